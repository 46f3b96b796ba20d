package wal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mortarmq/mortarmq/ring"
)

// inspectBytes returns a line for each finding in b.
func inspectBytes(t testing.TB, path string, b []byte) []string {
	t.Helper()
	var lines []string
	err := InspectReader(path, bytes.NewReader(b), int64(len(b)), func(f Finding) error {
		lines = append(lines, describe(f))
		return nil
	})
	if err != nil {
		t.Fatalf("InspectReader: %v", err)
	}
	return lines
}

func describe(f Finding) string {
	switch f := f.(type) {
	case *LogFound:
		return fmt.Sprintf("log %v journal %d base %d", f.Stream, f.Journal, f.Base)
	case *RecordFound:
		return fmt.Sprintf("record %d+%d %v seq %d %q", f.Offset, f.Length, f.Stream, f.Record.Sequence, f.Record.Value)
	case *PaddingFound:
		return fmt.Sprintf("padding %d+%d", f.Offset, f.Length)
	case *IndexFound:
		return fmt.Sprintf("index %v base %d covered %d entries %d sums %d", f.Stream, f.Base, f.Covered, len(f.Entries), len(f.Sums))
	case *CheckpointFound:
		return fmt.Sprintf("checkpoint next %d offset %d", f.Next, f.Offset)
	case *TableFound:
		line := fmt.Sprintf("table slot %d current %v generation %d rows %d", f.Slot, f.Current, f.Generation, len(f.Rows))
		if f.Log.Index > 0 {
			line += fmt.Sprintf(" log %v begins %v", f.Log, f.Begins)
		}
		return line
	case *MarkFound:
		return fmt.Sprintf("mark slot %d round %d", f.Slot, f.Round)
	case *ReplicaFound:
		return fmt.Sprintf("node state %d+%d generation %d %+v", f.Offset, f.Slot, f.Generation, f.State)
	case *CatchupFound:
		return fmt.Sprintf("catchup %d+%d generation %d %+v", f.Offset, f.Slot, f.Generation, f.State)
	case *SnapshotFound:
		return fmt.Sprintf("%v position %d %q", f.Kind, f.Position, f.Data)
	case *JournalFound:
		return fmt.Sprintf("journal %d file %d", f.Journal, f.Number)
	case *RoundFound:
		line := fmt.Sprintf("round %d at %d stale %v records %d", f.Number, f.Offset, f.Stale, f.Records)
		if f.Position != nil {
			line += fmt.Sprintf(" position %+v", *f.Position)
		}
		return line
	case *UnusedFound:
		return fmt.Sprintf("unused %d+%d zero %v", f.Offset, f.Length, f.Zero)
	case *Damage:
		cause := f.Err
		var corrupt *CorruptionError
		if errors.As(cause, &corrupt) {
			cause = corrupt.Cause
		}
		return fmt.Sprintf("damage %d+%d %v", f.Offset, f.Length, cause)
	default:
		return fmt.Sprintf("unknown finding %T", f)
	}
}

func wantLines(t *testing.T, got []string, want ...string) {
	t.Helper()
	for i := range max(len(got), len(want)) {
		var g, w string
		if i < len(got) {
			g = got[i]
		}
		if i < len(want) {
			w = want[i]
		}
		if g != w && (!strings.HasSuffix(w, "*") || !strings.HasPrefix(g, strings.TrimSuffix(w, "*"))) {
			t.Errorf("finding %d:\n got %s\nwant %s", i, g, w)
		}
	}
}

var inspectStream = StreamID{Kind: Messages, Topic: 3, Partition: 1}

const inspectPath = "data/topics/3/1/00000000000000000007.mqs"

