package engine

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/engine/coord"
	"github.com/mortarmq/mortarmq/engine/mpsc"
	"github.com/mortarmq/mortarmq/internal/mutant"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// messageKind says what a message in a shard's inbox asks for.
type messageKind uint8

const (
	msgPublish    messageKind = iota // batch of publishes from an event loop
	msgPropose                       // one record for the ledger, the metadata log or a system topic
	msgTrim                          // the store made everything up to round durable
	msgSnapshot                      // the store begins a sweep up to round and needs the producer windows
	msgDrop                          // topic was deleted
	msgQuarantine                    // the files of a partition turned out to be damaged
	msgReplica                       // from the other nodes, or about the shard's role among them
	msgClose                         // finish what is queued and stop
)

// message is what a shard's inbox carries.
type message struct {
	kind     messageKind
	topic    uint16
	index    uint16 // of the partition
	batch    *pubBatch
	proposal *proposal
	round    wal.RoundNumber
	replica  *replicaEvent
}

// proposal is a record that the coordinator wants in the journal.
type proposal struct {
	stream wal.StreamID
	id     uint64
	// value holds the key of a message, keyLen bytes, in front of its value.
	value  []byte
	keyLen int
}

// Bounds of the space that publishes must leave free, see spaceReserve.
const (
	// spaceReserve is added to the journal's bytes in use: what is acknowledged must fit its segment later.
	spaceReserve = 64 << 20
	// maxStorePending is how much committed data may wait for its segments before the shard stops taking publishes.
	maxStorePending = 64 << 20
	// sweepDivisor: a sweep is asked for when that part of the journal was written since the last one.
	sweepDivisor = 4
	// maxPooledProposal keeps a proposal that once held a huge message from occupying the pool for ever.
	maxPooledProposal = 1 << 20
	// nudgeAfter and nudgeBytes bound how long and how much is handed over without a wake-up.
	nudgeAfter = 50 * time.Millisecond
	nudgeBytes = 1 << 20
)

var proposals = sync.Pool{New: func() any { return new(proposal) }}

// submit queues a record of the ledger or the metadata log, without waking the shard. value is copied.
func (s *shard) submit(stream wal.StreamID, id uint64, value []byte) error {
	if f := s.failure.Load(); f != nil {
		return f.err()
	}
	p := proposals.Get().(*proposal)
	p.stream, p.id, p.keyLen, p.value = stream, id, 0, append(p.value[:0], value...)
	return s.queue(p)
}

// submitMessage queues a message for a partition of a system topic, without waking the shard. Key, head and value are copied.
func (s *shard) submitMessage(stream wal.StreamID, id uint64, key, head, value []byte) error {
	if f := s.failure.Load(); f != nil {
		return f.err()
	}
	p := proposals.Get().(*proposal)
	p.stream, p.id, p.keyLen = stream, id, len(key)
	p.value = slices.Grow(p.value[:0], len(key)+len(head)+len(value))
	p.value = append(append(append(p.value, key...), head...), value...)
	return s.queue(p)
}

func (s *shard) queue(p *proposal) error {
	if !s.inbox.PushQuietly(message{kind: msgPropose, proposal: p}) {
		return fmt.Errorf("%w: the broker is shutting down", protocol.CodeReadOnlyDegraded)
	}
	return nil
}

func (p *proposal) recycle() {
	if cap(p.value) <= maxPooledProposal {
		proposals.Put(p)
	}
}

// partition is a shard's state of one partition.
type partition struct {
	stream wal.StreamID
	// last is the highest sequence appended, committed the highest that is durable and visible.
	last, committed wal.Sequence
	// lastMs is the timestamp of the last record; timestamps never decrease.
	lastMs uint64
	// window is the producer window last used: mostly the next publish is of the same producer.
	window *window
	// refusal is the answer to every publish where the partition's files are quarantined, otherwise empty: its
	// sequences can't be continued without knowing where they end.
	refusal string
}

