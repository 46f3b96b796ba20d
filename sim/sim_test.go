package sim

import (
	"os"
	"strconv"
	"testing"
)

// seedsHere is how many seeds the package's own tests run; make sim runs more.
const seedsHere = 40

func TestSim_NothingAcknowledgedIsLost(t *testing.T) {
	if v := os.Getenv("MORTARMQ_SIM_SEED"); v != "" {
		seed, err := strconv.ParseUint(v, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		logs, _ := strconv.Atoi(os.Getenv("MORTARMQ_SIM_LOGS"))
		r := Run(Options{Seed: seed, Logs: logs, Log: os.Stderr})
		t.Log(r.Trace)
		if r.Failure != "" {
			t.Error(r.Failure)
		}
		return
	}
	o := ManyOptions{First: 1, Count: seedsHere}
	if testing.Short() {
		o.Count /= 4
	}
	s := RunMany(o)
	for _, f := range s.Failures {
		t.Errorf("seed %d: %s\n%s", f.Seed, f.Failure, f.Trace)
	}
	if s.Acknowledged == 0 {
		t.Error("nothing was acknowledged")
	}
}

// TestSim_SeveralLogs has two journals on each node.
func TestSim_SeveralLogs(t *testing.T) {
	s := RunMany(ManyOptions{First: 1, Count: seedsHere / 2, Run: Options{Logs: 2}})
	for _, f := range s.Failures {
		t.Errorf("seed %d: %s\n%s", f.Seed, f.Failure, f.Trace)
	}
	if s.Acknowledged == 0 {
		t.Error("nothing was acknowledged")
	}
}

func TestSim_ASeedIsReplayedExactly(t *testing.T) {
	a, b := Run(Options{Seed: 77}), Run(Options{Seed: 77})
	if a.Digest != b.Digest || a.Acknowledged != b.Acknowledged || a.Simulated != b.Simulated {
		t.Errorf("two runs of a seed: %x, %d acknowledged, %v; and %x, %d, %v", a.Digest, a.Acknowledged, a.Simulated, b.Digest, b.Acknowledged, b.Simulated)
	}
}

// TestSim_KeepsNoFiles: hundreds of thousands of runs in one process, with nodes that are killed again and again, must not
// run out of descriptors.
func TestSim_KeepsNoFiles(t *testing.T) {
	open := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	Run(Options{Seed: 1})
	before := open()
	for seed := uint64(2); seed < 6; seed++ {
		Run(Options{Seed: seed})
	}
	if after := open(); after != before {
		t.Errorf("%d files are open after four runs, %d before them", after, before)
	}
}

func TestSummary_NamesWhatOccurredTooRarely(t *testing.T) {
	s := Summary{Seeds: 200, In: map[string]uint64{}}
	for _, what := range Required() {
		s.In[what] = 2
	}
	if m := s.Missing(); len(m) > 0 {
		t.Errorf("missing: %v, although all occurred in 1 %% of the seeds", m)
	}
	s.In[learner] = 1
	if m := s.Missing(); len(m) != 1 || m[0] != learner {
		t.Errorf("missing: %v, want %s", m, learner)
	}
}
