package wal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"

	"github.com/mortarmq/mortarmq/internal/mutant"
	"github.com/mortarmq/mortarmq/protocol"
)

// A record is a 56-byte header followed by key and value, all integers big-endian:
//
//	 0        4        8     10      12        16         24           32
//	+--------+--------+-----+-------+---------+----------+------------+
//	|len u32 |crc u32 |flags|key_len|value_len|sequence  |producer_id |
//	|        |        |u16  |u16    |u32      |u64       |u64         |
//	+--------+--------+-----+-------+---------+----------+------------+
//	 32             40                48           52         53    56
//	+--------------+-----------------+------------+----------+-----+-----------+
//	|producer_seq  |timestamp_unix_ms|leader_epoch|repl_flags|0 0 0|key | value|
//	|u64           |u64              |u32         |u8        |     |    |      |
//	+--------------+-----------------+------------+----------+-----+-----------+
//
// len counts every byte after itself and the checksum's four bytes less: 52 + key_len + value_len, so the whole record
// takes len+4 bytes. crc is CRC-32C (Castagnoli) over every byte from offset 8 to the record's end.
const (
	// RecordHeaderLen is the length in bytes of a record's header.
	RecordHeaderLen = 56
	// MaxKeyLen is the largest key in bytes that a record can carry; the protocol allows less.
	MaxKeyLen = math.MaxUint16
	// MaxValueLen is the largest value in bytes: a message's, and the envelope that a dead letter has in front of it.
	MaxValueLen = protocol.MaxMsgValueLen
	// MaxRecordLen is the length in bytes of the largest record.
	MaxRecordLen = RecordHeaderLen + MaxKeyLen + MaxValueLen

	recordLenBias = 4 // the record's length in bytes minus its record_len field
	minRecordLen  = RecordHeaderLen - recordLenBias
	crcFrom       = 8
)

