package wal

import (
	"errors"
	"maps"
	"path/filepath"
	"slices"

	"github.com/mortarmq/mortarmq/ring"
)

// readTopics lists the topics' directories and goes on with deletions that a crash has interrupted.
func (o *opener) readTopics() error {
	o.deleted = map[uint16]struct{}{}
	dir := filepath.Join(o.s.o.Dir, topicsDir)
	op, err := o.io.run(ring.Op{Kind: ring.ReadDir, Path: dir})
	if err != nil {
		return err
	}
	for _, name := range op.Names {
		if topic, ok := parseID(name); ok {
			o.s.topics[topic] = struct{}{}
			continue
		}
		topic, journal, n, ok := parseDeletedName(name)
		if !ok {
			continue
		}
		o.deleted[topic] = struct{}{}
		o.s.dropped[topic] = struct{}{}
		if journal == o.s.o.Journal {
			o.s.dropSeq = max(o.s.dropSeq, n)
			o.s.drops = append(o.s.drops, &drop{topic: topic, phase: dropSweeping, path: filepath.Join(dir, name)})
		}
	}
	if len(o.s.drops) > 0 {
		// The renaming may not have been durable yet.
		if _, err := o.io.run(ring.Op{Kind: ring.SyncDir, Path: dir}); err != nil {
			return err
		}
	}
	for _, topic := range slices.Sorted(maps.Keys(o.s.topics)) {
		if _, renamed := o.deleted[topic]; renamed || o.isDeleted(topic) {
			o.forgetTopic(topic)
		}
	}
	return nil
}

// isDeleted tells whether the metadata that was read so far says that a topic was deleted.
func (o *opener) isDeleted(topic uint16) bool {
	return o.o.Deleted != nil && o.rec.Metadata == nil && o.o.Deleted(topic)
}

// forgetTopic begins the deletion of a topic that was deleted before a crash. Nothing is changed on the disk before the
// recovery is over.
func (o *opener) forgetTopic(topic uint16) {
	o.s.log.Info("going on with the deletion of a topic", "topic", topic)
	o.deleted[topic] = struct{}{}
	delete(o.s.dropped, topic) // of a directory that has its new name already
	o.s.DropTopic(topic)
}

// forgetTopics does so for the topics that the journal was found to have deleted.
func (o *opener) forgetTopics() {
	topics := maps.Clone(o.s.topics)
	for _, st := range o.s.order {
		if st.id.Kind == Messages {
			topics[st.id.Topic] = struct{}{}
		}
	}
	for _, topic := range slices.Sorted(maps.Keys(topics)) {
		if _, known := o.deleted[topic]; !known && o.isDeleted(topic) {
			o.forgetTopic(topic)
		}
	}
}

// announce tells of the partitions that are quarantined.
func (o *opener) announce() {
	for _, r := range o.s.reports {
		if st := o.s.streams.get(r.Stream); st != nil {
			o.s.announce(st, r)
			o.rec.Quarantined = append(o.rec.Quarantined, r)
		}
	}
	o.s.reports = nil
}

// readPartitions finds every partition of the journal and where it is to go on.
func (o *opener) readPartitions() error {
	var ids []StreamID
	for _, topic := range slices.Sorted(maps.Keys(o.s.topics)) {
		if _, gone := o.deleted[topic]; gone {
			continue
		}
		op, err := o.io.run(ring.Op{Kind: ring.ReadDir, Path: topicDir(o.s.o.Dir, topic)})
		if err != nil {
			return err
		}
		for _, name := range op.Names {
			if p, ok := parseID(name); ok {
				ids = append(ids, StreamID{Kind: Messages, Topic: topic, Partition: p})
			}
		}
	}
	for _, rows := range []map[StreamID]checkpoint{o.rows, o.floors} {
		for id := range rows {
			if _, gone := o.deleted[id.Topic]; id.Kind == Messages && !gone {
				ids = append(ids, id)
			}
		}
	}
	for id := range o.begins {
		if _, gone := o.deleted[id.Topic]; !gone {
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, compareStreams)
	ids = slices.Compact(ids)
	ids = slices.DeleteFunc(ids, func(id StreamID) bool {
		_, listed := o.rows[id]
		_, begun := o.begins[id]
		_, known := o.floors[id]
		return !listed && !begun && !known && !o.s.o.Owns(id.Topic, id.Partition)
	})
	var failed error
	running, next := 0, 0
	for next < len(ids) || running > 0 {
		for next < len(ids) && running < openParallel && failed == nil {
			running++
			p := o.newPartition(ids[next])
			next++
			p.read(func(err error) {
				running--
				failed = errors.Join(failed, err)
			})
		}
		if failed != nil {
			next = len(ids)
		}
		if running == 0 {
			continue
		}
		if err := o.disk.WaitOne(); err != nil {
			return err
		}
	}
	return failed
}

func compareStreams(a, b StreamID) int {
	return (int(a.Kind)<<32 | int(a.Topic)<<16 | int(a.Partition)) - (int(b.Kind)<<32 | int(b.Topic)<<16 | int(b.Partition))
}
