package bench

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/mortarmq/mortarmq/tests/harness"
)

// profiler fetches profiles of a broker while it is under load.
type profiler struct {
	d      *harness.Daemon
	prefix string
	cpu    chan error
}

// startProfiles begins a CPU profile of at most d; the files' names start with prefix.
func startProfiles(b *harness.Daemon, prefix string, d time.Duration) *profiler {
	p := &profiler{d: b, prefix: prefix, cpu: make(chan error, 1)}
	seconds := max(1, int(d.Seconds()))
	go func() { p.cpu <- p.fetch(fmt.Sprintf("/debug/pprof/profile?seconds=%d", seconds), "cpu") }()
	return p
}

// stop takes the other profiles, at the end of the load, and waits for the CPU profile. A nil profiler does nothing.
func (p *profiler) stop() error {
	if p == nil {
		return nil
	}
	var errs []error
	for _, kind := range []string{"heap", "allocs", "mutex", "block", "goroutine"} {
		errs = append(errs, p.fetch("/debug/pprof/"+kind, kind))
	}
	errs = append(errs, p.fetch("/metrics", "metrics"))
	return errors.Join(append(errs, <-p.cpu)...)
}

func (p *profiler) fetch(path, kind string) error {
	ext := ".pprof"
	if kind == "metrics" {
		ext = ".txt"
	}
	f, err := os.Create(p.prefix + "-" + kind + ext)
	if err != nil {
		return err
	}
	return errors.Join(p.d.Fetch(path, f), f.Close())
}
