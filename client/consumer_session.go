package client

import (
	"errors"
	"fmt"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// Times of the membership, in ticks of a second.
const (
	heartbeatTicks = 3
	revokeTicks    = 4 // the broker takes the partition away after 5 s anyway
)

// maxFrame is the room that a frame of the consumer's takes at most: SUB with a long group name.
const maxFrame = 512

// send appends a frame to the stream; encode gets the buffer to append to.
func (k *Consumer) send(encode func(dst []byte) []byte) {
	c, _ := k.out.reserve(maxFrame)
	c.buf = encode(c.buf)
	c.refs-- // nothing is repeated on another connection
	k.out.wake()
}

// serve is one connection's life: join or rejoin, then handle what the broker sends.
func (k *Consumer) serve(l *link) (progress bool, err error) {
	if err := k.subscribe(l); err != nil {
		return false, err
	}
	k.joinOnce.Do(func() { close(k.joined) })
	written := make(chan struct{})
	go func() {
		defer close(written)
		if err := k.out.write(l.nc); err != nil {
			l.close() // the reader reports it
		}
	}()
	ticker := newTicker(k.client.cfg.tick, k.onTick)
	err = k.read(l)
	ticker.stop()
	l.close()
	k.disconnect()
	<-written
	return true, err
}

// subscribe sends SUB and installs its answer.
func (k *Consumer) subscribe(l *link) error {
	for {
		m := k.subRequest()
		if _, err := l.nc.Write(m.AppendFrame(nil)); err != nil {
			return fmt.Errorf("subscribe: %w", err)
		}
		result, err := l.answer(protocol.OpSub)
		if err != nil {
			if m.Flags&protocol.SubFlagRejoin != 0 && errors.Is(err, protocol.CodeUnknownMember) {
				k.forgetMember() // too late: join as a new member
				continue
			}
			return fmt.Errorf("subscribe: %w", err)
		}
		var r protocol.SubResult
		if err := r.Decode(result); err != nil {
			return err
		}
		k.mu.Lock()
		defer k.mu.Unlock()
		k.out.reset()
		k.credit.reset()
		k.subID, k.member, k.joinEp, k.assEp = r.SubscriptionID, r.MemberID, r.MembershipEpoch, r.AssignmentEpoch
		k.live = true
		return nil
	}
}

func (k *Consumer) subRequest() *protocol.Sub {
	k.mu.Lock()
	defer k.mu.Unlock()
	m := &protocol.Sub{Group: []byte(k.group), TopicID: k.topic.ID, Partition: protocol.AnyPartition,
		StartPolicy: k.opts.Start, CreditCount: uint16(k.credit.windowCount), CreditBytes: uint32(k.credit.windowBytes),
		Flags: protocol.SubFlagStream}
	if k.opts.Broadcast {
		m.Flags |= protocol.SubFlagBroadcast
	}
	if k.member != 0 {
		m.Flags |= protocol.SubFlagRejoin
		m.MemberID = k.member
	}
	return m
}

// forgetMember drops the membership with everything that is assigned.
func (k *Consumer) forgetMember() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.member = 0
	for _, part := range k.parts {
		part.owned = false
	}
}

// disconnect ends every delivery: ids and credit belong to the connection. The broker delivers again what was not
// acknowledged.
func (k *Consumer) disconnect() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.live = false
	k.out.halt()
	for _, part := range k.parts {
		k.clear(part)
		part.setRevoke(nil)
	}
	for k.answers.len() > 0 {
		a := k.answers.pop()
		a.tell(errConnectionLost)
	}
	for _, a := range k.retry {
		a.tell(errConnectionLost)
	}
	k.retry = nil
	k.takers.Broadcast()
}

func (a *answer) tell(err error) {
	if a.waiter != nil {
		a.waiter <- err // has room for it
	}
}

// clear ends every delivery of a partition.
func (k *Consumer) clear(part *assigned) {
	for part.head != nil {
		k.end(part.head)
	}
	for part.queue.len() > 0 {
		part.queue.pop()
	}
}

// end takes m off the books. It reports false if that has happened before.
func (k *Consumer) end(m *Message) bool {
	if m.ended.Load() {
		return false
	}
	m.ended.Store(true)
	part := m.part
	if m.prev == nil {
		part.head = m.next
	} else {
		m.prev.next = m.next
	}
	if m.next == nil {
		part.tail = m.prev
	} else {
		m.next.prev = m.prev
	}
	m.prev, m.next = nil, nil
	if k.live {
		k.credit.add(int(m.cost))
	}
	return true
}

// finish ends m for the application and tells the broker.
func (k *Consumer) finish(m *Message, op protocol.Op, reason protocol.NackReason, waiter chan error) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if m.ended.Load() {
		return ErrDeliveryEnded
	}
	k.request(answer{m: m, op: op, reason: reason, waiter: waiter})
	k.end(m)
	k.settleRevoke(m.part)
	return nil
}

