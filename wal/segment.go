package wal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/mortarmq/mortarmq/ring"
)

// A log file holds committed records of one stream: a partition's segment (MMQS), the delivery ledger (MMLQ) or the
// metadata mutation log (MMML). The three differ in magic and name only.
//
//	 0                                                    4096
//	+----------------------------------------------------+--------+--------+------+-----+--------+---
//	| header                                             | record | record |  ... | pad | record | ...
//	+----------------------------------------------------+--------+--------+------+-----+--------+---
//	 0      4   5   6     8         10      12         16       24         32    36
//	+------+---+---+-----+---------+-------+----------+--------+----------+-----+------------------+
//	|magic |ver|hdr|topic|partition|journal|header_len|base_seq|created_ms|crc  |zero to header_len|
//	|      |u8 |u8 |u16  |u16      |u16    |u32       |u64     |u64       |u32  |                  |
//	+------+---+---+-----+---------+-------+----------+--------+----------+-----+------------------+
//
// ver and hdr are 1. crc is CRC-32C over the header without itself. Topic and partition are 0 outside MMQS. base_seq is
// the sequence of the first record. Records stand back to back; where a record_len would stand, 0 says that the next
// record starts at the next 4 KiB boundary of the file. Every sweep ends a file that way, so that a block that was made
// durable is never written again. A pad is never shorter than the 4 bytes of a record_len: where less is left of the
// block, the pad takes the whole next block too, whose zeros say the same once more.
const (
	segmentHeaderLen     = ring.BlockSize
	segmentFormatVersion = 1
	segmentHeaderVersion = 1
	segmentCRCOffset     = 32

	// MaxSegmentBytes bounds StoreOptions.SegmentMaxBytes: offsets are 32 bits wide and a segment may exceed its limit
	// by one round.
	MaxSegmentBytes = 4<<30 - 17<<20
)

var (
	magicSegment  = [4]byte{'M', 'M', 'Q', 'S'}
	magicLedger   = [4]byte{'M', 'M', 'L', 'Q'}
	magicMetadata = [4]byte{'M', 'M', 'M', 'L'}
)

var (
	errMagic       = errors.New("the file doesn't start with the magic of its format")
	errHeaderShort = errors.New("the file ends inside its header")
	errHeaderLen   = errors.New("the header's length is wrong")
	errHeaderZero  = errors.New("reserved bytes of the header are not zero")
	errMisplaced   = errors.New("the header names another stream or base sequence than the file's path")
)

// segmentHeader is the decoded first block of a log file.
type segmentHeader struct {
	Stream    StreamID
	Journal   int
	Base      Sequence
	CreatedMs uint64
}

func segmentMagic(k StreamKind) [4]byte {
	switch k {
	case Ledger:
		return magicLedger
	case Metadata:
		return magicMetadata
	case Messages, Replica:
	}
	return magicSegment
}

// putSegmentHeader encodes h into the first segmentHeaderLen bytes of dst.
func putSegmentHeader(dst []byte, h *segmentHeader) {
	dst = dst[:segmentHeaderLen]
	clear(dst)
	magic := segmentMagic(h.Stream.Kind)
	copy(dst, magic[:])
	dst[4] = segmentFormatVersion
	dst[5] = segmentHeaderVersion
	binary.BigEndian.PutUint16(dst[6:], h.Stream.Topic)
	binary.BigEndian.PutUint16(dst[8:], h.Stream.Partition)
	binary.BigEndian.PutUint16(dst[10:], uint16(h.Journal))
	binary.BigEndian.PutUint32(dst[12:], segmentHeaderLen)
	binary.BigEndian.PutUint64(dst[16:], uint64(h.Base))
	binary.BigEndian.PutUint64(dst[24:], h.CreatedMs)
	binary.BigEndian.PutUint32(dst[segmentCRCOffset:], crcWithout(dst, segmentCRCOffset))
}

// decodeSegmentHeader checks and decodes the header of a log file of the given kind. Errors are a *VersionError or a
// *CorruptionError, without path.
func decodeSegmentHeader(b []byte, kind StreamKind) (h segmentHeader, err error) {
	if len(b) < segmentHeaderLen {
		return h, &CorruptionError{Offset: int64(len(b)), Cause: errHeaderShort}
	}
	b = b[:segmentHeaderLen]
	sum := func(b []byte) error { return checkCRC(b, segmentCRCOffset) }
	if err := (format{segmentMagic(kind), segmentFormatVersion}).check(b, sum); err != nil {
		return h, err
	}
	if b[5] > segmentHeaderVersion {
		return h, newer(b, 5, segmentHeaderVersion, sum)
	}
	if err := sum(b); err != nil {
		return h, err
	}
	if binary.BigEndian.Uint32(b[12:]) != segmentHeaderLen {
		return h, &CorruptionError{Cause: errHeaderLen}
	}
	if b[5] == 0 || !allZero(b[segmentCRCOffset+4:]) {
		return h, &CorruptionError{Cause: errHeaderZero}
	}
	h.Stream = StreamID{Kind: kind, Topic: binary.BigEndian.Uint16(b[6:]), Partition: binary.BigEndian.Uint16(b[8:])}
	h.Journal = int(binary.BigEndian.Uint16(b[10:]))
	h.Base = Sequence(binary.BigEndian.Uint64(b[16:]))
	h.CreatedMs = binary.BigEndian.Uint64(b[24:])
	return h, nil
}

