package ledger

import "time"

// Cursor is the state of one consumer group on one partition. It belongs to a Book.
type Cursor struct {
	key   Key
	book  *Book
	opts  *Options
	owner Owner

	win   window
	retry retryHeap
	start Sequence // floor at which the group began
	next  Sequence // the lowest that was never handed out
	last  Sequence // the last committed one that the host told of
	skip  Sequence // a queued or proposed DROP of the fresh ones below it; 0 = none

	counts    [burying + 1]int32 // open entries by state
	total     Counts             // on record, since start
	run       Counts             // of them, those that this process has put there
	delivered uint64             // deliveries made by this process
	retried   uint64             // of them, second and later attempts

	queue *queue        // events for the next record, nil if none
	lease time.Duration // no lease ends before it; never if there is none
	wake  time.Duration // when Tick has to look at the cursor
	timer int           // its place in the book's timers + 1, 0 = not there
	begun bool          // a START is on record
	moves int           // STARTs and FORGETs that are queued or proposed
}

// Counts are numbers of messages that are done.
type Counts struct {
	Acked   uint64
	Dropped uint64 // done without having been acknowledged
	Buried  uint64 // of Dropped, those whose EXHAUSTED was on record: they have a dead letter
}

func (n *Counts) add(m Counts) {
	n.Acked += m.Acked
	n.Dropped += m.Dropped
	n.Buried += m.Buried
}

// Stats are a cursor's numbers. Acked + Dropped + Unsettled = Last - Start at any moment, whatever happened in between:
// both sides are on record. A move of the cursor (Seek) starts anew.
type Stats struct {
	Start, Floor, Last Sequence
	Counts                    // since Start
	Run                Counts // since this process has begun; it only grows
	Depth              uint64 // Last - Floor
	Unsettled          uint64 // Depth less what is done above the floor
	InFlight           uint64 // delivered and not on record as acknowledged, failed or dropped
	Retrying           uint64 // failed at least once, waiting for the next attempt or out of attempts
	Delivered, Retried uint64 // deliveries of this process and, of them, second and later attempts
}

// Key returns the cursor's name.
func (c *Cursor) Key() Key { return c.key }

// Owner returns the member that is served, the zero Owner if none.
func (c *Cursor) Owner() Owner { return c.owner }

// Floor is the highest sequence up to which every message is acknowledged or dropped, on record.
func (c *Cursor) Floor() Sequence {
	if c.win.live > 0 {
		return c.win.at(c.win.head).seq - 1
	}
	return c.next - 1
}

// Next is the lowest sequence that was never handed out.
func (c *Cursor) Next() Sequence { return c.next }

// Last is the last committed sequence that the host told of.
func (c *Cursor) Last() Sequence { return c.last }

// Recorded tells whether the cursor's START is on record and no move or end is under way; otherwise nothing is delivered,
// and every event about a delivery is without effect.
func (c *Cursor) Recorded() bool { return c.begun && c.moves == 0 }

// InFlight is the number of deliveries under a lease or with their ACK not yet on record.
func (c *Cursor) InFlight() int { return int(c.counts[leased] + c.counts[acking]) }

// Stats returns the cursor's numbers.
func (c *Cursor) Stats() Stats {
	s := Stats{
		Start: c.start, Floor: c.Floor(), Last: max(c.last, c.next-1),
		Counts: c.total, Run: c.run,
		InFlight: uint64(c.InFlight()), Delivered: c.delivered, Retried: c.retried,
	}
	s.Depth = uint64(s.Last - s.Floor)
	s.Unsettled = uint64(s.Last-c.next+1) + uint64(c.win.live)
	s.Retrying = uint64(len(c.retry)) + uint64(c.counts[failing]+c.counts[exhausted]+c.counts[parking]+c.counts[parked]+c.counts[dropping]+c.counts[burying])
	return s
}

// Committed tells that the partition's messages up to last are committed, and reports whether that gave the cursor
// something to deliver that it had not before.
func (c *Cursor) Committed(last Sequence) bool {
	if last <= c.last {
		return false
	}
	idle := c.next > c.last
	c.last = last
	return idle && c.next <= last
}

// Own makes o the partition's owner. What an earlier owner still had in flight is available at once.
func (c *Cursor) Own(o Owner) {
	if c.owner != o {
		c.Return()
		c.owner = o
	}
}

// Disown leaves the partition without an owner if epoch is the present one's. The host calls Return or Lost before.
func (c *Cursor) Disown(epoch uint64) {
	if c.owner.Epoch == epoch {
		c.owner = Owner{}
	}
}

