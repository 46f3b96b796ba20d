package wal

import (
	"fmt"
	"path/filepath"
	"slices"

	"github.com/mortarmq/mortarmq/ring"
)

const (
	// publishers bounds how many files are being published at once, each through a buffer of publishBytes.
	publishers   = 4
	publishBytes = 64 << 10
)

// publication is a file that replaces its predecessor as a whole: written under another name, flushed, renamed.
type publication struct {
	path string
	// build returns the contents, part by part; it is called when the publication begins.
	build func() [][]byte
	// hint says that the file is redundant: its name need not be durable and its failure is only logged.
	hint bool
	// st is the stream that the file belongs to, or nil.
	st *stream
	// done is called when the file is there; not after a failure.
	done func()
}

// publisher runs publications, a few at a time, in order; those of one path one after the other, since they share the
// other name.
type publisher struct {
	s      *Store
	queue  []*publication
	active []string // paths that are being published
	spare  []*ring.Slab
	all    []*ring.Slab
}

func (p *publisher) init(s *Store) error {
	p.s = s
	for range publishers {
		slab := s.o.Pool.Get(publishBytes)
		if slab == nil {
			return fmt.Errorf("store: the buffer pool has no room for %d buffers of %d bytes: %w",
				publishers, publishBytes, ErrNoMemory)
		}
		p.all = append(p.all, slab)
		p.spare = append(p.spare, slab)
	}
	return nil
}

func (p *publisher) free() {
	for _, slab := range p.all {
		slab.Release()
	}
	p.all, p.spare = nil, nil
}

// widen lets more files be published at once, as far as there is memory.
func (p *publisher) widen(n int) {
	for len(p.all) < n {
		slab := p.s.o.Pool.Get(publishBytes)
		if slab == nil {
			return
		}
		p.all = append(p.all, slab)
		p.spare = append(p.spare, slab)
	}
}

// cancel drops what has not begun.
func (p *publisher) cancel() {
	for _, pub := range p.queue {
		if pub.st != nil {
			pub.st.jobs--
		}
	}
	p.queue = nil
}

// busy tells whether a publication is under way or waits.
func (p *publisher) busy() bool { return len(p.queue) > 0 || len(p.spare) < len(p.all) }

func (p *publisher) add(pub *publication) {
	if pub.st != nil {
		pub.st.jobs++
	}
	p.queue = append(p.queue, pub)
	p.step()
}

func (p *publisher) step() {
	for len(p.spare) > 0 && p.s.err == nil {
		i := slices.IndexFunc(p.queue, func(pub *publication) bool { return !slices.Contains(p.active, pub.path) })
		if i < 0 {
			return
		}
		pub := p.queue[i]
		if i == 0 {
			p.queue = p.queue[1:] // there may be very many
		} else {
			p.queue = slices.Delete(p.queue, i, i+1)
		}
		p.active = append(p.active, pub.path)
		slab := p.spare[len(p.spare)-1]
		p.spare = p.spare[:len(p.spare)-1]
		p.start(pub, slab)
	}
}

// end gives the slot back.
func (p *publisher) end(pub *publication, slab *ring.Slab, ok bool) {
	p.spare = append(p.spare, slab)
	p.active = slices.DeleteFunc(p.active, func(path string) bool { return path == pub.path })
	if pub.st != nil {
		pub.st.jobs--
	}
	if ok && pub.done != nil {
		pub.done()
	}
	p.step()
}

