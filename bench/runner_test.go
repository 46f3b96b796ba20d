package bench

import (
	"context"
	"encoding/json"
	"errors"
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
		if err := RunEchoServer(os.Args[len(os.Args)-1]); err != nil {
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
	http.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{"healthy":true,"state":"serving"}`) })
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
	cfg.Mortard, cfg.Dir, cfg.Out, cfg.lockPath = self, t.TempDir(), t.TempDir(), filepath.Join(t.TempDir(), "lock")
	cfg.Workloads = slices.DeleteFunc(cfg.Workloads, func(w string) bool { return w == "catchup" || w == "restart" || w == "cluster" }) // the fake keeps nothing
	cfg.Sizes, cfg.OtherSizes = []int{100}, []int{1024}
	cfg.Partitions, cfg.Members = []int{1, 16}, []int{1}
	cfg.Peers = []*Peer{fakePeer(false), fakePeer(true)}
	cfg.Rounds = 2
	cfg.Duration, cfg.Warmup = 40*time.Millisecond, 5*time.Millisecond
	cfg.JournalFileBytes, cfg.JournalMaxFiles, cfg.JournalMultiple = 64<<10, 2, 1
	cfg.limitFileBytes = 2 << 20
	samples, err := Run(t.Context(), &cfg, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	both := []string{mortardName, "fake", "fake-slow"}
	for _, want := range []struct {
		workload string
		systems  []string
	}{
		{"disk", []string{machineName}}, {"echo", []string{machineName}}, {"echo-go", []string{machineName}}, {"publish", both},
		{"publish-sync", both}, {"producers", both}, {"partitions", []string{mortardName}}, {"end-to-end", both}, {"end-to-end-max", both},
	} {
		for _, system := range want.systems {
			for round := 1; round <= 2; round++ {
				at := slices.IndexFunc(samples, func(s Sample) bool { return s.Workload == want.workload && s.System == system && s.Round == round })
				if at < 0 {
					t.Errorf("no sample of %s, %s in round %d", want.workload, system, round)
					continue
				}
				checkSample(t, &cfg, &samples[at])
			}
		}
	}
	left, err := os.ReadDir(cfg.Dir)
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	var table strings.Builder
	if err := WriteTable(&table, samples); err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + table.String())
}

func checkSample(t *testing.T, cfg *Config, s *Sample) {
	t.Helper()
	if s.Latency == nil || s.Latency.P50 <= 0 || s.Latency.Max < s.Latency.P50 {
		t.Errorf("%s, %s: implausible latencies %+v", s.Workload, s.System, s.Latency)
	}
	if s.System == machineName {
		return
	}
	if s.Workload == "publish" && s.System == mortardName && s.Messages < cfg.messagesFor(s.Size) {
		t.Errorf("publish sent %d messages, want at least %d", s.Messages, cfg.messagesFor(s.Size))
	}
	if s.Messages == 0 || s.CPU == nil {
		t.Errorf("%s, %s: %d messages, CPU split %v", s.Workload, s.System, s.Messages, s.CPU)
	}
	if strings.HasPrefix(s.Workload, "end-to-end") && (s.DeliverLatency == nil || s.PublishLatency == nil) {
		t.Errorf("%s, %s lacks latencies", s.Workload, s.System)
	}
}

func TestRun_SlowStartersStartOncePerRound(t *testing.T) {
	p := fakePeer(true)
	starts := 0
	start := p.Start
	p.Start = func(ctx context.Context, o *PeerOptions) (PeerServer, error) {
		starts++
		return start(ctx, o)
	}
	r := &runner{cfg: &Config{Rounds: 2, Duration: 10 * time.Millisecond, JournalFileBytes: 1 << 10, JournalMaxFiles: 1, JournalMultiple: 1, Out: t.TempDir()},
		dir: t.TempDir(), log: io.Discard, kept: map[*target]server{}}
	slow, quick := peerTarget(p), peerTarget(fakePeer(false))
	l := &caseList{cfg: r.cfg}
	for _, size := range []int{100, 200, 300} {
		l.each([]*target{quick, slow}, "publish", "", size, publish(shape{1, 16, 1}))
	}
	samples, err := r.rounds(t.Context(), l.list)
	if err != nil {
		t.Fatal(err)
	}
	if starts != 2 || len(samples) != 12 || len(r.kept) > 0 {
		t.Errorf("%d starts, %d samples, %d servers left, want 2, 12 and none", starts, len(samples), len(r.kept))
	}
}

func TestRun_AMissingPeerIsReportedBeforeAnythingIsMeasured(t *testing.T) {
	cfg := DefaultConfig()
	cfg.Mortard, cfg.Dir, cfg.Out = "/bin/false", t.TempDir(), t.TempDir()
	p := fakePeer(false)
	p.Missing = func(*PeerOptions) error { return errors.New("install it first") }
	cfg.Peers = []*Peer{p}
	if _, err := Run(t.Context(), &cfg, io.Discard); err == nil || !strings.Contains(err.Error(), "fake: install it first") {
		t.Errorf("got %v", err)
	}
}

func TestRun_SaysWhichCaseFailed(t *testing.T) {
	cfg := DefaultConfig()
	cfg.Quick()
	cfg.Mortard, cfg.Dir, cfg.Out, cfg.Workloads = "/bin/false", t.TempDir(), t.TempDir(), []string{"publish"}
	cfg.lockPath = filepath.Join(t.TempDir(), "lock")
	if _, err := Run(t.Context(), &cfg, io.Discard); err == nil || !strings.Contains(err.Error(), "publish 100B mortard, round 1") {
		t.Errorf("got %v", err)
	}
}
