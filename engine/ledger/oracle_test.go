package ledger

import (
	"maps"
	"math/rand/v2"
	"slices"
	"time"
)

// status is what has become of a message, as the oracle sees it.
type status uint8

const (
	sLeased status = iota
	sAcking
	sFailing
	sWaiting
	sExhausted
	sParking
	sParked
	sDropping // an exhausted one, or one that is not stored any more
	sBurying
	sAcked
	sDropped
	sBuried // dropped, and in a dead letter
	statuses
)

// over tells whether that is the end.
func (s status) over() bool { return s >= sAcked }

var statusNames = [...]string{"leased", "acking", "failing", "waiting", "exhausted", "parking", "parked", "dropping", "burying", "acknowledged", "dropped", "buried"}

func (s status) String() string { return statusNames[s] }

// oracle is a cursor as one would write it without a thought for speed: a map of what became of every message.
type oracle struct {
	opts  *Options
	start Sequence
	last  Sequence
	next  Sequence
	msgs  map[Sequence]*oracleMsg
	done  Sequence // everything up to it is over: where floor goes on
	count [statuses]int
	owner Owner
	// moving: a move is queued or proposed, to the places in moves.
	moves []Sequence
	// skipTo: the fresh messages below are being dropped.
	skipTo Sequence
}

type oracleMsg struct {
	status   status
	id, old  DeliveryID // of the last delivery and the one before
	failures int        // on record
	reason   Reason     // of the last one
	attempt  uint16     // of the last delivery
	until    time.Duration
	notBefo  time.Duration // waiting: no earlier than
	notAfter time.Duration // waiting: due by then
	letters  Sequence
}

func newOracle(opts *Options) *oracle {
	return &oracle{opts: opts, next: 1, msgs: map[Sequence]*oracleMsg{}}
}

func (o *oracle) to(m *oracleMsg, s status) {
	o.count[m.status]--
	m.status = s
	o.count[s]++
}

// add takes a message in that was fresh.
func (o *oracle) add(seq Sequence, s status) *oracleMsg {
	m := &oracleMsg{status: s}
	o.msgs[seq] = m
	o.count[s]++
	o.next = max(o.next, seq+1)
	return m
}

func (o *oracle) floor() Sequence {
	for o.done+1 < o.next && o.msgs[o.done+1].status.over() {
		o.done++
	}
	return o.done
}

// open is the number of messages that were handed out and are not over.
func (o *oracle) open() (n int) {
	for s := status(0); !s.over(); s++ {
		n += o.count[s]
	}
	return n
}

// sorted returns the sequences of the messages that ok holds for.
func (o *oracle) sorted(ok func(*oracleMsg) bool) []Sequence {
	var all []Sequence
	for seq, m := range o.msgs {
		if ok(m) {
			all = append(all, seq)
		}
	}
	slices.Sort(all)
	return all
}

// pick returns a random message in a state, nil if there is none.
func (o *oracle) pick(rnd *rand.Rand, s status) (Sequence, *oracleMsg) {
	if o.count[s] == 0 {
		return 0, nil
	}
	all := o.sorted(func(m *oracleMsg) bool { return m.status == s })
	seq := all[rnd.IntN(len(all))]
	return seq, o.msgs[seq]
}

// endLeases is what happens to what is in flight.
func (o *oracle) endLeases(to status, now time.Duration) {
	for _, m := range o.msgs {
		if m.status == sLeased {
			o.to(m, to)
			m.notBefo, m.notAfter = 0, now
		}
	}
}

// apply folds an item on record.
func (o *oracle) apply(it *Item, now time.Duration) {
	switch it.Kind {
	case KindStart:
		*o = oracle{opts: o.opts, start: it.Floor, done: it.Floor, next: it.Floor + 1, last: max(o.last, it.Floor),
			msgs: map[Sequence]*oracleMsg{}, owner: o.owner, moves: o.moves}
		if len(o.moves) > 0 {
			o.moves = o.moves[1:]
		}
	case KindAck, KindDrop:
		for i := range it.Len {
			first, n := it.Run(i)
			for s := first; s < first+Sequence(n); s++ {
				o.end(s, it.Kind)
			}
		}
		if o.skipTo <= o.next {
			o.skipTo = 0
		}
	case KindFail:
		for i := range it.Len {
			o.fail(it.Failure(i), now)
		}
	case KindExhausted:
		m := o.msgs[it.Seq]
		o.to(m, sParked)
		m.letters = it.Letters
	case KindDeliver, KindForget:
	}
}

func (o *oracle) end(seq Sequence, kind Kind) {
	m := o.msgs[seq]
	if m == nil {
		m = o.add(seq, sDropping)
	}
	switch {
	case kind == KindAck:
		o.to(m, sAcked)
	case m.status == sBurying || m.status == sParked:
		o.to(m, sBuried)
	default:
		o.to(m, sDropped)
	}
}

func (o *oracle) fail(f Failure, now time.Duration) {
	m := o.msgs[f.Sequence]
	m.failures++
	m.reason = f.Reason
	m.notBefo, m.notAfter = now, now+o.opts.MaxDelay+2*quantum
	if f.DelayMs > 0 {
		m.notBefo = 0 // its delay began at the failure, before the record
	}
	if o.spent(m) {
		o.to(m, sExhausted)
		return
	}
	o.to(m, sWaiting)
}

func (o *oracle) spent(m *oracleMsg) bool {
	return m.failures > 0 && (m.reason == ReasonRejected || o.opts.MaxAttempts > 0 && m.failures >= o.opts.MaxAttempts)
}

// crash is what a restart makes of everything that is not on record: next is where the new cursor stands.
func (o *oracle) crash(next Sequence, now time.Duration) {
	o.moves, o.skipTo, o.owner = nil, 0, Owner{}
	for _, seq := range slices.Sorted(maps.Keys(o.msgs)) {
		m := o.msgs[seq]
		if seq >= next { // was delivered, but not on record as that: it is fresh again
			o.count[m.status]--
			delete(o.msgs, seq)
			continue
		}
		switch {
		case m.status.over():
		case m.status == sParked || m.status == sBurying:
			o.to(m, sParked)
		case o.spent(m):
			o.to(m, sExhausted)
		default:
			o.to(m, sWaiting)
			m.notBefo, m.notAfter = 0, now+o.opts.MaxDelay+2*quantum
		}
	}
	o.next = next
}
