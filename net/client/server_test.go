package client

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

func TestServer_AnswersInRequestOrderHoweverTheEngineFinishes(t *testing.T) {
	for _, loops := range []int{1, 2} {
		t.Run(fmt.Sprintf("%d loops", loops), func(t *testing.T) {
			s := serve(t, newFakeEngine(4), func(o *Options) { o.Loops = loops })
			var wg sync.WaitGroup
			for id := range 4 {
				p := connect(t, s)
				wg.Go(func() { pipeline(t, p, rand.New(rand.NewPCG(1, uint64(id))), 5000) })
			}
			wg.Wait()
		})
	}
}

// pipeline sends n requests of several kinds without waiting and checks the answers' order.
func pipeline(t *testing.T, p *peer, rnd *rand.Rand, n int) {
	var out []byte
	var want [][]byte
	for seq := range uint64(n) {
		switch rnd.IntN(8) {
		case 0:
			out = protocol.AppendPing(out)
			want = append(want, protocol.AppendOKEmpty(nil, protocol.OpPing))
		case 1:
			m := protocol.Ack{Sequence: seq}
			out = m.AppendFrame(out)
			want = append(want, protocol.AppendOKEmpty(nil, protocol.OpAck))
		default:
			out = pubFrame(out, seq, make([]byte, rnd.IntN(300)))
			want = append(want, answerTo(nil, &job{op: protocol.OpPub, seq: seq}))
		}
	}
	go func() {
		for len(out) > 0 {
			k := min(len(out), 1+rnd.IntN(100_000))
			if _, err := p.conn.Write(out[:k]); err != nil {
				t.Errorf("sending: %v", err)
				return
			}
			out = out[k:]
		}
	}()
	for i := range want {
		got, err := p.next()
		if err != nil || !bytes.Equal(got, want[i]) {
			t.Errorf("answer %d is % x, %v; want % x", i, got, err, want[i])
			return
		}
	}
}

