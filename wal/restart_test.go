package wal

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// contents is what a node has of a stream after a start.
type contents struct {
	// first is the first sequence, position that of the snapshot of a log.
	first    Sequence
	position uint64
	snapshot string
	values   []string
	// quarantined: the partition, or the metadata, isn't served. Then nothing else counts.
	quarantined bool
}

func (c contents) String() string {
	if c.quarantined {
		return "quarantined"
	}
	return fmt.Sprintf("from %d, snapshot %q at %d, %d records", c.first, c.snapshot, c.position, len(c.values))
}

func (c contents) equal(o contents) bool {
	return c.quarantined == o.quarantined && (c.quarantined ||
		c.first == o.first && c.position == o.position && c.snapshot == o.snapshot && slices.Equal(c.values, o.values))
}

// has returns what a node that was just opened has of a stream.
func (f *follower) has(id StreamID, what string) (c contents) {
	f.t.Helper()
	for _, q := range f.rec.Quarantined {
		if q.Stream == id {
			return contents{quarantined: true}
		}
	}
	last := f.rec.LastSequences[id]
	switch {
	case id.Kind == Metadata && f.rec.Metadata != nil:
		return contents{quarantined: true}
	case id.Kind == Messages:
		c.first = max(f.rec.FirstSequences[id], 1)
		values, err := f.readAll(id, c.first, 0)
		if errors.Is(err, ErrCorrupt) {
			return contents{quarantined: true} // found by a read, since the report was lost
		}
		if err != nil {
			f.t.Fatalf("%s: %v: %v", what, id, err)
		}
		if c.values = values; int(last)+1 != int(c.first)+len(values) && last > 0 {
			f.t.Fatalf("%s: %v: the last sequence is %d, there are %d records from %d", what, id, last, len(values), c.first)
		}
		if first, l, ok := f.s.Bounds(id); ok && (first != c.first || l != last) {
			f.t.Fatalf("%s: %v: bounds are %d to %d", what, id, first, l)
		}
	default:
		kind := SnapshotCursors
		if id.Kind == Metadata {
			kind = SnapshotMetadata
		}
		c.position, c.snapshot, c.values = f.h.positions[kind], f.h.snapshots[kind], f.h.records[id]
		if int(last) != int(c.position)+len(c.values) {
			f.t.Fatalf("%s: %v: the last sequence is %d, there are %d records behind the snapshot at %d", what, id, last, len(c.values),
				c.position)
		}
	}
	return c
}

// restartPower cuts the power before every completion of what a node does that catches up, and opens each disk that is left:
// every stream must have one of the contents that it may have then.
type restartPower struct {
	t    *testing.T
	o    OpenOptions
	pool *ring.Pool
	f    *follower
	d    *simdisk.Disk
	may  map[StreamID][]contents
	next map[StreamID]Sequence

	every, steps, cuts, twice int
	seen                      map[uint64]bool
	killed                    bool
}

func newRestartPower(t *testing.T) *restartPower {
	pool := ring.NewPool(256 << 20)
	o := smallStore(pool)
	o.Replicated = true
	o.Store.SegmentMaxBytes, o.Store.LogRollBytes = 12<<10, 5000
	p := &restartPower{t: t, o: o, pool: pool, may: map[StreamID][]contents{}, next: map[StreamID]Sequence{}, every: everyStep(1, 35),
		seen: map[uint64]bool{}}
	t.Cleanup(func() {
		if n := pool.InUse(); n != 0 && !t.Failed() {
			t.Errorf("%d bytes of slabs were not released", n)
		}
	})
	return p
}

func (p *restartPower) open(d *simdisk.Disk) {
	p.t.Helper()
	f, err := openFollower(p.t, d, p.o, p.pool)
	if err != nil {
		p.t.Fatal(err)
	}
	p.f, p.d = f, d
}

