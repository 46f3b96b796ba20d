package coord

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal"
)

// stubClient keeps what the coordinator sends it. It is used on one goroutine.
type stubClient struct {
	id      uint64
	answers map[uint64]string // rendered, by request
	pushed  []protocol.Notice
	msgs    []protocol.Msg
	order   []string // answers and notices as they came
	flushes int
	shut    protocol.ErrorCode
	shutMsg string
	pulls   atomic.Int32
	next    uint64
}

func (c *stubClient) ID() uint64 { return c.id }

func (c *stubClient) Complete(req uint64, frame []byte) {
	if old, twice := c.answers[req]; twice {
		panic(fmt.Sprintf("request %d is answered twice: %s", req, old))
	}
	text := render(frame)
	c.answers[req] = text
	c.order = append(c.order, text)
}

func (c *stubClient) Push(frames []byte) {
	for len(frames) > 0 {
		op, payload, n, err := protocol.ParseFrame(frames)
		if err != nil {
			panic(err)
		}
		frames = frames[n:]
		if op == protocol.OpMsg {
			var m protocol.Msg
			if err := m.Decode(bytes.Clone(payload)); err != nil {
				panic(err)
			}
			c.msgs = append(c.msgs, m)
		}
		if op != protocol.OpNotice {
			c.order = append(c.order, op.String())
			continue
		}
		var m protocol.Notice
		if err := m.Decode(payload); err != nil {
			panic(err)
		}
		c.pushed = append(c.pushed, m)
		c.order = append(c.order, fmt.Sprintf("NOTICE %d p%d", m.Kind, m.Partition))
	}
}

func (c *stubClient) PushOwned(frames []byte, owner Releaser) { c.Push(frames); owner.Release() }
func (c *stubClient) PushValue(head, value []byte, owner Releaser) {
	c.Push(append(head[:len(head):len(head)], value...))
	owner.Release()
}
func (c *stubClient) Flush()               { c.flushes++ }
func (c *stubClient) Outstanding() int     { return 0 }
func (c *stubClient) Pulls() *atomic.Int32 { return &c.pulls }
func (c *stubClient) Shut(code protocol.ErrorCode, _ protocol.Op, text string) {
	c.shut, c.shutMsg = code, text
}

// render makes an answer frame readable.
func render(frame []byte) string {
	op, payload, n, err := protocol.ParseFrame(frame)
	if err != nil || n != len(frame) {
		panic(fmt.Sprintf("bad frame %x: %v", frame, err))
	}
	if op == protocol.OpErr {
		var m protocol.ErrFrame
		if err := m.Decode(payload); err != nil {
			panic(err)
		}
		return fmt.Sprintf("ERR 0x%04X %s", uint16(m.Code), m.Message)
	}
	var m protocol.OKFrame
	if err := m.Decode(payload); err != nil {
		panic(err)
	}
	switch m.RequestOp {
	case protocol.OpDeclare:
		var r protocol.DeclareResult
		if err := r.Decode(m.Result); err != nil {
			var r protocol.ResetResult
			if err := r.Decode(m.Result); err != nil {
				panic(err)
			}
			return fmt.Sprintf("OK RESET %v", r.Positions)
		}
		return fmt.Sprintf("OK DECLARE id=%d parts=%d existed=%t", r.TopicID, r.Partitions, r.Existed)
	case protocol.OpSub:
		var r protocol.SubResult
		if err := r.Decode(m.Result); err != nil {
			panic(err)
		}
		return fmt.Sprintf("OK SUB sub=%d member=%x epochs=%d/%d", r.SubscriptionID, r.MemberID, r.MembershipEpoch, r.AssignmentEpoch)
	default:
		return "OK " + m.RequestOp.String()
	}
}

// stubLog keeps what is proposed until the bench commits it.
type stubLog struct {
	pending []wal.Record
	ledger  []wal.Record
	fail    error
	failAt  int // fail the n-th proposal from now on; 0: by fail alone
}

func (l *stubLog) ProposeMetadata(proposal uint64, value []byte) error {
	if l.failAt > 0 {
		if l.failAt--; l.failAt == 0 {
			l.fail = errors.New("the disk is on fire")
		}
	}
	if l.fail != nil {
		return l.fail
	}
	l.pending = append(l.pending, wal.Record{ProducerSeq: proposal, Value: append([]byte(nil), value...)})
	return nil
}

func (l *stubLog) Flush() {}

func (l *stubLog) ProposeMessage(uint16, uint16, uint64, []byte, []byte, []byte) error { return nil }

func (l *stubLog) ProposeLedger(_ int, proposal uint64, value []byte) error {
	l.ledger = append(l.ledger, wal.Record{ProducerSeq: proposal, Value: append([]byte(nil), value...)})
	return nil
}

type stubStore struct {
	snapshots []string // "kind@position"
	data      []byte
	dropped   []uint16
}

