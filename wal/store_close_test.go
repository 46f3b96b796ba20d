package wal

import (
	"fmt"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// TestStore_ClosesFromEveryState ends the store cleanly after every single completion of a scripted life (files being
// made, written, rolled, flushed, swept; a topic being deleted; snapshots and checkpoints being published), with and
// without a topic that is deleted at that very moment. It must come to its end, and the next start have nothing to replay.
func TestStore_ClosesFromEveryState(t *testing.T) {
	for _, c := range []struct {
		name string
		drop bool
	}{{"close", false}, {"delete a topic and close", true}} {
		t.Run(c.name, func(t *testing.T) {
			o := smallStore(testPool(t))
			o.Store.SliceFiles = 2
			for k := 0; ; k++ {
				n := openNode(t, simdisk.New(simdisk.Options{}), o)
				ended := n.play(closeScript(n), k)
				if c.drop {
					n.drop(1)
				}
				n.finishRounds()
				n.closeStore()
				n.closeJournal()
				n.reopenAfterClose(o, fmt.Sprintf("after %d completions", k))
				if ended {
					break
				}
			}
		})
	}
}

// closeScript is a life that visits what a store does.
func closeScript(n *node) []func() {
	seal := func(size int, streams ...StreamID) func() {
		return func() {
			for _, id := range streams {
				n.append(id, size)
			}
			n.j.Seal()
		}
	}
	return []func(){
		seal(3000, p0, p1, p2, le, md),
		func() { n.now += DefaultWriteOutEvery },
		seal(9000, p0, p1, p2),
		seal(20000, p0),
		n.s.RequestSweep,
		seal(9000, p0, p1, p2, le),
		func() { n.now += DefaultWriteOutEvery },
		seal(9000, p0, p2, md),
		func() { n.drop(2) },
		func() { n.s.SaveSnapshot(SnapshotCursors, uint64(len(n.acked[le])), n.j.Epoch(), []byte("cursors")) },
		seal(9000, p0, p1),
		func() { n.now += DefaultWriteOutEvery },
		n.s.RequestSweep,
	}
}

// play does the script's actions, each when the disk has nothing left to do, and stops after k completions. It returns
// whether the script was over before.
func (n *node) play(script []func(), k int) (ended bool) {
	for _, action := range script {
		action()
		for n.work() {
			if k--; k < 0 {
				return false
			}
		}
	}
	return true
}

// work is step that lets the pauses of slices pass. It returns false when the disk has nothing to do.
func (n *node) work() bool {
	for {
		if n.step() {
			return true
		}
		next := n.s.Step(n.now)
		if n.d.InFlight() > 0 {
			continue
		}
		if next <= n.now || next > n.now+DefaultSlicePause {
			return false
		}
		n.now = next
	}
}

// drop deletes a topic; records of it are dropped by the test from then on, too.
func (n *node) drop(topic uint16) {
	n.s.DropTopic(topic)
	n.dropped[topic] = true
}

// finishRounds waits until everything appended is committed, as a shard does before its store is closed.
func (n *node) finishRounds() {
	n.t.Helper()
	for n.j.gather != nil || n.j.InFlight() > 0 {
		n.j.Seal()
		if err := n.d.WaitOne(); err != nil {
			n.t.Fatal(err)
		}
	}
}

// reopenAfterClose starts on what a clean end has left: nothing is replayed, nothing is missing, deleted topics are
// deleted to the end.
func (n *node) reopenAfterClose(o OpenOptions, what string) {
	n.t.Helper()
	m := n.reopen(n.d.Crash(nil), o)
	if records := m.h.records[le]; len(records) > len(n.acked[le]) || len(m.rec.Quarantined) > 0 || m.rec.Torn != nil {
		n.t.Fatalf("%s: %d ledger records, quarantined: %v, torn: %v", what, len(records), m.rec.Quarantined, m.rec.Torn)
	}
	for id := range m.rec.LastSequences {
		if id.Kind == Messages && n.dropped[id.Topic] {
			n.t.Fatalf("%s: %v is back", what, id)
		}
	}
	m.check()
	m.settle()
	for _, p := range m.d.Paths() {
		if strings.Contains(p, deletedPrefix) {
			n.t.Fatalf("%s: %s is left of a deleted topic", what, p)
		}
	}
	m.close()
}

// TestStore_ClosesAfterRandomWork does the same with random work, topics that come and go, reads on their way and
// completions in random order.
func TestStore_ClosesAfterRandomWork(t *testing.T) {
	for seed := range seeds(60) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 99))
			o := smallStore(testPool(t))
			o.Store.SegmentMaxBytes = int64(8<<10 + rng.IntN(40<<10))
			o.Store.SliceFiles = 1 + rng.IntN(4)
			o.Store.WriteOutBytes = int64(rng.IntN(60 << 10))
			o.Store.DirectBytes = int64(rng.IntN(30<<10)) - 1
			w := &topicsThatComeAndGo{rng: rng, streams: []StreamID{le, md}}
			n := openNode(t, simdisk.New(simdisk.Options{Seed: seed + 1, Uncached: seed%2 == 1}), o)
			for range 4 {
				for range 40 {
					w.act(n)
					n.step()
				}
				n.finishRounds()
				n.closeStore()
				n.closeJournal()
				d := n.d.Clone()
				if rng.IntN(2) == 0 {
					d = n.d.Crash(nil)
				}
				n = n.reopen(d, o)
				if len(n.rec.Quarantined) > 0 {
					t.Fatalf("quarantined: %+v", n.rec.Quarantined)
				}
			}
			n.check()
			n.settle()
			n.close()
		})
	}
}

