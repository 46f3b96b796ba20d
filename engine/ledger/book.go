package ledger

import (
	"fmt"
	"slices"
	"time"
)

// Book holds the cursors of the partitions of one journal.
type Book struct {
	cursors map[Key]*Cursor
	list    []*Cursor // what is walked is walked in the order of the keys: see tidy
	gone    int       // of list, those that were removed
	mixed   bool      // list is out of order
	source  Source
	room    *Room
	live    bool // Restore has run: deadlines are monotonic times
	timers  timers
	dirty   []*queue // with events for the next record, in the order in which they became so
	spare   []*queue
	def     Options
}

// NewBook makes an empty book, to be filled by Load and Apply and brought to life by Restore. The books of one goroutine
// share room; nil gives the book room for DefaultMaxOpen messages of its own.
func NewBook(source Source, room *Room) *Book {
	if room == nil {
		room = NewRoom(DefaultMaxOpen)
	}
	return &Book{cursors: make(map[Key]*Cursor), source: source, room: room, def: DefaultOptions()}
}

// Cursor returns the cursor of k, nil if there is none.
func (b *Book) Cursor(k Key) *Cursor { return b.cursors[k] }

// Cursors returns all cursors in the order of their keys. The slice is the book's own: borrowed, until the next change.
func (b *Book) Cursors() []*Cursor {
	b.tidy()
	return b.list
}

// tidy puts the list of cursors in order. It is left to those who walk all of it anyway: cursors come in the order of their
// keys as a rule, and a group of many partitions goes as quickly as it has come.
func (b *Book) tidy() {
	if b.gone > 0 {
		b.list = slices.DeleteFunc(b.list, func(c *Cursor) bool { return c.gone })
		b.gone = 0
	}
	if b.mixed {
		slices.SortFunc(b.list, func(x, y *Cursor) int { return x.key.Compare(y.key) })
		b.mixed = false
	}
}

// Open makes the cursor of k, which must not exist, with the group starting after floor; its START is queued. opts is kept.
func (b *Book) Open(k Key, opts *Options, floor Sequence) *Cursor {
	c := b.insert(k)
	c.opts = opts
	c.start, c.next, c.last = floor, floor+1, floor
	c.Seek(floor)
	return c
}

// Configure gives a cursor its group's options, which are kept: before Restore to one that recovery has made, later where
// the group's settings have changed. Failures so far count towards another maximum of attempts from the next one on.
func (c *Cursor) Configure(opts *Options) {
	if c.opts = opts; c.book.live {
		c.book.timers.set(c, 0) // the next Tick finds out what it has to wait for now
	}
}

// Forget queues the end of a cursor: its group or topic is deleted. Nothing is delivered from it any more.
func (b *Book) Forget(c *Cursor) {
	c.moves++
	q := c.events()
	seek, floor := q.seek && !c.begun, q.floor // a FORGET needs a START before it
	q.reset()
	q.seek, q.floor, q.forget = seek, floor, true
}

func (b *Book) insert(k Key) *Cursor {
	if b.cursors[k] != nil {
		panic("ledger: a second cursor for " + k.String()) // a bug of the host: it asks Cursor first
	}
	c := &Cursor{key: k, book: b, opts: &b.def, next: 1, lease: never, wake: never}
	b.cursors[k] = c
	if n := len(b.list); n > 0 && b.list[n-1].key.Compare(k) >= 0 {
		b.mixed = true
	}
	b.list = append(b.list, c)
	return c
}

func (b *Book) remove(c *Cursor) {
	c.empty()
	c.gone = true
	b.timers.set(c, never)
	if c.queue != nil {
		c.queue.reset() // AppendRecord takes it from the list
	}
	delete(b.cursors, c.key)
	if b.gone++; b.gone > len(b.list)/2 {
		b.tidy()
	}
}

func (b *Book) takeQueue(c *Cursor) *queue {
	var q *queue
	if n := len(b.spare); n > 0 {
		q, b.spare = b.spare[n-1], b.spare[:n-1]
	} else {
		q = new(queue)
	}
	q.cursor = c
	b.dirty = append(b.dirty, q)
	return q
}

// Pending tells whether events are queued that no record has taken yet.
func (b *Book) Pending() bool { return len(b.dirty) > 0 }

