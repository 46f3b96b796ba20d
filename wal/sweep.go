package wal

import (
	"slices"

	"github.com/mortarmq/mortarmq/ring"
)

// sweepPhase is where a sweep stands.
type sweepPhase uint8

const (
	sweepIdle sweepPhase = iota
	// sweepWriting: everything up to the sweep's round is written out, and files end on block boundaries.
	sweepWriting
	// sweepFiles, sweepDirs: the files and then the directories that this changed are flushed.
	sweepFiles
	sweepDirs
	// sweepSnapshot: the dedup snapshot for the sweep's round isn't published yet.
	sweepSnapshot
	// sweepTable: the checkpoint table is being written.
	sweepTable
)

// sweep makes what was written durable and says so in the checkpoint table.
type sweep struct {
	phase    sweepPhase
	upTo     journalPoint
	files    []*segment
	dirs     []string
	inflight int
	rows     []sealedRow
}

// sealedRow is what a stream's checkpoint becomes when the table is durable.
type sealedRow struct {
	st *stream
	c  checkpoint
}

// unswept tells whether there is something to sweep: the checkpoint table is behind what was taken, or, where it is
// held, files were written.
func (s *Store) unswept() bool {
	if s.held {
		return s.dirty > 0
	}
	return s.added.Round > s.durable
}

func (s *Store) sweepDue() bool { return s.sweepWanted && s.sweep.phase == sweepIdle && !s.recovering }

func (s *Store) stepSweepClock() {
	if s.sweep.phase != sweepIdle || s.closing.started {
		return // StartClose has asked for the last one
	}
	if s.dirty >= s.o.MaxDirtyBytes/2 || s.unswept() && s.now-s.lastSweep >= s.o.SweepEvery {
		s.sweepWanted = true
	}
}

// beginSweep is called at the start of the write-out that seals the files.
func (s *Store) beginSweep(upTo journalPoint) {
	s.sweepWanted = false
	s.sweep.phase, s.sweep.upTo = sweepWriting, upTo
	s.lastSweep = s.now
	if s.onSweepStart != nil && !s.closing.started && !s.held {
		s.onSweepStart(upTo.Round)
	}
}

// syncSweep is called when everything up to the sweep's round is written. What later write-outs add belongs to the next
// sweep.
func (s *Store) syncSweep() {
	w := &s.sweep
	w.phase = sweepFiles
	w.files = append(w.files[:0], s.dirtySegs...)
	for i, seg := range s.dirtySegs {
		seg.queued = false
		seg.sweeping = seg.dirty
		s.dirtySegs[i] = nil
	}
	s.dirtySegs = s.dirtySegs[:0]
	w.dirs = w.dirs[:0]
	for dir := range s.newDirs {
		w.dirs = append(w.dirs, dir)
	}
	slices.Sort(w.dirs)
	clear(s.newDirs)
	w.rows = w.rows[:0]
	for _, st := range s.order {
		if st.sealed.Next > 0 {
			w.rows = append(w.rows, sealedRow{st, st.sealed})
		}
	}
	s.stepSweep()
}

// stepSweep keeps the present sweep going.
func (s *Store) stepSweep() {
	w := &s.sweep
	for s.err == nil {
		switch w.phase {
		case sweepIdle, sweepWriting, sweepTable:
			return
		case sweepFiles:
			if !s.syncFiles() {
				return
			}
			w.phase = sweepDirs
		case sweepDirs:
			if !s.syncDirs() {
				return
			}
			w.phase = sweepSnapshot
		case sweepSnapshot:
			if s.held {
				s.skipTable()
				return
			}
			if !s.snaps.dedupReady(s, w.upTo.Round) {
				return
			}
			if s.replicated && s.tableRound() < w.upTo.Round {
				// A table of an earlier round would name a later one's point in the log.
				s.skipTable()
				return
			}
			if s.table.unlisting {
				return
			}
			w.phase = sweepTable
			s.writeTable()
			return
		}
	}
}

// parallel returns how many flushes may be at the device at once.
func (s *Store) parallel() int {
	if s.closing.started {
		return closeParallel
	}
	return syncParallel
}

// syncFiles flushes the sweep's files and tells whether all are flushed.
func (s *Store) syncFiles() bool {
	w := &s.sweep
	for len(w.files) > 0 && w.inflight < s.parallel() && !s.paused() {
		n := len(w.files) - 1
		seg := w.files[n]
		w.files[n] = nil
		w.files = w.files[:n]
		if seg.dirty == 0 {
			continue // it was flushed early
		}
		s.slice++
		w.inflight++
		s.syncFile(seg)
	}
	return len(w.files) == 0 && w.inflight == 0
}

