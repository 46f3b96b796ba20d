package groups

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/tests/harness"
)

// Scenario is a group of member processes that are treated badly while messages are published. Start from
// DefaultScenario or Varied.
type Scenario struct {
	Seed       uint64
	Members    int
	Partitions int
	// Load is how long messages are published and members ended, replaced and frozen.
	Load time.Duration
	// PublishEvery is the time between two messages of a partition.
	PublishEvery time.Duration
	// One in so many messages fails with an error, panics or is rejected; 0: none.
	FailOneIn int
	// StepMin and StepMax bound the time between two of the events whose shares the fields below give.
	StepMin, StepMax time.Duration
	// KillMember ends a member with SIGKILL, Leave with SIGTERM, KillBroker and StopBroker the broker; each is replaced.
	// Freeze stops a member for FreezeFor, which may be longer than its session; one is frozen at the beginning.
	KillMember, Leave, KillBroker, StopBroker, Freeze int
	FreezeFor                                         time.Duration
	// Lease, Retry and Ordered are the group's settings.
	Lease   time.Duration
	Retry   []time.Duration
	Ordered bool
	// SlowOneIn is the share of members that take SlowWork for each message instead of Work.
	SlowOneIn      int
	Work, SlowWork time.Duration
	// Credit is the members' window in messages; they choose a part of it by chance.
	Credit int

	Binary  string // mortard
	DataDir string
	Config  map[string]any
	Logf    func(format string, args ...any)
	// patience is how long what must happen may take.
	patience time.Duration
}

const (
	scenarioTopic = "orders"
	scenarioGroup = "workers"
	// scenarioAttempts is how many attempts a message gets.
	scenarioAttempts = 5
	// maxFrozen is how many members are frozen at once, at most.
	maxFrozen = 2
	// defaultPatience is far beyond what a slow machine takes.
	defaultPatience = 90 * time.Second
	pollEvery       = 20 * time.Millisecond
)

// DefaultScenario is what the tests run: eight members on twelve partitions.
func DefaultScenario(seed uint64) Scenario {
	return Scenario{
		Seed: seed, Members: 8, Partitions: 12, Load: 14 * time.Second, PublishEvery: 25 * time.Millisecond, FailOneIn: 40,
		StepMin: 200 * time.Millisecond, StepMax: 800 * time.Millisecond,
		KillMember: 8, Leave: 4, KillBroker: 3, StopBroker: 1, Freeze: 3, FreezeFor: 12 * time.Second,
		Lease: 15 * time.Second, Retry: []time.Duration{20 * time.Millisecond, 50 * time.Millisecond, 200 * time.Millisecond},
		SlowOneIn: 3, Work: 2 * time.Millisecond, SlowWork: 20 * time.Millisecond, Credit: 64,
		Config: map[string]any{}, Logf: func(string, ...any) {},
	}
}

// Varied is a scenario whose settings differ from seed to seed.
func Varied(seed uint64) Scenario {
	rng := rand.New(rand.NewPCG(seed, 1))
	s := DefaultScenario(seed)
	s.Members = pick(rng, 2, 4, 8, 12)
	s.Partitions = pick(rng, 1, 6, 12, 40)
	s.Load = pick(rng, 10*time.Second, 20*time.Second, 40*time.Second)
	s.PublishEvery = time.Duration(s.Partitions) * pick(rng, time.Millisecond, 2*time.Millisecond, 4*time.Millisecond)
	s.FailOneIn = pick(rng, 5, 40, 500)
	s.StepMax = pick(rng, 300*time.Millisecond, time.Second, 3*time.Second)
	s.KillBroker = pick(rng, 0, 2, 6)
	s.Freeze = pick(rng, 0, 3)
	s.FreezeFor = pick(rng, 2*time.Second, 7*time.Second, 12*time.Second)
	s.Lease = pick(rng, 3*time.Second, 15*time.Second, 30*time.Second)
	s.Retry = pick(rng, []time.Duration{10 * time.Millisecond}, []time.Duration{20 * time.Millisecond, 100 * time.Millisecond, time.Second})
	s.Credit = pick(rng, 4, 64, 1000)
	s.Ordered = rng.IntN(4) == 0
	s.Config = map[string]any{
		"shards":                    pick(rng, 1, 1, 3),
		"io_backend":                pick(rng, "auto", "auto", "pread"),
		"journal_file_bytes":        pick(rng, 4<<20, 64<<20),
		"segment_max_bytes":         pick(rng, 64<<10, 64<<20),
		"metadata_snapshot_records": pick(rng, 1, 16, 8192),
	}
	return s
}

