package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/mortarmq/mortarmq/tests/harness"
)

const (
	// absenceSize is the value size of what is published at a rate, absenceFillSize of what the follower misses.
	absenceSize     = 1 << 10
	absenceFillSize = 16 << 10
	// absenceStretch is the length of one run at the rate; the state of the cluster is looked at between two.
	absenceStretch = 2 * time.Second
	// absenceNotice is how long it may take until the leader finds the follower behind.
	absenceNotice = 10 * time.Second
	// absencePatience is how long a catch-up may take.
	absencePatience = time.Hour
)

// absence stops a follower, stores what it will have missed, lets it come back, and measures publishes at Config.Rate before,
// while it catches up, and afterwards. The sample's latency is that of the time meanwhile; those of the other times, the
// length of the catch-up and its speed are in Values.
func absence(ctx context.Context, r *runner, s *Sample) error {
	free, err := freeBytes(r.dir)
	if err != nil {
		return err
	}
	// On three disks, but for the journals, which are there three times as well.
	if need := 3 * (r.cfg.AbsentBytes + r.cfg.AbsentBytes/10 + 2*r.cfg.journalBytes()); free < need {
		return fmt.Errorf("%w: it needs %d MiB free in %s, there are %d", errSkipped, need>>20, r.dir, free>>20)
	}
	a := &absenceRun{r: r, s: s, nodes: r.newNodes(3)}
	if err := r.startNodes(ctx, a.nodes); err != nil {
		return err
	}
	defer killNodes(a.nodes)
	if a.led, err = leader(ctx, a.nodes); err != nil {
		return err
	}
	for _, n := range a.nodes {
		if n != a.led {
			a.away = n
		}
	}
	return a.run(ctx)
}

// absenceRun is one run of the workload.
type absenceRun struct {
	r         *runner
	s         *Sample
	nodes     []*node
	led, away *node
	topic     uint16
	producers uint64 // producer ids used so far
	began     int64
	event     string // what was done since the last stretch
}

func (a *absenceRun) run(ctx context.Context) (err error) {
	if a.topic, err = declare(a.led.client, fewPartitions); err != nil {
		return err
	}
	if err := a.away.d.Stop(harness.DefaultStopTimeout); err != nil {
		return err
	}
	a.away.d = nil
	if err := a.fill(ctx); err != nil {
		return fmt.Errorf("publish what the follower misses: %w", err)
	}
	a.began = now()
	before, err := a.rated(ctx, func() bool { return false })
	if err != nil {
		return err
	}
	began := now()
	if err := a.r.startNode(ctx, a.away, a.nodes); err != nil {
		return err
	}
	a.event = fmt.Sprintf("node %d is back", a.away.id)
	var took float64
	seen := false // a node that has just connected is not known to be behind
	meanwhile, err := a.rated(ctx, func() bool {
		took = float64(now()-began) / 1e9
		led, _ := agreed(a.nodes) // all three, and healthy: nobody is behind
		seen = seen || led == nil
		return led == nil || !seen && took < absenceNotice.Seconds()
	})
	if err != nil {
		return err
	}
	if !seen {
		return errors.New("the follower was never behind: more has to be published in its absence")
	}
	a.event = fmt.Sprintf("node %d has caught up", a.away.id)
	after, err := a.rated(ctx, func() bool { return false })
	if err != nil {
		return err
	}
	for _, n := range a.nodes {
		if err := n.d.Crashed(); err != nil {
			return err
		}
	}
	s := a.s
	s.System = fmt.Sprintf("%s-%d", mortardName, len(a.nodes))
	s.Latency = quantiles(meanwhile)
	s.Seconds, s.Messages = took, uint64(meanwhile.TotalCount())
	s.MsgsPerSec = float64(s.Messages) / took
	s.MBPerSec = float64(a.r.cfg.AbsentBytes) / took / 1e6
	s.Values = map[string]float64{"catchup_s": took, "catchup_mb_per_s": s.MBPerSec}
	for name, h := range map[string]*hdrhistogram.Histogram{"before": before, "after": after} {
		q := quantiles(h)
		s.Values[name+"_p50_us"], s.Values[name+"_p99_us"] = q.P50, q.P99
	}
	return nil
}

func (a *absenceRun) publisher(size, window int) (*Publisher, error) {
	a.producers++
	return NewPublisher(PublisherOptions{Addr: a.led.client, TopicID: a.topic, Partitions: []uint16{0, 1, 2, 3}, ProducerID: a.producers, ValueBytes: size,
		Window: window, Seed: a.producers})
}

// fill publishes AbsentBytes of values.
func (a *absenceRun) fill(ctx context.Context) error {
	p, err := a.publisher(absenceFillSize, pipelineWindow)
	if err != nil {
		return err
	}
	defer p.Close()
	stop := context.AfterFunc(ctx, func() { p.Close() })
	defer stop()
	return p.Run(uint64(a.r.cfg.AbsentBytes/absenceFillSize)+1, nil)
}

// rated publishes at the rate for Duration at least, and on while more says so.
func (a *absenceRun) rated(ctx context.Context, more func() bool) (*hdrhistogram.Histogram, error) {
	all, began := newHist(), now()
	for {
		p, err := a.publisher(absenceSize, maxWindow)
		if err != nil {
			return nil, err
		}
		err = p.RunRated(ctx, a.r.cfg.Rate, 0, uint64(a.r.cfg.Rate*absenceStretch.Seconds())+1)
		_ = p.Close() // its errors have shown in its run
		if err != nil {
			return nil, err
		}
		all.Merge(p.Latency())
		a.moment(p.Latency())
		again, lasted := more(), time.Duration(now()-began)
		if lasted > absencePatience {
			return nil, fmt.Errorf("the follower has not caught up within %v", absencePatience)
		}
		if !again && lasted >= a.r.cfg.Duration {
			return all, nil
		}
	}
}

// moment adds a stretch to the timeline.
func (a *absenceRun) moment(h *hdrhistogram.Histogram) {
	q := quantiles(h)
	a.s.Timeline = append(a.s.Timeline, Moment{At: float64(now()-a.began) / 1e9, Published: a.r.cfg.Rate, PublishP50: q.P50, PublishP99: q.P99,
		PublishMax: q.Max, Event: a.event})
	a.event = ""
}
