package main

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/spf13/cobra"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/protocol"
)

// redriveGroup reads dead letters to put them back. What it has acknowledged is back in its topic, which is why a redrive
// can be interrupted and run again. Letters that are not wanted now are refused, which leaves them for another run.
const redriveGroup = "mortarmq.redrive"

// redriveSettings give a letter all the attempts there are, and have one that was not wanted come back soon.
const redriveSettings = `{"max_attempts":65535,"retry":[1000]}`

// redriveWindow is how many letters a run has at hand: at most so many messages are put back twice where it is killed.
const redriveWindow = 256

// redriveRow is the result of dlq redrive.
type redriveRow struct {
	Redriven uint64 `json:"redriven"`
	Left     uint64 `json:"left"`   // did not match, or came too late
	Failed   uint64 `json:"failed"` // could not be put back
}

func (a *app) dlqRedrive() *cobra.Command {
	var f letterFilter
	var dryRun bool
	var limit uint64
	c := &cobra.Command{
		Use:   "redrive GROUP",
		Short: "Put a group's dead letters back into their topics: redriven, left, failed",
		Long: `Put a group's dead letters back into the topic and partition that they come from, with the original key and value. They
are new messages there, marked as redriven, for all groups of the topic. The letters themselves stay in the dead-letter topic.

Each letter is put back once: what a run has done is on record with the broker, so an interrupted run is simply started
again. One that was killed between messages and their record puts these, at most 256, back a second time, never not at all.

Columns: redriven, left (not chosen by the filters), failed (the topic is gone or was created anew; exit code 4).
--dry-run lists what would be put back, with the columns of dlq list.`,
		Example: `  mortarmq dlq redrive billing --dry-run
  mortarmq dlq redrive billing --reason expired --since 24h --limit 100`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeGroups,
	}
	f.flags(c.Flags())
	c.Flags().BoolVar(&dryRun, "dry-run", false, "only list what would be put back")
	c.Flags().Uint64Var(&limit, "limit", 0, "put back at most so many; 0 is all")
	c.RunE = does(func(ctx context.Context, args []string) error {
		if err := f.parse(c.Flags()); err != nil {
			return err
		}
		return a.redrive(ctx, args[0], &f, dryRun, limit)
	})
	return c
}

// redrive is one run. It belongs to one goroutine, but for what done counts.
type redrive struct {
	*app
	client *client.Client
	filter *letterFilter
	dryRun bool
	limit  uint64
	out    *rowWriter[letterRow]

	last    uint64          // letters behind it came later
	open    uint64          // letters up to last that are still to be seen
	seen    map[uint64]bool // they may come twice
	chosen  uint64
	targets map[redriveTarget]*client.Producer
	topics  map[string]redriveTopic

	pending sync.WaitGroup
	mu      sync.Mutex
	row     redriveRow
	problem error // the first one
}

type redriveTarget struct {
	topic     string
	partition uint16
}

type redriveTopic struct {
	topic client.Topic
	err   error
}

func (a *app) redrive(ctx context.Context, group string, f *letterFilter, dryRun bool, limit uint64) error {
	topic, err := deadLetterTopic(group)
	if err != nil {
		return err
	}
	r := &redrive{app: a, filter: f, dryRun: dryRun, limit: limit, out: newRowWriter[letterRow](a),
		seen: map[uint64]bool{}, targets: map[redriveTarget]*client.Producer{}, topics: map[string]redriveTopic{}}
	if r.last, r.open, err = a.openLetters(ctx, group, topic); err != nil {
		return err
	}
	if r.open > 0 {
		if err := r.run(ctx, topic); err != nil {
			return err
		}
	}
	if dryRun {
		return r.out.end()
	}
	if err := printRow(a, r.row); err != nil {
		return err
	}
	if r.row.Failed > 0 {
		return refusedf("%d dead letters could not be put back and stay where they are, the first because of: %w", r.row.Failed, r.problem)
	}
	return nil
}

