package wal

import (
	"encoding/binary"
	"errors"

	"github.com/cespare/xxhash/v2"

	"github.com/mortarmq/mortarmq/ring"
)

// Layout of a round and of its entries; drawn in the package documentation.
const (
	roundMarker    = 0x4D52_4E44 // "MRND"
	roundHeaderLen = 80
	entryHeaderLen = 24

	roundTypeData  = 1
	roundTypeStart = 2

	// Offsets in a round's header.
	offRoundMarker    = 0
	offRoundType      = 4
	offRoundJournal   = 6
	offRoundLen       = 8
	offRoundEntries   = 12
	offRoundNumber    = 16
	offRoundSum       = 24
	offRoundPrev      = 32
	offRoundNonce     = 40
	offRoundEpoch     = 48
	offRoundReserved  = 52
	offRoundFlushed   = 56
	offRoundCommitted = 64
	offRoundHeadSum   = 72
)

// blockAlign rounds n up to whole blocks.
func blockAlign(n int) int { return (n + ring.BlockSize - 1) &^ (ring.BlockSize - 1) }

// roundSeal is what a round's header says besides what its entries say.
type roundSeal struct {
	journal            int
	number             RoundNumber
	epoch              Epoch
	start              bool
	nonce, prev        uint64
	flushed, committed RoundNumber
	// key is the key of the file that the round goes to.
	key uint64
}

// open starts gathering into buf.
func (r *Round) open() { r.size = roundHeaderLen }

// extends tells whether a record would continue the last entry.
func (r *Round) extends(s StreamID, seq Sequence) bool {
	if len(r.Entries) == 0 {
		return false
	}
	e := &r.Entries[len(r.Entries)-1]
	return e.Stream == s && e.Last()+1 == seq
}

// append encodes one record; the caller has checked that buf has room for it and, where it doesn't extend the last
// entry, for an entry header.
func (r *Round) append(s StreamID, rec *Record) {
	if !r.extends(s, rec.Sequence) {
		r.size += entryHeaderLen
		r.Entries = append(r.Entries, Entry{Stream: s, First: rec.Sequence, Off: uint32(r.size)})
	}
	n := PutRecord(r.buf[r.size:], rec)
	e := &r.Entries[len(r.Entries)-1]
	e.Count++
	e.Len += uint32(n)
	r.size += n
	r.records++
}

// seal writes the headers and the padding. The round is immutable from here on.
func (r *Round) seal(s roundSeal) {
	for i := range r.Entries {
		putEntry(r.buf[r.Entries[i].Off-entryHeaderLen:], &r.Entries[i])
	}
	r.Number, r.Epoch, r.Start, r.Flushed, r.Committed = s.number, s.epoch, s.start, s.flushed, s.committed
	r.prev = s.prev
	r.padded = blockAlign(r.size)
	clear(r.buf[r.size:r.padded])

	h := r.buf[:r.size]
	binary.BigEndian.PutUint32(h[offRoundMarker:], roundMarker)
	h[offRoundType], h[offRoundType+1] = roundTypeData, 0
	if s.start {
		h[offRoundType] = roundTypeStart
	}
	binary.BigEndian.PutUint16(h[offRoundJournal:], uint16(s.journal))
	binary.BigEndian.PutUint32(h[offRoundLen:], uint32(r.size))
	binary.BigEndian.PutUint32(h[offRoundEntries:], uint32(len(r.Entries)))
	binary.BigEndian.PutUint64(h[offRoundNumber:], uint64(s.number))
	binary.BigEndian.PutUint64(h[offRoundPrev:], s.prev)
	binary.BigEndian.PutUint64(h[offRoundNonce:], s.nonce)
	binary.BigEndian.PutUint32(h[offRoundEpoch:], uint32(s.epoch))
	binary.BigEndian.PutUint32(h[offRoundReserved:], 0)
	binary.BigEndian.PutUint64(h[offRoundFlushed:], uint64(s.flushed))
	binary.BigEndian.PutUint64(h[offRoundCommitted:], uint64(s.committed))
	binary.BigEndian.PutUint64(h[offRoundHeadSum:], roundHeadChecksum(h, s.key))
	r.sum = roundChecksum(h, s.key)
	binary.BigEndian.PutUint64(h[offRoundSum:], r.sum)
}

