package coord

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal"
)

const (
	rigTopic  = 1
	rigGroup  = 1
	rigMember = 77
	rigEpoch  = 5 // leader epoch
)

// rig is a delivery with everything around it faked: the journal commits when the test says so.
type rig struct {
	t       testing.TB
	opts    Options
	c       *Coordinator
	d       *delivery
	meta    *metadata.State
	pool    *ring.Pool
	journal *fakeJournal
	store   *fakeStore
	now     time.Duration
	wallMs  uint64
	epoch   wal.Epoch
	handle  uint64
	// noTopics is why no dead-letter topic can be created.
	noTopics error
}

// fakeJournal takes proposals and commits them in rounds.
type fakeJournal struct {
	number    wal.RoundNumber
	sequence  wal.Sequence // of the ledger
	proposals []wal.Record
	committed []wal.Record // ledger records, for replay
	fail      error

	letterTopic uint16
	letters     []wal.Record // proposed
	refuse      string       // why letters are refused
	refused     []uint64
}

// ProposeMessage takes dead letters; the rig commits them with the next round.
func (j *fakeJournal) ProposeMessage(topic, _ uint16, proposal uint64, key, head, value []byte) error {
	if j.refuse != "" {
		j.refused = append(j.refused, proposal)
		return nil
	}
	j.letters = append(j.letters, wal.Record{Key: bytes.Clone(key), Value: append(bytes.Clone(head), value...)})
	j.letterTopic = topic
	return nil
}

func (j *fakeJournal) ProposeMetadata(uint64, []byte) error { return nil }

func (j *fakeJournal) Flush() {}

func (j *fakeJournal) ProposeLedger(_ int, proposal uint64, value []byte) error {
	if j.fail != nil {
		return j.fail
	}
	j.proposals = append(j.proposals, wal.Record{ProducerSeq: proposal, Value: bytes.Clone(value)})
	return nil
}

// fakeStore holds the messages that are on disk, and the reads that were asked for.
type fakeStore struct {
	records   map[uint16][]wal.Record // by partition
	letters   map[uint16][]wal.Record // stored dead letters, by topic
	oldest    wal.Sequence
	until     wal.Sequence // the last one on disk; 0: all are
	reads     []*wal.ReadRequest
	done      int
	err       error
	snapshots [][]byte
	position  uint64
}

func (s *fakeStore) Read(_ int, req *wal.ReadRequest) { s.reads = append(s.reads, req) }
func (s *fakeStore) DropTopic(uint16)                 {}
func (s *fakeStore) SaveSnapshot(_ int, _ wal.SnapshotKind, position uint64, data []byte) {
	s.snapshots, s.position = append(s.snapshots, data), position
}

func newRig(t testing.TB, partitions uint16, adjust func(*Options)) *rig {
	r := &rig{
		t: t, now: time.Second, wallMs: 1_700_000_000_000, epoch: rigEpoch,
		pool: ring.NewPool(1 << 30), journal: &fakeJournal{}, store: &fakeStore{records: map[uint16][]wal.Record{}, letters: map[uint16][]wal.Record{}},
		meta: metadata.NewState(),
	}
	r.opts = Options{Seed: 1, Now: func() time.Duration { return r.now }, WallMs: func() uint64 { return r.wallMs }}
	if adjust != nil {
		adjust(&r.opts)
	}
	for i, m := range []metadata.Mutation{
		&metadata.TopicCreated{Topic: rigTopic, Partitions: partitions, Name: "t"},
		&metadata.GroupCreated{Group: rigGroup, Topic: rigTopic, Name: "g"},
	} {
		if err := r.meta.Apply(uint64(i)+1, 1, m); err != nil {
			t.Fatal(err)
		}
	}
	r.start()
	if err := r.d.recovered(); err != nil {
		t.Fatal(err)
	}
	r.turn()
	r.commit()
	return r
}

