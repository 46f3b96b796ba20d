package groups

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"time"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/protocol"
)

func resultAt(partition uint16, seq uint64) client.Result {
	return client.Result{Partition: partition, Sequence: seq}
}

const (
	// maxUnanswered is how many requests a hostile client has open, and maxKept how many messages and notices it remembers.
	maxUnanswered = 2000
	maxKept       = 300
	maxSubs       = 8
	maxJoining    = 3
	// firstIDs is about how many topics there are in a run, those of dead letters included.
	firstIDs = 24
)

// hostileClient is one connection of a client that does as it likes.
type hostileClient struct {
	r     *hostileRun
	rng   *rand.Rand
	nc    net.Conn
	life  int // of the broker, when it connected
	in    []byte
	out   []byte
	asked []hostileRequest
	// subs are the subscriptions that it uses, byID all that it has ever had, the newest of each id.
	subs []*hostileSub
	byID map[uint16]*hostileSub
	// joining is the number of SUBs without an answer.
	joining int
	// shut says that the broker must close the connection, or may: it was sent nonsense, or told of its fault.
	shut bool
}

// hostileRequest is one without an answer. answered is nil where nobody cares; sub is the subscription that it names.
type hostileRequest struct {
	op       protocol.Op
	sub      *hostileSub
	answered func(result []byte, err *protocol.Error)
}

// hostileSub is a subscription.
type hostileSub struct {
	id     uint16
	topic  string
	group  string
	member uint64
	mEpoch uint32
	aEpoch uint32
	epochs []uint64
	msgs   []protocol.Msg
	held   []protocol.Notice // not confirmed yet
	old    []protocol.Notice // confirmed
	// may is what it was ever granted, got what it has received, in messages and bytes. One that is honest grants again
	// what it has received and nothing else, so that it notices each message too many.
	may, got           uint64
	mayBytes, gotBytes uint64
	honest             bool
	window             uint64
	windowBytes        uint64
}

// client is the life of one connection.
func (r *hostileRun) client(rng *rand.Rand) {
	life := r.life()
	nc, err := net.DialTimeout("tcp", r.addr, time.Second)
	if err != nil {
		time.Sleep(retryPause)
		return
	}
	defer nc.Close()
	c := &hostileClient{r: r, rng: rng, nc: nc, life: life, byID: map[uint16]*hostileSub{}}
	c.ask(protocol.OpConnect, nil, (&protocol.Connect{Version: protocol.WireVersion}).AppendFrame(nil), nil)
	steps := 1 + rng.IntN(2000)
	for range steps {
		if r.stopped() {
			return
		}
		if len(c.asked) < maxUnanswered && !c.shut {
			for range 1 + rng.IntN(12) {
				c.act()
			}
		}
		if !c.send() || !c.receive() {
			return
		}
	}
}

func (c *hostileClient) ask(op protocol.Op, s *hostileSub, frame []byte, answered func(result []byte, err *protocol.Error)) {
	c.out = append(c.out, frame...)
	c.asked = append(c.asked, hostileRequest{op, s, answered})
}

func (c *hostileClient) send() bool {
	if len(c.out) == 0 {
		return true
	}
	_ = c.nc.SetWriteDeadline(time.Now().Add(c.r.patience)) // fails where Write does
	_, err := c.nc.Write(c.out)
	c.out = c.out[:0]
	if err != nil {
		for c.receive() { // it may say why
		}
		return false
	}
	return true
}

// receive takes what has come, after a short wait; now and then it does not look for a while.
func (c *hostileClient) receive() bool {
	if c.rng.IntN(200) == 0 {
		time.Sleep(time.Duration(c.rng.IntN(int(400 * time.Millisecond))))
	}
	wait := time.Duration(c.rng.IntN(int(time.Millisecond)))
	if len(c.asked) >= maxUnanswered || c.shut {
		wait = time.Second
	}
	_ = c.nc.SetReadDeadline(time.Now().Add(wait)) // fails where Read does
	b := make([]byte, 64<<10)
	n, err := c.nc.Read(b)
	rest, ferr := frames(append(c.in, b[:n]...), c.frame)
	c.in = rest
	switch {
	case ferr != nil:
		c.r.problem("hostile client: %w", ferr)
		return false
	case err == nil, errors.Is(err, os.ErrDeadlineExceeded):
		return true
	default:
		return c.ended(err)
	}
}