func pick[T any](rng *rand.Rand, from ...T) T { return from[rng.IntN(len(from))] }

// run is a scenario that is under way.
type run struct {
	*Scenario
	rng      *rand.Rand
	h        *history
	addr     string
	settings string
	members  []*process
	started  int // processes ever
	d        *harness.Daemon

	stop      chan struct{}
	producers sync.WaitGroup
}

// Run runs the scenario. The error names the promises that were found broken.
func (s *Scenario) Run(ctx context.Context) (err error) {
	r := newRun(s)
	defer func() {
		r.end()
		if err != nil {
			err = fmt.Errorf("seed %d: %w", s.Seed, err)
		}
	}()
	if err := r.prepare(ctx); err != nil {
		return err
	}
	if err := r.load(ctx); err != nil {
		return errors.Join(err, r.h.err())
	}
	if err := r.drain(ctx); err != nil {
		return errors.Join(err, r.h.err())
	}
	return errors.Join(r.finish(ctx), r.h.err())
}

func newRun(s *Scenario) *run {
	if s.patience == 0 {
		s.patience = defaultPatience
	}
	return &run{Scenario: s, rng: rand.New(rand.NewPCG(s.Seed, 2)), h: newHistory(), addr: harness.LastingAddr(), stop: make(chan struct{})}
}

// calm tells whether nothing is ended by force.
func (s *Scenario) calm() bool { return s.KillMember+s.KillBroker+s.StopBroker+s.Freeze == 0 }

// end ends every process that is left.
func (r *run) end() {
	for _, p := range r.members {
		p.kill()
	}
	if r.d != nil {
		r.d.Kill()
	}
}

// prepare starts the broker and the members.
func (r *run) prepare(ctx context.Context) error {
	if err := r.startBroker(ctx); err != nil {
		return err
	}
	delays := make([]int64, len(r.Retry))
	for i, d := range r.Retry {
		delays[i] = d.Milliseconds()
	}
	settings, err := json.Marshal(map[string]any{"retry": delays, "lease_ms": r.Lease.Milliseconds(), "ordered": r.Ordered, "max_attempts": scenarioAttempts})
	if err != nil {
		return err
	}
	r.settings = string(settings)
	c, err := harness.Dial(r.addr, "")
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := c.Declare(scenarioTopic, r.Partitions); err != nil {
		return err
	}
	for range r.Members {
		p, err := r.newMember()
		if err != nil {
			return err
		}
		r.members = append(r.members, p)
	}
	return nil
}

func (r *run) startBroker(ctx context.Context) error {
	config := map[string]any{"listen_client": r.addr}
	for k, v := range r.Config {
		config[k] = v
	}
	d, err := harness.Start(ctx, harness.Options{Binary: r.Binary, DataDir: r.DataDir, Config: config})
	if err != nil {
		return err
	}
	r.d = d
	return nil
}

