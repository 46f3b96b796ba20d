// Command groupbench measures what consumer groups cost: what a rebalance does to the partitions that it does not move, and
// how the broker's CPU time grows with members and groups.
//
//	groupbench [flags] rebalance   a fourth member joins three and leaves again, under load
//	groupbench [flags] members     10 to 100 members of one group on 1 000 partitions
//	groupbench [flags] groups      100 to 1 000 groups of one member
//
// Without a name all of them run. Nothing else should run on the machine meanwhile.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/mortarmq/mortarmq/tests/harness"
)

const (
	topicName = "orders"
	groupName = "workers"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			os.Exit(2)
		}
		fmt.Fprintln(os.Stderr, "groupbench:", err)
		os.Exit(1)
	}
}

// bencher is what the measurements share.
type bencher struct {
	binary, dir string
	out         io.Writer
	rounds      int
	quiet       time.Duration
}

type measurement struct {
	name string
	run  func(*bencher, context.Context) error
}

// measurements are those that the command line names, in the order in which they run.
var measurements = []measurement{
	{"rebalance", (*bencher).rebalance},
	{"members", (*bencher).members},
	{"groups", (*bencher).groups},
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("groupbench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	b := &bencher{out: stdout}
	flags.StringVar(&b.binary, "mortard", "", "the broker's binary (default: build it)")
	dir := flags.String("dir", os.TempDir(), "where to put data directories")
	flags.IntVar(&b.rounds, "rounds", 20, "how often members join and leave in each measurement")
	flags.DurationVar(&b.quiet, "quiet", 10*time.Second, "how long members are left alone to measure what their heartbeats cost")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if b.rounds < 1 || b.quiet <= 0 {
		return errors.New("--rounds and --quiet must be more than 0")
	}
	names := flags.Args()
	for _, name := range names {
		if !slices.ContainsFunc(measurements, func(m measurement) bool { return m.name == name }) {
			return fmt.Errorf("%q is no measurement: use rebalance, members or groups", name)
		}
	}
	var err error
	if b.dir, err = os.MkdirTemp(*dir, "mortarmq-groupbench-"); err != nil {
		return err
	}
	defer os.RemoveAll(b.dir)
	if b.binary == "" {
		fmt.Fprintln(stderr, "building mortard")
		if b.binary, err = harness.BuildMortard(b.dir, false); err != nil {
			return err
		}
	}
	for _, m := range measurements {
		if len(names) == 0 || slices.Contains(names, m.name) {
			if err := m.run(b, ctx); err != nil {
				return fmt.Errorf("%s: %w", m.name, err)
			}
		}
	}
	return nil
}

// broker starts a broker on an empty directory.
func (b *bencher) broker(ctx context.Context) (*harness.Daemon, error) {
	data, err := os.MkdirTemp(b.dir, "data-")
	if err != nil {
		return nil, err
	}
	return harness.Start(ctx, harness.Options{Binary: b.binary, DataDir: filepath.Join(data, "data"), Config: map[string]any{"log_level": "warn"}})
}

// settled waits until the group's members share its partitions.
func settled(ctx context.Context, d *harness.Daemon, members int) (*harness.GroupState, error) {
	for end := time.Now().Add(time.Minute); ; {
		g, err := d.GroupState(topicName, groupName)
		if err != nil {
			return nil, err
		}
		if g.Settled(members) {
			return g, nil
		}
		if time.Now().After(end) {
			return nil, fmt.Errorf("the group did not settle with %d members", members)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// cpu returns the CPU time of a process in nanoseconds, which /proc/<pid>/stat has in steps of 10 ms only: the sum over its
// threads (field 1 of /proc/<pid>/task/<tid>/schedstat). What ended threads have used is missing; a broker's do not end.
func cpu(d *harness.Daemon) (time.Duration, error) {
	paths, err := filepath.Glob(filepath.Join("/proc", strconv.Itoa(d.PID()), "task", "*", "schedstat"))
	if err != nil {
		return 0, err
	}
	sum := time.Duration(0)
	for _, p := range paths {
		text, err := os.ReadFile(p)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return 0, err
		}
		var ran, waited, slices int64
		if _, err := fmt.Sscan(string(text), &ran, &waited, &slices); err != nil {
			return 0, fmt.Errorf("%s: %w", p, err)
		}
		sum += time.Duration(ran)
	}
	if sum == 0 {
		return 0, errors.New("the kernel does not tell the CPU time of threads (/proc/<pid>/task/<tid>/schedstat)")
	}
	return sum, nil
}

// spent returns the CPU time that the broker uses for what do does.
func spent(d *harness.Daemon, do func() error) (time.Duration, error) {
	before, err := cpu(d)
	if err != nil {
		return 0, err
	}
	if err := do(); err != nil {
		return 0, err
	}
	after, err := cpu(d)
	return after - before, err
}

func milliseconds(d time.Duration) string { return strconv.FormatFloat(float64(d)/1e6, 'f', 2, 64) }
