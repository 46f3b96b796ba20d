package wal

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/mortarmq/mortarmq/ring"
)

// dropPhase is where the deletion of a topic stands.
type dropPhase uint8

const (
	// dropWaiting: files of the topic are still being made or published.
	dropWaiting dropPhase = iota
	// dropRenaming: the topic's directory gets another name, durably.
	dropRenaming
	// dropSweeping: the next checkpoint table doesn't name the topic any more. Only then may files go: a partition in
	// the table without files would be corruption.
	dropSweeping
	// dropRemoving: the files are removed, one after the other.
	// A shutdown doesn't wait for it; the next start goes on.
	dropRemoving
	dropDone
)

// drop is the deletion of a topic.
type drop struct {
	topic   uint16
	streams []*stream
	phase   dropPhase
	// path is the directory's new name.
	path string
	busy bool
	// unlisted says that the checkpoint table was begun in dropSweeping: it doesn't name the topic.
	unlisted bool
	// dirs are the directories to remove, innermost last; files are files of the last one.
	dirs  []string
	files []string
}

// DropTopic deletes the files of a topic, in the background. Records of the topic that are added from now on are
// discarded and reads find nothing. The topic's number must not be used again while the journal holds records of it.
func (s *Store) DropTopic(topic uint16) {
	if _, gone := s.dropped[topic]; gone || s.err != nil {
		return
	}
	s.dropped[topic] = struct{}{}
	d := &drop{topic: topic}
	kept := s.order[:0]
	for _, st := range s.order {
		if st.id.Kind != Messages || st.id.Topic != topic {
			kept = append(kept, st)
			continue
		}
		st.dropped = true
		s.streams.remove(st.id)
		d.streams = append(d.streams, st)
		if !st.inPass {
			s.discard(st)
		}
	}
	clear(s.order[len(kept):])
	s.order = kept
	s.drops = append(s.drops, d)
	s.stepDrops()
}

// KnowDeleted notes that a topic was deleted, for one of which there are no files here any more, or never were: records of it that
// are added are passed over. A node gets such records where a catch-up ended with a snapshot that is newer than they are.
func (s *Store) KnowDeleted(topic uint16) { s.dropped[topic] = struct{}{} }

// dropping tells whether a directory belongs to a topic that is being deleted.
func (s *Store) dropping(dir string) bool {
	rel, err := filepath.Rel(filepath.Join(s.o.Dir, topicsDir), dir)
	if err != nil {
		return false
	}
	topic, ok := parseID(strings.Split(rel, string(filepath.Separator))[0])
	_, gone := s.dropped[topic]
	return ok && gone
}

// stepDrops keeps the deletions going.
func (s *Store) stepDrops() {
	kept := s.drops[:0]
	for _, d := range s.drops {
		if !d.busy && s.err == nil {
			s.stepDrop(d)
		}
		if d.phase != dropDone {
			kept = append(kept, d)
		}
	}
	clear(s.drops[len(kept):])
	s.drops = kept
}

func (s *Store) stepDrop(d *drop) {
	switch d.phase {
	case dropWaiting:
		if s.recovering {
			return // nothing is moved before the recovery is known to succeed
		}
		for _, st := range d.streams {
			if st.busy || st.jobs > 0 || st.inPass {
				return
			}
		}
		d.phase = dropRenaming
		s.renameTopic(d)
	case dropRemoving:
		if !s.paused() && !s.closing.started {
			s.removeNext(d)
		}
	case dropRenaming, dropSweeping, dropDone:
	}
}

// renameTopic moves the topic's directory aside.
func (s *Store) renameTopic(d *drop) {
	d.busy = true
	s.dropSeq++
	d.path = filepath.Join(s.o.Dir, topicsDir, deletedName(d.topic, s.o.Journal, s.dropSeq))
	from := topicDir(s.o.Dir, d.topic)
	s.do(ring.Op{Kind: ring.Rename, Path: from, Path2: d.path}, func(op *ring.Op) {
		if op.Err != nil && !notExist(op.Err) {
			s.fail("move deleted topic aside", from, op.Err)
			return
		}
		dir := filepath.Dir(d.path)
		s.do(ring.Op{Kind: ring.SyncDir, Path: dir}, func(op *ring.Op) {
			if op.Err != nil {
				s.fail("flush directory", dir, op.Err)
				return
			}
			d.busy = false
			d.phase = dropSweeping
			s.sweepWanted = true
			for _, st := range d.streams {
				s.closeStream(st)
			}
		})
	})
}

