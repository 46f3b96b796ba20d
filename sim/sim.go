package sim

import (
	"fmt"
	"io"
	"math/rand/v2"
	"syscall"
	"time"

	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// Options configures a run.
type Options struct {
	Seed uint64
	// Log gets what the nodes log; nil: nothing.
	Log io.Writer
	// Faults is how long the phase of faults takes, Settle the bound of the second phase.
	Faults, Settle time.Duration
}

// Result is what a run has found.
type Result struct {
	// Failure is empty, or says which invariant was broken; Trace is what happened up to then.
	Failure, Trace string
	// Seen counts the faults and situations that occurred.
	Seen map[string]int
	// Simulated is how long the run took in simulated time.
	Simulated time.Duration
	// Acknowledged is the number of messages that were.
	Acknowledged int
	// Digest is a checksum of the trace: two runs of one seed have the same.
	Digest string
}

const (
	partitions = 3
	// messagesEach bounds what a producer publishes while there are faults.
	messagesEach = 300
	topicName    = "orders"
)

// Run runs one seed.
func Run(o Options) Result {
	if o.Faults == 0 {
		o.Faults = 12 * time.Second
	}
	if o.Settle == 0 {
		o.Settle = 60 * time.Second
	}
	if o.Log == nil {
		o.Log = io.Discard
	}
	w := &world{seed: o.Seed, rng: rand.New(rand.NewPCG(o.Seed, 1)), seen: map[string]int{}}
	for id := replica.NodeID(1); id <= 3; id++ {
		w.hosts = append(w.hosts, newHost(w, id, o.Log))
	}
	w.net = newNetwork(w)
	s := &scenario{w: w, r: newRecord(w)}
	s.run(o)
	for _, h := range w.hosts {
		if h.node != nil {
			h.stop()
		}
		h.discard()
	}
	return Result{Failure: w.failed, Trace: w.report(), Seen: w.seen, Simulated: w.now, Acknowledged: len(s.r.at), Digest: digest(w.trace)}
}

// scenario is what happens in a run.
type scenario struct {
	w         *world
	r         *record
	topic     uint16
	producers []*producer
	consumers []*consumer
	quiet     bool // no more faults
}

func (s *scenario) run(o Options) {
	w := s.w
	for _, h := range w.hosts {
		h.start()
	}
	if !s.declare() {
		return
	}
	for i := range uint64(4) {
		s.producers = append(s.producers, &producer{
			w: w, r: s.r, id: i + 1, topic: s.topic, partition: uint16(i % partitions), limit: messagesEach, pipeline: 1 + uint64(w.rng.IntN(8)),
			pace: w.between(0, 500*time.Millisecond),
		})
	}
	for range 2 {
		s.consumers = append(s.consumers, newConsumer(w, s.r, "billing", s.topic))
	}
	for _, p := range s.producers {
		p.begin(0)
	}
	for _, c := range s.consumers {
		c.begin(0)
	}
	w.after(w.between(0, time.Second), s.fault)
	w.run(w.now+o.Faults, nil)
	if w.failed != "" {
		return
	}
	s.calm()
	s.settle(o.Settle)
	if w.failed == "" {
		s.verify(o.Settle)
	}
}

// declare creates the topic.
func (s *scenario) declare() bool {
	w := s.w
	done := false
	var try func()
	try = func() {
		if done {
			return
		}
		c := w.dial(w.hosts[w.rng.IntN(3)])
		if c != nil {
			d := protocol.Declare{Topic: []byte(topicName), Partitions: partitions}
			c.ask(protocol.OpDeclare, d.AppendFrame(nil), func(b []byte, err error) {
				var res protocol.DeclareResult
				if err == nil && res.Decode(b) == nil {
					s.topic, done = res.TopicID, true
				}
				c.close()
			})
		}
		w.after(200*time.Millisecond, try)
	}
	try()
	w.run(w.now+30*time.Second, func() bool { return done })
	if !done && w.failed == "" {
		w.fail("no cluster was formed, or it doesn't take a DECLARE")
	}
	return done
}

// fault lets something go wrong, and comes again.
func (s *scenario) fault() {
	if s.quiet {
		return
	}
	w := s.w
	defer w.after(w.between(50*time.Millisecond, 1500*time.Millisecond), s.fault)
	h := w.hosts[w.rng.IntN(3)]
	down := 0
	for _, o := range w.hosts {
		if o.node == nil {
			down++
		}
	}
	switch w.rng.IntN(15) {
	case 0, 1:
		if h.node != nil {
			w.count("kill")
			h.kill(false)
			s.later(h)
		}
	case 2, 3:
		if h.node != nil {
			w.count("power cut")
			h.kill(true)
			s.later(h)
		}
	case 4:
		if down == 0 && w.chance(0.3) {
			w.count("power cut everywhere")
			for _, o := range w.hosts {
				o.kill(true)
				s.later(o)
			}
		}
	case 5:
		if h.node != nil && !h.paused {
			w.count("pause")
			w.note("node %d is stopped for a while", h.id)
			h.paused = true
			life := h.life
			w.after(w.between(50*time.Millisecond, 4*time.Second), func() {
				if h.life == life {
					w.note("node %d goes on", h.id)
					h.paused = false
					h.wake()
				}
			})
		}
	case 6:
		w.count("partition")
		w.note("node %d is cut off", h.id)
		for _, o := range w.hosts {
			if o != h {
				w.net.block(h.id, o.id)
				w.net.block(o.id, h.id)
			}
		}
		s.healLater()
	case 7:
		w.count("one-way partition")
		o := w.hosts[w.rng.IntN(3)]
		if o != h {
			w.note("node %d doesn't reach node %d", h.id, o.id)
			w.net.block(h.id, o.id)
			s.healLater()
		}
	case 8:
		o := w.hosts[w.rng.IntN(3)]
		if o != h {
			w.count("connection reset")
			w.net.hangUp(h.id, o.id)
			w.after(w.between(time.Millisecond, 200*time.Millisecond), w.net.connectAll)
		}
	case 9:
		w.count("message loss")
		w.net.loss = []float64{0, 0.02, 0.2, 0.5}[w.rng.IntN(4)]
	case 10:
		w.count("clock step")
		h.skew += w.between(-time.Hour, time.Hour)
		w.note("the wall clock of node %d is off by %v", h.id, h.skew)
	case 11:
		w.count("slow disk")
		w.note("the disk of node %d is slow", h.id)
		h.slow = 20
		w.after(w.between(time.Second, 3*time.Second), func() { h.slow = 1 })
	case 12:
		w.count("hanging disk")
		w.note("the disk of node %d hangs", h.id)
		disk := h.disk
		free := disk.Inject(simdisk.Fault{Kind: ring.WriteSync, Count: 1 + w.rng.IntN(2), Hang: true})
		w.after(w.between(100*time.Millisecond, 4*time.Second), func() {
			free()
			h.wake()
		})
	case 13:
		if down == 0 && h.node != nil && w.chance(0.5) {
			w.count("failed flush")
			w.note("a flush of node %d fails", h.id)
			h.disk.Inject(simdisk.Fault{Kind: ring.WriteSync, Count: 1, Err: syscall.EIO})
			w.after(w.between(500*time.Millisecond, 2*time.Second), func() {
				if h.node != nil && h.node.Status().Role != "" {
					h.kill(false)
					s.later(h)
				}
			})
		}
	case 14:
		if h.node != nil {
			w.count("orderly stop")
			h.stop()
			s.later(h)
		}
	}
}

// later starts a host again.
func (s *scenario) later(h *host) {
	s.w.after(s.w.between(50*time.Millisecond, 3*time.Second), h.start)
}

func (s *scenario) healLater() {
	s.w.after(s.w.between(200*time.Millisecond, 4*time.Second), func() {
		s.w.note("the network is whole again")
		s.w.net.heal()
	})
}

// calm ends the faults.
func (s *scenario) calm() {
	w := s.w
	w.note("the faults end")
	s.quiet = true
	w.net.loss = 0
	w.net.heal()
	for _, h := range w.hosts {
		h.slow = 1
		if h.paused {
			h.paused = false
			h.wake()
		}
	}
	// A node whose disk failed needs a restart, as an operator would give it.
	w.after(5*time.Second, func() {
		for _, h := range w.hosts {
			if h.node != nil && h.node.Engine() != nil && h.node.Engine().Err() != nil {
				h.kill(false)
			}
			h.start()
		}
	})
	for _, p := range s.producers {
		p.limit = p.acked + p.pipeline + 5 // what is under way, and a few more
	}
}

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
