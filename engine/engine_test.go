package engine

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/engine/coord"
	"github.com/mortarmq/mortarmq/protocol"
)

// testClient is a connection without a socket: it keeps answers by request and hands pushed frames to the test.
type testClient struct {
	id    uint64
	pulls atomic.Int32

	mu      sync.Mutex
	changed *sync.Cond
	next    uint64
	answers map[uint64][]byte
	pushed  []byte
	shut    protocol.ErrorCode
}

var clientIDs atomic.Uint64

func newTestClient() *testClient {
	c := &testClient{id: clientIDs.Add(1), answers: map[uint64][]byte{}}
	c.changed = sync.NewCond(&c.mu)
	return c
}

func (c *testClient) ID() uint64           { return c.id }
func (c *testClient) Flush()               {}
func (c *testClient) Outstanding() int     { return 0 }
func (c *testClient) Pulls() *atomic.Int32 { return &c.pulls }
func (c *testClient) PushOwned(frames []byte, owner coord.Releaser) {
	c.Push(frames)
	owner.Release()
}

func (c *testClient) PushValue(head, value []byte, owner coord.Releaser) {
	c.Push(append(head[:len(head):len(head)], value...))
	owner.Release()
}

func (c *testClient) Complete(req uint64, frame []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.answers[req] != nil {
		panic(fmt.Sprintf("request %d is answered twice", req))
	}
	c.answers[req] = bytes.Clone(frame)
	c.changed.Broadcast()
}

func (c *testClient) Push(frames []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pushed = append(c.pushed, frames...)
	c.changed.Broadcast()
}

func (c *testClient) Shut(code protocol.ErrorCode, _ protocol.Op, _ string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shut = code
	c.changed.Broadcast()
}

func (c *testClient) request() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.next++
	return c.next - 1
}

// answer waits for the answer to req and returns its payload: an OK's result, or the error.
func (c *testClient) answer(t testing.TB, req uint64) ([]byte, error) {
	t.Helper()
	c.mu.Lock()
	for c.answers[req] == nil && c.shut == 0 {
		c.changed.Wait()
	}
	frame, shut := c.answers[req], c.shut
	c.mu.Unlock()
	if frame == nil {
		return nil, &protocol.Error{Code: shut, Message: "the connection was closed"}
	}
	op, payload, n, err := protocol.ParseFrame(frame)
	if err != nil || n != len(frame) {
		t.Fatalf("request %d got a bad frame %x: %v", req, frame, err)
	}
	if op == protocol.OpErr {
		var e protocol.ErrFrame
		if err := e.Decode(payload); err != nil {
			t.Fatal(err)
		}
		return nil, &protocol.Error{Code: e.Code, RequestOp: e.RequestOp, Message: string(e.Message)}
	}
	var ok protocol.OKFrame
	if err := ok.Decode(payload); err != nil {
		t.Fatal(err)
	}
	return ok.Result, nil
}

func testOptions(dir string) Options {
	o := DefaultOptions(dir)
	o.JournalFileBytes = 4 << 20
	o.JournalMaxFiles = 4
	o.SegmentMaxBytes = 1 << 20
	o.MemoryBytes = 128 << 20
	o.TailBytes = 4 << 20
	o.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	return o
}

func mustOpen(t testing.TB, o Options) *Engine {
	t.Helper()
	e, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func mustClose(t testing.TB, e *Engine) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := e.Close(ctx); err != nil {
		t.Fatalf("closing: %v", err)
	}
}

// peer drives an engine the way one event loop would.
type peer struct {
	t  testing.TB
	in *Ingress
	c  *testClient
}

func newPeer(t testing.TB, e *Engine) *peer {
	return &peer{t: t, in: e.NewIngress(), c: newTestClient()}
}

// payloadOf strips length and op from a request frame.
func payloadOf(frame []byte) []byte { return frame[5:] }

func (p *peer) declare(name string, partitions uint16) protocol.DeclareResult {
	p.t.Helper()
	req := p.c.request()
	d := protocol.Declare{Topic: []byte(name), Partitions: partitions}
	p.in.Request(p.c, req, protocol.OpDeclare, payloadOf(d.AppendFrame(nil)))
	flush(p.in)
	b, err := p.c.answer(p.t, req)
	if err != nil {
		p.t.Fatalf("DECLARE %s: %v", name, err)
	}
	var res protocol.DeclareResult
	if err := res.Decode(b); err != nil {
		p.t.Fatal(err)
	}
	return res
}

func (p *peer) send(m protocol.Pub) uint64 {
	req := p.c.request()
	p.in.Publish(p.c, req, &m)
	return req
}

func (p *peer) result(req uint64) (protocol.PubResult, error) {
	p.t.Helper()
	b, err := p.c.answer(p.t, req)
	if err != nil {
		return protocol.PubResult{}, err
	}
	var res protocol.PubResult
	if err := res.Decode(b); err != nil {
		p.t.Fatal(err)
	}
	return res, nil
}