// topicsThatComeAndGo is random work in which topics are made and deleted all the time.
type topicsThatComeAndGo struct {
	rng     *rand.Rand
	streams []StreamID
	topics  uint16 // so far
}

func (w *topicsThatComeAndGo) act(n *node) {
	rng := w.rng
	switch rng.IntN(14) {
	case 0, 1, 2, 3, 4:
		n.randomChore(rng)
	case 5:
		if id := w.streams[rng.IntN(len(w.streams))]; id.Kind == Messages {
			n.s.Read(&ReadRequest{Stream: id, From: Sequence(1 + rng.IntN(5)), Done: func(r *ReadRequest) {
				if r.Chunk != nil {
					r.Chunk.Release()
				}
			}})
		}
	case 6:
		w.topics++
		for p := range uint16(1 + rng.IntN(3)) {
			w.streams = append(w.streams, StreamID{Kind: Messages, Topic: w.topics, Partition: p})
		}
	case 7:
		gone := w.streams[rng.IntN(len(w.streams))]
		if gone.Kind != Messages {
			return
		}
		w.streams = slices.DeleteFunc(w.streams, func(id StreamID) bool { return id.Kind == Messages && id.Topic == gone.Topic })
		n.drop(gone.Topic)
	default:
		for range 1 + rng.IntN(4) {
			n.append(w.streams[rng.IntN(len(w.streams))], []int{1, 100, 1500, 9000, 15000}[rng.IntN(5)])
		}
		n.j.Seal()
	}
}

// TestStore_DeletionOfATopicWhoseFileIsBeingMade: the topic's partition is the last one of its write-out, waits for its
// file, has more to write already, and a sweep is wanted: the next write-out begins where the partition leaves this one.
func TestStore_DeletionOfATopicWhoseFileIsBeingMade(t *testing.T) {
	o := smallStore(testPool(t))
	n := openNode(t, simdisk.New(simdisk.Options{}), o)
	n.settle()
	n.publish(100, p2)
	n.d.Hold(func(op *ring.Op) bool { return op.Kind == ring.Mkdir })
	n.now += DefaultWriteOutEvery
	n.s.Step(n.now)
	n.publish(100, p2)
	n.drop(2)
	n.s.RequestSweep()
	n.d.Hold(nil)
	n.settle()
	if n.s.Written() != n.j.Flushed() || n.s.Durable() != n.j.Flushed() {
		t.Errorf("round %d is committed, %d written out, %d durable", n.j.Flushed(), n.s.Written(), n.s.Durable())
	}
	n.close()
}

