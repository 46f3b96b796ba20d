package wal

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/mortarmq/mortarmq/ring"
)

// partition is the recovery of one partition's files.
type partition struct {
	o    *opener
	st   *stream
	then func(error)

	bases  []Sequence
	index  map[Sequence]struct{}
	hasMQC bool
	listed bool // the checkpoint table has a row
	anew   bool // it has one that says where the partition begins
	cp     checkpoint
	// floor is where a scan may begin, from an MMQC or the older half of the table: everything before it was durable.
	floor checkpoint
}

func (o *opener) newPartition(id StreamID) *partition {
	cp, listed := o.rows[id]
	p := &partition{o: o, st: newStream(o.s, id), cp: cp, listed: listed, floor: o.floors[id], index: map[Sequence]struct{}{}}
	if first, ok := o.begins[id]; ok {
		p.anew, p.st.anew = true, first > firstSequence
		p.st.first, p.st.next, p.st.wnext = first, first, first
	}
	return p
}

// read finds out where the partition ends. then gets an error only where nothing may be opened at all.
func (p *partition) read(then func(error)) {
	p.then = func(err error) {
		if err == nil && p.st.report != "" && p.st.bad == nil {
			p.readReport(then)
			return
		}
		then(err)
	}
	p.o.s.do(ring.Op{Kind: ring.ReadDir, Path: p.st.dir}, func(op *ring.Op) {
		switch {
		case op.Err == nil && len(op.Names) == 0:
			p.empty()
		case op.Err == nil:
			p.list(op.Names)
			p.readMQC()
		case !notExist(op.Err):
			p.then(op.Err)
		case !p.listed && p.floor.Next == 0:
			p.then(nil) // it begins with what the journal has
		default:
			if !p.listed {
				p.cp = p.floor
			}
			p.quarantine(&CorruptionError{Path: p.st.dir, Sequence: p.cp.Next - 1,
				Cause: errors.New("the directory is missing, though the checkpoint table knows the partition")})
		}
	})
}

// empty goes on with a directory that has nothing in it. It may have had a report (see Store.removeOld), whose removal a process
// that was killed did not live to make durable: were it back after a power cut, what comes into the partition meanwhile would not
// be served.
func (p *partition) empty() {
	p.o.s.do(ring.Op{Kind: ring.SyncDir, Path: p.st.dir}, func(op *ring.Op) {
		if op.Err != nil {
			p.then(op.Err)
			return
		}
		p.list(nil)
		p.readMQC()
	})
}

// readReport quarantines a partition whose end is known for what an earlier start, or a read, has reported.
func (p *partition) readReport(then func(error)) {
	path := p.st.report
	p.o.s.readSmall(path, maxReportBytes, func(b []byte, err error) {
		r := decodeReport(path, b)
		if err != nil {
			r.Cause = err.Error()
		}
		p.o.s.quarantine(p.st, &CorruptionError{Path: path, Stream: p.st.id, Sequence: max(r.Sequence, firstSequence),
			Cause: fmt.Errorf("the partition isn't served as long as this report is here: %s", r.Cause)})
		then(nil)
	})
}

// list sorts out the names in the partition's directory.
func (p *partition) list(names []string) {
	p.st.dirMade = p.listed
	if !p.listed {
		// A process that was killed made the directories; whether they would survive a power cut isn't known.
		delete(p.o.s.topics, p.st.id.Topic)
	}
	for _, name := range names {
		if base, ok := parseLogName(Messages, name); ok {
			p.bases = append(p.bases, base)
		} else if digits, ok := strings.CutSuffix(name, indexSuffix); ok {
			if base, ok := parseLogName(Messages, digits+segmentSuffix); ok {
				p.index[base] = struct{}{}
			}
		} else if name == checkpointFile {
			p.hasMQC = true
		} else if isReport(name) {
			p.st.report = max(p.st.report, filepath.Join(p.st.dir, name))
		}
	}
	slices.Sort(p.bases)
	// What is of before the partition began anew wasn't removed in time.
	old, _ := slices.BinarySearch(p.bases, p.st.first)
	p.st.stale, p.bases = slices.Clone(p.bases[:old]), p.bases[old:]
}

// readMQC takes the newer of the two checkpoints.
func (p *partition) readMQC() {
	if !p.hasMQC {
		p.locate()
		return
	}
	path := filepath.Join(p.st.dir, checkpointFile)
	p.o.s.readSmall(path, checkpointLen, func(b []byte, err error) {
		var c checkpoint
		if err == nil {
			c, err = decodeCheckpoint(b)
		}
		var version *VersionError
		switch {
		case errors.As(err, &version) || errors.Is(err, ErrNoMemory):
			p.then(wrapFile(path, p.st, err))
			return
		case err != nil:
			p.o.s.log.Warn("a partition's checkpoint can't be used", "err", wrapFile(path, p.st, err))
		default:
			p.take(c)
		}
		p.locate()
	})
}

