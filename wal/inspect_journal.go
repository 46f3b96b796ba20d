package wal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/mortarmq/mortarmq/ring"
)

// JournalFound is the header of a journal file (MMJL).
type JournalFound struct {
	Journal int
	// Number is the file's, FileBytes the length it was made with.
	Number    uint32
	FileBytes int64
}

// RoundFound is a whole round of a journal file. Its records follow as RecordFound.
type RoundFound struct {
	// Offset and Length locate it in the file, in bytes, padding included.
	Offset, Length int64
	Number         RoundNumber
	Epoch          Epoch
	// Start tells the round that opened an epoch.
	Start              bool
	Flushed, Committed RoundNumber
	Entries            []Entry
	// Records counts those of all entries but the position's.
	Records int
	// Position is the round's place in its replicated log; nil where it has none.
	Position *LogPosition
	// Stale tells a round left over from before: older than the newest one before it in the file. Recovery does not
	// look at it, and its records are not reported.
	Stale bool
}

// UnusedFound is space of a journal file without a round: zeros, or the rest of rounds that newer ones have overwritten.
type UnusedFound struct {
	Offset, Length int64
	Zero           bool
}

// roundScan is a walk over the rounds of a journal file.
type roundScan struct {
	*inspector
	file   *journalFile
	id     int
	off    int64
	newest *Round
	// expected is where the round after the newest one starts.
	expected int64
	unused   UnusedFound
}

// journal is an MMJL file.
func (in *inspector) journal() error {
	head, err := in.at(0, fileHeaderLen)
	if err != nil {
		return err
	}
	if len(head) < fileHeaderLen {
		return in.damage(int64(len(head)), in.size, errHeaderShort)
	}
	id := int(binary.BigEndian.Uint16(head[6:]))
	number, ok := parseJournalFileName(filepath.Base(in.path))
	if !ok {
		number = binary.BigEndian.Uint32(head[8:])
	}
	f, err := decodeFileHeader(in.path, head, id, number)
	if err != nil { // the rounds can't be checked without the header's key
		return in.damage(0, in.size, err)
	}
	if err := in.visit(&JournalFound{Journal: id, Number: f.number, FileBytes: f.size}); err != nil {
		return err
	}
	if f.size != in.size {
		err := fmt.Errorf("the header says that the file has %d bytes, it has %d", f.size, in.size)
		if err := in.damage(min(f.size, in.size), 0, err); err != nil {
			return err
		}
	}
	s := roundScan{inspector: in, file: f, id: id, off: fileHeaderLen, expected: fileHeaderLen}
	return s.run()
}

func (s *roundScan) run() error {
	for s.off < s.size {
		b, err := s.at(s.off, ring.BlockSize)
		if err != nil {
			return err
		}
		if len(b) < roundHeaderLen {
			if len(b) == 0 {
				break
			}
			if err := s.skip(b, int64(len(b))); err != nil {
				return err
			}
			continue
		}
		h, bad := peekRoundHeader(b, s.id, s.file.key)
		if bad != nil {
			if err := s.noRound(b, bad); err != nil {
				return err
			}
			continue
		}
		if err := s.round(&h); err != nil {
			return err
		}
	}
	return s.endUnused()
}

// noRound is a block at off where no round starts. Only where the next round is expected, and its marker stands there, is
// that worth a report; everything else is what recycled files look like.
func (s *roundScan) noRound(b []byte, bad error) error {
	if errors.Is(bad, errRoundMarker) || s.off != s.expected {
		return s.skip(b, ring.BlockSize)
	}
	if err := s.endUnused(); err != nil {
		return err
	}
	at := s.off
	s.off += ring.BlockSize
	return s.damage(at, ring.BlockSize, s.torn(at, nextNumber(s.newest), bad))
}

func nextNumber(r *Round) RoundNumber {
	if r == nil {
		return 0
	}
	return r.Number + 1
}

