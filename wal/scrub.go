package wal

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/mortarmq/mortarmq/ring"
)

// A scrub reads full segments, one after the other and slowly, past the page cache, and compares their blocks with the sums
// beside their indexes: rot is found before somebody wants to read there, while other copies are still good. What it finds
// goes the way of what a reader finds. It gives way to everything else that the store does.

const (
	// DefaultScrubBytes is how many bytes a scrub reads in a second, DefaultScrubEvery how often it begins anew,
	// DefaultScrubAfter how long after the start it first does.
	DefaultScrubBytes = 8 << 20
	DefaultScrubEvery = 24 * time.Hour
	DefaultScrubAfter = 10 * time.Minute

	// scrubPiece is read at once, scrubPause is for how long the scrub gives way when the store has something else to do, and
	// scrubPatience for how long at most, lest a store that is never idle is never read.
	scrubPiece    = 1 << 20
	scrubPause    = 100 * time.Millisecond
	scrubPatience = 5 * time.Second
)

// ScrubStats counts what scrubs have done since the start.
type ScrubStats struct {
	// Bytes were read and are what was written. Damaged segments were found, Failed ones could not be read.
	Bytes, Damaged, Failed uint64
}

// scrubber is a store's scrub.
type scrubber struct {
	stats  ScrubStats
	digest xxhash.Digest
	slab   *ring.Slab
	// at is when the scrub goes on or begins anew, since when it has given way to other work, 0: it doesn't.
	at, since time.Duration
	// begun is when this pass began, read what it has read; todo are the segments that it has before it.
	begun time.Duration
	read  uint64
	todo  []*segment
	// seg is being read, from off on, and compared with index.
	seg   *segment
	index *segIndex
	off   int64
	fd    int
	busy  bool // an operation is at the disk
	// scheduled: at was set.
	scheduled bool
}

// Scrubbed returns what scrubs have done.
func (s *Store) Scrubbed() ScrubStats { return s.scrub.stats }

// stepScrub goes on where that is due.
func (s *Store) stepScrub() {
	c := &s.scrub
	if !c.scheduled {
		c.scheduled, c.fd, c.at = true, -1, s.now+s.o.ScrubAfter
		if s.o.ScrubBytes < 0 {
			c.at = Never
		}
	}
	if c.busy || s.closing.started || s.recovering || s.now < c.at {
		return
	}
	if s.occupied() {
		if c.since == 0 {
			c.since = s.now
		}
		if s.now-c.since < scrubPatience {
			c.at = s.now + scrubPause
			return
		}
	}
	c.since = 0
	switch {
	case c.seg != nil && !s.readable(c.seg):
		s.scrubbed()
	case c.seg != nil:
		s.scrubPiece()
	case c.slab == nil:
		s.beginScrub()
	default:
		s.nextScrub()
	}
}

// occupied tells whether the store has something to do that clients wait for, or the journal.
func (s *Store) occupied() bool {
	return s.reads.active > 0 || s.reads.head != nil || s.pass.active || s.sweep.phase != sweepIdle || len(s.drops) > 0 || len(s.restarts) > 0 ||
		s.space.full || s.files.full
}

// closed tells whether a segment is full and on the disk, and its partition served.
func (seg *segment) closed() bool {
	st := seg.st
	return !st.dropped && st.bad == nil && seg != st.active && seg.dirty == 0 && seg.writes == 0
}

// readable tells whether a segment that was closed still is one of its partition's.
func (s *Store) readable(seg *segment) bool {
	return seg.closed() && s.streams.get(seg.st.id) == seg.st && slices.Contains(seg.st.segs, seg)
}

// beginScrub begins a pass.
func (s *Store) beginScrub() {
	c := &s.scrub
	for _, st := range s.order {
		if st.id.Kind != Messages {
			continue
		}
		for _, seg := range st.segs {
			if seg.closed() {
				c.todo = append(c.todo, seg)
			}
		}
	}
	c.begun, c.read = s.now, 0
	if len(c.todo) == 0 {
		c.at = s.now + s.o.ScrubEvery
		return
	}
	if c.slab = s.o.Pool.Get(scrubPiece); c.slab == nil {
		c.todo = nil
		c.at = s.now + s.o.ScrubAfter // memory is for others first
		return
	}
	c.at = s.now
}

