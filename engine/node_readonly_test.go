package engine

import (
	"testing"

	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/protocol"
)

// puller is a member that pulls.
type puller struct {
	*nodePeer
	sub    protocol.SubResult
	parsed int
}

// pullerOf joins a group; false where that is refused.
func (c *trio) pullerOf(n *Node, group string, topic uint16) (*puller, error) {
	c.t.Helper()
	p := &puller{nodePeer: newNodePeer(c.t, n)}
	sub := protocol.Sub{Group: []byte(group), TopicID: topic, Partition: protocol.AnyPartition, CreditCount: 1000, CreditBytes: 1 << 20}
	b, err := p.ask(protocol.OpSub, sub.AppendFrame(nil))
	if err != nil {
		return nil, err
	}
	return p, p.sub.Decode(b)
}

// pull asks for messages that are there, and returns them.
func (p *puller) pull(most uint16) (got []protocol.Msg, err error) {
	p.t.Helper()
	m := protocol.Pull{SubscriptionID: p.sub.SubscriptionID, MemberID: p.sub.MemberID, MembershipEpoch: p.sub.MembershipEpoch,
		AssignmentEpoch: p.sub.AssignmentEpoch, MaxMsgs: most, MaxBytes: 1 << 20}
	_, err = p.ask(protocol.OpPull, m.AppendFrame(nil))
	p.c.mu.Lock()
	pushed := p.c.pushed[p.parsed:]
	p.parsed = len(p.c.pushed)
	p.c.mu.Unlock()
	for len(pushed) > 0 {
		op, payload, n, err := protocol.ParseFrame(pushed)
		if err != nil || n == 0 {
			p.t.Fatalf("pushed bytes are no frame: %v", err)
		}
		pushed = pushed[n:]
		switch op {
		case protocol.OpMsg:
			var m protocol.Msg
			if err := m.Decode(payload); err != nil {
				p.t.Fatal(err)
			}
			got = append(got, m)
		case protocol.OpNotice:
			m, confirm := confirmation(p.t, payload)
			p.sub.AssignmentEpoch = m.AssignmentEpoch
			if _, err := p.ask(protocol.OpControlAck, confirm); err != nil {
				return got, err
			}
		default:
			p.t.Fatalf("%v was pushed", op)
		}
	}
	return got, err
}

// A leader that has lost its majority answers everything: what would have to be committed is refused at once, what is committed
// can be read, and members stay members. When the majority is back all of it goes on by itself.
func TestNode_WithoutAMajorityReadsGoOnAndWritesAreRefused(t *testing.T) {
	t.Parallel()
	c := newTrio(t, nil)
	topic := c.declare("orders", 1).TopicID
	const messages = 40
	c.commitAll(topic, 1, messages, 100)
	var p *puller
	var read []protocol.Msg
	var leader replica.NodeID
	var alone bool
	c.eventually("a leader is alone, with a member that has read some of the messages", func() bool {
		leader = c.leader()
		n := c.nodes[leader]
		var err error
		if p, err = c.pullerOf(n, "g", topic); err != nil {
			return false
		}
		defer func() {
			if !alone {
				n.ClientClosed(p.c)
			}
		}()
		for read = nil; len(read) < 10; {
			got, err := p.pull(10)
			if read = append(read, got...); err != nil {
				return false
			}
		}
		for id := range c.nodes {
			if id != leader {
				c.m.isolate(id, true)
			}
		}
		c.eventually("it has noticed", func() bool { return !n.Status().Serving })
		alone = n.Status().Role == "leader"
		if !alone {
			for id := range c.nodes {
				c.m.isolate(id, false)
			}
		}
		return alone
	})
	n := c.nodes[leader]
	first := &read[0]
	ack := protocol.Ack{SubscriptionID: p.sub.SubscriptionID, TopicID: topic, Sequence: first.Sequence, DeliveryID: first.DeliveryID, OwnershipEpoch: first.OwnershipEpoch}
	nack := protocol.Nack{SubscriptionID: p.sub.SubscriptionID, TopicID: topic, Sequence: first.Sequence, DeliveryID: first.DeliveryID, OwnershipEpoch: first.OwnershipEpoch, Reason: protocol.NackRetryNow}
	beat := protocol.Heartbeat{SubscriptionID: p.sub.SubscriptionID, MemberID: p.sub.MemberID, MembershipEpoch: p.sub.MembershipEpoch, AssignmentEpoch: p.sub.AssignmentEpoch}
	other := protocol.Sub{Group: []byte("h"), TopicID: topic, Partition: protocol.AnyPartition, CreditCount: 10, CreditBytes: 1 << 20}
	declare := protocol.Declare{Topic: []byte("new"), Partitions: 1}
	for _, r := range []struct {
		what  string
		op    protocol.Op
		frame []byte
		want  protocol.ErrorCode
	}{
		{"ACK", protocol.OpAck, ack.AppendFrame(nil), protocol.CodeReadOnlyDegraded},
		{"NACK", protocol.OpNack, nack.AppendFrame(nil), protocol.CodeReadOnlyDegraded},
		{"SUB", protocol.OpSub, other.AppendFrame(nil), protocol.CodeMetadataReadOnly},
		{"DECLARE", protocol.OpDeclare, declare.AppendFrame(nil), protocol.CodeMetadataReadOnly},
		{"HEARTBEAT", protocol.OpHeartbeat, beat.AppendFrame(nil), 0},
	} {
		if _, err := p.ask(r.op, r.frame); code(err) != r.want || r.want == 0 && err != nil {
			t.Errorf("%s: %v, want %v", r.what, err, r.want)
		}
	}
	for _, flags := range []uint16{0, uint16(protocol.DurabilityMemory), uint16(protocol.DurabilityLocal)} {
		if _, err := newNodePeer(t, n).publish(protocol.Pub{TopicID: topic, Flags: flags, Value: []byte("refused")}); code(err) != protocol.CodeReadOnlyDegraded {
			t.Errorf("PUB with flags %d: %v, want 0x6002", flags, err)
		}
	}
	for last := read[len(read)-1].Sequence; last < messages; {
		got, err := p.pull(10)
		if err != nil || len(got) == 0 || got[0].Sequence != last+1 {
			t.Fatalf("PULL behind %d: %d messages, %v", last, len(got), err)
		}
		last = got[len(got)-1].Sequence
	}
	for id := range c.nodes {
		c.m.isolate(id, false)
	}
	c.commitAll(topic, messages+1, messages+10, 100)
	c.eventually("everything that was not acknowledged comes again", func() bool { return c.acknowledged("k", topic, messages+10) })
}
