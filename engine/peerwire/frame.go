package peerwire

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cespare/xxhash/v2"
)

// The versions of the protocol that this build speaks. Two nodes use the lower of their highest versions, if both speak
// it: see package net/peer.
const (
	MinVersion = 1
	MaxVersion = 1
)

const (
	// HeaderLen is the length in bytes of a frame's header.
	HeaderLen = 16
	// MaxBody is the largest body of a frame in bytes. It holds the largest round of a journal, or the largest piece of a
	// catch-up, with what stands in front of it.
	MaxBody = 20 << 20

	magic = 0xB7

	offVersion = 1
	offKind    = 2
	offFlags   = 3
	offLen     = 4
	offSum     = 8
)

// FlagS2 says that the body is compressed: the length that it has without (u32), then an S2 block.
const FlagS2 = 1 << 0

const knownFlags = FlagS2

// Kind is a frame's kind. Each belongs to one lane.
type Kind uint8

// The kinds. Those below 16 are the transport's own, and stand on every lane.
const (
	KindHello     Kind = 1 // handshake, see package net/peer
	KindChallenge Kind = 2
	KindProof     Kind = 3
	KindWelcome   Kind = 4
	KindRefuse    Kind = 5
	KindPing      Kind = 8
	KindPong      Kind = 9

	KindMessage Kind = 16 // lane control: a message of replica.Node

	KindAppend  Kind = 32 // lane log
	KindFlushed Kind = 33
	KindReject  Kind = 34

	KindFetch         Kind = 48 // lane bulk
	KindFetched       Kind = 49
	KindFetchEnd      Kind = 50
	KindCatchup       Kind = 51
	KindRecords       Kind = 52
	KindSkip          Kind = 53
	KindSnapshot      Kind = 54
	KindCatchupDone   Kind = 55
	KindCatchupAck    Kind = 56
	KindCatchupCancel Kind = 57
	KindBehind        Kind = 58
)

var kindNames = map[Kind]string{
	KindHello: "HELLO", KindChallenge: "CHALLENGE", KindProof: "PROOF", KindWelcome: "WELCOME", KindRefuse: "REFUSE",
	KindPing: "PING", KindPong: "PONG", KindMessage: "MESSAGE", KindAppend: "APPEND", KindFlushed: "FLUSHED",
	KindReject: "REJECT", KindFetch: "FETCH", KindFetched: "FETCHED", KindFetchEnd: "FETCH_END", KindCatchup: "CATCHUP",
	KindRecords: "RECORDS", KindSkip: "SKIP", KindSnapshot: "SNAPSHOT", KindCatchupDone: "CATCHUP_DONE",
	KindCatchupAck: "CATCHUP_ACK", KindCatchupCancel: "CATCHUP_CANCEL", KindBehind: "BEHIND",
}

// String returns the kind's name.
func (k Kind) String() string {
	if name, ok := kindNames[k]; ok {
		return name
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// Lane is one of the connections between two nodes. What could hold the other up goes over another one.
type Lane uint8

// The lanes.
const (
	// Control carries the messages of replica.Node: a heartbeat must not wait behind a round.
	Control Lane = iota
	// Log carries APPEND, FLUSHED and REJECT.
	Log
	// Bulk carries FETCH, CATCHUP and their answers.
	Bulk
	// Lanes is their number.
	Lanes
)

// String returns the lane's name.
func (l Lane) String() string {
	switch l {
	case Control:
		return "control"
	case Log:
		return "log"
	case Bulk:
		return "bulk"
	default:
		return fmt.Sprintf("lane %d", uint8(l))
	}
}

// Header is a frame's header.
type Header struct {
	Version uint8
	Kind    Kind
	// Flags holds FlagS2.
	Flags uint8
	// Len is the length in bytes of the body.
	Len int
	// Sum is the checksum of header and body.
	Sum uint64
}

// What a header can have wrong.
var (
	ErrMagic    = errors.New("this is no frame of a MortarMQ peer")
	ErrFlags    = errors.New("the frame has unknown flags")
	ErrLen      = errors.New("the frame is longer than any may be")
	ErrChecksum = errors.New("the frame's checksum does not match")
	// ErrBody says that a body contradicts its kind's layout.
	ErrBody = errors.New("the frame's body is malformed")
)

// ParseHeader decodes the header at the beginning of b, which must hold HeaderLen bytes at least. The version and the
// kind are the caller's to judge.
func ParseHeader(b []byte) (Header, error) {
	h := Header{
		Version: b[offVersion],
		Kind:    Kind(b[offKind]),
		Flags:   b[offFlags],
		Sum:     binary.BigEndian.Uint64(b[offSum:]),
	}
	size := binary.BigEndian.Uint32(b[offLen:])
	switch {
	case b[0] != magic:
		return h, ErrMagic
	case h.Flags&^knownFlags != 0:
		return h, ErrFlags
	case size > MaxBody:
		return h, fmt.Errorf("%w: %d bytes", ErrLen, size)
	}
	h.Len = int(size)
	return h, nil
}

// PutHeader encodes all of h but the checksum into the first HeaderLen bytes of b.
func PutHeader(b []byte, h *Header) {
	b[0], b[offVersion], b[offKind], b[offFlags] = magic, h.Version, byte(h.Kind), h.Flags
	binary.BigEndian.PutUint32(b[offLen:], uint32(h.Len))
}

// Hasher computes the checksums of one connection's frames in one direction. Without a Seed it does so for a handshake.
type Hasher struct {
	digest xxhash.Digest
	seed   uint64
}

// Seed sets what the connection's checksums begin with, so that a frame of another connection doesn't pass.
func (s *Hasher) Seed(seed uint64) { s.seed = seed }

// Sum returns the checksum of a frame: of its header's first 8 bytes and of its body, which may come in two pieces.
func (s *Hasher) Sum(header, body, rest []byte) uint64 {
	s.digest.ResetWithSeed(s.seed)
	_, _ = s.digest.Write(header[:offSum]) // never fails
	_, _ = s.digest.Write(body)
	_, _ = s.digest.Write(rest)
	return s.digest.Sum64()
}

// PutSum stores the checksum in the header at the beginning of b.
func PutSum(b []byte, sum uint64) { binary.BigEndian.PutUint64(b[offSum:], sum) }

// Carries reports whether frames of kind k, other than a handshake's, belong on the lane.
func (l Lane) Carries(k Kind) bool {
	switch {
	case k == KindPing || k == KindPong:
		return true
	case l == Control:
		return k == KindMessage
	case l == Log:
		return k >= KindAppend && k <= KindReject
	default:
		return l == Bulk && k >= KindFetch && k <= KindBehind
	}
}