func (s *stubStore) Read(int, *wal.ReadRequest) {}
func (s *stubStore) SaveSnapshot(_ int, kind wal.SnapshotKind, position uint64, data []byte) {
	s.snapshots = append(s.snapshots, fmt.Sprintf("%d@%d", kind, position))
	s.data = data
}
func (s *stubStore) DropTopic(topic uint16) { s.dropped = append(s.dropped, topic) }

// stubDelivery records the calls of the coordinator.
type stubDelivery struct {
	calls    []string
	next     time.Duration
	starting bool // groups have not started yet
}

func (d *stubDelivery) say(format string, args ...any) {
	d.calls = append(d.calls, fmt.Sprintf(format, args...))
}

func (d *stubDelivery) openSub(s *subscription) {
	d.say("open %d g%d t%d stream=%t window=%d/%d", s.id, s.group, s.topic, s.stream, s.windowCount, s.windowBytes)
}
func (d *stubDelivery) closeSub(s *subscription, graceful bool) {
	d.say("close %d graceful=%t ended=0x%04X", s.id, graceful, uint16(s.ended))
}
func (d *stubDelivery) own(s *subscription, p uint16, e uint64) { d.say("own %d p%d e%d", s.id, p, e) }
func (d *stubDelivery) drain(g uint16, _ uint64, p uint16, e uint64) {
	d.say("drain g%d p%d e%d", g, p, e)
}
func (d *stubDelivery) disown(g uint16, _ uint64, p uint16, e uint64, graceful bool) {
	d.say("disown g%d p%d e%d graceful=%t", g, p, e, graceful)
}
func (d *stubDelivery) groupCreated(g, t uint16, p protocol.StartPolicy) {
	d.say("group+ g%d t%d policy=%d", g, t, p)
}
func (d *stubDelivery) memberJoins(g uint16, m uint64, p protocol.StartPolicy) {
	d.say("member+ g%d m%x policy=%d", g, m, p)
}
func (d *stubDelivery) memberStarted(uint16, uint64) bool { return !d.starting }
func (d *stubDelivery) memberGone(g uint16, m uint64)     { d.say("member- g%d m%x", g, m) }
func (d *stubDelivery) groupStarted(uint16) bool          { return !d.starting }
func (d *stubDelivery) groupDeleted(g uint16)             { d.say("group- g%d", g) }
func (d *stubDelivery) letGo(t *metadata.Topic) bool      { return true }
func (d *stubDelivery) topicDeleted(t uint16)             { d.say("topic- t%d", t) }
func (d *stubDelivery) groupConfigured(g uint16)          { d.say("group= g%d", g) }
func (d *stubDelivery) reset(g uint16, _ protocol.Reset, done func([]protocol.ResetPosition, error)) {
	d.say("reset g%d", g)
	done([]protocol.ResetPosition{{Partition: 0, From: 1, To: 2}}, nil)
}
func (d *stubDelivery) refused(uint64, string)       {}
func (d *stubDelivery) request(r *Request, _ []byte) { d.say("request %v", r.Op) }
func (d *stubDelivery) round(j int, r *wal.Round)    {}
func (d *stubDelivery) failed(code protocol.ErrorCode, _ string) {
	d.say("failed 0x%04X", uint16(code))
}
func (d *stubDelivery) written(j int, n wal.RoundNumber)      { d.say("written %d %d", j, n) }
func (d *stubDelivery) readDone(*wal.ReadRequest)             { d.say("read") }
func (d *stubDelivery) writable(c Client)                     { d.say("writable %d", c.ID()) }
func (d *stubDelivery) interrupt(c Client)                    { d.say("interrupt %d", c.ID()) }
func (d *stubDelivery) tick(time.Duration) time.Duration      { return d.next }
func (d *stubDelivery) dueFrozen() (time.Duration, bool)      { return d.next, d.next != 0 }
func (d *stubDelivery) restore(int, uint64, []byte) error     { return nil }
func (d *stubDelivery) replay(int, *wal.Record) error         { return nil }
func (d *stubDelivery) follow(int, *wal.Round)                {}
func (d *stubDelivery) compact()                              {}
func (d *stubDelivery) bounds(_, _ uint16, _, _ wal.Sequence) {}
func (d *stubDelivery) recovered() error                      { d.say("recovered"); return nil }
func (d *stubDelivery) groupStats(g *GroupStats)              { g.Parts[0].Lag, g.Lag = 7, 7 }
func (d *stubDelivery) standbyStats(*GroupStats)              {}
func (d *stubDelivery) topicStats(*TopicStats)                {}
func (d *stubDelivery) endToEnd() Quantiles                   { return Quantiles{} }
func (d *stubDelivery) take() (calls string) {
	calls, d.calls = strings.Join(d.calls, "; "), nil
	return
}

// bench is a coordinator whose log, time and clients are in the test's hands.
type bench struct {
	t     testing.TB
	c     *Coordinator
	log   *stubLog
	store *stubStore
	d     *stubDelivery
	now   time.Duration
	seq   wal.Sequence // of the metadata log
	epoch wal.Epoch
	round wal.RoundNumber
	pool  *ring.Pool
	ids   uint64

	ledgerSeq wal.Sequence
	// records are all that was committed, for a restart, ledger what was of the ledger.
	records, ledger []wal.Record
}

