package replica

import (
	"fmt"
	"slices"
	"time"
)

// host is what package engine is to this one: it carries out a Node's outputs on Logs, a disk and a network.
type host struct {
	w  *world
	id NodeID

	boot        int
	alive       bool
	pausedUntil time.Duration
	rate        float64 // of its clock
	offset      time.Duration

	disk disk
	lost [][]diskLog // what the disk had whenever it lost something

	// Lost in a crash.
	node     *Node
	logs     []*simLog
	outputs  []Output // taken, not carried out yet
	carrying bool
	tickAt   time.Duration
	queues   []time.Duration // per log, and last the control goroutine's: when the newest command is carried out
	states   []Persist       // being written
	diskAt   time.Duration   // the disk is busy with rounds until then
	stateAt  time.Duration   // and with states
	instance Instance
	voter    bool
	leader   NodeID // followed last: FLUSHED goes there
	epoch    Epoch  // followed
	fetches  int
	catching []int // per log the attempt to catch up that runs, 0 if none does
	// given are the logs that may have given up rounds for it.
	given []bool
	// fenced is the highest epoch that the logs were fenced at.
	fenced  Epoch
	catches int
	stalled bool
}

// disk survives crashes.
type disk struct {
	state Persistent
	logs  []diskLog
	// slow multiplies its times, hungUntil stops it.
	slow                time.Duration
	hungFrom, hungUntil time.Duration
}

// diskLog is a journal and what was checkpointed before it.
type diskLog struct {
	base    Point // committed, in the store
	floor   Point // committed somewhere: a catch-up has begun
	rounds  []simRound
	durable int // of rounds
	covered int // of rounds, by base
}

// simRound is a round as it lies in a journal.
type simRound struct {
	point, prev Point
	value       uint64
	commit      Index
	at          int // where it lies in this node's journal
}

func newHost(w *world, id NodeID) *host {
	h := &host{w: w, id: id, rate: 1}
	h.disk.slow = 1
	return h
}

// clock is the host's monotonic clock.
func (h *host) clock() time.Duration { return h.clockAt(h.w.now) }

func (h *host) clockAt(t time.Duration) time.Duration {
	return h.offset + time.Duration(float64(t)*h.rate)
}

// when returns the world's time at which the host's clock shows c.
func (h *host) when(c time.Duration) time.Duration {
	return time.Duration(float64(c-h.offset)/h.rate) + 1
}

func (h *host) running() bool { return h.alive && h.w.now >= h.pausedUntil }

// at runs f on this host at a time, later while it is paused, never after a crash.
func (h *host) at(t time.Duration, f func()) {
	boot := h.boot
	var run func()
	run = func() {
		switch {
		case !h.alive || h.boot != boot:
		case h.w.now < h.pausedUntil:
			h.w.at(h.pausedUntil, run)
		default:
			f()
		}
	}
	h.w.at(t, run)
}

func (h *host) after(d time.Duration, f func()) { h.at(h.w.now+d, f) }

// arrive runs f as soon as the host can, for something that came from outside and is lost if it is down.
func (h *host) arrive(f func()) {
	if h.alive {
		h.after(0, f)
	}
}

// queue runs f on a log's goroutine, or the control one's for k = len(logs), after what was queued there before.
func (h *host) queue(k int, f func()) {
	t := h.w.now + h.w.between(0, 300*time.Microsecond)
	h.queues[k] = max(h.queues[k], t)
	h.at(h.queues[k], f)
}

// input runs an input of the Node at the present time and carries out what it wants. The process may be stopped anywhere
// between: after the clock was read, and between any two outputs.
func (h *host) input(f func(now time.Duration)) {
	now := h.clock()
	if h.w.pauses(h) {
		h.after(0, func() { f(now); h.carry() })
		return
	}
	f(now)
	h.carry()
}

func (h *host) carry() {
	h.outputs = append(h.outputs, h.node.Take()...)
	if h.carrying {
		return
	}
	h.carrying = true
	for len(h.outputs) > 0 {
		if h.w.pauses(h) {
			h.after(0, func() { h.carrying = false; h.carry() })
			return
		}
		o := h.outputs[0]
		h.outputs = h.outputs[1:]
		h.do(o)
	}
	h.carrying = false
	h.schedule()
}

// schedule makes sure that the Node is ticked when it wants to be.
func (h *host) schedule() {
	at := max(h.when(h.node.Deadline()), h.w.now+time.Microsecond)
	if h.tickAt > h.w.now && h.tickAt <= at {
		return
	}
	h.tickAt = at
	h.at(at, func() {
		if h.tickAt != at {
			return
		}
		h.tickAt = 0
		h.input(h.node.Tick)
	})
}

