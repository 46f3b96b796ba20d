package main

import (
	"bufio"
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/protocol"
)

// subOptions are the flags of sub.
type subOptions struct {
	topic, group string
	count        uint64
	exitEmpty    bool
	broadcast    bool
	from         string
	format       string
	formatGiven  bool
}

// How many messages, and bytes, are written before they are acknowledged together, and how long a message waits for more.
const (
	subBatchMessages = 1024
	subBatchBytes    = 1 << 20
	subBatchDelay    = 5 * time.Millisecond

	// The credit window: several batches, so that the broker goes on sending while one is written.
	subCreditMessages = 8 * subBatchMessages
	subCreditBytes    = 16 << 20
)

// spareAfter is how long a member waits for a partition before it is told that it is a spare one: longer than it takes to
// move partitions between members that answer.
var spareAfter = 8 * time.Second

func (a *app) subCommand() *cobra.Command {
	var o subOptions
	c := &cobra.Command{
		Use:   "sub TOPIC --group GROUP",
		Short: "Read messages as a member of a consumer group",
		Long: `Read messages as a member of a consumer group and print them, until it is interrupted.

A message is acknowledged after it was written out, so what another program was killed over is delivered again. Within one
run no message is printed twice. SIGINT and SIGTERM write out and acknowledge what is at hand and leave the group; the exit
code is then 0.

A group has at most as many members at work as the topic has partitions; further ones wait until one leaves, and say so.
With --broadcast every member gets every message, from where it joined (--from) on; the group keeps nothing for the next run.

Formats: value (the bytes of the value and a newline), json (an object per line; key_base64 and value_base64 where the bytes
are not UTF-8), or a template with these in it:
  %k key             %v value           %p partition       %s sequence        %a attempt
  %K key's length    %V value's length  %t time received (RFC 3339)           %T the same in Unix milliseconds
  %i producer id     %q producer seq    %n topic           %% percent
  \n newline         \t tab             \r carriage return \0 NUL             \\ backslash
A template is printed as it is: end it with \n for lines. --json is --format json.

--exit-empty ends when the group (each member, with --broadcast) has acknowledged everything that was committed in the topic at the start. It asks the
broker's admin interface (--admin) how far that is.`,
		Example: `  mortarmq sub orders --group billing
  mortarmq sub lines --group copy --exit-empty > words.txt
  mortarmq sub events --group look --from latest --format '%p %s %k=%v\n'
  mortarmq sub prices --group tickers --broadcast --from latest`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeTopics,
	}
	f := c.Flags()
	f.StringVar(&o.group, "group", "", "consumer group; created if it is new (required)")
	f.Uint64Var(&o.count, "count", 0, "end after this many messages; 0 goes on")
	f.BoolVar(&o.exitEmpty, "exit-empty", false, "end when the group has acknowledged all that was there at the start")
	f.StringVar(&o.from, "from", "earliest", "where a new group starts, with --broadcast this member: earliest or latest")
	f.BoolVar(&o.broadcast, "broadcast", false, "get every message, whoever else is in the group: it must be a broadcast group, or new")
	f.StringVar(&o.format, "format", "value", "value, json or a template")
	a.completeFlag(c, "group", a.groupNames)
	a.completeFlag(c, "from", choices("earliest", "latest"))
	a.completeFlag(c, "format", choices("value", "json"))
	c.RunE = does(func(ctx context.Context, args []string) error {
		o.topic, o.formatGiven = args[0], f.Changed("format")
		return a.sub(ctx, &o)
	})
	return c
}

func (o *subOptions) consumerOptions() (client.ConsumerOptions, error) {
	opts := client.ConsumerOptions{CreditCount: subCreditMessages, CreditBytes: subCreditBytes, Broadcast: o.broadcast}
	switch o.from {
	case "earliest":
	case "latest":
		opts.Start = protocol.StartLatest
	default:
		return opts, usagef("--from is %q: use earliest or latest", o.from)
	}
	if o.group == "" {
		return opts, usagef("--group is missing: name the consumer group to read as; a new one gets every message from the first on")
	}
	if err := protocol.ValidateGroup([]byte(o.group)); err != nil {
		return opts, usagef("--group: %w", err)
	}
	return opts, nil
}

