package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/protocol"
)

const (
	// patience bounds every wait for a condition.
	patience = time.Minute
	// maxViolations is how many broken promises are reported.
	maxViolations = 20
	// handlers is how many messages a member has at work, each until its ACK is answered.
	handlers = 64
)

// place names a stored message.
type place struct {
	partition uint16
	sequence  uint64
}

func (p place) String() string {
	return fmt.Sprintf("partition %d, sequence %d", p.partition, p.sequence)
}

// LoadOptions say what a Load does.
type LoadOptions struct {
	// Addrs are the client addresses of the nodes.
	Addrs string
	Topic string
	// Partitions, Producers and Members of one group are how many there are.
	Partitions, Producers, Members int
	// Window is how many publishes of a producer may be unanswered.
	Window int
	// Pause is how long a producer waits between two messages; 0 is not at all.
	Pause time.Duration
	// ValueBytes is the length of a value, at least.
	ValueBytes int
}

// DefaultLoad leaves a small machine room for three brokers; Addrs and Topic are missing.
var DefaultLoad = LoadOptions{Partitions: 4, Producers: 2, Members: 2, Window: 64, Pause: 2 * time.Millisecond, ValueBytes: 200}

// group is the name of a Load's consumer group.
const group = "work"

// Load publishes through the client library, pipelined, and consumes what it publishes with a group whose members acknowledge
// every message and wait for the answer. It remembers what was promised: an acknowledged message is stored once, where the
// answer says, and an acknowledged delivery doesn't come again. Its methods may be called from any goroutine.
type Load struct {
	opts      LoadOptions
	client    *client.Client
	producers []*client.Producer
	consumers []*client.Consumer

	stop     chan struct{}
	sending  sync.WaitGroup
	running  sync.WaitGroup
	stopRun  context.CancelFunc
	revoked  atomic.Int64 // calls of OnRevoke
	answered atomic.Int64

	mu         sync.Mutex
	stored     map[place]string // by the answers to publishes
	acked      map[place]bool   // deliveries whose ACK was answered: false with an error, or not at all
	wantEpoch  uint64           // first is closed with the first answer of a leader beyond it
	first      chan struct{}
	firstAt    time.Time
	violations []error
}

// StartLoad creates the topic, lets the members join and begins to publish.
func StartLoad(ctx context.Context, o LoadOptions) (*Load, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	l := &Load{opts: o, stop: make(chan struct{}), stored: map[place]string{}, acked: map[place]bool{}}
	var err error
	// The default backoff is for networks between continents: waiting that long hides what the brokers do.
	if l.client, err = client.Dial(ctx, o.Addrs, client.WithBackoff(100*time.Millisecond, time.Second)); err != nil {
		return nil, err
	}
	if _, err := l.client.Declare(ctx, o.Topic, client.DeclareOptions{Partitions: uint16(o.Partitions)}); err != nil {
		return nil, errors.Join(err, l.client.Close())
	}
	run, stopRun := context.WithCancel(context.Background())
	l.stopRun = stopRun
	for range o.Members {
		k, err := l.client.NewConsumer(ctx, o.Topic, group, client.ConsumerOptions{
			Concurrency: handlers, ParallelKeys: true,
			OnRevoke: func(uint16, bool) { l.revoked.Add(1) },
		})
		if err != nil {
			return nil, errors.Join(err, l.abandon())
		}
		l.consumers = append(l.consumers, k)
		l.running.Add(1)
		go func() {
			defer l.running.Done()
			if err := k.Run(run, l.handle); err != nil {
				l.violated("a member of the group ended: %w", err)
			}
		}()
	}
	for i := range o.Producers {
		p, err := l.client.NewProducer(ctx, o.Topic, client.ProducerOptions{MaxInFlight: o.Window})
		if err != nil {
			return nil, errors.Join(err, l.abandon())
		}
		l.producers = append(l.producers, p)
		l.sending.Add(1)
		go func() {
			defer l.sending.Done()
			l.publish(i, p)
		}()
	}
	return l, nil
}

// abandon ends a load that didn't come to start.
func (l *Load) abandon() error {
	close(l.stop)
	l.stopRun()
	err := l.client.Close()
	l.sending.Wait()
	l.running.Wait()
	return err
}

func (l *Load) violated(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.violatedLocked(format, args...)
}

func (l *Load) violatedLocked(format string, args ...any) {
	if len(l.violations) < maxViolations {
		l.violations = append(l.violations, fmt.Errorf(format, args...))
	}
}

// Err returns the promises that were found broken so far.
func (l *Load) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return errors.Join(l.violations...)
}

// publish sends until the load is stopped.
func (l *Load) publish(number int, p *client.Producer) {
	padding := strings.Repeat("x", l.opts.ValueBytes)
	for n := 0; ; n++ {
		select {
		case <-l.stop:
			return
		case <-time.After(l.opts.Pause):
		}
		value := fmt.Sprintf("%d-%d-%s", number, n, padding)
		err := p.SendFunc(context.Background(), client.Record{Value: []byte(value)}, func(r client.Result, err error) { l.result(value, &r, err) })
		if err != nil {
			l.violated("message %d of producer %d: %w", n, number, err)
			return
		}
	}
}

// result takes the answer to a publish: all of them are settled by the library's retries.
func (l *Load) result(value string, r *client.Result, err error) {
	l.answered.Add(1)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		l.violatedLocked("message %.20s was given up: %w", value, err)
		return
	}
	at := place{r.Partition, r.Sequence}
	if was, ok := l.stored[at]; ok {
		l.violatedLocked("%v: messages %.20s and %.20s were both acknowledged there", at, was, value)
	}
	l.stored[at] = value
	if l.first != nil && r.LeaderEpoch > l.wantEpoch {
		l.firstAt = time.Now()
		close(l.first)
		l.first = nil
	}
}

