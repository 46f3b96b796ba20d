package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/tests/harness/fakebroker"
)

// fakeEnv makes the test binary a broker process for the runner: the fake one, behind mortard's command line.
const fakeEnv = "MORTARMQ_BENCH_TEST_FAKE"

func TestMain(m *testing.M) {
	switch {
	case len(os.Args) > 1 && os.Args[1] == EchoArg:
		if err := RunEchoServer(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	case os.Getenv(fakeEnv) != "":
		if err := runFake(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	default:
		os.Exit(m.Run())
	}
}

func runFake(args []string) error {
	if len(args) != 2 || args[0] != "--config" {
		return fmt.Errorf("unexpected arguments %q", args)
	}
	text, err := os.ReadFile(args[1])
	if err != nil {
		return err
	}
	var config struct {
		Client string `json:"listen_client"`
		Admin  string `json:"listen_admin"`
	}
	if err := json.Unmarshal(text, &config); err != nil {
		return err
	}
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	if _, err := fakebroker.New().StartAt(config.Client); err != nil {
		return err
	}
	answer := func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok") }
	http.HandleFunc("/healthz", answer)
	http.HandleFunc("/metrics", answer)
	http.HandleFunc("/debug/pprof/", answer)
	failed := make(chan error, 1)
	go func() { failed <- http.ListenAndServe(config.Admin, nil) }()
	select {
	case <-term:
		return nil
	case err := <-failed:
		return err
	}
}

func TestRun_MeasuresEveryCaseInEveryRound(t *testing.T) {
	t.Setenv(fakeEnv, "1")
	t.Setenv("GORACE", "atexit_sleep_ms=0") // a process with the race detector otherwise takes a second to end
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cfg := DefaultConfig()
	cfg.Mortard, cfg.Dir, cfg.Out = self, t.TempDir(), t.TempDir()
	cfg.Workloads = slices.DeleteFunc(cfg.Workloads, func(w string) bool { return w == "catchup" || w == "restart" }) // the fake keeps nothing
	cfg.Sizes = []int{100, 1024}
	cfg.Rounds = 2
	cfg.Duration, cfg.Warmup = 100*time.Millisecond, 10*time.Millisecond
	cfg.JournalFileBytes, cfg.JournalMaxFiles, cfg.JournalMultiple = 64<<10, 2, 1
	cfg.Profile = true
	cfg.limitFileBytes = 2 << 20
	samples, err := Run(t.Context(), &cfg, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range []string{"disk", "echo", "publish", "publish-sync", "producers", "partitions", "end-to-end", "end-to-end-max"} {
		for round := 1; round <= 2; round++ {
			at := slices.IndexFunc(samples, func(s Sample) bool { return s.Workload == w && s.Round == round })
			if at < 0 {
				t.Errorf("no sample of %s in round %d", w, round)
				continue
			}
			s := &samples[at]
			if s.Latency == nil || s.Latency.P50 <= 0 || s.Latency.Max < s.Latency.P50 {
				t.Errorf("%s: implausible latencies %+v", w, s.Latency)
			}
			if w == "publish" && s.Messages < cfg.messagesFor(s.Size) {
				t.Errorf("publish sent %d messages, want at least %d", s.Messages, cfg.messagesFor(s.Size))
			}
			if w == "end-to-end" && (s.DeliverLatency == nil || s.PublishLatency == nil) {
				t.Error("end-to-end lacks latencies")
			}
		}
	}
	left, err := os.ReadDir(cfg.Dir)
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	profiles, err := filepath.Glob(filepath.Join(cfg.Out, "publish-1KiB-2-*"))
	if err != nil || len(profiles) < 6 {
		t.Errorf("profiles: %v, %v", profiles, err)
	}
	var table strings.Builder
	if err := WriteTable(&table, samples); err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + table.String())
}

func TestRun_SaysWhichCaseFailed(t *testing.T) {
	cfg := DefaultConfig()
	cfg.Quick()
	cfg.Mortard, cfg.Dir, cfg.Out, cfg.Workloads = "/bin/false", t.TempDir(), t.TempDir(), []string{"publish"}
	if _, err := Run(t.Context(), &cfg, io.Discard); err == nil || !strings.Contains(err.Error(), "publish 100B, round 1") {
		t.Errorf("got %v", err)
	}
}