// ended is told that the connection has broken. Only a killed broker does that without saying why.
func (c *hostileClient) ended(err error) bool {
	if !c.shut && c.life%2 == 0 && c.life == c.r.life() {
		c.r.problem("the broker has closed a connection without a reason: %w", err)
	}
	return false
}

func (c *hostileClient) frame(op protocol.Op, payload []byte) error {
	switch op {
	case protocol.OpMsg:
		var m protocol.Msg
		if err := m.Decode(append([]byte(nil), payload...)); err != nil {
			return err
		}
		return c.message(m)
	case protocol.OpNotice:
		var n protocol.Notice
		if err := n.Decode(payload); err != nil {
			return err
		}
		for _, s := range c.subs {
			if s.member == n.MemberID {
				s.held = keep(s.held, n)
			}
		}
		// One of a subscription that is not answered yet is repeated.
		return nil
	case protocol.OpOK:
		var f protocol.OKFrame
		if err := f.Decode(payload); err != nil {
			return err
		}
		return c.answer(f.RequestOp, f.Result, nil)
	case protocol.OpErr:
		var f protocol.ErrFrame
		if err := f.Decode(payload); err != nil {
			return err
		}
		if f.Code.Closes() {
			if !c.shut {
				return f.Err()
			}
			return nil
		}
		if f.RequestOp == protocol.OpMsg {
			return nil // a message larger than the window
		}
		return c.answer(f.RequestOp, nil, f.Err())
	default:
		return fmt.Errorf("the broker has sent a %v", op)
	}
}

func keep[T any](list []T, v T) []T {
	if len(list) >= maxKept {
		list = slices.Delete(list, 0, maxKept/2)
	}
	return append(list, v)
}

func (c *hostileClient) answer(op protocol.Op, result []byte, err *protocol.Error) error {
	if len(c.asked) == 0 || c.asked[0].op != op {
		return fmt.Errorf("an answer to %v has come, which is not the oldest request without one", op)
	}
	q := c.asked[0]
	c.asked = c.asked[1:]
	what := op.String()
	if err != nil {
		what = fmt.Sprintf("%v %04x", op, uint16(err.Code))
		if err.Code == protocol.CodeInternal || err.Code == protocol.CodeReadOnlyDegraded || err.Code == protocol.CodeMetadataQuarantined {
			return err
		}
	}
	c.r.mu.Lock()
	c.r.answers[what]++
	c.r.mu.Unlock()
	if q.answered != nil {
		q.answered(result, err)
	}
	if err != nil && q.sub != nil && c.rng.IntN(4) == 0 {
		switch err.Code {
		case protocol.CodeUnknownMember, protocol.CodeUnknownGroup, protocol.CodeUnknownTopic: // it has ended
			c.subs = slices.DeleteFunc(c.subs, func(s *hostileSub) bool { return s == q.sub })
		default:
		}
	}
	return nil
}

func (c *hostileClient) message(m protocol.Msg) error {
	s := c.byID[m.SubscriptionID]
	if s == nil {
		return fmt.Errorf("a message came for subscription %d, which was never answered", m.SubscriptionID)
	}
	s.got++
	s.gotBytes += uint64(len(m.Key) + len(m.Value))
	if s.got > s.may || s.gotBytes > s.mayBytes {
		return fmt.Errorf("%d messages and %d bytes have come for a subscription that was granted %d and %d", s.got, s.gotBytes, s.may, s.mayBytes)
	}
	if h := c.r.history[cast{s.topic, s.group}]; h != nil {
		c.r.took(h, &m, s.member)
	}
	m.Key, m.Value = nil, nil
	s.msgs = keep(s.msgs, m)
	if !slices.Contains(s.epochs, m.OwnershipEpoch) {
		s.epochs = keep(s.epochs, m.OwnershipEpoch)
	}
	if c.rng.IntN(10) == 0 {
		c.r.mu.Lock()
		c.r.seen = keep(c.r.seen, m)
		c.r.mu.Unlock()
	}
	return nil
}

