package wal

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// TestPosition_BytesNeverChange holds the position record against bytes that were frozen when the format was.
func TestPosition_BytesNeverChange(t *testing.T) {
	want := LogPosition{Point: LogPoint{Epoch: 3, Index: 0x0102030405060708}, Prev: 2, Commit: 9, Flags: OpeningRound}
	var b [positionLen]byte
	putPosition(b[:], &want)
	const frozen = "00000044" + "a29e978b" + "0000" + "0000" + "00000010" + "0102030405060708" + "0000000000000000" +
		"0000000000000000" + "0000000000000000" + "00000003" + "00000000" + "01010000" + "00000002" + "0000000000000009"
	if got := hex.EncodeToString(b[:]); got != frozen {
		t.Errorf("a position is\n%s, frozen\n%s", got, frozen)
	}
	if got, err := decodePosition(b[:]); err != nil || got != want {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestPosition_WhatCanNotBeIsRefused(t *testing.T) {
	point := LogPoint{Epoch: 3, Index: 7}
	for _, p := range []LogPosition{
		{}, {Point: LogPoint{Epoch: 3}}, {Point: LogPoint{Index: 3}, Prev: 1},
		{Point: point}, {Point: point, Prev: 4}, {Point: point, Prev: 3, Commit: 7}, {Point: point, Prev: 3, Flags: 4},
		{Point: LogPoint{Epoch: 3, Index: 1}, Prev: 1}, {Point: point, Prev: 3, Flags: OpeningRound | CatchupRound},
		{Point: point, Prev: 3, Flags: CatchupRound}, {Flags: OpeningRound},
	} {
		if err := p.check(); err == nil {
			t.Errorf("%+v passes", p)
		}
	}
	for _, p := range []LogPosition{
		{Point: point, Prev: 3, Commit: 6}, {Point: point, Prev: 1, Flags: OpeningRound}, {Point: LogPoint{Epoch: 3, Index: 1}},
		{Flags: CatchupRound}, {Flags: CatchupRound, Commit: 5}, {Point: point, Flags: CatchupRound, Commit: 9},
	} {
		if err := p.check(); err != nil {
			t.Errorf("%+v is refused", p)
		}
	}
}

// TestJournal_KeepsRoomForThePosition fills rounds to the brim: the position always fits, and a round with one takes nothing
// more.
func TestJournal_KeepsRoomForThePosition(t *testing.T) {
	opts := smallJournal(testPool(t))
	opts.Stamped = true
	d := simdisk.New(simdisk.Options{})
	j, _, _ := openJournal(t, d, opts, 0)
	var flushed []LogPosition
	j.OnFlushed(func(r *Round, err error) {
		p, ok := r.Position()
		if err != nil || !ok || r.Bytes() > opts.MaxRoundBytes {
			t.Errorf("a round of %d bytes at %+v: %v", r.Bytes(), p, err)
		}
		if point, ok := r.Log(); !ok || point != p.Point || r.LogCommit() != p.Commit || r.LogFlags() != p.Flags || r.LogPrev() != p.Prev {
			t.Errorf("the round says of itself %v, %v, %v, %v, its position is %+v", point, r.LogCommit(), r.LogFlags(), r.LogPrev(), p)
		}
		flushed = append(flushed, p)
		r.Release()
	})
	var want []LogPosition
	for i := range LogIndex(12) {
		rec := Record{Sequence: Sequence(i)*1000 + 1, Value: make([]byte, 10*int(i))}
		for ; ; rec.Sequence++ {
			if err := j.Append(le, &rec); errors.Is(err, ErrRoundFull) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
		}
		p := position(2, i+1, 2, i/2)
		if i == 0 {
			p.Prev = 0
		}
		if err := j.Stamp(p.Point, p.Prev, p.Commit, p.Flags); err != nil {
			t.Fatal(err)
		}
		if err := j.Append(le, &rec); !errors.Is(err, ErrRoundFull) {
			t.Errorf("append behind the position: %v", err)
		}
		records, _ := j.Gathered()
		j.Seal()
		d.Poll()
		if records == 0 {
			t.Error("a round counts no records")
		}
		want = append(want, p)
		j.Trim(j.Flushed())
	}
	// A round of a position alone.
	p := position(2, 13, 2, 12)
	if err := j.Stamp(p.Point, p.Prev, p.Commit, p.Flags); err != nil {
		t.Fatal(err)
	}
	if records, _ := j.Gathered(); records != 0 || !j.CanSeal() {
		t.Errorf("a position alone counts as %d records", records)
	}
	j.Seal()
	d.Poll()
	if want = append(want, p); !slices.Equal(flushed, want) {
		t.Errorf("flushed %+v, want %+v", flushed, want)
	}
	newWriter(t, d, j).close()
}

// TestJournal_StampingAllocatesNothing guards the path of every round of a cluster.
func TestJournal_StampingAllocatesNothing(t *testing.T) {
	opts := smallJournal(testPool(t))
	opts.Stamped, opts.FileBytes = true, 4<<20
	d := simdisk.New(simdisk.Options{})
	j, _, _ := openJournal(t, d, opts, 0)
	payload := NewStampedTestRound(opts.Pool, 1, 1, position(1, 1, 0, 0), TestRun{Stream: p0, Records: []Record{testRecord(p0, 1, 100)}})
	defer payload.Release()
	sealed := 0
	j.OnFlushed(func(r *Round, _ error) {
		sealed++
		r.Release()
	})
	idle := func(*ring.Op) bool { return true }
	work := func(add func() error) {
		d.Hold(idle) // the disk allocates, the journal must not
		if err := add(); err != nil {
			t.Fatal(err)
		}
	}
	rec := testRecord(le, 1, 100)
	for name, add := range map[string]func() error{
		"stamp": func() error {
			if err := j.Append(le, &rec); err != nil {
				return err
			}
			return j.Stamp(LogPoint{Epoch: 2, Index: 9}, 2, 8, 0)
		},
		"payload": func() error { return j.AppendPayload(payload.Payload()) },
	} {
		once := func() {
			work(add)
			r := j.gather
			j.gather = nil
			r.Release()
		}
		for range 10 {
			once()
		}
		if allocs := testing.AllocsPerRun(100, once); allocs != 0 {
			t.Errorf("%s: %v allocations", name, allocs)
		}
	}
	d.Hold(nil)
	newWriter(t, d, j).close()
}

// TestJournal_TakesThePayloadOfAnother ships rounds of one journal to another: they come out byte for byte, under numbers of
// the journal's own, and another recovery finds them.
func TestJournal_TakesThePayloadOfAnother(t *testing.T) {
	pool := testPool(t)
	opts := smallJournal(pool)
	opts.Stamped = true
	var shipped, taken [][]byte
	leader, d1 := stampedJournal(t, opts, func(r *Round) { shipped = append(shipped, slices.Clone(r.Payload())) })
	follower, d2 := stampedJournal(t, opts, func(r *Round) { taken = append(taken, slices.Clone(r.Payload())) })
	for i := range 6 {
		id := testStreams[i%4]
		rec := testRecord(id, Sequence(i/4)+1, 2500*i)
		if err := leader.Append(id, &rec); err != nil {
			t.Fatal(err)
		}
		p := position(4, LogIndex(i+1), 4, LogIndex(i))
		if i == 0 {
			p.Prev = 0
		}
		if err := leader.Stamp(p.Point, p.Prev, p.Commit, p.Flags); err != nil {
			t.Fatal(err)
		}
		leader.Seal()
		d1.Poll()
		if err := follower.AppendPayload(shipped[i]); err != nil {
			t.Fatal(err)
		}
		if err := follower.AppendPayload(shipped[i]); !errors.Is(err, ErrRoundFull) {
			t.Errorf("a second payload for the same round: %v", err)
		}
		follower.Seal()
		d2.Poll()
	}
	if len(shipped) != 6 || !slices.EqualFunc(shipped, taken, bytes.Equal) {
		t.Fatalf("%d rounds were shipped, %d taken, or they differ", len(shipped), len(taken))
	}
	newWriter(t, d1, leader).close()
	newWriter(t, d2, follower).close()
	taken = nil
	j, _, err := recoverJournal(d2, opts, replay{round: func(r *Round) error {
		if _, ok := r.Log(); ok {
			taken = append(taken, slices.Clone(r.Payload()))
		}
		return nil
	}})
	if err != nil || !slices.EqualFunc(shipped, taken, bytes.Equal) {
		t.Fatalf("recovered %d of %d: %v", len(taken), len(shipped), err)
	}
	newWriter(t, d2, j).close()
}

func stampedJournal(t *testing.T, opts JournalOptions, flushed func(*Round)) (*Journal, *simdisk.Disk) {
	t.Helper()
	d := simdisk.New(simdisk.Options{})
	j, _, _ := openJournal(t, d, opts, 0)
	j.OnFlushed(func(r *Round, err error) {
		if err != nil {
			t.Error(err)
		}
		flushed(r)
		r.Release()
	})
	return j, d
}

// payloadSeeds are payloads, and bytes that are nearly some.
func payloadSeeds(pool *ring.Pool) (seeds [][]byte) {
	add := func(p LogPosition, runs ...TestRun) {
		r := NewStampedTestRound(pool, 1, 1, p, runs...)
		seeds = append(seeds, slices.Clone(r.Payload()))
		r.Release()
	}
	run := func(id StreamID, n int) TestRun { return TestRun{Stream: id, Records: []Record{testRecord(id, 3, n)}} }
	add(position(1, 1, 0, 0))
	add(position(4, 9, 3, 8), run(p0, 10), run(le, 0), run(md, 300))
	add(LogPosition{Flags: CatchupRound}, run(p1, 5000))
	two := append(slices.Clone(seeds[1]), seeds[0]...)
	r := NewTestRound(pool, 1, 1, run(p0, 10))
	defer r.Release()
	return append(seeds, two, slices.Clone(r.Payload()), nil, make([]byte, 24), make([]byte, 5000))
}

// TestJournal_RefusesWhatIsNoPayload flips every bit, cuts at every byte and adds bytes: nothing of it is taken.
func TestJournal_RefusesWhatIsNoPayload(t *testing.T) {
	opts := smallJournal(testPool(t))
	opts.Stamped = true
	j, d := stampedJournal(t, opts, func(*Round) { t.Error("something was written") })
	seeds := payloadSeeds(opts.Pool)
	refused := func(what string, b []byte) {
		t.Helper()
		if err := j.AppendPayload(b); !errors.Is(err, ErrPayload) && !errors.Is(err, ErrRecordTooLarge) {
			t.Errorf("%s: %v", what, err)
		}
		if j.CanSeal() {
			t.Fatalf("%s: something is gathered", what)
		}
	}
	for i, b := range seeds[3:] {
		refused(fmt.Sprintf("seed %d", 3+i), b)
	}
	good := seeds[1]
	streams := map[int]bool{} // where it says which stream an entry is of: that only the transport's checksum covers
	for at := 0; at < len(good)-stampLen; at += entryHeaderLen + int(binary.BigEndian.Uint32(good[at+12:])) {
		for i := range 6 {
			streams[at+i] = true
		}
	}
	for bit := range len(good) * 8 {
		b := slices.Clone(good)
		b[bit/8] ^= 1 << (bit % 8)
		if streams[bit/8] {
			continue
		}
		refused(fmt.Sprintf("bit %d flipped", bit), b)
	}
	for n := range len(good) {
		refused(fmt.Sprintf("cut to %d bytes", n), good[:n])
		refused("with more behind it", append(slices.Clone(good), make([]byte, n+1)...))
	}
	refused("beyond any round", make([]byte, maxRoundLen))
	if err := j.AppendPayload(good); err != nil {
		t.Errorf("a good one: %v", err)
	}
	newWriter(t, d, j).close()
}

func FuzzAppendPayload(f *testing.F) {
	pool := ring.NewPool(64 << 20)
	for _, b := range payloadSeeds(pool) {
		f.Add(b)
	}
	opts := smallJournal(pool)
	opts.Stamped, opts.FileBytes, opts.MaxRoundBytes = true, 1<<20, 512<<10
	d := simdisk.New(simdisk.Options{})
	j, _, _, err := tryJournal(d, opts, 0)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		before := pool.InUse()
		if err := j.AppendPayload(b); err != nil {
			if pool.InUse() > before+arenaBytes {
				t.Error("memory is kept of what was refused")
			}
			return
		}
		r := j.gather
		j.gather = nil
		defer r.Release()
		// What is taken is what a journal writes: encoded again it is the same.
		p, ok := r.Position()
		if !ok || p.check() != nil {
			t.Fatalf("taken with position %+v, %v", p, ok)
		}
		var runs []TestRun
		for i := range r.Entries {
			e := &r.Entries[i]
			if e.Stream.Kind == Replica {
				continue
			}
			run := TestRun{Stream: e.Stream}
			for data := r.Data(e); len(data) > 0; {
				var rec Record
				data = data[PeekRecord(data, &rec):]
				rec.Flags &^= FlagKey
				run.Records = append(run.Records, rec)
			}
			runs = append(runs, run)
		}
		again := NewStampedTestRound(pool, 1, 1, p, runs...)
		defer again.Release()
		if len(again.Entries) == len(r.Entries) && !bytes.Equal(again.Payload(), b) {
			t.Errorf("taken and encoded again it differs\n%x\n%x", b, again.Payload())
		}
	})
}