// take uses an MMQC: where it is newer than the table it counts, and without a table it says where to begin the scan.
func (p *partition) take(c checkpoint) {
	i, _ := slices.BinarySearch(p.bases, c.Next)
	if i > 0 {
		c.Base = p.bases[i-1]
	}
	switch {
	case c.Next <= p.st.first, p.anew && !p.listed && p.st.first == firstSequence:
		p.st.staleMQC = true // of before the partition began anew
	case p.o.scan && c.Next > p.floor.Next:
		p.floor = c
	case p.o.scan:
	case c.Next > p.cp.Next:
		p.cp, p.listed = c, true
	default:
		p.st.mqc = c.Next
	}
}

// locate opens the segment that the checkpoint names.
func (p *partition) locate() {
	switch {
	case !p.listed && len(p.bases) == 0 && p.floor.Next == 0:
		p.then(nil)
		return
	case !p.listed && p.o.scan:
		p.scanAll()
		return
	case !p.listed:
		p.st.stale = append(p.st.stale, p.bases...) // the journal has all of it, or it is of before
		p.then(nil)
		return
	}
	i, ok := slices.BinarySearch(p.bases, p.cp.Base)
	if !ok {
		p.quarantine(&CorruptionError{
			Path: filepath.Join(p.st.dir, logName(Messages, p.cp.Base, true)), Sequence: p.cp.Base, Cause: errNoFile,
		})
		return
	}
	p.st.stale = append(p.st.stale, p.bases[i+1:]...)
	for _, base := range p.bases[:i+1] {
		p.st.segs = append(p.st.segs, newSegment(p.st, base))
	}
	seg := p.st.segs[i]
	p.openSegment(seg, func(size int64, err error) {
		if err == nil && size < int64(p.cp.Offset) {
			err = &CorruptionError{Path: p.st.path(seg), Offset: size, Sequence: p.cp.Next - 1, Cause: fmt.Errorf(
				"the checkpoint at offset %d is beyond the end of the segment", p.cp.Offset)}
		}
		if err != nil {
			p.refuse(err)
			return
		}
		p.resume(seg, size)
	})
}

// openSegment opens a segment's file, which stays open, and checks its header.
func (p *partition) openSegment(seg *segment, then func(size int64, err error)) {
	s := p.o.s
	s.acquire(seg, func(err error) {
		if err != nil {
			then(0, err)
			return
		}
		s.do(ring.Op{Kind: ring.Stat, FD: seg.fd}, func(op *ring.Op) {
			size, err := op.Size, op.Err
			slab := s.o.Pool.Get(segmentHeaderLen)
			if slab == nil {
				err = ErrNoMemory
			}
			if err != nil {
				s.release(seg)
				then(0, err)
				return
			}
			s.do(ring.Op{Kind: ring.Read, FD: seg.fd, Buf: slab.Bytes()[:segmentHeaderLen]}, func(op *ring.Op) {
				err := op.Err
				if err == nil {
					err = checkHeader(seg, op.Buf[:op.N])
				}
				slab.Release()
				s.release(seg)
				then(size, err)
			})
		})
	})
}

// checkHeader checks that a file begins as its name says.
func checkHeader(seg *segment, b []byte) error {
	h, err := decodeSegmentHeader(b, seg.st.id.Kind)
	if err == nil && (h.Stream != seg.st.id || h.Base != seg.base) {
		err = &CorruptionError{Sequence: seg.base, Cause: errMisplaced}
	}
	if err != nil {
		return wrapFile(seg.st.path(seg), seg.st, err)
	}
	return nil
}

// resume lets the partition go on behind its checkpoint.
func (p *partition) resume(seg *segment, size int64) {
	st := p.st
	off := int64(p.cp.Offset)
	st.active, st.off, st.wnext, st.next, st.lastMs = seg, off, p.cp.Next, p.cp.Next, p.cp.LastMs
	st.cut, st.cutAt = size != off, off
	_, st.indexed = p.index[seg.base]
	st.cut = st.cut || st.indexed
	st.index.start(st.id, seg.base, off)
	st.sealed, st.saved = p.cp, p.cp
	st.readSeg, st.readOff, st.readNext, st.readFrom = seg, off, p.cp.Next, off
	p.then(nil)
}

// refuse ends the whole recovery for an error that isn't corruption, otherwise it quarantines the partition.
func (p *partition) refuse(err error) {
	if !errors.Is(err, ErrCorrupt) {
		p.then(err)
		return
	}
	p.quarantine(err)
}

