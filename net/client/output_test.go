package client

import (
	"bytes"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/engine/coord"
	"github.com/mortarmq/mortarmq/protocol"
)

// testOwner counts its releases and poisons the memory, so that bytes sent after the release are noticed.
type testOwner struct {
	b        []byte
	released atomic.Int32
	total    *atomic.Int64
}

func (o *testOwner) Release() {
	o.released.Add(1)
	for i := range o.b {
		o.b[i] = 0xDB
	}
	o.total.Add(1)
}

// subscriber connects and returns the engine's handle on the connection.
func subscriber(t *testing.T, s *Server, e *fakeEngine) (*peer, coord.Client) {
	t.Helper()
	p := connect(t, s)
	m := protocol.Heartbeat{}
	p.send(m.AppendFrame(nil))
	j := e.takeHeld(t, 1)[0]
	j.c.Complete(j.req, answerTo(nil, &j))
	j.c.Flush()
	p.expectOK(protocol.OpHeartbeat)
	return p, j.c
}

func holdHeartbeats(e *fakeEngine) *fakeEngine {
	e.hold = func(j job) bool { return j.op == protocol.OpHeartbeat }
	return e
}

func msgFrame(seq uint64, size int) []byte {
	v := make([]byte, size)
	for i := range v {
		v[i] = byte(seq) + byte(i)
	}
	m := protocol.Msg{Sequence: seq, Value: v}
	return m.AppendFrame(nil)
}

func TestPush_CopiedAndOwnedBytesKeepTheirOrder(t *testing.T) {
	e := holdHeartbeats(newFakeEngine(1))
	s := serve(t, e, nil)
	p, c := subscriber(t, s, e)
	rnd := rand.New(rand.NewPCG(3, 3))
	var releases atomic.Int64
	var want bytes.Buffer
	var owners []*testOwner
	const pushes = 2000
	for seq := range uint64(pushes) {
		frame := msgFrame(seq, []int{0, 10, 100, 5000, 20_000, 100_000}[rnd.IntN(6)])
		want.Write(frame)
		switch rnd.IntN(3) {
		case 0:
			c.Push(frame)
			clear(frame) // copied: the caller may reuse it
		case 1:
			o := &testOwner{b: frame, total: &releases}
			owners = append(owners, o)
			c.PushOwned(frame, o)
		case 2:
			split := len(frame) / 3
			o := &testOwner{b: frame[split:], total: &releases}
			owners = append(owners, o)
			c.PushValue(frame[:split], frame[split:], o)
			clear(frame[:split])
		}
		if rnd.IntN(10) == 0 {
			c.Flush()
		}
		if c.Outstanding() > coord.OutboundPause {
			c.Flush()
			got := make([]byte, want.Len())
			if _, err := io.ReadFull(p.r, got); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want.Bytes()) {
				t.Fatalf("bytes up to push %d differ", seq)
			}
			want.Reset()
		}
	}
	c.Flush()
	got := make([]byte, want.Len())
	if _, err := io.ReadFull(p.r, got); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want.Bytes()) {
		t.Fatal("the last bytes differ")
	}
	eventually(t, "every owner is released", func() bool { return releases.Load() == int64(len(owners)) })
	for _, o := range owners {
		if o.released.Load() != 1 {
			t.Fatalf("an owner was released %d times", o.released.Load())
		}
	}
	if c.Outstanding() != 0 {
		t.Errorf("%d bytes outstanding at the end", c.Outstanding())
	}
}

func TestPush_WritableComesWhenASlowReaderCatchesUp(t *testing.T) {
	e := holdHeartbeats(newFakeEngine(1))
	s := serve(t, e, nil)
	p, c := subscriber(t, s, e)
	var releases atomic.Int64
	frame := msgFrame(1, 64<<10)
	pushed := 0
	for round := range 3 {
		for c.Outstanding() <= coord.OutboundPause {
			b := bytes.Clone(frame)
			c.PushOwned(b, &testOwner{b: b, total: &releases})
			c.Flush()
			pushed++
		}
		if n := len(e.writable); n > 1 {
			t.Fatalf("round %d: %d callbacks", round, n)
		}
		for range pushed {
			got, err := p.next()
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, frame) {
				t.Fatal("a frame arrived damaged")
			}
		}
		pushed = 0
		if got := wait(t, "ClientWritable", e.writable); got != c {
			t.Fatal("another connection was reported")
		}
		eventually(t, "everything has left", func() bool { return c.Outstanding() == 0 })
	}
}

