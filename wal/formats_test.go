package wal

import (
	"bytes"
	"encoding/hex"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cespare/xxhash/v2"

	"github.com/mortarmq/mortarmq/ring"
)

var (
	frozenHeader     = segmentHeader{Stream: StreamID{Kind: Messages, Topic: 0x0102, Partition: 0x0304}, Journal: 5, Base: 6, CreatedMs: 7}
	frozenCheckpoint = checkpoint{Next: 0x0102030405060708, Base: 3, Offset: 0x00091000, LastMs: 0x010203040506}
	frozenIndex      = segIndex{
		covered: 70 << 10, from: segmentHeaderLen,
		entries: []indexEntry{{Sequence: 6, TimestampMs: 9, Offset: 4096, RecordLen: 100}, {Sequence: 8, TimestampMs: 9, Offset: 66000, RecordLen: 52}},
		sums:    []uint64{1, 2},
	}
)

func encodeTable(generation uint64, rows ...tableRow) []byte {
	b := make([]byte, tableSlotBytes(max(len(rows), minTableRows)))
	t := &table{Journal: 5, Generation: generation, SlotBytes: len(b), Point: journalPoint{Epoch: 2, Round: 3, Commit: 4}}
	putTableHeader(b, t, len(rows))
	end := tableHeaderLen
	for i := range rows {
		putTableRow(b[end:], rows[i].Stream, rows[i].checkpoint)
		end += tableRowLen
	}
	sealTable(b[:end])
	return b
}

// encodeClusterTable is the table of a node of a cluster: a point in its log, and partitions that began anew.
func encodeClusterTable() []byte {
	b := make([]byte, tableSlotBytes(minTableRows))
	point := journalPoint{Epoch: 2, Round: 3, Commit: 4, Log: LogPoint{Epoch: 0x05060708, Index: 0x090a0b0c0d0e0f10}}
	putTableHeader(b, &table{Journal: 5, Generation: 9, SlotBytes: len(b), Point: point}, 3)
	putTableRow(b[tableHeaderLen:], frozenHeader.Stream, frozenCheckpoint)
	putTableBegin(b[tableHeaderLen+tableRowLen:], tableBegin{Stream: frozenHeader.Stream, First: 0x1112131415161718})
	putTableBegin(b[tableHeaderLen+2*tableRowLen:], tableBegin{Stream: p0, First: 1})
	sealTable(b[:tableHeaderLen+3*tableRowLen])
	return b
}

// frozenFiles returns the encodings of the frozen segment header, checkpoint and index.
func frozenFiles() (header, check, index []byte) {
	header = make([]byte, segmentHeaderLen)
	putSegmentHeader(header, &frozenHeader)
	check = make([]byte, checkpointLen)
	putCheckpoint(check, frozenCheckpoint)
	index = make([]byte, indexSize(&frozenIndex))
	putIndex(index, frozenHeader.Stream, frozenHeader.Base, &frozenIndex)
	return header, check, index
}

// TestFormats_BytesNeverChange holds the encodings against bytes that were frozen when the formats were.
func TestFormats_BytesNeverChange(t *testing.T) {
	header, check, index := frozenFiles()
	table := encodeTable(9, tableRow{Stream: frozenHeader.Stream, checkpoint: frozenCheckpoint})
	cluster := encodeClusterTable()
	snapshot := make([]byte, snapshotHeaderLen)
	putSnapshotHeader(snapshot, &snapshotHeader{Kind: SnapshotCursors, Epoch: 1, Position: 2}, []byte("data"))
	for name, c := range map[string]struct {
		got  []byte
		want string
	}{
		"segment": {header[:40], "4d4d515301010102030400050000100000000000000000060000000000000007d6b765a200000000"},
		"mqc":     {check, "4d4d51430125787e9f010203040506070800091000"},
		"index": {index, "4d4d49580100010203040000000000020000000000000006000000000001180000000002ed111e06" +
			"000000000000000000000000000000000000000000000000" +
			"0000000000000006000000000000000900001000000000640000000000000000" +
			"00000000000000080000000000000009000101d0000000340000000000000000" +
			"00000000000000010000000000000002"},
		"table": {table[:96], "4d4d434b010000050000000000000009000010000000000100000002000000000000000000000003" +
			"000000000000000413beec15000000000000000000000000" +
			"0100010203040102030405060009100001020304050607080000000000000003"},
		"cluster table": {cluster[:160], "4d4d434b010000050000000000000009000010000000000300000002000000000000000000000003" +
			"00000000000000043a6f550505060708090a0b0c0d0e0f10" +
			"0100010203040102030405060009100001020304050607080000000000000003" +
			"0101010203040000000000000000000011121314151617180000000000000000" +
			"0101000100000000000000000000000000000000000000010000000000000000"},
		"snapshot": {snapshot, "4d4d43550100000029b62f0d0000000100000000000000020000000000000004"},
	} {
		if got := hex.EncodeToString(c.got); got != c.want {
			t.Errorf("%s is\n%s, frozen\n%s", name, got, c.want)
		}
	}
	if !allZero(header[40:]) || !allZero(table[96:]) {
		t.Error("padding isn't zero")
	}
}

