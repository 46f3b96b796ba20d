package wal

import (
	"path/filepath"
	"slices"

	"github.com/mortarmq/mortarmq/ring"
)

// What a node that catches up does to its files beside adding records: the logs jump to a snapshot (Install), and
// partitions begin anew (Skip, Reset). Each leaves files that can be opened whenever the power goes: a snapshot counts from
// the moment it has its name, and a partition's files go only when the checkpoint table doesn't name them any more.

// Install publishes a snapshot that another node has made, for a store whose owner is catching up.
//
// A metadata or cursor snapshot takes the place of all records up to position: where the log here ends before it, the log
// goes on with the record behind it, in a file of its own. Metadata that was quarantined is served again by the next start.
// A log that reaches further already, or has a newer snapshot, is left alone. Of the producers' windows the position is the
// newest round added (a RoundNumber, this node's own), as with SaveSnapshot.
//
// data is handed over. done, which may be nil, runs when the snapshot is durable and the log takes records from position+1
// on, possibly at once; never after a failure, see Err. The store must belong to a node of a cluster.
func (s *Store) Install(kind SnapshotKind, position uint64, epoch Epoch, data []byte, done func()) {
	if !s.replicated {
		panic("wal: Install in the store of a node on its own")
	}
	if done == nil {
		done = func() {}
	}
	id, isLog := kind.log()
	if newest := s.snaps.newest(id.Kind); isLog && newest > 0 && newest >= position {
		done()
		return
	}
	s.saveSnapshot(kind, position, epoch, data, func() {
		if isLog {
			s.installed(id, position)
		}
		done()
	})
}

// GiveUpMetadata ends what quarantined metadata holds back, for a node that catches up and is going to Install another one's:
// checkpoint tables are written again, without a row for it, so that the journal is trimmed and partitions can begin anew.
// Otherwise a catch-up of more than there is room for in the journal would never end. A start before the Install finds the
// metadata quarantined as before, but without what the journal had of it. Where none is quarantined it does nothing.
func (s *Store) GiveUpMetadata() { s.held = false }

// installed lets a log go on behind its snapshot.
func (s *Store) installed(id StreamID, position uint64) {
	if id.Kind == Metadata {
		s.noMetadata, s.held = false, false
	}
	st := s.streams.get(id)
	if st == nil {
		st = newStream(s, id)
		st.dirMade = true
	}
	st.jump(position)
}

// jump makes a log go on behind a snapshot, in a new file, where it ends before it.
func (st *stream) jump(position uint64) {
	if next := Sequence(position) + 1; st.next < next {
		st.next, st.rolls = next, true
	}
}

// log returns the log that a snapshot of this kind replaces.
func (k SnapshotKind) log() (id StreamID, ok bool) {
	switch k {
	case SnapshotMetadata:
		return StreamID{Kind: Metadata}, true
	case SnapshotCursors:
		return StreamID{Kind: Ledger}, true
	default:
		return StreamID{}, false
	}
}

// newest returns the position of the newest snapshot of a log; 0 where there is none.
func (n *snapshots) newest(kind StreamKind) uint64 {
	switch {
	case kind == Ledger:
		return n.cursors
	case kind == Metadata && len(n.metadata) > 0:
		return n.metadata[len(n.metadata)-1].Position
	default:
		return 0
	}
}

// restartPhase is where a partition stands that begins anew.
type restartPhase uint8

const (
	// restartWaiting: files of the partition are still being written, made or published.
	restartWaiting restartPhase = iota
	// restartSweeping: the next checkpoint table doesn't name the partition's files any more, but where it begins.
	restartSweeping
	// restartRemoving: the files are removed.
	restartRemoving
	restartDone
)

// restart is a partition that begins anew.
type restart struct {
	id    StreamID
	first Sequence
	phase restartPhase
	// old is what there was of the partition, or nil; st what takes its place.
	old, st *stream
	done    func()
}

// Skip makes a partition go on with the record next, for a node that catches up from one that doesn't have the records
// before any more: everything that is here before is given up, its files are removed. A partition that has reached next is
// left alone.
//
// done, which may be nil, runs when it is durable and the partition takes records, possibly at once; never after a failure,
// see Err, nor once StartClose was called. It takes a sweep, which all that begin anew at the same time share. Until then
// Add passes over records of the partition: they are of before. Interrupted, the partition is what it was or begins at next.
func (s *Store) Skip(id StreamID, next Sequence, done func()) {
	st := s.streams.get(id)
	if st != nil && st.bad == nil && st.next >= next || st == nil && next <= firstSequence {
		if done != nil {
			done()
		}
		return
	}
	s.Reset(id, next, done)
}

