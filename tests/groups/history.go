package groups

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/engine/deadletter"
	"github.com/mortarmq/mortarmq/protocol"
)

// maxViolations is how many broken promises are reported of a run.
const maxViolations = 20

// history is everything that was published, delivered, acknowledged and given up, of one group. Any goroutine may use it.
type history struct {
	mu         sync.Mutex
	messages   map[place]*fate
	owners     map[ownership]uint64 // the member that deliveries under an epoch went to
	refused    map[protocol.ErrorCode]int
	violations []error
}

// place names a message.
type place struct {
	partition uint16
	sequence  uint64
}

func (p place) String() string {
	return fmt.Sprintf("partition %d, sequence %d", p.partition, p.sequence)
}

// ownership is a partition under an epoch.
type ownership struct {
	partition uint16
	epoch     uint64
}

// fate is what has become of a message.
type fate struct {
	published  bool
	number     uint64
	cause      cause
	deliveries []delivered
	acking     bool   // an ACK may have been sent
	acked      uint64 // the delivery whose ACK was answered with OK, 0 if none was
	ackedBy    uint64 // the member that had sent it
	handled    int    // by handlers, to the end
	letters    []letter
}

// delivered is one delivery of a message.
type delivered struct {
	id      uint64
	attempt uint16
	member  uint64
}

// letter is a dead letter of a message.
type letter struct {
	sequence uint64 // of the letter itself
	attempts uint16
	reason   deadletter.Reason
}

func newHistory() *history {
	return &history{messages: map[place]*fate{}, owners: map[ownership]uint64{}, refused: map[protocol.ErrorCode]int{}}
}

func (h *history) violated(format string, args ...any) {
	if len(h.violations) < maxViolations {
		h.violations = append(h.violations, fmt.Errorf(format, args...))
	}
}

// err returns the promises that were found broken so far.
func (h *history) err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return errors.Join(h.violations...)
}

func (h *history) fate(p place) *fate {
	f := h.messages[p]
	if f == nil {
		f = new(fate)
		h.messages[p] = f
	}
	return f
}

// published takes the answer to a publish.
func (h *history) published(r *client.Result, n uint64, c cause) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := place{r.Partition, r.Sequence}
	f := h.fate(p)
	switch {
	case f.published:
		h.violated("%s: messages %d and %d were both stored there", p, f.number, n)
	case len(f.deliveries) > 0 && (f.number != n || f.cause != c):
		h.violated("%s: message %d was delivered, %d was stored there", p, f.number, n)
	}
	f.published, f.number, f.cause = true, n, c
}

// take takes an event of a process that is the given member now.
func (h *history) take(e *event, member uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := place{e.Partition, e.Sequence}
	switch e.Kind {
	case eventDelivered:
		h.delivered(p, e, member)
	case eventHandled:
		h.fate(p).handled++
	case eventAcking:
		h.fate(p).acking = true
	case eventAcked:
		f := h.fate(p)
		if f.acked != 0 {
			h.violated("%s: the ACKs of two deliveries, %x and %x, were answered with OK", p, f.acked, e.Delivery)
		}
		f.acked, f.ackedBy = e.Delivery, member
		h.checkAcked(p, f)
	case eventRefused:
		code := protocol.ErrorCode(e.Code)
		h.refused[code]++
		switch code {
		case protocol.CodeStaleOwner, protocol.CodeUnknownDelivery, protocol.CodeUnknownMember:
		default:
			h.violated("%s: an ACK was refused with %v", p, code)
		}
	case eventJoined, eventNacking:
	}
}

func (h *history) delivered(p place, e *event, member uint64) {
	f := h.fate(p)
	if (f.published || len(f.deliveries) > 0) && (f.number != e.Number || f.cause != e.Cause) {
		h.violated("%s: message %d was delivered where %d is stored", p, e.Number, f.number)
	}
	f.number, f.cause = e.Number, e.Cause
	f.deliveries = append(f.deliveries, delivered{e.Delivery, e.Attempt, member})
	h.checkAcked(p, f)
	o := ownership{e.Partition, e.Epoch}
	if m, ok := h.owners[o]; ok && m != member {
		h.violated("partition %d, ownership epoch %d: members %x and %x both got messages under it", e.Partition, e.Epoch, m, member)
	}
	h.owners[o] = member
}

