package crash

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
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

// withData returns a data directory that a broker with one topic, one group and a few messages was shut down on.
func withData(t *testing.T) *DaemonTarget {
	t.Helper()
	target := newTarget(t, nil)
	addr, err := target.Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	conn, err := harness.Dial(addr, "")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	topic, err := conn.Declare("orders", 2)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 20 {
		pub := protocol.Pub{TopicID: topic.TopicID, Partition: uint16(i % 2), Value: fmt.Appendf(nil, "order %d", i)}
		if _, err := conn.Publish(&pub); err != nil {
			t.Fatal(err)
		}
	}
	if err := consumeSome(addr, topic.TopicID, 5); err != nil {
		t.Fatal(err)
	}
	if err := target.Stop(); err != nil {
		t.Fatal(err)
	}
	return target
}

// consumeSome acknowledges n messages of group "billing", waits for the answers and leaves the group.
func consumeSome(addr string, topic uint16, n int) error {
	conn, sub, err := subscribe(addr, topic, "billing", protocol.SubFlagStream)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.Net().SetDeadline(time.Now().Add(defaultPatience)); err != nil {
		return err
	}
	for sent, acked := 0, 0; acked < n; {
		f, err := conn.Next()
		if err != nil {
			return fmt.Errorf("%d of %d messages acknowledged: %w", acked, n, err)
		}
		var out []byte
		switch f.Op {
		case protocol.OpNotice:
			out, err = confirm(f.Payload, &sub)
		case protocol.OpMsg:
			var msg protocol.Msg
			if err = msg.Decode(f.Payload); sent < n {
				ack := ackOf(&msg)
				out = ack.AppendFrame(nil)
				sent++
			}
		case protocol.OpOK:
			var ok protocol.OKFrame
			if err = ok.Decode(f.Payload); ok.RequestOp == protocol.OpAck {
				acked++
			}
		default:
			err = cmp.Or(f.Err(), fmt.Errorf("unexpected %v", f.Op))
		}
		if err != nil {
			return err
		}
		if err := conn.Send(out); err != nil {
			return err
		}
	}
	leave := protocol.Heartbeat{SubscriptionID: sub.SubscriptionID, MemberID: sub.MemberID, MembershipEpoch: sub.MembershipEpoch,
		AssignmentEpoch: sub.AssignmentEpoch, State: protocol.MemberLeave}
	_, err = conn.Request(protocol.OpHeartbeat, leave.AppendFrame(nil))
	return err
}

// filesWithMagic returns the files below dir that start with magic.
func filesWithMagic(t *testing.T, dir, magic string) []string {
	t.Helper()
	var list []string
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		head := make([]byte, len(magic))
		if n, _ := f.Read(head); string(head[:n]) == magic {
			list = append(list, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// The format version is the byte behind the magic in every file (storage, "Magics").
func TestStart_RefusesAFormatVersionThatIsTooNew(t *testing.T) {
	for _, magic := range []string{"MMJL", "MMQS", "MMCK", "MMML", "MMLQ"} {
		t.Run(magic, func(t *testing.T) {
			t.Parallel()
			target := withData(t)
			files := filesWithMagic(t, target.opts.DataDir, magic)
			if len(files) == 0 {
				t.Fatalf("no file with magic %s in %s", magic, target.opts.DataDir)
			}
			for _, path := range files {
				overwrite(t, path, 4, []byte{0xEE})
			}
			_, err := target.Start(t.Context())
			var start *harness.StartError
			if !errors.As(err, &start) {
				t.Fatalf("the broker started on a %s of version 238: %v", magic, err)
			}
			if start.ExitCode <= 0 {
				t.Errorf("exit code %d, want one above 0", start.ExitCode)
			}
			named := false
			for _, path := range files {
				named = named || strings.Contains(start.Log, filepath.Base(path))
			}
			if !named || !strings.Contains(start.Log, "238") {
				t.Errorf("the refusal doesn't name one of %v and version 238:\n%s", files, start.Log)
			}
		})
	}
}

func overwrite(t *testing.T, path string, off int64, b []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(b, off); err != nil {
		t.Fatal(err)
	}
}

func TestStart_RefusesADirectoryThatAnotherBrokerUses(t *testing.T) {
	t.Parallel()
	target := newTarget(t, nil)
	if _, err := target.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	second := NewDaemonTarget(target.opts.Binary, target.opts.DataDir, nil)
	_, err := second.Start(t.Context())
	var start *harness.StartError
	if !errors.As(err, &start) {
		t.Fatalf("a second broker started on the same data directory: %v", err)
	}
	if start.ExitCode <= 0 || !strings.Contains(start.Log, target.opts.DataDir) {
		t.Errorf("exit code %d, want one above 0 and a text that names the directory:\n%s", start.ExitCode, start.Log)
	}
	if err := target.Crashed(); err != nil {
		t.Errorf("the first broker: %v", err)
	}
	if err := target.Stop(); err != nil {
		t.Error(err)
	}
}

func TestStart_AfterACleanShutdownNothingIsReplayed(t *testing.T) {
	t.Parallel()
	target := withData(t)
	addr, err := target.Start(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	// What was acknowledged stays so; what was not comes back.
	conn, err := harness.Dial(addr, "")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	topic, err := conn.Declare("orders", 2)
	if err != nil {
		t.Fatal(err)
	}
	if !topic.Existed {
		t.Error("the topic is gone")
	}
	if err := consumeSome(addr, topic.TopicID, 15); err != nil {
		t.Errorf("the 15 messages that were left: %v", err)
	}
	if err := target.Stop(); err != nil {
		t.Error(err)
	}
}

func TestCrash_TopicsStayCreatedAndDeleted(t *testing.T) {
	t.Parallel()
	s := TopicScenario{Seed: seedOf(t, 5), Rounds: 6, LoadMin: 20 * time.Millisecond, LoadMax: 200 * time.Millisecond}
	if err := s.Run(t.Context(), newTarget(t, nil)); err != nil {
		t.Fatal(err)
	}
}