// act sends one request, sensible or not.
func (c *hostileClient) act() {
	if len(c.subs) == 0 || c.rng.IntN(60) == 0 {
		if c.joining < maxJoining {
			c.subscribe()
		}
		return
	}
	s := c.subs[c.rng.IntN(len(c.subs))]
	switch n := c.rng.IntN(1000); {
	case n < 420 && len(s.msgs) == 0 && c.rng.IntN(20) > 0:
		c.confirm(s)
	case n < 320:
		c.ack(s)
	case n < 420:
		c.nack(s)
	case n < 560:
		c.confirm(s)
	case n < 640:
		c.pull(s)
	case n < 800:
		c.credit(s)
	case n < 880:
		c.heartbeat(s, protocol.MemberActive)
	case n < 885:
		c.heartbeat(s, protocol.MemberLeave)
	case n < 930:
		c.ask(protocol.OpPing, nil, protocol.AppendPing(nil), nil)
	case n < 945:
		c.declareGroup()
	case n < 950:
		c.declareTopic()
	case n < 951:
		c.nonsense()
	default:
		time.Sleep(time.Duration(c.rng.IntN(int(5 * time.Millisecond))))
	}
}

func (c *hostileClient) subscribe() {
	if len(c.subs) >= maxSubs {
		return
	}
	t, g := pick(c.rng, hostileTopics...), pick(c.rng, hostileGroups...)
	c.r.mu.Lock()
	id := c.r.topics[t.name]
	others := c.r.members
	c.r.mu.Unlock()
	if c.rng.IntN(20) == 0 {
		id = uint16(pick(c.rng, c.rng.IntN(70_000), c.rng.IntN(firstIDs))) // perhaps nobody's, perhaps one of dead letters
	}
	m := protocol.Sub{Group: []byte(g.name), TopicID: id, Partition: protocol.AnyPartition, Flags: uint16(c.rng.IntN(2)) * protocol.SubFlagStream,
		CreditCount: uint16(pick(c.rng, 0, 1, 7, 300, 65535)), CreditBytes: uint32(pick(c.rng, 0, 1, 50, 5000, 1<<20, 1<<32-1)),
		StartPolicy: protocol.StartPolicy(c.rng.IntN(2))}
	switch c.rng.IntN(10) {
	case 0:
		m.Flags, m.Settings = m.Flags|protocol.SubFlagSettings, []byte(g.settings)
	case 1:
		m.Flags, m.Settings = m.Flags|protocol.SubFlagSettings, []byte(pick(c.rng, "", "{}", `{"max_attempts":0}`, `{"lease_ms":-1}`, `{"retry":[]}`, "[", `{"retry":"rocketmq"}`))
	}
	if (g.name == "radio") != (c.rng.IntN(30) == 0) {
		m.Flags |= protocol.SubFlagBroadcast
	}
	if c.rng.IntN(4) == 0 && len(others) > 0 {
		m.Flags, m.MemberID = m.Flags|protocol.SubFlagRejoin, others[c.rng.IntN(len(others))]
	}
	count, bytes := uint64(m.CreditCount), uint64(m.CreditBytes)
	if count == 0 {
		count = 256
	}
	if bytes == 0 {
		bytes = 2 << 20
	}
	c.joining++
	c.ask(protocol.OpSub, nil, m.AppendFrame(nil), func(result []byte, err *protocol.Error) {
		c.joining--
		if err != nil {
			return
		}
		var res protocol.SubResult
		if err := res.Decode(result); err != nil {
			c.r.problem("answer to SUB: %w", err)
			return
		}
		s := &hostileSub{id: res.SubscriptionID, topic: c.r.nameOf(id), group: g.name, member: res.MemberID, mEpoch: res.MembershipEpoch,
			aEpoch: res.AssignmentEpoch, may: count, mayBytes: bytes, honest: c.rng.IntN(2) == 0, window: count, windowBytes: bytes}
		c.subs = slices.DeleteFunc(c.subs, func(s *hostileSub) bool { return s.id == res.SubscriptionID }) // an ended one's id is used again
		c.subs, c.byID[s.id] = append(c.subs, s), s
		c.r.mu.Lock()
		c.r.members = keep(c.r.members, res.MemberID)
		c.r.mu.Unlock()
	})
}

