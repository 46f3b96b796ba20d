// Command mortarbench measures mortard against the limits of the machine it runs on and against other brokers; see package
// bench for the method.
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
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/mortarmq/mortarmq/bench"
	"github.com/mortarmq/mortarmq/bench/peers"
	"github.com/mortarmq/mortarmq/tests/harness"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == bench.EchoArg {
		kind := ""
		if len(os.Args) > 2 {
			kind = os.Args[2]
		}
		if err := bench.RunEchoServer(kind); err != nil {
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
	// --quick and --peers change defaults, so they have to be known before the other flags are read.
	for _, a := range args {
		if name, _, _ := strings.Cut(strings.TrimLeft(a, "-"), "="); strings.HasPrefix(a, "-") && name == "peers" {
			cfg.Compare()
		}
	}
	for _, a := range args {
		if a == "-quick" || a == "--quick" {
			cfg.Quick()
		}
	}
	fs := flag.NewFlagSet("mortarbench", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.Bool("quick", false, "short runs on small journals: shows that everything works")
	peerNames := fs.String("peers", "", "other brokers to measure beside mortard, separated by commas: nats, nsq, redis, rabbitmq, all, or single ones: "+strings.Join(names(peers.All()), ", "))
	workloads := fs.String("workloads", strings.Join(cfg.Workloads, ","), "what to measure, separated by commas; all are "+strings.Join(bench.Workloads, ","))
	set := fs.String("set", "", "further configuration of mortard: key=value,key=value")
	numbers(fs, "sizes", &cfg.Sizes, "value sizes of the publish runs in bytes")
	numbers(fs, "other-sizes", &cfg.OtherSizes, "value sizes of the other workloads")
	numbers(fs, "cluster-sizes", &cfg.ClusterSizes, "value sizes of the pipelined cluster runs")
	numbers(fs, "partitions", &cfg.Partitions, "partition counts of the partitions runs")
	numbers(fs, "members", &cfg.Members, "group sizes of the end-to-end runs")
	numbers(fs, "restart-bytes", &cfg.RestartBytes, "bytes stored before restarts, a run for each")
	fs.StringVar(&cfg.Mortard, "mortard", "", "the broker's binary (default: build it)")
	fs.StringVar(&cfg.Dir, "dir", os.TempDir(), "where to put data directories: decides which device is measured")
	fs.StringVar(&cfg.Out, "out", "", "directory for results (default: bench-results/<time>)")
	fs.StringVar(&cfg.Cache, "cache", cfg.Cache, "where bench/peers/install.sh has put programs")
	fs.IntVar(&cfg.Rounds, "rounds", cfg.Rounds, "how often to go through all cases")
	fs.DurationVar(&cfg.Duration, "duration", cfg.Duration, "length of runs that are measured by time, the most of a peer's")
	fs.DurationVar(&cfg.Warmup, "warmup", cfg.Warmup, "uncounted beginning of each run")
	fs.Int64Var(&cfg.AbsentBytes, "absent-bytes", cfg.AbsentBytes, "bytes that the follower misses in the absence run")
	fs.DurationVar(&cfg.MixedDuration, "mixed-duration", cfg.MixedDuration, "length of the mixed run")
	fs.Int64Var(&cfg.JournalFileBytes, "journal-file-bytes", cfg.JournalFileBytes, "size of one journal file")
	fs.IntVar(&cfg.JournalMaxFiles, "journal-max-files", cfg.JournalMaxFiles, "number of journal files")
	fs.Float64Var(&cfg.JournalMultiple, "journal-multiple", cfg.JournalMultiple, "journal capacities that a publish run sends")
	fs.Float64Var(&cfg.Rate, "rate", cfg.Rate, "messages per second of the end-to-end, absence and mixed runs")
	fs.IntVar(&cfg.CatchupMessages, "catchup-messages", cfg.CatchupMessages, "messages that the catch-up runs read")
	fs.BoolVar(&cfg.Profile, "profile", os.Getenv("PROFILE") == "1", "take profiles of the broker (also: PROFILE=1)")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	if fs.NArg() > 0 {
		return nil, fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	cfg.Workloads = strings.Split(*workloads, ",")
	var err error
	if cfg.Peers, err = choosePeers(*peerNames); err != nil {
		return nil, err
	}
	if err := parseSettings(*set, cfg.Broker); err != nil {
		return nil, err
	}
	if cfg.Out == "" {
		cfg.Out = filepath.Join("bench-results", time.Now().UTC().Format("20060102-150405"))
	}
	return &cfg, nil
}

// numbers is a flag that replaces a list of numbers.
func numbers[N int | int64](fs *flag.FlagSet, name string, list *[]N, usage string) {
	var text []string
	for _, n := range *list {
		text = append(text, fmt.Sprint(n))
	}
	fs.Func(name, usage+", separated by commas (default "+strings.Join(text, ",")+")", func(s string) error {
		*list = nil
		for _, t := range strings.Split(s, ",") {
			n, err := strconv.ParseInt(t, 10, 64)
			if err != nil {
				return fmt.Errorf("%q is not a number", t)
			}
			*list = append(*list, N(n))
		}
		return nil
	})
}

func names(list []*bench.Peer) (all []string) {
	for _, p := range list {
		all = append(all, p.Name)
	}
	return all
}

// choosePeers finds peers by name or by the system's name, which is the name's beginning.
func choosePeers(text string) ([]*bench.Peer, error) {
	all := peers.All()
	if text == "" {
		return nil, nil
	}
	if text == "all" {
		return all, nil
	}
	chosen := map[string]bool{}
	for _, want := range strings.Split(text, ",") {
		found := false
		for _, name := range names(all) {
			if name == want || strings.HasPrefix(name, want+"-") && !strings.Contains(want, "-") {
				found, chosen[name] = true, true
			}
		}
		if !found {
			return nil, fmt.Errorf("--peers: unknown peer %q: use nats, nsq, redis, rabbitmq, all, or some of %s", want, strings.Join(names(all), ", "))
		}
	}
	return slices.DeleteFunc(all, func(p *bench.Peer) bool { return !chosen[p.Name] }), nil
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
