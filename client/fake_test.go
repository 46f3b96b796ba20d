package client

import (
	"fmt"
	"net"
	"sync"
	"testing"

	"github.com/mortarmq/mortarmq/protocol"
)

// fakeBroker speaks the protocol well enough for the library: topics in memory, deduplication windows, one member per
// group that gets every partition, credit. Hooks let a test misbehave.
type fakeBroker struct {
	tb testing.TB
	ln net.Listener

	mu     sync.Mutex
	wg     sync.WaitGroup
	closed bool
	conns  map[*fakeConn]bool
	topics map[string]*fakeTopic
	groups map[string]*fakeGroup
	nextID uint64

	token string
	// onFrame may take a request over: it returns frames to send in answer, and whether to close the connection then.
	// It is called with mu held. nil, false, false leaves the request to the broker.
	onFrame func(c *fakeConn, op protocol.Op, payload []byte) (reply []byte, handled, hangUp bool)
	seen    map[protocol.Op]int
	credits []protocol.Credit
	acks    []protocol.Ack // without PROGRESS
	renewed []protocol.Ack // PROGRESS: they come whenever the machine is slow
	nacks   []protocol.Nack
	control []protocol.ControlAck
	beats   []protocol.Heartbeat
	subs    []protocol.Sub
	accepts int
}

type fakeTopic struct {
	name       string
	id         uint16
	partitions []*fakePartition
}

type fakePartition struct {
	log     []protocol.Pub
	windows map[uint64]map[uint64]uint64 // producer -> producer_seq -> sequence
	last    map[uint64]uint64
	next    map[string]int // group -> index in log to deliver next
}

type fakeGroup struct {
	member uint64
	conn   *fakeConn
	epoch  uint64
}

type fakeConn struct {
	b      *fakeBroker
	nc     net.Conn
	failed map[[2]uint64]uint64 // (partition, producer) -> the refused producer_seq
	sub    *fakeSub
	out    []byte

	pullWaits int // how many messages a waiting PULL asked for
}

type fakeSub struct {
	protocol.Sub
	id        uint16
	topic     *fakeTopic
	group     *fakeGroup
	groupName string
	count     int
	bytes     int
	owned     map[uint16]bool
}

func newFakeBroker(tb testing.TB) *fakeBroker {
	tb.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	b := &fakeBroker{tb: tb, ln: ln, conns: map[*fakeConn]bool{}, topics: map[string]*fakeTopic{},
		groups: map[string]*fakeGroup{}, seen: map[protocol.Op]int{}, nextID: 100}
	b.wg.Add(1)
	go b.accept()
	tb.Cleanup(b.close)
	return b
}

func (b *fakeBroker) addr() string { return b.ln.Addr().String() }

func (b *fakeBroker) close() {
	b.mu.Lock()
	b.closed = true
	_ = b.ln.Close()
	b.mu.Unlock()
	b.dropConnections()
	b.wg.Wait()
}

// dropConnections cuts every connection.
func (b *fakeBroker) dropConnections() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := range b.conns {
		_ = c.nc.Close()
	}
}

func (b *fakeBroker) accept() {
	defer b.wg.Done()
	for {
		nc, err := b.ln.Accept()
		if err != nil {
			return
		}
		c := &fakeConn{b: b, nc: nc, failed: map[[2]uint64]uint64{}}
		b.mu.Lock()
		b.accepts++
		b.conns[c] = true
		if b.closed {
			_ = nc.Close()
		}
		b.wg.Add(1)
		b.mu.Unlock()
		go c.serve()
	}
}

func (b *fakeBroker) addTopic(name string, partitions int) *fakeTopic {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.addTopicLocked(name, partitions)
}

func (b *fakeBroker) addTopicLocked(name string, partitions int) *fakeTopic {
	t := &fakeTopic{name: name, id: uint16(len(b.topics) + 1)}
	for range partitions {
		t.partitions = append(t.partitions, &fakePartition{windows: map[uint64]map[uint64]uint64{}, last: map[uint64]uint64{},
			next: map[string]int{}})
	}
	b.topics[name] = t
	return t
}

func (b *fakeBroker) topic(id uint16) *fakeTopic {
	for _, t := range b.topics {
		if t.id == id {
			return t
		}
	}
	return nil
}

// stored returns the values in a partition.
func (b *fakeBroker) stored(t *fakeTopic, partition int) []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	var values []string
	for _, m := range t.partitions[partition].log {
		values = append(values, string(m.Value))
	}
	return values
}

