package engine

import (
	"fmt"
	"log/slog"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/engine/mpsc"
	"github.com/mortarmq/mortarmq/wal"
)

// storeKind says what a message to the store's goroutine asks for.
type storeKind uint8

const (
	storeAdd storeKind = iota
	storeRead
	storeSnapshot
	storeDrop
	storeSweep
	storeSkip
	storeReset
	storeInstall
	storeGiveUp
	storeClose
)

type storeMessage struct {
	kind         storeKind
	topic        uint16
	snapshotKind wal.SnapshotKind
	round        *wal.Round
	read         *wal.ReadRequest
	position     uint64
	epoch        wal.Epoch
	data         []byte
	// Of a node that catches up: done runs on the store's goroutine.
	stream wal.StreamID
	done   func()
}

// storeLoop is the goroutine behind a shard's journal: it owns the segments and a ring of its own, writes committed
// rounds out, sweeps, checkpoints, and serves cold reads, all off the commit path.
type storeLoop struct {
	id    int
	eng   *Engine
	log   *slog.Logger
	inbox *mpsc.Queue[storeMessage]
	start chan struct{} // closed when recovery is over everywhere
	done  chan struct{}

	// Read by the shard.
	written  atomic.Uint64 // the newest round that is in the segments
	pending  atomic.Int64  // bytes committed and not yet written to segments
	free     atomic.Int64  // bytes free on the file system, -1 if unknown
	scrubbed atomic.Pointer[wal.ScrubStats]
	sweepAsk atomic.Bool // a sweep was asked for and has not begun

	device deviceRef
	disk   Device
	store  *wal.Store
	spare  []storeMessage
	failed bool
	// installed are the positions of snapshots from another node, by kind.
	installed map[wal.SnapshotKind]uint64
	// closing: write out and checkpoint; ended: that is done.
	closing, ended bool
}

func newStoreLoop(e *Engine, id int) *storeLoop {
	l := &storeLoop{id: id, eng: e, log: e.log.With("store", id), start: make(chan struct{}), done: make(chan struct{}), installed: map[wal.SnapshotKind]uint64{}}
	l.free.Store(-1)
	l.scrubbed.Store(&wal.ScrubStats{})
	l.inbox = mpsc.New[storeMessage](l.device.wake)
	return l
}

// add hands over a committed round with one reference. The store is not woken: see shard.handOver.
func (l *storeLoop) add(r *wal.Round) {
	l.pending.Add(int64(r.Bytes()))
	if !l.inbox.PushQuietly(storeMessage{kind: storeAdd, round: r}) {
		r.Release()
	}
}

func (l *storeLoop) saveDedup(round wal.RoundNumber, data []byte) {
	l.inbox.Push(storeMessage{kind: storeSnapshot, snapshotKind: wal.SnapshotDedup, position: uint64(round), epoch: wal.Epoch(l.eng.epoch.Load()), data: data})
}

// requestSweep asks for a sweep because the journal has no room; called by the shard as often as it likes.
func (l *storeLoop) requestSweep() {
	if l.sweepAsk.CompareAndSwap(false, true) {
		l.inbox.Push(storeMessage{kind: storeSweep})
	}
}

// opened is what recovery of one journal found.
type opened struct {
	journal  *wal.Journal
	recovery *wal.Recovery
	err      error
}

// run recovers the journal with its store, reports, waits for the start, and serves until it is closed.
func (l *storeLoop) run(o wal.OpenOptions, h wal.Handler, report chan<- opened) {
	runtime.LockOSThread()
	defer close(l.done)
	found := l.open(o, h)
	report <- found
	if found.err != nil {
		return
	}
	<-l.start
	l.loop()
	l.end()
}

// open recovers the journal with its store, on a ring that stays the store's.
func (l *storeLoop) open(o wal.OpenOptions, h wal.Handler) opened {
	d, err := l.eng.openDevice()
	if err != nil {
		return opened{err: err}
	}
	l.disk = d
	l.device.set(d)
	journal, store, recovery, err := wal.Open(o, waiter{d}, h)
	if err != nil {
		l.end()
		return opened{err: err}
	}
	l.store = store
	l.pending.Store(store.PendingBytes())
	l.free.Store(store.FreeBytes())
	l.hook()
	return opened{journal: journal, recovery: recovery}
}

