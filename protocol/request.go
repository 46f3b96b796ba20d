package protocol

import (
	"encoding/binary"
	"math"
)

var be = binary.BigEndian

// AppendFrame appends the whole CONNECT frame. Token has at most 65 535 bytes.
func (m *Connect) AppendFrame(dst []byte) []byte {
	must(OpConnect, "token", len(m.Token), math.MaxUint16)
	dst = appendHeader(dst, OpConnect, 1+2+2+len(m.Token)+4)
	dst = append(dst, m.Version)
	dst = be.AppendUint16(dst, m.Flags)
	dst = be.AppendUint16(dst, uint16(len(m.Token)))
	dst = append(dst, m.Token...)
	return be.AppendUint32(dst, 0)
}

// Decode reads a CONNECT payload. Token aliases it. Every version is accepted, for the caller to answer
// CodeUnsupportedVersion; a payload of another version may of course not have this format.
func (m *Connect) Decode(payload []byte) error {
	r := reader{b: payload, op: OpConnect}
	m.Version = r.u8("protocol_version")
	m.Flags = r.flags("client_flags", 0)
	m.Token = r.bytes("token", int(r.u16("token_len")), 0, math.MaxUint16, 2)
	r.reserved32()
	return r.end()
}

const declareFlags = DeclareFlagDelete | DeclareFlagLookup | DeclareFlagSettings | DeclareFlagGroup | DeclareFlagUpdate |
	DeclareFlagReset

// AppendFrame appends the whole DECLARE frame, with Settings if Flags has DeclareFlagSettings, Group and StartPolicy if
// it has DeclareFlagGroup. Topic and Settings have at most 65 535 bytes each, Group 1 to MaxGroupLen.
func (m *Declare) AppendFrame(dst []byte) []byte {
	must(OpDeclare, "topic", len(m.Topic), math.MaxUint16)
	n := 2 + len(m.Topic) + 2 + 2
	settings := m.Flags&DeclareFlagSettings != 0
	if settings {
		must(OpDeclare, "settings", len(m.Settings), math.MaxUint16)
		n += 2 + len(m.Settings)
	}
	group := m.Flags&DeclareFlagGroup != 0
	if group {
		must(OpDeclare, "group", len(m.Group), MaxGroupLen)
		n += 2 + len(m.Group) + 1
	}
	reset := m.Flags&DeclareFlagReset != 0
	if reset {
		n += resetLen
	}
	dst = appendHeader(dst, OpDeclare, n)
	dst = be.AppendUint16(dst, uint16(len(m.Topic)))
	dst = append(dst, m.Topic...)
	dst = be.AppendUint16(dst, m.Partitions)
	dst = be.AppendUint16(dst, m.Flags)
	if settings {
		dst = be.AppendUint16(dst, uint16(len(m.Settings)))
		dst = append(dst, m.Settings...)
	}
	if group {
		dst = be.AppendUint16(dst, uint16(len(m.Group)))
		dst = append(dst, m.Group...)
		dst = append(dst, byte(m.StartPolicy))
	}
	if reset {
		dst = m.Reset.append(dst)
	}
	return dst
}

// Decode reads a DECLARE payload. Topic, Settings and Group alias it. The name's length and characters are left to
// ValidateTopic, whose CodeInvalidTopic leaves the connection open.
func (m *Declare) Decode(payload []byte) error {
	r := reader{b: payload, op: OpDeclare}
	m.Topic = r.bytes("topic", int(r.u16("topic_len")), 0, math.MaxUint16, 2)
	m.Partitions = r.u16("partition_count")
	m.Flags = r.flags("flags", declareFlags)
	if both := DeclareFlagDelete | DeclareFlagLookup; m.Flags&both == both {
		r.fail("flags", r.off-2, "asks for DELETE and LOOKUP at once")
	}
	if m.Flags&DeclareFlagUpdate != 0 && m.Flags != DeclareFlagUpdate|DeclareFlagGroup|DeclareFlagSettings {
		r.fail("flags", r.off-2, "asks for UPDATE, which goes with GROUP and SETTINGS only")
	}
	if m.Flags&DeclareFlagReset != 0 && m.Flags != DeclareFlagReset|DeclareFlagGroup {
		r.fail("flags", r.off-2, "asks for RESET, which goes with GROUP only")
	}
	m.Settings, m.Group, m.StartPolicy, m.Reset = nil, nil, 0, Reset{}
	if m.Flags&DeclareFlagSettings != 0 {
		m.Settings = r.bytes("settings", int(r.u16("settings_len")), 0, math.MaxUint16, 2)
	}
	if m.Flags&DeclareFlagGroup != 0 {
		m.Group = r.bytes("group", int(r.u16("group_len")), 1, MaxGroupLen, 2)
		m.StartPolicy = StartPolicy(r.atMost("start_policy", uint8(StartLatest)))
	}
	if m.Flags&DeclareFlagReset != 0 {
		m.Reset.decode(&r)
	}
	return r.end()
}

const (
	pubFixed  = 2 + 2 + 8 + 8 + 2 + 2 // up to and including key_len
	pubLayout = pubFixed + 4          // without key and value
)

// PubFrameLen returns the size of a PUB frame, its length field included.
func PubFrameLen(keyLen, valueLen int) int { return HeaderSize + pubLayout + keyLen + valueLen }

