package engine

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

func streamOf(topic, partition uint16) wal.StreamID {
	return wal.StreamID{Kind: wal.Messages, Topic: topic, Partition: partition}
}

// TestDedup_AgreesWithAMap drives windows with random sends and resends and compares every verdict with a plain map of
// all that was ever stored.
func TestDedup_AgreesWithAMap(t *testing.T) {
	for seed := range uint64(50) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		d := newDedup(dedupMaxBytes)
		type producer struct {
			key    windowKey
			last   uint64
			stored map[uint64]wal.Sequence
		}
		var producers []*producer
		next := map[wal.StreamID]wal.Sequence{}
		for i := range 4 {
			producers = append(producers, &producer{
				key:    windowKey{stream: streamOf(1, uint16(i%2)), producer: uint64(100 + i)},
				stored: map[uint64]wal.Sequence{},
			})
		}
		var hints []*window // right and wrong ones, and of windows that are dropped
		for step := range 6000 {
			p := producers[rnd.IntN(len(producers))]
			pseq := p.last + 1
			switch rnd.IntN(10) {
			case 0:
				pseq = p.last + 2 + rnd.Uint64N(3)
			case 1, 2:
				pseq = 1 + rnd.Uint64N(p.last+1)
			}
			var hint *window
			if n := len(hints); n > 0 {
				hint = hints[rnd.IntN(n)]
			}
			w, v, seq := d.check(hint, p.key, pseq)
			var want verdict
			switch {
			case pseq == p.last+1:
				want = accept
			case pseq > p.last:
				want = gap
			case p.last-pseq >= protocol.ProducerWindow:
				want = expired
			default:
				want = duplicate
			}
			if v != want || (v == duplicate && seq != p.stored[pseq]) {
				t.Fatalf("seed %d step %d: producer_seq %d after %d: verdict %d sequence %d, want %d %d", seed, step, pseq, p.last, v, seq, want, p.stored[pseq])
			}
			if v == accept {
				next[p.key.stream]++
				hints = append(hints, d.record(w, p.key, pseq, next[p.key.stream]))
				if len(hints) > 8 {
					hints = hints[4:]
				}
				p.last, p.stored[pseq] = pseq, next[p.key.stream]
			}
			if rnd.IntN(500) == 0 { // the producer is forgotten, and begins anew
				if w := d.windows[p.key]; w != nil {
					d.drop(w)
				}
				p.last = 0
				clear(p.stored)
			}
		}
	}
}

func TestDedup_RunsAreMergedAndTrimmed(t *testing.T) {
	d := newDedup(dedupMaxBytes)
	key := windowKey{stream: streamOf(1, 0), producer: 7}
	var w *window
	for i := uint64(1); i <= 10_000; i++ {
		w = d.record(w, key, i, wal.Sequence(i))
	}
	if len(w.runs) != 1 {
		t.Errorf("a producer alone on a partition costs %d runs, want 1", len(w.runs))
	}
	for i := uint64(10_001); i <= 30_000; i++ {
		w = d.record(w, key, i, wal.Sequence(2*i))
	}
	if len(w.runs) > 2*protocol.ProducerWindow+2 {
		t.Errorf("an interleaved producer costs %d runs, want at most about %d", len(w.runs), 2*protocol.ProducerWindow)
	}
}

func TestDedup_EvictsTheLeastRecentlyUsed(t *testing.T) {
	d := newDedup(10 * (windowCost + runCost))
	for i := uint64(1); i <= 11; i++ {
		key := windowKey{stream: streamOf(1, 0), producer: i}
		w, v, _ := d.check(nil, key, 1)
		if v != accept {
			t.Fatalf("producer %d: %d", i, v)
		}
		d.record(w, key, 1, wal.Sequence(i))
		d.check(nil, windowKey{stream: streamOf(1, 0), producer: 1}, 1) // keeps the first one in use
	}
	if d.bytes > d.limit {
		t.Errorf("windows hold %d bytes, the limit is %d", d.bytes, d.limit)
	}
	if _, v, _ := d.check(nil, windowKey{stream: streamOf(1, 0), producer: 2}, 1); v != accept {
		t.Errorf("the least recently used producer is still known: verdict %d", v)
	}
	if _, v, seq := d.check(nil, windowKey{stream: streamOf(1, 0), producer: 1}, 1); v != duplicate || seq != 1 {
		t.Errorf("the producer in use was dropped: verdict %d", v)
	}
}

// TestDedup_SnapshotLeavesOutWhatIsNotCommitted guards against a window that vouches for a message lost in a crash.
func TestDedup_SnapshotLeavesOutWhatIsNotCommitted(t *testing.T) {
	d := newDedup(dedupMaxBytes)
	a := windowKey{stream: streamOf(1, 0), producer: 1}
	b := windowKey{stream: streamOf(1, 1), producer: 2}
	var wa, wb *window
	for i := uint64(1); i <= 10; i++ {
		wa = d.record(wa, a, i, wal.Sequence(i))
	}
	wb = d.record(wb, b, 1, 1)
	snap := d.snapshot(func(s wal.StreamID) wal.Sequence {
		if s == a.stream {
			return 6
		}
		return 0
	})
	r := newDedup(dedupMaxBytes)
	if err := r.restore(snap); err != nil {
		t.Fatal(err)
	}
	if w := r.windows[a]; w == nil || w.last != 6 {
		t.Fatalf("restored window: %+v, want last 6", w)
	}
	if _, v, _ := r.check(nil, a, 7); v != accept {
		t.Errorf("producer_seq 7 was not committed and must be accepted again: verdict %d", v)
	}
	if r.windows[b] != nil {
		t.Errorf("a window without a committed message was kept")
	}
	if wb.last != 1 {
		t.Errorf("taking a snapshot changed a window")
	}
}