func TestPush_ReaderThatNeverReadsIsClosedOthersAreServed(t *testing.T) {
	e := holdHeartbeats(newFakeEngine(1))
	s := serve(t, e, func(o *Options) { o.SlowConsumer = 100 * time.Millisecond; o.Linger = 50 * time.Millisecond })
	_, stuck := subscriber(t, s, e)
	good, reader := subscriber(t, s, e)
	var releases atomic.Int64
	pushed := int64(0)
	for len(e.gone) == 0 {
		if stuck.Outstanding() <= coord.OutboundPause { // as long as the kernel's buffers take some
			b := msgFrame(1, 100_000)
			stuck.PushOwned(b, &testOwner{b: b, total: &releases})
			stuck.Flush()
			pushed++
		}
		small := msgFrame(7, 100)
		reader.Push(small)
		reader.Flush()
		good.expect(small)
	}
	if c := <-e.gone; c != stuck {
		t.Fatal("the wrong connection was closed")
	}
	if releases.Load() != pushed {
		t.Errorf("%d of %d buffers released", releases.Load(), pushed)
	}
	if n := s.Stats().SlowClosed; n != 1 {
		t.Errorf("%d slow connections counted", n)
	}
	late := msgFrame(2, 10)
	stuck.PushOwned(late, &testOwner{b: late, total: &releases})
	if releases.Load() != pushed+1 {
		t.Error("a push to a closed connection kept its buffer")
	}
}

func TestPush_ReaderThatReadsALittleStays(t *testing.T) {
	e := holdHeartbeats(newFakeEngine(1))
	s := serve(t, e, func(o *Options) { o.SlowConsumer = 2 * time.Second })
	p, c := subscriber(t, s, e)
	frame := msgFrame(1, 3<<20)
	total, pushes := 0, 0
	for pushes < 4 || c.Outstanding() <= coord.OutboundPause {
		c.PushOwned(bytes.Clone(frame), &testOwner{total: new(atomic.Int64)})
		c.Flush()
		total += len(frame)
		pushes++
	}
	// So slowly that the kernel's buffer does not get a third of it free within the time.
	buf := make([]byte, 8<<10)
	for start := time.Now(); time.Since(start) < 3*time.Second; time.Sleep(20 * time.Millisecond) {
		n, err := p.conn.Read(buf)
		if err != nil {
			t.Fatalf("%d bytes before the end: %v", total, err)
		}
		total -= n
	}
	if n, err := io.CopyN(io.Discard, p.conn, int64(total)); err != nil {
		t.Fatalf("%d bytes before the end: %v", int64(total)-n, err)
	}
	if s.Stats().SlowClosed != 0 {
		t.Error("closed as slow")
	}
}

func TestPush_BlockedReaderHoldsNoMemoryOfOthers(t *testing.T) {
	e := holdHeartbeats(newFakeEngine(1))
	s := serve(t, e, nil)
	p, c := subscriber(t, s, e)
	var releases atomic.Int64
	var want bytes.Buffer
	pushed := int64(0)
	for full := false; !full; full = c.Outstanding() > coord.OutboundPause {
		for c.Outstanding() <= coord.OutboundPause {
			frame := msgFrame(uint64(pushed), 16<<10)
			want.Write(frame)
			head, value := frame[:protocol.MsgHeaderLen(0)], frame[protocol.MsgHeaderLen(0):]
			c.PushValue(head, value, &testOwner{b: value, total: &releases})
			c.Flush()
			pushed++
		}
		// The kernel's buffers may take it still, and the loop may be slow: full is what stays as it is.
		for last, same := -1, 0; same < 10; time.Sleep(20 * time.Millisecond) {
			if now := c.Outstanding(); now != last {
				last, same = now, 0
			} else {
				same++
			}
		}
	}
	eventually(t, "every owner is released", func() bool { return releases.Load() == pushed })
	if c.Outstanding() == 0 {
		t.Fatal("the connection is not blocked")
	}
	late := msgFrame(1<<40, 100)
	want.Write(late)
	c.Push(late)
	c.Flush()
	got := make([]byte, want.Len())
	if _, err := io.ReadFull(p.r, got); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want.Bytes()) {
		t.Fatal("the bytes differ")
	}
}

