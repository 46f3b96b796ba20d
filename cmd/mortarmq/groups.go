package main

import (
	"context"
	"errors"
	"net/url"

	"github.com/spf13/cobra"
)

// groupRow is a line of groups list.
type groupRow struct {
	Group string `json:"group"`
	Topic string `json:"topic"`
	Lag   uint64 `json:"lag"`
	State string `json:"state"`
}

// memberRow is a line of groups describe.
type memberRow struct {
	Member          uint64 `json:"member"`
	AssignmentEpoch uint32 `json:"assignment_epoch"`
	OwnershipEpoch  uint64 `json:"ownership_epoch"`
	Lag             uint64 `json:"lag"`
}

// leaderRow is the result of leader get.
type leaderRow struct {
	LeaderID    int    `json:"leader_id"`
	LeaderEpoch uint32 `json:"leader_epoch"`
	QuorumState string `json:"quorum_state"`
}

// brokerRow is the result of broker status.
type brokerRow struct {
	NodeID      int    `json:"node_id"`
	UptimeS     int64  `json:"uptime_s"`
	Connections int64  `json:"connections"`
	Version     string `json:"version"`
	// How the broker reaches the disk, "io_uring" or "pread", and why not io_uring.
	IOBackend string `json:"io_backend" column:"-"`
	IOReason  string `json:"io_reason,omitempty" column:"-"`
}

func (a *app) groupsCommand() *cobra.Command {
	var topic string
	list := &cobra.Command{
		Use:   "list",
		Short: "List the consumer groups: group, topic, lag, state",
		Args:  cobra.NoArgs,
	}
	list.Flags().StringVar(&topic, "topic", "", "only the groups of this topic")
	list.RunE = does(func(ctx context.Context, _ []string) error {
		rows, err := a.adminGroups(ctx, topic)
		if err != nil {
			return err
		}
		return printRows(a, rows)
	})
	var describeTopic string
	describe := &cobra.Command{
		Use:   "describe GROUP",
		Short: "List a group's members: member, assignment_epoch, ownership_epoch, lag",
		Args:  cobra.ExactArgs(1),
	}
	describe.Flags().StringVar(&describeTopic, "topic", "", "the group that reads this topic, where several have the name")
	describe.RunE = does(func(ctx context.Context, args []string) error {
		rows, err := a.adminMembers(ctx, args[0], describeTopic)
		if err != nil {
			return err
		}
		return printRows(a, rows)
	})
	return group("groups", "Look at consumer groups; create, change, move and delete them", list, describe,
		a.groupsCreate(), a.groupsSet(), a.groupsReset(), a.groupsDelete())
}

func (a *app) leaderCommand() *cobra.Command {
	get := &cobra.Command{
		Use:   "get",
		Short: "Tell who leads: leader_id, leader_epoch, quorum_state",
		Args:  cobra.NoArgs,
	}
	get.RunE = does(func(ctx context.Context, _ []string) error {
		var row leaderRow
		if err := a.fetch(ctx, "/leader", nil, &row); err != nil {
			return err
		}
		return printRow(a, row)
	})
	return group("leader", "Look at the leader", get)
}

func (a *app) brokerCommand() *cobra.Command {
	status := &cobra.Command{
		Use:   "status",
		Short: "Tell how the broker is: node_id, uptime_s, connections, version; with --json also io_backend, io_reason",
		Args:  cobra.NoArgs,
	}
	status.RunE = does(func(ctx context.Context, _ []string) error {
		var row brokerRow
		if err := a.fetch(ctx, "/broker", nil, &row); err != nil {
			return err
		}
		return printRow(a, row)
	})
	return group("broker", "Look at the broker", status)
}

func (a *app) adminTopics(ctx context.Context) ([]topicRow, error) {
	var rows []topicRow
	err := a.fetch(ctx, "/topics", nil, &rows)
	return rows, err
}

func (a *app) adminGroups(ctx context.Context, topic string) ([]groupRow, error) {
	query := url.Values{}
	if topic != "" {
		query.Set("topic", topic)
	}
	var rows []groupRow
	err := a.fetch(ctx, "/groups", query, &rows)
	return rows, err
}

// adminMembers lists the members of a group. A name may stand for several groups, one for each topic.
func (a *app) adminMembers(ctx context.Context, name, topic string) ([]memberRow, error) {
	query := url.Values{}
	if topic != "" {
		query.Set("topic", topic)
	}
	var rows []memberRow
	err := a.fetch(ctx, "/groups/"+url.PathEscape(name), query, &rows)
	switch {
	case errors.Is(err, errNotFound) && topic != "":
		return nil, refusedf("there is no group %q of topic %q: 'mortarmq groups list' lists them", name, topic)
	case errors.Is(err, errNotFound):
		return nil, refusedf("there is no group %q: 'mortarmq groups list' lists them", name)
	case errors.Is(err, errAmbiguous):
		return nil, usagef("several topics have a group %q: say which with --topic", name)
	}
	return rows, err
}