// gateRun is a gate with what it has given.
type gateRun struct {
	gate
	given []LogPoint
}

func newGateRun(at LogPoint) *gateRun {
	g := &gateRun{}
	g.give = func(r *Round) error {
		if p, ok := r.Log(); ok {
			g.given = append(g.given, p)
		}
		return nil
	}
	g.resume(at)
	return g
}

// feed gives the gate a round of the position alone.
func (g *gateRun) feed(pool *ring.Pool, n RoundNumber, p LogPosition) error {
	r := NewStampedTestRound(pool, 1, n, p)
	defer r.Release()
	return g.take(r)
}

func (g *gateRun) points() []LogPoint {
	var list []LogPoint
	for _, r := range g.pending {
		p, _ := r.Log()
		list = append(list, p)
	}
	return list
}

// TestGate_Rules goes through what a journal may hold.
func TestGate_Rules(t *testing.T) {
	pool := testPool(t)
	at := func(epoch Epoch, index LogIndex) LogPoint { return LogPoint{Epoch: epoch, Index: index} }
	catchup := func(p LogPoint, commit LogIndex) LogPosition {
		return LogPosition{Point: p, Commit: commit, Flags: CatchupRound}
	}
	for _, c := range []struct {
		name           string
		from           LogPoint
		feed           []LogPosition
		given, pending []LogPoint
		committed      LogPoint
		err            error
	}{
		{name: "nothing is committed before somebody says so", feed: []LogPosition{position(1, 1, 0, 0), position(1, 2, 1, 0)},
			pending: []LogPoint{at(1, 1), at(1, 2)}},
		{name: "a later round commits", feed: []LogPosition{position(1, 1, 0, 0), position(1, 2, 1, 0), position(1, 3, 1, 2)},
			given: []LogPoint{at(1, 1), at(1, 2)}, pending: []LogPoint{at(1, 3)}, committed: at(1, 2)},
		{name: "a checkpoint counts as committed", from: at(3, 9), feed: []LogPosition{position(3, 10, 3, 7)},
			pending: []LogPoint{at(3, 10)}, committed: at(3, 9)},
		{name: "the last leader's rounds stay", from: at(3, 9),
			feed:  []LogPosition{position(3, 10, 3, 9), position(3, 11, 3, 9), position(4, 10, 3, 9), position(4, 11, 4, 10)},
			given: []LogPoint{at(4, 10)}, pending: []LogPoint{at(4, 11)}, committed: at(4, 10)},
		{name: "a leader of a higher epoch may bring rounds of a lower one", from: at(3, 9),
			feed:    []LogPosition{position(5, 10, 3, 9), position(4, 10, 3, 9), position(6, 11, 4, 9)},
			pending: []LogPoint{at(4, 10), at(6, 11)}, committed: at(3, 9)},
		{name: "what was replaced is not committed by its index", from: at(3, 9),
			feed:  []LogPosition{position(3, 10, 3, 9), position(3, 11, 3, 9), position(4, 11, 3, 9), position(4, 12, 4, 11)},
			given: []LogPoint{at(3, 10), at(4, 11)}, pending: []LogPoint{at(4, 12)}, committed: at(4, 11)},
		{name: "a catch-up gives up what isn't committed", from: at(3, 9),
			feed:  []LogPosition{position(3, 10, 3, 9), position(3, 11, 3, 9), catchup(LogPoint{}, 10)},
			given: []LogPoint{at(3, 10), {}}, committed: at(3, 10)},
		{name: "the last round of a catch-up says where the log goes on", from: at(3, 9),
			feed:  []LogPosition{position(3, 10, 3, 9), catchup(LogPoint{}, 9), catchup(at(7, 50), 9), position(8, 51, 7, 50)},
			given: []LogPoint{{}, at(7, 50)}, pending: []LogPoint{at(8, 51)}, committed: at(7, 50)},
		{name: "a catch-up never goes back", from: at(3, 9), feed: []LogPosition{catchup(at(3, 4), 9), position(3, 10, 3, 9)},
			given: []LogPoint{at(3, 4)}, pending: []LogPoint{at(3, 10)}, committed: at(3, 9)},
		{name: "a gap", from: at(3, 9), feed: []LogPosition{position(3, 11, 3, 9)}, committed: at(3, 9), err: errLogGap},
		{name: "a gap behind what is pending", feed: []LogPosition{position(1, 1, 0, 0), position(1, 3, 1, 0)},
			pending: []LogPoint{at(1, 1)}, err: errLogGap},
		{name: "the place of a committed round", from: at(3, 9), feed: []LogPosition{position(4, 9, 3, 8)}, committed: at(3, 9),
			err: errLogCommitted},
		{name: "behind another epoch than it says", from: at(3, 9), feed: []LogPosition{position(4, 10, 2, 8)}, committed: at(3, 9),
			err: errLogEpoch},
		{name: "behind another pending one than it says", feed: []LogPosition{position(1, 1, 0, 0), position(1, 2, 1, 0),
			position(2, 2, 1, 0), position(3, 3, 1, 0)}, pending: []LogPoint{at(1, 1), at(2, 2)}, err: errLogEpoch},
		{name: "a catch-up that calls committed what isn't there", from: at(3, 9), feed: []LogPosition{catchup(LogPoint{}, 10)},
			committed: at(3, 9), err: errLogGap},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newGateRun(c.from)
			defer g.drop(0)
			var err error
			for i, p := range c.feed {
				if err = g.feed(pool, RoundNumber(i+1), p); err != nil && i+1 < len(c.feed) {
					t.Fatalf("round %d: %v", i, err)
				}
			}
			if !errors.Is(err, c.err) || c.err != nil && !errors.Is(err, ErrCorrupt) {
				t.Errorf("error is %v, want %v", err, c.err)
			}
			last := c.committed
			if n := len(c.pending); n > 0 {
				last = c.pending[n-1]
			}
			if !slices.Equal(g.given, c.given) || !slices.Equal(g.points(), c.pending) || g.handed != c.committed || g.last != last ||
				g.commit != c.committed.Index {
				t.Errorf("given %v, pending %v, committed %v (%d), last %v; want %v, %v, %v", g.given, g.points(), g.handed, g.commit,
					g.last, c.given, c.pending, c.committed)
			}
		})
	}
}

