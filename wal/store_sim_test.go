package wal

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// TestStore_SurvivesRandomLives runs random work with random completion order and random ends, and checks after each
// start that nothing acknowledged is lost and everything can be read.
func TestStore_SurvivesRandomLives(t *testing.T) {
	for seed := range seeds(40) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { randomLives(t, seed, 6) })
	}
}

func randomLives(t *testing.T, seed uint64, lives int) {
	rng := rand.New(rand.NewPCG(seed, 17))
	o := smallStore(ring.NewPool(512 << 20))
	o.Store.SegmentMaxBytes = int64(8<<10 + rng.IntN(40<<10))
	o.Store.SliceFiles = 1 + rng.IntN(4)
	o.Store.WriteOutBytes = int64(rng.IntN(60 << 10))
	o.Store.DirectBytes = int64(rng.IntN(30<<10)) - 1
	d := simdisk.New(simdisk.Options{Seed: seed + 1, Uncached: seed%2 == 1})
	p := &storePower{t: t, o: o, every: 1 << 30, seen: map[uint64]bool{}}
	streams := []StreamID{p0, p1, p2, {Kind: Messages, Topic: 2, Partition: 9}, le, md}
	for life := range lives {
		m, err := tryNode(t, d, o)
		if err != nil {
			t.Fatalf("start %d: %v", life, err)
		}
		acked, sealed, _ := p.sets()
		p.compare(m, fmt.Sprintf("start %d", life), acked, sealed, nil)
		for id := range sealed {
			values := sealed[id][:m.rec.LastSequences[id]]
			m.acked[id], m.sealed[id] = slices.Clone(values), slices.Clone(values)
		}
		p.n = m
		m.randomWork(rng, streams)
		switch rng.IntN(4) {
		case 0:
			m.settle()
			m.close()
			d = m.d
		case 1:
			m.kill()
			d = m.d.Clone()
		default:
			d = m.d.Crash(func(int, simdisk.Item) simdisk.Fate { return simdisk.Fate(rng.IntN(3)) })
			m.kill()
		}
		d = d.Clone()
	}
}

// randomWork publishes, lets time pass, sweeps, saves snapshots and reads.
func (n *node) randomWork(rng *rand.Rand, streams []StreamID) {
	n.t.Helper()
	for range 60 {
		switch rng.IntN(12) {
		case 0, 1, 2, 3, 4:
			n.randomChore(rng)
		case 5:
			n.randomRead(rng, streams[rng.IntN(4)])
		default:
			for range 1 + rng.IntN(4) {
				n.append(streams[rng.IntN(len(streams))], []int{1, 100, 1500, 9000}[rng.IntN(4)])
			}
			if n.j.CanSeal() {
				n.j.Seal()
			}
		}
		n.step()
	}
}

// randomChore asks for a sweep, lets time pass, or saves a snapshot.
func (n *node) randomChore(rng *rand.Rand) {
	switch rng.IntN(5) {
	case 0:
		n.s.RequestSweep()
	case 1:
		n.now += DefaultWriteOutEvery
	case 2:
		n.s.SaveSnapshot(SnapshotMetadata, uint64(len(n.acked[md])), n.j.Epoch(), []byte("metadata"))
	case 3:
		n.s.SaveSnapshot(SnapshotCursors, uint64(len(n.acked[le])), n.j.Epoch(), []byte("cursors"))
	default:
		n.now += DefaultSlicePause
		for range rng.IntN(50) {
			n.step()
		}
	}
}

// randomRead reads a chunk and compares it with what was committed.
func (n *node) randomRead(rng *rand.Rand, id StreamID) {
	n.t.Helper()
	all := n.acked[id]
	if len(all) == 0 {
		return
	}
	from := Sequence(1 + rng.IntN(len(all)))
	c, err := n.read(ReadRequest{Stream: id, From: from, MaxBytes: 1 + rng.IntN(30<<10)})
	if err != nil {
		n.t.Fatalf("read %v from %d: %v", id, from, err)
	}
	if c == nil {
		return // still in memory
	}
	defer c.Release()
	if c.First != from {
		n.t.Fatalf("read %v from %d: begins with %d", id, from, c.First)
	}
	for b := c.Bytes(); len(b) > 0; from++ {
		var r Record
		b = b[PeekRecord(b, &r):]
		if r.Sequence != from || string(r.Value) != all[from-1] {
			n.t.Fatalf("read %v: sequence %d is %d, %.40q", id, from, r.Sequence, r.Value)
		}
	}
}

// TestStore_DirectoriesOfAKilledStartAreFlushed is what a seed has found: a killed start made the directories, the next
// one wrote to them and published a checkpoint, then the power went.
func TestStore_DirectoriesOfAKilledStartAreFlushed(t *testing.T) {
	o := smallStore(testPool(t))
	n := openNode(t, simdisk.New(simdisk.Options{}), o)
	n.publish(100, p0, p1)
	n.now += DefaultWriteOutEvery
	n.settle()
	n.kill()
	n = n.reopen(n.d.Clone(), o)
	n.sweep()
	n.kill()
	n = n.reopen(n.d.Crash(nil), o)
	if len(n.rec.Quarantined) > 0 {
		t.Fatalf("quarantined: %+v", n.rec.Quarantined)
	}
	n.check()
	n.close()
}
