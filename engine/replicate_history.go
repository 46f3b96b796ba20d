package engine

import (
	"fmt"
	"time"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/wal"
)

// The committed rounds that a shard keeps for others, and what it tells them of its log.

// keptRound is a committed round that is kept for followers; upTo and sealed are as in replicaRound.
type keptRound struct {
	r      *wal.Round
	upTo   int64
	sealed time.Duration
}

// round returns the round at an index, if it is in memory.
func (r *replication) round(i replica.Index) *wal.Round {
	if n := r.history.len(); n > 0 && i >= r.oldest && i < r.oldest+replica.Index(n) {
		return r.history.at(int(i - r.oldest)).r
	}
	if f := &r.s.inFlight; f.len() > 0 {
		if first := f.front().repl.point.Index; i >= first && i < first+replica.Index(f.len()) {
			return f.at(int(i - first)).repl.r
		}
	}
	return nil
}

// lowest returns the lowest index that is in memory; the next one to come if there is none.
func (r *replication) lowest() replica.Index {
	switch {
	case r.history.len() > 0:
		return r.oldest
	case r.s.inFlight.len() > 0:
		return r.s.inFlight.front().repl.point.Index
	}
	return r.log.Last().Index + 1
}

// base returns the round before the lowest one in memory.
func (r *replication) base() replica.Point {
	lowest := r.lowest()
	round := r.round(lowest)
	if round == nil {
		return r.log.Last()
	}
	return replica.Point{Epoch: replica.Epoch(round.LogPrev()), Index: lowest - 1}
}

// logCut is a point of a log up to which everything is in the segments, and what goes with it.
type logCut struct {
	ok         bool
	point      replica.Point
	commit     replica.Index
	partitions []peerwire.Position // Next is behind the last committed record
	windows    []byte
}

// Rounds behind a cut are kept for pinFor for the follower that catches up to it, up to pinTimes as many as usually.
const (
	pinFor   = 10 * time.Second
	pinTimes = 3
)

// damagedPartition tells whether a partition isn't served because its files are damaged: what it knows of it may be less than
// what is committed.
func (s *shard) damagedPartition() bool {
	for _, parts := range s.topics {
		for _, p := range parts {
			if p != nil && p.refusal != "" {
				return true
			}
		}
	}
	return false
}

// cutOf returns a cut at index at, or with 0 the newest there is, and keeps what lies behind it for a while.
func (r *replication) cutOf(at replica.Index) logCut {
	s := r.s
	if r.fill != nil || s.damagedPartition() {
		return logCut{} // not all that is committed is here
	}
	if at == 0 {
		written := wal.RoundNumber(s.store.written.Load())
		for i := r.history.len() - 1; i >= 0; i-- {
			if r.history.at(i).r.Number <= written {
				at = r.oldest + replica.Index(i)
				break
			}
		}
		if at == 0 && r.history.len() == 0 && written >= s.unwritten {
			at = r.lowest() - 1 // all of it was there at the start, and recovery writes everything out that the disk has room for
		}
	}
	e, ok := r.log.EpochAt(at)
	if at == 0 || !ok || at+1 < r.lowest() {
		return logCut{}
	}
	r.pin, r.pinUntil = at+1, s.eng.now()+pinFor
	c := logCut{ok: true, point: replica.Point{Epoch: e, Index: at}, commit: r.log.Commit()}
	for topic, parts := range s.topics {
		for i, p := range parts {
			if p != nil && p.committed > 0 {
				c.partitions = append(c.partitions, peerwire.Position{
					Stream: peerwire.Stream{Kind: uint8(wal.Messages), Topic: uint16(topic), Partition: uint16(i)}, Next: uint64(p.committed) + 1,
				})
			}
		}
	}
	c.windows = s.dedup.snapshot(func(id wal.StreamID) wal.Sequence {
		return s.partitionOf(id.Topic, id.Partition).committed
	})
	return c
}

// keep adds a committed round, with its reference, to those kept for followers.
func (r *replication) keep(i replica.Index, round keptRound) {
	if r.history.len() == 0 {
		r.oldest = i
	}
	r.history.push(round)
	r.kept += int64(round.r.Bytes())
	for r.kept > r.keepBytes && r.history.len() > 1 && !r.pinned() {
		old := r.history.front().r
		r.history.pop()
		r.kept -= int64(old.Bytes())
		old.Release()
		r.oldest++
	}
}

// pinned tells whether the oldest round that is kept is kept for a follower that catches up.
func (r *replication) pinned() bool {
	return r.oldest >= r.pin && r.kept < pinTimes*r.keepBytes && r.s.eng.now() < r.pinUntil
}

// bytesUpTo returns sealedBytes as it was behind the round at an index; of one no longer in memory, that behind the last
// one before those.
func (r *replication) bytesUpTo(i replica.Index) int64 {
	if f := &r.s.inFlight; f.len() > 0 {
		if first := f.front().repl.point.Index; i >= first && i < first+replica.Index(f.len()) {
			return f.at(int(i - first)).repl.upTo
		}
	}
	n := r.history.len()
	switch {
	case n == 0:
		return r.sealedBytes
	case i < r.oldest:
		return r.history.front().upTo - int64(r.history.front().r.Bytes())
	}
	return r.history.at(min(int(i-r.oldest), n-1)).upTo
}

// serveFetch sends an elected node the rounds of the log that it lacks, or says what is in memory of them.
func (r *replication) serveFetch(ev *replicaEvent) {
	end := func(ok bool, reason string) {
		r.peers.Bulk(ev.peer, &peerwire.FetchEnd{Transfer: ev.transfer, OK: ok, Reason: reason}, nil, nil)
	}
	if e, ok := r.log.EpochAt(ev.point.Index); !ok || e != ev.point.Epoch || r.log.FlushedIndex() < ev.point.Index || r.fill != nil {
		end(false, fmt.Sprintf("node has no round %s that is flushed", ev.point))
		return
	}
	if ev.index+1 < r.lowest() {
		r.peers.Bulk(ev.peer, &peerwire.Behind{Transfer: ev.transfer, Epoch: r.fenced, Base: r.base(), Committed: r.committed()}, nil, nil)
		return
	}
	for i := ev.index + 1; i <= ev.point.Index; i++ {
		round := r.round(i)
		if round == nil {
			end(false, fmt.Sprintf("round %d is not in memory", i))
			return
		}
		p, _ := round.Position()
		f := peerwire.Fetched{
			Transfer: ev.transfer, Prev: replica.Point{Epoch: replica.Epoch(p.Prev), Index: i - 1},
			Point: replica.Point{Epoch: replica.Epoch(p.Point.Epoch), Index: i}, Commit: r.log.Commit(),
		}
		round.Retain()
		if !r.peers.Bulk(ev.peer, &f, round.Payload(), round) {
			round.Release()
			return // the other node asks again, from where it is then
		}
	}
	end(true, "")
}

// committed returns the newest round that is known to be committed.
func (r *replication) committed() replica.Point {
	commit := r.log.Commit()
	e, _ := r.log.EpochAt(commit)
	return replica.Point{Epoch: e, Index: commit}
}
