package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/tests/harness"
)

// LockPath is locked during a run, so that two runs on one machine follow one another.
const LockPath = "/tmp/mortarmq-bench.lock"

// sampleEvery is the distance of the points of a throughput curve.
const sampleEvery = 100 * time.Millisecond

// errSkipped is returned by a case that can't run on this machine.
var errSkipped = errors.New("skipped")

// Sample is the result of one case in one round. Times are seconds, latencies microseconds.
type Sample struct {
	Workload string
	Size     int // bytes
	Round    int
	Tool     string `json:",omitempty"` // what measured a limit

	Messages     uint64  `json:",omitempty"`
	Seconds      float64 `json:",omitempty"`
	MsgsPerSec   float64 `json:",omitempty"`
	MBPerSec     float64 `json:",omitempty"` // of values, 10^6 bytes
	DrainSeconds float64 `json:",omitempty"` // from SIGTERM until the broker had everything in segments and was gone
	// SustainedMsgsPerSec counts the drain as part of the run.
	SustainedMsgsPerSec float64 `json:",omitempty"`
	StartSeconds        float64 `json:",omitempty"` // from the start of the process until it served

	Latency        *Quantiles `json:",omitempty"`
	DeliverLatency *Quantiles `json:",omitempty"`
	PublishLatency *Quantiles `json:",omitempty"`

	// CPUSecondsPerMillion is the broker's CPU time from the first measured message until its exit.
	CPUSecondsPerMillion float64 `json:",omitempty"`
	PeakRSSBytes         int64   `json:",omitempty"`
	Retried              uint64  `json:",omitempty"`

	Values map[string]float64 `json:",omitempty"`
	// PerSecond is the throughput over time, one point per sampleEvery.
	PerSecond []float64 `json:",omitempty"`

	keepData   bool // leave the data directory to the next run of this case
	cpuAtStart time.Duration
}

func (s *Sample) setLimit(l *diskLimit) {
	s.Tool, s.MsgsPerSec, s.MBPerSec = l.Tool, l.PerSec, l.MBps
	lat := l.Latency
	s.Latency = &lat
}

// runner carries a run's settings and its scratch directory.
type runner struct {
	cfg *Config
	dir string
	log io.Writer
}

// Run measures everything that cfg asks for and returns the samples in the order in which they were taken. Progress goes
// to log. It holds the machine's benchmark lock meanwhile.
func Run(ctx context.Context, cfg *Config, log io.Writer) ([]Sample, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	unlock, err := lock(LockPath, log)
	if err != nil {
		return nil, err
	}
	defer unlock()
	dir, err := os.MkdirTemp(cfg.Dir, "mortarmq-bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	preciseTimers()
	r := &runner{cfg: cfg, dir: dir, log: log}
	cases := cfg.cases()
	var samples []Sample
	for round := 1; round <= cfg.Rounds; round++ {
		for i, c := range cases {
			fmt.Fprintf(log, "round %d/%d  case %2d/%d  %s %s ... ", round, cfg.Rounds, i+1, len(cases), c.workload, sizeName(c.size))
			s := Sample{Workload: c.workload, Size: c.size, Round: round}
			err := c.run(ctx, r, &s)
			if cerr := os.RemoveAll(r.dataDir()); err == nil {
				err = cerr
			}
			if errors.Is(err, errSkipped) {
				fmt.Fprintln(log, "skipped")
				continue
			}
			if err != nil {
				fmt.Fprintln(log, "failed")
				return samples, fmt.Errorf("%s %s, round %d: %w", c.workload, sizeName(c.size), round, err)
			}
			fmt.Fprintln(log, s.brief())
			samples = append(samples, s)
		}
	}
	return samples, nil
}

func (r *runner) dataDir() string { return filepath.Join(r.dir, "data") }

// withBroker starts mortard, lets fn use it and shuts it down. The data directory is empty before, unless s continues
// with what was kept.
func (r *runner) withBroker(ctx context.Context, s *Sample, fn func(*harness.Daemon) error) (err error) {
	if !s.keepData {
		if err := os.RemoveAll(r.dataDir()); err != nil {
			return err
		}
	}
	config := map[string]any{"journal_file_bytes": r.cfg.JournalFileBytes, "journal_max_files": r.cfg.JournalMaxFiles, "log_level": "warn"}
	for k, v := range r.cfg.Broker {
		config[k] = v
	}
	d, err := harness.Start(ctx, harness.Options{Binary: r.cfg.Mortard, DataDir: r.dataDir(), Config: config,
		LogPath: filepath.Join(r.cfg.Out, "mortard.log")})
	if err != nil {
		return err
	}
	defer d.Kill() // a no-op after Stop
	s.StartSeconds = d.ReadyIn.Seconds()
	if err := fn(d); err != nil {
		return errors.Join(err, d.Crashed())
	}
	select {
	case <-d.Exited():
		if err := d.Crashed(); err != nil {
			return err
		}
		return nil // fn killed it
	default:
	}
	u, err := d.Usage()
	if err != nil {
		return err
	}
	s.PeakRSSBytes = u.PeakRSS
	began := now()
	if err := d.Stop(harness.DefaultStopTimeout); err != nil {
		return err
	}
	s.DrainSeconds = float64(now()-began) / 1e9
	if s.Messages > 0 {
		s.CPUSecondsPerMillion = (d.ExitCPU() - s.cpuAtStart).Seconds() / float64(s.Messages) * 1e6
		s.SustainedMsgsPerSec = float64(s.Messages) / (s.Seconds + s.DrainSeconds)
	}
	return nil
}

// measure runs load, counts what completed meanwhile and takes profiles where asked.
func (r *runner) measure(d *harness.Daemon, s *Sample, completed func() uint64, load func() error) error {
	u, err := d.Usage()
	if err != nil {
		return err
	}
	s.cpuAtStart = u.CPU()
	var prof *profiler
	if r.cfg.Profile {
		prof = startProfiles(d, filepath.Join(r.cfg.Out, fmt.Sprintf("%s-%s-%d", s.Workload, sizeName(s.Size), s.Round)), r.cfg.Duration)
	}
	before, began := completed(), now()
	curve := startCurve(completed)
	err = load()
	elapsed := float64(now()-began) / 1e9
	s.PerSecond = curve.stop()
	if perr := prof.stop(); err == nil {
		err = perr
	}
	if err != nil {
		return err
	}
	s.Messages, s.Seconds = completed()-before, elapsed
	s.MsgsPerSec = float64(s.Messages) / elapsed
	s.MBPerSec = s.MsgsPerSec * float64(s.Size) / 1e6
	return nil
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

// lock waits for the exclusive lock on path; the file stays.
func lock(path string, log io.Writer) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o666)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		fmt.Fprintf(log, "another benchmark holds %s: waiting\n", path)
		for {
			if err = unix.Flock(int(f.Fd()), unix.LOCK_EX); !errors.Is(err, unix.EINTR) {
				break
			}
		}
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
	}
	return func() { f.Close() }, nil
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