// syncFile flushes a file. After a failure it is never tried again: the kernel may have dropped what it could not write.
func (s *Store) syncFile(seg *segment) {
	s.acquire(seg, func(err error) {
		if err != nil {
			s.syncDone(seg, err)
			return
		}
		s.do(ring.Op{Kind: ring.Sync, FD: seg.fd}, func(op *ring.Op) {
			if op.Err == nil {
				// Writes that were still on their way when the flush began are not among these.
				seg.dirty -= seg.sweeping
				s.dirty -= seg.sweeping
			}
			seg.sweeping = 0
			err := op.Err
			s.uncache(seg)
			s.release(seg)
			s.syncDone(seg, err)
		})
	})
}

// uncache takes a file that was flushed out of the page cache, unless somebody reads behind what is in memory: what is read
// soon is read from memory, and what isn't would grow the cache until the kernel has to search it for pages to free, in the
// middle of somebody's write. On a virtual machine that returns free memory to its host, a page that is not used again but
// taken anew costs twelve times the write itself. The file is in use.
func (s *Store) uncache(seg *segment) {
	st := seg.st
	if !seg.buffered || s.closing.started || st.id.Kind != Messages || st.wasRead && s.now-st.readAt < keepCached {
		return
	}
	seg.buffered = seg.dirty > 0
	from := seg.uncached
	if st.sealed.Base == seg.base {
		seg.uncached = int64(st.sealed.Offset) &^ (ring.BlockSize - 1) // what lies behind may have been written since
	}
	s.use(seg)
	s.do(ring.Op{Kind: ring.Uncache, FD: seg.fd, Off: from}, func(*ring.Op) { s.release(seg) })
}

func (s *Store) syncDone(seg *segment, err error) {
	s.sweep.inflight--
	if err != nil && !(seg.st.dropped && notExist(err)) {
		s.fail("flush segment", seg.st.path(seg), err)
	}
	s.stepSweep()
}

// syncDirs flushes the directories in which the sweep's files were made, and tells whether all are flushed.
func (s *Store) syncDirs() bool {
	w := &s.sweep
	for len(w.dirs) > 0 && w.inflight < s.parallel() && !s.paused() {
		n := len(w.dirs) - 1
		dir := w.dirs[n]
		w.dirs = w.dirs[:n]
		s.slice++
		w.inflight++
		s.do(ring.Op{Kind: ring.SyncDir, Path: dir}, func(op *ring.Op) {
			w.inflight--
			// A topic that is dropped meanwhile has its directory no more.
			if op.Err != nil && !(notExist(op.Err) && s.dropping(dir)) {
				s.fail("flush directory", dir, op.Err)
			}
			s.stepSweep()
		})
	}
	return len(w.dirs) == 0 && w.inflight == 0
}

// endSweep is called when the table is durable.
func (s *Store) endSweep(point journalPoint) {
	w := &s.sweep
	w.phase = sweepIdle
	s.table.rebuilt = true
	for i := range w.rows {
		row := &w.rows[i]
		rolled := row.c.Base != row.st.saved.Base
		row.st.saved = row.c
		if rolled && row.st.saved.Base > row.st.first {
			s.publishCheckpoint(row.st)
		}
		w.rows[i] = sealedRow{}
	}
	moved := point.Round > s.durable
	s.durable = point.Round
	s.sweptDrops()
	s.sweptRestarts()
	s.pruneLogs()
	if moved && s.onDurable != nil {
		s.onDurable(s.durable)
	}
	s.stepPass()
}

// skipTable ends a sweep without a checkpoint table: the journal keeps what the last one doesn't name.
func (s *Store) skipTable() {
	s.sweep.phase = sweepIdle
	clear(s.sweep.rows)
	s.stepPass()
}

// tableRound returns the round that the sweep's table names: none that the dedup snapshot doesn't include.
func (s *Store) tableRound() RoundNumber {
	round := s.sweep.upTo.Round
	if s.onSweepStart != nil || s.snaps.dedup > 0 {
		round = min(round, RoundNumber(s.snaps.dedup))
	}
	return max(round, s.durable)
}

// sequence runs operations one after the other until fail says so, then done.
func (s *Store) sequence(steps []ring.Op, fail func(*ring.Op) bool, done func()) {
	if len(steps) == 0 {
		done()
		return
	}
	s.do(steps[0], func(op *ring.Op) {
		if !fail(op) {
			s.sequence(steps[1:], fail, done)
		}
	})
}