// Reset makes a partition begin anew with the record first, usually 1: its files are removed, and a quarantine and its
// report are forgotten, for a node that repairs the partition by fetching all of it. Like Skip otherwise; interrupted, the
// partition may also be what it was up to an earlier record.
func (s *Store) Reset(id StreamID, first Sequence, done func()) {
	if id.Kind != Messages || first == 0 {
		panic("wal: only a partition can begin anew, with a record from 1 on")
	}
	if _, gone := s.dropped[id.Topic]; gone || s.err != nil {
		if done != nil && s.err == nil {
			done()
		}
		return
	}
	r := &restart{id: id, first: first, old: s.streams.get(id), done: done}
	if r.old != nil {
		r.old.restarting = true
	}
	s.restarts = append(s.restarts, r)
	s.stepRestarts()
}

// stepRestarts keeps the partitions going that begin anew.
func (s *Store) stepRestarts() {
	for i := 0; i < len(s.restarts) && s.err == nil && !s.closing.started; i++ {
		// A table on its way speaks for fewer rounds than those that hold records of the old files.
		if r := s.restarts[i]; r.phase == restartWaiting && r.idle() && s.sweep.phase == sweepIdle && !s.table.unlisting {
			s.detach(r)
		}
	}
	kept := s.restarts[:0]
	for _, r := range s.restarts {
		if r.phase != restartDone {
			kept = append(kept, r)
		}
	}
	clear(s.restarts[len(kept):])
	s.restarts = kept
}

// idle tells whether nothing is under way with the old files but reads, which end by themselves.
func (r *restart) idle() bool {
	old := r.old
	return old == nil || old.dropped || !old.inPass && !old.busy && old.jobs == 0 && old.inflight == 0
}

// detach takes the old files out of the store and asks for a table without them.
func (s *Store) detach(r *restart) {
	if r.old != nil && r.old.dropped {
		// The topic was deleted meanwhile, or the partition was begun anew once more.
		if r.old = s.streams.get(r.id); r.old == nil {
			s.restarted(r)
			return
		}
		r.old.restarting = true
		if !r.idle() {
			return
		}
	}
	dirMade := false
	if old := r.old; old != nil {
		dirMade = old.dirMade
		old.dropped = true
		s.discard(old)
		s.forget(old)
		s.closeStream(old)
	}
	st := newStream(s, r.id)
	st.first, st.next, st.wnext, st.dirMade = r.first, r.first, r.first, dirMade
	st.anew, st.restarting = true, true
	r.st, r.phase = st, restartSweeping
	s.sweepWanted = true
}

// forget takes a stream out of the store's lists. Its files are closed with their last user.
func (s *Store) forget(st *stream) {
	s.streams.remove(st.id)
	for i, x := range s.order {
		if x == st {
			s.order = append(s.order[:i], s.order[i+1:]...)
			return
		}
	}
}

// sweptRestarts is called when a sweep's checkpoint table is durable. Every sweep that began since a partition was detached
// includes all rounds with records of the old files, but for those that came since.
func (s *Store) sweptRestarts() {
	for _, r := range s.restarts {
		switch {
		case r.phase != restartSweeping:
		case r.st.passed > s.durable:
			s.sweepWanted = true // a start would go through that round again
		default:
			r.phase = restartRemoving
			s.removeOld(r)
		}
	}
	s.stepRestarts()
}

// unsettled tells whether a partition waits for the next sweep's table. One that belongs to no sweep must not be written then.
func (s *Store) unsettled() bool {
	return slices.ContainsFunc(s.restarts, func(r *restart) bool { return r.phase == restartSweeping })
}

// removeOld removes everything in the partition's directory. Its checkpoint goes first, since it would have a start go back
// to the files; a report goes last, since as long as it is there the partition isn't served.
func (s *Store) removeOld(r *restart) {
	dir := r.st.dir
	s.do(ring.Op{Kind: ring.ReadDir, Path: dir}, func(op *ring.Op) {
		if notExist(op.Err) {
			s.restarted(r)
			return
		}
		if op.Err != nil {
			s.fail("list partition", dir, op.Err)
			return
		}
		var steps, reports []ring.Op
		for _, name := range op.Names {
			remove := ring.Op{Kind: ring.Remove, Path: filepath.Join(dir, name)}
			switch {
			case isReport(name):
				reports = append(reports, remove)
			case name == checkpointFile:
				steps = append([]ring.Op{remove, {Kind: ring.SyncDir, Path: dir}}, steps...)
			default:
				steps = append(steps, remove)
			}
		}
		flush := ring.Op{Kind: ring.SyncDir, Path: dir}
		steps = append(steps, flush)
		if len(reports) > 0 {
			steps = append(append(steps, reports...), flush)
		}
		fail := func(op *ring.Op) bool {
			if op.Err == nil || notExist(op.Err) { // a deleted topic's directory has another name
				return false
			}
			s.fail("remove a partition's files", op.Path, op.Err)
			return true
		}
		s.sequence(steps, fail, func() { s.restarted(r) })
	})
}

// restarted ends a restart.
func (s *Store) restarted(r *restart) {
	r.phase = restartDone
	if r.st != nil {
		r.st.restarting, r.st.anew = false, r.first > firstSequence
	}
	if r.done != nil {
		r.done()
	}
	s.stepRestarts()
}
