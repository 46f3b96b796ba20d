package ledger

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// Cursor is the state of one consumer group on one partition. It belongs to a Book.
type Cursor struct {
	key   Key
	book  *Book
	opts  *Options
	owner Owner

	win   window
	retry retryHeap // may hold retries that are superseded, see firstRetry
	start Sequence  // floor at which the group began
	next  Sequence  // the lowest that was never handed out
	last  Sequence  // the last committed one that the host told of
	skip  Sequence  // a queued or proposed DROP of the fresh ones below it; 0 = none

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
	gone  bool          // a FORGET is on record: the book does not have it any more
	held  bool          // a fresh message was not offered because as many are open as may be
	waits bool          // in Room.waiting
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
	s.Retrying = uint64(c.counts[waiting] + c.counts[failing] + c.counts[exhausted] + c.counts[parking] + c.counts[parked] + c.counts[dropping] + c.counts[burying])
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
	if e := c.nextRetry(); e != nil && e.at <= now {
		return e.seq, e.failures + 1, true
	}
	if c.next > c.last || c.skip != 0 || c.opts.Ordered && c.win.live > 0 {
		return 0, 0, false
	}
	if c.win.live < c.mayOpen() {
		return c.next, 1, true
	}
	c.held = true
	if c.win.live < c.opts.MaxOpen {
		c.book.room.wait(c)
	}
	return 0, 0, false
}

// release reports the cursor as ready if a fresh message was held back and need not be any more.
func (c *Cursor) release(fx *Effects) {
	switch {
	case !c.held || c.win.live >= c.opts.MaxOpen:
	case c.win.live < c.mayOpen():
		c.held = false
		fx.ready(c)
	default:
		c.book.room.wait(c)
	}
}

// mayOpen is how many messages of the cursor may be open now.
func (c *Cursor) mayOpen() int {
	if c.book.room.full() {
		return min(openShare, c.opts.MaxOpen)
	}
	return c.opts.MaxOpen
}

// nextRetry returns the entry that may be retried next, nil if none waits: in an ordered group the first open one only.
func (c *Cursor) nextRetry() *entry {
	if !c.opts.Ordered {
		return c.firstRetry()
	}
	if c.win.live > 0 {
		if e := c.win.at(c.win.head); e.state == waiting {
			return e
		}
	}
	return nil
}

// firstRetry returns the entry whose retry comes first, nil if none waits. Retries whose messages do not wait any more are
// dropped on the way.
func (c *Cursor) firstRetry() *entry {
	for len(c.retry) > 0 {
		if e := c.win.get(c.retry[0].seq); e != nil && e.state == waiting && e.at == c.retry[0].at {
			return e
		}
		c.retry.pop()
	}
	return nil
}

// await lets e wait for its next attempt, which is due at e.at.
func (c *Cursor) await(pos uint64) {
	c.set(pos, waiting)
	e := c.win.at(pos)
	if c.retry.push(retry{e.at, e.seq}); len(c.retry) >= 2*int(c.counts[waiting])+markPlaces {
		c.sweepRetries()
	}
}

// sweepRetries drops the retries whose messages do not wait any more, and repeated ones.
func (c *Cursor) sweepRetries() {
	slices.SortFunc(c.retry, func(a, b retry) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.seq, b.seq)) })
	c.retry = slices.DeleteFunc(slices.Compact(c.retry), func(r retry) bool {
		e := c.win.get(r.seq)
		return e == nil || e.state != waiting || e.at != r.at
	})
}

