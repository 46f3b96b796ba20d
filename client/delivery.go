package client

import (
	"fmt"

	"github.com/mortarmq/mortarmq/protocol"
)

func (a *answer) tell(err error) {
	if a.waiter != nil {
		a.waiter <- err // has room for it
	}
}

// clear ends every delivery of a partition.
func (k *Consumer) clear(part *assigned) {
	for part.head != nil {
		k.end(part.head, false)
	}
	for i := range part.lanes {
		for queue := &part.lanes[i].queue; queue.len() > 0; {
			queue.pop()
		}
	}
}

// end takes m off the books; done says that nobody needs to see it again. Ending it twice does nothing.
func (k *Consumer) end(m *Message, done bool) {
	if m.ended.Load() {
		return
	}
	m.ended.Store(true)
	if k.opts.CumulativeAcks {
		m.part.unsettled.ended(m.Sequence, done)
	}
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
}

// finish ends m for the application and tells the broker.
func (k *Consumer) finish(m *Message, op protocol.Op, reason protocol.NackReason, waiter chan error) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if m.ended.Load() {
		return ErrDeliveryEnded
	}
	k.request(answer{m: m, op: op, reason: reason, waiter: waiter})
	k.end(m, op == protocol.OpAck || reason == protocol.NackReject || k.opts.Broadcast)
	k.settleRevoke(m.part)
	return nil
}

// request sends an ACK or NACK and remembers that its answer is to come.
func (k *Consumer) request(a answer) {
	if k.gone {
		a.tell(ErrConnectionLost) // as for what is still in hand when it is closed
		return
	}
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

func (k *Consumer) acknowledged(op protocol.Op, refusal *protocol.Error) error {
	if k.answers.len() == 0 || k.answers.at(0).op != op {
		return fmt.Errorf("client: an answer to %v although none is unanswered", op)
	}
	a := k.answers.pop()
	k.credit.answered()
	switch {
	case refusal == nil:
		a.tell(nil)
	case refusal.Code == protocol.CodeDLQUnavailable:
		// The message is given up, which is on record; the broker itself goes on trying to write its dead letter.
		k.client.cfg.logger.Warn("a dead letter can't be written yet", "topic", k.topic.Name, "partition", a.m.Partition,
			"sequence", a.m.Sequence, "error", refusal)
		a.tell(refusal)
	case refusal.Code.Retriable() && a.flags&protocol.AckFlagProgress == 0:
		if !a.again {
			a.again = true
			k.stuck++
		}
		k.retry = append(k.retry, a) // the credit account bounds it
		return nil
	default:
		k.client.cfg.logger.Debug("delivery not ended", "topic", k.topic.Name, "partition", a.m.Partition,
			"sequence", a.m.Sequence, "error", refusal)
		a.tell(refusal)
	}
	if a.again {
		k.stuck--
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
		k.callAssign(part)
	}
	if !part.owned || m.OwnershipEpoch < part.epoch || part.revoke != nil || k.closing {
		k.credit.add(cost) // sent before the broker knew; it delivers the message to the new owner
		return nil
	}
	if m.Attempt > 1 {
		k.supersede(part, m.Sequence)
	}
	msg := k.newMessage() // zeroed; set field by field, which spares the write barriers of copying the whole
	msg.Topic, msg.Partition, msg.Sequence = k.topic.Name, m.Partition, m.Sequence
	msg.Key, msg.Value = k.keep(m.Key), k.keep(m.Value)
	msg.Attempt, msg.ProducerID, msg.ProducerSeq = m.Attempt, m.ProducerID, m.ProducerSeq
	msg.Redriven = m.Flags&protocol.MsgFlagRedriven != 0
	msg.consumer, msg.part = k, part
	msg.deliveryID, msg.ownershipEpoch = m.DeliveryID, m.OwnershipEpoch
	msg.cost, msg.born, msg.renewed = uint32(cost), k.tick, k.tick
	if part.tail == nil {
		part.head = msg
	} else {
		part.tail.next, msg.prev = msg, part.tail
	}
	part.tail = msg
	l := k.lane(part, msg)
	l.queue.push(msg)
	if k.opts.CumulativeAcks {
		part.unsettled.arrived(m.Sequence)
	}
	k.offer(l)
	return nil
}

// supersede ends an older delivery of a message that has come again: its lease has run out at the broker.
func (k *Consumer) supersede(part *assigned, sequence uint64) {
	for m := part.head; m != nil; m = m.next {
		if m.Sequence == sequence {
			k.end(m, false)
			return
		}
	}
}

func (k *Consumer) part(id uint16) *assigned {
	if k.recent != nil && k.recent.id == id { // messages of a partition come in runs
		return k.recent
	}
	part := k.parts[id]
	if part == nil {
		part = k.newAssigned(id)
		k.parts[id] = part
	}
	k.recent = part
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
