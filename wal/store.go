package wal

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"time"

	"github.com/mortarmq/mortarmq/ring"
)

const (
	// DefaultSegmentMaxBytes is the size in bytes at which a segment is full.
	DefaultSegmentMaxBytes = 64 << 20
	// DefaultWriteOutBytes and DefaultWriteOutEvery start a write-out: this much is pending, or this long.
	DefaultWriteOutBytes = 32 << 20
	DefaultWriteOutEvery = time.Second
	// DefaultMaxDirtyBytes bounds what is written to files and not yet flushed. Without a bound the kernel lets it grow
	// and then stalls every writer for seconds.
	DefaultMaxDirtyBytes = 256 << 20
	// DefaultSweepEvery is the longest time between sweeps while there is something to sweep.
	DefaultSweepEvery = 30 * time.Second
	// DefaultSliceFiles files are written or flushed, then there is a pause of DefaultSlicePause for the journal.
	DefaultSliceFiles = 64
	DefaultSlicePause = time.Millisecond
	// DefaultDirectBytes is how much must wait for one partition for its whole blocks to go past the page cache: large
	// direct writes were measured at twice the rate of buffered ones, small ones are slower.
	DefaultDirectBytes = 1 << 20
	// DefaultMaxOpenFiles bounds the descriptors that the store keeps open.
	DefaultMaxOpenFiles = 4096
	// DefaultLogRollBytes is when the ledger or the metadata log goes on in a new file after a snapshot.
	DefaultLogRollBytes = 4 << 20

	// syncParallel is how many flushes of files the store has at the device: with 4 096 partitions, where sweeps decide how
	// much can be published, 8 were measured to bring a tenth more than 4 without hurting commits.
	syncParallel = 8
	// closeParallel is how many at a shutdown, which has no commits to hurt: file systems flush what comes at the same time
	// together, so that many partitions take a fraction of the time.
	closeParallel = 16
	// maxWriters bounds the streams whose write-out is under way at once.
	maxWriters = 32
	// maxReads bounds the cold reads under way at once; others wait in order.
	maxReads = 16

	// writeBuffers of writeBufferBytes gather small pieces; they are the store's own for its whole life, so that
	// a full pool can't keep it from freeing memory.
	writeBuffers     = 4
	writeBufferBytes = 1 << 20

	// keepCached is how long after a read of a partition's files what is written to them stays in the page cache.
	keepCached = time.Minute

	// statEvery is how often the free space is looked up.
	statEvery = time.Second
	// plentyBytes of free space need not be watched while nothing is written.
	plentyBytes = 4 << 30
	// statBytes written since are a reason to look it up at once: a second of publishing may take more than the reserve.
	statBytes = 16 << 20
)

// StoreOptions configures a Store. Zero values mean the defaults, where there are any.
type StoreOptions struct {
	// Dir is the data directory.
	Dir string
	// Journal is the number of the journal that the store stands behind.
	Journal int
	// SegmentMaxBytes is the size at which a segment is full, at most MaxSegmentBytes.
	SegmentMaxBytes int64
	// Pool provides the memory of cold reads and of the store's buffers.
	Pool *ring.Pool
	// Logger gets what an operator should know; nil means slog.Default().
	Logger *slog.Logger
	// Wall returns the wall-clock time in Unix milliseconds, for creation times and reports. It has no default.
	Wall func() uint64
	// Owns tells which partitions belong to this journal; nil means all.
	Owns func(topic, partition uint16) bool

	WriteOutBytes int64
	WriteOutEvery time.Duration
	MaxDirtyBytes int64
	SweepEvery    time.Duration
	SliceFiles    int
	SlicePause    time.Duration
	MaxOpenFiles  int
	LogRollBytes  int64
	// DirectBytes less than 0 means that nothing goes past the page cache. Reads do from a quarter of it on, where the records
	// are not in there.
	DirectBytes int64
	// ScrubBytes is how many bytes of full segments are read in a second to find rot; less than 0: none. A pass over all of them
	// begins ScrubAfter after the start, and ScrubEvery after the last one began.
	ScrubBytes             int64
	ScrubAfter, ScrubEvery time.Duration
}

