package replica

import (
	"fmt"
	"slices"
	"time"
)

// The defaults of Config.
const (
	DefaultHeartbeat     = 100 * time.Millisecond
	DefaultLease         = time.Second
	DefaultQuorumTimeout = 2 * time.Second
	DefaultSoftGap       = 5 * time.Second
	DefaultSoftGapBytes  = 64 << 20
	DefaultHardGap       = 30 * time.Second
	DefaultFetchTimeout  = 10 * time.Second
)

// MaxNodes is the most nodes of a cluster. Two things are argued for three nodes only: that a learner with a quorum of the
// others behind its leader can't have forgotten a promise that still matters, and that there is one candidate beside a leader.
const MaxNodes = 3

// MaxLogs is the most logs of a cluster.
const MaxLogs = 1024

// Config configures a Node. It doesn't change.
type Config struct {
	Self NodeID
	// Nodes are all nodes of the cluster, this one included, ascending: one or three.
	Nodes []NodeID
	// Rank is this node's place in the order of preferred leaders, from 0; it shortens the random delay before an election
	// and decides nothing else.
	Rank int
	// Logs is how many logs a cluster gets that is formed by this node. A formed cluster has its own number.
	Logs int

	// Heartbeat is the time between two renewals of the lease.
	Heartbeat time.Duration
	// Lease is how long a follower helps nobody else to leadership after a renewal. A leader counts nine tenths of it, from
	// the sending, so clocks may run 10 % apart.
	Lease time.Duration
	// QuorumTimeout is how long a round may wait for a majority before the cluster is read-only.
	QuorumTimeout time.Duration
	// SoftGap and SoftGapBytes are how far a follower may be behind before it is said to lag.
	SoftGap      time.Duration
	SoftGapBytes uint64
	// HardGap is how long no follower may be heard before writes get 0x6003 instead of 0x6002.
	HardGap time.Duration
	// FetchTimeout is how long an elected node may take to fetch what it lacks.
	FetchTimeout time.Duration

	// Rand is the source of random delays, instances and of the cluster's id. It must differ between nodes and starts.
	Rand func() uint64
}

// withDefaults fills in what is zero.
func (c Config) withDefaults() Config {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&c.Heartbeat, DefaultHeartbeat)
	def(&c.Lease, DefaultLease)
	def(&c.QuorumTimeout, DefaultQuorumTimeout)
	def(&c.SoftGap, DefaultSoftGap)
	def(&c.HardGap, DefaultHardGap)
	def(&c.FetchTimeout, DefaultFetchTimeout)
	if c.SoftGapBytes == 0 {
		c.SoftGapBytes = DefaultSoftGapBytes
	}
	c.Nodes = slices.Clone(c.Nodes)
	return c
}

func (c *Config) validate() error {
	switch {
	case len(c.Nodes) != 1 && len(c.Nodes) != MaxNodes:
		return fmt.Errorf("%w: %d nodes; a cluster has 1 or %d", ErrConfig, len(c.Nodes), MaxNodes)
	case !slices.IsSorted(c.Nodes) || len(slices.Compact(slices.Clone(c.Nodes))) != len(c.Nodes) || c.Nodes[0] == 0:
		return fmt.Errorf("%w: node ids %v; they must ascend from 1 and differ", ErrConfig, c.Nodes)
	case !slices.Contains(c.Nodes, c.Self):
		return fmt.Errorf("%w: this node's id %d is not among %v", ErrConfig, c.Self, c.Nodes)
	case c.Rank < 0 || c.Rank >= len(c.Nodes):
		return fmt.Errorf("%w: rank %d of %d nodes", ErrConfig, c.Rank, len(c.Nodes))
	case c.Logs < 1 || c.Logs > MaxLogs:
		return fmt.Errorf("%w: %d logs; 1 to %d are possible", ErrConfig, c.Logs, MaxLogs)
	case c.Heartbeat <= 0 || c.Lease < 4*c.Heartbeat:
		return fmt.Errorf("%w: lease %v with heartbeat %v; it must be at least four times that", ErrConfig, c.Lease, c.Heartbeat)
	case c.QuorumTimeout <= 0 || c.SoftGap <= 0 || c.HardGap <= 0 || c.FetchTimeout <= 0:
		return fmt.Errorf("%w: a time is negative", ErrConfig)
	case c.Rand == nil:
		return fmt.Errorf("%w: no source of random numbers", ErrConfig)
	}
	return nil
}

// leaderLease is how long a leader trusts a renewal, from its sending.
func (c *Config) leaderLease() time.Duration {
	return c.Lease / 10 * 9
}

// delay returns a random time to wait before standing for election, longer the more attempts failed.
func (c *Config) delay(attempt int) time.Duration {
	spread := 2 * c.Heartbeat << min(attempt, 3)
	width := spread * time.Duration(c.Rank+1) / time.Duration(len(c.Nodes))
	return time.Duration(c.Rand() % uint64(width))
}
