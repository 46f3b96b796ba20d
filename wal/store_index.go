package wal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/mortarmq/mortarmq/ring"
)

const (
	// maxIndexBytes bounds the indexes of full segments kept in memory; one of a 64 MiB segment takes 32 KiB.
	maxIndexBytes = 64 << 20
	// scanBytes is how much of a segment is read at once where its index must be made again.
	scanBytes = 1 << 20
	// maxIndexFile bounds an index file: one entry and one sum per block of the largest segment.
	maxIndexFile = indexHeaderLen + (indexEntryLen+8)*(1<<32/indexBlock+1)
)

// indexCache bounds the memory of the indexes of full segments; the one loaded first goes first.
type indexCache struct {
	segs  []*segment
	bytes int
}

func (x *segIndex) memory() int { return cap(x.entries)*24 + cap(x.sums)*8 }

// keepIndex keeps the index of a full segment in memory.
func (s *Store) keepIndex(seg *segment, x *segIndex) {
	c := &s.indexes
	if seg.index == nil {
		c.segs = append(c.segs, seg)
	} else {
		c.bytes -= seg.index.memory()
	}
	seg.index = x
	c.bytes += x.memory()
	for c.bytes > maxIndexBytes && len(c.segs) > 1 {
		old := c.segs[0]
		c.segs[0] = nil
		c.segs = c.segs[1:]
		c.bytes -= old.index.memory()
		old.index = nil
	}
}

// loadIndex calls then, possibly at once, with the index of a segment: from memory, from its file, or made again from the
// segment. The index is the store's; then must not keep it.
func (s *Store) loadIndex(seg *segment, then func(*segIndex, error)) {
	st := seg.st
	switch {
	case seg == st.active && st.index.from == segmentHeaderLen:
		then(&st.index.segIndex, nil)
		return
	case seg != st.active && seg.index != nil:
		then(seg.index, nil)
		return
	}
	seg.loading = append(seg.loading, then)
	if len(seg.loading) > 1 {
		return
	}
	l := &indexLoad{s: s, seg: seg, active: seg == st.active}
	if seg.writes > 0 && seg != st.active {
		// It was filled just now, and writes to it are still on their way.
		st.settling = append(st.settling, l)
		return
	}
	l.open()
}

// openLoads goes on with the loads that waited for the writes to a segment.
func (st *stream) openLoads(seg *segment) {
	i := slices.IndexFunc(st.settling, func(l *indexLoad) bool { return l.seg == seg })
	if i < 0 {
		return
	}
	l := st.settling[i]
	st.settling = slices.Delete(st.settling, i, i+1)
	l.open()
}

// indexLoad brings the index of a segment into memory.
type indexLoad struct {
	s   *Store
	seg *segment
	// active says that the segment was being written when the load began: the index is needed up to where the present
	// start went on.
	active bool
	end    int64
}

// failLoads ends the loads that wait for writes of a store that has failed.
func (s *Store) failLoads() {
	fail := func(streams []*stream) {
		for _, st := range streams {
			loads := st.settling
			st.settling = nil
			for _, l := range loads {
				l.finish(nil, s.err)
			}
		}
	}
	fail(s.order)
	for _, d := range s.drops {
		fail(d.streams)
	}
}

// finish lets those who wait go on.
func (l *indexLoad) finish(x *segIndex, err error) {
	seg := l.seg
	waiters := seg.loading
	seg.loading = nil
	for _, then := range waiters {
		then(x, err)
	}
}

// open finds out how long the segment is.
func (l *indexLoad) open() {
	l.s.acquire(l.seg, func(err error) {
		if err != nil {
			l.finish(nil, l.openError(err))
			return
		}
		if l.active {
			// Filled meanwhile or not: up to here it is as this start found it.
			l.end = l.seg.st.readFrom
			l.readFile()
			return
		}
		l.s.do(ring.Op{Kind: ring.Stat, FD: l.seg.fd}, func(op *ring.Op) {
			if op.Err != nil {
				l.release(nil, fmt.Errorf("%s: %w", l.path(), op.Err))
				return
			}
			if l.end = l.seg.end; l.end == 0 {
				l.end = op.Size
			}
			l.readFile()
		})
	})
}