// TestStore_ReadsAPartitionWithoutANewestFile: a scan found a newest file without a record, and goes on without it. What is
// in the others can be read, though nothing is written to the partition that could make the next file.
func TestStore_ReadsAPartitionWithoutANewestFile(t *testing.T) {
	o := smallStore(testPool(t))
	n := filled(t, o, 12, 5000)
	for range 40 { // until the journal has nothing of the partition any more
		n.publish(9000, p1)
	}
	n.close()
	d := n.d.Clone()
	d.RemoveFile(testJournalDir + "/" + tableFile)
	d.RemoveFile(streamDir(testDataDir, 0, p0) + "/" + checkpointFile)
	base := newestSegment(d, p0)
	d.WriteFile(segmentPath(p0, base), d.ReadFile(segmentPath(p0, base))[:segmentHeaderLen])
	n.acked[p0] = n.acked[p0][:base-1]
	n = n.reopen(d, o)
	n.check()
	n.close()
}

// newestSegment returns the base of a stream's newest file.
func newestSegment(d *simdisk.Disk, id StreamID) (base Sequence) {
	for _, p := range d.Paths() {
		if dir, name := path.Split(p); path.Clean(dir) == streamDir(testDataDir, 0, id) {
			if b, ok := parseLogName(id.Kind, name); ok {
				base = max(base, b)
			}
		}
	}
	return base
}

// TestStore_FlushesEveryFileFoundByScanning: a killed process has left more partitions than files may be open, written out
// and not flushed, and the checkpoint table is lost. The next one must flush all of them before it says that they are durable.
func TestStore_FlushesEveryFileFoundByScanning(t *testing.T) {
	o := smallStore(testPool(t))
	o.Store.MaxOpenFiles = maxWriters + maxReads + syncParallel
	o.Store.SegmentMaxBytes = 2 * segmentHeaderLen
	o.Journal.FileBytes, o.Journal.MinFiles = 1<<20, 4
	n := openNode(t, simdisk.New(simdisk.Options{}), o)
	var many []StreamID
	for p := range uint16(o.Store.MaxOpenFiles) {
		many = append(many, StreamID{Kind: Messages, Topic: 3, Partition: p})
	}
	n.publish(10, many...)
	for range 500 { // until the journal doesn't begin with its first round any more
		n.publish(9000, p1)
	}
	n.sweep()
	for range 3 { // files are full, and end before their sweep
		n.publish(3000, many...)
	}
	n.now += DefaultWriteOutEvery
	n.settle()
	n.kill()
	d := n.d.Clone()
	d.RemoveFile(testJournalDir + "/" + tableFile)
	n = n.reopen(d, o)
	n.sweep()
	n.kill()
	n = n.reopen(n.d.Crash(nil), o)
	if len(n.rec.Quarantined) > 0 {
		t.Errorf("quarantined: %+v", n.rec.Quarantined[0])
	}
	n.check()
	n.close()
}

// TestStore_CloseTakesTimeInProportion closes stores with very many new partitions: the operations grow as their number
// does, and flushes overlap.
func TestStore_CloseTakesTimeInProportion(t *testing.T) {
	cost := func(partitions int) (ops, overlap int) {
		o := smallStore(testPool(t))
		o.Journal.FileBytes = 1 << 20
		n := openNode(t, simdisk.New(simdisk.Options{}), o)
		for i := range partitions {
			n.append(StreamID{Kind: Messages, Topic: 3, Partition: uint16(i)}, 10)
		}
		n.finishRounds()
		n.settle()
		flushes := 0
		n.d.OnStep(func(op *ring.Op) {
			ops++
			if op.Kind == ring.Sync || op.Kind == ring.SyncDir {
				flushes++
				overlap += n.s.inflight
			}
		})
		n.closeStore()
		n.d.OnStep(nil)
		n.closeJournal()
		return ops, overlap / flushes
	}
	few, _ := cost(300)
	many, overlap := cost(600)
	if many > 2*few {
		t.Errorf("%d operations for 300 partitions, %d for 600", few, many)
	}
	if overlap < closeParallel/2 {
		t.Errorf("%d operations are at the disk together with a flush, %d are allowed", overlap, closeParallel)
	}
}

