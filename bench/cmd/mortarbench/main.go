// Command mortarbench measures mortard against the limits of the machine it runs on; see package bench for the method.
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
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/mortarmq/mortarmq/bench"
	"github.com/mortarmq/mortarmq/tests/harness"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == bench.EchoArg {
		if err := bench.RunEchoServer(); err != nil {
			fmt.Fprintln(os.Stderr, "mortarbench:", err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			os.Exit(2)
		}
		fmt.Fprintln(os.Stderr, "mortarbench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	cfg, err := parse(args, stderr)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(cfg.Out, 0o755); err != nil {
		return err
	}
	if cfg.Mortard == "" {
		fmt.Fprintln(stderr, "building mortard")
		if cfg.Mortard, err = harness.BuildMortard(cfg.Out, false); err != nil {
			return err
		}
	}
	env := bench.ReadEnvironment(cfg)
	fmt.Fprintln(stderr, env)
	samples, runErr := bench.Run(ctx, cfg, stderr)
	if len(samples) == 0 {
		return runErr
	}
	// What was measured before an error is worth keeping.
	err = errors.Join(writeFile(filepath.Join(cfg.Out, "results.jsonl"), func(w io.Writer) error { return bench.WriteJSONLines(w, env, samples) }),
		writeFile(filepath.Join(cfg.Out, "report.html"), func(w io.Writer) error { return bench.WriteHTML(w, env, samples) }),
		writeFile(filepath.Join(cfg.Out, "table.txt"), func(w io.Writer) error {
			fmt.Fprintf(w, "%v\n\n", env)
			return bench.WriteTable(w, samples)
		}),
		bench.WriteTable(stdout, samples))
	fmt.Fprintf(stderr, "results are in %s\n", cfg.Out)
	return errors.Join(runErr, err)
}

func writeFile(path string, write func(io.Writer) error) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(write(f), f.Close())
}

func parse(args []string, stderr io.Writer) (*bench.Config, error) {
	cfg := bench.DefaultConfig()
	fs := flag.NewFlagSet("mortarbench", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.Bool("quick", false, "short runs on small journals: shows that everything works")
	workloads := fs.String("workloads", strings.Join(bench.Workloads, ","), "what to measure, separated by commas")
	sizes := fs.String("sizes", "100,1024,16384", "value sizes in bytes, separated by commas")
	set := fs.String("set", "", "further configuration of mortard: key=value,key=value")
	fs.StringVar(&cfg.Mortard, "mortard", "", "the broker's binary (default: build it)")
	fs.StringVar(&cfg.Dir, "dir", os.TempDir(), "where to put data directories: decides which device is measured")
	fs.StringVar(&cfg.Out, "out", "", "directory for results (default: bench-results/<time>)")
	fs.IntVar(&cfg.Rounds, "rounds", cfg.Rounds, "how often to go through all cases")
	fs.DurationVar(&cfg.Duration, "duration", cfg.Duration, "length of runs that are measured by time")
	fs.DurationVar(&cfg.Warmup, "warmup", cfg.Warmup, "uncounted beginning of each run")
	fs.Int64Var(&cfg.JournalFileBytes, "journal-file-bytes", cfg.JournalFileBytes, "size of one journal file")
	fs.IntVar(&cfg.JournalMaxFiles, "journal-max-files", cfg.JournalMaxFiles, "number of journal files")
	fs.Float64Var(&cfg.JournalMultiple, "journal-multiple", cfg.JournalMultiple, "journal capacities that a publish run sends")
	fs.Float64Var(&cfg.Rate, "rate", cfg.Rate, "messages per second of the end-to-end runs")
	fs.IntVar(&cfg.CatchupMessages, "catchup-messages", cfg.CatchupMessages, "messages that the catch-up runs read")
	fs.Int64Var(&cfg.RestartBytes, "restart-bytes", cfg.RestartBytes, "bytes stored before the restart runs")
	fs.BoolVar(&cfg.Profile, "profile", os.Getenv("PROFILE") == "1", "fetch profiles of the broker (also: PROFILE=1)")
	// --quick changes defaults, so it has to be known before the other flags are read.
	for _, a := range args {
		if a == "-quick" || a == "--quick" {
			cfg.Quick()
		}
	}
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	if fs.NArg() > 0 {
		return nil, fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	cfg.Workloads = strings.Split(*workloads, ",")
	cfg.Sizes = nil
	for _, s := range strings.Split(*sizes, ",") {
		n, err := strconv.Atoi(s)
		if err != nil {
			return nil, fmt.Errorf("--sizes: %q is not a number of bytes", s)
		}
		cfg.Sizes = append(cfg.Sizes, n)
	}
	if err := parseSettings(*set, cfg.Broker); err != nil {
		return nil, err
	}
	if cfg.Out == "" {
		cfg.Out = filepath.Join("bench-results", time.Now().UTC().Format("20060102-150405"))
	}
	return &cfg, nil
}

// parseSettings reads "key=value,..." into keys; values are numbers or booleans where they look like it, else strings.
func parseSettings(text string, keys map[string]any) error {
	if text == "" {
		return nil
	}
	for _, kv := range strings.Split(text, ",") {
		k, v, ok := strings.Cut(kv, "=")
		if !ok {
			return fmt.Errorf("--set: %q is not of the form key=value", kv)
		}
		if n, err := strconv.ParseInt(v, 10, 64); err == nil {
			keys[k] = n
		} else if b, err := strconv.ParseBool(v); err == nil {
			keys[k] = b
		} else {
			keys[k] = v
		}
	}
	return nil
}
