package coord

import (
	"fmt"

	"github.com/mortarmq/mortarmq/engine/group"
	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/protocol"
)

// Credit windows of SUB.
const (
	// bytesPerMessage is the ratio of the default window: 2 MiB for 256 messages.
	bytesPerMessage = 8 << 10
	// maxWindowBytes is what a larger window is clamped to; the count has 16 bits on the wire.
	maxWindowBytes = 64 << 20
)

// pendingRequest is a request that a group machine answers by its reference.
type pendingRequest struct {
	client Client
	req    uint64
	op     protocol.Op
	sub    *subscription // of a SUB
}

// reference names a request for a group machine.
func (c *Coordinator) reference(p pendingRequest) uint64 {
	c.lastRef++
	c.refs[c.lastRef] = p
	return c.lastRef
}

func (c *Coordinator) handleSub(r *Request, payload []byte) {
	var m protocol.Sub
	err := m.Decode(payload)
	if err == nil {
		err = protocol.ValidateGroup(m.Group)
	}
	if err == nil {
		err = c.subscribe(r, &m)
	}
	if err != nil {
		c.refuseErr(r.Client, r.Req, r.Op, err)
	}
}

// subscribe starts what makes a SUB a member; the answer comes with the commit. On an error it is the caller's to give.
func (c *Coordinator) subscribe(r *Request, m *protocol.Sub) error {
	if err := c.liveTopic(m.TopicID); err != nil {
		return err
	}
	if m.Flags&protocol.SubFlagRejoin != 0 && m.MemberID == 0 {
		return errNobodyToRejoin
	}
	w, err := wishOf(m)
	if err != nil {
		return err
	}
	s := c.newSub(r, m)
	if !c.open(r.Client).addSub(s) {
		return fmt.Errorf("the connection has %d subscriptions, more are not allowed: %w", maxSubscriptions, protocol.CodeQuotaExceeded)
	}
	c.byHandle[s.handle] = s
	if err := c.enroll(s, w); err != nil {
		c.dropSub(s)
		return err
	}
	return nil
}

var (
	errNobodyToRejoin = fmt.Errorf("REJOIN needs a member's id: SUB without REJOIN: %w", protocol.CodeUnknownMember)
	// A member whose group was deleted while it had no connection is told so like all others, lest it make the group anew.
	errNoGroupToRejoin = fmt.Errorf("the group was deleted: SUB without REJOIN makes a new one: %w", protocol.CodeUnknownGroup)
)

// liveTopic checks that a topic is there to subscribe to.
func (c *Coordinator) liveTopic(id uint16) error {
	if err := c.servable(); err != nil {
		return err
	}
	switch t := c.meta.Topic(id); {
	case c.meta.TopicDeleted(id), t != nil && c.topics.deleting[id]:
		return deletedTopic(id)
	case t == nil:
		return fmt.Errorf("topic id %d does not exist: create the topic first (mortarmq topics create NAME): %w", id, protocol.CodeUnknownTopic)
	default:
		return nil
	}
}

// wishOf reads what a SUB says about its group. BROADCAST is a setting like the others, with a flag of its own.
func wishOf(m *protocol.Sub) (*groupWish, error) {
	w := &groupWish{name: string(m.Group), policy: m.StartPolicy, broadcast: m.Flags&protocol.SubFlagBroadcast != 0}
	if m.Flags&protocol.SubFlagSettings == 0 {
		return w, nil
	}
	s, err := metadata.ParseGroupSettings(m.Settings)
	if err != nil {
		return nil, err
	}
	s.Broadcast = s.Broadcast || w.broadcast
	if err := s.Validate(); err != nil {
		return nil, err
	}
	w.settings, w.broadcast = &s, s.Broadcast
	return w, nil
}

// enroll goes on with a SUB: it creates the group if it is new, and joins.
func (c *Coordinator) enroll(s *subscription, w *groupWish) error {
	if err := c.liveTopic(s.topic); err != nil {
		return err
	}
	key := groupKey{w.name, s.topic}
	again := func(err error) {
		if s.gone {
			return
		}
		if err == nil {
			err = c.enroll(s, w)
		}
		if err != nil {
			c.refuseSub(s, err)
		}
	}
	if c.afterChange(key, again) {
		return nil
	}
	g := c.meta.GroupByName(key.name, key.topic)
	switch {
	case g == nil && s.rejoin != 0:
		return errNoGroupToRejoin
	case g == nil:
		return c.createGroup(key, w, again)
	}
	if err := g.CheckSameKind(w.broadcast); err != nil {
		return err
	}
	if err := g.CheckSameGroup(w.settings); err != nil {
		return err
	}
	if w.broadcast && s.rejoin == 0 {
		if err := c.reserveCursors(s, len(g.Parts)); err != nil {
			return err
		}
	}
	c.joinStarted(s, g.ID)
	return nil
}

// reserveCursors counts the cursors that a SUB's member will have, until it is one.
func (c *Coordinator) reserveCursors(s *subscription, n int) error {
	if err := c.meta.CheckCursors(n, c.groups.changes.assignments); err != nil {
		return err
	}
	s.cursors = n
	c.groups.changes.assignments += n
	return nil
}

// freeCursors ends the reservation.
func (c *Coordinator) freeCursors(s *subscription) {
	c.groups.changes.assignments -= s.cursors
	s.cursors = 0
}