func newBench(t testing.TB, change ...func(*Options)) *bench {
	b := &bench{t: t, log: &stubLog{}, store: &stubStore{}, now: time.Second, epoch: 0, pool: ring.NewPool(16 << 20)}
	b.start(change...)
	return b
}

// start makes a new coordinator from what is committed.
func (b *bench) start(change ...func(*Options)) {
	b.t.Helper()
	opts := Options{NodeID: 1, Now: func() time.Duration { return b.now }, WallMs: func() uint64 { return 1 }}
	for _, f := range change {
		f(&opts)
	}
	b.epoch++
	b.log.pending, b.log.fail = nil, nil
	b.c = New(opts, b.log, b.store, func(uint16, uint16) int { return 0 }, 1)
	b.d = &stubDelivery{}
	b.c.delivery = b.d
	for i := range b.records {
		if err := b.c.ReplayMetadata(&b.records[i]); err != nil {
			b.t.Fatal(err)
		}
	}
	b.c.Epoch(b.epoch)
	if err := b.c.Recovered(); err != nil {
		b.t.Fatal(err)
	}
	b.c.proposeLeader()
	b.commit()
	b.d.take()
}

func (b *bench) client() *stubClient {
	b.ids++
	return &stubClient{id: b.ids, answers: make(map[uint64]string)}
}

// send submits one frame without committing anything, and returns the request's number.
func (b *bench) send(c *stubClient, frame []byte) uint64 {
	b.t.Helper()
	op, payload, _, err := protocol.ParseFrame(frame)
	if err != nil {
		b.t.Fatal(err)
	}
	c.next++
	batch := GetBatch()
	batch.Add(c, c.next, op, payload)
	b.c.Submit(batch)
	b.c.turn()
	return c.next
}

// do submits one frame, commits whatever comes of it, and returns the answer.
func (b *bench) do(c *stubClient, frame []byte) string {
	b.t.Helper()
	req := b.send(c, frame)
	b.commit()
	return c.answers[req]
}

// commit commits what is proposed until nothing more is.
func (b *bench) commit() {
	b.t.Helper()
	for len(b.log.pending)+len(b.log.ledger) > 0 {
		records, events := b.log.pending, b.log.ledger
		b.log.pending, b.log.ledger = nil, nil
		for i := range records {
			b.seq++
			records[i].Sequence, records[i].LeaderEpoch = b.seq, b.epoch
		}
		b.records = append(b.records, records...)
		for i := range events {
			b.ledgerSeq++
			events[i].Sequence, events[i].LeaderEpoch = b.ledgerSeq, b.epoch
		}
		b.ledger = append(b.ledger, events...)
		var runs []wal.TestRun
		if len(events) > 0 {
			runs = append(runs, wal.TestRun{Stream: wal.StreamID{Kind: wal.Ledger}, Records: events})
		}
		if len(records) > 0 {
			runs = append(runs, wal.TestRun{Stream: wal.StreamID{Kind: wal.Metadata}, Records: records})
		}
		b.round++
		b.c.CommitRound(0, wal.NewTestRound(b.pool, b.epoch, b.round, runs...))
		b.c.turn()
	}
}

// advance lets time pass, one due turn after the other.
func (b *bench) advance(d time.Duration) {
	b.t.Helper()
	end := b.now + d
	for range 10_000 {
		next, due := b.c.turn()
		b.commit()
		if !due || next > end {
			b.now = end
			b.c.turn()
			b.commit()
			return
		}
		b.now = max(b.now, next)
	}
	b.t.Fatal("the coordinator is due again and again")
}

func (b *bench) closeClient(c *stubClient) {
	b.c.Closed(c)
	b.c.turn()
	b.commit()
}

func declare(name string, partitions, flags uint16) []byte {
	return (&protocol.Declare{Topic: []byte(name), Partitions: partitions, Flags: flags}).AppendFrame(nil)
}

func sub(group string, topic uint16) []byte {
	return (&protocol.Sub{Group: []byte(group), TopicID: topic, Partition: protocol.AnyPartition}).AppendFrame(nil)
}

// confirm answers the client's notices.
func (b *bench) confirm(c *stubClient) {
	b.t.Helper()
	all := c.pushed
	c.pushed = nil
	for _, n := range all {
		got := b.do(c, (&protocol.ControlAck{NoticeID: n.NoticeID, Kind: n.Kind, GroupID: n.GroupID, MembershipEpoch: n.MembershipEpoch,
			AssignmentEpoch: n.AssignmentEpoch, OwnershipEpoch: n.OwnershipEpoch}).AppendFrame(nil))
		if got != "OK CONTROL_ACK" {
			b.t.Fatalf("CONTROL_ACK: %s", got)
		}
	}
}

func (b *bench) want(what, got, prefix string) {
	b.t.Helper()
	if !strings.HasPrefix(got, prefix) {
		b.t.Errorf("%s: got %q, want %q", what, got, prefix)
	}
}