// withDefaults returns o with its zero values replaced, or every problem with it.
func (o StoreOptions) withDefaults() (StoreOptions, error) {
	setDefault(&o.SegmentMaxBytes, DefaultSegmentMaxBytes)
	setDefault(&o.WriteOutBytes, DefaultWriteOutBytes)
	setDefault((*int64)(&o.WriteOutEvery), int64(DefaultWriteOutEvery))
	setDefault(&o.MaxDirtyBytes, DefaultMaxDirtyBytes)
	setDefault((*int64)(&o.SweepEvery), int64(DefaultSweepEvery))
	setDefault(&o.SliceFiles, DefaultSliceFiles)
	setDefault((*int64)(&o.SlicePause), int64(DefaultSlicePause))
	setDefault(&o.MaxOpenFiles, DefaultMaxOpenFiles)
	setDefault(&o.LogRollBytes, DefaultLogRollBytes)
	setDefault(&o.DirectBytes, DefaultDirectBytes)
	setDefault(&o.ScrubBytes, DefaultScrubBytes)
	setDefault((*int64)(&o.ScrubAfter), int64(DefaultScrubAfter))
	setDefault((*int64)(&o.ScrubEvery), int64(DefaultScrubEvery))
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Owns == nil {
		o.Owns = func(uint16, uint16) bool { return true }
	}
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf("store: "+format, args...)) }
	if o.Dir == "" {
		bad("no data directory given")
	}
	if o.Pool == nil {
		bad("no buffer pool given")
	}
	if o.Wall == nil {
		bad("no clock given")
	}
	if o.Journal < 0 || o.Journal > math.MaxUint16 {
		bad("journal %d is not between 0 and %d", o.Journal, math.MaxUint16)
	}
	if o.SegmentMaxBytes < 2*segmentHeaderLen || o.SegmentMaxBytes > MaxSegmentBytes {
		bad("segment size of %d bytes is not between %d and %d", o.SegmentMaxBytes, 2*segmentHeaderLen, int64(MaxSegmentBytes))
	}
	if o.MaxOpenFiles < maxWriters+maxReads+syncParallel {
		bad("%d open files are too few, at least %d", o.MaxOpenFiles, maxWriters+maxReads+syncParallel)
	}
	if o.SliceFiles < 1 || o.SlicePause < 0 || o.WriteOutEvery < 0 || o.SweepEvery < 0 || o.WriteOutBytes < 0 ||
		o.MaxDirtyBytes < 0 || o.LogRollBytes < 0 || o.ScrubAfter < 0 || o.ScrubEvery < 0 {
		bad("a threshold is negative")
	}
	return o, errors.Join(errs...)
}

// Store keeps the files behind one journal: it writes committed rounds out to segments and logs, flushes and
// checkpoints them so that the journal can be trimmed, publishes snapshots and serves cold reads. All methods belong to
// the goroutine that owns its disk; completions arrive inside that disk's Poll.
//
// Three clocks run independently: a write-out moves committed rounds from memory to files, a sweep flushes the files
// that were written, and at the end of each sweep the checkpoint table says so. What is not in the table after a crash
// comes from the journal again.
//
//	Add ──► runs per stream ──► write-out ──► page cache ──► sweep ──► MMCK ──► OnDurable, the journal is trimmed
//	                               │                          │
//	                               └► OnWritten: readable     └► OnSweepStart: the dedup snapshot for this sweep
//
// The owner calls Step after every Poll that completed something, after every other call, and at the time that Step
// returned.
type Store struct {
	o    StoreOptions
	disk Disk
	log  *slog.Logger
	now  time.Duration
	err  error

	journalDir string

	// inflight counts operations at the disk.
	inflight int
	tasks    []*task

	streams streamTable
	order   []*stream
	dropped map[uint16]struct{}
	topics  map[uint16]struct{} // topics whose directory is known to exist

	// added is the last round taken, written the last whose records are all in files, durable up to where the journal
	// isn't needed any more.
	added, written journalPoint
	durable        RoundNumber

	pending      int64 // bytes in runs
	oldest       time.Duration
	dirty        int64 // bytes written to files since their last flush
	dirtyStreams []*stream
	unsealed     []*stream
	dirtySegs    []*segment
	newDirs      map[string]struct{}
	pass         pass
	sweep        sweep
	table        tableWriter
	sweepWanted  bool
	lastSweep    time.Duration
	pauseUntil   time.Duration
	slice        int
	unpaced      bool // recovery and shutdown don't pause
	recovering   bool // nothing is swept before the whole journal is known to be good
	// noMetadata: the metadata is quarantined, and what is committed of it is not taken. held: so the checkpoint table stays as
	// it is, with its row for the metadata, and the journal keeps what is above: once good files are back, a start goes on
	// from them as if nothing had happened. A node that gets another one's metadata doesn't wait for that, see GiveUpMetadata.
	noMetadata, held bool
	// replicated: the journal is one of a cluster.
	replicated bool

	// all are the write buffers; buffers of them are free, buffer is being filled.
	all     []*writeBuffer
	buffers []*writeBuffer
	buffer  *writeBuffer
	// space and files have what waits for disk space and for descriptors; closes and flushes count the files that are being
	// closed, and flushed ahead of a sweep to be closed.
	space, files    shortage
	closes, flushes int

	pieces  []*piece
	waiting []*stream // streams that wait for a write buffer

	openFiles int
	idle      fileList
	indexes   indexCache

	reads   readQueue
	scrub   scrubber
	publish publisher
	snaps   snapshots
	drops   []*drop
	dropSeq int
	// restarts are the partitions that begin anew.
	restarts []*restart

	free     int64
	spent    int64 // written since free was looked up, which it counts already
	freeAt   time.Duration
	freeBusy bool

	reports []QuarantineReport // found by the recovery and not announced yet
	closing closeState

	onWritten    func(RoundNumber)
	onDurable    func(RoundNumber)
	onSweepStart func(RoundNumber)
	onQuarantine func(QuarantineReport)
}

