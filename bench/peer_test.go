package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// fakePeer is a peer that lives in the test process. Its protocol: a publish is a length and a value, its answer the number
// of the message; a consumer says hello with one byte, gets messages in the same form and acknowledges each with a byte,
// which is answered with an empty message. Every second answer to a publish overtakes the one before.
func fakePeer(slow bool) *Peer {
	name := "fake"
	if slow {
		name = "fake-slow"
	}
	return &Peer{Name: name, Nodes: 1, Durable: true, About: "in this process", SlowStart: slow, Missing: func(*PeerOptions) error { return nil }, Version: func(*PeerOptions) string { return "1" },
		Start: func(context.Context, *PeerOptions) (PeerServer, error) {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				return nil, err
			}
			s := &fakeServer{ln: ln}
			s.wg.Go(s.accept)
			return s, nil
		}}
}

type fakeServer struct {
	ln     net.Listener
	wg     sync.WaitGroup
	mu     sync.Mutex
	queues []*fakeQueue
	conns  []net.Conn
}

type fakeQueue struct {
	mu       sync.Mutex
	arrived  *sync.Cond
	messages [][]byte
	next     int // to deliver
	closed   bool
	stall    time.Duration // after the first message arrived, before anything else happens
}

func (s *fakeServer) Create(_ context.Context, first, n int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if first != len(s.queues) {
		return errors.New("a queue is made twice or left out")
	}
	for range n {
		q := &fakeQueue{}
		q.arrived = sync.NewCond(&q.mu)
		s.queues = append(s.queues, q)
	}
	return nil
}

func (s *fakeServer) Processes() []int { return nil }

func (s *fakeServer) Stop() error {
	s.ln.Close()
	s.mu.Lock()
	for _, c := range s.conns {
		c.Close()
	}
	for _, q := range s.queues {
		q.mu.Lock()
		q.closed = true
		q.arrived.Broadcast()
		q.mu.Unlock()
	}
	s.mu.Unlock()
	s.wg.Wait()
	return nil
}

// dial connects and says what the connection is for: 'P' or 'C' and the queue.
func (s *fakeServer) dial(kind byte, queue int) (net.Conn, error) {
	c, err := net.Dial("tcp", s.ln.Addr().String())
	if err != nil {
		return nil, err
	}
	_, err = c.Write([]byte{kind, byte(queue)})
	return c, err
}

func (s *fakeServer) Producer(_ context.Context, queue int) (ProducerConn, error) {
	c, err := s.dial('P', queue)
	return &fakeProducer{c}, err
}

func (s *fakeServer) Consumer(_ context.Context, queue, _ int, _ bool) (ConsumerConn, error) {
	c, err := s.dial('C', queue)
	return &fakeConsumer{c}, err
}

func (s *fakeServer) accept() {
	for {
		c, err := s.ln.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		s.conns = append(s.conns, c)
		s.mu.Unlock()
		s.wg.Go(func() {
			defer c.Close()
			var kind [2]byte
			if _, err := io.ReadFull(c, kind[:]); err != nil {
				return
			}
			s.mu.Lock()
			q := s.queues[kind[1]]
			s.mu.Unlock()
			if kind[0] == 'P' {
				q.serveProducer(c)
			} else {
				q.serveConsumer(c)
			}
		})
	}
}

func (q *fakeQueue) serveProducer(c net.Conn) {
	var held []byte
	for id := uint64(0); ; id++ {
		var head [4]byte
		// What is held back leaves when nothing else comes for a moment: the window may be as small as one.
		_ = c.SetReadDeadline(time.Now().Add(time.Millisecond))
		_, err := io.ReadFull(c, head[:])
		if err != nil && len(held) > 0 {
			if _, werr := c.Write(held); werr != nil {
				return
			}
			held = nil
		}
		if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
			id--
			continue
		}
		if err != nil {
			return
		}
		_ = c.SetReadDeadline(time.Time{})
		value := make([]byte, binary.BigEndian.Uint32(head[:]))
		if _, err := io.ReadFull(c, value); err != nil {
			return
		}
		if id == 0 {
			time.Sleep(q.stall)
		}
		q.mu.Lock()
		q.messages = append(q.messages, value)
		q.arrived.Broadcast()
		q.mu.Unlock()
		answer := binary.BigEndian.AppendUint64(nil, id)
		if held == nil {
			held = answer
			continue
		}
		if _, err := c.Write(append(answer, held...)); err != nil {
			return
		}
		held = nil
	}
}

