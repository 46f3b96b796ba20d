package replica

import "time"

// catchUp asks the leader for its store until it comes.
func (h *host) catchUp(o StartCatchup) {
	h.catches++
	h.catching[o.Log] = h.catches
	attempt := h.catches
	var ask func()
	ask = func() {
		if h.catching[o.Log] == attempt {
			h.w.net.send(h.id, o.Leader, func(leader *host) { leader.serveCatchUp(h.id, o, attempt) })
			h.after(300*time.Millisecond, ask)
		}
	}
	ask()
}

func (h *host) serveCatchUp(to NodeID, o StartCatchup, attempt int) {
	if h.logs == nil {
		return
	}
	l := h.logs[o.Log]
	if l.log.Epoch() != o.Epoch || !l.log.Leading() {
		return
	}
	cut, base := l.cut(), l.base()
	h.w.net.send(h.id, to, func(f *host) { f.takeCatchUp(o, cut, base, attempt) })
}

// takeCatchUp makes the cut durable as a floor, gives up what this node has above its store, perhaps, and takes the
// leader's store.
func (h *host) takeCatchUp(o StartCatchup, cut, base Point, attempt int) {
	if h.catching[o.Log] != attempt {
		return
	}
	d := &h.disk.logs[o.Log]
	if cut.Index < base.Index || !h.logs[o.Log].log.Behind(o.Epoch, base) {
		h.caughtUp(Point{}, o.Log, attempt) // it isn't behind any more
		return
	}
	h.given[o.Log] = true
	h.node.GivesUp(o.Log)
	h.at(h.diskTime(&h.stateAt), func() {
		if d.floor.Less(cut) {
			d.floor = cut
		}
		if h.catching[o.Log] != attempt || !h.logs[o.Log].log.Behind(o.Epoch, base) {
			return
		}
		h.logs[o.Log].log.SetFloor(cut)
		if h.w.chance(0.7) {
			d.rounds, d.durable, d.covered = nil, 0, 0
			h.reopen(o.Log)
		}
		h.after(h.w.between(0, 300*time.Millisecond), func() { h.caughtUp(cut, o.Log, attempt) })
	})
}

func (h *host) caughtUp(cut Point, k, attempt int) {
	if h.catching[k] != attempt {
		return
	}
	h.catching[k], h.given[k] = 0, false
	if d := &h.disk.logs[k]; cut.Index > d.base.Index {
		*d = diskLog{base: cut, floor: d.floor}
		h.reopen(k)
	}
	h.input(func(now time.Duration) { h.node.CaughtUp(now, k) })
}

// fetch asks another node for rounds until they come or it takes too long.
func (h *host) fetch(o FetchLog) {
	h.w.saw("fetch")
	h.w.onFetch(h, o.From)
	h.fetches++
	done := false
	end := func(f func(now time.Duration)) {
		if !done {
			done = true
			h.input(f)
		}
	}
	var take func(cut, base Point, rounds []simRound, ok bool)
	take = func(cut, base Point, rounds []simRound, ok bool) {
		if done {
			return
		}
		if ok && cut != (Point{}) && h.logs[o.Log].log.Has(base) {
			more := o
			more.After = base.Index
			h.w.net.send(h.id, o.From, func(src *host) { src.serveFetch(h.id, more, take) })
			return
		}
		if !ok {
			end(func(now time.Duration) { h.node.FetchFailed(now, o.Epoch, o.Log) })
			return
		}
		adopt := func() {
			l := h.logs[o.Log]
			for _, r := range rounds {
				switch v := l.log.Adopt(r.prev, r.point); v.Kind {
				case Accept, Replace:
					l.write(v, r)
				case Duplicate:
				case Divergent:
					h.w.fail("node %d log %d: fetched round %v differs from a committed one", h.id, o.Log, r.point)
				default:
					end(func(now time.Duration) { h.node.FetchFailed(now, o.Epoch, o.Log) })
					return
				}
			}
			var wait func()
			wait = func() {
				if l.log.FlushedIndex() < l.log.Last().Index {
					h.after(time.Millisecond, wait)
					return
				}
				end(func(now time.Duration) { h.node.Fetched(now, o.Epoch, o.Log, l.log.End()) })
			}
			wait()
		}
		if cut == (Point{}) {
			adopt()
			return
		}
		h.w.saw("fetch in bulk")
		h.at(h.diskTime(&h.stateAt), func() { h.fetchBulk(o, cut, &done, adopt) })
	}
	for _, d := range []time.Duration{0, 200 * time.Millisecond} { // asked twice, for the network loses
		h.after(d, func() {
			if !done {
				h.w.net.send(h.id, o.From, func(src *host) { src.serveFetch(h.id, o, take) })
			}
		})
	}
	h.after(600*time.Millisecond, func() { take(Point{}, Point{}, nil, false) })
}

// fetchBulk takes another node's store in the place of this one's log, before the rounds behind it are fetched.
func (h *host) fetchBulk(o FetchLog, cut Point, done *bool, then func()) {
	l, d := h.logs[o.Log], &h.disk.logs[o.Log]
	if *done || l.log.Epoch() != 0 || l.log.fence != o.Epoch || cut.Index <= l.log.Commit() {
		return
	}
	if d.floor.Less(cut) {
		d.floor = cut
	}
	l.log.SetFloor(d.floor)
	d.rounds, d.durable, d.covered = nil, 0, 0
	h.reopen(o.Log)
	h.w.onBulk(h, o.From)
	h.after(h.w.between(0, 100*time.Millisecond), func() {
		if *done || h.logs[o.Log].log.fence != o.Epoch || cut.Index <= d.base.Index {
			return
		}
		*d = diskLog{base: cut, floor: d.floor}
		h.reopen(o.Log)
		then()
	})
}

func (h *host) serveFetch(to NodeID, o FetchLog, take func(cut, base Point, rounds []simRound, ok bool)) {
	if o.Log >= len(h.logs) {
		return
	}
	l := h.logs[o.Log]
	var out []simRound
	var cut Point
	after := o.After
	if after+1 < l.retain || l.round(after+1) == nil {
		cut = l.cut()
		after = cut.Index
	}
	e, known := l.log.EpochAt(o.Upto.Index)
	ok := known && e == o.Upto.Epoch
	for i := after + 1; ok && i <= o.Upto.Index; i++ {
		out = append(out, *l.round(i))
	}
	boot, base := h.w.hosts[to-1].boot, l.base()
	h.w.net.send(h.id, to, func(c *host) {
		if c.boot == boot {
			take(cut, base, out, ok)
		}
	})
}
