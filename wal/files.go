package wal

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/mortarmq/mortarmq/ring"
)

// segment is one log file of a stream.
type segment struct {
	st   *stream
	base Sequence
	// end is the length of a full segment in bytes, where known; 0 otherwise.
	end int64

	fd      int // -1 while closed
	opening bool
	// direct is a second descriptor, for reads and writes past the page cache, or -1; noDirect says that there can't be one.
	direct        int
	noDirect      bool
	openingDirect bool // for a read
	// passed has a bit for each readGrain that was read past the page cache since the file was opened.
	passed  []uint64
	users   int
	writes  int // at the disk, or waiting for space
	waiters []func(error)
	// prev and next link the open files that nobody uses, in Store.idle.
	prev, next *segment
	idle       bool

	// dirty counts the bytes written and not known to be flushed, sweeping those of them that were complete when the
	// present sweep began to flush. queued says that the segment is in Store.dirtySegs.
	dirty, sweeping int64
	queued          bool
	// buffered says that the page cache has what was written since the last flush; what lies before uncached it has lost.
	buffered bool
	uncached int64

	index   *segIndex // of a full segment, if it is in memory
	loading []func(*segIndex, error)
}

func newSegment(st *stream, base Sequence) *segment {
	return &segment{st: st, base: base, fd: -1, direct: -1}
}

// fileList is a list of segments, least recently used first.
type fileList struct{ head, tail *segment }

func (l *fileList) push(seg *segment) {
	seg.prev, seg.next = l.tail, nil
	if l.tail != nil {
		l.tail.next = seg
	} else {
		l.head = seg
	}
	l.tail = seg
	seg.idle = true
}

func (l *fileList) remove(seg *segment) {
	if seg.prev != nil {
		seg.prev.next = seg.next
	} else {
		l.head = seg.next
	}
	if seg.next != nil {
		seg.next.prev = seg.prev
	} else {
		l.tail = seg.prev
	}
	seg.prev, seg.next, seg.idle = nil, nil, false
}

// use adds a user to a file that is open.
func (s *Store) use(seg *segment) {
	if seg.idle {
		s.idle.remove(seg)
	}
	seg.users++
}

// acquire opens the segment's file if need be and calls then, possibly at once. Without an error the file stays open
// until release.
func (s *Store) acquire(seg *segment, then func(error)) {
	if seg.fd >= 0 {
		s.use(seg)
		then(nil)
		return
	}
	seg.waiters = append(seg.waiters, then)
	if seg.opening {
		return
	}
	seg.opening = true
	s.openFile(seg)
}

// openFile opens a segment's file for those who wait for it.
func (s *Store) openFile(seg *segment) {
	s.do(ring.Op{Kind: ring.Open, Path: seg.st.path(seg)}, func(op *ring.Op) {
		if noFiles(op.Err) && s.starveFiles("open segment", op.Err, func() { s.openFile(seg) }) {
			return
		}
		if op.Err == nil {
			s.opened(seg, op.FD)
			seg.users--
		}
		s.wake(seg, op.Err)
	})
}

// opened takes over the descriptor of a segment, with one user.
func (s *Store) opened(seg *segment, fd int) {
	seg.fd = fd
	seg.users++
	s.openFiles++
	s.limitOpen()
}

// wake lets those who wait for the segment's file go on.
func (s *Store) wake(seg *segment, err error) {
	seg.opening = false
	waiters := seg.waiters
	seg.waiters = nil
	if err == nil {
		seg.users += len(waiters)
	}
	for _, then := range waiters {
		then(err)
	}
}

// release ends one use of the segment's file. A file with writes that aren't flushed stays open: were it closed and
// opened again, an error of the kernel's own write-back could be lost.
func (s *Store) release(seg *segment) {
	seg.users--
	switch {
	case seg.users > 0 || seg.fd < 0:
	case seg.st.dropped:
		s.closeFile(seg)
	case seg.dirty == 0:
		s.idle.push(seg)
		s.limitOpen()
	}
}

// limitOpen closes files that nobody uses while there are too many.
func (s *Store) limitOpen() {
	for s.openFiles > s.o.MaxOpenFiles && s.idle.head != nil {
		seg := s.idle.head
		s.idle.remove(seg)
		s.closeFile(seg)
	}
}

// closeFile closes the file of a segment that nobody uses and that isn't in the idle list.
func (s *Store) closeFile(seg *segment) {
	fd := seg.fd
	seg.fd, seg.passed = -1, nil
	s.openFiles--
	s.dirty -= seg.dirty // of a topic that is deleted
	seg.dirty, seg.sweeping = 0, 0
	s.closeFD(seg, fd)
	if seg.direct >= 0 {
		s.closeFD(seg, seg.direct)
		seg.direct = -1
		s.openFiles--
	}
}