// inspectSegment returns a segment with the records 7 and 8 in its first block, 9 behind padding, and the rest zero.
func inspectSegment() []byte {
	b := make([]byte, 4*ring.BlockSize)
	putSegmentHeader(b, &segmentHeader{Stream: inspectStream, Base: 7, CreatedMs: 1})
	off := segmentHeaderLen
	for seq := Sequence(7); seq <= 8; seq++ {
		off += PutRecord(b[off:], &Record{Sequence: seq, LeaderEpoch: 1, Value: fmt.Append(nil, "v", seq)})
	}
	PutRecord(b[2*ring.BlockSize:], &Record{Sequence: 9, LeaderEpoch: 1, Key: []byte("k"), Value: []byte("v9")})
	return b
}

func TestInspect_SegmentRecordsAndPadding(t *testing.T) {
	wantLines(t, inspectBytes(t, inspectPath, inspectSegment()),
		"log topic 3 partition 1 journal 0 base 7",
		`record 4096+58 topic 3 partition 1 seq 7 "v7"`,
		`record 4154+58 topic 3 partition 1 seq 8 "v8"`,
		"padding 4212+3980",
		`record 8192+59 topic 3 partition 1 seq 9 "v9"`,
		"padding 8251+8133")
}

func TestInspect_SegmentDamage(t *testing.T) {
	for _, c := range []struct {
		name   string
		path   string
		damage func(b []byte) []byte
		want   []string
	}{
		{"a flipped bit in a value leaves the records behind it", "", func(b []byte) []byte {
			b[4096+57] ^= 1
			return b
		}, []string{"log *", "damage 4096+58 checksum is *", `record 4154+58 *`, "padding 4212+3980", "record 8192*", "padding 8251*"}},
		{"a flipped length leaves the next block", "", func(b []byte) []byte {
			b[4096] ^= 0x80
			return b
		}, []string{"log *", "damage 4096+4096 record_len is out of range", "record 8192*", "padding 8251*"}},
		{"a torn tail", "", func(b []byte) []byte { return b[:8192+30] },
			[]string{"log *", "record 4096*", "record 4154*", "padding 4212*", "damage 8192+30 the file ends inside a record*"}},
		{"three bytes of a tail", "", func(b []byte) []byte { return b[:4154+3] },
			[]string{"log *", "record 4096*", "padding 4154+3"}},
		{"bytes in the padding", "", func(b []byte) []byte {
			b[5000] = 1
			return b
		}, []string{"log *", "record 4096*", "record 4154*", "padding 4212+3980", "damage 5000+3192 the padding*", "record 8192*", "padding 8251*"}},
		{"a damaged header leaves the records", "", func(b []byte) []byte {
			b[16] ^= 1
			return b
		}, []string{"damage 0+4096 checksum is *", "record 4096*", "record 4154*", "padding 4212*", "record 8192*", "padding 8251*"}},
		{"a newer version is not guessed at", "", func(b []byte) []byte {
			b[4], b[8] = 2, b[8]+1
			return b
		}, []string{"damage 0+16384 data/topics/3/1/00000000000000000007.mqs has format version 2*"}},
		{"a flipped bit in the version leaves the records", "", func(b []byte) []byte {
			b[4] ^= 64
			return b
		}, []string{"damage 0+4096 the format version is damaged: it is 65, and the checksum that of version 1",
			"record 4096*", "record 4154*", "padding 4212*", "record 8192*", "padding 8251*"}},
		{"a sequence is missing", "", func(b []byte) []byte {
			PutRecord(b[8192:], &Record{Sequence: 11, LeaderEpoch: 1, Key: []byte("k"), Value: []byte("v9")})
			return b
		}, []string{"log *", "record 4096*", "record 4154*", "padding 4212*", "damage 8192+0 expected sequence 9 here", "record 8192*", "padding 8251*"}},
		{"the name tells another base", "data/topics/3/1/00000000000000000009.mqs", func(b []byte) []byte { return b[:4096] },
			[]string{"log *", "damage 0+0 the header names another stream*"}},
		{"the directory tells another topic", "data/topics/4/1/00000000000000000007.mqs", func(b []byte) []byte { return b[:4096] },
			[]string{"log *", "damage 0+0 the header names another stream*"}},
		{"nothing at all", "", func([]byte) []byte { return nil }, []string{"damage 0+0 the file ends inside its header"}},
		{"another magic", "", func(b []byte) []byte {
			b[0] = 'X'
			return b
		}, []string{"damage 0+16384 the file doesn't start with the magic*"}},
		{"no file of ours", "notes.txt", func([]byte) []byte { return []byte("hello") }, []string{"damage 0+5 neither name nor content*"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := c.path
			if path == "" {
				path = inspectPath
			}
			wantLines(t, inspectBytes(t, path, c.damage(inspectSegment())), c.want...)
		})
	}
}