func (l *indexLoad) path() string { return l.seg.st.path(l.seg) }

func (l *indexLoad) openError(err error) error {
	if !notExist(err) || l.seg.st.dropped {
		return err
	}
	return &CorruptionError{Path: l.path(), Stream: l.seg.st.id, Sequence: l.seg.base, Cause: errNoFile}
}

// release ends the load.
func (l *indexLoad) release(x *segIndex, err error) {
	l.s.release(l.seg)
	l.finish(x, err)
}

// readFile reads the index file. One that doesn't fit is made again, and so is one of a newer version: what it says can be
// found in the segment.
func (l *indexLoad) readFile() {
	s, st := l.s, l.seg.st
	path := st.indexPath(l.seg.base)
	s.readSmall(path, maxIndexFile, func(b []byte, err error) {
		var x *segIndex
		if err == nil {
			x, err = decodeIndex(b, st.id, l.seg.base)
		}
		switch {
		case errors.Is(err, ErrNoMemory):
			l.release(nil, err)
		case err != nil || x.covered != l.end:
			if err != nil && !notExist(err) {
				s.log.Warn("an index can't be used, it is made again from its segment", "err", wrapFile(path, st, err))
			}
			l.scan()
		default:
			l.done(x, false)
		}
	})
}

// done takes over the index of the segment up to l.end.
func (l *indexLoad) done(x *segIndex, made bool) {
	s, seg := l.s, l.seg
	if l.active {
		if seg != seg.st.active {
			// It was filled meanwhile, and is a full one now.
			s.release(seg)
			waiters := seg.loading
			seg.loading = nil
			for _, then := range waiters {
				s.loadIndex(seg, then)
			}
			return
		}
		seg.st.index.prepend(x)
		l.release(&seg.st.index.segIndex, nil)
		return
	}
	seg.end = x.covered
	s.keepIndex(seg, x)
	if made && s.err == nil && !slices.Contains(x.sums, 0) {
		s.publishIndex(seg, x)
	}
	l.release(x, nil)
}

// prepend adds what is known of the segment before the place where this start went on. The sum of the block in which
// that is stays unknown.
func (b *indexBuilder) prepend(x *segIndex) {
	entries := make([]indexEntry, 0, len(x.entries)+len(b.entries)+64)
	b.entries = append(append(entries, x.entries...), b.entries...)
	copy(b.sums[:min(int(b.from/indexBlock), len(b.sums))], x.sums)
	b.from = segmentHeaderLen
}

func (l *indexLoad) scan() {
	c := &scanner{s: l.s, seg: l.seg, end: l.end}
	c.run(func(err error) {
		if err != nil {
			l.release(nil, err)
			return
		}
		x := c.index.segIndex
		l.done(&x, true)
	})
}

// scanner reads a segment from its start, checks every record and makes the index.
type scanner struct {
	s   *Store
	seg *segment
	// end is how far to read.
	end   int64
	index indexBuilder
	// off and next are the place and sequence of the next record.
	off  int64
	next Sequence
	size int64
	slab *ring.Slab
	then func(error)
	// record, if set, gets every record; its error ends the scan.
	record func(*Record) error
	lastMs uint64
}

// run scans; the segment's file is open and stays so. Any error is about the record at c.off; what was read before it is
// good.
func (c *scanner) run(then func(error)) {
	c.then = then
	c.index.start(c.seg.st.id, c.seg.base, 0)
	c.next = c.seg.base
	c.window()
}

func (c *scanner) finish(err error) {
	if c.slab != nil {
		c.slab.Release()
		c.slab = nil
	}
	if err == nil {
		c.index.finish()
	}
	c.then(err)
}

func (c *scanner) corrupt(off int64, cause error) {
	var d *CorruptionError
	if errors.As(cause, &d) {
		cause = d.Cause
	}
	c.finish(&CorruptionError{Path: c.seg.st.path(c.seg), Offset: off, Stream: c.seg.st.id, Sequence: c.next, Cause: cause})
}

