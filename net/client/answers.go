package client

import "fmt"

// inlineAnswer is the size of the largest answer that a slot holds without further memory; PUB's OK has 36 bytes.
const inlineAnswer = 38

// minSlots is the size of a connection's first ring of slots; it doubles from there.
const minSlots = 16

type slotState uint8

const (
	slotWaiting slotState = iota // no answer yet
	slotInline                   // in inline
	slotSpilled                  // in spill
	slotBusy                     // the constant answer "0x4001 to PUB"
)

// slot is one unanswered request, or one answered before its turn.
type slot struct {
	spill  []byte
	state  slotState
	n      uint8
	inline [inlineAnswer]byte
}

// answerRing brings answers into the order of their requests. Request numbers count from 0; head is the oldest one that
// was not passed on, and requests head..head+len(slots)-1 have a slot each. The owner's mutex guards it.
type answerRing struct {
	slots  []slot // a power of two, or none
	head   uint64
	spills [][]byte // free memory of spilled answers
}

// maxSpills bounds the free list of spilled answers.
const maxSpills = 64

// at returns the slot of req.
func (r *answerRing) at(req uint64) *slot {
	if req-r.head >= uint64(len(r.slots)) {
		panic(fmt.Sprintf("net/client: answer to request %d, but only %d..%d are open: answered twice, or never asked",
			req, r.head, r.head+uint64(len(r.slots))))
	}
	return &r.slots[req&uint64(len(r.slots)-1)]
}

// grow doubles the ring.
func (r *answerRing) grow() {
	next := make([]slot, max(minSlots, 2*len(r.slots)))
	for i := range r.slots {
		req := r.head + uint64(i)
		next[req&uint64(len(next)-1)] = r.slots[req&uint64(len(r.slots)-1)]
	}
	r.slots = next
}

// put stores the answer to req, which is not the head. frame is copied.
func (r *answerRing) put(req uint64, frame []byte) {
	s := r.at(req)
	s.open(req)
	if len(frame) <= inlineAnswer {
		s.n = uint8(copy(s.inline[:], frame))
		s.state = slotInline
		return
	}
	if n := len(r.spills); n > 0 {
		s.spill = r.spills[n-1]
		r.spills = r.spills[:n-1]
	}
	s.spill = append(s.spill[:0], frame...)
	s.state = slotSpilled
}

// putBusy stores the constant answer to a PUB that the connection has no room for.
func (r *answerRing) putBusy(req uint64) {
	s := r.at(req)
	s.open(req)
	s.state = slotBusy
}

func (s *slot) open(req uint64) {
	if s.state != slotWaiting {
		panic(fmt.Sprintf("net/client: request %d is answered twice", req))
	}
}

// pop passes the head's answer to out and reports whether there was one.
func (r *answerRing) pop(out *outQueue, busy []byte) bool {
	if len(r.slots) == 0 {
		return false
	}
	s := &r.slots[r.head&uint64(len(r.slots)-1)]
	switch s.state {
	case slotWaiting:
		return false
	case slotInline:
		out.copyIn(s.inline[:s.n])
	case slotSpilled:
		out.copyIn(s.spill)
		if len(r.spills) < maxSpills && cap(s.spill) <= 1024 {
			r.spills = append(r.spills, s.spill)
		}
		s.spill = nil
	case slotBusy:
		out.copyIn(busy)
	}
	s.state = slotWaiting
	r.head++
	return true
}