// TestStore_CloseLeavesOutWhatIsRedundantWhereItTakesLong: every operation takes a second.
func TestStore_CloseLeavesOutWhatIsRedundantWhereItTakesLong(t *testing.T) {
	o := smallStore(testPool(t))
	n := openNode(t, simdisk.New(simdisk.Options{}), o)
	for i := range 100 {
		n.publish(10, StreamID{Kind: Messages, Topic: 3, Partition: uint16(i)})
	}
	published := 0
	n.d.OnStep(func(op *ring.Op) {
		n.now += time.Second
		if op.Kind == ring.Rename && strings.HasSuffix(op.Path2, checkpointFile) {
			published++
		}
	})
	n.closeStore()
	n.d.OnStep(nil)
	n.closeJournal()
	if published > closeParallel {
		t.Errorf("%d checkpoints were published", published)
	}
	n = n.reopen(n.d.Crash(nil), o)
	if n.rec.Rounds > 1 || len(n.rec.Quarantined) > 0 {
		t.Errorf("%d rounds were replayed, quarantined %+v", n.rec.Rounds, n.rec.Quarantined)
	}
	n.check()
	n.close()
}

// TestStore_ShortagesAmidRandomWorkPass lets space and descriptors run short for a while, anywhere in random work with
// topics that come and go, also during a shutdown. Afterwards everything is written, and nothing is missing.
func TestStore_ShortagesAmidRandomWorkPass(t *testing.T) {
	for seed := range seeds(30) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 101))
			o := smallStore(testPool(t))
			o.Journal.FileBytes, o.Journal.MinFiles = 2<<20, 4 // publishes don't wait
			o.Store.SegmentMaxBytes = int64(8<<10 + rng.IntN(40<<10))
			o.Store.DirectBytes = int64(rng.IntN(30<<10)) - 1
			w := &topicsThatComeAndGo{rng: rng, streams: []StreamID{le, md}}
			n := openNode(t, simdisk.New(simdisk.Options{Seed: seed + 1, Uncached: seed%2 == 1}), o)
			o.Deleted = func(topic uint16) bool { return n.dropped[topic] }
			for range 4 {
				var relieve []func()
				for range 60 {
					w.act(n)
					if rng.IntN(8) == 0 {
						relieve = append(relieve, n.d.Inject(randomShortage(rng)))
					}
					n.now += time.Duration(rng.IntN(int(retryEvery)))
					n.step()
				}
				n.finishRounds()
				if rng.IntN(2) == 0 { // otherwise they last until the shutdown is over
					for _, f := range relieve {
						f()
					}
					for range 3 {
						n.now += retryEvery
						n.settle()
					}
					if n.s.Written() != n.j.Flushed() {
						t.Fatalf("round %d of %d is written", n.s.Written(), n.j.Flushed())
					}
				}
				n.closeInTime()
				n = n.reopen(n.d.Clone(), o)
				if len(n.rec.Quarantined) > 0 || len(n.rec.Unwritten) > 0 {
					t.Fatalf("quarantined: %+v, %d rounds wait for space", n.rec.Quarantined, len(n.rec.Unwritten))
				}
				n.check()
			}
			n.settle()
			n.close()
		})
	}
}

// randomShortage returns a fault that hits a few operations which need space or a descriptor.
func randomShortage(rng *rand.Rand) simdisk.Fault {
	f := []simdisk.Fault{
		{Kind: ring.Write, Path: "*.mqs", Err: syscall.ENOSPC}, {Kind: ring.Write, Err: syscall.ENOSPC},
		{Kind: ring.Mkdir, Err: syscall.ENOSPC}, {Kind: ring.Truncate, Err: syscall.EDQUOT},
		{Kind: ring.Open, Path: "*.tmp", Err: syscall.ENOSPC}, {Kind: ring.Open, Path: "*.mqs", Err: syscall.EMFILE},
		{Kind: ring.Open, Path: "*.tmp", Err: syscall.ENFILE},
	}[rng.IntN(7)]
	f.Skip, f.Count = rng.IntN(10), 1+rng.IntN(10)
	return f
}

// closeInTime is close while time passes, for what is tried again.
func (n *node) closeInTime() {
	n.t.Helper()
	n.saveDedup()
	n.s.StartClose()
	for range 100_000 {
		next := n.s.Step(n.now)
		switch {
		case n.s.Closed():
			n.closeJournal()
			return
		case n.d.InFlight() > 0:
			if err := n.d.WaitOne(); err != nil {
				n.t.Fatal(err)
			}
		case next > n.now && next != Never:
			n.now = next
		}
	}
	n.t.Fatal("the store doesn't close")
}