// openLetters returns the last sequence of a dead-letter topic and how many letters up to it were not put back.
func (a *app) openLetters(ctx context.Context, group, topic string) (last, open uint64, err error) {
	if last, err = a.letterCount(ctx, group, topic); err != nil || last == 0 {
		return 0, 0, err
	}
	s, err := a.stats(ctx, topic, redriveGroup)
	if err != nil {
		return 0, 0, err
	}
	if g, ok := s.group(topic, redriveGroup); ok {
		return last, min(last, g.InFlight+g.Waiting), nil
	}
	return last, last, nil
}

func (r *redrive) run(ctx context.Context, topic string) error {
	c, err := r.dial(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	r.client = c
	k, err := r.consume(ctx, c, topic, redriveGroup, client.ConsumerOptions{
		GroupSettings: []byte(redriveSettings), CreditCount: redriveWindow, CreditBytes: subCreditBytes,
	})
	if err != nil {
		return err
	}
	err = r.eachMessage(ctx, k, func(m *client.Message) error { return r.take(ctx, m) })
	if err == nil {
		r.pending.Wait()
	}
	r.tidy(ctx, func(ctx context.Context) {
		for _, p := range r.targets {
			err = errors.Join(err, r.brokerError(p.Close(ctx)))
		}
		err = errors.Join(err, r.brokerError(k.Close(ctx))) // with what is acknowledged
	})
	return err
}

// take decides about a letter.
func (r *redrive) take(ctx context.Context, m *client.Message) error {
	if m.Sequence > r.last || r.seen[m.Sequence] {
		r.leave(m)
		return nil
	}
	r.seen[m.Sequence] = true
	l, err := decodeLetter(m)
	if err != nil {
		return err
	}
	switch {
	case !r.filter.match(l) || r.limit > 0 && r.chosen >= r.limit:
		r.mu.Lock()
		r.row.Left++
		r.mu.Unlock()
		r.leave(m)
	case r.dryRun:
		r.chosen++
		err = r.out.row(l.row())
		r.leave(m)
	default:
		r.chosen++
		err = r.put(ctx, m, l)
	}
	if err == nil && uint64(len(r.seen)) >= r.open {
		err = errEnough
	}
	return err
}

// leave gives a letter back for another run.
func (r *redrive) leave(m *client.Message) {
	_ = m.Nack(protocol.NackRetryLater) // a delivery that is over comes again anyway
}

// put publishes a letter's message and, once that is stored, acknowledges the letter.
func (r *redrive) put(ctx context.Context, m *client.Message, l *letter) error {
	p, err := r.producer(ctx, l)
	if err != nil {
		if errors.Is(err, context.Canceled) {
			return err
		}
		r.fail(err)
		r.leave(m)
		return nil
	}
	r.pending.Add(1)
	future := p.SendAsync(ctx, client.Record{Key: l.key, Value: l.value, Redriven: true})
	go func() {
		defer r.pending.Done()
		if _, err := future.Wait(ctx); err != nil {
			r.fail(err)
			r.leave(m)
			return
		}
		_ = m.Ack() // if it is too late for that, the next run puts the message back again
		r.mu.Lock()
		r.row.Redriven++
		r.mu.Unlock()
	}()
	return nil
}

func (r *redrive) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.row.Failed++; r.problem == nil {
		r.problem = err
	}
}

// producer returns the producer for where a letter comes from.
func (r *redrive) producer(ctx context.Context, l *letter) (*client.Producer, error) {
	name := string(l.env.Topic)
	t, known := r.topics[name]
	ctx, cancel := r.requestContext(ctx)
	defer cancel()
	if !known {
		t.topic, t.err = r.client.Lookup(ctx, name)
		r.topics[name] = t
	}
	switch {
	case t.err != nil:
		return nil, t.err
	case t.topic.ID != l.env.TopicID:
		return nil, fmt.Errorf("topic %q was created anew since: its messages are others", name)
	case l.env.Partition >= t.topic.Partitions:
		return nil, fmt.Errorf("topic %q has no partition %d", name, l.env.Partition)
	}
	target := redriveTarget{name, l.env.Partition}
	if p := r.targets[target]; p != nil {
		return p, nil
	}
	p, err := r.client.NewProducer(ctx, name, client.ProducerOptions{
		Durability: protocol.DurabilityQuorum,
		Route:      func([]byte, uint16) uint16 { return target.partition },
	})
	if err != nil {
		return nil, err
	}
	r.targets[target] = p
	return p, nil
}
