// Package simdisk is a disk in memory that behaves as badly as a real one may. It is deterministic: the same calls and
// the same seed give the same completions, so that a failure found once can be found again.
//
// # What survives
//
// A running process sees every write at once. A power cut keeps what is durable and, of the rest, any part:
//
//   - Sectors (512 bytes unless told otherwise) written but not flushed are kept, dropped or torn one by one, those of
//     writes still in flight too. Only the last version of an unflushed sector is known to the model.
//   - A change of a file's length is kept or dropped. Bytes that were never written read as zeros.
//   - Directory changes (a file created, renamed, removed, a directory made) are kept or dropped one by one until SyncDir
//     of their directory, in any combination; a rename is one change and belongs to the directory of its new name.
//     Flushing a file doesn't make its name durable. What lies in a directory whose own entry was lost is lost.
//
// WriteSync makes its own bytes and the length they need durable when it completes, and nothing else, not even of the
// same file. Sync makes durable what had been written to its file by completed writes when it was submitted, and the
// length. A Sync that fails makes nothing durable and the sectors it would have covered are never made durable by a later
// one: the kernel has forgotten that they were dirty.
//
// Crash makes the disk that a power cut leaves, Clone the one that a killed process leaves. Faults (errors, delays,
// operations that hang, short and misdirected and stale reads, flipped bits, a full disk) are injected by kind of operation
// and path.
//
// # Time
//
// A disk may have a clock, Options.Now, which is its user's to move: then an operation takes as long as Options.Latency
// says, completions come in the order of time, and NextDue tells when there is something to poll for. Without a clock
// whatever is in flight completes as soon as somebody polls.
package simdisk

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/mortarmq/mortarmq/ring"
)

const (
	pageBytes = 4096
	// DefaultSectorBytes is the unit that a device writes whole or not at all.
	DefaultSectorBytes = 512
	// unlimited is what StatFS reports where no capacity is set.
	unlimited = 1 << 50
)

// ErrStuck is what WaitOne returns where nothing that could complete is in flight.
var ErrStuck = errors.New("simdisk: nothing in flight can complete")

// Options configures a Disk.
type Options struct {
	// SectorBytes divides 4096 and is at least 64; 0 means DefaultSectorBytes.
	SectorBytes int
	// CapacityBytes bounds the blocks of all files together; 0 means no bound.
	CapacityBytes int64
	// Seed orders completions, where there is no clock; with 0 they come in the order of the submissions. It also seeds the
	// generator that Latency gets.
	Seed uint64
	// Now is the simulated time. With it an operation completes when it has been at the device for its latency.
	Now func() time.Duration
	// Latency returns how long an operation takes, drawing from rng whatever it likes; nil means no time. It must not call
	// the disk.
	Latency func(op *ring.Op, rng *rand.Rand) time.Duration
	// Uncached says that nothing is in the page cache (ring.Cached); by default everything is.
	Uncached bool
	// Wait is called by WaitOne to let time pass until the next operation is due; it may be nil, and then the operation
	// completes although its time hasn't come: for a start that waits for its disk while nothing else goes on.
	Wait func(until time.Duration)
}

// Disk is one simulated device with a file system. It is a wal.Waiter itself, for an only user; further users get a
// Queue each. All methods may be called from any goroutine; Done runs on the one that polls.
type Disk struct {
	opts Options

	mu     sync.Mutex
	rng    *rand.Rand
	names  map[string]*inode // as processes see it
	kept   map[string]*inode // as a power cut leaves it at least
	dirOps []dirOp           // what is between them, in order
	files  map[int]*handle
	nextFD int
	inodes uint64
	used   int64
	faults []*fault
	hold   func(*ring.Op) bool
	onStep func(*ring.Op)
	seq    uint64

	queue  Queue
	queues []*Queue
	// busy counts the operations in flight of all queues: a simulator asks idle disks again and again.
	busy atomic.Int64
}

// handle is an open file.
type handle struct {
	node             *inode
	path             string
	readOnly, direct bool
}

