package crash

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/mortarmq/mortarmq/tests/harness"
)

// Target is a broker that can be killed and started again on the same data.
type Target interface {
	// Start starts the broker and returns its client address when it serves.
	Start(ctx context.Context) (addr string, err error)
	// Flicker starts the broker and kills it again after d, in the middle of its recovery.
	Flicker(d time.Duration) error
	// Kill ends the broker without warning.
	Kill()
	// Stop ends the broker in an orderly way.
	Stop() error
	// Crashed returns an error if the broker ended by itself.
	Crashed() error
}

// Scenario is a series of rounds on one data directory.
type Scenario struct {
	Seed       uint64
	Rounds     int
	Partitions int
	// Producers with an identity; one plain one joins them.
	Producers int
	// LoadMin and LoadMax bound the time from the start of the load until the kill.
	LoadMin, LoadMax time.Duration
	// FullCheckEvery is the number of rounds after which the whole log is read; it is in the last round in any case.
	FullCheckEvery int
	// StopOneIn is the share of rounds that end with SIGTERM, FlickerOneIn that of rounds that kill the broker once more
	// while it starts. 0 means none.
	StopOneIn, FlickerOneIn int
	Logf                    func(format string, args ...any)

	// patience bounds how long the broker may take to deliver, or to accept, what it must; 0 means the default.
	patience time.Duration
	// member is the group's member of the round before, 0 if there is none.
	member uint64
}

// DefaultScenario returns the rounds that the tests run.
func DefaultScenario(seed uint64) Scenario {
	return Scenario{Seed: seed, Rounds: 20, Partitions: 5, Producers: 3, LoadMin: 30 * time.Millisecond, LoadMax: 300 * time.Millisecond,
		FullCheckEvery: 5, StopOneIn: 6, FlickerOneIn: 4, Logf: func(string, ...any) {}}
}

const (
	topicName = "crash"
	// defaultPatience is far beyond what a slow machine takes, and below a delivery lease.
	defaultPatience = time.Minute
	settlePoll      = 5 * time.Millisecond
)

// Run runs the scenario. The error names every promise that was found broken in the first bad round.
func (s *Scenario) Run(ctx context.Context, t Target) error {
	if s.patience == 0 {
		s.patience = defaultPatience
	}
	s.member = 0
	m := newModel(s.Seed, s.Partitions)
	rng := rand.New(rand.NewPCG(s.Seed, 0))
	for round := 1; round <= s.Rounds; round++ {
		if err := s.round(ctx, t, m, rng, round); err != nil {
			return fmt.Errorf("seed %d, round %d: %w", s.Seed, round, errors.Join(err, t.Crashed()))
		}
	}
	return nil
}

// round is one life of the broker.
func (s *Scenario) round(ctx context.Context, t Target, m *model, rng *rand.Rand, round int) error {
	if s.FlickerOneIn > 0 && rng.IntN(s.FlickerOneIn) == 0 {
		if err := t.Flicker(time.Duration(rng.Int64N(int64(100 * time.Millisecond)))); err != nil {
			return err
		}
	}
	m.restarted()
	addr, err := t.Start(ctx)
	if err != nil {
		return err
	}
	topic, err := s.declare(addr)
	if err != nil {
		return err
	}
	c, err := newConsumer(m, addr, topic, rand.New(rand.NewPCG(s.Seed, uint64(round)<<8|1)), s.member)
	if err != nil {
		return err
	}
	defer c.conn.Close()
	s.member = c.sub.MemberID
	var consumerErr error
	var consumerDone sync.WaitGroup
	consumerDone.Go(func() { consumerErr = c.run() })
	producers, err := s.connect(m, addr, topic, round)
	defer func() {
		for _, p := range producers {
			p.conn.Close()
		}
	}()
	if err != nil {
		return err
	}
	if err := each(producers, (*producer).resume); err != nil {
		return errors.Join(err, m.err())
	}
	if err := producers[0].mark(); err != nil {
		return errors.Join(err, m.err())
	}
	if err := s.settle(m, t); err != nil {
		return err
	}
	read := 0
	if round%s.FullCheckEvery == 0 || round == s.Rounds {
		if read, err = readLog(m, addr, topic, fmt.Sprintf("readers-%d", round), s.patience); err != nil {
			return errors.Join(err, m.err())
		}
	}
	kind, err := s.load(t, producers, rng)
	consumerDone.Wait()
	s.Logf("round %2d: known ends %v, whole log read: %d messages, ended by %s", round, m.ends(), read, kind)
	return errors.Join(err, consumerErr, m.err())
}

// load lets the producers run until the broker is ended.
func (s *Scenario) load(t Target, producers []*producer, rng *rand.Rand) (kind string, err error) {
	after := s.LoadMin + time.Duration(rng.Int64N(int64(s.LoadMax-s.LoadMin)+1))
	orderly := s.StopOneIn > 0 && rng.IntN(s.StopOneIn) == 0
	stop := make(chan struct{})
	var stopErr error
	timer := time.AfterFunc(after, func() {
		if orderly {
			stopErr = t.Stop()
		} else {
			t.Kill()
		}
		close(stop)
	})
	err = each(producers, func(p *producer) error { return p.load(stop) })
	if timer.Stop() { // every producer gave up before
		t.Kill()
	} else {
		<-stop
	}
	kind = "kill -9"
	if orderly {
		kind = "SIGTERM"
	}
	return fmt.Sprintf("%s after %v", kind, after.Round(time.Millisecond)), errors.Join(err, stopErr)
}

func (s *Scenario) declare(addr string) (uint16, error) {
	conn, err := harness.Dial(addr, "")
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	res, err := conn.Declare(topicName, s.Partitions)
	return res.TopicID, err
}

// connect opens the producers' connections. The plain producer is a new one in every round: what it did not hear about
// before, it never will.
func (s *Scenario) connect(m *model, addr string, topic uint16, round int) ([]*producer, error) {
	var list []*producer
	for i := range s.Producers + 1 {
		id := uint64(i) + 1
		if i == s.Producers {
			id = plainBit | uint64(round)
		}
		conn, err := harness.Dial(addr, "")
		if err != nil {
			return list, err
		}
		list = append(list, &producer{m: m, id: id, topic: topic, parts: s.Partitions, conn: conn, patience: s.patience,
			rng: rand.New(rand.NewPCG(s.Seed, uint64(round)<<8|uint64(i)+2))})
	}
	return list, nil
}

// each runs fn for all producers side by side.
func each(producers []*producer, fn func(*producer) error) error {
	errs := make([]error, len(producers))
	var wg sync.WaitGroup
	for i, p := range producers {
		wg.Go(func() { errs[i] = fn(p) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// settle waits until the group's consumer has seen everything that it must see after a restart.
func (s *Scenario) settle(m *model, t Target) error {
	deadline := time.Now().Add(s.patience)
	for {
		if err := errors.Join(m.err(), t.Crashed()); err != nil {
			return err
		}
		pending := m.pending()
		if len(pending) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			var errs []error
			for part, list := range pending {
				errs = append(errs, fmt.Errorf("partition %d: %d messages that were never acknowledged were not delivered within %v, from sequence %d to %d",
					part, len(list), s.patience, list[0], list[len(list)-1]))
			}
			return errors.Join(errs...)
		}
		time.Sleep(settlePoll)
	}
}
