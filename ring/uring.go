//go:build uring

package ring

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"syscall"
	"time"
	"unsafe"

	"github.com/pawelgaczynski/giouring"
	"golang.org/x/sys/unix"
)

const (
	// cqFactor makes the completion queue this many times the submission queue: one completion for each operation in
	// flight and room for wake-ups, so that it doesn't overflow.
	cqFactor = 4

	// wakeSlot stands for the poll of the eventfd in a completion's slot number.
	wakeSlot = 1<<32 - 1

	// busyPause is how long the owner waits where the kernel has no memory to take a submission (EAGAIN) and nothing
	// is complete that could be reaped to make room.
	busyPause = 100 * time.Microsecond
)

// slot is an operation that the kernel has, or the place for one. gen counts its uses: a completion that carries
// another generation belongs to none.
type slot struct {
	op    *Op
	gen   uint32
	start int
}

// uringBackend runs data operations through io_uring.
//
// user_data is generation<<32 | slot number, never a pointer: the table keeps operations alive for the garbage collector,
// and completions nobody waits for show. There is one slot less than submission entries, and no slot has more than one
// entry in the queue: an entry is always free for an operation in a slot and for the wake-up's poll.
//
// Of giouring it uses the set-up, the queues' access and the plain io_uring_enter wrappers, which report errno but
// neither repeat after EINTR nor wait until a completion is there: both is done here.
type uringBackend struct {
	r    *Ring
	ring *giouring.Ring
	// enabled is set once the owner's thread has switched the ring on.
	enabled bool

	slots []slot
	free  []uint32
	// overflow holds operations that wait for a slot, in order.
	overflow opList
	// inKernel counts slots in use.
	inKernel int

	// wakeFD is the non-blocking eventfd that ends a sleep; wakeGen is the generation of the poll on it.
	wakeFD  int
	wakeGen uint32
	polling bool

	timeout syscall.Timespec
}

func newUring(entries int, r *Ring) (backend, error) {
	return newUringWith(entries, r, setupChoices[:])
}

// newUringWith is newUring with the set-up flags to try.
func newUringWith(entries int, r *Ring, choices []uint32) (backend, error) {
	ring, flags, err := setup(entries, choices)
	if err != nil {
		return nil, err
	}
	wakeFD, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		ring.QueueExit()
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	b := &uringBackend{r: r, ring: ring, wakeFD: wakeFD, slots: make([]slot, entries-1)}
	b.free = make([]uint32, len(b.slots))
	for i := range b.free {
		b.free[i] = uint32(len(b.free) - 1 - i)
	}
	r.log.Debug("io_uring is set up", "entries", entries, "flags", flagNames(flags))
	return b, nil
}

func (b *uringBackend) name() string { return "io_uring" }

// enable switches the ring on, which makes the calling thread its only submitter.
func (b *uringBackend) enable() error {
	if b.enabled {
		return nil
	}
	if _, err := b.ring.EnableRings(); err != nil {
		return fmt.Errorf("ring: enable io_uring: %w", err)
	}
	b.enabled = true
	return nil
}

func (b *uringBackend) submit(op *Op) {
	// Those that wait already go first.
	if !b.overflow.empty() || len(b.free) == 0 {
		b.overflow.push(op)
		return
	}
	b.start(op)
}

// start gives op a slot, of which one must be free, and queues its first entry.
func (b *uringBackend) start(op *Op) {
	last := len(b.free) - 1
	index := b.free[last]
	b.free = b.free[:last]
	b.inKernel++
	b.slots[index].op = op
	b.queue(index)
}

// queue makes the submission entry for the next part of the operation in a slot.
func (b *uringBackend) queue(index uint32) {
	s := &b.slots[index]
	s.gen++
	op := s.op
	sqe := b.entry()
	sqe.Fd = int32(op.FD)
	sqe.UserData = userData(index, s.gen)
	if op.Kind == Sync {
		sqe.OpCode = giouring.OpFsync
		sqe.OpcodeFlags = giouring.FsyncDatasync
		return
	}
	start, length := op.part()
	s.start = start
	part := op.Buf[start : start+length]
	sqe.Addr = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(part))))
	sqe.Len = uint32(len(part))
	sqe.Off = uint64(op.Off) + uint64(start)
	switch op.Kind {
	case Read:
		sqe.OpCode = giouring.OpRead
	case WriteSync:
		sqe.OpCode = giouring.OpWrite
		sqe.OpcodeFlags = unix.RWF_DSYNC
	default:
		sqe.OpCode = giouring.OpWrite
	}
}

// entry returns a zeroed submission entry. giouring's Prepare functions leave fields of the entry's last use behind, so
// none of them is used on it.
func (b *uringBackend) entry() *giouring.SubmissionQueueEntry {
	sqe := b.ring.GetSQE()
	if sqe == nil {
		panic("ring: submission queue full with a slot free")
	}
	*sqe = giouring.SubmissionQueueEntry{}
	b.r.stats.sqes.Add(1)
	return sqe
}

