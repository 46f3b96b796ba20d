package coord

import (
	"log/slog"
	"slices"
	"time"

	"github.com/mortarmq/mortarmq/engine/ledger"
	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// delivery brings messages to consumers and keeps the ledger. It belongs to the coordinator's goroutine.
//
// Events only change state and put consumers into turn; messages are sent, and ledger records proposed, in tick, which
// the coordinator calls at the end of every turn of its loop. So everything that arrived together is answered together,
// with one record per journal and one flush per connection.
type delivery struct {
	c    *Coordinator
	deps deliveryDeps
	log  *slog.Logger

	ledgers []*ledgerLog // by journal
	groups  map[uint16]*groupDelivery

	parts      partitionTable
	tails      []tail // by journal
	tailBytes  int64
	tailBudget int64

	reads      map[uint64]*coldRead
	readTag    uint64
	spareReads []*coldRead
	stalled    agenda[*reader]
	coldBytes  int64

	turn       deque[*consumer] // those that may be sent something
	waiting    pullHeap
	sparePulls []*pull
	deliveries uint64 // counts delivery ids

	out     *sendBuffer
	head    []byte
	msg     protocol.Msg
	rec     wal.Record
	ack     protocol.Ack
	nack    protocol.Nack
	pullMsg protocol.Pull
	creditM protocol.Credit
	frame   []byte

	office letterOffice
	resets []*reset // whose moves are not on record
	// resetting counts all that are under way.
	resetting int
	latency   latency
}

var _ deliverer = (*delivery)(nil)

// deliveryDeps is what delivery asks of the coordinator that owns it.
type deliveryDeps struct {
	// meta is the folded metadata, epoch the leader epoch; both are asked when needed.
	meta  func() *metadata.State
	epoch func() wal.Epoch
	// readDone is where the store reports a finished read, on any goroutine.
	readDone func(*wal.ReadRequest)
	// ensureTopic creates one of the broker's own topics unless it exists; done is called once, possibly at once.
	ensureTopic func(name string, partitions uint16, done func(topic uint16, err error))
	// tailBytes is the memory in bytes for rounds that are written out already.
	tailBytes int64
}

// newDelivery makes the delivery of a coordinator whose options, log and placement are set.
func newDelivery(c *Coordinator, deps deliveryDeps) *delivery {
	d := &delivery{
		c: c, deps: deps, log: c.logger,
		groups: make(map[uint16]*groupDelivery), reads: make(map[uint64]*coldRead),
		tails: make([]tail, c.journals), tailBudget: deps.tailBytes, office: newLetterOffice(),
	}
	room := ledger.NewRoom(c.opts.MaxOpen)
	for j := range c.journals {
		d.ledgers = append(d.ledgers, newLedgerLog(j, c.opts.Seed, room))
	}
	d.latency.init()
	return d
}

// bounds implements deliverer.
func (d *delivery) bounds(topic, id uint16, first, last wal.Sequence) {
	// The registry is not there yet; recovered drops the partitions whose topics are gone.
	d.parts.add(&partition{topic: topic, id: id, journal: d.c.placement(topic, id), first: first, last: last})
}

// recovered implements deliverer.
func (d *delivery) recovered() error {
	d.c.readClocks()
	if d.c.quarantined != "" {
		return nil // nobody knows which groups there are: the cursors stay as they are
	}
	for id, parts := range d.parts {
		if parts == nil {
			continue
		}
		t, ok := d.c.Registry().Topic(uint16(id))
		if !ok {
			d.parts.forget(uint16(id))
			continue
		}
		for _, p := range parts {
			if p != nil {
				p.letters = isLetterTopic(t.Name)
			}
		}
	}
	for _, g := range d.deps.meta().Groups() {
		d.openGroup(g)
	}
	for _, l := range d.ledgers {
		for _, cur := range slices.Clone(l.book.Cursors()) {
			if d.readerOf(cur.Key()) == nil {
				l.book.Forget(cur) // its group or member is gone, and the broker died before the ledger knew
			}
		}
		l.book.Restore(d.c.now, d.c.wallMs, &l.fx)
		d.effects(l)
	}
	for _, g := range d.groups {
		for rd := range g.readers() {
			rd.cur.Committed(sequence(rd.part.last))
			if s := rd.cur.Stats(); s.Last > sequence(rd.part.last) {
				d.log.Error("a group's cursor is beyond the end of its partition: messages are missing there; what is published from now on is delivered from the cursor on",
					slog.Int("group", int(g.id)), slog.Int("topic", int(g.topic)), slog.Int("partition", int(rd.part.id)),
					slog.Uint64("cursor", uint64(s.Last)), slog.Uint64("last", uint64(rd.part.last)))
			}
		}
	}
	return nil
}

// topicDeleted implements deliverer.
func (d *delivery) topicDeleted(topic uint16) {
	d.parts.forget(topic) // its rounds leave the tail in their turn
}

// openSub implements deliverer.
func (d *delivery) openSub(s *subscription) {
	g := d.groups[s.group]
	s.consumer = &consumer{sub: s, group: g, credit: newCredit(s.windowCount, s.windowBytes)}
	if g != nil {
		s.consumer.set = g.set(s.member)
	}
}

// closeSub implements deliverer.
func (d *delivery) closeSub(s *subscription, graceful bool) {
	con := s.consumer
	if con == nil || con.sub == nil {
		return
	}
	for p := con.pulls[0]; p != nil; p = con.pulls[0] {
		d.finish(p, s.ended, s.endedText)
	}
	for len(con.readers) > 0 {
		d.detach(con.readers[len(con.readers)-1], graceful)
	}
	con.sub = nil
}

// own implements deliverer.
func (d *delivery) own(s *subscription, partition uint16, ownershipEpoch uint64) {
	con := s.consumer
	if con == nil || con.sub == nil || con.set == nil || int(partition) >= len(con.set.readers) {
		return
	}
	rd := con.set.readers[partition]
	if rd.con != nil {
		d.detach(rd, true)
	}
	rd.con, rd.epoch, rd.draining = con, ownershipEpoch, false
	rd.at = len(con.readers)
	con.readers = append(con.readers, rd)
	rd.group.owners[ownershipEpoch] = con
	rd.cur.Own(ledger.Owner{Member: s.member, Epoch: ownershipEpoch})
	d.wake(rd)
}

// drain implements deliverer.
func (d *delivery) drain(group uint16, member uint64, partition uint16, ownershipEpoch uint64) {
	if rd := d.reader(group, member, partition); rd != nil && rd.con != nil && rd.epoch == ownershipEpoch {
		rd.draining = true
		rd.con.unready(rd)
	}
}

// disown implements deliverer.
func (d *delivery) disown(group uint16, member uint64, partition uint16, ownershipEpoch uint64, graceful bool) {
	if rd := d.reader(group, member, partition); rd != nil && rd.con != nil && rd.epoch == ownershipEpoch {
		d.detach(rd, graceful)
	}
}

// detach takes a partition from its owner. A member of a broadcast group that has lost its connection has not failed at
// what it had in flight: with one attempt for each message it would lose that, although it may come back.
func (d *delivery) detach(rd *reader, graceful bool) {
	con := rd.con
	if con == nil {
		return
	}
	if graceful || rd.group.broadcast || d.c.stopping.Load() {
		rd.cur.Return()
	} else {
		rd.cur.Lost(d.c.now)
	}
	rd.cur.Disown(rd.epoch)
	last := con.readers[len(con.readers)-1]
	con.readers[rd.at], last.at = last, rd.at
	con.readers[len(con.readers)-1] = nil
	con.readers = con.readers[:len(con.readers)-1]
	con.unready(rd)
	if rd.group.owners[rd.epoch] == con { // the partitions of a member of a broadcast group have one epoch
		delete(rd.group.owners, rd.epoch)
	}
	rd.con, rd.draining, rd.reported, rd.sample = nil, false, 0, sample{}
	d.dropCold(rd)
}

// wake notes that a partition may have something to deliver.
func (d *delivery) wake(rd *reader) {
	if rd.con == nil || rd.draining {
		return
	}
	rd.con.makeReady(rd)
	d.enqueue(rd.con)
}

// enqueue puts a consumer in turn, if something may be sent to it.
func (d *delivery) enqueue(con *consumer) {
	if !con.queued && con.wants() {
		con.queued = true
		d.turn.push(con)
	}
}

// round implements deliverer.
func (d *delivery) round(journal int, r *wal.Round) {
	d.fold(journal, r)
	d.addTail(journal, r)
	if len(d.resets) > 0 {
		d.finishResets()
	}
}

// written implements deliverer.
func (d *delivery) written(journal int, n wal.RoundNumber) {
	d.tails[journal].written = max(d.tails[journal].written, n)
	d.trimTail()
}

// writable implements deliverer.
func (d *delivery) writable(client Client) {
	d.eachConsumer(client, func(con *consumer) {
		con.paused = false
		d.enqueue(con)
	})
}

// interrupt implements deliverer.
func (d *delivery) interrupt(client Client) {
	d.eachConsumer(client, d.hurry)
}

// hurry has the waiting PULLs answered with what there is. That is sent in tick, as usual.
func (d *delivery) hurry(con *consumer) {
	for _, p := range con.pulls {
		if p != nil {
			p.hurried = true
			con.paused = false
		}
	}
	d.enqueue(con)
}

func (d *delivery) eachConsumer(client Client, do func(*consumer)) {
	ss := d.c.lookup(client)
	if ss == nil {
		return
	}
	for _, s := range ss.subs {
		if s != nil && s.consumer != nil && s.consumer.sub != nil {
			do(s.consumer)
		}
	}
}

// close is called after the last turn: it gives all memory back and writes the cursors down, so that the next start has little to
// read. The ledger's records that are not committed yet are lost, as in a crash: what they would have answered has not been answered.
func (d *delivery) close() {
	for _, l := range d.ledgers {
		if l.sinceRecords > 0 {
			d.checkpoint(l)
		}
	}
	for _, g := range d.groups {
		for rd := range g.readers() {
			d.dropCold(rd)
		}
	}
	for j := range d.tails {
		for d.tails[j].rounds.len() > 0 {
			d.dropRound(d.tails[j].rounds.pop())
		}
	}
}

// dueFrozen returns when something is due while the clock of leases, sessions and retries stands still, so that nothing comes
// due by that: a PULL waits for real time.
func (d *delivery) dueFrozen() (next time.Duration, due bool) {
	switch {
	case d.turn.len() > 0:
		return d.c.now, true
	case len(d.waiting) > 0:
		return max(d.waiting[0].deadline-d.c.real+d.c.now, d.c.now), true
	}
	return 0, false
}

// tick implements deliverer. It is called at the end of every turn of the coordinator's loop, and returns now if there is
// more to do at once.
func (d *delivery) tick(now time.Duration) (next time.Duration) {
	for _, l := range d.ledgers {
		if due := l.book.Tick(now, &l.fx); due >= 0 {
			next = earliest(next, due)
		}
		d.effects(l)
	}
	next = earliest(next, d.resume(now))
	for len(d.waiting) > 0 && d.waiting[0].deadline <= d.c.real {
		p := d.waiting[0]
		d.waiting.remove(p)
		p.expired = true
		p.con.paused = false
		d.enqueue(p.con)
	}
	d.serveTurn()
	next = earliest(next, d.serveLetters(now))
	if len(d.waiting) > 0 {
		next = earliest(next, max(d.waiting[0].deadline-d.c.real+now, 1))
	}
	for _, l := range d.ledgers {
		d.propose(l)
		if l.checkpointDue() {
			d.checkpoint(l)
		}
		if l.held {
			next = earliest(next, max(l.again, now+1))
		}
		if l.lazyUntil != 0 {
			next = earliest(next, l.lazyUntil)
		}
	}
	d.latency.rotate(now)
	if d.turn.len() > 0 {
		return max(now, 1) // 0 would mean that nothing is due
	}
	return next
}
