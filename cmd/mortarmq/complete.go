package main

import (
	"context"
	"slices"
	"time"

	"github.com/spf13/cobra"
)

// completionTimeout bounds what a shell waits for behind the TAB key.
const completionTimeout = 2 * time.Second

// completeWith makes a cobra function of one that lists candidates for the first argument. A broker that can't be asked has
// none.
func (a *app) completeWith(list func(ctx context.Context) ([]string, error)) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return a.candidates(cmd.Context(), list)
	}
}

func (a *app) candidates(ctx context.Context, list func(ctx context.Context) ([]string, error)) ([]string, cobra.ShellCompDirective) {
	if ctx == nil {
		ctx = context.Background()
	}
	ctx, cancel := context.WithTimeout(ctx, completionTimeout)
	defer cancel()
	names, err := list(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveError
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// completeTopics completes the name of a topic.
func (a *app) completeTopics(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	return a.completeWith(a.topicNames)(cmd, args, prefix)
}

// completeGroups completes the name of a group.
func (a *app) completeGroups(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	return a.completeWith(a.groupNames)(cmd, args, prefix)
}

// completeFlag completes the value of a flag from a list.
func (a *app) completeFlag(c *cobra.Command, flag string, list func(ctx context.Context) ([]string, error)) {
	err := c.RegisterFlagCompletionFunc(flag, func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		return a.candidates(cmd.Context(), list)
	})
	if err != nil { // there is no such flag
		panic(err)
	}
}

// choices are the values of a flag that has a few.
func choices(values ...string) func(context.Context) ([]string, error) {
	return func(context.Context) ([]string, error) { return values, nil }
}

func (a *app) topicNames(ctx context.Context) ([]string, error) {
	rows, err := a.adminTopics(ctx)
	names := make([]string, len(rows))
	for i, r := range rows {
		names[i] = r.Name
	}
	return names, err
}

func (a *app) groupNames(ctx context.Context) ([]string, error) {
	rows, err := a.adminGroups(ctx, "")
	names := make([]string, len(rows))
	for i, r := range rows {
		names[i] = r.Group
	}
	slices.Sort(names)
	return slices.Compact(names), err
}