// nameOf is the name of one of hostileTopics that has, or had, this id; else "".
func (r *hostileRun) nameOf(id uint16) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.names[id]
}

// victim is a message to answer: mostly the subscription's own, sometimes somebody else's or none.
func (c *hostileClient) victim(s *hostileSub) protocol.Msg {
	var m protocol.Msg
	if len(s.msgs) > 0 {
		m = s.msgs[c.rng.IntN(len(s.msgs))]
	}
	if c.rng.IntN(10) == 0 {
		c.r.mu.Lock()
		if len(c.r.seen) > 0 {
			m = c.r.seen[c.rng.IntN(len(c.r.seen))]
		}
		c.r.mu.Unlock()
		m.SubscriptionID = s.id
	}
	if c.rng.IntN(30) == 0 {
		switch c.rng.IntN(6) {
		case 0:
			m.DeliveryID += uint64(c.rng.IntN(3)) - 1
		case 1:
			m.OwnershipEpoch += uint64(c.rng.IntN(3)) - 1
		case 2:
			m.Sequence = pick(c.rng, 0, 1, m.Sequence+1, 1<<63, 1<<64-1)
		case 3:
			m.Partition = uint16(c.rng.IntN(6))
		case 4:
			m.TopicID += uint16(c.rng.IntN(3)) - 1
		case 5:
			m.SubscriptionID = uint16(c.rng.IntN(12))
		}
	}
	return m
}

func (c *hostileClient) ack(s *hostileSub) {
	m := c.victim(s)
	a := protocol.Ack{SubscriptionID: m.SubscriptionID, TopicID: m.TopicID, Partition: m.Partition, Sequence: m.Sequence, DeliveryID: m.DeliveryID,
		OwnershipEpoch: m.OwnershipEpoch}
	switch c.rng.IntN(10) {
	case 0:
		a.Flags = protocol.AckFlagProgress
	case 1:
		a.Flags = protocol.AckFlagCumulative
	case 2:
		a.Flags = protocol.AckFlagCumulative | protocol.AckFlagProgress
	}
	by := c.byID[a.SubscriptionID] // the subscription that it really names
	e := event{Kind: eventAcking, Partition: a.Partition, Sequence: a.Sequence, Delivery: a.DeliveryID, Epoch: a.OwnershipEpoch}
	ends := a.Flags&protocol.AckFlagProgress == 0
	h := (*history)(nil)
	if by != nil {
		h = c.r.history[cast{by.topic, by.group}]
	}
	if h != nil && ends {
		if a.Flags&protocol.AckFlagCumulative != 0 {
			h.ackingUpTo(place{a.Partition, a.Sequence}, by.member)
		} else {
			h.take(&e, by.member)
		}
	}
	c.ask(protocol.OpAck, s, a.AppendFrame(nil), func(_ []byte, err *protocol.Error) {
		if h == nil || err != nil || a.Flags != 0 {
			return
		}
		e.Kind = eventAcked
		h.take(&e, by.member)
	})
}

func (c *hostileClient) nack(s *hostileSub) {
	m := c.victim(s)
	n := protocol.Nack{SubscriptionID: m.SubscriptionID, TopicID: m.TopicID, Partition: m.Partition, Sequence: m.Sequence, DeliveryID: m.DeliveryID,
		OwnershipEpoch: m.OwnershipEpoch, Reason: protocol.NackReason(c.rng.IntN(3))}
	if n.Reason == protocol.NackReject && c.rng.IntN(8) > 0 {
		n.Reason = protocol.NackRetryNow
	}
	c.ask(protocol.OpNack, s, n.AppendFrame(nil), nil)
}

