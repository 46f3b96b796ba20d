package sim

import (
	"fmt"
	"io"
	"regexp"
	"slices"

	"github.com/mortarmq/mortarmq/internal/mutant"
)

// Mutant is a deliberate fault in the broker, in builds with the tag mutants.
type Mutant struct {
	Name, What string
	// By matches the failures that speak of the fault. A run that fails otherwise, because a node gives up, say, does not
	// count as having found it.
	By string
}

// Failures that speak of a fault.
const (
	otherMessage  = `was acknowledged for message|, which was acknowledged as`
	otherSequence = `^message .* was acknowledged at \d+, now at \d+|has message .* at \d+ and at \d+`
	otherRecords  = `have different records|has a record at .* has not|has two records`
	comesAgain    = `although its acknowledgement was answered|although it was rejected|although \d+ failed|before it was attempt`
	foundDamage   = `whose disk keeps what was flushed, says`
)

// Mutants are those that whole clusters have to find. Those of the replication protocol that only rare orders of events show are
// left to engine/replica's simulator, those of the journal's files to wal's.
var Mutants = []Mutant{
	{"commit-on-one-vote", "a leader commits what one node has flushed", otherMessage + "|" + otherSequence + "|" + otherRecords + "|" + comesAgain},
	{"no-truncation", "a follower keeps rounds that differ from the leader's", otherRecords},
	{"empty-disk-votes", "a node with an empty disk counts at once", otherMessage + "|" + otherSequence + "|" + comesAgain},
	{"candidate-skips-fetch", "an elected node leads without the rounds that it lacks", otherMessage + "|" + otherSequence + "|" + otherRecords},
	{"answer-before-quorum", "a leader answers publishes before a majority has flushed them", otherMessage + "|" + otherSequence + "|with the commit point at"},
	{"ack-before-flush", "a follower says that it has flushed what it has received", "says that it has flushed"},
	{"duplicate-answered-early", "a publish that is sent again is answered before the first one is committed", "with the commit point at"},
	{"ledger-forgotten", "a node that takes over knows nothing of deliveries", comesAgain},
	{"windows-forgotten", "a node that takes over knows nothing of what producers have sent", otherSequence},
	{"notice-before-commit", "a member hears of its partition before the assignment is committed", "of which a member heard|was given to member"},
	{"letter-written-twice", "nobody looks whether a dead letter is there already", "was written twice"},
	{"sequence-reused", "a new leader gives out sequences of rounds that it has not committed yet", otherMessage + "|" + otherRecords},
	{"failed-flush-ignored", "a failed flush counts as one", foundDamage + "|" + otherMessage},
	{"record-checksum-ignored", "the checksums of records are not compared", "which was not published like that|that nobody has published|" + otherRecords},
}

// mutantBatch is how many seeds run between two looks at what they have found.
const mutantBatch = 25

// RunMutants has the runs find each of the faults named, all of them where there is none, and writes which seed did. It
// returns those that none of the seeds has found.
func RunMutants(o ManyOptions, names []string, w io.Writer) (missed []string) {
	defer mutant.Choose("")
	for _, m := range Mutants {
		if len(names) > 0 && !slices.Contains(names, m.Name) {
			continue
		}
		if !m.find(o, w) {
			missed = append(missed, m.Name)
		}
	}
	return missed
}

// find runs seeds until one has found the fault.
func (m *Mutant) find(o ManyOptions, w io.Writer) bool {
	speaks := regexp.MustCompile(m.By)
	others := 0
	for first, end := o.First, o.First+o.Count; first < end; first += mutantBatch {
		batch := o
		batch.First, batch.Count, batch.MaxFailures = first, min(mutantBatch, end-first), mutantBatch
		mutant.Choose(m.Name)
		s := RunMany(batch)
		mutant.Choose("")
		for _, f := range s.Failures {
			if !speaks.MatchString(f.Failure) {
				others++
				continue
			}
			if r := Run(Options{Seed: f.Seed}); r.Failure != "" {
				fmt.Fprintf(w, "seed %d fails without a mutant: %s\n", f.Seed, r.Failure)
				return false
			}
			fmt.Fprintf(w, "%-26s found by seed %d: %s\n", m.Name, f.Seed, f.Failure[:min(len(f.Failure), maxShown)])
			return true
		}
	}
	fmt.Fprintf(w, "%-26s NOT FOUND in %d seeds (%d failed without speaking of it)\n", m.Name, o.Count, others)
	return false
}

// maxShown is how much of a failure RunMutants writes, in bytes.
const maxShown = 160
