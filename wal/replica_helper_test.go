package wal

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// logRound is a round of a replicated log as a test remembers it.
type logRound struct {
	pos     LogPosition
	records []got // round is 0
}

// values returns the records of a log by stream, behind what a snapshot or an earlier life has of each stream.
func logValues(base map[StreamID][]string, log []logRound) map[StreamID][]string {
	all := map[StreamID][]string{}
	for id, values := range base {
		all[id] = slices.Clone(values)
	}
	for _, r := range log {
		for _, g := range r.records {
			if int(g.seq) <= len(all[g.stream]) {
				continue // what a catch-up has brought already
			}
			all[g.stream] = append(all[g.stream], g.value)
		}
	}
	return all
}

// replay is a naive gate: it makes the log, and what is committed of it for sure, of the rounds in the order in which a
// node wrote them.
type replayed struct {
	// given are the committed rounds behind which nothing was lost, log is the whole log behind base.
	base   LogPoint
	given  []logRound
	log    []logRound
	commit LogIndex
}

func replayLog(written []logRound) (l replayed) {
	for _, r := range written {
		p := r.pos
		if p.Flags&CatchupRound != 0 {
			l.commit = max(l.commit, p.Commit)
			l.given = append(append(slices.Clone(l.given), l.log[:l.committed()]...), r)
			l.base = l.point(l.committed())
			if p.Point.Index > l.base.Index {
				l.base = p.Point
			}
			l.log, l.commit = nil, l.base.Index
			continue
		}
		l.log = append(slices.Clone(l.log[:p.Point.Index-l.base.Index-1]), r)
		l.commit = max(l.commit, p.Commit)
	}
	return l
}

// committed returns how many rounds of the log are committed for sure.
func (l *replayed) committed() int { return int(l.commit - l.base.Index) }

// point returns the point of the n-th round behind the base.
func (l *replayed) point(n int) LogPoint {
	if n == 0 {
		return l.base
	}
	return l.log[n-1].pos.Point
}

func (l *replayed) last() LogPoint { return l.point(len(l.log)) }

// follower drives the journal and the store of a node of a cluster.
type follower struct {
	*node
	pool *ring.Pool
	// written are the rounds that were sealed, flushed how many of them are durable.
	written []logRound
	flushed int
	// numbers has the physical number of each, and rounds those that are flushed and neither committed nor replaced.
	numbers []RoundNumber
	rounds  map[RoundNumber]*Round
	// commit is what the node was told, added what it has given to its store.
	commit, added LogIndex
	// installed has the values that a snapshot has taken the place of, by log.
	installed map[StreamID][]string
}

// openFollower opens a node; the caller says what it wrote in earlier lives.
func openFollower(t testing.TB, d *simdisk.Disk, o OpenOptions, pool *ring.Pool) (*follower, error) {
	f := &follower{pool: pool, rounds: map[RoundNumber]*Round{}, node: &node{t: t, d: d, h: newMemory(), dedup: true,
		acked: map[StreamID][]string{}, sealed: map[StreamID][]string{}, dropped: map[uint16]bool{}}}
	n := f.node
	var err error
	if n.j, n.s, n.rec, err = Open(o, d, n.h); err != nil {
		return nil, err
	}
	n.j.OnFlushed(func(r *Round, err error) {
		if err != nil {
			t.Errorf("flush: %v", err)
		}
		f.flushed++
		f.rounds[r.Number] = r
	})
	n.s.OnDurable(func(upTo RoundNumber) { n.j.Trim(upTo) })
	n.s.OnSweepStart(func(RoundNumber) { n.saveDedup() })
	n.j.Trim(n.s.Durable())
	for _, r := range n.rec.Pending {
		f.rounds[r.Number] = r
	}
	for id, last := range n.rec.LastSequences {
		n.acked[id] = make([]string, last) // how many is what the windows' snapshot says
	}
	f.commit, f.added = n.rec.Log.Committed.Index, n.rec.Log.Committed.Index
	return f, nil
}

// adopt makes the node go on behind what it wrote in earlier lives, with what the recovery has left pending.
func (f *follower) adopt(written []logRound) {
	f.written, f.flushed = slices.Clone(written), len(written)
	f.numbers = make([]RoundNumber, len(written))
	for _, r := range f.rec.Pending {
		p, _ := r.Log()
		i := slices.IndexFunc(f.written, func(w logRound) bool { return w.pos.Point == p && w.pos.Flags&CatchupRound == 0 })
		f.numbers[i] = r.Number
	}
}