// AppendFrame appends the whole PUB frame. Key has at most MaxKeyLen bytes, Value at most MaxValueLen.
func (m *Pub) AppendFrame(dst []byte) []byte {
	must(OpPub, "value", len(m.Value), MaxValueLen)
	return append(m.AppendHeader(dst, len(m.Value)), m.Value...)
}

// AppendHeader appends a PUB frame up to and including value_len; the caller sends valueLen bytes of value behind it.
func (m *Pub) AppendHeader(dst []byte, valueLen int) []byte {
	must(OpPub, "key", len(m.Key), MaxKeyLen)
	dst = appendHeader(dst, OpPub, pubLayout+len(m.Key)+valueLen)
	dst = be.AppendUint16(dst, m.TopicID)
	dst = be.AppendUint16(dst, m.Partition)
	dst = be.AppendUint64(dst, m.ProducerID)
	dst = be.AppendUint64(dst, m.ProducerSeq)
	dst = be.AppendUint16(dst, m.Flags)
	dst = be.AppendUint16(dst, uint16(len(m.Key)))
	dst = append(dst, m.Key...)
	return be.AppendUint32(dst, uint32(valueLen))
}

var pubFields = []field{{"topic_id", 2}, {"partition", 2}, {"producer_id", 8}, {"producer_seq", 8}, {"flags", 2}, {"key_len", 2}}

// Decode reads a PUB payload. Key and Value alias it.
func (m *Pub) Decode(payload []byte) error {
	r := reader{b: payload, op: OpPub}
	h := r.fixed(pubFixed, pubFields)
	if h == nil {
		return r.end()
	}
	m.TopicID = be.Uint16(h[0:])
	m.Partition = be.Uint16(h[2:])
	m.ProducerID = be.Uint64(h[4:])
	m.ProducerSeq = be.Uint64(h[12:])
	m.Flags = be.Uint16(h[20:])
	r.checkFlags(m.Flags, PubFlagDurability|PubFlagRedriven, "flags", 20)
	m.Key = r.bytes("key", int(be.Uint16(h[22:])), 0, MaxKeyLen, 2)
	m.Value = r.bytes("value", int(r.u32("value_len")), 0, MaxValueLen, 4)
	return r.end()
}

// Durability returns what the publisher asked for.
func (m *Pub) Durability() Durability { return Durability(m.Flags & PubFlagDurability) }

// SubFlagFollower is reserved: its meaning is not defined yet, so it is refused like any reserved field.
const subFlags = SubFlagStream | SubFlagBroadcast | SubFlagRejoin | SubFlagSettings

// AppendFrame appends the whole SUB frame, with MemberID if Flags has SubFlagRejoin and Settings if it has
// SubFlagSettings. Group has 1 to MaxGroupLen bytes, Settings at most 65 535.
func (m *Sub) AppendFrame(dst []byte) []byte {
	must(OpSub, "group", len(m.Group), MaxGroupLen)
	n := 2 + len(m.Group) + 2 + 2 + 1 + 2 + 4 + 2
	if m.Flags&SubFlagRejoin != 0 {
		n += 8
	}
	if m.Flags&SubFlagSettings != 0 {
		must(OpSub, "settings", len(m.Settings), math.MaxUint16)
		n += 2 + len(m.Settings)
	}
	dst = appendHeader(dst, OpSub, n)
	dst = be.AppendUint16(dst, uint16(len(m.Group)))
	dst = append(dst, m.Group...)
	dst = be.AppendUint16(dst, m.TopicID)
	dst = be.AppendUint16(dst, m.Partition)
	dst = append(dst, byte(m.StartPolicy))
	dst = be.AppendUint16(dst, m.CreditCount)
	dst = be.AppendUint32(dst, m.CreditBytes)
	dst = be.AppendUint16(dst, m.Flags)
	if m.Flags&SubFlagRejoin != 0 {
		dst = be.AppendUint64(dst, m.MemberID)
	}
	if m.Flags&SubFlagSettings != 0 {
		dst = be.AppendUint16(dst, uint16(len(m.Settings)))
		dst = append(dst, m.Settings...)
	}
	return dst
}

// Decode reads a SUB payload. Group and Settings alias it.
func (m *Sub) Decode(payload []byte) error {
	r := reader{b: payload, op: OpSub}
	m.Group = r.bytes("group", int(r.u16("group_len")), 1, MaxGroupLen, 2)
	m.TopicID = r.u16("topic_id")
	m.Partition = r.u16("partition")
	if m.Partition != AnyPartition {
		r.fail("partition", r.off-2, "must be 0xFFFF")
	}
	m.StartPolicy = StartPolicy(r.atMost("start_policy", uint8(StartLatest)))
	m.CreditCount = r.u16("credit_count")
	m.CreditBytes = r.u32("credit_bytes")
	m.Flags = r.flags("flags", subFlags)
	m.MemberID, m.Settings = 0, nil
	if m.Flags&SubFlagRejoin != 0 {
		m.MemberID = r.u64("member_id")
	}
	if m.Flags&SubFlagSettings != 0 {
		m.Settings = r.bytes("settings", int(r.u16("settings_len")), 0, math.MaxUint16, 2)
	}
	return r.end()
}

// AppendPing appends a PING frame.
func AppendPing(dst []byte) []byte { return appendHeader(dst, OpPing, 0) }

// DecodePing checks that a PING payload is empty.
func DecodePing(payload []byte) error {
	r := reader{b: payload, op: OpPing}
	return r.end()
}
