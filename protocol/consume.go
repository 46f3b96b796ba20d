package protocol

import (
	"math"
	"slices"
)

const ackFlags = AckFlagProgress | AckFlagCumulative

// AckFrameLen is the size of an ACK frame, its length field included.
const AckFrameLen = HeaderSize + 2 + 2 + 2 + 8 + 8 + 8 + 2

// AppendFrame appends the whole ACK frame.
func (m *Ack) AppendFrame(dst []byte) []byte {
	dst = appendHeader(dst, OpAck, AckFrameLen-HeaderSize)
	dst = be.AppendUint16(dst, m.SubscriptionID)
	dst = be.AppendUint16(dst, m.TopicID)
	dst = be.AppendUint16(dst, m.Partition)
	dst = be.AppendUint64(dst, m.Sequence)
	dst = be.AppendUint64(dst, m.DeliveryID)
	dst = be.AppendUint64(dst, m.OwnershipEpoch)
	return be.AppendUint16(dst, m.Flags)
}

var ackFields = []field{{"subscription_id", 2}, {"topic_id", 2}, {"partition", 2}, {"seq", 8}, {"delivery_id", 8},
	{"ownership_epoch", 8}, {"flags", 2}}

// Decode reads an ACK payload.
func (m *Ack) Decode(payload []byte) error {
	r := reader{b: payload, op: OpAck}
	h := r.fixed(AckFrameLen-HeaderSize, ackFields)
	if h == nil {
		return r.end()
	}
	m.SubscriptionID = be.Uint16(h[0:])
	m.TopicID = be.Uint16(h[2:])
	m.Partition = be.Uint16(h[4:])
	m.Sequence = be.Uint64(h[6:])
	m.DeliveryID = be.Uint64(h[14:])
	m.OwnershipEpoch = be.Uint64(h[22:])
	m.Flags = be.Uint16(h[30:])
	r.checkFlags(m.Flags, ackFlags, "flags", 30)
	return r.end()
}

// AppendFrame appends the whole NACK frame.
func (m *Nack) AppendFrame(dst []byte) []byte {
	dst = appendHeader(dst, OpNack, 2+2+2+8+8+8+1+2)
	dst = be.AppendUint16(dst, m.SubscriptionID)
	dst = be.AppendUint16(dst, m.TopicID)
	dst = be.AppendUint16(dst, m.Partition)
	dst = be.AppendUint64(dst, m.Sequence)
	dst = be.AppendUint64(dst, m.DeliveryID)
	dst = be.AppendUint64(dst, m.OwnershipEpoch)
	dst = append(dst, byte(m.Reason))
	return be.AppendUint16(dst, m.Flags)
}

// Decode reads a NACK payload. Reason 3 is reserved and refused.
func (m *Nack) Decode(payload []byte) error {
	r := reader{b: payload, op: OpNack}
	m.SubscriptionID = r.u16("subscription_id")
	m.TopicID = r.u16("topic_id")
	m.Partition = r.u16("partition")
	m.Sequence = r.u64("seq")
	m.DeliveryID = r.u64("delivery_id")
	m.OwnershipEpoch = r.u64("ownership_epoch")
	m.Reason = NackReason(r.atMost("reason", uint8(NackReject)))
	m.Flags = r.flags("flags", 0)
	return r.end()
}

// AppendFrame appends the whole PULL frame. OwnershipEpochs has at most 65 535 elements.
func (m *Pull) AppendFrame(dst []byte) []byte {
	must(OpPull, "ownership_epochs", len(m.OwnershipEpochs), math.MaxUint16)
	dst = appendHeader(dst, OpPull, 2+8+4+4+2+8*len(m.OwnershipEpochs)+2+4+2+4)
	dst = be.AppendUint16(dst, m.SubscriptionID)
	dst = be.AppendUint64(dst, m.MemberID)
	dst = be.AppendUint32(dst, m.MembershipEpoch)
	dst = be.AppendUint32(dst, m.AssignmentEpoch)
	dst = be.AppendUint16(dst, uint16(len(m.OwnershipEpochs)))
	for _, epoch := range m.OwnershipEpochs {
		dst = be.AppendUint64(dst, epoch)
	}
	dst = be.AppendUint16(dst, m.MaxMsgs)
	dst = be.AppendUint32(dst, m.MaxBytes)
	dst = be.AppendUint16(dst, m.WaitMs)
	return be.AppendUint32(dst, m.MinBytes)
}

// Decode reads a PULL payload. OwnershipEpochs is refilled from its start, keeping its capacity; it is grown only for
// as many elements as the payload really holds.
func (m *Pull) Decode(payload []byte) error {
	r := reader{b: payload, op: OpPull}
	m.SubscriptionID = r.u16("subscription_id")
	m.MemberID = r.u64("member_id")
	m.MembershipEpoch = r.u32("membership_epoch")
	m.AssignmentEpoch = r.u32("assignment_epoch")
	count := int(r.u16("ownership_epochs_len"))
	raw := r.bytes("ownership_epochs", 8*count, 0, 8*math.MaxUint16, 2)
	m.OwnershipEpochs = slices.Grow(m.OwnershipEpochs[:0], len(raw)/8)
	for ; len(raw) > 0; raw = raw[8:] {
		m.OwnershipEpochs = append(m.OwnershipEpochs, be.Uint64(raw))
	}
	m.MaxMsgs = r.u16("max_msgs")
	m.MaxBytes = r.u32("max_bytes")
	m.WaitMs = r.u16("wait_ms")
	m.MinBytes = r.u32("min_bytes")
	return r.end()
}

