package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
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
	// Variant tells cases of a workload apart: the number of partitions, of members, of bytes stored.
	Variant string `json:",omitempty"`
	// System is what was measured: mortard, a peer's name, or "machine".
	System string
	// Durable says that a publish is answered when it was flushed to disk, on a majority of the nodes.
	Durable bool
	Size    int // bytes
	Round   int
	Tool    string `json:",omitempty"` // what measured a limit

	Messages     uint64  `json:",omitempty"`
	Seconds      float64 `json:",omitempty"`
	MsgsPerSec   float64 `json:",omitempty"`
	MBPerSec     float64 `json:",omitempty"` // of values, 10^6 bytes
	DrainSeconds float64 `json:",omitempty"` // from SIGTERM until mortard had everything in segments and was gone
	// SustainedMsgsPerSec counts the drain as part of the run.
	SustainedMsgsPerSec float64 `json:",omitempty"`
	StartSeconds        float64 `json:",omitempty"` // from the start of the process until it served

	Latency        *Quantiles `json:",omitempty"`
	DeliverLatency *Quantiles `json:",omitempty"`
	PublishLatency *Quantiles `json:",omitempty"`

	// CPUSecondsPerMillion is the servers' CPU time per million messages: mortard's from the first measured message until
	// its exit, segments included, a peer's until the last message.
	CPUSecondsPerMillion float64 `json:",omitempty"`
	PeakRSSBytes         int64   `json:",omitempty"`
	Retried              uint64  `json:",omitempty"`

	CPU *CPUSplit `json:",omitempty"`
	// PerMessage are the broker's own counters during the measurement, per message.
	PerMessage map[string]float64 `json:",omitempty"`
	Values     map[string]float64 `json:",omitempty"`
	// PerSecond is the throughput over time, one point per sampleEvery.
	PerSecond []float64 `json:",omitempty"`
	// Timeline is the course of a long run.
	Timeline []Moment `json:",omitempty"`

	cpuAtStart time.Duration
}

func (s *Sample) setLimit(l *diskLimit) {
	s.Tool, s.MsgsPerSec, s.MBPerSec = l.Tool, l.PerSec, l.MBps
	lat := l.Latency
	s.Latency = &lat
}

// Name is the case that was measured, without the system.
func (s *Sample) Name() string {
	g := group{workload: s.Workload, variant: s.Variant, size: s.Size}
	return g.name()
}

// Allocations returns how many objects mortard allocated per message during the measurement; false where that was not
// counted.
func (s *Sample) Allocations() (perMessage float64, ok bool) {
	perMessage, ok = s.PerMessage[allocationsName]
	return perMessage, ok
}

// fileName is the beginning of the names of files about this sample.
func (s *Sample) fileName() string {
	parts := []string{s.Workload}
	if s.Variant != "" {
		parts = append(parts, strings.ReplaceAll(s.Variant, " ", ""))
	}
	if s.System != mortardName {
		parts = append(parts, s.System)
	}
	return strings.Join(append(parts, sizeName(s.Size), fmt.Sprint(s.Round)), "-")
}

// runner carries a run's settings and its scratch directory.
type runner struct {
	cfg  *Config
	dir  string
	log  io.Writer
	kept map[*target]server // slow starters of this round
	// profiles of all cases so far.
	profiles []profiles
}

// Run measures everything that cfg asks for and returns the samples in the order in which they were taken. Progress goes
// to log. It holds the machine's benchmark lock meanwhile.
func Run(ctx context.Context, cfg *Config, log io.Writer) ([]Sample, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if err := cfg.checkPeers(); err != nil {
		return nil, err
	}
	unlock, err := lock(cfg.lockPath, log)
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
	r := &runner{cfg: cfg, dir: dir, log: log, kept: map[*target]server{}}
	defer r.endKept()
	samples, err := r.rounds(ctx, cfg.cases())
	if len(r.profiles) > 0 {
		err = errors.Join(err, summarise(cfg.Mortard, cfg.Out, r.profiles))
	}
	return samples, err
}

func (r *runner) rounds(ctx context.Context, cases []benchCase) (samples []Sample, err error) {
	for round := 1; round <= r.cfg.Rounds; round++ {
		for i := range cases {
			c := &cases[i]
			s := Sample{Workload: c.workload, Variant: c.variant, System: c.system, Durable: c.durable, Size: c.size, Round: round}
			fmt.Fprintf(r.log, "round %d/%d  case %2d/%d  %s ... ", round, r.cfg.Rounds, i+1, len(cases), c)
			began := now()
			err := r.runCase(ctx, c, &s)
			if i+1 == len(cases) || cases[i+1].target != c.target {
				err = errors.Join(err, r.leave(c.target))
			}
			if errors.Is(err, errSkipped) {
				fmt.Fprintln(r.log, err)
				continue
			}
			if err != nil {
				fmt.Fprintln(r.log, "failed")
				return samples, fmt.Errorf("%s, round %d: %w", c, round, err)
			}
			fmt.Fprintf(r.log, "%s  (took %.1f s)\n", s.brief(), float64(now()-began)/1e9)
			samples = append(samples, s)
		}
		r.endKept()
	}
	return samples, nil
}

func (r *runner) runCase(ctx context.Context, c *benchCase, s *Sample) error {
	err := os.RemoveAll(r.dataDir())
	if err == nil {
		if c.target == nil {
			err = c.alone(ctx, r, s)
		} else {
			err = r.runOn(ctx, c, s)
		}
	}
	return errors.Join(err, os.RemoveAll(r.dataDir()))
}

// runOn runs a case on a server that is started for it, or kept from an earlier case of the round.
func (r *runner) runOn(ctx context.Context, c *benchCase, s *Sample) error {
	srv := r.kept[c.target]
	if p, ok := srv.(*peerServer); ok {
		p.signal(syscall.SIGCONT)
	}
	if srv == nil {
		var err error
		if srv, err = c.target.open(ctx, r, s); err != nil {
			return err
		}
		if c.target.slow {
			r.kept[c.target] = srv
		}
	}
	if c.target.slow {
		return c.load(ctx, r, s, srv)
	}
	defer srv.kill() // a no-op after close
	if err := c.load(ctx, r, s, srv); err != nil {
		return errors.Join(err, crashed(srv))
	}
	return srv.close(s)
}

// leave is called when another target's turn begins: a kept server of one node waits for its next case, a cluster, whose
// nodes would take a pause for failures of one another, ends.
func (r *runner) leave(t *target) error {
	srv, ok := r.kept[t].(*peerServer)
	if !ok {
		return nil
	}
	if t.nodes == 1 {
		srv.signal(syscall.SIGSTOP)
		return nil
	}
	delete(r.kept, t)
	return srv.close(nil)
}

// endKept ends the kept servers. Their data is thrown away, so how they end does not matter.
func (r *runner) endKept() {
	for t, srv := range r.kept {
		if p, ok := srv.(*peerServer); ok {
			p.signal(syscall.SIGCONT)
		}
		srv.kill()
		delete(r.kept, t)
	}
}

// crashed tells of brokers that ended by themselves.
func crashed(srv server) error {
	var errs []error
	for _, d := range srv.daemons() {
		errs = append(errs, d.Crashed())
	}
	return errors.Join(errs...)
}

func (r *runner) dataDir() string { return filepath.Join(r.dir, "data") }

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
