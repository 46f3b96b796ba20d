// Package engine is the broker without its network: shards that make publishes durable, the store behind each journal,
// and the coordinator that serves consumers.
//
// The goroutines and what each of them owns:
//
//	event loop   an Ingress; checks requests and hands them over in batches
//	shard        a wal.Journal and a ring: appends, grouped flushes, producer windows, answers to PUB
//	store        a wal.Store and a ring: segments, sweeps, checkpoints, cold reads; one behind each shard
//	coordinator  metadata, groups, the delivery ledger, delivery (engine/coord)
//
// They share nothing but committed rounds, which are immutable and reference-counted, and a few atomic counters. See
// docs/design.md for the way of a publish and of a delivery through them.
package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/engine/coord"
	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal"
)

// ringEntries is the depth of each ring. A shard has a few operations in flight, a store up to a few hundred.
const ringEntries = 256

// Engine is a running broker. Create it with Open, end it with Close.
type Engine struct {
	opts    Options
	log     *slog.Logger
	started time.Time
	epoch   atomic.Uint32 // wal.Epoch; in a cluster the leader's
	backend string
	reason  string

	pools  []*ring.Pool
	shards []*shard
	stores []*storeLoop
	coord  *coord.Coordinator
	// sleeper is what the coordinator's goroutine sleeps on; nil without one (Options.Stepped).
	sleeper *ring.Sleeper

	stopCoord  context.CancelFunc
	coordBegun bool // of a stepped engine
	coordDone  chan struct{}

	mu      sync.Mutex
	failure error // first of a shard, a store or the coordinator
	closed  bool
	// dedupLost says why recovery found the producers' windows incomplete. It is set before others see the engine.
	dedupLost error
	// quarantined is what is not served because its files are damaged.
	quarantined []wal.QuarantineReport
}

// Open recovers the data directory and starts the broker's goroutines. It returns once requests can be served. The
// caller must hold the directory's lock.
func Open(opts Options) (*Engine, error) {
	if opts.Logger == nil {
		opts.Logger = slog.Default()
	}
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	journals := 0
	if c := opts.cluster; c != nil {
		journals = c.logs // the cluster has agreed on it
	} else {
		layout, err := openLayout(opts.DataDir, opts.Shards)
		if err != nil {
			return nil, err
		}
		journals = layout.Journals
	}
	e := &Engine{opts: opts, log: opts.Logger, started: time.Now(), coordDone: make(chan struct{})}
	var sleeper coord.Sleeper
	if !opts.Stepped {
		var err error
		if e.sleeper, err = ring.NewSleeper(); err != nil {
			return nil, err
		}
		sleeper = e.sleeper
	}
	e.coord = coord.New(coord.Options{
		Sleeper:                 sleeper,
		NodeID:                  opts.cluster.node(),
		Standby:                 opts.cluster != nil,
		PartitionDefaultCount:   opts.PartitionDefaultCount,
		DeliveryMaxAttempts:     opts.DeliveryMaxAttempts,
		DeliveryLease:           opts.DeliveryLease,
		PollMaxWait:             opts.PollMaxWait,
		CreditInitialCount:      opts.CreditInitialCount,
		MetadataSnapshotRecords: opts.MetadataSnapshotRecords,
		TailBytes:               opts.TailBytes,
		Seed:                    opts.Seed,
		Logger:                  opts.Logger,
		Now:                     e.now,
		WallMs:                  e.wallMs,
	}, engineLog{e}, engineStore{e}, e.place, journals)
	for i := range journals {
		e.pools = append(e.pools, ring.NewPoolFrom(opts.Heap, opts.MemoryBytes))
		e.shards = append(e.shards, newShard(e, i))
		e.stores = append(e.stores, newStoreLoop(e, i))
		e.shards[i].store = e.stores[i]
	}
	if err := e.recover(); err != nil {
		e.abandon()
		return nil, err
	}
	if err := e.start(); err != nil {
		e.abandon()
		return nil, err
	}
	return e, nil
}

