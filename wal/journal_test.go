package wal

import (
	"slices"
	"testing"

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
