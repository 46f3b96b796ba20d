package deadletter

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/mortarmq/mortarmq/protocol"
)

// Sizes in bytes, and the format's version.
const (
	Version = 1
	// MaxHeaderLen is the most that an envelope adds to the value of a message; the specification's limit.
	MaxHeaderLen = 512

	fixedLen = 56
	magic    = "MMDL"
)

// FlagTombstone marks a message that deletes its key; it has the bit that it has in a record.
const FlagTombstone uint16 = 1 << 1

// maxSequence bounds sequences as everywhere in the broker: it leaves room for arithmetic.
const maxSequence = 1<<63 - 1

// ErrFormat is matched by every error about a value that is no dead letter of a version known here.
var ErrFormat = errors.New("not a dead letter")

// Reason tells why the last attempt failed.
type Reason uint8

// The reasons, as they are stored; never renumbered.
const (
	ReasonNack Reason = iota + 1
	ReasonExpired
	ReasonConnection
	ReasonRejected
)

var reasonNames = [...]string{
	ReasonNack: "nack", ReasonExpired: "expired", ReasonConnection: "connection", ReasonRejected: "rejected",
}

// String returns the name that command lines and JSON use.
func (r Reason) String() string {
	if int(r) < len(reasonNames) && reasonNames[r] != "" {
		return reasonNames[r]
	}
	return fmt.Sprintf("reason %d", uint8(r))
}

// ParseReason is the reverse of Reason.String.
func ParseReason(name string) (Reason, error) {
	for r, n := range reasonNames {
		if n != "" && n == name {
			return Reason(r), nil
		}
	}
	return 0, fmt.Errorf("reason is %.32q: use nack, expired, connection or rejected", name)
}

// Envelope is the header of a dead letter.
type Envelope struct {
	// TopicID, Partition and Sequence say where the message is stored.
	TopicID   uint16
	Partition uint16
	Sequence  uint64
	// Topic is the name that the topic had. It aliases what was decoded.
	Topic []byte
	// ProducerID and ProducerSeq are the message's own; both 0 for a plain publish.
	ProducerID, ProducerSeq uint64
	// Attempts is the number of failed deliveries, at least 1.
	Attempts uint16
	Reason   Reason
	// Flags holds FlagTombstone.
	Flags uint16
	// PublishedMs and EndedMs are Unix milliseconds: when the message was stored, and when the group gave it up.
	PublishedMs, EndedMs uint64
}

// HeaderLen returns the length in bytes that AppendHeader adds.
func (e *Envelope) HeaderLen() int { return fixedLen + len(e.Topic) }

// AppendHeader appends the header; the message's value is to follow. The topic's name has 1 to protocol.MaxTopicLen bytes.
func (e *Envelope) AppendHeader(dst []byte) []byte {
	dst = append(dst, magic...)
	dst = append(dst, Version, byte(e.Reason))
	dst = binary.BigEndian.AppendUint16(dst, e.Attempts)
	dst = binary.BigEndian.AppendUint16(dst, uint16(e.HeaderLen()))
	dst = binary.BigEndian.AppendUint16(dst, e.TopicID)
	dst = binary.BigEndian.AppendUint16(dst, e.Partition)
	dst = binary.BigEndian.AppendUint16(dst, e.Flags)
	dst = binary.BigEndian.AppendUint64(dst, e.Sequence)
	dst = binary.BigEndian.AppendUint64(dst, e.ProducerID)
	dst = binary.BigEndian.AppendUint64(dst, e.ProducerSeq)
	dst = binary.BigEndian.AppendUint64(dst, e.PublishedMs)
	dst = binary.BigEndian.AppendUint64(dst, e.EndedMs)
	return append(dst, e.Topic...)
}

// Decode reads the value of a dead letter, checks everything that the format promises and returns the message's value.
// Both the envelope's topic and value alias b. An error matches ErrFormat; e is then undefined.
func (e *Envelope) Decode(b []byte) (value []byte, err error) {
	switch {
	case len(b) < fixedLen:
		return nil, fmt.Errorf("%w: %d bytes are shorter than a header", ErrFormat, len(b))
	case string(b[:4]) != magic:
		return nil, fmt.Errorf("%w: it does not begin with %s", ErrFormat, magic)
	case b[4] != Version:
		return nil, fmt.Errorf("%w: format version %d, this program knows %d", ErrFormat, b[4], Version)
	}
	header := int(binary.BigEndian.Uint16(b[8:]))
	if header < fixedLen || header > MaxHeaderLen || header > len(b) {
		return nil, fmt.Errorf("%w: header_len %d of %d bytes", ErrFormat, header, len(b))
	}
	*e = Envelope{
		Reason:      Reason(b[5]),
		Attempts:    binary.BigEndian.Uint16(b[6:]),
		TopicID:     binary.BigEndian.Uint16(b[10:]),
		Partition:   binary.BigEndian.Uint16(b[12:]),
		Flags:       binary.BigEndian.Uint16(b[14:]),
		Sequence:    binary.BigEndian.Uint64(b[16:]),
		ProducerID:  binary.BigEndian.Uint64(b[24:]),
		ProducerSeq: binary.BigEndian.Uint64(b[32:]),
		PublishedMs: binary.BigEndian.Uint64(b[40:]),
		EndedMs:     binary.BigEndian.Uint64(b[48:]),
		Topic:       b[fixedLen:header:header],
	}
	if err := e.check(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFormat, err)
	}
	return b[header:], nil
}

func (e *Envelope) check() error {
	switch {
	case e.Reason < ReasonNack || e.Reason > ReasonRejected:
		return fmt.Errorf("unknown reason %d", uint8(e.Reason))
	case e.Attempts == 0:
		return errors.New("attempts is 0")
	case e.TopicID == 0:
		return errors.New("topic_id is 0")
	case e.Partition == protocol.AnyPartition:
		return errors.New("partition names none")
	case e.Flags&^FlagTombstone != 0:
		return fmt.Errorf("unknown flags %#x", e.Flags)
	case e.Sequence == 0 || e.Sequence > maxSequence:
		return fmt.Errorf("sequence %d is out of range", e.Sequence)
	}
	return protocol.ValidateLookup(e.Topic)
}
