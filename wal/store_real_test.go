package wal

import (
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/ring"
)

// realDisk lets tests block on a ring.
type realDisk struct{ *ring.Ring }

func (d realDisk) WaitOne() error {
	for {
		if n, err := d.Wait(-1); n > 0 || err != nil {
			return err
		}
	}
}

// TestStore_OnARealDisk runs journal and store on a real file system, ends them cleanly and by forgetting them, and reads
// everything back.
func TestStore_OnARealDisk(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	dir := t.TempDir()
	pool := testPool(t)
	want := map[StreamID][]string{}
	ids := []StreamID{p0, p1, p2, le, md}
	for life := range 4 {
		r, err := ring.New(ring.Options{Logger: quietLog})
		if err != nil {
			t.Fatal(err)
		}
		d := realDisk{r}
		o := smallStore(pool)
		o.Store.Dir, o.Journal.Dir = filepath.Join(dir, "data"), ""
		o.Store.SegmentMaxBytes = 2 << 20
		o.Journal.FileBytes, o.Journal.MinFiles, o.Journal.MaxRoundBytes = 8<<20, 3, 1<<20
		h := newMemory()
		j, s, rec, err := Open(o, d, h)
		if err != nil {
			t.Fatalf("start %d: %v", life, err)
		}
		if len(rec.Quarantined) > 0 || rec.Metadata != nil || rec.DedupLost != nil {
			t.Fatalf("start %d: %+v", life, rec)
		}
		for id, values := range want {
			if got := rec.LastSequences[id]; int(got) != len(values) {
				t.Fatalf("start %d: %v: last sequence %d of %d", life, id, got, len(values))
			}
		}
		begin := time.Now()
		step := func() {
			s.Step(time.Since(begin))
			if r.Poll() == 0 {
				if _, err := r.Wait(time.Millisecond); err != nil {
					t.Fatal(err)
				}
			}
			if err := s.Err(); err != nil {
				t.Fatal(err)
			}
		}
		s.OnDurable(func(n RoundNumber) { j.Trim(n) })
		s.OnSweepStart(func(n RoundNumber) { s.SaveSnapshot(SnapshotDedup, uint64(j.Flushed()), j.Epoch(), []byte("dedup")) })
		j.Trim(s.Durable())
		j.OnFlushed(func(r *Round, err error) {
			if err != nil {
				t.Errorf("flush: %v", err)
			}
			if err := s.Add(r); err != nil {
				t.Error(err)
			}
		})
		for i := range 60 {
			for k, id := range ids {
				size := []int{20, 3000, 90 << 10}[(i+k)%3]
				rec := testRecord(id, Sequence(len(want[id])+1), size)
				for j.Append(id, &rec) != nil {
					if j.CanSeal() {
						j.Seal()
					}
					s.RequestSweep()
					step()
				}
				want[id] = append(want[id], string(rec.Value))
			}
			for !j.CanSeal() {
				step()
			}
			j.Seal()
			step()
		}
		for j.InFlight() > 0 {
			step()
		}
		if life == 1 {
			s.SaveSnapshot(SnapshotCursors, uint64(len(want[le])), j.Epoch(), []byte("cursors"))
			s.SaveSnapshot(SnapshotMetadata, uint64(len(want[md])), j.Epoch(), []byte("metadata"))
		}
		s.RequestSweep()
		for s.Durable() < j.Flushed() {
			step()
		}
		checkReal(t, s, step, want)
		if life%2 == 0 {
			s.SaveSnapshot(SnapshotDedup, uint64(j.Flushed()), j.Epoch(), []byte("dedup"))
			s.StartClose()
			for !s.Closed() {
				step()
			}
			if err := j.Close(d); err != nil {
				t.Fatal(err)
			}
		} else {
			for s.inflight > 0 {
				step()
			}
			j.releaseMemory()
			s.closeAll()
			s.freeBuffers()
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if names, err := os.ReadDir(filepath.Join(dir, "data", "topics", "1", "0")); err != nil || len(names) < 4 {
		t.Errorf("few files: %v, %v", names, err)
	}
}

// checkReal reads every partition back.
func checkReal(t *testing.T, s *Store, step func(), want map[StreamID][]string) {
	t.Helper()
	for id, values := range want {
		if id.Kind != Messages {
			continue
		}
		var got []string
		for {
			done := false
			req := &ReadRequest{Stream: id, From: Sequence(len(got) + 1), Done: func(*ReadRequest) { done = true }}
			s.Read(req)
			for !done {
				step()
			}
			if req.Err != nil {
				t.Fatalf("read %v: %v", id, req.Err)
			}
			if req.Chunk == nil {
				break
			}
			var r Record
			for b := req.Chunk.Bytes(); len(b) > 0; {
				b = b[PeekRecord(b, &r):]
				got = append(got, string(r.Value))
			}
			req.Chunk.Release()
		}
		if !slices.Equal(got, values) {
			t.Fatalf("%v: %d records read, %d committed", id, len(got), len(values))
		}
	}
}
