package wal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"path"
	"slices"
	"syscall"
	"testing"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

func journalFileAt(n uint32) string { return path.Join(testJournalDir, journalFileName(n)) }

// place is where a round lies.
type place struct {
	number RoundNumber
	path   string
	off    int64
	size   int64
}

// stored is a disk with a closed journal and what was written to it.
type stored struct {
	d      *simdisk.Disk
	rounds []place
	list   []got
}

// writeJournal writes rounds of these value sizes, one record each, and closes the journal.
func writeJournal(t testing.TB, opts JournalOptions, sizes ...int) *stored {
	t.Helper()
	s := &stored{d: simdisk.New(simdisk.Options{})}
	j, _, _ := openJournal(t, s.d, opts, 0)
	w := newWriter(t, s.d, j)
	j.OnFlushed(func(r *Round, err error) {
		if err != nil {
			t.Fatal(err)
		}
		s.rounds = append(s.rounds, place{r.Number, r.file.path, r.op.Off, int64(r.size)})
		s.list = append(s.list, roundRecords(r)...)
		r.Release()
	})
	for i, n := range sizes {
		w.round(n, testStreams[i%2])
	}
	w.close()
	return s
}

// wantCorrupt checks that recovery refuses the disk and says where.
func wantCorrupt(t testing.TB, d *simdisk.Disk, opts JournalOptions, from RoundNumber, path string, off int64, round RoundNumber) {
	t.Helper()
	before := d.Clone()
	_, _, _, err := tryJournal(d, opts, from)
	var corrupt *CorruptionError
	if !errors.As(err, &corrupt) {
		t.Fatalf("recovery: %v, want a CorruptionError", err)
	}
	if corrupt.Path != path || off >= 0 && corrupt.Offset != off || corrupt.Round != round {
		t.Fatalf("%v\nwant %s at offset %d, round %d", err, path, off, round)
	}
	if !d.Equal(before) {
		t.Fatal("a recovery that found corruption changed the disk")
	}
}

func TestRecoverJournal_CutsATornTailAtEverySector(t *testing.T) {
	pool := testPool(t)
	opts := smallJournal(pool)
	d := simdisk.New(simdisk.Options{})
	j, _, _ := openJournal(t, d, opts, 0)
	w := newWriter(t, d, j)
	w.round(100, testStreams...)
	d.Hold(func(op *ring.Op) bool { return op.Kind == ring.WriteSync })
	if err := w.append(testStreams[0], 5000); err != nil {
		t.Fatal(err)
	}
	j.Seal()
	pending := d.Pending()
	whole := 0
	for k := range len(pending) + 1 {
		for _, fate := range []simdisk.Fate{simdisk.Drop, simdisk.Torn} {
			left := d.Crash(func(i int, _ simdisk.Item) simdisk.Fate {
				if i == k {
					return fate
				}
				return simdisk.Keep
			})
			j2, rec, list := openJournal(t, left, smallJournal(pool), 0)
			if slices.Equal(list, w.sealed) {
				whole++
			} else if !slices.Equal(list, w.flushed) {
				t.Fatalf("sector %d lost: recovered %v", k, list)
			} else if k > 0 && rec.Torn == nil {
				t.Errorf("sector %d lost: no torn tail was reported", k)
			}
			j2.releaseMemory()
		}
	}
	if whole < 2 {
		t.Errorf("the whole round was recovered %d times, at least when no sector was lost it must be", whole)
	}
	d.Hold(nil)
	d.Poll()
	w.close()
}

func TestRecoverJournal_RefusesAFlippedBitInADurableRound(t *testing.T) {
	pool := testPool(t)
	s := writeJournal(t, smallJournal(pool), 300, 300, 300, 300)
	// The last round is known durable by the mark only, the others by the rounds behind them too.
	for _, r := range s.rounds {
		for off := range r.size {
			if off > roundHeaderLen+entryHeaderLen+RecordHeaderLen && off%37 != 0 {
				continue
			}
			d := s.d.Clone()
			d.Damage(r.path, r.off+off, 1<<(off%8))
			wantCorrupt(t, d, smallJournal(pool), 0, r.path, r.off, r.number)
		}
		// The padding carries nothing.
		d := s.d.Clone()
		d.Damage(r.path, r.off+r.size, 1)
		j, _, list := openJournal(t, d, smallJournal(pool), 0)
		if !slices.Equal(list, s.list) {
			t.Fatalf("padding of round %d damaged: recovered %v", r.number, list)
		}
		j.releaseMemory()
	}
}