func (q *fakeQueue) serveConsumer(c net.Conn) {
	var one [1]byte
	if _, err := io.ReadFull(c, one[:]); err != nil {
		return
	}
	for {
		q.mu.Lock()
		for q.next == len(q.messages) && !q.closed {
			q.arrived.Wait()
		}
		if q.closed {
			q.mu.Unlock()
			return
		}
		m := q.messages[q.next]
		q.next++
		q.mu.Unlock()
		out := binary.BigEndian.AppendUint32(nil, uint32(len(m)))
		if _, err := c.Write(append(out, m...)); err != nil {
			return
		}
		if _, err := io.ReadFull(c, one[:]); err != nil {
			return
		}
		if _, err := c.Write(make([]byte, 4)); err != nil {
			return
		}
	}
}

type fakeProducer struct{ c net.Conn }

func (p *fakeProducer) Conn() net.Conn { return p.c }

func (p *fakeProducer) Append(dst []byte, _ uint64, value []byte) []byte {
	return append(binary.BigEndian.AppendUint32(dst, uint32(len(value))), value...)
}

func (p *fakeProducer) Answers(b, out []byte, done func(uint64, bool)) (int, []byte, error) {
	n := 0
	for ; len(b)-n >= 8; n += 8 {
		done(binary.BigEndian.Uint64(b[n:]), false)
	}
	return n, out, nil
}

type fakeConsumer struct{ c net.Conn }

func (p *fakeConsumer) Conn() net.Conn { return p.c }

func (p *fakeConsumer) Open(out []byte) []byte { return append(out, 'H') }

func (p *fakeConsumer) Take(b, out []byte, in Inbox) (int, []byte, error) {
	n := 0
	for len(b)-n >= 4 {
		size := int(binary.BigEndian.Uint32(b[n:]))
		if len(b)-n-4 < size {
			break
		}
		if size == 0 {
			in.Acknowledged(1)
		} else {
			in.Message(b[n+4 : n+4+size])
			out = append(out, 'A')
		}
		n += 4 + size
	}
	return n, out, nil
}

func newFake(t *testing.T) *fakeServer {
	t.Helper()
	srv, err := fakePeer(false).Start(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { srv.Stop() })
	if err := srv.Create(t.Context(), 0, 1); err != nil {
		t.Fatal(err)
	}
	return srv.(*fakeServer)
}

