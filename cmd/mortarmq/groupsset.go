package main

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/protocol"
)

// groupResultRow is the result of groups create and groups set.
type groupResultRow struct {
	Result string `json:"result"` // created, existed or mismatch; set
}

// groupSettingsFlags are a group's settings as flags.
type groupSettingsFlags struct {
	strategy, retry    string
	maxAttempts        uint16
	ordered, broadcast bool
	lease              time.Duration
}

func (s *groupSettingsFlags) add(f *pflag.FlagSet) {
	f.StringVar(&s.strategy, "strategy", "", "how partitions are spread over members: sticky, averagely or circle")
	f.Uint16Var(&s.maxAttempts, "max-attempts", 0, "attempts before a message is a dead letter")
	f.BoolVar(&s.ordered, "ordered", false, "a partition's next message waits until the one before is done")
	f.StringVar(&s.retry, "retry", "", "delays between attempts: exponential, rocketmq, or durations separated by commas, as 1s,10s,1m")
	f.DurationVar(&s.lease, "lease", 0, "how long a delivery may stay unacknowledged")
	f.BoolVar(&s.broadcast, "broadcast", false, "every member gets every partition")
}

// complete has the shell offer the values that there are.
func (s *groupSettingsFlags) complete(a *app, c *cobra.Command) {
	a.completeFlag(c, "topic", a.topicNames)
	a.completeFlag(c, "strategy", choices("sticky", "averagely", "circle"))
	a.completeFlag(c, "retry", choices("exponential", "rocketmq"))
}

// json returns the settings that were given, nil if none was. The broker checks them.
func (s *groupSettingsFlags) json(f *pflag.FlagSet) ([]byte, error) {
	settings := map[string]any{}
	if f.Changed("strategy") {
		settings["strategy"] = s.strategy
	}
	if f.Changed("max-attempts") {
		settings["max_attempts"] = s.maxAttempts
	}
	if s.ordered {
		settings["ordered"] = true
	}
	if s.broadcast {
		settings["broadcast"] = true
	}
	if f.Changed("lease") {
		settings["lease_ms"] = s.lease.Milliseconds()
	}
	switch {
	case !f.Changed("retry"):
	case s.retry == "exponential" || s.retry == "rocketmq":
		settings["retry"] = s.retry
	default:
		var delays []int64
		for _, text := range strings.Split(s.retry, ",") {
			d, err := time.ParseDuration(strings.TrimSpace(text))
			if err != nil {
				return nil, usagef("--retry is %q: use exponential, rocketmq, or durations separated by commas, as 1s,10s,1m", s.retry)
			}
			delays = append(delays, d.Milliseconds())
		}
		settings["retry"] = delays
	}
	if len(settings) == 0 {
		return nil, nil
	}
	return json.Marshal(settings)
}

func (a *app) groupsCreate() *cobra.Command {
	var topic, from string
	var settings groupSettingsFlags
	c := &cobra.Command{
		Use:   "create GROUP --topic TOPIC",
		Short: "Create a group with settings of its own: created, existed or mismatch",
		Long: `Create a consumer group with settings of its own, or find out that it exists. Joining a group that does not exist creates
it too, with the broker's settings.

Columns: created|existed|mismatch. A mismatch (the group exists with other settings) exits with 4; 'groups set' changes them.`,
		Example: `  mortarmq groups create billing --topic orders --from latest
  mortarmq groups create billing --topic orders --ordered --retry 1s,10s,1m --max-attempts 10`,
		Args: cobra.ExactArgs(1),
	}
	c.Flags().StringVar(&topic, "topic", "", "topic that the group reads (required)")
	c.Flags().StringVar(&from, "from", "earliest", "where it starts: earliest or latest")
	settings.add(c.Flags())
	settings.complete(a, c)
	a.completeFlag(c, "from", choices("earliest", "latest"))
	c.RunE = does(func(ctx context.Context, args []string) error {
		start, ok := map[string]protocol.StartPolicy{"earliest": protocol.StartEarliest, "latest": protocol.StartLatest}[from]
		switch {
		case topic == "":
			return missingTopic()
		case !ok:
			return usagef("--from is %q: use earliest or latest", from)
		}
		wish, err := settings.json(c.Flags())
		if err != nil {
			return err
		}
		return a.createGroup(ctx, topic, args[0], client.GroupOptions{Start: start, Settings: wish})
	})
	return c
}

func (a *app) createGroup(ctx context.Context, topic, name string, opts client.GroupOptions) error {
	return a.request(ctx, func(ctx context.Context, c *client.Client) error {
		created, err := c.DeclareGroup(ctx, topic, name, opts)
		return a.groupCreated(ctx, topic, name, created, err)
	})
}

// groupCreated prints how the creation of a group went.
func (a *app) groupCreated(ctx context.Context, topic, name string, created bool, err error) error {
	row := groupResultRow{"existed"}
	switch {
	case errors.Is(err, protocol.CodeGroupExistsMismatch):
		// The broker refuses settings that no group can have with the same code.
		if exists, existsErr := a.groupExists(ctx, topic, name); existsErr == nil && exists && !strings.Contains(err.Error(), "group settings: ") {
			if err := printRow(a, groupResultRow{"mismatch"}); err != nil {
				return err
			}
			return refusedf("%w; 'mortarmq groups describe %s --topic %s --settings' shows the settings, 'mortarmq groups set %s --topic %s ...' changes them",
				err, name, topic, name, topic)
		}
		return a.brokerError(err)
	case err != nil:
		return a.brokerError(err)
	case created:
		row.Result = "created"
	}
	return printRow(a, row)
}

// groupExists tells a group with other settings from settings that no group can have.
func (a *app) groupExists(ctx context.Context, topic, name string) (bool, error) {
	rows, err := a.adminGroups(ctx, topic)
	for _, r := range rows {
		if r.Group == name {
			return true, nil
		}
	}
	return false, err
}

func (a *app) groupsSet() *cobra.Command {
	var topic string
	var settings groupSettingsFlags
	c := &cobra.Command{
		Use:   "set GROUP --topic TOPIC [settings]",
		Short: "Replace a group's settings; what is left out gets its default: set",
		Long: `Replace the settings of a consumer group that exists; what is left out gets its default. Members go on: the new settings
count from the next attempt on, another strategy moves partitions.`,
		Example: `  mortarmq groups set billing --topic orders --max-attempts 10
  mortarmq groups set billing --topic orders    # the defaults again`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeGroups,
	}
	c.Flags().StringVar(&topic, "topic", "", "topic that the group reads (required)")
	settings.add(c.Flags())
	settings.complete(a, c)
	c.RunE = does(func(ctx context.Context, args []string) error {
		if topic == "" {
			return missingTopic()
		}
		wish, err := settings.json(c.Flags())
		if err != nil {
			return err
		}
		if wish == nil {
			wish = []byte("{}")
		}
		return a.request(ctx, func(ctx context.Context, c *client.Client) error {
			if err := c.SetGroup(ctx, topic, args[0], wish); err != nil {
				return a.brokerError(err)
			}
			return printRow(a, groupResultRow{"set"})
		})
	})
	return c
}
