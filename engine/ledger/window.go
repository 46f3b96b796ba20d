package ledger

import "time"

// state is where an open message stands.
type state uint8

const (
	done      state = iota // the entry is a hole in the window
	leased                 // in flight; at = the lease's deadline
	acking                 // its ACK is queued or proposed
	failing                // its FAIL is queued or proposed; at = when the retry will be due
	dropping               // its DROP is queued or proposed
	waiting                // in the retry heap; at = when it is due (0: at once)
	exhausted              // out of attempts, the host decides
	parking                // its EXHAUSTED is queued or proposed; delivery = the dead-letter topic's end
	parked                 // EXHAUSTED is on record; delivery = the dead-letter topic's end
	burying                // parked, and its DROP is queued or proposed
)

// entry is an open message. While records are replayed, at of a waiting one is its due time on the wall clock in
// milliseconds: only Restore knows the monotonic time that it stands for.
type entry struct {
	seq      Sequence
	delivery DeliveryID
	at       time.Duration
	delayMs  uint32
	failures uint16 // on record
	state    state
	reason   Reason
}

// window is the ring of open messages, sorted by sequence, with holes for those that finished out of order.
type window struct {
	ring       []entry // its length is a power of two
	marks      []mark  // one for each markPlaces of the ring
	head, tail uint64  // positions count up; position p lies at p % len(ring)
	live       int     // entries that are not done
}

func (w *window) at(pos uint64) *entry { return &w.ring[pos&uint64(len(w.ring)-1)] }

// push appends an entry; its sequence must be the highest.
func (w *window) push(e entry) {
	if w.tail-w.head == uint64(len(w.ring)) {
		w.resize(max(16, 2*len(w.ring)))
	}
	*w.at(w.tail) = e
	w.tail++
	w.live++
}

// find returns the position of seq, or of the first higher one, and whether it was found.
func (w *window) find(seq Sequence) (pos uint64, ok bool) {
	if w.head == w.tail {
		return w.tail, false
	}
	front := w.at(w.head).seq
	if seq < front {
		return w.head, false
	}
	// Without finished stretches in between, which is the rule, the distance is the position.
	lo, hi := w.head, w.tail
	if d := uint64(seq - front); d < hi-lo {
		if w.at(lo+d).seq == seq {
			return lo + d, true
		}
		hi = lo + d // sequences grow at least as quickly as positions
	}
	for lo < hi {
		mid := lo + (hi-lo)/2
		if w.at(mid).seq < seq {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo, lo < w.tail && w.at(lo).seq == seq
}

// open returns the position of the open entry of seq, if there is one.
func (w *window) open(seq Sequence) (pos uint64, ok bool) {
	if pos, ok = w.find(seq); ok {
		ok = w.at(pos).state != done
	}
	return pos, ok
}

// get returns the open entry of seq, or nil.
func (w *window) get(seq Sequence) *entry {
	if pos, ok := w.open(seq); ok {
		return w.at(pos)
	}
	return nil
}

// finish marks the entry at pos, which is not leased any more, done.
func (w *window) finish(pos uint64) {
	w.at(pos).state = done
	w.live--
}

// trim removes the holes at the front, and all of them when they are the majority. No pointer to an entry survives it.
func (w *window) trim() {
	for w.head != w.tail && w.at(w.head).state == done {
		w.head++
	}
	if n := int(w.tail - w.head); n >= 64 && w.live < n/2 {
		clear(w.marks)
		to := w.head
		for p := w.head; p != w.tail; p++ {
			if e := w.at(p); e.state != done {
				w.put(to, e)
				to++
			}
		}
		w.tail = to
	}
}

// shrink gives memory back after a burst.
func (w *window) shrink() {
	switch n := int(w.tail - w.head); {
	case n == 0:
		w.ring, w.marks = nil, nil
	case len(w.ring) > 256 && n < len(w.ring)/8:
		w.resize(len(w.ring) / 4)
	}
}

// resize moves the entries to a ring of n, a power of two that holds them.
func (w *window) resize(n int) {
	old := *w
	w.ring, w.marks = make([]entry, n), make([]mark, max(1, n/markPlaces))
	w.head, w.tail = 0, 0
	for p := old.head; p != old.tail; p++ {
		w.put(w.tail, old.at(p))
		w.tail++
	}
}

// put copies an entry to a place of the ring.
func (w *window) put(pos uint64, e *entry) {
	*w.at(pos) = *e
	if e.state == leased {
		w.lease(pos)
	}
}

// reset empties the window.
func (w *window) reset() { *w = window{} }