// start makes a coordinator, before recovery.
func (r *rig) start() {
	r.c = New(r.opts, r.journal, r.store, func(uint16, uint16) int { return 0 }, 1)
	r.c.epoch = r.epoch
	r.c.real, r.c.now, r.c.wallMs = r.now, r.now, r.wallMs
	r.publishTopics()
	r.d = r.c.delivery.(*delivery)
	r.d.deps.meta = func() *metadata.State { return r.meta }
	r.d.deps.ensureTopic = r.ensureTopic
	r.d.deps.readDone = func(*wal.ReadRequest) { panic("the fake store answers by itself") }
}

// publishTopics has the registry show what the metadata says.
func (r *rig) publishTopics() {
	reg := &Registry{}
	for _, t := range r.meta.Topics() {
		reg = reg.with(t.ID, topicOf(t))
	}
	r.c.registry.Store(reg)
}

// ensureTopic creates dead-letter topics at once.
func (r *rig) ensureTopic(name string, partitions uint16, done func(uint16, error)) {
	if r.noTopics != nil {
		done(0, r.noTopics)
		return
	}
	t := r.meta.TopicByName(name)
	if t == nil {
		id := r.meta.LastTopic() + 1
		r.apply(&metadata.TopicCreated{Topic: id, Partitions: partitions, Name: name})
		t = r.meta.Topic(id)
		r.publishTopics()
	}
	done(t.ID, nil)
}

// restart is kill -9 and a new start.
func (r *rig) restart() {
	r.t.Helper()
	r.journal.proposals, r.journal.letters, r.journal.refused = nil, nil, nil
	r.epoch++
	old := r.d
	r.start()
	if n := len(r.store.snapshots); n > 0 {
		if err := r.d.restore(0, r.store.position, r.store.snapshots[n-1]); err != nil {
			r.t.Fatal(err)
		}
	}
	for i := range r.journal.committed {
		if err := r.d.replay(0, &r.journal.committed[i]); err != nil {
			r.t.Fatal(err)
		}
	}
	for _, parts := range old.parts {
		for _, p := range parts {
			if p != nil && p.last > 0 {
				r.d.bounds(p.topic, p.id, max(p.first, 1), p.last)
			}
		}
	}
	if err := r.d.recovered(); err != nil {
		r.t.Fatal(err)
	}
}

// turn is one turn of the coordinator's loop, without its inbox.
func (r *rig) turn() {
	r.c.real, r.c.now, r.c.wallMs = r.now, r.now, r.wallMs
	for range 1000 {
		next := r.d.tick(r.now)
		r.c.flush()
		if next == 0 || next > r.now {
			return
		}
	}
	r.t.Fatal("delivery is never done")
}

// commit makes everything proposed so far durable, in one round, and takes a turn.
func (r *rig) commit() {
	for j := r.journal; len(j.proposals)+len(j.letters)+len(j.refused) > 0; {
		refused := j.refused
		j.refused = nil
		for _, id := range refused {
			r.d.refused(id, j.refuse)
		}
		if len(j.proposals)+len(j.letters) > 0 {
			r.round()
		}
		r.turn()
	}
}

func (r *rig) pass(d time.Duration) {
	r.now += d
	r.wallMs += uint64(d.Milliseconds())
	r.turn()
}

// round commits a round of the proposals there are and of messages.
func (r *rig) round(runs ...wal.TestRun) *wal.Round {
	j := r.journal
	if len(j.proposals) > 0 {
		for i := range j.proposals {
			j.sequence++
			j.proposals[i].Sequence, j.proposals[i].LeaderEpoch = j.sequence, r.epoch
		}
		j.committed = append(j.committed, j.proposals...)
		runs = append(runs, wal.TestRun{Stream: wal.StreamID{Kind: wal.Ledger}, Records: j.proposals})
		j.proposals = nil
	}
	if len(j.letters) > 0 {
		stored := r.store.letters[j.letterTopic]
		for i := range j.letters {
			j.letters[i].Sequence, j.letters[i].TimestampMs = wal.Sequence(len(stored)+i+1), r.wallMs
		}
		runs = append(runs, wal.TestRun{Stream: wal.StreamID{Kind: wal.Messages, Topic: j.letterTopic}, Records: j.letters})
		r.store.letters[j.letterTopic] = append(stored, j.letters...)
		j.letters = nil
	}
	j.number++
	rd := wal.NewTestRound(r.pool, r.epoch, j.number, runs...)
	r.c.real, r.c.now, r.c.wallMs = r.now, r.now, r.wallMs
	r.d.round(0, rd)
	rd.Release()
	return rd
}

