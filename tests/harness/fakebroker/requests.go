package fakebroker

import (
	"bytes"
	"slices"

	"github.com/mortarmq/mortarmq/protocol"
)

// handle answers one request; false closes the connection.
func (b *Broker) handle(c *conn, op protocol.Op, payload []byte) bool {
	c.node.thawed()
	b.mu.Lock()
	defer b.mu.Unlock()
	if refusal := c.node.refuse(op, payload); refusal != nil {
		c.send(protocol.AppendErr(nil, refusal.Code, op, refusal.Message))
		return !refusal.Code.Closes()
	}
	var err error
	switch op {
	case protocol.OpConnect, protocol.OpPing:
		c.send(protocol.AppendOKEmpty(nil, op))
	case protocol.OpHeartbeat:
		err = b.heartbeat(c, payload)
	case protocol.OpDeclare:
		err = b.declare(c, payload)
	case protocol.OpPub:
		err = b.publish(c, payload)
	case protocol.OpSub:
		err = b.subscribe(c, payload)
	case protocol.OpControlAck:
		err = b.confirm(c, payload)
	case protocol.OpAck:
		err = b.ack(c, payload)
	case protocol.OpNack:
		err = b.nack(c, payload)
	case protocol.OpCredit:
		err = b.credit(c, payload)
	case protocol.OpPull:
		err = b.pull(c, payload)
	default:
		err = protocol.CodeUnknownOp
	}
	if err == nil {
		return true
	}
	code, ok := protocol.CodeOf(err)
	if !ok {
		code = protocol.CodeInternal
	}
	c.send(protocol.AppendErr(nil, code, op, err.Error()))
	return !code.Closes()
}

func (b *Broker) declare(c *conn, payload []byte) error {
	var req protocol.Declare
	if err := req.Decode(payload); err != nil {
		return err
	}
	for i, t := range b.topics {
		if t.name == string(req.Topic) {
			res := protocol.DeclareResult{TopicID: uint16(i + 1), Partitions: uint16(len(t.partitions)), Existed: true}
			c.send(res.AppendOK(nil))
			return nil
		}
	}
	if req.Flags&protocol.DeclareFlagLookup != 0 {
		return protocol.CodeUnknownTopic
	}
	t := &topic{name: string(req.Topic)}
	for range req.Partitions {
		t.partitions = append(t.partitions, &partition{producers: map[uint64]*window{}})
	}
	b.topics = append(b.topics, t)
	res := protocol.DeclareResult{TopicID: uint16(len(b.topics)), Partitions: req.Partitions}
	c.send(res.AppendOK(nil))
	return nil
}

func (b *Broker) partition(topic, part uint16) (*partition, error) {
	if topic == 0 || int(topic) > len(b.topics) {
		return nil, protocol.CodeUnknownTopic
	}
	if int(part) >= len(b.topics[topic-1].partitions) {
		return nil, protocol.CodeUnknownPartition
	}
	return b.topics[topic-1].partitions[part], nil
}

func (b *Broker) publish(c *conn, payload []byte) error {
	var req protocol.Pub
	if err := req.Decode(payload); err != nil {
		return err
	}
	p, err := b.partition(req.TopicID, req.Partition)
	if err != nil {
		return err
	}
	if err := b.refuse(c, &req); err != nil {
		return err
	}
	res := protocol.PubResult{Durability: protocol.DurabilityQuorum, LeaderEpoch: b.epoch}
	if req.ProducerID != 0 {
		w := p.producers[req.ProducerID]
		if w == nil {
			w = &window{seqs: map[uint64]uint64{}}
			p.producers[req.ProducerID] = w
		}
		switch {
		case req.ProducerSeq > w.last+1:
			return protocol.CodeSeqGap
		case req.ProducerSeq <= w.last:
			res.Sequence, res.Flags = w.seqs[req.ProducerSeq], protocol.ResultFlagDeduplicated
		default:
			w.last++
			w.seqs[w.last] = uint64(len(p.log)) + 1
		}
	}
	if res.Sequence == 0 {
		p.log = append(p.log, record{req.ProducerID, req.ProducerSeq, bytes.Clone(req.Key), bytes.Clone(req.Value)})
		res.Sequence = uint64(len(p.log))
	}
	res.CommitSeq = uint64(len(p.log))
	c.send(res.AppendOK(nil))
	b.pumpAll()
	return nil
}