func (b *fakeBroker) hook(f func(c *fakeConn, op protocol.Op, payload []byte) ([]byte, bool, bool)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.onFrame = f
}

// inspect calls f with the broker locked.
func (b *fakeBroker) inspect(f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f()
}

func (c *fakeConn) serve() {
	defer c.b.wg.Done()
	defer func() {
		_ = c.nc.Close()
		c.b.mu.Lock()
		delete(c.b.conns, c)
		for _, g := range c.b.groups {
			if g.conn == c {
				g.conn = nil
			}
		}
		c.b.mu.Unlock()
	}()
	buf := make([]byte, 0, 1<<20)
	tmp := make([]byte, 256<<10)
	for {
		n, err := c.nc.Read(tmp)
		if err != nil {
			return
		}
		buf = append(buf, tmp[:n]...)
		c.b.mu.Lock()
		hangUp := false
		for !hangUp {
			op, payload, n, err := protocol.ParseFrame(buf)
			if err != nil {
				c.b.tb.Errorf("fake broker: %v", err)
				hangUp = true
				break
			}
			if n == 0 {
				break
			}
			hangUp = c.request(op, payload)
			buf = append(buf[:0], buf[n:]...)
		}
		out := c.out
		c.out = nil
		c.b.mu.Unlock()
		if _, err := c.nc.Write(out); err != nil || hangUp {
			return
		}
	}
}

// push sends frames from outside the connection's goroutine; mu is held.
func (c *fakeConn) push(frames []byte) {
	if _, err := c.nc.Write(frames); err != nil {
		_ = c.nc.Close()
	}
}

func (c *fakeConn) request(op protocol.Op, payload []byte) (hangUp bool) {
	c.b.seen[op]++
	if n := c.pullWaits; n > 0 && op != protocol.OpPull { // another request ends the wait
		c.pullWaits = 0
		if c.deliverUpTo(n) {
			c.out = protocol.AppendOKEmpty(c.out, protocol.OpPull)
		}
	}
	if c.b.onFrame != nil {
		if reply, handled, hangUp := c.b.onFrame(c, op, payload); handled {
			c.out = append(c.out, reply...)
			return hangUp
		}
	}
	decode := func(m interface{ Decode([]byte) error }) {
		if err := m.Decode(payload); err != nil {
			c.b.tb.Errorf("fake broker: %v", err)
		}
	}
	switch op {
	case protocol.OpConnect:
		var m protocol.Connect
		decode(&m)
		if c.b.token != "" && c.b.token != string(m.Token) {
			c.out = protocol.AppendErr(c.out, protocol.CodeAuthFailed, op, "")
			return true
		}
		c.out = protocol.AppendOKEmpty(c.out, op)
	case protocol.OpPing:
		c.out = protocol.AppendOKEmpty(c.out, op)
	case protocol.OpDeclare:
		var m protocol.Declare
		decode(&m)
		c.declare(&m)
	case protocol.OpPub:
		var m protocol.Pub
		decode(&m)
		c.pub(&m)
	case protocol.OpSub:
		var m protocol.Sub
		decode(&m)
		c.subscribe(&m)
	case protocol.OpAck:
		var m protocol.Ack
		decode(&m)
		if m.Flags&protocol.AckFlagProgress != 0 {
			c.b.renewed = append(c.b.renewed, m)
		} else {
			c.b.acks = append(c.b.acks, m)
		}
		c.out = protocol.AppendOKEmpty(c.out, op)
	case protocol.OpNack:
		var m protocol.Nack
		decode(&m)
		c.b.nacks = append(c.b.nacks, m)
		c.out = protocol.AppendOKEmpty(c.out, op)
	case protocol.OpHeartbeat:
		var m protocol.Heartbeat
		decode(&m)
		c.b.beats = append(c.b.beats, m)
		c.out = protocol.AppendOKEmpty(c.out, op)
	case protocol.OpControlAck:
		var m protocol.ControlAck
		decode(&m)
		c.b.control = append(c.b.control, m)
		c.out = protocol.AppendOKEmpty(c.out, op)
		if m.Kind == protocol.NoticeAssign && m.Result == protocol.ControlOK && c.sub != nil {
			c.sub.owned[uint16(m.NoticeID%1000)] = true
			c.deliver()
		}
	case protocol.OpCredit:
		var m protocol.Credit
		decode(&m)
		c.b.credits = append(c.b.credits, m)
		if m.Mode == protocol.CreditSet {
			c.sub.count, c.sub.bytes = int(m.Count), int(m.Bytes)
			c.sub.CreditCount, c.sub.CreditBytes = m.Count, m.Bytes
		} else {
			c.sub.count = min(c.sub.count+int(m.Count), int(c.sub.CreditCount))
			c.sub.bytes = min(c.sub.bytes+int(m.Bytes), int(c.sub.CreditBytes))
		}
		r := protocol.CreditResult{GrantedCount: m.Count, GrantedBytes: m.Bytes}
		c.out = r.AppendOK(c.out)
		c.deliver()
	case protocol.OpPull:
		var m protocol.Pull
		decode(&m)
		if c.sub.count == 0 {
			c.out = protocol.AppendErr(c.out, protocol.CodeNoCredit, op, "")
			break
		}
		before := len(c.out)
		switch done := c.deliverUpTo(int(m.MaxMsgs)); {
		case done && len(c.out) == before:
			c.pullWaits = int(m.MaxMsgs)
		case done:
			c.out = protocol.AppendOKEmpty(c.out, op)
		}
	case protocol.OpErr, protocol.OpOK, protocol.OpMsg, protocol.OpNotice:
		c.b.tb.Errorf("fake broker: unexpected %v", op)
		return true
	}
	return false
}