// newStore returns a store without streams; Open fills it.
func newStore(o StoreOptions, disk Disk) (*Store, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	s := &Store{
		o: o, disk: disk, log: o.Logger, free: -1,
		streams: newStreamTable(), dropped: make(map[uint16]struct{}), topics: make(map[uint16]struct{}),
		newDirs: make(map[string]struct{}), journalDir: journalPath(o.Dir, o.Journal), table: tableWriter{fd: -1},
		space: shortage{what: "no space to write committed records to their segments; trying again until there is",
			over: "committed records get to their segments again"},
		files: shortage{what: "out of file descriptors; closing unused files and trying again: raise LimitNOFILE (ulimit -n)",
			over: "there are file descriptors again"},
	}
	for range writeBuffers {
		slab := o.Pool.Get(writeBufferBytes)
		if slab == nil {
			s.freeBuffers()
			return nil, fmt.Errorf("store: the buffer pool has no room for %d write buffers of %d bytes: %w",
				writeBuffers, writeBufferBytes, ErrNoMemory)
		}
		s.all = append(s.all, &writeBuffer{slab: slab})
	}
	s.buffers = append(s.buffers, s.all...)
	if err := s.publish.init(s); err != nil {
		s.freeBuffers()
		return nil, err
	}
	return s, nil
}

// freeBuffers gives the store's memory back. Nothing may be in flight.
func (s *Store) freeBuffers() {
	for _, w := range s.all {
		w.slab.Release()
	}
	s.all, s.buffers, s.buffer = nil, nil, nil
	s.publish.free()
	s.table.free()
	s.scrub.free()
}

// OnWritten sets the function that hears up to which round everything is in files and can be read from there.
func (s *Store) OnWritten(f func(RoundNumber)) { s.onWritten = f }

// OnDurable sets the function that hears up to which round the journal isn't needed any more.
func (s *Store) OnDurable(f func(RoundNumber)) { s.onDurable = f }

// OnSweepStart sets the function that hears which round a sweep is going to make durable. Each call must be answered by
// SaveSnapshot(SnapshotDedup) at that round or a later one: the sweep's checkpoint waits for it. Once StartClose was
// called nothing is waited for; in a cluster there is no checkpoint then, unless the snapshot includes all rounds.
func (s *Store) OnSweepStart(f func(RoundNumber)) { s.onSweepStart = f }

// OnQuarantine sets the function that hears of every partition that is quarantined from now on.
func (s *Store) OnQuarantine(f func(QuarantineReport)) { s.onQuarantine = f }

// Written returns the round up to which all records are in files and served by Read.
func (s *Store) Written() RoundNumber { return s.written.Round }

// Durable returns the round up to which the journal isn't needed any more.
func (s *Store) Durable() RoundNumber { return s.durable }

// PendingBytes returns the bytes of committed records that wait in memory to be written to files. The engine slows its
// producers down where they are too many.
func (s *Store) PendingBytes() int64 { return s.pending }

// spend counts bytes that are about to be written to files.
func (s *Store) spend(n int) {
	s.spent += int64(n)
	if s.free > 0 {
		s.free = max(s.free-int64(n), 0)
	}
}

// FreeBytes returns the space in bytes left on the file system, as of about a second ago less what was written to segments
// since: 0 while something waits for space, whatever the file system says (a quota may be what it has run into); -1 before
// it is known.
func (s *Store) FreeBytes() int64 {
	if s.space.full {
		return 0
	}
	return s.free
}

// Sweeping tells whether a sweep is under way.
func (s *Store) Sweeping() bool { return s.sweep.phase != sweepIdle }

// RequestSweep asks for a sweep as soon as possible; one that is under way doesn't count.
func (s *Store) RequestSweep() { s.sweepWanted = true }

// Err returns the error that stopped the store, a *FailedError, or nil. Reads go on after it.
func (s *Store) Err() error { return s.err }