// refuse applies RefuseEvery, and after it the rule that later publishes of that producer get SEQ_GAP until the refused
// one comes back.
func (b *Broker) refuse(c *conn, req *protocol.Pub) error {
	if b.faults.RefuseEvery == 0 {
		return nil
	}
	key := producerKey{c, req.TopicID, req.Partition, req.ProducerID}
	if refused, ok := b.faults.refusedProducerOf[key]; ok {
		if req.ProducerSeq > refused {
			return protocol.CodeSeqGap
		}
		delete(b.faults.refusedProducerOf, key)
	}
	if b.faults.refuseCountdown--; b.faults.refuseCountdown == 0 {
		b.faults.refuseCountdown = b.faults.RefuseEvery
		b.faults.refusedProducerOf[key] = req.ProducerSeq
		return protocol.CodeBackpressure
	}
	return nil
}

func (b *Broker) subscribe(c *conn, payload []byte) error {
	var req protocol.Sub
	if err := req.Decode(payload); err != nil {
		return err
	}
	if _, err := b.partition(req.TopicID, 0); err != nil {
		return err
	}
	parts := b.topics[req.TopicID-1].partitions
	g := b.groups[string(req.Group)]
	if g == nil {
		g = &group{topic: req.TopicID}
		for range parts {
			g.cursor = append(g.cursor, cursor{next: 1, done: map[uint64]struct{}{}, inFlight: map[uint64]uint64{}, failed: map[uint64]uint16{}})
		}
		b.groups[string(req.Group)] = g
	}
	rejoin := req.Flags&protocol.SubFlagRejoin != 0
	switch {
	case rejoin && req.MemberID != g.member:
		return protocol.CodeUnknownMember
	case rejoin && g.sub != nil:
		g.sub.conn.leave()
	case g.sub != nil:
		return protocol.CodeGroupMemberLimit
	case !rejoin:
		b.next++
		g.member = b.next
	}
	if req.CreditCount == 0 {
		req.CreditCount, req.CreditBytes = 256, 2<<20
	}
	s := &subscription{conn: c, id: uint16(len(c.subs) + 1), group: g, member: g.member, stream: req.Flags&protocol.SubFlagStream != 0,
		credit: int(req.CreditCount), window: int(req.CreditCount), creditB: int(req.CreditBytes), windowB: int(req.CreditBytes)}
	g.sub = s
	c.subs = append(c.subs, s)
	res := protocol.SubResult{SubscriptionID: s.id, MemberID: s.member, MembershipEpoch: 1, AssignmentEpoch: 1}
	c.send(res.AppendOK(nil))
	for p := range parts {
		cur := &g.cursor[p]
		if cur.owned = cur.owned && rejoin; cur.owned { // kept, without a notice
			cur.confirmed = true
			continue
		}
		n := protocol.Notice{NoticeID: uint64(s.id)<<16 | uint64(p), Kind: protocol.NoticeAssign, GroupID: 1, MembershipEpoch: 1,
			AssignmentEpoch: 1, OwnershipEpoch: uint64(p) + 1, TopicID: req.TopicID, Partition: uint16(p), MemberID: s.member}
		c.send(n.AppendFrame(nil))
	}
	b.pumpAll()
	return nil
}

func (b *Broker) confirm(c *conn, payload []byte) error {
	var req protocol.ControlAck
	if err := req.Decode(payload); err != nil {
		return err
	}
	c.send(protocol.AppendOKEmpty(nil, protocol.OpControlAck))
	if sub := int(req.NoticeID >> 16); sub >= 1 && sub <= len(c.subs) {
		g := c.subs[sub-1].group
		if p := int(req.NoticeID & 0xFFFF); p < len(g.cursor) {
			g.cursor[p].confirmed, g.cursor[p].owned = true, true
		}
	}
	b.pumpAll()
	return nil
}

// sub returns a subscription of the connection.
func (c *conn) sub(id uint16) (*subscription, error) {
	if id == 0 || int(id) > len(c.subs) {
		return nil, protocol.CodeUnknownMember
	}
	return c.subs[id-1], nil
}

// cursor returns a partition of a subscription's group.
func (c *conn) cursor(id, part uint16) (*cursor, error) {
	s, err := c.sub(id)
	if err != nil {
		return nil, err
	}
	if int(part) >= len(s.group.cursor) {
		return nil, protocol.CodeUnknownPartition
	}
	return &s.group.cursor[part], nil
}

func (b *Broker) ack(c *conn, payload []byte) error {
	var req protocol.Ack
	if err := req.Decode(payload); err != nil {
		return err
	}
	cur, err := c.cursor(req.SubscriptionID, req.Partition)
	if err != nil {
		return err
	}
	if req.Flags&protocol.AckFlagCumulative != 0 {
		for seq := range cur.inFlight {
			if seq <= req.Sequence {
				cur.finish(seq)
			}
		}
	} else if cur.inFlight[req.Sequence] != req.DeliveryID {
		return protocol.CodeUnknownDelivery
	} else {
		cur.finish(req.Sequence)
	}
	c.send(protocol.AppendOKEmpty(nil, protocol.OpAck))
	return nil
}

