package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/engine/coord"
	"github.com/mortarmq/mortarmq/protocol"
)

// patience is how long a test waits for something that must happen; it is never waited out when all is well.
const patience = 30 * time.Second

// job is a request as the fake engine keeps it.
type job struct {
	c       coord.Client
	req     uint64
	op      protocol.Op
	seq     uint64 // PUB: producer_seq, echoed as the sequence
	payload []byte
}

// fakeEngine answers requests in random order from several goroutines. A PUB's result echoes its producer_seq and, as
// commit_seq, the length of its value.
type fakeEngine struct {
	work    chan []job
	workers sync.WaitGroup
	// hold, if set, decides what becomes of a request: true keeps it from being answered.
	hold func(job) bool
	// onPub, if set, sees every value, possibly on another goroutine.
	onPub func(value []byte)

	closed     atomic.Int64
	writable   chan coord.Client
	gone       chan coord.Client
	interrupts chan coord.Client
	owned      atomic.Int64
	released   atomic.Int64
	mu         sync.Mutex
	held       []job
	heldSignal chan struct{}
}

func newFakeEngine(workers int) *fakeEngine {
	e := &fakeEngine{
		work:       make(chan []job, 1024),
		writable:   make(chan coord.Client, 1024),
		gone:       make(chan coord.Client, 1<<16),
		interrupts: make(chan coord.Client, 1024),
		heldSignal: make(chan struct{}, 1<<16),
	}
	for i := range workers {
		e.workers.Add(1)
		go e.worker(rand.New(rand.NewPCG(7, uint64(i))))
	}
	return e
}

func (e *fakeEngine) stop() {
	close(e.work)
	e.workers.Wait()
}

func (e *fakeEngine) worker(rnd *rand.Rand) {
	defer e.workers.Done()
	var frame []byte
	for batch := range e.work {
		rnd.Shuffle(len(batch), func(i, j int) { batch[i], batch[j] = batch[j], batch[i] })
		for i := range batch {
			j := &batch[i]
			frame = answerTo(frame[:0], j)
			j.c.Complete(j.req, frame)
		}
		for i := range batch {
			batch[i].c.Flush()
		}
		jobs.put(batch)
	}
}

// jobs recycles batches, so that the fake engine does not allocate in steady state either.
var jobs jobPool

type jobPool struct {
	mu   sync.Mutex
	free [][]job
}

func (p *jobPool) get() []job {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.free); n > 0 {
		b := p.free[n-1]
		p.free = p.free[:n-1]
		return b
	}
	return nil
}

func (p *jobPool) put(b []job) {
	clear(b)
	p.mu.Lock()
	p.free = append(p.free, b[:0])
	p.mu.Unlock()
}

func answerTo(dst []byte, j *job) []byte {
	if j.op == protocol.OpPub {
		r := protocol.PubResult{Sequence: j.seq, Durability: protocol.DurabilityLocal, LeaderEpoch: 1}
		return r.AppendOK(dst)
	}
	return protocol.AppendOKEmpty(dst, j.op)
}

func (e *fakeEngine) NewIngress() Ingress           { return &fakeIngress{e: e} }
func (e *fakeEngine) ClientClosed(c coord.Client)   { e.closed.Add(1); e.gone <- c }
func (e *fakeEngine) ClientWritable(c coord.Client) { e.writable <- c }

// takeHeld waits for n held requests and returns them.
func (e *fakeEngine) takeHeld(t *testing.T, n int) []job {
	t.Helper()
	for range n {
		select {
		case <-e.heldSignal:
		case <-time.After(patience):
			t.Fatalf("the engine did not get %d requests", n)
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	held := e.held
	e.held = nil
	return held
}

type fakeIngress struct {
	e       *fakeEngine
	batch   []job
	left    [][]job // to Lend
	flushes int
}

func (in *fakeIngress) add(j job) {
	if in.e.hold != nil && in.e.hold(j) {
		in.e.mu.Lock()
		in.e.held = append(in.e.held, j)
		in.e.mu.Unlock()
		in.e.heldSignal <- struct{}{}
		return
	}
	if in.batch == nil {
		in.batch = jobs.get()
	}
	in.batch = append(in.batch, j)
}

func (in *fakeIngress) Publish(c coord.Client, req uint64, p *protocol.Pub) {
	if in.e.onPub != nil {
		in.e.onPub(p.Value)
	}
	in.add(job{c: c, req: req, op: protocol.OpPub, seq: p.ProducerSeq})
}

func (in *fakeIngress) PublishOwned(c coord.Client, req uint64, p *protocol.Pub, own coord.Releaser) {
	in.e.owned.Add(1)
	value := p.Value
	j := job{c: c, req: req, op: protocol.OpPub, seq: p.ProducerSeq}
	go func() { // the memory is used after PublishOwned has returned
		if in.e.onPub != nil {
			in.e.onPub(value)
		}
		own.Release()
		in.e.released.Add(1)
	}()
	in.add(j)
}

func (in *fakeIngress) Request(c coord.Client, req uint64, op protocol.Op, payload []byte) {
	in.add(job{c: c, req: req, op: op, payload: bytes.Clone(payload)})
}

func (in *fakeIngress) Interrupt(c coord.Client) { in.e.interrupts <- c }

// Flush leaves every other batch to Lend.
func (in *fakeIngress) Flush() (lend bool) {
	if len(in.batch) == 0 {
		return len(in.left) > 0
	}
	if in.flushes++; in.flushes%2 == 0 {
		in.left = append(in.left, in.batch)
	} else {
		in.Lend() // order is kept
		in.e.work <- in.batch
	}
	in.batch = nil
	return len(in.left) > 0
}

func (in *fakeIngress) Lend() {
	for _, b := range in.left {
		in.e.work <- b
	}
	in.left = in.left[:0]
}

// serve starts a server over e; the test's end shuts it down and checks that nothing is left.
func serve(t testing.TB, e *fakeEngine, change func(*Options)) *Server {
	t.Helper()
	opts := Options{Addr: "127.0.0.1:0", Handler: e, Logger: slog.New(slog.DiscardHandler)}
	if change != nil {
		change(&opts)
	}
	s, err := New(opts)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// A test that leaves requests unanswered on purpose cannot be shut down gracefully.
		ctx, cancel := context.WithCancel(context.Background())
		if e.hold != nil {
			cancel()
		}
		defer cancel()
		if err := s.Shutdown(ctx); err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("Shutdown: %v", err)
		}
		e.stop()
		for e.owned.Load() != e.released.Load() {
			time.Sleep(time.Millisecond)
		}
		if st := s.Stats(); st.Connections != 0 || st.PartialBytes != 0 || st.OwnedBytes != 0 {
			t.Errorf("left behind: %+v", st)
		}
	})
	return s
}

