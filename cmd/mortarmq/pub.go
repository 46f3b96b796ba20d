package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/protocol"
)

// pubOptions are the flags of pub.
type pubOptions struct {
	topic        string
	values       []string
	file         string
	key          string
	keySeparator string
	partition    int // -1: the key's
	rate         float64
	durability   string
	// patience is how long the broker may fail before unanswered messages are given up; 0 is the client library's.
	patience time.Duration
}

// pubRow is the summary of pub.
type pubRow struct {
	Acknowledged uint64      `json:"acknowledged"`
	Bytes        uint64      `json:"bytes"`
	Seconds      json.Number `json:"seconds"`
}

// closeTimeout bounds the orderly end of a producer or consumer.
const closeTimeout = 5 * time.Second

func (a *app) pubCommand() *cobra.Command {
	var o pubOptions
	c := &cobra.Command{
		Use:   "pub TOPIC [VALUE...]",
		Short: "Publish messages: acknowledged, bytes, seconds",
		Long: `Publish messages to a topic: the arguments, or else the lines of --file or standard input.

A line is everything up to a newline, byte for byte: carriage returns, NULs and empty lines are kept, and the last line
needs no newline. Messages with the same key keep their order; without a key they are spread over the partitions.

It ends with 0 when the broker has acknowledged every message. Otherwise it says how many were: the first ones of each
partition. Columns: acknowledged, bytes (of keys and values), seconds.`,
		Example: `  mortarmq pub orders '{"id":1}' '{"id":2}' --key customer-7
  mortarmq pub lines --file words.txt
  seq 1000000 | sed 's/^/user:/' | mortarmq pub events --key-separator :`,
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completeTopics,
	}
	f := c.Flags()
	f.StringVar(&o.file, "file", "", "publish the lines of this file; - is standard input")
	f.StringVar(&o.key, "key", "", "key of every message")
	f.StringVar(&o.keySeparator, "key-separator", "", "what separates key and value of a line: its first occurrence")
	f.IntVar(&o.partition, "partition", -1, "publish to this partition, whatever the key")
	f.Float64Var(&o.rate, "rate", 0, "messages per second at most; 0 is as fast as possible")
	f.StringVar(&o.durability, "durability", "", "when a message counts as stored: memory, local or quorum; the topic's setting by default")
	a.completeFlag(c, "durability", choices("memory", "local", "quorum"))
	c.RunE = does(func(ctx context.Context, args []string) error {
		o.topic, o.values = args[0], args[1:]
		if c.Flags().Changed("timeout") {
			o.patience = a.timeout
		}
		return a.pub(ctx, &o)
	})
	return c
}

func parseDurability(s string) (protocol.Durability, error) {
	switch s {
	case "":
		return protocol.DurabilityTopic, nil
	case "memory":
		return protocol.DurabilityMemory, nil
	case "local":
		return protocol.DurabilityLocal, nil
	case "quorum":
		return protocol.DurabilityQuorum, nil
	}
	return 0, usagef("--durability is %q: use memory, local or quorum", s)
}

// check finds what is wrong with the options before anything is sent.
func (o *pubOptions) check() error {
	switch {
	case o.key != "" && o.keySeparator != "":
		return usagef("--key and --key-separator exclude each other")
	case len(o.key) > protocol.MaxKeyLen:
		return usagef("--key has %d bytes, at most %d are possible", len(o.key), protocol.MaxKeyLen)
	case len(o.values) > 0 && o.file != "":
		return usagef("values come from the arguments or from --file, not from both")
	case o.partition < -1 || o.partition >= protocol.AnyPartition:
		return usagef("--partition is %d: possible are 0 to %d", o.partition, protocol.AnyPartition-1)
	case o.rate < 0:
		return usagef("--rate is %v: it can't be negative", o.rate)
	}
	return nil
}

// input returns the lines to publish and what closes their source.
func (a *app) input(o *pubOptions) (*lineReader, io.Closer, error) {
	limit := protocol.MaxValueLen
	if o.keySeparator != "" {
		limit += protocol.MaxKeyLen + len(o.keySeparator)
	}
	if o.file == "" || o.file == "-" {
		return newLineReader(a.stdin, limit), io.NopCloser(nil), nil
	}
	f, err := os.Open(o.file)
	if err != nil {
		return nil, nil, usagef("--file: %w", err)
	}
	return newLineReader(f, limit), f, nil
}