// checkAcked checks that no delivery was made after the one whose ACK was answered. Processes report at times of their
// own, but the broker's delivery ids only grow: an ACK of a delivery that is not the message's last one is refused, so a
// delivery with a higher id than that of an accepted ACK was made after it.
func (h *history) checkAcked(p place, f *fate) {
	if f.acked == 0 {
		return
	}
	for _, d := range f.deliveries {
		if d.id > f.acked {
			h.violated("%s: it was delivered again, %x, attempt %d, after the ACK of delivery %x had been answered", p, d.id, d.attempt, f.acked)
		}
	}
}

// buried takes a dead letter.
func (h *history) buried(e *deadletter.Envelope, sequence uint64, value []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := place{e.Partition, e.Sequence}
	f := h.fate(p)
	if n, c, ok := parseValue(value[:min(len(value), valueLen)]); !ok || n != f.number || c != f.cause {
		h.violated("%s: its dead letter holds another message: %x", p, value)
	}
	f.letters = append(f.letters, letter{sequence, e.Attempts, e.Reason})
}

// totals are what a group's counters must say at the end.
type totals struct{ published, acknowledged, dropped uint64 }

// checkEnd checks what must hold when nothing is left to deliver. calm says that no member and no broker was ended by
// force: then nothing may have been delivered, or handled, more often than it failed.
func (h *history) checkEnd(maxAttempts uint16, calm bool) totals {
	h.mu.Lock()
	defer h.mu.Unlock()
	places := make([]place, 0, len(h.messages))
	for p := range h.messages {
		places = append(places, p)
	}
	slices.SortFunc(places, func(a, b place) int {
		return cmp.Or(cmp.Compare(a.partition, b.partition), cmp.Compare(a.sequence, b.sequence))
	})
	var t totals
	for _, p := range places {
		f := h.messages[p]
		if !f.published {
			h.violated("%s: message %d was never published", p, f.number)
			continue
		}
		t.published++
		if len(f.letters) > 0 {
			t.dropped++
		} else {
			t.acknowledged++
		}
		h.checkAttempts(p, f, maxAttempts)
		h.checkFate(p, f, maxAttempts)
		if calm {
			h.checkCalm(p, f, maxAttempts)
		}
	}
	return t
}

// checkOrder checks, of an ordered group, that no message was delivered again after a later one of its partition: a message
// comes when the one before is done, and not earlier.
func (h *history) checkOrder() {
	h.mu.Lock()
	defer h.mu.Unlock()
	type made struct{ id, sequence uint64 }
	parts := map[uint16][]made{}
	for p, f := range h.messages {
		for _, d := range f.deliveries {
			parts[p.partition] = append(parts[p.partition], made{d.id, p.sequence})
		}
	}
	for p, list := range parts {
		slices.SortFunc(list, func(a, b made) int { return cmp.Compare(a.id, b.id) })
		for i := 1; i < len(list); i++ {
			if list[i].sequence < list[i-1].sequence {
				h.violated("partition %d of an ordered group: message %d was delivered after %d", p, list[i].sequence, list[i-1].sequence)
			}
		}
	}
}

// checkAttempts checks that attempts count up in the order in which deliveries were made.
func (h *history) checkAttempts(p place, f *fate, most uint16) {
	slices.SortFunc(f.deliveries, func(a, b delivered) int { return cmp.Compare(a.id, b.id) })
	for i, d := range f.deliveries {
		switch {
		case d.attempt < 1 || d.attempt > most:
			h.violated("%s: it was delivered as attempt %d of at most %d", p, d.attempt, most)
		case i > 0 && d.attempt < f.deliveries[i-1].attempt:
			h.violated("%s: it was delivered as attempt %d after attempt %d", p, d.attempt, f.deliveries[i-1].attempt)
		case i > 0 && d.id == f.deliveries[i-1].id:
			h.violated("%s: two deliveries have the id %x", p, d.id)
		}
	}
}