// Peek returns the message to deliver next and its attempt: a retry that is due, else the first fresh one. It reports
// false if there is none, or nobody to give it to.
func (c *Cursor) Peek(now time.Duration) (seq Sequence, attempt uint16, ok bool) {
	if !c.Recorded() || c.owner == (Owner{}) {
		return 0, 0, false
	}
	if c.opts.Ordered && c.win.live > 0 {
		if e := c.win.at(c.win.head); e.state == waiting && e.at <= now {
			return e.seq, e.failures + 1, true
		}
		return 0, 0, false
	}
	if len(c.retry) > 0 && c.retry[0].at <= now {
		seq = c.retry[0].seq
		return seq, c.win.get(seq).failures + 1, true
	}
	if c.next <= c.last && c.skip == 0 && c.win.live < c.opts.MaxOpen {
		return c.next, 1, true
	}
	return 0, 0, false
}

// Take delivers seq, which Peek has just returned: the message is under a lease from now on, and its DELIVER is queued.
func (c *Cursor) Take(seq Sequence, delivery DeliveryID, now time.Duration) {
	until := roundUp(now + c.opts.Lease)
	if seq == c.next {
		c.next++
		c.win.push(entry{seq: seq, delivery: delivery, at: until, state: leased})
		c.counts[leased]++
	} else {
		e := c.win.get(seq)
		if e == nil || e.state != waiting {
			panic("ledger: Take of a message that Peek did not return") // a bug of the host, whatever clients send
		}
		if e.failures > 0 {
			c.retried++
		}
		c.set(e, leased)
		e.delivery, e.at = delivery, until
		c.rearm(now)
	}
	c.delivered++
	if until < c.lease {
		c.lease = until
		if until < c.wake {
			c.book.timers.set(c, until)
		}
	}
	c.events().deliver(seq, delivery, c.owner)
}

// Ack takes an acknowledgement. With progress it renews the lease instead; with cumulative it means every delivery to the
// present owner up to seq, of those made no later than delivery.
func (c *Cursor) Ack(seq Sequence, delivery DeliveryID, epoch uint64, progress, cumulative bool, now time.Duration) Verdict {
	if v := c.fence(epoch); v != Settling {
		return v
	}
	if cumulative {
		return c.ackUpTo(seq, delivery, progress, now)
	}
	e := c.win.get(seq)
	if e == nil || e.state != leased || e.delivery != delivery {
		return UnknownDelivery
	}
	if progress {
		e.at = roundUp(now + c.opts.Lease)
		return Renewed
	}
	c.set(e, acking)
	c.events().ack(seq)
	return Settling
}

func (c *Cursor) ackUpTo(seq Sequence, delivery DeliveryID, progress bool, now time.Duration) Verdict {
	verdict := UnknownDelivery
	for p := c.win.head; p != c.win.tail; p++ {
		e := c.win.at(p)
		if e.seq > seq {
			break
		}
		if e.state != leased || e.delivery > delivery {
			continue
		}
		if progress {
			e.at = roundUp(now + c.opts.Lease)
			verdict = Renewed
			continue
		}
		c.set(e, acking)
		c.events().ack(e.seq)
		verdict = Settling
	}
	return verdict
}

// Nack takes a refusal: for good with rejected, else for a retry, at once with soon or after the backoff.
func (c *Cursor) Nack(seq Sequence, delivery DeliveryID, epoch uint64, rejected, soon bool, now time.Duration) Verdict {
	if v := c.fence(epoch); v != Settling {
		return v
	}
	e := c.win.get(seq)
	if e == nil || e.state != leased || e.delivery != delivery {
		return UnknownDelivery
	}
	switch {
	case rejected:
		c.fail(e, ReasonRejected, 0, now)
	case soon:
		c.fail(e, ReasonNack, 0, now)
	default:
		c.fail(e, ReasonNack, c.backoff(e), now)
	}
	return Settling
}

func (c *Cursor) fence(epoch uint64) Verdict {
	switch {
	case !c.Recorded():
		return UnknownDelivery
	case c.owner == (Owner{}) || c.owner.Epoch != epoch:
		return StaleOwner
	default:
		return Settling
	}
}

// Lost ends every lease as a failed attempt: the connection was lost with the messages in flight.
func (c *Cursor) Lost(now time.Duration) {
	if c.counts[leased] == 0 || !c.Recorded() {
		return
	}
	for p := c.win.head; p != c.win.tail; p++ {
		if e := c.win.at(p); e.state == leased {
			c.fail(e, ReasonConnection, c.backoff(e), now)
		}
	}
}

// Return ends every lease without using up an attempt: the member left or gave the partition back.
func (c *Cursor) Return() {
	if c.counts[leased] == 0 {
		return
	}
	for p := c.win.head; p != c.win.tail; p++ {
		if e := c.win.at(p); e.state == leased {
			c.set(e, waiting)
			e.at, e.delivery = 0, 0
			c.retry.push(retry{0, e.seq})
		}
	}
}

// Park queues the EXHAUSTED of an exhausted message, with the last sequence of the dead-letter topic before its letter is
// written there. The effect Parked follows when it is on record. It reports whether the message was exhausted.
func (c *Cursor) Park(seq, letters Sequence) bool {
	e := c.openEntry(seq)
	if e == nil || e.state != exhausted {
		return false
	}
	c.set(e, parking)
	e.delivery = DeliveryID(letters)
	c.events().parks = append(c.events().parks, park{seq, letters})
	return true
}

