package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

// Credit goes back in batches (concepts, "Credit"): at this many messages, this many bytes, half of the window, or this
// time, whichever is first.
const (
	creditBatchCount = 32
	creditBatchBytes = 1 << 20
	creditDelay      = 20 * time.Millisecond
)

// heartbeatEvery keeps a member alive that has nothing to acknowledge.
const heartbeatEvery = 3 * time.Second

// AckMode says how a consumer acknowledges.
type AckMode uint8

const (
	// AckEach sends one ACK per message.
	AckEach AckMode = iota
	// AckBatch sends one cumulative ACK per partition for everything that one read brought.
	AckBatch
)

// ConsumerOptions describe a member of a group.
type ConsumerOptions struct {
	Addr        string
	TopicID     uint16
	Partitions  int
	Group       string
	CreditCount uint16
	CreditBytes uint32
	Ack         AckMode
	// Stamped values start with the time at which they were due: latencies are recorded but for the group's first messages.
	Stamped bool
	// Total is what all members of the group are to receive together.
	Total *Tally
}

// Consumer is a subscription with STREAM: it acknowledges what arrives and returns the credit.
type Consumer struct {
	opts ConsumerOptions
	conn *harness.Conn
	sub  protocol.SubResult

	read []byte
	have int
	out  []byte

	// acks are the due times of the messages whose ACKs are unanswered, in order (0 for a cumulative ACK).
	acks    []int64
	ackHead int

	at                       int64 // when the last read returned: what it brought arrived by then
	creditCount, creditBytes int   // to return
	creditSince              int64
	batchLast                []protocol.Msg // AckBatch: the newest message of each partition in this read, Sequence 0 if none
	touched                  []uint16
	expect                   []uint64
	lastSent                 int64
	delivered, ackedAt       *hdrhistogram.Histogram
	assigned                 atomic.Int64
}

// NewConsumer connects and subscribes; delivery starts with Run.
func NewConsumer(o ConsumerOptions) (*Consumer, error) {
	c, err := harness.Dial(o.Addr, "")
	if err != nil {
		return nil, err
	}
	sub, err := c.Subscribe(&protocol.Sub{Group: []byte(o.Group), TopicID: o.TopicID, Partition: protocol.AnyPartition,
		StartPolicy: protocol.StartEarliest, CreditCount: o.CreditCount, CreditBytes: o.CreditBytes, Flags: protocol.SubFlagStream})
	if err != nil {
		c.Close()
		return nil, err
	}
	return &Consumer{opts: o, conn: c, sub: sub, read: make([]byte, 1<<20),
		batchLast: make([]protocol.Msg, o.Partitions), expect: make([]uint64, o.Partitions),
		delivered: newHist(), ackedAt: newHist(), lastSent: now()}, nil
}

// Close closes the connection.
func (c *Consumer) Close() error { return c.conn.Close() }

// Assigned returns how many partitions the member has; any goroutine.
func (c *Consumer) Assigned() int { return int(c.assigned.Load()) }

// Latencies returns those until arrival and until the ACK was answered; not while Run runs.
func (c *Consumer) Latencies() (delivered, acked *hdrhistogram.Histogram) {
	return c.delivered, c.ackedAt
}

// Run receives until the group has received everything and this member's ACKs were answered.
func (c *Consumer) Run(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { c.conn.Close() })
	defer stop()
	for !c.opts.Total.complete() || c.ackHead < len(c.acks) {
		if err := c.turn(); err != nil {
			return fmt.Errorf("consume, after %v: %w", c.opts.Total, err)
		}
	}
	return nil
}

// turn handles what one read brings, and answers with one write.
func (c *Consumer) turn() error {
	if err := c.fillBuffer(); err != nil {
		return err
	}
	off := 0
	for {
		op, payload, n, err := protocol.ParseFrame(c.read[off:c.have])
		if err != nil {
			return err
		}
		if n == 0 {
			break
		}
		off += n
		if err := c.frame(op, payload); err != nil {
			return err
		}
	}
	c.have = copy(c.read, c.read[off:c.have])
	if c.have == len(c.read) {
		c.read = append(c.read, make([]byte, len(c.read))...) // a frame larger than the buffer
	}
	c.finishBatch()
	t := now()
	c.returnCredit(t)
	if len(c.out) == 0 && t-c.lastSent > int64(heartbeatEvery) {
		hb := protocol.Heartbeat{SubscriptionID: c.sub.SubscriptionID, MemberID: c.sub.MemberID, MembershipEpoch: c.sub.MembershipEpoch,
			AssignmentEpoch: c.sub.AssignmentEpoch, State: protocol.MemberActive}
		c.out = hb.AppendFrame(c.out)
	}
	if len(c.out) == 0 {
		return nil
	}
	c.lastSent = t
	err := c.conn.Send(c.out)
	c.out = c.out[:0]
	return err
}

