package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/protocol"
)

// resetRow is a line of groups reset: the ack floor of a partition before and after.
type resetRow struct {
	Partition uint16 `json:"partition"`
	From      uint64 `json:"from"`
	To        uint64 `json:"to"`
}

func (a *app) groupsReset() *cobra.Command {
	var topic, to string
	var partition int
	var force, dryRun bool
	c := &cobra.Command{
		Use:   "reset GROUP --topic TOPIC --to earliest|latest|SEQUENCE|TIME",
		Short: "Move a group to another position: partition, from, to",
		Long: `Move a consumer group to another position in its topic. What it had in flight or waiting for a retry is forgotten.

The position is earliest, latest, the sequence of the message to read next, or a time (RFC 3339, as 2026-01-31T12:00:00Z,
or a duration ago, as 90m): the first message stored then or later. What a partition does not have means its nearest end.

Columns: partition, from, to: the sequences up to which everything is done, before and after. --dry-run only shows them.
The move is refused while the group has members, unless --force is given.`,
		Example: `  mortarmq groups reset billing --topic orders --to earliest --dry-run
  mortarmq groups reset billing --topic orders --to 90m
  mortarmq groups reset billing --topic orders --to 1234 --partition 3 --force`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeGroups,
	}
	f := c.Flags()
	f.StringVar(&topic, "topic", "", "topic that the group reads (required)")
	f.StringVar(&to, "to", "", "new position (required)")
	f.IntVar(&partition, "partition", -1, "move in this partition only")
	f.BoolVar(&force, "force", false, "also while the group has members")
	f.BoolVar(&dryRun, "dry-run", false, "only show what would change")
	a.completeFlag(c, "topic", a.topicNames)
	a.completeFlag(c, "to", choices("earliest", "latest"))
	c.RunE = does(func(ctx context.Context, args []string) error {
		if topic == "" || to == "" {
			return usagef("--topic and --to are missing: name the topic that the group reads, and where it is to go on")
		}
		if partition < -1 || partition >= protocol.AnyPartition {
			return usagef("--partition is %d: possible are 0 to %d", partition, protocol.AnyPartition-1)
		}
		target, err := parseTarget(to)
		if err != nil {
			return err
		}
		opts := client.ResetOptions{Force: force, DryRun: dryRun}
		if partition >= 0 {
			opts.OnePartition, opts.Partition = true, uint16(partition)
		}
		return a.resetGroup(ctx, topic, args[0], target, opts)
	})
	return c
}

func (a *app) resetGroup(ctx context.Context, topic, name string, target client.ResetTarget, opts client.ResetOptions) error {
	return a.request(ctx, func(ctx context.Context, c *client.Client) error {
		moves, err := c.ResetGroup(ctx, topic, name, target, opts)
		if err != nil {
			return a.brokerError(err)
		}
		rows := make([]resetRow, len(moves))
		for i, m := range moves {
			rows[i] = resetRow(m)
		}
		return printRows(a, rows)
	})
}

// parseTarget reads --to.
func parseTarget(s string) (client.ResetTarget, error) {
	switch s {
	case "earliest":
		return client.Earliest(), nil
	case "latest":
		return client.Latest(), nil
	}
	if seq, err := strconv.ParseUint(s, 10, 63); err == nil {
		if seq == 0 {
			return client.ResetTarget{}, usagef("--to is 0: sequences begin with 1")
		}
		return client.AtSequence(seq), nil
	}
	t, err := parseTime(s)
	if err != nil {
		return client.ResetTarget{}, usagef("--to is %q: use earliest, latest, a sequence, or %w", s, err)
	}
	return client.AtTime(t), nil
}

var errTime = errors.New("a time such as 2026-01-31T12:00:00Z or 90m ago")

// parseTime reads a time in RFC 3339 or how long ago it was.
func parseTime(s string) (time.Time, error) {
	if t, err := time.Parse(time.RFC3339Nano, s); err == nil {
		return t, nil
	}
	if d, err := time.ParseDuration(s); err == nil && d >= 0 {
		return now().Add(-d), nil
	}
	return time.Time{}, errTime
}

func (a *app) groupsDelete() *cobra.Command {
	var topic string
	var force bool
	c := &cobra.Command{
		Use:   "delete GROUP --topic TOPIC",
		Short: "Delete a group with its position; its dead letters stay: deleted or not_found",
		Long: `Delete a consumer group with its position in the topic and its settings. Its dead letters stay.

While members are connected it is refused, unless --force is given: they are ended. Whether there are any is asked of the
admin interface (--admin).

Columns: deleted|not_found; both exit with 0.`,
		Example:           `  mortarmq groups delete billing --topic orders`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeGroups,
	}
	c.Flags().StringVar(&topic, "topic", "", "topic that the group reads (required)")
	c.Flags().BoolVar(&force, "force", false, "also while it has members, which are ended")
	a.completeFlag(c, "topic", a.topicNames)
	c.RunE = does(func(ctx context.Context, args []string) error {
		if topic == "" {
			return missingTopic()
		}
		if !force {
			if err := a.checkUnused(ctx, topic, args[0]); err != nil {
				return err
			}
		}
		return a.deleteGroup(ctx, topic, args[0])
	})
	return c
}

func missingTopic() error { return usagef("--topic is missing: name the topic that the group reads") }

// checkUnused is an error if a group has members. One that does not exist has none.
func (a *app) checkUnused(ctx context.Context, topic, name string) error {
	s, err := a.stats(ctx, topic, name)
	if errors.Is(err, errNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("whether group %q has members can't be found out, --force deletes it without asking: %w", name, err)
	}
	g, ok := s.group(topic, name)
	if !ok || g.connected() == 0 {
		return nil
	}
	return refusedf("group %q of topic %q has %s: stop what reads it first, or end it with --force", name, topic, countOf(g.connected(), "connected member"))
}

func (a *app) deleteGroup(ctx context.Context, topic, name string) error {
	return a.request(ctx, func(ctx context.Context, c *client.Client) error {
		existed, err := c.DeleteGroup(ctx, topic, name)
		if err != nil && !errors.Is(err, protocol.CodeUnknownTopic) {
			return a.brokerError(err)
		}
		return printRow(a, deletion(existed))
	})
}