// Drop queues the DROP of an exhausted or parked message: it is done without having been acknowledged. It reports whether
// the message was one.
func (c *Cursor) Drop(seq Sequence) bool {
	e := c.openEntry(seq)
	switch {
	case e != nil && e.state == exhausted:
		c.set(e, dropping)
	case e != nil && e.state == parked:
		c.set(e, burying)
	default:
		return false
	}
	c.events().drop(seq, 1)
	return true
}

// Ended tells whether seq, which was handed out, will not be delivered again by itself: it is done or out of attempts.
func (c *Cursor) Ended(seq Sequence) bool {
	e := c.win.get(seq)
	if e == nil {
		return true
	}
	switch e.state {
	case done, dropping, exhausted, parking, parked, burying:
		return true
	case leased, acking, failing, waiting:
		return false
	default:
		return false
	}
}

// Parked tells whether the EXHAUSTED of seq is on record and its DROP is not queued.
func (c *Cursor) Parked(seq Sequence) bool {
	e := c.openEntry(seq)
	return e != nil && e.state == parked
}

// Skip queues the DROP of all messages below first that were never delivered, because they are not stored any more.
// Nothing fresh is delivered until it is on record.
func (c *Cursor) Skip(first Sequence) {
	if first <= c.next || c.skip != 0 || !c.Recorded() {
		return
	}
	c.skip = first
	for from := c.next; from < first; {
		n := min(uint64(first-from), 1<<32-1)
		c.events().drop(from, uint32(n))
		from += Sequence(n)
	}
}

// Discard drops an open message that is not stored any more (lost to retention) while it waits for a retry.
func (c *Cursor) Discard(seq Sequence) bool {
	e := c.openEntry(seq)
	if e == nil || e.state != waiting {
		return false
	}
	c.set(e, dropping)
	c.events().drop(seq, 1)
	return true
}

// Seek queues a move of the group to floor: nothing is delivered until it is on record, everything in flight is forgotten.
func (c *Cursor) Seek(floor Sequence) {
	q := c.events()
	if !q.seek {
		c.moves++
	}
	q.reset()
	q.seek, q.floor = true, floor
}

// openEntry returns the open entry of seq, or nil; nil as well while the cursor is being moved.
func (c *Cursor) openEntry(seq Sequence) *entry {
	if !c.Recorded() {
		return nil
	}
	return c.win.get(seq)
}

// backoff returns the delay after the failure that e is about to have.
func (c *Cursor) backoff(e *entry) time.Duration {
	return c.opts.delay(int(e.failures)+1, c.book.source)
}

// fail queues a failed attempt. The retry waits until it is on record.
func (c *Cursor) fail(e *entry, reason Reason, delay, now time.Duration) {
	c.set(e, failing)
	e.at = roundUp(now + delay)
	if delay == 0 {
		e.at = 0
	}
	e.delivery = 0
	e.delayMs = uint32(delay.Milliseconds())
	c.events().fails = append(c.events().fails, failure{
		seq: e.seq, failures: min(e.failures+1, maxFailures), reason: reason, delayMs: e.delayMs,
	})
}

// set moves e to another state. A message that leaves waiting leaves the retry heap; entering it is the caller's business,
// who knows when the retry is due.
func (c *Cursor) set(e *entry, s state) {
	c.leave(e)
	e.state = s
	c.counts[s]++
}

func (c *Cursor) leave(e *entry) {
	c.counts[e.state]--
	if e.state == waiting && c.book.live {
		c.retry.remove(e.seq)
	}
}

// finish makes e a hole.
func (c *Cursor) finish(e *entry) {
	c.leave(e)
	c.win.finish(e)
}

// spent tells whether e will not be delivered again by itself.
func (c *Cursor) spent(e *entry) bool {
	return e.reason == ReasonRejected || c.opts.MaxAttempts > 0 && int(e.failures) >= c.opts.MaxAttempts
}

// expire fails what the leases have run out for.
func (c *Cursor) expire(now time.Duration) {
	if now < c.lease {
		return
	}
	c.lease = never
	if c.counts[leased] > 0 && c.Recorded() {
		for p := c.win.head; p != c.win.tail; p++ {
			e := c.win.at(p)
			if e.state != leased {
				continue
			}
			if e.at <= now {
				c.fail(e, ReasonExpired, c.backoff(e), now)
			} else {
				c.lease = min(c.lease, e.at)
			}
		}
	}
	c.win.shrink()
}

// rearm sets the timer to the next lease deadline or retry that is still to come.
func (c *Cursor) rearm(now time.Duration) {
	wake := c.lease
	if len(c.retry) > 0 && c.retry[0].at > now {
		wake = min(wake, c.retry[0].at)
	}
	c.book.timers.set(c, wake)
}

func (c *Cursor) events() *queue {
	if c.queue == nil {
		c.queue = c.book.takeQueue(c)
	}
	return c.queue
}