// Bounds returns the first and last sequence of a stream's committed records known to the store. ok is false where the
// stream has none. Of a partition that began anew and has none since, last is the one before first.
func (s *Store) Bounds(id StreamID) (first, last Sequence, ok bool) {
	st := s.streams.get(id)
	if st == nil || st.next <= firstSequence {
		return 0, 0, false
	}
	return st.oldest(), st.next - 1, true
}

// fail makes the first error sticky: nothing more is written, so the journal keeps what the files may have lost.
func (s *Store) fail(op, path string, err error) {
	if s.err != nil {
		return
	}
	s.err = &FailedError{Op: op, Path: path, Err: err}
	s.log.Error("segments can't be written any more; the journal keeps what was committed, restart to recover",
		"op", op, "path", path, "err", err)
}

// Step starts whatever is due at now, a monotonic time of the owner's. It returns the time at which it wants to be called
// again at the latest, or Never.
func (s *Store) Step(now time.Duration) (next time.Duration) {
	s.now = now
	s.files.step(s)
	if s.err == nil && !s.closing.givenUp {
		s.space.step(s)
		s.stepSpace()
		s.stepSweepClock()
		s.stepPass()
		s.stepSweep()
		s.stepDrops()
		s.stepRestarts()
		s.unlistTable()
		s.publish.step()
	} else {
		s.failLoads()
	}
	s.stepReads()
	if s.err == nil {
		s.stepScrub()
	}
	s.stepClose()
	return s.nextStep()
}

func (s *Store) nextStep() time.Duration {
	next := s.files.next()
	if s.err != nil {
		return max(next, s.now)
	}
	at := func(t time.Duration) { next = min(next, t) }
	if s.sweepDue() && !s.pass.active && !s.closing.givenUp {
		return s.now // wanted by what came behind the passes in this step
	}
	if s.pauseUntil > s.now && (s.pass.active || s.sweep.phase != sweepIdle || len(s.drops) > 0) {
		at(s.pauseUntil)
	}
	// What is due already waits for something at the disk: a pass for its writes, a sweep for the pass before it.
	if s.pending > 0 && !s.pass.active && s.dirty < s.o.MaxDirtyBytes {
		at(s.oldest + s.o.WriteOutEvery)
	}
	if s.unswept() && !s.pass.active && s.sweep.phase == sweepIdle && !s.closing.started {
		at(s.lastSweep + s.o.SweepEvery)
	}
	at(s.space.next())
	if !s.scrub.busy && !s.closing.started {
		at(s.scrub.at)
	}
	if !s.freeBusy && !s.closing.started && (s.free < plentyBytes || s.pending > 0) {
		at(s.freeAt)
	}
	if s.closing.published && len(s.publish.queue) > 0 {
		at(s.closing.since + closeRedundant)
	}
	return max(next, s.now)
}

// paused tells whether a slice of work is used up and its pause not over.
func (s *Store) paused() bool {
	if s.unpaced {
		return false
	}
	if s.slice >= s.o.SliceFiles {
		s.slice = 0
		s.pauseUntil = s.now + s.o.SlicePause
	}
	return s.now < s.pauseUntil
}

// stepSpace looks the free space up. A shutdown doesn't want to know, and would wait for it.
func (s *Store) stepSpace() {
	if s.closing.started || s.freeBusy || s.now < s.freeAt && s.spent < statBytes {
		return
	}
	s.freeBusy = true
	s.do(ring.Op{Kind: ring.StatFS, Path: s.o.Dir}, s.spaceFound)
}

func (s *Store) spaceFound(op *ring.Op) {
	s.freeBusy = false
	s.freeAt, s.spent = s.now+statEvery, 0
	if op.Err == nil {
		s.free = op.Size
	}
}

// task is one operation with what follows it.
type task struct {
	op   ring.Op
	s    *Store
	then func(*ring.Op)
}

// do submits a copy of op; then runs with the completed one, which is valid until it returns. For everything that is not
// per record.
func (s *Store) do(op ring.Op, then func(*ring.Op)) {
	var t *task
	if n := len(s.tasks); n > 0 {
		t = s.tasks[n-1]
		s.tasks = s.tasks[:n-1]
		done := t.op.Done
		t.op = op
		t.op.Done = done
	} else {
		t = &task{op: op, s: s}
		t.op.Done = t.done
	}
	t.then = then
	s.inflight++
	s.disk.Submit(&t.op)
}

func (t *task) done(op *ring.Op) {
	s, then := t.s, t.then
	t.then = nil
	s.inflight--
	then(op)
	op.Buf, op.Names = nil, nil
	s.tasks = append(s.tasks, t)
}
