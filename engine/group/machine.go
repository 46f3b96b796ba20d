package group

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// Machine is one consumer group. It belongs to one goroutine.
type Machine struct {
	opts Options

	membershipEpoch uint32
	assignmentEpoch uint32
	lastOwnership   uint64
	lastMember      uint64
	lastNotice      uint64

	members   []*member // ascending by id
	bySession map[uint64]*member
	// staying counts the members that are not leaving, lost those of them that have no connection.
	staying, lost int
	// parts are the partitions, in order; in a broadcast group there are none and each member has parts of its own.
	parts      []*part
	partitions int
	// notices finds the part that an unconfirmed notice is about; due has the parts in the order in which something is to be
	// done about them.
	notices map[uint64]*part
	due     partHeap

	waiting []joiner
	flight  flight
	// wake is not later than the first moment at which tick has something to do; hasWake is false if there is none.
	// Deadlines that move away, as a member's does with all that it sends, are not followed.
	wake    time.Duration
	hasWake bool
	// retryAt is when a refused batch is proposed again; 0: nothing was refused.
	retryAt time.Duration
	// reassign: the target must be computed anew even if no member changes.
	reassign bool
	// going counts the members whose removal is decided and not proposed, loose are partitions that were released since the
	// last batch.
	going  int
	loose  []*part
	closed bool
}

// member is one member, from the commit of its joining to that of its leaving.
type member struct {
	id        uint64
	joinEpoch uint32
	// installed is the assignment epoch of the last notice that it confirmed.
	installed uint32
	// session is 0 while it has no connection; it then keeps its place until lostUntil.
	session   uint64
	lostUntil time.Duration
	lastOp    time.Duration
	// restored: it comes from the metadata log and has not come back since. What it had confirmed is not in the log.
	restored bool
	// leaving: its removal is decided, and proposed with the next batch. What it owns is not delivered to it any more.
	leaving bool
	// leaveRefs are answered when the removal is committed.
	leaveRefs []uint64
	// parts are those that it owns, in no order.
	parts []*part
	// missed are partitions that were taken from it and whose REVOKE it has not confirmed, by number.
	missed map[uint16]*part
}

// part is one partition; in a broadcast group, one for each member. One in member.missed stands for what a member had.
type part struct {
	partition uint16

	owner  uint64
	at     int // in its owner's parts
	epoch  uint64
	target uint64
	// installed: the owner has confirmed it, and delivery runs.
	installed bool
	// released: the owner has given it up (or was not asked any longer); the target gets it with the next batch.
	released bool
	// missed: it is in member.missed.
	missed bool
	// notice is the unconfirmed notice about it; NoticeID 0: none.
	notice   protocol.Notice
	deadline time.Duration
	repeatAt time.Duration
	place    int // in Machine.due + 1, 0 = not there
}

// joiner waits to become a member.
type joiner struct {
	ref     uint64
	session uint64 // 0: the connection closed meanwhile
	member  uint64
}

// flight is the batch of changes that the metadata log has not committed yet.
type flight struct {
	left    int // changes not yet committed
	joins   []joiner
	leaves  []*member
	assign  []PartChange
	mEpoch  uint32
	aEpoch  uint32
	ownEp   uint64
	lastMem uint64
}

// New returns the machine of a group as the metadata log knows it. Members found there have no connection yet; their
// session timers start at now.
func New(now time.Duration, opts Options, st State) *Machine {
	m := &Machine{
		opts:            opts,
		membershipEpoch: st.MembershipEpoch,
		assignmentEpoch: st.AssignmentEpoch,
		lastOwnership:   st.LastOwnership,
		lastMember:      max(st.LastMember, opts.MemberBase),
		lastNotice:      opts.NoticeBase,
		bySession:       make(map[uint64]*member),
		partitions:      len(st.Parts),
		notices:         make(map[uint64]*part),
	}
	for _, s := range st.Members {
		m.members = append(m.members, &member{
			id: s.ID, joinEpoch: s.JoinEpoch, installed: st.AssignmentEpoch, lastOp: now, lostUntil: now + SessionTimeout, restored: true,
		})
	}
	m.staying, m.lost = len(m.members), len(m.members)
	if opts.Broadcast {
		for _, mb := range m.members {
			m.giveAll(mb)
		}
	} else {
		for i, s := range st.Parts {
			p := &part{partition: uint16(i), epoch: s.OwnershipEpoch, target: s.Target}
			m.parts = append(m.parts, p)
			m.give(p, s.Owner)
		}
	}
	// The old notices are forgotten with the old machine; these wait for their members to come back.
	for p := range m.all() {
		if p.owner != 0 {
			if p.target != 0 && p.target != p.owner {
				m.newNotice(now, p, protocol.NoticeRevoke)
			} else {
				m.newNotice(now, p, protocol.NoticeAssign)
			}
		}
	}
	if len(m.members) > 0 {
		// The log may have ended between a change of the members and the assignment that belongs to it.
		m.reassign = true
		m.retryAt = max(now, 1)
	}
	m.reckon()
	return m
}

// giveAll makes a member of a broadcast group the owner of every partition.
func (m *Machine) giveAll(mb *member) {
	mb.parts = make([]*part, m.partitions)
	for i := range mb.parts {
		mb.parts[i] = &part{partition: uint16(i), owner: mb.id, at: i, target: mb.id, epoch: uint64(mb.joinEpoch)}
	}
}