const (
	// quarantinedText answers publishes to a partition whose files are damaged.
	quarantinedText = "this partition's files are damaged and quarantined: see the report beside them in the broker's data directory"
	// deletedText answers publishes to a topic that was deleted while they were on their way.
	deletedText = "the topic was deleted: DECLARE it again for a new id"
)

// answer is the OK owed to n consecutive requests of one client whose messages got consecutive sequences.
type answer struct {
	client     coord.Client
	part       *partition
	req        uint64
	seq        wal.Sequence
	n          uint32
	flags      uint8
	durability protocol.Durability
}

// roundAnswers is what is owed when one round commits.
type roundAnswers struct {
	round   wal.RoundNumber
	answers []answer
	repl    replicaRound // in a cluster
}

// refusal is the answer to what can't be acknowledged.
type refusal struct {
	code protocol.ErrorCode
	text string
}

func (r *refusal) err() error { return fmt.Errorf("%w: %s", r.code, r.text) }

// shard appends to one journal and answers when its rounds are committed. Its state belongs to one goroutine, locked to
// its thread; everyone else posts to the inbox.
type shard struct {
	id    int
	eng   *Engine
	log   *slog.Logger
	inbox *mpsc.Queue[message]
	store *storeLoop
	done  chan struct{}

	// Read by other goroutines.
	queued  atomic.Int64            // bytes of publishes that wait in the inbox and the backlog
	failure atomic.Pointer[refusal] // why nothing more is acknowledged
	stats   shardStats
	device  deviceRef

	// driving is held by whoever runs the shard's turns: its goroutine, or an event loop that lends its thread while the
	// goroutine sleeps and nothing is at the disk, see lend. It guards the rest.
	driving sync.Mutex
	lent    lentDisk

	// repl is the shard's part in a cluster, nil on a node on its own.
	repl *replication

	disk      Device
	journal   *wal.Journal
	dedup     *dedup
	topics    [][]*partition // by topic id, by partition
	gone      topicSet       // topics deleted in this process's life, whose publishes may still be on their way
	ledgerSeq wal.Sequence   // last appended of the ledger stream
	metaSeq   wal.Sequence   // last appended of the metadata stream
	epoch     wal.Epoch
	// closing: finish what is queued; ended: that is done.
	closing, ended bool
	// published is the newest round that coordinator and store were given.
	published wal.RoundNumber
	// unwritten is the newest round that recovery could not write to segments, because the disk was full; 0: it wrote all.
	unwritten wal.RoundNumber
	// sweepBytes were committed since a sweep was last asked for.
	sweepBytes int64
	// quietBytes were handed over without a wake-up; at nudgeAt, if it is not 0, the wake-up is due.
	quietBytes int
	nudgeAt    time.Duration

	publishes fifo[*pubBatch] // backlog
	next      int             // the request of the first batch to take next
	proposals fifo[*proposal] // backlog; served before publishes
	spare     []message

	gathering roundAnswers       // of the round being filled
	inFlight  fifo[roundAnswers] // of the sealed rounds
	freeLists [][]answer         // emptied answer slices for reuse
	touched   []coord.Client     // clients with answers to flush
	frame     []byte
	record    wal.Record
	nowMs     uint64
}

// shardStats are counters that other goroutines read.
type shardStats struct {
	Rounds, Records, RoundBytes, Duplicates, Refused atomic.Uint64
}

func newShard(e *Engine, id int) *shard {
	s := &shard{id: id, eng: e, log: e.log.With("shard", id), done: make(chan struct{}), dedup: newDedup(dedupMaxBytes)}
	s.inbox = mpsc.New[message](s.device.wake)
	return s
}

// admit says whether a publish may queue: called by event loops.
func (s *shard) admit() (protocol.ErrorCode, string) {
	if f := s.failure.Load(); f != nil {
		return f.code, f.text
	}
	if s.repl != nil {
		if f := s.repl.readOnly.Load(); f != nil {
			return f.code, f.text
		}
	}
	if s.queued.Load() > maxQueuedBytes {
		s.stats.Refused.Add(1)
		return protocol.CodeBackpressure, "the broker's queue is full: back off and send again"
	}
	return 0, ""
}