func (a *app) sub(ctx context.Context, o *subOptions) error {
	opts, err := o.consumerOptions()
	if err != nil {
		return err
	}
	if a.json {
		if o.formatGiven && o.format != "json" {
			return usagef("--json and --format %s exclude each other", o.format)
		}
		o.format = "json"
	}
	format, err := parseFormat(o.format)
	if err != nil {
		return err
	}
	c, err := a.dial(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	s := &subscription{app: a, o: o, format: format, out: bufio.NewWriterSize(a.stdout, subBatchBytes), printed: map[uint16]*ranges{}}
	if o.exitEmpty {
		if s.end, err = a.findEnd(ctx, o.topic, o.group); err != nil {
			return err
		}
		defer s.end.stop()
	}
	joinCtx, cancel := a.requestContext(ctx)
	defer cancel()
	if s.consumer, err = c.NewConsumer(joinCtx, o.topic, o.group, opts); err != nil {
		return a.brokerError(err)
	}
	err = s.follow(ctx)
	bounded, cancelClose := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancelClose()
	if closeErr := s.consumer.Close(bounded); err == nil && closeErr != nil {
		err = a.brokerError(closeErr)
	}
	return err
}

// subscription is a run of sub. It belongs to one goroutine.
type subscription struct {
	*app
	o        *subOptions
	format   formatter
	consumer *client.Consumer
	out      *bufio.Writer
	line     []byte            // scratch of the formatter
	pending  []*client.Message // written to out, not acknowledged
	bytes    int               // of pending
	count    uint64
	end      *endWatch // nil without --exit-empty
	// printed tells, by partition, what was written already: a redelivery is acknowledged, not printed.
	printed map[uint16]*ranges
}

// follow prints messages until there is a reason to stop; what it has printed is then acknowledged.
func (s *subscription) follow(ctx context.Context) error {
	if s.end == nil && s.o.count == 0 {
		s.hint("reading topic %q as a member of group %q; Ctrl-C ends it", s.o.topic, s.o.group)
	}
	messages := s.consumer.Messages()
	flush := time.NewTimer(subBatchDelay)
	flush.Stop()
	defer flush.Stop()
	spare := time.NewTimer(spareAfter)
	defer spare.Stop()
	var ended <-chan error
	if s.end != nil {
		ended = s.end.done
	}
	for {
		select {
		case m, ok := <-messages:
			if !ok {
				return s.finish(s.brokerError(s.consumer.Err()))
			}
			if len(s.pending) == 0 {
				flush.Reset(subBatchDelay)
			}
			if err := s.print(m); err != nil {
				return err
			}
			if s.o.count > 0 && s.count == s.o.count {
				return s.finish(nil)
			}
			if len(s.pending) >= subBatchMessages || s.bytes >= subBatchBytes {
				if err := s.acknowledge(); err != nil {
					return err
				}
			}
		case <-flush.C:
			if err := s.acknowledge(); err != nil {
				return err
			}
		case <-spare.C:
			s.tellSpare()
		case err := <-ended:
			return s.finish(err)
		case <-ctx.Done():
			return s.finish(nil)
		}
	}
}

// tellSpare says why nothing comes, if it is because others have all partitions.
func (s *subscription) tellSpare() {
	if s.count > 0 || len(s.consumer.Partitions()) > 0 {
		return
	}
	s.note("the other members of group %q have all of topic %q (%s): this one waits as a spare until one of them leaves; "+
		"a group of its own (--group) would get every message", s.o.group, s.o.topic, countOf(int(s.consumer.Topic().Partitions), "partition"))
}

// finish acknowledges what was printed; err is why it ends.
func (s *subscription) finish(err error) error {
	if ackErr := s.acknowledge(); err == nil {
		err = ackErr
	}
	return err
}

func (s *subscription) print(m *client.Message) error {
	s.pending = append(s.pending, m)
	s.bytes += len(m.Key) + len(m.Value)
	seen := s.printed[m.Partition]
	if seen == nil {
		seen = &ranges{}
		s.printed[m.Partition] = seen
	}
	if !seen.add(m.Sequence) {
		return nil
	}
	s.count++
	s.line = s.format(s.line[:0], m)
	_, err := s.out.Write(s.line)
	return outputError(err)
}

// acknowledge writes out what was printed and then, only then, acknowledges it.
func (s *subscription) acknowledge() error {
	if err := s.out.Flush(); err != nil {
		return outputError(err)
	}
	for i, m := range s.pending {
		_ = m.Ack() // a delivery that is over comes again, and printed knows it
		s.pending[i] = nil
	}
	s.pending, s.bytes = s.pending[:0], 0
	if s.end != nil {
		s.end.wake()
	}
	return nil
}

// maxRanges bounds the memory of what was printed of a partition. Only redeliveries and other members make gaps.
const maxRanges = 4096

// ranges is a set of sequences, kept as sorted runs.
type ranges struct{ runs []seqRange }

type seqRange struct{ first, last uint64 }

// add puts seq into the set and reports whether it is new. Beyond maxRanges the lowest run is forgotten.
func (r *ranges) add(seq uint64) bool {
	i := len(r.runs)
	for i > 0 && r.runs[i-1].first > seq {
		i--
	}
	// runs[i-1] is the last one that starts at or before seq
	if i > 0 && seq <= r.runs[i-1].last {
		return false
	}
	joinsLower := i > 0 && r.runs[i-1].last+1 == seq
	joinsUpper := i < len(r.runs) && seq+1 == r.runs[i].first
	switch {
	case joinsLower && joinsUpper:
		r.runs[i-1].last = r.runs[i].last
		r.runs = append(r.runs[:i], r.runs[i+1:]...)
	case joinsLower:
		r.runs[i-1].last = seq
	case joinsUpper:
		r.runs[i].first = seq
	default:
		r.runs = append(r.runs, seqRange{})
		copy(r.runs[i+1:], r.runs[i:])
		r.runs[i] = seqRange{seq, seq}
		if len(r.runs) > maxRanges {
			r.runs = append(r.runs[:0], r.runs[1:]...)
		}
	}
	return true
}
