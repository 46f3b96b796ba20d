package replica

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// The abstract simulator: three hosts that run the real Node and Log on abstract disks, over a network that loses, delays,
// repeats and reorders, with crashes, pauses, partitions, slow disks and drifting clocks. A round's content is one number.
// All chance comes from one seed.

// world is one simulated cluster.
type world struct {
	seed    uint64
	rng     *rand.Rand
	now     time.Duration
	events  eventHeap
	eventNo uint64
	hosts   []*host
	net     network
	opt     simOptions

	err   error
	trace []string // the last lines, or all
	all   bool

	committed [][]committedRound // per log, each round that any node ever knew as committed
	leaders   map[Epoch]NodeID   // who led in an epoch
	serials   uint64             // contents given out
	faulty    NodeID             // whose disk may
	theme     theme
	script    func(h *host)     // called when a node leads
	calm      bool              // no faults any more
	quiet     bool              // no writes any more
	seen      map[string]uint64 // how often something that a test wants to have happened did
}

// committedRound is what was committed at an index, under which leader's epoch first.
type committedRound struct {
	value uint64
	by    Epoch
}

type simOptions struct {
	nodes  int
	logs   int
	faults time.Duration // how long faults go on
	heal   time.Duration // how long the cluster may take to be well afterwards
	// probabilities
	loss, dup, slow float64
	pause           float64 // that the process is stopped at some place in a step
	collide         bool    // elections begin at the same moment
	churn           bool    // short leases, slow connections and disks, no leader lasts
	lag             time.Duration
	tail            Index // committed rounds that stay in memory
	// how likely something goes wrong right after an election, while a follower catches up, while a candidate fetches
	onLead, onCatchup, onFetch float64
}

type event struct {
	at  time.Duration
	no  uint64
	run func()
}

type eventHeap []event

func (h eventHeap) Len() int { return len(h) }
func (h eventHeap) Less(i, j int) bool {
	return h[i].at < h[j].at || h[i].at == h[j].at && h[i].no < h[j].no
}
func (h eventHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *eventHeap) Push(x any)   { *h = append(*h, x.(event)) }
func (h *eventHeap) Pop() any {
	old := *h
	e := old[len(old)-1]
	old[len(old)-1] = event{}
	*h = old[:len(old)-1]
	return e
}

func newWorld(seed uint64, opt simOptions) *world {
	w := &world{seed: seed, rng: rand.New(rand.NewPCG(seed, 0x6d6f72746172)), opt: opt, leaders: map[Epoch]NodeID{}, seen: map[string]uint64{}}
	w.committed = make([][]committedRound, opt.logs)
	w.net = network{w: w, cut: make([][]bool, opt.nodes), mute: make([][]bool, opt.nodes), jam: make([][]bool, opt.nodes), last: make([][]time.Duration, opt.nodes)}
	for i := range opt.nodes {
		w.net.cut[i], w.net.mute[i], w.net.jam[i] = make([]bool, opt.nodes), make([]bool, opt.nodes), make([]bool, opt.nodes)
		w.net.last[i] = make([]time.Duration, opt.nodes)
		w.hosts = append(w.hosts, newHost(w, NodeID(i+1)))
	}
	return w
}

// at runs f at a time; events of one time run in the order in which they were made.
func (w *world) at(t time.Duration, f func()) {
	w.eventNo++
	heap.Push(&w.events, event{at: max(t, w.now), no: w.eventNo, run: f})
}

func (w *world) after(d time.Duration, f func()) { w.at(w.now+d, f) }

// step runs the next event.
func (w *world) step() bool {
	if w.err != nil || len(w.events) == 0 {
		return false
	}
	e := heap.Pop(&w.events).(event)
	w.now = e.at
	e.run()
	w.checkServing()
	return w.err == nil
}

// runUntil runs all events up to t.
func (w *world) runUntil(t time.Duration) {
	for w.err == nil && len(w.events) > 0 && w.events[0].at <= t {
		w.step()
	}
	w.now = max(w.now, t)
}

func (w *world) fail(format string, args ...any) {
	if w.err == nil {
		w.err = fmt.Errorf("at %v: "+format, append([]any{w.now}, args...)...)
		w.logf("FAILED: %v", w.err)
	}
}

// logf adds a line to the trace.
func (w *world) logf(format string, args ...any) {
	if !w.all && len(w.trace) > 0 && w.err == nil {
		return // traces are made by a second run
	}
	w.trace = append(w.trace, fmt.Sprintf("%12v ", w.now)+fmt.Sprintf(format, args...))
}

func (w *world) tail(n int) string {
	return strings.Join(w.trace[max(0, len(w.trace)-n):], "\n")
}

func (w *world) chance(p float64) bool { return p > 0 && w.rng.Float64() < p }

// between returns a random duration of [a, b).
func (w *world) between(a, b time.Duration) time.Duration {
	return a + time.Duration(w.rng.Int64N(int64(b-a)))
}

func (w *world) saw(what string) { w.seen[what]++ }

// network delivers messages between hosts.
type network struct {
	w    *world
	cut  [][]bool          // [from][to]
	mute [][]bool          // as cut, but rounds go through
	jam  [][]bool          // as cut, for rounds only
	last [][]time.Duration // when the newest frame of a stream arrives
}

// send delivers f to a host later, perhaps twice, perhaps never.
func (n *network) send(from, to NodeID, f func(h *host)) {
	w := n.w
	if n.cut[from-1][to-1] || n.mute[from-1][to-1] || w.chance(w.opt.loss) {
		return
	}
	times := 1
	if w.chance(w.opt.dup) {
		times = 2
	}
	for range times {
		d := w.between(100*time.Microsecond, 2*time.Millisecond)
		if w.chance(w.opt.slow) {
			d = w.between(0, 1500*time.Millisecond)
		}
		h := w.hosts[to-1]
		w.after(d, func() { h.arrive(func() { f(h) }) })
	}
}

// stream delivers as a connection does, in order for the most part: what is lost or late is so because of a reconnection.
func (n *network) stream(from, to NodeID, f func(h *host)) {
	w := n.w
	if n.cut[from-1][to-1] || n.jam[from-1][to-1] || w.chance(w.opt.loss/4) {
		return
	}
	h, last := w.hosts[to-1], &n.last[from-1][to-1]
	*last = max(*last, w.now+w.between(50*time.Microsecond, time.Millisecond+w.opt.lag))
	w.at(*last, func() { h.arrive(func() { f(h) }) })
	if w.chance(w.opt.dup + w.opt.slow/4) {
		w.after(w.between(0, 1500*time.Millisecond), func() { h.arrive(func() { f(h) }) })
	}
}

func (n *network) heal() {
	for i := range n.cut {
		for k := range n.cut[i] {
			n.cut[i][k], n.mute[i][k], n.jam[i][k] = false, false, false
		}
	}
}
