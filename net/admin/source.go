package admin

import (
	"context"
	"time"

	"github.com/mortarmq/mortarmq/engine/coord"
)

// Source is what the admin port reports on. Its methods may be called from any goroutine.
type Source interface {
	// Snapshot returns the state of the broker, which the caller only reads.
	Snapshot(ctx context.Context) (*Snapshot, error)
	// Healthy reports whether the broker can serve what its role asks, and its state in words. It never blocks.
	Healthy() (ok bool, state string)
}

// Snapshot is a picture of the broker at one moment.
type Snapshot struct {
	NodeID    int
	Version   string
	Uptime    time.Duration
	IOBackend string // "io_uring" or "pread"
	IOReason  string // why it is not "io_uring"; empty otherwise

	// LeaderID is the node that leads; on a single node, this one.
	LeaderID int
	Quorum   QuorumState

	Connections int64
	Network     []Counter // what the client port counts

	// Coord holds topics, groups and the leader epoch.
	Coord *coord.Stats
	// Storage counts what the shards and their stores do.
	Storage []Counter
	// Peers counts what the connections to the other nodes do.
	Peers []Counter
}

// Counter is one number for /metrics beside the fixed names.
type Counter struct {
	// Name is the metric's whole name; a counter's ends in _total.
	Name, Help string
	// Gauge says that the value may fall.
	Gauge bool
	Value float64
	// Shard, Peer and Lane label the value if they are not empty. All counters of a name have the same ones.
	Shard, Peer, Lane string
}

// QuorumState is the value of mortarmq_quorum_state.
type QuorumState uint8

// The quorum states of the specification. A single node is a healthy majority of one as long as it can write.
const (
	QuorumHealthy QuorumState = iota
	QuorumSoft
	QuorumReadOnly
)

// String returns the state as the command line prints it.
func (q QuorumState) String() string {
	switch q {
	case QuorumHealthy:
		return "healthy"
	case QuorumSoft:
		return "soft"
	default:
		return "read_only"
	}
}