// closeStream closes the files of a stream; those in use close with their last user.
func (s *Store) closeStream(st *stream) {
	for _, seg := range st.segs {
		if seg.fd >= 0 && seg.users == 0 && !seg.opening {
			if seg.idle {
				s.idle.remove(seg)
			}
			s.closeFile(seg)
		}
	}
}

// unlistDrops is called when a checkpoint table is made.
func (s *Store) unlistDrops() {
	for _, d := range s.drops {
		d.unlisted = d.phase == dropSweeping
	}
}

// sweptDrops is called when that table is durable.
func (s *Store) sweptDrops() {
	for _, d := range s.drops {
		if d.phase == dropSweeping && d.unlisted {
			d.phase = dropRemoving
			d.dirs = append(d.dirs, d.path)
		}
	}
}

// removeNext removes one file, or a directory whose files are gone. Directories are listed when they come up.
func (s *Store) removeNext(d *drop) {
	s.slice++
	d.busy = true
	if n := len(d.files); n > 0 {
		path := d.files[n-1]
		d.files = d.files[:n-1]
		s.do(ring.Op{Kind: ring.Remove, Path: path}, func(op *ring.Op) {
			d.busy = false
			if op.Err != nil && !notExist(op.Err) {
				s.giveUp(d, path, op.Err)
			}
			s.stepDrops()
		})
		return
	}
	dir := d.dirs[len(d.dirs)-1]
	s.do(ring.Op{Kind: ring.ReadDir, Path: dir}, func(op *ring.Op) {
		dirs := len(d.dirs)
		for _, name := range op.Names {
			path := filepath.Join(dir, name)
			if _, partition := parseID(name); partition && dir == d.path {
				d.dirs = append(d.dirs, path)
			} else {
				d.files = append(d.files, path)
			}
		}
		if len(d.dirs) == dirs && len(d.files) == 0 {
			s.removeDir(d, dir)
			return
		}
		d.busy = false
		s.stepDrops()
	})
}

// giveUp leaves the rest of a deleted topic to the next start.
func (s *Store) giveUp(d *drop, path string, err error) {
	d.phase = dropDone
	s.log.Warn("a deleted topic's files can't be removed; the next start tries again", "path", path, "err", err)
}

// removeDir removes an empty directory.
func (s *Store) removeDir(d *drop, dir string) {
	s.do(ring.Op{Kind: ring.Remove, Path: dir}, func(op *ring.Op) {
		d.busy = false
		if op.Err != nil && !notExist(op.Err) {
			s.giveUp(d, dir, op.Err)
			return
		}
		if d.dirs = d.dirs[:len(d.dirs)-1]; len(d.dirs) == 0 {
			d.phase = dropDone
		}
		s.stepDrops()
	})
}

func deletedName(topic uint16, journal, n int) string {
	return fmt.Sprintf("%s%d-%d-%d", deletedPrefix, topic, journal, n)
}

// parseDeletedName is the reverse of deletedName.
func parseDeletedName(name string) (topic uint16, journal, n int, ok bool) {
	rest, ok := strings.CutPrefix(name, deletedPrefix)
	if !ok {
		return 0, 0, 0, false
	}
	parts := strings.Split(rest, "-")
	if len(parts) != 3 {
		return 0, 0, 0, false
	}
	topic, ok = parseID(parts[0])
	j, err1 := strconv.ParseUint(parts[1], 10, 16)
	k, err2 := strconv.ParseUint(parts[2], 10, 31)
	return topic, int(j), int(k), ok && err1 == nil && err2 == nil && deletedName(topic, int(j), int(k)) == name
}