// watch begins to cut the power.
func (p *restartPower) watch() {
	p.d.OnStep(func(op *ring.Op) {
		if op.Kind == ring.Read || op.Kind == ring.Stat || op.Kind == ring.ReadDir || op.Kind == ring.StatFS || op.Kind == ring.Close {
			return
		}
		if p.steps++; p.steps%p.every != 0 {
			return
		}
		pending := p.d.Pending()
		for keep := range simdisk.Subsets(len(pending), 6, 16, uint64(p.steps)) {
			p.check(p.d.Crash(func(i int, _ simdisk.Item) simdisk.Fate {
				if keep(i) {
					return simdisk.Keep
				}
				return simdisk.Drop
			}))
		}
		p.check(p.d.Crash(func(int, simdisk.Item) simdisk.Fate { return simdisk.Torn }))
		p.killed = true // what it leaves looks like what a power cut may, but isn't durable
		p.check(p.d.Clone())
		p.killed = false
	})
}

func (p *restartPower) check(left *simdisk.Disk) {
	p.t.Helper()
	key := fingerprint(left)
	if p.killed {
		key++
	}
	for _, id := range slices.SortedFunc(maps.Keys(p.may), func(a, b StreamID) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
	}) {
		list := p.may[id]
		key = key*31 + uint64(len(list))
		for _, c := range list {
			key = key*31 + uint64(len(c.values)) + uint64(c.first)<<20 + c.position<<40
		}
	}
	if p.seen[key] {
		return
	}
	p.seen[key] = true
	p.cuts++
	what := fmt.Sprintf("step %d, cut %d", p.steps, p.cuts)
	m, err := openFollower(p.t, left, p.o, p.pool)
	if err != nil {
		p.t.Fatalf("%s: %v", what, err)
	}
	before := p.compare(m, what)
	if p.cuts%8 != 0 && !p.killed {
		m.kill()
		return
	}
	// What is found once stays.
	p.twice++
	m.sweep()
	m.kill()
	again, err := openFollower(p.t, m.d.Crash(nil), p.o, p.pool)
	if err != nil {
		p.t.Fatalf("%s, cut again: %v", what, err)
	}
	for id, c := range p.compare(again, what+", cut again") {
		if !c.equal(before[id]) {
			p.t.Fatalf("%s, cut again: %v is %v, was %v", what, id, c, before[id])
		}
	}
	again.kill()
}

func (p *restartPower) compare(m *follower, what string) map[StreamID]contents {
	p.t.Helper()
	m.settle()
	if err := m.s.Err(); err != nil {
		p.t.Fatalf("%s: %v", what, err)
	}
	found := map[StreamID]contents{}
	for id, list := range p.may {
		c := m.has(id, what)
		if !slices.ContainsFunc(list, c.equal) {
			p.t.Fatalf("%s: %v is %v; it may be %v", what, id, c, list)
		}
		found[id] = c
	}
	return found
}

// now returns what a stream has for sure.
func (p *restartPower) now(id StreamID) contents {
	if list := p.may[id]; len(list) > 0 {
		return list[len(list)-1]
	}
	if id.Kind == Messages {
		return contents{first: 1}
	}
	return contents{}
}

// becoming says that a stream is getting other contents; became that it has.
func (p *restartPower) becoming(id StreamID, c ...contents) { p.may[id] = append(p.may[id], c...) }

func (p *restartPower) became(id StreamID) { p.may[id] = []contents{p.now(id)} }

// fill adds a round of a catch-up with a record per stream.
func (p *restartPower) fill(size int, ids ...StreamID) {
	p.t.Helper()
	r := logRound{pos: LogPosition{Flags: CatchupRound}}
	var runs []TestRun
	for _, id := range ids {
		c := p.now(id)
		seq := c.first + Sequence(len(c.values))
		if id.Kind != Messages {
			seq = Sequence(c.position) + 1 + Sequence(len(c.values))
		}
		rec := testRecord(id, seq, size)
		runs = append(runs, TestRun{Stream: id, Records: []Record{rec}})
		c.values = append(slices.Clone(c.values), string(rec.Value))
		if p.may[id] == nil {
			p.becoming(id, p.now(id))
		}
		p.becoming(id, c)
	}
	p.f.put(r, runs, false)
	for _, id := range ids {
		p.became(id)
	}
}

