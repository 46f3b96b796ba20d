package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/mortarmq/mortarmq/client"
)

const (
	mixedSize       = 1 << 10
	mixedPartitions = 8
	mixedKeys       = 1000
	// mixedMoments bounds the points of the chart; none is shorter than a second.
	mixedMoments = 600
	// mixedFailures are spread over the run, each a SIGKILL of the broker, or of the cluster's leader.
	mixedFailures = 2
	// A node that was killed stays away for this part of the run, at most mixedAwayMax.
	mixedAwayPart = 20
	mixedAwayMax  = 30 * time.Second
	// A slow consumer sleeps in the midst of its work: a fifth of each eleventh of the run, so that it falls behind and has to
	// read what is no longer in memory.
	mixedNaps    = 11
	mixedNapPart = 5
	// mixedFailEvery is how many messages a failing consumer refuses one of, once.
	mixedFailEvery = 100
	// mixedPatience is how long the groups may receive nothing at the end although messages are missing.
	mixedPatience = 90 * time.Second
)

// Moment is a stretch of a long run. Latencies are microseconds from when a message was due: Publish until it was
// acknowledged, Deliver until the quick group had it.
type Moment struct {
	At                       float64 // seconds since the begin, its end
	Published, Delivered     float64 // per second
	PublishP50, PublishP99   float64 `json:",omitempty"`
	DeliverP50, DeliverP99   float64 `json:",omitempty"`
	PublishMax, DeliverMax   float64 `json:",omitempty"`
	SlowLag, FailingRefusals float64 `json:",omitempty"` // messages published that the slow group has not had; refusals per second
	Event                    string  `json:",omitempty"` // what was done to the brokers
}

// mixedRun is a day in miniature: a producer at a fixed rate, a quick group, a slow one that falls behind and catches up, one
// that refuses messages, and brokers that are killed. It uses the client library, which has to put up with all of it.
type mixedRun struct {
	r     *runner
	s     *Sample
	nodes []*node
	addrs string
	log   *slog.Logger
	total uint64 // messages to publish
	began int64

	published atomic.Uint64
	groups    []*mixedGroup

	mu       sync.Mutex
	publish  *hdrhistogram.Histogram // of the present moment
	deliver  *hdrhistogram.Histogram
	allPub   *hdrhistogram.Histogram
	allDel   *hdrhistogram.Histogram
	events   []string
	timeline []Moment
}

// mixedGroup remembers which messages it has had.
type mixedGroup struct {
	name    string
	members int
	handle  func(seen *mixedGroup, index uint64, m *client.Message) error

	mu    sync.Mutex
	seen  []uint64 // a bit per message
	had   atomic.Uint64
	again atomic.Uint64
	fails atomic.Uint64
}

// mark notes that message index was handled, and tells whether for the first time.
func (g *mixedGroup) mark(index uint64) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	w, bit := &g.seen[index/64], uint64(1)<<(index%64)
	if *w&bit != 0 {
		g.again.Add(1)
		return false
	}
	*w |= bit
	g.had.Add(1)
	return true
}

