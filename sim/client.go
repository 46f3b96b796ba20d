package sim

import (
	"bytes"
	"encoding/binary"
	"errors"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/engine"
	"github.com/mortarmq/mortarmq/engine/coord"
	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/protocol"
)

// intake is what an event loop of a node's client port is.
type intake interface {
	Publish(c coord.Client, req uint64, p *protocol.Pub)
	Request(c coord.Client, req uint64, op protocol.Op, payload []byte)
	Flush() (lend bool)
}

// session is a connection of a client to a node; the network between them takes time, and loses everything when either end
// goes.
type session struct {
	w    *world
	id   uint64
	host *host
	life int
	in   intake
	next uint64
	wait map[uint64]func(payload []byte, err error)
	// push gets what the node sends by itself, and when it did.
	push  func(op protocol.Op, payload []byte, sent sending)
	ended bool
	pulls atomic.Int32
	// out and back are when the newest frame of a direction arrives: they keep their order.
	out, back time.Duration
	// ready are answers that wait for those of earlier requests; answered counts those that were passed on.
	ready    map[uint64]func()
	answered uint64
	// onEnd is called when the node closes the connection.
	onEnd func()
}

// sending is when a node has sent something, and in which epoch it was.
type sending struct {
	at    time.Duration
	epoch replica.Epoch
}

// dial connects to a node; nil if it is down.
func (w *world) dial(h *host) *session {
	if h.node == nil || h.paused {
		return nil
	}
	w.order++
	s := &session{w: w, id: w.order, host: h, life: h.life, wait: map[uint64]func([]byte, error){}, ready: map[uint64]func(){}}
	s.in = h.node.NewIngress()
	return s
}

func (s *session) alive() bool { return !s.ended && s.host.node != nil && s.host.life == s.life }

// toNode has f run at the node after the network's delay.
func (s *session) toNode(f func()) {
	s.out = max(s.out+1, s.w.now+s.w.between(20*time.Microsecond, 300*time.Microsecond))
	s.w.after(s.out-s.w.now, func() { s.arrive(f) })
}

// arrive has f run at the node, once it is not paused.
func (s *session) arrive(f func()) {
	switch {
	case !s.alive():
	case s.host.paused:
		s.w.after(10*time.Millisecond, func() { s.arrive(f) })
	default:
		f()
		s.in.Flush()
		s.host.wake()
	}
}

func (s *session) toClient(f func()) {
	s.back = max(s.back+1, s.w.now+s.w.between(20*time.Microsecond, 300*time.Microsecond))
	s.w.after(s.back-s.w.now, func() {
		if !s.ended {
			f()
		}
	})
}

// close ends the connection from the client's side.
func (s *session) close() {
	if s == nil || s.ended {
		return
	}
	s.ended = true
	if s.host.node != nil && s.host.life == s.life {
		h, life := s.host, s.life
		s.w.after(100*time.Microsecond, func() {
			if h.node != nil && h.life == life {
				h.node.ClientClosed(s)
				h.wake()
			}
		})
	}
}

// publish sends a PUB; done gets its outcome unless the connection ends before.
func (s *session) publish(p protocol.Pub, done func(protocol.PubResult, error)) {
	s.toNode(func() {
		req := s.request(func(b []byte, err error) {
			var r protocol.PubResult
			if err == nil {
				err = r.Decode(b)
			}
			done(r, err)
		})
		s.in.Publish(s, req, &p)
	})
}

// ask sends any other request; frame is a whole one.
func (s *session) ask(op protocol.Op, frame []byte, done func(payload []byte, err error)) {
	s.toNode(func() { s.in.Request(s, s.request(done), op, frame[5:]) })
}

func (s *session) request(done func([]byte, error)) uint64 {
	s.next++
	s.wait[s.next-1] = done
	return s.next - 1
}

// ID implements coord.Client, as the methods below do.
func (s *session) ID() uint64 { return s.id }

// Complete implements coord.Client.
func (s *session) Complete(req uint64, frame []byte) {
	done := s.wait[req]
	if done == nil {
		s.w.fail("node %d answers request %d of a connection twice, or one that was never made", s.host.id, req)
		return
	}
	delete(s.wait, req)
	op, payload, _, err := protocol.ParseFrame(bytes.Clone(frame))
	if err != nil {
		s.w.fail("node %d answers with a malformed frame: %v", s.host.id, err)
		return
	}
	s.ready[req] = func() {
		if op == protocol.OpErr {
			var e protocol.ErrFrame
			if err := e.Decode(payload); err != nil {
				s.w.fail("a malformed ERR: %v", err)
				return
			}
			done(nil, &protocol.Error{Code: e.Code, RequestOp: e.RequestOp, Message: string(e.Message)})
			return
		}
		var ok protocol.OKFrame
		if err := ok.Decode(payload); err != nil {
			s.w.fail("a malformed OK: %v", err)
			return
		}
		done(ok.Result, nil)
	}
	for f := s.ready[s.answered]; f != nil; f = s.ready[s.answered] {
		delete(s.ready, s.answered)
		s.answered++
		s.toClient(f)
	}
}

