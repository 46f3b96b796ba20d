package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// memberRow is a line of groups describe.
type memberRow struct {
	Member          uint64 `json:"member"`
	AssignmentEpoch uint32 `json:"assignment_epoch"`
	OwnershipEpoch  uint64 `json:"ownership_epoch"`
	Lag             uint64 `json:"lag"`
}

func (a *app) groupsDescribe() *cobra.Command {
	var topic string
	var settings bool
	c := &cobra.Command{
		Use:   "describe GROUP",
		Short: "List a group's members: member, assignment_epoch, ownership_epoch, lag",
		Long: `List a group's members, a line each. What the group as a whole is like goes to standard error.

With --settings the group's settings are listed instead: name, value. With --json they are one object.`,
		Example: `  mortarmq groups describe billing
  mortarmq groups describe billing --topic orders --settings`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeGroups,
	}
	c.Flags().StringVar(&topic, "topic", "", "the group that reads this topic, where several have the name")
	c.Flags().BoolVar(&settings, "settings", false, "list the group's settings: name, value")
	a.completeFlag(c, "topic", a.topicNames)
	c.RunE = does(func(ctx context.Context, args []string) error {
		g, err := a.findGroup(ctx, args[0], topic)
		if err != nil {
			return err
		}
		if settings {
			return a.printSettings(g)
		}
		if !a.json {
			a.note("group %q of topic %q is %s: %s, lag %d, %d in flight%s", g.Group, g.Topic, g.State,
				countOf(g.connected(), "connected member"), g.Lag, g.InFlight, g.settingsText())
		}
		return printRows(a, g.memberRows())
	})
	return c
}

// findGroup returns the group of a name; topic may be empty where no other one is called so.
func (a *app) findGroup(ctx context.Context, name, topic string) (*groupStats, error) {
	s, err := a.look(ctx, topic, name)
	switch {
	case (errors.Is(err, errNotFound) || err == nil && len(s.Groups) == 0) && topic != "":
		return nil, refusedf("there is no group %q of topic %q: 'mortarmq groups list' lists them", name, topic)
	case errors.Is(err, errNotFound), err == nil && len(s.Groups) == 0:
		return nil, refusedf("there is no group %q: 'mortarmq groups list' lists them", name)
	case err != nil:
		return nil, err
	case len(s.Groups) > 1:
		return nil, usagef("several topics have a group %q: say which with --topic", name)
	}
	return &s.Groups[0], nil
}

func (g *groupStats) memberRows() []memberRow {
	var rows []memberRow
	for _, m := range g.Members {
		rows = append(rows, m.memberRow)
	}
	return rows
}

// settings returns the group's settings by name. Brokers that do not tell them have none.
func (g *groupStats) settings() map[string]json.RawMessage {
	var settings map[string]json.RawMessage
	_ = json.Unmarshal(g.Settings, &settings) // an answer that is no object has none either
	return settings
}

// settingsText is the end of a sentence about the group.
func (g *groupStats) settingsText() string {
	settings := g.settings()
	if settings == nil {
		return ""
	}
	var list []string
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		if value := plain(settings[name]); value != "false" {
			list = append(list, name+" "+value)
		}
	}
	if len(list) == 0 {
		return "; settings: the defaults"
	}
	return "; settings: " + strings.Join(list, ", ")
}

// plain is a JSON value as a column: a string without its quotes, a list with commas only.
func plain(raw json.RawMessage) string {
	var text string
	var list []json.RawMessage
	switch {
	case json.Unmarshal(raw, &text) == nil:
		return text
	case json.Unmarshal(raw, &list) == nil:
		values := make([]string, len(list))
		for i, v := range list {
			values[i] = plain(v)
		}
		return strings.Join(values, ",")
	default:
		return string(raw)
	}
}

func (a *app) printSettings(g *groupStats) error {
	settings := g.settings()
	if a.json {
		if settings == nil {
			settings = map[string]json.RawMessage{} // {}, not null
		}
		return a.printJSON(settings)
	}
	var b bytes.Buffer
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		fmt.Fprintf(&b, "%s\t%s\n", name, plain(settings[name]))
	}
	return a.write(b.Bytes())
}

// countOf is a number with what it counts.
func countOf(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
