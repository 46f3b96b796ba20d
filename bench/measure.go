package bench

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/tests/harness"
)

// CPUSplit says where the machine's CPU time went during a measurement, in seconds.
type CPUSplit struct {
	BrokerUser, BrokerSystem       float64
	GeneratorUser, GeneratorSystem float64
	// Other is what no process of ours was charged with: the kernel's own threads, interrupts, other programs.
	Other float64
	// Idle is what nobody used, waiting for the disk included.
	Idle float64
}

// counted are the broker's own counters that are reported per message, by the name in the report.
var counted = []struct{ name, metric string }{
	{"rounds", "mortarmq_shard_rounds_total"},
	{"commit syscalls", "mortarmq_commit_ring_syscalls_total"},
	{"commit SQEs", "mortarmq_commit_ring_sqes_total"},
	{"commit flushes", "mortarmq_commit_ring_flushes_total"},
	{"commit bytes written", "mortarmq_commit_ring_written_bytes_total"},
	{"store syscalls", "mortarmq_store_ring_syscalls_total"},
	{"store SQEs", "mortarmq_store_ring_sqes_total"},
	{"store flushes", "mortarmq_store_ring_flushes_total"},
	{"store bytes written", "mortarmq_store_ring_written_bytes_total"},
	{allocationsName, "go_memstats_mallocs_total"},
	{"bytes allocated", "go_memstats_alloc_bytes_total"},
	{"garbage collections", "go_gc_duration_seconds_count"},
}

const allocationsName = "allocations"

// Names of the two counters that the kernel keeps (proc(5), status): threads that went to sleep, threads that were made to
// give way.
const (
	sleepsName    = "voluntary switches"
	preemptedName = "involuntary switches"
)

// reading is everything that is read before and after a measurement.
type reading struct {
	at       int64
	broker   harness.Usage
	self     harness.Usage
	busy     float64 // seconds of all processors that somebody used
	idle     float64
	counters map[string]float64 // by counted.name
}

func takeReading(srv server) (*reading, error) {
	c := &reading{at: now(), counters: map[string]float64{}}
	var err error
	if c.broker, err = srv.usage(); err != nil {
		return nil, err
	}
	if c.self, err = harness.ReadUsage(os.Getpid()); err != nil {
		return nil, err
	}
	if c.busy, c.idle, err = machineTimes(); err != nil {
		return nil, err
	}
	for _, d := range srv.daemons() {
		if err := c.addCounters(d); err != nil {
			return nil, err
		}
	}
	return c, nil
}

func (c *reading) addCounters(d *harness.Daemon) error {
	var text bytes.Buffer
	if err := d.Fetch("/metrics", &text); err != nil {
		return fmt.Errorf("the broker's counters: %w", err)
	}
	sums := sumMetrics(text.Bytes())
	for _, k := range counted {
		if v, ok := sums[k.metric]; ok {
			c.counters[k.name] += v
		}
	}
	sleeps, preempted, err := switches(d.PID())
	if err != nil {
		return err
	}
	c.counters[sleepsName] += float64(sleeps)
	c.counters[preemptedName] += float64(preempted)
	return nil
}

// sumMetrics adds up the samples of each metric of a Prometheus text over its labels.
func sumMetrics(text []byte) map[string]float64 {
	sums := map[string]float64{}
	for line := range bytes.Lines(text) {
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		at := bytes.LastIndexByte(bytes.TrimRight(line, "\n"), ' ')
		if at < 0 {
			continue
		}
		v, err := strconv.ParseFloat(strings.TrimSpace(string(line[at:])), 64)
		if err != nil {
			continue
		}
		name, _, _ := bytes.Cut(line[:at], []byte("{"))
		sums[string(name)] += v
	}
	return sums
}

// switches adds up the context switches of a process's threads.
func switches(pid int) (voluntary, involuntary uint64, err error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil {
		return 0, 0, err
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			continue // the thread has ended
		}
		for line := range bytes.Lines(text) {
			for name, sum := range map[string]*uint64{"voluntary_ctxt_switches:": &voluntary, "nonvoluntary_ctxt_switches:": &involuntary} {
				if v, ok := bytes.CutPrefix(line, []byte(name)); ok {
					n, _ := strconv.ParseUint(string(bytes.TrimSpace(v)), 10, 64) // the kernel writes numbers
					*sum += n
				}
			}
		}
	}
	return voluntary, involuntary, nil
}

