package engine

import (
	"math/rand/v2"
	"testing"
	"time"
)

// The estimate stands where one of fifty rounds takes longer, and follows when more of them do.
func TestCommitLatency_FollowsTheSlowRounds(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var l commitLatency
	settled := func(slow float64) time.Duration {
		sum := time.Duration(0)
		for i := range 20_000 {
			d := time.Millisecond/2 + time.Duration(rng.Int64N(int64(time.Millisecond)))
			if rng.Float64() < slow {
				d = 20 * time.Millisecond
			}
			l.add(d)
			if i >= 10_000 {
				sum += l.get()
			}
		}
		return sum / 10_000
	}
	few := settled(0.001)
	if few < time.Millisecond || few > 2*time.Millisecond {
		t.Errorf("with one slow round of a thousand the estimate is %v, the 98th percentile near 1.5 ms", few)
	}
	if many := settled(0.1); many < 5*few {
		t.Errorf("with every tenth round slow the estimate is %v, and was %v", many, few)
	}
	if again := settled(0.001); again > 2*time.Millisecond {
		t.Errorf("when the slow rounds are over the estimate is %v", again)
	}
}