func (c *hostileClient) confirm(s *hostileSub) {
	var n protocol.Notice
	again := false
	switch {
	case len(s.held) > 0 && c.rng.IntN(20) > 0:
		i := c.rng.IntN(len(s.held))
		n = s.held[i]
		s.held = slices.Delete(s.held, i, i+1)
		s.old = keep(s.old, n)
	case len(s.old) > 0:
		n, again = s.old[c.rng.IntN(len(s.old))], true
	default:
		return
	}
	a := protocol.ControlAck{NoticeID: n.NoticeID, Kind: n.Kind, GroupID: n.GroupID, MembershipEpoch: n.MembershipEpoch, AssignmentEpoch: n.AssignmentEpoch,
		OwnershipEpoch: n.OwnershipEpoch}
	switch c.rng.IntN(60) {
	case 0:
		a.Result = protocol.ControlStale
	case 1:
		a.Result = protocol.ControlError
	case 2:
		a.OwnershipEpoch++
	case 3:
		a.Kind ^= 1
	case 4:
		a.NoticeID++
	case 5:
		a.GroupID++
	}
	if !again && c.rng.IntN(20) > 0 {
		s.mEpoch, s.aEpoch = max(s.mEpoch, n.MembershipEpoch), max(s.aEpoch, n.AssignmentEpoch)
		s.epochs = keep(s.epochs, n.OwnershipEpoch)
	}
	c.ask(protocol.OpControlAck, s, a.AppendFrame(nil), nil)
}

func (c *hostileClient) pull(s *hostileSub) {
	m := protocol.Pull{SubscriptionID: s.id, MemberID: s.member, MembershipEpoch: c.bent(s.mEpoch), AssignmentEpoch: c.bent(s.aEpoch),
		MaxMsgs: uint16(pick(c.rng, 0, 1, 100, 65535)), MaxBytes: uint32(pick(c.rng, 0, 1, 4000, 1<<32-1)),
		WaitMs: uint16(pick(c.rng, 0, 1, 50, 65535)), MinBytes: uint32(pick(c.rng, 0, 1, 100_000, 1<<32-1))}
	switch c.rng.IntN(8) {
	case 0:
		m.OwnershipEpochs = s.epochs
	case 1:
		m.OwnershipEpochs = make([]uint64, c.rng.IntN(3000))
	case 2:
		m.MemberID += uint64(c.rng.IntN(3)) - 1
	}
	c.ask(protocol.OpPull, s, m.AppendFrame(nil), nil)
}

// bent is an epoch, now and then another one.
func (c *hostileClient) bent(epoch uint32) uint32 {
	if c.rng.IntN(20) > 0 {
		return epoch
	}
	return pick(c.rng, epoch-1, epoch+1, 0, 1<<32-1)
}

func (c *hostileClient) credit(s *hostileSub) {
	m := protocol.Credit{SubscriptionID: s.id, MembershipEpoch: c.bent(s.mEpoch), Mode: protocol.CreditAdd, Count: uint16(c.rng.IntN(100)), Bytes: uint32(c.rng.IntN(100_000))}
	switch c.rng.IntN(10) {
	case 0:
		m.Count, m.Bytes = 65535, 1<<32-1
	case 1:
		m.Mode, m.Count, m.Bytes = protocol.CreditSet, uint16(pick(c.rng, 0, 1, 50, 65535)), uint32(pick(c.rng, 0, 1, 10_000, 1<<32-1))
	}
	if s.honest {
		back, backBytes := s.window+s.got-s.may, s.windowBytes+s.gotBytes-s.mayBytes
		m.Mode, m.Count, m.Bytes = protocol.CreditAdd, uint16(min(back, 65535)), uint32(min(backBytes, 1<<32-1))
	}
	s.may += uint64(m.Count)
	s.mayBytes += uint64(m.Bytes)
	c.ask(protocol.OpCredit, s, m.AppendFrame(nil), nil)
}

