package wal

import (
	"errors"
	"path/filepath"
	"time"

	"github.com/mortarmq/mortarmq/ring"
)

const (
	// zeroSlab is the buffer of a file that is being made: zeros, and a last block for its header.
	zeroSlab  = 256 << 10
	zeroChunk = zeroSlab - fileHeaderLen
	// growRetry is how long the journal waits after a further file could not be made, for want of space mostly.
	growRetry = 10 * time.Second
	// growDivisor: another file is made when messages have less than this fraction of the journal left before they are
	// refused. Where trimming keeps up it never comes to that, however long the journal runs.
	growDivisor = 8
)

// makeState says which step of making a journal file comes next.
type makeState uint8

const (
	makeOpen makeState = iota
	makeAllocate
	makeZero
	makeHeader
	makeSync
	makeRename
	makeSyncDir
	makeDone

	makeClose
	makeRemove
	makeRemoveRenamed
	makeFailed
)

// fileMaker makes one journal file, a step at a time: allocated, written with zeros from end to end (a write to blocks
// that were only allocated costs a commit of the file system's own journal), with its header, flushed, and only then under
// its name, which is flushed too. Whatever a power cut leaves is a file that was never used.
type fileMaker struct {
	file    *journalFile
	journal int
	tmp     string
	slab    *ring.Slab
	op      ring.Op
	state   makeState
	busy    bool
	zeroed  int64
	// err is what went wrong; the steps after it only clean up.
	err error
}

// newFileMaker starts the making of a file; nil where the pool has no memory. done runs after each step.
func newFileMaker(opts *JournalOptions, number uint32) *fileMaker {
	slab := opts.Pool.Get(zeroSlab)
	if slab == nil {
		return nil
	}
	path := filepath.Join(opts.Dir, journalFileName(number))
	m := &fileMaker{
		file:    &journalFile{path: path, number: number, fd: -1, size: opts.FileBytes, key: opts.Random()},
		journal: opts.ID,
		tmp:     path + tmpSuffix,
		slab:    slab,
	}
	clear(slab.Bytes()[:zeroChunk])
	putFileHeader(slab.Bytes()[zeroChunk:zeroSlab], opts.ID, m.file)
	m.op.Done = m.stepped
	return m
}

// ended tells that the file is made or, with err set, given up and cleaned away.
func (m *fileMaker) ended() bool { return m.state == makeDone || m.state == makeFailed }

// step submits the next operation. It must not be called while one is at the disk or after the end.
func (m *fileMaker) step(d Disk) {
	op := &m.op
	op.FD, op.Off, op.Size, op.Flags, op.Buf, op.Path, op.Path2 = m.file.fd, 0, 0, 0, nil, "", ""
	switch m.state {
	case makeOpen:
		op.Kind, op.Path, op.Flags = ring.Open, m.tmp, ring.Create|ring.Direct
	case makeAllocate:
		op.Kind, op.Size = ring.Allocate, m.file.size
	case makeZero:
		op.Kind, op.Off = ring.Write, m.zeroed
		op.Buf = m.slab.Bytes()[:min(zeroChunk, m.file.size-m.zeroed)]
	case makeHeader:
		op.Kind, op.Buf = ring.Write, m.slab.Bytes()[zeroChunk:zeroSlab]
	case makeSync:
		op.Kind = ring.Sync
	case makeRename:
		op.Kind, op.Path, op.Path2 = ring.Rename, m.tmp, m.file.path
	case makeSyncDir:
		op.Kind, op.Path = ring.SyncDir, filepath.Dir(m.tmp)
	case makeClose:
		op.Kind = ring.Close
	case makeRemove:
		op.Kind, op.Path = ring.Remove, m.tmp
	case makeRemoveRenamed:
		op.Kind, op.Path = ring.Remove, m.file.path
	case makeDone, makeFailed:
		panic("wal: step of a journal file after its end")
	}
	m.busy = true
	d.Submit(op)
}

