package main

import (
	"bytes"
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/mortarmq/mortarmq/engine/deadletter"
	"github.com/mortarmq/mortarmq/protocol"
)

// letterRow is a line of dlq list and of redrive's dry run.
type letterRow struct {
	Sequence  uint64  `json:"sequence"` // of the letter
	Topic     string  `json:"topic"`
	Partition uint16  `json:"partition"`
	Source    uint64  `json:"source_sequence"`
	Reason    string  `json:"reason"`
	Attempts  uint16  `json:"attempts"`
	Ended     string  `json:"ended"`
	Key       payload `json:"key"`
	Bytes     int     `json:"value_bytes"`
}

// letterObject is a dead letter as show and export print it.
type letterObject struct {
	Sequence    uint64 `json:"sequence"`
	Topic       string `json:"topic"`
	TopicID     uint16 `json:"topic_id"`
	Partition   uint16 `json:"partition"`
	Source      uint64 `json:"source_sequence"`
	Reason      string `json:"reason"`
	Attempts    uint16 `json:"attempts"`
	Published   string `json:"published"`
	Ended       string `json:"ended"`
	ProducerID  uint64 `json:"producer_id"`
	ProducerSeq uint64 `json:"producer_seq"`
	contentJSON
}

// row describes a letter in one line.
func (l *letter) row() letterRow {
	return letterRow{
		Sequence: l.sequence, Topic: string(l.env.Topic), Partition: l.env.Partition, Source: l.env.Sequence,
		Reason: l.env.Reason.String(), Attempts: l.env.Attempts, Ended: utc(l.env.EndedMs), Key: payload{bytes: l.key}, Bytes: len(l.value),
	}
}

func (l *letter) object() letterObject {
	return letterObject{
		Sequence: l.sequence, Topic: string(l.env.Topic), TopicID: l.env.TopicID, Partition: l.env.Partition, Source: l.env.Sequence,
		Reason: l.env.Reason.String(), Attempts: l.env.Attempts, Published: utc(l.env.PublishedMs), Ended: utc(l.env.EndedMs),
		ProducerID: l.env.ProducerID, ProducerSeq: l.env.ProducerSeq, contentJSON: contentOf(l.key, l.value),
	}
}

func utc(ms uint64) string {
	return time.UnixMilli(int64(ms)).UTC().Format("2006-01-02T15:04:05.000Z07:00")
}

// letterFilter chooses letters.
type letterFilter struct {
	topic, key, reason string
	since, until       string

	byKey      bool
	reasonCode deadletter.Reason
	from, to   time.Time
}

func (f *letterFilter) flags(fs *pflag.FlagSet) {
	fs.StringVar(&f.topic, "topic", "", "only messages of this topic")
	fs.StringVar(&f.key, "key", "", "only messages with this key")
	fs.StringVar(&f.reason, "reason", "", "only these: nack, expired, connection or rejected")
	fs.StringVar(&f.since, "since", "", "only those given up then or later: a time (RFC 3339) or a duration ago, as 2h")
	fs.StringVar(&f.until, "until", "", "only those given up before")
}

// parse checks the flags; fs says whether a key was given, for it may be empty.
func (f *letterFilter) parse(fs *pflag.FlagSet) error {
	f.byKey = fs.Changed("key")
	var err error
	if f.reason != "" {
		if f.reasonCode, err = deadletter.ParseReason(f.reason); err != nil {
			return usagef("--%w", err)
		}
	}
	for _, p := range []struct {
		flag, text string
		t          *time.Time
	}{{"since", f.since, &f.from}, {"until", f.until, &f.to}} {
		if p.text == "" {
			continue
		}
		if *p.t, err = parseTime(p.text); err != nil {
			return usagef("--%s is %q: use %w", p.flag, p.text, err)
		}
	}
	return nil
}

func (f *letterFilter) match(l *letter) bool {
	ended := time.UnixMilli(int64(l.env.EndedMs))
	return (f.topic == "" || f.topic == string(l.env.Topic)) &&
		(!f.byKey || f.key == string(l.key)) &&
		(f.reasonCode == 0 || f.reasonCode == l.env.Reason) &&
		(f.from.IsZero() || !ended.Before(f.from)) &&
		(f.to.IsZero() || ended.Before(f.to))
}

