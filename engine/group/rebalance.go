package group

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// prepare puts everything that has been decided into one batch of changes, unless one is in flight.
func (m *Machine) prepare(fx *Effects) {
	if m.flight.left > 0 || m.closed {
		return
	}
	m.retryAt = 0
	f := flight{mEpoch: m.membershipEpoch, aEpoch: m.assignmentEpoch, ownEp: m.lastOwnership, lastMem: m.lastMember}
	m.admit(&f, fx)
	if len(f.joins) == 0 && m.going == 0 && len(m.loose) == 0 && !m.reassign {
		return
	}
	changes := m.memberChanges(&f)
	if len(changes) > 0 || m.reassign || !m.handOn(&f) {
		m.assignment(&f, len(changes) > 0 || m.reassign)
	}
	m.reassign, m.going = false, 0
	clear(m.loose)
	m.loose = m.loose[:0]
	if len(f.assign) > 0 {
		changes = append(changes, Change{Kind: Assigned, MembershipEpoch: f.mEpoch, AssignmentEpoch: f.aEpoch, Parts: f.assign})
	}
	if len(changes) == 0 {
		return
	}
	f.left = len(changes)
	m.flight = f
	fx.add(Effect{Kind: Propose, Changes: changes})
}

// memberChanges are the batch's changes of members: those that leave first.
func (m *Machine) memberChanges(f *flight) (changes []Change) {
	if m.going > 0 || m.reassign {
		for _, mb := range m.members {
			if mb.leaving {
				f.leaves = append(f.leaves, mb)
				f.mEpoch++
				changes = append(changes, Change{Kind: Left, Member: mb.id, MembershipEpoch: f.mEpoch})
			}
		}
	}
	for i := range f.joins {
		f.mEpoch++
		f.lastMem++
		f.joins[i].member = f.lastMem
		changes = append(changes, Change{Kind: Joined, Member: f.lastMem, Session: f.joins[i].session, MembershipEpoch: f.mEpoch})
	}
	return changes
}

// handOn gives the partitions that were released to those that they are promised to. It reports false, and does nothing, if
// one of these is not there any more.
func (m *Machine) handOn(f *flight) bool {
	for _, p := range m.loose {
		if mb := m.member(p.target); mb == nil || mb.leaving {
			return false
		}
	}
	slices.SortFunc(m.loose, func(a, b *part) int { return cmp.Compare(a.partition, b.partition) })
	for _, p := range m.loose {
		if p.released {
			f.ownEp++
			f.assign = append(f.assign, PartChange{Partition: p.partition, Member: p.target, OwnershipEpoch: f.ownEp})
		}
	}
	return true
}

// admit lets waiting joiners in as far as the limit allows. Where it does not, a member without a connection gives way.
func (m *Machine) admit(f *flight, fx *Effects) {
	for _, j := range m.waiting {
		if j.session == 0 {
			// Nobody is there to become a member; the answer goes nowhere, but each request has one.
			fx.add(Effect{Kind: Answer, Ref: j.ref, Code: protocol.CodeUnknownMember, Text: "the connection closed"})
			continue
		}
		members := m.staying + len(f.joins)
		if members >= m.limit() && m.giveWay(fx) {
			members--
		}
		if m.opts.Broadcast && (members+1)*m.partitions > MaxBroadcastAssignments {
			fx.add(Effect{Kind: Answer, Ref: j.ref, Session: j.session, Code: protocol.CodeGroupAssignmentLimit,
				Text: fmt.Sprintf("%d members with all of %d partitions each are as many as a broadcast group may have: stop one first", members, m.partitions)})
			continue
		}
		if members >= m.limit() {
			fx.add(Effect{Kind: Answer, Ref: j.ref, Session: j.session, Code: protocol.CodeGroupMemberLimit,
				Text: fmt.Sprintf("the group has %d members and can't have more: stop one first", m.limit())})
			continue
		}
		f.joins = append(f.joins, j)
	}
	clear(m.waiting)
	m.waiting = m.waiting[:0]
}

// giveWay removes the member whose connection was lost first, and reports whether there was one.
func (m *Machine) giveWay(fx *Effects) bool {
	if m.lost == 0 {
		return false
	}
	var first *member
	for _, mb := range m.members {
		if !mb.leaving && mb.session == 0 && (first == nil || mb.lostUntil < first.lostUntil) {
			first = mb
		}
	}
	if first == nil {
		return false
	}
	m.remove(first, protocol.CodeUnknownMember, "", false, fx)
	return true
}

// assignment computes what the batch gives to whom: a new target if the members change or a partition has none, and new
// ownership epochs for every partition that is free or released.
func (m *Machine) assignment(f *flight, membersChange bool) {
	live := make([]uint64, 0, len(m.members)+len(f.joins))
	for _, mb := range m.members {
		if !mb.leaving {
			live = append(live, mb.id)
		}
	}
	for _, j := range f.joins {
		live = append(live, j.member)
	}
	if len(live) == 0 {
		return
	}
	isLive := func(id uint64) bool { _, ok := slices.BinarySearch(live, id); return ok }
	target := make([]uint64, len(m.parts))
	for i, p := range m.parts {
		// A partition that is being moved counts as the one's that it was promised to.
		switch {
		case isLive(p.target):
			target[i] = p.target
		case isLive(p.owner) && !p.released:
			target[i] = p.owner
		default:
			membersChange = true
		}
	}
	if membersChange {
		target = m.opts.Strategy.assign(live, target)
	}
	next := false
	for i, to := range target {
		p := m.parts[i]
		change := PartChange{Partition: p.partition, Member: to}
		if !isLive(p.owner) || p.released {
			f.ownEp++
			change.OwnershipEpoch = f.ownEp
		} else if p.target == to {
			continue
		}
		next = next || p.target != to
		f.assign = append(f.assign, change)
	}
	if next {
		f.aEpoch++
	}
}