func TestEngine_PublishIsAnsweredAndSurvivesARestart(t *testing.T) {
	o := testOptions(t.TempDir())
	e := mustOpen(t, o)
	p := newPeer(t, e)
	topic := p.declare("orders", 3)
	const each = 500
	var reqs []uint64
	for i := range each {
		for part := range uint16(3) {
			reqs = append(reqs, p.send(protocol.Pub{
				TopicID: topic.TopicID, Partition: part, ProducerID: 9, ProducerSeq: uint64(i + 1),
				Value: binary.BigEndian.AppendUint64(nil, uint64(i)),
			}))
		}
	}
	flush(p.in)
	for i, req := range reqs {
		res, err := p.result(req)
		if err != nil || res.Sequence != uint64(i/3+1) || res.Durability != protocol.DurabilityQuorum || res.CommitSeq < res.Sequence {
			t.Fatalf("publish %d: %+v, %v", i, res, err)
		}
	}
	mustClose(t, e)

	e = mustOpen(t, o)
	defer mustClose(t, e)
	p = newPeer(t, e)
	if again := p.declare("orders", 3); again.TopicID != topic.TopicID || !again.Existed {
		t.Errorf("the topic after the restart: %+v", again)
	}
	dup := p.send(protocol.Pub{TopicID: topic.TopicID, Partition: 1, ProducerID: 9, ProducerSeq: each})
	next := p.send(protocol.Pub{TopicID: topic.TopicID, Partition: 1, ProducerID: 9, ProducerSeq: each + 1})
	flush(p.in)
	if res, err := p.result(dup); err != nil || res.Sequence != each || res.Flags != protocol.ResultFlagDeduplicated {
		t.Errorf("resend after the restart: %+v, %v", res, err)
	}
	if res, err := p.result(next); err != nil || res.Sequence != each+1 || res.Flags != 0 {
		t.Errorf("next publish after the restart: %+v, %v", res, err)
	}
}

func TestEngine_ProducerRules(t *testing.T) {
	e := mustOpen(t, testOptions(t.TempDir()))
	defer mustClose(t, e)
	p := newPeer(t, e)
	topic := p.declare("t", 2).TopicID
	for _, c := range []struct {
		name string
		pub  protocol.Pub
		want protocol.ErrorCode
	}{
		{"unknown topic", protocol.Pub{TopicID: 77}, protocol.CodeUnknownTopic},
		{"unknown partition", protocol.Pub{TopicID: topic, Partition: 2}, protocol.CodeUnknownPartition},
		{"producer_seq without producer", protocol.Pub{TopicID: topic, ProducerSeq: 1}, protocol.CodeProducerSeqInvalid},
		{"producer without producer_seq", protocol.Pub{TopicID: topic, ProducerID: 1}, protocol.CodeProducerSeqInvalid},
		{"unknown producer not at 1", protocol.Pub{TopicID: topic, ProducerID: 1, ProducerSeq: 2}, protocol.CodeSeqGap},
		{"first", protocol.Pub{TopicID: topic, ProducerID: 1, ProducerSeq: 1}, 0},
		{"jump", protocol.Pub{TopicID: topic, ProducerID: 1, ProducerSeq: 3}, protocol.CodeSeqGap},
		{"next", protocol.Pub{TopicID: topic, ProducerID: 1, ProducerSeq: 2}, 0},
	} {
		req := p.send(c.pub)
		flush(p.in)
		_, err := p.result(req)
		got, _ := protocol.CodeOf(err)
		if got != c.want {
			t.Errorf("%s: %v, want code %v", c.name, err, c.want)
		}
	}
	for i := uint64(3); i <= protocol.ProducerWindow+3; i++ {
		p.send(protocol.Pub{TopicID: topic, ProducerID: 1, ProducerSeq: i})
	}
	old := p.send(protocol.Pub{TopicID: topic, ProducerID: 1, ProducerSeq: 2})
	flush(p.in)
	if _, err := p.result(old); err == nil {
		t.Error("a producer_seq from before the window was not refused")
	} else if code, _ := protocol.CodeOf(err); code != protocol.CodeSeqExpired {
		t.Errorf("a producer_seq from before the window: %v", err)
	}
}

// TestEngine_DuplicateWaitsForTheFirst sends every message twice in one batch: the second answer must not come before
// the first message is durable, and must name its sequence.
func TestEngine_DuplicateWaitsForTheFirst(t *testing.T) {
	e := mustOpen(t, testOptions(t.TempDir()))
	defer mustClose(t, e)
	p := newPeer(t, e)
	topic := p.declare("t", 1).TopicID
	for i := uint64(1); i <= 50; i++ {
		first := p.send(protocol.Pub{TopicID: topic, ProducerID: 5, ProducerSeq: i})
		second := p.send(protocol.Pub{TopicID: topic, ProducerID: 5, ProducerSeq: i})
		flush(p.in)
		b, err := p.result(second)
		if err != nil || b.Flags != protocol.ResultFlagDeduplicated || b.CommitSeq < b.Sequence {
			t.Fatalf("the duplicate: %+v, %v", b, err)
		}
		a, err := p.result(first)
		if err != nil || a.Sequence != b.Sequence {
			t.Fatalf("the first: %+v, %v; the duplicate: %+v", a, err, b)
		}
	}
}