// wait lets the store work until done.
func (p *restartPower) wait(done *bool) {
	p.t.Helper()
	for range 100_000 {
		if *done {
			return
		}
		if !p.f.step() {
			p.f.now += DefaultSlicePause
		}
	}
	p.t.Fatalf("it never ends; store: %v", p.f.s.Err())
}

// prepare fills the node with a few segments, log files, snapshots and a checkpoint.
func (p *restartPower) prepare() {
	p.open(simdisk.New(simdisk.Options{SectorBytes: 4096}))
	p.fill(100, p0, le, md)
	for range 3 {
		p.fill(5000, p0, p1)
		p.fill(3000, le, md)
	}
	p.f.sweep()
	for range 2 {
		p.fill(5000, p0)
	}
	p.f.sweep()
	p.fill(300, p0, p1, le, md)
}

// TestStore_InstallSurvivesPowerCutsAtEveryStep replaces ledger and metadata by snapshots that reach far beyond them, adds
// records behind, and goes on with ordinary snapshots.
func TestStore_InstallSurvivesPowerCutsAtEveryStep(t *testing.T) {
	t.Parallel()
	p := newRestartPower(t)
	p.prepare()
	p.watch()
	install := func(id StreamID, kind SnapshotKind, position uint64, data string) {
		done := false
		p.becoming(id, contents{position: position, snapshot: data})
		p.f.s.Install(kind, position, 9, []byte(data), func() {
			p.became(id)
			done = true
		})
		p.wait(&done)
		p.f.acked[id] = nil
	}
	install(le, SnapshotCursors, 1000, "cursors 1000")
	install(md, SnapshotMetadata, 77, "metadata 77")
	p.fill(300, le, md)
	p.f.now += DefaultWriteOutEvery
	p.f.settle()
	p.fill(3000, le, md, p0)
	p.f.sweep()
	// Over what was installed, and not written yet.
	p.fill(300, le)
	install(le, SnapshotCursors, 2000, "cursors 2000")
	install(le, SnapshotCursors, 3000, "cursors 3000")
	p.fill(3000, le, md)
	p.f.sweep()
	save := func(id StreamID, kind SnapshotKind, data string) {
		c := p.now(id)
		p.becoming(id, contents{position: c.position + uint64(len(c.values)), snapshot: data})
		p.f.s.SaveSnapshot(kind, c.position+uint64(len(c.values)), 9, []byte(data))
		p.f.settle()
		p.became(id)
	}
	save(le, SnapshotCursors, "cursors")
	save(md, SnapshotMetadata, "metadata")
	p.fill(3000, le, md)
	p.f.sweep()
	p.f.close()
	t.Logf("%d steps, %d power cuts, %d of them twice", p.steps, p.cuts, p.twice)
}

// TestStore_SkipSurvivesPowerCutsAtEveryStep lets two partitions begin anew, one of them with files and one without, fills
// them, and lets one begin anew once more.
func TestStore_SkipSurvivesPowerCutsAtEveryStep(t *testing.T) {
	t.Parallel()
	p := newRestartPower(t)
	p.prepare()
	p.watch()
	skip := func(next Sequence, ids ...StreamID) {
		left, done := len(ids), false
		for _, id := range ids {
			if p.may[id] == nil {
				p.becoming(id, p.now(id))
			}
			p.becoming(id, contents{first: next})
			p.f.s.Skip(id, next, func() {
				p.became(id)
				left--
				done = left == 0
			})
		}
		p.wait(&done)
	}
	skip(500, p0, p2)
	p.fill(5000, p0, p2)
	p.f.now += DefaultWriteOutEvery
	p.f.settle()
	for range 3 {
		p.fill(5000, p0, p1)
	}
	p.f.sweep()
	p.fill(5000, p0, p2)
	skip(900, p0)
	p.fill(100, p0, p2)
	p.f.close()
	p.open(p.d)
	p.compare(p.f, "after a clean end")
	p.fill(100, p0)
	p.f.close()
	t.Logf("%d steps, %d power cuts, %d of them twice", p.steps, p.cuts, p.twice)
}

