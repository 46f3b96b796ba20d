package wal

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

func TestStore_DropTopicRemovesItsFilesAndNothingElse(t *testing.T) {
	o := smallStore(testPool(t))
	o.Store.SliceFiles = 2
	n := openNode(t, simdisk.New(simdisk.Options{}), o)
	other := StreamID{Kind: Messages, Topic: 2, Partition: 9}
	for i := range 12 {
		n.publish(5000, p0, p2, other)
		if i == 5 {
			n.sweep()
		}
	}
	free := n.d.Used()
	n.s.DropTopic(2)
	n.dropped[2] = true
	n.publish(100, p0, p2) // a record that was on its way
	n.settle()
	if c, err := n.read(ReadRequest{Stream: p2, From: 1}); c != nil || err != nil {
		t.Errorf("a deleted topic was read: %v, %v", c, err)
	}
	if _, _, ok := n.s.Bounds(p2); ok {
		t.Error("a deleted topic has bounds")
	}
	n.settle()
	for _, p := range n.d.Paths() {
		if strings.Contains(p, "topics/2/") || strings.Contains(p, deletedPrefix) {
			t.Errorf("%s is still there", p)
		}
	}
	if used := n.d.Used(); used >= free {
		t.Errorf("%d bytes are used, %d were before", used, free)
	}
	n.check()
	n.close()
	n = n.reopen(n.d, o)
	if _, ok := n.rec.LastSequences[p2]; ok {
		t.Error("the topic is back")
	}
	n.check()
	n.close()
}

// TestStore_KnowsATopicThatWasDeletedElsewhere: records from before a deletion come behind the snapshot that tells of it. They
// leave no file behind.
func TestStore_KnowsATopicThatWasDeletedElsewhere(t *testing.T) {
	o := smallStore(testPool(t))
	n := openNode(t, simdisk.New(simdisk.Options{}), o)
	n.s.KnowDeleted(2)
	n.dropped[2] = true
	n.publish(100, p0, p2)
	n.settle()
	n.sweep()
	if err := n.s.Err(); err != nil {
		t.Fatal(err)
	}
	for _, p := range n.d.Paths() {
		if strings.Contains(p, "topics/2/") {
			t.Errorf("%s is there", p)
		}
	}
	n.check()
	n.close()
}

// TestStore_DeletionGoesOnAfterARestart cuts the power between the renaming and the removal.
func TestStore_DeletionGoesOnAfterARestart(t *testing.T) {
	o := smallStore(testPool(t))
	n := openNode(t, simdisk.New(simdisk.Options{}), o)
	for range 6 {
		n.publish(5000, p0, p2)
	}
	n.sweep()
	n.publish(100, p2) // still in the journal after the restart
	n.dropped[2] = true
	n.s.DropTopic(2)
	n.d.Hold(func(op *ring.Op) bool { return op.Kind == ring.Remove })
	for range 10_000 {
		n.s.Step(n.now)
		if n.d.Poll() == 0 {
			break
		}
	}
	n.kill()
	n = n.reopen(n.d.Clone(), o)
	if len(n.rec.Quarantined) > 0 {
		t.Errorf("quarantined: %+v", n.rec.Quarantined)
	}
	if _, ok := n.rec.LastSequences[p2]; ok {
		t.Error("the topic is back")
	}
	n.settle()
	for _, p := range n.d.Paths() {
		if strings.Contains(p, "topics/2/") || strings.Contains(p, deletedPrefix) {
			t.Errorf("%s is still there", p)
		}
	}
	n.check()
	n.close()
}

// TestStore_WritesOutAndSweepsOnItsOwn lets only time pass.
func TestStore_WritesOutAndSweepsOnItsOwn(t *testing.T) {
	o := smallStore(testPool(t))
	n := openNode(t, simdisk.New(simdisk.Options{}), o)
	n.settle()
	written, durable := RoundNumber(0), RoundNumber(0)
	n.s.OnWritten(func(r RoundNumber) { written = r })
	n.s.OnDurable(func(r RoundNumber) { durable = r })
	n.publish(100, p0)
	n.settle()
	if written >= n.j.Flushed() || n.s.PendingBytes() == 0 {
		t.Fatalf("round %d is written at once, %d bytes pending", written, n.s.PendingBytes())
	}
	for range 100 {
		next := n.s.Step(n.now)
		if next == Never || next <= n.now || written >= n.j.Flushed() {
			break
		}
		n.now = next
		n.settle()
	}
	if written != n.j.Flushed() || n.s.Written() != written || n.now > DefaultWriteOutEvery+statEvery || n.s.PendingBytes() != 0 {
		t.Fatalf("round %d of %d is written after %v", written, n.j.Flushed(), n.now)
	}
	for range 1000 {
		next := n.s.Step(n.now)
		if durable == n.j.Flushed() || next == Never {
			break
		}
		n.now = max(next, n.now)
		n.settle()
	}
	if durable != n.j.Flushed() || n.now > DefaultSweepEvery+time.Second {
		t.Fatalf("round %d of %d is durable after %v", durable, n.j.Flushed(), n.now)
	}
	n.close()
}