// handle acknowledges a message.
func (l *Load) handle(ctx context.Context, m *client.Message) error {
	at := place{m.Partition, m.Sequence}
	l.mu.Lock()
	if l.acked[at] {
		l.violatedLocked("%v came again after its ACK was answered", at)
	}
	l.mu.Unlock()
	// Without an answer the message may come again, or not: the broker knows which.
	done := m.AckSync(ctx) == nil
	l.mu.Lock()
	l.acked[at] = done || l.acked[at]
	l.mu.Unlock()
	return nil
}

// Answered is the number of publishes that were answered so far.
func (l *Load) Answered() int64 { return l.answered.Load() }

// Acked is the number of messages whose ACK was answered.
func (l *Load) Acked() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, done := range l.acked {
		if done {
			n++
		}
	}
	return n
}

// AwaitMore waits until so many publishes more are answered.
func (l *Load) AwaitMore(ctx context.Context, n int64) error {
	want := l.Answered() + n
	return l.await(ctx, fmt.Sprintf("%d publishes are answered", n), func() bool { return l.Answered() >= want })
}

// Epoch returns a channel that is closed with the first publish that a leader beyond the epoch has acknowledged; at tells when that was.
func (l *Load) Epoch(beyond uint64) (resumed <-chan struct{}, at func() time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	first := make(chan struct{})
	l.wantEpoch, l.first = beyond, first
	return first, func() time.Time {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.firstAt
	}
}

func (l *Load) await(ctx context.Context, what string, done func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for !done() {
		if err := l.Err(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting until %s: %w", what, ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
	return l.Err()
}

// Finish stops publishing, waits until everything is answered, delivered and, by the broker's own account (nothing left for the
// group), acknowledged, and reads all of it once more with a group of its own, to see that it is there once and nothing else is.
func (l *Load) Finish(ctx context.Context, nothingLeft func() bool) error {
	close(l.stop)
	l.sending.Wait()
	bounded, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var errs []error
	for _, p := range l.producers {
		errs = append(errs, p.Close(bounded))
	}
	if err := errors.Join(errs...); err != nil {
		return errors.Join(err, l.end(ctx))
	}
	err := l.await(ctx, "everything that was published is delivered", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		for at := range l.stored {
			if _, ok := l.acked[at]; !ok {
				return false
			}
		}
		return true
	})
	if err == nil {
		err = l.await(ctx, "the group has acknowledged everything", nothingLeft)
	}
	if err == nil {
		err = l.audit(ctx)
	}
	return errors.Join(err, l.end(ctx))
}

// end closes everything.
func (l *Load) end(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	l.stopRun()
	l.running.Wait()
	var errs []error
	for _, k := range l.consumers {
		errs = append(errs, k.Close(ctx))
	}
	return errors.Join(append(errs, l.client.Close(), l.Err())...)
}

// audit reads the whole topic and compares.
func (l *Load) audit(ctx context.Context) error {
	found, err := l.readAll(ctx)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	values := map[string]place{}
	for at, value := range found {
		if other, ok := values[value]; ok {
			l.violatedLocked("message %.20s is stored twice: %v and %v", value, at, other)
		}
		values[value] = at
		if want, ok := l.stored[at]; !ok {
			l.violatedLocked("%v holds %.20s, which was never acknowledged although its producer has an answer to everything", at, value)
		} else if want != value {
			l.violatedLocked("%v holds %.20s, not %.20s", at, value, want)
		}
	}
	for at, value := range l.stored {
		if _, ok := found[at]; !ok {
			l.violatedLocked("%v: message %.20s is lost", at, value)
		}
	}
	return errors.Join(l.violations...)
}

// readAll reads the topic from its beginning up to what is acknowledged, and what comes behind it.
func (l *Load) readAll(ctx context.Context) (map[place]string, error) {
	l.mu.Lock()
	left := len(l.stored)
	l.mu.Unlock()
	return ReadAll(ctx, l.client, l.opts.Topic, left)
}

// ReadAll reads a topic from its beginning with a group of its own: n messages, and those that come along behind them.
func ReadAll(ctx context.Context, c *client.Client, topic string, n int) (map[place]string, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	name := fmt.Sprintf("audit-%d", audits.Add(1))
	k, err := c.NewConsumer(ctx, topic, name, client.ConsumerOptions{Start: protocol.StartEarliest, CreditCount: 8192, CreditBytes: 16 << 20})
	if err != nil {
		return nil, err
	}
	found := map[place]string{}
	messages := k.Messages()
	for done := false; !done; {
		var quiet <-chan time.Time
		if len(found) >= n {
			quiet = time.After(200 * time.Millisecond) // there should be no more
		}
		select {
		case m, ok := <-messages:
			if !ok {
				return nil, fmt.Errorf("reading %q: %w", topic, k.Err())
			}
			at := place{m.Partition, m.Sequence}
			if was, ok := found[at]; ok && was != string(m.Value) {
				return nil, fmt.Errorf("%v was %.20s and is %.20s now", at, was, m.Value)
			}
			found[at] = string(m.Value)
			_ = m.Ack() // where that fails the message comes again, which is no matter here
		case <-quiet:
			done = true
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("%d of %d messages of %q came: %w", len(found), n, topic, ctx.Err()), k.Close(context.WithoutCancel(ctx)))
		}
	}
	return found, k.Close(ctx)
}

var audits atomic.Int64