func (a *app) dlqCommand() *cobra.Command {
	return group("dlq", "Look at dead letters, put them back, export them", a.dlqList(), a.dlqShow(), a.dlqRedrive(), a.dlqExport())
}

func (a *app) dlqList() *cobra.Command {
	var f letterFilter
	c := &cobra.Command{
		Use:   "list GROUP",
		Short: "List a group's dead letters: sequence, topic, partition, source_sequence, reason, attempts, ended, key, value_bytes",
		Example: `  mortarmq dlq list billing --since 2h
  mortarmq dlq list billing --topic orders --reason rejected --json`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeGroups,
	}
	f.flags(c.Flags())
	c.RunE = does(func(ctx context.Context, args []string) error {
		if err := f.parse(c.Flags()); err != nil {
			return err
		}
		out := newRowWriter[letterRow](a)
		err := a.eachLetter(ctx, args[0], func(l *letter) error {
			if !f.match(l) {
				return nil
			}
			return out.row(l.row())
		})
		if err != nil {
			return err
		}
		return out.end()
	})
	return c
}

func (a *app) dlqExport() *cobra.Command {
	var f letterFilter
	c := &cobra.Command{
		Use:   "export GROUP",
		Short: "Write a group's dead letters as JSON, an object per line",
		Long: `Write a group's dead letters to standard output as JSON, an object per line. Keys and values that are not UTF-8 are
key_base64 and value_base64. The letters stay where they are.`,
		Example: `  mortarmq dlq export billing > letters.jsonl
  mortarmq dlq export billing --key customer-7 | jq -r .value`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeGroups,
	}
	f.flags(c.Flags())
	c.RunE = does(func(ctx context.Context, args []string) error {
		if err := f.parse(c.Flags()); err != nil {
			return err
		}
		return a.eachLetter(ctx, args[0], func(l *letter) error {
			if !f.match(l) {
				return nil
			}
			return a.printJSON(l.object())
		})
	})
	return c
}

func (a *app) dlqShow() *cobra.Command {
	c := &cobra.Command{
		Use:   "show GROUP SEQUENCE",
		Short: "Show one dead letter, by its own sequence in the dead-letter topic",
		Example: `  mortarmq dlq show billing 17
  mortarmq dlq show billing 17 --json`,
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completeGroups,
	}
	c.RunE = does(func(ctx context.Context, args []string) error {
		seq, err := strconv.ParseUint(args[1], 10, 63)
		if err != nil || seq == 0 {
			return usagef("the sequence is %q: it must be a number from 1", args[1])
		}
		found := false
		err = a.eachLetterFrom(ctx, args[0], seq, func(l *letter) error {
			if l.sequence != seq {
				return errEnough
			}
			found = true
			if err := a.show(l); err != nil {
				return err
			}
			return errEnough
		})
		if err == nil && !found {
			err = refusedf("group %q has no dead letter with the sequence %d: 'mortarmq dlq list %s' lists them", args[0], seq, args[0])
		}
		return err
	})
	return c
}

func (a *app) show(l *letter) error {
	if a.json {
		return a.printJSON(l.object())
	}
	var b bytes.Buffer
	for _, line := range [][2]any{
		{"sequence", l.sequence}, {"topic", string(l.env.Topic)}, {"topic_id", l.env.TopicID}, {"partition", l.env.Partition},
		{"source_sequence", l.env.Sequence}, {"reason", l.env.Reason}, {"attempts", l.env.Attempts},
		{"published", utc(l.env.PublishedMs)}, {"ended", utc(l.env.EndedMs)},
		{"producer_id", l.env.ProducerID}, {"producer_seq", l.env.ProducerSeq},
		{"key", payload{bytes: l.key}}, {"value", payload{bytes: l.value}},
	} {
		fmt.Fprintf(&b, "%v\t%v\n", line[0], line[1])
	}
	return a.write(b.Bytes())
}

// deadLetterTopic is the name of a group's dead-letter topic.
func deadLetterTopic(group string) (string, error) {
	if err := protocol.ValidateGroup([]byte(group)); err != nil {
		return "", usagef("%w", err)
	}
	return protocol.DLQPrefix + group, nil
}
