package wal

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/mortarmq/mortarmq/ring"
)

const (
	// openParallel is how many partitions are looked at at once.
	openParallel = 32
	// spillBytes is how much of the replayed journal waits in memory before it is written to files.
	spillBytes = 8 << 20
)

// Open recovers a journal and the files behind it, or makes them. Recovery starts at the checkpoints and replays the
// journal above them; what lies below isn't read, so that its time doesn't depend on how much that is. Records are handed
// to h and, where their files don't have them yet, written out in passing.
//
// disk drives the recovery and is the store's afterwards; the journal gets its own by SetDisk. A partition whose files
// can't be trusted is quarantined and reported, so is the metadata; everything else that is wrong (a newer format, a
// damaged journal or ledger) is an error and leaves the files as they are.
func Open(o OpenOptions, disk Waiter, h Handler) (*Journal, *Store, *Recovery, error) {
	begin := o.now()
	if o.Journal.Dir == "" {
		o.Journal.Dir = journalPath(o.Store.Dir, o.Journal.ID)
	}
	if o.Journal.ID != o.Store.Journal {
		return nil, nil, nil, fmt.Errorf("open: the store is for journal %d, not %d", o.Store.Journal, o.Journal.ID)
	}
	s, err := newStore(o.Store, disk)
	if err != nil {
		return nil, nil, nil, err
	}
	s.journalDir = o.Journal.Dir
	o.Journal.Stamped, s.replicated = o.Replicated, o.Replicated
	op := &opener{o: o, disk: disk, io: newBlockingDisk(disk), s: s, h: h, rec: &Recovery{
		FirstSequences: map[StreamID]Sequence{}, LastSequences: map[StreamID]Sequence{}, LastTimes: map[StreamID]uint64{},
	}}
	j, err := op.open()
	if err != nil {
		op.abandon()
		return nil, nil, nil, fmt.Errorf("open %s: %w", o.Store.Dir, err)
	}
	op.rec.Duration = o.now() - begin
	return j, s, op.rec, nil
}

func (o *OpenOptions) now() time.Duration {
	if o.Now == nil {
		return 0
	}
	return o.Now()
}

// opener is one recovery.
type opener struct {
	o    OpenOptions
	disk Waiter
	io   *blockingDisk
	s    *Store
	h    Handler
	rec  *Recovery

	table table
	// found says that there is a table. Then whatever it doesn't name came after it and is in the journal. Without one it
	// is so if the journal goes back to its first round; otherwise the files must be scanned to know where they end.
	found bool
	scan  bool
	read  bool // the files were looked at
	// badSlot says that one of the table's slots can't be read: torn by a power cut, or damaged since.
	badSlot bool
	rows    map[StreamID]checkpoint
	// floors are the rows of the older slot where the newer one is lost: streams go further than that.
	floors  map[StreamID]checkpoint
	begins  map[StreamID]Sequence // partitions that began anew
	deleted map[uint16]struct{}
	scanned []scannedStream
	logs    [Metadata + 1]*logState
	// unwritten are the rounds whose messages may not be in files yet, each with a reference.
	unwritten []*Round

	// gate decides, in a cluster, which rounds are committed; given is the newest one that was.
	gate  gate
	given RoundNumber
}

// scannedStream is a stream without a checkpoint: where reading it ended, and why.
type scannedStream struct {
	st   *stream
	next Sequence
	err  error
}

func (o *opener) open() (*Journal, error) {
	s := o.s
	s.recovering, s.unpaced = true, true
	for _, step := range []func() error{o.makeLayout, o.readTable, o.readTopics, o.readDedup} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	if o.found {
		if err := o.readFiles(); err != nil {
			return nil, err
		}
	}
	r := replay{from: o.table.Point.Round, round: o.round}
	if o.o.Replicated {
		o.gate.give = o.committed
		o.gate.resume(o.table.Point.Log)
		o.given = o.table.Point.Round
		r.round, r.committed, r.suspect = o.gate.take, func() RoundNumber { return o.given }, o.o.Suspect
	}
	j, found, err := recoverJournal(o.disk, o.o.Journal, r)
	if err != nil {
		return nil, err
	}
	if !o.read {
		// Not one round: the journal is new.
		o.scan = true
		if err = o.readFiles(); err == nil && o.o.Replicated {
			err = o.nothingThere()
		}
	}
	if err == nil {
		err = o.settle(found)
	}
	if err != nil {
		return nil, errors.Join(err, j.Close(o.disk))
	}
	o.rec.Epoch = j.Epoch()
	return j, nil
}