func TestServer_Pipelines100000Publishes(t *testing.T) {
	const n = 100_000
	s := serve(t, newFakeEngine(3), func(o *Options) { o.MaxPending = n })
	p := connect(t, s)
	var out []byte
	for seq := range uint64(n) {
		out = pubFrame(out, seq, []byte("value"))
	}
	sent := make(chan error, 1)
	go func() { _, err := p.conn.Write(out); sent <- err }()
	for seq := range uint64(n) {
		if err := p.nextPub(seq); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
}

func TestServer_FramesSplitAtEveryByte(t *testing.T) {
	s := serve(t, newFakeEngine(2), nil)
	m := protocol.Ack{Sequence: 1}
	stream := connectFrame("token")
	stream = protocol.AppendPing(stream)
	stream = pubFrame(stream, 1, []byte("abc"))
	stream = m.AppendFrame(stream)
	stream = pubFrame(stream, 2, nil)
	received := s.Stats().BytesIn
	for cut := 1; cut < len(stream); cut++ {
		p := dial(t, s)
		p.send(stream[:cut])
		received += uint64(cut)
		eventually(t, "the first part is read", func() bool { return s.Stats().BytesIn == received })
		p.send(stream[cut:])
		received += uint64(len(stream) - cut)
		p.expectOK(protocol.OpConnect)
		p.expectOK(protocol.OpPing)
		p.expectPub(1)
		p.expectOK(protocol.OpAck)
		p.expectPub(2)
		_ = p.conn.Close()
	}
}

func TestServer_FramesSentByteByByte(t *testing.T) {
	s := serve(t, newFakeEngine(1), nil)
	stream := append(connectFrame("t"), pubFrame(nil, 9, []byte("xyz"))...)
	stream = protocol.AppendPing(stream)
	p := dial(t, s)
	for i := range stream {
		p.send(stream[i : i+1])
		eventually(t, "the byte is read", func() bool { return s.Stats().BytesIn == uint64(i+1) })
	}
	p.expectOK(protocol.OpConnect)
	p.expectPub(9)
	p.expectOK(protocol.OpPing)
}

func TestServer_HostileFramesGetTheirErrorAndClose(t *testing.T) {
	ok := connectFrame("t")
	ping := protocol.AppendPing(nil)
	pub := pubFrame(nil, 1, []byte("v"))
	malformedPub := bytes.Clone(pub)
	malformedPub[protocol.HeaderSize+4+8+8] = 0xFF // undefined flags
	reserved := bytes.Clone(ok)
	reserved[len(reserved)-1] = 1
	version := bytes.Clone(ok)
	version[protocol.HeaderSize] = 2
	frame := func(op protocol.Op, payload ...byte) []byte {
		b := binary.BigEndian.AppendUint32(nil, uint32(1+len(payload)))
		return append(append(b, byte(op)), payload...)
	}
	for _, c := range []struct {
		name string
		auth bool
		send []byte
		code protocol.ErrorCode
		op   protocol.Op
	}{
		{"length 0", true, []byte{0, 0, 0, 0}, protocol.CodeBadLength, 0},
		{"length 0 with more behind", true, append([]byte{0, 0, 0, 0}, ping...), protocol.CodeBadLength, 0},
		{"length above the cap", true, []byte{1, 0, 0, 1}, protocol.CodeBadLength, 0},
		{"length above the cap with op", true, []byte{1, 0, 0, 1, 3}, protocol.CodeBadLength, 3},
		{"largest length", true, []byte{0xFF, 0xFF, 0xFF, 0xFF, 3}, protocol.CodeBadLength, 3},
		{"op 0", true, frame(0), protocol.CodeUnknownOp, 0},
		{"op 16", true, frame(0x10), protocol.CodeUnknownOp, 0x10},
		{"op 255", true, frame(0xFF), protocol.CodeUnknownOp, 0xFF},
		{"op 16 of an incomplete frame", true, []byte{0, 0, 1, 0, 0x10}, protocol.CodeUnknownOp, 0x10},
		{"unknown op before CONNECT", false, frame(0x10), protocol.CodeUnknownOp, 0x10},
		{"PING with payload", true, frame(protocol.OpPing, 0), protocol.CodeMalformedPayload, protocol.OpPing},
		{"PUB with undefined flags", true, malformedPub, protocol.CodeMalformedPayload, protocol.OpPub},
		{"PUB too short", true, frame(protocol.OpPub, 0, 1), protocol.CodeMalformedPayload, protocol.OpPub},
		{"PUB empty", true, frame(protocol.OpPub), protocol.CodeMalformedPayload, protocol.OpPub},
		{"OK from a client", true, frame(protocol.OpOK, 7, 0, 0, 0, 0), protocol.CodeMalformedPayload, protocol.OpOK},
		{"MSG from a client", true, frame(protocol.OpMsg), protocol.CodeMalformedPayload, protocol.OpMsg},
		{"NOTICE from a client", true, frame(protocol.OpNotice), protocol.CodeMalformedPayload, protocol.OpNotice},
		{"malformed ERR", true, frame(protocol.OpErr, 1), protocol.CodeMalformedPayload, protocol.OpErr},
		{"second CONNECT", true, ok, protocol.CodeMalformedPayload, protocol.OpConnect},
		{"PUB before CONNECT", false, pub, protocol.CodeNotAuthenticated, protocol.OpPub},
		{"MSG before CONNECT", false, frame(protocol.OpMsg), protocol.CodeNotAuthenticated, protocol.OpMsg},
		{"SUB before CONNECT", false, frame(protocol.OpSub), protocol.CodeNotAuthenticated, protocol.OpSub},
		{"CONNECT of version 2", false, version, protocol.CodeUnsupportedVersion, protocol.OpConnect},
		{"CONNECT of version 0, short", false, frame(protocol.OpConnect, 0), protocol.CodeUnsupportedVersion, protocol.OpConnect},
		{"CONNECT with reserved set", false, reserved, protocol.CodeMalformedPayload, protocol.OpConnect},
		{"CONNECT empty", false, frame(protocol.OpConnect), protocol.CodeMalformedPayload, protocol.OpConnect},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newFakeEngine(1)
			s := serve(t, e, nil)
			p := dial(t, s)
			if c.auth {
				p.send(ok)
				p.expectOK(protocol.OpConnect)
			}
			p.send(c.send)
			p.expectErr(c.code, c.op)
			p.expectEOF()
			_ = p.conn.Close()
			eventually(t, "the connection is gone", func() bool { return s.Stats().Connections == 0 })
		})
	}
}

func TestServer_HostileFrameIsAnsweredBehindTheAnswersInFlight(t *testing.T) {
	e := newFakeEngine(1)
	e.hold = func(j job) bool { return j.op == protocol.OpPub }
	s := serve(t, e, nil)
	p := connect(t, s)
	var out []byte
	for seq := range uint64(3) {
		out = pubFrame(out, seq, nil)
	}
	out = append(out, 0, 0, 0, 0)
	out = pubFrame(out, 99, nil) // behind the broken frame nothing is read
	p.send(out)
	held := e.takeHeld(t, 3)
	for i := range held {
		j := &held[len(held)-1-i]
		j.c.Complete(j.req, answerTo(nil, j))
	}
	held[0].c.Flush()
	for seq := range uint64(3) {
		p.expectPub(seq)
	}
	p.expectErr(protocol.CodeBadLength, 0)
	p.expectEOF()
}