// quarantine leaves the partition's files as they are. Records of the journal go to a new file.
func (p *partition) quarantine(err error) {
	var c *CorruptionError
	if errors.As(err, &c) && (c.Stream.Kind == 0 || c.Sequence == 0) {
		d := *c
		d.Stream = p.st.id
		if d.Sequence == 0 {
			d.Sequence = p.cp.Base
		}
		err = &d
	}
	st := p.st
	st.active, st.off, st.cut = nil, 0, false
	st.next, st.lastMs = max(p.cp.Next, st.first), p.cp.LastMs
	st.wnext = st.next
	if p.cp.Base > 0 {
		st.sealed, st.saved = p.cp, p.cp
	}
	p.o.s.quarantine(st, err)
	p.then(nil)
}

// scanAll reads a partition without a row in the table from its start, or from the segment that an MMQC names. Where it
// ends before its last file, the files behind are stale: the journal has to go on there.
func (p *partition) scanAll() {
	first, _ := slices.BinarySearch(p.bases, p.floor.Base)
	if p.floor.Next > 0 && (first == len(p.bases) || p.bases[first] != p.floor.Base) {
		p.cp = p.floor
		p.quarantine(&CorruptionError{Path: p.st.dir, Sequence: p.floor.Next - 1, Cause: errNoFile})
		return
	}
	for _, base := range p.bases {
		p.st.segs = append(p.st.segs, newSegment(p.st, base))
	}
	p.o.s.log.Warn("a partition has no checkpoint, its segments are read", "stream", p.st.id, "segments", len(p.bases))
	p.scan(first)
}

// scan reads the i-th segment.
func (p *partition) scan(i int) {
	seg := p.st.segs[i]
	p.openSegment(seg, func(size int64, err error) {
		if err != nil {
			if !errors.Is(err, ErrCorrupt) {
				p.then(err)
				return
			}
			p.end(i, nil, err)
			return
		}
		s := p.o.s
		s.acquire(seg, func(err error) {
			if err != nil {
				p.then(err)
				return
			}
			c := &scanner{s: s, seg: seg, end: size}
			c.run(func(err error) {
				s.release(seg)
				switch {
				case err != nil && !errors.Is(err, ErrCorrupt):
					p.then(err)
				case err == nil && i+1 < len(p.st.segs) && p.st.segs[i+1].base == c.next:
					seg.end = size
					p.scan(i + 1)
				default:
					p.end(i, c, err)
				}
			})
		})
	})
}

// end ends the scan of a partition in its i-th segment, which c has read as far as it goes; c is nil where not even the
// header can be read.
func (p *partition) end(i int, c *scanner, err error) {
	st := p.st
	if p.floor.Next > 0 && (c == nil || c.next < p.floor.Next) {
		if err == nil {
			err = &CorruptionError{Path: st.path(st.segs[i]), Offset: c.off, Sequence: c.next, Cause: fmt.Errorf(
				"the checkpoint names sequence %d, the segment ends before", p.floor.Next)}
		}
		p.cp = p.floor
		p.quarantine(err)
		return
	}
	for _, seg := range st.segs[i+1:] {
		st.stale = append(st.stale, seg.base)
	}
	if err == nil && i+1 < len(st.segs) {
		err = &CorruptionError{Path: st.path(st.segs[i]), Offset: c.off, Stream: st.id, Sequence: c.next,
			Cause: fmt.Errorf("the segment ends here, the next one begins with sequence %d", st.segs[i+1].base)}
	}
	if c == nil || c.next == st.segs[i].base {
		// A file without a whole record is no file: it is made again when there is one.
		st.stale = append(st.stale, st.segs[i].base)
		st.segs = st.segs[:i]
		st.next = p.bases[i]
		if i == 0 {
			st.next = 1
		}
		st.wnext = st.next
		if i > 0 {
			st.readSeg, st.readOff, st.readNext = st.segs[i-1], st.segs[i-1].end, st.next
		}
		p.o.s.distrust(st)
		p.o.scanned = append(p.o.scanned, scannedStream{st, st.next, err})
		p.then(nil)
		return
	}
	seg := st.segs[i]
	st.segs = st.segs[:i+1]
	st.active, st.wnext, st.next, st.lastMs = seg, c.next, c.next, c.lastMs
	st.off = c.off + int64(padLen(c.off))
	st.cut, st.cutAt = true, c.off
	_, st.indexed = p.index[seg.base]
	st.index.start(st.id, seg.base, st.off)
	st.readSeg, st.readOff, st.readNext, st.readFrom = seg, c.off, c.next, st.off
	st.sealed = checkpoint{Next: c.next, Base: seg.base, Offset: uint32(st.off), LastMs: c.lastMs}
	p.o.s.distrust(st)
	p.o.scanned = append(p.o.scanned, scannedStream{st, c.next, err})
	p.then(nil)
}