// machineTimes reads the first line of /proc/stat (proc(5)): user, nice, system, idle, iowait, irq, softirq, steal in
// ticks of 10 ms.
func machineTimes() (busy, idle float64, err error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0, err
	}
	line, _, _ := bytes.Cut(text, []byte("\n"))
	f := strings.Fields(string(line))
	if len(f) < 9 || f[0] != "cpu" {
		return 0, 0, fmt.Errorf("unexpected form of /proc/stat: %q", line)
	}
	for i, text := range f[1:9] {
		v, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("unexpected form of /proc/stat: %q", line)
		}
		switch i {
		case 3, 4, 7: // steal is another machine's time: nobody here used it
			idle += v / 100
		default:
			busy += v / 100
		}
	}
	return busy, idle, nil
}

// between fills in what happened between two readings.
func (s *Sample) between(a, b *reading) {
	sec := func(x, y time.Duration) float64 { return max(0, (y - x).Seconds()) }
	c := &CPUSplit{
		BrokerUser: sec(a.broker.User, b.broker.User), BrokerSystem: sec(a.broker.System, b.broker.System),
		GeneratorUser: sec(a.self.User, b.self.User), GeneratorSystem: sec(a.self.System, b.self.System),
		Idle: max(0, b.idle-a.idle),
	}
	c.Other = max(0, b.busy-a.busy-c.BrokerUser-c.BrokerSystem-c.GeneratorUser-c.GeneratorSystem)
	s.CPU = c
	s.PeakRSSBytes = b.broker.PeakRSS
	if s.Messages == 0 {
		return
	}
	s.CPUSecondsPerMillion = (c.BrokerUser + c.BrokerSystem) / float64(s.Messages) * 1e6
	for name, v := range b.counters {
		if s.PerMessage == nil {
			s.PerMessage = map[string]float64{}
		}
		s.PerMessage[name] = (v - a.counters[name]) / float64(s.Messages)
	}
}

// measure runs load, counts what completed meanwhile and takes profiles where asked.
func (r *runner) measure(srv server, s *Sample, completed func() uint64, load func() error) error {
	before, err := takeReading(srv)
	if err != nil {
		return err
	}
	s.cpuAtStart = before.broker.CPU()
	var prof *profiler
	if r.cfg.Profile && len(srv.daemons()) > 0 {
		prof = startProfiles(srv.daemons()[0], filepath.Join(r.cfg.Out, s.fileName()), r.cfg.Duration)
	}
	had, began := completed(), now()
	curve := startCurve(completed)
	err = load()
	elapsed := float64(now()-began) / 1e9
	s.PerSecond = curve.stop()
	if err != nil {
		prof.abandon()
		return err
	}
	after, err := takeReading(srv)
	if err != nil {
		prof.abandon()
		return err
	}
	s.Messages, s.Seconds = completed()-had, elapsed
	s.MsgsPerSec = float64(s.Messages) / elapsed
	s.MBPerSec = s.MsgsPerSec * float64(s.Size) / 1e6
	s.between(before, after)
	if prof == nil {
		return nil
	}
	list, err := prof.stop()
	r.profiles = append(r.profiles, list)
	return err
}

// curve samples a counter in the background.
type curve struct {
	quit, done chan struct{}
	points     []float64
}

func startCurve(count func() uint64) *curve {
	c := &curve{quit: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(c.done)
		t := time.NewTicker(sampleEvery)
		defer t.Stop()
		last, at := count(), now()
		for {
			select {
			case <-c.quit:
				return
			case <-t.C:
			}
			n, t := count(), now()
			c.points = append(c.points, float64(n-last)/(float64(t-at)/1e9))
			last, at = n, t
		}
	}()
	return c
}

func (c *curve) stop() []float64 {
	close(c.quit)
	<-c.done
	return c.points
}

// preciseTimers sets the timer slack of every thread of this process to 1 ns (proc(5), timerslack_ns): an idle Go
// processor otherwise wakes up to 50 us late, which would be counted as the broker's latency. Threads that are started
// later inherit it.
func preciseTimers() {
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return
	}
	for _, t := range tasks {
		// Where it is not permitted the figures are a little higher for echo and broker alike.
		_ = os.WriteFile("/proc/"+t.Name()+"/timerslack_ns", []byte("1"), 0)
	}
}

// freeBytes returns the free space of dir's file system.
func freeBytes(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, err
	}
	return int64(st.Bavail) * st.Bsize, nil
}