// Take delivers seq, which Peek has just returned: the message is under a lease from now on, and its DELIVER is queued.
func (c *Cursor) Take(seq Sequence, delivery DeliveryID, now time.Duration) {
	until := roundUp(now + c.opts.Lease)
	if seq == c.next {
		c.next++
		c.push(entry{seq: seq, delivery: delivery, at: until, state: leased})
		c.win.lease(c.win.tail - 1)
	} else {
		pos, ok := c.win.open(seq)
		if !ok || c.win.at(pos).state != waiting {
			panic("ledger: Take of a message that Peek did not return") // a bug of the host, whatever clients send
		}
		if len(c.retry) > 0 && c.retry[0].seq == seq {
			c.retry.pop()
		}
		e := c.win.at(pos)
		if e.failures > 0 {
			c.retried++
		}
		e.delivery, e.at = delivery, until
		c.set(pos, leased)
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
	pos, ok := c.leasedAt(seq, delivery)
	if !ok {
		return UnknownDelivery
	}
	if progress {
		e := c.win.at(pos)
		e.at = max(e.at, roundUp(now+c.opts.Lease)) // the group's lease may have become shorter
		return Renewed
	}
	c.set(pos, acking)
	c.events().ack(seq)
	return Settling
}

// leasedAt returns the position of seq if that delivery of it is under a lease.
func (c *Cursor) leasedAt(seq Sequence, delivery DeliveryID) (pos uint64, ok bool) {
	if pos, ok = c.win.find(seq); ok {
		e := c.win.at(pos)
		ok = e.state == leased && e.delivery == delivery
	}
	return pos, ok
}

func (c *Cursor) ackUpTo(seq Sequence, delivery DeliveryID, progress bool, now time.Duration) Verdict {
	end, ok := c.win.find(seq)
	if ok {
		end++
	}
	l := c.win.leases(end, delivery, never)
	pos, ok := l.next()
	if !ok {
		return UnknownDelivery
	}
	if progress {
		// Those that were renewed within the same quantum already are passed over.
		until := roundUp(now + c.opts.Lease)
		l = c.win.leases(end, delivery, until-1)
		for pos, ok = l.next(); ok; pos, ok = l.next() {
			c.win.at(pos).at = until
		}
		return Renewed
	}
	for ; ok; pos, ok = l.next() {
		c.set(pos, acking)
		c.events().ack(c.win.at(pos).seq)
	}
	return Settling
}

// Nack takes a refusal: for good with rejected, else for a retry, at once with soon or after the backoff.
func (c *Cursor) Nack(seq Sequence, delivery DeliveryID, epoch uint64, rejected, soon bool, now time.Duration) Verdict {
	if v := c.fence(epoch); v != Settling {
		return v
	}
	pos, ok := c.leasedAt(seq, delivery)
	if !ok {
		return UnknownDelivery
	}
	switch {
	case rejected:
		c.fail(pos, ReasonRejected, 0, now)
	case soon:
		c.fail(pos, ReasonNack, 0, now)
	default:
		c.fail(pos, ReasonNack, c.backoff(pos), now)
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
	l := c.win.allLeases()
	for pos, ok := l.next(); ok; pos, ok = l.next() {
		c.fail(pos, ReasonConnection, c.backoff(pos), now)
	}
}

// Return ends every lease without using up an attempt: the member left or gave the partition back.
func (c *Cursor) Return() {
	if c.counts[leased] == 0 {
		return
	}
	l := c.win.allLeases()
	for pos, ok := l.next(); ok; pos, ok = l.next() {
		e := c.win.at(pos)
		e.at, e.delivery = 0, 0
		c.await(pos)
	}
}

// Park queues the EXHAUSTED of an exhausted message, with the last sequence of the dead-letter topic before its letter is
// written there. The effect Parked follows when it is on record. It reports whether the message was exhausted.
func (c *Cursor) Park(seq, letters Sequence) bool {
	pos, ok := c.openAt(seq, exhausted)
	if !ok {
		return false
	}
	c.set(pos, parking)
	c.win.at(pos).delivery = DeliveryID(letters)
	c.events().parks = append(c.events().parks, park{seq, letters})
	return true
}

// Drop queues the DROP of an exhausted or parked message: it is done without having been acknowledged. It reports whether
// the message was one.
func (c *Cursor) Drop(seq Sequence) bool {
	if pos, ok := c.openAt(seq, exhausted); ok {
		c.set(pos, dropping)
	} else if pos, ok = c.openAt(seq, parked); ok {
		c.set(pos, burying)
	} else {
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
	_, ok := c.openAt(seq, parked)
	return ok
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
	pos, ok := c.openAt(seq, waiting)
	if !ok {
		return false
	}
	c.set(pos, dropping)
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

// openAt returns the position of the entry of seq if it is in state s, and not while the cursor is being moved.
func (c *Cursor) openAt(seq Sequence, s state) (pos uint64, ok bool) {
	if c.Recorded() {
		pos, ok = c.win.find(seq)
	}
	return pos, ok && c.win.at(pos).state == s
}

// backoff returns the delay after the failure that the entry at pos is about to have.
func (c *Cursor) backoff(pos uint64) time.Duration {
	return c.opts.delay(int(c.win.at(pos).failures)+1, c.book.source)
}

// fail queues a failed attempt. The retry waits until it is on record.
func (c *Cursor) fail(pos uint64, reason Reason, delay, now time.Duration) {
	c.set(pos, failing)
	e := c.win.at(pos)
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

// push opens a message, which is the highest one.
func (c *Cursor) push(e entry) {
	c.win.push(e)
	c.counts[e.state]++
	c.book.room.open++
}

// set moves the entry at pos to another state. Its delivery and deadline are set before it becomes leased.
func (c *Cursor) set(pos uint64, s state) {
	c.leave(pos)
	c.win.at(pos).state = s
	c.counts[s]++
	if s == leased {
		c.win.lease(pos)
	}
}

func (c *Cursor) leave(pos uint64) {
	e := c.win.at(pos)
	c.counts[e.state]--
	if e.state == leased {
		c.win.unlease(pos)
	}
}

// finish makes the entry at pos a hole.
func (c *Cursor) finish(pos uint64) {
	c.leave(pos)
	c.win.finish(pos)
	c.book.room.open--
}

// empty closes all messages.
func (c *Cursor) empty() {
	c.book.room.open -= c.win.live
	c.win.reset()
	c.retry = c.retry[:0]
	c.counts = [burying + 1]int32{}
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
		l := c.win.leases(c.win.tail, math.MaxUint64, now)
		for pos, ok := l.next(); ok; pos, ok = l.next() {
			c.fail(pos, ReasonExpired, c.backoff(pos), now)
		}
		c.lease = c.win.earliest()
	}
	c.win.shrink()
}

// offerRetries reports the cursor as ready if a retry is due, and sets the timer. The retry may have become due since the
// last Tick, which would not look for it any more once the timer is set to something later.
func (c *Cursor) offerRetries(now time.Duration, fx *Effects) {
	if e := c.nextRetry(); e != nil && e.at <= now {
		fx.ready(c)
	}
	c.rearm(now)
}

// rearm sets the timer to the next lease deadline or retry that is still to come.
func (c *Cursor) rearm(now time.Duration) {
	wake := c.lease
	if e := c.nextRetry(); e != nil && e.at > now {
		wake = min(wake, e.at)
	}
	c.book.timers.set(c, wake)
}

func (c *Cursor) events() *queue {
	if c.queue == nil {
		c.queue = c.book.takeQueue(c)
	}
	return c.queue
}
