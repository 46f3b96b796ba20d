package engine

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal"
)

// Options configures an Engine. Start from DefaultOptions; Validate reports every problem at once. Immutable after Open.
type Options struct {
	// DataDir holds everything the broker persists.
	DataDir string
	// Shards is the number of shards, each with a journal of its own. 0 means the number that the data directory was
	// created with, or 1 for a new one. It cannot change once the directory exists.
	Shards int
	// SegmentMaxBytes is the size from which a partition's segment is closed and a new one begun.
	SegmentMaxBytes int64
	// JournalFileBytes is the size of one journal file; the journal starts with JournalMinFiles of them, grows to
	// JournalMaxFiles on demand and recycles them.
	JournalFileBytes int64
	JournalMinFiles  int
	JournalMaxFiles  int
	// MaxRoundBytes bounds a journal round of several records; 0 means wal.DefaultMaxRoundBytes.
	MaxRoundBytes int
	// MemoryBytes bounds the off-heap memory of one shard: rounds that gather or are not yet in segments, the tail kept
	// for consumers, cold reads.
	MemoryBytes int64
	// MaxOpenFiles is how many file descriptors all stores together may keep open without using them; 0 means
	// wal.DefaultMaxOpenFiles for each. Files that were written stay open until they are flushed, and don't count.
	MaxOpenFiles int
	// ScrubBytes is how many bytes of full segments each shard reads in a second, in the background, to find rot; 0: none. The
	// first time ScrubAfter after the start, then each ScrubEvery; 0 means the defaults of package wal.
	ScrubBytes             int64
	ScrubAfter, ScrubEvery time.Duration
	// TailBytes is how much of MemoryBytes recently committed rounds may hold after they were written out.
	TailBytes int64

	PartitionDefaultCount   int
	DeliveryMaxAttempts     int
	DeliveryLease           time.Duration
	PollMaxWait             time.Duration
	CreditInitialCount      int
	MetadataSnapshotRecords int

	// IOBackend is "auto", "uring" or "pread".
	IOBackend string
	// OpenDevice opens the disk for each goroutine that uses one; nil means a ring.Ring by IOBackend.
	OpenDevice func() (Device, error)
	// Clock is the time; nil means the machine's.
	Clock Clock
	// Stepped has the engine start no goroutines: its owner drives it with Step. For simulations.
	Stepped bool
	// Heap is where the engine's buffers come from; nil means the kernel. For simulations, whose processes end without
	// giving anything back.
	Heap *ring.Heap
	// Seed feeds the jitter of retries and the keys of journal files; 0 takes them from the system.
	Seed   uint64
	Logger *slog.Logger

	// cluster is set by Node.
	cluster *clusterOptions
}

// Clock is where an engine takes the time from. Any goroutine calls it.
type Clock interface {
	// Now is a monotonic time since some moment in the past.
	Now() time.Duration
	// WallMs is the wall clock in Unix milliseconds.
	WallMs() uint64
}

// DefaultOptions returns the defaults of the specification, for the data directory dir.
func DefaultOptions(dir string) Options {
	return Options{
		DataDir:                 dir,
		SegmentMaxBytes:         64 << 20,
		JournalFileBytes:        64 << 20,
		JournalMinFiles:         2,
		JournalMaxFiles:         8,
		MemoryBytes:             384 << 20,
		TailBytes:               64 << 20,
		ScrubBytes:              wal.DefaultScrubBytes,
		PartitionDefaultCount:   4,
		DeliveryMaxAttempts:     5,
		DeliveryLease:           30 * time.Second,
		PollMaxWait:             5 * time.Second,
		CreditInitialCount:      256,
		MetadataSnapshotRecords: 8192,
		IOBackend:               "auto",
	}
}