func (c *fakeConn) declare(m *protocol.Declare) {
	t := c.b.topics[string(m.Topic)]
	r := protocol.DeclareResult{Existed: true}
	switch {
	case m.Flags&protocol.DeclareFlagDelete != 0:
		delete(c.b.topics, string(m.Topic))
	case t == nil && m.Flags&protocol.DeclareFlagLookup != 0:
		c.out = protocol.AppendErr(c.out, protocol.CodeUnknownTopic, protocol.OpDeclare, "")
		return
	case t == nil:
		t = c.b.addTopicLocked(string(m.Topic), max(1, int(m.Partitions)))
		r.Existed = false
	case m.Partitions != 0 && int(m.Partitions) != len(t.partitions):
		c.out = protocol.AppendErr(c.out, protocol.CodeTopicExistsMismatch, protocol.OpDeclare, "")
		return
	}
	if t != nil {
		r.TopicID, r.Partitions = t.id, uint16(len(t.partitions))
	}
	c.out = r.AppendOK(c.out)
}

// refuse answers a PUB with code; what follows it of the same producer gets a gap.
func (c *fakeConn) refuse(m *protocol.Pub, code protocol.ErrorCode) []byte {
	c.failed[[2]uint64{uint64(m.Partition), m.ProducerID}] = m.ProducerSeq
	return protocol.AppendErr(nil, code, protocol.OpPub, "")
}

func (c *fakeConn) pub(m *protocol.Pub) {
	t := c.b.topic(m.TopicID)
	if t == nil {
		c.out = protocol.AppendErr(c.out, protocol.CodeUnknownTopic, protocol.OpPub, "")
		return
	}
	p := t.partitions[m.Partition]
	key := [2]uint64{uint64(m.Partition), m.ProducerID}
	if failed, ok := c.failed[key]; ok && m.ProducerID != 0 {
		if m.ProducerSeq > failed {
			c.out = protocol.AppendErr(c.out, protocol.CodeSeqGap, protocol.OpPub, "")
			return
		}
		delete(c.failed, key)
	}
	r := protocol.PubResult{Durability: protocol.DurabilityQuorum, LeaderEpoch: 1}
	if m.ProducerID != 0 {
		if seq, ok := p.windows[m.ProducerID][m.ProducerSeq]; ok {
			r.Sequence, r.Flags = seq, protocol.ResultFlagDeduplicated
			c.out = r.AppendOK(c.out)
			return
		}
		if m.ProducerSeq != p.last[m.ProducerID]+1 {
			c.out = append(c.out, c.refuse(m, protocol.CodeSeqGap)...)
			return
		}
	}
	stored := *m
	stored.Key, stored.Value = append([]byte(nil), m.Key...), append([]byte(nil), m.Value...)
	p.log = append(p.log, stored)
	r.Sequence = uint64(len(p.log))
	r.CommitSeq = r.Sequence
	if m.ProducerID != 0 {
		if p.windows[m.ProducerID] == nil {
			p.windows[m.ProducerID] = map[uint64]uint64{}
		}
		p.windows[m.ProducerID][m.ProducerSeq] = r.Sequence
		p.last[m.ProducerID] = m.ProducerSeq
	}
	c.out = r.AppendOK(c.out)
}