func (a *app) pub(ctx context.Context, o *pubOptions) error {
	if err := o.check(); err != nil {
		return err
	}
	durability, err := parseDurability(o.durability)
	if err != nil {
		return err
	}
	lines, source, err := a.input(o)
	if err != nil {
		return err
	}
	defer source.Close()
	c, err := a.dial(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	p, err := a.openProducer(ctx, c, o, durability)
	if err != nil {
		return err
	}
	if in, ok := a.stdin.(*os.File); ok && len(o.values) == 0 && (o.file == "" || o.file == "-") && term.IsTerminal(int(in.Fd())) {
		a.hint("publishing each line that you type; Ctrl-D ends it")
	}
	return a.publishAll(ctx, p, o, lines)
}

func (a *app) openProducer(ctx context.Context, c *client.Client, o *pubOptions, d protocol.Durability) (*client.Producer, error) {
	ctx, cancel := a.requestContext(ctx)
	defer cancel()
	opts := client.ProducerOptions{Durability: d, DeliveryTimeout: o.patience}
	if o.partition >= 0 {
		opts.Route = func([]byte, uint16) uint16 { return uint16(o.partition) }
	}
	p, err := c.NewProducer(ctx, o.topic, opts)
	if err != nil {
		return nil, a.brokerError(err)
	}
	if last := int(p.Topic().Partitions) - 1; o.partition > last {
		return nil, usagef("--partition is %d, but topic %q has the partitions 0 to %d", o.partition, o.topic, last)
	}
	return p, nil
}

// publishing is a run of pub.
type publishing struct {
	o        *pubOptions
	p        *client.Producer
	sent     atomic.Uint64
	acked    atomic.Uint64
	bytes    atomic.Uint64 // of acknowledged messages
	start    time.Time
	answered func(client.Result, error)
	cancel   context.CancelCauseFunc
}

// publishAll publishes everything, waits for the answers and prints the summary.
func (a *app) publishAll(ctx context.Context, p *client.Producer, o *pubOptions, lines *lineReader) error {
	sendCtx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r := &publishing{o: o, p: p, start: time.Now(), cancel: cancel}
	r.answered = r.answer
	stopProgress := a.progress(func() string { return r.status() })
	err := r.sendUntil(sendCtx, lines)
	if flushErr := a.flush(ctx, p); err == nil {
		err = flushErr
	}
	if cause := context.Cause(sendCtx); cause != nil && ctx.Err() == nil {
		err = cause // the broker's refusal of a message, not that sending stopped because of it
	}
	stopProgress()
	row := pubRow{r.acked.Load(), r.bytes.Load(), decimal(time.Since(r.start).Seconds(), 3)}
	if printErr := printRow(a, row); err == nil {
		err = printErr
	}
	if err != nil {
		return r.incomplete(a.pubError(err))
	}
	return nil
}

// sendUntil is send that does not wait for input any more when ctx ends: a read of a terminal can't be interrupted.
func (r *publishing) sendUntil(ctx context.Context, lines *lineReader) error {
	sent := make(chan error, 1)
	go func() { sent <- r.send(ctx, lines) }()
	select {
	case err := <-sent:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// answer counts a broker's answer; it runs on the producer's goroutine.
func (r *publishing) answer(res client.Result, err error) {
	if err != nil {
		r.cancel(err)
		return
	}
	r.acked.Add(1)
	r.bytes.Add(res.Tag)
}

// flush waits for the answers. After an interrupt it does so for a short time only.
func (a *app) flush(ctx context.Context, p *client.Producer) error {
	err := p.Flush(ctx)
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	if closeErr := p.Close(bounded); err == nil {
		err = closeErr
	}
	return err
}

// pubError gives an error of publishing its exit code.
func (a *app) pubError(err error) error {
	var f *failure
	if errors.As(err, &f) || isLocal(err) {
		return failed(err)
	}
	return a.brokerError(err)
}

// incomplete adds how far publishing came.
func (r *publishing) incomplete(err error) error {
	code := exitLocal
	if f := (*failure)(nil); errors.As(err, &f) {
		code = f.code
	}
	return &failure{code, fmt.Errorf("%w; %d of the %d messages sent to %q were acknowledged", err, r.acked.Load(), r.sent.Load(), r.o.topic)}
}

// send publishes the values, without waiting for the answers.
func (r *publishing) send(ctx context.Context, lines *lineReader) error {
	pace := newPacer(r.o.rate, r.start)
	key := []byte(r.o.key)
	for _, v := range r.o.values {
		if err := pace.wait(ctx); err != nil {
			return err
		}
		if err := r.sendOne(ctx, key, []byte(v)); err != nil {
			return err
		}
	}
	if len(r.o.values) > 0 {
		return nil
	}
	separator := []byte(r.o.keySeparator)
	for {
		value, err := lines.next()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case errors.Is(err, errLineTooLong):
			return &failure{exitUsage, err}
		case err != nil:
			return &localError{fmt.Errorf("reading the lines: %w", err)}
		}
		if len(separator) > 0 {
			var found bool
			if key, value, found = bytes.Cut(value, separator); !found {
				return usagef("line %d has no key: there is no %q in it", lines.number, separator)
			}
			if len(key) > protocol.MaxKeyLen {
				return usagef("line %d: the key has %d bytes, at most %d are possible", lines.number, len(key), protocol.MaxKeyLen)
			}
		}
		if err := pace.wait(ctx); err != nil {
			return err
		}
		if err := r.sendOne(ctx, key, value); err != nil {
			return err
		}
	}
}

func (r *publishing) sendOne(ctx context.Context, key, value []byte) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	m := client.Record{Key: key, Value: value, Tag: uint64(len(key) + len(value))}
	if err := r.p.SendFunc(ctx, m, r.answered); err != nil {
		return err
	}
	r.sent.Add(1)
	return nil
}

// status is the progress line.
func (r *publishing) status() string {
	acked, n := r.acked.Load(), r.bytes.Load()
	elapsed := time.Since(r.start).Seconds()
	return fmt.Sprintf("%d messages, %s, %.0f messages/s", acked, byteCount(n), float64(acked)/elapsed)
}

// localError marks an error of this machine, so that it doesn't count as one of the connection.
type localError struct{ err error }

func (e *localError) Error() string { return e.err.Error() }
func (e *localError) Unwrap() error { return e.err }

func isLocal(err error) bool {
	var l *localError
	return errors.As(err, &l)
}

// pacer spreads messages over time.
type pacer struct {
	rate  float64
	start time.Time
	n     float64
}

// minPause is the shortest pause worth a timer; what it makes late is caught up with.
const minPause = time.Millisecond

func newPacer(rate float64, start time.Time) *pacer { return &pacer{rate: rate, start: start} }

// wait waits until the next message is due.
func (p *pacer) wait(ctx context.Context) error {
	if p.rate <= 0 {
		return nil
	}
	due := p.start.Add(time.Duration(p.n / p.rate * float64(time.Second)))
	p.n++
	pause := time.Until(due)
	if pause < minPause {
		return nil
	}
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
