package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/mortarmq/mortarmq/tests/harness"
)

// sessionTimeout is how long the broker waits for a member that doesn't come back.
const sessionTimeout = 10 * time.Second

// Failover kills the leader again and again under load.
type Failover struct {
	// Binary is mortard, Dir where the nodes keep their data and logs, Config their further settings.
	Binary, Dir string
	Config      map[string]any
	// Rounds is how many kills there are.
	Rounds int
	// Load is what happens meanwhile; Addrs and Topic are filled in.
	Load LoadOptions
	Logf func(format string, args ...any)
}

// FailoverReport is what a Failover measured: for each kill the milliseconds until a publish was acknowledged by the next leader.
type FailoverReport struct {
	Rounds     int       `json:"rounds"`
	ResumeMs   []float64 `json:"resume_ms"`
	MedianMs   float64   `json:"median_ms"`
	MaxMs      float64   `json:"max_ms"`
	Published  int64     `json:"published"`
	Deliveries int       `json:"acknowledged_deliveries"`
	// Moved is how often the group lost a member that took longer than its session to come back.
	Moved int `json:"slow_rejoins"`
}

// Run kills the leader, waits until another one acknowledges, and starts the old one again, Rounds times. In the end nothing that
// was acknowledged may be lost or doubled, no acknowledged delivery may have come again, and no partition may have moved.
func (f *Failover) Run(ctx context.Context) (*FailoverReport, error) {
	c, err := harness.NewCluster(harness.ClusterOptions{Binary: f.Binary, Dir: f.Dir, Config: f.Config})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if err := bounded(ctx, c.Start); err != nil {
		return nil, err
	}
	o := f.Load
	o.Addrs, o.Topic = c.Addrs(), "load"
	l, err := StartLoad(ctx, o)
	if err != nil {
		return nil, err
	}
	report := &FailoverReport{Rounds: f.Rounds}
	for round := range f.Rounds {
		if err := f.round(ctx, c, l, report); err != nil {
			return nil, errors.Join(fmt.Errorf("round %d: %w", round, err), l.end(ctx), c.Crashed())
		}
	}
	if err := errors.Join(l.Finish(ctx, nothingLeft(ctx, c, o.Topic)), c.CheckSums(), c.Crashed()); err != nil {
		return nil, err
	}
	report.Published, report.Deliveries = l.Answered(), l.Acked()
	sorted := slices.Sorted(slices.Values(report.ResumeMs))
	report.MedianMs, report.MaxMs = sorted[len(sorted)/2], sorted[len(sorted)-1]
	return report, nil
}

// bounded calls f with a context that ends after patience.
func bounded(ctx context.Context, f func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return f(ctx)
}

// round is one kill.
func (f *Failover) round(ctx context.Context, c *harness.Cluster, l *Load, report *FailoverReport) error {
	ctx, cancel := context.WithTimeout(ctx, 3*patience)
	defer cancel()
	before, err := f.settled(ctx, c, l)
	if err != nil {
		return err
	}
	old, err := c.Leader(ctx)
	if err != nil {
		return err
	}
	var leader struct {
		Epoch uint64 `json:"leader_epoch"`
	}
	if err := c.Node(old).FetchJSON("/leader", &leader); err != nil {
		return err
	}
	if err := l.AwaitMore(ctx, 200); err != nil {
		return err
	}
	resumed, at := l.Epoch(leader.Epoch)
	killed := time.Now()
	c.Node(old).Kill()
	select {
	case <-resumed:
	case <-ctx.Done():
		return fmt.Errorf("no publish was acknowledged after node %d was killed: %w", old, ctx.Err())
	}
	took := at().Sub(killed)
	report.ResumeMs = append(report.ResumeMs, float64(took.Microseconds())/1000)
	f.Logf("node %d of epoch %d was killed: writes resumed after %v", old, leader.Epoch, took.Round(time.Millisecond))
	after, err := f.settled(ctx, c, l)
	if err != nil {
		return err
	}
	if !slices.Equal(before, after) {
		if settled := time.Since(killed); settled < sessionTimeout*8/10 {
			return fmt.Errorf("partitions moved, although all members were back after %v: %v, then %v", settled, before, after)
		}
		report.Moved++ // a member that comes back too late loses what it has
	}
	if err := c.Launch(old); err != nil {
		return err
	}
	return c.AwaitHealthy(ctx)
}

// owner is who has a partition.
type owner struct {
	member, epoch uint64
}

// settled waits until the leader says that all members are there and have their partitions, and returns these.
func (f *Failover) settled(ctx context.Context, c *harness.Cluster, l *Load) ([]owner, error) {
	var owners []owner
	err := l.await(ctx, "the group is settled", func() bool {
		i, err := c.Leader(ctx)
		if err != nil {
			return false
		}
		g, err := c.Node(i).GroupState(l.opts.Topic, group)
		if err != nil || !g.Settled(l.opts.Members) {
			return false
		}
		owners = owners[:0]
		for _, p := range g.Partitions {
			owners = append(owners, owner{p.Member, p.OwnershipEpoch})
		}
		return true
	})
	return owners, err
}

// nothingLeft tells whether, as the leader sees it, the group of a Load has acknowledged everything.
func nothingLeft(ctx context.Context, c *harness.Cluster, topic string) func() bool {
	return nothingLeftOf(ctx, c, topic, group)
}

// nothingLeftOf tells the same of any group; the leader is one of these nodes, or of all.
func nothingLeftOf(ctx context.Context, c *harness.Cluster, topic, group string, nodes ...int) func() bool {
	return func() bool {
		i, err := c.Leader(ctx, nodes...)
		if err != nil {
			return false
		}
		g, err := c.Node(i).GroupStats(topic, group)
		return err == nil && g.Published > 0 && g.Acknowledged == g.Published && g.Lag == 0
	}
}
