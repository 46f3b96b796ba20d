package replica

import "time"

// checkServing is lease exclusivity: never may two nodes serve, whatever their clocks say.
func (w *world) checkServing() {
	var first *host
	for _, h := range w.hosts {
		if !h.running() || h.node == nil || !h.node.Serving(h.clock()) {
			continue
		}
		if first != nil {
			w.fail("nodes %d (epoch %d) and %d (epoch %d) both serve", first.id, first.node.state.Promised, h.id, h.node.state.Promised)
			return
		}
		first = h
	}
}

// holds reports whether a log on a disk has a round for good.
func (d *diskLog) holds(p Point) bool {
	if p.Index <= d.base.Index {
		return true
	}
	for i := d.durable - 1; i >= 0; i-- {
		if q := d.rounds[i].point; q.Index <= p.Index {
			return q == p // below it: the round was replaced
		}
	}
	return false
}

// checkFlushed is that a round is visible only when a majority of nodes that count has flushed it. What a disk lost counts:
// it was flushed.
func (w *world) checkFlushed(l *simLog, r *simRound) {
	n := 0
	for _, h := range w.hosts {
		s := &h.disk.state
		held := l.k < len(h.disk.logs) && h.disk.logs[l.k].holds(r.point) && !s.Learner && !s.Suspect
		for _, was := range h.lost {
			held = held || l.k < len(was) && was[l.k].holds(r.point)
		}
		if held {
			n++
		}
	}
	if n < majority(w.opt.nodes) {
		w.fail("node %d log %d: round %v is committed and on %d disks that count", l.h.id, l.k, r.point, n)
	}
}

// checkComplete is that a node that begins to lead has everything that was committed in lower epochs. It may do so late, when
// there is a leader in a higher one.
func (l *simLog) checkComplete(epoch Epoch) {
	for k, c := range l.h.w.committed[l.k] {
		i := Index(k + 1)
		if c.by >= epoch || i <= l.applied {
			continue
		}
		if r := l.round(i); r == nil || r.value != c.value {
			l.h.w.fail("node %d log %d: leads epoch %d, ends with %v, and has not round %d, committed in epoch %d", l.h.id, l.k, epoch, l.log.Last(), i, c.by)
			return
		}
	}
}

// healthy reports whether all nodes agree and count, and why not.
func (w *world) healthy() (string, bool) {
	var lead *host
	for _, h := range w.hosts {
		switch {
		case !h.running():
			return "a node is down", false
		case h.node.Standing() != Voter || h.logs == nil:
			return "a node is no voter", false
		case h.node.Serving(h.clock()):
			lead = h
		}
	}
	if lead == nil {
		return "nobody serves", false
	}
	if lead.node.quorum.State != Healthy {
		return "the quorum state is not healthy", false
	}
	for k := range w.committed {
		all := Index(len(w.committed[k]))
		for _, h := range w.hosts {
			if l := h.logs[k]; l.applied != all || l.log.Last() != lead.logs[k].log.Last() || l.log.Last().Index != all {
				return "logs differ", false
			}
		}
	}
	return "", true
}

// converge lets the cluster come to rest after the faults.
func (w *world) converge() {
	w.net.heal()
	w.calm = true
	w.opt.loss, w.opt.dup, w.opt.slow = 0.005, 0.005, 0
	for _, h := range w.hosts {
		h.disk.slow, h.disk.hungUntil = 1, 0
		h.diskAt, h.stateAt = min(h.diskAt, w.now), min(h.stateAt, w.now)
		h.pausedUntil = min(h.pausedUntil, w.now)
		if h.alive && h.node.failed || h.node != nil && h.node.resigned {
			h.crash()
		}
		if !h.alive {
			h.start()
		}
	}
	w.logf("faults end")
	from, end := make([]int, len(w.committed)), w.now+w.opt.heal
	for k := range from {
		from[k] = len(w.committed[k])
	}
	why := ""
	for w.err == nil && w.now < end {
		w.runUntil(w.now + 50*time.Millisecond)
		more := true
		for k := range from {
			more = more && len(w.committed[k]) >= from[k]+5
		}
		w.quiet = more
		var ok bool
		if why, ok = w.healthy(); ok && more {
			return
		}
	}
	if w.err == nil {
		w.fail("the cluster does not come to rest: %s", why)
		for _, h := range w.hosts {
			w.logf("%d: alive %t role %v leader %d standing %v state %+v", h.id, h.alive, h.node.Role(), h.node.leader, h.node.status, h.node.state)
			for _, l := range h.logs {
				w.logf("   log %d: last %v flushed %d commit %d applied %d epoch %d leading %t peers %+v", l.k, l.log.Last(), l.log.flushed, l.log.commit, l.applied, l.log.epoch, l.log.leading, l.log.peers)
			}
		}
	}
}