// partitionOf returns the state of a partition, created on first use.
func (s *shard) partitionOf(topic, index uint16) *partition {
	for int(topic) >= len(s.topics) {
		s.topics = append(s.topics, nil)
	}
	parts := s.topics[topic]
	for int(index) >= len(parts) {
		parts = append(parts, nil)
	}
	s.topics[topic] = parts
	p := parts[index]
	if p == nil {
		p = &partition{stream: wal.StreamID{Kind: wal.Messages, Topic: topic, Partition: index}}
		parts[index] = p
	}
	return p
}

// run is the shard's goroutine. ready is closed, or sent an error, when it can take requests.
func (s *shard) run(ready chan<- error) {
	runtime.LockOSThread()
	defer close(s.done)
	s.driving.Lock()
	defer s.driving.Unlock()
	err := s.begin()
	ready <- err
	if err != nil {
		return
	}
	s.loop()
	s.end()
}

// begin opens the shard's ring. What comes then belongs to one goroutine, and end comes last.
func (s *shard) begin() error {
	d, err := s.eng.openDevice()
	if err != nil {
		return fmt.Errorf("shard %d: %w", s.id, err)
	}
	s.disk = d
	s.lent.on, _ = d.(executor)
	s.device.set(d)
	s.journal.SetDisk(d)
	s.journal.OnFlushed(s.flushed)
	return nil
}

// end closes the journal and gives the ring back.
func (s *shard) end() {
	d := s.disk
	if s.repl != nil {
		s.repl.release()
	}
	if err := s.journal.Close(waiter{d}); err != nil && s.failure.Load() == nil {
		s.log.Error("closing the journal", "err", err)
	}
	s.device.clear()
	if err := d.Close(); err != nil {
		s.log.Error("closing the shard's ring", "err", err)
	}
}

// leave refuses what came too late, after the shard's goroutine has ended: connections may outlive the engine.
func (s *shard) leave() {
	s.inbox.Close()
	f := s.failure.Load()
	if f == nil && s.repl != nil {
		f = s.repl.refusal()
	}
	if f == nil {
		f = &refusal{protocol.CodeReadOnlyDegraded, "the broker is shutting down: reconnect and send again"}
	}
	for _, m := range s.inbox.Drain(nil) {
		switch {
		case m.kind == msgPublish:
			s.refuseBatch(m.batch, f.code, f.text)
		case m.kind == msgReplica && m.replica.payload != nil:
			m.replica.payload.Release()
		}
	}
}

func (s *shard) loop() {
	for {
		progress, next := s.turn()
		if s.ended {
			return
		}
		if progress || !s.inbox.Sleep() {
			continue
		}
		err := s.wait(next)
		if err != nil {
			s.fail(fmt.Errorf("waiting for the disk: %w", err))
		}
		s.inbox.Awake()
		s.flushClients()
	}
}

// turn does everything that can be done without blocking. It reports whether something completed, so that there may be
// more to do at once, and otherwise when there will be. After the last turn, ended is set.
func (s *shard) turn() (progress bool, next time.Duration) {
	s.take()
	s.encode()
	s.submitRounds()
	s.flushClients() // of publishes that do not wait for the disk: Poll may be the write
	now := s.eng.now()
	next = s.journal.Step(now)
	if s.nudgeAt != 0 {
		if now >= s.nudgeAt {
			s.nudge()
		} else {
			next = min(next, s.nudgeAt)
		}
	}
	progress = s.disk.Poll() > 0
	if err := s.journal.Err(); err != nil && s.failure.Load() == nil {
		s.fail(err) // of a write that no round waits for
	}
	if s.repl != nil {
		next = min(next, s.repl.afterPoll(now))
	}
	s.flushClients()
	if !progress && s.closing && s.idle() {
		s.nudge()
		if s.repl == nil {
			s.published = s.journal.NextRound() - 1 // START rounds too: nothing is in flight
		}
		s.snapshot(s.published)
		s.ended = true
	}
	return progress, next
}