func TestServer_HostileFrameIsAnsweredThoughTheEngineStaysSilent(t *testing.T) {
	e := newFakeEngine(1)
	e.hold = func(job) bool { return true }
	s := serve(t, e, func(o *Options) { o.AnswerGrace = 20 * time.Millisecond })
	p := connect(t, s)
	p.send(append(pubFrame(nil, 1, nil), 0, 0, 0, 0))
	held := e.takeHeld(t, 1)
	p.expectErr(protocol.CodeBadLength, 0)
	p.expectEOF()
	held[0].c.Complete(held[0].req, answerTo(nil, &held[0])) // too late: a no-op
	held[0].c.Flush()
}

func TestServer_ErrFromAClientIsNotAnswered(t *testing.T) {
	s := serve(t, newFakeEngine(1), nil)
	p := dial(t, s)
	out := protocol.AppendErr(nil, protocol.CodeInternal, protocol.OpMsg, "cannot read this")
	out = append(out, connectFrame("t")...)
	out = protocol.AppendErr(out, protocol.CodeInternal, protocol.OpMsg, "nor this")
	p.send(protocol.AppendPing(out))
	p.expectOK(protocol.OpConnect)
	p.expectOK(protocol.OpPing)
}

func TestServer_PingIsAllowedBeforeConnect(t *testing.T) {
	s := serve(t, newFakeEngine(1), nil)
	p := dial(t, s)
	p.send([]byte{0, 0, 0, 1, 7})
	p.expect([]byte{0, 0, 0, 6, 9, 7, 0, 0, 0, 0})
}

func TestServer_ChecksTokens(t *testing.T) {
	digests := [][sha256.Size]byte{sha256.Sum256([]byte("one")), sha256.Sum256([]byte("two"))}
	e := newFakeEngine(1)
	s := serve(t, e, func(o *Options) { o.TokenDigests = digests })
	for _, token := range []string{"one", "two"} {
		p := dial(t, s)
		p.send(connectFrame(token))
		p.expectOK(protocol.OpConnect)
	}
	for _, token := range []string{"", "on", "onee", "three", string(digests[0][:]), strings.Repeat("x", 65535)} {
		p := dial(t, s)
		start := time.Now()
		p.send(append(connectFrame(token), pubFrame(nil, 1, nil)...))
		p.expectErr(protocol.CodeAuthFailed, protocol.OpConnect)
		if d := time.Since(start); d < 100*time.Millisecond {
			t.Errorf("token of %d bytes refused after %v", len(token), d)
		}
		p.expectEOF()
	}
	if n := s.Stats().AuthFailures; n != 6 {
		t.Errorf("%d authentication failures counted", n)
	}
	if e.closed.Load() != 0 {
		t.Error("the engine heard of connections that never authenticated")
	}
}

func TestServer_WrongTokenDoesNotDelayOthers(t *testing.T) {
	e := newFakeEngine(1)
	s := serve(t, e, func(o *Options) {
		o.TokenDigests = [][sha256.Size]byte{sha256.Sum256([]byte("t"))}
		o.AuthDelay = time.Hour
	})
	bad := dial(t, s)
	bad.send(connectFrame("wrong"))
	eventually(t, "the token is refused", func() bool { return s.Stats().AuthFailures == 1 })
	good := connect(t, s)
	good.send(pubFrame(nil, 1, nil))
	good.expectPub(1)
	_ = bad.conn.Close()
}

func TestServer_AnyTokenWithoutDigests(t *testing.T) {
	s := serve(t, newFakeEngine(1), nil)
	for _, token := range []string{"", "anything"} {
		p := dial(t, s)
		p.send(connectFrame(token))
		p.expectOK(protocol.OpConnect)
	}
}

func TestServer_AuthTimeout(t *testing.T) {
	s := serve(t, newFakeEngine(1), func(o *Options) { o.AuthTimeout = 30 * time.Millisecond })
	p := dial(t, s)
	p.expectErr(protocol.CodeAuthTimeout, 0)
	p.expectEOF()
}

