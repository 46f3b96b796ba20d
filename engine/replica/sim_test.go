package replica

import (
	"os"
	"strconv"
	"testing"
	"time"
)

// simulate runs one seed: faults, then rest.
func simulate(seed uint64, all bool) *world {
	w := newWorld(seed, simOptions{nodes: 3, logs: 2, heal: 60 * time.Second})
	w.all = all
	w.opt.faults = w.between(2*time.Second, 10*time.Second)
	w.opt.loss = [...]float64{0, 0, 0, 0.02, 0.2}[w.rng.IntN(5)]
	w.opt.dup = [...]float64{0, 0.05}[w.rng.IntN(2)]
	w.opt.slow = [...]float64{0, 0.02, 0.2}[w.rng.IntN(3)]
	if w.theme = theme(w.rng.IntN(2 * int(themes))); w.theme >= themes {
		w.theme = mixed
	}
	if w.theme != mixed {
		w.opt.faults += 4 * time.Second
	}
	w.opt.pause = [...]float64{0, 0.0001, 0.0005}[w.rng.IntN(3)]
	w.opt.tail = [...]Index{2, 10, 30}[w.rng.IntN(3)]
	w.opt.collide = w.chance(0.3)
	w.opt.onLead = [...]float64{0, 0, 0.3, 0.7}[w.rng.IntN(4)]
	w.opt.onCatchup = [...]float64{0, 0.4}[w.rng.IntN(2)]
	w.opt.onFetch = [...]float64{0, 0.5}[w.rng.IntN(2)]
	if w.opt.churn = w.chance(0.3); w.opt.churn {
		w.opt.onLead, w.opt.lag = 0.8, w.between(1, 30*time.Millisecond)
	}
	w.faulty = NodeID(w.rng.IntN(6)) // of three nodes, or none
	if w.theme == rotten {
		w.faulty = NodeID(1 + w.rng.IntN(3))
	}
	for _, h := range w.hosts {
		w.after(w.between(0, 200*time.Millisecond), h.start)
	}
	w.clients()
	w.after(w.between(0, 4*time.Second), w.mischief)
	w.runUntil(w.opt.faults)
	w.converge()
	return w
}

// replay reports a failed seed with the end of its trace.
func replay(t *testing.T, seed uint64) {
	t.Helper()
	w := simulate(seed, true)
	t.Errorf("seed %d: %v\n%s\nrun it alone with REPLICA_SEED=%d", seed, w.err, w.tail(250), seed)
}

func envInt(name string, def uint64) uint64 {
	if v, err := strconv.ParseUint(os.Getenv(name), 10, 64); err == nil {
		return v
	}
	return def
}

func TestSim_RandomFaults(t *testing.T) {
	if one := envInt("REPLICA_SEED", 0); one > 0 {
		w := simulate(one, true)
		t.Logf("%v\n%s", w.seen, w.tail(100000))
		if w.err != nil {
			t.Fatal(w.err)
		}
		return
	}
	seeds := uint64(2000)
	if testing.Short() {
		seeds = 200
	}
	seeds = envInt("REPLICA_SEEDS", seeds)
	first := envInt("REPLICA_FIRST", 1)
	seen := map[string]uint64{}
	for seed := first; seed < first+seeds; seed++ {
		w := simulate(seed, false)
		if w.err != nil {
			replay(t, seed)
			return
		}
		for k, v := range w.seen {
			seen[k] += min(v, 1)
		}
	}
	t.Log(seen)
	if seeds < 1000 {
		return
	}
	for _, what := range mustHappen {
		if seen[what] < seeds/100 {
			t.Errorf("%q happened in %d of %d seeds: the simulator is not what it was", what, seen[what], seeds)
		}
	}
}

// mustHappen is what at least one seed in a hundred is to have, so that a passing run means something.
var mustHappen = []string{
	"crashed", "power failure", "paused", "paused in a step", "isolated", "one-way cut", "mute", "jammed", "slow disk", "hanging disk",
	"disk failed", "resigned", "wiped", "suspect", "forgetful", "lonely", "overtaken", "rot while alone", "trap",
	"catch-up", "fetch", "fetch in bulk", "replaced", "old round committed", EventVoter.String(), EventElectionLost.String(),
	EventSteppedDown.String(), EventFollowerLag.String(), EventQuorumLost.String(), EventQuorumRecovered.String(),
}
