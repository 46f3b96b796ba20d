package client

import (
	"bytes"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// kept waits until the server has seen that a client has shut its side, and goes on writing to it.
func kept(t *testing.T, c *conn) {
	t.Helper()
	eventually(t, "the server keeps the socket", func() bool {
		c.writing.Lock()
		defer c.writing.Unlock()
		return c.kept
	})
}

func answer(j *job) {
	j.c.Complete(j.req, answerTo(nil, j))
	j.c.Flush()
}

// TestServer_AnswersAClientThatHasShutItsSide: what was asked before is answered, then the connection ends.
func TestServer_AnswersAClientThatHasShutItsSide(t *testing.T) {
	e := newFakeEngine(1)
	e.hold = func(j job) bool { return j.op == protocol.OpPub || j.op == protocol.OpPull }
	s := serve(t, e, nil)
	p := connect(t, s)
	pull := protocol.Pull{}
	p.send(pull.AppendFrame(pubFrame(pubFrame(nil, 1, nil), 2, nil)))
	held := e.takeHeld(t, 3)
	if err := p.conn.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	kept(t, held[0].c.(*conn))
	wait(t, "the waiting PULL is interrupted", e.interrupts)
	select {
	case <-e.gone:
		t.Fatal("the engine was told that the client is gone")
	default:
	}
	for i := range held {
		answer(&held[i])
	}
	p.expectPub(1)
	p.expectPub(2)
	p.expectOK(protocol.OpPull)
	p.expectEOF()
	wait(t, "the engine hears of the end", e.gone)
}

// TestServer_SendsMuchToAClientThatHasShutItsSide has more queued than the socket takes.
func TestServer_SendsMuchToAClientThatHasShutItsSide(t *testing.T) {
	e := newFakeEngine(1)
	e.hold = func(j job) bool { return j.op == protocol.OpPub }
	s := serve(t, e, func(o *Options) { o.MaxOutbound = 64 << 20 })
	p := connect(t, s)
	p.send(pubFrame(nil, 1, nil))
	held := e.takeHeld(t, 1)
	if err := p.conn.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	c := held[0].c.(*conn)
	kept(t, c)
	m := protocol.Msg{Value: bytes.Repeat([]byte("m"), 1<<20)}
	frame := m.AppendFrame(nil)
	const frames = 24
	for range frames {
		c.Push(frame)
	}
	answer(&held[0])
	for range frames {
		p.expect(frame)
	}
	p.expectPub(1)
	p.expectEOF()
}

// TestServer_AClientThatIsGoneIsLetGo: the client has closed the connection altogether, which looks the same at first.
func TestServer_AClientThatIsGoneIsLetGo(t *testing.T) {
	e := newFakeEngine(1)
	e.hold = func(j job) bool { return j.op == protocol.OpPub }
	s := serve(t, e, nil)
	p := connect(t, s)
	p.send(pubFrame(pubFrame(nil, 1, nil), 2, nil))
	held := e.takeHeld(t, 2)
	if err := p.conn.Close(); err != nil {
		t.Fatal(err)
	}
	kept(t, held[0].c.(*conn))
	answer(&held[0]) // is answered by a reset
	answer(&held[1])
	wait(t, "the engine hears of the end", e.gone)
	eventually(t, "no connection is left", func() bool { return s.Stats().Connections == 0 })
}

// TestServer_AClientThatHasShutItsSideIsNotWaitedForForEver: the engine never answers.
func TestServer_AClientThatHasShutItsSideIsNotWaitedForForEver(t *testing.T) {
	e := newFakeEngine(1)
	e.hold = func(j job) bool { return j.op == protocol.OpPub }
	s := serve(t, e, func(o *Options) { o.AnswerGrace = 50 * time.Millisecond })
	p := connect(t, s)
	p.send(pubFrame(nil, 1, nil))
	e.takeHeld(t, 1)
	if err := p.conn.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	p.expectEOF()
	wait(t, "the engine hears of the end", e.gone)
}

// TestServer_ShutdownClosesWhatItKept ends the server while it waits for an answer.
func TestServer_ShutdownClosesWhatItKept(t *testing.T) {
	e := newFakeEngine(1)
	e.hold = func(j job) bool { return j.op == protocol.OpPub }
	s := serve(t, e, nil) // shut down by an ended context, and checked, at the end of the test
	p := connect(t, s)
	p.send(pubFrame(nil, 1, nil))
	held := e.takeHeld(t, 1)
	if err := p.conn.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	kept(t, held[0].c.(*conn))
}
