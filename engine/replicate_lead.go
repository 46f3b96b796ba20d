package engine

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/internal/mutant"
	"github.com/mortarmq/mortarmq/wal"
)

// What a shard does while its node leads: rounds are sealed and sent to the others, those that lag get them again.

// commitLatency estimates what 98 of 100 rounds stay below, from seal to commit, in nanoseconds; any goroutine can read it. A
// round that took longer raises the estimate by a quarter, each other one lowers it by a half per cent, so that it stands where
// one of fifty is longer, whatever the distribution is, and follows a change within some hundred rounds.
type commitLatency struct{ ns atomic.Int64 }

func (l *commitLatency) add(d time.Duration) {
	q := l.ns.Load()
	switch {
	case q == 0:
		q = int64(d)
	case int64(d) > q:
		q = min(q+q/4+1, int64(d))
	default:
		q -= q / 200
	}
	l.ns.Store(q)
}

func (l *commitLatency) get() time.Duration { return time.Duration(l.ns.Load()) }

// followerState is what a leading shard remembers of a follower between two looks.
type followerState struct {
	at      time.Duration // when it last vouched for something, or had everything
	vouched replica.Index
	// behind: it needs what is not in memory; told is when it was last told so.
	behind bool
	told   time.Duration
	// measured is the newest round that says how long it takes, see measure.
	measured replica.Index
}

// depose ends leading: whoever waits for a commit is answered, what was sealed stays where it is.
func (r *replication) depose(f *refusal) {
	r.leading, r.opening, r.probing, r.opened, r.probed = false, false, false, nil, nil
	r.deposed = f
	r.s.refuseUncommitted(f)
	r.s.journal.Discard()
}

// lead makes the log this node's own: what is pending of earlier epochs goes before its opening round.
func (r *replication) lead(ev *replicaEvent) error {
	if err := r.log.Lead(ev.epoch); err != nil {
		return err
	}
	r.dropIncoming()
	r.s.journal.Discard()
	if last, commit := r.log.Last(), r.log.Commit(); last.Index > commit {
		r.logger.Debug("this log has rounds of earlier epochs that may not be committed", "log", r.s.id, "last", last, "committed", commit)
	}
	r.epoch, r.leader, r.leading, r.opening = ev.epoch, 0, true, true
	opened := ev.fenced
	r.opened = func() { opened(r.log.End()) }
	r.s.epoch = wal.Epoch(ev.epoch)
	for i := range r.s.inFlight.len() {
		if mutant.Is("sequence-reused") {
			break
		}
		r.s.fold(r.s.inFlight.at(i).repl.r)
	}
	for i := range r.heard {
		r.heard[i] = followerState{at: r.s.eng.now()}
	}
	return nil
}

// connected sends again what was under way when the connection to a node ended.
func (r *replication) connected(peer replica.NodeID) {
	if r.leading {
		r.log.Resend(peer)
	} else if peer == r.leader {
		r.acked = peerwire.Flushed{}
	}
}

func (r *replication) setQuorum(f *refusal) {
	r.readOnly.Store(f)
	if f != nil && r.leading {
		r.s.refuseUncommitted(f)
	}
}

// seal submits the gathering round and ships it at once, so that the disks of all nodes work at the same time.
func (r *replication) seal() {
	s := r.s
	records, _ := s.journal.Gathered()
	if s.journal.Busy() || s.journal.Err() != nil || records == 0 && !r.opening && !r.probing {
		return
	}
	prev := r.log.Last()
	point := replica.Point{Epoch: r.epoch, Index: prev.Index + 1}
	var flags wal.RoundFlags
	if r.opening {
		flags = wal.OpeningRound
	}
	if err := s.journal.Stamp(logPoint(point), wal.Epoch(prev.Epoch), wal.LogIndex(r.log.Commit()), flags); err != nil {
		s.appendFailed(err)
		return
	}
	stamp, err := r.log.Seal()
	if err != nil || stamp.Point != point {
		s.fail(fmt.Errorf("a round at %s of the log was to be %s: %w", stamp.Point, point, errors.Join(err, replica.ErrLogState)))
		return
	}
	if r.probing && r.probed != nil {
		r.probed(point.Index)
	}
	r.opening, r.probing, r.probed = false, false, nil
	r.sealed(stamp.Point, stamp.Ticket, s.gathering.answers)
	s.gathering = roundAnswers{}
	if n := len(s.freeLists); n > 0 {
		s.gathering.answers = s.freeLists[n-1]
		s.freeLists = s.freeLists[:n-1]
	}
	r.ship()
}

// sealed seals the gathering round, which is stamped, and notes it.
func (r *replication) sealed(p replica.Point, ticket uint64, answers []answer) {
	s := r.s
	round := s.journal.SealRound()
	if round == nil {
		s.fail(errors.New("the journal did not take a round that it had room for"))
		return
	}
	round.Retain()
	r.flight.push(ticket)
	r.sealedBytes += int64(round.Bytes())
	s.inFlight.push(roundAnswers{round: round.Number, answers: answers, repl: replicaRound{
		r: round, point: p, ticket: ticket, upTo: r.sealedBytes, sealed: s.eng.now(),
	}})
}

// ship sends every follower what it does not have yet, as far as the transport takes it.
func (r *replication) ship() {
	for i, peer := range r.others {
		for {
			send, ok := r.log.Next(peer)
			if !ok {
				r.heard[i].behind = false
				break
			}
			a := peerwire.Append{Log: uint16(r.s.id), Epoch: send.Epoch, Prev: send.Prev, Commit: send.Commit}
			if send.Index == 0 {
				if !r.peers.Append(peer, &a, nil, nil) {
					break
				}
				r.log.Sent(peer, send)
				continue
			}
			round := r.round(send.Index)
			if round == nil {
				r.tellBehind(i)
				break
			}
			p, _ := round.Log()
			a.Point = replica.Point{Epoch: replica.Epoch(p.Epoch), Index: replica.Index(p.Index)}
			if a.Point.Epoch < r.epoch && a.Point.Index > a.Commit {
				r.logger.Debug("a round of an earlier epoch is sent again")
			}
			round.Retain()
			if !r.peers.Append(peer, &a, round.Payload(), round) {
				round.Release()
				break
			}
			r.log.Sent(peer, send)
		}
	}
}

// tellBehind tells a follower, now and then, that it needs what is no longer in memory.
func (r *replication) tellBehind(i int) {
	h, now := &r.heard[i], r.s.eng.now()
	if h.behind && now-h.told < resendAfter {
		return
	}
	h.behind, h.told = true, now
	r.peers.Bulk(r.others[i], &peerwire.Behind{
		Transfer: peerwire.Transfer{Log: uint16(r.s.id)}, Epoch: r.epoch, Base: r.base(), Committed: r.committed(),
	}, nil, nil)
}

// resend has a follower get everything again that it has not vouched for in a while: the transport may have lost it.
func (r *replication) resend(now time.Duration) (next time.Duration) {
	next = wal.Never
	for i, peer := range r.others {
		h := &r.heard[i]
		if h.behind {
			next = min(next, h.told+resendAfter)
		}
		has, _ := r.log.PeerWindow(peer)
		if !r.log.Unanswered(peer) {
			h.vouched, h.at = has, now
			continue
		}
		if has != h.vouched {
			h.vouched, h.at = has, now
		}
		if now-h.at >= resendAfter {
			h.at = now
			r.log.Resend(peer)
			r.ship()
		}
		next = min(next, h.at+resendAfter)
	}
	return next
}