// format is how a file begins: with its magic and a version, of which version is the newest that this build reads.
type format struct {
	magic   [4]byte
	version uint8
}

// check checks the first 5 bytes of a file. The version comes before any checksum, which sum checks as this build knows it:
// a newer format may have another one.
func (f format) check(b []byte, sum func(b []byte) error) error {
	if [4]byte(b[:4]) != f.magic {
		return &CorruptionError{Cause: errMagic}
	}
	switch {
	case b[4] > f.version:
		return newer(b, 4, f.version, sum)
	case b[4] == 0:
		return &CorruptionError{Offset: 4, Cause: errors.New("format version 0 doesn't exist")}
	}
	return nil
}

// newer returns the error for the version in b[at], of which supported is the newest that this build reads. Where the checksum
// is right with that one in its place, nobody has written a newer file: the byte is damaged.
func newer(b []byte, at int, supported uint8, sum func(b []byte) error) error {
	version := b[at]
	b = slices.Clone(b)
	b[at] = supported
	if sum(b) == nil {
		return &CorruptionError{Cause: fmt.Errorf("%w: it is %d, and the checksum that of version %d",
			errVersionByte, version, supported)}
	}
	return &VersionError{Version: version, Supported: supported}
}

var errVersionByte = errors.New("the format version is damaged")

// crcWithout returns the CRC-32C of b without the 4 bytes at off, where the checksum itself stands.
func crcWithout(b []byte, off int) uint32 {
	return crc32.Update(crc32.Checksum(b[:off], castagnoli), castagnoli, b[off+4:])
}

func checkCRC(b []byte, off int) error {
	if want, got := binary.BigEndian.Uint32(b[off:]), crcWithout(b, off); want != got {
		return &CorruptionError{Cause: &checksumError{uint64(want), uint64(got)}}
	}
	return nil
}

// padLen returns how many zero bytes end a log file at off on a block boundary: 0 at a boundary, otherwise at least 4.
func padLen(off int64) int {
	n := int(-off & (ring.BlockSize - 1))
	if n > 0 && n < 4 {
		n += ring.BlockSize
	}
	return n
}

// nextBlock returns the first block boundary behind off.
func nextBlock(off int64) int64 { return off&^(ring.BlockSize-1) + ring.BlockSize }

// Names and places. Numbers in names are decimal; sequences have 20 digits so that names sort like them.
const (
	topicsDir      = "topics"
	ledgerDir      = "ledger"
	metadataDir    = "metadata"
	journalDir     = "journal"
	segmentSuffix  = ".mqs"
	indexSuffix    = ".mqi"
	ledgerActive   = "delivery.mql"
	ledgerPrefix   = "delivery-"
	ledgerSuffix   = ".mql"
	metadataPrefix = "mmml-"
	metadataSuffix = ".log"
	checkpointFile = "checkpoint.mqc"
	deletedPrefix  = ".deleted-"
)

func topicDir(dir string, topic uint16) string {
	return filepath.Join(dir, topicsDir, strconv.Itoa(int(topic)))
}

// streamDir returns the directory of a stream's log files.
func streamDir(dir string, journal int, id StreamID) string {
	switch id.Kind {
	case Ledger:
		return filepath.Join(dir, ledgerDir, strconv.Itoa(journal))
	case Metadata:
		return filepath.Join(dir, metadataDir)
	case Messages, Replica:
	}
	return filepath.Join(topicDir(dir, id.Topic), strconv.Itoa(int(id.Partition)))
}

func sequenceName(base Sequence) string { return fmt.Sprintf("%020d", uint64(base)) }

// logName returns the name of a log file. The newest ledger file has a name of its own; it is renamed when another
// follows it.
func logName(kind StreamKind, base Sequence, active bool) string {
	switch {
	case kind == Ledger && active:
		return ledgerActive
	case kind == Ledger:
		return ledgerPrefix + sequenceName(base) + ledgerSuffix
	case kind == Metadata:
		return metadataPrefix + sequenceName(base) + metadataSuffix
	default:
		return sequenceName(base) + segmentSuffix
	}
}

// parseLogName is the reverse of logName for all but the newest ledger file, which doesn't tell its base.
func parseLogName(kind StreamKind, name string) (base Sequence, ok bool) {
	prefix, suffix := "", segmentSuffix
	switch kind {
	case Ledger:
		prefix, suffix = ledgerPrefix, ledgerSuffix
	case Metadata:
		prefix, suffix = metadataPrefix, metadataSuffix
	case Messages, Replica:
	}
	digits, ok := strings.CutPrefix(name, prefix)
	if !ok {
		return 0, false
	}
	if digits, ok = strings.CutSuffix(digits, suffix); !ok || len(digits) != 20 {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	return Sequence(n), err == nil && n > 0
}

// parseID parses a directory name that is a topic or partition number, in the one form that is written.
func parseID(name string) (uint16, bool) {
	n, err := strconv.ParseUint(name, 10, 16)
	return uint16(n), err == nil && strconv.FormatUint(n, 10) == name
}