// roundChecksum computes the checksum of an encoded round. While it is computed the file's key stands in the place of
// the checksum: only who knows the key can make a round that passes, which no producer of a value does. The checksum's
// field holds the key afterwards.
func roundChecksum(b []byte, key uint64) uint64 {
	binary.BigEndian.PutUint64(b[offRoundSum:], key)
	return xxhash.Sum64(b)
}

// roundHeadChecksum computes the checksum of a round's header alone, with the file's key in the place of the round's
// checksum. It lets a scan refuse what only looks like a header without reading the length that it claims.
func roundHeadChecksum(b []byte, key uint64) uint64 {
	var h [offRoundHeadSum]byte
	copy(h[:], b)
	binary.BigEndian.PutUint64(h[offRoundSum:], key)
	return xxhash.Sum64(h[:])
}

func putEntry(b []byte, e *Entry) {
	b[0], b[1] = byte(e.Stream.Kind), 0
	binary.BigEndian.PutUint16(b[2:], e.Stream.Topic)
	binary.BigEndian.PutUint16(b[4:], e.Stream.Partition)
	binary.BigEndian.PutUint16(b[6:], 0)
	binary.BigEndian.PutUint32(b[8:], e.Count)
	binary.BigEndian.PutUint32(b[12:], e.Len)
	binary.BigEndian.PutUint64(b[16:], uint64(e.First))
}

// Reasons why bytes are no round of a journal.
var (
	errRoundMarker  = errors.New("no round starts here")
	errRoundHeader  = errors.New("the round's header contradicts itself")
	errRoundLength  = errors.New("the round's length is out of range")
	errRoundJournal = errors.New("the round belongs to another journal")
	errRoundEntries = errors.New("the round's entries contradict its header")
	errRoundShort   = errors.New("the file ends inside the round")
)

// roundHeader is a decoded header, not yet backed by the checksum.
type roundHeader struct {
	start              bool
	size, entries      int
	number             RoundNumber
	sum, prev, nonce   uint64
	epoch              Epoch
	flushed, committed RoundNumber
}

// peekRoundHeader reads the header at the start of b, which has at least roundHeaderLen bytes and comes from a file with
// this key, and checks everything but the payload.
func peekRoundHeader(b []byte, journal int, key uint64) (roundHeader, error) {
	if binary.BigEndian.Uint32(b[offRoundMarker:]) != roundMarker {
		return roundHeader{}, errRoundMarker
	}
	if want, got := binary.BigEndian.Uint64(b[offRoundHeadSum:]), roundHeadChecksum(b, key); want != got {
		return roundHeader{}, &checksumError{want, got}
	}
	h := roundHeader{
		start:     b[offRoundType] == roundTypeStart,
		size:      int(binary.BigEndian.Uint32(b[offRoundLen:])),
		entries:   int(binary.BigEndian.Uint32(b[offRoundEntries:])),
		number:    RoundNumber(binary.BigEndian.Uint64(b[offRoundNumber:])),
		sum:       binary.BigEndian.Uint64(b[offRoundSum:]),
		prev:      binary.BigEndian.Uint64(b[offRoundPrev:]),
		nonce:     binary.BigEndian.Uint64(b[offRoundNonce:]),
		epoch:     Epoch(binary.BigEndian.Uint32(b[offRoundEpoch:])),
		flushed:   RoundNumber(binary.BigEndian.Uint64(b[offRoundFlushed:])),
		committed: RoundNumber(binary.BigEndian.Uint64(b[offRoundCommitted:])),
	}
	switch {
	case int(binary.BigEndian.Uint16(b[offRoundJournal:])) != journal:
		return h, errRoundJournal
	case h.size < roundHeaderLen || h.size > maxRoundLen:
		return h, errRoundLength
	case b[offRoundType] != roundTypeData && !h.start, b[offRoundType+1] != 0,
		binary.BigEndian.Uint32(b[offRoundReserved:]) != 0,
		h.number == 0, h.epoch == 0, h.flushed >= h.number, h.committed >= h.number,
		h.start && h.entries != 0, h.entries > (h.size-roundHeaderLen)/(entryHeaderLen+RecordHeaderLen):
		return h, errRoundHeader
	}
	return h, nil
}