// Bounds of the options.
const (
	maxShards             = 64
	minJournalFileBytes   = 2 << 20 // a round of many messages, and the file's header
	maxJournalFileBytes   = 1 << 30
	minSimulatedFileBytes = 128 << 10
	minMemoryBytes        = 96 << 20 // a gathering and a written round of 17 MiB each, slab rounding, a cold read
	minTailBytes          = 1 << 20
	minScrubBytes         = 64 << 10
	maxScrubBytes         = 16 << 30
	minOpenFiles          = 64 // per store: what it uses at once
	minSegmentMaxBytes    = 64 << 10
	maxSegmentMaxBytes    = 4<<30 - 17<<20 // offsets in the sparse index are 32 bits
	maxPartitionsPerTopic = 65534          // 0xFFFF asks for routing
)

// Validate reports every option that is out of its bounds.
func (o *Options) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(o.DataDir != "", "data_dir is empty: name the directory that holds the broker's data")
	check(o.Shards >= 0 && o.Shards <= maxShards, "shards is %d: use 1 to %d, or 0 for the default", o.Shards, maxShards)
	check(o.SegmentMaxBytes >= minSegmentMaxBytes && o.SegmentMaxBytes <= maxSegmentMaxBytes,
		"segment_max_bytes is %d: use %d to %d", o.SegmentMaxBytes, minSegmentMaxBytes, maxSegmentMaxBytes)
	smallest := int64(minJournalFileBytes)
	if o.Stepped {
		smallest = minSimulatedFileBytes
	}
	check(o.JournalFileBytes >= smallest && o.JournalFileBytes <= maxJournalFileBytes && o.JournalFileBytes%4096 == 0,
		"journal_file_bytes is %d: use a multiple of 4096 from %d to %d", o.JournalFileBytes, smallest, maxJournalFileBytes)
	check(o.JournalMinFiles >= 2 && o.JournalMinFiles <= o.JournalMaxFiles && o.JournalMaxFiles <= 1024,
		"journal files are %d to %d: use at least 2 and at most 1024", o.JournalMinFiles, o.JournalMaxFiles)
	check(o.MemoryBytes >= minMemoryBytes, "memory_bytes is %d: use at least %d", o.MemoryBytes, minMemoryBytes)
	check(o.TailBytes >= minTailBytes && o.TailBytes <= o.MemoryBytes/2,
		"tail_bytes is %d: use %d to half of memory_bytes (%d)", o.TailBytes, minTailBytes, o.MemoryBytes)
	check(o.ScrubBytes == 0 || o.ScrubBytes >= minScrubBytes && o.ScrubBytes <= maxScrubBytes,
		"scrub_bytes_per_second is %d: use %d to %d, or 0 to read nothing", o.ScrubBytes, minScrubBytes, int64(maxScrubBytes))
	check(o.ScrubAfter >= 0 && o.ScrubEvery >= 0, "a scrub begins %v after the start and every %v: use no negative times", o.ScrubAfter, o.ScrubEvery)
	check(o.MaxOpenFiles >= 0, "at most %d open files: allow at least %d", o.MaxOpenFiles, minOpenFiles)
	check(o.PartitionDefaultCount >= 1 && o.PartitionDefaultCount <= maxPartitionsPerTopic,
		"partition_default_count is %d: use 1 to %d", o.PartitionDefaultCount, maxPartitionsPerTopic)
	check(o.DeliveryMaxAttempts >= 1, "delivery_max_attempts is %d: use at least 1", o.DeliveryMaxAttempts)
	check(o.DeliveryLease > 0, "delivery_lease_ms is %v: use at least 1", o.DeliveryLease)
	check(o.PollMaxWait >= time.Millisecond, "poll_max_wait_ms is %v: use at least 1", o.PollMaxWait)
	check(o.CreditInitialCount >= 1 && o.CreditInitialCount <= 65535, "credit_initial_count is %d: use 1 to 65535", o.CreditInitialCount)
	check(o.MetadataSnapshotRecords >= 1, "metadata_snapshot_records is %d: use at least 1", o.MetadataSnapshotRecords)
	switch o.IOBackend {
	case "auto", "uring", "pread":
	default:
		check(false, "io_backend is %q: use auto, uring or pread", o.IOBackend)
	}
	return errors.Join(errs...)
}
