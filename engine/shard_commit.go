package engine

import (
	"errors"
	"fmt"

	"github.com/mortarmq/mortarmq/engine/coord"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// The way of a round from its seal to the answers, the coordinator and the store.

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
