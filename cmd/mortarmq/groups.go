package main

import (
	"context"
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
		Example: `  mortarmq groups list
  mortarmq groups list --topic orders --json`,
		Args: cobra.NoArgs,
	}
	list.Flags().StringVar(&topic, "topic", "", "only the groups of this topic")
	a.completeFlag(list, "topic", a.topicNames)
	list.RunE = does(func(ctx context.Context, _ []string) error {
		rows, err := a.adminGroups(ctx, topic)
		if err != nil {
			return err
		}
		return printRows(a, rows)
	})
	return group("groups", "Look at consumer groups; create, change, move and delete them", list, a.groupsDescribe(),
		a.groupsCreate(), a.groupsSet(), a.groupsReset(), a.groupsDelete())
}

func (a *app) leaderCommand() *cobra.Command {
	get := &cobra.Command{
		Use:   "get",
		Short: "Tell who leads: leader_id, leader_epoch, quorum_state",
		Example: `  mortarmq leader get
  mortarmq leader get --admin node-1,node-2,node-3`,
		Args: cobra.NoArgs,
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
		Example: `  mortarmq broker status
  mortarmq broker status --json`,
		Args: cobra.NoArgs,
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
	err := a.fetchNewest(ctx, "/topics", url.Values{}, &rows)
	return rows, err
}

func (a *app) adminGroups(ctx context.Context, topic string) ([]groupRow, error) {
	query := url.Values{}
	if topic != "" {
		query.Set("topic", topic)
	}
	var rows []groupRow
	err := a.fetchNewest(ctx, "/groups", query, &rows)
	return rows, err
}
