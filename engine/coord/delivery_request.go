package coord

import (
	"errors"
	"time"

	"github.com/mortarmq/mortarmq/engine/ledger"
	"github.com/mortarmq/mortarmq/protocol"
)

// request implements deliverer.
func (d *delivery) request(r *Request, payload []byte) {
	var err error
	switch r.Op {
	case protocol.OpAck:
		if err = d.ack.Decode(payload); err == nil {
			d.onAck(r)
		}
	case protocol.OpNack:
		if err = d.nack.Decode(payload); err == nil {
			d.onNack(r)
		}
	case protocol.OpPull:
		if err = d.pullMsg.Decode(payload); err == nil {
			d.onPull(r)
		}
	case protocol.OpCredit:
		if err = d.creditM.Decode(payload); err == nil {
			d.onCredit(r)
		}
	default:
		err = protocol.CodeUnknownOp
	}
	if err != nil {
		text := ""
		if p := (*protocol.PayloadError)(nil); errors.As(err, &p) {
			text = p.Error()
		}
		r.Client.Shut(protocol.CodeMalformedPayload, r.Op, text)
	}
}

// consumerOf finds the subscription that a request names, or answers the request.
func (d *delivery) consumerOf(r *Request, id uint16) *consumer {
	s := d.c.subscription(r.Client, id)
	switch {
	case s == nil:
		d.c.answerErr(r.Client, r.Req, r.Op, protocol.CodeUnknownMember, "")
	case s.ended != 0:
		d.c.answerErr(r.Client, r.Req, r.Op, s.ended, s.endedText)
	case s.consumer == nil || s.consumer.sub == nil:
		d.c.answerErr(r.Client, r.Req, r.Op, protocol.CodeUnknownMember, "")
	default:
		return s.consumer
	}
	return nil
}

// readerFor finds the partition that an ACK or NACK names, or answers the request.
func (d *delivery) readerFor(r *Request, con *consumer, topic, partition uint16) *reader {
	if topic != con.sub.topic {
		d.c.answerErr(r.Client, r.Req, r.Op, protocol.CodeUnknownDelivery, "the subscription is for another topic: nothing was changed")
		return nil
	}
	if con.set == nil || int(partition) >= len(con.set.readers) {
		d.c.answerErr(r.Client, r.Req, r.Op, protocol.CodeUnknownPartition, "")
		return nil
	}
	rd := con.set.readers[partition]
	if rd.ledger.err != nil {
		d.c.answerErr(r.Client, r.Req, r.Op, protocol.CodeInternal, "")
		return nil
	}
	return rd
}

func (d *delivery) onAck(r *Request) {
	m := &d.ack
	con := d.consumerOf(r, m.SubscriptionID)
	if con == nil {
		return
	}
	rd := d.readerFor(r, con, m.TopicID, m.Partition)
	if rd == nil {
		return
	}
	verdict := ledger.StaleOwner
	progress, cumulative := m.Flags&protocol.AckFlagProgress != 0, m.Flags&protocol.AckFlagCumulative != 0
	if rd.con == con {
		verdict = rd.cur.Ack(ledger.Sequence(m.Sequence), ledger.DeliveryID(m.DeliveryID), m.OwnershipEpoch, progress, cumulative, d.c.now)
	}
	since := uint64(0)
	if s := &rd.sample; verdict == ledger.Settling && s.seq != 0 &&
		(s.seq == ledger.Sequence(m.Sequence) || cumulative && s.seq < ledger.Sequence(m.Sequence)) {
		since = s.since
		*s = sample{}
	}
	d.answerVerdict(r, rd, verdict, answer{since: since})
}

func (d *delivery) onNack(r *Request) {
	m := &d.nack
	con := d.consumerOf(r, m.SubscriptionID)
	if con == nil {
		return
	}
	rd := d.readerFor(r, con, m.TopicID, m.Partition)
	if rd == nil {
		return
	}
	verdict := ledger.StaleOwner
	if rd.con == con {
		verdict = rd.cur.Nack(ledger.Sequence(m.Sequence), ledger.DeliveryID(m.DeliveryID), m.OwnershipEpoch,
			m.Reason == protocol.NackReject, m.Reason == protocol.NackRetryNow, d.c.now)
	}
	if rd.sample.seq == ledger.Sequence(m.Sequence) {
		rd.sample = sample{}
	}
	d.answerVerdict(r, rd, verdict, answer{since: m.Sequence, nacked: rd})
}