func TestRecoverJournal_WithoutMarkTrustsLaterRounds(t *testing.T) {
	pool := testPool(t)
	s := writeJournal(t, smallJournal(pool), 300, 300, 300)
	s.d.RemoveFile(path.Join(testJournalDir, markName))
	n := len(s.rounds)
	for i, r := range s.rounds {
		d := s.d.Clone()
		d.Damage(r.path, r.off+100, 1)
		if i < n-1 {
			wantCorrupt(t, withMark(d), smallJournal(pool), 0, r.path, r.off, r.number)
			continue
		}
		// Nothing says that the last one was ever durable.
		j, rec, list := openJournal(t, d, smallJournal(pool), 0)
		if !rec.MarkLost || rec.Torn == nil || !slices.Equal(list, s.list[:n-1]) {
			t.Fatalf("%+v, recovered %v", rec, list)
		}
		j.releaseMemory()
		j, rec, _ = openJournal(t, d, smallJournal(pool), 0)
		if rec.MarkLost {
			t.Error("the mark file was not made anew")
		}
		j.releaseMemory()
	}
}

// withMark gives a disk an empty mark file, as recovery would before it finds the corruption.
func withMark(d *simdisk.Disk) *simdisk.Disk {
	op := ring.Op{Kind: ring.Open, Path: path.Join(testJournalDir, markName), Flags: ring.Create, Done: func(*ring.Op) {}}
	d.Submit(&op)
	d.Poll()
	d.WriteFile(op.Path, make([]byte, markSlots*markSlotLen))
	return d
}

func TestRecoverJournal_RefusesAZeroedTail(t *testing.T) {
	pool := testPool(t)
	s := writeJournal(t, smallJournal(pool), 300, 300, 300)
	for _, r := range append([]place{{1, s.rounds[0].path, fileHeaderLen, 0}}, s.rounds...) {
		d := s.d.Clone()
		b := d.ReadFile(r.path)
		clear(b[r.off:])
		d.WriteFile(r.path, b)
		wantCorrupt(t, d, smallJournal(pool), 0, r.path, r.off, r.number)
	}
}

func TestRecoverJournal_RefusesShortAndMissingFiles(t *testing.T) {
	pool := testPool(t)
	// Three files: 12 KiB rounds, five to a file.
	sizes := slices.Repeat([]int{11 << 10}, 12)
	opts := func() JournalOptions {
		o := smallJournal(pool)
		o.MinFiles = 4
		return o
	}
	s := writeJournal(t, opts(), sizes...)
	if last := s.rounds[len(s.rounds)-1].path; last != journalFileAt(3) {
		t.Fatalf("the last round is in %s", last)
	}
	for n := uint32(1); n <= 3; n++ {
		for _, size := range []int{0, 100, fileHeaderLen, 20000, 64<<10 - 1} {
			d := s.d.Clone()
			d.WriteFile(journalFileAt(n), d.ReadFile(journalFileAt(n))[:size])
			_, _, _, err := tryJournal(d, opts(), 0)
			var corrupt *CorruptionError
			if !errors.As(err, &corrupt) || corrupt.Path != journalFileAt(n) {
				t.Fatalf("file %d cut to %d bytes: %v", n, size, err)
			}
		}
		d := s.d.Clone()
		d.RemoveFile(journalFileAt(n))
		// Without the first file the journal starts later, which only the caller can judge.
		j, rec, list, err := tryJournal(d, opts(), 0)
		if n == 1 {
			if err != nil || rec.Oldest == 1 || len(list) == 0 || list[0].round != rec.Oldest {
				t.Fatalf("without file 1: %+v, %v", rec, err)
			}
			j.releaseMemory()
			d = s.d.Clone()
			d.RemoveFile(journalFileAt(1))
			wantCorrupt(t, d, opts(), 1, journalFileAt(2), fileHeaderLen, 2)
			continue
		}
		if !errors.Is(err, ErrCorrupt) {
			t.Fatalf("without file %d: %v", n, err)
		}
	}
}

