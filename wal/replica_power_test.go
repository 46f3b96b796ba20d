package wal

import (
	"fmt"
	"slices"
	"testing"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// replicaPower cuts the power before every completion of what a node of a cluster does, with every choice (see
// simdisk.Subsets) of what survives, and recovers each disk that is left.
type replicaPower struct {
	t    *testing.T
	o    OpenOptions
	pool *ring.Pool
	d    *simdisk.Disk
	// f is the node, nil while it is being opened; written, flushed and commit are what earlier lives did.
	f       *follower
	written []logRound
	flushed int
	commit  LogIndex

	every, steps, crashes, reopens, skipped int
	seen                                    map[uint64]bool
}

func (p *replicaPower) watch(d *simdisk.Disk) {
	p.d = d
	d.OnStep(func(op *ring.Op) {
		switch op.Kind {
		case ring.Read, ring.Stat, ring.ReadDir, ring.StatFS, ring.Close: // leave nothing behind
		default:
			p.cut()
		}
	})
}

func (p *replicaPower) cut() {
	p.steps++
	if p.steps%p.every != 0 {
		return
	}
	pending := p.d.Pending()
	for keep := range simdisk.Subsets(len(pending), 8, 32, uint64(p.steps)) {
		p.check(p.d.Crash(func(i int, _ simdisk.Item) simdisk.Fate {
			if keep(i) {
				return simdisk.Keep
			}
			return simdisk.Drop
		}), fmt.Sprintf("step %d, %d pending, crash %d", p.steps, len(pending), p.crashes))
	}
	p.check(p.d.Crash(func(int, simdisk.Item) simdisk.Fate { return simdisk.Torn }), fmt.Sprintf("step %d, all torn", p.steps))
	p.check(p.d.Clone(), fmt.Sprintf("step %d, killed", p.steps))
}

// everyStep returns how many steps lie between two power cuts of a test: n, or short in a short run.
func everyStep(n, short int) int {
	if testing.Short() {
		return short
	}
	return n
}

// seeds returns how many random runs a test makes: n, fewer in a short run.
func seeds(n uint64) uint64 {
	if testing.Short() {
		return n / 5
	}
	return n
}

// state is what the node has done so far.
func (p *replicaPower) state() (written []logRound, flushed int, commit LogIndex) {
	if p.f != nil {
		return p.f.written, p.f.flushed, p.f.commit
	}
	return p.written, p.flushed, p.commit
}

// check recovers a disk.
func (p *replicaPower) check(d *simdisk.Disk, what string) {
	p.t.Helper()
	written, flushed, commit := p.state()
	key := fingerprint(d)*31 + uint64(flushed)<<32 + uint64(commit)
	if p.seen[key] {
		p.skipped++
		return
	}
	p.seen[key] = true
	p.crashes++
	m, err := openFollower(p.t, d, p.o, p.pool)
	if err != nil {
		p.t.Fatalf("%s: %v", what, err)
	}
	k := p.compare(m, what, written, flushed, commit)
	if p.crashes%16 != 0 {
		m.kill()
		return
	}
	// What was recovered survives the next cut, too, with and without a sweep.
	p.reopens++
	if p.crashes%32 == 0 {
		m.sweep()
	}
	m.kill()
	m2, err := openFollower(p.t, m.d.Crash(nil), p.o, p.pool)
	if err != nil {
		p.t.Fatalf("%s, cut again: %v", what, err)
	}
	if again := p.compare(m2, what+", cut again", written[:k], k, max(commit, m.rec.Log.Committed.Index)); again != k {
		p.t.Fatalf("%s, cut again: %d rounds, before %d", what, again, k)
	}
	m2.kill()
}

// compare finds how many of the rounds that were written have been recovered: all that were durable, maybe more, and what
// recovery says must be what a naive gate makes of them, with a commit index that was known.
func (p *replicaPower) compare(m *follower, what string, written []logRound, flushed int, commit LogIndex) int {
	p.t.Helper()
	if len(m.rec.Quarantined) > 0 || m.rec.Metadata != nil || m.rec.DedupLost != nil || m.rec.Suspect != nil {
		p.t.Fatalf("%s: quarantined %+v, metadata %+v, windows %v, suspect %v", what, m.rec.Quarantined, m.rec.Metadata,
			m.rec.DedupLost, m.rec.Suspect)
	}
	m.settle()
	if err := m.s.Err(); err != nil {
		p.t.Fatalf("%s: %v", what, err)
	}
	values := m.recovered(what)
	why := ""
	for k := len(written); k >= flushed; k-- {
		l := replayLog(written[:k])
		known := m.rec.Log.Committed
		n := int(known.Index) - int(l.base.Index)
		switch {
		case m.rec.Log.Last != l.last():
			why = fmt.Sprintf("the log ends with %v, not %v", m.rec.Log.Last, l.last())
		case known.Index < l.commit, known.Index > max(commit, l.commit), n > len(l.log), known != l.point(n):
			why = fmt.Sprintf("committed is %v of %v to %v", known, l.commit, commit)
		case !samePending(m.rec.Pending, l.log[n:]):
			why = fmt.Sprintf("%d rounds pending of %d", len(m.rec.Pending), len(l.log)-n)
		default:
			want := logValues(nil, append(slices.Clone(l.given), l.log[:n]...))
			all := logValues(nil, append(slices.Clone(l.given), l.log[:min(len(l.log), int(max(commit, l.commit)-l.base.Index))]...))
			if why = p.differ(m, values, want, all); why == "" {
				p.checkWindows(m, what, want)
				return k
			}
		}
	}
	p.t.Fatalf("%s: %d rounds written, %d durable, commit %d: %s", what, len(written), flushed, commit, why)
	return 0
}

// differ says what differs between what was recovered and what is committed: want as far as the recovery knows, all as far
// as the node has known it. A snapshot may reach further than the recovery knows.
func (p *replicaPower) differ(m *follower, values, want, all map[StreamID][]string) string {
	for id := range all {
		got := values[id]
		if id.Kind != Messages {
			kind := SnapshotCursors
			if id.Kind == Metadata {
				kind = SnapshotMetadata
			}
			at := int(m.h.positions[kind])
			if at > len(all[id]) {
				return fmt.Sprintf("%v: the snapshot is of %d records of %d", id, at, len(all[id]))
			}
			got = append(slices.Clone(all[id][:at]), got...)
			want[id] = all[id][:max(at, len(want[id]))]
		}
		if !slices.Equal(got, want[id]) {
			return fmt.Sprintf("%v: %d records\n%.300v, not %d\n%.300v", id, len(got), got, len(want[id]), want[id])
		}
		if last := m.rec.LastSequences[id]; int(last) != len(got) {
			return fmt.Sprintf("%v: the last sequence is %d, there are %d records", id, last, len(got))
		}
	}
	return ""
}

func samePending(pending []*Round, want []logRound) bool {
	return slices.EqualFunc(pending, want, func(r *Round, w logRound) bool {
		pos, ok := r.Position()
		records := slices.DeleteFunc(roundRecords(r), func(g got) bool { return g.stream.Kind == Replica })
		for i := range records {
			records[i].round = 0
		}
		return ok && pos == w.pos && slices.Equal(records, w.records)
	})
}

// checkWindows checks that the producers' windows and what was replayed for them cover all that is committed.
func (p *replicaPower) checkWindows(m *follower, what string, committed map[StreamID][]string) {
	q := storePower{t: p.t}
	q.checkDedup(m.node, what, committed, nil)
}

// start opens the node on a disk, to go on.
func (p *replicaPower) start(d *simdisk.Disk) {
	p.t.Helper()
	p.watch(d)
	f, err := openFollower(p.t, d, p.o, p.pool)
	if err != nil {
		p.t.Fatal(err)
	}
	k := p.compare(f, "start", p.written, p.flushed, p.commit)
	f.adopt(slices.Clone(p.written[:k]))
	f.commit = max(f.commit, f.rec.Log.Committed.Index)
	l := replayLog(f.written)
	for id, values := range logValues(nil, append(l.given, l.log[:int(f.commit-l.base.Index)]...)) {
		f.acked[id] = values
	}
	p.f = f
}

// leave ends a life; d is the disk that it leaves.
func (p *replicaPower) leave(d func() *simdisk.Disk) *simdisk.Disk {
	p.written, p.flushed, p.commit = p.f.state()
	f := p.f
	p.f = nil
	left := d()
	f.kill()
	return left
}

func (f *follower) state() ([]logRound, int, LogIndex) {
	return slices.Clone(f.written), f.flushed, f.commit
}

// TestReplica_SurvivesPowerCutsAtEveryStep covers a replicated log with three leaders that replace what the one before left
// uncommitted, of the node's own rounds and of shipped ones, with checkpoints in between, trimmed and recycled files, a
// power cut, a kill, a catch-up and a clean end.
func TestReplica_SurvivesPowerCutsAtEveryStep(t *testing.T) {
	t.Parallel()
	pool := ring.NewPool(512 << 20)
	o := smallStore(pool)
	o.Replicated = true
	o.Store.SegmentMaxBytes, o.Store.LogRollBytes = 12<<10, 5000
	o.Journal.FileBytes, o.Journal.MaxFiles, o.Journal.MaxRoundBytes = 48<<10, 3, 16<<10
	p := &replicaPower{t: t, o: o, pool: pool, every: everyStep(11, 55), seen: map[uint64]bool{}}
	p.start(simdisk.New(simdisk.Options{SectorBytes: 4096}))
	f := p.f
	f.write(opening(position(1, 1, 0, 0)), 100, false, md)
	f.write(position(1, 2, 1, 0), 100, false, p0, le)
	f.write(position(1, 3, 1, 1), 4000, false, p0, p1)
	f.commitTo(2)
	f.write(position(1, 4, 1, 2), 5000, false, p0, le)
	f.sweep()
	f.commitTo(4)
	f.snapshots()
	f.write(position(1, 5, 1, 4), 3000, false, p0, p2)
	f.write(position(1, 6, 1, 4), 3000, false, p0, md)
	f.sweep()
	// A leader that has neither 5 nor 6.
	f.write(opening(position(2, 5, 1, 4)), 200, true, md)
	f.write(position(2, 6, 2, 4), 6000, true, p1, p0)
	f.write(position(2, 7, 2, 6), 4000, true, le, p0)
	f.commitTo(7)
	f.snapshots()
	f.now += DefaultWriteOutEvery
	f.settle()
	f.sweep()
	f.write(position(2, 8, 2, 6), 100, true, p1)

	p.start(p.leave(func() *simdisk.Disk { return p.d.Crash(nil) }))
	f = p.f
	f.write(position(2, 9, 2, 7), 9000, true, p1, p2)
	f.write(position(2, 10, 2, 7), 9000, true, p1)
	// A leader that has nothing above 8.
	f.write(opening(position(3, 9, 2, 8)), 100, false, md, le)
	f.commitTo(8)
	f.write(position(3, 10, 3, 9), 7000, false, p0, p1)
	f.commitTo(10)
	f.sweep()
	f.snapshots()
	f.sweep()
	f.write(position(3, 11, 3, 9), 7000, false, p0, p2)

	p.start(p.leave(func() *simdisk.Disk { return p.d.Clone() }))
	f = p.f
	f.write(position(3, 12, 3, 9), 500, false, p0)
	f.commitTo(11)
	// A catch-up gives up 12, which may not be committed; the last of it says where the log goes on.
	catchup := LogPosition{Flags: CatchupRound, Commit: 11}
	f.write(catchup, 5000, false, p0, p1)
	f.write(catchup, 5000, false, p0, le, md)
	f.sweep()
	catchup.Point = LogPoint{Epoch: 5, Index: 40}
	f.write(catchup, 300, false, p2)
	f.write(position(5, 41, 5, 40), 300, true, p0)

	p.start(p.leave(func() *simdisk.Disk { return p.d.Crash(nil) }))
	f = p.f
	f.write(position(6, 42, 5, 41), 300, true, p0, p1)
	f.commitTo(42)
	f.snapshots()
	f.close()
	p.written, p.flushed, p.commit = f.state()
	p.f = nil
	p.start(p.d)
	if l := p.f.rec.Log; l.Last != l.Committed || l.Last != (LogPoint{Epoch: 6, Index: 42}) || p.f.rec.Rounds > 1 {
		t.Errorf("after a clean end: %+v, %d rounds replayed", l, p.f.rec.Rounds)
	}
	p.f.close()
	if n := pool.InUse(); n != 0 {
		t.Errorf("%d bytes of slabs were not released", n)
	}
	t.Logf("%d steps, %d power cuts, %d of them twice, %d alike", p.steps, p.crashes, p.reopens, p.skipped)
}

// snapshots saves what a coordinator does, of all that is committed.
func (f *follower) snapshots() {
	f.s.SaveSnapshot(SnapshotMetadata, uint64(len(f.acked[md])), f.j.Epoch(), []byte("metadata"))
	f.s.SaveSnapshot(SnapshotCursors, uint64(len(f.acked[le])), f.j.Epoch(), []byte("cursors"))
}

// opening makes a position that of an opening round.
func opening(p LogPosition) LogPosition {
	p.Flags |= OpeningRound
	return p
}
