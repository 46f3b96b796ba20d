package ledger

import (
	"bytes"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// everyKind is a queue with an event of every kind, of a cursor that belongs to member (0: to a group).
func everyKind(member uint64) *Book {
	opts := DefaultOptions()
	b := NewBook(rand.NewPCG(0, 0), nil)
	c := b.Open(Key{Group: 1, Topic: 2, Partition: 3, Member: member}, &opts, 10)
	q := c.events()
	q.deliver(11, 0x0000_0100_0000_0001, Owner{7, 9})
	q.deliver(12, 0x0000_0100_0000_0002, Owner{7, 9})
	q.deliver(20, 0x0000_0100_0000_0003, Owner{7, 9})
	q.deliver(13, 0x0000_0100_0000_0004, Owner{8, 10})
	q.ack(15)
	q.ack(16)
	q.ack(12)
	q.fails = append(q.fails, failure{14, 2, ReasonExpired, 2500}, failure{13, 1, ReasonConnection, 1000})
	q.parks = append(q.parks, park{17, 99})
	q.drop(18, 2)
	q.forget = true
	return b
}

// golden compares with frozen bytes, which are never regenerated.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	if want := goldenBytes(t, name); !bytes.Equal(got, want) {
		t.Fatalf("%s: got\n%x\nwant\n%x", name, got, want)
	}
}

func goldenBytes(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	want, err := hex.DecodeString(strings.Join(strings.Fields(string(text)), ""))
	if err != nil {
		t.Fatal(err)
	}
	return want
}

func TestRecord_BytesAreFrozen(t *testing.T) {
	golden(t, "record-v1.hex", everyKind(0).AppendRecord(nil, 0x0000_0190_0000_0000))
	golden(t, "record-v2.hex", everyKind(1<<48+5).AppendRecord(nil, 0x0000_0190_0000_0000))
}

func TestSnapshot_BytesAreFrozen(t *testing.T) {
	b := newBench(t, func(o *Options) { o.JitterPercent = 0; o.MaxAttempts = 2 })
	b.c.Committed(9)
	var ds []delivery
	for range 5 {
		ds = append(ds, b.take())
	}
	b.ack(ds[1])
	b.nack(ds[2])
	b.c.Nack(ds[3].seq, ds[3].id, owner.Epoch, true, false, b.now)
	b.commit()
	b.c.Park(ds[3].seq, 500)
	b.commit()
	golden(t, "snapshot-v2.hex", b.book.AppendSnapshot(nil, b.now, b.wallMs))
	b.book.Open(Key{Group: group, Topic: topic, Partition: partition, Member: group<<48 + 2}, &b.opts, 6)
	b.commit()
	golden(t, "snapshot-v3.hex", b.book.AppendSnapshot(nil, b.now, b.wallMs))
}

func TestSnapshot_OfEveryVersionIsRead(t *testing.T) {
	for read, written := range map[string]string{"snapshot-v1.hex": "snapshot-v2.hex", "snapshot-v2.hex": "snapshot-v2.hex", "snapshot-v3.hex": "snapshot-v3.hex"} {
		b := NewBook(nil, nil)
		if err := b.Load(goldenBytes(t, read)); err != nil {
			t.Fatal(err)
		}
		if got, want := b.AppendSnapshot(nil, 0, 0), goldenBytes(t, written); !bytes.Equal(got, want) {
			t.Fatalf("%s is read as\n%x\nwant\n%x", read, got, want)
		}
	}
}

// encodeItems writes decoded items again.
func encodeItems(t *testing.T, value []byte) []byte {
	w := writer{buf: []byte{value[0]}, limit: 1 << 30}
	var it Item
	d := NewDecoder(value)
	for d.Next(&it) {
		w.header(it.Kind, it.Key)
		switch it.Kind {
		case KindStart:
			w.u64(uint64(it.Floor))
		case KindExhausted:
			w.u64(uint64(it.Seq))
			w.u64(uint64(it.Letters))
		case KindForget:
		case KindDeliver, KindAck, KindDrop, KindFail:
			if it.Kind == KindDeliver {
				w.u64(it.Owner.Member)
				w.u64(it.Owner.Epoch)
				w.u64(it.LeaseUntilMs)
			}
			w.u32(uint32(it.Len))
			for i := range it.Len {
				if it.Kind == KindFail {
					f := it.Failure(i)
					w.u64(uint64(f.Sequence))
					w.buf = append(w.buf, byte(f.Failures>>8), byte(f.Failures), byte(f.Reason))
					w.u32(f.DelayMs)
					w.u64(f.DueMs)
					continue
				}
				first, n := it.Run(i)
				w.u64(uint64(first))
				w.u32(n)
				if it.Kind == KindDeliver {
					w.u64(uint64(it.Delivery(i)))
				}
			}
		}
	}
	if d.Err() != nil {
		t.Fatal(d.Err())
	}
	return w.buf
}

func TestRecord_DecodesWhatWasEncoded(t *testing.T) {
	for _, member := range []uint64{0, 1, 1<<64 - 1} {
		value := everyKind(member).AppendRecord(nil, 1_700_000_000_000)
		if got := encodeItems(t, value); !bytes.Equal(got, value) {
			t.Fatalf("got\n%x\nwant\n%x", got, value)
		}
		var it Item
		for d := NewDecoder(value); d.Next(&it); {
			if want := (Key{Group: 1, Topic: 2, Partition: 3, Member: member}); it.Key != want {
				t.Fatalf("%s item of %v, want %v", it.Kind, it.Key, want)
			}
		}
	}
}

func TestRecord_EveryTruncationIsAnError(t *testing.T) {
	for _, member := range []uint64{0, 5} {
		everyTruncation(t, everyKind(member).AppendRecord(nil, 1_700_000_000_000))
	}
}

