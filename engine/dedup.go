package engine

import (
	"fmt"

	"github.com/mortarmq/mortarmq/engine/dedupsnap"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// A producer's window remembers where its last protocol.ProducerWindow messages to one partition were stored, so that a
// publish sent again is recognised. It is kept as runs: consecutive producer_seqs that got consecutive sequences are one
// run, so a producer alone on a partition costs one run however much it sends.
//
// Windows are folded when a record is appended and are trusted only up to the partition's commit point: a duplicate of
// something not yet committed waits for it, a snapshot leaves it out.

// run says that producer_seqs pseq..pseq+n-1 were stored at sequences seq..seq+n-1.
type run struct {
	pseq uint64
	seq  wal.Sequence
	n    uint64
}

// last is the highest producer_seq of the run.
func (r *run) last() uint64 { return r.pseq + r.n - 1 }

type windowKey struct {
	stream   wal.StreamID
	producer uint64
}

type window struct {
	// owner is where the window is in use, nil where it isn't any more.
	owner *dedup

	key  windowKey
	last uint64 // highest producer_seq accepted
	runs []run  // oldest first

	// position in the least-recently-used list
	prev, next *window
}

// verdict is a window's answer to a producer_seq.
type verdict uint8

const (
	accept    verdict = iota // the next one: store it
	duplicate                // stored before, at the sequence returned
	gap                      // ahead of what was stored
	expired                  // stored, but too long ago to know where
)

// Memory that a window and a run are taken to cost, in bytes, for the bound below.
const (
	windowCost    = 160
	runCost       = 24
	dedupMaxBytes = 32 << 20
	// smallRuns is a capacity for runs that isn't worth giving back: what is counted is their number, so where they become
	// fewer their array may be a few times as large, but not as large as it ever was.
	smallRuns = 16
)

// dedup holds the producer windows of one shard. It belongs to the shard's goroutine.
type dedup struct {
	windows map[windowKey]*window
	// lru.next is the most recently used window, lru.prev the least.
	lru   window
	bytes int64
	limit int64
	// evicted counts windows dropped to stay within the limit.
	evicted uint64
	// spare holds windows of dropped producers for reuse.
	spare *window
}

func newDedup(limit int64) *dedup {
	d := &dedup{windows: make(map[windowKey]*window), limit: limit}
	d.lru.prev, d.lru.next = &d.lru, &d.lru
	return d
}

// check says what to do with pseq of the producer of key, without changing anything but the order of use. The window is
// nil for an unknown producer. hint is a window that may be the one, or nil.
func (d *dedup) check(hint *window, key windowKey, pseq uint64) (*window, verdict, wal.Sequence) {
	w := hint
	if w == nil || w.owner != d || w.key != key {
		w = d.windows[key]
	}
	if w == nil {
		if pseq == 1 {
			return nil, accept, 0
		}
		return nil, gap, 0
	}
	d.touch(w)
	v, seq := w.check(pseq)
	return w, v, seq
}

func (w *window) check(pseq uint64) (verdict, wal.Sequence) {
	switch {
	case pseq == w.last+1:
		return accept, 0
	case pseq > w.last:
		return gap, 0
	case w.last-pseq >= protocol.ProducerWindow:
		return expired, 0
	}
	for i := len(w.runs) - 1; i >= 0; i-- {
		r := &w.runs[i]
		if pseq >= r.pseq {
			if off := pseq - r.pseq; off < r.n {
				return duplicate, r.seq + wal.Sequence(off)
			}
			break
		}
	}
	return expired, 0
}

// record notes that pseq (the next one of its producer) was stored at seq, and returns the window.
func (d *dedup) record(w *window, key windowKey, pseq uint64, seq wal.Sequence) *window {
	if w == nil {
		w = d.add(key)
	}
	if n := len(w.runs); n > 0 {
		if r := &w.runs[n-1]; r.pseq+r.n == pseq && r.seq+wal.Sequence(r.n) == seq {
			r.n++
			w.last = pseq
			d.trim(w)
			return w
		}
	}
	w.last = pseq
	w.runs = append(w.runs, run{pseq: pseq, seq: seq, n: 1})
	d.bytes += runCost
	d.trim(w)
	if d.bytes > d.limit {
		d.evict(w)
	}
	return w
}

// trim forgets what lies before the window. Dropped runs are shifted out in batches so that the copy is amortised.
func (d *dedup) trim(w *window) {
	if w.last < protocol.ProducerWindow {
		return
	}
	floor := w.last - protocol.ProducerWindow // producer_seqs up to floor are out of the window
	// Only a half or more is dropped: the run in the middle says whether there is.
	half := max(len(w.runs)/2, 1)
	if half >= len(w.runs) || w.runs[half-1].last() > floor {
		return
	}
	drop := half
	for drop < len(w.runs)-1 && w.runs[drop].last() <= floor {
		drop++
	}
	w.runs = w.runs[:copy(w.runs, w.runs[drop:])]
	d.bytes -= int64(drop) * runCost
	if cap(w.runs) > smallRuns && len(w.runs) < cap(w.runs)/4 {
		w.runs = append(make([]run, 0, 2*len(w.runs)), w.runs...)
	}
}

func (d *dedup) add(key windowKey) *window {
	w := d.spare
	if w != nil {
		d.spare = w.next
		*w = window{runs: w.runs[:0]}
	} else {
		w = &window{}
	}
	w.owner, w.key = d, key
	d.windows[key] = w
	d.bytes += windowCost
	d.pushFront(w)
	return w
}

func (d *dedup) pushFront(w *window) {
	w.prev, w.next = &d.lru, d.lru.next
	w.prev.next, w.next.prev = w, w
}

func (d *dedup) unlink(w *window) {
	w.prev.next, w.next.prev = w.next, w.prev
	w.prev, w.next = nil, nil
}

func (d *dedup) touch(w *window) {
	if d.lru.next == w {
		return
	}
	d.unlink(w)
	d.pushFront(w)
}

func (d *dedup) drop(w *window) {
	d.unlink(w)
	w.owner = nil
	delete(d.windows, w.key)
	d.bytes -= windowCost + int64(len(w.runs))*runCost
	if cap(w.runs) > smallRuns {
		w.runs = nil // the next user may need one run, and is counted with that
	}
	w.next = d.spare
	d.spare = w
}

// evict drops the least recently used windows, but never keep, until the limit holds.
func (d *dedup) evict(keep *window) {
	for d.bytes > d.limit {
		w := d.lru.prev
		if w == &d.lru || w == keep {
			return
		}
		d.drop(w)
		d.evicted++
	}
}

// dropTopics forgets every producer of the topics that were deleted.
func (d *dedup) dropTopics(deleted func(topic uint16) bool) {
	for w := d.lru.next; w != &d.lru; {
		next := w.next
		if deleted(w.key.stream.Topic) {
			d.drop(w)
		}
		w = next
	}
}

// replay folds a record read back from the journal. Records that the snapshot already covers are skipped.
func (d *dedup) replay(stream wal.StreamID, r *wal.Record) {
	if r.ProducerID == 0 {
		return
	}
	key := windowKey{stream: stream, producer: r.ProducerID}
	w := d.windows[key]
	if w != nil && r.ProducerSeq <= w.last {
		return
	}
	if w != nil && r.ProducerSeq != w.last+1 {
		// The window was dropped and begun again between the snapshot and this record.
		d.drop(w)
		w = nil
	}
	d.record(w, key, r.ProducerSeq, r.Sequence)
}

// snapshot encodes what is committed: committed(stream) is the partition's commit point. The windows come least recently
// used first, so that restoring them in order restores the order of use.
func (d *dedup) snapshot(committed func(wal.StreamID) wal.Sequence) []byte {
	out := dedupsnap.Append(nil)
	var s dedupsnap.Window
	for w := d.lru.prev; w != &d.lru; w = w.prev {
		limit := committed(w.key.stream)
		s.Topic, s.Partition, s.ProducerID, s.Runs = w.key.stream.Topic, w.key.stream.Partition, w.key.producer, s.Runs[:0]
		for _, r := range w.runs {
			if r.seq > limit {
				break
			}
			s.Runs = append(s.Runs, dedupsnap.Run{ProducerSeq: r.pseq, Sequence: uint64(r.seq), Count: min(r.n, uint64(limit-r.seq)+1)})
		}
		if len(s.Runs) > 0 {
			out = dedupsnap.AppendWindow(out, &s)
		}
	}
	return out
}

// restore replaces the windows by those of a snapshot. It refuses anything that snapshot cannot have written.
func (d *dedup) restore(b []byte) error {
	return dedupsnap.Decode(b, func(s *dedupsnap.Window) error {
		key := windowKey{
			stream:   wal.StreamID{Kind: wal.Messages, Topic: s.Topic, Partition: s.Partition},
			producer: s.ProducerID,
		}
		if d.windows[key] != nil {
			return fmt.Errorf("producer windows: %v appears twice", s)
		}
		w := d.add(key)
		for _, r := range s.Runs {
			w.runs = append(w.runs, run{pseq: r.ProducerSeq, seq: wal.Sequence(r.Sequence), n: r.Count})
			w.last = r.Last()
			d.bytes += runCost
		}
		if d.bytes > d.limit {
			d.evict(w)
		}
		return nil
	})
}
