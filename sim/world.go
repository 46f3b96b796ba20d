package sim

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// world is the simulated time, and everything that happens in it.
type world struct {
	seed   uint64
	logs   int // of each node
	rng    *rand.Rand
	now    time.Duration
	events eventHeap
	order  uint64
	hosts  []*host
	net    *network
	trace  []string
	failed string
	// moments is a checksum of when anything happened.
	moments uint64
	// seen counts the faults and situations that occurred.
	seen map[string]int
	// vouched is nil where nothing is compared with the disks, see vouch.go.
	vouched *vouching
}

// event is something that happens at a time.
type event struct {
	at    time.Duration
	order uint64
	do    func()
}

// eventHeap has the events with the next one first.
type eventHeap []event

func (e *event) before(o *event) bool {
	if e.at != o.at {
		return e.at < o.at
	}
	return e.order < o.order
}

func (h *eventHeap) push(e event) {
	list := append(*h, e)
	*h = list
	for i := len(list) - 1; i > 0; {
		up := (i - 1) / 2
		if !list[i].before(&list[up]) {
			return
		}
		list[i], list[up] = list[up], list[i]
		i = up
	}
}

func (h *eventHeap) pop() event {
	list := *h
	first, end := list[0], len(list)-1
	list[0], list[end] = list[end], event{}
	list = list[:end]
	*h = list
	for i := 0; ; {
		next := 2*i + 1
		if next+1 < end && list[next+1].before(&list[next]) {
			next++
		}
		if next >= end || !list[next].before(&list[i]) {
			return first
		}
		list[i], list[next] = list[next], list[i]
		i = next
	}
}

// after has do called once that time has passed.
func (w *world) after(d time.Duration, do func()) {
	w.order++
	w.events.push(event{w.now + max(d, 0), w.order, do})
}

// maxTrace bounds the lines that are kept for a failure.
const maxTrace = 20000

// note adds a line to the trace.
func (w *world) note(format string, args ...any) {
	if len(w.trace) < maxTrace {
		w.trace = append(w.trace, fmt.Sprintf("%12v ", w.now)+fmt.Sprintf(format, args...))
	}
}

// count notes that a fault or a situation occurred.
func (w *world) count(what string) { w.seen[what]++ }

// fail ends the run: an invariant is broken.
func (w *world) fail(format string, args ...any) {
	if w.failed == "" {
		w.failed = fmt.Sprintf(format, args...)
		w.note("FAILED: %s", w.failed)
	}
}

// maxTurns bounds what a node does at one moment: beyond it, it spins.
const maxTurns = 20000

// maxSteps is how many steps a second takes at most; with more, something spins.
const maxSteps = 200000

// run lets time pass until the given moment, or until stop returns true.
func (w *world) run(until time.Duration, stop func() bool) {
	steps, mark := 0, w.now
	for w.failed == "" && (stop == nil || !stop()) {
		if steps++; steps >= maxSteps {
			if w.now-mark < time.Second {
				w.fail("%d steps took only %v", steps, w.now-mark)
			}
			steps, mark = 0, w.now
		}
		next := until
		for _, h := range w.hosts {
			h.wakes = h.due()
			next = min(next, h.wakes)
		}
		if len(w.events) > 0 {
			next = min(next, w.events[0].at)
		}
		w.now = max(w.now, next)
		w.moment()
		for len(w.events) > 0 && w.events[0].at <= w.now && w.failed == "" {
			w.events.pop().do()
		}
		for _, h := range w.hosts {
			if min(h.wakes, h.next) <= w.now {
				h.step()
			}
		}
		if w.now >= until {
			return
		}
	}
}

// chance draws whether something with that probability happens.
func (w *world) chance(p float64) bool { return w.rng.Float64() < p }

// between draws a time.
func (w *world) between(lo, hi time.Duration) time.Duration {
	return lo + time.Duration(w.rng.Int64N(int64(hi-lo)+1))
}

func (w *world) report() string {
	return fmt.Sprintf("seed %d: %s\n%s", w.seed, w.failed, strings.Join(w.trace, "\n"))
}
