package bench

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/mortarmq/mortarmq/tests/harness"
)

// profiles are the files of one case's profiles.
type profiles struct {
	prefix string
	kinds  []string // those that were taken
	missed []string // those for which the load was too short
}

func (p *profiles) path(kind string) string { return p.prefix + "-" + kind + profileExt(kind) }

func profileExt(kind string) string {
	switch kind {
	case "metrics":
		return ".txt"
	case "trace":
		return ".trace"
	default:
		return ".pprof"
	}
}

// profiler fetches profiles of a broker while it is under load: a CPU profile for half of the time, block and mutex for a
// quarter, then a trace of a second, and what the heap holds at the end.
type profiler struct {
	d    *harness.Daemon
	list profiles
	stop func() (profiles, error)

	mu    sync.Mutex
	ended bool
}

// startProfiles begins profiles for a load that takes about d; the files' names start with prefix. The profiler's stop
// waits for what has begun; a nil one does nothing.
func startProfiles(b *harness.Daemon, prefix string, d time.Duration) *profiler {
	p := &profiler{d: b, list: profiles{prefix: prefix}}
	done := make(chan error, 1)
	go func() { done <- p.run(max(1, int(d.Seconds()/2)), max(1, int(d.Seconds()/4))) }()
	p.stop = sync.OnceValues(func() (profiles, error) {
		p.mu.Lock()
		p.ended = true
		p.mu.Unlock()
		err := <-done
		return p.list, err
	})
	return p
}

// profileTime is how long startProfiles needs load, for a load of about d.
func profileTime(d time.Duration) time.Duration {
	return time.Duration(max(1, int(d.Seconds()/2))+max(1, int(d.Seconds()/4))+2) * time.Second
}

// abandon waits for what has begun, for a run that has failed anyway.
func (p *profiler) abandon() {
	if p != nil {
		_, _ = p.stop()
	}
}

func (p *profiler) loadEnded() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ended
}

func (p *profiler) run(cpu, contention int) error {
	errs := []error{p.during(fmt.Sprintf("/debug/pprof/profile?seconds=%d", cpu), "cpu")}
	var wg sync.WaitGroup
	both := make([]error, 2)
	for i, kind := range []string{"mutex", "block"} {
		wg.Go(func() { both[i] = p.during(fmt.Sprintf("/debug/pprof/%s?seconds=%d", kind, contention), kind) })
	}
	wg.Wait()
	errs = append(errs, both...)
	errs = append(errs, p.during("/debug/pprof/trace?seconds=1", "trace"))
	for _, kind := range []string{"heap", "allocs", "goroutine"} {
		errs = append(errs, p.fetch("/debug/pprof/"+kind, kind))
	}
	return errors.Join(append(errs, p.fetch("/metrics", "metrics"))...)
}

// during takes a profile that needs load, unless that has ended.
func (p *profiler) during(path, kind string) error {
	if p.loadEnded() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.list.missed = append(p.list.missed, kind)
		return nil
	}
	return p.fetch(path, kind)
}

func (p *profiler) fetch(path, kind string) error {
	f, err := os.Create(p.list.path(kind))
	if err != nil {
		return err
	}
	if err := errors.Join(p.d.Fetch(path, f), f.Close()); err != nil {
		return fmt.Errorf("%s profile: %w", kind, err)
	}
	p.mu.Lock()
	p.list.kinds = append(p.list.kinds, kind)
	p.mu.Unlock()
	return nil
}

const (
	// summaryLines is how many functions a summary names per profile.
	summaryLines = 15
	summaryName  = "profiles.md"
)

// summarise writes, when nothing is measured any more, the stacks of every CPU, block and mutex profile in the folded form
// that flame graph tools read ("a;b;c value"), and profiles.md with the functions at the top. binary is the broker's.
func summarise(binary, out string, list []profiles) error {
	f, err := os.Create(filepath.Join(out, summaryName))
	if err != nil {
		return err
	}
	w := bufio.NewWriter(f)
	fmt.Fprintf(w, "# Profiles\n\nOpen one with `go tool pprof -http=: %s FILE`, a trace with `go tool trace FILE`; `.folded` files are stacks for flame graphs.\n", binary)
	for _, p := range list {
		fmt.Fprintf(w, "\n## %s\n", filepath.Base(p.prefix))
		if len(p.missed) > 0 {
			fmt.Fprintf(w, "\nToo short for: %s. Use a longer --duration or --journal-multiple.\n", strings.Join(p.missed, ", "))
		}
		for _, kind := range []string{"cpu", "allocs", "heap", "block", "mutex"} {
			if !slices.Contains(p.kinds, kind) {
				continue
			}
			err = cmp.Or(err, p.summary(w, binary, kind))
		}
	}
	return errors.Join(err, w.Flush(), f.Close())
}

