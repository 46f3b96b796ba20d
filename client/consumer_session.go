package client

import (
	"errors"
	"fmt"

	"github.com/mortarmq/mortarmq/protocol"
)

// maxFrame is the room that a frame of the consumer's takes at most: SUB with a long group name.
const maxFrame = 512

// send appends a frame to the stream; encode gets the buffer to append to. Behind LEAVE nothing is sent: the broker doesn't
// know the member any more and would refuse it.
func (k *Consumer) send(encode func(dst []byte) []byte) {
	if k.gone {
		return
	}
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
	k.link = l // only read by this goroutine
	written := k.out.start(l)
	ticker := newTicker(k.client.cfg.tick, func() {
		if k.onTick() {
			k.client.owes(l)
		}
	})
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
		k.live, k.gone, k.pulling, k.beats = true, false, false, 0
		k.pull() // after a rejoin there is something to pull at once
		return nil
	}
}

func (k *Consumer) subRequest() *protocol.Sub {
	k.mu.Lock()
	defer k.mu.Unlock()
	m := &protocol.Sub{Group: []byte(k.group), TopicID: k.topic.ID, Partition: protocol.AnyPartition,
		StartPolicy: k.opts.Start, CreditCount: uint16(k.credit.windowCount), CreditBytes: uint32(k.credit.windowBytes),
	}
	if !k.opts.Pull {
		m.Flags |= protocol.SubFlagStream
	}
	if k.opts.Broadcast {
		m.Flags |= protocol.SubFlagBroadcast
	}
	if len(k.opts.GroupSettings) > 0 {
		m.Flags |= protocol.SubFlagSettings
		m.Settings = k.opts.GroupSettings
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
	k.dropMembership()
}

// dropMembership is forgetMember under the lock.
func (k *Consumer) dropMembership() {
	k.member = 0
	for _, part := range k.parts {
		part.owned = false
	}
	k.callRevokeAll(true)
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
		a.tell(ErrConnectionLost)
	}
	for _, a := range k.retry {
		a.tell(ErrConnectionLost)
	}
	k.retry, k.stuck = nil, 0
	k.takers.Broadcast()
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
		case protocol.CodeUnknownMember: // removed: join anew
			k.dropMembership()
			return refusal
		case protocol.CodeUnknownGroup, protocol.CodeUnknownTopic: // deleted
			return refusal
		default:
			if refusal.Code.Closes() || elsewhere(refusal) || fatal(refusal) {
				return refusal
			}
		}
		k.client.refused(k.link, refusal.Code)
	}
	switch op {
	case protocol.OpAck, protocol.OpNack:
		return k.acknowledged(op, refusal)
	case protocol.OpMsg:
		if refusal != nil && refusal.Code == protocol.CodeMessageExceedsCredit {
			k.raiseCredit(refusal)
			return nil
		}
	case protocol.OpPull:
		k.pulled(refusal)
	case protocol.OpHeartbeat:
		k.beats--
		if k.closing && k.beats == 0 { // no heartbeat follows LEAVE
			k.takers.Broadcast()
		}
	default: // CONTROL_ACK, CREDIT: nothing depends on their answers
	}
	if refusal != nil {
		k.client.cfg.logger.Debug("request refused", "topic", k.topic.Name, "group", k.group, "error", refusal)
	}
	return nil
}

// down is told that there is no connection. A refusal of SUB that does not pass by itself ends the consumer; a new one
// takes any refusal that waiting does not help against as an answer.
func (k *Consumer) down(err error) error {
	k.mu.Lock()
	k.trouble = err
	k.mu.Unlock()
	code, refused := protocol.CodeOf(err)
	if !refused || fatal(err) || elsewhere(err) { // another node may take it
		return nil
	}
	select {
	case <-k.joined:
	default:
		if !code.Retriable() {
			return err
		}
	}
	switch code {
	case protocol.CodeUnknownTopic, protocol.CodeMalformedPayload, protocol.CodeGroupExistsMismatch, protocol.CodeUnknownGroup:
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
	k.callRevokeAll(true)
	k.over = true
	k.called.Broadcast()
	k.mu.Unlock()
	k.credit.timer.Stop()
	k.joinOnce.Do(func() { close(k.joined) })
}

// raiseCredit makes room for a message that is larger than the whole window.
func (k *Consumer) raiseCredit(cause error) {
	k.client.cfg.logger.Warn("raising the credit window for a large message", "topic", k.topic.Name, "group", k.group,
		"cause", cause)
	k.credit.raise()
}