func TestInspect_SmallFiles(t *testing.T) {
	check := make([]byte, checkpointLen)
	putCheckpoint(check, checkpoint{Next: 9, Offset: 8192})

	index := &segIndex{covered: 4 * ring.BlockSize, entries: []indexEntry{{Sequence: 7, Offset: 4096, RecordLen: 54}}, sums: []uint64{5}}
	idx := make([]byte, indexSize(index))
	putIndex(idx, inspectStream, 7, index)

	marks := make([]byte, markSlots*markSlotLen)
	putMark(marks[markSlotLen:], 2, &mark{generation: 1, round: 4, epoch: 1})

	snap := make([]byte, snapshotHeaderLen, 64)
	putSnapshotHeader(snap, &snapshotHeader{Kind: SnapshotCursors, Epoch: 2, Position: 5, Length: 3}, []byte("abc"))
	snap = append(snap, "abc"...)

	slot := tableSlotBytes(minTableRows)
	tab := make([]byte, 2*slot)
	for i := range 2 {
		b := tab[i*slot:]
		putTableHeader(b, &table{Journal: 1, Generation: uint64(8 - i), SlotBytes: slot}, 1)
		putTableRow(b[tableHeaderLen:], inspectStream, checkpoint{Next: 9, Base: 7, Offset: 8192})
		sealTable(b[:tableHeaderLen+tableRowLen])
	}
	cluster := bytes.Repeat(encodeClusterTable(), 2)
	states := func(format stateFormat, encode func(*[stateUsed]byte)) []byte {
		b := make([]byte, stateSlots*stateSlotLen)
		for i := range stateSlots {
			encode((*[stateUsed]byte)(b[i*stateSlotLen:]))
			format.seal(b[i*stateSlotLen:][:stateUsed], 7)
		}
		return b
	}
	node, catchup := states(replicaFormat, frozenReplicaState.encode), states(catchupFormat, frozenCatchupState.encode)
	flip := func(b []byte, at int) []byte {
		b = bytes.Clone(b)
		b[at] ^= 1
		return b
	}
	for _, c := range []struct {
		name, path string
		b          []byte
		want       []string
	}{
		{"checkpoint", "checkpoint.mqc", check, []string{"checkpoint next 9 offset 8192"}},
		{"damaged checkpoint", "checkpoint.mqc", flip(check, 12), []string{"damage 0+21 checksum*"}},
		{"long checkpoint", "checkpoint.mqc", append(bytes.Clone(check), 0), []string{"damage 22+22 a partition checkpoint has 21 bytes"}},
		{"index", "data/topics/3/1/00000000000000000007.mqi", idx, []string{"index topic 3 partition 1 base 7 covered 16384 entries 1 sums 1"}},
		{"damaged index", "x.mqi", flip(idx, 70), []string{"damage 0+* checksum*"}},
		{"mark", "mark", marks, []string{"mark slot 1 round 4"}},
		{"torn mark", "mark", flip(marks, markSlotLen+30), []string{"damage 4096+4096 the slot is torn or damaged"}},
		{"cut mark", "mark", marks[:5000], []string{"damage 4096+904 the file is shorter*"}},
		{"cursors", "cursor.mqc", snap, []string{`cursor checkpoint position 5 "abc"`}},
		{"damaged cursors", "cursor.mqc", flip(snap, 33), []string{"damage 0+35 checksum*"}},
		{"cut cursors", "cursor.mqc", snap[:34], []string{"damage 34+34 the file's length disagrees*"}},
		{"table", "partitions.mmck", tab, []string{"table slot 0 current true generation 8 rows 1", "table slot 1 current false generation 7 rows 1"}},
		{"a cluster's table", "partitions.mmck", cluster, []string{
			"table slot 0 current false generation 9 rows 1 log index 651345242494996240 of epoch 84281096 begins " +
				"[{topic 258 partition 772 1230066625199609624} {topic 1 partition 0 1}]", "table slot 1 current true*"}},
		{"node state", "replica.mmrs", node, []string{"node state 0+0 generation 7 {Cluster:[1 2 3*", "node state 4096+1 generation 7*"}},
		{"half a node state", "replica.mmrs", flip(node, 9), []string{"damage 0+4096 the slot is torn or damaged", "node state 4096+1*"}},
		{"cut node state", "replica.mmrs", node[:5000], []string{"node state 0+0*", "damage 4096+904 the file is shorter*"}},
		{"catch-up", "x", catchup, []string{"catchup 0+0 generation 7 {Leader:258 Epoch:3*", "catchup 4096+1 generation 7*"}},
		{"damaged catch-up", "catchup.mmcup", flip(catchup, 0), []string{"damage 0+4096 the slot is torn or damaged", "catchup 4096+1*"}},
		{"half a table", "partitions.mmck", flip(tab, 70), []string{"damage 0+4096 checksum*", "table slot 1 current true generation 7 rows 1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := inspectBytes(t, c.path, c.b)
			for i := range c.want {
				c.want[i] = strings.Replace(c.want[i], "+* ", fmt.Sprintf("+%d ", len(c.b)), 1)
			}
			wantLines(t, got, c.want...)
		})
	}
}