func (c *fakeConn) subscribe(m *protocol.Sub) {
	kept := *m
	kept.Group = append([]byte(nil), m.Group...)
	c.b.subs = append(c.b.subs, kept)
	t := c.b.topic(m.TopicID)
	if t == nil {
		c.out = protocol.AppendErr(c.out, protocol.CodeUnknownTopic, protocol.OpSub, "")
		return
	}
	g := c.b.groups[string(m.Group)]
	if g == nil {
		g = &fakeGroup{}
		c.b.groups[string(m.Group)] = g
	}
	rejoin := m.Flags&protocol.SubFlagRejoin != 0
	if rejoin && g.member != m.MemberID {
		c.out = protocol.AppendErr(c.out, protocol.CodeUnknownMember, protocol.OpSub, "")
		return
	}
	if !rejoin {
		c.b.nextID++
		g.member = c.b.nextID
		g.epoch++
	}
	g.conn = c
	c.sub = &fakeSub{Sub: kept, id: 7, topic: t, group: g, groupName: string(m.Group), owned: map[uint16]bool{},
		count: int(m.CreditCount), bytes: int(m.CreditBytes)}
	r := protocol.SubResult{SubscriptionID: 7, MemberID: g.member, MembershipEpoch: uint32(g.epoch), AssignmentEpoch: uint32(g.epoch)}
	c.out = r.AppendOK(c.out)
	for i := range t.partitions {
		if rejoin {
			c.sub.owned[uint16(i)] = true
			continue
		}
		n := c.notice(protocol.NoticeAssign, uint16(i))
		c.out = n.AppendFrame(c.out)
	}
	if rejoin {
		c.deliver()
	}
}

// notice makes a notice whose id ends in the partition's number.
func (c *fakeConn) notice(kind protocol.NoticeKind, partition uint16) protocol.Notice {
	c.b.nextID++
	g := c.sub.group
	return protocol.Notice{NoticeID: c.b.nextID*1000 + uint64(partition), Kind: kind, GroupID: 1,
		MembershipEpoch: uint32(g.epoch), AssignmentEpoch: uint32(g.epoch), OwnershipEpoch: g.epoch,
		TopicID: c.sub.topic.id, Partition: partition, MemberID: g.member}
}

// deliver sends messages while there is credit, to a member with STREAM.
func (c *fakeConn) deliver() {
	if c.sub.Flags&protocol.SubFlagStream != 0 {
		c.deliverUpTo(1 << 30)
	}
}

// deliverUpTo sends at most n messages. It reports false if it sent an ERR, because of a message too large.
func (c *fakeConn) deliverUpTo(n int) bool {
	s := c.sub
	op := protocol.OpMsg
	if s.Flags&protocol.SubFlagStream == 0 {
		op = protocol.OpPull
	}
	for i, p := range s.topic.partitions {
		for s.owned[uint16(i)] && p.next[s.groupName] < len(p.log) {
			m := &p.log[p.next[s.groupName]]
			cost := len(m.Key) + len(m.Value)
			if cost > int(s.CreditBytes) {
				c.out = protocol.AppendErr(c.out, protocol.CodeMessageExceedsCredit, op, "too large")
				return false
			}
			if n == 0 || s.count == 0 || s.bytes < cost {
				return true
			}
			n--
			s.count--
			s.bytes -= cost
			p.next[s.groupName]++
			c.out = c.message(m, uint16(i), uint64(p.next[s.groupName]), 1).AppendFrame(c.out)
		}
	}
	return true
}

func (c *fakeConn) message(m *protocol.Pub, partition uint16, sequence uint64, attempt uint16) *protocol.Msg {
	c.b.nextID++
	return &protocol.Msg{SubscriptionID: c.sub.id, TopicID: c.sub.topic.id, Partition: partition, Sequence: sequence,
		DeliveryID: c.b.nextID, Attempt: attempt, OwnershipEpoch: c.sub.group.epoch, ProducerID: m.ProducerID,
		ProducerSeq: m.ProducerSeq, Key: m.Key, Value: m.Value}
}

// fill stores n messages with the values "<partition>-<number>" in every partition.
func (b *fakeBroker) fill(t *fakeTopic, n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, p := range t.partitions {
		for j := range n {
			p.log = append(p.log, protocol.Pub{TopicID: t.id, Partition: uint16(i), Value: fmt.Appendf(nil, "%d-%d", i, j)})
		}
	}
}