// timeout is how long the shard may sleep: until the journal's next step, and not long while something is refused for a
// reason that no message announces (space on the disk, the store's backlog).
func (s *shard) timeout(next time.Duration) time.Duration {
	d := s.eng.until(next)
	if s.timeoutShort() && (d < 0 || d > retryRefused) {
		d = retryRefused
	}
	return d
}

// retryRefused is after how long a shard looks again whether there is room for what waits.
const retryRefused = 2 * time.Millisecond

// timeoutShort tells whether something waits that no message announces.
func (s *shard) timeoutShort() bool {
	return s.closing || s.publishes.len() > 0 || s.proposals.len() > 0 || s.repl != nil && s.repl.waiting()
}

func (s *shard) idle() bool {
	records, _ := s.journal.Gathered()
	return s.publishes.len() == 0 && s.proposals.len() == 0 && records == 0 && s.journal.InFlight() == 0
}

// take moves the inbox into the backlogs.
func (s *shard) take() {
	items := s.inbox.Drain(s.spare)
	for i := range items {
		m := &items[i]
		switch m.kind {
		case msgPublish:
			s.publishes.push(m.batch)
		case msgPropose:
			s.proposals.push(m.proposal)
		case msgTrim:
			s.journal.Trim(m.round)
		case msgSnapshot:
			s.snapshot(m.round)
		case msgDrop:
			s.forget(m.topic)
		case msgQuarantine:
			if !s.gone.has(m.topic) {
				s.partitionOf(m.topic, m.index).refusal = quarantinedText
			}
		case msgReplica:
			s.repl.handle(m.replica)
		case msgClose:
			s.closing = true
		}
	}
	s.spare = items
}

// forget drops what is kept of a deleted topic; its id is never used again. Records of it that are still on their way to
// the disk are committed and dropped with the files, publishes that come from now on are refused.
func (s *shard) forget(topic uint16) {
	s.gone.add(topic)
	s.dedup.dropTopics(func(id uint16) bool { return id == topic })
	if int(topic) < len(s.topics) {
		s.topics[topic] = nil
	}
}

// snapshot gives the store the producer windows as of the last committed round, which is at least round: a sweep covers
// committed rounds only.
func (s *shard) snapshot(round wal.RoundNumber) {
	s.store.saveDedup(round, s.dedup.snapshot(func(id wal.StreamID) wal.Sequence {
		return s.partitionOf(id.Topic, id.Partition).committed
	}))
}

// encode appends from the backlogs to the gathering round until they are empty or it is full.
func (s *shard) encode() {
	s.nowMs = s.eng.wallMs()
	for s.proposals.len() > 0 {
		p := *s.proposals.front()
		if !s.propose(p) {
			return
		}
		p.recycle()
		s.proposals.pop()
	}
	if s.publishes.len() == 0 {
		return
	}
	if f := s.refusal(); f != nil {
		s.refuseAll(f)
		return
	}
	full := s.spaceLow()
	if !full && s.store.pending.Load() > maxStorePending {
		return // segments fall behind: publishers wait, and are refused once the inbox is full
	}
	for s.publishes.len() > 0 {
		b := *s.publishes.front()
		for ; s.next < len(b.requests); s.next++ {
			if full {
				s.refuse(&b.requests[s.next], protocol.CodeStorageHighWatermark, "the broker's disk is nearly full: free space in its data directory; publishing resumes by itself")
				b.release(&b.requests[s.next])
				continue
			}
			if !s.publish(b, &b.requests[s.next]) {
				return
			}
		}
		s.finishBatch(b)
	}
}

// finishBatch drops the first batch, b, whose requests are all taken.
func (s *shard) finishBatch(b *pubBatch) {
	s.queued.Add(-b.bytes)
	b.recycle()
	s.publishes.pop()
	s.next = 0
}

func (s *shard) spaceLow() bool {
	free := s.store.free.Load()
	used, _ := s.journal.Usage()
	return free >= 0 && free < used+spaceReserve
}