func TestPush_BlockedReaderIsNotClosedForAValueLargerThanMaxOutbound(t *testing.T) {
	e := holdHeartbeats(newFakeEngine(1))
	s := serve(t, e, func(o *Options) { o.MaxOutbound = 1 << 20 })
	p, c := subscriber(t, s, e)
	frame := msgFrame(1, 12<<20) // more than the kernel's buffers take
	var releases atomic.Int64
	c.PushOwned(bytes.Clone(frame), &testOwner{total: &releases})
	c.Flush()
	time.Sleep(unpinAfter + 10*maxTick) // if this is not long enough the test proves less
	if releases.Load() != 0 {
		t.Error("the value was copied")
	}
	got, err := p.next()
	if err != nil || !bytes.Equal(got, frame) {
		t.Fatalf("the frame is damaged or did not come: %v", err)
	}
}

func TestComplete_ProducerThatNeverReadsItsAnswersIsClosed(t *testing.T) {
	e := newFakeEngine(1)
	s := serve(t, e, func(o *Options) { o.MaxOutbound = 256 << 10; o.Linger = 50 * time.Millisecond })
	p := connect(t, s)
	_ = p.conn.SetReadBuffer(4 << 10)
	go func() {
		out := make([]byte, 0, 1<<20)
		for seq := uint64(0); ; {
			out = out[:0]
			for range 10_000 {
				out = pubFrame(out, seq, nil)
				seq++
			}
			if _, err := p.conn.Write(out); err != nil {
				return
			}
		}
	}()
	wait(t, "the connection is closed", e.gone)
	if s.Stats().SlowClosed == 0 {
		t.Error("it was not closed as slow")
	}
}

// TestPush_ReadersThatNeverReadTogether: none of them has more than it may, but all together they would take what there is.
func TestPush_ReadersThatNeverReadTogether(t *testing.T) {
	e := holdHeartbeats(newFakeEngine(1))
	const readers, each = 16, 1 << 20
	s := serve(t, e, func(o *Options) { o.OutboundBytes = readers * each / 4; o.Linger = 50 * time.Millisecond })
	value := bytes.Repeat([]byte{1}, 8<<10)
	for range readers {
		_, c := subscriber(t, s, e)
		for range 2*each/len(value) + 1024 { // the socket takes some
			c.Push(value)
		}
		c.Flush()
		if sum := s.outbound.Load(); sum > s.opts.OutboundBytes+readers*(minOutboundShare+outboundGrain)+int64(len(value)) {
			t.Fatalf("%d bytes are queued, the bound is %d", sum, s.opts.OutboundBytes)
		}
	}
	if s.Stats().SlowClosed == 0 {
		t.Error("no connection was closed as slow")
	}
	for deadline := time.Now().Add(10 * time.Second); s.outbound.Load() > s.opts.OutboundBytes; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("what was queued is not given back")
		}
	}
}

func TestFlush_IsNeverLost(t *testing.T) {
	e := holdHeartbeats(newFakeEngine(1))
	s := serve(t, e, nil)
	p, c := subscriber(t, s, e)
	var wg sync.WaitGroup
	const pushers, each = 4, 3000
	for id := range pushers {
		wg.Go(func() {
			for i := range each {
				c.Push(msgFrame(uint64(id)<<32|uint64(i), 1))
				c.Flush()
			}
		})
	}
	next := [pushers]uint64{}
	for range pushers * each {
		frame, err := p.next()
		if err != nil {
			t.Fatal(err)
		}
		var m protocol.Msg
		if err := m.Decode(frame[protocol.HeaderSize:]); err != nil {
			t.Fatal(err)
		}
		id := m.Sequence >> 32
		if m.Sequence&0xFFFFFFFF != next[id] {
			t.Fatalf("pusher %d: message %d instead of %d", id, m.Sequence&0xFFFFFFFF, next[id])
		}
		next[id]++
	}
	wg.Wait()
}

func TestAnswerRing_RestoresTheOrder(t *testing.T) {
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		var r answerRing
		var out outQueue
		var open []uint64
		var want []byte
		next := uint64(0)
		for range 500 {
			if rnd.IntN(2) == 0 || len(open) == 0 {
				for next-r.head >= uint64(len(r.slots)) {
					r.grow()
				}
				open = append(open, next)
				next++
				continue
			}
			i := rnd.IntN(len(open))
			req := open[i]
			open = append(open[:i], open[i+1:]...)
			switch {
			case rnd.IntN(10) == 0:
				r.putBusy(req)
			default:
				r.put(req, answerFor(req))
			}
			for r.pop(&out, []byte("busy....")) {
			}
		}
		for _, req := range open {
			r.put(req, answerFor(req))
			for r.pop(&out, []byte("busy....")) {
			}
		}
		got := contents(&out)
		req := uint64(0)
		for len(got) > 0 {
			want = answerFor(req)
			if bytes.HasPrefix(got, []byte("busy....")) {
				got = got[8:]
			} else if bytes.HasPrefix(got, want) {
				got = got[len(want):]
			} else {
				t.Fatalf("seed %d: answer %d is out of order", seed, req)
			}
			req++
		}
		if req != next {
			t.Fatalf("seed %d: %d of %d answers", seed, req, next)
		}
	}
}