// give makes the member with the id the owner of a partition; 0 or an id that is no member's: nobody.
func (m *Machine) give(p *part, id uint64) {
	if mb := m.member(p.owner); mb != nil {
		last := mb.parts[len(mb.parts)-1]
		mb.parts[p.at], last.at = last, p.at
		mb.parts = mb.parts[:len(mb.parts)-1]
	}
	p.owner = id
	if mb := m.member(id); mb != nil {
		p.at = len(mb.parts)
		mb.parts = append(mb.parts, p)
	}
}

// all goes through every part there is, those that members have missed included.
func (m *Machine) all() iter.Seq[*part] {
	return func(yield func(*part) bool) {
		for _, p := range m.parts {
			if !yield(p) {
				return
			}
		}
		for _, mb := range m.members {
			if m.opts.Broadcast {
				for _, p := range mb.parts {
					if !yield(p) {
						return
					}
				}
			}
			for _, number := range slices.Sorted(maps.Keys(mb.missed)) {
				if !yield(mb.missed[number]) {
					return
				}
			}
		}
	}
}

// owned returns the parts that a member owns, by partition.
func (mb *member) owned() []*part {
	return slices.SortedFunc(slices.Values(mb.parts), func(a, b *part) int { return cmp.Compare(a.partition, b.partition) })
}

// Step handles one event. now never goes back. Effects are appended to fx in the order in which they must be done.
func (m *Machine) Step(now time.Duration, ev *Event, fx *Effects) {
	if m.closed {
		m.stepClosed(ev, fx)
		return
	}
	switch ev.Kind {
	case Join:
		m.join(ev, fx)
	case Rejoin:
		m.rejoin(now, ev, fx)
	case Heartbeat:
		m.heartbeat(now, ev, fx)
	case Leave:
		m.leave(ev, fx)
	case Touch:
		if mb := m.member(ev.Member); mb != nil {
			mb.lastOp = max(mb.lastOp, ev.At)
		}
	case SessionClosed:
		m.sessionClosed(now, ev.Session)
	case Confirm:
		m.confirm(now, ev, fx)
	case Committed:
		m.committed(now, fx)
	case Refused:
		m.refused(now, fx)
	case Configure:
		m.opts.Strategy, m.reassign = ev.Strategy, true
		m.prepare(fx)
	case Close:
		m.close(ev, fx)
	case Tick:
		m.tick(now, fx)
	}
}

// stepClosed answers what still comes for a group that is gone.
func (m *Machine) stepClosed(ev *Event, fx *Effects) {
	switch ev.Kind {
	case Join, Rejoin, Heartbeat, Leave:
		fx.add(Effect{Kind: Answer, Ref: ev.Ref, Session: ev.Session, Code: protocol.CodeUnknownGroup, Text: "the group was deleted: SUB again"})
	case Touch, SessionClosed, Confirm, Committed, Refused, Configure, Close, Tick:
	}
}

// Deadline returns when the machine wants its next Tick, and false if nothing is due. It may turn out to be early.
func (m *Machine) Deadline() (time.Duration, bool) { return m.wake, m.hasWake && !m.closed }

// wakeBy sees to a tick at t or earlier.
func (m *Machine) wakeBy(t time.Duration) {
	if !m.hasWake || t < m.wake {
		m.wake, m.hasWake = t, true
	}
}

// reckon computes wake from everything that has a deadline.
func (m *Machine) reckon() {
	m.hasWake = false
	if m.retryAt != 0 && m.flight.left == 0 {
		m.wakeBy(m.retryAt)
	}
	for _, mb := range m.members {
		if !mb.leaving {
			m.wakeBy(mb.expiry())
		}
	}
	if len(m.due) > 0 {
		m.wakeBy(m.due[0].when())
	}
}

// expiry is when the member is removed if nothing is heard of it.
func (mb *member) expiry() time.Duration {
	if mb.session == 0 {
		return mb.lostUntil
	}
	return mb.lastOp + SessionTimeout
}

func (m *Machine) tick(now time.Duration, fx *Effects) {
	for _, mb := range m.members {
		if !mb.leaving && mb.expiry() <= now {
			m.remove(mb, protocol.CodeUnknownMember, "the member sent nothing for 10 s (or had no connection for 3 s) and was removed: SUB again", false, fx)
		}
	}
	for len(m.due) > 0 && m.due[0].when() <= now {
		m.tickNotice(now, m.due[0], fx)
	}
	if m.retryAt <= now {
		m.prepare(fx)
	}
	m.reckon()
}

// close ends everything; what the machine had asked the log for no longer matters, the group is gone from it.
func (m *Machine) close(ev *Event, fx *Effects) {
	for _, mb := range m.members {
		m.remove(mb, ev.Code, ev.Text, true, fx)
		for _, ref := range mb.leaveRefs {
			fx.add(Effect{Kind: Answer, Ref: ref})
		}
	}
	for _, j := range slices.Concat(m.flight.joins, m.waiting) {
		fx.add(Effect{Kind: Answer, Ref: j.ref, Session: j.session, Code: ev.Code, Text: ev.Text})
	}
	*m = Machine{opts: m.opts, closed: true}
}

// member finds a member by its id.
func (m *Machine) member(id uint64) *member {
	at, ok := slices.BinarySearchFunc(m.members, id, func(mb *member, id uint64) int { return cmp.Compare(mb.id, id) })
	if !ok {
		return nil
	}
	return m.members[at]
}

// limit is the most members that the group may have.
func (m *Machine) limit() int {
	if m.opts.MaxMembers > 0 {
		return m.opts.MaxMembers
	}
	return max(minMemberLimit, m.partitions)
}
