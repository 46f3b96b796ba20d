package wal

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash/crc32"
	"strings"
	"testing"
)

// goldenRecord is frozen: these bytes are on disks.
const goldenRecord = "0000003c" + // record_len = 52 + 3 + 5
	"b1f47b02" + // crc32c
	"0001" + "0003" + "00000005" + // flags, key_len, value_len
	"0102030405060708" + // sequence
	"1112131415161718" + // producer_id
	"2122232425262728" + // producer_seq
	"3132333435363738" + // timestamp_unix_ms
	"41424344" + // leader_epoch
	"02" + "000000" + // replication_flags, reserved
	"6b6579" + "76616c7565" // key, value

func goldenRecordValue() Record {
	return Record{
		Sequence: 0x0102030405060708, ProducerID: 0x1112131415161718, ProducerSeq: 0x2122232425262728,
		TimestampMs: 0x3132333435363738, LeaderEpoch: 0x41424344, ReplFlags: 2,
		Key: []byte("key"), Value: []byte("value"),
	}
}

func TestPutRecord_WritesTheFrozenBytes(t *testing.T) {
	r := goldenRecordValue()
	b := make([]byte, RecordSize(len(r.Key), len(r.Value)))
	if n := PutRecord(b, &r); n != len(b) {
		t.Fatalf("PutRecord returned %d, the record has %d bytes", n, len(b))
	}
	if got := hex.EncodeToString(b); got != goldenRecord {
		t.Fatalf("encoded\n%s\nwant\n%s", got, goldenRecord)
	}
}

func TestDecodeRecord_ReadsTheFrozenBytes(t *testing.T) {
	b, err := hex.DecodeString(goldenRecord)
	if err != nil {
		t.Fatal(err)
	}
	var got Record
	n, err := DecodeRecord(append(b, 0xFF), &got)
	if err != nil || n != len(b) {
		t.Fatalf("DecodeRecord = %d, %v", n, err)
	}
	want := goldenRecordValue()
	if string(got.Key) != "key" || string(got.Value) != "value" || got.Flags != FlagKey {
		t.Fatalf("decoded %+v", got)
	}
	got.Key, got.Value, got.Flags, want.Key, want.Value = nil, nil, 0, nil, nil
	if got.Sequence != want.Sequence || got.ProducerID != want.ProducerID || got.ProducerSeq != want.ProducerSeq ||
		got.TimestampMs != want.TimestampMs || got.LeaderEpoch != want.LeaderEpoch || got.ReplFlags != want.ReplFlags {
		t.Fatalf("decoded %+v, want %+v", got, want)
	}
}

func TestDecodeRecord_RoundTripsAtTheLimits(t *testing.T) {
	for _, sizes := range [][2]int{{0, 0}, {0, 1}, {1, 0}, {255, 100}, {MaxKeyLen, 3}, {0, MaxValueLen}} {
		r := Record{Sequence: 1, Flags: FlagTombstone, Key: bytes.Repeat([]byte{'k'}, sizes[0]), Value: bytes.Repeat([]byte{'v'}, sizes[1])}
		b := make([]byte, RecordSize(sizes[0], sizes[1]))
		PutRecord(b, &r)
		var got Record
		n, err := DecodeRecord(b, &got)
		if err != nil || n != len(b) || !bytes.Equal(got.Key, r.Key) || !bytes.Equal(got.Value, r.Value) {
			t.Errorf("key %d, value %d: %d bytes of %d, %v", sizes[0], sizes[1], n, len(b), err)
		}
		if got.Flags&FlagTombstone == 0 || (got.Flags&FlagKey != 0) != (sizes[0] > 0) {
			t.Errorf("key %d: flags %#x", sizes[0], got.Flags)
		}
	}
}

func TestDecodeRecord_TellsShortFromCorrupt(t *testing.T) {
	whole, _ := hex.DecodeString(goldenRecord)
	for n := range whole {
		if _, err := DecodeRecord(whole[:n], &Record{}); !errors.Is(err, ErrShort) {
			t.Fatalf("%d of %d bytes: %v, want ErrShort", n, len(whole), err)
		}
	}
	for bit := range len(whole) * 8 {
		b := bytes.Clone(whole)
		b[bit/8] ^= 1 << (bit % 8)
		_, err := DecodeRecord(b, &Record{})
		// A flipped length may only look short; every other bit must be caught.
		if bit < 32 && errors.Is(err, ErrShort) {
			continue
		}
		var corrupt *CorruptionError
		if !errors.As(err, &corrupt) || !errors.Is(err, ErrCorrupt) {
			t.Fatalf("bit %d flipped: %v, want a CorruptionError", bit, err)
		}
	}
}

