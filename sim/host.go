package sim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"sync"
	"time"

	"github.com/mortarmq/mortarmq/engine"
	"github.com/mortarmq/mortarmq/engine/coord"
	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// host is one machine: its disk survives, its process comes and goes.
type host struct {
	w    *world
	id   replica.NodeID
	disk *simdisk.Disk
	node *engine.Node // nil while the process is down
	// life numbers the processes; what a dead one had under way is dropped.
	life   int
	paused bool
	next   time.Duration // when the process wants to run next
	wakes  time.Duration // when it has something to do, as of the last look
	skew   time.Duration // of the wall clock
	// slow multiplies the time that the disk takes.
	slow time.Duration
	// disks counts those that the host has had.
	disks int
	// capacity bounds the bytes on the disk, 0 without a bound.
	capacity int64
	// hangs end what keeps the disk from answering.
	hangs []func()
	// victim: its disk may be damaged.
	victim bool
	// broken: the process says that its disk has failed.
	broken bool
	// wiped: its disk was replaced by an empty one.
	wiped bool
	// letters counts the dead letters that the process has begun and not ended.
	letters  int
	letterAt time.Duration // when it has begun the last one
	// log gets everything that the process logs; nil: only the observer looks at it.
	log slog.Handler
	// heap is the memory of whichever process runs.
	heap *ring.Heap
}

// Now and WallMs implement engine.Clock.
func (h *host) Now() time.Duration { return h.w.now }

// epochMs is when the simulation begins, in Unix milliseconds.
const epochMs = 1_800_000_000_000

// WallMs implements engine.Clock.
func (h *host) WallMs() uint64 { return uint64(epochMs + (h.w.now + h.skew).Milliseconds()) }

// heaps keeps memory from one run for the next.
var heaps = sync.Pool{New: func() any { return new(ring.Heap) }}

// discard ends a host for good.
func (h *host) discard() {
	h.life++
	h.node = nil
	h.heap.Reclaim()
	heaps.Put(h.heap)
	h.heap = nil
}

func newHost(w *world, id replica.NodeID, log io.Writer) *host {
	h := &host{w: w, id: id, slow: 1, heap: heaps.Get().(*ring.Heap)}
	if log != nil {
		h.log = slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Duration("t", w.now)
			}
			return a
		}})
	}
	h.newDisk()
	return h
}

func (h *host) newDisk() {
	h.disks++
	h.disk = simdisk.New(simdisk.Options{
		Seed: max(h.w.rng.Uint64(), 1), Now: h.Now, Latency: h.latency, CapacityBytes: h.capacity,
	})
}

// latency is how long an operation takes.
func (h *host) latency(op *ring.Op, rng *rand.Rand) time.Duration {
	var d time.Duration
	switch op.Kind {
	case ring.WriteSync, ring.Sync, ring.SyncDir:
		d = time.Duration(80+rng.IntN(120)) * time.Microsecond
	case ring.Write, ring.Read:
		d = time.Duration(10+rng.IntN(40)) * time.Microsecond
	default:
		d = time.Duration(5+rng.IntN(20)) * time.Microsecond
	}
	return d * h.slow
}

// device is a disk as one loop of an engine uses it.
type device struct {
	h    *host
	life int
	q    *simdisk.Queue
}

var errDead = errors.New("the process was killed")

func (d *device) Submit(op *ring.Op) { d.q.Submit(op) }

func (d *device) Poll() int {
	if d.life != d.h.life {
		return 0
	}
	return d.q.Poll()
}

// Wait is called at the start and the end of an engine only: one operation completes, whatever its time. A disk that hangs
// has to answer then, since the process would do nothing else until it does.
func (d *device) Wait(time.Duration) (int, error) {
	if d.life != d.h.life {
		return 0, errDead
	}
	if err := d.q.WaitOne(); err == nil {
		return 1, nil
	}
	d.h.unhang()
	if err := d.q.WaitOne(); err != nil {
		return 0, err
	}
	return 1, nil
}

func (d *device) Wake()             {}
func (d *device) Stats() ring.Stats { return ring.Stats{} }
func (d *device) Backend() string   { return "simulated" }
func (d *device) Reason() string    { return "" }
func (d *device) Close() error      { return nil }

