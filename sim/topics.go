package sim

import (
	"fmt"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// Topics come and go beside the one that is checked, so that deletions meet elections, catch-ups and files that are being made.

// passingProducer is the first of the producers that publish to them, each to one.
const passingProducer = 1000

// passing is a topic that is declared, gets a few messages, and is deleted again.
type passing struct {
	s    *scenario
	name string
	id   uint16
	n    uint64 // its number, from 1
	sent uint64
}

// topicsComeAndGo has one come, while there are faults.
func (s *scenario) topicsComeAndGo() {
	if s.quiet {
		return
	}
	s.passed++
	(&passing{s: s, n: s.passed, name: fmt.Sprintf("passing-%d", s.passed)}).declare()
	s.w.after(s.w.between(500*time.Millisecond, 4*time.Second), s.topicsComeAndGo)
}

// ask sends a request to any node, again and again until one has carried it out or the faults end.
func (p *passing) ask(frame []byte, then func(result []byte)) {
	w, done := p.s.w, false
	var try func()
	try = func() {
		if done || p.s.quiet {
			return
		}
		if c := w.dial(w.hosts[w.rng.IntN(len(w.hosts))]); c != nil {
			c.ask(protocol.OpDeclare, frame, func(b []byte, err error) {
				c.close()
				if err == nil && !done {
					done = true
					then(b)
				}
			})
		}
		w.after(300*time.Millisecond, try)
	}
	try()
}

func (p *passing) declare() {
	w := p.s.w
	p.ask((&protocol.Declare{Topic: []byte(p.name), Partitions: 1 + uint16(w.rng.IntN(partitions))}).AppendFrame(nil), func(b []byte) {
		var res protocol.DeclareResult
		if err := res.Decode(b); err != nil {
			w.fail("a malformed answer to DECLARE: %v", err)
			return
		}
		p.id = res.TopicID
		for range w.rng.IntN(6) {
			w.after(w.between(0, 2*time.Second), p.publish)
		}
		w.after(w.between(200*time.Millisecond, 3*time.Second), p.remove)
	})
}

// publish sends a few messages, once: whether they are stored is not known.
func (p *passing) publish() {
	w := p.s.w
	c := w.dial(w.hosts[w.rng.IntN(len(w.hosts))])
	if c == nil || p.s.quiet {
		return
	}
	for range 1 + w.rng.IntN(20) {
		p.sent++
		c.publish(protocol.Pub{
			TopicID: p.id, ProducerID: passingProducer + p.n, ProducerSeq: p.sent, Value: valueOf(passingProducer+p.n, p.sent), Flags: uint16(protocol.DurabilityQuorum),
		}, func(protocol.PubResult, error) {})
	}
	w.after(2*time.Second, c.close)
}

func (p *passing) remove() {
	p.ask((&protocol.Declare{Topic: []byte(p.name), Flags: protocol.DeclareFlagDelete}).AppendFrame(nil), func([]byte) { p.s.w.count(topicDeleted) })
}
