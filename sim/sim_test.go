package sim

import (
	"os"
	"runtime/debug"
	"strconv"
	"testing"
)

func TestMain(m *testing.M) {
	debug.SetGCPercent(400)
	os.Exit(m.Run())
}

func seeds(t *testing.T, def int) (from, n uint64) {
	t.Helper()
	if v := os.Getenv("MORTARMQ_SIM_SEED"); v != "" {
		s, err := strconv.ParseUint(v, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return s, 1
	}
	if v := os.Getenv("MORTARMQ_SIM_SEEDS"); v != "" {
		k, err := strconv.ParseUint(v, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return 1, k
	}
	return 1, uint64(def)
}

func TestSim_NothingAcknowledgedIsLost(t *testing.T) {
	from, n := seeds(t, 20)
	for seed := from; seed < from+n; seed++ {
		o := Options{Seed: seed}
		if os.Getenv("MORTARMQ_SIM_SEED") != "" {
			o.Log = os.Stderr
		}
		r := Run(o)
		if r.Failure != "" {
			t.Errorf("%s", r.Trace)
			return
		}
	}
}

func TestSim_ASeedIsReplayedExactly(t *testing.T) {
	a, b := Run(Options{Seed: 77}), Run(Options{Seed: 77})
	if a.Digest != b.Digest || a.Acknowledged != b.Acknowledged || a.Simulated != b.Simulated {
		t.Errorf("two runs of a seed: %s, %d acknowledged, %v; and %s, %d, %v", a.Digest, a.Acknowledged, a.Simulated, b.Digest, b.Acknowledged, b.Simulated)
	}
}