// diskTime returns when something written now is durable, behind what is on its way in the same file.
func (h *host) diskTime(busy *time.Duration) time.Duration {
	*busy = max(*busy, h.w.now) + h.w.between(50*time.Microsecond, 800*time.Microsecond)*h.disk.slow
	if h.disk.hungUntil > h.w.now {
		*busy = max(*busy, h.disk.hungUntil)
	}
	return *busy
}

func (h *host) do(o Output) {
	w := h.w
	if _, quiet := o.(LeaderCommits); !quiet {
		if m, is := o.(SendMessage); !is || w.all {
			w.logf("%d: %T%+v %v", h.id, o, o, m.Message.Kind)
		}
	}
	switch o := o.(type) {
	case SendMessage:
		from := h.id
		if o.Message.Kind == KindHeartbeat && w.theme == stopped && !w.calm && w.chance(0.01) {
			w.after(0, func() { w.pausesLong(h) }) // with the answers waiting for it
		}
		w.net.send(h.id, o.To, func(to *host) {
			to.input(func(now time.Duration) {
				w.logf("%d: <- %d %v %+v", to.id, from, o.Message.Kind, o.Message)
				to.node.Receive(now, from, o.Message)
			})
		})
	case Persist:
		h.states = append(h.states, o)
		h.at(h.diskTime(&h.stateAt), func() {
			for len(h.states) > 0 && h.states[0].Token <= o.Token {
				h.disk.state = h.states[0].State
				h.states = h.states[1:]
			}
			h.input(func(now time.Duration) { h.node.Persisted(now, o.Token) })
		})
	case FormedCluster:
		h.openLogs(int(o.Logs))
	case FenceLogs:
		h.fence(o.Epoch)
	case FollowLeader:
		h.leader, h.epoch, h.instance, h.voter = o.Leader, o.Epoch, o.Instance, o.Voter
		for k := range h.logs {
			h.queue(k, func() {
				l := h.logs[k]
				if err := l.log.Follow(o.Epoch); err != nil {
					// A higher epoch was promised since.
					if l.log.fence <= o.Epoch {
						w.fail("node %d log %d: %v", h.id, l.k, err)
					}
					return
				}
				l.acknowledge()
				l.moved()
			})
		}
	case LeaderCommits:
		for k, c := range o.Commits {
			h.queue(k, func() { h.logs[k].log.LeaderCommit(o.Epoch, c); h.logs[k].moved() })
		}
	case FetchLog:
		h.fetch(o)
	case Lead:
		h.lead(o.Epoch)
		w.onLead(h)
	case PeerJoined:
		for k, l := range h.logs {
			h.queue(k, func() {
				if err := l.log.Join(o.Peer, o.Epoch, o.Instance, o.Voter, o.Ends[k]); err != nil {
					if l.log.Epoch() == o.Epoch && l.log.Leading() {
						w.fail("node %d log %d: %v", h.id, k, err)
					}
					return
				}
				l.behind[o.Peer-1] = 0
				l.pump()
				l.moved()
			})
		}
	case PeerLeft:
		for k, l := range h.logs {
			h.queue(k, func() { l.log.Left(o.Peer) })
		}
	case ProbeLogs:
		h.probe(o.Epoch)
	case StartCatchup:
		w.saw("catch-up")
		h.catchUp(o)
		w.onCatchup(h, o.Leader)
	case SetQuorum, Serve, StopServing, LeaderLost:
	case Event:
		w.saw(o.What.String())
		if o.What == EventTwoLeaders {
			w.fail("node %d sees two leaders in epoch %d", h.id, o.Epoch)
		}
	default:
		panic(fmt.Sprintf("%T", o))
	}
}

// fence fences all logs on their goroutines and reports when the last one is.
func (h *host) fence(epoch Epoch) {
	if h.logs == nil {
		h.w.fail("node %d: fence without logs", h.id)
		return
	}
	ends, left := make([]End, len(h.logs)), len(h.logs)
	for k := range h.logs {
		resume := !h.given[k] && epoch > h.fenced
		if resume {
			h.catching[k] = 0
		}
		h.queue(k, func() {
			ends[k] = h.logs[k].log.Fence(epoch)
			if resume {
				h.logs[k].log.Resume()
			}
			if left--; left == 0 {
				h.queue(len(h.logs), func() {
					h.input(func(now time.Duration) { h.node.Fenced(now, epoch, ends) })
				})
			}
		})
	}
	h.fenced = max(h.fenced, epoch)
}