func (s *Store) closeFD(seg *segment, fd int) {
	s.closes++
	s.do(ring.Op{Kind: ring.Close, FD: fd}, func(op *ring.Op) {
		s.closes--
		if op.Err != nil {
			s.log.Warn("closing a file", "path", seg.st.path(seg), "err", op.Err)
		}
		s.freed()
	})
}

// openDirect opens the active file a second time, for writes past the page cache. Where the file system doesn't take them
// everything goes through the first descriptor.
func (s *Store) openDirect(st *stream) {
	st.busy = true
	seg := st.active
	s.chain(st, "open segment", ring.Op{Kind: ring.Open, Path: st.path(seg), Flags: ring.Direct}, func(op *ring.Op) {
		s.openedDirect(seg, op)
		s.chained(st)
	})
}

// openedDirect takes over the second descriptor of a segment that is in use.
func (s *Store) openedDirect(seg *segment, op *ring.Op) {
	switch {
	case !op.Direct:
		seg.noDirect = true
		s.closeFD(seg, op.FD)
	case seg.direct >= 0: // a read and a write-out wanted it at the same time
		s.closeFD(seg, op.FD)
	default:
		seg.direct = op.FD
		s.openFiles++
		s.limitOpen()
	}
}

// closeIdle closes every file that nobody uses.
func (s *Store) closeIdle() {
	for s.idle.head != nil {
		seg := s.idle.head
		s.idle.remove(seg)
		s.closeFile(seg)
	}
}

// syncDirLater makes the next sweep flush a directory.
func (s *Store) syncDirLater(dir string) { s.newDirs[dir] = struct{}{} }

// chain runs one operation for a stream and goes on with then unless it failed. Where space or a descriptor is missing it
// is tried again until there is some; any other failure stops the store.
func (s *Store) chain(st *stream, what string, op ring.Op, then func(*ring.Op)) {
	if s.err != nil {
		return // it was to be tried again, and something else has failed since
	}
	s.do(op, func(done *ring.Op) {
		switch {
		case done.Err == nil:
			then(done)
		case noSpace(done.Err):
			s.starve(what, done.Err, func() { s.chain(st, what, op, then) })
		case noFiles(done.Err) && s.starveFiles(what, done.Err, func() { s.chain(st, what, op, then) }):
		case st.dropped && errors.Is(done.Err, fs.ErrNotExist):
			s.chained(st)
		default:
			s.fail(what, op.Path, done.Err)
			s.chained(st)
		}
	})
}

// chained ends a chain of operations for a stream; its write-out goes on.
func (s *Store) chained(st *stream) {
	st.busy = false
	s.advance(st)
}

// openActive opens the stream's active file for writing.
func (s *Store) openActive(st *stream) {
	st.busy = true
	seg := st.active
	s.acquire(seg, func(err error) {
		if err != nil {
			s.openFailed(st, err)
			return
		}
		st.held = seg
		if !st.cut {
			s.chained(st)
			return
		}
		s.cutActive(st, func() { s.chained(st) })
	})
}

// letGo ends the stream's hold on its active file.
func (s *Store) letGo(st *stream) {
	if seg := st.held; seg != nil {
		st.held = nil
		s.release(seg)
	}
}

// cutActive takes away what the active file, found at start, holds behind the checkpoint: it is of before a crash, and
// whether it is what was meant can't be known. The index file goes too, since the segment goes on otherwise.
func (s *Store) cutActive(st *stream, then func()) {
	seg := st.active
	path := st.path(seg)
	s.markDirty(seg, 1)
	resize := func() {
		s.chain(st, "cut segment", ring.Op{Kind: ring.Truncate, FD: seg.fd, Path: path, Size: st.cutAt}, func(*ring.Op) {
			s.chain(st, "cut segment", ring.Op{Kind: ring.Truncate, FD: seg.fd, Path: path, Size: st.off}, func(*ring.Op) {
				st.cut = false
				then()
			})
		})
	}
	if !st.indexed {
		resize()
		return
	}
	st.indexed = false
	s.loadIndex(seg, func(_ *segIndex, err error) {
		if err != nil {
			s.log.Warn("the index of a partition's newest segment can't be used", "path", path, "err", err)
		}
		s.removeIndex(st, seg.base, resize)
	})
}

// removeIndex removes the index file of a segment that goes on otherwise. It is gone for good before the next checkpoint
// can name the segment.
func (s *Store) removeIndex(st *stream, base Sequence, then func()) {
	path := st.indexPath(base)
	s.do(ring.Op{Kind: ring.Remove, Path: path}, func(op *ring.Op) {
		if op.Err != nil && !notExist(op.Err) {
			s.fail("remove index", path, op.Err)
			s.chained(st)
			return
		}
		s.syncDirLater(st.dir)
		then()
	})
}

