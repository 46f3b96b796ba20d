package metadata

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/mortarmq/mortarmq/protocol"
)

// Version is the format version of mutations and snapshots that this package reads and writes.
const Version = 1

// maxNameLen bounds a name in the log: "$dlq." and the longest group name.
const maxNameLen = protocol.MaxTopicLen

// maxSettingsLen bounds the settings of one topic or group in the log, in bytes.
const maxSettingsLen = 4096

// ErrMalformed is wrapped by every error about bytes that are no mutation or snapshot of this version.
var ErrMalformed = errors.New("malformed metadata")

var be = binary.BigEndian

// AppendMutation appends the encoding of m. Names are at most 255 bytes long; the Check functions see to it.
func AppendMutation(dst []byte, m Mutation) []byte {
	dst = append(dst, Version, byte(m.Type()))
	return m.appendFields(dst)
}

func appendString[T string | []byte](dst []byte, s T) []byte {
	dst = be.AppendUint16(dst, uint16(len(s)))
	return append(dst, s...)
}

func (m *TopicCreated) appendFields(dst []byte) []byte {
	dst = be.AppendUint16(dst, m.Topic)
	dst = be.AppendUint16(dst, m.Partitions)
	dst = appendString(dst, m.Name)
	return appendString(dst, m.Settings.AppendJSON(nil))
}

func (m *TopicDeleted) appendFields(dst []byte) []byte { return be.AppendUint16(dst, m.Topic) }

func (m *GroupCreated) appendFields(dst []byte) []byte {
	dst = be.AppendUint16(dst, m.Group)
	dst = be.AppendUint16(dst, m.Topic)
	dst = append(dst, byte(m.Policy))
	dst = appendString(dst, m.Name)
	return appendString(dst, m.Settings.AppendJSON(nil))
}

func (m *GroupDeleted) appendFields(dst []byte) []byte { return be.AppendUint16(dst, m.Group) }

func (m *MemberJoined) appendFields(dst []byte) []byte {
	dst = be.AppendUint16(dst, m.Group)
	dst = be.AppendUint64(dst, m.Member)
	return be.AppendUint32(dst, m.MembershipEpoch)
}

func (m *MemberLeft) appendFields(dst []byte) []byte {
	dst = be.AppendUint16(dst, m.Group)
	dst = be.AppendUint64(dst, m.Member)
	return be.AppendUint32(dst, m.MembershipEpoch)
}

// assignedPartLen is the encoded length of one AssignedPart.
const assignedPartLen = 2 + 8 + 8

func (m *Assigned) appendFields(dst []byte) []byte {
	dst = be.AppendUint16(dst, m.Group)
	dst = be.AppendUint32(dst, m.MembershipEpoch)
	dst = be.AppendUint32(dst, m.AssignmentEpoch)
	dst = be.AppendUint32(dst, uint32(len(m.Parts)))
	for _, p := range m.Parts {
		dst = be.AppendUint16(dst, p.Partition)
		dst = be.AppendUint64(dst, p.Member)
		dst = be.AppendUint64(dst, p.OwnershipEpoch)
	}
	return dst
}

func (m *LeaderChanged) appendFields(dst []byte) []byte { return be.AppendUint16(dst, m.Node) }

func (m *GroupChanged) appendFields(dst []byte) []byte {
	dst = be.AppendUint16(dst, m.Group)
	return appendString(dst, m.Settings.AppendJSON(nil))
}