// checkFate checks that a message was acknowledged or is in one dead letter, with good reason.
func (h *history) checkFate(p place, f *fate, most uint16) {
	switch {
	case len(f.letters) > 1:
		h.violated("%s: it is in %d dead letters", p, len(f.letters))
	case len(f.letters) == 1 && f.acked != 0:
		h.violated("%s: it was acknowledged and is in a dead letter", p)
	case len(f.letters) == 0 && f.cause != good:
		h.violated("%s: it always fails (%d deliveries) and is in no dead letter", p, len(f.deliveries))
	case len(f.letters) == 0 && !f.acking:
		h.violated("%s: it is lost: nobody has acknowledged it, and it is in no dead letter (%d deliveries)", p, len(f.deliveries))
	}
	for _, l := range f.letters {
		switch {
		case f.cause == rejected && l.reason == deadletter.ReasonRejected:
		case l.attempts != most:
			h.violated("%s: it was given up after %d failed attempts (%v), the maximum is %d", p, l.attempts, l.reason, most)
		case f.cause == good && (l.reason == deadletter.ReasonNack || l.reason == deadletter.ReasonRejected):
			h.violated("%s: nobody has refused it, and it was given up as %v", p, l.reason)
		}
	}
}

// checkCalm checks what holds where nothing was ended by force.
func (h *history) checkCalm(p place, f *fate, most uint16) {
	attempts := most
	if f.cause == good || f.cause == rejected {
		attempts = 1
	}
	if f.handled != int(attempts) {
		h.violated("%s: it was handled %d times instead of %d", p, f.handled, attempts)
	}
	if n := len(f.deliveries); n == 0 || f.deliveries[n-1].attempt != attempts {
		h.violated("%s: its last delivery was not attempt %d: %v", p, attempts, f.deliveries)
	}
}

// ackingUpTo notes a cumulative ACK: everything that was delivered to a member on the partition, up to p.
func (h *history) ackingUpTo(p place, member uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for at, f := range h.messages {
		if at.partition == p.partition && at.sequence <= p.sequence {
			f.acking = f.acking || f.wentTo(member)
		}
	}
}

func (f *fate) wentTo(member uint64) bool {
	for _, d := range f.deliveries {
		if d.member == member {
			return true
		}
	}
	return false
}

// checkHostile is checkEnd where members do as they like: a message may be given up for any reason.
func (h *history) checkHostile(most uint16) totals {
	h.mu.Lock()
	defer h.mu.Unlock()
	var t totals
	for p, f := range h.messages {
		switch {
		case !f.published && len(f.deliveries) == 0 && f.acked == 0:
			continue // somebody has made it up for an ACK
		case !f.published:
			h.violated("%s: message %d was never published", p, f.number)
			continue
		case len(f.letters) > 1:
			h.violated("%s: it is in %d dead letters", p, len(f.letters))
		case len(f.letters) == 1 && f.acked != 0:
			h.violated("%s: it was acknowledged and is in a dead letter", p)
		case len(f.letters) == 0 && !f.acking:
			h.violated("%s: it is lost: nobody has acknowledged it, and it is in no dead letter (%d deliveries)", p, len(f.deliveries))
		case len(f.letters) == 1 && f.letters[0].reason != deadletter.ReasonRejected && f.letters[0].attempts != most:
			h.violated("%s: it was given up after %d failed attempts, the maximum is %d", p, f.letters[0].attempts, most)
		}
		t.published++
		if len(f.letters) > 0 {
			t.dropped++
		} else {
			t.acknowledged++
		}
		h.checkAttempts(p, f, most)
		if f.acked != 0 && !slices.ContainsFunc(f.deliveries, func(d delivered) bool { return d.id == f.acked && d.member == f.ackedBy }) {
			h.violated("%s: the ACK of delivery %x by member %x was answered with OK, which was not made to it: %v", p, f.acked, f.ackedBy, f.deliveries)
		}
	}
	return t
}