// recovery is the wal.Handler of one journal: it folds what was on disk into the coordinator and the producer windows.
type recovery struct {
	e       *Engine
	journal int
}

func (h recovery) Snapshot(kind wal.SnapshotKind, position uint64, data []byte) error {
	switch kind {
	case wal.SnapshotMetadata:
		return h.e.coord.RestoreMetadata(position, data)
	case wal.SnapshotCursors:
		return h.e.coord.RestoreLedger(h.journal, position, data)
	case wal.SnapshotDedup:
		return h.e.shards[h.journal].dedup.restore(data)
	default:
		return fmt.Errorf("snapshot of an unknown kind %d", kind)
	}
}

func (h recovery) Record(s wal.StreamID, r *wal.Record, fromJournal bool) error {
	switch s.Kind {
	case wal.Metadata:
		return h.e.coord.ReplayMetadata(r)
	case wal.Ledger:
		return h.e.coord.ReplayLedger(h.journal, r)
	case wal.Messages:
		if fromJournal {
			h.e.shards[h.journal].dedup.replay(s, r)
		}
		return nil
	default:
		return fmt.Errorf("record of an unknown stream kind %d", s.Kind)
	}
}

// recover opens every journal in turn. The store goroutines do it, each on the ring that it keeps.
func (e *Engine) recover() error {
	var recoveries []*wal.Recovery
	var epoch wal.Epoch
	for i, l := range e.stores {
		var o opened
		if e.opts.Stepped {
			o = l.open(e.openOptions(i), recovery{e: e, journal: i})
		} else {
			report := make(chan opened, 1)
			go l.run(e.openOptions(i), recovery{e: e, journal: i}, report)
			o = <-report
		}
		if o.err != nil {
			return o.err
		}
		e.shards[i].journal = o.journal
		recoveries = append(recoveries, o.recovery)
		epoch = max(epoch, o.recovery.Epoch)
		e.report(i, o.recovery)
	}
	if e.opts.cluster != nil {
		if err := e.beyondRepair(); err != nil {
			return err
		}
		epoch = 0
		for _, r := range recoveries {
			epoch = max(epoch, r.Log.Last.Epoch)
		}
	}
	e.epoch.Store(uint32(epoch))
	lastTopic := uint16(0)
	for i, r := range recoveries {
		lastTopic = max(lastTopic, r.LastTopic)
		s := e.shards[i]
		s.epoch, s.published = epoch, r.Committed
		for id, last := range r.LastSequences {
			switch id.Kind {
			case wal.Ledger:
				s.ledgerSeq = last
			case wal.Metadata:
				s.metaSeq = last
			case wal.Messages:
				p := s.partitionOf(id.Topic, id.Partition)
				p.last, p.committed, p.lastMs = last, last, r.LastTimes[id]
				e.coord.SetBounds(id.Topic, id.Partition, r.FirstSequences[id], last)
			case wal.Replica:
				// Positions of rounds are no records of a stream.
			}
		}
	}
	e.coord.Epoch(epoch)
	if err := e.coord.CheckIDs(lastTopic); err != nil && !e.opts.cluster.behindOthers() {
		return err
	}
	e.knowDeleted()
	if c := e.opts.cluster; c != nil {
		for i, r := range recoveries {
			if err := c.join(e.shards[i], r); err != nil {
				return err
			}
		}
		e.restoreTails(recoveries)
		return nil // the recovery goes on until this node leads
	}
	if err := e.coord.Recovered(); err != nil {
		return err
	}
	e.restoreTails(recoveries)
	return nil
}

// knowDeleted tells shards and stores which topics are deleted already. In a cluster records of them may still come, in rounds from
// before the deletion, behind the snapshot that says so.
func (e *Engine) knowDeleted() {
	for i, s := range e.shards {
		s.dedup.dropTopics(e.coord.TopicDeleted)
		for topic := range int(e.coord.LastTopic()) {
			if id := uint16(topic + 1); e.coord.TopicDeleted(id) {
				s.gone.add(id)
				e.stores[i].store.KnowDeleted(id)
			}
		}
	}
}

