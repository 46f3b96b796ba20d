package bench

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/tests/harness"
)

func TestSumMetrics_AddsUpOverLabels(t *testing.T) {
	got := sumMetrics([]byte("# HELP a b\n# TYPE a counter\na{shard=\"0\"} 10\na{shard=\"1\"} 2.5e1\nb 3\nb_total{x=\"a b\"} NaN\nnonsense\n\n"))
	if got["a"] != 35 || got["b"] != 3 || len(got) != 3 {
		t.Errorf("got %v", got)
	}
}

func TestSample_BetweenGivesCPUSplitAndCountersPerMessage(t *testing.T) {
	a := &reading{broker: harness.Usage{User: time.Second}, busy: 10, idle: 5, counters: map[string]float64{"rounds": 100}}
	b := &reading{broker: harness.Usage{User: 3 * time.Second, System: time.Second, PeakRSS: 7}, self: harness.Usage{User: 2 * time.Second}, busy: 16, idle: 6,
		counters: map[string]float64{"rounds": 300}}
	s := Sample{Messages: 1000}
	s.between(a, b)
	if want := (CPUSplit{BrokerUser: 2, BrokerSystem: 1, GeneratorUser: 2, Other: 1, Idle: 1}); *s.CPU != want {
		t.Errorf("the split is %+v, want %+v", *s.CPU, want)
	}
	if s.PerMessage["rounds"] != 0.2 || s.PeakRSSBytes != 7 || s.CPUSecondsPerMillion != 3000 {
		t.Errorf("got %+v", s)
	}
}

func TestReadings_OfThisMachineAreUnderstood(t *testing.T) {
	busy, idle, err := machineTimes()
	if err != nil || busy <= 0 || idle < 0 {
		t.Errorf("busy %v, idle %v, %v", busy, idle, err)
	}
	if _, _, err := switches(os.Getpid()); err != nil {
		t.Error(err)
	}
	if free, err := freeBytes(t.TempDir()); err != nil || free <= 0 {
		t.Errorf("%d bytes free, %v", free, err)
	}
}

const tracesText = `File: mortard
Type: cpu
Duration: 10s, Total samples = 5s (50%)
-----------+-------------------------------------------------------
      30ms   runtime.futex
             runtime.futexwakeup
             engine.(*shard).loop
-----------+-------------------------------------------------------
       key:  value
        1s   protocol.Decode (inline)
             engine.(*shard).loop
-----------+-------------------------------------------------------
     500us   engine.(*shard).loop
-----------+-------------------------------------------------------
`

func TestParseTraces_FoldsStacks(t *testing.T) {
	stacks, err := parseTraces(strings.NewReader(tracesText))
	if err != nil || len(stacks) != 3 {
		t.Fatalf("%+v, %v", stacks, err)
	}
	if s := stacks[0]; s.value != 30e6 || !slices.Equal(s.frames, []string{"engine.(*shard).loop", "runtime.futexwakeup", "runtime.futex"}) {
		t.Errorf("got %+v", s)
	}
	if s := stacks[1]; s.value != 1e9 || s.frames[1] != "protocol.Decode" {
		t.Errorf("got %+v", s)
	}
	var b bytes.Buffer
	writeTop(&b, "cpu", stacks)
	for _, want := range []string{"### cpu: 1.031s", "| protocol.Decode | 97.0 % | engine.(*shard).loop | 100.0 % |"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is missing in\n%s", want, b.String())
		}
	}
	if _, err := parseTraces(strings.NewReader("-----------+---\n what is this\n")); err == nil {
		t.Error("nonsense was accepted")
	}
}

func TestParseValue_KnowsUnits(t *testing.T) {
	for text, want := range map[string]float64{"12": 12, "3ns": 3, "2us": 2e3, "1.5ms": 1.5e6, "2s": 2e9, "1.50mins": 90e9, "1hrs": 3600e9, "512B": 512, "1.50kB": 1536, "2MB": 2 << 20} {
		if got, err := parseValue(text); err != nil || got != want {
			t.Errorf("%s is %v, %v, want %v", text, got, err, want)
		}
	}
}

// TestProfiler_TakesEveryKindAndKnowsWhatCameTooLate holds the CPU profile back until the load has ended.
func TestProfiler_TakesEveryKindAndKnowsWhatCameTooLate(t *testing.T) {
	for _, short := range []bool{false, true} {
		hold, holding, served := make(chan struct{}), make(chan struct{}), make(chan struct{})
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/debug/pprof/profile" {
				close(holding)
				<-hold
			}
			_, _ = w.Write([]byte("profile"))
			if r.URL.Path == "/metrics" { // the last one
				close(served)
			}
		}))
		p := startProfiles(&harness.Daemon{AdminAddr: srv.Listener.Addr().String()}, t.TempDir()+"/case", time.Second)
		<-holding
		stopped := make(chan struct{})
		var list profiles
		var err error
		if short {
			go func() {
				list, err = p.stop()
				close(stopped)
			}()
			for !p.loadEnded() {
				time.Sleep(time.Millisecond)
			}
			close(hold)
		} else {
			close(hold)
			<-served
			list, err = p.stop()
			close(stopped)
		}
		<-stopped
		srv.Close()
		slices.Sort(list.kinds)
		slices.Sort(list.missed)
		kinds, missed := []string{"allocs", "block", "cpu", "goroutine", "heap", "metrics", "mutex", "trace"}, []string(nil)
		if short {
			kinds, missed = []string{"allocs", "cpu", "goroutine", "heap", "metrics"}, []string{"block", "mutex", "trace"}
		}
		if err != nil || !slices.Equal(list.kinds, kinds) || !slices.Equal(list.missed, missed) {
			t.Errorf("short load %v: took %v, missed %v, %v", short, list.kinds, list.missed, err)
		}
		for _, k := range list.kinds {
			if text, err := os.ReadFile(list.path(k)); err != nil || string(text) != "profile" {
				t.Errorf("%s: %q, %v", k, text, err)
			}
		}
	}
}

func TestTeam_TheFirstErrorCancelsTheOthers(t *testing.T) {
	team, ctx := newTeam(t.Context())
	team.start(func() error { <-ctx.Done(); return context.Canceled })
	team.start(func() error { return os.ErrNotExist })
	if err := team.wait(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}