// TestStore_BoundsDirtyBytesAndMemory publishes a lot without ever letting the store's flushes through at once.
func TestStore_BoundsDirtyBytes(t *testing.T) {
	o := smallStore(testPool(t))
	o.Store.MaxDirtyBytes, o.Store.WriteOutBytes = 200<<10, 20<<10
	o.Journal.FileBytes, o.Journal.MinFiles, o.Journal.MaxFiles = 1<<20, 8, 8
	n := openNode(t, simdisk.New(simdisk.Options{}), o)
	n.d.Hold(func(op *ring.Op) bool { return op.Kind == ring.Sync })
	for range 100 {
		n.publish(9000, p0, p1)
		for n.s.Step(n.now); n.d.Poll() > 0; n.s.Step(n.now) {
		}
		if n.s.dirty > o.Store.MaxDirtyBytes+2*o.Store.WriteOutBytes {
			t.Fatalf("%d dirty bytes", n.s.dirty)
		}
	}
	if n.s.PendingBytes() == 0 {
		t.Error("nothing is held back")
	}
	n.d.Hold(nil)
	n.settle()
	n.sweep()
	n.check()
	n.close()
}

// TestOpen_CostDoesNotGrowWithWhatIsStored counts what a start asks of the disk with little and with much below the
// checkpoint.
func TestOpen_CostDoesNotGrowWithWhatIsStored(t *testing.T) {
	cost := func(records int) (ops, bytes int) {
		o := smallStore(testPool(t))
		n := filled(t, o, records, 3000)
		n.publish(100, p0, le)
		n.kill()
		d := n.d.Clone()
		d.OnStep(func(op *ring.Op) {
			ops++
			bytes += len(op.Buf)
		})
		n = n.reopen(d, o)
		d.OnStep(nil)
		if got := int(n.rec.LastSequences[p0]); got != records+1 {
			t.Errorf("%d records, expected %d", got, records+1)
		}
		n.settle()
		n.close()
		return ops, bytes
	}
	littleOps, littleBytes := cost(40)
	muchOps, muchBytes := cost(1000)
	if muchOps > littleOps+8 || muchBytes > littleBytes+32<<10 {
		t.Errorf("a start with 25 times the data takes %d operations and %d bytes, not %d and %d",
			muchOps, muchBytes, littleOps, littleBytes)
	}
}

// TestOpen_ReplaysALongJournalInLittleMemory replays more than the buffer pool could hold.
func TestOpen_ReplaysALongJournalInLittleMemory(t *testing.T) {
	pool := ring.NewPool(26 << 20)
	o := smallStore(pool)
	o.Store.SegmentMaxBytes = 8 << 20
	o.Journal.FileBytes, o.Journal.MaxFiles, o.Journal.MaxRoundBytes = 8<<20, 8, 1<<20
	n := openNode(t, simdisk.New(simdisk.Options{}), o)
	sent := 0
	for sent < 36<<20 {
		n.publish(400<<10, p0, p1)
		sent += 800 << 10
		n.now += DefaultWriteOutEvery
		n.settle()
	}
	n.kill()
	d := n.d.Clone()
	// No checkpoint was ever written: all of it comes from the journal.
	d.RemoveFile(tableTestPath)
	n = n.reopen(d, o)
	if n.rec.Bytes < int64(sent) {
		t.Errorf("replayed %d of %d bytes", n.rec.Bytes, sent)
	}
	if n.s.PendingBytes() > spillBytes {
		t.Errorf("%d bytes are pending", n.s.PendingBytes())
	}
	n.settle()
	n.check()
	n.close()
}

// TestStoreAdd_AllocatesNothing adds rounds of many records and writes them out.
func TestStoreAdd_AllocatesNothing(t *testing.T) {
	pool := ring.NewPool(256 << 20)
	o := smallStore(pool)
	o.Store.SegmentMaxBytes = 1 << 30
	n := openNode(t, simdisk.New(simdisk.Options{}), o)
	n.settle()
	const perRound = 50
	streams := []StreamID{p0, p1, p2}
	number, seq := n.j.Flushed(), Sequence(0)
	rounds := make([]*Round, 0, 600)
	for range cap(rounds) {
		number++
		var runs []TestRun
		for _, id := range streams {
			run := TestRun{Stream: id}
			for i := range Sequence(perRound) {
				run.Records = append(run.Records, testRecord(id, seq+1+i, 20))
			}
			runs = append(runs, run)
		}
		seq += perRound
		rounds = append(rounds, NewTestRound(pool, 1, number, runs...))
	}
	next := 0
	work := func() {
		if err := n.s.Add(rounds[next]); err != nil {
			t.Fatal(err)
		}
		next++
	}
	for range 200 {
		work()
	}
	if allocs := testing.AllocsPerRun(200, work); allocs > 0.1 {
		t.Errorf("%.2f allocations per round of %d records", allocs, perRound*len(streams))
	}
	for next < len(rounds) {
		work()
	}
	n.now += DefaultWriteOutEvery
	n.settle()
	if got := n.mustReadAll(p0, ""); len(got) != int(seq) {
		t.Errorf("%d records of %d", len(got), seq)
	}
	n.kill()
}

