package peerwire

import (
	"encoding/binary"
	"fmt"

	"github.com/mortarmq/mortarmq/engine/replica"
)

// Lengths in bytes of what stands before a payload, or of the whole body where there is none.
const (
	AppendLen  = 32
	FlushedLen = 24
	RejectLen  = 40
)

// Releaser is memory with a reference count, such as a *wal.Round.
type Releaser interface{ Release() }

// Payload is the memory of a frame's payload that has arrived. It is its receiver's until Release, which is called once, from
// any goroutine.
type Payload interface {
	Bytes() []byte
	Release()
}

// Append takes a round of the leader to a follower. Its payload, the round's entries byte for byte, travels beside it. A
// probe has no payload: it asks the follower how far it agrees.
type Append struct {
	Log   uint16
	Epoch replica.Epoch // of the leader that sends it
	Prev  replica.Point // the round before
	// Point is the round's own: its index is Prev's and one. A probe's is zero.
	Point  replica.Point
	Commit replica.Index // the leader's commit index when it was sent
}

// PutAppend encodes a into the first AppendLen bytes of b. The index of a.Point is not sent, since it follows from a.Prev.
func PutAppend(b []byte, a *Append) {
	binary.BigEndian.PutUint16(b, a.Log)
	binary.BigEndian.PutUint16(b[2:], 0)
	binary.BigEndian.PutUint32(b[4:], uint32(a.Epoch))
	binary.BigEndian.PutUint32(b[8:], uint32(a.Prev.Epoch))
	binary.BigEndian.PutUint32(b[12:], uint32(a.Point.Epoch))
	binary.BigEndian.PutUint64(b[16:], uint64(a.Prev.Index))
	binary.BigEndian.PutUint64(b[24:], uint64(a.Commit))
}

// DecodeAppend decodes the first AppendLen bytes of an APPEND's body and returns the payload behind them, which aliases b and
// is empty in a probe. What the payload holds is not looked at.
func DecodeAppend(b []byte, a *Append) (payload []byte, err error) {
	if len(b) < AppendLen {
		return nil, malformed(KindAppend, "it is too short")
	}
	*a = Append{
		Log:   binary.BigEndian.Uint16(b),
		Epoch: replica.Epoch(binary.BigEndian.Uint32(b[4:])),
		Prev: replica.Point{
			Epoch: replica.Epoch(binary.BigEndian.Uint32(b[8:])),
			Index: replica.Index(binary.BigEndian.Uint64(b[16:])),
		},
		Commit: replica.Index(binary.BigEndian.Uint64(b[24:])),
	}
	payload = b[AppendLen:]
	epoch := replica.Epoch(binary.BigEndian.Uint32(b[12:]))
	if len(payload) > 0 {
		a.Point = replica.Point{Epoch: epoch, Index: a.Prev.Index + 1}
	}
	switch {
	case b[2]|b[3] != 0:
		return nil, malformed(KindAppend, "reserved bytes are not zero")
	case len(payload) == 0 && epoch != 0:
		return nil, malformed(KindAppend, "a probe has a round's epoch")
	case len(payload) > 0 && (epoch < a.Prev.Epoch || epoch > a.Epoch || epoch == 0 || a.Point.Index == 0):
		return nil, malformed(KindAppend, "epoch or index of the round are out of range")
	}
	return payload, nil
}

// Flushed says that a follower has a log's rounds up to Index, as the leader of Epoch sent them, on its disk.
type Flushed struct {
	Log      uint16
	Voter    bool // it counts
	Epoch    replica.Epoch
	Index    replica.Index
	Instance replica.Instance // of the follower
}

const flagVoter = 1 << 0

// PutFlushed encodes f into the first FlushedLen bytes of b.
func PutFlushed(b []byte, f *Flushed) {
	binary.BigEndian.PutUint16(b, f.Log)
	b[2], b[3] = 0, 0
	if f.Voter {
		b[2] = flagVoter
	}
	binary.BigEndian.PutUint32(b[4:], uint32(f.Epoch))
	binary.BigEndian.PutUint64(b[8:], uint64(f.Index))
	binary.BigEndian.PutUint64(b[16:], uint64(f.Instance))
}

// DecodeFlushed decodes the body of a FLUSHED.
func DecodeFlushed(b []byte, f *Flushed) error {
	switch {
	case len(b) != FlushedLen:
		return malformedLen(KindFlushed, len(b), FlushedLen)
	case b[2]&^flagVoter != 0 || b[3] != 0:
		return malformed(KindFlushed, "reserved bytes are not zero")
	}
	*f = Flushed{
		Log:      binary.BigEndian.Uint16(b),
		Voter:    b[2]&flagVoter != 0,
		Epoch:    replica.Epoch(binary.BigEndian.Uint32(b[4:])),
		Index:    replica.Index(binary.BigEndian.Uint64(b[8:])),
		Instance: replica.Instance(binary.BigEndian.Uint64(b[16:])),
	}
	return nil
}

// Reject tells a leader that a follower didn't take an APPEND, and where the follower's log ends.
type Reject struct {
	Log     uint16
	Verdict replica.VerdictKind
	Epoch   replica.Epoch // of the APPEND
	Known   replica.Epoch // the highest that the follower knows
	End     replica.End
	// Instance is the follower's.
	Instance replica.Instance
}

// PutReject encodes r into the first RejectLen bytes of b.
func PutReject(b []byte, r *Reject) {
	binary.BigEndian.PutUint16(b, r.Log)
	b[2], b[3] = byte(r.Verdict), 0
	binary.BigEndian.PutUint32(b[4:], uint32(r.Epoch))
	binary.BigEndian.PutUint32(b[8:], uint32(r.Known))
	binary.BigEndian.PutUint32(b[12:], uint32(r.End.Last.Epoch))
	binary.BigEndian.PutUint64(b[16:], uint64(r.End.Last.Index))
	binary.BigEndian.PutUint64(b[24:], uint64(r.End.Commit))
	binary.BigEndian.PutUint64(b[32:], uint64(r.Instance))
}

// DecodeReject decodes the body of a REJECT.
func DecodeReject(b []byte, r *Reject) error {
	switch {
	case len(b) != RejectLen:
		return malformedLen(KindReject, len(b), RejectLen)
	case b[3] != 0:
		return malformed(KindReject, "reserved bytes are not zero")
	}
	*r = Reject{
		Log:     binary.BigEndian.Uint16(b),
		Verdict: replica.VerdictKind(b[2]),
		Epoch:   replica.Epoch(binary.BigEndian.Uint32(b[4:])),
		Known:   replica.Epoch(binary.BigEndian.Uint32(b[8:])),
		End: replica.End{
			Last: replica.Point{
				Epoch: replica.Epoch(binary.BigEndian.Uint32(b[12:])),
				Index: replica.Index(binary.BigEndian.Uint64(b[16:])),
			},
			Commit: replica.Index(binary.BigEndian.Uint64(b[24:])),
		},
		Instance: replica.Instance(binary.BigEndian.Uint64(b[32:])),
	}
	return nil
}

func malformed(k Kind, what string) error { return fmt.Errorf("%w: %v: %s", ErrBody, k, what) }

func malformedLen(k Kind, got, want int) error {
	return fmt.Errorf("%w: %v: it has %d bytes, not %d", ErrBody, k, got, want)
}