// inspectJournal returns a journal file with the rounds first..first+n-1, one record each, in a block each.
func inspectJournal(first RoundNumber, n int, blocks int) ([]byte, *journalFile) {
	f := &journalFile{number: 1, size: int64(blocks+1) * ring.BlockSize, key: 77}
	b := make([]byte, f.size)
	putFileHeader(b, 0, f)
	prev := uint64(1)
	for i := range n {
		prev = putInspectRound(b[(1+i)*ring.BlockSize:], f, first+RoundNumber(i), 1, prev)
	}
	return b, f
}

func putInspectRound(b []byte, f *journalFile, number RoundNumber, epoch Epoch, prev uint64) (sum uint64) {
	r := &Round{buf: b}
	r.open()
	r.append(inspectStream, &Record{Sequence: Sequence(number), LeaderEpoch: epoch, Value: []byte("x")})
	r.seal(roundSeal{number: number, epoch: epoch, prev: prev, key: f.key, flushed: number - 1})
	return r.sum
}

func TestInspect_Journal(t *testing.T) {
	const path = "journal/0/journal-000001.mmj"
	t.Run("rounds and free space", func(t *testing.T) {
		b, _ := inspectJournal(5, 2, 4)
		wantLines(t, inspectBytes(t, path, b), "journal 0 file 1",
			"round 5 at 4096 stale false records 1", "record 4200+57 *",
			"round 6 at 8192 stale false records 1", "record 8296+57 *",
			"unused 12288+8192 zero true")
	})
	t.Run("rounds of the last time around are stale", func(t *testing.T) {
		b, f := inspectJournal(5, 4, 4)
		sum := putInspectRound(b[ring.BlockSize:], f, 20, 2, 1)
		putInspectRound(b[2*ring.BlockSize:], f, 21, 2, sum)
		b[3*ring.BlockSize] ^= 1 // partly overwritten
		wantLines(t, inspectBytes(t, path, b), "journal 0 file 1",
			"round 20 at 4096 stale false records 1", "record *", "round 21 at 8192 stale false records 1", "record *",
			"unused 12288+4096 zero false", "round 8 at 16384 stale true records 1")
	})
	t.Run("rounds of a replicated log", func(t *testing.T) {
		b, f := inspectJournal(5, 0, 2)
		r := &Round{buf: b[ring.BlockSize:]}
		r.open()
		r.append(inspectStream, &Record{Sequence: 1, LeaderEpoch: 4, Value: []byte("x")})
		p := opening(position(4, 9, 3, 8))
		r.stamp(&p)
		r.seal(roundSeal{number: 5, epoch: 1, key: f.key})
		wantLines(t, inspectBytes(t, path, b), "journal 0 file 1",
			"round 5 at 4096 stale false records 1 position {Point:index 9 of epoch 4 Prev:3 Commit:8 Flags:1}", "record 4200+57 *", "unused *")
	})
	t.Run("a flipped bit in a round", func(t *testing.T) {
		b, _ := inspectJournal(5, 3, 3)
		b[2*ring.BlockSize+150] ^= 1
		wantLines(t, inspectBytes(t, path, b), "journal 0 file 1", "round 5 *", "record *", "damage 8192+4096 checksum*",
			"damage 12288+0 the rounds from 6 to 6 are missing before this one", "round 7 *", "record *")
	})
	t.Run("a flipped bit in a round's header", func(t *testing.T) {
		b, _ := inspectJournal(5, 2, 2)
		b[2*ring.BlockSize+20] ^= 1
		wantLines(t, inspectBytes(t, path, b), "journal 0 file 1", "round 5 *", "record *", "damage 8192+4096 checksum*")
	})
	t.Run("a broken chain", func(t *testing.T) {
		b, f := inspectJournal(5, 2, 2)
		putInspectRound(b[2*ring.BlockSize:], f, 6, 1, 12345)
		wantLines(t, inspectBytes(t, path, b), "journal 0 file 1", "round 5 *", "record *",
			"damage 8192+0 it doesn't carry the checksum*", "round 6 *", "record *")
	})
	t.Run("a cut file", func(t *testing.T) {
		b, _ := inspectJournal(5, 2, 2)
		wantLines(t, inspectBytes(t, path, b[:2*ring.BlockSize+100]), "journal 0 file 1", "damage 8292+0 the header says*",
			"round 5 *", "record *", "damage 8192+100 the file ends inside the round: a torn tail*")
	})
	t.Run("a damaged header", func(t *testing.T) {
		b, _ := inspectJournal(5, 2, 2)
		b[9] ^= 1
		wantLines(t, inspectBytes(t, path, b), "damage 0+12288 checksum*")
	})
}

