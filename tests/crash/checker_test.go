package crash

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/tests/harness/fakebroker"
)

// fakeTarget is the fake broker, which breaks its promises from the given crash on.
type fakeTarget struct {
	b       *fakebroker.Broker
	crashes int
	after   int
	faults  fakebroker.Faults
	// broken, if set, is called when it begins to.
	broken func()
}

func (t *fakeTarget) Start(context.Context) (string, error) { return t.b.Start() }

func (t *fakeTarget) Flicker(time.Duration) error { return nil }

func (t *fakeTarget) Kill() {
	if t.crashes++; t.crashes >= t.after {
		t.b.SetFaults(t.faults)
		if t.broken != nil {
			t.broken()
		}
	}
	t.b.Crash()
}

func (t *fakeTarget) Stop() error { t.Kill(); return nil }

func (t *fakeTarget) Crashed() error { return nil }

func quickScenario() Scenario {
	s := DefaultScenario(1)
	s.Rounds, s.FullCheckEvery = 4, 2
	s.LoadMin, s.LoadMax = 10*time.Millisecond, 20*time.Millisecond
	return s
}

func TestScenario_AcceptsABrokerThatKeepsItsPromises(t *testing.T) {
	s := quickScenario()
	if err := s.Run(t.Context(), &fakeTarget{b: fakebroker.New(), after: 1, faults: fakebroker.Faults{RefuseEvery: 100}}); err != nil {
		t.Fatal(err)
	}
}

// Every promise is tested by a broker that breaks it: a checker that accepts everything would be worth nothing.
func TestScenario_NoticesBrokenPromises(t *testing.T) {
	for _, tt := range []struct {
		name   string
		faults fakebroker.Faults
		// waits says that it is noticed by waiting in vain, which need not take long.
		waits bool
		want  []string // any of these
	}{
		{"an acknowledged message is lost", fakebroker.Faults{LoseAcknowledged: true}, true,
			[]string{"is lost", "before it was", "SEQ_GAP", "the first time it was", "were not delivered", "did not get to the end of the log"}},
		{"a message is stored twice", fakebroker.Faults{DuplicateStored: true}, false,
			[]string{"stored twice", "was acknowledged at sequence", "before it was"}},
		{"a bit flips", fakebroker.Faults{CorruptStored: true}, false, []string{"not as it was sent", "never sent"}},
		{"acknowledged deliveries come back", fakebroker.Faults{ForgetAcks: true}, false, []string{"after its ACK had been answered"}},
		{"producers are forgotten", fakebroker.Faults{ForgetProducers: true}, true,
			[]string{"SEQ_GAP", "not answered as deduplicated", "the first time it was"}},
		{"failed attempts are forgotten", fakebroker.Faults{ForgetFailures: true}, false, []string{"was delivered as attempt 1 after"}},
		{"unacknowledged deliveries don't come back", fakebroker.Faults{SkipUnacked: true}, true, []string{"were not delivered", "did not get to the end of the log"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			// What the promise is about must have happened before a crash, which takes longer on a busy machine.
			var err error
			for load := 20 * time.Millisecond; err == nil; load *= 2 {
				if load > time.Minute {
					t.Fatal("not noticed")
				}
				s := quickScenario()
				s.LoadMax = load
				target := &fakeTarget{b: fakebroker.New(), after: 2, faults: tt.faults}
				if tt.waits {
					target.broken = func() { s.patience = 3 * time.Second }
				}
				err = s.Run(t.Context(), target)
			}
			for _, w := range tt.want {
				if strings.Contains(err.Error(), w) {
					return
				}
			}
			t.Errorf("noticed as something else: %v", err)
		})
	}
}
