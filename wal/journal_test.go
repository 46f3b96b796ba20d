package wal

import (
	"encoding/hex"
	"errors"
	"path"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

func TestJournal_RecoversWhatWasFlushed(t *testing.T) {
	pool := testPool(t)
	d := simdisk.New(simdisk.Options{})
	j, rec, _ := openJournal(t, d, smallJournal(pool), 0)
	if !rec.Created || j.Epoch() != 1 || j.NextRound() != 2 {
		t.Fatalf("a new journal: %+v, epoch %d, next round %d", rec, j.Epoch(), j.NextRound())
	}
	w := newWriter(t, d, j)
	for range 5 {
		w.round(100, testStreams...)
	}
	w.close()
	if !slices.Equal(w.sealed, w.flushed) || len(w.flushed) != 20 {
		t.Fatalf("flushed %v\nsealed %v", w.flushed, w.sealed)
	}
	j, rec, list := openJournal(t, d.Crash(nil), smallJournal(pool), 0)
	if !slices.Equal(list, w.flushed) {
		t.Fatalf("recovered %v\nflushed %v", list, w.flushed)
	}
	if rec.Created || rec.Epoch != 1 || rec.Last != 6 || rec.Oldest != 1 || rec.Torn != nil || rec.MarkLost || j.Epoch() != 2 || j.NextRound() != 8 {
		t.Fatalf("recovery %+v, epoch %d, next round %d", rec, j.Epoch(), j.NextRound())
	}
	j.releaseMemory()
}

func TestJournal_ConsecutiveRecordsShareAnEntry(t *testing.T) {
	pool := testPool(t)
	d := simdisk.New(simdisk.Options{})
	j, _, _ := openJournal(t, d, smallJournal(pool), 0)
	var entries []Entry
	j.OnFlushed(func(r *Round, err error) {
		entries = slices.Clone(r.Entries)
		r.Release()
	})
	a, b := testStreams[0], testStreams[1]
	for _, x := range []struct {
		s   StreamID
		seq Sequence
	}{{a, 1}, {a, 2}, {a, 3}, {b, 1}, {a, 4}, {a, 6}} {
		if err := j.Append(x.s, &Record{Sequence: x.seq}); err != nil {
			t.Fatal(err)
		}
	}
	if records, bytes := j.Gathered(); records != 6 || bytes != roundHeaderLen+4*entryHeaderLen+6*RecordHeaderLen {
		t.Errorf("gathered %d records, %d bytes", records, bytes)
	}
	j.Seal()
	d.Poll()
	if len(entries) != 4 || entries[0].Count != 3 || entries[0].Last() != 3 || entries[2].First != 4 || entries[3].First != 6 {
		t.Errorf("entries %+v", entries)
	}
	j.releaseMemory()
}

func TestJournal_RoundsCountInOrderWhateverTheDeviceDoes(t *testing.T) {
	pool := testPool(t)
	for seed := uint64(1); seed < 20; seed++ {
		d := simdisk.New(simdisk.Options{Seed: seed})
		opts := smallJournal(pool)
		opts.MaxInFlight = 4
		j, _, _ := openJournal(t, d, opts, 0)
		w := newWriter(t, d, j)
		for range 4 {
			for j.InFlight() < 4 {
				if err := w.append(testStreams[0], 10); err != nil {
					t.Fatal(err)
				}
				j.Seal()
			}
			if err := w.append(testStreams[1], 10); err != nil {
				t.Fatal(err)
			}
			if j.CanSeal() || j.Seal() != 0 {
				t.Fatal("a fifth round was sealed")
			}
			d.Poll()
			j.Seal()
		}
		d.Poll()
		if !slices.Equal(w.flushed, w.sealed) {
			t.Fatalf("seed %d: flushed %v", seed, w.flushed)
		}
		w.close()
	}
}

func TestJournal_FullLeavesTheReserveToLedgerAndMetadata(t *testing.T) {
	pool := testPool(t)
	d := simdisk.New(simdisk.Options{})
	opts := smallJournal(pool)
	opts.MaxFiles = 2
	j, _, _ := openJournal(t, d, opts, 0)
	w := newWriter(t, d, j)
	fill := func(s StreamID) {
		t.Helper()
		for {
			err := w.append(s, 3000)
			if errors.Is(err, ErrJournalFull) {
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			w.round(0)
		}
	}
	fill(testStreams[0])
	used, capacity := j.Usage()
	if capacity != 2*60<<10 || capacity-used < capacity/4 || capacity-used > capacity/4+4096 {
		t.Fatalf("messages filled %d of %d bytes", used, capacity)
	}
	fill(testStreams[2])
	if used, capacity = j.Usage(); capacity != used {
		t.Fatalf("the ledger filled %d of %d bytes", used, capacity)
	}
	if err := w.append(testStreams[3], 10); !errors.Is(err, ErrJournalFull) {
		t.Fatalf("append to a journal without a free block: %v", err)
	}
	// A full journal opens; the START round gets a file of its own.
	j2, rec, list := openJournal(t, d.Crash(nil), opts, 0)
	if !slices.Equal(list, w.flushed) || rec.Last != j.Flushed() {
		t.Fatalf("recovered up to %d, flushed %d", rec.Last, j.Flushed())
	}
	j2.releaseMemory()
	// Trimming up to the newest round keeps the file that has it.
	j.Trim(j.Flushed())
	if used, _ := j.Usage(); used != 60<<10 {
		t.Fatalf("%d bytes are used after everything was trimmed, want one file", used)
	}
	w.round(10, testStreams...)
	if used, _ := j.Usage(); used != 4096 {
		t.Fatalf("%d bytes are used, want one round", used)
	}
	w.close()
}

// TestJournal_NewestDurableRoundIsNeverOverwritten: its file must stay while only rounds in flight follow.
func TestJournal_NewestDurableRoundIsNeverOverwritten(t *testing.T) {
	pool := testPool(t)
	d := simdisk.New(simdisk.Options{})
	opts := smallJournal(pool)
	opts.FileBytes, opts.MaxRoundBytes, opts.MaxFiles, opts.MaxInFlight = 16<<10, 12<<10, 2, 4
	j, _, _ := openJournal(t, d, opts, 0)
	w := newWriter(t, d, j)
	ledger := testStreams[2]
	w.round(7000, ledger) // fills the first file
	d.Hold(func(op *ring.Op) bool { return op.Kind == ring.WriteSync })
	if err := w.append(ledger, 11000); err != nil { // fills the second
		t.Fatal(err)
	}
	j.Seal()
	j.Trim(j.Flushed())
	if err := w.append(ledger, 10); !errors.Is(err, ErrJournalFull) {
		t.Fatalf("append while the newest durable round is in the only other file: %v", err)
	}
	d.Hold(nil)
	d.Poll()
	if err := w.append(ledger, 10); err != nil {
		t.Fatalf("append after the round behind it was flushed: %v", err)
	}
	w.close()
}

func TestJournal_RefusesWhatDoesNotFit(t *testing.T) {
	pool := testPool(t)
	d := simdisk.New(simdisk.Options{})
	j, _, _ := openJournal(t, d, smallJournal(pool), 0)
	w := newWriter(t, d, j)
	if err := w.append(testStreams[0], 60<<10); !errors.Is(err, ErrRecordTooLarge) {
		t.Errorf("a record as large as a file: %v", err)
	}
	if err := w.append(testStreams[0], MaxValueLen+1); !errors.Is(err, ErrRecordTooLarge) {
		t.Errorf("a value beyond the format's limit: %v", err)
	}
	// Larger than MaxRoundBytes by itself: a round of its own.
	if err := w.append(testStreams[0], 40<<10); err != nil {
		t.Fatal(err)
	}
	if err := w.append(testStreams[0], 1); !errors.Is(err, ErrRoundFull) {
		t.Errorf("a record behind one that is larger than a round: %v", err)
	}
	w.round(0)
	if err := w.append(testStreams[0], 10); err != nil {
		t.Fatal(err)
	}
	if err := w.append(testStreams[0], 16<<10); !errors.Is(err, ErrRoundFull) {
		t.Errorf("a record that makes the round too large: %v", err)
	}
	w.round(0)
	w.close()
	j, _, list := openJournal(t, d, smallJournal(pool), 0)
	if !slices.Equal(list, w.sealed) {
		t.Error("recovered something else")
	}
	j.releaseMemory()
}

func TestJournal_HoldsTheLargestValue(t *testing.T) {
	pool := testPool(t)
	d := simdisk.New(simdisk.Options{SectorBytes: 4096})
	opts := smallJournal(pool)
	opts.FileBytes, opts.MaxRoundBytes = 24<<20, 1<<20
	j, _, _ := openJournal(t, d, opts, 0)
	w := newWriter(t, d, j)
	w.round(10, testStreams[0])
	w.round(MaxValueLen, testStreams[0])
	w.round(10, testStreams[0])
	w.close()
	j, _, list := openJournal(t, d.Crash(nil), opts, 0)
	if !slices.Equal(list, w.flushed) || len(list) != 3 {
		t.Error("recovered something else")
	}
	j.releaseMemory()
}

func TestJournal_OutgrownArenaMovesTheRound(t *testing.T) {
	pool := testPool(t)
	d := simdisk.New(simdisk.Options{SectorBytes: 4096})
	opts := smallJournal(pool)
	opts.FileBytes, opts.MaxRoundBytes = 16<<20, 1<<20
	j, _, _ := openJournal(t, d, opts, 0)
	w := newWriter(t, d, j)
	for range 60 {
		for range 12 {
			if err := w.append(testStreams[0], 10000); err != nil {
				t.Fatal(err)
			}
		}
		w.round(0)
		if n := pool.InUse(); n > 2*arenaBytes+64<<10 {
			t.Fatalf("%d bytes in use though every round was released", n)
		}
	}
	w.close()
	j, _, list := openJournal(t, d, opts, 0)
	if !slices.Equal(list, w.flushed) {
		t.Error("recovered something else")
	}
	j.releaseMemory()
}

func TestJournal_PoolAtItsLimitRefusesTheAppend(t *testing.T) {
	pool := ring.NewPool(4 << 20)
	d := simdisk.New(simdisk.Options{})
	j, _, _ := openJournal(t, d, smallJournal(pool), 0)
	w := newWriter(t, d, j)
	j.dropArena()
	var held []*ring.Slab
	for s := pool.Get(4096); s != nil; s = pool.Get(4096) {
		held = append(held, s)
	}
	if err := w.append(testStreams[0], 10); !errors.Is(err, ErrNoMemory) {
		t.Fatalf("append without memory: %v", err)
	}
	for _, s := range held {
		s.Release()
	}
	w.round(10, testStreams[0])
	w.close()
	if n := pool.InUse(); n != 0 {
		t.Errorf("%d bytes of slabs were not released", n)
	}
}

func TestJournal_WriteErrorIsFinal(t *testing.T) {
	for _, errno := range []error{syscall.EIO, syscall.ENOSPC} {
		pool := testPool(t)
		d := simdisk.New(simdisk.Options{})
		opts := smallJournal(pool)
		opts.MaxInFlight = 4
		j, _, _ := openJournal(t, d, opts, 0)
		w := newWriter(t, d, j)
		w.round(10, testStreams[0])
		acked := slices.Clone(w.flushed)
		d.Inject(simdisk.Fault{Kind: ring.WriteSync, Skip: 1, Count: 1, Err: errno})
		for range 4 {
			if err := w.append(testStreams[0], 10); err != nil {
				t.Fatal(err)
			}
			j.Seal()
		}
		if err := w.append(testStreams[0], 10); err != nil {
			t.Fatal(err)
		}
		// They complete in any order; the one before the failed one still counts.
		d.Hold(func(op *ring.Op) bool { return op.Kind == ring.WriteSync && op.Off < j.curOff-3*4096 })
		d.Poll()
		var failed *FailedError
		if !errors.As(j.Err(), &failed) || !errors.Is(j.Err(), errno) || failed.Path != j.cur.path {
			t.Fatalf("Err() = %v", j.Err())
		}
		if len(w.flushed) != 1 || len(w.failed) != 0 {
			t.Fatalf("a round behind one in flight was answered: %v, %v", w.flushed, w.failed)
		}
		d.Hold(nil)
		d.Poll()
		if len(w.flushed) != 2 || len(w.failed) != 3 {
			t.Fatalf("%d rounds flushed, %d failed, want 2 and 3", len(w.flushed), len(w.failed))
		}
		for _, err := range w.failed {
			if !errors.Is(err, ErrFailed) || !errors.Is(err, errno) {
				t.Errorf("a round after the failed one got %v", err)
			}
		}
		if j.CanSeal() || j.Seal() != 0 || !errors.Is(w.append(testStreams[0], 1), ErrFailed) || j.Step(time.Hour) != Never {
			t.Error("a failed journal goes on")
		}
		if err := j.Close(d); !errors.Is(err, ErrFailed) {
			t.Errorf("Close of a failed journal: %v", err)
		}
		// A restart finds what was acknowledged, and perhaps more.
		j2, _, list := openJournal(t, d.Crash(nil), smallJournal(pool), 0)
		if len(list) < len(acked)+1 || !slices.Equal(list, w.sealed[:len(list)]) {
			t.Errorf("recovered %v", list)
		}
		j2.releaseMemory()
	}
}

func TestJournal_MarkIsWrittenWhenQuiet(t *testing.T) {
	pool := testPool(t)
	d := simdisk.New(simdisk.Options{})
	j, _, _ := openJournal(t, d, smallJournal(pool), 0)
	w := newWriter(t, d, j)
	w.round(10, testStreams[0])
	if next := j.Step(time.Second); next != time.Second+markQuiet || d.InFlight() != 0 {
		t.Fatalf("Step at 1 s: next %v, %d in flight", next, d.InFlight())
	}
	w.round(10, testStreams[0])
	if next := j.Step(time.Second + 9*time.Millisecond); next != time.Second+19*time.Millisecond {
		t.Fatalf("Step after another round: next %v", next)
	}
	if err := w.append(testStreams[0], 10); err != nil {
		t.Fatal(err)
	}
	if next := j.Step(time.Second + 18*time.Millisecond); next != time.Second+28*time.Millisecond {
		t.Fatalf("Step while a round gathers: next %v", next)
	}
	w.round(0)
	if next := j.Step(time.Second + 28*time.Millisecond); next != time.Second+38*time.Millisecond {
		t.Fatalf("Step after that round: next %v", next)
	}
	if next := j.Step(time.Second + 38*time.Millisecond); next != Never || d.InFlight() != 1 || j.Idle() {
		t.Fatalf("Step after 10 ms of quiet: next %v, %d in flight", next, d.InFlight())
	}
	d.Poll()
	if next := j.Step(time.Minute); next != Never || d.InFlight() != 0 || !j.Idle() {
		t.Fatalf("Step after the mark was written: next %v, %d in flight", next, d.InFlight())
	}
	w.round(10, testStreams[0])
	d.Inject(simdisk.Fault{Kind: ring.WriteSync, Path: markName, Err: syscall.EIO})
	j.Step(time.Minute)
	j.Step(time.Minute + markQuiet)
	d.Poll()
	if !errors.Is(j.Err(), syscall.EIO) {
		t.Fatalf("Err() after the mark could not be written: %v", j.Err())
	}
	_ = j.Close(d)
}

func TestJournal_GrowsOnDemandAndSurvivesAFullDisk(t *testing.T) {
	pool := testPool(t)
	d := simdisk.New(simdisk.Options{})
	opts := smallJournal(pool)
	opts.MaxFiles = 3
	j, _, _ := openJournal(t, d, opts, 0)
	w := newWriter(t, d, j)
	now := time.Duration(0)
	settle := func() time.Duration {
		for {
			next := j.Step(now)
			if d.Poll() == 0 {
				return next
			}
		}
	}
	for j.messageRoom() >= 120<<10/growDivisor {
		if j.Step(now); j.grow.maker != nil {
			t.Fatal("another file is made though there is room")
		}
		w.round(3000, testStreams[2])
	}
	d.SetCapacity(d.Used() + 10<<10)
	settle()
	now += markQuiet
	if next := settle(); next != growRetry {
		t.Fatalf("after a failed attempt Step wants to be called at %v, not %v", next, growRetry)
	}
	if j.Err() != nil {
		t.Fatalf("no space for a further file failed the journal: %v", j.Err())
	}
	if slices.ContainsFunc(d.Paths(), func(p string) bool { return strings.HasSuffix(p, tmpSuffix) }) {
		t.Fatalf("the attempt left something behind: %v", d.Paths())
	}
	w.round(10, testStreams[2])
	d.SetCapacity(0)
	now += growRetry
	settle()
	if _, capacity := j.Usage(); capacity != 3*60<<10 || len(j.free) != 1 {
		t.Fatalf("capacity %d, %d free files", capacity, len(j.free))
	}
	for len(j.free) > 0 || j.messageRoom() > 0 {
		w.round(10000, testStreams[2])
	}
	settle()
	if now += growRetry; settle() != Never {
		t.Error("a journal with all its files wants another")
	}
	w.close()
	j2, _, list := openJournal(t, d.Crash(nil), opts, 0)
	if !slices.Equal(list, w.flushed) {
		t.Error("recovered something else")
	}
	j2.releaseMemory()
}

// TestJournal_ZeroesAtItsPaceUnlessRoomRunsOut counts the zeros written per simulated second.
func TestJournal_ZeroesAtItsPaceUnlessRoomRunsOut(t *testing.T) {
	pool := testPool(t)
	d := simdisk.New(simdisk.Options{SectorBytes: 4096})
	opts := smallJournal(pool)
	opts.FileBytes, opts.MaxRoundBytes, opts.ZeroBytesPerSec, opts.MaxFiles = 16*zeroChunk, 64<<10, zeroChunk, 3
	j, _, _ := openJournal(t, d, opts, 0)
	w := newWriter(t, d, j)
	for j.messageRoom() >= 2*(16*zeroChunk-fileHeaderLen)/growDivisor {
		w.round(60<<10, testStreams[2])
	}
	now := time.Duration(0)
	run := func(until time.Duration) {
		for now <= until {
			next := j.Step(now)
			if d.Poll() == 0 {
				now = next
			}
		}
	}
	run(5 * time.Second)
	if j.grow.maker == nil {
		t.Fatal("no further file is being made")
	}
	if z := j.grow.maker.zeroed; z < 5*zeroChunk || z > 7*zeroChunk {
		t.Fatalf("%d chunks were zeroed in 5 s at a pace of one per second", z/zeroChunk)
	}
	for j.messageRoom() > 0 {
		w.round(60<<10, testStreams[2])
	}
	for range 100 {
		j.Step(now)
		d.Poll()
	}
	if j.files() != 3 {
		t.Fatalf("the room ran out and the file wasn't made in time")
	}
	w.close()
}

func TestJournal_AppendDoesNotAllocate(t *testing.T) {
	pool := ring.NewPool(64 << 20)
	d := simdisk.New(simdisk.Options{})
	opts := smallJournal(pool)
	opts.FileBytes = 1 << 20
	j, _, _ := openJournal(t, d, opts, 0)
	null := &nullDisk{}
	j.SetDisk(null)
	var held [8]*Round
	flushed := 0
	j.OnFlushed(func(r *Round, err error) {
		if err != nil {
			t.Fatal(err)
		}
		if old := held[flushed%len(held)]; old != nil {
			old.Release()
		}
		held[flushed%len(held)] = r
		flushed++
		j.Trim(r.Number)
	})
	rec := Record{Key: []byte("key"), Value: make([]byte, 100)}
	round := func() {
		for i := range 32 {
			rec.Sequence++
			if err := j.Append(testStreams[i%4], &rec); err != nil {
				t.Fatal(err)
			}
		}
		j.Seal()
		null.Poll()
		j.Step(time.Duration(flushed) * time.Second)
		null.Poll()
	}
	for range 1000 {
		round()
	}
	if n := testing.AllocsPerRun(2000, round); n != 0 {
		t.Errorf("%v allocations per round of 32 records", n)
	}
	for _, r := range held {
		r.Release()
	}
	j.releaseMemory()
	if n := pool.InUse(); n != 0 {
		t.Errorf("%d bytes of slabs were not released", n)
	}
}

// nullDisk completes everything and keeps nothing.
type nullDisk struct{ ops []*ring.Op }

func (d *nullDisk) Submit(op *ring.Op) { d.ops = append(d.ops, op) }

func (d *nullDisk) Poll() int {
	n := len(d.ops)
	for _, op := range d.ops {
		op.N, op.Err = len(op.Buf), nil
		op.Done(op)
	}
	d.ops = d.ops[:0]
	return n
}

func TestJournalOptions_ReportEveryProblem(t *testing.T) {
	_, err := JournalOptions{ID: -1, MinFiles: 1, FileBytes: 5000, MaxInFlight: 1000, MaxRoundBytes: 5}.withDefaults()
	for _, want := range []string{"no directory", "no buffer pool", "id -1", "5000 bytes", "1 to 8 files", "1000 rounds", "5 bytes"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not mention %q", err, want)
		}
	}
	o, err := JournalOptions{Dir: "d", Pool: ring.NewPool(1)}.withDefaults()
	if err != nil || o.FileBytes != DefaultFileBytes || o.MinFiles != 2 || o.MaxFiles != 8 || o.MaxInFlight != 1 {
		t.Errorf("%+v, %v", o, err)
	}
}

// The frozen bytes of a file header, a mark and a round: they are on disks.
const (
	goldenFileHeader = "4d4d4a4c" + "01" + "00" + "0007" + // magic, version, zero, journal
		"00000003" + "00000000" + "0000000000010000" + // file number, zero, file size
		"1122334455667788" + "0000000000000000" + // key, zero
		"c7c8b61a115f4e8a" // xxhash64 of the 40 bytes before
	goldenMark = "4d4d4a4d" + "01" + "00" + "0007" + // magic, version, zero, journal
		"00000005" + "00000000" + "0000000000000009" + // epoch, zero, generation
		"2122232425262728" + "3132333435363738" + "4142434445464748" + // round, its checksum, start's number
		"0000000000000000" + "967d50515432d18c" // zero, xxhash64 of the 56 bytes before
	goldenRound = "4d524e44" + "01" + "00" + "0007" + // marker, type, zero, journal
		"0000012f" + "00000002" + "0000000000000051" + // length, entries, round
		"2be5b24af33a140c" + "6162636465666768" + // checksum, the previous round's
		"4142434445464748" + "00000005" + "00000000" + // start's number, epoch, zero
		"0000000000000050" + "000000000000004f" + "6f49d3e0e10b4209" + // flushed, committed, header checksum
		// Entry: kind, zero, topic, partition, zero, records, length, first sequence.
		"01" + "00" + "0102" + "0304" + "0000" + "00000002" + "00000072" + "0000000000000008" +
		"00000036f0002586000100010000000100000000000000080000000000000000" +
		"000000000000000000000000000000000000000000000000" + "6b76" +
		"00000034a8a4a50c000000000000000000000000000000090000000000000000" +
		"000000000000000000000000000000000000000000000000" +
		"02" + "00" + "0000" + "0000" + "0000" + "00000001" + "0000003d" + "0000000000000001" +
		"0000003986bfd451000000000000000500000000000000010000000000000000" +
		"000000000000000000000000000000000000000000000000" + "6576656e74"
)

func TestJournalFormat_FrozenBytes(t *testing.T) {
	b := make([]byte, fileHeaderLen)
	f := &journalFile{number: 3, size: 64 << 10, key: 0x1122334455667788}
	putFileHeader(b, 7, f)
	checkGolden(t, "file header", b[:fileHeaderUsed], goldenFileHeader)
	if g, err := decodeFileHeader("f", b, 7, 3); err != nil || g.size != f.size || g.key != f.key || g.number != 3 {
		t.Errorf("decoded %+v, %v", g, err)
	}
	m := mark{generation: 9, round: 0x2122232425262728, epoch: 5, sum: 0x3132333435363738, nonce: 0x4142434445464748}
	b = make([]byte, markSlotLen)
	putMark(b, 7, &m)
	checkGolden(t, "mark", b[:markUsed], goldenMark)
	if g, ok, err := decodeMark("f", b, 7); err != nil || !ok || g != m {
		t.Errorf("decoded %+v, %v, %v", g, ok, err)
	}
	r := NewTestRound(testPool(t), 1, 1,
		TestRun{StreamID{Messages, 0x0102, 0x0304}, []Record{{Sequence: 8, Key: []byte("k"), Value: []byte("v")}, {Sequence: 9}}},
		TestRun{StreamID{Kind: Ledger}, []Record{{Sequence: 1, Value: []byte("event")}}})
	r.seal(roundSeal{journal: 7, number: 0x51, epoch: 5, nonce: 0x4142434445464748, prev: 0x6162636465666768,
		flushed: 0x50, committed: 0x4F, key: f.key})
	checkGolden(t, "round", r.buf[:r.size], goldenRound)
	r.Release()
}

func checkGolden(t *testing.T, what string, b []byte, want string) {
	t.Helper()
	if got := hex.EncodeToString(b); got != want {
		t.Errorf("%s: encoded\n%s\nwant\n%s", what, got, want)
	}
}

func TestJournal_RunsOnARealRing(t *testing.T) {
	// A ring is driven by one thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pool := testPool(t)
	rg, err := ring.New(ring.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer rg.Close()
	opts := smallJournal(pool)
	opts.Dir = path.Join(t.TempDir(), "data", "journal", "0")
	opts.FileBytes, opts.MaxRoundBytes, opts.MaxFiles = 4<<20, 1<<20, 3
	var sealed []got
	for start := range 3 {
		d := ringWaiter{rg}
		var list []got
		j, rec, err := recoverJournal(d, opts, replay{round: func(r *Round) error {
			list = append(list, roundRecords(r)...)
			return nil
		}})
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(list, sealed) || rec.Torn != nil || int(j.Epoch()) != start+1 {
			t.Fatalf("start %d: %+v, recovered %d records of %d", start, rec, len(list), len(sealed))
		}
		w := newWriter(t, nil, j)
		for _, g := range sealed {
			w.next[g.stream] = g.seq
		}
		w.sealed = sealed
		for i := range 200 {
			err := w.append(testStreams[i%4], i*100)
			for errors.Is(err, ErrJournalFull) { // until the next file is made
				j.Step(time.Duration(i) * time.Millisecond)
				if _, err := rg.Wait(time.Millisecond); err != nil {
					t.Fatal(err)
				}
				err = w.append(testStreams[i%4], i*100)
			}
			if err != nil {
				t.Fatal(err)
			}
			j.Seal()
			for j.InFlight() > 0 {
				if err := d.WaitOne(); err != nil {
					t.Fatal(err)
				}
				j.Step(time.Duration(i) * time.Millisecond)
			}
		}
		if err := j.Close(d); err != nil {
			t.Fatal(err)
		}
		sealed = w.sealed
	}
}

// ringWaiter is a ring that can be waited for.
type ringWaiter struct{ *ring.Ring }

func (r ringWaiter) WaitOne() error {
	_, err := r.Wait(-1)
	return err
}

func TestJournal_AppendPanicsForWhatRecoveryWouldRefuse(t *testing.T) {
	pool := testPool(t)
	d := simdisk.New(simdisk.Options{})
	j, _, _ := openJournal(t, d, smallJournal(pool), 0)
	defer j.releaseMemory()
	for name, x := range map[string]struct {
		s StreamID
		r Record
	}{
		"no sequence":       {testStreams[0], Record{}},
		"unknown flag":      {testStreams[0], Record{Sequence: 1, Flags: 1 << 9}},
		"replication flags": {testStreams[0], Record{Sequence: 1, ReplFlags: 4}},
		"no stream":         {StreamID{}, Record{Sequence: 1}},
		"ledger of a topic": {StreamID{Kind: Ledger, Topic: 1}, Record{Sequence: 1}},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			_ = j.Append(x.s, &x.r)
		}()
	}
	if records, _ := j.Gathered(); records != 0 {
		t.Errorf("%d records were gathered", records)
	}
}