func (r *run) newMember() (*process, error) {
	r.started++
	cfg := &memberConfig{
		Addr: r.addr, Topic: scenarioTopic, Group: scenarioGroup, Seed: r.Seed, Settings: r.settings, Lease: r.Lease,
		Credit: 1 + r.rng.IntN(r.Credit), Concurrency: 1 + r.rng.IntN(4), Pull: r.rng.IntN(4) == 0, WorkMax: r.Work,
	}
	switch r.rng.IntN(4) {
	case 0:
		cfg.Cumulative = true
	case 1:
		cfg.ParallelKeys = true
	}
	if r.SlowOneIn > 0 && r.rng.IntN(r.SlowOneIn) == 0 {
		cfg.WorkMax = r.SlowWork
	}
	return startMember("member process "+strconv.Itoa(r.started), cfg, r.h.take)
}

// load publishes and lets things happen.
func (r *run) load(ctx context.Context) error {
	c, err := client.Dial(ctx, r.addr, client.WithBackoff(10*time.Millisecond, 200*time.Millisecond))
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }() // every publish was answered
	p, err := c.NewProducer(ctx, scenarioTopic, client.ProducerOptions{Route: routeByNumber})
	if err != nil {
		return err
	}
	failures := make(chan error, r.Partitions)
	for i := range r.Partitions {
		r.producers.Go(func() {
			if err := r.produce(ctx, p, i); err != nil {
				failures <- err
			}
		})
	}
	err = r.events(ctx)
	close(r.stop)
	r.producers.Wait()
	select {
	case perr := <-failures:
		err = errors.Join(err, perr)
	default:
	}
	return err
}

// keysPerPartition is how many keys the messages of a partition have.
const keysPerPartition = 5

// routeByNumber sends a message to the partition that its key names.
func routeByNumber(key []byte, partitions uint16) uint16 {
	number, _, _ := strings.Cut(string(key), " ")
	n, err := strconv.ParseUint(number, 10, 16)
	if err != nil {
		return 0
	}
	return uint16(n) % partitions
}

// numberShift keeps the numbers of the messages of different partitions apart.
const numberShift = 40

// produce publishes to one partition until the load ends.
func (r *run) produce(ctx context.Context, p *client.Producer, partition int) error {
	rng := rand.New(rand.NewPCG(r.Seed, uint64(partition)<<8|3))
	for n := uint64(partition)<<numberShift | 1; ; n++ {
		c := good
		if r.FailOneIn > 0 && rng.IntN(r.FailOneIn) == 0 {
			c = pick(rng, failing, failing, panicking, rejected)
		}
		res, err := p.Send(ctx, client.Record{Key: fmt.Appendf(nil, "%d %d", partition, n%keysPerPartition), Value: valueOf(n, c)})
		if err != nil {
			return fmt.Errorf("publish to partition %d: %w", partition, err)
		}
		r.h.published(&res, n, c)
		select {
		case <-r.stop:
			return nil
		case <-time.After(r.PublishEvery):
		}
	}
}

// events lets things happen to members and broker, and looks that nothing happens by itself.
func (r *run) events(ctx context.Context) error {
	counts := map[string]int{}
	end := time.Now().Add(r.Load)
	if r.Freeze > 0 {
		r.members[0].freeze(time.Now().Add(r.FreezeFor))
		counts["member frozen"]++
	}
	for time.Now().Before(end) {
		wait := r.StepMin + time.Duration(r.rng.Int64N(int64(r.StepMax-r.StepMin)+1))
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
		for _, p := range r.members {
			if !p.frozenUntil.IsZero() && time.Now().After(p.frozenUntil) {
				p.wake()
			}
		}
		what, err := r.event(ctx, end)
		if err != nil {
			return err
		}
		counts[what]++
		if err := r.check(); err != nil {
			return err
		}
	}
	r.Logf("in %v: %v", r.Load, counts)
	return nil
}