// start starts the process.
func (h *host) start() {
	if h.node != nil {
		return
	}
	h.life++
	h.heap.Reclaim() // nothing of the process before is left
	life := h.life
	o := engine.DefaultOptions("/data")
	o.JournalFileBytes, o.JournalMaxFiles, o.MaxRoundBytes = 512<<10, 4, 64<<10
	o.SegmentMaxBytes, o.Shards = 64<<10, h.w.logs
	o.MemoryBytes, o.TailBytes = 128<<20, 1<<20
	o.MetadataSnapshotRecords = 64
	o.DeliveryLease, o.DeliveryMaxAttempts = 2*time.Second, maxAttempts
	o.Clock, o.Stepped, o.Heap, o.Seed = h, true, h.heap, max(h.w.rng.Uint64(), 1)
	o.OpenDevice = func() (engine.Device, error) {
		return &device{h: h, life: life, q: h.disk.NewQueue()}, nil
	}
	o.Logger = slog.New(&observer{h: h, life: life, out: h.log})
	random := rand.New(rand.NewPCG(h.w.rng.Uint64(), uint64(h.id)))
	no := engine.NodeOptions{
		Engine: o, Self: h.id, Rank: int(h.id) - 1, Peers: link{h.w.net, h}, Random: random.Uint64, HistoryBytes: 64 << 10,
	}
	for _, other := range h.w.hosts {
		no.Nodes = append(no.Nodes, engine.NodeInfo{ID: other.id, Name: fmt.Sprint(other.id), ClientAddr: fmt.Sprint(other.id)})
	}
	n, err := engine.OpenNode(no)
	if err != nil {
		h.w.note("node %d can't start: %v", h.id, err)
		if errors.Is(err, wal.ErrCorrupt) && !h.victim {
			h.w.fail("node %d can't start: %v", h.id, err)
		}
		return
	}
	h.w.note("node %d starts", h.id)
	h.node, h.paused, h.next = n, false, h.w.now
	h.w.net.connectAll()
}

// kill ends the process at once; the disk keeps what the kernel had.
func (h *host) kill() {
	if h.end("is killed") {
		h.disk = h.disk.Clone()
		h.disk.SetCapacity(h.capacity)
	}
}

// cutPower ends the process, and the disk keeps any part of what was not flushed.
func (h *host) cutPower() {
	if h.end("loses power") {
		h.disk = h.disk.Crash(simdisk.RandomFates(h.w.rng))
		h.disk.SetCapacity(h.capacity)
	}
}

// wipe ends the process and puts an empty disk in the place of its own.
func (h *host) wipe() {
	h.end("loses its disk")
	h.wiped = true
	h.newDisk()
}

// end ends the process without its doing anything more; false where there is none.
func (h *host) end(how string) bool {
	if h.node == nil {
		return false
	}
	h.w.note("node %d %s", h.id, how)
	if h.letters > 0 && h.w.now-h.letterAt < time.Second {
		h.w.count(crashAroundLetter)
	}
	h.gone()
	return true
}

func (h *host) gone() {
	h.life++
	h.node, h.letters, h.broken = nil, 0, false
	h.w.net.down(h)
}

// full bounds the bytes that the disk takes; 0: it has room.
func (h *host) full(capacity int64) {
	h.capacity = capacity
	h.disk.SetCapacity(capacity)
	h.wake()
}

// failed tells whether the process has given up.
func (h *host) failed() bool {
	return h.node != nil && (h.broken || h.node.Status().Failed || h.node.Engine() != nil && h.node.Engine().Err() != nil)
}

// stats asks the process for its figures; nil if it has none. Time stands still meanwhile.
func (h *host) stats() *coord.Stats {
	e := h.node.Engine()
	if e == nil {
		return nil
	}
	answer := make(chan *engine.Stats, 1)
	go func() {
		s, _ := e.Stats(context.Background())
		answer <- s
	}()
	for {
		select {
		case s := <-answer:
			if s == nil {
				return nil
			}
			return s.Coord
		default:
			h.step()
			runtime.Gosched()
		}
	}
}

// stop ends the process in order.
func (h *host) stop() {
	if h.node == nil {
		return
	}
	h.w.note("node %d is stopped", h.id)
	if err := h.node.Close(context.Background()); err != nil {
		h.w.note("node %d: closing: %v", h.id, err)
	}
	h.gone()
	h.disk = h.disk.Clone()
	h.disk.SetCapacity(h.capacity)
}

// due is when the host has something to do.
func (h *host) due() time.Duration {
	if h.node == nil || h.paused {
		return wal.Never
	}
	at := h.next
	// What was due before has been polled, or belongs to nobody: an engine that could not be closed in order.
	if d, ok := h.disk.NextDue(); ok && d > h.w.now {
		at = min(at, d)
	}
	return max(at, h.w.now)
}

// step lets the process do what it can at this moment.
func (h *host) step() {
	if h.node == nil || h.paused {
		return
	}
	for range maxTurns {
		progress, next := h.node.Step()
		if h.node == nil {
			return
		}
		if !progress {
			h.next = next
			return
		}
	}
	h.w.fail("node %d does not come to rest", h.id)
}

// unhang has the disk answer whatever it was asked.
func (h *host) unhang() {
	for _, free := range h.hangs {
		free()
	}
	h.hangs = nil
}

// wake has the process look at what has arrived.
func (h *host) wake() { h.next = h.w.now }