// TestStore_ResetSurvivesPowerCutsAtEveryStep repairs a partition whose segment is damaged: it is quarantined until its
// files are gone, then filled again from its first record. A sweep may be under way, whose checkpoint table speaks for
// fewer rounds than those with records of the old files.
func TestStore_ResetSurvivesPowerCutsAtEveryStep(t *testing.T) {
	t.Parallel()
	for _, swept := range []int{-1, 0, 5} {
		t.Run(fmt.Sprintf("%d steps into a sweep", swept), func(t *testing.T) { resetPowerCuts(t, swept) })
	}
}

func resetPowerCuts(t *testing.T, swept int) {
	p := newRestartPower(t)
	p.prepare()
	if swept >= 0 {
		p.f.s.RequestSweep()
		for range swept {
			p.f.step()
		}
		p.fill(100, p0)
	}
	old := p.now(p0)
	p.d.Damage(segmentPath(p0, 1), segmentHeaderLen+60, 1)
	if _, err := p.f.readAll(p0, 1, 0); !errors.Is(err, ErrCorrupt) {
		t.Fatalf("read of a damaged segment: %v", err)
	}
	p.f.settle()
	report := p.f.s.streams.get(p0).report
	if swept >= 0 {
		p.f.s.RequestSweep()
		for range swept {
			p.f.s.Step(p.f.now)
			if p.d.InFlight() > 0 {
				_ = p.d.WaitOne()
			}
		}
		p.fill(100, p0)
	}
	p.watch()
	done := false
	p.may[p0] = []contents{{quarantined: true}, {first: 1}}
	p.f.s.Reset(p0, 1, func() {
		p.may[p0] = []contents{{first: 1}}
		done = true
	})
	p.f.put(logRound{pos: LogPosition{Flags: CatchupRound}}, []TestRun{{Stream: p0, Records: []Record{testRecord(p0,
		Sequence(len(old.values))+1, 10)}}}, false) // a round of before that was still on its way
	p.wait(&done)
	if p.d.ReadFile(report) != nil {
		t.Error("the report is still there")
	}
	p.f.acked[p0] = nil
	for range old.values {
		p.fill(4000, p0)
	}
	p.f.sweep()
	p.fill(100, p0)
	p.f.close()
	p.open(p.d)
	p.compare(p.f, "after a clean end")
	p.f.close()
	t.Logf("%d steps, %d power cuts, %d of them twice", p.steps, p.cuts, p.twice)
}

// TestStore_ResetWaitsForASweepOfItsOwn lets a partition begin anew while a checkpoint table is being written that speaks for
// fewer rounds than those with records of the old files: its files stay until the next one.
func TestStore_ResetWaitsForASweepOfItsOwn(t *testing.T) {
	p := newRestartPower(t)
	p.prepare()
	s := p.f.s
	s.RequestSweep()
	for s.sweep.phase != sweepTable {
		p.f.step()
	}
	p.d.Hold(func(op *ring.Op) bool { return op.Kind == ring.WriteSync && op.FD == s.table.fd })
	p.fill(100, p0)
	p.f.s.OnSweepStart(func(RoundNumber) {}) // the windows aren't saved, and no sweep comes to its end
	p.may[p0] = append(p.may[p0], contents{first: 1})
	done := false
	late := RoundNumber(0)
	s.Reset(p0, 1, func() {
		if done = true; late == 0 || s.durable < late {
			t.Errorf("it is done with a table that speaks for rounds up to %d", s.durable)
		}
	})
	p.d.Hold(nil)
	p.f.settle()
	if done || p.d.ReadFile(segmentPath(p0, 1)) == nil {
		t.Fatal("the files are gone, and the table speaks for none of the rounds since")
	}
	m, err := openFollower(t, p.d.Crash(nil), p.o, p.pool)
	if err != nil {
		t.Fatal(err)
	}
	p.compare(m, "cut")
	m.kill()
	// A round that was still on its way when the sweep began: it is in none of the files, but a start would see it.
	late = p.f.j.NextRound()
	p.f.put(logRound{pos: LogPosition{Flags: CatchupRound}}, []TestRun{{Stream: p0, Records: []Record{testRecord(p0,
		Sequence(len(p.may[p0][0].values))+1, 10)}}}, false)
	p.f.saveDedup()
	p.f.settle()
	p.became(p0)
	if !done {
		t.Fatal("the next table doesn't end it")
	}
	if m, err = openFollower(t, p.d.Crash(nil), p.o, p.pool); err != nil {
		t.Fatal(err)
	}
	p.compare(m, "cut behind it")
	m.kill()
	p.f.kill()
}