func TestDedup_RestorePlusReplayEqualsTheOriginal(t *testing.T) {
	for seed := range uint64(20) {
		rnd := rand.New(rand.NewPCG(seed, 2))
		d := newDedup(dedupMaxBytes)
		stream := streamOf(3, 0)
		var log []wal.Record
		var snap []byte
		last := map[uint64]uint64{}
		for i := 1; i <= 5000; i++ {
			id := 1 + rnd.Uint64N(5)
			last[id]++
			key := windowKey{stream: stream, producer: id}
			w, v, _ := d.check(nil, key, last[id])
			if v != accept {
				t.Fatalf("verdict %d", v)
			}
			d.record(w, key, last[id], wal.Sequence(i))
			log = append(log, wal.Record{ProducerID: id, ProducerSeq: last[id], Sequence: wal.Sequence(i)})
			if i == 3000 {
				snap = d.snapshot(func(wal.StreamID) wal.Sequence { return wal.Sequence(i) })
			}
		}
		r := newDedup(dedupMaxBytes)
		if err := r.restore(snap); err != nil {
			t.Fatal(err)
		}
		for i := 2000; i < len(log); i++ { // overlapping the snapshot
			r.replay(stream, &log[i])
		}
		for i := range log {
			key := windowKey{stream: stream, producer: log[i].ProducerID}
			_, v1, s1 := d.check(nil, key, log[i].ProducerSeq)
			_, v2, s2 := r.check(nil, key, log[i].ProducerSeq)
			if v1 != v2 || s1 != s2 {
				t.Fatalf("seed %d record %d: %d/%d after recovery, %d/%d before", seed, i, v2, s2, v1, s1)
			}
		}
	}
}

func FuzzDedupRestore(f *testing.F) {
	d := newDedup(dedupMaxBytes)
	key := windowKey{stream: streamOf(1, 0), producer: 1}
	d.record(nil, key, 1, 1)
	all := func(wal.StreamID) wal.Sequence { return 1 << 62 }
	f.Add(d.snapshot(all))
	f.Add([]byte{})
	f.Add([]byte{1, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		r := newDedup(dedupMaxBytes)
		if r.restore(b) != nil {
			return
		}
		if again := newDedup(dedupMaxBytes); again.restore(r.snapshot(func(wal.StreamID) wal.Sequence { return ^wal.Sequence(0) })) != nil {
			t.Fatal("a restored snapshot does not restore again")
		}
	})
}

func TestDedup_SnapshotIsStable(t *testing.T) {
	d := newDedup(dedupMaxBytes)
	for i := uint64(1); i <= 100; i++ {
		d.record(nil, windowKey{stream: streamOf(1, 0), producer: i}, 1, wal.Sequence(i))
	}
	all := func(wal.StreamID) wal.Sequence { return 1 << 62 }
	r := newDedup(dedupMaxBytes)
	if err := r.restore(d.snapshot(all)); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(d.snapshot(all), r.snapshot(all)) {
		t.Error("snapshot, restore, snapshot changed the bytes")
	}
}

func TestDedup_SteadyStateDoesNotAllocate(t *testing.T) {
	d := newDedup(dedupMaxBytes)
	key := windowKey{stream: streamOf(1, 0), producer: 1}
	pseq := uint64(0)
	step := func() {
		for range 100 {
			pseq++
			w, v, _ := d.check(nil, key, pseq)
			if v != accept {
				t.Fatal(fmt.Sprint("verdict ", v))
			}
			d.record(w, key, pseq, wal.Sequence(2*pseq))
		}
	}
	for range 100 {
		step()
	}
	if n := testing.AllocsPerRun(50, step); n > 0 {
		t.Errorf("%v allocations per 100 messages", n)
	}
}

// TestDedupMemory: what a window is counted with is about what it holds, also once its runs have become fewer.
func TestDedupMemory(t *testing.T) {
	t.Parallel()
	d := newDedup(1 << 20)
	seq := wal.Sequence(0)
	fill := func(topic uint16, producer uint64) {
		key := windowKey{stream: wal.StreamID{Kind: wal.Messages, Topic: topic}, producer: producer}
		var w *window
		for pseq := uint64(1); pseq <= 3*protocol.ProducerWindow; pseq++ {
			if seq++; pseq <= protocol.ProducerWindow {
				seq++ // another producer's message lies between, so each is a run
			}
			w = d.record(w, key, pseq, seq)
		}
	}
	for producer := range uint64(1000) {
		fill(1, producer+1)
	}
	held := func() (bytes int64) {
		for w := d.lru.next; w != &d.lru; w = w.next {
			bytes += windowCost + int64(cap(w.runs))*runCost
		}
		for w := d.spare; w != nil; w = w.next {
			bytes += windowCost + int64(cap(w.runs))*runCost
		}
		return bytes
	}
	if got := held(); got > 4*d.limit {
		t.Errorf("windows hold %d bytes, the limit is %d (counted: %d)", got, d.limit, d.bytes)
	}
	d.dropTopics(func(topic uint16) bool { return topic == 1 })
	if got := held(); got > d.limit {
		t.Errorf("dropped windows hold %d bytes, the limit is %d", got, d.limit)
	}
}