// TestGate_AgreesWithANaiveOne feeds random histories of leaders that replace one another, with catch-ups, to the gate and to
// a model.
func TestGate_AgreesWithANaiveOne(t *testing.T) {
	pool := testPool(t)
	for seed := range seeds(300) {
		rng := rand.New(rand.NewPCG(seed, 23))
		g := newGateRun(LogPoint{})
		var written []logRound
		epoch, commit := Epoch(1), LogIndex(0)
		for n := range RoundNumber(80) {
			l := replayLog(written)
			commit = max(commit, l.commit)
			p := LogPosition{Commit: commit}
			if x := rng.IntN(20); x == 0 {
				p.Flags = CatchupRound
				if rng.IntN(2) == 0 {
					p.Point = LogPoint{Epoch: epoch, Index: commit + LogIndex(1+rng.IntN(20))}
					commit = p.Point.Index
				}
			} else {
				index := l.last().Index + 1
				if x < 4 { // another leader, that has a part of what isn't committed
					epoch += Epoch(1 + rng.IntN(2))
					index = commit + 1 + LogIndex(rng.Uint64N(uint64(index-commit)))
				}
				p.Point = LogPoint{Epoch: epoch, Index: index}
				p.Prev = l.point(int(index - 1 - l.base.Index)).Epoch
				p.Commit = commit - LogIndex(rng.Uint64N(uint64(min(commit, 2)+1)))
			}
			if err := g.feed(pool, n+1, p); err != nil {
				t.Fatalf("seed %d, round %d: %+v: %v", seed, n, p, err)
			}
			written = append(written, logRound{pos: p})
			l = replayLog(written)
			var given, pending []LogPoint
			for _, r := range l.given {
				given = append(given, r.pos.Point)
			}
			for i, r := range l.log {
				if i < l.committed() {
					given = append(given, r.pos.Point)
				} else {
					pending = append(pending, r.pos.Point)
				}
			}
			if !slices.Equal(g.given, given) || !slices.Equal(g.points(), pending) || g.last != l.last() || g.handed != l.point(l.committed()) {
				t.Fatalf("seed %d, round %d: gate gave %v, holds %v, committed %v, last %v\nmodel gave %v, holds %v, committed %v, last %v", seed, n,
					g.given, g.points(), g.handed, g.last, given, pending, l.point(l.committed()), l.last())
			}
			if p.Flags == 0 && rng.IntN(3) == 0 { // the leader hears of followers
				commit = max(commit, p.Point.Index-LogIndex(rng.Uint64N(min(3, uint64(p.Point.Index)))))
			}
		}
		g.drop(0)
	}
}

// TestOpen_KeepsNodesOfAClusterAndOthersApart opens each journal as what it isn't.
func TestOpen_KeepsNodesOfAClusterAndOthersApart(t *testing.T) {
	pool := testPool(t)
	single := smallStore(pool)
	n := openNode(t, simdisk.New(simdisk.Options{}), single)
	n.publish(100, p0)
	d := n.d.Clone()
	n.close()
	clustered := single
	clustered.Replicated = true
	if _, err := tryNode(t, d, clustered); !errors.Is(err, errNoPosition) || !errors.Is(err, ErrCorrupt) {
		t.Errorf("a node on its own opened as one of a cluster: %v", err)
	}
	f, err := openFollower(t, simdisk.New(simdisk.Options{}), clustered, pool)
	if err != nil {
		t.Fatal(err)
	}
	f.write(position(1, 1, 0, 0), 100, false, p0)
	d = f.d.Clone()
	f.commitTo(1)
	f.close()
	if _, err := tryNode(t, d, single); !errors.Is(err, errPosition) || !strings.Contains(err.Error(), "cluster") {
		t.Errorf("a node of a cluster opened as one on its own: %v", err)
	}
}