// arm queues the poll of the eventfd unless there is one.
func (b *uringBackend) arm() {
	if b.polling {
		return
	}
	b.polling = true
	b.wakeGen++
	sqe := b.entry()
	sqe.OpCode = giouring.OpPollAdd
	sqe.Fd = int32(b.wakeFD)
	sqe.Len = giouring.PollAddMulti
	sqe.OpcodeFlags = unix.POLLIN
	sqe.UserData = userData(wakeSlot, b.wakeGen)
}

func (b *uringBackend) reap() int {
	n := 0
	// What is there now; operations that Done submits can't add to it before the next io_uring_enter that matters.
	for ready := b.ring.CQReady(); ready > 0; ready-- {
		cqe, err := b.ring.PeekCQE()
		if err != nil || cqe == nil {
			break
		}
		// The kernel may overwrite the entry as soon as it is marked seen.
		c := *cqe
		b.ring.CQESeen(cqe)
		n += b.completed(c.UserData, c.Res, c.Flags)
	}
	return n
}

// completed handles one completion and returns the number of operations that ended with it.
func (b *uringBackend) completed(data uint64, res int32, flags uint32) int {
	index, gen := uint32(data), uint32(data>>32)
	if index == wakeSlot && gen == b.wakeGen && b.polling {
		b.woken(res, flags)
		return 0
	}
	if int64(index) >= int64(len(b.slots)) || b.slots[index].op == nil || b.slots[index].gen != gen {
		b.r.stats.stale.Add(1)
		b.r.log.LogAttrs(context.Background(), slog.LevelError, "io_uring completed an operation that is not in flight",
			slog.Uint64("user_data", data), slog.Int("result", int(res)))
		return 0
	}
	s := &b.slots[index]
	op := s.op
	var err error
	if res < 0 {
		err = syscall.Errno(-res)
		res = 0
	}
	if !op.advance(s.start, int(res), err) {
		b.queue(index)
		return 0
	}
	s.op = nil
	s.gen++ // a second completion of this use would be stale
	b.free = append(b.free, index)
	b.inKernel--
	if next := b.overflow.pop(); next != nil {
		b.start(next)
	}
	b.r.complete(op)
	return 1
}

// woken handles a completion of the poll on the eventfd.
func (b *uringBackend) woken(res int32, flags uint32) {
	b.drainWake()
	if flags&giouring.CQEFMore != 0 {
		return
	}
	// A multishot poll ends, for example, where the completion queue had no room for it.
	b.polling = false
	if res < 0 && res != -int32(unix.ECANCELED) {
		b.r.err = fmt.Errorf("ring: io_uring poll of the wake-up eventfd: %w", syscall.Errno(-res))
	}
}

// drainWake resets the eventfd. EAGAIN: it was reset before.
func (b *uringBackend) drainWake() {
	var buf [8]byte
	b.r.stats.syscalls.Add(1)
	_, _ = unix.Read(b.wakeFD, buf[:])
}

func (b *uringBackend) signal() {
	one := [8]byte{1}
	b.r.stats.syscalls.Add(1)
	for {
		// EAGAIN: the counter is full and the owner as good as awake.
		if _, err := unix.Write(b.wakeFD, one[:]); !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

func (b *uringBackend) flush() error {
	if b.inKernel == 0 && b.ring.SQReady() == 0 {
		return nil
	}
	if err := b.enable(); err != nil {
		return err
	}
	for {
		b.r.stats.syscalls.Add(1)
		_, err := b.ring.SubmitAndGetEvents()
		switch {
		case err == nil && b.ring.SQReady() == 0:
			return nil
		case err == nil, errors.Is(err, unix.EINTR):
			// The kernel stops at an entry that it refuses, and takes the rest at the next call.
		default:
			// Busy: what is not taken yet stays queued and goes with the next call.
			return enterError(err)
		}
	}
}

func (b *uringBackend) sleep(d time.Duration) error {
	if err := b.enable(); err != nil {
		return err
	}
	b.arm()
	b.r.stats.syscalls.Add(1)
	var err error
	if d < 0 {
		_, err = b.ring.SubmitAndWait(1)
	} else {
		b.timeout = syscall.NsecToTimespec(int64(d))
		_, err = b.ring.SubmitAndWaitTimeout(1, &b.timeout, nil)
	}
	if busy(err) && b.ring.CQReady() == 0 {
		time.Sleep(busyPause)
	}
	return enterError(err)
}

// close frees the ring; no operation is in flight and nobody signals any more.
func (b *uringBackend) close() error {
	b.ring.QueueExit()
	return unix.Close(b.wakeFD)
}

// busy tells whether the kernel could not take a submission for now: out of memory, or completions must be reaped first.
func busy(err error) bool { return errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EBUSY) }

// enterError returns nil for results of io_uring_enter after which the caller just goes on.
func enterError(err error) error {
	switch {
	case err == nil, busy(err), errors.Is(err, unix.EINTR), errors.Is(err, unix.ETIME):
		return nil
	case errors.Is(err, unix.EEXIST):
		return fmt.Errorf("ring: io_uring_enter: %w: a ring may only be driven by one goroutine that is locked to its thread", err)
	}
	return fmt.Errorf("ring: io_uring_enter: %w", err)
}

func userData(index, gen uint32) uint64 { return uint64(gen)<<32 | uint64(index) }