func TestServer_PingsDoNotReplaceConnect(t *testing.T) {
	s := serve(t, newFakeEngine(1), func(o *Options) { o.AuthTimeout = 50 * time.Millisecond })
	p := dial(t, s)
	p.send(protocol.AppendPing(nil))
	p.expectOK(protocol.OpPing)
	p.expectErr(protocol.CodeAuthTimeout, 0)
	p.expectEOF()
}

func TestServer_KeepaliveClosesTheSilent(t *testing.T) {
	e := newFakeEngine(1)
	s := serve(t, e, func(o *Options) { o.Keepalive = 50 * time.Millisecond })
	p := connect(t, s)
	p.send(pubFrame(nil, 1, nil))
	p.expectPub(1)
	p.expectEOF()
	wait(t, "the engine hears of it", e.gone)
}

func TestServer_HalfFrameTimeout(t *testing.T) {
	whole := pubFrame(nil, 1, make([]byte, 1000))
	for _, n := range []int{1, 4, 5, 600} {
		s := serve(t, newFakeEngine(1), func(o *Options) { o.HalfFrame = 50 * time.Millisecond })
		p := connect(t, s)
		p.send(whole[:n])
		p.expectEOF()
		eventually(t, "the memory is back", func() bool { return s.Stats().PartialBytes == 0 })
	}
}

func TestServer_LargeFramesAreHandedOver(t *testing.T) {
	e := newFakeEngine(2)
	var mu sync.Mutex
	got := map[[sha256.Size]byte]int{}
	e.onPub = func(v []byte) {
		sum := sha256.Sum256(v)
		mu.Lock()
		got[sum]++
		mu.Unlock()
	}
	s := serve(t, e, nil)
	p := connect(t, s)
	rnd := rand.NewChaCha8([32]byte{1})
	sizes := []int{0, 1, 64<<10 - 40, 64 << 10, 100_000, 256 << 10, 1 << 20, 5 << 20, protocol.MaxValueLen}
	want := map[[sha256.Size]byte]int{}
	var out []byte
	for i, size := range sizes {
		v := make([]byte, size)
		_, _ = rnd.Read(v)
		want[sha256.Sum256(v)]++
		out = pubFrame(out, uint64(i), v)
	}
	go func() { _, _ = p.conn.Write(out) }()
	for i := range sizes {
		p.expectPub(uint64(i))
	}
	eventually(t, "all are released", func() bool { return e.owned.Load() == e.released.Load() })
	if e.owned.Load() < 5 {
		t.Errorf("only %d frames were handed over", e.owned.Load())
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Error("the values that arrived are not those that were sent")
	}
}

func TestServer_PartialFrameMemoryGrowsWithTheBytes(t *testing.T) {
	s := serve(t, newFakeEngine(1), nil)
	p := connect(t, s)
	frame := pubFrame(nil, 1, make([]byte, 10<<20))
	before := s.Stats().BytesIn
	sent := 0
	for next := 100; next < 2<<20; next *= 3 {
		p.send(frame[sent:next])
		sent = next
		eventually(t, "the bytes are read", func() bool { return s.Stats().BytesIn-before == uint64(sent) })
		eventually(t, "the memory is in proportion to them", func() bool { return s.Stats().PartialBytes <= int64(max(4*sent, 4<<10)) })
	}
}

func TestServer_PartialFrameBudgetClosesTheOffender(t *testing.T) {
	s := serve(t, newFakeEngine(1), func(o *Options) { o.PartialBytes = minPartialBytes })
	big := pubFrame(nil, 1, make([]byte, protocol.MaxValueLen))
	first := connect(t, s)
	go func() { _, _ = first.conn.Write(big[:len(big)-1]) }()
	eventually(t, "the first frame takes its memory", func() bool { return s.Stats().PartialBytes >= 16<<20 })
	second := connect(t, s)
	go func() { _, _ = second.conn.Write(big) }()
	second.expectErr(protocol.CodeBackpressure, 0)
	second.expectEOF()
	first.send(big[len(big)-1:])
	first.expectPub(1)
}

func TestServer_LargeFramesBeyondTheEnginesBudgetGetBackpressure(t *testing.T) {
	e := newFakeEngine(1)
	s := serve(t, e, nil)
	s.frames.owned.Add(s.frames.maxOwned) // as if the engine held that much
	t.Cleanup(func() { s.frames.owned.Add(-s.frames.maxOwned) })
	p := connect(t, s)
	out := pubFrame(nil, 1, make([]byte, 300<<10))
	go func() { _, _ = p.conn.Write(pubFrame(out, 2, nil)) }()
	p.expectErr(protocol.CodeBackpressure, protocol.OpPub)
	p.expectPub(2)
}