// beyondRepair returns an error, a wal.ErrCorrupt, where a node of a cluster can't get what is damaged from the others file by
// file: a partition that begins anew needs a checkpoint, and there is none while the metadata is quarantined; and without the
// producers' windows there would be none that could be saved.
func (e *Engine) beyondRepair() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.dedupLost != nil {
		return fmt.Errorf("%w: the producers' windows: %w", wal.ErrCorrupt, e.dedupLost)
	}
	isMetadata := func(q wal.QuarantineReport) bool { return q.Stream.Kind == wal.Metadata }
	i := slices.IndexFunc(e.quarantined, isMetadata)
	if i < 0 || !slices.ContainsFunc(e.quarantined, func(q wal.QuarantineReport) bool { return !isMetadata(q) }) {
		return nil
	}
	return fmt.Errorf("%w: the metadata and partitions are quarantined: %s", wal.ErrCorrupt, e.quarantined[i].Cause)
}

// restoreTails gives the coordinator what a full disk keeps from its segments.
func (e *Engine) restoreTails(recoveries []*wal.Recovery) {
	for i, r := range recoveries {
		if len(r.Unwritten) == 0 {
			continue
		}
		e.log.Warn("the disk is full: publishes are refused until there is space; everything can be read", "journal", i)
		e.shards[i].unwritten = r.Unwritten[len(r.Unwritten)-1].Number
		for _, round := range r.Unwritten {
			e.coord.RestoreTail(i, round)
		}
		r.Unwritten = nil
		e.coord.Written(i, e.stores[i].store.Written())
	}
}

// report tells the operator what the recovery of a journal found, and keeps what is not served.
func (e *Engine) report(journal int, r *wal.Recovery) {
	log := e.log.With("journal", journal)
	log.Info("recovered", "epoch", r.Epoch, "rounds", r.Rounds, "bytes", r.Bytes, "took", r.Duration)
	if r.Torn != nil {
		log.Info("an append that never became durable was cut off the journal", "what", r.Torn)
	}
	if r.DedupLost != nil {
		e.dedupLost = r.DedupLost
		log.Warn("the windows of producers are incomplete: a publish from before the crash that is sent again may be stored twice", "err", r.DedupLost)
	}
	if c := e.opts.cluster; c != nil && (r.Metadata != nil || len(r.Quarantined) > 0) {
		c.damaged(journal)
	}
	if r.Metadata != nil {
		e.coord.Quarantine(r.Metadata.Cause)
		e.quarantine(*r.Metadata)
	}
	for _, q := range r.Quarantined {
		e.quarantine(q)
		log.Error("quarantined: not served until it is repaired", "stream", q.Stream, "path", q.Path, "report", q.Report, "cause", q.Cause)
		if q.Stream.Kind == wal.Messages {
			e.shards[journal].partitionOf(q.Stream.Topic, q.Stream.Partition).refusal = quarantinedText
		}
	}
}

// quarantine notes what is not served any more.
func (e *Engine) quarantine(r wal.QuarantineReport) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.quarantined = append(e.quarantined, r)
}

// shardDir is where everything of a shard lives: the first in the data directory itself, each further one in a directory
// of its own below it, which can be a mount point of another device.
func (e *Engine) shardDir(i int) string {
	if i == 0 {
		return e.opts.DataDir
	}
	return filepath.Join(e.opts.DataDir, fmt.Sprintf("shard-%d", i))
}

