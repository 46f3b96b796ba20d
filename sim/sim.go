package sim

import (
	"io"
	"math/rand/v2"
	"runtime/debug"
	"time"

	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/protocol"
)

// Options configures a run.
type Options struct {
	Seed uint64
	// Logs is how many journals each node has, which are logs of their own, with the metadata in the first; 0 means 1.
	Logs int
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
	// Digest is a checksum of all that happened: two runs of one seed have the same.
	Digest uint64
}

const (
	partitions = 3
	// messagesEach bounds what a producer publishes while there are faults.
	messagesEach = 200
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
	w := &world{seed: o.Seed, logs: max(o.Logs, 1), rng: rand.New(rand.NewPCG(o.Seed, 1)), seen: map[string]int{}}
	if o.Seed%vouchRuns == 0 {
		w.vouched = &vouching{}
	}
	for id := replica.NodeID(1); id <= 3; id++ {
		w.hosts = append(w.hosts, newHost(w, id, o.Log))
	}
	w.net = newNetwork(w)
	s := &scenario{w: w, r: newRecord(w)}
	s.guarded(o)
	for _, h := range w.hosts {
		if h.node != nil {
			h.stop()
		}
		h.discard()
	}
	return Result{Failure: w.failed, Trace: w.report(), Seen: w.seen, Simulated: w.now, Acknowledged: len(s.r.at), Digest: w.digest()}
}

// scenario is what happens in a run.
type scenario struct {
	w         *world
	r         *record
	topic     uint16
	producers []*producer
	groups    []*group
	quiet     bool // no more faults
	// passed counts the topics that have come and gone, see topics.go.
	passed uint64
	// topics are the names by id, at the end.
	topics map[uint16]string
	// victim is the only host whose disk loses or falsifies what it holds; nil: none does.
	victim *host
}

// guarded turns a panic of whatever runs into a failure of the run.
func (s *scenario) guarded(o Options) {
	defer func() {
		if p := recover(); p != nil {
			s.w.fail("panic: %v\n%s", p, debug.Stack())
			for _, h := range s.w.hosts {
				h.node = nil // it can't be trusted to end in order
			}
		}
	}()
	s.run(o)
}

func (s *scenario) run(o Options) {
	w := s.w
	for _, h := range w.hosts {
		h.start()
	}
	if !s.declare() {
		return
	}
	if w.chance(0.5) {
		s.victim = w.hosts[w.rng.IntN(3)]
		s.victim.victim = true
	}
	for i := range uint64(4) {
		s.producers = append(s.producers, &producer{
			w: w, r: s.r, id: i + 1, topic: s.topic, partition: uint16(i % partitions), limit: messagesEach, pipeline: 1 + uint64(w.rng.IntN(8)),
			pace: w.between(0, 500*time.Millisecond),
		})
	}
	for _, p := range s.producers {
		p.begin(0)
	}
	s.groups = []*group{newGroup(w, "billing", s.topic, false), newGroup(w, "audit", s.topic, true)}
	for _, g := range s.groups {
		for range 1 + w.rng.IntN(2) {
			g.join(s.r)
		}
	}
	w.after(w.between(0, time.Second), s.comeAndGo)
	w.after(w.between(0, 2*time.Second), s.topicsComeAndGo)
	newMonitor(w).run()
	w.after(w.between(0, time.Second), s.fault)
	w.run(w.now+o.Faults, nil)
	if w.failed != "" {
		return
	}
	s.calm()
	s.settle(o.Settle)
	if w.failed == "" && w.chance(0.25) {
		s.verify(o.Settle)
	}
	if w.failed == "" {
		s.finish()
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

// comeAndGo has members come, leave, vanish and fall silent, while there are faults.
func (s *scenario) comeAndGo() {
	if s.quiet {
		return
	}
	w := s.w
	w.after(w.between(500*time.Millisecond, 4*time.Second), s.comeAndGo)
	g := s.groups[w.rng.IntN(len(s.groups))]
	var there []*consumer
	for _, c := range g.members {
		if !c.stopped {
			there = append(there, c)
		}
	}
	c := there[w.rng.IntN(len(there))]
	switch n := w.rng.IntN(5); {
	case n == 0 && len(there) < partitions-1:
		g.join(s.r)
	case n == 1 && len(there) > 1:
		c.leave()
	case n == 2 && len(there) > 1:
		c.stop()
	case n == 3:
		c.begin(0) // its connection breaks
	case n == 4:
		c.mute = true
		w.after(w.between(time.Second, 8*time.Second), c.speak)
	}
}

// silence is how long members give nothing up although asked to, longer than a broker waits.
const silence = 10 * time.Second

// calm ends the faults.
func (s *scenario) calm() {
	w := s.w
	w.note("the faults end")
	s.quiet = true
	w.net.loss, w.net.jitter = 0, usualJitter
	w.net.heal()
	for _, h := range w.hosts {
		h.slow = 1
		h.full(0)
		if h.paused {
			h.paused = false
			h.wake()
		}
	}
	// A node whose disk failed needs a restart, as an operator would give it.
	w.after(5*time.Second, func() {
		for _, h := range w.hosts {
			if h.failed() {
				h.kill()
			}
			h.start()
			if h.node == nil && h.victim {
				// The refusal names a file that can't be read: it is moved aside with all the others.
				w.count(operatorSetAside)
				h.wipe()
				h.start()
			}
		}
	})
	for _, p := range s.producers {
		p.limit = p.acked + p.pipeline + 5 // what is under way, and a few more
	}
	if w.chance(0.6) {
		w.note("members that give nothing up on demand are joined by another one")
		g := s.groups[0]
		for _, c := range g.members {
			c.mute = true
			w.after(silence, c.speak)
		}
		g.join(s.r)
	}
}
