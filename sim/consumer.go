package sim

import (
	"bytes"
	"encoding/binary"
	"slices"
	"time"

	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/protocol"
)

// consumer is a member of a group. It handles what it gets in one way or another, and joins again when its connection ends.
type consumer struct {
	w     *world
	r     *record
	g     *group
	s     *session
	sub   protocol.SubResult
	owns  map[uint16]uint64 // ownership epochs by partition
	timer int
	got   int
	// reader: it only looks, into seen.
	reader  bool
	seen    map[place][2]uint64
	stopped bool
	pulling bool
	// mute: it doesn't confirm what is taken from it, which is in unconfirmed.
	mute        bool
	unconfirmed map[uint16]bool
}

func newConsumer(w *world, r *record, g *group) *consumer {
	return &consumer{w: w, r: r, g: g, seen: map[place][2]uint64{}}
}

// stop ends the member.
func (c *consumer) stop() {
	c.stopped = true
	c.timer++
	c.s.close()
}

// speak ends a silence: what was taken meanwhile is given up once the notice comes again.
func (c *consumer) speak() { c.mute = false }

// leave ends the member in order.
func (c *consumer) leave() {
	if c.s != nil && c.sub.MemberID != 0 {
		c.s.ask(protocol.OpHeartbeat, (&protocol.Heartbeat{
			SubscriptionID: c.sub.SubscriptionID, MemberID: c.sub.MemberID, MembershipEpoch: c.sub.MembershipEpoch,
			AssignmentEpoch: c.sub.AssignmentEpoch, State: protocol.MemberLeave,
		}).AppendFrame(nil), func([]byte, error) { c.s.close() })
	}
	c.stopped = true
	c.timer++
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
	c.pulling = false
	c.s = c.w.dial(c.w.hosts[to-1])
	if c.s == nil {
		c.again(0)
		return
	}
	c.s.onEnd = func() { c.again(0) }
	c.s.push = func(op protocol.Op, payload []byte, sent sending) {
		if c.timer == mine {
			c.pushed(op, payload, sent)
		}
	}
	// The window holds all that a run publishes, so that no credit has to be given back.
	sub := protocol.Sub{Group: []byte(c.g.name), TopicID: c.g.topic, Partition: protocol.AnyPartition, CreditCount: 65535, CreditBytes: 64 << 20}
	if c.sub.MemberID != 0 {
		sub.Flags, sub.MemberID = protocol.SubFlagRejoin, c.sub.MemberID // it keeps what it owns
	} else {
		c.owns, c.unconfirmed = map[uint16]uint64{}, map[uint16]bool{}
	}
	answered := false
	c.s.ask(protocol.OpSub, sub.AppendFrame(nil), func(b []byte, err error) {
		if c.timer != mine {
			return
		}
		answered = true
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
		if c.timer == mine && !answered {
			c.begin(0) // the node died with the request on its way, or hangs
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
	for part := range uint16(partitions) {
		if e, ok := c.owns[part]; ok && !slices.Contains(p.OwnershipEpochs, e) {
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
			} else if code, _ := protocol.CodeOf(err); code == protocol.CodeStaleGeneration || code == protocol.CodeNotOwner {
				for part := range c.unconfirmed {
					delete(c.owns, part) // it was taken without this member's word
				}
			}
			return // the next beat pulls again
		}
		c.pull(mine)
	})
}

func (c *consumer) pushed(op protocol.Op, payload []byte, sent sending) {
	switch op {
	case protocol.OpNotice:
		var n protocol.Notice
		if err := n.Decode(payload); err != nil {
			c.w.fail("a malformed NOTICE: %v", err)
			return
		}
		c.notice(&n, sent)
	case protocol.OpMsg:
		var m protocol.Msg
		if err := m.Decode(payload); err != nil {
			c.w.fail("a malformed MSG: %v", err)
			return
		}
		c.message(&m, sent)
	default:
	}
}

func (c *consumer) notice(n *protocol.Notice, sent sending) {
	if !c.reader {
		c.g.assigned(c, n, sent)
	}
	switch n.Kind {
	case protocol.NoticeAssign:
		delete(c.unconfirmed, n.Partition)
		c.owns[n.Partition] = n.OwnershipEpoch
		c.sub.AssignmentEpoch, c.sub.MembershipEpoch = max(c.sub.AssignmentEpoch, n.AssignmentEpoch), max(c.sub.MembershipEpoch, n.MembershipEpoch)
	case protocol.NoticeRevoke:
		if c.mute {
			c.unconfirmed[n.Partition] = true
			return
		}
		if c.owns[n.Partition] <= n.OwnershipEpoch { // otherwise it is about an earlier time
			delete(c.owns, n.Partition)
		}
		delete(c.unconfirmed, n.Partition)
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

// message checks a delivery that was sent at a time, and answers it.
func (c *consumer) message(m *protocol.Msg, sent sending) {
	p := place{m.TopicID, m.Partition, m.Sequence}
	if len(m.Value) < 16 {
		c.w.fail("partition %d delivers %d bytes at %d that nobody has published", p.partition, len(m.Value), p.seq)
		return
	}
	id := [2]uint64{binary.BigEndian.Uint64(m.Value), binary.BigEndian.Uint64(m.Value[8:])}
	if !c.r.sent(id) || !bytes.Equal(m.Value, valueOf(id[0], id[1])) || m.ProducerID != id[0] || m.ProducerSeq != id[1] {
		c.w.fail("partition %d delivers message %v at %d, which was not published like that", p.partition, id, p.seq)
		return
	}
	if was, ok := c.r.who[p]; ok && was != id {
		c.w.fail("partition %d delivers message %v at %d, which was acknowledged as %v", p.partition, id, p.seq, was)
	}
	c.r.read(p, sent.at)
	c.w.visible(p, id)
	c.seen[p] = id
	c.got++
	if c.reader {
		return
	}
	if _, ok := c.owns[p.partition]; !ok && !c.unconfirmed[p.partition] {
		c.owns[p.partition] = m.OwnershipEpoch // the notice was lost with an earlier connection
	}
	d := c.g.delivery(c.sub.MemberID, m, p, id, sent)
	refused, forGood := poisonous(id)
	switch refused = refused && c.g.picky; {
	case refused && forGood:
		c.refuse(m, d, protocol.NackReject)
	case refused && m.Attempt%2 == 1:
		c.refuse(m, d, protocol.NackRetryNow)
	case refused:
		c.refuse(m, d, protocol.NackRetryLater)
	case c.w.chance(0.01):
		// It is forgotten, and its lease runs out.
	case c.w.chance(0.01):
		c.refuse(m, d, protocol.NackRetryNow)
	default:
		c.acknowledge(m, d)
	}
}

func (c *consumer) acknowledge(m *protocol.Msg, d *delivered) {
	d.tried = true
	c.ask(protocol.OpAck, (&protocol.Ack{
		SubscriptionID: c.sub.SubscriptionID, TopicID: m.TopicID, Partition: m.Partition, Sequence: m.Sequence,
		DeliveryID: m.DeliveryID, OwnershipEpoch: m.OwnershipEpoch,
	}).AppendFrame(nil), func() {
		if !d.acked {
			d.acked, d.ackedAt = true, c.w.now
		}
	})
}

func (c *consumer) refuse(m *protocol.Msg, d *delivered, reason protocol.NackReason) {
	c.ask(protocol.OpNack, (&protocol.Nack{
		SubscriptionID: c.sub.SubscriptionID, TopicID: m.TopicID, Partition: m.Partition, Sequence: m.Sequence,
		DeliveryID: m.DeliveryID, OwnershipEpoch: m.OwnershipEpoch, Reason: reason,
	}).AppendFrame(nil), func() {
		d.refusals, d.refusedAt = max(d.refusals, int(m.Attempt)), c.w.now
		d.rejected = d.rejected || reason == protocol.NackReject
	})
}

// ask sends an answer to a delivery; done is called if it is taken.
func (c *consumer) ask(op protocol.Op, frame []byte, done func()) {
	mine := c.timer
	c.s.ask(op, frame, func(_ []byte, err error) {
		if err == nil {
			done()
			return
		}
		if c.timer == mine {
			if id := leaderOf(err); id != 0 {
				c.again(id)
			}
		}
	})
}
