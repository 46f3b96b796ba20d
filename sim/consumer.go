package sim

import (
	"encoding/binary"
	"time"

	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/protocol"
)

// consumer is a member of a group. It acknowledges what it gets, and joins again when its connection ends.
type consumer struct {
	w     *world
	r     *record
	group string
	topic uint16
	s     *session
	sub   protocol.SubResult
	owns  map[uint16]uint64 // ownership epochs by partition
	timer int
	got   int
	// got says what was delivered: the content by place; acked what was acknowledged and answered.
	seen  map[place][2]uint64
	acked map[place]bool
	// late are messages that came again although their acknowledgement was answered.
	quiet   bool // doesn't acknowledge
	stopped bool
	pulling bool
}

func newConsumer(w *world, r *record, group string, topic uint16) *consumer {
	return &consumer{w: w, r: r, group: group, topic: topic, seen: map[place][2]uint64{}, acked: map[place]bool{}}
}

// begin connects and joins.
func (c *consumer) begin(to replica.NodeID) {
	if c.s != nil {
		c.s.close()
	}
	if c.stopped {
		return
	}
	if to == 0 {
		to = replica.NodeID(c.w.rng.IntN(3) + 1)
	}
	c.timer++
	mine := c.timer
	c.owns, c.pulling = map[uint16]uint64{}, false
	c.s = c.w.dial(c.w.hosts[to-1])
	if c.s == nil {
		c.again(0)
		return
	}
	c.s.onEnd = func() { c.again(0) }
	c.s.push = func(op protocol.Op, payload []byte) {
		if c.timer == mine {
			c.pushed(op, payload)
		}
	}
	// The window holds all that a run publishes, so that no credit has to be given back.
	sub := protocol.Sub{Group: []byte(c.group), TopicID: c.topic, Partition: protocol.AnyPartition, CreditCount: 65535, CreditBytes: 64 << 20}
	if c.sub.MemberID != 0 {
		sub.Flags, sub.MemberID = protocol.SubFlagRejoin, c.sub.MemberID
	}
	c.s.ask(protocol.OpSub, sub.AppendFrame(nil), func(b []byte, err error) {
		if c.timer != mine {
			return
		}
		if err == nil {
			err = c.sub.Decode(b)
		}
		if err != nil {
			c.sub = protocol.SubResult{}
			c.again(leaderOf(err))
			return
		}
		c.beat(mine)
	})
	c.w.after(3*time.Second, func() {
		if c.timer == mine && c.sub.MemberID == 0 {
			c.begin(0)
		}
	})
}

func (c *consumer) again(to replica.NodeID) {
	c.timer++
	mine := c.timer
	c.w.after(c.w.between(10*time.Millisecond, 100*time.Millisecond), func() {
		if c.timer == mine {
			c.begin(to)
		}
	})
}

// beat keeps the membership, and pulls.
func (c *consumer) beat(mine int) {
	if c.timer != mine {
		return
	}
	if !c.s.alive() {
		c.again(0)
		return
	}
	c.s.ask(protocol.OpHeartbeat, (&protocol.Heartbeat{
		SubscriptionID: c.sub.SubscriptionID, MemberID: c.sub.MemberID, MembershipEpoch: c.sub.MembershipEpoch,
		AssignmentEpoch: c.sub.AssignmentEpoch, State: protocol.MemberActive,
	}).AppendFrame(nil), func(_ []byte, err error) {
		if err != nil && c.timer == mine {
			c.again(leaderOf(err))
		}
	})
	c.pull(mine)
	c.w.after(300*time.Millisecond, func() { c.beat(mine) })
}