// propose appends a ledger or metadata record; false means that it has to wait.
func (s *shard) propose(p *proposal) bool {
	if s.failure.Load() != nil || s.repl != nil && !s.repl.leading {
		return true // it never commits; the coordinator learns of the failure by the engine
	}
	if p.stream.Kind == wal.Messages {
		return s.proposeMessage(p)
	}
	seq := &s.ledgerSeq
	if p.stream.Kind == wal.Metadata {
		seq = &s.metaSeq
	}
	s.record = wal.Record{
		Sequence: *seq + 1, ProducerSeq: p.id, TimestampMs: s.nowMs, LeaderEpoch: s.epoch, Value: p.value,
	}
	if err := s.journal.Append(p.stream, &s.record); err != nil {
		s.appendFailed(err)
		// On a full disk nothing makes room in the journal: a shutdown can't wait for it, and nobody for the record.
		return s.closing && errors.Is(err, wal.ErrJournalFull) && s.spaceLow()
	}
	*seq++
	return true
}

// proposeMessage appends a message of the coordinator's; false means that it has to wait for the next round. What would
// have to wait longer is refused: ledger and metadata records come behind it.
func (s *shard) proposeMessage(p *proposal) bool {
	if s.gone.has(p.stream.Topic) {
		s.eng.coord.Refused(p.id, deletedText)
		return true
	}
	part := s.partitionOf(p.stream.Topic, p.stream.Partition)
	switch {
	case part.refusal != "":
		s.eng.coord.Refused(p.id, part.refusal)
		return true
	case s.spaceLow():
		s.eng.coord.Refused(p.id, "the disk is nearly full")
		return true
	}
	ms := max(s.nowMs, part.lastMs)
	s.record = wal.Record{
		Sequence: part.last + 1, TimestampMs: ms, LeaderEpoch: s.epoch,
		Key: p.value[:p.keyLen], Value: p.value[p.keyLen:],
	}
	if p.keyLen > 0 {
		s.record.Flags = wal.FlagKey
	}
	err := s.journal.Append(part.stream, &s.record)
	switch {
	case err == nil:
		part.last++
		part.lastMs = ms
		return true
	case errors.Is(err, wal.ErrRoundFull):
		return false
	case errors.Is(err, wal.ErrJournalFull), errors.Is(err, wal.ErrNoMemory), errors.Is(err, wal.ErrRecordTooLarge):
		s.appendRefused(err)
		s.eng.coord.Refused(p.id, err.Error())
		return true
	default:
		s.fail(err)
		return true
	}
}

// publish handles one PUB; false means that it has to wait for the next round.
func (s *shard) publish(b *pubBatch, r *pubRequest) bool {
	if s.gone.has(r.topic) {
		s.refuse(r, protocol.CodeUnknownTopic, deletedText)
		b.release(r)
		return true
	}
	part := s.partitionOf(r.topic, r.partition)
	if part.refusal != "" {
		s.refuse(r, protocol.CodeInternal, part.refusal)
		b.release(r)
		return true
	}
	var key windowKey
	var w *window
	if r.producerID != 0 {
		key = windowKey{stream: part.stream, producer: r.producerID}
		var v verdict
		var seq wal.Sequence
		w, v, seq = s.dedup.check(part.window, key, r.producerSeq)
		if v != accept {
			s.answerOld(part, r, v, seq)
			b.release(r)
			return true
		}
	}
	keyBytes, value := b.payload(r)
	ms := max(s.nowMs, part.lastMs)
	s.record = wal.Record{
		Sequence: part.last + 1, ProducerID: r.producerID, ProducerSeq: r.producerSeq,
		TimestampMs: ms, LeaderEpoch: s.epoch, Key: keyBytes, Value: value,
	}
	if len(keyBytes) > 0 {
		s.record.Flags = wal.FlagKey
	}
	if r.redriven {
		s.record.Flags |= wal.FlagRedriven
	}
	if err := s.journal.Append(part.stream, &s.record); err != nil {
		if errors.Is(err, wal.ErrRecordTooLarge) {
			s.refuse(r, protocol.CodeInternal, "the message fits no journal file: raise journal_file_bytes above its size plus 1 MiB")
			b.release(r)
			return true
		}
		s.appendFailed(err)
		return false
	}
	part.last++
	part.lastMs = ms
	if r.producerID != 0 {
		part.window = s.dedup.record(w, key, r.producerSeq, part.last)
	}
	b.release(r)
	a := answer{client: r.client, part: part, req: r.req, seq: part.last, n: 1, durability: r.durability}
	if r.durability == protocol.DurabilityMemory {
		s.emit(&a)
	} else {
		s.owe(a)
	}
	return true
}