// committed counts the batch's changes; with the last one the machine takes its new state.
func (m *Machine) committed(now time.Duration, fx *Effects) {
	if m.flight.left == 0 {
		return
	}
	if m.flight.left--; m.flight.left > 0 {
		return
	}
	f := m.flight
	m.flight = flight{}
	before := m.assignmentEpoch
	m.membershipEpoch, m.assignmentEpoch, m.lastOwnership, m.lastMember = f.mEpoch, f.aEpoch, f.ownEp, f.lastMem
	m.forget(f.leaves, fx)
	joinEpoch := f.mEpoch - uint32(len(f.joins))
	for _, j := range f.joins {
		joinEpoch++
		m.admitted(now, j, joinEpoch, before, fx)
	}
	for _, c := range f.assign {
		p := m.parts[c.Partition]
		p.target = c.Member
		if c.OwnershipEpoch != 0 {
			m.give(p, c.Member)
			p.epoch, p.installed, p.released = c.OwnershipEpoch, false, false
			if m.member(c.Member).leaving {
				// Its removal was decided while the batch was in flight.
				p.released = true
				continue
			}
			m.newNotice(now, p, protocol.NoticeAssign)
			m.send(now, p, fx)
		}
	}
	m.revoke(now, f.assign, fx)
	m.prepare(fx)
}

// admitted makes a member of a joiner whose joining is committed. Its own assignment epoch is the one before the batch's
// new target: that one it learns of by its notices.
func (m *Machine) admitted(now time.Duration, j joiner, joinEpoch, assignmentEpoch uint32, fx *Effects) {
	mb := &member{id: j.member, joinEpoch: joinEpoch, installed: assignmentEpoch, lastOp: now, lostUntil: now + LostTimeout}
	m.members = append(m.members, mb)
	m.staying++
	m.lost++
	m.bind(mb, j.session)
	m.wakeBy(mb.expiry())
	fx.add(Effect{Kind: Answer, Ref: j.ref, Session: j.session, Member: mb.id, MembershipEpoch: joinEpoch, AssignmentEpoch: assignmentEpoch})
	if m.opts.Broadcast {
		m.giveAll(mb)
		for _, p := range mb.parts {
			m.newNotice(now, p, protocol.NoticeAssign)
			m.send(now, p, fx)
		}
	}
}

// forget drops the members whose leaving is committed, and frees what they owned or were promised.
func (m *Machine) forget(leaves []*member, fx *Effects) {
	if len(leaves) == 0 {
		return
	}
	gone := make(map[uint64]bool, len(leaves))
	for _, mb := range leaves {
		gone[mb.id] = true
		if m.opts.Broadcast {
			fx.add(Effect{Kind: Forget, Member: mb.id})
		}
		for _, ref := range mb.leaveRefs {
			fx.add(Effect{Kind: Answer, Ref: ref})
		}
	}
	for _, p := range m.parts {
		if gone[p.owner] {
			m.give(p, 0)
			p.released = false
		}
		if gone[p.target] {
			p.target = 0
		}
	}
	m.members = slices.DeleteFunc(m.members, func(mb *member) bool { return gone[mb.id] })
}

// revoke asks the owners that are not the targets any more to give their partitions up. Once asked it must, even if it
// becomes the target again: it may have let go already.
func (m *Machine) revoke(now time.Duration, changes []PartChange, fx *Effects) {
	for _, c := range changes {
		p := m.parts[c.Partition]
		if p.owner == 0 || p.released || p.target == 0 || p.target == p.owner {
			continue
		}
		if p.notice.NoticeID != 0 && p.notice.Kind == protocol.NoticeRevoke {
			continue
		}
		m.newNotice(now, p, protocol.NoticeRevoke)
		if mb := m.member(p.owner); p.installed && mb != nil && mb.session != 0 {
			fx.add(Effect{Kind: Drain, Session: mb.session, Member: mb.id, Partition: p.partition, OwnershipEpoch: p.epoch})
		}
		m.send(now, p, fx)
	}
}

// refused takes back a batch that the log did not accept. Joiners are told; removals stand and are proposed again.
func (m *Machine) refused(now time.Duration, fx *Effects) {
	if m.flight.left == 0 {
		return
	}
	for _, j := range m.flight.joins {
		fx.add(Effect{Kind: Answer, Ref: j.ref, Session: j.session, Code: protocol.CodeMetadataReadOnly})
	}
	for _, mb := range m.flight.leaves {
		for _, ref := range mb.leaveRefs {
			fx.add(Effect{Kind: Answer, Ref: ref, Code: protocol.CodeMetadataReadOnly})
		}
		mb.leaveRefs = nil
	}
	m.flight, m.reassign = flight{}, true // which sees to the members that leave, too
	m.retryAt = now + ProposeRetry
	m.wakeBy(m.retryAt)
}