// Push implements coord.Client.
func (s *session) Push(frames []byte) {
	frames = bytes.Clone(frames)
	sent := sending{s.w.now, s.host.node.Status().Epoch}
	s.toClient(func() {
		for len(frames) > 0 {
			op, payload, n, err := protocol.ParseFrame(frames)
			if err != nil || n == 0 {
				s.w.fail("node %d pushes a malformed frame: %v", s.host.id, err)
				return
			}
			if s.push != nil {
				s.push(op, payload, sent)
			}
			frames = frames[n:]
		}
	})
}

// PushOwned implements coord.Client.
func (s *session) PushOwned(frames []byte, owner coord.Releaser) {
	s.Push(frames)
	owner.Release()
}

// PushValue implements coord.Client.
func (s *session) PushValue(head, value []byte, owner coord.Releaser) {
	s.Push(append(bytes.Clone(head), value...))
	owner.Release()
}

// Flush implements coord.Client.
func (s *session) Flush() {}

// Outstanding implements coord.Client.
func (s *session) Outstanding() int { return 0 }

// Pulls implements coord.Client.
func (s *session) Pulls() *atomic.Int32 { return &s.pulls }

// Shut implements coord.Client.
func (s *session) Shut(protocol.ErrorCode, protocol.Op, string) {
	s.toClient(func() {
		s.close()
		if s.onEnd != nil {
			s.onEnd()
		}
	})
}

var _ coord.Client = (*session)(nil)
var _ intake = engine.NodeIngress(nil)

// leaderOf returns the node that an error names as the leader, 0 if none.
func leaderOf(err error) replica.NodeID {
	var e *protocol.Error
	if !errors.As(err, &e) || e.Code != protocol.CodeStaleLeaderEpoch {
		return 0
	}
	named, ok := strings.CutPrefix(e.Message, "leader=")
	if !ok {
		return 0
	}
	name, _, _ := strings.Cut(named, " ")
	id, err := strconv.ParseUint(name, 10, 8)
	if err != nil {
		return 0 // it knows none
	}
	return replica.NodeID(id)
}

// producer publishes numbered messages to one partition, several at a time, and sends again whatever it got no answer to.
type producer struct {
	w         *world
	r         *record
	id        uint64
	topic     uint16
	partition uint16
	s         *session
	at        replica.NodeID
	acked     uint64 // everything up to here
	limit     uint64
	pipeline  uint64
	pace      time.Duration
	pumping   bool
	broken    bool            // an answer to it was an error
	sent      map[uint64]bool // since it connected
	timer     int
}

// valueOf is the content of a message: it tells everything about it.
func valueOf(producer, seq uint64) []byte {
	b := make([]byte, 16+int(producer*7+seq*13)%200)
	binary.BigEndian.PutUint64(b, producer)
	binary.BigEndian.PutUint64(b[8:], seq)
	return b
}

// begin connects, to the node named or any.
func (p *producer) begin(to replica.NodeID) {
	if p.s != nil {
		p.s.close()
	}
	if to == 0 {
		to = replica.NodeID(p.w.rng.IntN(3) + 1)
	}
	p.at = to
	p.s = p.w.dial(p.w.hosts[to-1])
	p.sent, p.broken = map[uint64]bool{}, false
	p.timer++
	if p.s == nil {
		p.again(0)
		return
	}
	p.s.onEnd = func() { p.again(0) }
	p.pump()
	p.watch()
}

// again connects anew after a moment.
func (p *producer) again(to replica.NodeID) {
	p.timer++
	mine := p.timer
	p.w.after(p.w.between(5*time.Millisecond, 60*time.Millisecond), func() {
		if p.timer == mine {
			p.begin(to)
		}
	})
}

// watch gives up a connection on which nothing happens.
func (p *producer) watch() {
	mine, acked := p.timer, p.acked
	p.w.after(time.Second, func() {
		switch {
		case p.timer != mine || p.done():
		case p.acked == acked:
			p.begin(0)
		default:
			p.watch()
		}
	})
}

func (p *producer) done() bool { return p.acked >= p.limit }

// pumpLater pumps after a moment, once for all answers that come until then.
func (p *producer) pumpLater() {
	if p.pumping {
		return
	}
	p.pumping = true
	p.w.after(p.w.between(0, p.pace), func() {
		p.pumping = false
		if p.s != nil {
			p.pump()
		}
	})
}

// pump sends what may be sent.
func (p *producer) pump() {
	s := p.s
	for seq := p.acked + 1; seq <= min(p.acked+p.pipeline, p.limit); seq++ {
		if p.sent[seq] {
			continue
		}
		p.sent[seq] = true
		p.r.published(p.id, seq)
		s.publish(protocol.Pub{
			TopicID: p.topic, Partition: p.partition, ProducerID: p.id, ProducerSeq: seq, Value: valueOf(p.id, seq),
			Flags: uint16(protocol.DurabilityQuorum),
		}, func(res protocol.PubResult, err error) {
			if s != p.s {
				return
			}
			if err != nil {
				p.broken = true
				p.again(leaderOf(err))
				return
			}
			p.r.acknowledged(p.topic, p.partition, p.id, seq, res)
			if p.broken {
				return // what got an error may have been stored: it is sent again
			}
			if seq == p.acked+1 {
				p.acked = seq
			} else if seq > p.acked {
				p.w.fail("producer %d got the answers out of order: %d behind %d", p.id, seq, p.acked)
			}
			p.pumpLater()
		})
	}
}