func TestDecodeRecord_RefusesWhatTheFormatForbids(t *testing.T) {
	tests := []struct {
		name  string
		patch func(b []byte)
		want  error
	}{
		{"length 0", func(b []byte) { binary.BigEndian.PutUint32(b, 0) }, errRecordLen},
		{"length below the header", func(b []byte) { binary.BigEndian.PutUint32(b, 51) }, errRecordLen},
		{"length above the largest", func(b []byte) { binary.BigEndian.PutUint32(b, MaxRecordLen-3) }, errRecordLen},
		{"unknown flag", func(b []byte) { b[9] |= 8 }, errRecordFlags},
		{"key without its flag", func(b []byte) { b[9] = 0 }, errRecordKeyFlag},
		{"flag without a key", func(b []byte) { b[11], b[15] = 0, 8 }, errRecordKeyFlag},
		{"lengths disagree", func(b []byte) { b[15] = 4 }, errRecordLengths},
		{"reserved byte", func(b []byte) { b[54] = 1 }, errRecordReserved},
		{"replication flags", func(b []byte) { b[52] = 4 }, errRecordRepl},
	}
	for _, tt := range tests {
		b, _ := hex.DecodeString(goldenRecord)
		tt.patch(b)
		binary.BigEndian.PutUint32(b[4:], crc32.Checksum(b[8:], castagnoli))
		if _, err := DecodeRecord(b, &Record{}); !errors.Is(err, tt.want) || !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
		}
	}
}

func TestRecord_CodecDoesNotAllocate(t *testing.T) {
	r := goldenRecordValue()
	b := make([]byte, RecordSize(len(r.Key), len(r.Value)))
	var got Record
	if n := testing.AllocsPerRun(100, func() {
		PutRecord(b, &r)
		if _, err := DecodeRecord(b, &got); err != nil {
			t.Fatal(err)
		}
		PeekRecord(b, &got)
	}); n != 0 {
		t.Errorf("%v allocations per record", n)
	}
}

// FuzzDecodeRecord: no input panics, what decodes has the length it says, and encoding it again gives the same bytes.
func FuzzDecodeRecord(f *testing.F) {
	golden, _ := hex.DecodeString(goldenRecord)
	f.Add(golden)
	f.Add(golden[:20])
	f.Add([]byte(strings.Repeat("\x00", 60)))
	f.Fuzz(func(t *testing.T, b []byte) {
		var r Record
		n, err := DecodeRecord(b, &r)
		if err != nil {
			if !errors.Is(err, ErrShort) && !errors.Is(err, ErrCorrupt) {
				t.Fatalf("error of an unexpected kind: %v", err)
			}
			return
		}
		again := make([]byte, RecordSize(len(r.Key), len(r.Value)))
		if m := PutRecord(again, &r); m != n || !bytes.Equal(again, b[:n]) {
			t.Fatalf("decoded %x, encoded again %x", b[:n], again)
		}
	})
}

func TestErrors_SayWhereAndMatch(t *testing.T) {
	cause := &checksumError{1, 2}
	err := error(&CorruptionError{Path: "f", Offset: 9, Stream: StreamID{Kind: Messages, Topic: 3, Partition: 4}, Sequence: 5, Round: 6, Cause: cause})
	if want := "corrupt data in f at offset 9, topic 3 partition 4, sequence 5, round 6: checksum is 0x1, the bytes give 0x2"; err.Error() != want {
		t.Errorf("%q, want %q", err, want)
	}
	var c *checksumError
	if !errors.Is(err, ErrCorrupt) || errors.Is(err, ErrFailed) || !errors.As(err, &c) {
		t.Error("a CorruptionError must match ErrCorrupt and its cause only")
	}
	failed := error(&FailedError{Op: "write", Path: "f", Err: ErrShort})
	if !errors.Is(failed, ErrFailed) || !errors.Is(failed, ErrShort) || !strings.Contains(failed.Error(), "write f") {
		t.Errorf("%v must match ErrFailed and its cause", failed)
	}
	if v := (&VersionError{Path: "f", Version: 9, Supported: 1}).Error(); !strings.Contains(v, "f has format version 9") {
		t.Error(v)
	}
}