func everyTruncation(t *testing.T, value []byte) {
	t.Helper()
	ends := map[int]bool{}
	var it Item
	for d := NewDecoder(value); d.Next(&it); {
		ends[len(value)-len(d.rest)] = true
	}
	for n := range value {
		d := NewDecoder(value[:n])
		for d.Next(&it) {
		}
		if ok := d.Err() == nil; ok != ends[n] {
			t.Fatalf("%d of %d bytes: error %v", n, len(value), d.Err())
		} else if !ok && !errors.Is(d.Err(), ErrRecord) {
			t.Fatalf("%d of %d bytes: %v is no ErrRecord", n, len(value), d.Err())
		}
	}
}

func TestRecord_HostileOnesAreRefused(t *testing.T) {
	head := "01" + "%k" + "000100020003"
	for name, h := range map[string]string{
		"newer version":         "02" + "07000100020003",
		"unknown kind":          strings.Replace(head, "%k", "08", 1),
		"kind 0":                strings.Replace(head, "%k", "00", 1),
		"no elements":           strings.Replace(head, "%k", "03", 1) + "00000000",
		"count far too large":   strings.Replace(head, "%k", "03", 1) + "ffffffff" + "000000000000000100000001",
		"sequence 0":            strings.Replace(head, "%k", "03", 1) + "00000001" + "000000000000000000000001",
		"empty run":             strings.Replace(head, "%k", "03", 1) + "00000001" + "000000000000000100000000",
		"sequence overflows":    strings.Replace(head, "%k", "03", 1) + "00000001" + "ffffffffffffffff00000001",
		"overlapping runs":      strings.Replace(head, "%k", "03", 1) + "00000002" + "000000000000000100000002" + "000000000000000200000001",
		"unknown reason":        strings.Replace(head, "%k", "04", 1) + "00000001" + "0000000000000001" + "0001" + "05" + "00000000" + "0000000000000000",
		"no failures":           strings.Replace(head, "%k", "04", 1) + "00000001" + "0000000000000001" + "0000" + "01" + "00000000" + "0000000000000000",
		"failures out of order": strings.Replace(head, "%k", "04", 1) + "00000002" + strings.Repeat("0000000000000001"+"0001"+"01"+"00000000"+"0000000000000000", 2),
		"floor out of range":    strings.Replace(head, "%k", "01", 1) + "ffffffffffffffff",
	} {
		value, err := hex.DecodeString(h)
		if err != nil {
			t.Fatal(err)
		}
		b, fx := NewBook(rand.NewPCG(0, 0), nil), Effects{}
		if err := b.Apply(value, 0, &fx); !errors.Is(err, ErrRecord) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

func FuzzRecord(f *testing.F) {
	f.Add(everyKind(0).AppendRecord(nil, 1_700_000_000_000))
	f.Add(everyKind(9).AppendRecord(nil, 1_700_000_000_000))
	f.Add([]byte{RecordVersion})
	f.Fuzz(func(t *testing.T, value []byte) {
		// Invariants: no panic, and a record that decodes is encoded to the same bytes. Applying it is safe on any book.
		b := newBench(t, nil)
		b.c.Committed(40)
		for range 20 {
			b.take()
		}
		b.commit()
		_ = b.book.Apply(value, b.now, &b.fx)
		b.book.Tick(b.now+time.Hour, &b.fx)
		cold := NewBook(rand.NewPCG(0, 0), nil)
		_ = cold.Apply(value, 0, &b.fx)
		cold.Restore(0, 0, &b.fx)
		d := NewDecoder(value)
		var it Item
		for d.Next(&it) {
		}
		if d.Err() == nil && !bytes.Equal(encodeItems(t, value), value) {
			t.Fatal("encoded differently")
		}
	})
}

func FuzzSnapshot(f *testing.F) {
	b := newBench(f, nil)
	b.c.Committed(9)
	for range 4 {
		b.nack(b.take())
	}
	b.commit()
	f.Add(b.book.AppendSnapshot(nil, b.now, b.wallMs))
	f.Add([]byte{SnapshotVersion, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		b := NewBook(rand.NewPCG(0, 0), nil)
		if b.Load(data) != nil {
			return
		}
		// Another version may be read than would be written.
		if again := b.AppendSnapshot(nil, 0, 0); again[0] == data[0] && !bytes.Equal(again, data) {
			t.Fatalf("got\n%x\nwant\n%x", again, data)
		}
		var fx Effects
		b.Restore(time.Second, 1_700_000_000_000, &fx)
		b.Tick(time.Hour, &fx)
	})
}

func TestSnapshot_EveryTruncationAndChangedCountIsAnError(t *testing.T) {
	b := newBench(t, nil)
	b.c.Committed(9)
	for range 4 {
		b.nack(b.take())
	}
	b.commit()
	snap := b.book.AppendSnapshot(nil, b.now, b.wallMs)
	for n := range snap {
		if err := NewBook(rand.NewPCG(0, 0), nil).Load(snap[:n]); !errors.Is(err, ErrRecord) {
			t.Fatalf("%d of %d bytes: error %v", n, len(snap), err)
		}
	}
	for i, what := range map[int]string{0: "version", 4: "cursors", 5 + 6 + 15: "next", 5 + 6 + 31: "dropped", 5 + 6 + 35: "open"} {
		bad := bytes.Clone(snap)
		bad[i]++
		if err := NewBook(rand.NewPCG(0, 0), nil).Load(bad); !errors.Is(err, ErrRecord) {
			t.Errorf("changed %s: error %v", what, err)
		}
	}
	if err := NewBook(rand.NewPCG(0, 0), nil).Load(append(snap, 0)); !errors.Is(err, ErrRecord) {
		t.Errorf("trailing byte: error %v", err)
	}
}
