package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

const (
	rebalancePartitions = 12
	// publishEvery is the time between two messages of a partition; the partitions take turns.
	publishEvery = 10 * time.Millisecond
	// windowTime is how long after a join or leave, or after nothing, messages are counted as those of it.
	windowTime = time.Second
)

// window is a stretch of time whose messages are counted together.
type window struct {
	// stay and move hold the times from when a message was due to its delivery, in nanoseconds, of the partitions that
	// keep their owner and of the others.
	stay, move *hdrhistogram.Histogram
}

func newWindow() *window {
	return &window{hdrhistogram.New(1000, int64(time.Minute), 3), hdrhistogram.New(1000, int64(time.Minute), 3)}
}

// arrival is a delivery.
type arrival struct {
	partition uint16
	due, at   int64 // on the bencher's clock
}

// recorder takes the deliveries of all members.
type recorder struct {
	mu   sync.Mutex
	list []arrival
}

func (r *recorder) handle(began time.Time) client.Handler {
	return func(_ context.Context, m *client.Message) error {
		at := int64(time.Since(began))
		r.mu.Lock()
		defer r.mu.Unlock()
		r.list = append(r.list, arrival{m.Partition, int64(binary.BigEndian.Uint64(m.Value)), at})
		return nil
	}
}

// take returns what has come and forgets it.
func (r *recorder) take() []arrival {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := r.list
	r.list = nil
	return list
}

// rebalance measures how long messages take while a fourth member joins three, and leaves.
func (b *bencher) rebalance(ctx context.Context) error {
	d, err := b.broker(ctx)
	if err != nil {
		return err
	}
	defer d.Kill()
	c, err := client.Dial(ctx, d.ClientAddr)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }() // nothing is lost that matters
	if _, err := c.Declare(ctx, topicName, client.DeclareOptions{Partitions: rebalancePartitions}); err != nil {
		return err
	}
	began, rec := time.Now(), &recorder{}
	join := func() (*client.Consumer, error) {
		k, err := c.NewConsumer(ctx, topicName, groupName, client.ConsumerOptions{Concurrency: 4})
		if err == nil {
			go func() { _ = k.Run(context.Background(), rec.handle(began)) }() // ends with the consumer
		}
		return k, err
	}
	for range 3 {
		if _, err := join(); err != nil {
			return err
		}
	}
	before, err := settled(ctx, d, 3)
	if err != nil {
		return err
	}
	stop, failed := make(chan struct{}), make(chan error, 1)
	go func() { failed <- publishDue(d.ClientAddr, began, stop) }()
	nothing, joined, left := newWindow(), newWindow(), newWindow()
	pauses := hdrhistogram.New(1000, int64(time.Minute), 3)
	moved := 0
	for range b.rounds {
		if err := b.pause(ctx, windowTime); err != nil {
			return err
		}
		nothing.add(rec.take(), nil)
		fourth, err := join()
		if err != nil {
			return err
		}
		after, err := settled(ctx, d, 4)
		if err != nil {
			return err
		}
		if err := b.pause(ctx, windowTime); err != nil {
			return err
		}
		list := rec.take()
		moves := movedPartitions(before, after)
		moved += len(moves)
		joined.add(list, moves)
		for p := range moves {
			_ = pauses.RecordValue(longestGap(list, p)) // within the histogram's range
		}
		if err := fourth.Close(ctx); err != nil {
			return err
		}
		if before, err = settled(ctx, d, 3); err != nil {
			return err
		}
		if err := b.pause(ctx, windowTime); err != nil {
			return err
		}
		left.add(rec.take(), movedPartitions(after, before))
	}
	close(stop)
	if err := <-failed; err != nil {
		return err
	}
	fmt.Fprintf(b.out, "A fourth member joins three on %d partitions and leaves again, %d times; each partition gets a message every %v.\n", rebalancePartitions, b.rounds, publishEvery)
	fmt.Fprintf(b.out, "Partitions moved by a join: %.2f. Time from when a message was due to its handler, in ms:\n\n", float64(moved)/float64(b.rounds))
	w := tabwriter.NewWriter(b.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "\tmessages\tp50\tp99\tp99.9\tmax\t")
	row(w, "nothing happens", nothing.stay)
	row(w, "a member joins: partitions that stay", joined.stay)
	row(w, "a member leaves: partitions that stay", left.stay)
	row(w, "a member joins: partitions that move", joined.move)
	row(w, "a member leaves: partitions that move", left.move)
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(b.out, "\nLongest gap between two messages of a partition that moves at a join: median %s ms, longest %s ms.\n\n",
		milliseconds(time.Duration(pauses.ValueAtQuantile(50))), milliseconds(time.Duration(pauses.Max())))
	return nil
}

func row(w *tabwriter.Writer, name string, h *hdrhistogram.Histogram) {
	q := func(p float64) string { return milliseconds(time.Duration(h.ValueAtQuantile(p))) }
	fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\t%s\t\n", name, h.TotalCount(), q(50), q(99), q(99.9), milliseconds(time.Duration(h.Max())))
}

func (b *bencher) pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

func (w *window) add(list []arrival, moves map[uint16]bool) {
	for _, a := range list {
		h := w.stay
		if moves[a.partition] {
			h = w.move
		}
		_ = h.RecordValue(max(a.at-a.due, 1000)) // within the histogram's range
	}
}

// movedPartitions are those with another owner or epoch.
func movedPartitions(before, after *harness.GroupState) map[uint16]bool {
	moves := map[uint16]bool{}
	for i := range before.Partitions {
		if before.Partitions[i] != after.Partitions[i] {
			moves[uint16(i)] = true
		}
	}
	return moves
}

// longestGap is the longest time between two deliveries of a partition.
func longestGap(list []arrival, partition uint16) int64 {
	last, longest := int64(0), int64(0)
	for _, a := range list {
		if a.partition != partition {
			continue
		}
		if last != 0 {
			longest = max(longest, a.at-last)
		}
		last = a.at
	}
	return longest
}

// publishDue publishes at a fixed rate until stop is closed; each value says when it was due. Answers are read on the side.
func publishDue(addr string, began time.Time, stop <-chan struct{}) error {
	conn, err := harness.Dial(addr, "")
	if err != nil {
		return err
	}
	defer conn.Close()
	topic, err := conn.Declare(topicName, rebalancePartitions)
	if err != nil {
		return err
	}
	answers := make(chan error, 1)
	go func() {
		for {
			f, err := conn.Next()
			if err == nil {
				err = f.Err()
			}
			if err != nil {
				answers <- err
				return
			}
		}
	}()
	const step = publishEvery / rebalancePartitions
	due := time.Since(began).Truncate(step)
	var frames []byte
	for n := uint16(0); ; {
		select {
		case <-stop:
			return nil
		case err := <-answers:
			return fmt.Errorf("publish: %w", err)
		default:
		}
		frames = frames[:0]
		for now := time.Since(began); due <= now; due += step {
			m := protocol.Pub{TopicID: topic.TopicID, Partition: n % rebalancePartitions, Value: binary.BigEndian.AppendUint64(nil, uint64(due))}
			frames = m.AppendFrame(frames)
			n++
		}
		if len(frames) > 0 {
			if err := conn.Send(frames); err != nil {
				return errors.Join(err, errors.New("publishing"))
			}
		}
		time.Sleep(due - time.Since(began))
	}
}
