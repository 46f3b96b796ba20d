package sim

import (
	"fmt"
	"io"

	"github.com/mortarmq/mortarmq/internal/mutant"
)

// Mutant is a deliberate fault in the broker, in builds with the tag mutants.
type Mutant struct{ Name, What string }

// Mutants are those that the runs have to find. The replication protocol's own are found by engine/replica's simulator, too.
var Mutants = []Mutant{
	{"promise-not-persisted", "a promise is answered and forgotten in a crash"},
	{"two-promises-one-epoch", "the same epoch is promised to two candidates"},
	{"commit-on-one-vote", "a leader commits what one node has flushed"},
	{"commit-old-epoch-by-count", "a leader commits rounds of older epochs by counting"},
	{"no-truncation", "a follower keeps rounds that differ from the leader's"},
	{"ack-before-flush", "a follower vouches for rounds that are not durable"},
	{"empty-disk-votes", "a node with an empty disk counts at once"},
	{"learner-votes", "a learner's flushes count"},
	{"stale-epoch-taken", "a follower goes on taking rounds of an epoch after it promised a higher one"},
	{"candidate-skips-fetch", "an elected node leads without the rounds that it lacks"},
	{"suspect-votes", "a node that lost rounds from its journal counts in elections"},
	{"answer-before-flush", "a leader counts its own vote before its disk has the round"},
	{"answer-before-quorum", "a leader answers publishes before a majority has flushed them"},
	{"duplicate-answered-early", "a publish that is sent again is answered before the first one is committed"},
	{"chain-ignored", "recovery doesn't look whether a round chains to the one before"},
	{"newest-file-recycled", "the journal file with the newest durable round is written again"},
	{"ledger-forgotten", "a node that takes over knows nothing of deliveries"},
	{"windows-forgotten", "a node that takes over knows nothing of what producers have sent"},
	{"notice-before-commit", "a member hears of its partition before the assignment is committed"},
	{"letter-written-twice", "nobody looks whether a dead letter is there already"},
	{"sequence-reused", "a new leader gives out sequences of rounds that it has not committed yet"},
	{"failed-flush-ignored", "a failed flush counts as one"},
	{"record-checksum-ignored", "the checksums of records are not compared"},
}

// RunMutants has the runs find each of the faults named, all of them where there is none, and writes which seed did. It
// returns those that none of the seeds has found.
func RunMutants(o ManyOptions, names []string, w io.Writer) (missed []string) {
	defer mutant.Choose("")
	o.MaxFailures = 1
	if len(names) == 0 {
		for _, m := range Mutants {
			names = append(names, m.Name)
		}
	}
	for _, name := range names {
		mutant.Choose(name)
		s := RunMany(o)
		mutant.Choose("")
		if len(s.Failures) > 0 {
			if r := Run(Options{Seed: s.Failures[0].Seed}); r.Failure != "" {
				fmt.Fprintf(w, "seed %d fails without a mutant: %s\n", s.Failures[0].Seed, r.Failure)
				return append(missed, name)
			}
		}
		if len(s.Failures) == 0 {
			missed = append(missed, name)
			fmt.Fprintf(w, "%-26s NOT FOUND in %d seeds\n", name, s.Seeds)
			continue
		}
		f := s.Failures[0]
		failure := f.Failure
		if len(failure) > maxShown {
			failure = failure[:maxShown] + "..."
		}
		fmt.Fprintf(w, "%-26s found by seed %d: %s\n", name, f.Seed, failure)
	}
	return missed
}

// maxShown is how much of a failure RunMutants writes, in bytes.
const maxShown = 160