func TestRecoverJournal_RefusesADamagedFileHeader(t *testing.T) {
	pool := testPool(t)
	s := writeJournal(t, smallJournal(pool), 300)
	for _, n := range []uint32{1, 2} {
		for off := range int64(fileHeaderUsed + 2) {
			d := s.d.Clone()
			d.Damage(journalFileAt(n), off, 0x80)
			_, _, _, err := tryJournal(d, smallJournal(pool), 0)
			var corrupt *CorruptionError
			switch {
			case errors.As(err, &corrupt) && corrupt.Path == journalFileAt(n):
			default:
				t.Fatalf("file %d, header byte %d changed: %v", n, off, err)
			}
		}
	}
	other := smallJournal(pool)
	other.ID = 3
	if _, _, _, err := tryJournal(s.d.Clone(), other, 0); !errors.Is(err, ErrCorrupt) {
		t.Fatalf("the files of journal 0 opened as journal 3: %v", err)
	}
}

func TestRecoverJournal_RefusesATooNewMark(t *testing.T) {
	pool := testPool(t)
	s := writeJournal(t, smallJournal(pool), 300)
	m := path.Join(testJournalDir, markName)
	b := s.d.ReadFile(m)
	slot := b[markSlotLen:]
	if string(slot[:4]) != markMagic {
		slot = b
	}
	slot[4] = markVersion + 1
	resumMark(slot)
	s.d.WriteFile(m, b)
	_, _, _, err := tryJournal(s.d, smallJournal(pool), 0)
	var version *VersionError
	if !errors.As(err, &version) || version.Path != m || version.Version != markVersion+1 {
		t.Fatalf("recovery: %v, want a VersionError for %s", err, m)
	}
}

func TestRecoverJournal_OneMarkSlotIsEnough(t *testing.T) {
	pool := testPool(t)
	s := writeJournal(t, smallJournal(pool), 300)
	m := path.Join(testJournalDir, markName)
	// The next mark is torn: its slot is unreadable, the other still counts.
	newest := int64(0)
	if b := s.d.ReadFile(m); string(b[:4]) != markMagic || string(b[markSlotLen:][:4]) == markMagic &&
		binary.BigEndian.Uint64(b[16:]) < binary.BigEndian.Uint64(b[markSlotLen+16:]) {
		newest = markSlotLen
	}
	d := s.d.Clone()
	d.Damage(m, newest^markSlotLen+20, 1)
	last := s.rounds[len(s.rounds)-1]
	d.Damage(last.path, last.off+90, 1)
	wantCorrupt(t, d, smallJournal(pool), 0, last.path, last.off, last.number)

	d = s.d.Clone()
	d.Damage(m, 20, 1)
	d.Damage(m, markSlotLen+20, 1)
	j, rec, list := openJournal(t, d, smallJournal(pool), 0)
	if !rec.MarkLost || !slices.Equal(list, s.list) {
		t.Fatalf("%+v, recovered %v", rec, list)
	}
	j.releaseMemory()
}

// TestRecoverJournal_LostMarkLeavesTheOneBefore: the power goes while a mark is written and takes that slot along, and
// the round that the mark before named turns out to be damaged.
func TestRecoverJournal_LostMarkLeavesTheOneBefore(t *testing.T) {
	pool := testPool(t)
	d := simdisk.New(simdisk.Options{})
	j, _, _ := openJournal(t, d, smallJournal(pool), 0)
	w := newWriter(t, d, j)
	for i := range 4 {
		w.round(10, testStreams[0])
		damaged, off := j.Flushed(), j.curOff-4096
		j.writeMark()
		d.Poll()
		w.round(10, testStreams[0])
		j.writeMark()
		left := d.Crash(nil)
		left.Damage(path.Join(testJournalDir, markName), j.mark.op.Off+20, 1)
		// Without the round that says so too.
		left.Damage(j.cur.path, off+100, 1)
		left.Damage(j.cur.path, j.curOff-4096, 1)
		_, _, _, err := tryJournal(left, smallJournal(pool), 0)
		var corrupt *CorruptionError
		if !errors.As(err, &corrupt) || corrupt.Round != damaged {
			t.Fatalf("mark %d lost: %v, want round %d to be corrupt", i, err, damaged)
		}
		d.Poll()
	}
	w.close()
}