// publish commits messages of a partition, one per value.
func (r *rig) publish(partition uint16, values ...[]byte) *wal.Round {
	run := wal.TestRun{Stream: wal.StreamID{Kind: wal.Messages, Topic: rigTopic, Partition: partition}}
	for _, v := range values {
		rec := wal.Record{
			Sequence: wal.Sequence(len(r.store.records[partition]) + 1), ProducerID: 9, ProducerSeq: 1, TimestampMs: r.wallMs,
			LeaderEpoch: r.epoch, Value: v,
		}
		r.store.records[partition] = append(r.store.records[partition], rec)
		run.Records = append(run.Records, rec)
	}
	rd := r.round(run)
	r.turn()
	return rd
}

func (r *rig) publishN(partition uint16, n, size int) {
	for range n {
		r.publish(partition, make([]byte, size))
	}
}

// reads completes the reads from disk.
func (r *rig) reads() int {
	n := 0
	for len(r.store.reads) > 0 {
		reqs := r.store.reads
		r.store.reads = nil
		for _, req := range reqs {
			r.complete(req)
			n++
		}
		r.turn()
	}
	return n
}

func (r *rig) complete(req *wal.ReadRequest) {
	r.store.done++
	req.Err = r.store.err
	if req.Err == nil {
		from := max(req.From, r.store.oldest, 1)
		var records []wal.Record
		size := 0
		stored := r.store.records[req.Stream.Partition]
		if req.Stream.Topic != rigTopic {
			stored = r.store.letters[req.Stream.Topic]
		}
		for _, rec := range stored {
			if rec.Sequence < from || req.ByTime && rec.TimestampMs < req.TimeMs {
				continue
			}
			if r.store.until != 0 && rec.Sequence > r.store.until {
				break
			}
			size += wal.RecordSize(len(rec.Key), len(rec.Value))
			if len(records) > 0 && size > req.MaxBytes {
				break
			}
			records = append(records, rec)
		}
		if len(records) > 0 {
			req.Chunk = newChunk(r.t, r.pool, req.Stream, records)
		}
	}
	r.d.readDone(req)
}

// newChunk makes a chunk as the store does; its memory is a private matter of package wal.
func newChunk(t testing.TB, pool *ring.Pool, stream wal.StreamID, records []wal.Record) *wal.Chunk {
	size := 0
	for i := range records {
		size += wal.RecordSize(len(records[i].Key), len(records[i].Value))
	}
	slab := pool.Get(size)
	if slab == nil {
		t.Fatal("no memory for a chunk")
	}
	data := slab.Bytes()[:size]
	off := 0
	for i := range records {
		off += wal.PutRecord(data[off:], &records[i])
	}
	c := &wal.Chunk{Stream: stream, First: records[0].Sequence, Count: len(records)}
	v := reflect.ValueOf(c).Elem()
	*(**ring.Slab)(unsafe.Pointer(v.FieldByName("slab").UnsafeAddr())) = slab
	*(*[]byte)(unsafe.Pointer(v.FieldByName("data").UnsafeAddr())) = data
	return c
}