// end gives the ring back.
func (l *storeLoop) end() {
	l.device.clear()
	if err := l.disk.Close(); err != nil {
		l.log.Error("closing the store's ring", "err", err)
	}
}

func (l *storeLoop) hook() {
	sh := l.eng.shards[l.id]
	l.store.OnWritten(func(n wal.RoundNumber) {
		l.written.Store(uint64(n))
		l.eng.coord.Written(l.id, n)
	})
	l.store.OnDurable(func(n wal.RoundNumber) { sh.inbox.Push(message{kind: msgTrim, round: n}) })
	l.store.OnQuarantine(func(r wal.QuarantineReport) {
		l.eng.quarantine(r)
		if id := r.Stream; id.Kind == wal.Messages {
			sh.inbox.Push(message{kind: msgQuarantine, topic: id.Topic, index: id.Partition})
			if c := l.eng.opts.cluster; c != nil {
				c.damaged(l.id)
			}
		}
	})
	l.store.OnSweepStart(func(n wal.RoundNumber) {
		l.sweepAsk.Store(false)
		sh.inbox.Push(message{kind: msgSnapshot, round: n})
	})
}

func (l *storeLoop) loop() {
	d := l.disk
	for {
		progress, next := l.turn()
		if l.ended {
			return
		}
		if progress || !l.inbox.Sleep() {
			continue
		}
		if _, err := d.Wait(l.eng.until(next)); err != nil {
			l.fail(fmt.Errorf("waiting for the disk: %w", err))
			time.Sleep(10 * time.Millisecond)
		}
		l.inbox.Awake()
	}
}

// turn does everything that can be done without blocking, see shard.turn.
func (l *storeLoop) turn() (progress bool, next time.Duration) {
	l.take()
	next = l.store.Step(l.eng.now())
	l.pending.Store(l.store.PendingBytes())
	l.free.Store(l.store.FreeBytes())
	if st := l.store.Scrubbed(); st != *l.scrubbed.Load() {
		changed := st // st itself stays off the heap
		l.scrubbed.Store(&changed)
	}
	l.check()
	progress = l.disk.Poll() > 0
	l.ended = l.closing && (l.store.Closed() || l.failed)
	return progress, next
}

func (l *storeLoop) take() {
	items := l.inbox.Drain(l.spare)
	for i := range items {
		m := &items[i]
		switch m.kind {
		case storeAdd:
			if err := l.store.Add(m.round); err != nil {
				l.fail(err)
			}
		case storeRead:
			l.store.Read(m.read)
		case storeSnapshot:
			if m.snapshotKind != wal.SnapshotDedup && m.position < l.installed[m.snapshotKind] {
				continue // of a coordinator that does not know of the catch-up
			}
			l.store.SaveSnapshot(m.snapshotKind, m.position, m.epoch, m.data)
		case storeDrop:
			l.store.DropTopic(m.topic)
		case storeSkip:
			l.store.Skip(m.stream, wal.Sequence(m.position), m.done)
		case storeReset:
			l.store.Reset(m.stream, wal.Sequence(m.position), m.done)
		case storeInstall:
			l.installed[m.snapshotKind] = max(l.installed[m.snapshotKind], m.position)
			l.store.Install(m.snapshotKind, m.position, m.epoch, m.data, m.done)
		case storeGiveUp:
			l.store.GiveUpMetadata()
		case storeSweep:
			l.store.RequestSweep()
		case storeClose:
			l.closing = true
			l.store.StartClose()
		}
	}
	l.spare = items
}

// check passes a failure of the store on: what is in the journal is safe, but nothing can be trimmed any more.
func (l *storeLoop) check() {
	if err := l.store.Err(); err != nil {
		l.fail(err)
	}
}

func (l *storeLoop) fail(err error) {
	if l.failed {
		return
	}
	l.failed = true
	l.log.Error("segments can't be written: nothing more is taken until a restart; check the disk", "err", err)
	l.eng.shards[l.id].stop(fmt.Errorf("store %d: %w", l.id, err))
}
