package replica

import (
	"testing"
	"time"
)

// These scenarios run on the simulator without random faults: each is one case of what may go wrong in a cluster.

// calmWorld returns a cluster of three in which node 1, the preferred leader, leads and clients write.
func calmWorld(t *testing.T, seed uint64) *world {
	t.Helper()
	w := newWorld(seed, simOptions{nodes: 3, logs: 2, tail: 20})
	w.calm = true
	for _, h := range w.hosts {
		h.start()
	}
	w.clients()
	w.until(t, 10*time.Second, "somebody serves", func() bool { return w.server() != nil })
	w.settle(t)
	return w
}

// server returns who serves.
func (w *world) server() *host {
	for _, h := range w.hosts {
		if h.running() && h.node.Serving(h.clock()) {
			return h
		}
	}
	return nil
}

// until runs the world until something is the case.
func (w *world) until(t *testing.T, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	for end := w.now + limit; !ok(); {
		if w.err != nil {
			t.Fatalf("%v", w.err)
		}
		if w.now >= end {
			t.Fatalf("not within %v: %s", limit, what)
		}
		w.runUntil(w.now + 10*time.Millisecond)
	}
}

// settle waits until all nodes agree, without writes.
func (w *world) settle(t *testing.T) {
	t.Helper()
	w.quiet = true
	w.until(t, 60*time.Second, "the cluster is healthy", func() bool { _, ok := w.healthy(); return ok })
	w.quiet = false
}

func (w *world) runs(t *testing.T, d time.Duration) {
	t.Helper()
	w.runUntil(w.now + d)
	if w.err != nil {
		t.Fatal(w.err)
	}
}

// others returns the nodes beside h.
func (w *world) others(h *host) (a, b *host) {
	i := int(h.id)
	return w.hosts[i%3], w.hosts[(i+1)%3]
}

func (w *world) between2(a, b *host, cut bool) {
	w.net.cut[a.id-1][b.id-1], w.net.cut[b.id-1][a.id-1] = cut, cut
}

func (w *world) total() (n int) {
	for _, c := range w.committed {
		n += len(c)
	}
	return n
}

func each(t *testing.T, f func(t *testing.T, w *world)) {
	t.Helper()
	for seed := uint64(1); seed <= 10; seed++ {
		f(t, calmWorld(t, seed))
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func TestScenario_AKilledLeaderIsReplacedSoon(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		old := w.server()
		old.crash()
		killed := w.now
		w.until(t, 3*time.Second, "another node serves", func() bool { return w.server() != nil })
		if took := w.now - killed; took > 1500*time.Millisecond {
			t.Errorf("it took %v", took)
		}
		old.start()
		w.runs(t, time.Second)
		w.settle(t)
	})
}

func TestScenario_AResignedLeaderIsReplacedAtOnce(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		old := w.server()
		old.input(old.node.Resign)
		left := w.now
		w.until(t, time.Second, "another node serves", func() bool { s := w.server(); return s != nil && s != old })
		if took := w.now - left; took > 500*time.Millisecond {
			t.Errorf("it took %v", took)
		}
	})
}

// A leader that hears its followers and isn't heard by them stops within its lease.
func TestScenario_OneWayPartitionOfTheLeader(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		old := w.server()
		a, b := w.others(old)
		w.net.cut[old.id-1][a.id-1], w.net.cut[old.id-1][b.id-1] = true, true
		cut := w.now
		w.until(t, 2*time.Second, "the leader stops", func() bool { return !old.node.Serving(old.clock()) })
		if took := w.now - cut; took > time.Second {
			t.Errorf("it took %v", took)
		}
		w.until(t, 3*time.Second, "another node serves", func() bool { return w.server() != nil })
		w.net.heal()
		w.runs(t, time.Second)
		w.settle(t)
	})
}

// What a leader in the minority has sealed is cut when it comes back, and was never visible.
func TestScenario_TheTailOfALeaderInTheMinorityIsCut(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		old := w.server()
		a, b := w.others(old)
		w.between2(old, a, true)
		w.between2(old, b, true)
		w.runs(t, 3*time.Second)
		tail := false
		for _, l := range old.logs {
			tail = tail || l.log.Last().Index > l.applied
		}
		if !tail {
			t.Error("the old leader has no tail")
		}
		w.net.heal()
		w.runs(t, 2*time.Second)
		w.settle(t)
	})
}

// A follower that comes and goes costs no epoch.
func TestScenario_AFlappingFollowerChangesNoEpoch(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		lead := w.server()
		epoch := lead.node.state.Promised
		a, b := w.others(lead)
		for range 10 {
			w.between2(a, lead, true)
			w.between2(a, b, true)
			w.runs(t, time.Second)
			w.net.heal()
			w.runs(t, 300*time.Millisecond)
		}
		w.settle(t)
		if e := w.server().node.state.Promised; e != epoch || w.server() != lead {
			t.Errorf("epoch %d became %d", epoch, e)
		}
	})
}

// A follower that the leader doesn't reach, but that the other one hears, can't drive the epoch up either.
func TestScenario_AHalfConnectedFollowerChangesNoEpoch(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		lead := w.server()
		a, _ := w.others(lead)
		epoch := lead.node.state.Promised
		w.net.cut[lead.id-1][a.id-1] = true
		w.runs(t, 20*time.Second)
		if w.server() != lead || lead.node.state.Promised != epoch {
			t.Errorf("epoch %d became %d", epoch, lead.node.state.Promised)
		}
		w.net.heal()
		w.runs(t, time.Second)
		w.settle(t)
	})
}