// errNoTable refuses a cluster node's files without a checkpoint table whose journal doesn't go back to its first round.
// A node on its own reads the files to see how far they go; here they may lack what others count on this one to have.
var errNoTable = errors.New("there is no readable checkpoint table, and the journal doesn't go back to its first round: " +
	"how far the files here can be relied on isn't known")

// nothingThere refuses files of a cluster node whose journal has not one round.
func (o *opener) nothingThere() error {
	for _, st := range o.s.order {
		if st.next > firstSequence || st.bad != nil {
			return &CorruptionError{Path: st.dir, Stream: st.id, Sequence: st.next, Cause: errNoRounds}
		}
	}
	return nil
}

// readFiles finds out where every stream's files end.
func (o *opener) readFiles() error {
	o.read = true
	for _, step := range []func() error{o.readPartitions, o.readLedger, o.readMetadata} {
		if err := step(); err != nil {
			return err
		}
	}
	o.s.durable = o.table.Point.Round
	o.s.added, o.s.written = o.table.Point, o.table.Point
	return nil
}

// makeLayout makes the directories, durably.
func (o *opener) makeLayout() error {
	dirs := []string{
		o.s.o.Dir, o.s.journalDir, filepath.Join(o.s.o.Dir, topicsDir),
		filepath.Join(o.s.o.Dir, ledgerDir, strconv.Itoa(o.s.o.Journal)),
	}
	if o.s.o.Journal == 0 {
		dirs = append(dirs, filepath.Join(o.s.o.Dir, metadataDir))
	}
	for _, dir := range dirs {
		if err := makeDir(o.io, dir); err != nil {
			return err
		}
		// What is found under its name counts, and what it replaces may be gone by then: a start that was killed may have
		// left the name undurable.
		if _, err := o.io.run(ring.Op{Kind: ring.SyncDir, Path: dir}); err != nil {
			return err
		}
	}
	return nil
}

// readFile returns a whole file in Go's memory.
func (o *opener) readFile(path string, limit int64) ([]byte, error) {
	op, err := o.io.run(ring.Op{Kind: ring.Open, Path: path, Flags: ring.ReadOnly})
	if err != nil {
		return nil, err
	}
	fd := op.FD
	b, err := o.readFD(path, fd, limit)
	_, closeErr := o.io.run(ring.Op{Kind: ring.Close, FD: fd})
	return b, errors.Join(err, closeErr)
}

func (o *opener) readFD(path string, fd int, limit int64) ([]byte, error) {
	op, err := o.io.run(ring.Op{Kind: ring.Stat, FD: fd})
	if err != nil {
		return nil, err
	}
	size := op.Size
	if err := tooLong(size, limit); err != nil {
		return nil, &CorruptionError{Path: path, Cause: err}
	}
	slab := o.s.o.Pool.Get(int(min(size, scanBytes)))
	if slab == nil {
		return nil, ErrNoMemory
	}
	defer slab.Release()
	b := make([]byte, 0, size)
	for int64(len(b)) < size {
		part := slab.Bytes()[:min(size-int64(len(b)), scanBytes)]
		op, err := o.io.run(ring.Op{Kind: ring.Read, FD: fd, Off: int64(len(b)), Buf: part})
		if err != nil {
			return nil, err
		}
		if op.N == 0 {
			break
		}
		b = append(b, part[:op.N]...)
	}
	return b, nil
}

