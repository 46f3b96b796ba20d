package harness

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

const (
	// crowdHeartbeat is the time between two heartbeats of a member.
	crowdHeartbeat = 3 * time.Second
	// crowdCredit is how many messages a member finishes before it returns their credit.
	crowdCredit = 32
	// crowdPatience bounds the wait for the answer to a SUB or LEAVE.
	crowdPatience = 60 * time.Second
)

// Crowd is many members, of one group or of many, on one connection. They confirm what they are told, acknowledge every
// message at once, return credit and send heartbeats. Its methods may be called from any goroutine.
type Crowd struct {
	conn *Conn
	// onMessage sees each message before it is acknowledged.
	onMessage func(m *CrowdMember, msg *protocol.Msg)

	mu      sync.Mutex
	asked   []crowdRequest
	members map[uint16]*CrowdMember // by subscription id
	byID    map[uint64]*CrowdMember
	out     []byte
	err     error
	closed  bool
	done    chan struct{}
}

// crowdRequest is one without an answer; done is nil where nobody waits.
type crowdRequest struct {
	op   protocol.Op
	done func(result []byte, err error)
}

// CrowdMember is one member of a Crowd.
type CrowdMember struct {
	Group string
	sub   protocol.SubResult
	crowd *Crowd
	// owned holds the ownership epochs, by partition; guarded by the crowd's lock.
	owned map[uint16]uint64
	// count and bytes are credit to return.
	count, bytes int
	received     atomic.Uint64
}

// NewCrowd connects. onMessage may be nil; it is called on the goroutine that reads and must not block, and the message's
// bytes are valid only until it returns.
func NewCrowd(addr string, onMessage func(m *CrowdMember, msg *protocol.Msg)) (*Crowd, error) {
	conn, err := Dial(addr, "")
	if err != nil {
		return nil, err
	}
	c := &Crowd{conn: conn, onMessage: onMessage, members: map[uint16]*CrowdMember{}, byID: map[uint64]*CrowdMember{}, done: make(chan struct{})}
	go c.read()
	go c.beat()
	return c, nil
}

// Join makes another member. s.SubscriptionID and the like come with the answer; a rejoining member takes its epochs over
// from the notices that follow.
func (c *Crowd) Join(s *protocol.Sub) (*CrowdMember, error) {
	m := &CrowdMember{Group: string(s.Group), crowd: c, owned: map[uint16]uint64{}}
	err := c.wait(protocol.OpSub, s.AppendFrame(nil), func(result []byte) error {
		if err := m.sub.Decode(result); err != nil {
			return err
		}
		c.members[m.sub.SubscriptionID], c.byID[m.sub.MemberID] = m, m
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("subscribe group %q: %w", s.Group, err)
	}
	return m, nil
}

// Leave has the member leave its group.
func (m *CrowdMember) Leave() error {
	c := m.crowd
	c.mu.Lock()
	frame := m.heartbeat(protocol.MemberLeave)
	c.mu.Unlock()
	return c.wait(protocol.OpHeartbeat, frame, func([]byte) error {
		delete(c.members, m.sub.SubscriptionID)
		delete(c.byID, m.sub.MemberID)
		return nil
	})
}

// ID is the member's id.
func (m *CrowdMember) ID() uint64 { return m.sub.MemberID }

// Received is the number of messages that the member has got.
func (m *CrowdMember) Received() uint64 { return m.received.Load() }

// Owned is the number of partitions that the member has.
func (m *CrowdMember) Owned() int {
	m.crowd.mu.Lock()
	defer m.crowd.mu.Unlock()
	return len(m.owned)
}

// Err returns why the connection ended; nil while it works, and after Close.
func (c *Crowd) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close breaks the connection, as the end of a process does.
func (c *Crowd) Close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.conn.Close()
	<-c.done
}

// wait sends a request and waits for its answer, of which ok, under the lock, gets the result.
func (c *Crowd) wait(op protocol.Op, frame []byte, ok func(result []byte) error) error {
	answer := make(chan error, 1)
	c.mu.Lock()
	err := c.ask(op, frame, func(result []byte, err error) {
		if err == nil {
			err = ok(result)
		}
		answer <- err
	})
	if err == nil {
		err = c.flush()
	}
	c.mu.Unlock()
	if err != nil {
		return err
	}
	select {
	case err := <-answer:
		return err
	case <-time.After(crowdPatience):
		return fmt.Errorf("%v is not answered after %v", op, crowdPatience)
	}
}

func (c *Crowd) ask(op protocol.Op, frame []byte, done func(result []byte, err error)) error {
	if c.err != nil {
		return c.err
	}
	c.out = append(c.out, frame...)
	c.asked = append(c.asked, crowdRequest{op, done})
	return nil
}

func (c *Crowd) flush() error {
	if len(c.out) == 0 {
		return nil
	}
	err := c.conn.Send(c.out)
	c.out = c.out[:0]
	return err
}