// A leader that was stopped for a minute commits nothing of its old epoch when it goes on.
func TestScenario_AStoppedLeaderComesBackToAnotherEpoch(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		old := w.server()
		old.pausedUntil = w.now + time.Minute
		w.until(t, 3*time.Second, "another node serves", func() bool { return w.server() != nil })
		w.runUntil(old.pausedUntil)
		w.runs(t, time.Second)
		if old.node.role == leader {
			t.Error("it still leads")
		}
		w.settle(t)
	})
}

// Two followers that time out at the same instant elect one leader, and soon.
func TestScenario_SimultaneousCandidates(t *testing.T) {
	for seed := uint64(1); seed <= 20; seed++ {
		w := calmWorld(t, seed)
		old := w.server()
		a, b := w.others(old)
		a.rate, b.rate = 1, 1
		old.crash()
		w.runs(t, 900*time.Millisecond)
		for _, h := range []*host{a, b} {
			h.node.leaseUntil, h.node.electAt = h.clockAt(w.now+200*time.Millisecond), h.clockAt(w.now+200*time.Millisecond)
			h.schedule()
		}
		from := w.now
		w.until(t, 5*time.Second, "one of them serves", func() bool { return w.server() != nil })
		if took := w.now - from; took > 2*time.Second {
			t.Errorf("seed %d: it took %v", seed, took)
		}
	}
}

// An emptied node is a learner until it has everything, and then counts again.
func TestScenario_AnEmptiedNodeJoinsAsALearner(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		lead := w.server()
		a, b := w.others(lead)
		a.crash()
		a.wipe()
		a.start()
		w.until(t, 5*time.Second, "it joins", func() bool { return a.node.formed() })
		if a.node.Standing() != Learner {
			t.Fatalf("it is a %v", a.node.Standing())
		}
		w.until(t, 30*time.Second, "it counts", func() bool { return a.node.Standing() == Voter })
		// Now it can carry the cluster.
		b.crash()
		before := w.total()
		w.until(t, 10*time.Second, "rounds are committed with it", func() bool { return w.total() > before+5 })
	})
}

// While one node is empty and the leader gone, nothing that was acknowledged is voted away: the cluster waits.
func TestScenario_AnEmptiedNodeCannotReplaceALeader(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		lead := w.server()
		a, b := w.others(lead)
		b.crash()
		w.runs(t, 500*time.Millisecond)
		a.crash()
		a.wipe()
		lead.crash()
		a.start()
		b.start()
		w.runs(t, 10*time.Second)
		if w.server() != nil {
			t.Fatal("they elected a leader without what the old one had")
		}
		lead.start()
		w.until(t, 10*time.Second, "a leader serves", func() bool { return w.server() != nil })
		w.runs(t, time.Second)
		w.settle(t)
	})
}

// A node that lost the last round that it vouched for can't outvote it.
func TestScenario_ASuspectEndVotesNothingAway(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		lead := w.server()
		a, b := w.others(lead)
		b.crash()
		w.runs(t, 500*time.Millisecond)
		for a.crash(); w.seen["suspect"] == 0; {
			a.rot()
		}
		lead.crash()
		a.start()
		b.start()
		w.runs(t, 10*time.Second)
		if w.server() != nil {
			t.Fatal("they elected a leader without what the old one had")
		}
		lead.start()
		w.until(t, 10*time.Second, "a leader serves", func() bool { return w.server() != nil })
		w.runs(t, time.Second)
		w.settle(t)
	})
}

// Power fails on one node while the other two are stopped: nobody leads alone, and nobody believes an old quorum.
func TestScenario_PowerLossOnOneWhileTwoAreStopped(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		lead := w.server()
		a, b := w.others(lead)
		a.pausedUntil, b.pausedUntil = w.now+5*time.Second, w.now+5*time.Second
		w.runs(t, 500*time.Millisecond)
		lead.crash()
		lead.start()
		w.runs(t, 4*time.Second)
		if w.server() != nil {
			t.Error("somebody serves alone")
		}
		w.runs(t, 3*time.Second)
		w.settle(t)
	})
}

// A leader whose disk hangs gives way, and comes back as a follower.
func TestScenario_AHangingDiskGivesWay(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		old := w.server()
		old.disk.hungFrom, old.disk.hungUntil = w.now, w.now+30*time.Second
		w.until(t, 10*time.Second, "another node serves", func() bool { s := w.server(); return s != nil && s != old })
		before := w.total()
		w.runs(t, 2*time.Second)
		if w.total() < before+10 {
			t.Error("nothing is committed without the disk that hangs")
		}
		w.runs(t, 30*time.Second)
		w.settle(t)
	})
}

// Both followers gone: the leader stops, consumers keep what is committed, and writes resume by themselves.
func TestScenario_WritesResumeWhenAFollowerReturns(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		lead := w.server()
		a, b := w.others(lead)
		a.crash()
		b.crash()
		w.until(t, 2*time.Second, "the leader stops", func() bool { return w.server() == nil })
		w.runs(t, 40*time.Second)
		if w.server() != nil {
			t.Error("somebody serves alone")
		}
		a.start()
		w.until(t, 10*time.Second, "somebody serves", func() bool { return w.server() != nil })
		before := w.total()
		w.runs(t, time.Second)
		if w.total() == before {
			t.Error("nothing is committed")
		}
		b.start()
		w.runs(t, time.Second)
		w.settle(t)
	})
}

func TestSim_RunsReproduceBitForBit(t *testing.T) {
	for seed := uint64(1); seed <= 20; seed++ {
		a, b := simulate(seed, false), simulate(seed, true)
		if a.eventNo != b.eventNo || a.now != b.now || a.serials != b.serials || a.total() != b.total() {
			t.Errorf("seed %d: %d and %d events", seed, a.eventNo, b.eventNo)
		}
	}
}