// AppendFrame appends the whole HEARTBEAT frame.
func (m *Heartbeat) AppendFrame(dst []byte) []byte {
	dst = appendHeader(dst, OpHeartbeat, 2+8+4+4+1)
	dst = be.AppendUint16(dst, m.SubscriptionID)
	dst = be.AppendUint64(dst, m.MemberID)
	dst = be.AppendUint32(dst, m.MembershipEpoch)
	dst = be.AppendUint32(dst, m.AssignmentEpoch)
	return append(dst, byte(m.State))
}

// Decode reads a HEARTBEAT payload.
func (m *Heartbeat) Decode(payload []byte) error {
	r := reader{b: payload, op: OpHeartbeat}
	m.SubscriptionID = r.u16("subscription_id")
	m.MemberID = r.u64("member_id")
	m.MembershipEpoch = r.u32("membership_epoch")
	m.AssignmentEpoch = r.u32("assignment_epoch")
	m.State = MemberState(r.atMost("state", uint8(MemberLeave)))
	return r.end()
}

// AppendFrame appends the whole NOTICE frame.
func (m *Notice) AppendFrame(dst []byte) []byte {
	dst = appendHeader(dst, OpNotice, 8+1+2+4+4+8+2+2+8)
	dst = be.AppendUint64(dst, m.NoticeID)
	dst = append(dst, byte(m.Kind))
	dst = be.AppendUint16(dst, m.GroupID)
	dst = be.AppendUint32(dst, m.MembershipEpoch)
	dst = be.AppendUint32(dst, m.AssignmentEpoch)
	dst = be.AppendUint64(dst, m.OwnershipEpoch)
	dst = be.AppendUint16(dst, m.TopicID)
	dst = be.AppendUint16(dst, m.Partition)
	return be.AppendUint64(dst, m.MemberID)
}

// Decode reads a NOTICE payload.
func (m *Notice) Decode(payload []byte) error {
	r := reader{b: payload, op: OpNotice}
	m.NoticeID = r.u64("notice_id")
	m.Kind = NoticeKind(r.atMost("kind", uint8(NoticeRevoke)))
	m.GroupID = r.u16("group_id")
	m.MembershipEpoch = r.u32("membership_epoch")
	m.AssignmentEpoch = r.u32("assignment_epoch")
	m.OwnershipEpoch = r.u64("ownership_epoch")
	m.TopicID = r.u16("topic_id")
	m.Partition = r.u16("partition")
	m.MemberID = r.u64("member_id")
	return r.end()
}

// AppendFrame appends the whole CONTROL_ACK frame.
func (m *ControlAck) AppendFrame(dst []byte) []byte {
	dst = appendHeader(dst, OpControlAck, 8+1+2+4+4+8+1)
	dst = be.AppendUint64(dst, m.NoticeID)
	dst = append(dst, byte(m.Kind))
	dst = be.AppendUint16(dst, m.GroupID)
	dst = be.AppendUint32(dst, m.MembershipEpoch)
	dst = be.AppendUint32(dst, m.AssignmentEpoch)
	dst = be.AppendUint64(dst, m.OwnershipEpoch)
	return append(dst, byte(m.Result))
}

// Decode reads a CONTROL_ACK payload.
func (m *ControlAck) Decode(payload []byte) error {
	r := reader{b: payload, op: OpControlAck}
	m.NoticeID = r.u64("notice_id")
	m.Kind = NoticeKind(r.atMost("notice_kind", uint8(NoticeRevoke)))
	m.GroupID = r.u16("group_id")
	m.MembershipEpoch = r.u32("membership_epoch")
	m.AssignmentEpoch = r.u32("assignment_epoch")
	m.OwnershipEpoch = r.u64("ownership_epoch")
	m.Result = ControlResult(r.atMost("result", uint8(ControlError)))
	return r.end()
}

// AppendFrame appends the whole CREDIT frame.
func (m *Credit) AppendFrame(dst []byte) []byte {
	dst = appendHeader(dst, OpCredit, 2+4+8+1+2+4+4)
	dst = be.AppendUint16(dst, m.SubscriptionID)
	dst = be.AppendUint32(dst, m.MembershipEpoch)
	dst = be.AppendUint64(dst, m.OwnershipEpoch)
	dst = append(dst, byte(m.Mode))
	dst = be.AppendUint16(dst, m.Count)
	dst = be.AppendUint32(dst, m.Bytes)
	return be.AppendUint32(dst, 0)
}

// Decode reads a CREDIT payload.
func (m *Credit) Decode(payload []byte) error {
	r := reader{b: payload, op: OpCredit}
	m.SubscriptionID = r.u16("subscription_id")
	m.MembershipEpoch = r.u32("membership_epoch")
	m.OwnershipEpoch = r.u64("ownership_epoch")
	m.Mode = CreditMode(r.atMost("mode", uint8(CreditAdd)))
	m.Count = r.u16("credit_count")
	m.Bytes = r.u32("credit_bytes")
	r.reserved32()
	return r.end()
}