// window reads the next stretch.
func (c *scanner) window() {
	if c.off >= c.end && c.off > 0 {
		c.finish(nil)
		return
	}
	from := c.off &^ (ring.BlockSize - 1)
	to := min(from+max(scanBytes, c.size+ring.BlockSize), c.end)
	if to < segmentHeaderLen {
		c.corrupt(to, errHeaderShort)
		return
	}
	if c.slab != nil && int64(len(c.slab.Bytes())) < to-from {
		c.slab.Release()
		c.slab = nil
	}
	if c.slab == nil {
		if c.slab = c.s.o.Pool.Get(int(to - from)); c.slab == nil {
			c.finish(ErrNoMemory)
			return
		}
	}
	c.s.do(ring.Op{Kind: ring.Read, FD: c.seg.fd, Off: from, Buf: c.slab.Bytes()[:to-from]}, func(op *ring.Op) {
		switch {
		case op.Err != nil:
			c.finish(fmt.Errorf("read segment %s: %w", c.seg.st.path(c.seg), op.Err))
		case op.N < len(op.Buf):
			c.corrupt(from+int64(op.N), errors.New("the file ends before what was written"))
		default:
			c.parse(op.Buf, from)
		}
	})
}

// parse goes through the records in buf, which stands at from.
func (c *scanner) parse(buf []byte, from int64) {
	to := from + int64(len(buf))
	if c.off == 0 {
		h, err := decodeSegmentHeader(buf, c.seg.st.id.Kind)
		if err == nil && (h.Stream != c.seg.st.id || h.Base != c.seg.base) {
			err = &CorruptionError{Cause: errMisplaced}
		}
		if err != nil {
			c.finish(wrapFile(c.seg.st.path(c.seg), c.seg.st, err))
			return
		}
		c.off = segmentHeaderLen
	}
	var r Record
	for c.off < to {
		b := buf[c.off-from:]
		if len(b) >= 4 && binary.BigEndian.Uint32(b) == 0 {
			c.off = nextBlock(c.off)
			continue
		}
		n, err := DecodeRecord(b, &r)
		if errors.Is(err, ErrShort) && to < c.end {
			if len(b) >= 4 {
				c.size = int64(binary.BigEndian.Uint32(b)) + recordLenBias
			}
			break
		}
		if err == nil && r.Sequence != c.next {
			err = fmt.Errorf("sequence %d is in the place of %d", r.Sequence, c.next)
		}
		if err != nil {
			c.hash(buf, from)
			c.corrupt(c.off, err)
			return
		}
		if c.record != nil {
			if err := c.record(&r); err != nil {
				c.finish(err)
				return
			}
		}
		c.index.mark(&r, c.off, n)
		c.lastMs = r.TimestampMs
		c.off += int64(n)
		c.next++
	}
	c.hash(buf, from)
	c.window()
}

// hash adds what is new in buf to the sums, up to the next record.
func (c *scanner) hash(buf []byte, from int64) {
	to := min(c.off, from+int64(len(buf)))
	if c.index.off < to {
		c.index.write(buf[c.index.off-from : to-from])
	}
}

// readSmall reads a whole file of at most limit bytes. What then gets is valid until it returns.
func (s *Store) readSmall(path string, limit int64, then func([]byte, error)) {
	s.do(ring.Op{Kind: ring.Open, Path: path, Flags: ring.ReadOnly}, func(op *ring.Op) {
		if op.Err != nil {
			then(nil, op.Err)
			return
		}
		fd := op.FD
		end := func(b []byte, err error) {
			then(b, err)
			s.do(ring.Op{Kind: ring.Close, FD: fd}, func(*ring.Op) {})
		}
		s.do(ring.Op{Kind: ring.Stat, FD: fd}, func(op *ring.Op) {
			size := op.Size
			if op.Err != nil || size > limit {
				end(nil, errors.Join(op.Err, tooLong(size, limit)))
				return
			}
			slab := s.o.Pool.Get(int(size))
			if slab == nil {
				end(nil, ErrNoMemory)
				return
			}
			s.do(ring.Op{Kind: ring.Read, FD: fd, Buf: slab.Bytes()[:size]}, func(op *ring.Op) {
				end(op.Buf[:op.N], op.Err)
				slab.Release()
			})
		})
	})
}

func tooLong(size, limit int64) error {
	if size <= limit {
		return nil
	}
	return fmt.Errorf("%d bytes are more than the %d that such a file can have", size, limit)
}