// peer is a client's end of a connection.
type peer struct {
	t    testing.TB
	conn *net.TCPConn
	r    *bufio.Reader
}

func dial(t testing.TB, s *Server) *peer {
	t.Helper()
	conn, err := net.Dial("tcp", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return &peer{t: t, conn: conn.(*net.TCPConn), r: bufio.NewReaderSize(conn, 64<<10)}
}

// connect dials and authenticates with the token "t".
func connect(t testing.TB, s *Server) *peer {
	t.Helper()
	p := dial(t, s)
	p.send(connectFrame("t"))
	p.expectOK(protocol.OpConnect)
	return p
}

func connectFrame(token string) []byte {
	m := protocol.Connect{Version: protocol.WireVersion, Token: []byte(token)}
	return m.AppendFrame(nil)
}

func pubFrame(dst []byte, seq uint64, value []byte) []byte {
	m := protocol.Pub{TopicID: 1, Partition: protocol.AnyPartition, ProducerID: 1, ProducerSeq: seq, Value: value}
	return m.AppendFrame(dst)
}

func (p *peer) send(b []byte) {
	p.t.Helper()
	if _, err := p.conn.Write(b); err != nil {
		p.t.Fatalf("sending %d bytes: %v", len(b), err)
	}
}

// next reads one frame, its length field included.
func (p *peer) next() ([]byte, error) {
	_ = p.conn.SetReadDeadline(time.Now().Add(patience))
	head, err := p.r.Peek(protocol.LengthSize)
	if err != nil {
		return nil, err
	}
	frame := make([]byte, protocol.LengthSize+int(binary.BigEndian.Uint32(head)))
	_, err = io.ReadFull(p.r, frame)
	return frame, err
}

func (p *peer) expect(want []byte) {
	p.t.Helper()
	got, err := p.next()
	if err != nil {
		p.t.Fatalf("waiting for % x: %v", want, err)
	}
	if !bytes.Equal(got, want) {
		p.t.Fatalf("got  % x\nwant % x", got, want)
	}
}

func (p *peer) expectOK(op protocol.Op) {
	p.t.Helper()
	p.expect(protocol.AppendOKEmpty(nil, op))
}

// expectErr reads an ERR and checks its code and op.
func (p *peer) expectErr(code protocol.ErrorCode, op protocol.Op) string {
	p.t.Helper()
	frame, err := p.next()
	if err != nil {
		p.t.Fatalf("waiting for %v: %v", code, err)
	}
	if protocol.Op(frame[protocol.LengthSize]) != protocol.OpErr {
		p.t.Fatalf("got %v instead of %v", protocol.Op(frame[protocol.LengthSize]), code)
	}
	var m protocol.ErrFrame
	if err := m.Decode(frame[protocol.HeaderSize:]); err != nil {
		p.t.Fatal(err)
	}
	if m.Code != code || m.RequestOp != op {
		p.t.Fatalf("got %v for op %v: %q; want %v for op %v", m.Code.Name(), m.RequestOp, m.Message, code.Name(), op)
	}
	if len(m.Message) == 0 {
		p.t.Fatalf("%v has no text", code.Name())
	}
	return string(m.Message)
}

// expectEOF checks that nothing more comes and that the server closes in an orderly way.
func (p *peer) expectEOF() {
	p.t.Helper()
	if frame, err := p.next(); !errors.Is(err, io.EOF) {
		p.t.Fatalf("got % x, %v; want the end of the connection", frame, err)
	}
}

func (p *peer) expectPub(seq uint64) {
	p.t.Helper()
	if err := p.nextPub(seq); err != nil {
		p.t.Fatal(err)
	}
}

func (p *peer) nextPub(seq uint64) error {
	frame, err := p.next()
	if err != nil {
		return err
	}
	want := answerTo(nil, &job{op: protocol.OpPub, seq: seq})
	if !bytes.Equal(frame, want) {
		return fmt.Errorf("answer to PUB %d is % x", seq, frame)
	}
	return nil
}

// eventually waits until ok holds.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never happened: %s", what)
		}
	}
}

func wait[T any](t testing.TB, what string, ch <-chan T) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(patience):
		t.Fatalf("never happened: %s", what)
		panic("unreachable")
	}
}
