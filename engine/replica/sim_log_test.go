package replica

import (
	"slices"
	"time"
)

// simLog is a shard.
type simLog struct {
	h       *host
	k       int
	log     *Log
	rounds  []simRound // the log's rounds in memory, ascending
	first   int        // how many rounds the journal had before ticket 1
	flushAt time.Duration
	applied Index // committed rounds that were checked
	retain  Index // rounds below are not in memory
	report  bool  // a Progress is on its way
	stalls  []Index
	stallAt []time.Duration
	behind  []time.Duration // per peer when it was told last that it has to catch up; 0 if it needn't
}

// round returns a round in memory.
func (l *simLog) round(i Index) *simRound {
	if len(l.rounds) == 0 || i < l.rounds[0].point.Index || i > l.rounds[len(l.rounds)-1].point.Index {
		return nil
	}
	return &l.rounds[i-l.rounds[0].point.Index]
}

// seal writes a round of the leader's own.
func (l *simLog) seal() {
	s, err := l.log.Seal()
	if err != nil {
		l.h.w.fail("node %d log %d: %v", l.h.id, l.k, err)
		return
	}
	l.h.w.serials++
	l.put(s.Ticket, simRound{point: s.Point, prev: s.Prev, value: l.h.w.serials, commit: s.Commit})
	l.pump()
}

// write carries out a verdict.
func (l *simLog) write(v Verdict, r simRound) {
	if v.Kind == Replace {
		l.h.w.saw("replaced")
		l.rounds = l.rounds[:v.From-l.rounds[0].point.Index]
	}
	l.put(v.Ticket, r)
}

func (l *simLog) put(ticket uint64, r simRound) {
	d := &l.h.disk.logs[l.k]
	if got := uint64(len(d.rounds) - l.first + 1); got != ticket {
		l.h.w.fail("node %d log %d: ticket %d for the %dth round", l.h.id, l.k, ticket, got)
	}
	r.at = len(d.rounds)
	d.rounds = append(d.rounds, r)
	l.rounds = append(l.rounds, r)
	l.flushAt = max(l.flushAt, l.h.diskTime(&l.h.diskAt))
	l.h.at(l.flushAt, func() {
		if l.h.logs[l.k] != l {
			return
		}
		d.durable = max(d.durable, l.first+int(ticket))
		l.log.Flushed(ticket)
		l.acknowledge()
		l.moved()
	})
}

// moved looks at what changed in the log: what is committed now, what can be sent, what the Node should know.
func (l *simLog) moved() {
	l.apply(l.log.Commit())
	if l.report {
		return
	}
	l.report = true
	l.h.queue(len(l.h.logs), func() {
		if l.h.logs[l.k] != l {
			return
		}
		l.report = false
		var p Progress
		l.log.Progress(&p)
		l.h.input(func(now time.Duration) { l.h.node.Progress(now, l.k, &p) })
	})
}

// apply checks what became committed.
func (l *simLog) apply(commit Index) {
	w := l.h.w
	for l.applied < commit {
		i := l.applied + 1
		r := l.round(i)
		if r == nil {
			w.fail("node %d log %d: round %d is committed and not there", l.h.id, l.k, i)
			return
		}
		all := &w.committed[l.k]
		switch {
		case i <= Index(len(*all)):
			if (*all)[i-1].value != r.value {
				w.fail("node %d log %d: committed %d at %v, %d was committed there before", l.h.id, l.k, r.value, r.point, (*all)[i-1].value)
				return
			}
		case i == Index(len(*all))+1:
			*all = append(*all, committedRound{r.value, l.log.Epoch()})
			w.checkFlushed(l, r)
			if r.point.Epoch != l.log.Epoch() {
				w.saw("old round committed")
			}
		default:
			w.fail("node %d log %d: committed %d, the cluster only %d", l.h.id, l.k, i, len(*all))
			return
		}
		l.applied = i
	}
}

// pump sends what can be sent.
func (l *simLog) pump() {
	h := l.h
	for _, to := range h.nodes() {
		if to == h.id {
			continue
		}
		for {
			s, ok := l.log.Next(to)
			if !ok {
				break
			}
			if flushed, next := l.log.PeerWindow(to); s.Index > 0 && next > flushed+40 {
				break
			}
			var r simRound
			if s.Index > 0 {
				if s.Index < l.retain || l.round(s.Index) == nil {
					l.log.Skip(to, l.base())
					l.tellBehind(to)
					break
				}
				r = *l.round(s.Index)
				if r.prev != s.Prev && s.Prev.Epoch != 0 {
					h.w.fail("node %d log %d: round %v follows %v, the log says %v", h.id, l.k, r.point, r.prev, s.Prev)
				}
			}
			l.log.Sent(to, s)
			k, epoch, prev, commit := l.k, s.Epoch, s.Prev, s.Commit
			h.w.net.stream(h.id, to, func(f *host) { f.onAppend(k, h.id, epoch, prev, r, commit) })
		}
	}
}

