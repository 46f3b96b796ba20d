package groups

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/mortarmq/mortarmq/client"
)

// memberVariable holds the memberConfig of a process that is to be a member.
const memberVariable = "MORTARMQ_TEST_GROUP_MEMBER"

// memberConfig is what a member process is told.
type memberConfig struct {
	Addr, Topic, Group string
	Seed               uint64
	Settings           string        // of the group
	Lease              time.Duration // as Settings have it
	Credit             int
	Concurrency        int
	Pull               bool
	Cumulative         bool
	ParallelKeys       bool
	// WorkMin and WorkMax bound the time that a message takes.
	WorkMin, WorkMax time.Duration
}

const (
	// joinPatience is how long a member tries to join: the broker may be starting.
	joinPatience = 60 * time.Second
	// leavePatience is how long it may take to leave.
	leavePatience = 30 * time.Second
	retryPause    = 50 * time.Millisecond
)

// RunIfMember makes this process a member of a group, and never returns, if it was started to be one by a Scenario. Every
// program that runs scenarios calls it first.
func RunIfMember() {
	text := os.Getenv(memberVariable)
	if text == "" {
		return
	}
	if err := runMember(text); err != nil {
		fmt.Fprintln(os.Stderr, "member:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// runMember joins, consumes and, at SIGTERM, leaves. Events go to the standard output.
func runMember(text string) error {
	var cfg memberConfig
	if err := json.Unmarshal([]byte(text), &cfg); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	out := &reporter{w: os.Stdout}
	k, err := joinGroup(ctx, &cfg, out)
	if err != nil || ctx.Err() != nil {
		return err
	}
	h := &handler{cfg: &cfg, out: out}
	ended := make(chan error, 1)
	go func() { ended <- k.Run(context.Background(), h.handle) }()
	select {
	case err := <-ended:
		return fmt.Errorf("the consumer ended by itself: %w", err)
	case <-ctx.Done():
	}
	bounded, cancel := context.WithTimeout(context.Background(), leavePatience)
	defer cancel()
	return k.Close(bounded)
}

// joinGroup joins as soon as there is a broker that lets it.
func joinGroup(ctx context.Context, cfg *memberConfig, out *reporter) (*client.Consumer, error) {
	ctx, cancel := context.WithTimeout(ctx, joinPatience)
	defer cancel()
	for {
		k, err := tryJoin(ctx, cfg, out)
		if err == nil {
			return k, nil
		}
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return nil, err
			}
			return nil, nil
		case <-time.After(retryPause):
		}
	}
}

func tryJoin(ctx context.Context, cfg *memberConfig, out *reporter) (*client.Consumer, error) {
	c, err := client.Dial(ctx, cfg.Addr, client.WithBackoff(10*time.Millisecond, 200*time.Millisecond), client.WithDialer(tapped(out)),
		client.WithLogger(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))))
	if err != nil {
		return nil, err
	}
	k, err := c.NewConsumer(ctx, cfg.Topic, cfg.Group, client.ConsumerOptions{
		CreditCount: cfg.Credit, Pull: cfg.Pull, Concurrency: cfg.Concurrency, CumulativeAcks: cfg.Cumulative, ParallelKeys: cfg.ParallelKeys, GroupSettings: []byte(cfg.Settings), Lease: cfg.Lease,
	})
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return k, nil
}

// handler is what a member does with messages.
type handler struct {
	cfg *memberConfig
	out *reporter
}

var errFailed = errors.New("this message always fails")

func (h *handler) handle(_ context.Context, m *client.Message) (err error) {
	n, c, ok := parseValue(m.Value)
	if !ok {
		return fmt.Errorf("%w: its value is none of ours", client.ErrReject)
	}
	// Each message has a time of its own, whoever it comes to.
	rng := rand.New(rand.NewPCG(h.cfg.Seed, n))
	time.Sleep(h.cfg.WorkMin + time.Duration(rng.Int64N(int64(h.cfg.WorkMax-h.cfg.WorkMin)+1)))
	e := event{Kind: eventHandled, Cause: c, Number: n, Partition: m.Partition, Sequence: m.Sequence, Attempt: m.Attempt}
	if c != good {
		e.Code = 1
	}
	if err := h.out.report(e); err != nil {
		return err
	}
	switch c {
	case failing:
		return errFailed
	case panicking:
		panic(errFailed)
	case rejected:
		return client.ErrReject
	default:
		return nil
	}
}