// refuseSub ends a SUB that waited.
func (c *Coordinator) refuseSub(s *subscription, err error) {
	c.freeCursors(s)
	c.dropSub(s)
	c.refuseErr(s.client, s.req, protocol.OpSub, err)
}

func deletedTopic(id uint16) error {
	return fmt.Errorf("topic id %d was deleted: DECLARE the topic again for a new id: %w", id, protocol.CodeUnknownTopic)
}

func (c *Coordinator) newSub(r *Request, m *protocol.Sub) *subscription {
	c.lastHandle++
	s := &subscription{
		client: r.Client, handle: c.lastHandle, topic: m.TopicID, req: r.Req, lastOp: c.now,
		rejoin: m.MemberID, policy: m.StartPolicy,
		stream:      m.Flags&protocol.SubFlagStream != 0,
		windowCount: uint32(m.CreditCount), windowBytes: min(uint64(m.CreditBytes), maxWindowBytes),
	}
	if s.windowCount == 0 {
		s.windowCount = uint32(c.opts.CreditInitialCount)
	}
	if s.windowBytes == 0 {
		s.windowBytes = min(uint64(c.opts.CreditInitialCount)*bytesPerMessage, maxWindowBytes)
	}
	return s
}

// joinStarted has a SUB join a group that exists, as soon as it is on record where the group starts: if the broker died
// between a SUB's answer and that record, the group would start at another place afterwards.
func (c *Coordinator) joinStarted(s *subscription, id uint16) {
	if waiting, busy := c.groups.starting[id]; busy {
		c.groups.starting[id] = append(waiting, s)
		return
	}
	c.join(s, id)
}

// join asks the group's machine for membership.
func (c *Coordinator) join(s *subscription, id uint16) {
	h := c.groups.byID[id]
	s.group = id
	h.subs[s.handle] = s
	ev := group.Event{Kind: group.Join, Session: s.handle}
	if s.rejoin != 0 {
		ev.Kind, ev.Member = group.Rejoin, s.rejoin
	}
	ev.Ref = c.reference(pendingRequest{client: s.client, req: s.req, op: protocol.OpSub, sub: s})
	c.step(h, &ev)
}

// answered carries out a machine's answer to a SUB or HEARTBEAT.
func (c *Coordinator) answered(e *group.Effect) {
	p, ok := c.refs[e.Ref]
	if !ok {
		return
	}
	delete(c.refs, e.Ref)
	s := p.sub
	if s != nil {
		c.freeCursors(s)
	}
	switch {
	case s != nil && s.gone:
	case e.Code != 0:
		if s != nil {
			c.dropSub(s)
		}
		c.answerErr(p.client, p.req, p.op, e.Code, e.Text)
	case s != nil:
		s.member, s.membershipEpoch, s.assignmentEpoch = e.Member, e.MembershipEpoch, e.AssignmentEpoch
		s.open, s.lastOp = true, c.now
		c.delivery.openSub(s)
		result := protocol.SubResult{SubscriptionID: s.id, MemberID: s.member, MembershipEpoch: s.membershipEpoch, AssignmentEpoch: s.assignmentEpoch}
		c.frame = result.AppendOK(c.frame[:0])
		p.client.Complete(p.req, c.frame)
		c.flushLater(p.client)
	default:
		c.answerOK(p.client, p.req, p.op)
	}
}

func (c *Coordinator) handleHeartbeat(r *Request, payload []byte) {
	var m protocol.Heartbeat
	if err := m.Decode(payload); err != nil {
		c.refuseErr(r.Client, r.Req, r.Op, err)
		return
	}
	s := c.subscription(r.Client, m.SubscriptionID)
	switch {
	case s == nil:
		c.answerErr(r.Client, r.Req, r.Op, protocol.CodeUnknownMember, fmt.Sprintf("the connection has no subscription %d: SUB first", m.SubscriptionID))
		return
	case s.ended != 0:
		c.answerErr(r.Client, r.Req, r.Op, s.ended, s.endedText)
		return
	case m.MemberID != s.member:
		c.answerErr(r.Client, r.Req, r.Op, protocol.CodeUnknownMember, fmt.Sprintf("subscription %d is not that of member %d", m.SubscriptionID, m.MemberID))
		return
	}
	ev := group.Event{Kind: group.Heartbeat, Session: s.handle, Member: s.member, MembershipEpoch: m.MembershipEpoch, AssignmentEpoch: m.AssignmentEpoch}
	if m.State == protocol.MemberLeave {
		ev.Kind = group.Leave
	}
	ev.Ref = c.reference(pendingRequest{client: r.Client, req: r.Req, op: r.Op})
	c.step(c.groups.byID[s.group], &ev)
}

// handleControlAck confirms a notice. One that fits none (repeated, overtaken, of a group that is gone) is harmless, so
// the answer is always OK, and goes ahead of the messages that the confirmation sets going.
func (c *Coordinator) handleControlAck(r *Request, payload []byte) {
	var m protocol.ControlAck
	if err := m.Decode(payload); err != nil {
		c.refuseErr(r.Client, r.Req, r.Op, err)
		return
	}
	c.answerOK(r.Client, r.Req, r.Op)
	h := c.groups.byID[m.GroupID]
	if h == nil {
		return
	}
	// The notice went to one of the connection's members of that group; to the others it means nothing.
	if s := c.byHandle[h.m.Noticed(m.NoticeID)]; s != nil && s.client == r.Client {
		s.lastOp = c.now
		c.step(h, &group.Event{Kind: group.Confirm, Session: s.handle, Ack: m})
	}
}
