package replica

import "time"

// theme is a way to go wrong that a seed prefers.
type theme uint8

const (
	mixed     theme = iota
	forgetful       // followers restart between a lease and the next
	muted           // leaders that nobody hears go on
	lonely          // leaders end whose rounds are on one slow disk, not for good
	overtaken       // leaders end in turn, each with rounds that only it has
	rotten          // what is on two disks rots on one
	trapped         // logs part so far that they can't be completed from memory
	stopped         // leaders are stopped while answers wait for them
	themes
)

// pauses decides whether the process is stopped right here.
func (w *world) pauses(h *host) bool {
	if w.calm || !w.chance(w.opt.pause) {
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
				if !h.node.Serving(h.clock()) && !w.chance(0.4) {
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
	d := w.between(20*time.Millisecond, 900*time.Millisecond)
	if w.theme != mixed {
		d = w.between(w.lease(), 6*w.lease()) // for each to take its course
	}
	w.after(d, func() {
		if w.calm {
			return
		}
		w.fault()
		w.mischief()
	})
}

// fault lets one thing go wrong.
func (w *world) fault() {
	themed := [...]func(){forgetful: w.forget, muted: w.muteLeader, lonely: w.leaveAlone, overtaken: w.overtake, rotten: w.rotWhileAlone, trapped: w.trap}
	if int(w.theme) < len(themed) && themed[w.theme] != nil && w.chance(0.7) {
		themed[w.theme]()
		return
	}
	h := w.hosts[w.rng.IntN(len(w.hosts))]
	kinds := [...]func(h *host){
		w.restarts, w.restarts, w.restarts, w.powerFails, w.pausesLong, w.pausesLong,
		w.isolate, w.isolate, w.mute, w.heals, w.heals, w.diskFails, w.resigns,
		func(h *host) {
			w.saw("one-way cut")
			w.cut(int(h.id)-1, w.rng.IntN(len(w.hosts)), w.between(100*time.Millisecond, 4*time.Second))
		},
		func(h *host) { w.jamFor(h, w.between(500*time.Millisecond, 5*time.Second)) },
		func(h *host) {
			w.saw("slow disk")
			h.disk.slow = time.Duration(1 + w.rng.IntN(40))
		},
		func(h *host) {
			w.saw("hanging disk")
			h.disk.hungFrom, h.disk.hungUntil = w.now, w.now+w.between(100*time.Millisecond, 6*time.Second)
		},
		func(*host) { themed[forgetful+theme(w.rng.IntN(len(themed)-1))]() },
	}
	kinds[w.rng.IntN(len(kinds))](h)
}

func (w *world) restarts(h *host) {
	w.crashed(h, w.between(10*time.Millisecond, 2500*time.Millisecond))
}

func (w *world) powerFails(*host) {
	w.saw("power failure")
	for _, h := range w.hosts {
		w.crashed(h, w.between(10*time.Millisecond, 600*time.Millisecond))
	}
}

func (w *world) pausesLong(h *host) {
	w.saw("paused")
	h.pausedUntil = w.now + w.between(200*time.Millisecond, 4*time.Second)
	w.logf("%d: paused until %v", h.id, h.pausedUntil)
}

func (w *world) heals(*host) { w.net.heal() }

func (w *world) diskFails(h *host) {
	if h.running() && h.node != nil {
		w.saw("disk failed")
		h.input(h.node.DiskFailed)
		w.after(w.between(10*time.Millisecond, time.Second), func() { w.crashed(h, w.between(10*time.Millisecond, time.Second)) })
	}
}

func (w *world) resigns(h *host) {
	if h.running() && h.node != nil {
		w.saw("resigned")
		h.input(h.node.Resign)
		w.after(w.between(10*time.Millisecond, 300*time.Millisecond), func() { w.crashed(h, w.between(10*time.Millisecond, time.Second)) })
	}
}

// mute keeps a host's heartbeats and votes from the others, while rounds get through.
func (w *world) mute(h *host) { w.muteFor(h, w.between(500*time.Millisecond, 3*time.Second)) }

func (w *world) muteFor(h *host, d time.Duration) {
	w.saw("mute")
	for i := range w.hosts {
		w.net.mute[h.id-1][i] = true
		w.after(d, func() { w.net.mute[h.id-1][i] = false })
	}
}

// roles returns who serves and the others in random order; nil if nobody does.
func (w *world) roles() (lead, one, two *host) {
	for _, h := range w.hosts {
		if h.alive && h.node.lead.serving {
			lead = h
		}
	}
	if lead == nil {
		return nil, nil, nil
	}
	i, k := int(lead.id)%3, (int(lead.id)+1)%3
	if w.chance(0.5) {
		i, k = k, i
	}
	return lead, w.hosts[i], w.hosts[k]
}

// muteLeader is a leader that nobody hears, whose rounds get through to slow disks.
func (w *world) muteLeader() {
	if lead, one, two := w.roles(); lead != nil {
		w.muteFor(lead, 3*w.lease())
		for i := range w.hosts { // nor does it hear of its successor
			w.net.mute[i][lead.id-1] = true
			w.after(3*w.lease(), func() { w.net.mute[i][lead.id-1] = false })
		}
		w.after(w.lease()*19/20, func() { w.jamFor(two, w.lease()) })
		w.after(w.lease()*9/10, func() { w.press(lead, w.now+w.lease()) })
		one.disk.slow, two.disk.slow, lead.disk.slow = time.Duration(1+w.rng.IntN(60)), 1, 1
	}
}

// press makes a leader go on sealing, whether or not it may serve.
func (w *world) press(h *host, until time.Duration) {
	if w.now > until || w.calm || !h.alive {
		return
	}
	for _, l := range h.logs {
		if l.log.Leading() && l.log.Last().Index < l.log.Commit()+30 {
			h.queue(l.k, func() {
				if l.log.Leading() {
					l.seal()
					l.moved()
				}
			})
		}
	}
	w.after(w.between(time.Millisecond, 10*time.Millisecond), func() { w.press(h, until) })
}

// forget is a follower that restarts just after it has renewed a lease, while the other one can't hear the leader.
func (w *world) forget() {
	lead, one, two := w.roles()
	if lead == nil {
		return
	}
	w.saw("forgetful")
	w.cut(int(lead.id)-1, int(two.id)-1, 4*w.lease())
	w.cut(int(two.id)-1, int(lead.id)-1, 4*w.lease())
	w.after(w.lease()+w.between(0, w.lease()), func() {
		if !w.calm {
			w.crashed(one, w.between(time.Millisecond, w.lease()/4))
			w.cut(int(lead.id)-1, int(one.id)-1, w.lease())
			w.cut(int(one.id)-1, int(lead.id)-1, w.lease())
		}
	})
}

// leaveAlone is a leader that ends when its newest rounds have reached one slow disk only, and not yet for good.
func (w *world) leaveAlone() {
	lead, one, two := w.roles()
	if lead == nil {
		return
	}
	w.saw("lonely")
	w.jamFor(two, w.lease())
	one.disk.slow = 300
	w.after(w.between(20*time.Millisecond, 300*time.Millisecond), func() {
		if !w.calm {
			w.crashed(lead, w.between(w.lease(), 4*w.lease()))
		}
	})
	w.after(4*w.lease(), func() { one.disk.slow = 1 })
}

// overtake ends leaders in turn: the first has rounds that nobody else has, the second one too, the third leader is the first
// one again and ends, with its follower, while its old rounds reach a majority and its own don't.
func (w *world) overtake() {
	a, b, c := w.roles()
	if a == nil {
		return
	}
	w.saw("overtaken")
	lease := w.lease()
	w.jamFor(b, 10*lease)
	w.jamFor(c, 10*lease)
	w.after(w.between(10*time.Millisecond, 200*time.Millisecond), func() {
		if !w.calm {
			w.crashed(a, lease*2)
		}
	})
	var second *host
	w.script = func(h *host) {
		switch {
		case w.calm:
		case second == nil && h != a:
			second = h
			w.after(w.between(2*time.Millisecond, 30*time.Millisecond), func() { w.crashed(h, 4*lease) })
		case second != nil && h == a:
			w.script = nil
			w.net.heal()
			third := b
			if second == b {
				third = c
			}
			third.disk.slow = 100
			w.after(w.between(20*time.Millisecond, 200*time.Millisecond), func() {
				w.crashed(a, 4*lease)
				w.crashed(third, 10*time.Millisecond)
			})
		}
	}
}

func (w *world) lease() time.Duration {
	if w.opt.churn {
		return churnLease
	}
	return DefaultLease
}

func (w *world) isolate(h *host) {
	w.saw("isolated")
	for i := range w.hosts {
		d := w.between(100*time.Millisecond, 4*time.Second)
		w.cut(int(h.id)-1, i, d)
		w.cut(i, int(h.id)-1, d)
	}
}

// onLead strikes when a node has just been elected.
func (w *world) onLead(h *host) {
	if w.script != nil {
		w.script(h)
		return
	}
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
func (w *world) trap() {
	lead, other, behind := w.roles()
	if lead == nil {
		return
	}
	w.saw("trap")
	lease := w.lease()
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
	if w.faulty < 1 || int(w.faulty) > len(w.hosts) {
		return
	}
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
func (w *world) cut(from, to int, d time.Duration) {
	if from == to {
		return
	}
	w.net.cut[from][to] = true
	w.after(d, func() {
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
