package ledger

import (
	"errors"
	"time"
)

// What a record can get wrong about the history before it.
var (
	errNoStart   = errors.New("its START is missing")
	errGap       = errors.New("it skips messages that were never delivered or dropped")
	errUnknown   = errors.New("the message was never delivered")
	errTooMany   = errors.New("more open messages than the ledger allows")
	errNoFailure = errors.New("the message has no failed attempt")
)

func (c *Cursor) applyStart(floor Sequence, fx *Effects) {
	c.empty()
	c.skip = 0
	c.lease = never
	c.book.timers.set(c, never)
	c.start, c.next = floor, floor+1
	c.last = max(c.last, floor)
	c.total = Counts{}
	c.begun = true
	if c.book.live && c.moves > 0 {
		c.moves--
	}
	if c.Recorded() {
		fx.ready(c)
	}
}

// applyDeliver opens what is not known yet as delivered: nothing on the leader, which has taken it long since.
func (c *Cursor) applyDeliver(first Sequence, count uint32) error {
	last := first + Sequence(count) - 1
	if last < c.next {
		return nil
	}
	if first > c.next {
		return errGap
	}
	if uint64(c.win.live)+uint64(last-c.next) >= maxOpen {
		return errTooMany
	}
	for ; c.next <= last; c.next++ {
		c.push(entry{seq: c.next, state: waiting})
		if c.book.live {
			c.retry.push(retry{0, c.next})
		}
	}
	return nil
}

// applyDone ends the messages of a run of an ACK or DROP.
func (c *Cursor) applyDone(it *Item, i int) error {
	first, count := it.Run(i)
	last := first + Sequence(count) - 1
	if last >= c.next && (it.Kind == KindAck || first > c.next) {
		return errUnknown
	}
	var n Counts
	pos, _ := c.win.find(first)
	for ; pos != c.win.tail; pos++ {
		e := c.win.at(pos)
		if e.seq > last {
			break
		}
		if e.state == done {
			continue
		}
		switch {
		case it.Kind == KindAck:
			n.Acked++
		case e.state == parked || e.state == burying:
			n.Buried++
			n.Dropped++
		default:
			n.Dropped++
		}
		c.finish(pos)
	}
	if last >= c.next {
		n.Dropped += uint64(last - c.next + 1)
		c.next = last + 1
		c.last = max(c.last, last)
		if c.skip != 0 && c.next >= c.skip {
			c.skip = 0
		}
	}
	c.total.add(n)
	if c.book.live {
		c.run.add(n)
	}
	return nil
}

// applyFailure counts a failed attempt and lets the message wait for its retry.
func (c *Cursor) applyFailure(f Failure, now time.Duration, fx *Effects) error {
	if f.Sequence >= c.next {
		return errUnknown
	}
	pos, ok := c.win.open(f.Sequence)
	if !ok {
		return nil
	}
	e := c.win.at(pos)
	if f.Failures < e.failures || f.Failures == e.failures && e.state != failing {
		return nil // folded before: a snapshot may be ahead of the record
	}
	e.failures, e.reason, e.delayMs = f.Failures, f.Reason, f.DelayMs
	switch {
	case !c.book.live:
		c.set(pos, waiting)
		e.at = time.Duration(f.DueMs)
		return nil
	case e.state != failing:
		e.at = roundUp(now + time.Duration(f.DelayMs)*time.Millisecond)
	}
	if c.spent(e) {
		c.exhaust(pos, fx)
		return nil
	}
	c.await(pos)
	return nil
}

// exhaust reports a message that is out of attempts.
func (c *Cursor) exhaust(pos uint64, fx *Effects) {
	c.set(pos, exhausted)
	e := c.win.at(pos)
	fx.Exhausted = append(fx.Exhausted, Exhausted{c, e.seq, int(e.failures), e.reason})
}

func (c *Cursor) applyExhausted(seq, letters Sequence, fx *Effects) error {
	if seq >= c.next {
		return errUnknown
	}
	pos, ok := c.win.open(seq)
	if !ok {
		return nil
	}
	e := c.win.at(pos)
	if e.failures == 0 {
		return errNoFailure
	}
	c.set(pos, parked)
	e.delivery = DeliveryID(letters)
	if c.book.live {
		fx.Parked = append(fx.Parked, Parked{c, seq, letters, int(e.failures), e.reason})
	}
	return nil
}

func (c *Cursor) rearmLive(now time.Duration) {
	if c.book.live {
		c.rearm(now)
	}
}

// restore turns recorded wall-clock times into monotonic ones.
func (c *Cursor) restore(now time.Duration, wallMs uint64, fx *Effects) {
	c.retry = c.retry[:0]
	for p := c.win.head; p != c.win.tail; p++ {
		e := c.win.at(p)
		switch e.state {
		case waiting:
			remaining := min(max(int64(e.at)-int64(wallMs), 0), int64(e.delayMs))
			e.at = 0
			if remaining > 0 {
				e.at = roundUp(now + time.Duration(remaining)*time.Millisecond)
			}
			if e.failures > 0 && c.spent(e) {
				c.exhaust(p, fx)
				continue
			}
			c.retry.push(retry{e.at, e.seq})
		case parked:
			fx.Parked = append(fx.Parked, Parked{c, e.seq, Sequence(e.delivery), int(e.failures), e.reason})
		case done, leased, acking, failing, dropping, exhausted, parking, burying: // only a live book has them
		}
	}
	if e := c.nextRetry(); e != nil && e.at <= now {
		fx.ready(c)
	}
	c.rearm(now)
}
