package crash

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

const (
	groupName = "workers"
	// leaveOneIn is the share of deliveries that the consumer never answers, nackOneIn that of first deliveries it refuses.
	leaveOneIn  = 8
	nackOneIn   = 32
	creditCount = 8192
	creditBytes = 64 << 20
	// pullWait is a reader's long poll, pullMsgs and pullBytes the size of one answer.
	pullWait  = 200 * time.Millisecond
	pullMsgs  = 500
	pullBytes = 1 << 20
)

// consumer is the group's one member: it acknowledges most of what it gets.
type consumer struct {
	m    *model
	rng  *rand.Rand
	conn *harness.Conn
	sub  protocol.SubResult
	out  []byte
	sent []sentAck // unanswered ACKs and NACKs
	// used is the credit to return.
	used      int
	usedBytes int
}

type sentAck struct {
	op   protocol.Op
	part uint16
	seq  uint64
}

// subscribe joins a group on a connection of its own; with a member it comes back as that one, if the broker still knows it.
func subscribe(addr string, topic uint16, group string, flags uint16, member uint64) (*harness.Conn, protocol.SubResult, error) {
	conn, err := harness.Dial(addr, "")
	if err != nil {
		return nil, protocol.SubResult{}, err
	}
	req := protocol.Sub{Group: []byte(group), TopicID: topic, Partition: protocol.AnyPartition,
		StartPolicy: protocol.StartEarliest, CreditCount: creditCount, CreditBytes: creditBytes, Flags: flags}
	if member != 0 {
		req.Flags, req.MemberID = flags|protocol.SubFlagRejoin, member
	}
	sub, err := conn.Subscribe(&req)
	if errors.Is(err, protocol.CodeUnknownMember) {
		req.Flags, req.MemberID = flags, 0
		sub, err = conn.Subscribe(&req)
	}
	if err != nil {
		conn.Close()
		return nil, sub, err
	}
	return conn, sub, nil
}

// newConsumer subscribes with STREAM, as the member that it was in the round before.
func newConsumer(m *model, addr string, topic uint16, rng *rand.Rand, member uint64) (*consumer, error) {
	conn, sub, err := subscribe(addr, topic, groupName, protocol.SubFlagStream, member)
	if err != nil {
		return nil, err
	}
	return &consumer{m: m, rng: rng, conn: conn, sub: sub}, nil
}

// run consumes until the connection breaks, which is expected. An error is an answer that should not have come.
func (c *consumer) run() error {
	for {
		f, err := c.conn.Next()
		if err != nil {
			return nil
		}
		if err := c.frame(&f); err != nil {
			c.conn.Close()
			return fmt.Errorf("consumer: %w", err)
		}
		if c.conn.Buffered() {
			continue
		}
		if c.used > 0 {
			cr := protocol.Credit{SubscriptionID: c.sub.SubscriptionID, MembershipEpoch: c.sub.MembershipEpoch, Mode: protocol.CreditAdd,
				Count: uint16(c.used), Bytes: uint32(c.usedBytes)}
			c.out = cr.AppendFrame(c.out)
			c.used, c.usedBytes = 0, 0
		}
		if len(c.out) > 0 {
			if c.conn.Send(c.out) != nil {
				return nil
			}
			c.out = c.out[:0]
		}
	}
}

func (c *consumer) frame(f *harness.Frame) error {
	switch f.Op {
	case protocol.OpMsg:
		var msg protocol.Msg
		if err := msg.Decode(f.Payload); err != nil {
			return err
		}
		c.m.delivered(&msg)
		c.used++
		c.usedBytes += len(msg.Key) + len(msg.Value)
		c.answer(&msg)
		return nil
	case protocol.OpOK:
		var ok protocol.OKFrame
		if err := ok.Decode(f.Payload); err != nil {
			return err
		}
		return c.answered(ok.RequestOp)
	case protocol.OpNotice:
		frame, err := confirm(f.Payload, &c.sub)
		c.out = append(c.out, frame...)
		return err
	default:
		if err := f.Err(); err != nil {
			return err
		}
		return fmt.Errorf("unexpected %v", f.Op)
	}
}

// answer acknowledges a message, or refuses it, or leaves it.
func (c *consumer) answer(msg *protocol.Msg) {
	switch {
	case c.rng.IntN(leaveOneIn) == 0:
	case msg.Attempt == 1 && c.rng.IntN(nackOneIn) == 0:
		c.m.nackSent(msg.Partition, msg.Sequence)
		c.sent = append(c.sent, sentAck{protocol.OpNack, msg.Partition, msg.Sequence})
		nack := protocol.Nack{SubscriptionID: msg.SubscriptionID, TopicID: msg.TopicID, Partition: msg.Partition, Sequence: msg.Sequence,
			DeliveryID: msg.DeliveryID, OwnershipEpoch: msg.OwnershipEpoch, Reason: protocol.NackRetryNow}
		c.out = nack.AppendFrame(c.out)
	default:
		c.m.ackSent(msg.Partition, msg.Sequence)
		c.sent = append(c.sent, sentAck{protocol.OpAck, msg.Partition, msg.Sequence})
		ack := ackOf(msg)
		c.out = ack.AppendFrame(c.out)
	}
}

