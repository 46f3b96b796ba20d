package sim

import (
	"fmt"
	"time"

	"github.com/mortarmq/mortarmq/engine/coord"
	"github.com/mortarmq/mortarmq/engine/replica"
)

// settle waits until everything that was published is acknowledged, and every node counts again.
func (s *scenario) settle(bound time.Duration) {
	w := s.w
	settled := func() bool {
		for _, p := range s.producers {
			if !p.done() {
				return false
			}
		}
		for _, h := range w.hosts {
			if h.node == nil {
				return false
			}
			st := h.node.Status()
			if st.Standing != replica.Voter || st.Reopening || st.LeaderName == "" {
				return false
			}
		}
		return true
	}
	for _, p := range s.producers {
		if !p.done() {
			p.again(0)
		}
	}
	since := w.now
	w.run(w.now+bound, func() bool {
		if !settled() {
			since = w.now
		}
		return w.now-since >= settledFor
	})
	if w.failed == "" && settled() {
		s.drain(bound)
		return
	}
	if w.failed == "" {
		text := ""
		for _, h := range w.hosts {
			if h.node == nil {
				text += fmt.Sprintf("; node %d is down", h.id)
				continue
			}
			text += fmt.Sprintf("; node %d is %+v", h.id, h.node.Status())
		}
		for _, p := range s.producers {
			text += fmt.Sprintf("; producer %d has %d of %d", p.id, p.acked, p.limit)
		}
		w.fail("the cluster doesn't settle within %v of the last fault%s", bound, text)
	}
}

// settledFor is how long a cluster has to be settled: a follower that lags catches up meanwhile, and what a silent member
// doesn't give up is taken from it.
const settledFor = 6 * time.Second

// drain waits until the groups have nothing left to do.
func (s *scenario) drain(bound time.Duration) {
	w := s.w
	var stats *coord.Stats
	drained, looked := false, time.Duration(0)
	w.run(w.now+bound, func() bool {
		if w.now-looked < drainEvery {
			return false
		}
		looked = w.now
		h := s.serving()
		if h == nil {
			return false
		}
		if stats = h.stats(); stats == nil {
			return false
		}
		drained = true
		for i := range stats.Groups {
			g := &stats.Groups[i]
			drained = drained && g.Lag == 0 && g.InFlight == 0 && g.Waiting == 0
			if g.Published != g.Acknowledged+g.Dropped+g.InFlight+g.Waiting || g.DLQ > g.Dropped {
				w.fail("group %s doesn't add up: %d published, %d acknowledged, %d dropped, %d in flight, %d waiting, %d dead letters",
					g.Name, g.Published, g.Acknowledged, g.Dropped, g.InFlight, g.Waiting, g.DLQ)
			}
		}
		return drained
	})
	if w.failed != "" {
		return
	}
	if !drained {
		text := ""
		if stats != nil {
			for _, g := range stats.Groups {
				text += fmt.Sprintf("; group %s: state %s, lag %d, %d in flight, %d waiting, members %+v", g.Name, g.State, g.Lag, g.InFlight, g.Waiting, g.Members)
			}
		}
		w.fail("the groups aren't done within %v%s", bound, text)
		return
	}
	s.topics = map[uint16]string{}
	for _, t := range stats.Topics {
		s.topics[t.ID] = t.Name
	}
}

// drainEvery is how often the groups are looked at.
const drainEvery = 500 * time.Millisecond

// serving returns a node that serves, nil if none does.
func (s *scenario) serving() *host {
	for _, h := range s.w.hosts {
		if h.node != nil && h.node.Status().Serving {
			return h
		}
	}
	return nil
}

// finish stops everything and compares what the nodes hold with each other and with what the clients know.
func (s *scenario) finish() {
	w := s.w
	for _, g := range s.groups {
		g.stop()
	}
	w.run(w.now+time.Second, nil) // the followers hear of the last commits
	for _, h := range w.hosts {
		h.stop()
	}
	if w.failed != "" {
		return
	}
	c := s.compareDisks()
	if c == nil {
		return
	}
	s.check(c.host, c.messages)
	s.checkLetters(c, s.topics)
	if w.failed == "" {
		s.linearizable(c.messages)
	}
}

// verify has every node lead in turn and read everything back.
func (s *scenario) verify(bound time.Duration) {
	w := s.w
	for _, g := range s.groups {
		g.stop()
	}
	var first map[place][2]uint64
	ends := map[replica.NodeID]bool{}
	for round := 0; len(ends) < 3 && round < 8 && w.failed == ""; round++ {
		leader := s.leader(bound)
		if leader == nil {
			return
		}
		if !ends[leader.id] {
			ends[leader.id] = true
			got := s.readAll(leader, fmt.Sprintf("check-%d", round), bound)
			if w.failed != "" {
				return
			}
			s.check(leader, got)
			if first == nil {
				first = got
			} else if d := difference(first, got); d != "" {
				w.fail("node %d has other messages than the one before: %s", leader.id, d)
			}
		}
		leader.stop()
		w.run(w.now+200*time.Millisecond, nil)
		w.after(3*time.Second, leader.start)
	}
}

// leader waits for a node that serves.
func (s *scenario) leader(bound time.Duration) *host {
	w := s.w
	var found *host
	w.run(w.now+bound, func() bool {
		for _, h := range w.hosts {
			if h.node != nil && h.node.Status().Serving {
				found = h
			}
		}
		return found != nil
	})
	if found == nil && w.failed == "" {
		w.fail("no node serves within %v", bound)
	}
	return found
}

// readAll reads every partition from its start.
func (s *scenario) readAll(h *host, name string, bound time.Duration) map[place][2]uint64 {
	w := s.w
	c := newConsumer(w, s.r, newGroup(w, name, s.topic, false))
	c.reader = true
	c.begin(h.id)
	last, since := 0, w.now
	w.run(w.now+bound, func() bool {
		if c.got != last {
			last, since = c.got, w.now
		}
		return len(c.seen) >= len(s.r.at) && w.now-since > 700*time.Millisecond
	})
	c.stop()
	return c.seen
}

// check compares what a node has with what was acknowledged.
func (s *scenario) check(h *host, got map[place][2]uint64) {
	w := s.w
	where := map[[2]uint64]place{}
	highest := map[uint16]uint64{}
	for p, m := range got {
		if other, twice := where[m]; twice {
			w.fail("node %d has message %v at %d and at %d", h.id, m, other.seq, p.seq)
		}
		where[m] = p
		highest[p.partition] = max(highest[p.partition], p.seq)
	}
	count := map[uint16]uint64{}
	for p := range got {
		count[p.partition]++
	}
	for part, n := range highest {
		if count[part] != n {
			w.fail("node %d has %d messages in partition %d, the last one at %d", h.id, count[part], part, n)
		}
	}
	for p, m := range s.r.who {
		if got[p] != m {
			w.fail("node %d has message %v at %d of partition %d, where %v was acknowledged (%d messages in all, %d acknowledged)", h.id, got[p], p.seq, p.partition, m, len(got), len(s.r.at))
			return
		}
	}
}

func difference(a, b map[place][2]uint64) string {
	if len(a) != len(b) {
		return fmt.Sprintf("%d and %d messages", len(a), len(b))
	}
	for p, m := range a {
		if b[p] != m {
			return fmt.Sprintf("%v and %v at %d of partition %d", m, b[p], p.seq, p.partition)
		}
	}
	return ""
}