func TestServer_TooManyPendingPublishesGetBackpressureInOrder(t *testing.T) {
	e := newFakeEngine(1)
	e.hold = func(j job) bool { return j.op == protocol.OpPub }
	s := serve(t, e, func(o *Options) { o.MaxPending = 10 })
	p := connect(t, s)
	var out []byte
	for seq := range uint64(15) {
		out = pubFrame(out, seq, nil)
	}
	p.send(out)
	held := e.takeHeld(t, 10)
	eventually(t, "the others are refused", func() bool { return s.Stats().Busy == 5 })
	for i := range held {
		held[i].c.Complete(held[i].req, answerTo(nil, &held[i]))
	}
	held[0].c.Flush()
	for seq := range uint64(10) {
		p.expectPub(seq)
	}
	for range 5 {
		p.expectErr(protocol.CodeBackpressure, protocol.OpPub)
	}
}

func TestServer_ClosesWhoNeverStopsAsking(t *testing.T) {
	e := newFakeEngine(1)
	e.hold = func(job) bool { return true }
	s := serve(t, e, func(o *Options) { o.MaxPending = 10 })
	p := connect(t, s)
	m := protocol.Ack{}
	var out []byte
	for range 21 {
		out = m.AppendFrame(out)
	}
	p.send(out)
	p.expectErr(protocol.CodeBackpressure, protocol.OpAck)
	p.expectEOF()
}

func TestServer_RequestBehindAPullInterruptsItOnce(t *testing.T) {
	e := newFakeEngine(1)
	e.hold = func(j job) bool { return j.op == protocol.OpPull }
	s := serve(t, e, nil)
	p := connect(t, s)
	pull := protocol.Pull{SubscriptionID: 1}
	p.send(pull.AppendFrame(pull.AppendFrame(nil)))
	held := e.takeHeld(t, 2)
	if len(e.interrupts) != 0 {
		t.Fatal("a PULL was interrupted by a PULL")
	}
	p.send(protocol.AppendPing(pubFrame(nil, 1, nil)))
	if c := wait(t, "the interruption", e.interrupts); c != held[0].c {
		t.Fatal("another connection was interrupted")
	}
	for i := range held {
		held[i].c.Complete(held[i].req, protocol.AppendOKEmpty(nil, protocol.OpPull))
	}
	held[0].c.Flush()
	p.expectOK(protocol.OpPull)
	p.expectOK(protocol.OpPull)
	p.expectPub(1)
	p.expectOK(protocol.OpPing)
	p.send(protocol.AppendPing(nil))
	p.expectOK(protocol.OpPing)
	if len(e.interrupts) != 0 {
		t.Error("a PULL was interrupted more than once, or after its answer")
	}
}

func TestServer_PullAndPublishInOneEventInterrupts(t *testing.T) {
	e := newFakeEngine(1)
	e.hold = func(j job) bool { return j.op == protocol.OpPull }
	s := serve(t, e, nil)
	p := connect(t, s)
	pull := protocol.Pull{SubscriptionID: 1}
	p.send(pubFrame(pull.AppendFrame(nil), 1, nil))
	wait(t, "the interruption", e.interrupts)
}

func TestServer_ShutSendsReadyAnswersThenTheErrorAndCloses(t *testing.T) {
	e := newFakeEngine(1)
	e.hold = func(job) bool { return true }
	s := serve(t, e, nil)
	p := connect(t, s)
	p.send(pubFrame(pubFrame(pubFrame(nil, 1, nil), 2, nil), 3, nil))
	held := e.takeHeld(t, 3)
	held[0].c.Complete(held[0].req, answerTo(nil, &held[0]))
	held[2].c.Complete(held[2].req, answerTo(nil, &held[2])) // not its turn: never sent
	held[0].c.Shut(protocol.CodeMalformedPayload, protocol.OpSub, "no")
	held[0].c.Shut(protocol.CodeInternal, protocol.OpSub, "a second time")
	held[0].c.Push(protocol.AppendPing(nil)) // too late
	p.expectPub(1)
	if text := p.expectErr(protocol.CodeMalformedPayload, protocol.OpSub); text != "no" {
		t.Errorf("text is %q", text)
	}
	p.expectEOF()
	_ = p.conn.Close()
	if c := wait(t, "the engine hears of it", e.gone); c.ID() != held[0].c.ID() {
		t.Error("another connection was reported")
	}
}

