package crash

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/tests/harness"
)

// buildDir is removed at the end of the tests.
var buildDir string

// mortard builds the binary under test, once; with the race detector where the tests have it.
var mortard = sync.OnceValues(func() (string, error) { return harness.BuildMortard(buildDir, raceEnabled) })

func TestMain(m *testing.M) {
	if raceEnabled {
		// A broker that finds a race ends at once, so that it is noticed although most brokers here end by a kill.
		os.Setenv("GORACE", "halt_on_error=1 atexit_sleep_ms=0")
	}
	os.Exit(func() int {
		var err error
		if buildDir, err = os.MkdirTemp("", "mortarmq-crash-"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(buildDir)
		return m.Run()
	}())
}

// seedOf returns the seed of a test, or SEED of the environment to repeat another.
func seedOf(t *testing.T, fixed uint64) uint64 {
	t.Helper()
	text := os.Getenv("SEED")
	if text == "" {
		return fixed
	}
	seed, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("SEED: %v", err)
	}
	return seed
}

func newTarget(t *testing.T, config map[string]any) *DaemonTarget {
	t.Helper()
	binary, err := mortard()
	if err != nil {
		t.Fatal(err)
	}
	target := NewDaemonTarget(binary, filepath.Join(t.TempDir(), "data"), config)
	t.Cleanup(func() {
		if target.d != nil {
			target.Kill()
		}
	})
	return target
}

// io_backend auto is io_uring where it was built in and the kernel has it.
func TestCrash_NothingAcknowledgedIsLost(t *testing.T) {
	for _, tt := range []struct {
		backend string
		seed    uint64
		rounds  int
	}{
		{"auto", 1, 10},
		{"auto", 2, 10},
		{"pread", 3, 6},
	} {
		t.Run(fmt.Sprintf("%s, seed %d", tt.backend, tt.seed), func(t *testing.T) {
			t.Parallel()
			s := DefaultScenario(seedOf(t, tt.seed))
			s.Rounds, s.Logf = tt.rounds, t.Logf
			if testing.Short() {
				s.Rounds /= 2
			}
			if err := s.Run(t.Context(), newTarget(t, map[string]any{"io_backend": tt.backend})); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// Settings that differ with the seed, as in the soak run.
func TestCrash_VariedSettings(t *testing.T) {
	for _, seed := range []uint64{6, 11} {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			s, config := Varied(seedOf(t, seed))
			t.Logf("%d partitions, %d producers, %v", s.Partitions, s.Producers, config)
			s.Rounds, s.Logf = 5, t.Logf
			if err := s.Run(t.Context(), newTarget(t, config)); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestShutdown_UnderLoadExitsCleanlyAndLosesNothing(t *testing.T) {
	t.Parallel()
	s := DefaultScenario(seedOf(t, 4))
	s.Rounds, s.StopOneIn, s.FlickerOneIn, s.FullCheckEvery, s.Logf = 4, 1, 0, 2, t.Logf
	if err := s.Run(t.Context(), newTarget(t, nil)); err != nil {
		t.Fatal(err)
	}
}

func TestCrash_TopicsStayCreatedAndDeleted(t *testing.T) {
	t.Parallel()
	s := TopicScenario{Seed: seedOf(t, 5), Rounds: 6, LoadMin: 20 * time.Millisecond, LoadMax: 200 * time.Millisecond}
	if err := s.Run(t.Context(), newTarget(t, nil)); err != nil {
		t.Fatal(err)
	}
}