// Flags of a record.
const (
	// FlagKey says that the record has a key. It is derived from the key: PutRecord sets it.
	FlagKey uint16 = 1 << 0
	// FlagTombstone marks a deletion of the key.
	FlagTombstone uint16 = 1 << 1
	// FlagRedriven marks a message that was put back from a dead-letter topic.
	FlagRedriven uint16 = 1 << 2

	knownFlags = FlagKey | FlagTombstone | FlagRedriven

	// MaxReplFlags is the largest value of replication_flags.
	MaxReplFlags = 3
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Record is one message, ledger event or metadata mutation as it stands in a log.
type Record struct {
	// Flags holds FlagTombstone and FlagRedriven; FlagKey follows from Key.
	Flags       uint16
	Sequence    Sequence
	ProducerID  uint64
	ProducerSeq uint64
	TimestampMs uint64
	LeaderEpoch Epoch
	ReplFlags   uint8
	// Key and Value are borrowed by PutRecord and alias the source after a decode.
	Key, Value []byte
}

// What a damaged record can have wrong, as Cause of a *CorruptionError.
var (
	errRecordLen      = errors.New("record_len is out of range")
	errRecordLengths  = errors.New("record_len disagrees with key_len and value_len")
	errRecordFlags    = errors.New("unknown flag bits are set")
	errRecordKeyFlag  = errors.New("the key flag disagrees with key_len")
	errRecordReserved = errors.New("reserved bytes are not zero")
	errRecordRepl     = errors.New("replication_flags is out of range")
)

// checksumError is the cause of a CorruptionError where a checksum fails.
type checksumError struct{ want, got uint64 }

func (e *checksumError) Error() string {
	return fmt.Sprintf("checksum is %#x, the bytes give %#x", e.want, e.got)
}

// RecordSize returns the length in bytes of a record with a key and a value of these lengths.
func RecordSize(keyLen, valueLen int) int { return RecordHeaderLen + keyLen + valueLen }

// PutRecord encodes r at the start of dst and returns the number of bytes. Key and value are copied. dst must have room
// for RecordSize(len(r.Key), len(r.Value)) bytes, and key and value must not be longer than MaxKeyLen and MaxValueLen.
func PutRecord(dst []byte, r *Record) int {
	n := RecordSize(len(r.Key), len(r.Value))
	dst = dst[:n]
	flags := r.Flags &^ FlagKey
	if len(r.Key) > 0 {
		flags |= FlagKey
	}
	binary.BigEndian.PutUint32(dst[0:], uint32(n-recordLenBias))
	binary.BigEndian.PutUint16(dst[8:], flags)
	binary.BigEndian.PutUint16(dst[10:], uint16(len(r.Key)))
	binary.BigEndian.PutUint32(dst[12:], uint32(len(r.Value)))
	binary.BigEndian.PutUint64(dst[16:], uint64(r.Sequence))
	binary.BigEndian.PutUint64(dst[24:], r.ProducerID)
	binary.BigEndian.PutUint64(dst[32:], r.ProducerSeq)
	binary.BigEndian.PutUint64(dst[40:], r.TimestampMs)
	binary.BigEndian.PutUint32(dst[48:], uint32(r.LeaderEpoch))
	binary.BigEndian.PutUint32(dst[52:], uint32(r.ReplFlags)<<24)
	copy(dst[RecordHeaderLen:], r.Key)
	copy(dst[RecordHeaderLen+len(r.Key):], r.Value)
	binary.BigEndian.PutUint32(dst[4:], crc32.Checksum(dst[crcFrom:], castagnoli))
	return n
}

// DecodeRecord reads the record at the start of b, checks everything the format promises and returns the record's
// length in bytes. r.Key and r.Value alias b. The error is ErrShort where b ends before the record does and a
// *CorruptionError (with Offset 0 and no Path) where the record is there but wrong; r is then undefined.
//
// A record_len of 0 is corruption here: where a format gives it a meaning (the end of a block in a segment) its reader
// looks for it first.
func DecodeRecord(b []byte, r *Record) (n int, err error) {
	if len(b) < 4 {
		return 0, ErrShort
	}
	recordLen := binary.BigEndian.Uint32(b)
	if recordLen < minRecordLen || recordLen > MaxRecordLen-recordLenBias {
		return 0, &CorruptionError{Cause: errRecordLen}
	}
	n = int(recordLen) + recordLenBias
	if len(b) < n {
		return 0, ErrShort
	}
	b = b[:n]
	if want, got := binary.BigEndian.Uint32(b[4:]), crc32.Checksum(b[crcFrom:], castagnoli); want != got && !mutant.Is("record-checksum-ignored") {
		return 0, &CorruptionError{Cause: &checksumError{uint64(want), uint64(got)}}
	}
	if err := checkRecord(b); err != nil {
		return 0, &CorruptionError{Sequence: Sequence(binary.BigEndian.Uint64(b[16:])), Cause: err}
	}
	return PeekRecord(b, r), nil
}

// checkRecord checks the header of a record of len(b) bytes.
func checkRecord(b []byte) error {
	flags := binary.BigEndian.Uint16(b[8:])
	keyLen := int(binary.BigEndian.Uint16(b[10:]))
	valueLen := int64(binary.BigEndian.Uint32(b[12:]))
	last := binary.BigEndian.Uint32(b[52:])
	switch {
	case valueLen > MaxValueLen || int64(len(b)) != RecordHeaderLen+int64(keyLen)+valueLen:
		return errRecordLengths
	case flags&^knownFlags != 0:
		return errRecordFlags
	case (flags&FlagKey != 0) != (keyLen > 0):
		return errRecordKeyFlag
	case last&0xFFFFFF != 0:
		return errRecordReserved
	case last>>24 > MaxReplFlags:
		return errRecordRepl
	}
	return nil
}

// PeekRecord is DecodeRecord without any check, for memory that this process encoded or has checked before: the data of
// a Round for one. It panics where b is no whole record.
func PeekRecord(b []byte, r *Record) (n int) {
	keyLen := int(binary.BigEndian.Uint16(b[10:]))
	n = RecordHeaderLen + keyLen + int(binary.BigEndian.Uint32(b[12:]))
	b = b[:n:n]
	r.Flags = binary.BigEndian.Uint16(b[8:])
	r.Sequence = Sequence(binary.BigEndian.Uint64(b[16:]))
	r.ProducerID = binary.BigEndian.Uint64(b[24:])
	r.ProducerSeq = binary.BigEndian.Uint64(b[32:])
	r.TimestampMs = binary.BigEndian.Uint64(b[40:])
	r.LeaderEpoch = Epoch(binary.BigEndian.Uint32(b[48:]))
	r.ReplFlags = b[52]
	r.Key = b[RecordHeaderLen : RecordHeaderLen+keyLen : RecordHeaderLen+keyLen]
	r.Value = b[RecordHeaderLen+keyLen:]
	return n
}