func TestInspect_ReadsFilesAndPassesErrorsOn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "00000000000000000007.mqs")
	if err := os.WriteFile(path, inspectSegment(), 0o600); err != nil {
		t.Fatal(err)
	}
	stop := errors.New("enough")
	n := 0
	err := Inspect(path, func(Finding) error {
		if n++; n == 3 {
			return stop
		}
		return nil
	})
	if !errors.Is(err, stop) || n != 3 {
		t.Errorf("Inspect = %v after %d findings", err, n)
	}
	if err := Inspect(path+".missing", nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Inspect of a missing file = %v", err)
	}
	if err := Inspect(t.TempDir(), nil); err == nil {
		t.Error("Inspect of a directory succeeds")
	}
}

func TestInspect_IndexIsComparedWithItsSegment(t *testing.T) {
	segment := inspectSegment()
	var b indexBuilder
	b.start(inspectStream, 7, 0)
	b.write(segment)
	b.finish()
	b.from = segmentHeaderLen
	idx := make([]byte, indexSize(&b.segIndex))
	putIndex(idx, inspectStream, 7, &b.segIndex)
	dir := t.TempDir()
	path := filepath.Join(dir, "00000000000000000007")
	inspect := func(segment []byte) (lines []string) {
		t.Helper()
		for name, content := range map[string][]byte{path + indexSuffix: idx, path + segmentSuffix: segment} {
			if err := os.WriteFile(name, content, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		err := Inspect(path+indexSuffix, func(f Finding) error {
			lines = append(lines, strings.ReplaceAll(describe(f), dir, "DIR"))
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return lines
	}
	wantLines(t, inspect(segment), "index *")
	other := bytes.Clone(segment)
	other[5000] ^= 1
	wantLines(t, inspect(other), "index *", "damage 64+0 DIR/00000000000000000007.mqs has other bytes from 0 to 16384 *")
	wantLines(t, inspect(segment[:9000]), "index *", "damage 64+0 DIR/00000000000000000007.mqs has 9000 bytes, its index describes 16384")
	if err := os.Remove(path + segmentSuffix); err != nil {
		t.Fatal(err)
	}
	if err := Inspect(path+indexSuffix, func(Finding) error { return nil }); err != nil {
		t.Errorf("without a segment: %v", err)
	}
}

// A large file is read through a window, and large records are shown whole.
func TestInspect_LargeRecordsCrossTheWindow(t *testing.T) {
	b := make([]byte, segmentHeaderLen, 16<<20)
	putSegmentHeader(b, &segmentHeader{Stream: inspectStream, Base: 1})
	sizes := []int{10, 3 << 20, 5, inspectWindow, 7 << 20}
	for i, n := range sizes {
		at := len(b)
		b = append(b, make([]byte, RecordSize(0, n))...)
		PutRecord(b[at:], &Record{Sequence: Sequence(i + 1), LeaderEpoch: 1, Value: bytes.Repeat([]byte{'a' + byte(i)}, n)})
	}
	seen := 0
	err := InspectReader("x.mqs", bytes.NewReader(b), int64(len(b)), func(f Finding) error {
		switch f := f.(type) {
		case *RecordFound:
			if len(f.Record.Value) != sizes[seen] {
				t.Errorf("record %d has %d bytes, want %d", seen, len(f.Record.Value), sizes[seen])
			}
			seen++
		case *Damage:
			t.Errorf("damage: %v", f.Err)
		}
		return nil
	})
	if err != nil || seen != len(sizes) {
		t.Errorf("%d records, %v", seen, err)
	}
}

// FuzzInspect: no panic, and everything found lies inside the file.
func FuzzInspect(f *testing.F) {
	journal, _ := inspectJournal(5, 3, 4)
	f.Add("journal-000001.mmj", journal)
	f.Add("00000000000000000007.mqs", inspectSegment())
	for _, magic := range []string{"MMLQ", "MMML", "MMIX", "MMQC", "MMCK", "MMJM", "MMMS", "MMCU", "MMDD", "MMJL"} {
		b := make([]byte, 2*ring.BlockSize)
		copy(b, magic)
		b[4] = 1
		f.Add("x", b)
	}
	for _, format := range []stateFormat{replicaFormat, catchupFormat} {
		b := make([]byte, stateSlots*stateSlotLen)
		b[6] = 1
		format.seal(b[:stateUsed], 1)
		f.Add("x", b)
	}
	f.Add("mark", make([]byte, markSlots*markSlotLen))
	f.Add(tableFile, make([]byte, 2*ring.BlockSize))
	// A record whose header is right makes the walk behind damage try harder.
	twice := append(inspectSegment(), inspectSegment()...)
	binary.BigEndian.PutUint32(twice[segmentHeaderLen:], 1<<31)
	f.Add("a.mqs", twice)
	f.Fuzz(func(t *testing.T, path string, b []byte) {
		size := int64(len(b))
		n := 0
		err := InspectReader(path, bytes.NewReader(b), size, func(found Finding) error {
			n++
			switch found := found.(type) {
			case *RecordFound:
				if found.Offset < 0 || found.Offset+found.Length > size {
					t.Fatalf("record at %d+%d of %d bytes", found.Offset, found.Length, size)
				}
			case *Damage:
				if found.Err == nil || found.Offset < 0 || found.Offset > max(size, maxInspectIndex) {
					t.Fatalf("damage at %d of %d bytes: %v", found.Offset, size, found.Err)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatalf("InspectReader: %v", err)
		}
		if n == 0 && !allZero(b) {
			t.Fatal("nothing was found, not even damage")
		}
	})
}
