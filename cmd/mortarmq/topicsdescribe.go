package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
)

// topicDetail is what topics describe --json prints.
type topicDetail struct {
	topicStats
	Groups []topicGroup `json:"groups"`
}

// topicGroup is a group of a topic.
type topicGroup struct {
	Group   string `json:"group"`
	State   string `json:"state"`
	Lag     uint64 `json:"lag"`
	Members int    `json:"members"`
}

func (a *app) topicsDescribe() *cobra.Command {
	c := &cobra.Command{
		Use:   "describe NAME",
		Short: "Tell all about a topic: its settings, partitions and groups",
		Long: `Tell all about a topic. The first column says what a line is:

  name, id, state, partitions, durability, created_epoch: a property and its value
  partition: number, first_seq, last_seq (0 while it is empty), depth (what its slowest group has not acknowledged)
  group: name, state, lag, connected members

With --json it is one object.`,
		Example: `  mortarmq topics describe orders
  mortarmq topics describe orders | awk '$1 == "partition" {sum += $4} END {print sum}'
  mortarmq topics describe orders --json`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeTopics,
	}
	c.RunE = does(func(ctx context.Context, args []string) error {
		s, err := a.look(ctx, args[0], "")
		if err != nil && !errors.Is(err, errNotFound) {
			return err
		}
		var t *topicStats
		if err == nil {
			t, _ = s.topic(args[0])
		}
		if t == nil {
			return refusedf("there is no topic %q: 'mortarmq topics list' lists them", args[0])
		}
		return a.describeTopic(topicDetail{*t, topicGroups(s)})
	})
	return c
}

func topicGroups(s *statsAnswer) []topicGroup {
	list := []topicGroup{}
	for i := range s.Groups {
		g := &s.Groups[i]
		list = append(list, topicGroup{g.Group, g.State, g.Lag, g.connected()})
	}
	return list
}

func (a *app) describeTopic(t topicDetail) error {
	if a.json {
		return a.printJSON(t)
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "name\t%s\nid\t%d\nstate\t%s\npartitions\t%d\ndurability\t%s\ncreated_epoch\t%d\n",
		t.Name, t.ID, t.State, t.PartitionNum, t.Durability, t.CreatedEpoch)
	for _, p := range t.Partitions {
		fmt.Fprintf(&b, "partition\t%d\t%d\t%d\t%d\n", p.Partition, p.FirstSeq, p.LastSeq, p.Depth)
	}
	for _, g := range t.Groups {
		fmt.Fprintf(&b, "group\t%s\t%s\t%d\t%d\n", g.Group, g.State, g.Lag, g.Members)
	}
	return a.write(b.Bytes())
}
