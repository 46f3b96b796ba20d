package wal

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

const testStatePath = testDataDir + "/" + replicaStateFile

var frozenReplicaState = ReplicaState{
	Cluster: [16]byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, Node: 0x0102, Logs: 0x0304,
	Promised: 0x05060708, Candidate: 0x090a, Forming: true, Suspect: true,
}

var frozenCatchupState = CatchupState{
	Leader: 0x0102, Epoch: 3, From: LogPoint{Epoch: 4, Index: 5}, Target: LogPoint{Epoch: 6, Index: 7}, BegunMs: 8, Streams: 9,
	StreamsDone: 10, Records: 11, Bytes: 12, Metadata: true, Windows: true,
}

// TestState_BytesNeverChange holds both slot files against bytes that were frozen when the formats were.
func TestState_BytesNeverChange(t *testing.T) {
	var replica, catchup [stateUsed]byte
	frozenReplicaState.encode(&replica)
	replicaFormat.seal(replica[:], 17)
	frozenCatchupState.encode(&catchup)
	catchupFormat.seal(catchup[:], 18)
	for name, c := range map[string]struct {
		got  []byte
		want string
	}{
		"MMRS": {replica[:], "4d4d5253010501020000000000000011" + "0102030405060708090a0b0c0d0e0f10" + "05060708090a0304" +
			strings.Repeat("00", 80) + "0ec5c3e398cace10"},
		"MMCUP": {catchup[:], "4d4d43555001050000000000000000120102000000000003" + "0000000400000000" + "0000000000000005" +
			"0000000600000000" + "0000000000000007" + "0000000000000008" + "000000090000000a" + "000000000000000b" +
			"000000000000000c" + strings.Repeat("00", 32) + "13c94fb60e950ca1"},
	} {
		if got := hex.EncodeToString(c.got); got != c.want {
			t.Errorf("%s is\n%s, frozen\n%s", name, got, c.want)
		}
	}
	if s, err := decodeReplicaState(replica[:]); err != nil || s != frozenReplicaState {
		t.Errorf("%+v, %v", s, err)
	}
	if s, err := decodeCatchupState(catchup[:]); err != nil || s != frozenCatchupState {
		t.Errorf("%+v, %v", s, err)
	}
}