// beat sends heartbeats until the connection ends.
func (c *Crowd) beat() {
	for {
		select {
		case <-c.done:
			return
		case <-time.After(crowdHeartbeat):
		}
		c.mu.Lock()
		for _, m := range c.members {
			m.returnCredit()
			// A refusal means that it met a NOTICE on the way, or that the reader is about to learn why.
			if c.ask(protocol.OpHeartbeat, m.heartbeat(protocol.MemberActive), nil) != nil {
				break
			}
		}
		_ = c.flush() // the reader learns of it
		c.mu.Unlock()
	}
}

func (m *CrowdMember) heartbeat(state protocol.MemberState) []byte {
	h := protocol.Heartbeat{SubscriptionID: m.sub.SubscriptionID, MemberID: m.sub.MemberID, MembershipEpoch: m.sub.MembershipEpoch,
		AssignmentEpoch: m.sub.AssignmentEpoch, State: state}
	return h.AppendFrame(nil)
}

// read handles what comes until the connection ends.
func (c *Crowd) read() {
	defer close(c.done)
	for {
		f, err := c.conn.Next()
		c.mu.Lock()
		if err == nil {
			err = c.frame(&f)
		}
		if err == nil && !c.conn.Buffered() {
			err = c.flush()
		}
		if err != nil {
			asked := c.asked
			c.asked = nil
			if c.err = err; c.closed {
				c.err = nil
			}
			c.mu.Unlock()
			c.conn.Close()
			for _, r := range asked {
				if r.done != nil {
					r.done(nil, err)
				}
			}
			return
		}
		c.mu.Unlock()
	}
}

func (c *Crowd) frame(f *Frame) error {
	switch f.Op {
	case protocol.OpMsg:
		var msg protocol.Msg
		if err := msg.Decode(f.Payload); err != nil {
			return err
		}
		return c.message(&msg)
	case protocol.OpNotice:
		var n protocol.Notice
		if err := n.Decode(f.Payload); err != nil {
			return err
		}
		if m := c.byID[n.MemberID]; m != nil {
			m.sub.MembershipEpoch = max(m.sub.MembershipEpoch, n.MembershipEpoch)
			m.sub.AssignmentEpoch = max(m.sub.AssignmentEpoch, n.AssignmentEpoch)
			if n.Kind == protocol.NoticeAssign {
				m.owned[n.Partition] = n.OwnershipEpoch
			} else {
				delete(m.owned, n.Partition)
			}
		}
		return c.ask(protocol.OpControlAck, ConfirmNotice(&n), nil)
	case protocol.OpOK:
		var ok protocol.OKFrame
		if err := ok.Decode(f.Payload); err != nil {
			return err
		}
		return c.answered(ok.RequestOp, ok.Result, nil)
	default:
		var e protocol.ErrFrame
		if err := e.Decode(f.Payload); err != nil {
			return err
		}
		return c.answered(e.RequestOp, nil, e.Err())
	}
}

func (c *Crowd) answered(op protocol.Op, result []byte, refusal error) error {
	if len(c.asked) == 0 || c.asked[0].op != op {
		return fmt.Errorf("an answer to %v (%w) that is not the oldest request open", op, refusal)
	}
	r := c.asked[0]
	c.asked = c.asked[1:]
	switch {
	case r.done != nil:
		r.done(result, refusal)
	case refusal != nil && op == protocol.OpAck:
		return fmt.Errorf("an ACK was refused: %w", refusal)
	}
	return nil
}

func (c *Crowd) message(msg *protocol.Msg) error {
	m := c.members[msg.SubscriptionID]
	if m == nil {
		return fmt.Errorf("a message came for subscription %d, which nobody has", msg.SubscriptionID)
	}
	m.owned[msg.Partition] = msg.OwnershipEpoch // a member that rejoined gets no notice for what it keeps
	if c.onMessage != nil {
		c.onMessage(m, msg)
	}
	m.received.Add(1)
	m.count++
	m.bytes += len(msg.Key) + len(msg.Value)
	if m.count >= crowdCredit {
		m.returnCredit()
	}
	a := protocol.Ack{SubscriptionID: msg.SubscriptionID, TopicID: msg.TopicID, Partition: msg.Partition, Sequence: msg.Sequence,
		DeliveryID: msg.DeliveryID, OwnershipEpoch: msg.OwnershipEpoch}
	return c.ask(protocol.OpAck, a.AppendFrame(nil), nil)
}

func (m *CrowdMember) returnCredit() {
	if m.count == 0 {
		return
	}
	cr := protocol.Credit{SubscriptionID: m.sub.SubscriptionID, MembershipEpoch: m.sub.MembershipEpoch, Mode: protocol.CreditAdd,
		Count: uint16(m.count), Bytes: uint32(m.bytes)}
	m.count, m.bytes = 0, 0
	_ = m.crowd.ask(protocol.OpCredit, cr.AppendFrame(nil), nil) // the reader learns of it
}