// owe notes an answer that is due when the gathering round commits, joined to the one before where they are consecutive.
func (s *shard) owe(a answer) {
	if n := len(s.gathering.answers); n > 0 {
		l := &s.gathering.answers[n-1]
		if l.client == a.client && l.part == a.part && l.durability == a.durability && l.flags == a.flags &&
			l.req+uint64(l.n) == a.req && l.seq+wal.Sequence(l.n) == a.seq {
			l.n += a.n
			return
		}
	}
	s.gathering.answers = append(s.gathering.answers, a)
}

// answerOld answers a publish that is not the producer's next one.
func (s *shard) answerOld(part *partition, r *pubRequest, v verdict, seq wal.Sequence) {
	switch v {
	case accept:
	case duplicate:
		s.stats.Duplicates.Add(1)
		a := answer{client: r.client, part: part, req: r.req, seq: seq, n: 1, flags: protocol.ResultFlagDeduplicated, durability: r.durability}
		if seq <= part.committed || r.durability == protocol.DurabilityMemory || mutant.Is("duplicate-answered-early") {
			s.emit(&a)
			return
		}
		// The first one is still on its way to the disk; the answers of its round come before these.
		s.log.Debug("a publish is sent again while the first one is on its way")
		if records, _ := s.journal.Gathered(); records == 0 && s.inFlight.len() > 0 {
			last := s.inFlight.back()
			last.answers = append(last.answers, a)
			return
		}
		s.owe(a)
	case gap:
		s.refuse(r, protocol.CodeSeqGap, "producer_seq is ahead of what was stored: send the missing ones first (an unknown producer starts at 1)")
	case expired:
		s.refuse(r, protocol.CodeSeqExpired, "producer_seq was stored before the window of recent ones: it is a duplicate; a producer that starts over takes a new producer_id")
	}
}

func (s *shard) refuse(r *pubRequest, code protocol.ErrorCode, text string) {
	s.stats.Refused.Add(1)
	s.frame = protocol.AppendErr(s.frame[:0], code, protocol.OpPub, text)
	r.client.Complete(r.req, s.frame)
	s.touch(r.client)
}

// refuseBatch answers every request of b with an error; called by whoever holds b.
func (s *shard) refuseBatch(b *pubBatch, code protocol.ErrorCode, text string) {
	frame := protocol.AppendErr(nil, code, protocol.OpPub, text)
	for i := range b.requests {
		r := &b.requests[i]
		r.client.Complete(r.req, frame)
		r.client.Flush()
		b.release(r)
	}
	s.queued.Add(-b.bytes)
	b.recycle()
}

// refusal is the answer to every publish at the moment, nil if there is none.
func (s *shard) refusal() *refusal {
	if f := s.failure.Load(); f != nil || s.repl == nil {
		return f
	}
	return s.repl.refusal()
}

// refuseAll answers what waits with f.
func (s *shard) refuseAll(f *refusal) {
	for s.publishes.len() > 0 {
		b := *s.publishes.front()
		for ; s.next < len(b.requests); s.next++ {
			s.refuse(&b.requests[s.next], f.code, f.text)
			b.release(&b.requests[s.next])
		}
		s.finishBatch(b)
	}
}