// fillBuffer reads once. It gives up early where credit waits to be returned, and to see whether the group is done.
func (c *Consumer) fillBuffer() error {
	if c.conn.Buffered() { // what arrived together with SUB's answer
		f, err := c.conn.Next()
		if err != nil {
			return err
		}
		c.at = now()
		return c.frame(f.Op, f.Payload)
	}
	wait := groupPoll
	if c.creditCount > 0 {
		wait = creditDelay
	}
	if err := c.conn.Net().SetReadDeadline(time.Now().Add(wait)); err != nil {
		return err
	}
	n, err := c.conn.Net().Read(c.read[c.have:])
	c.at = now()
	c.have += n
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	return err
}

func (c *Consumer) frame(op protocol.Op, payload []byte) error {
	switch op {
	case protocol.OpMsg:
		return c.message(payload)
	case protocol.OpOK:
		var f protocol.OKFrame
		if err := f.Decode(payload); err != nil {
			return err
		}
		if f.RequestOp == protocol.OpAck {
			if c.ackHead == len(c.acks) {
				return errors.New("an answer to an ACK that was not sent")
			}
			if due := c.acks[c.ackHead]; due != 0 {
				record(c.ackedAt, c.at-due)
			}
			c.ackHead++
			if c.ackHead == len(c.acks) {
				c.acks, c.ackHead = c.acks[:0], 0
			} else if c.ackHead > 64<<10 {
				c.acks = c.acks[:copy(c.acks, c.acks[c.ackHead:])]
				c.ackHead = 0
			}
		}
		return nil
	case protocol.OpNotice:
		var n protocol.Notice
		if err := n.Decode(payload); err != nil {
			return err
		}
		if n.Kind == protocol.NoticeAssign {
			c.assigned.Add(1)
		} else {
			c.assigned.Add(-1)
		}
		c.out = append(c.out, harness.ConfirmNotice(&n)...)
		return nil
	case protocol.OpErr:
		var f protocol.ErrFrame
		if err := f.Decode(payload); err != nil {
			return err
		}
		return f.Err()
	default:
		return fmt.Errorf("unexpected %v from the broker", op)
	}
}

func (c *Consumer) message(payload []byte) error {
	var m protocol.Msg
	if err := m.Decode(payload); err != nil {
		return err
	}
	if int(m.Partition) >= len(c.expect) {
		return fmt.Errorf("a message of partition %d of a topic with %d", m.Partition, len(c.expect))
	}
	// Nothing is nacked, and partitions are shared before anything is published: each arrives in order without a hole.
	if want := c.expect[m.Partition]; want != 0 && m.Sequence != want {
		return fmt.Errorf("partition %d: sequence %d arrived, %d was next", m.Partition, m.Sequence, want)
	}
	c.expect[m.Partition] = m.Sequence + 1
	due := int64(0)
	if c.opts.Stamped && len(m.Value) >= stampBytes && c.opts.Total.received.Load() >= c.opts.Total.warm {
		due = int64(binary.BigEndian.Uint64(m.Value))
		record(c.delivered, c.at-due)
	}
	if c.opts.Ack == AckEach {
		c.ack(&m, 0, due)
	} else {
		if c.batchLast[m.Partition].Sequence == 0 {
			c.touched = append(c.touched, m.Partition)
		}
		c.batchLast[m.Partition] = m
	}
	if c.creditCount == 0 {
		c.creditSince = c.at
	}
	c.creditCount++
	c.creditBytes += len(m.Key) + len(m.Value)
	c.opts.Total.add(c.at, 1, len(m.Value))
	return nil
}

func (c *Consumer) ack(m *protocol.Msg, flags uint16, due int64) {
	a := protocol.Ack{SubscriptionID: m.SubscriptionID, TopicID: m.TopicID, Partition: m.Partition, Sequence: m.Sequence,
		DeliveryID: m.DeliveryID, OwnershipEpoch: m.OwnershipEpoch, Flags: flags}
	c.out = a.AppendFrame(c.out)
	c.acks = append(c.acks, due)
}

// finishBatch acknowledges what this read brought, where that is done cumulatively.
func (c *Consumer) finishBatch() {
	for _, p := range c.touched {
		c.ack(&c.batchLast[p], protocol.AckFlagCumulative, 0)
		c.batchLast[p] = protocol.Msg{}
	}
	c.touched = c.touched[:0]
}

func (c *Consumer) returnCredit(t int64) {
	if c.creditCount == 0 {
		return
	}
	if c.creditCount < creditBatchCount && c.creditBytes < creditBatchBytes && c.creditCount < int(c.opts.CreditCount)/2 &&
		c.creditBytes < int(c.opts.CreditBytes)/2 && t-c.creditSince < int64(creditDelay) {
		return
	}
	cr := protocol.Credit{SubscriptionID: c.sub.SubscriptionID, MembershipEpoch: c.sub.MembershipEpoch, Mode: protocol.CreditAdd,
		Count: uint16(min(c.creditCount, 65535)), Bytes: uint32(c.creditBytes)}
	c.out = cr.AppendFrame(c.out)
	c.creditCount, c.creditBytes = 0, 0
}
