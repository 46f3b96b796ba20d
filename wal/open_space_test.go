package wal

import (
	"strings"
	"syscall"
	"testing"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// fillUp makes everything fail that needs further space; what is allocated can be written again.
func fillUp(d *simdisk.Disk) { d.SetCapacity(max(d.Used(), 1)) }

// crashedWithMuchInTheJournal returns a disk with records in files, and more that only the journal has.
func crashedWithMuchInTheJournal(t *testing.T, o OpenOptions) *node {
	n := openNode(t, simdisk.New(simdisk.Options{}), o)
	for range 8 {
		n.publish(4000, p0, p1, le, md)
	}
	n.sweep()
	for range 6 {
		n.publish(4000, p0, p1, p2, le, md)
	}
	n.kill()
	return n
}

// release gives back the rounds that wait for space.
func (n *node) release() {
	for _, r := range n.rec.Unwritten {
		r.Release()
	}
	n.rec.Unwritten = nil
}

// TestOpen_NeedsNoSpace starts on a disk that something else has filled: everything is there, in files or in the rounds
// that wait for space, nothing is deleted, and it is written when there is space again.
func TestOpen_NeedsNoSpace(t *testing.T) {
	o := smallStore(testPool(t))
	o.Store.DirectBytes = -1
	n := crashedWithMuchInTheJournal(t, o)
	d := n.d.Clone()
	fillUp(d)
	n = n.reopen(d, o)
	if len(n.rec.Quarantined) > 0 || len(n.rec.Unwritten) == 0 || n.s.FreeBytes() != 0 {
		t.Fatalf("quarantined %v, %d rounds wait, %d bytes free", n.rec.Quarantined, len(n.rec.Unwritten), n.s.FreeBytes())
	}
	n.checkWithUnwritten()
	n.settle()
	n.checkWithUnwritten()
	written := n.s.Written()

	// A clean stop doesn't wait for somebody to make room, and the next start finds everything again.
	n.release()
	n.closeStore()
	n.closeJournal()
	n = n.reopen(d, o)
	if n.rec.Torn != nil || n.s.Written() < written {
		t.Fatalf("after a stop: torn %v, written %d, before %d", n.rec.Torn, n.s.Written(), written)
	}
	n.checkWithUnwritten()
	n.release()

	d.SetCapacity(0)
	n.now += retryEvery
	n.settle()
	n.now += roomAfter
	n.settle()
	if n.s.Written() != n.s.added.Round || n.s.FreeBytes() <= 0 {
		t.Fatalf("with space again: round %d of %d is written, %d bytes free", n.s.Written(), n.s.added.Round, n.s.FreeBytes())
	}
	n.check()
	n.publish(100, p0, p1, p2)
	n.sweep()
	n.check()
	n.close()
	n = n.reopen(d, o)
	n.check()
	n.close()
}

// checkWithUnwritten is check with the rounds that wait for space.
func (n *node) checkWithUnwritten() {
	n.t.Helper()
	waiting := map[StreamID][]got{}
	for _, r := range n.rec.Unwritten {
		for _, g := range roundRecords(r) {
			waiting[g.stream] = append(waiting[g.stream], g)
		}
	}
	for id, want := range n.acked {
		if id.Kind != Messages || n.dropped[id.Topic] {
			continue
		}
		have, err := n.readAll(id, 1, 0)
		if err != nil {
			n.t.Fatalf("%v: %v", id, err)
		}
		for _, g := range waiting[id] {
			if g.seq > Sequence(len(have))+1 {
				n.t.Fatalf("%v: files end with sequence %d, waiting rounds go on with %d", id, len(have), g.seq)
			}
			if g.seq == Sequence(len(have))+1 {
				have = append(have, g.value)
			}
		}
		if len(have) != len(want) || n.rec.LastSequences[id] != Sequence(len(want)) {
			n.t.Fatalf("%v: %d records, last sequence %d, %d acknowledged", id, len(have), n.rec.LastSequences[id], len(want))
		}
		for i := range want {
			if have[i] != want[i] {
				n.t.Fatalf("%v: sequence %d is not what was acknowledged", id, i+1)
			}
		}
	}
}

// TestOpen_SpaceRunsOutAtAnyMoment fails everything of a kind that could need space, from each moment of a start on.
func TestOpen_SpaceRunsOutAtAnyMoment(t *testing.T) {
	o := smallStore(testPool(t))
	n := crashedWithMuchInTheJournal(t, o)
	for _, f := range []simdisk.Fault{
		{Kind: ring.Write, Path: "*.mqs"}, {Kind: ring.Write, Path: "*.mql"}, {Kind: ring.Write, Path: "*.log"},
		{Kind: ring.Truncate, Path: "*.mqs"}, {Kind: ring.Mkdir}, {Kind: ring.Open, Path: "*.tmp"}, {Kind: ring.Rename},
	} {
		for waiting := true; waiting; f.Skip++ {
			d := n.d.Clone()
			f.Err = syscall.ENOSPC
			remove := d.Inject(f)
			m := n.reopen(d, o)
			waiting = len(m.s.space.list) > 0
			m.checkWithUnwritten()
			m.settle()
			m.checkWithUnwritten()
			m.release()
			remove()
			m.now += retryEvery
			m.settle()
			m.check()
			m.sweep()
			m.close()
			m = n.reopen(d, o)
			m.check()
			m.close()
		}
	}
}

// TestOpen_WithoutSpaceKeepsMemoryToServeWith: what only the journal has is more than memory should be given to.
func TestOpen_WithoutSpaceKeepsMemoryToServeWith(t *testing.T) {
	pool := ring.NewPool(24 << 20)
	o := smallStore(pool)
	o.Journal.FileBytes, o.Journal.MinFiles, o.Journal.MaxFiles, o.Journal.MaxRoundBytes = 8<<20, 4, 4, 1<<20
	o.Store.SegmentMaxBytes = 64 << 20
	n := openNode(t, simdisk.New(simdisk.Options{}), o)
	n.settle()
	for range 20 { // the journal keeps all of it
		n.publish(900<<10, p0)
		n.now += DefaultWriteOutEvery
		n.settle()
	}
	n.kill()
	d := n.d.Crash(nil)
	fillUp(d)
	_, err := tryNode(t, d, o)
	if err == nil || !strings.Contains(err.Error(), "make room") {
		t.Fatalf("a start without memory and space: %v", err)
	}
	d = d.Clone()
	d.SetCapacity(0)
	n = n.reopen(d, o)
	n.check()
	n.close()
	if n := pool.InUse(); n != 0 {
		t.Errorf("%d bytes of slabs were not released", n)
	}
}

// TestStore_DeletingATopicMakesSpace: something has filled the disk, and committed records wait for space. Deleting a topic
// frees some, though no sweep can get to its end before; a power cut at any moment of it brings nothing back.
func TestStore_DeletingATopicMakesSpace(t *testing.T) {
	o := smallStore(testPool(t))
	o.Store.DirectBytes = -1
	n := openNode(t, simdisk.New(simdisk.Options{}), o)
	for range 10 {
		n.publish(9000, p2)
	}
	n.sweep()
	fillUp(n.d)
	n.publish(9000, p0, p1)
	n.now += DefaultWriteOutEvery
	n.settle()
	if n.s.FreeBytes() != 0 {
		t.Fatalf("%d bytes are free on a full disk", n.s.FreeBytes())
	}
	o.Deleted = func(topic uint16) bool { return n.dropped[topic] }
	n.d.OnStep(func(op *ring.Op) {
		m := n.reopen(n.d.Crash(nil), o)
		if len(m.rec.Quarantined) > 0 || m.rec.LastSequences[p2] > 0 {
			t.Fatalf("before operation %d: quarantined %v, %d records of the topic", op.Kind, m.rec.Quarantined, m.rec.LastSequences[p2])
		}
		m.checkWithUnwritten()
		m.release()
		m.kill()
	})
	n.drop(2)
	n.settle()
	n.d.OnStep(nil)
	n.now += retryEvery
	n.settle()
	if n.s.Written() != n.j.Flushed() {
		t.Fatalf("round %d of %d is written", n.s.Written(), n.j.Flushed())
	}
	n.check()
	n.sweep()
	n.close()
	n = n.reopen(n.d, o)
	n.check()
	n.close()
}
