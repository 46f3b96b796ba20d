package wal

import (
	"fmt"

	"github.com/mortarmq/mortarmq/ring"
)

// ReadRequest asks a Store for records that are in a partition's segments. Its owner allocates it, fills in the first
// part, hands it to Store.Read and gets it back, with the results, in Done; in between it belongs to the store.
type ReadRequest struct {
	Stream StreamID
	// From is the first sequence wanted; below the oldest retained record the chunk starts at that one. Ignored with
	// ByTime.
	From Sequence
	// MaxBytes bounds the chunk, except that one record larger than it is returned whole. 0 means DefaultReadBytes,
	// more than MaxReadBytes means MaxReadBytes.
	MaxBytes int
	// DiskBytes, where it is more, stands for MaxBytes where the records are not in the page cache: a larger read makes better
	// use of a disk, a smaller one is still in the processor's caches when its bytes are looked at.
	DiskBytes int
	// ByTime asks for the first record whose timestamp is at or after TimeMs (Unix milliseconds) instead.
	ByTime bool
	TimeMs uint64
	// Done runs on the store's goroutine, never from within Store.Read. It may call Store.Read again.
	Done func(*ReadRequest)
	// Tag is the owner's and left alone by the store.
	Tag uint64

	// Chunk is the result; the owner of the request owns its one reference. nil without an error means that the segments
	// hold no such record (yet): what is newer is in memory, see Store.OnWritten.
	Chunk *Chunk
	// Err is a *CorruptionError where the partition is quarantined (and then stays so), ErrNoMemory where the buffer
	// pool is at its limit (ask again later), a *FailedError where the store has failed, or the disk's error.
	Err error

	next *ReadRequest
}

const (
	// DefaultReadBytes is the size in bytes of a cold read that doesn't name one.
	DefaultReadBytes = 512 << 10
	// MaxReadBytes bounds a cold read, except for one larger record.
	MaxReadBytes = 1 << 20
)

// Chunk is a run of consecutive verified records of one partition, read from its segments. It is immutable and
// reference-counted; Retain and Release may be called from any goroutine.
type Chunk struct {
	Stream StreamID
	// First is the sequence of the first record.
	First Sequence
	// Count is the number of records, at least 1.
	Count int

	slab *ring.Slab
	data []byte
}

// Last returns the sequence of the last record.
func (c *Chunk) Last() Sequence { return c.First + Sequence(c.Count) - 1 }

// String names the chunk without its contents.
func (c *Chunk) String() string {
	if c == nil {
		return "no records"
	}
	return fmt.Sprintf("%v, sequences %d to %d", c.Stream, c.First, c.Last())
}

// Bytes returns the encoded records back to back; PeekRecord reads them. The slice is off-heap and valid while the
// caller holds a reference.
func (c *Chunk) Bytes() []byte { return c.data }

// Size returns the bytes of memory that the chunk pins.
func (c *Chunk) Size() int { return len(c.slab.Bytes()) }

// Retain adds a reference; the caller holds one already.
func (c *Chunk) Retain() { c.slab.Retain() }

// Release drops a reference; with the last one the memory is gone.
func (c *Chunk) Release() { c.slab.Release() }