func (p *profiles) summary(w io.Writer, binary, kind string) error {
	args := []string{"-traces"}
	switch kind {
	case "allocs":
		args = append(args, "-sample_index=alloc_objects")
	case "heap":
		args = append(args, "-sample_index=inuse_space")
	}
	text, err := pprof(append(args, binary, p.path(kind))...)
	if err != nil {
		return err
	}
	stacks, err := parseTraces(bytes.NewReader(text))
	if err != nil {
		return fmt.Errorf("%s: %w", p.path(kind), err)
	}
	var folded bytes.Buffer
	for _, s := range stacks {
		fmt.Fprintf(&folded, "%s %d\n", strings.Join(s.frames, ";"), int64(s.value))
	}
	if err := os.WriteFile(p.prefix+"-"+kind+".folded", folded.Bytes(), 0o644); err != nil {
		return err
	}
	writeTop(w, kind, stacks)
	return nil
}

func pprof(args ...string) ([]byte, error) {
	cmd := exec.Command("go", append([]string{"tool", "pprof", "-symbolize=none"}, args...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go tool pprof: %w: %s", err, stderr.Bytes())
	}
	return out, nil
}

// stack is one call stack with its value; the outermost frame comes first.
type stack struct {
	frames []string
	value  float64 // nanoseconds, objects or bytes
}

// parseTraces reads what `pprof -traces` prints: blocks divided by dashed lines, each a value and the innermost frame, then
// the callers. Labels may stand before ("key: value").
func parseTraces(r io.Reader) ([]stack, error) {
	var list []stack
	var cur *stack
	begun := false // the heading ends with the first divider
	in := bufio.NewScanner(r)
	in.Buffer(nil, 1<<20)
	for in.Scan() {
		line := in.Text()
		if strings.HasPrefix(line, "-----------+") {
			begun, cur = true, nil
			continue
		}
		f := strings.Fields(line)
		if !begun || len(f) == 0 {
			continue
		}
		if cur != nil {
			cur.frames = append(cur.frames, frameName(f))
			continue
		}
		v, err := parseValue(f[0])
		if err != nil {
			if strings.HasSuffix(f[0], ":") {
				continue
			}
			return nil, fmt.Errorf("pprof's traces have the line %q", line)
		}
		if len(f) < 2 {
			continue // a value without a stack
		}
		list = append(list, stack{value: v, frames: []string{frameName(f[1:])}})
		cur = &list[len(list)-1]
	}
	for _, s := range list {
		slices.Reverse(s.frames)
	}
	return list, in.Err()
}

// frameName joins a function's name, which may have blanks; inlined ones are marked so.
func frameName(f []string) string {
	return strings.TrimSuffix(strings.Join(f, " "), " (inline)")
}

// parseValue reads pprof's values: nanoseconds where there is a unit of time, bytes where there is one of memory, else the
// bare number.
func parseValue(s string) (float64, error) {
	if v, err := strconv.ParseFloat(s, 64); err == nil {
		return v, nil
	}
	for _, u := range []struct {
		unit   string
		factor float64
	}{{"kB", 1 << 10}, {"MB", 1 << 20}, {"GB", 1 << 30}, {"B", 1}, {"mins", 60e9}, {"hrs", 3600e9}, {"ns", 1}, {"us", 1e3}, {"ms", 1e6}, {"s", 1e9}} {
		if text, ok := strings.CutSuffix(s, u.unit); ok {
			v, err := strconv.ParseFloat(text, 64)
			return v * u.factor, err
		}
	}
	return 0, fmt.Errorf("%q is no value", s)
}

// writeTop names the functions that had the most of a profile: by themselves, and with everything that they called.
func writeTop(w io.Writer, kind string, stacks []stack) {
	flat, cum := map[string]float64{}, map[string]float64{}
	total := 0.0
	for _, s := range stacks {
		total += s.value
		flat[s.frames[len(s.frames)-1]] += s.value
		seen := map[string]bool{}
		for _, f := range s.frames {
			if !seen[f] { // recursion counts once
				seen[f] = true
				cum[f] += s.value
			}
		}
	}
	unit := time.Duration(total).Round(time.Millisecond).String()
	switch kind {
	case "heap":
		unit = fmt.Sprintf("%.1f MiB in use", total/(1<<20))
	case "allocs":
		unit = fmt.Sprintf("%.0f objects since the start", total)
	}
	fmt.Fprintf(w, "\n### %s: %s\n", kind, unit)
	if total == 0 {
		return
	}
	byFlat, byCum := largest(flat), largest(cum)
	fmt.Fprint(w, "\n| by itself | | with what it called | |\n|---|---|---|---|\n")
	for i := range min(summaryLines, len(byCum)) {
		a, b := "", byCum[i]
		av := ""
		if i < len(byFlat) {
			a, av = byFlat[i], percent(flat[byFlat[i]], total)
		}
		fmt.Fprintf(w, "| %s | %s | %s | %s |\n", a, av, b, percent(cum[b], total))
	}
}

func percent(v, total float64) string { return fmt.Sprintf("%.1f %%", 100*v/total) }

// largest returns the keys by falling value.
func largest(m map[string]float64) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b string) int { return cmp.Or(cmp.Compare(m[b], m[a]), cmp.Compare(a, b)) })
	return keys
}
