// Command soak runs crash scenarios with ever new seeds until its time is over or a promise is found broken. It then
// prints the seed, with which SEED=<seed> repeats the workload, and keeps the data directory.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/mortarmq/mortarmq/tests/crash"
	"github.com/mortarmq/mortarmq/tests/harness"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("soak", flag.ContinueOnError)
	duration := flags.Duration("duration", 10*time.Minute, "how long to go on")
	rounds := flags.Int("rounds", 20, "kills per data directory")
	race := flags.Bool("race", false, "build mortard with the race detector")
	binary := flags.String("mortard", "", "the broker's binary (default: build it)")
	dir := flags.String("dir", os.TempDir(), "where to put data directories")
	verbose := flags.Bool("v", false, "one line per round")
	if err := flags.Parse(args); err != nil {
		return err
	}
	seed, fixed, err := seedOf(os.Getenv("SEED"))
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp(*dir, "mortarmq-soak-")
	if err != nil {
		return err
	}
	if *binary == "" {
		if *binary, err = harness.BuildMortard(work, *race); err != nil {
			return err
		}
	}
	end := time.Now().Add(*duration)
	for n := 0; n == 0 || (!fixed && time.Now().Before(end) && ctx.Err() == nil); n++ {
		if !fixed {
			seed = rand.Uint64()
		}
		s, config := crash.Varied(seed)
		s.Rounds = *rounds
		fmt.Fprintf(out, "seed %d: %d partitions, %d producers, %v\n", seed, s.Partitions, s.Producers, config)
		if *verbose {
			s.Logf = func(format string, args ...any) { fmt.Fprintf(out, "  "+format+"\n", args...) }
		}
		data := filepath.Join(work, strconv.FormatUint(seed, 10))
		t := crash.NewDaemonTarget(*binary, data, config)
		err := s.Run(ctx, t)
		if d := t.Daemon(); d != nil {
			d.Kill()
		}
		if ctx.Err() != nil {
			break
		}
		if err != nil {
			return fmt.Errorf("%w\nrepeat with SEED=%d; the data directory and the broker's log are in %s", err, seed, work)
		}
		if err := os.RemoveAll(data); err != nil {
			return err
		}
	}
	return os.RemoveAll(work)
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