// New returns an empty disk. The directories "/" and "." exist and always survive.
func New(opts Options) *Disk {
	if opts.SectorBytes == 0 {
		opts.SectorBytes = DefaultSectorBytes
	}
	if opts.SectorBytes < minSectorBytes || pageBytes%opts.SectorBytes != 0 {
		panic(fmt.Sprintf("simdisk: sector size %d does not divide %d", opts.SectorBytes, pageBytes))
	}
	d := &Disk{
		opts: opts, rng: rand.New(rand.NewPCG(opts.Seed, 0)),
		names: map[string]*inode{}, kept: map[string]*inode{}, files: map[int]*handle{}, nextFD: 3,
	}
	d.queue.d = d
	d.queues = append(d.queues, &d.queue)
	return d
}

// Queue is one user's view of the disk: what it submits completes in its own Poll.
type Queue struct {
	d        *Disk
	inFlight []*flight
	busy     atomic.Int64
	// ready is scratch of pick.
	ready []*flight
}

// flight is an operation at the disk.
type flight struct {
	op   *ring.Op
	seq  uint64
	file *handle
	err  error
	// wrote are the pages that a write has put into its file, from the one it begins in: what its buffer held when it was
	// submitted.
	wrote []*page
	one   [1]*page // room for it
	// A Sync covers these sectors and this length.
	covers []covered
	size   int64
	fault  *Fault
	// due is when the operation completes, where there is a clock; hangs are the faults that keep it from completing.
	due   time.Duration
	hangs []*fault
}

// NewQueue returns a further queue on the disk.
func (d *Disk) NewQueue() *Queue {
	d.mu.Lock()
	defer d.mu.Unlock()
	q := &Queue{d: d}
	d.queues = append(d.queues, q)
	return q
}