// nack returns a message at once, whatever the reason.
func (b *Broker) nack(c *conn, payload []byte) error {
	var req protocol.Nack
	if err := req.Decode(payload); err != nil {
		return err
	}
	cur, err := c.cursor(req.SubscriptionID, req.Partition)
	if err != nil {
		return err
	}
	if cur.inFlight[req.Sequence] != req.DeliveryID {
		return protocol.CodeUnknownDelivery
	}
	delete(cur.inFlight, req.Sequence)
	cur.failed[req.Sequence]++
	cur.returned = append(cur.returned, req.Sequence)
	c.send(protocol.AppendOKEmpty(nil, protocol.OpNack))
	b.pumpAll()
	return nil
}

func (c *cursor) finish(seq uint64) {
	delete(c.inFlight, seq)
	c.done[seq] = struct{}{}
}

// heartbeat has no sessions to renew; LEAVE gives the group free for the next member.
func (b *Broker) heartbeat(c *conn, payload []byte) error {
	var req protocol.Heartbeat
	if err := req.Decode(payload); err != nil {
		return err
	}
	if req.State == protocol.MemberLeave {
		c.leave()
	}
	c.send(protocol.AppendOKEmpty(nil, protocol.OpHeartbeat))
	return nil
}

func (b *Broker) credit(c *conn, payload []byte) error {
	var req protocol.Credit
	if err := req.Decode(payload); err != nil {
		return err
	}
	s, err := c.sub(req.SubscriptionID)
	if err != nil {
		return err
	}
	switch req.Mode {
	case protocol.CreditSet:
		s.credit, s.window, s.creditB, s.windowB = int(req.Count), int(req.Count), int(req.Bytes), int(req.Bytes)
		s.creditEpoch++
	case protocol.CreditAdd:
		s.credit = min(s.window, s.credit+int(req.Count))
		s.creditB = min(s.windowB, s.creditB+int(req.Bytes))
	}
	res := protocol.CreditResult{GrantedCount: uint16(s.credit), GrantedBytes: uint32(max(s.creditB, 0)),
		OutstandingCount: uint16(s.window - s.credit), CreditEpoch: s.creditEpoch}
	c.send(res.AppendOK(nil))
	b.pumpAll()
	return nil
}

// pull answers at once with what there is: no long poll.
func (b *Broker) pull(c *conn, payload []byte) error {
	var req protocol.Pull
	if err := req.Decode(payload); err != nil {
		return err
	}
	s, err := c.sub(req.SubscriptionID)
	if err != nil {
		return err
	}
	limit := int(req.MaxMsgs)
	for p := range s.group.cursor {
		if s.group.cursor[p].confirmed {
			limit -= b.pump(s, uint16(p), limit)
		}
	}
	c.send(protocol.AppendOKEmpty(nil, protocol.OpPull))
	return nil
}

// pumpAll delivers whatever there is credit for.
func (b *Broker) pumpAll() {
	for _, g := range b.groups {
		if s := g.sub; s != nil && s.stream {
			for p := range g.cursor {
				if g.cursor[p].confirmed {
					b.pump(s, uint16(p), len(b.topics[g.topic-1].partitions[p].log))
				}
			}
		}
	}
}

// pump delivers up to limit messages of a partition and returns how many there were.
func (b *Broker) pump(s *subscription, part uint16, limit int) (n int) {
	cur := &s.group.cursor[part]
	log := b.topics[s.group.topic-1].partitions[part].log
	var frames []byte
	for n < limit && s.credit > 0 && s.creditB > 0 {
		var seq uint64
		if len(cur.returned) > 0 {
			slices.Sort(cur.returned)
			seq, cur.returned = cur.returned[0], cur.returned[1:]
		} else if cur.next <= uint64(len(log)) {
			seq = cur.next
			cur.next++
		} else {
			break
		}
		if _, done := cur.done[seq]; done || seq > uint64(len(log)) { // a fault may have cut the log
			continue
		}
		b.next++
		cur.inFlight[seq] = b.next
		rec := &log[seq-1]
		m := protocol.Msg{SubscriptionID: s.id, TopicID: s.group.topic, Partition: part, Sequence: seq, DeliveryID: b.next,
			Attempt:        1 + cur.failed[seq],
			OwnershipEpoch: uint64(part) + 1, ProducerID: rec.producer, ProducerSeq: rec.producerSeq, Key: rec.key, Value: rec.value}
		frames = m.AppendFrame(frames)
		n++
		s.credit--
		s.creditB -= len(rec.key) + len(rec.value)
	}
	if len(frames) > 0 {
		s.conn.send(frames)
	}
	return n
}