func (s *Store) openFailed(st *stream, err error) {
	if !st.dropped {
		s.fail("open segment", st.path(st.active), err)
	}
	s.chained(st)
}

// startFile begins a new file of the stream with the record base. What the file before still needs was written.
func (s *Store) startFile(st *stream, base Sequence) {
	st.busy = true
	if old := st.active; st.id.Kind == Ledger && old != nil {
		// The old file is open and stays so across the renaming. Its new name must be durable before the next file takes
		// the old one, or the two could be mistaken for each other.
		from, to := st.path(old), filepath.Join(st.dir, logName(st.id.Kind, old.base, false))
		s.chain(st, "rename ledger", ring.Op{Kind: ring.Rename, Path: from, Path2: to}, func(*ring.Op) {
			s.chain(st, "sync directory", ring.Op{Kind: ring.SyncDir, Path: st.dir}, func(*ring.Op) {
				s.endFile(st)
				s.createFile(st, base)
			})
		})
		return
	}
	s.endFile(st)
	s.makeStreamDir(st, func() { s.createFile(st, base) })
}

// endFile ends the active file: nothing more is written to it.
func (s *Store) endFile(st *stream) {
	old := st.active
	if old == nil {
		return
	}
	st.active = nil
	s.letGo(st)
	old.end = st.off
	if st.id.Kind != Messages {
		return
	}
	st.index.finish()
	if st.index.complete() && st.index.covered == old.end {
		x := st.index.segIndex
		st.index.segIndex = segIndex{}
		s.keepIndex(old, &x)
		s.publishIndex(old, &x)
	}
}

// makeStreamDir makes the directory of a stream.
func (s *Store) makeStreamDir(st *stream, then func()) {
	if st.dirMade {
		then()
		return
	}
	s.chain(st, "make directory", ring.Op{Kind: ring.Mkdir, Path: st.dir}, func(*ring.Op) {
		st.dirMade = true
		if st.id.Kind == Messages {
			s.syncDirLater(filepath.Dir(st.dir))
			if _, known := s.topics[st.id.Topic]; !known {
				s.topics[st.id.Topic] = struct{}{}
				s.syncDirLater(filepath.Join(s.o.Dir, topicsDir))
			}
		}
		then()
	})
}

// createFile makes the next file of a stream. A file of that name is left alone, unless it is one that a start found
// behind the checkpoint.
func (s *Store) createFile(st *stream, base Sequence) {
	seg := newSegment(st, base)
	path := filepath.Join(st.dir, logName(st.id.Kind, base, true))
	flags := ring.Create | ring.Exclusive
	if st.takeStale(base) || st.staleActive {
		st.staleActive = false
		flags = ring.Create
	}
	if flags&ring.Exclusive == 0 && st.id.Kind == Messages {
		// Its index, if there is one, is of what the file was.
		s.removeIndex(st, base, func() { s.openNew(st, seg, path, flags) })
		return
	}
	s.openNew(st, seg, path, flags)
}

func (s *Store) openNew(st *stream, seg *segment, path string, flags ring.OpenFlags) {
	s.chain(st, "create segment", ring.Op{Kind: ring.Open, Path: path, Flags: flags}, func(op *ring.Op) {
		s.opened(seg, op.FD)
		begin := func(*ring.Op) {
			s.syncDirLater(st.dir)
			st.segs = append(st.segs, seg)
			st.active, st.held, st.off = seg, seg, 0
			st.index.start(st.id, seg.base, 0)
			s.chained(st)
		}
		if flags&ring.Exclusive != 0 {
			begin(op)
			return
		}
		s.chain(st, "cut segment", ring.Op{Kind: ring.Truncate, FD: seg.fd, Path: path}, begin)
	})
}

// takeStale tells whether the file of this base is stale, and takes it out of the list.
func (st *stream) takeStale(base Sequence) bool {
	for i, b := range st.stale {
		if b == base {
			st.stale = append(st.stale[:i], st.stale[i+1:]...)
			return true
		}
	}
	return false
}

// notExist tells whether an operation failed because the file isn't there.
func notExist(err error) bool { return errors.Is(err, fs.ErrNotExist) }

// wrapFile adds the path to what a decoder found.
func wrapFile(path string, st *stream, err error) error {
	var c *CorruptionError
	if errors.As(err, &c) {
		d := *c
		d.Path = path
		if st != nil && d.Stream.Kind == 0 {
			d.Stream = st.id
		}
		return &d
	}
	var v *VersionError
	if errors.As(err, &v) {
		d := *v
		d.Path = path
		return &d
	}
	return fmt.Errorf("%s: %w", path, err)
}
