package wal

import (
	"time"

	"github.com/mortarmq/mortarmq/ring"
)

// closeRedundant is how long after its begin a shutdown goes on with files that say what others say: a start needs none of
// them.
const closeRedundant = 10 * time.Second

// closeState is where a clean shutdown stands.
type closeState struct {
	started bool
	// published says that everything is in files and durable, and checkpoints and indexes are being written beside them.
	published bool
	closed    bool
	// since is when the shutdown began.
	since time.Duration
	// retried: what waits for space was tried once more since the shutdown began. givenUp: it still found none, and is left
	// to the journal and the next start.
	retried, givenUp bool
}

// StartClose begins a clean shutdown: what is committed is written out, swept and checkpointed, so that the next start
// has nothing to replay. Where the disk is full that is left to the next start, which finds it in the journal. Nothing may be added any more. The last dedup snapshot was handed over before. The owner goes on
// calling Step until Closed.
func (s *Store) StartClose() {
	c := &s.closing
	if c.started {
		return
	}
	c.started, c.since = true, s.now
	s.unpaced = true
	s.publish.widen(closeParallel)
	s.sweepWanted = s.unswept() || s.dirty > 0
}

// Closed tells whether the shutdown is over and no operation is at the disk. After a failure it becomes true once
// nothing is in flight; the files then are what a crash would have left.
func (s *Store) Closed() bool { return s.closing.closed }

func (s *Store) stepClose() {
	c := &s.closing
	if c.published && s.now >= c.since+closeRedundant {
		s.publish.cancel()
	}
	if !c.started || c.closed || s.inflight > 0 || s.reads.active > 0 || s.reads.head != nil {
		return
	}
	if s.err == nil && !s.endWithoutSpace() {
		if s.sweepWanted || s.pass.active || s.sweep.phase != sweepIdle || s.publish.busy() || len(s.space.list) > 0 || len(s.files.list) > 0 {
			return
		}
		for _, d := range s.drops {
			if d.phase < dropSweeping {
				return
			}
		}
		if !c.published {
			c.published = true
			if s.publishAll(); s.publish.busy() || s.inflight > 0 {
				return
			}
		}
	}
	if s.endScrub(); s.inflight > 0 {
		return
	}
	if s.openFiles > 0 || s.table.fd >= 0 {
		if s.closeAll(); s.inflight > 0 {
			return
		}
	}
	c.closed = true
	s.discardAll()
	s.freeBuffers()
}

// discardAll forgets what waits to be written.
func (s *Store) discardAll() {
	for _, st := range s.order {
		s.discard(st)
	}
	for _, d := range s.drops {
		for _, st := range d.streams {
			s.discard(st) // of a write-out that did not get that far
		}
	}
}

// endWithoutSpace ends the shutdown early where the disk is full: it would wait for somebody to make room. Nothing is at the disk.
func (s *Store) endWithoutSpace() bool {
	c := &s.closing
	switch {
	case c.givenUp || !s.space.full || len(s.space.list) == 0:
	case !c.retried:
		c.retried = true
		s.space.run()
	default:
		c.givenUp = true
		s.space.list, s.files.list = nil, nil
		s.log.Warn("the disk is full: the journal keeps what could not be written to its segments, for the next start")
	}
	return c.givenUp
}

// publishAll writes the checkpoints of all partitions, and the indexes of their newest segments, as they are at the end.
func (s *Store) publishAll() {
	for _, st := range s.order {
		if st.id.Kind != Messages || st.bad != nil || st.saved.Next == 0 {
			continue
		}
		s.publishCheckpoint(st)
		if st.active != nil && st.index.from == segmentHeaderLen && st.index.covered == int64(st.saved.Offset) {
			x := st.index.segIndex
			if st.index.off%indexBlock != 0 {
				x.sums = append(x.sums, st.index.blockSum())
			}
			s.publishIndex(st.active, &x)
		}
	}
}

// closeAll closes every file. Nothing is at the disk; who still uses a file waits for what will not come any more.
func (s *Store) closeAll() {
	closeAll := func(streams []*stream) {
		for _, st := range streams {
			for _, seg := range st.segs {
				if seg.fd >= 0 {
					seg.users = 0
				}
			}
			st.held = nil
			s.closeStream(st)
		}
	}
	closeAll(s.order)
	for _, d := range s.drops {
		closeAll(d.streams)
	}
	s.closeIdle()
	if s.table.fd >= 0 {
		fd := s.table.fd
		s.table.fd = -1
		s.do(ring.Op{Kind: ring.Close, FD: fd}, func(*ring.Op) {})
	}
}