// TestStore_InstallBringsMetadataBack installs a snapshot where the metadata was quarantined.
func TestStore_InstallBringsMetadataBack(t *testing.T) {
	p := newRestartPower(t)
	p.prepare()
	p.f.sweep()
	p.f.close()
	p.d.Damage(testDataDir+"/metadata/"+logName(Metadata, 1, false), segmentHeaderLen+60, 1)
	p.open(p.d)
	if p.f.rec.Metadata == nil {
		t.Fatal("the metadata was not quarantined")
	}
	p.every = everyStep(3, 35)
	p.may[md] = []contents{{quarantined: true}}
	// More comes than the journal has room for, and a partition begins anew.
	p.f.s.GiveUpMetadata()
	for range 2 * p.o.Journal.MaxFiles * int(p.o.Journal.FileBytes) / 14_000 {
		p.fill(12_000, p0)
	}
	p.watch()
	p.fill(12_000, p0)
	reset := false
	p.becoming(p1, contents{first: 1})
	p.f.s.Reset(p1, 1, func() {
		p.became(p1)
		reset = true
	})
	p.wait(&reset)
	p.becoming(md, contents{position: 50, snapshot: "metadata 50"})
	done := false
	p.f.s.Install(SnapshotMetadata, 50, 9, []byte("metadata 50"), func() {
		p.became(md)
		done = true
	})
	p.wait(&done)
	p.fill(3000, md, p0)
	p.f.sweep()
	p.fill(3000, md)
	p.f.close()
	p.open(p.d)
	p.compare(p.f, "after a clean end")
	p.f.close()
	t.Logf("%d steps, %d power cuts, %d of them twice", p.steps, p.cuts, p.twice)
}

// TestStore_AResetThatHadToWaitGoesOnByItself resets a partition of which a file is being published. The store is called only when
// it says so, and when an operation has ended.
func TestStore_AResetThatHadToWaitGoesOnByItself(t *testing.T) {
	p := newRestartPower(t)
	p.prepare()
	p.f.sweep()
	s, done := p.f.s, false
	s.closeIdle() // or the end of that would be another reason to go on
	p.f.settle()
	s.publish.add(&publication{
		path: streamDir(testDataDir, 0, p0) + "/report", hint: true, st: s.streams.get(p0),
		build: func() [][]byte { return [][]byte{[]byte("why")} },
	})
	s.Reset(p0, 1, func() { done = true })
	for now := p.f.now; ; {
		next := s.Step(now)
		switch {
		case p.d.InFlight() > 0:
			if err := p.d.WaitOne(); err != nil {
				t.Fatal(err)
			}
			continue
		case next <= now+DefaultSlicePause:
			now = next
			continue
		}
		p.f.now = now
		break
	}
	if !done {
		t.Error("the partition has not begun anew, and the store waits for nothing")
	}
	p.f.close()
}