func (h *host) lead(epoch Epoch) {
	if who, taken := h.w.leaders[epoch]; taken && who != h.id {
		h.w.fail("nodes %d and %d both lead epoch %d", who, h.id, epoch)
	}
	h.w.leaders[epoch] = h.id
	for k, l := range h.logs {
		h.queue(k, func() {
			if l.log.fence > epoch {
				return
			}
			l.checkComplete(epoch)
			if err := l.log.Lead(epoch); err != nil {
				h.w.fail("node %d log %d: %v", h.id, k, err)
				return
			}
			l.seal()
			l.moved()
		})
	}
	h.openWhenCommitted(epoch)
}

// openWhenCommitted calls Opened when all opening rounds are committed.
func (h *host) openWhenCommitted(epoch Epoch) {
	h.after(5*time.Millisecond, func() {
		for _, l := range h.logs {
			if l.log.fence > epoch {
				return
			}
			if !l.log.Leading() || l.applied < l.log.Opening() {
				h.openWhenCommitted(epoch)
				return
			}
		}
		h.input(func(now time.Duration) { h.node.Opened(now, epoch) })
	})
}

func (h *host) probe(epoch Epoch) {
	lasts, left := make([]Index, len(h.logs)), len(h.logs)
	for k, l := range h.logs {
		h.queue(k, func() {
			if l.log.Epoch() != epoch || !l.log.Leading() {
				return
			}
			l.seal()
			lasts[k] = l.log.Last().Index
			if left--; left == 0 {
				h.queue(len(h.logs), func() {
					h.input(func(now time.Duration) { h.node.Probed(now, epoch, lasts) })
				})
			}
		})
	}
}

// openLogs recovers the logs from the disk.
func (h *host) openLogs(n int) {
	for len(h.disk.logs) < n {
		h.disk.logs = append(h.disk.logs, diskLog{})
	}
	h.logs = h.logs[:0:0]
	h.queues = make([]time.Duration, n+1)
	for k := range n {
		h.logs = append(h.logs, h.recoverLog(k))
	}
}

// recoverLog is the gate: a round replaces those of the same index and above, and what is committed is handed over.
func (h *host) recoverLog(k int) *simLog {
	d := &h.disk.logs[k]
	var kept []simRound
	commit := d.base.Index
	for i, r := range d.rounds {
		if i < d.covered {
			continue
		}
		r.at = i
		for len(kept) > 0 && kept[len(kept)-1].point.Index >= r.point.Index {
			kept = kept[:len(kept)-1]
		}
		if want := d.base.Index + Index(len(kept)) + 1; r.point.Index != want {
			h.w.fail("node %d log %d: round %v in the journal where %d is next", h.id, k, r.point, want)
		}
		kept = append(kept, r)
		commit = max(commit, r.commit)
	}
	commit = min(commit, d.base.Index+Index(len(kept)))
	committed := d.base
	var pending []Point
	for _, r := range kept {
		if r.point.Index <= commit {
			committed = r.point
		} else {
			pending = append(pending, r.point)
		}
	}
	log, err := NewLog(h.id, h.nodes(), committed, pending)
	if err != nil {
		h.w.fail("node %d log %d: %v", h.id, k, err)
		log, _ = NewLog(h.id, h.nodes(), Point{}, nil)
	}
	log.SetFloor(d.floor)
	l := &simLog{h: h, k: k, log: log, rounds: kept, first: len(d.rounds), retain: d.base.Index + 1, applied: d.base.Index,
		stalls: make([]Index, h.w.opt.nodes), stallAt: make([]time.Duration, h.w.opt.nodes), behind: make([]time.Duration, h.w.opt.nodes)}
	if h.w.chance(0.5) { // as a broker whose memory has pending rounds only
		l.retain = committed.Index + 1
	}
	l.apply(committed.Index)
	return l
}

func (h *host) nodes() []NodeID {
	ids := make([]NodeID, h.w.opt.nodes)
	for i := range ids {
		ids[i] = NodeID(i + 1)
	}
	return ids
}

// churnLease is the lease where no leader lasts.
const churnLease = 300 * time.Millisecond

