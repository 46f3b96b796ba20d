package wal

import (
	"errors"
	"fmt"
	"path/filepath"
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
		o.checkDedup(j, found)
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
	// What it says counts from now on: a broker that was killed may not have lived to make it durable.
	if _, err := o.io.run(ring.Op{Kind: ring.Sync, FD: op.FD}); err != nil {
		_, _ = o.io.run(ring.Op{Kind: ring.Close, FD: op.FD}) // the first error counts
		return fmt.Errorf("flush checkpoint table %s: %w", path, err)
	}
	w.fd, w.slotBytes, w.generation, w.point, w.rebuilt = op.FD, slot, o.table.Generation, o.table.Point, true
	if o.badSlot {
		return o.fallBack(path)
	}
	return nil
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
