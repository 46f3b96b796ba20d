// Command soak runs scenarios with ever new seeds until its time is over or a promise is found broken: a cluster whose leaders
// are killed (package tests/cluster), a broker that is killed again and again (package tests/crash), a group whose members are, and clients that do as they like (package
// tests/groups), in turn. On a failure it prints the seed, with which SEED=<seed> and --only repeat the workload, and keeps
// the data directory.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/mortarmq/mortarmq/tests/cluster"
	"github.com/mortarmq/mortarmq/tests/crash"
	"github.com/mortarmq/mortarmq/tests/groups"
	"github.com/mortarmq/mortarmq/tests/harness"
)

func main() {
	groups.RunIfMember()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

// soak is what a run of the command works with.
type soak struct {
	binary string
	rounds int
	kills  int
	report string
	out    io.Writer
	logf   func(format string, args ...any)
}

// kinds are the scenarios, by the names that --only takes.
var kinds = []string{"failover", "crash", "groups", "hostile"}

func run(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("soak", flag.ContinueOnError)
	duration := flags.Duration("duration", 10*time.Minute, "how long to go on")
	rounds := flags.Int("rounds", 20, "kills per data directory of a crash scenario")
	kills := flags.Int("failovers", 30, "leaders killed by a failover scenario")
	report := flags.String("report", "", "file for what the newest failover scenario has measured, as JSON")
	race := flags.Bool("race", false, "build mortard with the race detector")
	binary := flags.String("mortard", "", "the broker's binary (default: build it)")
	dir := flags.String("dir", os.TempDir(), "where to put data directories")
	only := flags.String("only", "", "the kind of scenario: "+strings.Join(kinds, " or ")+" (default: in turn)")
	verbose := flags.Bool("v", false, "one line per round")
	if err := flags.Parse(args); err != nil {
		return err
	}
	seed, fixed, err := seedOf(os.Getenv("SEED"))
	if err != nil {
		return err
	}
	list := kinds
	if *only != "" {
		if list = []string{*only}; !slices.Contains(kinds, *only) {
			return fmt.Errorf("--only: %q is none of %s", *only, strings.Join(kinds, ", "))
		}
	}
	work, err := os.MkdirTemp(*dir, "mortarmq-soak-")
	if err != nil {
		return err
	}
	if *race {
		// A broker that finds a race ends at once, which is noticed although most brokers here end by a kill.
		if err := os.Setenv("GORACE", "halt_on_error=1 atexit_sleep_ms=0"); err != nil {
			return err
		}
	}
	if *binary == "" {
		if *binary, err = harness.BuildMortard(work, *race); err != nil {
			return err
		}
	}
	k := &soak{binary: *binary, rounds: *rounds, kills: *kills, report: *report, out: out, logf: func(string, ...any) {}}
	if *verbose {
		k.logf = func(format string, args ...any) { fmt.Fprintf(out, "  "+format+"\n", args...) }
	}
	end := time.Now().Add(*duration)
	for n := 0; n < len(list) || (!fixed && time.Now().Before(end)); n++ {
		if !fixed {
			seed = rand.Uint64()
		}
		kind := list[n%len(list)]
		data := filepath.Join(work, strconv.FormatUint(seed, 10))
		err := k.scenario(ctx, kind, seed, data)
		if ctx.Err() != nil {
			break
		}
		if err != nil {
			return fmt.Errorf("%w\nrepeat with SEED=%d and --only %s; the data directory and the broker's log are in %s", err, seed, kind, work)
		}
		if err := os.RemoveAll(data); err != nil {
			return err
		}
	}
	return os.RemoveAll(work)
}

// scenario runs the one that a seed makes, on an empty data directory.
func (k *soak) scenario(ctx context.Context, kind string, seed uint64, data string) error {
	switch kind {
	case "failover":
		return k.failover(ctx, seed, data)
	case "hostile":
		s := groups.VariedHostile(seed)
		s.Binary, s.DataDir, s.Logf = k.binary, data, k.logf
		fmt.Fprintf(k.out, "hostile, seed %d: %d clients, killed every %v, %v\n", seed, s.Clients, s.KillEvery, s.Config)
		return s.Run(ctx)
	case "groups":
		s := groups.Varied(seed)
		s.Binary, s.DataDir, s.Logf = k.binary, data, k.logf
		fmt.Fprintf(k.out, "groups, seed %d: %d members, %d partitions, %v\n", seed, s.Members, s.Partitions, s.Config)
		return s.Run(ctx)
	}
	s, config := crash.Varied(seed)
	s.Rounds, s.Logf = k.rounds, k.logf
	fmt.Fprintf(k.out, "crash, seed %d: %d partitions, %d producers, %v\n", seed, s.Partitions, s.Producers, config)
	t := crash.NewDaemonTarget(k.binary, data, config)
	err := s.Run(ctx, t)
	if d := t.Daemon(); d != nil {
		d.Kill()
	}
	return err
}

// failover kills the leaders of a cluster and tells how long writes stayed away.
func (k *soak) failover(ctx context.Context, seed uint64, data string) error {
	f := cluster.Failover{Binary: k.binary, Dir: data, Rounds: k.kills, Load: cluster.DefaultLoad, Logf: k.logf}
	fmt.Fprintf(k.out, "failover, seed %d: %d leaders are killed\n", seed, f.Rounds)
	r, err := f.Run(ctx)
	if err != nil {
		return err
	}
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	fmt.Fprintf(k.out, "%s\n", text)
	if k.report == "" {
		return nil
	}
	return os.WriteFile(k.report, append(text, '\n'), 0o644)
}

// seedOf reads SEED of the environment; fixed tells that there is one.
func seedOf(text string) (seed uint64, fixed bool, err error) {
	if text == "" {
		return 0, false, nil
	}
	if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
		return 0, false, fmt.Errorf("SEED: %w", err)
	}
	return seed, true, nil
}