// request sends an ACK or NACK and remembers that its answer is to come.
func (k *Consumer) request(a answer) {
	m := a.m
	c, _ := k.out.reserve(maxFrame)
	if a.op == protocol.OpAck {
		ack := protocol.Ack{SubscriptionID: k.subID, TopicID: k.topic.ID, Partition: m.Partition, Sequence: m.Sequence,
			DeliveryID: m.deliveryID, OwnershipEpoch: m.ownershipEpoch, Flags: a.flags}
		c.buf = ack.AppendFrame(c.buf)
	} else {
		nack := protocol.Nack{SubscriptionID: k.subID, TopicID: k.topic.ID, Partition: m.Partition, Sequence: m.Sequence,
			DeliveryID: m.deliveryID, OwnershipEpoch: m.ownershipEpoch, Reason: a.reason}
		c.buf = nack.AppendFrame(c.buf)
	}
	c.refs--
	k.out.wake()
	k.answers.push(a)
}

func (k *Consumer) progress(m *Message) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if m.ended.Load() {
		return ErrDeliveryEnded
	}
	m.born = k.tick
	k.renew(m)
	return nil
}

func (k *Consumer) renew(m *Message) {
	m.renewed = k.tick
	k.request(answer{m: m, op: protocol.OpAck, flags: protocol.AckFlagProgress})
}

// read handles frames until the connection breaks. The lock is taken once per batch of received frames.
func (k *Consumer) read(l *link) error {
	for {
		op, payload, err := l.next()
		if err != nil {
			return err
		}
		k.mu.Lock()
		for {
			if err = k.frame(op, payload); err != nil || !l.buffered() {
				break
			}
			if op, payload, err = l.next(); err != nil {
				break
			}
		}
		k.mu.Unlock()
		if err != nil {
			return err
		}
	}
}

// frame handles one frame from the broker. An error means that the connection is of no further use.
func (k *Consumer) frame(op protocol.Op, payload []byte) error {
	switch op {
	case protocol.OpMsg:
		var m protocol.Msg
		if err := m.Decode(payload); err != nil {
			return err
		}
		return k.message(&m)
	case protocol.OpNotice:
		var n protocol.Notice
		if err := n.Decode(payload); err != nil {
			return err
		}
		k.notice(&n)
		return nil
	case protocol.OpOK:
		var ok protocol.OKFrame
		if err := ok.Decode(payload); err != nil {
			return err
		}
		return k.answered(ok.RequestOp, nil)
	case protocol.OpErr:
		var refusal protocol.ErrFrame
		if err := refusal.Decode(payload); err != nil {
			return err
		}
		return k.answered(refusal.RequestOp, refusal.Err())
	default:
		return nil // not for a consumer
	}
}

// answered handles OK (refusal is nil) and ERR.
func (k *Consumer) answered(op protocol.Op, refusal *protocol.Error) error {
	if refusal != nil {
		switch refusal.Code {
		case protocol.CodeStaleLeaderEpoch:
			return refusal
		case protocol.CodeUnknownMember: // removed: join anew
			k.member = 0
			for _, part := range k.parts {
				part.owned = false
			}
			return refusal
		default:
			if refusal.Code.Closes() {
				return refusal
			}
		}
	}
	switch op {
	case protocol.OpAck, protocol.OpNack:
		return k.acknowledged(op, refusal)
	case protocol.OpMsg:
		if refusal != nil && refusal.Code == protocol.CodeMessageExceedsCredit {
			k.client.cfg.logger.Warn("raising the credit window for a large message", "topic", k.topic.Name, "group", k.group,
				"message", refusal.Message)
			k.credit.raise()
			return nil
		}
	case protocol.OpHeartbeat:
		if k.closing && refusal == nil {
			k.member = 0 // no heartbeat follows LEAVE
			k.takers.Broadcast()
		}
	default: // CONTROL_ACK, CREDIT: nothing depends on their answers
	}
	if refusal != nil {
		k.client.cfg.logger.Debug("request refused", "topic", k.topic.Name, "group", k.group, "error", refusal)
	}
	return nil
}

func (k *Consumer) acknowledged(op protocol.Op, refusal *protocol.Error) error {
	if k.answers.len() == 0 || k.answers.at(0).op != op {
		return fmt.Errorf("client: an answer to %v although none is unanswered", op)
	}
	a := k.answers.pop()
	switch {
	case refusal == nil:
		a.tell(nil)
	case refusal.Code.Retriable() && a.flags&protocol.AckFlagProgress == 0:
		k.retry = append(k.retry, a) // at most one for each message that the credit allowed
		return nil
	default:
		k.client.cfg.logger.Debug("delivery not ended", "topic", k.topic.Name, "partition", a.m.Partition,
			"sequence", a.m.Sequence, "error", refusal)
		a.tell(refusal)
	}
	if k.closing && k.answers.len() == 0 {
		k.takers.Broadcast()
	}
	return nil
}

