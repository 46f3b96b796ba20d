package sim

import (
	"fmt"
	"time"

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
	w.run(w.now+bound, settled)
	if w.failed == "" && !settled() {
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

// verify has every node lead in turn and read everything back.
func (s *scenario) verify(bound time.Duration) {
	w := s.w
	for _, c := range s.consumers {
		c.stopped = true
		c.s.close()
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
func (s *scenario) readAll(h *host, group string, bound time.Duration) map[place][2]uint64 {
	w := s.w
	c := newConsumer(w, s.r, group, s.topic)
	c.begin(h.id)
	last, since := 0, w.now
	w.run(w.now+bound, func() bool {
		if c.got != last {
			last, since = c.got, w.now
		}
		return len(c.seen) >= len(s.r.at) && w.now-since > 700*time.Millisecond
	})
	c.stopped = true
	c.timer++
	c.s.close()
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