func (e *Engine) openOptions(i int) wal.OpenOptions {
	dir := e.shardDir(i)
	o := wal.OpenOptions{
		Journal: wal.JournalOptions{
			Dir: filepath.Join(dir, "journal", fmt.Sprint(i)), ID: i,
			MaxRoundBytes: e.opts.MaxRoundBytes,
			FileBytes:     e.opts.JournalFileBytes, MinFiles: e.opts.JournalMinFiles, MaxFiles: e.opts.JournalMaxFiles,
			Pool: e.pools[i], Logger: e.log.With("journal", i),
		},
		Store: wal.StoreOptions{
			Dir: dir, Journal: i, SegmentMaxBytes: e.opts.SegmentMaxBytes,
			Pool: e.pools[i], Logger: e.log.With("journal", i), Wall: e.wallMs, MaxOpenFiles: e.openFiles(),
			ScrubBytes: e.opts.ScrubBytes, ScrubAfter: e.opts.ScrubAfter, ScrubEvery: e.opts.ScrubEvery,
		},
		Deleted: e.coord.TopicDeleted,
		Now:     e.now,
	}
	if o.Store.ScrubBytes == 0 {
		o.Store.ScrubBytes = -1
	}
	if c := e.opts.cluster; c != nil {
		o.Replicated, o.Suspect, o.Journal.Random = true, c.suspect, c.random
	}
	return o
}

// openFiles is a store's share of the descriptors.
func (e *Engine) openFiles() int {
	if e.opts.MaxOpenFiles == 0 {
		return wal.DefaultMaxOpenFiles
	}
	return min(max(e.opts.MaxOpenFiles/len(e.stores), minOpenFiles), wal.DefaultMaxOpenFiles)
}

// start sets the goroutines going once everything is recovered.
func (e *Engine) start() error {
	if e.opts.Stepped {
		return e.startStepped()
	}
	for _, s := range e.shards {
		ready := make(chan error, 1)
		go s.run(ready)
		if err := <-ready; err != nil {
			return err
		}
	}
	for _, l := range e.stores {
		close(l.start)
	}
	ctx, cancel := context.WithCancel(context.Background())
	e.stopCoord = cancel
	go func() {
		runtime.LockOSThread() // it sleeps in the kernel
		defer close(e.coordDone)
		if err := e.coord.Run(ctx); err != nil && !errors.Is(err, context.Canceled) {
			e.failed(fmt.Errorf("coordinator: %w", err))
		}
	}()
	return nil
}

// Close ends the broker in order: the coordinator finishes what it proposed, shards commit what is queued, the stores
// write everything out, sweep and checkpoint. The network must be closed before. Data is safe whatever it returns.
func (e *Engine) Close(ctx context.Context) error {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return nil
	}
	e.closed = true
	e.mu.Unlock()
	if e.opts.Stepped {
		return e.closeStepped()
	}
	e.stopCoord()
	if err := await(ctx, e.coordDone, "the coordinator"); err != nil {
		return err
	}
	if err := e.sleeper.Close(); err != nil {
		e.log.Warn("closing what the coordinator slept on", "err", err)
	}
	for _, s := range e.shards {
		s.inbox.Push(message{kind: msgClose})
	}
	for _, s := range e.shards {
		if err := await(ctx, s.done, fmt.Sprintf("shard %d", s.id)); err != nil {
			return err
		}
		s.leave()
	}
	for _, l := range e.stores {
		l.inbox.Push(storeMessage{kind: storeClose})
	}
	for _, l := range e.stores {
		if err := await(ctx, l.done, fmt.Sprintf("the store of shard %d", l.id)); err != nil {
			return err
		}
		l.inbox.Close()
	}
	return e.Err()
}

func await(ctx context.Context, done <-chan struct{}, what string) error {
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("closing: %s did not finish in time: %w (acknowledged data is safe in the journal)", what, ctx.Err())
	}
}

// abandon stops the goroutines of an Open that failed.
func (e *Engine) abandon() {
	if e.opts.Stepped {
		_ = e.closeStepped()
		return
	}
	for _, s := range e.shards {
		if s.device.live() {
			s.inbox.Push(message{kind: msgClose})
			<-s.done
		}
	}
	for _, l := range e.stores {
		if !l.device.live() {
			continue
		}
		select {
		case <-l.start:
		default:
			close(l.start)
		}
		l.inbox.Push(storeMessage{kind: storeClose})
		<-l.done
	}
	_ = e.sleeper.Close() // nothing was slept on
}