// subscribe makes a connection with a subscription that owns every partition.
func (r *rig) subscribe(group uint16, stream bool, adjust func(*subscription)) (*fakeClient, *subscription) {
	r.handle++
	cl := &fakeClient{rig: r, id: r.handle, answers: map[uint64][]byte{}}
	s := &subscription{open: true, client: cl, handle: r.handle, group: group, topic: rigTopic, member: rigMember, stream: stream, windowCount: 256, windowBytes: 2 << 20}
	if adjust != nil {
		adjust(s)
	}
	if !r.c.open(cl).addSub(s) {
		r.t.Fatal("no room for a subscription")
	}
	r.d.openSub(s)
	for i := range s.consumer.set.readers {
		r.d.own(s, uint16(i), r.handle*100+uint64(i))
	}
	r.turn()
	return cl, s
}

func (r *rig) apply(m metadata.Mutation) {
	r.t.Helper()
	if err := r.meta.Apply(r.meta.MutationID()+1, 1, m); err != nil {
		r.t.Fatal(err)
	}
}

// addGroup makes another group on the topic.
func (r *rig) addGroup(id uint16, policy protocol.StartPolicy) {
	r.apply(&metadata.GroupCreated{Group: id, Topic: rigTopic, Policy: policy, Name: fmt.Sprint("g", id)})
	r.d.groupCreated(id, rigTopic, policy)
	r.turn()
	r.commit()
}

// fakeClient is a connection that keeps what it is sent.
type fakeClient struct {
	rig     *rig
	id      uint64
	answers map[uint64][]byte // by request
	req     uint64
	in      []byte // pushed
	msgs    []protocol.Msg
	errs    []protocol.ErrFrame
	flushes int
	pushes  int
	bytes   int
	pulls   atomic.Int32
	shut    protocol.ErrorCode
	// stuck: the socket takes nothing; what is pushed stays outstanding, with the memory that it lies in.
	stuck       bool
	outstanding int
	owned       []Releaser
	counting    bool // only count
	drains      bool // what is outstanding leaves while more is pushed
	values      int  // pushed without a copy
}

func (c *fakeClient) ID() uint64           { return c.id }
func (c *fakeClient) Outstanding() int     { return c.outstanding }
func (c *fakeClient) Pulls() *atomic.Int32 { return &c.pulls }
func (c *fakeClient) Flush()               { c.flushes++ }

func (c *fakeClient) Complete(req uint64, frame []byte) {
	if c.counting {
		c.flushes++
		return
	}
	if c.answers[req] != nil {
		c.rig.t.Fatalf("request %d is answered twice", req)
	}
	c.answers[req] = bytes.Clone(frame)
}

func (c *fakeClient) Shut(code protocol.ErrorCode, _ protocol.Op, _ string) { c.shut = code }

func (c *fakeClient) Push(frames []byte) {
	c.pushes++
	c.bytes += len(frames)
	if c.stuck {
		c.outstanding += len(frames)
	}
	if c.drains {
		c.outstanding = 0
	}
	if !c.counting {
		c.in = append(c.in, frames...)
		c.parse()
	}
}

func (c *fakeClient) PushOwned(frames []byte, owner Releaser) {
	c.Push(frames)
	c.keep(owner)
}

func (c *fakeClient) PushValue(head, value []byte, owner Releaser) {
	c.values++
	c.Push(append(bytes.Clone(head), value...))
	c.keep(owner)
}

func (c *fakeClient) keep(owner Releaser) {
	if c.stuck {
		c.owned = append(c.owned, owner)
		return
	}
	owner.Release()
}

// unstick lets the socket take everything.
func (c *fakeClient) unstick() {
	c.stuck, c.outstanding = false, 0
	for _, o := range c.owned {
		o.Release()
	}
	c.owned = nil
	c.rig.d.writable(c)
	c.rig.turn()
}

func (c *fakeClient) parse() {
	for {
		op, payload, n, err := protocol.ParseFrame(c.in)
		if err != nil {
			c.rig.t.Fatalf("a bad frame was pushed: %v", err)
		}
		if n == 0 {
			return
		}
		payload = bytes.Clone(payload)
		c.in = c.in[n:]
		switch op {
		case protocol.OpMsg:
			var m protocol.Msg
			if err := m.Decode(payload); err != nil {
				c.rig.t.Fatal(err)
			}
			c.msgs = append(c.msgs, m)
		case protocol.OpErr:
			var m protocol.ErrFrame
			if err := m.Decode(payload); err != nil {
				c.rig.t.Fatal(err)
			}
			c.errs = append(c.errs, m)
		default:
			c.rig.t.Fatalf("%v was pushed", op)
		}
	}
}