// NextDue returns when the next operation of any queue completes; ok is false where nothing in flight will by itself.
// Without a clock that is at once.
func (d *Disk) NextDue() (at time.Duration, ok bool) {
	if d.busy.Load() == 0 {
		return 0, false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, q := range d.queues {
		for _, f := range q.inFlight {
			if !d.held(f) && (!ok || f.due < at) {
				at, ok = f.due, true
			}
		}
	}
	return at, ok
}

// held tells whether an operation doesn't complete before somebody lets it.
func (d *Disk) held(f *flight) bool { return len(f.hangs) > 0 || d.hold != nil && d.hold(f.op) }

func (d *Disk) now() time.Duration {
	if d.opts.Now == nil {
		return 0
	}
	return d.opts.Now()
}

// Submit implements wal.Disk on the disk's own queue.
func (d *Disk) Submit(op *ring.Op) { d.queue.Submit(op) }

// Poll implements wal.Disk on the disk's own queue.
func (d *Disk) Poll() int { return d.queue.Poll() }

// WaitOne implements wal.Waiter on the disk's own queue.
func (d *Disk) WaitOne() error { return d.queue.WaitOne() }

// InFlight returns how many operations of the disk's own queue have not completed.
func (d *Disk) InFlight() int { return d.queue.InFlight() }

// Hold makes operations for which match returns true stay in flight until another Hold lets them go; nil holds nothing.
// match must not call the disk.
func (d *Disk) Hold(match func(*ring.Op) bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.hold = match
}

// OnStep makes the disk call f before each completion takes effect, on the goroutine that polls: the moment to look at
// Pending and to cut the power. f may call the disk's Pending, Crash and Clone.
func (d *Disk) OnStep(f func(op *ring.Op)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.onStep = f
}

// InFlight returns how many operations have not completed.
func (q *Queue) InFlight() int {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	return len(q.inFlight)
}

// Submit implements wal.Disk. The bytes of a write are on their way to the device from here on.
func (q *Queue) Submit(op *ring.Op) {
	d := q.d
	d.mu.Lock()
	defer d.mu.Unlock()
	d.seq++
	op.N, op.Err, op.Names, op.Direct = 0, nil, nil, false
	f := &flight{op: op, seq: d.seq, due: d.now()}
	q.inFlight = append(q.inFlight, f)
	q.busy.Add(1)
	d.busy.Add(1)
	if d.opts.Latency != nil && d.opts.Now != nil {
		f.due += d.opts.Latency(op, d.rng)
	}
	f.start(d)
}

// Poll implements wal.Disk: everything that isn't held and whose time has come completes, what Done submits included.
func (q *Queue) Poll() int {
	n := 0
	for q.completeOne(false) {
		n++
	}
	return n
}

// WaitOne implements wal.Waiter: one operation completes, when its time comes or at once, see Options.Wait. It returns
// ErrStuck where none can.
func (q *Queue) WaitOne() error {
	if !q.completeOne(true) {
		return ErrStuck
	}
	return nil
}

// completeOne completes the next operation; with early even one whose time hasn't come.
func (q *Queue) completeOne(early bool) bool {
	if q.busy.Load() == 0 {
		return false
	}
	d := q.d
	d.mu.Lock()
	f, step, now := q.pick(), d.onStep, d.now()
	d.mu.Unlock()
	if f == nil || f.due > now && !early {
		return false
	}
	if f.due > now && d.opts.Wait != nil {
		d.opts.Wait(f.due)
	}
	if step != nil {
		step(f.op)
	}
	d.mu.Lock()
	q.inFlight = slices.DeleteFunc(q.inFlight, func(x *flight) bool { return x == f })
	q.busy.Add(-1)
	d.busy.Add(-1)
	f.finish(d)
	d.mu.Unlock()
	f.op.Done(f.op)
	return true
}

// pick chooses the operation that completes next.
func (q *Queue) pick() *flight {
	ready := q.ready[:0]
	for _, f := range q.inFlight {
		if !q.d.held(f) {
			ready = append(ready, f)
		}
	}
	q.ready = ready
	switch {
	case len(ready) == 0:
		return nil
	case q.d.opts.Now != nil:
		return slices.MinFunc(ready, func(a, b *flight) int { return cmp.Or(cmp.Compare(a.due, b.due), cmp.Compare(a.seq, b.seq)) })
	case q.d.opts.Seed == 0:
		return ready[0]
	default:
		return ready[q.d.rng.IntN(len(ready))]
	}
}

// start does what an operation does before it completes.
func (f *flight) start(d *Disk) {
	op := f.op
	p := op.Path
	switch op.Kind {
	case ring.Read, ring.Write, ring.WriteSync, ring.Sync, ring.Close, ring.Allocate, ring.Truncate, ring.Cached, ring.Uncache:
		if f.file = d.files[op.FD]; f.file == nil {
			f.err = syscall.EBADF
			return
		}
		p = f.file.path
	case ring.Stat:
		if op.Path == "" {
			if f.file = d.files[op.FD]; f.file == nil {
				f.err = syscall.EBADF
				return
			}
			p = f.file.path
		}
	default:
	}
	d.matchFaults(f, p)
	switch op.Kind {
	case ring.Read:
		f.err = f.file.check(op)
	case ring.Write, ring.WriteSync:
		f.startWrite(d)
	case ring.Sync:
		f.covers, f.size = f.file.node.snapshot(), f.file.node.size
	default:
	}
}

func (f *flight) startWrite(d *Disk) {
	op, n := f.op, f.file.node
	if f.err = f.file.check(op); f.err != nil {
		return
	}
	if f.file.readOnly {
		f.err = syscall.EBADF
		return
	}
	if d.full(n.grows(op.Off, int64(len(op.Buf)))) {
		f.err = syscall.ENOSPC
		return
	}
	d.used += n.write(op.Off, op.Buf, d.opts.SectorBytes)
	if len(op.Buf) > 0 {
		first, last := op.Off/pageBytes, (op.Off+int64(len(op.Buf))-1)/pageBytes
		f.wrote = append(f.one[:0], n.pages[first:last+1]...)
	}
	n.takeOff(op.Off, len(op.Buf), d.opts.SectorBytes)
}

// check refuses what O_DIRECT refuses.
func (h *handle) check(op *ring.Op) error {
	if op.Off < 0 {
		return syscall.EINVAL
	}
	if !h.direct || len(op.Buf) == 0 {
		return nil
	}
	address := uintptr(unsafe.Pointer(unsafe.SliceData(op.Buf)))
	if op.Off%ring.BlockSize != 0 || len(op.Buf)%ring.BlockSize != 0 || address%ring.BlockSize != 0 {
		return syscall.EINVAL
	}
	return nil
}

// finish completes an operation.
func (f *flight) finish(d *Disk) {
	op := f.op
	if f.wrote != nil {
		f.file.node.land(op.Off, len(op.Buf), d.opts.SectorBytes)
		f.checkBuffer()
	}
	err := f.err
	if err == nil && f.fault != nil && f.fault.Err != nil {
		err = f.fault.Err
		if op.Kind == ring.Sync {
			f.file.node.forget(f.covers)
		}
	}
	if err == nil {
		err = f.apply(d)
	}
	if err != nil {
		p := op.Path
		if f.file != nil {
			p = f.file.path
		}
		op.Err = &fs.PathError{Op: fmt.Sprintf("disk operation %d", op.Kind), Path: p, Err: err}
	}
}

// checkBuffer panics where the buffer of a write was changed while the write was in flight.
func (f *flight) checkBuffer() {
	b, from := f.op.Buf, f.op.Off%pageBytes
	for _, p := range f.wrote {
		part := min(int64(len(b)), pageBytes-from)
		if !bytes.Equal(b[:part], p[from:from+part]) {
			panic("simdisk: the buffer of a write was changed while the write was in flight")
		}
		b, from = b[part:], 0
	}
}

// apply gives an operation that succeeds its effect and its result.
func (f *flight) apply(d *Disk) error {
	op := f.op
	switch op.Kind {
	case ring.Read:
		f.read()
		return nil
	case ring.Write:
		op.N = len(op.Buf)
		return nil
	case ring.WriteSync:
		op.N = len(op.Buf)
		f.file.node.persist(op.Off, len(op.Buf), d.opts.SectorBytes)
		return nil
	case ring.Sync:
		f.file.node.persistAll(f.covers, f.size, d.opts.SectorBytes)
		return nil
	case ring.Close:
		d.close(op.FD)
		return nil
	case ring.Allocate:
		return d.allocate(f.file.node, op.Off, op.Size)
	case ring.Truncate:
		d.used += f.file.node.truncate(op.Size, d.opts.SectorBytes)
		return nil
	case ring.Cached:
		if d.opts.Uncached {
			op.Size = 0
		}
		return nil
	case ring.Uncache:
		return nil
	case ring.Stat:
		if f.file != nil {
			op.Size = f.file.node.size
			return nil
		}
		return d.stat(op)
	default:
		return d.applyName(f)
	}
}

// read fills the buffer, with whatever a fault makes of it.
func (f *flight) read() {
	op, n, off := f.op, f.file.node, f.op.Off
	if f.fault != nil {
		off += f.fault.Misdirect
		if f.fault.Stale != nil {
			if old := f.fault.Stale.lookup(f.file.path); old != nil {
				n = old
			}
		}
	}
	op.N = n.read(off, op.Buf)
	if f.fault == nil {
		return
	}
	if f.fault.Short > 0 {
		op.N = min(op.N, f.fault.Short)
	}
	if f.fault.Mutate != nil {
		f.fault.Mutate(op.Off, op.Buf[:op.N])
	}
}

func (d *Disk) full(more int64) bool {
	return d.opts.CapacityBytes > 0 && d.used+more > d.opts.CapacityBytes
}

func (d *Disk) allocate(n *inode, off, size int64) error {
	if d.full(n.grows(off, size)) {
		return syscall.ENOSPC
	}
	d.used += n.allocate(off, size)
	return nil
}

func (d *Disk) close(fd int) {
	h := d.files[fd]
	delete(d.files, fd)
	h.node.opens--
	d.reap(h.node)
}

// reap frees the blocks of a file that has neither a name nor an opener.
func (d *Disk) reap(n *inode) {
	if n.links == 0 && n.opens == 0 {
		d.used -= n.blocks * pageBytes
		n.blocks = 0
	}
}

// lookup returns the file at a path.
func (d *Disk) lookup(p string) *inode {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.names[path.Clean(p)]
}

// Paths returns all files (no directories), sorted.
func (d *Disk) Paths() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var paths []string
	for p, n := range d.names {
		if !n.dir {
			paths = append(paths, p)
		}
	}
	slices.Sort(paths)
	return paths
}