// verifyRound checks the checksum of the whole round b, whose header is h.
func verifyRound(b []byte, h *roundHeader, key uint64) error {
	got := roundChecksum(b[:h.size], key)
	binary.BigEndian.PutUint64(b[offRoundSum:], h.sum)
	if got != h.sum {
		return &checksumError{h.sum, got}
	}
	return nil
}

// load fills in a round from verified bytes: r.buf holds them, padded.
func (r *Round) load(h *roundHeader) error {
	r.Number, r.Epoch, r.Start, r.Flushed, r.Committed = h.number, h.epoch, h.start, h.flushed, h.committed
	r.prev, r.sum, r.size, r.padded = h.prev, h.sum, h.size, blockAlign(h.size)
	if err := r.loadEntries(); err != nil {
		return err
	}
	if len(r.Entries) != h.entries {
		return errRoundEntries
	}
	return nil
}

// loadEntries finds the entries in r.buf[:r.size]. Each record is decoded once, strictly, so that later readers can peek.
func (r *Round) loadEntries() error {
	for off := roundHeaderLen; off < r.size; {
		if r.size-off < entryHeaderLen {
			return errRoundEntries
		}
		if r.stamped {
			return errPositionPlace
		}
		e, err := decodeEntry(r.buf[off:])
		if err != nil {
			return err
		}
		off += entryHeaderLen
		e.Off = uint32(off)
		if int64(e.Len) > int64(r.size-off) {
			return errRoundEntries
		}
		if err := checkEntry(r.buf[off:off+int(e.Len)], &e); err != nil {
			return err
		}
		off += int(e.Len)
		r.Entries = append(r.Entries, e)
		if e.Stream.Kind != Replica {
			r.records += int(e.Count)
		} else if err := r.loadPosition(&e); err != nil {
			return err
		}
	}
	return nil
}

// valid tells whether there can be such a stream.
func (s StreamID) valid() bool {
	switch s.Kind {
	case Messages:
		return true
	case Ledger, Metadata, Replica:
		return s.Topic == 0 && s.Partition == 0
	default:
		return false
	}
}

func decodeEntry(b []byte) (Entry, error) {
	e := Entry{
		Stream: StreamID{
			Kind:      StreamKind(b[0]),
			Topic:     binary.BigEndian.Uint16(b[2:]),
			Partition: binary.BigEndian.Uint16(b[4:]),
		},
		Count: binary.BigEndian.Uint32(b[8:]),
		Len:   binary.BigEndian.Uint32(b[12:]),
		First: Sequence(binary.BigEndian.Uint64(b[16:])),
	}
	switch {
	case !e.Stream.valid(), b[1] != 0 || b[6] != 0 || b[7] != 0, e.Count == 0,
		e.First == 0 && e.Stream.Kind != Replica:
		return e, errRoundEntries
	}
	return e, nil
}

// checkEntry decodes the records of an entry: as many as it says, numbered without gaps, filling its length.
func checkEntry(b []byte, e *Entry) error {
	var rec Record
	for i := range e.Count {
		n, err := DecodeRecord(b, &rec)
		if err != nil {
			return err
		}
		if rec.Sequence != e.First+Sequence(i) {
			return errRoundEntries
		}
		b = b[n:]
	}
	if len(b) != 0 {
		return errRoundEntries
	}
	return nil
}