// OnlyDelivers tells whether nothing but deliveries is queued, in fewer than limit runs: nobody waits for their record, so
// it may be put off until something else is queued.
func (b *Book) OnlyDelivers(limit int) bool {
	runs := 0
	for _, q := range b.dirty {
		if q.seek || q.forget || len(q.acks)+len(q.drops)+len(q.fails)+len(q.parks) > 0 {
			return false
		}
		if runs += len(q.delivers); runs >= limit {
			return false
		}
	}
	return true
}

// AppendRecord appends to dst one record with as many of the queued events as fit into MaxRecord bytes; it appends nothing
// if there are none. The host proposes it, and hands it to Apply when it has committed. Call it until Pending is false.
func (b *Book) AppendRecord(dst []byte, wallMs uint64) []byte {
	w := writer{buf: append(dst, recordVersion1), start: len(dst), limit: len(dst) + MaxRecord, wallMs: wallMs}
	taken := 0
	for _, q := range b.dirty {
		if !w.take(q) {
			break
		}
		taken++
		q.cursor.queue, q.cursor = nil, nil
		q.reset()
		b.spare = append(b.spare, q)
	}
	b.dirty = shift(b.dirty, taken)
	if len(w.buf) == len(dst)+1 {
		return dst
	}
	return w.buf
}

// Apply folds a committed record. While the book is being recovered, before Restore, now is ignored and there are no
// effects. An error means that the record can't be the ledger's; none of it was applied unless the error is about its
// place in the history (an ACK of what was never delivered, a cursor without a START).
func (b *Book) Apply(value []byte, now time.Duration, fx *Effects) error {
	var it Item
	d := NewDecoder(value)
	for d.Next(&it) {
	}
	if d.Err() != nil {
		return d.Err()
	}
	d = NewDecoder(value)
	for d.Next(&it) {
		if err := b.apply(&it, now, fx); err != nil {
			return fmt.Errorf("%w: %s item of %s: %w", ErrRecord, it.Kind, it.Key, err)
		}
	}
	if b.live {
		b.room.offer(fx)
	}
	return nil
}

func (b *Book) apply(it *Item, now time.Duration, fx *Effects) error {
	c := b.cursors[it.Key]
	if it.Kind == KindStart {
		if c == nil {
			c = b.insert(it.Key)
		}
		c.applyStart(it.Floor, fx)
		return nil
	}
	if c == nil {
		return errNoStart
	}
	switch it.Kind {
	case KindDeliver:
		for i := range it.Len {
			if err := c.applyDeliver(it.Run(i)); err != nil {
				return err
			}
		}
	case KindAck, KindDrop:
		for i := range it.Len {
			if err := c.applyDone(it, i); err != nil {
				return err
			}
		}
		c.win.trim()
		if it.Kind == KindDrop || c.opts.Ordered {
			fx.ready(c)
			c.rearmLive(now) // another message may be the first one
		}
		c.release(fx)
	case KindFail:
		for i := range it.Len {
			if err := c.applyFailure(it.Failure(i), now, fx); err != nil {
				return err
			}
		}
		if b.live {
			c.offerRetries(now, fx)
		}
	case KindExhausted:
		return c.applyExhausted(it.Seq, it.Letters, fx)
	case KindForget:
		b.remove(c)
		fx.Forgotten = append(fx.Forgotten, it.Key)
	case KindStart: // above
	}
	return nil
}

// Tick ends the leases that have run out and finds the retries that are due. It returns the time of the next deadline, or
// a negative one if there is none.
func (b *Book) Tick(now time.Duration, fx *Effects) time.Duration {
	for len(b.timers) > 0 && b.timers[0].wake <= now {
		c := b.timers[0]
		c.expire(now)
		c.offerRetries(now, fx)
	}
	// Those that were offered room before may have left it: nobody reads them at present, say.
	b.room.offer(fx)
	next := never
	if len(b.timers) > 0 {
		next = b.timers[0].wake
	}
	if b.room.wanted() {
		next = min(next, now+quantum)
	}
	if next == never {
		return -1
	}
	return next
}

// Restore ends recovery: deliveries that were in flight are available again, retries wait for what remains of their
// recorded delay, by the wall clock but at least 0 and at most the whole delay. Exhausted and parked messages are reported.
func (b *Book) Restore(now time.Duration, wallMs uint64, fx *Effects) {
	for _, c := range b.Cursors() {
		c.restore(now, wallMs, fx)
	}
	b.live = true
}