// ReadFile returns a file's contents as a process would read them, nil where there is no such file.
func (d *Disk) ReadFile(p string) []byte { return d.ReadFileInto(nil, p) }

// ReadFileInto is ReadFile that uses b's memory where it suffices.
func (d *Disk) ReadFileInto(b []byte, p string) []byte {
	n := d.lookup(p)
	if n == nil || n.dir {
		return nil
	}
	if int64(cap(b)) < n.size {
		b = make([]byte, n.size)
	}
	b = b[:n.size]
	n.read(0, b)
	return b
}

// WriteFile replaces a file's contents behind everybody's back, durably; the file must exist. Damage is made so.
func (d *Disk) WriteFile(p string, b []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := d.names[path.Clean(p)]
	if n == nil {
		panic("simdisk: WriteFile of a file that doesn't exist: " + p)
	}
	d.used += n.truncate(0, d.opts.SectorBytes)
	d.used += n.write(0, b, d.opts.SectorBytes)
	d.used += n.truncate(int64(len(b)), d.opts.SectorBytes)
	n.persistAll(n.snapshot(), n.size, d.opts.SectorBytes)
}

// Damage changes one byte of a file, on the device and as processes see it: b becomes b XOR mask.
func (d *Disk) Damage(p string, off int64, mask byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := d.names[path.Clean(p)]
	if n == nil || off < 0 || off >= n.size {
		panic(fmt.Sprintf("simdisk: Damage of a byte that doesn't exist: %s at %d", p, off))
	}
	index := off / pageBytes
	seen, kept := *n.pages.at(index), *n.durable.at(index)
	same := n.pages.at(index) == n.durable.at(index)
	seen[off%pageBytes] ^= mask
	kept[off%pageBytes] ^= mask
	n.pages.set(index, &seen)
	if same {
		n.durable.set(index, &seen)
	} else {
		n.durable.set(index, &kept)
	}
}