// payload returns the key and the value of r. They stay valid until release or recycle.
func (b *pubBatch) payload(r *pubRequest) (key, value []byte) {
	if r.owned >= 0 {
		o := &b.owned[r.owned]
		return o.key, o.value
	}
	mid := r.off + uint32(r.keyLen)
	return b.data[r.off:mid:mid], b.data[mid : mid+r.valueLen]
}

// release lets go of memory that was handed over with r.
func (b *pubBatch) release(r *pubRequest) {
	if r.owned >= 0 {
		o := &b.owned[r.owned]
		o.owner.Release()
		*o = ownedPub{}
		r.owned = -1
	}
}

// submitRounds submits the gathering round, and in a cluster what the leader has sent, if there is any and the disk takes it.
func (s *shard) submitRounds() {
	if s.repl != nil {
		s.repl.turn()
		return
	}
	if records, _ := s.journal.Gathered(); records > 0 && s.journal.CanSeal() {
		s.seal()
	}
}

// seal submits the gathering round.
func (s *shard) seal() {
	s.gathering.round = s.journal.Seal()
	s.inFlight.push(s.gathering)
	s.gathering = roundAnswers{}
	if n := len(s.freeLists); n > 0 {
		s.gathering.answers = s.freeLists[n-1]
		s.freeLists = s.freeLists[:n-1]
	}
}

// appendFailed tells waiting (the round or the journal is full) from failure.
func (s *shard) appendFailed(err error) {
	if errors.Is(err, wal.ErrRoundFull) || errors.Is(err, wal.ErrJournalFull) || errors.Is(err, wal.ErrNoMemory) {
		s.appendRefused(err)
		return
	}
	s.fail(err)
}

// appendRefused does what helps against an append's refusal.
func (s *shard) appendRefused(err error) {
	if errors.Is(err, wal.ErrJournalFull) {
		s.store.requestSweep()
	}
}

// flushed runs when a round has reached the disk, in round order. The reference to r is the shard's.
func (s *shard) flushed(r *wal.Round, err error) {
	if s.repl != nil {
		s.repl.flushed(r, err)
		return
	}
	owed := *s.inFlight.front()
	s.inFlight.pop()
	if err != nil {
		s.fail(err)
		s.refuseOwed(&owed, s.failure.Load())
		r.Release()
		return
	}
	s.commit(r, &owed)
}

// commit makes a round visible: on a single node every flushed round is committed. The round is queued for coordinator
// and store, then the producers get their answers, and only then the others are woken: they are other threads, and waking
// one costs more than encoding a small round. The coordinator is woken where somebody waits for messages or for a record
// of its own, the store for every nudgeBytes; the rest is told by nudge.
func (s *shard) commit(r *wal.Round, owed *roundAnswers) {
	bytes := r.Bytes()
	s.markCommitted(r)
	urgent := s.publishRound(r)
	for i := range owed.answers {
		s.emit(&owed.answers[i])
	}
	s.keep(owed)
	s.flushClients()
	s.announce(bytes, urgent)
}

// markCommitted moves the commit points of the round's partitions.
func (s *shard) markCommitted(r *wal.Round) {
	for i := range r.Entries {
		e := &r.Entries[i]
		if e.Stream.Kind == wal.Messages && !s.gone.has(e.Stream.Topic) {
			p := s.partitionOf(e.Stream.Topic, e.Stream.Partition)
			p.committed = max(p.committed, e.Last()) // a catch-up may have brought more already
		}
	}
}

// publishRound queues a committed and flushed round, with the reference, for coordinator and store. It reports whether the
// coordinator is to be woken at once.
func (s *shard) publishRound(r *wal.Round) (urgent bool) {
	r.Retain()
	urgent = s.eng.coord.CommitRound(s.id, r)
	s.storeRound(r)
	return urgent
}

// storeRound queues a committed and flushed round, with the reference, for the store.
func (s *shard) storeRound(r *wal.Round) {
	s.stats.Rounds.Add(1)
	s.stats.Records.Add(uint64(r.Records()))
	s.stats.RoundBytes.Add(uint64(r.Bytes()))
	s.journal.SetCommitted(r.Number)
	s.published = r.Number
	s.sweepBytes += int64(r.Bytes())
	if _, capacity := s.journal.Usage(); s.sweepBytes >= capacity/sweepDivisor {
		s.sweepBytes = 0
		s.store.requestSweep()
	}
	s.store.add(r)
}