// torn tells of a round that isn't whole. Where the next round was expected that need not be damage.
func (s *roundScan) torn(at int64, n RoundNumber, cause error) error {
	if at == s.expected {
		cause = fmt.Errorf("%w: a torn tail, if the round was never durable (the mark tells)", cause)
	}
	return s.about(n, cause)
}

func (s *roundScan) about(n RoundNumber, cause error) error {
	var corrupt *CorruptionError
	if errors.As(cause, &corrupt) {
		c := *corrupt
		c.Offset, c.Round = 0, n
		return &c
	}
	return &CorruptionError{Round: n, Cause: cause}
}

// round is a round at off whose header is right.
func (s *roundScan) round(h *roundHeader) error {
	if err := s.endUnused(); err != nil {
		return err
	}
	at := s.off
	padded := int64(blockAlign(h.size))
	stale := s.newest != nil && (h.epoch < s.newest.Epoch || h.number <= s.newest.Number)
	b, err := s.at(at, int(padded))
	if err != nil {
		return err
	}
	var bad error
	r := &Round{buf: b}
	if len(b) < h.size {
		bad = errRoundShort
	} else if bad = verifyRound(b, h, s.file.key); bad == nil {
		bad = r.load(h)
	}
	switch {
	case bad != nil && stale: // partly overwritten
		return s.skip(b[:min(len(b), ring.BlockSize)], ring.BlockSize)
	case bad != nil:
		s.off += ring.BlockSize // its length may be wrong as well
		return s.damage(at, min(padded, s.size-at), s.torn(at, h.number, bad))
	}
	s.off += padded
	if !stale {
		if err := s.checkChain(r, h, at); err != nil {
			return err
		}
		s.newest, s.expected = &Round{Number: r.Number, Epoch: r.Epoch, sum: r.sum}, s.off
	}
	found := &RoundFound{Offset: at, Length: padded, Number: r.Number, Epoch: r.Epoch, Start: r.Start, Flushed: r.Flushed,
		Committed: r.Committed, Entries: r.Entries, Records: r.records, Stale: stale}
	if r.stamped {
		found.Position = &r.position
	}
	if err := s.visit(found); err != nil || stale {
		return err
	}
	return s.records(r, at)
}

// checkChain compares a round with the one before it in the file.
func (s *roundScan) checkChain(r *Round, h *roundHeader, at int64) error {
	switch {
	case s.newest == nil:
		return nil
	case r.Number > s.newest.Number+1:
		err := fmt.Errorf("the rounds from %d to %d are missing before this one", s.newest.Number+1, r.Number-1)
		return s.damage(at, 0, s.about(r.Number, err))
	case h.prev != s.newest.sum:
		return s.damage(at, 0, s.about(r.Number, errors.New("it doesn't carry the checksum of the round before: the chain breaks here")))
	}
	return nil
}

func (s *roundScan) records(r *Round, at int64) error {
	var rec Record
	for i := range r.Entries {
		e := &r.Entries[i]
		if e.Stream.Kind == Replica {
			continue // RoundFound has it
		}
		off := at + int64(e.Off)
		for data := r.Data(e); len(data) > 0; {
			n := PeekRecord(data, &rec)
			if err := s.visit(&RecordFound{Offset: off, Length: int64(n), Stream: e.Stream, Record: &rec}); err != nil {
				return err
			}
			data = data[n:]
			off += int64(n)
		}
	}
	return nil
}

// skip passes over n bytes without a round; b is what there is of them.
func (s *roundScan) skip(b []byte, n int64) error {
	n = min(n, s.size-s.off)
	zero := allZero(b[:min(int64(len(b)), n)])
	if s.unused.Length > 0 && s.unused.Zero != zero {
		if err := s.endUnused(); err != nil {
			return err
		}
	}
	if s.unused.Length == 0 {
		s.unused = UnusedFound{Offset: s.off, Zero: zero}
	}
	s.unused.Length += n
	s.off += n
	return nil
}

func (s *roundScan) endUnused() error {
	if s.unused.Length == 0 {
		return nil
	}
	found := s.unused
	s.unused = UnusedFound{}
	return s.visit(&found)
}
