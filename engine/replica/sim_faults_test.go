package replica

import "time"

// pauses decides whether the process is stopped right here.
func (w *world) pauses(h *host) bool {
	if w.calm || !w.chance(0.0004) {
		return false
	}
	h.pausedUntil = w.now + w.between(200*time.Millisecond, 3*time.Second)
	w.saw("paused in a step")
	w.logf("%d: stopped in the middle of a step", h.id)
	return true
}

// clients make whoever serves write.
func (w *world) clients() {
	w.after(w.between(2*time.Millisecond, 60*time.Millisecond), func() {
		if !w.quiet {
			for _, h := range w.hosts {
				if !h.running() || h.logs == nil {
					continue
				}
				if !h.node.Serving(h.clock()) && !w.chance(0.2) {
					continue // what was under way when serving ended may still be sealed
				}
				l := h.logs[w.rng.IntN(len(h.logs))]
				for range 1 + w.rng.IntN(3) {
					h.queue(l.k, func() {
						if l.log.Leading() && l.log.Last().Index < l.log.Commit()+50 {
							l.seal()
							l.moved()
						}
					})
				}
			}
		}
		w.clients()
	})
}

// mischief lets something go wrong now and then.
func (w *world) mischief() {
	w.after(w.between(20*time.Millisecond, 900*time.Millisecond), func() {
		if w.calm {
			return
		}
		w.fault()
		w.mischief()
	})
}

func (w *world) fault() {
	h := w.hosts[w.rng.IntN(len(w.hosts))]
	switch w.rng.IntN(24) {
	case 0, 1, 2:
		w.crashed(h, w.between(10*time.Millisecond, 2500*time.Millisecond))
	case 3: // the power fails everywhere
		w.saw("power failure")
		for _, h := range w.hosts {
			w.crashed(h, w.between(10*time.Millisecond, 600*time.Millisecond))
		}
	case 4, 5:
		w.saw("paused")
		h.pausedUntil = w.now + w.between(200*time.Millisecond, 4*time.Second)
		w.logf("%d: paused until %v", h.id, h.pausedUntil)
	case 6, 7:
		w.saw("one-way cut")
		to := w.rng.IntN(len(w.hosts))
		w.cut(int(h.id)-1, to)
	case 8, 9:
		w.isolate(h)
	case 16, 17: // no heartbeat gets through, but rounds do
		w.saw("mute")
		for i := range w.hosts {
			w.net.mute[h.id-1][i] = true
			w.after(w.between(500*time.Millisecond, 3*time.Second), func() { w.net.mute[h.id-1][i] = false })
		}
	case 10, 11:
		w.net.heal()
	case 12:
		w.saw("slow disk")
		h.disk.slow = time.Duration(1 + w.rng.IntN(40))
	case 13:
		w.saw("hanging disk")
		h.disk.hungFrom, h.disk.hungUntil = w.now, w.now+w.between(100*time.Millisecond, 6*time.Second)
	case 22, 23:
		w.trap(h)
	case 20, 21: // heartbeats get through, but no rounds
		w.jamFor(h, w.between(500*time.Millisecond, 5*time.Second))
	case 18, 19:
		if 0 < w.faulty && int(w.faulty) <= len(w.hosts) {
			w.rotWhileAlone()
		}
	case 14:
		if h.running() && h.node != nil {
			w.saw("disk failed")
			h.input(h.node.DiskFailed)
			w.after(w.between(10*time.Millisecond, time.Second), func() { w.crashed(h, w.between(10*time.Millisecond, time.Second)) })
		}
	case 15:
		if h.running() && h.node != nil {
			w.saw("resigned")
			h.input(h.node.Resign)
			w.after(w.between(10*time.Millisecond, 300*time.Millisecond), func() { w.crashed(h, w.between(10*time.Millisecond, time.Second)) })
		}
	}
}

func (w *world) isolate(h *host) {
	w.saw("isolated")
	for i := range w.hosts {
		w.cut(int(h.id)-1, i)
		w.cut(i, int(h.id)-1)
	}
}

// onLead strikes when a node has just been elected.
func (w *world) onLead(h *host) {
	if w.calm || !w.chance(w.opt.onLead) {
		return
	}
	w.after(w.between(0, 40*time.Millisecond), func() {
		switch w.rng.IntN(5) {
		case 0:
			w.isolate(h)
		case 1:
			w.crashed(h, w.between(50*time.Millisecond, 2*time.Second))
			w.crashed(w.hosts[w.rng.IntN(len(w.hosts))], w.between(10*time.Millisecond, 200*time.Millisecond))
		case 2:
			for _, h := range w.hosts {
				w.crashed(h, w.between(10*time.Millisecond, 600*time.Millisecond))
			}
		default:
			w.crashed(h, w.between(10*time.Millisecond, 2*time.Second))
		}
	})
}