// check looks for what must not be at any time.
func (r *run) check() error {
	errs := []error{r.h.err(), r.d.Crashed()}
	for _, p := range r.members {
		errs = append(errs, p.failed())
	}
	if _, err := r.d.CheckSums(); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// event has one thing happen, by chance. What ends after end does not begin.
func (r *run) event(ctx context.Context, end time.Time) (what string, err error) {
	at := r.rng.IntN(len(r.members))
	p := r.members[at]
	n := r.rng.IntN(r.KillMember + r.Leave + r.KillBroker + r.StopBroker + r.Freeze)
	switch {
	case n < r.KillMember:
		p.kill()
		what = "member killed"
	case n < r.KillMember+r.Leave:
		if !p.frozenUntil.IsZero() {
			return "nothing", nil // it can't hear the signal
		}
		p.leave()
		select {
		case <-p.ended:
		case <-time.After(r.patience):
			return "", fmt.Errorf("%s is still there %v after SIGTERM", p.name, r.patience)
		}
		if err := p.failed(); err != nil {
			return "", err
		}
		what = "member left"
	case n < r.KillMember+r.Leave+r.KillBroker:
		r.d.Kill()
		return "broker killed", r.startBroker(ctx)
	case n < r.KillMember+r.Leave+r.KillBroker+r.StopBroker:
		if err := r.d.Stop(harness.DefaultStopTimeout); err != nil {
			return "", err
		}
		return "broker stopped", r.startBroker(ctx)
	default:
		until := time.Now().Add(r.FreezeFor)
		if r.frozen() >= maxFrozen || !p.frozenUntil.IsZero() || until.After(end) {
			return "nothing", nil
		}
		p.freeze(until)
		return "member frozen", nil
	}
	r.members[at], err = r.newMember()
	return what, err
}

func (r *run) frozen() (n int) {
	for _, p := range r.members {
		if !p.frozenUntil.IsZero() {
			n++
		}
	}
	return n
}

// drain waits until nothing is left to deliver. Those who are frozen stay so as long as they were meant to.
func (r *run) drain(ctx context.Context) error {
	began := time.Now()
	done, lastDone := uint64(0), began
	for {
		if err := r.check(); err != nil {
			return err
		}
		for _, p := range r.members {
			if !p.frozenUntil.IsZero() && time.Now().After(p.frozenUntil) {
				p.wake()
			}
		}
		g, err := r.d.GroupStats(scenarioTopic, scenarioGroup)
		if err != nil {
			return err
		}
		if g.Lag == 0 && g.Waiting == 0 && g.InFlight == 0 && r.frozen() == 0 {
			r.Logf("the rest took %v", time.Since(began).Round(time.Millisecond))
			return nil
		}
		if n := g.Acknowledged + g.Dropped; n != done {
			done, lastDone = n, time.Now()
		}
		if time.Since(lastDone) > r.patience {
			return fmt.Errorf("nothing has happened for %v, and something is still to be delivered: %+v\n%s", r.patience, g, r.d.Log())
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pollEvery):
		}
	}
}

// finish has all members leave, reads the dead letters and compares everything.
func (r *run) finish(ctx context.Context) error {
	for _, p := range r.members {
		p.leave()
	}
	for _, p := range r.members {
		select {
		case <-p.ended:
		case <-time.After(r.patience):
			return fmt.Errorf("%s is still there %v after SIGTERM", p.name, r.patience)
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := p.failed(); err != nil {
			return err
		}
	}
	g, err := r.d.GroupStats(scenarioTopic, scenarioGroup)
	if err != nil {
		return err
	}
	if err := readLetters(r.addr, scenarioGroup, g.DLQ, r.patience, r.h.buried); err != nil {
		return err
	}
	calm := r.calm() && len(r.h.refused) == 0
	t := r.h.checkEnd(scenarioAttempts, calm)
	if r.Ordered {
		r.h.checkOrder()
	}
	if g.Published != t.published || g.Acknowledged != t.acknowledged || g.Dropped != t.dropped || g.DLQ != t.dropped {
		return fmt.Errorf("the group's counters are %+v, it was %+v", g, t)
	}
	r.Logf("%d messages, %d dead letters; %d member processes; ACKs that were refused: %v", t.published, t.dropped, r.started, r.h.refused)
	return nil
}
