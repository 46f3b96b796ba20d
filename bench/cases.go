package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

const (
	topicName = "bench"
	// pipelineWindow is the number of outstanding publishes of the pipelined runs.
	pipelineWindow = 256
	manyProducers  = 16
	// fewPartitions is the broker's default partition count.
	fewPartitions = 4
	// catchupSize is the value size of the catch-up runs, restartSize that of the restart runs.
	catchupSize = 1 << 10
	restartSize = 16 << 10
	// clusterSyncSize is the value size of the cluster runs with one outstanding.
	clusterSyncSize = 1 << 10
	// A consumer that is to be fast asks for a large credit window; 64 MiB is the largest.
	largeCreditCount = 16384
	largeCreditBytes = 64 << 20
	// fillTimes bounds the filling before a catch-up run, in durations: a peer that flushes each message would take hours.
	fillTimes = 10
)

// machineName is the System of samples that measure no broker.
const machineName = "machine"

// benchCase is one measurement of one round. Either load runs on a target, or alone does everything itself.
type benchCase struct {
	workload, variant, system string
	durable                   bool
	size                      int // value size, or the block size of a disk limit
	target                    *target
	load                      func(ctx context.Context, r *runner, s *Sample, srv server) error
	alone                     func(ctx context.Context, r *runner, s *Sample) error
}

func (c *benchCase) String() string {
	name := c.workload + " " + sizeName(c.size)
	if c.variant != "" {
		name = c.workload + " (" + c.variant + ") " + sizeName(c.size)
	}
	return name + " " + c.system
}

type loadFunc = func(ctx context.Context, r *runner, s *Sample, srv server) error

// caseList builds the cases of a round.
type caseList struct {
	cfg  *Config
	list []benchCase
}

func (l *caseList) machine(workload string, size int, run func(context.Context, *runner, *Sample) error) {
	l.list = append(l.list, benchCase{workload: workload, system: machineName, size: size, alone: run})
}

// each adds a case per target: A, B, C, so that what is compared is measured within seconds.
func (l *caseList) each(targets []*target, workload, variant string, size int, load loadFunc) {
	for _, t := range targets {
		l.list = append(l.list, benchCase{workload: workload, variant: variant, system: t.name, durable: t.durable, size: size, target: t, load: load})
	}
}

// cases lists what a round measures, in order.
func (c *Config) cases() []benchCase {
	l := &caseList{cfg: c}
	single := c.targets(1)
	only := single[:1] // mortard
	for _, w := range Workloads {
		if !slices.Contains(c.Workloads, w) {
			continue
		}
		switch w {
		case "raw":
			l.limits()
		case "publish":
			for _, size := range c.Sizes {
				l.each(single, w, "", size, publish(shape{1, pipelineWindow, 1}))
			}
		case "publish-sync":
			for _, size := range c.OtherSizes {
				l.each(single, w, "", size, publish(shape{1, 1, 1}))
			}
		case "producers":
			for _, size := range c.OtherSizes {
				l.each(single, w, "", size, publish(shape{manyProducers, pipelineWindow, manyProducers}))
			}
		case "partitions":
			for _, size := range c.OtherSizes {
				for _, n := range c.Partitions {
					l.each(only, w, plural(n, "partition"), size, publish(shape{1, pipelineWindow, n}))
				}
			}
		case "end-to-end", "end-to-end-max":
			load := endToEnd
			if w == "end-to-end-max" {
				load = endToEndMax
			}
			for _, size := range c.OtherSizes {
				for _, n := range c.Members {
					l.each(single, w, plural(n, "member"), size, load(n))
				}
			}
		case "catchup":
			l.list = append(l.list, benchCase{workload: w, system: mortardName, durable: true, size: catchupSize, alone: catchup})
			l.each(single[1:], w, "", catchupSize, peerCatchup)
		case "restart":
			for _, n := range c.RestartBytes {
				l.list = append(l.list, benchCase{workload: w, variant: sizeName(int(n)), system: mortardName, durable: true, size: restartSize, alone: restart(n)})
			}
		case "cluster":
			// Target after target: starting a cluster takes long.
			for _, t := range c.targets(3) {
				for _, size := range c.ClusterSizes {
					l.each([]*target{t}, w, "pipelined", size, publish(shape{1, pipelineWindow, 1}))
				}
				l.each([]*target{t}, w, "one outstanding", clusterSyncSize, publish(shape{1, 1, 1}))
			}
		case "absence":
			l.list = append(l.list, benchCase{workload: w, variant: sizeName(int(c.AbsentBytes)), system: mortardName, durable: true, size: absenceSize, alone: absence})
		case "mixed":
			l.list = append(l.list, benchCase{workload: w, system: mortardName, durable: true, size: mixedSize, alone: mixed})
		}
	}
	return l.list
}

