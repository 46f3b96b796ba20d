package wal

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"log/slog"
	"testing"

	"github.com/cespare/xxhash/v2"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

const testJournalDir = "data/journal/0"

var (
	quietLog = slog.New(slog.DiscardHandler)

	testStreams = []StreamID{
		{Kind: Messages, Topic: 1, Partition: 0}, {Kind: Messages, Topic: 1, Partition: 1},
		{Kind: Ledger}, {Kind: Metadata},
	}
)

// smallJournal returns options for a journal of 64 KiB files, so that a few rounds rotate.
func smallJournal(pool *ring.Pool) JournalOptions {
	n := uint64(0)
	return JournalOptions{
		Dir: testJournalDir, FileBytes: 64 << 10, MinFiles: 2, MaxFiles: 4, MaxRoundBytes: 16 << 10,
		ZeroBytesPerSec: 1 << 40, Pool: pool, Logger: quietLog,
		Random: func() uint64 { n++; return n * 0x9E3779B97F4A7C15 },
	}
}

// testPool returns a pool and checks at the test's end that everything was given back.
func testPool(t testing.TB) *ring.Pool {
	t.Helper()
	pool := ring.NewPool(256 << 20)
	t.Cleanup(func() {
		if n := pool.InUse(); n != 0 && !t.Failed() {
			t.Errorf("%d bytes of slabs were not released", n)
		}
		pool.Trim()
	})
	return pool
}

// got is a record as a test remembers it.
type got struct {
	round  RoundNumber
	stream StreamID
	seq    Sequence
	value  string
}

// roundRecords returns the records of a round.
func roundRecords(r *Round) []got {
	var list []got
	var rec Record
	for i := range r.Entries {
		e := &r.Entries[i]
		b := r.Data(e)
		for k := range e.Count {
			b = b[PeekRecord(b, &rec):]
			if rec.Sequence != e.First+Sequence(k) {
				panic("sequence of a record disagrees with its entry")
			}
			list = append(list, got{r.Number, e.Stream, rec.Sequence, string(rec.Value)})
		}
		if len(b) != 0 {
			panic("an entry has more bytes than its records")
		}
	}
	return list
}

// openJournal recovers the journal on a disk and returns what it delivered.
func openJournal(t testing.TB, d *simdisk.Disk, opts JournalOptions, from RoundNumber) (*Journal, *journalRecovery, []got) {
	t.Helper()
	j, rec, list, err := tryJournal(d, opts, from)
	if err != nil {
		t.Fatal(err)
	}
	return j, rec, list
}

func tryJournal(d *simdisk.Disk, opts JournalOptions, from RoundNumber) (*Journal, *journalRecovery, []got, error) {
	var list []got
	next := RoundNumber(0)
	j, rec, err := recoverJournal(d, opts, replay{from: from, round: func(r *Round) error {
		if next != 0 && r.Number != next {
			return fmt.Errorf("round %d was delivered, not %d", r.Number, next)
		}
		next = r.Number + 1
		list = append(list, roundRecords(r)...)
		return nil
	}})
	return j, rec, list, err
}

// testValue returns a value made of epoch, stream and sequence, padded to n bytes.
func testValue(epoch Epoch, s StreamID, seq Sequence, n int) []byte {
	v := fmt.Appendf(nil, "%d/%v/%d/", epoch, s, seq)
	if len(v) < n {
		v = append(v, bytes.Repeat([]byte{byte('a' + seq%26)}, n-len(v))...)
	}
	return v
}

// writer drives a journal in tests: it numbers records and remembers what was sealed and what was flushed.
type writer struct {
	t       testing.TB
	d       *simdisk.Disk
	j       *Journal
	next    map[StreamID]Sequence
	sealed  []got
	flushed []got
	failed  []error
}

func newWriter(t testing.TB, d *simdisk.Disk, j *Journal) *writer {
	w := &writer{t: t, d: d, j: j, next: map[StreamID]Sequence{}}
	j.OnFlushed(func(r *Round, err error) {
		if err != nil {
			w.failed = append(w.failed, err)
		} else {
			w.flushed = append(w.flushed, roundRecords(r)...)
		}
		r.Release()
	})
	return w
}

// append appends a record of n value bytes.
func (w *writer) append(s StreamID, n int) error {
	seq := w.next[s] + 1
	rec := Record{Sequence: seq, Key: []byte("k"), Value: testValue(w.j.Epoch(), s, seq, n), LeaderEpoch: w.j.Epoch()}
	if err := w.j.Append(s, &rec); err != nil {
		return err
	}
	w.next[s] = seq
	w.sealed = append(w.sealed, got{w.j.NextRound(), s, seq, string(rec.Value)})
	return nil
}

// round writes one round with a record of n bytes on each stream and waits for it.
func (w *writer) round(n int, streams ...StreamID) RoundNumber {
	w.t.Helper()
	for _, s := range streams {
		if err := w.append(s, n); err != nil {
			w.t.Fatalf("append: %v", err)
		}
	}
	number := w.j.Seal()
	for w.j.InFlight() > 0 {
		if err := w.d.WaitOne(); err != nil {
			w.t.Fatal(err)
		}
	}
	return number
}

func (w *writer) close() {
	w.t.Helper()
	if err := w.j.Close(w.d); err != nil {
		w.t.Fatal(err)
	}
}

// resumMark makes a mark slot's checksum right again.
func resumMark(slot []byte) { binary.BigEndian.PutUint64(slot[56:], xxhash.Sum64(slot[:56])) }