// readTable reads the checkpoint table. A table without a valid slot is no table: everything is found by scanning, and
// what the journal doesn't have any more is missed there.
func (o *opener) readTable() error {
	o.rows, o.begins = map[StreamID]checkpoint{}, map[StreamID]Sequence{}
	path := filepath.Join(o.s.journalDir, tableFile)
	b, err := o.readFile(path, 2*int64(tableSlotBytes(maxTableRows)))
	if notExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	slot := len(b) / 2 &^ (ring.BlockSize - 1)
	for i := range 2 {
		t, ok, err := decodeTable(b[i*slot:(i+1)*slot], o.s.o.Journal)
		var version *VersionError
		switch {
		case errors.As(err, &version):
			return wrapFile(path, nil, err)
		case err != nil:
			o.badSlot = true
			o.s.log.Warn("a slot of the checkpoint table was torn or is damaged; the other one counts",
				"slot", i, "err", wrapFile(path, nil, err))
		case ok && t.SlotBytes == slot && (!o.found || t.Generation > o.table.Generation):
			o.table, o.found = t, true
		}
	}
	if !o.found {
		o.s.log.Error("the checkpoint table can't be read; segments are scanned instead", "path", path)
		return nil
	}
	for _, r := range o.table.Rows {
		o.rows[r.Stream] = r.checkpoint
	}
	for _, b := range o.table.Begins {
		o.begins[b.Stream] = b.First
	}
	op, err := o.io.run(ring.Op{Kind: ring.Open, Path: path})
	if err != nil {
		return err
	}
	w := &o.s.table
	w.fd, w.slotBytes, w.generation, w.point, w.rebuilt = op.FD, slot, o.table.Generation, o.table.Point, true
	if o.badSlot {
		return o.fallBack(path)
	}
	return nil
}

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
		if st := o.s.streams[r.Stream]; st != nil {
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

// round takes a round of the journal of a node on its own.
func (o *opener) round(r *Round) error {
	if r.stamped {
		return &CorruptionError{Path: o.s.journalDir, Round: r.Number, Cause: errPosition}
	}
	return o.committed(r)
}

// committed takes a committed round of the journal that may not be in the files.
func (o *opener) committed(r *Round) error {
	o.given = r.Number
	if !o.read {
		o.scan = r.Number > 1
		if o.scan && o.o.Replicated {
			return &CorruptionError{Path: filepath.Join(o.s.journalDir, tableFile), Round: r.Number, Cause: errNoTable}
		}
		if err := o.readFiles(); err != nil {
			return err
		}
	}
	if err := o.handOver(r); err != nil {
		return err
	}
	o.rec.Rounds++
	o.rec.Bytes += int64(r.Bytes())
	r.Retain()
	before := o.s.pending
	if err := o.s.Add(r); err != nil {
		return err
	}
	if o.s.pending > before {
		o.keep(r)
	}
	if o.s.pending >= spillBytes {
		return o.spill()
	}
	return nil
}

// handOver gives the records of a round to the handler.
func (o *opener) handOver(r *Round) error {
	var rec Record
	for i := range r.Entries {
		e := &r.Entries[i]
		if e.Stream.Kind == Replica {
			continue
		}
		if e.Stream.Kind == Messages {
			if _, gone := o.deleted[e.Stream.Topic]; gone || uint64(r.Number) <= o.s.snaps.dedup {
				continue
			}
		}
		data := r.Data(e)
		for len(data) > 0 {
			data = data[PeekRecord(data, &rec):]
			err := o.record(e.Stream, &rec, true)
			if err != nil && e.Stream.Kind == Metadata && untrusted(err) {
				err = o.quarantineMetadata(err)
			}
			if err != nil {
				return err
			}
			if e.Stream.Kind == Messages {
				o.rec.LastTimes[e.Stream] = rec.TimestampMs
			}
		}
	}
	return nil
}

// settle ends the recovery once the journal is known to be good.
func (o *opener) settle(found *journalRecovery) error {
	s := o.s
	if err := o.checkLogs(); err != nil {
		return err
	}
	o.forgetTopics()
	for i := range o.scanned {
		if c := &o.scanned[i]; c.err != nil && c.st.next == c.next && !c.st.dropped {
			// Nothing in the journal takes the place of what can't be read.
			c.st.abandonActive()
			s.quarantine(c.st, c.err)
		}
	}
	for _, st := range slices.Clone(s.order) {
		if err := o.unaccounted(st, 0); err != nil && st.id.Kind == Messages {
			st.stale = nil
			s.quarantine(st, err)
		}
	}
	if err := o.spill(); err != nil {
		return err
	}
	if err := o.cutScanned(); err != nil {
		return err
	}
	if err := o.removeStale(); err != nil {
		return err
	}
	for topic := range o.deleted {
		o.rec.LastTopic = max(o.rec.LastTopic, topic)
	}
	for _, st := range s.order {
		if st.id.Kind == Messages && (st.next > 1 || st.bad != nil) {
			o.rec.LastTopic = max(o.rec.LastTopic, st.id.Topic)
		}
		if st.next <= 1 {
			continue
		}
		o.rec.FirstSequences[st.id] = st.oldest()
		o.rec.LastSequences[st.id] = st.next - 1
		if st.id.Kind == Messages {
			o.rec.LastTimes[st.id] = max(o.rec.LastTimes[st.id], st.lastMs)
		}
	}
	if err := o.lookUpSpace(); err != nil {
		return err
	}
	o.rec.Unwritten, o.unwritten = o.unwritten, nil
	o.announce()
	o.rec.Torn, o.rec.Suspect = found.Torn, found.Suspect
	if o.o.Replicated {
		o.rec.Pending, o.rec.Log = o.gate.pending, LogEnd{Last: o.gate.last, Committed: o.gate.handed}
		o.gate.pending = nil
	}
	s.recovering, s.unpaced = false, false
	// What was found by scanning gets its checkpoints at once: a further start could take it for what the journal has.
	s.sweepWanted = o.rec.Bytes > 0 || len(s.drops) > 0 || o.scan && s.dirty > 0
	return nil
}

// cutScanned ends the files of streams that had no checkpoint on the block boundary that their next one will name.
func (o *opener) cutScanned() error {
	s := o.s
	for _, st := range s.order {
		if !st.cut || st.saved.Next > 0 || st.active == nil {
			continue
		}
		done := false
		s.acquire(st.active, func(err error) {
			if err != nil {
				s.fail("open segment", st.path(st.active), err)
				return
			}
			s.cutActive(st, func() {
				s.release(st.active)
				done = true
			})
		})
		if err := o.io.waitFor(func() bool { return done || s.inflight == 0 }); err != nil {
			return err
		}
		if !done {
			// Later would be too late: the file goes on from here.
			return cmp.Or(s.err, fmt.Errorf("cutting %s: no space; make room and start again", st.path(st.active)))
		}
	}
	return s.err
}

// removeStale removes the files that no checkpoint knew. All they held was in the journal and is in other files by now.
// It is durable before the next checkpoint, which would know them.
func (o *opener) removeStale() error {
	for _, st := range o.s.order {
		var paths []string
		if st.staleMQC {
			paths = append(paths, filepath.Join(st.dir, checkpointFile))
		}
		if st.staleActive {
			paths = append(paths, filepath.Join(st.dir, ledgerActive))
		}
		for _, base := range st.stale {
			paths = append(paths, filepath.Join(st.dir, logName(st.id.Kind, base, false)))
			if st.id.Kind == Messages {
				paths = append(paths, st.indexPath(base))
			}
		}
		if len(paths) == 0 {
			continue
		}
		for _, path := range paths {
			if _, err := o.io.run(ring.Op{Kind: ring.Remove, Path: path}); err != nil && !notExist(err) {
				return err
			}
		}
		st.stale, st.staleActive, st.staleMQC = nil, false, false
		if _, err := o.io.run(ring.Op{Kind: ring.SyncDir, Path: st.dir}); err != nil {
			return err
		}
	}
	return nil
}

// abandon gives everything back after a failure.
func (o *opener) abandon() {
	s := o.s
	o.gate.drop(0)
	if s.err == nil {
		s.err = ErrFailed // nothing new begins
	}
	wait := func() bool {
		for s.inflight > 0 {
			if o.disk.WaitOne() != nil {
				return false
			}
		}
		return true
	}
	if !wait() {
		return // what is in flight still owns its memory
	}
	s.closeAll()
	s.discardAll()
	for _, r := range o.unwritten {
		r.Release()
	}
	if wait() {
		s.freeBuffers()
	}
}