func TestServer_AnsweringTwiceIsABugOfOurs(t *testing.T) {
	e := newFakeEngine(1)
	e.hold = func(job) bool { return true }
	s := serve(t, e, nil)
	p := connect(t, s)
	p.send(pubFrame(pubFrame(nil, 1, nil), 2, nil))
	held := e.takeHeld(t, 2)
	c := held[0].c.(*conn)
	for name, f := range map[string]func(){
		"before its turn": func() {
			c.answers.put(held[1].req, []byte("x"))
			c.answers.put(held[1].req, []byte("x"))
		},
		"of the past": func() { c.answers.at(held[0].req - 1) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("no panic for a second answer %s", name)
				}
			}()
			c.mu.Lock()
			defer c.mu.Unlock()
			f()
		}()
	}
}

func TestServer_RefusesConnectionsBeyondTheLimit(t *testing.T) {
	s := serve(t, newFakeEngine(1), func(o *Options) { o.MaxConnections = 2 })
	a, b := connect(t, s), connect(t, s)
	c := dial(t, s)
	c.expectEOF()
	_ = a.conn.Close()
	eventually(t, "a place is free", func() bool { return s.Stats().Connections == 1 })
	connect(t, s)
	b.send(protocol.AppendPing(nil))
	b.expectOK(protocol.OpPing)
	if n := s.Stats().Rejected; n != 1 {
		t.Errorf("%d connections counted as rejected", n)
	}
}

func TestServer_ShutdownAnswersWhatIsInFlight(t *testing.T) {
	e := newFakeEngine(1)
	e.hold = func(j job) bool { return j.op == protocol.OpPub || j.op == protocol.OpPull }
	s := serve(t, e, nil)
	idle, busy, pulling := connect(t, s), connect(t, s), connect(t, s)
	busy.send(pubFrame(pubFrame(nil, 1, nil), 2, nil))
	pull := protocol.Pull{}
	pulling.send(pull.AppendFrame(nil))
	held := e.takeHeld(t, 3)
	done := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		done <- s.Shutdown(ctx)
	}()
	idle.expectEOF()
	wait(t, "the waiting PULL is interrupted", e.interrupts)
	if _, err := net.DialTimeout("tcp", s.Addr().String(), patience); err == nil {
		t.Error("a connection was accepted during the shutdown")
	}
	busy.send(pubFrame(nil, 3, nil)) // no longer read
	for i := range held {
		held[i].c.Complete(held[i].req, answerTo(nil, &held[i]))
		held[i].c.Flush()
	}
	busy.expectPub(1)
	busy.expectPub(2)
	busy.expectEOF()
	pulling.expectOK(protocol.OpPull)
	pulling.expectEOF()
	for _, p := range []*peer{idle, busy, pulling} {
		_ = p.conn.Close()
	}
	if err := wait(t, "the end of Shutdown", done); err != nil {
		t.Errorf("Shutdown: %v", err)
	}
	if n := e.closed.Load(); n != 2 {
		t.Errorf("the engine heard of %d closed connections, not of the 2 it knows", n)
	}
	held[0].c.Flush() // after the end: a no-op
	held[0].c.Push([]byte("x"))
}

func TestServer_ShutdownEndsWithItsContext(t *testing.T) {
	e := newFakeEngine(1)
	e.hold = func(job) bool { return true }
	s := serve(t, e, nil)
	p := connect(t, s)
	p.send(pubFrame(nil, 1, nil))
	e.takeHeld(t, 1)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	err := s.Shutdown(ctx)
	if err == nil || !strings.Contains(err.Error(), "1 connections") {
		t.Errorf("Shutdown: %v", err)
	}
}

func TestServer_StartReportsAddressInUse(t *testing.T) {
	e := newFakeEngine(1)
	s := serve(t, e, nil)
	other, err := New(Options{Addr: s.Addr().String(), Handler: e})
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(context.Background()); err == nil || !strings.Contains(err.Error(), s.Addr().String()) {
		t.Errorf("Start: %v", err)
	}
}

func TestNew_ReportsEveryProblem(t *testing.T) {
	_, err := New(Options{Loops: -1, Keepalive: -1, MaxPending: -1, PartialBytes: 1})
	if err == nil {
		t.Fatal("accepted")
	}
	for _, part := range []string{"handler", "event loops", "keepalive", "unanswered", "incomplete frames"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q is missing in: %v", part, err)
		}
	}
}