// TestStore_InstallIsSatisfiedWithWhatIsThere does nothing where nothing is to be done.
func TestStore_InstallIsSatisfiedWithWhatIsThere(t *testing.T) {
	p := newRestartPower(t)
	p.prepare()
	count := 0
	done := func() { count++ }
	p.f.s.SaveSnapshot(SnapshotCursors, 4, 1, []byte("own"))
	p.f.settle()
	p.f.s.Install(SnapshotCursors, 4, 1, []byte("other"), done)
	p.f.s.Install(SnapshotCursors, 3, 1, []byte("other"), done)
	p.f.s.Skip(p0, 1, done)
	p.f.s.Skip(p0, p.f.s.streams.get(p0).next, done)
	p.f.s.Skip(StreamID{Kind: Messages, Topic: 9}, 1, done)
	if count != 5 {
		t.Errorf("%d of 5 were done at once", count)
	}
	// Within the log: it is published, and the log goes on as it was.
	next := p.f.s.streams.get(le).next
	p.f.s.Install(SnapshotCursors, 5, 1, []byte("other"), done)
	p.f.settle()
	if count != 6 || p.f.s.streams.get(le).next != next {
		t.Errorf("%d done, the ledger goes on with %d, not %d", count, p.f.s.streams.get(le).next, next)
	}
	// One that waits behind another is done with it or a later one.
	p.f.s.Install(SnapshotCursors, 100, 1, []byte("a"), done)
	p.f.s.Install(SnapshotCursors, 200, 1, []byte("b"), done)
	p.f.s.Install(SnapshotCursors, 300, 1, []byte("c"), done)
	p.f.s.Install(SnapshotDedup, uint64(p.f.s.added.Round), 1, []byte("{}"), done)
	p.f.settle()
	if count != 10 || p.f.s.streams.get(le).next != 301 {
		t.Errorf("%d done, the ledger goes on with %d", count, p.f.s.streams.get(le).next)
	}
	p.f.s.DropTopic(2)
	p.f.s.Reset(p2, 1, done)
	if count != 11 {
		t.Error("a partition of a deleted topic is waited for")
	}
	p.f.kill()
}

// TestStore_GapsAreRefused adds rounds that don't follow: nothing of them counts, and the store goes on.
func TestStore_GapsAreRefused(t *testing.T) {
	p := newRestartPower(t)
	p.prepare()
	s := p.f.s
	before := s.added
	for _, id := range []StreamID{p0, p2, le, md} {
		next := firstSequence
		if st := s.streams.get(id); st != nil {
			next = st.next
		}
		r := NewStampedTestRound(p.pool, 1, before.Round+1, position(1, 1, 0, 0), TestRun{Stream: id, Records: []Record{testRecord(id, next+1, 10)}})
		if err := s.Add(r); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), errGap.Error()) {
			t.Errorf("%v: %v", id, err)
		}
	}
	if s.added != before || s.Err() != nil {
		t.Errorf("added is %+v, was %+v; %v", s.added, before, s.Err())
	}
	// An overlap is no gap.
	c := p.now(p0)
	last := Sequence(len(c.values))
	r := NewStampedTestRound(p.pool, 1, before.Round+1, position(1, 1, 0, 0),
		TestRun{Stream: p0, Records: []Record{testRecord(p0, last-1, 10), testRecord(p0, last, 10), testRecord(p0, last+1, 10)}})
	if err := s.Add(r); err != nil {
		t.Fatal(err)
	}
	p.f.now += DefaultWriteOutEvery
	p.f.settle()
	got, err := p.f.readAll(p0, 1, 0)
	rec := testRecord(p0, last+1, 10)
	if err != nil || !slices.Equal(got, append(slices.Clone(c.values), string(rec.Value))) {
		t.Errorf("%d records, %v", len(got), err)
	}
	p.f.kill()
}

// TestStore_ClosesWithoutWaitingForARestart shuts down while a partition is about to begin anew.
func TestStore_ClosesWithoutWaitingForARestart(t *testing.T) {
	p := newRestartPower(t)
	p.prepare()
	for steps := range 12 {
		p.becoming(p0, contents{first: 700})
		p.f.s.Skip(p0, 700, nil)
		for range steps {
			p.f.step()
		}
		p.f.close()
		p.open(p.d)
		found := p.compare(p.f, fmt.Sprintf("%d steps", steps))
		if found[p0].first == 700 {
			p.f.close()
			return
		}
		p.may[p0] = []contents{found[p0]}
	}
	p.f.close()
}