func plural(n int, word string) string {
	if n == 1 {
		return "1 " + word
	}
	return strconv.Itoa(n) + " " + word + "s"
}

func (l *caseList) limits() {
	blocks := map[int]bool{}
	sizes := slices.Concat(l.cfg.Sizes, l.cfg.OtherSizes)
	slices.Sort(sizes)
	for _, size := range slices.Compact(sizes) {
		if b := journalBlock(size); !blocks[b] {
			blocks[b] = true
			l.machine("disk", b, diskWrite)
		}
		l.machine("echo", size, echo("gnet"))
		l.machine("echo-go", size, echo("go"))
	}
	l.machine("disk", bandwidthBlock, diskWrite)
	l.machine("disk-read", bandwidthBlock, diskRead)
}

// stopRule says when producers end: after count messages each, after a time, whichever is first; or, where both matter,
// whichever is last. 0 leaves one out.
type stopRule struct {
	count uint64
	limit time.Duration
	both  bool
}

// runAll runs publishers side by side until they end by the rule; each publishes at least something.
func runAll(pubs []publisher, rule stopRule) error {
	end := now() + int64(rule.limit)
	errs := make([]error, len(pubs))
	var wg sync.WaitGroup
	for i, p := range pubs {
		count, before := rule.count, p.Completed()
		var more func() bool
		switch {
		case rule.both:
			count = 0
			more = func() bool { return now() < end || p.Completed()-before < rule.count }
		case rule.limit > 0:
			begun := false
			more = func() bool {
				first := !begun
				begun = true
				return first || now() < end
			}
		}
		wg.Go(func() { errs[i] = p.Run(count, more) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// rule returns when a pipelined run ends: mortard publishes a multiple of its journal's capacity, so that segments are
// written at the rate that is measured, and for Duration at least. Peers, which have no such buffer, publish as much or for
// Duration. Where profiles are taken the load lasts as long as they do.
func (r *runner) rule(srv server, sh shape, size int) stopRule {
	count := r.cfg.messagesFor(size)/uint64(sh.producers) + 1
	switch {
	case sh.window == 1 && r.cfg.Profile:
		return stopRule{limit: r.cfg.profileTime()}
	case sh.window == 1:
		return stopRule{limit: r.cfg.Duration} // what one outstanding message fills in a reasonable time is no throughput
	case len(srv.daemons()) == 0:
		return stopRule{count: count, limit: r.cfg.Duration}
	case r.cfg.Profile:
		return stopRule{count: count, limit: r.cfg.profileTime(), both: true}
	default:
		return stopRule{count: count, limit: r.cfg.Duration, both: true}
	}
}

// publish returns the case of producers that publish as fast as their windows allow.
func publish(sh shape) loadFunc {
	return func(ctx context.Context, r *runner, s *Sample, srv server) error {
		if err := srv.create(ctx, sh); err != nil {
			return err
		}
		pubs, err := srv.publishers(ctx, sh, s.Size, uint64(s.Round))
		if err != nil {
			return err
		}
		defer closeAll(pubs)
		stop := context.AfterFunc(ctx, func() { closeAll(pubs) })
		defer stop()
		if r.cfg.Warmup > 0 {
			if err := runAll(pubs, stopRule{limit: r.cfg.Warmup}); err != nil {
				return err
			}
		}
		for _, p := range pubs {
			p.Latency().Reset()
		}
		completed := func() (n uint64) {
			for _, p := range pubs {
				n += p.Completed()
			}
			return n
		}
		if err := r.measure(srv, s, completed, func() error { return runAll(pubs, r.rule(srv, sh, s.Size)) }); err != nil {
			return err
		}
		h := newHist()
		for _, p := range pubs {
			h.Merge(p.Latency())
			s.Retried += p.Retries()
		}
		s.Latency = quantiles(h)
		return nil
	}
}

func declare(addr string, partitions int) (topic uint16, err error) {
	c, err := harness.Dial(addr, "")
	if err != nil {
		return 0, err
	}
	defer c.Close()
	res, err := c.Declare(topicName, partitions)
	return res.TopicID, err
}

// crowd is a group of consumers with one producer.
type crowd struct {
	pub     publisher
	members []member
	total   *Tally
}

// gather makes what an end-to-end case needs. The producer has a window of its own.
func gather(ctx context.Context, s *Sample, srv server, members, window int, total *Tally) (*crowd, error) {
	sh := shape{producers: 1, window: window, partitions: fewPartitions}
	if err := srv.create(ctx, sh); err != nil {
		return nil, err
	}
	pubs, err := srv.publishers(ctx, sh, s.Size, uint64(s.Round))
	if err != nil {
		return nil, err
	}
	c := &crowd{pub: pubs[0], total: total}
	if c.members, err = srv.members(ctx, members, sh, total, true); err != nil {
		c.close()
		return nil, err
	}
	return c, nil
}

func (c *crowd) close() {
	closeAll(c.members)
	_ = c.pub.Close() // its errors have shown in its runs
}

// run starts the members, waits until they share the partitions, and has load published and measured. It ends when the
// group has received everything.
func (c *crowd) run(ctx context.Context, r *runner, s *Sample, srv server, load func(ctx context.Context) error) error {
	team, ctx := newTeam(ctx)
	for _, m := range c.members {
		team.start(func() error { return m.Run(ctx) })
	}
	err := srv.settled(ctx, c.members)
	if err == nil {
		err = r.measure(srv, s, c.total.received.Load, func() error {
			team.start(func() error { return load(ctx) })
			return team.wait()
		})
	}
	if err != nil {
		team.cancel()
		return errors.Join(team.wait(), err)
	}
	acked, delivered := newHist(), newHist()
	for _, m := range c.members {
		d, a := m.Latencies()
		delivered.Merge(d)
		acked.Merge(a)
	}
	published := c.pub.Latency()
	if late := c.pub.Unsent(); late != nil {
		// What could not even be sent in time belongs to all of them: leaving it out would flatter.
		for _, h := range []*hdrhistogram.Histogram{published, delivered, acked} {
			if h.TotalCount() > 0 {
				h.Merge(late)
			}
		}
		s.Values = map[string]float64{"not_sent_in_time": float64(late.TotalCount())}
	}
	s.Latency, s.DeliverLatency, s.PublishLatency = quantiles(acked), quantiles(delivered), quantiles(published)
	return nil
}

// endToEnd publishes at a fixed rate to a group. Latency counts from the time a message was due until the answer to its ACK,
// which says that the acknowledgement is durable, for systems that answer one; DeliverLatency until the message arrived,
// PublishLatency until the publish was answered.
func endToEnd(members int) loadFunc {
	return func(ctx context.Context, r *runner, s *Sample, srv server) error {
		d := r.cfg.Duration
		if r.cfg.Profile {
			d = r.cfg.profileTime()
		}
		warm, count := uint64(r.cfg.Rate*r.cfg.Warmup.Seconds()), uint64(r.cfg.Rate*d.Seconds())
		c, err := gather(ctx, s, srv, members, maxWindow, NewTally(warm+count, warm))
		if err != nil {
			return err
		}
		defer c.close()
		return c.run(ctx, r, s, srv, func(ctx context.Context) error {
			err := c.pub.RunRated(ctx, r.cfg.Rate, warm, count)
			c.total.want.Store(c.pub.Completed())
			return err
		})
	}
}

// endToEndMax publishes with a full window to a group that acknowledges every message. It ends when everything was
// received.
func endToEndMax(members int) loadFunc {
	return func(ctx context.Context, r *runner, s *Sample, srv server) error {
		c, err := gather(ctx, s, srv, members, pipelineWindow, NewTally(unknownYet, 0))
		if err != nil {
			return err
		}
		defer c.close()
		return c.run(ctx, r, s, srv, func(ctx context.Context) error {
			stop := context.AfterFunc(ctx, func() { c.pub.Close() })
			defer stop()
			began := now()
			err := runAll([]publisher{c.pub}, r.rule(srv, shape{1, pipelineWindow, fewPartitions}, s.Size))
			n := c.pub.Completed()
			c.total.want.Store(n)
			s.Retried = c.pub.Retries()
			s.Values = map[string]float64{"publish_msgs_per_s": float64(n) / (float64(now()-began) / 1e9)}
			return err
		})
	}
}

// peerCatchup stores messages in a peer and reads them; what was written a moment ago is in its own or the page cache.
func peerCatchup(ctx context.Context, r *runner, s *Sample, srv server) error {
	sh := shape{producers: 1, window: pipelineWindow, partitions: fewPartitions}
	if err := srv.create(ctx, sh); err != nil {
		return err
	}
	pubs, err := srv.publishers(ctx, sh, s.Size, uint64(s.Round))
	if err != nil {
		return err
	}
	defer closeAll(pubs)
	stop := context.AfterFunc(ctx, func() { closeAll(pubs) })
	defer stop()
	if err := runAll(pubs, stopRule{count: uint64(r.cfg.CatchupMessages), limit: fillTimes * r.cfg.Duration}); err != nil {
		return err
	}
	if err := readAll(ctx, r, s, srv, sh, pubs[0].Completed()); err != nil {
		return err
	}
	s.Values = map[string]float64{"warm_mb_per_s": s.MBPerSec, "warm_msgs_per_s": s.MsgsPerSec}
	return nil
}

// readAll measures how fast one member reads count stored messages.
func readAll(ctx context.Context, r *runner, s *Sample, srv server, sh shape, count uint64) error {
	total := NewTally(count, 0)
	members, err := srv.members(ctx, 1, sh, total, false)
	if err != nil {
		return err
	}
	defer closeAll(members)
	return r.measure(srv, s, total.received.Load, func() error { return members[0].Run(ctx) })
}

// catchup stores messages, restarts the broker, and reads them from a warm and then from a cold page cache. The sample is the
// warm read; the cold one and the restarts are in Values.
func catchup(ctx context.Context, r *runner, s *Sample) error {
	count := uint64(r.cfg.CatchupMessages)
	sh := shape{producers: 1, window: pipelineWindow, partitions: fewPartitions}
	err := r.withBroker(ctx, s, func(m *mortardServer) error { return fillTopic(ctx, m, sh, s, count) })
	if err != nil {
		return err
	}
	values := map[string]float64{}
	warm := *s
	for _, state := range []string{"warm", "cold"} {
		prepare := fillCache
		if state == "cold" {
			prepare = dropCache
			dropAllCaches()
		}
		if err := prepare(r.dataDir()); err != nil {
			return err
		}
		pass := Sample{Workload: s.Workload, Variant: state, System: s.System, Size: s.Size, Round: s.Round}
		err := r.withBroker(ctx, &pass, func(m *mortardServer) error {
			m.group = state // the second group begins at the beginning, too
			if err := m.create(ctx, sh); err != nil {
				return err
			}
			return readAll(ctx, r, &pass, m, sh, count)
		})
		if err != nil {
			return fmt.Errorf("%s: %w", state, err)
		}
		values[state+"_mb_per_s"] = pass.MBPerSec
		values[state+"_msgs_per_s"] = pass.MsgsPerSec
		values[state+"_restart_s"] = pass.StartSeconds
		if state == "warm" {
			warm = pass
		}
	}
	warm.Variant, warm.Values = s.Variant, values
	*s = warm
	return nil
}

func fillTopic(ctx context.Context, m *mortardServer, sh shape, s *Sample, count uint64) error {
	if err := m.create(ctx, sh); err != nil {
		return err
	}
	pubs, err := m.publishers(ctx, sh, s.Size, uint64(s.Round))
	if err != nil {
		return err
	}
	defer closeAll(pubs)
	stop := context.AfterFunc(ctx, func() { closeAll(pubs) })
	defer stop()
	return runAll(pubs, stopRule{count: count})
}

// restart measures how long an empty broker takes to start, then stores so many bytes and measures it again after a clean
// shutdown and after a kill in the middle of publishing.
func restart(bytes int64) func(ctx context.Context, r *runner, s *Sample) error {
	return func(ctx context.Context, r *runner, s *Sample) error {
		free, err := freeBytes(r.dir)
		if err != nil {
			return err
		}
		if need := bytes + bytes/10 + 2*r.cfg.journalBytes(); free < need {
			return fmt.Errorf("%w: it needs %d MiB free in %s, there are %d", errSkipped, need>>20, r.dir, free>>20)
		}
		empty := *s
		if err := r.withBroker(ctx, &empty, func(*mortardServer) error { return nil }); err != nil {
			return err
		}
		s.Values = map[string]float64{"empty_start_s": empty.StartSeconds}
		count := uint64(bytes/int64(s.Size)) + 1
		sh := shape{producers: 1, window: pipelineWindow, partitions: fewPartitions}
		fill := *s
		if err := r.withBroker(ctx, &fill, func(m *mortardServer) error { return fillTopic(ctx, m, sh, &fill, count) }); err != nil {
			return err
		}
		killed := *s
		err = r.withBroker(ctx, &killed, func(m *mortardServer) error {
			s.Values["clean_restart_s"] = killed.StartSeconds
			return killWhilePublishing(m.nodes[0], s, r.cfg.Duration/4)
		})
		if err != nil {
			return err
		}
		return r.withBroker(ctx, s, func(*mortardServer) error {
			s.Values["killed_restart_s"] = s.StartSeconds
			return nil
		})
	}
}

func killWhilePublishing(d *harness.Daemon, s *Sample, after time.Duration) error {
	topic, err := declare(d.ClientAddr, fewPartitions)
	if err != nil {
		return err
	}
	p, err := NewPublisher(PublisherOptions{Addr: d.ClientAddr, TopicID: topic, Partitions: []uint16{0, 1, 2, 3}, ProducerID: 1 << 20,
		ValueBytes: s.Size, Window: pipelineWindow, Seed: 1})
	if err != nil {
		return err
	}
	defer p.Close()
	timer := time.AfterFunc(after, d.Kill)
	defer timer.Stop()
	if err := p.Run(0, nil); err == nil {
		return errors.New("publishing went on after the broker was killed")
	}
	d.Kill()
	return nil
}

// echo returns the case of an echo server: "gnet" is the library below mortard's client port, "go" a plain goroutine per
// connection.
func echo(kind string) func(ctx context.Context, r *runner, s *Sample) error {
	return func(ctx context.Context, r *runner, s *Sample) error {
		addr, stop, err := startEcho(ctx, kind)
		if err != nil {
			return err
		}
		defer stop()
		frame := protocol.PubFrameLen(0, s.Size)
		if _, err := echoLatency(ctx, addr, frame, r.cfg.Warmup+time.Millisecond); err != nil {
			return err
		}
		s.Tool = kind
		if s.Latency, err = echoLatency(ctx, addr, frame, r.cfg.Duration/4); err != nil {
			return err
		}
		s.MsgsPerSec, err = echoRate(ctx, addr, frame, r.cfg.Duration/4)
		s.MBPerSec = s.MsgsPerSec * float64(s.Size) / 1e6
		return err
	}
}