// answerVerdict answers an ACK or NACK. a says what belongs to the answer where it has to wait for its record.
func (d *delivery) answerVerdict(r *Request, rd *reader, v ledger.Verdict, a answer) {
	switch v {
	case ledger.Settling:
		a.client, a.req, a.op = r.Client, r.Req, r.Op
		rd.ledger.later(a)
	case ledger.Renewed:
		d.c.answerOK(r.Client, r.Req, r.Op)
	case ledger.StaleOwner:
		d.c.answerErr(r.Client, r.Req, r.Op, protocol.CodeStaleOwner, "")
	case ledger.UnknownDelivery:
		d.c.answerErr(r.Client, r.Req, r.Op, protocol.CodeUnknownDelivery, "")
	}
}

func (d *delivery) onCredit(r *Request) {
	m := &d.creditM
	con := d.consumerOf(r, m.SubscriptionID)
	if con == nil {
		return
	}
	if m.MembershipEpoch < con.sub.membershipEpoch {
		d.c.answerErr(r.Client, r.Req, r.Op, protocol.CodeStaleGeneration, "")
		return
	}
	var count uint16
	var bytes uint32
	if m.Mode == protocol.CreditSet {
		count, bytes = con.credit.set(m.Count, m.Bytes)
	} else {
		count, bytes = con.credit.add(m.Count, m.Bytes)
	}
	res := con.credit.result(count, bytes)
	d.frame = res.AppendOK(d.frame[:0])
	r.Client.Complete(r.Req, d.frame)
	d.c.flushLater(r.Client)
	con.credited()
	if con.ready.n > 0 || m.Mode == protocol.CreditSet { // another window may have another answer to what is too large for it
		d.enqueue(con)
	}
}

func (d *delivery) onPull(r *Request) {
	m := &d.pullMsg
	con := d.consumerOf(r, m.SubscriptionID)
	if con == nil {
		return
	}
	if code := d.checkPull(con, m); code != 0 {
		d.c.answerErr(r.Client, r.Req, r.Op, code, "")
		return
	}
	maxWait := d.c.opts.PollMaxWait
	p := d.newPull()
	*p = pull{
		con: con, req: r.Req, maxMsgs: uint32(m.MaxMsgs), maxBytes: uint64(m.MaxBytes), minBytes: uint64(m.MinBytes),
		deadline: d.c.real + min(time.Duration(m.WaitMs)*time.Millisecond, maxWait), latest: d.c.real + maxWait,
	}
	r.Client.Pulls().Add(1)
	if con.pulls[0] == nil {
		con.pulls[0] = p
	} else {
		con.pulls[1] = p
	}
	if p.deadline > d.c.real {
		d.waiting.push(p)
	} else {
		p.expired = true
	}
	d.enqueue(con)
}

// checkPull returns the code that a PULL is refused with, 0 if it is in order.
func (d *delivery) checkPull(con *consumer, m *protocol.Pull) protocol.ErrorCode {
	s := con.sub
	switch {
	case m.MemberID != s.member:
		return protocol.CodeUnknownMember
	case m.MembershipEpoch < s.membershipEpoch || m.AssignmentEpoch < s.assignmentEpoch:
		return protocol.CodeStaleGeneration
	case con.pulls[maxWaitingPulls-1] != nil:
		return protocol.CodeMaxWaitingPulls
	}
	for _, epoch := range m.OwnershipEpochs {
		switch owner := con.owner(epoch); {
		case owner == nil:
			return protocol.CodeStaleGeneration
		case owner != con:
			return protocol.CodeNotOwner
		}
	}
	if con.credit.count == 0 {
		return protocol.CodeNoCredit
	}
	return 0
}

// owner returns who of the consumer's group has a partition under an ownership epoch, nil if nobody does.
func (con *consumer) owner(epoch uint64) *consumer {
	if con.group == nil {
		return nil
	}
	return con.group.owners[epoch]
}

func (d *delivery) newPull() *pull {
	if n := len(d.sparePulls); n > 0 {
		p := d.sparePulls[n-1]
		d.sparePulls = d.sparePulls[:n-1]
		return p
	}
	return new(pull)
}

// finish answers the consumer's oldest PULL: with OK, or with code.
func (d *delivery) finish(p *pull, code protocol.ErrorCode, text string) {
	con := p.con
	client := con.sub.client
	d.flushOut(con)
	if code == 0 {
		d.c.answerOK(client, p.req, protocol.OpPull)
	} else {
		d.c.answerErr(client, p.req, protocol.OpPull, code, text)
	}
	client.Pulls().Add(-1)
	d.waiting.remove(p)
	con.pulls[0], con.pulls[1] = con.pulls[1], nil
	*p = pull{}
	d.sparePulls = append(d.sparePulls, p)
}