// start boots the host from its disk.
func (h *host) start() {
	h.boot++
	h.alive, h.pausedUntil = true, 0
	h.rate = 0.96 + 0.08*h.w.rng.Float64()
	h.offset = h.w.between(0, time.Hour)
	h.outputs, h.carrying, h.states, h.tickAt, h.diskAt, h.stateAt = nil, false, nil, 0, 0, 0
	h.logs, h.leader, h.epoch, h.instance, h.voter, h.catching, h.stalled = nil, 0, 0, 0, false, nil, false
	h.fenced = 0
	h.catching, h.given = make([]int, h.w.opt.logs), make([]bool, h.w.opt.logs)
	h.queues = make([]time.Duration, 1)
	s := h.disk.state
	if s.Cluster != (ClusterID{}) && !s.Forming {
		h.openLogs(int(s.Logs))
	}
	rng := h.w.rng
	rand := rng.Uint64
	if h.w.opt.collide {
		// Delays of no length: elections begin at the same moment.
		rand = func() uint64 {
			if h.w.chance(0.7) {
				return 0
			}
			return rng.Uint64()
		}
	}
	cfg := Config{Self: h.id, Nodes: h.nodes(), Rank: int(h.id) - 1, Logs: h.w.opt.logs, Rand: rand}
	if h.w.opt.churn {
		cfg.Heartbeat, cfg.Lease = 50*time.Millisecond, churnLease
	}
	node, err := New(cfg, s, h.clock())
	if err != nil {
		h.w.fail("node %d: %v", h.id, err)
		return
	}
	h.node = node
	h.w.logf("%d: starts with %+v", h.id, s)
	h.carry()
	h.housekeeping()
}

// crash ends the process: what was not durable may or may not be.
func (h *host) crash() {
	if !h.alive {
		return
	}
	h.alive = false
	for _, p := range h.states {
		if h.w.chance(0.5) {
			break
		}
		h.disk.state = p.State
	}
	for k := range h.disk.logs {
		d := &h.disk.logs[k]
		if lost := len(d.rounds) - d.durable; lost > 0 {
			d.rounds = d.rounds[:d.durable+h.w.rng.IntN(lost+1)]
		}
		d.durable = len(d.rounds)
	}
	h.w.logf("%d: crashed, keeps %+v", h.id, h.disk.state)
}

// rot takes durable rounds from the end of a crashed node's logs; the node notices.
func (h *host) rot() {
	h.remember()
	found := false
	for k := range h.disk.logs {
		d := &h.disk.logs[k]
		if n := len(d.rounds); n > 0 && h.w.chance(0.7) {
			cut := 1 + h.w.rng.IntN(min(n, 5))
			d.rounds = d.rounds[:n-cut]
			d.durable = len(d.rounds)
			d.covered = min(d.covered, d.durable)
			found = true
		}
	}
	if found && h.disk.state.Cluster != (ClusterID{}) {
		h.disk.state.Suspect = true
		h.w.saw("suspect")
		h.w.logf("%d: rots", h.id)
	}
}

// remember notes what the disk has before it loses something, while that counts.
func (h *host) remember() {
	if s := &h.disk.state; s.Learner || s.Suspect {
		return
	}
	was := make([]diskLog, len(h.disk.logs))
	for k, d := range h.disk.logs {
		was[k] = diskLog{base: d.base, rounds: slices.Clone(d.rounds), durable: d.durable}
	}
	h.lost = append(h.lost, was)
}

// wipe empties a crashed node's disk.
func (h *host) wipe() {
	h.remember()
	h.disk = disk{slow: 1}
	h.w.saw("wiped")
	h.w.logf("%d: wiped", h.id)
}

// housekeeping is what hosts do by time: resending, telling followers that they are behind, checkpoints.
func (h *host) housekeeping() {
	h.after(150*time.Millisecond, func() {
		for _, l := range h.logs {
			l.housekeeping()
		}
		stalled := h.disk.hungUntil > h.w.now && h.w.now > h.disk.hungFrom+2*time.Second
		if stalled != h.stalled {
			h.stalled = stalled
			h.input(func(now time.Duration) { h.node.DiskStalled(now, stalled) })
		}
		h.housekeeping()
	})
}

// reopen recovers one log again, as it was fenced and followed.
func (h *host) reopen(k int) {
	old := h.logs[k].log
	d := &h.disk.logs[k]
	d.rounds = d.rounds[:d.durable]
	l := h.recoverLog(k)
	l.log.Fence(old.fence)
	if old.epoch != 0 && !old.leading {
		_ = l.log.Follow(old.epoch)
	}
	h.logs[k] = l
	l.moved()
}
