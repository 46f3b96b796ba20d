// Command benchcompare tells whether this tree is slower than a commit: see package bench/compare.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/mortarmq/mortarmq/bench"
	"github.com/mortarmq/mortarmq/bench/compare"
	"github.com/mortarmq/mortarmq/tests/harness"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "benchcompare:", err)
		if errors.Is(err, flag.ErrHelp) {
			os.Exit(2)
		}
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o := compare.Options{Log: stderr}
	limits := compare.DefaultLimits()
	fs := flag.NewFlagSet("benchcompare", flag.ContinueOnError)
	fs.SetOutput(stderr)
	ref := fs.String("base", "HEAD", "the commit to compare the working tree with")
	packages := fs.String("packages", strings.Join(compare.Packages, ","), "directories with microbenchmarks, separated by commas")
	brokers := fs.Int("brokers", 3, "how often to count the allocations per message of a whole broker; 0 leaves them out")
	fs.StringVar(&o.Match, "bench", ".", "which benchmarks to run")
	fs.IntVar(&o.Count, "count", 10, "how often each runs in each tree")
	fs.StringVar(&o.Benchtime, "benchtime", "100ms", "how long each runs")
	fs.Float64Var(&limits.Time, "time", limits.Time, "by which part a time may grow")
	fs.Float64Var(&limits.Alpha, "alpha", limits.Alpha, "how improbable a difference must be to count")
	fs.Float64Var(&limits.Allocations, "allocations", limits.Allocations, "by how many allocations per operation or message may grow")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if fs.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	if o.Count < 5 {
		return fmt.Errorf("--count is %d: with fewer than 5 no difference stands out from the noise", o.Count)
	}
	o.Packages = strings.Split(*packages, ",")
	root, err := harness.RepoRoot()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "mortarmq-base-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := compare.Checkout(ctx, root, *ref, dir); err != nil {
		return err
	}
	base, head, err := compare.Micro(ctx, dir, root, &o)
	if err != nil {
		return err
	}
	if *brokers > 0 {
		if err := messages(ctx, dir, root, *brokers, base, head, stderr); err != nil {
			return err
		}
	}
	n, err := compare.Report(stdout, base, head, limits)
	if err == nil && n > 0 {
		err = fmt.Errorf("%d regressions against %s", n, *ref)
	}
	return err
}

// messages counts the allocations per message of the brokers of both trees, in turn, under the same load.
func messages(ctx context.Context, baseTree, headTree string, count int, base, head compare.Set, log io.Writer) error {
	work, err := os.MkdirTemp("", "mortarmq-compare-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	type side struct {
		name, mortard string
		set           compare.Set
	}
	sides := []side{{"base", baseTree, base}, {"head", headTree, head}}
	for i := range sides {
		dir := filepath.Join(work, sides[i].name)
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return err
		}
		if sides[i].mortard, err = compare.BuildMortard(ctx, sides[i].mortard, dir); err != nil {
			return err
		}
	}
	for range count {
		for _, s := range sides {
			cfg := bench.DefaultConfig()
			cfg.Quick()
			cfg.Mortard, cfg.Dir, cfg.Out = s.mortard, work, work
			cfg.Workloads = []string{"publish", "producers", "end-to-end-max"}
			cfg.Sizes, cfg.OtherSizes, cfg.Members = []int{100, 1 << 10}, []int{1 << 10}, []int{1}
			cfg.Duration = time.Second
			samples, err := bench.Run(ctx, &cfg, log)
			if err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			for i := range samples {
				if v, ok := samples[i].Allocations(); ok {
					s.set.Add("broker: "+samples[i].Name(), compare.MessageUnit, v)
				}
			}
		}
	}
	return nil
}