func (c *hostileClient) heartbeat(s *hostileSub, state protocol.MemberState) {
	h := protocol.Heartbeat{SubscriptionID: s.id, MemberID: s.member, MembershipEpoch: c.bent(s.mEpoch), AssignmentEpoch: c.bent(s.aEpoch), State: state}
	if c.rng.IntN(30) == 0 {
		h.MemberID += uint64(c.rng.IntN(3)) - 1
	}
	c.ask(protocol.OpHeartbeat, s, h.AppendFrame(nil), nil)
}

// declareGroup creates, changes, deletes and sets back groups that are doomed, and asks for the others.
func (c *hostileClient) declareGroup() {
	t, g := pick(c.rng, hostileTopics...), pick(c.rng, hostileGroups...)
	m := protocol.Declare{Topic: []byte(t.name), Flags: protocol.DeclareFlagGroup, Group: []byte(g.name)}
	doomed := t.doomed || g.doomed
	switch c.rng.IntN(6) {
	case 0:
		m.Flags |= protocol.DeclareFlagSettings
		m.Settings = []byte(pick(c.rng, g.settings, "{}", `{"strategy":"averagely"}`, "no"))
		if doomed && c.rng.IntN(2) == 0 {
			m.Flags |= protocol.DeclareFlagUpdate
		}
	case 1:
		if doomed {
			m.Flags |= protocol.DeclareFlagDelete
		}
	case 2, 3:
		m.Flags |= protocol.DeclareFlagReset
		m.Reset = protocol.Reset{To: protocol.ResetTo(c.rng.IntN(4)), Value: uint64(pick(c.rng, 0, 1, 50, 1<<40, 1<<62)), Partition: protocol.AnyPartition, Options: uint8(c.rng.IntN(4))}
		if c.rng.IntN(3) == 0 {
			m.Reset.Partition = uint16(c.rng.IntN(6))
		}
		if !doomed {
			m.Reset.Options |= protocol.ResetDryRun
		}
	case 4:
		m.Flags |= protocol.DeclareFlagLookup
	}
	c.ask(protocol.OpDeclare, nil, m.AppendFrame(nil), nil)
}

// declareTopic deletes the doomed topic and creates it again, or deletes the dead letters of a doomed group.
func (c *hostileClient) declareTopic() {
	if g := pick(c.rng, hostileGroups...); g.doomed && c.rng.IntN(2) == 0 {
		m := protocol.Declare{Topic: []byte(protocol.DLQPrefix + g.name), Flags: protocol.DeclareFlagDelete}
		c.ask(protocol.OpDeclare, nil, m.AppendFrame(nil), nil)
		return
	}
	t := hostileTopics[len(hostileTopics)-1]
	m := protocol.Declare{Topic: []byte(t.name), Partitions: uint16(t.partitions)}
	if c.rng.IntN(3) == 0 {
		m.Flags = protocol.DeclareFlagDelete
	}
	c.ask(protocol.OpDeclare, nil, m.AppendFrame(nil), func(result []byte, err *protocol.Error) {
		var res protocol.DeclareResult
		if err == nil && m.Flags == 0 && res.Decode(result) == nil {
			c.r.topic(t.name, res.TopicID)
		}
	})
}

// nonsense ends the connection: with a frame that is none, or in the middle of one.
func (c *hostileClient) nonsense() {
	c.shut = true
	switch c.rng.IntN(4) {
	case 0:
		c.out = append(c.out, 0, 0, 0, 0)
	case 1:
		c.out = append(c.out, 0, 0, 0, 1, 0x77)
	case 2:
		c.out = append(c.out, 0, 0, 0, 4, byte(pick(c.rng, protocol.OpAck, protocol.OpSub, protocol.OpPull, protocol.OpCredit)), 1, 2, 3)
	default:
		c.out = append(c.out, 0, 1)
		_ = c.send()
		_ = c.nc.Close() // at once
	}
}