func (c *consumer) pull(mine int) {
	if c.pulling || len(c.owns) == 0 {
		return
	}
	c.pulling = true
	p := protocol.Pull{
		SubscriptionID: c.sub.SubscriptionID, MemberID: c.sub.MemberID, MembershipEpoch: c.sub.MembershipEpoch,
		AssignmentEpoch: c.sub.AssignmentEpoch, MaxMsgs: 64, MaxBytes: 1 << 20, WaitMs: 200, MinBytes: 1,
	}
	epochs := map[uint64]bool{}
	for part := range uint16(64) {
		if e, ok := c.owns[part]; ok && !epochs[e] {
			epochs[e] = true
			p.OwnershipEpochs = append(p.OwnershipEpochs, e)
		}
	}
	c.s.ask(protocol.OpPull, p.AppendFrame(nil), func(_ []byte, err error) {
		if c.timer != mine {
			return
		}
		c.pulling = false
		if err != nil {
			if id := leaderOf(err); id != 0 {
				c.again(id)
			}
			return // the next beat pulls again
		}
		c.pull(mine)
	})
}

func (c *consumer) pushed(op protocol.Op, payload []byte) {
	switch op {
	case protocol.OpNotice:
		var n protocol.Notice
		if err := n.Decode(payload); err != nil {
			c.w.fail("a malformed NOTICE: %v", err)
			return
		}
		c.notice(&n)
	case protocol.OpMsg:
		var m protocol.Msg
		if err := m.Decode(payload); err != nil {
			c.w.fail("a malformed MSG: %v", err)
			return
		}
		c.message(&m)
	default:
	}
}

func (c *consumer) notice(n *protocol.Notice) {
	switch n.Kind {
	case protocol.NoticeAssign:
		c.owns[n.Partition] = n.OwnershipEpoch
		c.sub.AssignmentEpoch, c.sub.MembershipEpoch = max(c.sub.AssignmentEpoch, n.AssignmentEpoch), max(c.sub.MembershipEpoch, n.MembershipEpoch)
	case protocol.NoticeRevoke:
		delete(c.owns, n.Partition)
	default:
	}
	mine := c.timer
	c.s.ask(protocol.OpControlAck, (&protocol.ControlAck{
		NoticeID: n.NoticeID, Kind: n.Kind, GroupID: n.GroupID, MembershipEpoch: n.MembershipEpoch,
		AssignmentEpoch: n.AssignmentEpoch, OwnershipEpoch: n.OwnershipEpoch, Result: protocol.ControlOK,
	}).AppendFrame(nil), func([]byte, error) {
		if c.timer == mine {
			c.pull(mine)
		}
	})
}

// message checks and acknowledges a delivery.
func (c *consumer) message(m *protocol.Msg) {
	p := place{m.TopicID, m.Partition, m.Sequence}
	if len(m.Value) < 16 {
		c.w.fail("partition %d delivers %d bytes at %d that nobody has published", p.partition, len(m.Value), p.seq)
		return
	}
	id := [2]uint64{binary.BigEndian.Uint64(m.Value), binary.BigEndian.Uint64(m.Value[8:])}
	if !c.r.sent[id] || m.ProducerID != id[0] || m.ProducerSeq != id[1] {
		c.w.fail("partition %d delivers message %v at %d, which was not published like that", p.partition, id, p.seq)
		return
	}
	if was, ok := c.seen[p]; ok && was != id {
		c.w.fail("partition %d delivers message %v at %d, before it was %v", p.partition, id, p.seq, was)
	}
	if was, ok := c.r.who[p]; ok && was != id {
		c.w.fail("partition %d delivers message %v at %d, which was acknowledged as %v", p.partition, id, p.seq, was)
	}
	if c.acked[p] {
		c.w.fail("group %s gets %d of partition %d again (attempt %d) although its acknowledgement was answered", c.group, p.seq, p.partition, m.Attempt)
	}
	c.seen[p] = id
	c.got++
	if c.quiet {
		return
	}
	mine := c.timer
	c.s.ask(protocol.OpAck, (&protocol.Ack{
		SubscriptionID: c.sub.SubscriptionID, TopicID: m.TopicID, Partition: m.Partition, Sequence: m.Sequence,
		DeliveryID: m.DeliveryID, OwnershipEpoch: m.OwnershipEpoch,
	}).AppendFrame(nil), func(_ []byte, err error) {
		if err == nil {
			c.acked[p] = true
			return
		}
		if c.timer == mine {
			if id := leaderOf(err); id != 0 {
				c.again(id)
			}
		}
	})
}