// announce wakes who has to know of a round of so many bytes that was queued for coordinator and store.
func (s *shard) announce(bytes int, urgent bool) {
	switch {
	case urgent && s.lent.active.Load():
		s.lent.urgent = true
	case urgent:
		s.eng.coord.Nudge()
	}
	s.quietBytes += bytes
	if s.quietBytes >= nudgeBytes {
		s.nudge()
	} else if s.nudgeAt == 0 {
		s.nudgeAt = s.eng.now() + nudgeAfter
	}
}

// nudge wakes the coordinator and the store for the rounds that were handed over quietly.
func (s *shard) nudge() {
	s.quietBytes, s.nudgeAt = 0, 0
	s.eng.coord.Nudge()
	s.store.inbox.Nudge()
}

func (s *shard) keep(owed *roundAnswers) {
	clear(owed.answers)
	if len(s.freeLists) < 4 {
		s.freeLists = append(s.freeLists, owed.answers[:0])
	}
	owed.answers = nil
}

// emit sends the OKs of a.
func (s *shard) emit(a *answer) {
	res := protocol.PubResult{
		Durability: reached(a.durability), LeaderEpoch: uint64(s.epoch), CommitSeq: uint64(a.part.committed), Flags: a.flags,
	}
	for i := uint32(0); i < a.n; i++ {
		res.Sequence = uint64(a.seq) + uint64(i)
		s.frame = res.AppendOK(s.frame[:0])
		a.client.Complete(a.req+uint64(i), s.frame)
	}
	s.touch(a.client)
}

// reached is the durability to report: a flush on a single node is a majority's flush.
func reached(asked protocol.Durability) protocol.Durability {
	if asked == protocol.DurabilityTopic {
		return protocol.DurabilityQuorum
	}
	return asked
}

// touch remembers a client that has answers to flush. Runs of one client are the common case.
func (s *shard) touch(c coord.Client) {
	if n := len(s.touched); n > 0 && s.touched[n-1] == c {
		return
	}
	s.touched = append(s.touched, c)
}

// flushClients wakes each connection that got answers, once.
func (s *shard) flushClients() {
	for i, c := range s.touched {
		c.Flush()
		s.touched[i] = nil
	}
	s.touched = s.touched[:0]
}

// stop refuses everything from now on; any goroutine may call it. The first reason is kept.
func (s *shard) stop(err error) bool {
	text := "the broker's disk failed and it takes no writes until it is restarted: see its log"
	if !s.failure.CompareAndSwap(nil, &refusal{protocol.CodeReadOnlyDegraded, text}) {
		return false
	}
	s.eng.failed(err)
	return true
}

// fail stops the shard for good: nothing more is acknowledged.
func (s *shard) fail(err error) {
	if s.stop(fmt.Errorf("shard %d: %w", s.id, err)) {
		s.log.Error("the journal failed: no more writes until a restart; check the disk", "err", err)
	}
	s.refuseUncommitted(s.failure.Load())
}

// refuseUncommitted answers everyone who waits for a commit with f. What they sent may be committed nevertheless.
func (s *shard) refuseUncommitted(f *refusal) {
	s.refuseOwed(&s.gathering, f)
	for i := range s.inFlight.len() {
		s.refuseOwed(s.inFlight.at(i), f)
	}
}

func (s *shard) refuseOwed(owed *roundAnswers, f *refusal) {
	for i := range owed.answers {
		a := &owed.answers[i]
		s.frame = protocol.AppendErr(s.frame[:0], f.code, protocol.OpPub, f.text)
		for j := uint32(0); j < a.n; j++ {
			a.client.Complete(a.req+uint64(j), s.frame)
		}
		s.touch(a.client)
	}
	clear(owed.answers)
	owed.answers = owed.answers[:0]
}