// failed keeps the first failure, for the health check, and has the coordinator refuse what can't be committed.
func (e *Engine) failed(err error) {
	e.mu.Lock()
	first := e.failure == nil
	if first {
		e.failure = err
	}
	e.mu.Unlock()
	if first {
		e.coord.LogFailed(err.Error())
		if c := e.opts.cluster; c != nil {
			c.failed(err)
		}
	}
}

// Err returns the failure that stopped part of the broker, or nil.
func (e *Engine) Err() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.failure
}

// now is the monotonic time since the engine was opened; wallMs the wall clock in Unix milliseconds.
func (e *Engine) now() time.Duration {
	if c := e.opts.Clock; c != nil {
		return c.Now()
	}
	return time.Since(e.started)
}

func (e *Engine) wallMs() uint64 {
	if c := e.opts.Clock; c != nil {
		return c.WallMs()
	}
	return uint64(time.Now().UnixMilli())
}

// until is the time to sleep before next, an instant on the clock of now: negative, for ever, where that is wal.Never.
func (e *Engine) until(next time.Duration) time.Duration {
	if next == wal.Never {
		return -1
	}
	return max(next-e.now(), 0)
}

// place says which journal a partition lives in. It never changes for a data directory.
func (e *Engine) place(topic, partition uint16) int {
	return placement(topic, partition, len(e.shards))
}

func placement(topic, partition uint16, journals int) int {
	return (int(topic) + int(partition)) % journals
}

func (e *Engine) shardOf(topic, partition uint16) *shard { return e.shards[e.place(topic, partition)] }

// Stopping tells the engine that the connections are about to be closed because the broker stops: consumers get what was
// in flight again without a failed attempt. Close follows.
func (e *Engine) Stopping() { e.coord.Stopping() }

// ClientClosed tells the engine that a connection is gone. Its unanswered requests are still carried out.
func (e *Engine) ClientClosed(c coord.Client) { e.coord.Closed(c) }

// ClientWritable tells the engine that a connection's outstanding bytes have drained.
func (e *Engine) ClientWritable(c coord.Client) { e.coord.Writable(c) }

// engineLog gives the coordinator the journals.
type engineLog struct{ e *Engine }

func (l engineLog) ProposeMetadata(id uint64, value []byte) error {
	return l.e.shards[0].submit(wal.StreamID{Kind: wal.Metadata}, id, value)
}

func (l engineLog) ProposeLedger(journal int, id uint64, value []byte) error {
	return l.e.shards[journal].submit(wal.StreamID{Kind: wal.Ledger}, id, value)
}

func (l engineLog) ProposeMessage(topic, partition uint16, id uint64, key, head, value []byte) error {
	stream := wal.StreamID{Kind: wal.Messages, Topic: topic, Partition: partition}
	return l.e.shardOf(topic, partition).submitMessage(stream, id, key, head, value)
}

// Flush runs on the coordinator's thread; one that was lent to it sees to the shards by itself.
func (l engineLog) Flush() {
	for _, s := range l.e.shards {
		s.lend()
	}
}

// engineStore gives the coordinator the stores.
type engineStore struct{ e *Engine }

func (s engineStore) Read(journal int, req *wal.ReadRequest) {
	s.e.stores[journal].inbox.Push(storeMessage{kind: storeRead, read: req})
}

func (s engineStore) SaveSnapshot(journal int, kind wal.SnapshotKind, position uint64, data []byte) {
	s.e.stores[journal].inbox.Push(storeMessage{kind: storeSnapshot, snapshotKind: kind, position: position, epoch: wal.Epoch(s.e.epoch.Load()), data: data})
}

func (s engineStore) DropTopic(topic uint16) {
	s.e.mu.Lock()
	s.e.quarantined = slices.DeleteFunc(s.e.quarantined, func(q wal.QuarantineReport) bool {
		return q.Stream.Kind == wal.Messages && q.Stream.Topic == topic
	})
	s.e.mu.Unlock()
	for i, l := range s.e.stores {
		s.e.shards[i].inbox.Push(message{kind: msgDrop, topic: topic})
		l.inbox.Push(storeMessage{kind: storeDrop, topic: topic})
	}
}
