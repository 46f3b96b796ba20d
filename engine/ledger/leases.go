package ledger

import (
	"math"
	"math/bits"
	"time"
)

// markPlaces is how many places of the ring a mark sums up.
const markPlaces = 64

// mark sums up neighbouring places of the ring, so that a few leases are found among many open messages without a look at
// each of those. A client can ask for that as often as it likes.
type mark struct {
	leased uint64 // bit i: the entry at the mark's place i is leased
	// Lower bounds over the leased ones; exact again after tighten.
	delivery DeliveryID
	until    time.Duration
}

// lease notes that the entry at pos, whose delivery and deadline are set, is leased.
func (w *window) lease(pos uint64) {
	slot := pos & uint64(len(w.ring)-1)
	e, m := &w.ring[slot], &w.marks[slot/markPlaces]
	if m.leased == 0 {
		m.delivery, m.until = e.delivery, e.at
	} else {
		m.delivery, m.until = min(m.delivery, e.delivery), min(m.until, e.at)
	}
	m.leased |= 1 << (slot % markPlaces)
}

// unlease notes that the entry at pos is not leased any more.
func (w *window) unlease(pos uint64) {
	slot := pos & uint64(len(w.ring)-1)
	w.marks[slot/markPlaces].leased &^= 1 << (slot % markPlaces)
}

// tighten makes the bounds of mark i exact.
func (w *window) tighten(i uint64) {
	m := &w.marks[i]
	m.delivery, m.until = math.MaxUint64, never
	for set := m.leased; set != 0; set &= set - 1 {
		e := &w.ring[i*markPlaces+uint64(bits.TrailingZeros64(set))]
		m.delivery, m.until = min(m.delivery, e.delivery), min(m.until, e.at)
	}
}

// earliest is the earliest deadline of a lease, or earlier; never if nothing is leased.
func (w *window) earliest() time.Duration {
	at := never
	for i := range w.marks {
		if m := &w.marks[i]; m.leased != 0 {
			at = min(at, m.until)
		}
	}
	return at
}

// leases walks over leased entries by sequence: those before position end that were delivered no later than delivery and
// whose leases end no later than until. Its cost is what it finds, and a look at the marks in between: a mark that was looked
// into in vain has exact bounds afterwards. The entry that next has returned may change its state, nothing else may happen.
type leases struct {
	w        *window
	pos, end uint64
	delivery DeliveryID
	until    time.Duration
	set      uint64 // the candidates that are left of the present mark
	base     uint64 // position of the mark's place 0
}

// leases starts a walk; end is w.tail for all.
func (w *window) leases(end uint64, delivery DeliveryID, until time.Duration) leases {
	return leases{w: w, pos: w.head, end: end, delivery: delivery, until: until}
}

// allLeases starts a walk over every leased entry.
func (w *window) allLeases() leases { return w.leases(w.tail, math.MaxUint64, never) }

func (l *leases) next() (pos uint64, ok bool) {
	w := l.w
	for {
		for l.set != 0 {
			pos := l.base + uint64(bits.TrailingZeros64(l.set))
			l.set &= l.set - 1
			if e := w.at(pos); e.delivery <= l.delivery && e.at <= l.until {
				return pos, true
			}
		}
		if l.pos >= l.end {
			return 0, false
		}
		slot := l.pos & uint64(len(w.ring)-1)
		first := slot % markPlaces // of the mark's places; those before are at the other end of the window
		l.base = l.pos - first
		l.pos = l.base + uint64(min(markPlaces, len(w.ring)))
		i := slot / markPlaces
		if m := &w.marks[i]; m.leased == 0 || !l.fits(m) {
			continue
		}
		if w.tighten(i); !l.fits(&w.marks[i]) {
			continue
		}
		l.set = w.marks[i].leased >> first << first
		if left := l.end - l.base; left < markPlaces {
			l.set &= 1<<left - 1
		}
	}
}

func (l *leases) fits(m *mark) bool { return m.delivery <= l.delivery && m.until <= l.until }