// mixed runs for MixedDuration on a cluster of three nodes where mortard has that, else on one. The sample's latencies are
// those of the whole run; Timeline is its course.
func mixed(ctx context.Context, r *runner, s *Sample) error {
	logFile, err := os.OpenFile(filepath.Join(r.cfg.Out, "mixed-clients.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return err
	}
	defer logFile.Close() // a log that is cut short loses no figure
	m := &mixedRun{r: r, s: s, log: slog.New(slog.NewTextHandler(logFile, nil)), publish: newHist(), deliver: newHist(), allPub: newHist(), allDel: newHist()}
	if err := m.startBrokers(ctx); err != nil {
		return err
	}
	defer func() { killNodes(m.nodes) }()
	m.total = uint64(r.cfg.Rate * r.cfg.MixedDuration.Seconds())
	m.groups = m.plan()
	if err := m.run(ctx); err != nil {
		return err
	}
	return m.report()
}

func (m *mixedRun) startBrokers(ctx context.Context) error {
	m.nodes = m.r.newNodes(3)
	err := m.r.startNodes(ctx, m.nodes)
	if errors.Is(err, errSkipped) {
		if err = os.RemoveAll(m.r.dataDir()); err != nil {
			return err
		}
		m.nodes = m.r.newNodes(1)
		err = m.r.startNodes(ctx, m.nodes)
	}
	if err != nil {
		return err
	}
	if len(m.nodes) > 1 {
		m.s.System = fmt.Sprintf("%s-%d", mortardName, len(m.nodes))
	}
	for i, n := range m.nodes {
		if i > 0 {
			m.addrs += ","
		}
		m.addrs += n.client
	}
	_, err = leader(ctx, m.nodes)
	return err
}

func (m *mixedRun) plan() []*mixedGroup {
	nap := m.r.cfg.MixedDuration / mixedNaps
	list := []*mixedGroup{
		{name: "quick", members: 2, handle: func(g *mixedGroup, index uint64, msg *client.Message) error {
			if g.mark(index) {
				due := int64(binary.BigEndian.Uint64(msg.Value))
				m.record(m.deliver, m.allDel, now()-due)
			}
			return nil
		}},
		{name: "slow", members: 1, handle: func(g *mixedGroup, index uint64, _ *client.Message) error {
			if at := time.Duration(now()-m.began) % nap; at < nap/mixedNapPart {
				time.Sleep(nap/mixedNapPart - at)
			}
			g.mark(index)
			return nil
		}},
		{name: "failing", members: 2, handle: func(g *mixedGroup, index uint64, msg *client.Message) error {
			if index%mixedFailEvery == 0 && msg.Attempt == 1 {
				g.fails.Add(1)
				return errors.New("refused once, as planned")
			}
			g.mark(index)
			return nil
		}},
	}
	for _, g := range list {
		g.seen = make([]uint64, m.total/64+1)
	}
	return list
}

func (m *mixedRun) record(moment, all *hdrhistogram.Histogram, ns int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	record(moment, ns)
	record(all, ns)
}

func (m *mixedRun) run(ctx context.Context) error {
	c, err := client.Dial(ctx, m.addrs, client.WithLogger(m.log), client.WithBackoff(20*time.Millisecond, time.Second))
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := c.Declare(ctx, topicName, client.DeclareOptions{Partitions: mixedPartitions}); err != nil {
		return err
	}
	team, ctx := newTeam(ctx)
	consumers, stopConsumers := context.WithCancel(ctx)
	defer stopConsumers()
	for _, g := range m.groups {
		for range g.members {
			k, err := c.NewConsumer(ctx, topicName, g.name, client.ConsumerOptions{Concurrency: mixedPartitions, CreditCount: 2048, CreditBytes: 8 << 20})
			if err != nil {
				team.cancel()
				return errors.Join(err, team.wait())
			}
			defer k.Close(context.WithoutCancel(ctx))
			team.start(func() error { return k.Run(consumers, m.handler(g)) })
		}
	}
	m.began = now()
	ended := make(chan struct{})
	team.start(func() error { m.watch(ctx, ended); return nil })
	team.start(func() error { return m.breakThings(ctx) })
	team.start(func() error {
		defer close(ended)
		defer stopConsumers()
		if err := m.produce(ctx, c); err != nil {
			return err
		}
		return m.awaitGroups(ctx)
	})
	return team.wait()
}

func (m *mixedRun) handler(g *mixedGroup) client.Handler {
	return func(_ context.Context, msg *client.Message) error {
		if len(msg.Value) != mixedSize {
			return fmt.Errorf("a message of %d bytes", len(msg.Value))
		}
		index := binary.BigEndian.Uint64(msg.Value[stampBytes:])
		if index >= m.total {
			return fmt.Errorf("message %d was never published", index)
		}
		return g.handle(g, index, msg)
	}
}

// produce publishes on time, or as soon as it can where it is held up: then the messages are late, not left out.
func (m *mixedRun) produce(ctx context.Context, c *client.Client) error {
	p, err := c.NewProducer(ctx, topicName, client.ProducerOptions{DeliveryTimeout: 10 * time.Minute})
	if err != nil {
		return err
	}
	defer p.Close(context.WithoutCancel(ctx))
	var failed atomic.Pointer[error]
	value, key := randomBytes(1, mixedSize), make([]byte, 2)
	every := float64(time.Second) / m.r.cfg.Rate
	for i := range m.total {
		due := m.began + int64(float64(i)*every)
		if ahead := due - now(); ahead > 0 {
			time.Sleep(time.Duration(ahead))
		}
		binary.BigEndian.PutUint64(value, uint64(due))
		binary.BigEndian.PutUint64(value[stampBytes:], i)
		binary.BigEndian.PutUint16(key, uint16(i%mixedKeys))
		err := p.SendFunc(ctx, client.Record{Key: key, Value: value}, func(_ client.Result, err error) {
			if err != nil {
				failed.CompareAndSwap(nil, &err)
				return
			}
			m.published.Add(1)
			m.record(m.publish, m.allPub, now()-due)
		})
		if perr := failed.Load(); err == nil && perr != nil {
			err = *perr
		}
		if err != nil {
			return fmt.Errorf("publish message %d: %w", i, err)
		}
	}
	if err := p.Flush(ctx); err != nil {
		return err
	}
	if perr := failed.Load(); perr != nil {
		return fmt.Errorf("publish: %w", *perr)
	}
	return nil
}

// awaitGroups waits until every group has had every message.
func (m *mixedRun) awaitGroups(ctx context.Context) error {
	had := func() (n uint64) {
		for _, g := range m.groups {
			n += g.had.Load()
		}
		return n
	}
	for last, since := had(), time.Now(); ; {
		n := had()
		if n == m.total*uint64(len(m.groups)) {
			return nil
		}
		if n != last {
			last, since = n, time.Now()
		}
		if time.Since(since) > mixedPatience {
			var missing []string
			for _, g := range m.groups {
				missing = append(missing, fmt.Sprintf("%s %d", g.name, m.total-g.had.Load()))
			}
			return fmt.Errorf("messages that were acknowledged did not arrive within %v: %v of %d", mixedPatience, missing, m.total)
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
}

// breakThings kills the broker, or the cluster's leader, at regular times and starts it again.
func (m *mixedRun) breakThings(ctx context.Context) error {
	d := m.r.cfg.MixedDuration
	away := time.Duration(0) // a broker alone is started again at once
	if len(m.nodes) > 1 {
		away = min(d/mixedAwayPart, mixedAwayMax)
	}
	for i := range mixedFailures {
		at := m.began + int64(d)*int64(i+1)/(mixedFailures+1)
		if err := pause(ctx, time.Duration(at-now())); err != nil {
			return nil // the run is over; its error is somebody else's
		}
		led, err := leader(ctx, m.nodes)
		if err != nil {
			return err
		}
		led.d.Kill()
		led.d = nil
		m.event(fmt.Sprintf("node %d killed", led.id))
		if err := pause(ctx, away); err != nil {
			return nil
		}
		if err := m.r.startNode(ctx, led, m.nodes); err != nil {
			return err
		}
		m.event(fmt.Sprintf("node %d serves again", led.id))
	}
	return nil
}

func (m *mixedRun) event(text string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.events = append(m.events, text)
}

// watch closes a moment of the timeline now and then until the run has ended.
func (m *mixedRun) watch(ctx context.Context, ended <-chan struct{}) {
	every := max(time.Second, m.r.cfg.MixedDuration/mixedMoments)
	t := time.NewTicker(every)
	defer t.Stop()
	var last struct{ published, delivered, fails uint64 }
	lastAt := m.began
	for {
		select {
		case <-ended:
			return
		case <-ctx.Done():
			return
		case <-t.C:
		}
		at := now()
		sec := float64(at-lastAt) / 1e9
		published, delivered, fails := m.published.Load(), m.groups[0].had.Load(), m.groups[2].fails.Load()
		mo := Moment{At: float64(at-m.began) / 1e9, Published: float64(published-last.published) / sec,
			Delivered: float64(delivered-last.delivered) / sec, FailingRefusals: float64(fails-last.fails) / sec,
			SlowLag: float64(published) - float64(min(published, m.groups[1].had.Load()))}
		m.mu.Lock()
		if q := quantiles(m.publish); q != nil {
			mo.PublishP50, mo.PublishP99, mo.PublishMax = q.P50, q.P99, q.Max
		}
		if q := quantiles(m.deliver); q != nil {
			mo.DeliverP50, mo.DeliverP99, mo.DeliverMax = q.P50, q.P99, q.Max
		}
		m.publish.Reset()
		m.deliver.Reset()
		for i, e := range m.events {
			if i > 0 {
				mo.Event += ", "
			}
			mo.Event += e
		}
		m.events = m.events[:0]
		m.timeline = append(m.timeline, mo)
		m.mu.Unlock()
		last.published, last.delivered, last.fails, lastAt = published, delivered, fails, at
	}
}

// report fills in the sample.
func (m *mixedRun) report() error {
	for _, n := range m.nodes {
		if n.d == nil {
			continue
		}
		if err := n.d.Crashed(); err != nil {
			return err
		}
	}
	s := m.s
	s.Messages = m.published.Load()
	s.Seconds = float64(now()-m.began) / 1e9
	s.MsgsPerSec = float64(s.Messages) / s.Seconds
	s.PublishLatency, s.DeliverLatency = quantiles(m.allPub), quantiles(m.allDel)
	s.Timeline = slices.Clone(m.timeline)
	s.Values = map[string]float64{}
	for _, g := range m.groups {
		s.Values[g.name+"_redelivered"] = float64(g.again.Load() + g.fails.Load())
	}
	return nil
}

// pause sleeps, or returns the context's error when that ends first.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
