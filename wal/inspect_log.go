package wal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/mortarmq/mortarmq/ring"
)

var (
	errPadding  = errors.New("the padding up to the next block is not zero")
	errTornTail = errors.New("the file ends inside a record: a torn tail, if nothing beyond it was durable")
)

// logScan is a walk over the records of a log file.
type logScan struct {
	*inspector
	stream StreamID
	// next is the sequence expected, 0 where nothing is known.
	next Sequence
	off  int64
	// pad is where the padding that ends at off began, -1 where there is none.
	pad int64
	// budget is how many bytes the search behind damage may still check, so that a hostile file costs a bounded time.
	budget int64
}

// log is an MMQS, MMLQ or MMML file.
func (in *inspector) log(kind StreamKind) error {
	head, err := in.at(0, segmentHeaderLen)
	if err != nil {
		return err
	}
	s := logScan{inspector: in, stream: StreamID{Kind: kind}, off: segmentHeaderLen, pad: -1, budget: 4*in.size + MaxRecordLen}
	h, err := decodeSegmentHeader(head, kind)
	var version *VersionError
	switch {
	case errors.As(err, &version):
		return in.damage(0, in.size, err)
	case err != nil: // the records may be whole all the same
		if err := in.damage(0, segmentHeaderLen, err); err != nil {
			return err
		}
	default:
		s.stream, s.next = h.Stream, h.Base
		found := &LogFound{Stream: h.Stream, Journal: h.Journal, Base: h.Base, CreatedMs: h.CreatedMs}
		if err := in.visit(found); err != nil {
			return err
		}
		if err := in.checkLogPlace(&h); err != nil {
			return err
		}
	}
	return s.run()
}

func (in *inspector) checkLogPlace(h *segmentHeader) error {
	if h.Stream.Kind == Messages {
		return in.checkPlace(h.Stream, h.Base, segmentSuffix)
	}
	if base, ok := parseLogName(h.Stream.Kind, filepath.Base(in.path)); ok && base != h.Base {
		return in.damage(0, 0, errMisplaced)
	}
	return nil
}

func (s *logScan) run() error {
	var rec Record
	for s.off < s.size {
		b, err := s.at(s.off, 4)
		if err != nil {
			return err
		}
		if len(b) < 4 && !allZero(b) {
			if err := s.damaged(0, errTornTail); err != nil {
				return err
			}
			continue
		}
		if len(b) < 4 || binary.BigEndian.Uint32(b) == 0 {
			if err := s.padding(); err != nil {
				return err
			}
			continue
		}
		n, err := s.record(&rec)
		if err != nil {
			var corrupt *CorruptionError
			if !errors.As(err, &corrupt) && !errors.Is(err, ErrShort) {
				return err
			}
			if errors.Is(err, ErrShort) {
				err = errTornTail
			}
			if err := s.damaged(n, err); err != nil {
				return err
			}
			continue
		}
		if err := s.found(&rec, n); err != nil {
			return err
		}
	}
	return s.endPadding()
}

// record decodes the record at off. With an error n is the length that it claims, 0 where that is impossible.
func (s *logScan) record(rec *Record) (n int64, err error) {
	b, err := s.at(s.off, 4)
	if err != nil {
		return 0, err
	}
	if len(b) == 4 {
		if claimed := int64(binary.BigEndian.Uint32(b)) + recordLenBias; claimed >= RecordHeaderLen && claimed <= MaxRecordLen {
			n = claimed
		}
	}
	if b, err = s.at(s.off, int(n)); err != nil {
		return 0, err
	}
	if n == 0 {
		return 0, &CorruptionError{Cause: errRecordLen}
	}
	if _, err := DecodeRecord(b, rec); err != nil {
		return n, err
	}
	return n, nil
}

func (s *logScan) found(rec *Record, n int64) error {
	if err := s.endPadding(); err != nil {
		return err
	}
	if s.next != 0 && rec.Sequence != s.next {
		err := &CorruptionError{Stream: s.stream, Sequence: rec.Sequence, Cause: fmt.Errorf("expected sequence %d here", s.next)}
		if err := s.damage(s.off, 0, err); err != nil {
			return err
		}
	}
	if err := s.visit(&RecordFound{Offset: s.off, Length: n, Stream: s.stream, Record: rec}); err != nil {
		return err
	}
	s.next = rec.Sequence + 1
	s.off += n
	return nil
}

// padding passes over the rest of a block.
func (s *logScan) padding() error {
	end := min(nextBlock(s.off), s.size)
	b, err := s.at(s.off, int(end-s.off))
	if err != nil {
		return err
	}
	if len(b) == 0 { // the file became shorter meanwhile
		s.off = s.size
		return nil
	}
	if s.pad < 0 {
		s.pad = s.off
	}
	start := s.off
	s.off = end
	for i, c := range b {
		if c != 0 {
			if err := s.endPadding(); err != nil {
				return err
			}
			return s.damage(start+int64(i), end-start-int64(i), errPadding)
		}
	}
	return nil
}

func (s *logScan) endPadding() error {
	if s.pad < 0 {
		return nil
	}
	found := &PaddingFound{Offset: s.pad, Length: s.off - s.pad}
	s.pad = -1
	return s.visit(found)
}

// damaged reports that no record can be read at off and moves off to where the next one may be: behind the length that
// the damaged one claims, if there is a record, else at the next block boundary that has one. It ends the walk where there
// is none.
func (s *logScan) damaged(claimed int64, cause error) error {
	if err := s.endPadding(); err != nil {
		return err
	}
	at := s.off
	var ok bool
	var err error
	if claimed > 0 {
		s.off = at + claimed
		if ok, err = s.plausible(); err != nil {
			return err
		}
	}
	for block := nextBlock(at); !ok; block += ring.BlockSize {
		s.off = block
		if block >= s.size || s.budget < 0 {
			s.off = s.size
			break
		}
		if ok, err = s.plausible(); err != nil {
			return err
		}
	}
	var corrupt *CorruptionError
	if !errors.As(cause, &corrupt) {
		corrupt = &CorruptionError{Cause: cause}
	}
	c := *corrupt
	c.Stream = s.stream
	if c.Sequence == 0 {
		c.Sequence = s.next
	}
	s.next = 0 // unknown: how many records were lost can't be told here; the next one tells
	return s.damage(at, s.off-at, &c)
}

// plausible tells whether a whole record stands at off.
func (s *logScan) plausible() (bool, error) {
	b, err := s.at(s.off, RecordHeaderLen)
	if err != nil || len(b) < RecordHeaderLen {
		return false, err
	}
	n := int64(binary.BigEndian.Uint32(b)) + recordLenBias
	keyLen, valueLen := int64(binary.BigEndian.Uint16(b[10:])), int64(binary.BigEndian.Uint32(b[12:]))
	if valueLen > MaxValueLen || n != RecordHeaderLen+keyLen+valueLen || n > s.size-s.off {
		return false, nil
	}
	s.budget -= n
	var rec Record
	_, err = s.record(&rec)
	var corrupt *CorruptionError
	if errors.As(err, &corrupt) || errors.Is(err, ErrShort) {
		return false, nil
	}
	return err == nil && (s.next == 0 || rec.Sequence >= s.next), err
}
