package engine

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/mortarmq/mortarmq/internal/mutant"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// The way of a publish into a round: from the queue of its batch to the journal's gathering round, and the answers that it gets without one.

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