func openState(t testing.TB, d *simdisk.Disk, pool *ring.Pool) *ReplicaFile {
	t.Helper()
	f, err := OpenReplicaFile(d, pool, testDataDir, 3)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// TestReplicaFile_SurvivesPowerCutsAtEveryStep makes the file and saves states, some while another is on its way, and
// recovers from every disk that a power cut may leave at any moment: never anything older than what was acknowledged, never
// anything that wasn't asked for.
func TestReplicaFile_SurvivesPowerCutsAtEveryStep(t *testing.T) {
	pool := testPool(t)
	d := simdisk.New(simdisk.Options{})
	asked, acked, cuts := Epoch(0), Epoch(0), 0
	check := func(left *simdisk.Disk, what string) {
		t.Helper()
		cuts++
		f := openState(t, left, pool)
		if got := f.State().Promised; got < acked || got > asked {
			t.Fatalf("%s: promised is %d, acknowledged was %d, asked for %d", what, got, acked, asked)
		}
		// What is read once stays, whatever is lost after that.
		again := openState(t, left.Crash(nil), pool)
		if again.State() != f.State() {
			t.Fatalf("%s: cut again it is %+v, was %+v", what, again.State(), f.State())
		}
		// A save right after the recovery may be cut short, too.
		next := f.State()
		next.Promised += 1000
		f.Save(next, nil)
		next.Node = 3
		torn := openState(t, left.Crash(func(int, simdisk.Item) simdisk.Fate { return simdisk.Torn }), pool)
		if got := torn.State().Promised; got != f.State().Promised && got != f.State().Promised-1000 {
			t.Fatalf("%s: behind a torn save it is %d", what, got)
		}
		for !f.Idle() {
			if err := left.WaitOne(); err != nil {
				t.Fatal(err)
			}
		}
		// One that was acknowledged is there, also where the start before was killed before the name was durable.
		last := openState(t, left.Crash(nil), pool)
		if last.State() != next {
			t.Fatalf("%s: what was saved after it is %+v, not %+v", what, last.State(), next)
		}
		for _, file := range []*ReplicaFile{f, again, torn, last} {
			if err := file.Close(file.f.disk.(*simdisk.Disk)); err != nil {
				t.Fatal(err)
			}
		}
	}
	steps := 0
	d.OnStep(func(*ring.Op) {
		steps++
		pending := d.Pending()
		for keep := range simdisk.Subsets(len(pending), 10, 0, 0) {
			check(d.Crash(func(i int, _ simdisk.Item) simdisk.Fate {
				if keep(i) {
					return simdisk.Keep
				}
				return simdisk.Drop
			}), fmt.Sprintf("step %d", steps))
		}
		check(d.Crash(func(int, simdisk.Item) simdisk.Fate { return simdisk.Torn }), fmt.Sprintf("step %d, torn", steps))
		check(d.Clone(), fmt.Sprintf("step %d, killed", steps))
	})
	for range 2 {
		f := openState(t, d, pool)
		for round := range 6 {
			for range round%3 + 1 {
				asked++
				promised := asked
				s := f.State()
				s.Promised = promised
				f.Save(s, func(err error) {
					if err != nil {
						t.Fatal(err)
					}
					acked = max(acked, promised)
				})
			}
			for !f.Idle() {
				if err := d.WaitOne(); err != nil {
					t.Fatal(err)
				}
			}
			if acked != asked {
				t.Fatalf("asked for %d, acknowledged %d", asked, acked)
			}
		}
		if err := f.Close(d); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d steps, %d power cuts", steps, cuts)
}

// TestReplicaFile_EitherSlotIsEnough damages one slot at a time: what was acknowledged is in the other one.
func TestReplicaFile_EitherSlotIsEnough(t *testing.T) {
	pool := testPool(t)
	d := simdisk.New(simdisk.Options{})
	f := openState(t, d, pool)
	want := frozenReplicaState
	want.Node = 3
	if err := f.SaveWait(d, want); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(d); err != nil {
		t.Fatal(err)
	}
	for slot := range int64(stateSlots) {
		for _, at := range []int64{0, 4, 5, 8, 33, 119, 127, 128, stateSlotLen - 1} {
			left := d.Clone()
			left.Damage(testStatePath, slot*stateSlotLen+at, 0x41)
			f := openState(t, left, pool)
			if f.State() != want {
				t.Errorf("slot %d damaged at %d: %+v", slot, at, f.State())
			}
			if err := f.Close(left); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(left.ReadFile(testStatePath), d.ReadFile(testStatePath)) {
				t.Errorf("slot %d damaged at %d: it was not written again", slot, at)
			}
			left.Damage(testStatePath, 20, 1)
			left.Damage(testStatePath, stateSlotLen+20, 1)
			if _, err := OpenReplicaFile(left, pool, testDataDir, 3); !errors.Is(err, ErrCorrupt) || !errors.Is(err, errStateLost) {
				t.Errorf("both slots damaged: %v", err)
			}
		}
	}
}

// TestReplicaFile_ALyingReadTakesNothingBack has one read return what the disk held earlier, or nothing: what this node has
// promised counts.
func TestReplicaFile_ALyingReadTakesNothingBack(t *testing.T) {
	pool := testPool(t)
	d := simdisk.New(simdisk.Options{})
	f := openState(t, d, pool)
	early := d.Clone()
	want := frozenReplicaState
	want.Node = 3
	if err := f.SaveWait(d, want); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(d); err != nil {
		t.Fatal(err)
	}
	for skip := range stateSlots {
		for name, fault := range map[string]simdisk.Fault{
			"older content":     {Stale: early},
			"the other's place": {Misdirect: int64(1-2*skip) * stateSlotLen},
			"nothing":           {Mutate: func(_ int64, b []byte) { clear(b) }},
		} {
			fault.Kind, fault.Path, fault.Skip, fault.Count = ring.Read, "*.mmrs", skip, 1
			left := d.Clone()
			left.Inject(fault)
			f := openState(t, left, pool)
			if f.State() != want {
				t.Errorf("read %d returns %s: %+v", skip, name, f.State())
			}
			if err := f.Close(left); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestReplicaFile_RefusesWhatIsNotItsOwn(t *testing.T) {
	pool := testPool(t)
	d := simdisk.New(simdisk.Options{})
	f := openState(t, d, pool)
	if err := f.Close(d); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenReplicaFile(d, pool, testDataDir, 4); err == nil || !strings.Contains(err.Error(), "belongs to node 3") {
		t.Errorf("as another node: %v", err)
	}
	b := d.ReadFile(testStatePath)
	newer := stateFormat{magic: replicaFormat.magic, version: replicaFormat.version + 1}
	for i := range stateSlots {
		newer.seal(b[i*stateSlotLen:][:stateUsed], 9)
	}
	d.WriteFile(testStatePath, b)
	var version *VersionError
	if _, err := OpenReplicaFile(d, pool, testDataDir, 3); !errors.As(err, &version) || version.Path != testStatePath {
		t.Errorf("of a newer version: %v", err)
	}
}

// TestReplicaFile_AFailureIsFinal makes a write fail: everyone who waits hears of it and nothing is written after it.
func TestReplicaFile_AFailureIsFinal(t *testing.T) {
	pool := testPool(t)
	for slot := range stateSlots {
		d := simdisk.New(simdisk.Options{})
		f := openState(t, d, pool)
		d.Inject(simdisk.Fault{Kind: ring.WriteSync, Skip: slot, Count: 1, Err: syscall.EIO})
		var heard []error
		for i := range 3 {
			f.Save(ReplicaState{Promised: Epoch(i + 1)}, func(err error) { heard = append(heard, err) })
		}
		d.Poll()
		f.Save(ReplicaState{Promised: 9}, func(err error) { heard = append(heard, err) })
		if len(heard) != 4 || slices.ContainsFunc(heard, func(err error) bool { return !errors.Is(err, ErrFailed) }) || f.Err() == nil {
			t.Errorf("slot %d: heard %v", slot, heard)
		}
		if err := f.Close(d); !errors.Is(err, ErrFailed) {
			t.Errorf("close: %v", err)
		}
		again := openState(t, d, pool)
		if got := again.State().Promised; got > 1 {
			t.Errorf("slot %d: promised is %d", slot, got)
		}
		if err := again.Close(d); err != nil {
			t.Error(err)
		}
	}
}

func TestCatchupFile_IsMadeAnewWhereItIsDamaged(t *testing.T) {
	pool := testPool(t)
	d := simdisk.New(simdisk.Options{})
	if err := makeDir(newBlockingDisk(d), testJournalDir); err != nil {
		t.Fatal(err)
	}
	open := func() *CatchupFile {
		t.Helper()
		c, err := OpenCatchupFile(d, pool, testDataDir, 0)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	c := open()
	if c.State() != (CatchupState{}) {
		t.Errorf("a new one: %+v", c.State())
	}
	c.Save(frozenCatchupState, nil)
	d.Poll()
	if err := c.Close(d); err != nil {
		t.Fatal(err)
	}
	c = open()
	if c.State() != frozenCatchupState || !c.Idle() || c.Err() != nil {
		t.Errorf("opened again: %+v", c.State())
	}
	if err := c.Close(d); err != nil {
		t.Fatal(err)
	}
	path := testJournalDir + "/" + catchupFile
	for slot := range int64(stateSlots) {
		d.Damage(path, slot*stateSlotLen+30, 1)
	}
	c = open()
	if c.State() != (CatchupState{}) {
		t.Errorf("damaged: %+v", c.State())
	}
	if err := c.Close(d); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := RemoveCatchupFile(d, testDataDir, 0); err != nil {
			t.Fatal(err)
		}
	}
	if d.ReadFile(path) != nil {
		t.Error("it is still there")
	}
}

func FuzzDecodeStates(f *testing.F) {
	var b [stateUsed]byte
	frozenReplicaState.encode(&b)
	f.Add(slices.Clone(b[:]))
	frozenCatchupState.encode(&b)
	f.Add(slices.Clone(b[:]))
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) != stateUsed {
			return
		}
		var again [stateUsed]byte
		same := func(format stateFormat) {
			b := slices.Clone(in)
			format.seal(b, 5)
			format.seal(again[:], 5)
			if !bytes.Equal(again[:], b) {
				t.Error("decoded and encoded again it differs")
			}
		}
		if s, err := decodeReplicaState(in); err == nil {
			s.encode(&again)
			same(replicaFormat)
		}
		if s, err := decodeCatchupState(in); err == nil {
			s.encode(&again)
			same(catchupFormat)
		}
	})
}
