package wal

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/mortarmq/mortarmq/ring"
)

// SnapshotKind names one of the three states that a journal's owner keeps outside of the log.
type SnapshotKind uint8

const (
	// SnapshotMetadata is the folded metadata log. Its position is the Sequence (mutation id) it includes.
	SnapshotMetadata SnapshotKind = iota + 1
	// SnapshotCursors is the folded delivery ledger. Its position is the ledger Sequence it includes.
	SnapshotCursors
	// SnapshotDedup holds the producers' windows. Its position is the RoundNumber it includes.
	SnapshotDedup

	snapshotKinds = int(SnapshotDedup) + 1
)

// String returns the kind's name as it stands in errors.
func (k SnapshotKind) String() string {
	switch k {
	case SnapshotMetadata:
		return "metadata snapshot"
	case SnapshotCursors:
		return "cursor checkpoint"
	case SnapshotDedup:
		return "dedup snapshot"
	default:
		return fmt.Sprintf("snapshot kind %d", uint8(k))
	}
}

const (
	cursorFile     = "cursor.mqc"
	dedupFile      = "dedup.mmdd"
	snapshotPrefix = "mmms-"
	snapshotSuffix = ".bin"
)

// snapshotID tells metadata snapshots apart.
type snapshotID struct {
	Position uint64
	Epoch    Epoch
}

func (a snapshotID) less(b snapshotID) bool {
	return a.Position < b.Position || a.Position == b.Position && a.Epoch < b.Epoch
}

func metadataSnapshotName(id snapshotID) string {
	return fmt.Sprintf("%s%020d-%010d%s", snapshotPrefix, id.Position, uint32(id.Epoch), snapshotSuffix)
}

// parseMetadataSnapshotName is the reverse of metadataSnapshotName.
func parseMetadataSnapshotName(name string) (id snapshotID, ok bool) {
	middle, ok := strings.CutPrefix(name, snapshotPrefix)
	if !ok {
		return id, false
	}
	if middle, ok = strings.CutSuffix(middle, snapshotSuffix); !ok {
		return id, false
	}
	offset, epoch, ok := strings.Cut(middle, "-")
	if !ok {
		return id, false
	}
	var err error
	if id.Position, err = strconv.ParseUint(offset, 10, 64); err != nil {
		return id, false
	}
	e, err := strconv.ParseUint(epoch, 10, 32)
	id.Epoch = Epoch(e)
	return id, err == nil && metadataSnapshotName(id) == name
}

// snapshotPath returns the path of a snapshot.
func (s *Store) snapshotPath(kind SnapshotKind, id snapshotID) string {
	switch kind {
	case SnapshotCursors:
		return filepath.Join(s.o.Dir, ledgerDir, strconv.Itoa(s.o.Journal), cursorFile)
	case SnapshotDedup:
		return filepath.Join(s.journalDir, dedupFile)
	case SnapshotMetadata:
	}
	return filepath.Join(s.o.Dir, metadataDir, metadataSnapshotName(id))
}

// snapshots knows what is published.
type snapshots struct {
	// dedup and cursors are the positions of the published ones.
	dedup, cursors uint64
	// metadata holds the published metadata snapshots, oldest first. Two are kept: should the newest prove unreadable,
	// the one before and the log still give the same state.
	metadata []snapshotID
	busy     [snapshotKinds]bool
	next     [snapshotKinds]*publication
	// installs wait until a snapshot of their position or a later one is published.
	installs [snapshotKinds][]install
}

// install is somebody who waits for a snapshot to be published.
type install struct {
	position uint64
	done     func()
}

// covers tells whether a snapshot replaces the first record of a log file, so that the file can go once it is full.
func (n *snapshots) covers(kind StreamKind, base Sequence) bool {
	switch kind {
	case Ledger:
		return n.cursors >= uint64(base)
	case Metadata:
		return len(n.metadata) > 0 && n.metadata[len(n.metadata)-1].Position >= uint64(base)
	case Messages, Replica:
	}
	return false
}

// needless returns the position up to which a log isn't needed.
func (n *snapshots) needless(kind StreamKind) uint64 {
	switch {
	case kind == Ledger:
		return n.cursors
	case kind == Metadata && len(n.metadata) > 1:
		return n.metadata[0].Position
	default:
		return 0
	}
}