// answered takes the answer to the oldest ACK or NACK.
func (c *consumer) answered(op protocol.Op) error {
	if op != protocol.OpAck && op != protocol.OpNack {
		return nil // CREDIT, CONTROL_ACK
	}
	if len(c.sent) == 0 || c.sent[0].op != op {
		return fmt.Errorf("an answer to %v that is not the oldest one open", op)
	}
	s := c.sent[0]
	c.sent = c.sent[1:]
	if op == protocol.OpAck {
		c.m.ackAnswered(s.part, s.seq)
	} else {
		c.m.nackAnswered(s.part, s.seq)
	}
	return nil
}

// confirm returns the answer to a NOTICE and takes over the epochs that it gives the member.
func confirm(payload []byte, sub *protocol.SubResult) ([]byte, error) {
	var n protocol.Notice
	if err := n.Decode(payload); err != nil {
		return nil, err
	}
	sub.MembershipEpoch, sub.AssignmentEpoch = n.MembershipEpoch, n.AssignmentEpoch
	return harness.ConfirmNotice(&n), nil
}

func ackOf(msg *protocol.Msg) protocol.Ack {
	return protocol.Ack{SubscriptionID: msg.SubscriptionID, TopicID: msg.TopicID, Partition: msg.Partition, Sequence: msg.Sequence,
		DeliveryID: msg.DeliveryID, OwnershipEpoch: msg.OwnershipEpoch}
}

// readLog reads every partition from its start up to its known end, as a group of its own, by PULL with cumulative ACKs.
func readLog(m *model, addr string, topic uint16, group string, within time.Duration) (read int, err error) {
	conn, sub, err := subscribe(addr, topic, group, 0, 0)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	check, ends := m.newLogCheck(), m.ends()
	deadline := time.Now().Add(within)
	if err := conn.Net().SetDeadline(deadline.Add(time.Second)); err != nil {
		return 0, err
	}
	for !check.reached(ends) {
		if time.Now().After(deadline) {
			return 0, fmt.Errorf("group %s did not get to the end of the log within %v: next %d, ends %d", group, within, check.next, ends)
		}
		if err := pull(conn, &sub, check); err != nil {
			return 0, fmt.Errorf("group %s: %w", group, err)
		}
	}
	leave := protocol.Heartbeat{SubscriptionID: sub.SubscriptionID, MemberID: sub.MemberID, MembershipEpoch: sub.MembershipEpoch,
		AssignmentEpoch: sub.AssignmentEpoch, State: protocol.MemberLeave}
	if err := conn.Send(leave.AppendFrame(nil)); err != nil {
		return 0, err
	}
	return check.finish(), nil
}

func (c *logCheck) reached(ends []uint64) bool {
	for i, end := range ends {
		if c.next[i] <= end {
			return false
		}
	}
	return true
}

// pull makes one request and handles everything up to its answer; what came is acknowledged cumulatively and its credit
// returned, with requests whose answers come with the next pull.
func pull(conn *harness.Conn, sub *protocol.SubResult, check *logCheck) error {
	req := protocol.Pull{SubscriptionID: sub.SubscriptionID, MemberID: sub.MemberID, MembershipEpoch: sub.MembershipEpoch,
		AssignmentEpoch: sub.AssignmentEpoch, MaxMsgs: pullMsgs, MaxBytes: pullBytes, WaitMs: uint16(pullWait.Milliseconds()), MinBytes: 1}
	if err := conn.Send(req.AppendFrame(nil)); err != nil {
		return err
	}
	last := map[uint16]protocol.Msg{}
	credit := protocol.Credit{SubscriptionID: sub.SubscriptionID, MembershipEpoch: sub.MembershipEpoch, Mode: protocol.CreditAdd}
	for {
		f, err := conn.Next()
		if err != nil {
			return err
		}
		switch f.Op {
		case protocol.OpMsg:
			var msg protocol.Msg
			if err := msg.Decode(f.Payload); err != nil {
				return err
			}
			check.message(&msg)
			credit.Count++
			credit.Bytes += uint32(len(msg.Key) + len(msg.Value))
			last[msg.Partition] = msg
			continue
		case protocol.OpNotice:
			frame, err := confirm(f.Payload, sub)
			if err := errors.Join(err, conn.Send(frame)); err != nil {
				return err
			}
			continue
		default:
			if err := f.Err(); errors.Is(err, protocol.CodeStaleGeneration) {
				return nil // the NOTICE with the new epochs is behind it or before it: pull again
			} else if err != nil {
				return err
			}
		}
		var ok protocol.OKFrame
		if err := ok.Decode(f.Payload); err != nil {
			return err
		}
		if ok.RequestOp != protocol.OpPull {
			continue
		}
		var out []byte
		for _, msg := range last {
			ack := ackOf(&msg)
			ack.Flags = protocol.AckFlagCumulative
			out = ack.AppendFrame(out)
		}
		if credit.Count > 0 {
			out = credit.AppendFrame(out)
		}
		if len(out) == 0 {
			return nil
		}
		return conn.Send(out)
	}
}