// take returns the messages that came since the last call.
func (c *fakeClient) take() []protocol.Msg {
	m := c.msgs
	c.msgs = nil
	return m
}

// want takes exactly n messages.
func (c *fakeClient) want(n int) []protocol.Msg {
	c.rig.t.Helper()
	m := c.take()
	if len(m) != n {
		c.rig.t.Fatalf("%d messages came, want %d", len(m), n)
	}
	return m
}

// send hands a request to delivery, as the coordinator does.
func (c *fakeClient) send(op protocol.Op, frame []byte) uint64 {
	c.req++
	c.rig.c.real, c.rig.c.now, c.rig.c.wallMs = c.rig.now, c.rig.now, c.rig.wallMs
	c.rig.d.request(&Request{Client: c, Req: c.req, Op: op}, frame[protocol.HeaderSize:])
	return c.req
}

func (c *fakeClient) ack(m *protocol.Msg, flags uint16) uint64 {
	a := protocol.Ack{SubscriptionID: m.SubscriptionID, TopicID: m.TopicID, Partition: m.Partition, Sequence: m.Sequence,
		DeliveryID: m.DeliveryID, OwnershipEpoch: m.OwnershipEpoch, Flags: flags}
	return c.send(protocol.OpAck, a.AppendFrame(nil))
}

func (c *fakeClient) nack(m *protocol.Msg, reason protocol.NackReason) uint64 {
	a := protocol.Nack{SubscriptionID: m.SubscriptionID, TopicID: m.TopicID, Partition: m.Partition, Sequence: m.Sequence,
		DeliveryID: m.DeliveryID, OwnershipEpoch: m.OwnershipEpoch, Reason: reason}
	return c.send(protocol.OpNack, a.AppendFrame(nil))
}

func (c *fakeClient) credit(s *subscription, mode protocol.CreditMode, count uint16, size uint32) protocol.CreditResult {
	c.rig.t.Helper()
	m := protocol.Credit{SubscriptionID: s.id, Mode: mode, Count: count, Bytes: size}
	req := c.send(protocol.OpCredit, m.AppendFrame(nil))
	var ok protocol.OKFrame
	var res protocol.CreditResult
	_, payload, _, err := protocol.ParseFrame(c.answers[req])
	if err == nil {
		err = ok.Decode(payload)
	}
	if err == nil {
		err = res.Decode(ok.Result)
	}
	if err != nil {
		c.rig.t.Fatal(err)
	}
	return res
}

func (c *fakeClient) pull(s *subscription, adjust func(*protocol.Pull)) uint64 {
	p := protocol.Pull{SubscriptionID: s.id, MemberID: s.member}
	if adjust != nil {
		adjust(&p)
	}
	return c.send(protocol.OpPull, p.AppendFrame(nil))
}

var errNoAnswer = errors.New("not answered")

// answer returns what a request was answered with: nil for OK.
func (c *fakeClient) answer(req uint64) error {
	frame := c.answers[req]
	if frame == nil {
		return errNoAnswer
	}
	op, payload, _, err := protocol.ParseFrame(frame)
	if err != nil {
		return err
	}
	if op == protocol.OpErr {
		var e protocol.ErrFrame
		if err := e.Decode(payload); err != nil {
			return err
		}
		return e.Err()
	}
	return nil
}

func (c *fakeClient) wantAnswer(req uint64, want error) {
	c.rig.t.Helper()
	if got := c.answer(req); !errors.Is(got, want) || (want == nil) != (got == nil) {
		c.rig.t.Fatalf("request %d was answered with %v, want %v", req, got, want)
	}
}
