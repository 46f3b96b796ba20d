package group

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

func (m *Machine) join(ev *Event, fx *Effects) {
	if len(m.waiting) >= MaxWaiting {
		fx.add(Effect{Kind: Answer, Ref: ev.Ref, Session: ev.Session, Code: protocol.CodeBackpressure,
			Text: fmt.Sprintf("%d members are joining the group already: back off and SUB again", MaxWaiting)})
		return
	}
	m.waiting = append(m.waiting, joiner{ref: ev.Ref, session: ev.Session})
	m.prepare(fx)
}

// rejoin gives a member its place back: partitions and epochs stay, so the log has nothing to learn.
func (m *Machine) rejoin(now time.Duration, ev *Event, fx *Effects) {
	mb := m.member(ev.Member)
	if mb == nil || mb.leaving {
		fx.add(Effect{Kind: Answer, Ref: ev.Ref, Session: ev.Session, Code: protocol.CodeUnknownMember,
			Text: "the member is not in the group any more: SUB without REJOIN"})
		return
	}
	if mb.session != 0 {
		// The client came back before its old connection was found dead.
		m.stopOwned(mb, false, fx)
		m.endSession(mb, protocol.CodeUnknownMember, "the member rejoined on another connection", false, fx)
	}
	m.bind(mb, ev.Session)
	mb.lastOp = now
	fx.add(Effect{Kind: Answer, Ref: ev.Ref, Session: ev.Session, Member: mb.id, MembershipEpoch: mb.joinEpoch, AssignmentEpoch: mb.installed})
	for _, number := range slices.Sorted(maps.Keys(mb.missed)) {
		m.send(now, mb.missed[number], fx)
	}
	for _, p := range mb.owned() {
		if p.notice.NoticeID != 0 {
			if p.notice.Kind == protocol.NoticeAssign {
				p.deadline = now + AssignTimeout
				// Before the restart it may have confirmed this one already and be using it; if not, the notice
				// reaches it ahead of the first message.
				p.installed = p.installed || mb.restored
			}
			m.send(now, p, fx)
		}
		if p.installed {
			fx.add(Effect{Kind: Install, Session: mb.session, Member: mb.id, Partition: p.partition, OwnershipEpoch: p.epoch})
			if p.notice.Kind == protocol.NoticeRevoke && p.notice.NoticeID != 0 {
				fx.add(Effect{Kind: Drain, Session: mb.session, Member: mb.id, Partition: p.partition, OwnershipEpoch: p.epoch})
			}
		}
	}
	mb.restored = false
}

// current finds the member that a request speaks for, nil (and answered) if it is not one (any more).
func (m *Machine) current(ev *Event, fx *Effects) *member {
	mb := m.member(ev.Member)
	if mb == nil || mb.leaving || mb.session != ev.Session {
		fx.add(Effect{Kind: Answer, Ref: ev.Ref, Session: ev.Session, Code: protocol.CodeUnknownMember, Text: "the member is not in the group any more: SUB again"})
		return nil
	}
	return mb
}

func (m *Machine) heartbeat(now time.Duration, ev *Event, fx *Effects) {
	mb := m.current(ev, fx)
	if mb == nil {
		return
	}
	mb.lastOp = now
	answer := Effect{Kind: Answer, Ref: ev.Ref, Session: ev.Session, Member: mb.id}
	switch {
	case ev.MembershipEpoch < mb.joinEpoch, ev.AssignmentEpoch < mb.installed:
		answer.Code = protocol.CodeStaleGeneration
		answer.Text = fmt.Sprintf("epochs %d/%d are older than the member's own %d/%d: take them from SUB's answer and the last NOTICE", ev.MembershipEpoch, ev.AssignmentEpoch, mb.joinEpoch, mb.installed)
	case ev.MembershipEpoch > m.membershipEpoch, ev.AssignmentEpoch > m.assignmentEpoch:
		answer.Code = protocol.CodeStaleGeneration
		answer.Text = fmt.Sprintf("epochs %d/%d are newer than the group's %d/%d: SUB again", ev.MembershipEpoch, ev.AssignmentEpoch, m.membershipEpoch, m.assignmentEpoch)
	}
	fx.add(answer)
}

func (m *Machine) leave(ev *Event, fx *Effects) {
	mb := m.current(ev, fx)
	if mb == nil {
		return
	}
	mb.leaveRefs = append(mb.leaveRefs, ev.Ref)
	m.remove(mb, 0, "", true, fx)
	m.prepare(fx)
}

// sessionClosed starts the time for which the member of a lost connection keeps its place. Delivery ended with the
// connection.
func (m *Machine) sessionClosed(now time.Duration, session uint64) {
	if mb := m.bySession[session]; mb != nil {
		m.bind(mb, 0)
		mb.lostUntil = now + LostTimeout
		m.wakeBy(mb.lostUntil)
		return
	}
	for i := range m.flight.joins {
		if m.flight.joins[i].session == session {
			m.flight.joins[i].session = 0
		}
	}
	for i := range m.waiting {
		if m.waiting[i].session == session {
			m.waiting[i].session = 0
		}
	}
}

// remove decides that a member goes. From here on it owns nothing and its session is refused; the log learns of it with
// the next batch.
func (m *Machine) remove(mb *member, code protocol.ErrorCode, text string, graceful bool, fx *Effects) {
	if mb.leaving {
		return
	}
	m.stopOwned(mb, graceful, fx)
	for _, p := range mb.parts {
		m.dropNotice(p)
		p.installed, p.released = false, true
	}
	for _, p := range mb.missed {
		m.dropNotice(p)
	}
	m.endSession(mb, code, text, graceful, fx)
	mb.leaving = true
	m.going++
	m.staying--
	m.lost--
}

// bind gives a member that is not leaving another session; 0: it has no connection any more.
func (m *Machine) bind(mb *member, session uint64) {
	if mb.session != 0 {
		delete(m.bySession, mb.session)
		m.lost++
	}
	if mb.session = session; session != 0 {
		m.bySession[session] = mb
		m.lost--
	}
}

// stopOwned ends the delivery of what a member owns. Without a session it has ended already.
func (m *Machine) stopOwned(mb *member, graceful bool, fx *Effects) {
	if mb.session == 0 {
		return
	}
	for _, p := range mb.owned() {
		if p.installed {
			fx.add(Effect{Kind: Remove, Session: mb.session, Member: mb.id, Partition: p.partition, OwnershipEpoch: p.epoch, Graceful: graceful})
		}
	}
}

func (m *Machine) endSession(mb *member, code protocol.ErrorCode, text string, graceful bool, fx *Effects) {
	if mb.session == 0 {
		return
	}
	fx.add(Effect{Kind: End, Session: mb.session, Member: mb.id, Code: code, Text: text, Graceful: graceful})
	m.bind(mb, 0)
}