// cut is up to where a log can be copied in bulk.
func (l *simLog) cut() Point {
	i := min(l.log.Commit(), l.log.FlushedIndex())
	e, _ := l.log.EpochAt(i)
	return Point{Epoch: e, Index: i}
}

// base is the round before the oldest one in memory.
func (l *simLog) base() Point {
	if r := l.round(l.retain); r != nil {
		return r.prev
	}
	return l.log.Last()
}

func (l *simLog) tellBehind(to NodeID) {
	h, k, epoch, base := l.h, l.k, l.log.Epoch(), l.base()
	l.behind[to-1] = h.w.now
	h.w.net.send(h.id, to, func(f *host) {
		if k >= len(f.logs) {
			return
		}
		f.queue(k, func() {
			switch l := f.logs[k]; {
			case l.log.Behind(epoch, base):
				f.queue(len(f.logs), func() {
					f.input(func(now time.Duration) {
						if f.node.State().Promised == epoch {
							f.node.Behind(now, k)
						}
					})
				})
			default:
				l.acknowledge()
				l.moved()
			}
		})
	})
}

func (h *host) onAppend(k int, from NodeID, epoch Epoch, prev Point, r simRound, commit Index) {
	if k >= len(h.logs) || h.catching[k] != 0 {
		return
	}
	h.queue(k, func() {
		l := h.logs[k]
		switch v := l.log.Append(epoch, prev, r.point, commit); v.Kind {
		case Accept, Replace:
			l.write(v, r)
			l.moved()
		case Duplicate, Matched:
			l.acknowledge()
			l.moved()
		case Gap:
			if v.Reject {
				l.reject(from, epoch)
			}
		case Divergent, Invalid:
			h.w.fail("node %d log %d: round %v after %v of epoch %d is %v", h.id, k, r.point, prev, epoch, v.Kind)
		default:
		}
	})
}

// reject tells a leader where the log ends.
func (l *simLog) reject(leader NodeID, epoch Epoch) {
	h, k, end, inst := l.h, l.k, l.log.End(), l.h.instance
	h.w.net.stream(h.id, leader, func(to *host) {
		if k >= len(to.logs) {
			return
		}
		to.queue(k, func() {
			if err := to.logs[k].log.Rejected(h.id, epoch, inst, end); err != nil {
				to.w.fail("node %d log %d: %v", to.id, k, err)
			}
			to.logs[k].pump()
		})
	})
}

// acknowledge sends FLUSHED.
func (l *simLog) acknowledge() {
	h, k := l.h, l.k
	epoch, index := l.log.Ack()
	if epoch == 0 || epoch != h.epoch || h.leader == 0 {
		return
	}
	inst, voter := h.instance, h.voter
	h.w.net.stream(h.id, h.leader, func(to *host) {
		if k >= len(to.logs) {
			return
		}
		to.queue(k, func() {
			to.logs[k].log.PeerFlushed(h.id, epoch, inst, voter, index)
			to.logs[k].pump()
			to.logs[k].moved()
		})
	})
}

func (l *simLog) housekeeping() {
	h := l.h
	if l.log.Leading() {
		for _, to := range h.nodes() {
			if to == h.id {
				continue
			}
			if p := l.log.peer(to); p.joined {
				l.behind[to-1] = 0
			} else if at := l.behind[to-1]; at != 0 && h.w.now-at > 300*time.Millisecond {
				l.tellBehind(to)
			}
			if h.w.chance(0.01) {
				l.tellBehind(to) // out of the blue
			}
			flushed, _ := l.log.PeerWindow(to)
			if !l.log.Unanswered(to) || flushed != l.stalls[to-1] {
				l.stalls[to-1], l.stallAt[to-1] = flushed, h.w.now
			} else if h.w.now-l.stallAt[to-1] > 300*time.Millisecond {
				l.stallAt[to-1] = h.w.now
				l.log.Resend(to)
				l.pump()
			}
		}
	}
	// A checkpoint: committed rounds are in the store, old ones leave the memory.
	done := min(l.log.Commit(), l.log.FlushedIndex())
	if r := l.round(done); r != nil && h.w.chance(0.1) && done > h.disk.logs[l.k].base.Index {
		d := &h.disk.logs[l.k]
		d.base, d.covered = r.point, r.at+1
	}
	if tail := h.w.opt.tail; h.w.chance(0.3) && done > tail && len(l.rounds) > 0 {
		l.retain = max(l.retain, done-tail)
		if cut := int(l.retain) - int(l.rounds[0].point.Index); cut > 0 {
			l.rounds = slices.Delete(l.rounds, 0, cut)
		}
	}
}
