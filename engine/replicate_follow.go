package engine

import (
	"errors"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/internal/mutant"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// What a shard does while another node leads: its rounds are taken, written and vouched for; and likewise those that an elected node fetches.

// follow takes rounds of a leader from now on.
func (r *replication) follow(ev *replicaEvent) error {
	if err := r.log.Follow(ev.epoch); err != nil {
		return err
	}
	r.leading, r.epoch, r.leader, r.instance, r.voter = false, ev.epoch, ev.peer, ev.instance, ev.voter
	r.acked = peerwire.Flushed{}
	return nil
}

// queue puts a round from another node in line for the journal.
func (r *replication) queue(ev *replicaEvent) {
	if r.incoming.len() >= maxIncoming {
		r.drop(ev)
		return
	}
	r.incoming.push(ev)
}

// drop lets go of a round that is not taken; its sender sends it again.
func (r *replication) drop(ev *replicaEvent) {
	if ev.payload != nil {
		ev.payload.Release()
	}
	ev.recycle()
}

// dropIncoming forgets what waits for the journal.
func (r *replication) dropIncoming() {
	for r.incoming.len() > 0 {
		ev := *r.incoming.front()
		r.incoming.pop()
		r.drop(ev)
	}
}

// receive takes rounds of the leader, and those that a candidate fetched.
func (r *replication) receive() {
	s := r.s
	if r.adopting != nil {
		defer r.advance()
	}
	for r.incoming.len() > 0 && s.journal.Err() == nil {
		ev := *r.incoming.front()
		if len(evPayload(ev)) > 0 && s.journal.Busy() {
			return
		}
		if !r.take(ev) {
			return
		}
		r.incoming.pop()
		if ev.payload != nil {
			ev.payload.Release()
		}
		ev.recycle()
	}
}

func evPayload(ev *replicaEvent) []byte {
	if ev.payload == nil {
		return nil
	}
	return ev.payload.Bytes()
}

// take handles a round or a probe from another node; false means that it has to wait for the journal.
func (r *replication) take(ev *replicaEvent) bool {
	s, a := r.s, &ev.append
	payload := evPayload(ev)
	if len(payload) > 0 {
		switch err := s.journal.AppendPayload(payload); {
		case err == nil:
		case errors.Is(err, wal.ErrPayload):
			r.logger.Error("a round from another node is malformed and was not taken", "peer", ev.peer, "point", a.Point, "err", err)
			return true
		default:
			s.appendFailed(err)
			return false
		}
		if p := s.journal.GatheredPosition(); p.Point != logPoint(a.Point) || p.Prev != wal.Epoch(a.Prev.Epoch) {
			s.journal.Discard()
			r.logger.Error("a round from another node is not the one that it was announced as, and was not taken", "peer", ev.peer, "announced", a.Point, "is", p.Point)
			return true
		}
	}
	var v replica.Verdict
	if ev.kind == evAdopt {
		if v = r.log.Adopt(a.Prev, a.Point); v.Kind == replica.Accept || v.Kind == replica.Replace || v.Kind == replica.Duplicate {
			r.agreed = max(r.agreed, a.Point.Index)
		}
	} else {
		v = r.log.Append(a.Epoch, a.Prev, a.Point, a.Commit)
	}
	switch v.Kind {
	case replica.Replace:
		r.cut(v.From)
		r.sealed(a.Point, v.Ticket, nil)
	case replica.Accept:
		r.sealed(a.Point, v.Ticket, nil)
	default:
		s.journal.Discard()
		r.refused(ev, v)
	}
	r.advance()
	return true
}

// refused handles a round that is not written.
func (r *replication) refused(ev *replicaEvent, v replica.Verdict) {
	switch v.Kind {
	case replica.Gap, replica.Stale, replica.Divergent:
		if v.Kind == replica.Divergent {
			r.logger.Error("the leader has another round where this node has a committed one: this log takes nothing more; its data must be made again from the others",
				"code", protocol.CodeDivergentCommitted, "peer", ev.peer, "log", r.s.id, "point", ev.append.Point, "committed", r.log.Commit())
		}
		if ev.kind == evAppend && (v.Reject || v.Kind != replica.Gap) {
			r.peers.Reject(ev.peer, &peerwire.Reject{
				Log: uint16(r.s.id), Verdict: v.Kind, Epoch: ev.append.Epoch, Known: r.log.Epoch(), End: r.log.End(), Instance: r.instance,
			})
		}
	default: // there already, or of no interest
	}
}

// cut forgets the pending rounds from index on: another leader has others in their place.
func (r *replication) cut(from replica.Index) {
	f := &r.s.inFlight
	if f.len() > 0 && f.back().repl.point.Index >= from {
		r.logger.Debug("rounds that were never committed are cut off", "log", r.s.id, "from", from, "last", f.back().repl.point)
	}
	for f.len() > 0 && f.back().repl.point.Index >= from {
		f.back().repl.r.Release()
		f.dropBack()
	}
}

// vouch tells the leader what is flushed here.
func (r *replication) vouch() {
	epoch, index := r.log.Ack()
	if epoch == 0 || r.leader == 0 || r.fill != nil {
		return
	}
	f := peerwire.Flushed{Log: uint16(r.s.id), Voter: r.voter, Epoch: epoch, Index: index, Instance: r.instance}
	if f != r.acked && r.peers.Flushed(r.leader, &f) {
		r.acked = f
	}
}

// fetchAfter returns up to where this log has what another one has that ends at upto.
func (r *replication) fetchAfter(upto replica.Point) replica.Index {
	last := r.log.Last()
	if last.Epoch == upto.Epoch {
		return min(last.Index, upto.Index) // both have it from the same leader
	}
	return max(r.agreed, min(r.log.Commit(), last.Index))
}

// adopted reports, once everything that a candidate fetched is flushed here or can't be any more.
func (r *replication) adopted() {
	ev := r.adopting
	if r.s.journal.Err() == nil && (r.incoming.len() > 0 || r.log.FlushedIndex() < min(ev.point.Index, r.log.Last().Index)) {
		return
	}
	r.adopting = nil
	ev.fenced(r.log.End())
	ev.recycle()
}

// fold advances sequences and producer windows by a round that another node has sealed: one that is committed, or one of an
// earlier leader that this node appends its own behind. Doing so twice changes nothing.
func (s *shard) fold(r *wal.Round) {
	var rec wal.Record
	for i := range r.Entries {
		e := &r.Entries[i]
		if e.Stream.Kind == wal.Messages && s.gone.has(e.Stream.Topic) {
			continue
		}
		switch e.Stream.Kind {
		case wal.Ledger:
			s.ledgerSeq = max(s.ledgerSeq, e.Last())
		case wal.Metadata:
			s.metaSeq = max(s.metaSeq, e.Last())
		case wal.Messages:
			p := s.partitionOf(e.Stream.Topic, e.Stream.Partition)
			p.last = max(p.last, e.Last())
			for data := r.Data(e); len(data) > 0; {
				data = data[wal.PeekRecord(data, &rec):]
				if !mutant.Is("windows-forgotten") {
					s.dedup.replay(e.Stream, &rec)
				}
				p.lastMs = max(p.lastMs, rec.TimestampMs)
			}
		case wal.Replica:
		}
	}
}