// TestRecoverJournal_RoundMustBeTheOneThatTheMarkNames: the mark's round is there, whole, but not the one flushed then.
func TestRecoverJournal_RoundMustBeTheOneThatTheMarkNames(t *testing.T) {
	pool := testPool(t)
	s := writeJournal(t, smallJournal(pool), 300)
	p := path.Join(testJournalDir, markName)
	b := s.d.ReadFile(p)
	for slot := range markSlots {
		b := b[slot*markSlotLen:][:markSlotLen]
		if m, ok, _ := decodeMark(p, b, 0); ok {
			m.sum++
			putMark(b, 0, &m)
		}
	}
	s.d.WriteFile(p, b)
	last := s.rounds[len(s.rounds)-1]
	wantCorrupt(t, s.d, smallJournal(pool), 0, last.path, last.off, last.number)
}

func TestTail_FollowsOnlyTheNextRoundOfTheChain(t *testing.T) {
	at := tail{number: 7, sum: 70, nonce: 3, epoch: 2}
	tests := []struct {
		name string
		h    roundHeader
		ok   bool
	}{
		{"next", roundHeader{number: 8, prev: 70, nonce: 3, epoch: 2}, true},
		{"start", roundHeader{number: 8, prev: 70, nonce: 4, epoch: 3, start: true}, true},
		{"start of a much later epoch", roundHeader{number: 8, prev: 70, nonce: 4, epoch: 30, start: true}, true},
		{"same number", roundHeader{number: 7, prev: 70, nonce: 3, epoch: 2}, false},
		{"one too far", roundHeader{number: 9, prev: 70, nonce: 3, epoch: 2}, false},
		{"other chain", roundHeader{number: 8, prev: 71, nonce: 3, epoch: 2}, false},
		{"other start", roundHeader{number: 8, prev: 70, nonce: 4, epoch: 2}, false},
		{"older epoch", roundHeader{number: 8, prev: 70, nonce: 3, epoch: 1}, false},
		{"later epoch without a start", roundHeader{number: 8, prev: 70, nonce: 3, epoch: 3}, false},
		{"start of the same epoch", roundHeader{number: 8, prev: 70, nonce: 4, epoch: 2, start: true}, false},
	}
	for _, tt := range tests {
		if err := at.follows(&tt.h); (err == nil) != tt.ok {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

func TestRoundHeader_EveryBitIsChecked(t *testing.T) {
	r := NewTestRound(testPool(t), 1, 5, TestRun{testStreams[0], []Record{{Sequence: 8, Value: []byte("v")}}})
	defer r.Release()
	if _, err := peekRoundHeader(r.buf, 0, 0); err != nil {
		t.Fatal(err)
	}
	for bit := range roundHeaderLen * 8 {
		if bit/8 >= offRoundSum && bit/8 < offRoundPrev {
			continue // the round's own checksum
		}
		b := bytes.Clone(r.buf)
		b[bit/8] ^= 1 << (bit % 8)
		if _, err := peekRoundHeader(b, 0, 0); err == nil {
			t.Errorf("bit %d of the header was flipped and it still passes", bit)
		}
	}
}

func TestRecoverJournal_KnowsWhatTheCheckpointTableKnows(t *testing.T) {
	pool := testPool(t)
	s := writeJournal(t, smallJournal(pool), 300, 300, 300)
	for from := RoundNumber(0); from <= 4; from++ {
		j, rec, list := openJournal(t, s.d.Clone(), smallJournal(pool), from)
		if !slices.Equal(list, above(s.list, from)) || rec.Last != 4 {
			t.Errorf("from %d: %+v, recovered %v", from, rec, list)
		}
		j.releaseMemory()
	}
	wantCorrupt(t, s.d.Clone(), smallJournal(pool), 5, s.rounds[2].path, s.rounds[2].off+4096, 5)
	d := simdisk.New(simdisk.Options{})
	if _, _, _, err := tryJournal(d, smallJournal(pool), 7); !errors.Is(err, ErrCorrupt) {
		t.Errorf("an empty journal, though round 7 was known: %v", err)
	}
}

func TestRecoverJournal_EmptyDirectoryWithAMarkIsCorruption(t *testing.T) {
	pool := testPool(t)
	s := writeJournal(t, smallJournal(pool), 300)
	for n := uint32(1); n <= 2; n++ {
		s.d.RemoveFile(journalFileAt(n))
	}
	wantCorrupt(t, s.d, smallJournal(pool), 0, testJournalDir, 0, 1)
}

// TestRecoverJournal_ForgedRoundInAValueDoesNotPass: a producer who knows everything but the file's key puts rounds into
// a value, where they come to lie on block boundaries behind a torn tail and in a recycled file.
func TestRecoverJournal_ForgedRoundInAValueDoesNotPass(t *testing.T) {
	pool := testPool(t)
	opts := smallJournal(pool)
	d := simdisk.New(simdisk.Options{})
	j, _, _ := openJournal(t, d, opts, 0)
	w := newWriter(t, d, j)
	w.round(100, testStreams[0])
	keep := slices.Clone(w.flushed)
	key := j.cur.key

	// The forged round would follow, and says that everything before it was durable.
	forge := func(key uint64, number RoundNumber) []byte {
		r := NewTestRound(pool, j.epoch, number, TestRun{testStreams[0], []Record{{Sequence: 2, Value: []byte("forged")}}})
		defer r.Release()
		r.seal(roundSeal{number: number, epoch: j.epoch, nonce: j.nonce, prev: j.lastSum, flushed: number - 1, key: key})
		return bytes.Clone(r.buf[:r.padded])
	}
	victim := func(key uint64) *simdisk.Disk {
		// The value starts so that the forged bytes are block aligned.
		head := roundHeaderLen + entryHeaderLen + RecordHeaderLen
		value := make([]byte, blockAlign(head)-head)
		value = append(value, forge(key, j.next)...)
		value = append(value, forge(key, j.next+1)...)
		d2 := d.Clone()
		b := d2.ReadFile(j.cur.path)
		r := NewTestRound(pool, j.epoch, j.next, TestRun{testStreams[0], []Record{{Sequence: 2, Value: value}}})
		defer r.Release()
		r.seal(roundSeal{number: j.next, epoch: j.epoch, nonce: j.nonce, prev: j.lastSum, flushed: j.flushed, key: j.cur.key})
		copy(b[j.curOff:], r.buf[:r.padded])
		b[j.curOff+90] ^= 1 // torn
		d2.WriteFile(j.cur.path, b)
		return d2
	}
	j2, _, list := openJournal(t, victim(key^1), smallJournal(pool), 0)
	if !slices.Equal(list, keep) {
		t.Fatalf("recovered %v, want %v", list, keep)
	}
	j2.releaseMemory()
	// With the key the forgery would be taken for proof: it is the key that keeps it out.
	if _, _, _, err := tryJournal(victim(key), smallJournal(pool), 0); !errors.Is(err, ErrCorrupt) {
		t.Fatalf("recovery: %v", err)
	}
	w.close()
}

// TestRecoverJournal_RoundsOfACutEpochProveNothing: behind the tail lie whole rounds of an older epoch with higher numbers,
// as they do after a cut that a later start made.
func TestRecoverJournal_RoundsOfACutEpochProveNothing(t *testing.T) {
	pool := testPool(t)
	s := writeJournal(t, smallJournal(pool), 300)
	j, _, _ := openJournal(t, s.d, smallJournal(pool), 0) // epoch 2
	w := newWriter(t, s.d, j)
	w.round(10, testStreams[0])
	b := s.d.ReadFile(j.cur.path)
	for i, epoch := range []Epoch{1, 2, 3} {
		r := NewTestRound(pool, epoch, j.next+9, TestRun{testStreams[0], []Record{{Sequence: 1}}})
		r.seal(roundSeal{number: j.next + 9, epoch: epoch, nonce: j.nonce + 1, flushed: j.next + 8, key: j.cur.key})
		d := s.d.Clone()
		damaged := bytes.Clone(b)
		copy(damaged[j.curOff+8192:], r.buf[:r.padded])
		d.WriteFile(j.cur.path, damaged)
		r.Release()
		j2, _, _, err := tryJournal(d, smallJournal(pool), 0)
		if wantErr := i == 2; errors.Is(err, ErrCorrupt) != wantErr {
			t.Fatalf("a round of epoch %d behind the tail of epoch 2: %v", epoch, err)
		}
		if err == nil {
			j2.releaseMemory()
		}
	}
	w.close()
}

func TestRecoverJournal_ReadErrorsAreNoTornTail(t *testing.T) {
	pool := testPool(t)
	s := writeJournal(t, smallJournal(pool), 300, 300)
	before := s.d.Clone()
	for skip := range 20 {
		d := s.d.Clone()
		d.Inject(simdisk.Fault{Kind: ring.Read, Skip: skip, Count: 1, Err: syscall.EIO})
		j, _, list, err := tryJournal(d, smallJournal(pool), 0)
		if err == nil {
			if !slices.Equal(list, s.list) {
				t.Fatalf("read %d failed: recovered %v", skip, list)
			}
			j.releaseMemory()
			continue
		}
		if !errors.Is(err, syscall.EIO) || !d.Equal(before) {
			t.Fatalf("read %d failed: %v", skip, err)
		}
	}
}

func TestRecoverJournal_MisdirectedAndStaleReadsAreCaught(t *testing.T) {
	pool := testPool(t)
	opts := smallJournal(pool)
	d := simdisk.New(simdisk.Options{})
	j, _, _ := openJournal(t, d, opts, 0)
	w := newWriter(t, d, j)
	old := d.Clone()
	for range 5 {
		w.round(3000, testStreams[0])
	}
	w.close()
	for name, f := range map[string]simdisk.Fault{
		"misdirected by a block": {Misdirect: 4096},
		"misdirected backwards":  {Misdirect: -4096},
		"stale":                  {Stale: old},
	} {
		f.Kind, f.Path = ring.Read, "journal-000001.mmj"
		c := d.Clone()
		c.Inject(f)
		if _, _, _, err := tryJournal(c, smallJournal(pool), 0); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s read: %v, want corruption", name, err)
		}
	}
	// A read that returns less than asked for is only continued.
	c := d.Clone()
	c.Inject(simdisk.Fault{Kind: ring.Read, Short: 8192})
	j, _, list := openJournal(t, c, smallJournal(pool), 0)
	if !slices.Equal(list, w.flushed) {
		t.Errorf("short reads: recovered %v", list)
	}
	j.releaseMemory()
}

// FuzzRecoverJournal: whatever a file's bytes are, recovery neither panics nor delivers anything but rounds that were
// written, in order from the first.
func FuzzRecoverJournal(f *testing.F) {
	pool := ring.NewPool(64 << 20)
	opts := func() JournalOptions {
		o := smallJournal(pool)
		o.FileBytes, o.MinFiles, o.MaxRoundBytes = 20<<10, 3, 8<<10
		return o
	}
	s := writeJournal(f, opts(), 10, 3000, 10, 10, 10, 4000)
	f.Add(uint16(4096), []byte("MRND"), uint16(20<<10-1), false)
	f.Add(uint16(0), []byte{0}, uint16(4096), true)
	f.Add(uint16(12<<10), make([]byte, 64), uint16(0), false)
	f.Fuzz(func(t *testing.T, at uint16, patch []byte, cut uint16, second bool) {
		d := s.d.Clone()
		p := journalFileAt(1)
		if second {
			p = journalFileAt(2)
		}
		b := d.ReadFile(p)
		if int(at) < len(b) {
			copy(b[at:], patch)
		}
		if cut != 0 && int(cut) < len(b) {
			clear(b[cut:])
		}
		d.WriteFile(p, b)
		j, _, list, err := tryJournal(d, opts(), 0)
		if err != nil {
			var version *VersionError
			if !errors.Is(err, ErrCorrupt) && !errors.As(err, &version) {
				t.Fatal(err)
			}
			return
		}
		if len(list) > len(s.list) || !slices.Equal(list, s.list[:len(list)]) {
			// Only a lost first file may make the journal start later.
			if i := len(s.list) - len(list); i < 0 || !slices.Equal(list, s.list[i:]) {
				t.Fatalf("recovered %v", list)
			}
		}
		j.releaseMemory()
	})
}
