package coord

import (
	"cmp"
	"iter"
	"log/slog"
	"slices"

	"github.com/mortarmq/mortarmq/engine/ledger"
	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/protocol"
)

// groupDelivery is what delivery knows of a group.
type groupDelivery struct {
	id, topic uint16
	broadcast bool
	opts      *ledger.Options
	// sets is the group's one set of readers; in a broadcast group, one for each member, by member.
	sets    []*readerSet
	letters letterBox
	// owners are the consumers that have partitions, by ownership epoch.
	owners map[uint64]*consumer
}

// readerSet are the readers, one for each partition of the topic, that the members of a group share; in a broadcast group,
// those of one member.
type readerSet struct {
	member  uint64 // 0: shared
	readers []*reader
	started int // how many readers at the start were found to have their START on record
}

// set returns the readers that a member of the group reads with, nil if there are none.
func (g *groupDelivery) set(member uint64) *readerSet {
	if !g.broadcast {
		return g.sets[0]
	}
	if at, ok := g.find(member); ok {
		return g.sets[at]
	}
	return nil
}

func (g *groupDelivery) find(member uint64) (at int, ok bool) {
	return slices.BinarySearchFunc(g.sets, member, func(s *readerSet, id uint64) int { return cmp.Compare(s.member, id) })
}

// readers goes through all readers of the group.
func (g *groupDelivery) readers() iter.Seq[*reader] {
	return func(yield func(*reader) bool) {
		for _, s := range g.sets {
			for _, rd := range s.readers {
				if !yield(rd) {
					return
				}
			}
		}
	}
}

// hasStarted tells whether it is on record where each of the readers starts.
func (s *readerSet) hasStarted() bool {
	for ; s.started < len(s.readers); s.started++ {
		if !s.readers[s.started].cur.Recorded() {
			return false
		}
	}
	return true
}

// reader returns the reader of a partition for a member of a group, nil if the group or member is gone.
func (d *delivery) reader(group uint16, member uint64, partition uint16) *reader {
	g := d.groups[group]
	if g == nil {
		return nil
	}
	if s := g.set(member); s != nil && int(partition) < len(s.readers) {
		return s.readers[partition]
	}
	return nil
}

// readerOf returns the reader that a cursor belongs to, nil if its group or member is gone.
func (d *delivery) readerOf(k ledger.Key) *reader {
	if rd := d.reader(k.Group, k.Member, k.Partition); rd != nil && rd.cur.Key() == k {
		return rd
	}
	return nil
}

// groupCreated implements deliverer.
func (d *delivery) groupCreated(group, topic uint16, policy protocol.StartPolicy) {
	if d.groups[group] != nil {
		return
	}
	if g := d.deps.meta().Group(group); g != nil {
		d.openGroup(g)
	}
}

// openGroup makes a group's readers: a broadcast group's are those of its members.
func (d *delivery) openGroup(m *metadata.Group) {
	if _, ok := d.c.Registry().Topic(m.Topic); !ok {
		d.log.Error("a group's topic is missing, it is not served", slog.Int("group", int(m.ID)), slog.Int("topic", int(m.Topic)))
		return
	}
	opts := d.ledgerOptions(&m.Settings)
	g := &groupDelivery{
		id: m.ID, topic: m.Topic, broadcast: m.Settings.Broadcast, opts: &opts,
		letters: letterBox{name: protocol.DLQPrefix + m.Name}, owners: make(map[uint64]*consumer),
	}
	d.groups[m.ID] = g
	if !g.broadcast {
		d.openSet(g, 0, m.Policy)
		return
	}
	for _, mb := range m.Members {
		d.openSet(g, mb.ID, m.Policy)
	}
}