// Rot flips a random bit of a random file whose path match accepts, on the device and as processes see it, and tells which.
// ok is false where there is no such file with contents.
func (d *Disk) Rot(rng *rand.Rand, match func(path string) bool) (p string, off int64, ok bool) {
	var paths []string
	for _, p := range d.Paths() {
		if match(p) && d.lookup(p).size > 0 {
			paths = append(paths, p)
		}
	}
	if len(paths) == 0 {
		return "", 0, false
	}
	p = paths[rng.IntN(len(paths))]
	off = rng.Int64N(d.lookup(p).size)
	d.Damage(p, off, 1<<rng.IntN(8))
	return p, off, true
}

// RemoveFile removes a file durably.
func (d *Disk) RemoveFile(p string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	p = path.Clean(p)
	if n := d.names[p]; n != nil {
		n.links--
		d.reap(n)
	}
	delete(d.names, p)
	delete(d.kept, p)
	d.dirOps = slices.DeleteFunc(d.dirOps, func(o dirOp) bool { return o.path == p || o.path2 == p })
}

// Used returns the bytes of all blocks that are allocated.
func (d *Disk) Used() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.used
}

// Equal tells whether two disks show the same files with the same contents.
func (d *Disk) Equal(o *Disk) bool {
	paths := d.Paths()
	if !slices.Equal(paths, o.Paths()) {
		return false
	}
	for _, p := range paths {
		if !bytes.Equal(d.ReadFile(p), o.ReadFile(p)) {
			return false
		}
	}
	return true
}

func under(dir, p string) bool { return path.Dir(p) == dir && p != dir && !strings.HasSuffix(p, "/.") }