func answerFor(req uint64) []byte {
	b := binary.BigEndian.AppendUint64(nil, req+1<<56)
	for range req % 60 {
		b = append(b, byte(req))
	}
	return b
}

func contents(q *outQueue) []byte {
	var b []byte
	for _, s := range q.segs[q.head:] {
		b = append(b, s.b...)
	}
	return b
}

func TestOutQueue_ConsumesWhatItGathered(t *testing.T) {
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(seed, 2))
		var q outQueue
		var releases atomic.Int64
		var model []byte
		owned := int64(0)
		for i := range 300 {
			frame := bytes.Repeat([]byte{byte(i)}, rnd.IntN(9000))
			switch rnd.IntN(4) {
			case 0:
				q.copyIn(frame)
				model = append(model, frame...)
			case 3:
				limit := rnd.IntN(50_000)
				list := q.borrowedUpTo(limit, nil)
				after := q.copied
				for i := range list {
					list[i].b = bytes.Clone(list[i].b)
					after += len(list[i].b)
				}
				if after > max(limit, q.copied) {
					t.Fatalf("seed %d, step %d: %d bytes would be copied ones, %d may be", seed, i, after, limit)
				}
				if rnd.IntN(2) == 0 { // appended meanwhile
					q.copyIn(frame)
					model = append(model, frame...)
				}
				for _, o := range q.replace(list, nil) {
					o.Release()
				}
			case 1:
				q.own(frame, &testOwner{total: &releases})
				owned++
				model = append(model, frame...)
			case 2:
				iov, n := q.gather(make([]unix.Iovec, 0, maxIovecs), 1+rnd.IntN(100_000))
				if len(iov) == 0 && len(model) > 0 {
					t.Fatal("nothing gathered")
				}
				if n > 0 {
					n = 1 + rnd.IntN(n)
				}
				for _, o := range q.consume(n, nil) {
					o.Release()
				}
				model = model[n:]
			}
			if q.bytes != len(model) || !bytes.Equal(contents(&q), model) {
				t.Fatalf("seed %d, step %d: %d bytes instead of %d", seed, i, q.bytes, len(model))
			}
		}
		for _, o := range q.drop(nil) {
			o.Release()
		}
		if q.bytes != 0 || q.copied != 0 || len(q.segs) != 0 || releases.Load() != owned {
			t.Fatalf("seed %d: left %d bytes, %d copied; %d of %d released", seed, q.bytes, q.copied, releases.Load(), owned)
		}
	}
}

func TestWheel_LooksAtEachConnectionNoLaterThanDue(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 5))
	w := wheel{tick: time.Millisecond}
	due := map[*conn]time.Duration{}
	conns := make([]*conn, 300)
	for i := range conns {
		conns[i] = new(conn)
	}
	now := time.Duration(0)
	for range 5000 {
		now += time.Duration(rnd.IntN(3_000_000))
		c := conns[rnd.IntN(len(conns))]
		switch rnd.IntN(4) {
		case 0:
			w.remove(c)
			delete(due, c)
		default:
			d := now + time.Duration(rnd.Int64N(int64(3*time.Second)))
			if old, ok := due[c]; !ok || d < old {
				due[c] = d
			}
			w.schedule(c, due[c])
		}
		w.advance(now, func(c *conn) {
			d, ok := due[c]
			if !ok {
				t.Fatal("looked at a removed connection")
			}
			if now >= d {
				delete(due, c)
				return
			}
			w.schedule(c, d)
		})
		for c, d := range due {
			if now >= d+w.tick {
				t.Fatalf("%v: a connection due at %v was not looked at (its tick is %d)", now, d, c.wheel.at)
			}
		}
	}
	n := 0
	w.each(func(*conn) { n++ })
	if n != len(due) {
		t.Errorf("%d connections in the wheel, not %d", n, len(due))
	}
}
