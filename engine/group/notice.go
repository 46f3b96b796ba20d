package group

import (
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// newNotice makes the notice about a partition for its present owner, in place of an older one. Whoever has a connection
// gets it with the next send.
func (m *Machine) newNotice(now time.Duration, p *part, kind protocol.NoticeKind) {
	m.dropNotice(p)
	m.lastNotice++
	p.notice = protocol.Notice{
		NoticeID: m.lastNotice, Kind: kind, GroupID: m.opts.Group, TopicID: m.opts.Topic, Partition: p.partition,
		MembershipEpoch: m.membershipEpoch, AssignmentEpoch: m.assignmentEpoch, OwnershipEpoch: p.epoch, MemberID: p.owner,
	}
	m.notices[p.notice.NoticeID] = p
	p.deadline = now + AssignTimeout
	if kind == protocol.NoticeRevoke {
		p.deadline = now + RevokeTimeout
	}
	p.repeatAt = now + NoticeRepeat
	m.due.set(p)
	m.wakeBy(p.when())
}

// Noticed returns the session of the member whom an unconfirmed notice is for, 0 if there is no such notice or the member has
// no connection.
func (m *Machine) Noticed(id uint64) (session uint64) {
	if p := m.notices[id]; p != nil {
		if mb := m.member(p.owner); mb != nil {
			session = mb.session
		}
	}
	return session
}

func (m *Machine) dropNotice(p *part) {
	if p.notice.NoticeID != 0 {
		delete(m.notices, p.notice.NoticeID)
		p.notice = protocol.Notice{}
		m.due.remove(p)
	}
}

// send sends the notice about a partition if its owner has a connection.
func (m *Machine) send(now time.Duration, p *part, fx *Effects) {
	p.repeatAt = now + NoticeRepeat
	m.due.set(p)
	m.wakeBy(p.when())
	if mb := m.member(p.owner); mb != nil && mb.session != 0 {
		fx.add(Effect{Kind: Send, Session: mb.session, Member: mb.id, Notice: p.notice})
	}
}

// tickNotice repeats the notice about a partition, or does what its silence means.
func (m *Machine) tickNotice(now time.Duration, p *part, fx *Effects) {
	mb := m.member(p.owner)
	switch {
	case p.deadline > now:
		m.send(now, p, fx)
	case p.notice.Kind == protocol.NoticeRevoke:
		m.carryOut(now, p, fx)
	case mb != nil && !mb.leaving:
		m.remove(mb, protocol.CodeUnknownMember, "the member did not confirm an ASSIGN within 10 s and was removed: SUB again", false, fx)
	default:
		m.dropNotice(p)
	}
}

// release takes a partition from its owner, who confirmed the REVOKE or was given enough time to.
func (m *Machine) release(p *part, fx *Effects) {
	m.dropNotice(p)
	mb := m.member(p.owner)
	if p.missed {
		delete(mb.missed, p.partition)
		return
	}
	if mb != nil && mb.session != 0 && p.installed {
		fx.add(Effect{Kind: Remove, Session: mb.session, Member: mb.id, Partition: p.partition, OwnershipEpoch: p.epoch, Graceful: true})
	}
	p.installed, p.released = false, true
	m.loose = append(m.loose, p)
}

// carryOut takes a partition from its owner, who has not confirmed the REVOKE in time. The notice is repeated until it does:
// it may have no connection, and then believes to own the partition when it comes back.
func (m *Machine) carryOut(now time.Duration, p *part, fx *Effects) {
	notice, epoch, mb := p.notice, p.epoch, m.member(p.owner)
	m.release(p, fx)
	if mb == nil {
		return
	}
	if mb.missed == nil {
		mb.missed = make(map[uint16]*part)
	}
	if old := mb.missed[p.partition]; old != nil {
		m.dropNotice(old)
	}
	q := &part{partition: p.partition, owner: mb.id, epoch: epoch, missed: true, notice: notice, deadline: forever, repeatAt: now + NoticeRepeat}
	mb.missed[p.partition] = q
	m.notices[notice.NoticeID] = q
	m.due.set(q)
}

// forever is later than every deadline.
const forever = time.Duration(1<<63 - 1)

// confirm handles a CONTROL_ACK. Whatever does not echo an unconfirmed notice of the sender's own exactly (a repetition,
// a notice that was replaced) changes nothing.
func (m *Machine) confirm(now time.Duration, ev *Event, fx *Effects) {
	mb := m.bySession[ev.Session]
	if mb == nil || mb.leaving {
		return
	}
	mb.lastOp = now
	p := m.notices[ev.Ack.NoticeID]
	if p == nil {
		return
	}
	n, a := &p.notice, &ev.Ack
	if n.MemberID != mb.id || a.Kind != n.Kind || a.GroupID != n.GroupID || a.MembershipEpoch != n.MembershipEpoch ||
		a.AssignmentEpoch != n.AssignmentEpoch || a.OwnershipEpoch != n.OwnershipEpoch {
		return
	}
	epoch := n.AssignmentEpoch
	if n.Kind == protocol.NoticeRevoke {
		// Whatever the result says, the member does not hold on to it, and the ownership epoch moves on.
		m.raise(mb, epoch, fx)
		m.release(p, fx)
		m.prepare(fx)
		return
	}
	switch a.Result {
	case protocol.ControlOK:
		m.dropNotice(p)
		m.raise(mb, epoch, fx)
		if !p.installed {
			p.installed = true
			fx.add(Effect{Kind: Install, Session: mb.session, Member: mb.id, Partition: p.partition, OwnershipEpoch: p.epoch})
		}
	case protocol.ControlError:
		m.remove(mb, protocol.CodeUnknownMember, "the member answered an ASSIGN with ERROR and was removed: SUB again", false, fx)
		m.prepare(fx)
	case protocol.ControlStale:
		// The member knows better epochs than the notice has, which can't be: it is asked again until its time is up.
	default:
	}
}

// raise records what the member has confirmed; older epochs of it are stale from now on.
func (m *Machine) raise(mb *member, epoch uint32, fx *Effects) {
	if epoch > mb.installed {
		mb.installed = epoch
		fx.add(Effect{Kind: Confirmed, Session: mb.session, Member: mb.id, AssignmentEpoch: epoch})
	}
}