func TestFormats_DecodeWhatWasEncoded(t *testing.T) {
	b := make([]byte, segmentHeaderLen)
	for _, kind := range []StreamKind{Messages, Ledger, Metadata} {
		h := frozenHeader
		h.Stream.Kind = kind
		putSegmentHeader(b, &h)
		if got, err := decodeSegmentHeader(b, kind); err != nil || got != h {
			t.Errorf("header %+v: %+v, %v", h, got, err)
		}
	}
	putCheckpoint(b, frozenCheckpoint)
	want := checkpoint{Next: frozenCheckpoint.Next, Offset: frozenCheckpoint.Offset}
	if got, err := decodeCheckpoint(b[:checkpointLen]); err != nil || got != want {
		t.Errorf("checkpoint: %+v, %v", got, err)
	}
	x := make([]byte, indexSize(&frozenIndex))
	putIndex(x, frozenHeader.Stream, frozenHeader.Base, &frozenIndex)
	got, err := decodeIndex(x, frozenHeader.Stream, frozenHeader.Base)
	if err != nil || !slices.Equal(got.entries, frozenIndex.entries) || !slices.Equal(got.sums, frozenIndex.sums) || got.covered != frozenIndex.covered {
		t.Errorf("index: %+v, %v", got, err)
	}
	rows := []tableRow{{Stream: frozenHeader.Stream, checkpoint: frozenCheckpoint}, {Stream: le, checkpoint: frozenCheckpoint}}
	rows[1].LastMs = maxRowMs
	slot, ok, err := decodeTable(encodeTable(9, rows...), 5)
	if c, ok, err := decodeTable(encodeClusterTable(), 5); err != nil || !ok || len(c.Rows) != 1 || c.Point.Log != (LogPoint{Epoch: 0x05060708,
		Index: 0x090a0b0c0d0e0f10}) || !slices.Equal(c.Begins, []tableBegin{{frozenHeader.Stream, 0x1112131415161718}, {p0, 1}}) {
		t.Errorf("cluster table: %+v, %v, %v", c, ok, err)
	}
	if err != nil || !ok || slot.Generation != 9 || slot.Point != (journalPoint{Epoch: 2, Round: 3, Commit: 4}) || !slices.Equal(slot.Rows, rows) {
		t.Errorf("table: %+v, %v, %v", slot, ok, err)
	}
}

// TestFormats_EveryFlippedBitIsFound flips each bit of each format. The version's don't make it a newer one.
func TestFormats_EveryFlippedBitIsFound(t *testing.T) {
	header, check, index := frozenFiles()
	snap := append(make([]byte, snapshotHeaderLen), "data"...)
	putSnapshotHeader(snap, &snapshotHeader{Kind: SnapshotDedup, Epoch: 1, Position: 2}, snap[snapshotHeaderLen:])
	for name, c := range map[string]struct {
		b      []byte
		decode func([]byte) error
	}{
		"segment": {header, func(b []byte) error { _, err := decodeSegmentHeader(b, Messages); return err }},
		"mqc":     {check, func(b []byte) error { _, err := decodeCheckpoint(b); return err }},
		"index": {index, func(b []byte) error {
			_, err := decodeIndex(b, frozenHeader.Stream, frozenHeader.Base)
			return err
		}},
		"table": {encodeTable(9, tableRow{Stream: p0, checkpoint: frozenCheckpoint})[:96], func(b []byte) error {
			_, _, err := decodeTable(b, 5)
			return err
		}},
		"cluster table": {encodeClusterTable()[:160], func(b []byte) error {
			_, _, err := decodeTable(b, 5)
			return err
		}},
		"snapshot": {snap, decodeSnapshot},
	} {
		if err := c.decode(c.b); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for i := range len(c.b) * 8 {
			b := slices.Clone(c.b)
			b[i/8] ^= 1 << (i % 8)
			if err := c.decode(b); !errors.Is(err, ErrCorrupt) {
				t.Errorf("%s with bit %d flipped: %v", name, i, err)
			}
		}
		for i := range c.b {
			if err := c.decode(c.b[:i]); !errors.Is(err, ErrCorrupt) {
				t.Errorf("%s cut to %d bytes: %v", name, i, err)
			}
		}
	}
}