func TestEngine_RoutesByKeyProducerAndTurn(t *testing.T) {
	e := mustOpen(t, testOptions(t.TempDir()))
	defer mustClose(t, e)
	in := e.NewIngress()
	p := &peer{t: t, in: in, c: newTestClient()}
	id := p.declare("t", 4).TopicID
	route := func(m protocol.Pub) uint16 {
		m.TopicID, m.Partition = id, protocol.AnyPartition
		_, part, code, text := in.route(&m)
		if code != 0 {
			t.Fatal(code, text)
		}
		return part
	}
	if got, want := route(protocol.Pub{Key: []byte("k")}), protocol.Route([]byte("k"), 4); got != want {
		t.Errorf("by key: partition %d, want %d", got, want)
	}
	if got := route(protocol.Pub{ProducerID: 6, ProducerSeq: 1}); got != 2 {
		t.Errorf("by producer: partition %d, want 2", got)
	}
	seen := map[uint16]int{}
	for range 8 {
		seen[route(protocol.Pub{})]++
	}
	if len(seen) != 4 || seen[0] != 2 {
		t.Errorf("in turn: %v, want each of 4 partitions twice", seen)
	}
}

// TestEngine_ManyShardsRotateAndRecover pushes several times the journals' capacity through two shards, with values of
// all sizes, closes and reopens half-way, and checks that sequences go on where they ended.
func TestEngine_ManyShardsRotateAndRecover(t *testing.T) {
	o := testOptions(t.TempDir())
	o.Shards = 2
	o.JournalMaxFiles = 2
	rnd := rand.New(rand.NewPCG(1, 2))
	last := make([]uint64, 5)
	for start := range 3 {
		e := mustOpen(t, o)
		p := newPeer(t, e)
		topic := p.declare("t", uint16(len(last))).TopicID
		sent := 0
		for sent < 20<<20 {
			var reqs, parts []uint64
			for range 64 {
				part := rnd.IntN(len(last))
				value := make([]byte, rnd.IntN(1<<(4+rnd.IntN(13))))
				sent += len(value)
				reqs = append(reqs, p.send(protocol.Pub{TopicID: topic, Partition: uint16(part), Value: value}))
				parts = append(parts, uint64(part))
			}
			flush(p.in)
			for i, req := range reqs {
				res, err := p.result(req)
				last[parts[i]]++
				if err != nil || res.Sequence != last[parts[i]] {
					t.Fatalf("start %d: publish to partition %d: %+v, %v; want sequence %d", start, parts[i], res, err, last[parts[i]])
				}
			}
		}
		mustClose(t, e)
	}
}

func TestEngine_StatsAndHealth(t *testing.T) {
	e := mustOpen(t, testOptions(t.TempDir()))
	p := newPeer(t, e)
	topic := p.declare("t", 2).TopicID
	req := p.send(protocol.Pub{TopicID: topic, Key: []byte("key"), Value: []byte("value")})
	flush(p.in)
	if _, err := p.result(req); err != nil {
		t.Fatal(err)
	}
	s, err := e.Stats(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Coord.Topics) != 1 || s.Coord.Topics[0].Produced != 1 || s.Coord.Topics[0].ProducedBytes != 8 {
		t.Errorf("topics: %+v", s.Coord.Topics)
	}
	if s.Shards[0].Records < 1 || s.Backend == "" {
		t.Errorf("shard: %+v, backend %q", s.Shards[0], s.Backend)
	}
	if ok, state := e.Healthy(); !ok || state != "serving" {
		t.Errorf("health: %v %q", ok, state)
	}
	mustClose(t, e)
	if ok, _ := e.Healthy(); ok {
		t.Error("a closed engine is healthy")
	}
}

// flush hands over what an intake has, as an event loop does.
func flush(in interface {
	Flush() (lend bool)
	Lend()
}) {
	if in.Flush() {
		in.Lend()
	}
}

// confirmation decodes a NOTICE and returns it with the frame that confirms it.
func confirmation(t testing.TB, payload []byte) (m protocol.Notice, frame []byte) {
	t.Helper()
	if err := m.Decode(payload); err != nil {
		t.Fatal(err)
	}
	return m, (&protocol.ControlAck{
		NoticeID: m.NoticeID, Kind: m.Kind, GroupID: m.GroupID, MembershipEpoch: m.MembershipEpoch,
		AssignmentEpoch: m.AssignmentEpoch, OwnershipEpoch: m.OwnershipEpoch,
	}).AppendFrame(nil)
}