// onCatchup strikes when a follower begins to catch up.
func (w *world) onCatchup(h *host, leader NodeID) {
	if w.calm || !w.chance(w.opt.onCatchup) {
		return
	}
	w.after(w.between(0, 300*time.Millisecond), func() {
		if w.chance(0.5) {
			w.crashed(h, w.between(10*time.Millisecond, 600*time.Millisecond))
		}
		w.crashed(w.hosts[leader-1], w.between(10*time.Millisecond, 2500*time.Millisecond))
	})
}

// onFetch strikes when an elected node fetches what it lacks.
func (w *world) onFetch(h *host, from NodeID) {
	if w.calm || !w.chance(w.opt.onFetch) {
		return
	}
	w.after(w.between(0, 60*time.Millisecond), func() {
		w.crashed(h, w.between(10*time.Millisecond, 200*time.Millisecond))
		if w.chance(0.7) {
			w.crashed(w.hosts[from-1], w.between(500*time.Millisecond, 5*time.Second))
		}
	})
}

// jamFor keeps rounds from a host for a while.
func (w *world) jamFor(h *host, d time.Duration) {
	w.saw("jammed")
	for i := range w.hosts {
		w.net.jam[i][h.id-1] = true
		w.after(d, func() { w.net.jam[i][h.id-1] = false })
	}
}

// trap lets one node fall behind, another miss a leadership that commits nothing, and the leader crash twice: what the second
// one has is committed, and it lacks what the leader's log goes on with.
func (w *world) trap(behind *host) {
	var lead, other *host
	for _, h := range w.hosts {
		switch {
		case h == behind:
		case h.alive && h.node.lead.serving && lead == nil:
			lead = h
		default:
			other = h
		}
	}
	if lead == nil || other == nil {
		return
	}
	w.saw("trap")
	lease := time.Second
	if w.opt.churn {
		lease = 300 * time.Millisecond
	}
	w.jamFor(behind, 10*lease)
	first := w.between(lease/4, lease)
	down := w.between(lease*3/2, lease*5/2)
	w.after(first, func() {
		if !w.calm {
			w.crashed(other, down)
			w.crashed(lead, 10*time.Millisecond)
		}
	})
	w.after(first+down-lease/20, func() {
		if !w.calm {
			w.crashed(lead, w.between(10*time.Millisecond, lease/5))
		}
	})
}

// onBulk strikes when an elected node has given up rounds for those of another one.
func (w *world) onBulk(h *host, from NodeID) {
	if w.calm || !w.chance(w.opt.onFetch) {
		return
	}
	w.after(w.between(0, 100*time.Millisecond), func() {
		w.crashed(h, w.between(10*time.Millisecond, 200*time.Millisecond))
		w.crashed(w.hosts[from-1], w.between(2*time.Second, 6*time.Second))
		w.net.heal()
	})
}

// rotWhileAlone lets the disk of one of the two nodes that have the newest rounds lose them, and the other one stop soon.
func (w *world) rotWhileAlone() {
	h := w.hosts[w.faulty-1]
	away := w.hosts[(int(w.faulty)+w.rng.IntN(2))%3]
	w.isolate(away)
	w.after(w.between(100*time.Millisecond, 900*time.Millisecond), func() {
		if w.calm || !h.alive {
			return
		}
		w.saw("rot while alone")
		h.crash()
		h.rot()
		if w.chance(0.7) {
			w.jamFor(h, w.between(100*time.Millisecond, 2*time.Second))
		}
		w.after(w.between(10*time.Millisecond, 100*time.Millisecond), func() {
			if !h.alive {
				h.start()
			}
		})
		w.after(w.between(100*time.Millisecond, 1200*time.Millisecond), func() {
			if w.calm {
				return
			}
			for _, o := range w.hosts {
				if o != h && o != away {
					w.crashed(o, w.between(time.Second, 5*time.Second))
				}
			}
			w.net.heal()
		})
	})
}

// cut stops what one host sends to another, for a while.
func (w *world) cut(from, to int) {
	if from == to {
		return
	}
	w.net.cut[from][to] = true
	w.after(w.between(100*time.Millisecond, 4*time.Second), func() {
		w.net.cut[from][to] = false
		for _, p := range [][2]int{{from, to}, {to, from}} {
			h, peer := w.hosts[p[0]], NodeID(p[1]+1)
			if h.alive && w.chance(0.7) {
				h.after(0, func() {
					h.input(func(now time.Duration) { h.node.Disconnected(now, peer) })
					h.input(func(now time.Duration) { h.node.Connected(now, peer) })
				})
			}
		}
	})
}

// crashed ends a host and starts it again. One host's disk is allowed to lose what it had.
func (w *world) crashed(h *host, down time.Duration) {
	if !h.alive {
		return
	}
	w.saw("crashed")
	h.crash()
	if h.id == w.faulty && w.chance(0.5) {
		if w.chance(0.5) {
			h.wipe()
		} else {
			h.rot()
		}
	}
	boot := h.boot
	w.after(down, func() {
		if !h.alive && h.boot == boot {
			h.disk.slow = 1
			h.start()
		}
	})
}
