package groups

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"
)

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

// scenario prepares one for a test.
func scenario(t *testing.T, seed uint64) Scenario {
	t.Helper()
	s := DefaultScenario(seedOf(t, seed))
	s.Binary, s.DataDir, s.Logf = mortard, filepath.Join(t.TempDir(), "data"), t.Logf
	if testing.Short() {
		s.Load, s.Freeze = 4*time.Second, 0 // a session alone takes longer
	}
	return s
}

// Nobody is ended by force: each message is handled once, and each that fails exactly as often as it may.
func TestScenario_CalmMembersHandleEachMessageOnce(t *testing.T) {
	t.Parallel()
	s := scenario(t, 1)
	s.Load, s.KillMember, s.KillBroker, s.StopBroker, s.Freeze = 3*time.Second, 0, 0, 0, 0
	if err := s.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// An ordered group delivers a message when the one before is done, whoever is ended meanwhile.
func TestScenario_OrderedGroupKeepsTheOrder(t *testing.T) {
	t.Parallel()
	s := scenario(t, 4)
	s.Load, s.Freeze, s.Ordered, s.StopBroker = 4*time.Second, 0, true, 0
	if err := s.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// Members and the broker are killed, members are frozen for longer than their sessions and go on afterwards.
func TestScenario_KilledAndFrozenMembersLoseNothing(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		seed    uint64
		brokers int
	}{
		{seed: 2, brokers: 3},
		{seed: 3, brokers: 0}, // connections last as long as the members: sessions end by silence
	} {
		t.Run(fmt.Sprintf("seed %d", tt.seed), func(t *testing.T) {
			t.Parallel()
			s := scenario(t, tt.seed)
			if s.KillBroker = tt.brokers; tt.brokers == 0 {
				s.StopBroker = 0
			}
			if err := s.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
		})
	}
}
