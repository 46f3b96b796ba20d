// Package ring runs disk operations asynchronously for one goroutine, through io_uring where the kernel allows it and
// through worker goroutines with pread and pwrite elsewhere.
//
// The owner fills in an Op, submits it, and drives the ring with Poll or Wait, which run the Op's Done once it has ended.
// Completion order is not submission order.
//
//	Submit ──► slots ──► io_uring ──┐              (data operations, io_uring backend)
//	       └─► data workers ────────┤ Poll / Wait ──► Op.Done
//	       └─► file workers ────────┘
//
// io_uring needs the build tag uring and, because of its library, the linker flag -checklinkname=0 (see README). Without
// them, or where the kernel refuses, New falls back and Reason tells why.
//
// # Goroutines
//
// Submit, Poll, Wait, InFlight and Close belong to one goroutine, the owner, which must be locked to its thread
// (runtime.LockOSThread) from the first of these calls on: the kernel refuses a ring to any other thread. New may run
// elsewhere. Wake, Stats, Backend and Reason may be called from anywhere, even after Close.
//
// Done runs on the owner's goroutine. It may Submit, also the same Op, but must not call Poll, Wait or Close.
package ring

import (
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Backend selects how data operations run.
type Backend uint8

const (
	// Auto takes io_uring where it works, else pread.
	Auto Backend = iota
	// Uring takes io_uring or fails.
	Uring
	// Pread takes worker goroutines with ordinary system calls.
	Pread
)

const (
	defaultEntries = 256
	minEntries     = 8
	maxEntries     = 4096

	defaultWorkers = 8
	maxWorkers     = 256
	// fileWorkers bounds the goroutines for file-system operations. They are apart from the data workers so that a
	// slow directory never delays a write.
	fileWorkers = 8
)

// Options configures New. The zero value is usable.
type Options struct {
	Backend Backend
	// Entries bounds the data operations that the kernel has at once (8 to 4096, a power of two, default 256); others
	// wait in the ring in order. The pread backend ignores it.
	Entries int
	// Workers bounds the goroutines of the pread backend for data operations (default 8, at most 256).
	Workers int
	// Logger gets one line where io_uring can't be used, one where O_DIRECT is refused. nil discards them.
	Logger *slog.Logger
}

func (o *Options) normalize() {
	if o.Entries <= 0 {
		o.Entries = defaultEntries
	}
	o.Entries = ceilPow2(min(max(o.Entries, minEntries), maxEntries))
	if o.Workers <= 0 {
		o.Workers = defaultWorkers
	}
	o.Workers = min(o.Workers, maxWorkers)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

// backend runs data operations. Except for signal, the owner's goroutine calls it.
type backend interface {
	name() string
	// submit takes over a data operation.
	submit(op *Op)
	// reap ends what the backend knows to be complete, without a system call, and returns how many that were.
	reap() int
	// flush hands to the kernel what was submitted and collects completions; it does not wait.
	flush() error
	// sleep does what flush does and waits for a completion, a signal or the time to pass (d < 0: no limit). It may
	// return early.
	sleep(d time.Duration) error
	// signal ends a sleep, the present one or the next. Any goroutine.
	signal()
	close() error
}

// Ring runs operations for its owner. See the package comment for which goroutine may call what.
type Ring struct {
	b      backend
	reason string
	log    *slog.Logger
	files  *workers
	fin    finished
	stats  counters

	// The owner's.
	ended    opList // operations that did not go through the backend and are over
	inline   opList // operations to run inside the next Poll or Wait
	inflight int
	err      error
	driving  bool
	closing  bool
	closed   bool

	// wake is set by Wake until a Wait returns. sleeping is set by the owner before it looks for the last time and
	// blocks; who adds something looks at it after adding. One of the two always sees the other, so no wake-up is lost,
	// and while the owner is awake a Wake costs no system call. signallers counts goroutines between the two steps:
	// Close must not give the backend's descriptors away under them.
	wake       atomic.Bool
	sleeping   atomic.Bool
	signallers atomic.Int32

	directRefused sync.Once
}

// New prepares a ring. Where opts.Backend is Uring and io_uring can't be used the error tells what to change; with Auto
// that text is the ring's Reason.
func New(opts Options) (*Ring, error) { return newRing(opts, newUring) }

// newRing is New with a choice of how the io_uring backend is made.
func newRing(opts Options, makeUring func(entries int, r *Ring) (backend, error)) (*Ring, error) {
	opts.normalize()
	r := &Ring{log: opts.Logger}
	r.files = newWorkers(fileWorkers, r.runFile)
	switch opts.Backend {
	case Auto, Uring:
		b, err := makeUring(opts.Entries, r)
		if err == nil {
			r.b = b
			return r, nil
		}
		if opts.Backend == Uring {
			return nil, fmt.Errorf("ring: io_uring can't be used: %w", err)
		}
		r.reason = err.Error()
		r.log.Warn("io_uring can't be used, disk operations go through pread and pwrite", "reason", r.reason)
	case Pread:
		r.reason = "the pread backend was asked for"
	default:
		return nil, fmt.Errorf("ring: unknown backend %d", opts.Backend)
	}
	r.b = newPread(opts.Workers, r.runData)
	return r, nil
}

// Backend returns "io_uring" or "pread".
func (r *Ring) Backend() string { return r.b.name() }

// Reason tells why io_uring is not in use, and what to change; it is empty where it is.
func (r *Ring) Reason() string { return r.reason }

// Stats returns the ring's counters. Any goroutine.
func (r *Ring) Stats() Stats { return r.stats.snapshot() }

// InFlight returns the number of operations submitted whose Done hasn't run yet.
func (r *Ring) InFlight() int { return r.inflight }

// Submit takes over op until its Done has run; it never blocks. The kernel may see op only at the next Poll or Wait, so
// that several operations go there together. Every outcome, errors included, arrives through Done, never from within
// Submit. There is no limit but the number of operations the owner makes.
func (r *Ring) Submit(op *Op) {
	if op.Done == nil {
		panic("ring: Op submitted without Done")
	}
	if op.busy {
		panic("ring: Op submitted again before its Done")
	}
	op.busy = true
	op.N, op.Err, op.Direct, op.Names = 0, nil, false, nil
	op.done, op.tries = 0, 0
	r.inflight++
	switch {
	case r.closing:
		r.fail(op, ErrClosed)
	case !op.Kind.valid() || op.Off < 0:
		// io_uring takes offset -1 for the file's position.
		r.fail(op, unix.EINVAL)
	case op.Kind.data() && op.Inline, op.Kind.brief():
		r.inline.push(op)
	case op.Kind.data():
		r.b.submit(op)
	default:
		r.files.submit(op)
	}
}

// fail lets op end with an error at the next Poll or Wait.
func (r *Ring) fail(op *Op, cause error) {
	op.Err = opError(op, cause)
	r.ended.push(op)
}

// complete ends an operation.
func (r *Ring) complete(op *Op) {
	r.inflight--
	op.busy = false
	if op.Kind.data() {
		r.stats.count(op)
	}
	op.Done(op)
}

// Execute runs a data operation by a plain system call on the thread of its caller, who need not be the owner: the ring's
// queues and what is in flight are left alone. Done has run there when it returns. The ring must not be closed meanwhile.
func (r *Ring) Execute(op *Op) {
	if op.Done == nil || op.busy || !op.Kind.data() {
		panic("ring: Execute of an Op that is in flight, has no Done or moves no data")
	}
	op.N, op.Err, op.done, op.tries = 0, nil, 0, 0
	transfer(op, &r.stats)
	r.stats.count(op)
	op.Done(op)
}

// Poll hands everything submitted to the kernel and runs Done of everything that is complete, without blocking but for
// Inline operations. It returns how many ran. What these submit goes to the kernel with the next Poll or Wait. An error
// of the ring itself is returned by the next Wait.
func (r *Ring) Poll() int {
	n := r.reap()
	r.flush()
	r.runInline()
	return n + r.reap()
}

// Wait hands everything submitted to the kernel, blocks until at least one Done ran, Wake was called or timeout passed
// (negative: no limit), and returns how many Done ran. A Wake since the last Wait returned lets it return at once; what
// the waker did before is visible then. An error is one of the ring itself and lasting; operations in flight stay so.
func (r *Ring) Wait(timeout time.Duration) (int, error) {
	if r.closed {
		return r.reap(), ErrClosed
	}
	var deadline time.Time
	if timeout > 0 {
		deadline = time.Now().Add(timeout)
	}
	if !r.inline.empty() {
		r.flush() // the others are under way meanwhile
		r.runInline()
	}
	for slept := false; ; {
		n := r.reap()
		left := timeout
		if timeout > 0 {
			left = time.Until(deadline)
		}
		expired := timeout >= 0 && left <= 0
		if woken := r.wake.Load() && r.wake.Swap(false); n > 0 || woken || expired {
			if !slept {
				r.flush()
				if n == 0 {
					n = r.reap()
				}
			}
			return n, r.err
		}
		if r.err != nil {
			return 0, r.err
		}
		r.sleeping.Store(true)
		if !r.wake.Load() && !r.fin.some.Load() {
			r.err = r.b.sleep(left)
			slept = true
		}
		r.sleeping.Store(false)
	}
}

// Wake lets the present or else the next Wait return. It is cheap, in particular while the owner is awake. Any goroutine.
func (r *Ring) Wake() {
	r.wake.Store(true)
	r.signal()
}

// signal gets the owner out of its sleep, if it is in one.
func (r *Ring) signal() {
	if !r.sleeping.Load() {
		return
	}
	r.signallers.Add(1)
	if r.sleeping.CompareAndSwap(true, false) {
		r.b.signal()
	}
	r.signallers.Add(-1)
}

// Close waits for the operations in flight, whose buffers belong to the kernel until then, runs their Done, and frees
// the ring. Operations submitted from now on end with ErrClosed. Where it returns an error operations may still be in
// flight: their buffers must not be reused.
func (r *Ring) Close() error {
	if r.closed {
		return nil
	}
	r.closing = true
	for r.inflight > 0 {
		if _, err := r.Wait(-1); err != nil {
			return fmt.Errorf("ring: close with %d operations in flight: %w", r.inflight, err)
		}
	}
	r.closed = true
	r.files.close()
	// sleeping stays false from here on: nobody begins to signal any more.
	for r.signallers.Load() != 0 {
		runtime.Gosched()
	}
	return r.b.close()
}

// reap runs Done of everything that is known to have ended.
func (r *Ring) reap() int {
	if r.driving {
		panic("ring: Poll, Wait or Close called from Done")
	}
	r.driving = true
	ended := r.ended
	r.ended = opList{}
	n := r.completeAll(ended) + r.completeAll(r.fin.take())
	if !r.closed { // later there is no ring to look at
		n += r.b.reap()
	}
	r.driving = false
	return n
}

func (r *Ring) completeAll(l opList) int {
	n := 0
	for op := l.pop(); op != nil; op = l.pop() {
		r.complete(op)
		n++
	}
	return n
}

func (r *Ring) flush() {
	if r.err == nil && !r.closed {
		r.err = r.b.flush()
	}
}

// runInline runs the operations that the owner does itself.
func (r *Ring) runInline() {
	for op := r.inline.pop(); op != nil; op = r.inline.pop() {
		if op.Kind.brief() {
			fileOp(op, r.logDirectRefused)
		} else {
			transfer(op, &r.stats)
		}
		r.ended.push(op)
	}
}

// runData runs on a data worker.
func (r *Ring) runData(op *Op) {
	transfer(op, &r.stats)
	r.fin.add(op)
	r.signal()
}

// runFile runs on a file worker.
func (r *Ring) runFile(op *Op) {
	fileOp(op, r.logDirectRefused)
	r.fin.add(op)
	r.signal()
}

func (r *Ring) logDirectRefused(path string) {
	r.directRefused.Do(func() {
		r.log.Warn("the file system refuses O_DIRECT, its files go through the page cache", "path", path)
	})
}

func ceilPow2(n int) int {
	p := 1
	for p < n {
		p <<= 1
	}
	return p
}
