//go:build mutants

package replica

import (
	"testing"

	"github.com/mortarmq/mortarmq/internal/mutant"
)

// mutants are deliberate faults in the protocol, each with what it is about.
var mutants = []struct{ name, what string }{
	{"promise-not-persisted", "a promise is answered and forgotten in a crash"},
	{"two-promises-one-epoch", "the same epoch is promised to two candidates"},
	{"promise-under-lease", "a follower promises while the lease that it granted runs"},
	{"restart-forgets-lease", "a follower promises right after a restart"},
	{"lease-from-receipt", "a leader counts its lease from the answer, not from the sending"},
	{"commit-on-one-vote", "a leader commits what one node has flushed"},
	{"commit-old-epoch-by-count", "a leader commits rounds of older epochs by counting"},
	{"ack-before-flush", "a follower vouches for rounds that are not durable"},
	{"replaced-flush-counts", "the flush of a round that was replaced counts for its successor"},
	{"stale-epoch-taken", "a follower goes on taking rounds of an epoch after it promised a higher one"},
	{"no-truncation", "a follower keeps rounds that differ from the leader's"},
	{"candidate-skips-fetch", "an elected node leads without the rounds that it lacks"},
	{"empty-disk-votes", "a node with an empty disk counts at once"},
	{"learner-votes", "a learner's flushes count"},
	{"learner-cured-early", "a node counts again before it has what is committed"},
	{"suspect-votes", "a node that lost rounds from its journal counts in elections"},
	{"old-notice-believed", "a follower gives up rounds that the leader counts on"},
}

func TestMutants_AreCaught(t *testing.T) {
	seeds := envInt("REPLICA_SEEDS", 2000)
	defer mutant.Choose("")
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			mutant.Choose(m.name)
			for seed := uint64(1); seed <= seeds; seed++ {
				if w := simulate(seed, false); w.err != nil {
					t.Logf("%s: caught by seed %d: %v", m.what, seed, w.err)
					return
				}
			}
			t.Errorf("%s: not caught in %d seeds", m.what, seeds)
		})
	}
}
