package peerwire

import (
	"encoding/binary"
	"time"

	"github.com/mortarmq/mortarmq/engine/replica"
)

const (
	messageLen = 56

	flagGranted   = 1 << 0
	flagConfirmed = 1 << 1
)

// AppendMessage encodes the body of a MESSAGE behind b. m is borrowed.
func AppendMessage(b []byte, m *replica.Message) []byte {
	var flags byte
	if m.Granted {
		flags |= flagGranted
	}
	if m.Confirmed {
		flags |= flagConfirmed
	}
	b = append(b, byte(m.Kind), byte(m.Stage), byte(m.Reason), byte(m.Standing), flags, 0)
	b = binary.BigEndian.AppendUint16(b, m.Logs)
	b = binary.BigEndian.AppendUint32(b, uint32(m.Epoch))
	b = binary.BigEndian.AppendUint16(b, uint16(len(m.Ends)))
	b = binary.BigEndian.AppendUint16(b, uint16(len(m.Commits)))
	b = append(b, m.Cluster[:]...)
	b = binary.BigEndian.AppendUint64(b, uint64(m.Instance))
	b = binary.BigEndian.AppendUint64(b, m.Session)
	b = binary.BigEndian.AppendUint64(b, uint64(m.Sent))
	for _, e := range m.Ends {
		b = appendPoint(b, e.Last)
		b = binary.BigEndian.AppendUint64(b, uint64(e.Commit))
		b = appendPoint(b, e.Floor)
	}
	for _, c := range m.Commits {
		b = binary.BigEndian.AppendUint64(b, uint64(c))
	}
	return b
}

const (
	endLen    = 32
	commitLen = 8
)

// DecodeMessage decodes the body of a MESSAGE. Nothing of m aliases b.
func DecodeMessage(b []byte, m *replica.Message) error {
	if len(b) < messageLen {
		return malformed(KindMessage, "it is too short")
	}
	ends, commits := int(binary.BigEndian.Uint16(b[12:])), int(binary.BigEndian.Uint16(b[14:]))
	if want := messageLen + ends*endLen + commits*commitLen; len(b) != want {
		return malformedLen(KindMessage, len(b), want)
	}
	*m = replica.Message{
		Kind: replica.Kind(b[0]), Stage: replica.Stage(b[1]), Reason: replica.Reason(b[2]), Standing: replica.Standing(b[3]),
		Granted: b[4]&flagGranted != 0, Confirmed: b[4]&flagConfirmed != 0,
		Logs:  binary.BigEndian.Uint16(b[6:]),
		Epoch: replica.Epoch(binary.BigEndian.Uint32(b[8:])), Cluster: replica.ClusterID(b[16:32]),
		Instance: replica.Instance(binary.BigEndian.Uint64(b[32:])), Session: binary.BigEndian.Uint64(b[40:]),
		Sent: time.Duration(binary.BigEndian.Uint64(b[48:])),
	}
	switch {
	case !m.Kind.Valid():
		return malformed(KindMessage, m.Kind.String()+" is unknown")
	case m.Stage > replica.Formed || m.Reason > replica.NoVote || m.Standing > replica.Learner:
		return malformed(KindMessage, "its fields are out of range")
	case b[4]&^(flagGranted|flagConfirmed) != 0 || b[5] != 0:
		return malformed(KindMessage, "reserved bytes are not zero")
	}
	r := reader{b: b[messageLen:]}
	if ends > 0 {
		m.Ends = make([]replica.End, ends)
	}
	for i := range m.Ends {
		m.Ends[i] = replica.End{Last: r.point(), Commit: replica.Index(r.u64()), Floor: r.point()}
	}
	if commits > 0 {
		m.Commits = make([]replica.Index, commits)
	}
	for i := range m.Commits {
		m.Commits[i] = replica.Index(r.u64())
	}
	return nil
}