func TestStoreOptions_EveryProblemIsReported(t *testing.T) {
	_, err := newStore(StoreOptions{Journal: -1, SegmentMaxBytes: 1, MaxOpenFiles: 1, SliceFiles: -1}, nil)
	if err == nil {
		t.Fatal("accepted")
	}
	for _, part := range []string{"directory", "pool", "journal -1", "segment size", "open files", "negative"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q is missing in: %v", part, err)
		}
	}
	for _, size := range []int64{MaxSegmentBytes + 1, 4096} {
		if _, err := newStore(StoreOptions{Dir: "d", Pool: ring.NewPool(64 << 20), SegmentMaxBytes: size}, nil); err == nil {
			t.Errorf("segments of %d bytes were accepted", size)
		}
	}
}

// TestStore_KeepsFewFilesOpen has more partitions than descriptors.
func TestStore_KeepsFewFilesOpen(t *testing.T) {
	o := smallStore(testPool(t))
	o.Store.MaxOpenFiles = maxWriters + maxReads + syncParallel
	o.Journal.FileBytes, o.Journal.MaxRoundBytes = 1<<20, 512<<10
	n := openNode(t, simdisk.New(simdisk.Options{}), o)
	var ids []StreamID
	for p := range uint16(200) {
		ids = append(ids, StreamID{Kind: Messages, Topic: 3, Partition: p})
	}
	for range 3 {
		n.publish(100, ids...)
		n.sweep()
	}
	if n.s.openFiles > o.Store.MaxOpenFiles {
		t.Errorf("%d files are open", n.s.openFiles)
	}
	n.check()
	n.close()
	n = n.reopen(n.d, o)
	n.check()
	n.close()
}

// TestStore_SnapshotsSupersedeEachOther saves faster than the disk publishes.
func TestStore_SnapshotsSupersedeEachOther(t *testing.T) {
	o := smallStore(testPool(t))
	n := openNode(t, simdisk.New(simdisk.Options{}), o)
	n.settle()
	for i := range 20 {
		n.publish(10, le, md)
		n.s.SaveSnapshot(SnapshotMetadata, uint64(len(n.acked[md])), Epoch(1), fmt.Appendf(nil, "metadata %d", i))
		n.s.SaveSnapshot(SnapshotCursors, uint64(len(n.acked[le])), Epoch(1), fmt.Appendf(nil, "cursors %d", i))
	}
	n.settle()
	snapshots := 0
	for _, p := range n.d.Paths() {
		if strings.Contains(p, snapshotPrefix) && strings.HasSuffix(p, snapshotSuffix) {
			snapshots++
		}
	}
	if snapshots != 2 {
		t.Errorf("%d metadata snapshots, expected the newest and the one before", snapshots)
	}
	n.close()
	n = n.reopen(n.d, o)
	if got := n.h.snapshots[SnapshotMetadata]; got != "metadata 19" || n.h.positions[SnapshotMetadata] != 20 {
		t.Errorf("metadata snapshot %q at %d", got, n.h.positions[SnapshotMetadata])
	}
	if got := n.h.snapshots[SnapshotCursors]; got != "cursors 19" || len(n.h.records[le]) != 0 {
		t.Errorf("cursor checkpoint %q, %d records above it", got, len(n.h.records[le]))
	}
	n.close()
}

// TestStore_LargeWritesGoPastThePageCache mixes small and large write-outs, whose blocks meet at every offset.
func TestStore_LargeWritesGoPastThePageCache(t *testing.T) {
	for _, limit := range []int64{16 << 10, -1} {
		o := smallStore(testPool(t))
		o.Store.DirectBytes, o.Store.SegmentMaxBytes = limit, 4<<20
		o.Journal.FileBytes, o.Journal.MinFiles, o.Journal.MaxRoundBytes = 1<<20, 4, 512<<10
		n := openNode(t, simdisk.New(simdisk.Options{Seed: 3}), o)
		for i := range 30 {
			n.publish(1+i*37, p0)
			if i%3 != 0 {
				n.publish(60_000+i*111, p0)
			}
			n.now += DefaultWriteOutEvery
			n.settle()
		}
		if open := n.s.streams.get(p0).active.direct >= 0; open != (limit > 0) {
			t.Errorf("with a limit of %d bytes the direct descriptor is open: %v", limit, open)
		}
		n.sweep()
		n.check()
		n.kill()
		n = n.reopen(n.d.Crash(nil), o)
		n.check()
		n.close()
	}
}