func decodeSnapshot(b []byte) error {
	h, err := decodeSnapshotHeader(b, SnapshotDedup, int64(len(b)))
	if err != nil {
		return err
	}
	return h.checkData(b, b[snapshotHeaderLen:])
}

func TestFormats_PadsLeaveRoomForALength(t *testing.T) {
	for off := int64(4096); off < 3*4096; off++ {
		pad := padLen(off)
		switch {
		case (off+int64(pad))%ring.BlockSize != 0:
			t.Fatalf("a pad of %d at %d ends inside a block", pad, off)
		case pad > 0 && pad < 4, pad >= ring.BlockSize+4, off%ring.BlockSize == 0 && pad != 0:
			t.Fatalf("a pad of %d at %d", pad, off)
		}
		// A reader skips block by block and ends up behind the pad.
		at := off
		for at < off+int64(pad) {
			at = nextBlock(at)
		}
		if at != off+int64(pad) {
			t.Fatalf("a reader skips from %d to %d, the pad ends at %d", off, at, off+int64(pad))
		}
	}
}

func TestFormats_NamesRoundTrip(t *testing.T) {
	for _, base := range []Sequence{1, 42, math.MaxUint64} {
		for _, kind := range []StreamKind{Messages, Ledger, Metadata} {
			if got, ok := parseLogName(kind, logName(kind, base, false)); !ok || got != base {
				t.Errorf("%v %d: %d, %v", kind, base, got, ok)
			}
		}
	}
	for _, name := range []string{"", "1.mqs", sequenceName(0) + ".mqs", sequenceName(1) + ".mqs.tmp", "+" + sequenceName(1)[1:] + ".mqs", ledgerActive} {
		if base, ok := parseLogName(Messages, name); ok {
			t.Errorf("%q is sequence %d", name, base)
		}
	}
	id := snapshotID{Position: 7, Epoch: 8}
	if got, ok := parseMetadataSnapshotName(metadataSnapshotName(id)); !ok || got != id {
		t.Errorf("%+v, %v", got, ok)
	}
	for _, name := range []string{"mmms-7-8.bin", "mmms-.bin", "mmms-1.bin", metadataSnapshotName(id) + ".tmp"} {
		if got, ok := parseMetadataSnapshotName(name); ok {
			t.Errorf("%q is %+v", name, got)
		}
	}
	if topic, journal, n, ok := parseDeletedName(deletedName(1, 2, 3)); !ok || topic != 1 || journal != 2 || n != 3 {
		t.Error("deleted name doesn't round trip")
	}
	for _, name := range []string{".deleted-1", ".deleted-1-2", ".deleted-01-2-3", ".deleted-1-2-x", "deleted-1-2-3", ".deleted-70000-2-3"} {
		if _, _, _, ok := parseDeletedName(name); ok {
			t.Errorf("%q is a deleted topic", name)
		}
	}
}

// TestIndexBuilder_InAnyPiecesIsTheSame feeds the same segment in different pieces.
func TestIndexBuilder_InAnyPiecesIsTheSame(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	data := make([]byte, 5*indexBlock+1234)
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
	build := func(piece func() int) []uint64 {
		var b indexBuilder
		b.start(p0, 1, 0)
		for rest := data; len(rest) > 0; {
			n := min(piece(), len(rest))
			b.write(rest[:n])
			rest = rest[n:]
		}
		b.finish()
		if !b.complete() || b.covered != int64(len(data)) {
			t.Fatalf("covered %d of %d", b.covered, len(data))
		}
		return b.sums
	}
	want := build(func() int { return len(data) })
	if len(want) != 6 || want[0] == want[1] {
		t.Fatalf("sums %v", want)
	}
	for range 10 {
		if got := build(func() int { return 1 + rng.IntN(100_000) }); !slices.Equal(got, want) {
			t.Fatalf("sums differ: %v, %v", got, want)
		}
	}
	// The same bytes elsewhere have other sums.
	for _, id := range []StreamID{p1, p2} {
		if blockSum(new(xxhash.Digest), id, 1, 0, data[:indexBlock]) == want[0] {
			t.Errorf("%v: the same sum", id)
		}
	}
}

