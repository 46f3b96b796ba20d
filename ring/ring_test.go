package ring

import (
	"bytes"
	"log/slog"
	"runtime/debug"
	"strings"
	"testing"
)

// setGCPercent sets the collector's target and returns how to put it back.
func setGCPercent(percent int) (restore func()) {
	old := debug.SetGCPercent(percent)
	return func() { debug.SetGCPercent(old) }
}

func newTestPread(opts Options) (*Ring, error) {
	opts.Backend = Pread
	return New(opts)
}

func TestNew_PreadTellsItWasAskedFor(t *testing.T) {
	withRing(t, Options{Backend: Pread}, func(r *Ring) {
		if r.Backend() != "pread" || !strings.Contains(r.Reason(), "asked for") {
			t.Errorf("backend %q, reason %q", r.Backend(), r.Reason())
		}
	})
}

func TestNew_UnknownBackendIsAnError(t *testing.T) {
	if _, err := New(Options{Backend: Pread + 1}); err == nil {
		t.Error("no error")
	}
}

func TestRing_RefusedDirectIsLoggedOnce(t *testing.T) {
	var out bytes.Buffer
	opts := Options{Backend: Pread, Logger: slog.New(slog.NewTextHandler(&out, nil))}
	withRing(t, opts, func(r *Ring) {
		for range 3 {
			op := must(t, r, &Op{Kind: Open, Path: "/proc/self/status", Flags: ReadOnly | Direct})
			must(t, r, &Op{Kind: Close, FD: op.FD})
		}
	})
	if n := strings.Count(out.String(), "O_DIRECT"); n != 1 {
		t.Errorf("logged %d times: %s", n, out.String())
	}
}

func TestOptions_AreBroughtIntoRange(t *testing.T) {
	for _, c := range []struct{ entries, workers, wantEntries, wantWorkers int }{
		{0, 0, defaultEntries, defaultWorkers},
		{1, 1, minEntries, 1},
		{100, 12, 128, 12},
		{1 << 20, 1 << 20, maxEntries, maxWorkers},
	} {
		o := Options{Entries: c.entries, Workers: c.workers}
		if o.normalize(); o.Entries != c.wantEntries || o.Workers != c.wantWorkers || o.Logger == nil {
			t.Errorf("%d, %d became %+v", c.entries, c.workers, o)
		}
	}
}