func TestPeerPublisher_AnswersMayOvertakeOneAnother(t *testing.T) {
	s := newFake(t)
	conn, err := s.Producer(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	p := newPeerPublisher(conn, 64, 100, 1)
	defer p.Close()
	for range 2 { // runs continue one another
		if err := p.Run(5001, nil); err != nil {
			t.Fatal(err)
		}
	}
	if p.Completed() != 10002 || p.Latency().TotalCount() != 10002 || len(s.queues[0].messages) != 10002 {
		t.Errorf("%d acknowledged, %d latencies, %d stored, want 10002 of each", p.Completed(), p.Latency().TotalCount(), len(s.queues[0].messages))
	}
}

func TestPeerPublisher_RatedLatencyCountsFromWhenAMessageWasDue(t *testing.T) {
	s := newFake(t)
	s.queues[0].stall = 150 * time.Millisecond // with a window of 8 the messages that become due meanwhile can't even be sent
	conn, err := s.Producer(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	p := newPeerPublisher(conn, 8, 100, 1)
	defer p.Close()
	if err := p.RunRated(t.Context(), 2000, 50, 500); err != nil {
		t.Fatal(err)
	}
	if got := p.Latency().TotalCount(); got != 500 {
		t.Fatalf("%d latencies recorded, want those of 500 messages", got)
	}
	late := int64(0)
	for _, bar := range p.Latency().Distribution() {
		if bar.From >= int64(10*time.Millisecond) {
			late += bar.Count
		}
	}
	if late < 100 {
		t.Errorf("%d messages were at least 10 ms late: the stall was omitted", late)
	}
}

func TestPeerPublisher_WhatCannotBeSentInTimeIsCountedAsLate(t *testing.T) {
	s := newFake(t)
	s.queues[0].stall = 300 * time.Millisecond // a run of 100 ms is given 150
	conn, err := s.Producer(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	p := newPeerPublisher(conn, 8, 100, 1)
	defer p.Close()
	p.patience = 50 * time.Millisecond
	if err := p.RunRated(t.Context(), 2000, 0, 200); err != nil {
		t.Fatal(err)
	}
	late := p.Unsent()
	if late == nil {
		t.Fatal("everything was sent")
	}
	// The window lets 8 through, fewer if this machine was slow itself.
	if p.Completed() > 8 || int64(p.Completed())+late.TotalCount() != 200 || late.Max() < int64(100*time.Millisecond) {
		t.Errorf("%d messages acknowledged, %d unsent, the latest by %v", p.Completed(), late.TotalCount(), time.Duration(late.Max()))
	}
}

func TestPeerPublisher_AStrayAnswerIsAnError(t *testing.T) {
	p := newPeerPublisher(&fakeProducer{}, 8, 100, 1)
	p.next.Store(5)
	for _, tt := range []struct {
		id    uint64
		all   bool
		stray bool
	}{{3, false, false}, {2, true, false}, {1, false, true}, {5, false, true}, {4, true, false}, {4, true, false}} {
		p.stray = nil
		p.acknowledged(tt.id, tt.all)
		if (p.stray != nil) != tt.stray {
			t.Errorf("answer for %d, all %v: %v", tt.id, tt.all, p.stray)
		}
	}
	if p.low.Load() != 5 || p.count.Load() != 5 {
		t.Errorf("%d answers counted, everything below %d, want 5 and 5", p.count.Load(), p.low.Load())
	}
}

func TestPeerConsumer_MembersReceiveTogetherWhatWasPublished(t *testing.T) {
	s := newFake(t)
	conn, err := s.Producer(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	p := newPeerPublisher(conn, 64, 100, 1)
	defer p.Close()
	total := NewTally(unknownYet, 0)
	team, ctx := newTeam(t.Context())
	var members []*peerConsumer
	for i := range 3 {
		w, err := s.Consumer(ctx, 0, i, false)
		if err != nil {
			t.Fatal(err)
		}
		c := newPeerConsumer(w, total, true)
		members = append(members, c)
		defer c.Close()
		team.start(func() error { return c.Run(ctx) })
	}
	if err := p.Run(2000, nil); err != nil {
		t.Fatal(err)
	}
	total.want.Store(p.Completed())
	if err := team.wait(); err != nil {
		t.Fatal(err)
	}
	var delivered, acked int64
	for _, m := range members {
		d, a := m.Latencies()
		delivered, acked = delivered+d.TotalCount(), acked+a.TotalCount()
	}
	if total.received.Load() != 2000 || total.bytes.Load() != 200_000 || delivered != 2000 || acked != 2000 {
		t.Errorf("%d messages, %d bytes received, %d and %d latencies", total.received.Load(), total.bytes.Load(), delivered, acked)
	}
}

func TestPeerLoad_AServerThatGoesAwayIsAnError(t *testing.T) {
	s := newFake(t)
	conn, err := s.Producer(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	p := newPeerPublisher(conn, 64, 100, 1)
	defer p.Close()
	calls := 0
	err = p.Run(0, func() bool {
		if calls++; calls == 100 {
			s.Stop()
		}
		return true
	})
	if err == nil {
		t.Error("no error after the server was gone")
	}
}