// message takes in a delivery.
func (k *Consumer) message(m *protocol.Msg) error {
	cost := len(m.Key) + len(m.Value)
	if err := k.credit.spend(cost); err != nil {
		return err
	}
	part := k.part(m.Partition)
	if !part.owned && m.OwnershipEpoch > part.fenced {
		part.owned, part.epoch = true, m.OwnershipEpoch // a member that rejoined gets no notice for what it keeps
	}
	if !part.owned || m.OwnershipEpoch < part.epoch || part.revoke != nil || k.closing {
		k.credit.add(cost) // sent before the broker knew; it delivers the message to the new owner
		return nil
	}
	if m.Attempt > 1 {
		k.supersede(part, m.Sequence)
	}
	msg := k.newMessage()
	*msg = Message{Topic: k.topic.Name, Partition: m.Partition, Sequence: m.Sequence, Key: k.keep(m.Key), Value: k.keep(m.Value),
		Attempt: m.Attempt, ProducerID: m.ProducerID, ProducerSeq: m.ProducerSeq, consumer: k, part: part,
		deliveryID: m.DeliveryID, ownershipEpoch: m.OwnershipEpoch, cost: uint32(cost), born: k.tick, renewed: k.tick}
	if part.tail == nil {
		part.head = msg
	} else {
		part.tail.next, msg.prev = msg, part.tail
	}
	part.tail = msg
	part.queue.push(msg)
	k.offer(part)
	return nil
}

// supersede ends an older delivery of a message that has come again: its lease has run out at the broker.
func (k *Consumer) supersede(part *assigned, sequence uint64) {
	for m := part.head; m != nil; m = m.next {
		if m.Sequence == sequence {
			k.end(m)
			return
		}
	}
}

func (k *Consumer) part(id uint16) *assigned {
	part := k.parts[id]
	if part == nil {
		part = &assigned{id: id}
		k.parts[id] = part
	}
	return part
}

func (k *Consumer) newMessage() *Message {
	if len(k.msgs) == 0 {
		k.msgs = make([]Message, messageBlock)
	}
	m := &k.msgs[0]
	k.msgs = k.msgs[1:]
	return m
}

// keep copies b out of the receive buffer.
func (k *Consumer) keep(b []byte) []byte {
	if len(b) == 0 {
		return nil
	}
	if len(b) > valueBlock/4 {
		return append(make([]byte, 0, len(b)), b...)
	}
	if len(k.bytes) < len(b) {
		k.bytes = make([]byte, valueBlock)
	}
	own := k.bytes[:len(b):len(b)]
	k.bytes = k.bytes[len(b):]
	copy(own, b)
	return own
}

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
		}
		k.confirm(n, protocol.ControlOK)
		return
	}
	if part.revoke != nil && part.revoke.NoticeID == n.NoticeID {
		return // repeated while messages at hand are finished
	}
	revoke := *n
	part.setRevoke(&revoke)
	part.revokeBy = k.tick + revokeTicks
	for part.queue.len() > 0 { // nobody has begun these
		k.end(part.queue.pop())
	}
	k.settleRevoke(part)
}

// settleRevoke confirms a REVOKE when nothing of the partition is at hand any more, or when it takes too long: the ACKs
// of what was finished are in the stream before the confirmation.
func (k *Consumer) settleRevoke(part *assigned) {
	if part.revoke == nil || (part.head != nil && k.tick < part.revokeBy) {
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
	k.send(m.AppendFrame)
}

// onTick is called every second of a connection.
func (k *Consumer) onTick() {
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
	for _, part := range k.parts {
		k.renewLeases(part)
		k.settleRevoke(part)
	}
}

// renewLeases sends PROGRESS for what waits or is worked on, and ends what the broker has given up by now.
func (k *Consumer) renewLeases(part *assigned) {
	lease, longest := uint64(k.opts.Lease/time.Second), uint64(k.opts.MaxProcessing/time.Second)
	for m := part.head; m != nil; {
		next := m.next
		switch idle := k.tick - m.renewed; {
		case idle >= lease:
			k.end(m)
		case idle >= lease/3 && k.tick-m.born < longest:
			k.renew(m)
		}
		m = next
	}
	for part.queue.len() > 0 && !(*part.queue.at(0)).Active() { // nobody takes them while a handler is stuck
		part.queue.pop()
	}
}

// down is told that there is no connection. A refusal of SUB that does not pass by itself ends the consumer; a new one
// takes any refusal that waiting does not help against as an answer.
func (k *Consumer) down(err error) error {
	code, refused := protocol.CodeOf(err)
	if !refused {
		return nil
	}
	select {
	case <-k.joined:
	default:
		if !code.Retriable() && code != protocol.CodeStaleLeaderEpoch {
			return err
		}
	}
	switch code {
	case protocol.CodeUnknownTopic, protocol.CodeMalformedPayload, protocol.CodeMetadataQuarantined,
		protocol.CodeGroupExistsMismatch:
		return err
	default:
		return nil
	}
}

// ended is the end of the session.
func (k *Consumer) ended(err error) {
	k.mu.Lock()
	if !errors.Is(err, ErrClosed) {
		k.err = err
	}
	k.stopLocked()
	k.mu.Unlock()
	k.credit.timer.Stop()
	k.joinOnce.Do(func() { close(k.joined) })
}
