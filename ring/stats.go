package ring

import "sync/atomic"

// Stats counts what a ring has done since it was opened.
type Stats struct {
	// Syscalls counts io_uring_enter and the wake-up's reads and writes, or the data system calls of the pread backend.
	// Those of file-system operations are left out.
	Syscalls uint64
	// SQEs counts the entries handed to the kernel; 0 without io_uring.
	SQEs uint64
	// Flushes counts the Sync and WriteSync operations that succeeded.
	Flushes uint64
	// BytesRead and BytesWritten count what data operations moved, failed ones included.
	BytesRead    uint64
	BytesWritten uint64
	// Stale counts completions that belong to no operation in flight. Anything but 0 is a fault of the ring or the
	// kernel.
	Stale uint64
}

type counters struct {
	syscalls, sqes, flushes, bytesRead, bytesWritten, stale atomic.Uint64
}

func (c *counters) snapshot() Stats {
	return Stats{
		Syscalls:     c.syscalls.Load(),
		SQEs:         c.sqes.Load(),
		Flushes:      c.flushes.Load(),
		BytesRead:    c.bytesRead.Load(),
		BytesWritten: c.bytesWritten.Load(),
		Stale:        c.stale.Load(),
	}
}

// count adds a data operation that has ended.
func (c *counters) count(op *Op) {
	switch op.Kind {
	case Read:
		c.bytesRead.Add(uint64(op.N))
	case Write, WriteSync:
		c.bytesWritten.Add(uint64(op.N))
	default:
	}
	if op.Err == nil && (op.Kind == Sync || op.Kind == WriteSync) {
		c.flushes.Add(1)
	}
}
