package sim

import (
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/cespare/xxhash/v2"
	"golang.org/x/sys/unix"
)

// ManyOptions configures RunMany.
type ManyOptions struct {
	// First is the first seed, Count how many there are.
	First, Count uint64
	// Workers is how many run at a time; 0 means one for each processor.
	Workers int
	// MaxFailures ends the runs early; 0 means 10.
	MaxFailures int
	// Progress is called after each seed, with its result, on any goroutine but one at a time; nil: nobody is told.
	Progress func(s *Summary, seed uint64, r *Result)
	// Run configures each run; its seed is set.
	Run Options
}

// Failed is a run that has found something.
type Failed struct {
	Seed           uint64
	Failure, Trace string
}

// Summary is what many runs have found.
type Summary struct {
	// Seeds is how many have run.
	Seeds uint64
	// Simulated is how long they took in simulated time, Took in real time, CPU all processors' time together, the garbage
	// collector's too.
	Simulated, Took, CPU time.Duration
	// Acknowledged counts messages.
	Acknowledged uint64
	// In counts the seeds in which a fault or situation occurred, Times how often it did in all of them.
	In, Times map[string]uint64
	// Digest is a checksum of what happened in all of them: the same seeds of the same code have the same on every machine.
	Digest uint64
	// Failures come in the order of their seeds.
	Failures []Failed

	each []time.Duration
}

// RunMany runs many seeds, several at a time. Each of them is as deterministic as alone.
func RunMany(o ManyOptions) *Summary {
	if o.Workers == 0 {
		o.Workers = runtime.GOMAXPROCS(0)
	}
	if o.MaxFailures == 0 {
		o.MaxFailures = 10
	}
	begun, cpu := time.Now(), cpuTime(unix.RUSAGE_SELF)
	s := &Summary{In: map[string]uint64{}, Times: map[string]uint64{}}
	var mu sync.Mutex
	var next atomic.Uint64
	var enough atomic.Bool
	var wg sync.WaitGroup
	for range o.Workers {
		wg.Go(func() {
			runtime.LockOSThread() // to know its processor time
			defer runtime.UnlockOSThread()
			for !enough.Load() {
				k := next.Add(1) - 1
				if k >= o.Count {
					return
				}
				run := o.Run
				run.Seed = o.First + k
				at := cpuTime(unix.RUSAGE_THREAD)
				r := Run(run)
				took := cpuTime(unix.RUSAGE_THREAD) - at
				mu.Lock()
				s.add(run.Seed, &r, took)
				s.Took, s.CPU = time.Since(begun), cpuTime(unix.RUSAGE_SELF)-cpu
				if len(s.Failures) >= o.MaxFailures {
					enough.Store(true)
				}
				if o.Progress != nil {
					o.Progress(s, run.Seed, &r)
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	slices.SortFunc(s.Failures, func(a, b Failed) int { return int(int64(a.Seed) - int64(b.Seed)) })
	return s
}

func (s *Summary) add(seed uint64, r *Result, took time.Duration) {
	s.Seeds++
	s.Simulated += r.Simulated
	s.Acknowledged += uint64(r.Acknowledged)
	s.Digest += xxhash.Sum64(binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, seed), r.Digest)) // in any order
	s.each = append(s.each, took)
	for what, n := range r.Seen {
		s.In[what]++
		s.Times[what] += uint64(n)
	}
	if r.Failure != "" {
		s.Failures = append(s.Failures, Failed{seed, r.Failure, r.Trace})
	}
}

// cpuTime returns how much processor time this process or thread has had.
func cpuTime(who int) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(who, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Median returns how much processor time the median run took, without the garbage collector's.
func (s *Summary) Median() time.Duration {
	if len(s.each) == 0 {
		return 0
	}
	each := slices.Sorted(slices.Values(s.each))
	return each[len(each)/2]
}

// Required are the faults and situations that many runs are worth little without.
func Required() []string {
	var list []string
	for _, k := range faultKinds {
		list = append(list, k.name)
	}
	return append(list, requiredSituations...)
}

// requiredPercent is in how many of a hundred seeds each of Required has to occur.
const requiredPercent = 1

// Missing returns what of Required occurred in too few seeds.
func (s *Summary) Missing() []string {
	return slices.DeleteFunc(Required(), func(what string) bool { return s.In[what]*100 >= s.Seeds*requiredPercent })
}

// Print writes the summary and the table of what occurred.
func (s *Summary) Print(w io.Writer) {
	fmt.Fprintf(w, "%d seeds, %d failures, %.1f hours of simulated time, %d messages acknowledged, %v\n",
		s.Seeds, len(s.Failures), s.Simulated.Hours(), s.Acknowledged, s.Took.Round(time.Second))
	fmt.Fprintf(w, "digest %016x, processor time of a seed: %v in the median, %v on average with garbage collection\n",
		s.Digest, s.Median().Round(time.Millisecond), (s.CPU / time.Duration(max(s.Seeds, 1))).Round(time.Millisecond))
	required := Required()
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "fault or situation\tin seeds\t\ttimes\n")
	for _, what := range slices.Sorted(maps.Keys(s.In)) {
		mark := ""
		if slices.Contains(required, what) {
			mark = "required"
		}
		fmt.Fprintf(t, "%s\t%d (%.1f %%)\t%s\t%d\n", what, s.In[what], 100*float64(s.In[what])/float64(max(s.Seeds, 1)), mark, s.Times[what])
	}
	_ = t.Flush()
	if missing := s.Missing(); len(missing) > 0 {
		fmt.Fprintf(w, "in less than %d %% of the seeds: %s\n", requiredPercent, strings.Join(missing, ", "))
	}
}
