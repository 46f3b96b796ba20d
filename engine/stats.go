package engine

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/mortarmq/mortarmq/engine/coord"
	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal"
)

// Stats is a picture of the engine at one moment; it belongs to the caller.
type Stats struct {
	Uptime time.Duration
	// Backend is how the disk is reached, "io_uring" or "pread"; Reason says why not io_uring.
	Backend, Reason string
	// Failure is what stopped part of the broker, nil while all is well.
	Failure error
	// Quarantined are the streams that recovery refused to serve.
	Quarantined []wal.QuarantineReport
	Shards      []ShardStats
	Coord       *coord.Stats
}

// ShardStats counts what one shard did since the start.
type ShardStats struct {
	// Rounds were committed, with Records records in RoundBytes bytes (padding included).
	Rounds, Records, RoundBytes uint64
	// Duplicates is how many publishes were recognised as sent before, Refused how many got an error.
	Duplicates, Refused uint64
	// QueuedBytes wait for the shard, PendingBytes for their segments; MemoryBytes are in use off the heap. FreeBytes are
	// left on the file system, -1 before that is known.
	QueuedBytes, PendingBytes, MemoryBytes, FreeBytes int64
	// CommitRing and StoreRing count the disk operations of the commit path and of everything behind it.
	CommitRing, StoreRing ring.Stats
	// Scrub counts what was read of full segments to find rot.
	Scrub wal.ScrubStats
	// Replicas are the nodes' copies of the log, in a cluster only: on the leader those of all nodes, elsewhere this one's.
	Replicas []ReplicaStats
}

// Stats asks every part of the engine for its figures.
func (e *Engine) Stats(ctx context.Context) (*Stats, error) {
	c, err := e.coord.Stats(ctx)
	if err != nil {
		return nil, err
	}
	s := &Stats{Uptime: e.now(), Failure: e.Err(), Coord: c}
	e.mu.Lock()
	s.Quarantined = slices.Clone(e.quarantined)
	e.mu.Unlock()
	s.Backend, s.Reason = e.Backend()
	for i, sh := range e.shards {
		st := ShardStats{
			Rounds: sh.stats.Rounds.Load(), Records: sh.stats.Records.Load(), RoundBytes: sh.stats.RoundBytes.Load(),
			Duplicates: sh.stats.Duplicates.Load(), Refused: sh.stats.Refused.Load(),
			QueuedBytes: sh.queued.Load(), PendingBytes: sh.store.pending.Load(), FreeBytes: sh.store.free.Load(),
			MemoryBytes: e.pools[i].InUse(), Scrub: *sh.store.scrubbed.Load(),
			CommitRing: sh.device.stats(), StoreRing: sh.store.device.stats(),
		}
		if sh.repl != nil {
			st.Replicas = sh.repl.replicas()
		}
		s.Shards = append(s.Shards, st)
	}
	return s, nil
}

// Backend returns how the disk is reached, "io_uring" or "pread", and for the latter why.
func (e *Engine) Backend() (name, reason string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.backend, e.reason
}

// Healthy reports whether the engine serves all that it should, and its state in words. It never blocks.
func (e *Engine) Healthy() (ok bool, state string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.closed:
		return false, "closing"
	case e.failure != nil:
		return false, fmt.Sprintf("read only: %v", e.failure)
	case e.coord.Registry().Quarantined():
		return false, "metadata is quarantined: see metadata/quarantine in the data directory"
	case len(e.quarantined) > 0:
		return true, fmt.Sprintf("serving, except %d quarantined partitions", len(e.quarantined))
	case slices.ContainsFunc(e.stores, func(l *storeLoop) bool { return l.free.Load() == 0 }):
		return true, "serving, but publishes are refused: the disk is full"
	}
	return true, "serving"
}