// write seals one round with records of size value bytes and the position; shipped ones come as another node's payload.
func (f *follower) write(pos LogPosition, size int, shipped bool, streams ...StreamID) {
	f.t.Helper()
	l := replayLog(f.written)
	if pos.Flags&CatchupRound == 0 {
		l.log = l.log[:pos.Point.Index-l.base.Index-1]
	} else {
		l.log = l.log[:f.commit-l.base.Index]
	}
	next := logValues(f.installed, append(l.given, l.log...))
	r := logRound{pos: pos}
	var runs []TestRun
	for _, id := range streams {
		seq := Sequence(len(next[id])) + 1
		rec := testRecord(id, seq, size)
		rec.Value = fmt.Appendf(nil, "%v/%s", pos.Point, rec.Value)
		next[id] = append(next[id], string(rec.Value))
		runs = append(runs, TestRun{Stream: id, Records: []Record{rec}})
		r.records = append(r.records, got{0, id, seq, string(rec.Value)})
	}
	f.put(r, runs, shipped)
}

// put seals a round and waits until it is durable.
func (f *follower) put(r logRound, runs []TestRun, shipped bool) {
	f.t.Helper()
	f.written = append(f.written, r)
	f.numbers = append(f.numbers, f.j.NextRound())
	if shipped {
		round := NewStampedTestRound(f.pool, 77, 99, r.pos, runs...)
		f.retry(func() error { return f.j.AppendPayload(round.Payload()) })
		round.Release()
	} else {
		for _, run := range runs {
			for i := range run.Records {
				f.retry(func() error { return f.j.Append(run.Stream, &run.Records[i]) })
			}
		}
		f.retry(func() error { return f.j.Stamp(r.pos.Point, r.pos.Prev, r.pos.Commit, r.pos.Flags) })
	}
	f.j.Seal()
	for f.j.InFlight() > 0 {
		if err := f.d.WaitOne(); err != nil {
			f.t.Fatal(err)
		}
	}
	if r.pos.Flags&CatchupRound != 0 {
		f.commitTo(0) // what was pending is given up
		f.settleCommitted(len(f.written)-1, true)
	}
}

// retry appends until the journal has room.
func (f *follower) retry(appended func() error) {
	f.t.Helper()
	for range 10_000 {
		err := appended()
		if err == nil {
			return
		}
		if !errors.Is(err, ErrJournalFull) {
			f.t.Fatal(err)
		}
		f.now += DefaultSlicePause
		f.s.RequestSweep()
		f.step()
	}
	f.t.Fatal("the journal never has room")
}

// commitTo tells the node how far the log is committed and gives the store what is.
func (f *follower) commitTo(commit LogIndex) {
	f.t.Helper()
	f.commit = max(f.commit, commit)
	for i, w := range f.written {
		if w.pos.Flags&CatchupRound == 0 {
			f.settleCommitted(i, false)
		}
	}
}

// settleCommitted gives the i-th round written to the store if it is committed and still part of the log.
func (f *follower) settleCommitted(i int, catchup bool) {
	f.t.Helper()
	w, r := f.written[i], f.rounds[f.numbers[i]]
	if r == nil {
		return
	}
	l := replayLog(f.written)
	p := w.pos.Point
	if !catchup {
		if at := int(p.Index-l.base.Index) - 1; p.Index <= l.base.Index || at >= len(l.log) || l.log[at].pos.Point != p {
			delete(f.rounds, r.Number)
			r.Release() // replaced
			return
		}
		if p.Index > f.commit {
			return
		}
	}
	delete(f.rounds, r.Number)
	f.j.SetCommitted(r.Number)
	f.remember(r)
	if err := f.s.Add(r); err != nil {
		f.t.Fatal(err)
	}
	f.added = max(f.added, p.Index)
	if catchup {
		f.commit = max(f.commit, p.Index)
	}
}

// remember notes the records of a committed round, once each.
func (f *follower) remember(r *Round) {
	for _, g := range roundRecords(r) {
		if g.stream.Kind != Replica && int(g.seq) == len(f.acked[g.stream])+1 {
			f.acked[g.stream] = append(f.acked[g.stream], g.value)
		}
	}
}

// kill forgets the node as if its process had died, giving its memory back.
func (f *follower) kill() {
	for _, r := range f.rounds {
		r.Release()
	}
	clear(f.rounds)
	f.node.kill()
}

// records returns what recovery handed over and the files have of every stream.
func (f *follower) recovered(what string) map[StreamID][]string {
	f.t.Helper()
	got := map[StreamID][]string{}
	for id, values := range f.h.records {
		got[id] = slices.Clone(values)
	}
	for id := range f.rec.LastSequences {
		if id.Kind == Messages {
			got[id] = f.mustReadAll(id, what)
		}
	}
	maps.DeleteFunc(got, func(_ StreamID, v []string) bool { return len(v) == 0 })
	return got
}

// position returns a position that follows prev.
func position(epoch Epoch, index LogIndex, prev Epoch, commit LogIndex) LogPosition {
	return LogPosition{Point: LogPoint{Epoch: epoch, Index: index}, Prev: prev, Commit: commit}
}