func (p *publisher) start(pub *publication, slab *ring.Slab) {
	s := p.s
	if s.err != nil || pub.st != nil && pub.st.dropped {
		p.end(pub, slab, false)
		return
	}
	tmp := pub.path + tmpSuffix
	fd := -1
	fail := func(op *ring.Op) bool {
		if op.Err == nil {
			return false
		}
		err := op.Err
		if fd >= 0 {
			s.do(ring.Op{Kind: ring.Close, FD: fd}, func(*ring.Op) {})
		}
		p.failed(pub, slab, err)
		return true
	}
	s.do(ring.Op{Kind: ring.Open, Path: tmp, Flags: ring.Create}, func(op *ring.Op) {
		if fail(op) {
			return
		}
		fd = op.FD
		s.sequence([]ring.Op{{Kind: ring.Truncate, FD: fd}}, fail, func() {
			p.write(fd, slab, pub.build(), 0, fail, func() {
				p.rename(pub, slab, fd, func(op *ring.Op) bool {
					if op.Kind == ring.Close {
						fd = -1
					}
					return fail(op)
				})
			})
		})
	})
}

// write writes the parts through the slab.
func (p *publisher) write(fd int, slab *ring.Slab, parts [][]byte, off int64, fail func(*ring.Op) bool, done func()) {
	buf := slab.Bytes()[:publishBytes]
	n := 0
	for len(parts) > 0 && n < len(buf) {
		c := copy(buf[n:], parts[0])
		n += c
		if parts[0] = parts[0][c:]; len(parts[0]) == 0 {
			parts = parts[1:]
		}
	}
	if n == 0 {
		done()
		return
	}
	p.s.do(ring.Op{Kind: ring.Write, FD: fd, Off: off, Buf: buf[:n]}, func(op *ring.Op) {
		if !fail(op) {
			p.write(fd, slab, parts, off+int64(n), fail, done)
		}
	})
}

// rename flushes the file and gives it its name.
func (p *publisher) rename(pub *publication, slab *ring.Slab, fd int, fail func(*ring.Op) bool) {
	// Redundant files are flushed, too: the name could otherwise come to stand for what the file of the other name held
	// before, which may be well-formed.
	steps := []ring.Op{
		{Kind: ring.Sync, FD: fd}, {Kind: ring.Close, FD: fd},
		{Kind: ring.Rename, Path: pub.path + tmpSuffix, Path2: pub.path},
	}
	if !pub.hint {
		steps = append(steps, ring.Op{Kind: ring.SyncDir, Path: filepath.Dir(pub.path)})
	}
	p.s.sequence(steps, fail, func() { p.end(pub, slab, true) })
}

func (p *publisher) failed(pub *publication, slab *ring.Slab, err error) {
	s := p.s
	switch {
	case pub.st != nil && pub.st.dropped && notExist(err):
	case pub.hint:
		s.log.Warn("a file that only speeds things up can't be written", "path", pub.path, "err", err)
	case noSpace(err):
		s.starve("publish "+pub.path, err, func() { p.start(pub, slab) })
		return
	case noFiles(err) && s.starveFiles("publish "+pub.path, err, func() { p.start(pub, slab) }):
		return
	default:
		s.fail("publish", pub.path, err)
	}
	p.end(pub, slab, false)
}

// publishCheckpoint refreshes the MMQC of a partition.
func (s *Store) publishCheckpoint(st *stream) {
	if st.id.Kind != Messages || st.mqc == st.saved.Next || st.bad != nil {
		return
	}
	st.mqc = st.saved.Next
	c := st.saved
	s.publish.add(&publication{
		path: filepath.Join(st.dir, checkpointFile), st: st,
		build: func() [][]byte {
			b := make([]byte, checkpointLen)
			putCheckpoint(b, c)
			return [][]byte{b}
		},
	})
}

// publishIndex writes the index file of a segment.
func (s *Store) publishIndex(seg *segment, x *segIndex) {
	s.publish.add(&publication{
		path: seg.st.indexPath(seg.base), hint: true, st: seg.st,
		build: func() [][]byte {
			b := make([]byte, indexSize(x))
			putIndex(b, seg.st.id, seg.base, x)
			return [][]byte{b}
		},
	})
}

// indexPath returns the path of the index file of one of the stream's segments.
func (st *stream) indexPath(base Sequence) string {
	return filepath.Join(st.dir, sequenceName(base)+indexSuffix)
}