// openSet makes readers. A cursor that the ledger does not have starts where the policy says: it is new, or the broker died
// before its START was on record, when nothing can have been delivered yet and no member has been let in.
func (d *delivery) openSet(g *groupDelivery, member uint64, policy protocol.StartPolicy) {
	t, ok := d.c.Registry().Topic(g.topic)
	if !ok {
		return
	}
	s := &readerSet{member: member, readers: make([]*reader, 0, t.Partitions)}
	for i := range t.Partitions {
		p := d.partition(g.topic, i)
		rd := &reader{part: p, ledger: d.ledgers[p.journal], group: g}
		k := ledger.Key{Group: g.id, Topic: g.topic, Partition: i, Member: member}
		if rd.cur = rd.ledger.book.Cursor(k); rd.cur != nil {
			rd.cur.Configure(g.opts)
		} else {
			floor := max(p.first, 1) - 1
			if policy == protocol.StartLatest {
				floor = p.last
			}
			rd.cur = rd.ledger.book.Open(k, g.opts, sequence(floor))
			rd.cur.Committed(sequence(p.last))
		}
		s.readers = append(s.readers, rd)
		p.addReader(rd)
	}
	at, _ := g.find(member)
	g.sets = slices.Insert(g.sets, at, s)
}

// closeSet ends what readers do, and forgets their cursors.
func (d *delivery) closeSet(s *readerSet) {
	for _, rd := range s.readers {
		d.detach(rd, true)
		d.abandon(rd)
		rd.part.settled = add(rd.part.settled, rd.cur.Stats().Run)
		rd.ledger.book.Forget(rd.cur)
		rd.part.removeReader(rd)
	}
}

// ledgerOptions are a group's delivery settings; what they leave open is the broker's.
func (d *delivery) ledgerOptions(s *metadata.GroupSettings) ledger.Options {
	o := ledger.DefaultOptions()
	o.Lease, o.Ordered, o.MaxAttempts = d.c.opts.DeliveryLease, s.Ordered, s.Attempts(d.c.opts.DeliveryMaxAttempts)
	if s.Lease > 0 {
		o.Lease = s.Lease
	}
	if delays := s.RetryDelays(); delays != nil {
		o.Fixed(delays)
	}
	return o
}

// groupConfigured implements deliverer.
func (d *delivery) groupConfigured(group uint16) {
	g, m := d.groups[group], d.deps.meta().Group(group)
	if g == nil || m == nil {
		return
	}
	// The cursors hold on to their options, so these are others.
	opts := d.ledgerOptions(&m.Settings)
	g.opts = &opts
	for rd := range g.readers() {
		rd.cur.Configure(g.opts)
		d.wake(rd)
	}
}

// groupStarted implements deliverer. The members of a broadcast group start one by one.
func (d *delivery) groupStarted(group uint16) bool {
	g := d.groups[group]
	// One that is not served at all, which is logged, has nothing to wait for.
	return g == nil || g.broadcast || g.sets[0].hasStarted()
}

// groupDeleted implements deliverer.
func (d *delivery) groupDeleted(group uint16) {
	g := d.groups[group]
	if g == nil {
		return
	}
	delete(d.groups, group)
	for _, s := range g.sets {
		d.closeSet(s)
	}
}

// memberJoins implements deliverer.
func (d *delivery) memberJoins(group uint16, member uint64, policy protocol.StartPolicy) {
	if g := d.groups[group]; g != nil && g.set(member) == nil {
		d.openSet(g, member, policy)
	}
}

// memberStarted implements deliverer.
func (d *delivery) memberStarted(group uint16, member uint64) bool {
	g := d.groups[group]
	if g == nil {
		return true
	}
	s := g.set(member)
	return s == nil || s.hasStarted()
}

// memberGone implements deliverer.
func (d *delivery) memberGone(group uint16, member uint64) {
	g := d.groups[group]
	if g == nil || !g.broadcast {
		return
	}
	if at, ok := g.find(member); ok {
		s := g.sets[at]
		g.sets = slices.Delete(g.sets, at, at+1)
		d.closeSet(s)
	}
}