// nextScrub opens the next segment, or ends the pass.
func (s *Store) nextScrub() {
	c := &s.scrub
	for len(c.todo) > 0 && !s.readable(c.todo[0]) {
		c.todo = c.todo[1:]
	}
	if len(c.todo) == 0 {
		s.log.Info("all full segments were read and compared with their checksums", "bytes", c.read, "took", s.now-c.begun)
		s.endScrub()
		return
	}
	seg := c.todo[0]
	c.todo = c.todo[1:]
	c.busy = true
	s.loadIndex(seg, func(x *segIndex, err error) {
		if err != nil {
			c.busy = false
			s.scrubFailed(seg, err)
			return
		}
		s.do(ring.Op{Kind: ring.Open, Path: seg.st.path(seg), Flags: ring.Direct}, func(op *ring.Op) {
			c.busy = false
			switch {
			case op.Err == nil:
				// The cache may let go of the index, of which nothing changes any more.
				c.seg, c.index, c.off, c.fd, c.at = seg, x, 0, op.FD, s.now
			case notExist(op.Err):
				s.scrubFailed(seg, &CorruptionError{Path: seg.st.path(seg), Stream: seg.st.id, Sequence: seg.base, Cause: errNoFile})
			default:
				s.scrubFailed(seg, op.Err)
			}
		})
	})
}

// scrubPiece reads the next piece of the segment.
func (s *Store) scrubPiece() {
	c := &s.scrub
	seg, off := c.seg, c.off
	want := min(c.index.covered-off, scrubPiece)
	if want <= 0 {
		s.scrubbed()
		return
	}
	buf := c.slab.Bytes()[:(want+ring.BlockSize-1)&^(ring.BlockSize-1)]
	c.busy = true
	s.do(ring.Op{Kind: ring.Read, FD: c.fd, Off: off, Buf: buf}, func(op *ring.Op) {
		c.busy = false
		err := op.Err
		if err == nil && !s.readable(seg) {
			s.scrubbed()
			return
		}
		if err == nil {
			err = s.compare(seg, off, want, buf[:min(int64(op.N), want)])
		}
		if err != nil {
			s.scrubFailed(seg, err)
			return
		}
		c.off += want
		c.read += uint64(want)
		c.stats.Bytes += uint64(want)
		c.at = s.now + time.Duration(want)*time.Second/time.Duration(s.o.ScrubBytes)
	})
}

// compare compares a piece of a segment, which begins with a block, with the sums.
func (s *Store) compare(seg *segment, off, want int64, b []byte) error {
	corrupt := func(at int64, err error) error {
		c := &CorruptionError{Path: seg.st.path(seg), Offset: at, Stream: seg.st.id, Cause: err}
		for _, e := range s.scrub.index.entries { // where readers of the place would begin
			if int64(e.Offset) <= at {
				c.Sequence = e.Sequence
			}
		}
		return c
	}
	if int64(len(b)) < want {
		return corrupt(off+int64(len(b)), fmt.Errorf("the segment ends here, %d bytes before the end of what was written", want-int64(len(b))))
	}
	for len(b) > 0 {
		n := min(len(b), indexBlock)
		if sum := s.scrub.index.sum(off, off+int64(n)); sum != 0 {
			if got := blockSum(&s.scrub.digest, seg.st.id, seg.base, off, b[:n]); got != sum {
				return corrupt(off, fmt.Errorf("64 KiB of the segment are not what was written here: %w", &checksumError{sum, got}))
			}
		}
		b = b[n:]
		off += int64(n)
	}
	return nil
}

// scrubFailed notes a segment that is damaged or can't be read, and goes on with the next one.
func (s *Store) scrubFailed(seg *segment, err error) {
	c := &s.scrub
	switch {
	case seg.st.dropped:
	case errors.Is(err, ErrCorrupt):
		c.stats.Damaged++
		s.log.Error("reading all segments has found a damaged one", "stream", seg.st.id, "err", err)
		s.quarantine(seg.st, err)
	default:
		c.stats.Failed++
		s.log.Warn("a segment can't be read to compare it with its checksums", "path", seg.st.path(seg), "err", err)
	}
	s.scrubbed()
}

// scrubbed is done with the segment; the next one comes after a piece's time.
func (s *Store) scrubbed() {
	c := &s.scrub
	if c.fd >= 0 {
		fd := c.fd
		c.fd = -1
		s.do(ring.Op{Kind: ring.Close, FD: fd}, func(*ring.Op) {})
	}
	c.seg, c.index = nil, nil
	c.at = s.now + time.Duration(scrubPiece)*time.Second/time.Duration(s.o.ScrubBytes)
}

// endScrub gives back what the scrub holds. Nothing of it is at the disk.
func (s *Store) endScrub() {
	c := &s.scrub
	if c.seg != nil {
		s.scrubbed()
	}
	c.free()
	c.todo = nil
	c.at = max(c.begun+s.o.ScrubEvery, s.now+scrubPause)
}

// free gives the memory back. Nothing is at the disk.
func (c *scrubber) free() {
	if c.slab != nil {
		c.slab.Release()
		c.slab = nil
	}
}
