package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/mortarmq/mortarmq/client"
)

// createRow is the result of topics create.
type createRow struct {
	Result  string `json:"result"` // created, existed or mismatch
	TopicID uint16 `json:"topic_id"`
}

// deleteRow is the result of topics delete and groups delete.
type deleteRow struct {
	Result string `json:"result"` // deleted or not_found
}

func deletion(existed bool) deleteRow {
	if existed {
		return deleteRow{"deleted"}
	}
	return deleteRow{"not_found"}
}

// topicRow is a line of topics list.
type topicRow struct {
	Name         string `json:"name"`
	Partitions   uint16 `json:"partitions"`
	State        string `json:"state"`
	CreatedEpoch uint32 `json:"created_epoch"`
}

func (a *app) topicsCommand() *cobra.Command {
	return group("topics", "Create, delete, list and describe topics", a.topicsCreate(), a.topicsDelete(), a.topicsList(), a.topicsDescribe())
}

// maxPartitions is the most that a topic can have; 0xFFFF on the wire asks for routing.
const maxPartitions = 0xFFFF - 1

func (a *app) topicsCreate() *cobra.Command {
	var partitions int
	var durability string
	c := &cobra.Command{
		Use:   "create NAME",
		Short: "Create a topic: result, topic_id",
		Long: `Create a topic, or find out that it exists.

Columns: created|existed|mismatch, topic_id. A mismatch (the topic exists with another number of partitions) exits with 4.`,
		Example: `  mortarmq topics create orders --partitions 12
  mortarmq topics create metrics --partitions 4 --durability local`,
		Args: cobra.ExactArgs(1),
	}
	c.Flags().IntVar(&partitions, "partitions", 0, "number of partitions, fixed for the topic's life; 0 takes what exists, or the broker's default")
	c.Flags().StringVar(&durability, "durability", "", "what its publishes get by default: memory, local or quorum")
	a.completeFlag(c, "durability", choices("memory", "local", "quorum"))
	c.RunE = does(func(ctx context.Context, args []string) error {
		if partitions < 0 || partitions > maxPartitions {
			return usagef("--partitions is %d: use 1 to %d, or 0 for the broker's default", partitions, maxPartitions)
		}
		opts := client.DeclareOptions{Partitions: uint16(partitions)}
		if durability != "" {
			if _, err := parseDurability(durability); err != nil {
				return err
			}
			opts.Settings = fmt.Appendf(nil, `{"durability":%q}`, durability)
		}
		return a.createTopic(ctx, args[0], opts)
	})
	return c
}

func (a *app) createTopic(ctx context.Context, name string, opts client.DeclareOptions) error {
	return a.request(ctx, func(ctx context.Context, c *client.Client) error { return a.declareTopic(ctx, c, name, opts) })
}

func (a *app) declareTopic(ctx context.Context, c *client.Client, name string, opts client.DeclareOptions) error {
	t, err := c.Declare(ctx, name, opts)
	row := createRow{Result: "existed", TopicID: t.ID}
	switch {
	case errors.Is(err, client.ErrTopicExistsMismatch):
		existing, lookErr := c.Lookup(ctx, name)
		if lookErr != nil {
			return a.brokerError(lookErr)
		}
		if err := printRow(a, createRow{"mismatch", existing.ID}); err != nil {
			return err
		}
		return refusedf("topic %q exists with %d partitions, not %d: leave --partitions out, or use another name", name, existing.Partitions, opts.Partitions)
	case err != nil:
		return a.brokerError(err)
	case t.Created:
		row.Result = "created"
	}
	return printRow(a, row)
}

func (a *app) topicsDelete() *cobra.Command {
	c := &cobra.Command{
		Use:   "delete NAME",
		Short: "Delete a topic with everything in it: deleted or not_found",
		Long: `Delete a topic with its messages and its groups. There is no way back, and no question asked. Its files go in the background.

Columns: deleted|not_found; both exit with 0.`,
		Example:           `  mortarmq topics delete orders`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeTopics,
	}
	c.RunE = does(func(ctx context.Context, args []string) error {
		return a.request(ctx, func(ctx context.Context, c *client.Client) error {
			_, err := c.Lookup(ctx, args[0])
			if err == nil {
				err = c.DeleteTopic(ctx, args[0])
			}
			missing := errors.Is(err, client.ErrUnknownTopic)
			if err != nil && !missing {
				return a.brokerError(err)
			}
			return printRow(a, deletion(!missing))
		})
	})
	return c
}

func (a *app) topicsList() *cobra.Command {
	c := &cobra.Command{
		Use:   "list",
		Short: "List the topics: name, partitions, state, created_epoch",
		Example: `  mortarmq topics list
  mortarmq topics list --json`,
		Args: cobra.NoArgs,
	}
	c.RunE = does(func(ctx context.Context, _ []string) error {
		rows, err := a.adminTopics(ctx)
		if err != nil {
			return err
		}
		return printRows(a, rows)
	})
	return c
}
