package main

import (
	"context"
	"encoding/json"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/protocol"
)

// benchOptions are the flags of bench.
type benchOptions struct {
	topic    string
	messages int
	size     int
}

// benchRow is a line of bench.
type benchRow struct {
	Phase    string      `json:"phase"` // publish or consume
	Messages uint64      `json:"messages"`
	Seconds  json.Number `json:"seconds"`
	PerS     json.Number `json:"messages_per_s"`
	MBPerS   json.Number `json:"mb_per_s"`
}

func (a *app) benchCommand() *cobra.Command {
	o := benchOptions{}
	c := &cobra.Command{
		Use:   "bench",
		Short: "Publish and consume for a rough figure: phase, messages, seconds, messages_per_s, mb_per_s",
		Long: `Publish messages to a topic of its own, read them back, and print the throughput of both. The topic is created, and deleted at
the end. It is a first look at a running broker; 'make bench' measures properly, with latencies and the limits of the device.`,
		Args: cobra.NoArgs,
	}
	c.Flags().StringVar(&o.topic, "topic", "", "name of the topic; by default one is made up")
	c.Flags().IntVar(&o.messages, "messages", 200_000, "number of messages")
	c.Flags().IntVar(&o.size, "size", 100, "bytes per message")
	c.RunE = does(func(ctx context.Context, _ []string) error {
		if o.topic == "" {
			o.topic = fmt.Sprintf("bench.%d", time.Now().UnixNano())
		}
		return a.bench(ctx, &o)
	})
	return c
}

func (a *app) bench(ctx context.Context, o *benchOptions) error {
	if o.messages < 1 || o.size < 0 || o.size > protocol.MaxValueLen {
		return usagef("--messages must be at least 1 and --size between 0 and %d", protocol.MaxValueLen)
	}
	c, err := a.dial(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	t, err := c.Declare(ctx, o.topic, client.DeclareOptions{})
	if err != nil {
		return a.brokerError(err)
	}
	if !t.Created {
		return usagef("topic %q exists already: bench deletes its topic at the end, so it wants one of its own", o.topic)
	}
	published, err := a.benchPublish(ctx, c, o)
	rows := []benchRow{published}
	if err == nil {
		var consumed benchRow
		consumed, err = a.benchConsume(ctx, c, o)
		rows = append(rows, consumed)
	}
	cleanUp, cancel := a.requestContext(context.WithoutCancel(ctx))
	defer cancel()
	if deleteErr := c.DeleteTopic(cleanUp, o.topic); err == nil {
		err = deleteErr
	}
	if err != nil {
		return a.brokerError(err)
	}
	return printRows(a, rows)
}

func newBenchRow(phase string, o *benchOptions, took time.Duration) benchRow {
	s := took.Seconds()
	n := float64(o.messages)
	return benchRow{phase, uint64(o.messages), decimal(s, 3), decimal(n/s, 0), decimal(n*float64(o.size)/s/1e6, 3)}
}

func (a *app) benchPublish(ctx context.Context, c *client.Client, o *benchOptions) (benchRow, error) {
	p, err := c.NewProducer(ctx, o.topic, client.ProducerOptions{})
	if err != nil {
		return benchRow{}, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	answered := func(_ client.Result, err error) {
		if err != nil {
			cancel(err)
		}
	}
	start := time.Now()
	value := make([]byte, o.size)
	for range o.messages {
		if err = p.SendFunc(ctx, client.Record{Value: value}, answered); err != nil {
			break
		}
	}
	if err == nil {
		err = p.Flush(ctx)
	}
	took := time.Since(start)
	if closeErr := a.flush(ctx, p); err == nil {
		err = closeErr
	}
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	return newBenchRow("publish", o, took), err
}

func (a *app) benchConsume(ctx context.Context, c *client.Client, o *benchOptions) (benchRow, error) {
	start := time.Now()
	k, err := c.NewConsumer(ctx, o.topic, "bench", client.ConsumerOptions{CreditCount: subCreditMessages, CreditBytes: subCreditBytes})
	if err != nil {
		return benchRow{}, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var n atomic.Int64
	err = k.Run(ctx, func(context.Context, *client.Message) error {
		if n.Add(1) == int64(o.messages) {
			cancel()
		}
		return nil
	})
	took := time.Since(start)
	bounded, cancelClose := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancelClose()
	if closeErr := k.Close(bounded); err == nil {
		err = closeErr
	}
	if got := n.Load(); err == nil && got < int64(o.messages) {
		err = fmt.Errorf("%d of %d messages came back: %w", got, o.messages, context.Canceled)
	}
	return newBenchRow("consume", o, took), err
}