// dedupReady tells whether the checkpoint of a sweep up to round may be written.
func (n *snapshots) dedupReady(s *Store, round RoundNumber) bool {
	return s.onSweepStart == nil || n.dedup >= uint64(round) ||
		s.closing.started && !n.busy[SnapshotDedup]
}

// SaveSnapshot publishes a snapshot that includes everything up to position; of those that wait to be written only the
// newest of each kind is. data is handed over. Records that a snapshot replaces are removed from the ledger and the
// metadata log some time later.
func (s *Store) SaveSnapshot(kind SnapshotKind, position uint64, epoch Epoch, data []byte) {
	s.saveSnapshot(kind, position, epoch, data, nil)
}

// saveSnapshot calls done, if there is one, when the snapshot or one that takes its place is published.
func (s *Store) saveSnapshot(kind SnapshotKind, position uint64, epoch Epoch, data []byte, done func()) {
	if s.err != nil {
		return
	}
	id := snapshotID{Position: position, Epoch: epoch}
	path := s.snapshotPath(kind, id)
	if len(data) > MaxSnapshotBytes {
		s.fail("publish", path, fmt.Errorf("%v of %d bytes is larger than %d", kind, len(data), MaxSnapshotBytes))
		return
	}
	pub := &publication{
		path: path,
		build: func() [][]byte {
			head := make([]byte, snapshotHeaderLen)
			putSnapshotHeader(head, &snapshotHeader{Kind: kind, Epoch: epoch, Position: position}, data)
			return [][]byte{head, data}
		},
		done: func() { s.snapshotPublished(kind, id) },
	}
	if done != nil {
		s.snaps.installs[kind] = append(s.snaps.installs[kind], install{position, done})
	}
	if s.snaps.busy[kind] {
		s.snaps.next[kind] = pub
		return
	}
	s.snaps.busy[kind] = true
	s.publish.add(pub)
}

func (s *Store) snapshotPublished(kind SnapshotKind, id snapshotID) {
	n := &s.snaps
	n.busy[kind] = false
	switch kind {
	case SnapshotMetadata:
		n.addMetadata(id)
		for len(n.metadata) > 2 {
			s.remove(s.snapshotPath(kind, n.metadata[0]))
			n.metadata = n.metadata[1:]
		}
	case SnapshotCursors:
		n.cursors = id.Position
	case SnapshotDedup:
		n.dedup = id.Position
	}
	if pub := n.next[kind]; pub != nil {
		n.next[kind] = nil
		n.busy[kind] = true
		s.publish.add(pub)
	}
	waiting := n.installs[kind]
	n.installs[kind] = nil
	for _, w := range waiting {
		if w.position > id.Position {
			n.installs[kind] = append(n.installs[kind], w)
			continue
		}
		w.done()
	}
	s.pruneLogs()
	s.stepSweep()
}

// addMetadata adds a snapshot to the list unless it is there.
func (n *snapshots) addMetadata(id snapshotID) {
	if k := len(n.metadata); k > 0 && !n.metadata[k-1].less(id) {
		return
	}
	n.metadata = append(n.metadata, id)
}

// pruneLogs removes the files of ledger and metadata that snapshots have made superfluous. The file that the checkpoint
// table names, and what follows it, stays.
func (s *Store) pruneLogs() {
	for _, kind := range []StreamKind{Ledger, Metadata} {
		st := s.streams.get(StreamID{Kind: kind})
		if st == nil {
			continue
		}
		needless := Sequence(s.snaps.needless(kind))
		for len(st.segs) > 1 && st.segs[1].base <= needless+1 && st.segs[0].base < st.saved.Base {
			seg := st.segs[0]
			if seg.dirty > 0 || seg.users > 0 || seg.opening {
				break
			}
			path := st.path(seg)
			if seg.fd >= 0 {
				s.idle.remove(seg)
				s.closeFile(seg)
			}
			st.segs = st.segs[1:]
			s.remove(path)
		}
	}
}

// remove unlinks a file that isn't needed any more.
func (s *Store) remove(path string) {
	s.do(ring.Op{Kind: ring.Remove, Path: path}, func(op *ring.Op) {
		if op.Err != nil && !notExist(op.Err) {
			s.log.Warn("a superfluous file can't be removed", "path", path, "err", op.Err)
		}
	})
}