// DecodeMutation reads one mutation; nothing of it aliases b. The error wraps ErrMalformed.
func DecodeMutation(b []byte) (Mutation, error) {
	r := reader{b: b}
	if v := r.u8(); r.err == nil && v != Version {
		return nil, fmt.Errorf("mutation has version %d, this broker reads version %d: upgrade it: %w", v, Version, ErrMalformed)
	}
	t := Type(r.u8())
	var m Mutation
	switch t {
	case TypeTopicCreated:
		x := &TopicCreated{Topic: r.u16(), Partitions: r.u16(), Name: r.name()}
		x.Settings = r.topicSettings()
		m = x
	case TypeTopicDeleted:
		m = &TopicDeleted{Topic: r.u16()}
	case TypeGroupCreated:
		x := &GroupCreated{Group: r.u16(), Topic: r.u16(), Policy: r.policy(), Name: r.name()}
		x.Settings = r.groupSettings()
		m = x
	case TypeGroupDeleted:
		m = &GroupDeleted{Group: r.u16()}
	case TypeMemberJoined:
		m = &MemberJoined{Group: r.u16(), Member: r.u64(), MembershipEpoch: r.u32()}
	case TypeMemberLeft:
		m = &MemberLeft{Group: r.u16(), Member: r.u64(), MembershipEpoch: r.u32()}
	case TypeAssigned:
		x := &Assigned{Group: r.u16(), MembershipEpoch: r.u32(), AssignmentEpoch: r.u32()}
		x.Parts = make([]AssignedPart, r.count(assignedPartLen))
		for i := range x.Parts {
			x.Parts[i] = AssignedPart{Partition: r.u16(), Member: r.u64(), OwnershipEpoch: r.u64()}
		}
		m = x
	case TypeLeaderChanged:
		m = &LeaderChanged{Node: r.u16()}
	case TypeGroupChanged:
		x := &GroupChanged{Group: r.u16()}
		x.Settings = r.groupSettings()
		m = x
	default:
		if r.err == nil {
			return nil, fmt.Errorf("unknown mutation type %d: %w", t, ErrMalformed)
		}
	}
	if err := r.end(); err != nil {
		return nil, fmt.Errorf("mutation (%v, %d bytes): %w", t, len(b), err)
	}
	return m, nil
}

// reader takes fields off b; the first failure sticks, and everything read after it is zero.
type reader struct {
	b   []byte
	err error
}

func (r *reader) take(n int) []byte {
	if r.err != nil {
		return nil
	}
	if len(r.b) < n {
		r.err = fmt.Errorf("%d bytes missing: %w", n-len(r.b), ErrMalformed)
		return nil
	}
	out := r.b[:n]
	r.b = r.b[n:]
	return out
}

func (r *reader) u8() uint8 {
	if b := r.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (r *reader) u16() uint16 {
	if b := r.take(2); b != nil {
		return be.Uint16(b)
	}
	return 0
}

func (r *reader) u32() uint32 {
	if b := r.take(4); b != nil {
		return be.Uint32(b)
	}
	return 0
}

func (r *reader) u64() uint64 {
	if b := r.take(8); b != nil {
		return be.Uint64(b)
	}
	return 0
}

// count reads the number of elements that follow, each at least size bytes long: a count that the rest can't hold fails
// before anything is allocated for it.
func (r *reader) count(size int) int {
	n := r.u32()
	if r.err == nil && uint64(n)*uint64(size) > uint64(len(r.b)) {
		r.fail("%d elements announced, but only %d bytes left", n, len(r.b))
		return 0
	}
	return int(n)
}

func (r *reader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), ErrMalformed)
	}
}

func (r *reader) bytes(limit int) []byte {
	n := int(r.u16())
	if n > limit {
		r.fail("a field of %d bytes, at most %d are allowed", n, limit)
		return nil
	}
	return r.take(n)
}

func (r *reader) name() string { return string(r.bytes(maxNameLen)) }

func (r *reader) policy() protocol.StartPolicy {
	p := protocol.StartPolicy(r.u8())
	if p > protocol.StartLatest {
		r.fail("start policy %d", p)
	}
	return p
}

func (r *reader) topicSettings() TopicSettings {
	b := r.bytes(maxSettingsLen)
	if r.err != nil {
		return TopicSettings{}
	}
	s, err := ParseTopicSettings(b)
	if err != nil {
		r.fail("%v", err)
	} else if string(s.AppendJSON(nil)) != string(b) {
		r.fail("topic settings are not in their canonical form")
	}
	return s
}

func (r *reader) groupSettings() GroupSettings {
	b := r.bytes(maxSettingsLen)
	if r.err != nil {
		return GroupSettings{}
	}
	s, err := ParseGroupSettings(b)
	if err != nil {
		r.fail("%v", err)
	} else if string(s.AppendJSON(nil)) != string(b) {
		r.fail("group settings are not in their canonical form")
	}
	return s
}

func (r *reader) end() error {
	if r.err == nil && len(r.b) > 0 {
		r.fail("%d bytes too many", len(r.b))
	}
	return r.err
}