// stepped is the Done of every step.
func (m *fileMaker) stepped(op *ring.Op) {
	m.busy = false
	switch m.state {
	case makeClose, makeRemove, makeRemoveRenamed:
		// Cleaning up is best effort: what stays behind is removed, or found to be unused, at the next start.
		m.state++
	case makeOpen:
		if op.Err == nil {
			m.file.fd = op.FD
		}
		m.advance(op.Err)
	case makeZero:
		m.zeroed += int64(len(op.Buf))
		if op.Err == nil && m.zeroed < m.file.size {
			return
		}
		m.advance(op.Err)
	case makeAllocate:
		if errors.Is(op.Err, errors.ErrUnsupported) {
			// The zeros that follow allocate, too, only less evenly.
			op.Err = nil
		}
		m.advance(op.Err)
	default:
		m.advance(op.Err)
	}
	if m.ended() {
		m.slab.Release()
		m.slab = nil
	}
}

func (m *fileMaker) advance(err error) {
	switch {
	case err == nil:
		m.state++
	case m.file.fd < 0:
		m.err, m.state = err, makeFailed
	default:
		m.err, m.state = err, makeClose
	}
}

// grower prepares further files beside the commits.
type grower struct {
	maker *fileMaker
	// due is when the next zeros may be written, retry when another attempt may start.
	due, retry time.Duration
	// room is how much messages could be appended when the maker started.
	room int64
}

func (g *grower) busy() bool { return g.maker != nil && g.maker.busy }

// stepGrow makes another file when messages are about to run out of room.
func (j *Journal) stepGrow(now time.Duration) time.Duration {
	g := &j.grow
	if g.maker == nil {
		if j.messageRoom() >= j.capacity/growDivisor || j.files() >= j.opts.MaxFiles {
			return Never
		}
		if now < g.retry {
			return g.retry
		}
		if g.maker = newFileMaker(&j.opts, j.lastFile+1); g.maker == nil {
			g.retry = now + growRetry
			return g.retry
		}
		g.due, g.room = now, j.messageRoom()
	}
	m := g.maker
	switch {
	case m.busy:
		return Never
	case m.ended():
		return j.grown(now)
	case m.state == makeZero && now < g.due && !j.growBehind():
		return g.due
	}
	if m.state == makeZero {
		g.due = max(g.due, now) + time.Duration(zeroChunk*int64(time.Second)/j.opts.ZeroBytesPerSec)
	}
	m.step(j.disk)
	return Never
}

// grown takes over the file that was made, or waits before the next attempt.
func (j *Journal) grown(now time.Duration) time.Duration {
	m := j.grow.maker
	j.grow.maker = nil
	if m.err != nil {
		j.grow.retry = now + growRetry
		j.opts.Logger.Warn("no further journal file could be made; publishers wait for the segments instead",
			"journal", j.opts.ID, "path", m.file.path, "error", m.err, "retry_in", growRetry)
		return j.grow.retry
	}
	j.adopt(m.file)
	j.free = append(j.free, m.file)
	j.freeBytes += m.file.payload()
	return Never
}

// adopt counts a file in.
func (j *Journal) adopt(f *journalFile) {
	j.capacity += f.payload()
	j.lastFile = max(j.lastFile, f.number)
}

// files returns how many files the journal has.
func (j *Journal) files() int { return len(j.full) + 1 + len(j.free) }

// messageRoom returns how many bytes of rounds fit before messages are refused.
func (j *Journal) messageRoom() int64 {
	return j.freeBytes + j.cur.size - j.curOff - j.capacity/reserveDivisor
}

// growBehind tells that the room for messages goes faster than its replacement comes: the file should be ready when half
// of the room that there was is left. Then zeroing goes on unpaced: slower commits are better than refused ones.
func (j *Journal) growBehind() bool {
	g := &j.grow
	used := g.room - j.messageRoom()
	return g.room <= 0 || 2*float64(used)*float64(g.maker.file.size) > float64(g.maker.zeroed)*float64(g.room)
}

// Step does what is due besides the commits: it writes the mark file when the journal has been quiet for 10 ms, and makes
// further files, up to MaxFiles, when messages are about to run out of room. now is the owner's monotonic clock. It returns the
// instant, on the same clock, at which it wants to be called again, or Never; it also wants a call after every Poll that
// completed something.
func (j *Journal) Step(now time.Duration) (next time.Duration) {
	if j.err != nil {
		return Never
	}
	return min(j.stepMark(now), j.stepGrow(now))
}

// abandon makes the remaining steps clean up, unless the file is made already.
func (m *fileMaker) abandon() {
	switch {
	case m.ended() || m.state > makeDone:
	case m.file.fd < 0:
		m.err, m.state = errClosed, makeFailed
		m.slab.Release()
		m.slab = nil
	default:
		m.err, m.state = errClosed, makeClose
	}
}
