package client

import (
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// Times of the membership, in ticks of a second.
const (
	heartbeatTicks = 3
	revokeTicks    = 4 // the broker takes the partition away after 5 s anyway
)

// notice handles ASSIGN and REVOKE.
func (k *Consumer) notice(n *protocol.Notice) {
	if n.MemberID != k.member || n.TopicID != k.topic.ID {
		k.confirm(n, protocol.ControlStale)
		return
	}
	part := k.part(n.Partition)
	if part.owned && n.OwnershipEpoch < part.epoch {
		k.confirm(n, protocol.ControlStale)
		return
	}
	k.joinEp, k.assEp = max(k.joinEp, n.MembershipEpoch), max(k.assEp, n.AssignmentEpoch)
	if n.Kind == protocol.NoticeAssign {
		if !part.owned || n.OwnershipEpoch > part.epoch {
			k.clear(part)
			part.owned, part.epoch = true, n.OwnershipEpoch
			part.setRevoke(nil)
			part.unsettled = unsettled{} // what was delivered under an older epoch no ACK of the new one touches
			k.callAssign(part)
		}
		k.confirm(n, protocol.ControlOK)
		k.pull()
		return
	}
	if part.revoke != nil && part.revoke.NoticeID == n.NoticeID {
		return // repeated while messages at hand are finished
	}
	revoke := *n
	part.setRevoke(&revoke)
	part.revokeBy = k.tick + revokeTicks
	for i := range part.lanes {
		for queue := &part.lanes[i].queue; queue.len() > 0; { // nobody has begun these
			k.end(queue.pop(), false)
		}
	}
	k.settleRevoke(part)
}

// settleRevoke confirms a REVOKE when nothing of the partition is at hand any more and OnRevoke was called, or when it
// takes too long: the ACKs of what was finished are in the stream before the confirmation.
func (k *Consumer) settleRevoke(part *assigned) {
	if part.revoke == nil {
		return
	}
	late := k.tick >= part.revokeBy
	if part.head != nil && !late {
		return
	}
	k.callRevoke(part, late)
	if part.calls > 0 && !late {
		return
	}
	n := part.revoke
	k.clear(part)
	part.setRevoke(nil)
	part.owned, part.fenced = false, part.epoch
	k.confirm(n, protocol.ControlOK)
}

func (part *assigned) setRevoke(n *protocol.Notice) {
	part.revoke = n
	part.stop.Store(n != nil)
}

func (k *Consumer) confirm(n *protocol.Notice, result protocol.ControlResult) {
	m := protocol.ControlAck{NoticeID: n.NoticeID, Kind: n.Kind, GroupID: n.GroupID, MembershipEpoch: n.MembershipEpoch,
		AssignmentEpoch: n.AssignmentEpoch, OwnershipEpoch: n.OwnershipEpoch, Result: result}
	k.send(m.AppendFrame)
}

func (k *Consumer) heartbeat(state protocol.MemberState) {
	m := protocol.Heartbeat{SubscriptionID: k.subID, MemberID: k.member, MembershipEpoch: k.joinEp, AssignmentEpoch: k.assEp,
		State: state}
	k.beats++
	k.send(m.AppendFrame)
}

// onTick is called every second of a connection. It reports whether the broker owes an answer.
func (k *Consumer) onTick() (waits bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.tick++
	if k.tick%heartbeatTicks == 0 && !k.closing {
		k.heartbeat(protocol.MemberActive)
	}
	retry := k.retry
	k.retry = nil
	for _, a := range retry {
		k.request(a)
	}
	k.credit.flush() // what was kept back while ACKs were stuck
	k.pull()
	for _, part := range k.parts {
		k.renewLeases(part)
		k.settleRevoke(part)
	}
	return k.beats > 0 || k.answers.len() > 0
}

// renewLeases sends PROGRESS for what waits or is worked on, and ends what the broker has given up by now.
func (k *Consumer) renewLeases(part *assigned) {
	lease, longest := uint64(k.opts.Lease/time.Second), uint64(k.opts.MaxProcessing/time.Second)
	for m := part.head; m != nil; {
		next := m.next
		switch idle := k.tick - m.renewed; {
		case idle >= lease:
			k.end(m, false)
		case idle >= lease/3 && k.tick-m.born < longest:
			k.renew(m)
		}
		m = next
	}
	for i := range part.lanes { // nobody takes them while a handler is stuck
		for queue := &part.lanes[i].queue; queue.len() > 0 && !(*queue.at(0)).Active(); {
			queue.pop()
		}
	}
}