func FuzzDecodeTable(f *testing.F) {
	f.Add(encodeTable(1), uint8(5))
	f.Add(encodeTable(9, tableRow{Stream: p0, checkpoint: frozenCheckpoint}), uint8(5))
	f.Add(encodeClusterTable(), uint8(5))
	f.Fuzz(func(t *testing.T, b []byte, journal uint8) {
		tab, ok, err := decodeTable(b, int(journal))
		if err != nil || !ok {
			return
		}
		rows := len(tab.Rows) + len(tab.Begins)
		again := make([]byte, tableHeaderLen+rows*tableRowLen)
		putTableHeader(again, &tab, rows)
		for i := range tab.Rows {
			putTableRow(again[tableHeaderLen+i*tableRowLen:], tab.Rows[i].Stream, tab.Rows[i].checkpoint)
		}
		for i, b := range tab.Begins {
			putTableBegin(again[tableHeaderLen+(len(tab.Rows)+i)*tableRowLen:], b)
		}
		sealTable(again)
		if !bytes.Equal(again, b[:len(again)]) {
			t.Error("decoded and encoded again it differs")
		}
	})
}

func FuzzDecodeIndex(f *testing.F) {
	b := make([]byte, indexSize(&frozenIndex))
	putIndex(b, frozenHeader.Stream, frozenHeader.Base, &frozenIndex)
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= indexHeaderLen {
			// Let the fuzzer past the checksum.
			b = slices.Clone(b)
			crc := crcWithout(b, indexCRCOffset)
			b[indexCRCOffset], b[indexCRCOffset+1], b[indexCRCOffset+2], b[indexCRCOffset+3] = byte(crc>>24), byte(crc>>16), byte(crc>>8), byte(crc)
		}
		x, err := decodeIndex(b, frozenHeader.Stream, frozenHeader.Base)
		if err != nil {
			return
		}
		again := make([]byte, indexSize(x))
		putIndex(again, frozenHeader.Stream, frozenHeader.Base, x)
		if !bytes.Equal(again, b) {
			t.Error("decoded and encoded again it differs")
		}
		for _, seq := range []Sequence{0, 1, 6, 7, math.MaxUint64} {
			if e, ok := x.find(seq); ok && e.Sequence > seq {
				t.Errorf("entry %+v for sequence %d", e, seq)
			}
		}
		x.findTime(5)
		x.sum(0, indexBlock)
	})
}

func FuzzDecodeSegmentHeader(f *testing.F) {
	b := make([]byte, segmentHeaderLen)
	putSegmentHeader(b, &frozenHeader)
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, kind := range []StreamKind{Messages, Ledger, Metadata} {
			h, err := decodeSegmentHeader(b, kind)
			if err != nil {
				continue
			}
			again := make([]byte, segmentHeaderLen)
			putSegmentHeader(again, &h)
			if !bytes.Equal(again, b[:segmentHeaderLen]) {
				t.Error("decoded and encoded again it differs")
			}
		}
	})
}

func FuzzDecodeSmallFiles(f *testing.F) {
	check := make([]byte, checkpointLen)
	putCheckpoint(check, frozenCheckpoint)
	f.Add(check)
	snap := append(make([]byte, snapshotHeaderLen), "data"...)
	putSnapshotHeader(snap, &snapshotHeader{Kind: SnapshotDedup, Epoch: 1, Position: 2}, snap[snapshotHeaderLen:])
	f.Add(snap)
	f.Fuzz(func(t *testing.T, b []byte) {
		if c, err := decodeCheckpoint(b); err == nil {
			again := make([]byte, checkpointLen)
			putCheckpoint(again, c)
			if !bytes.Equal(again, b) {
				t.Error("checkpoint: decoded and encoded again it differs")
			}
		}
		if decodeSnapshot(b) == nil {
			h, _ := decodeSnapshotHeader(b, SnapshotDedup, int64(len(b)))
			again := make([]byte, snapshotHeaderLen)
			putSnapshotHeader(again, &h, b[snapshotHeaderLen:])
			if !bytes.Equal(again, b[:snapshotHeaderLen]) {
				t.Error("snapshot: decoded and encoded again it differs")
			}
		}
	})
}
