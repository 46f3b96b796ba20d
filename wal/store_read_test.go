package wal

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// filled returns a node with several full segments of p0, everything durable.
func filled(t *testing.T, o OpenOptions, records, size int) *node {
	t.Helper()
	return filledOn(t, simdisk.Options{}, o, records, size)
}

// filledOn is filled on a disk with other options.
func filledOn(t *testing.T, d simdisk.Options, o OpenOptions, records, size int) *node {
	t.Helper()
	n := openNode(t, simdisk.New(d), o)
	for i := range records {
		n.publish(size, p0)
		if i%9 == 8 {
			n.now += DefaultWriteOutEvery
			n.settle()
		}
		if i%20 == 19 {
			n.sweep()
		}
	}
	n.sweep()
	return n
}

func TestStoreRead_ChunksOfAnySizeGiveTheSameRecords(t *testing.T) {
	o := smallStore(testPool(t))
	n := filled(t, o, 120, 900)
	for _, max := range []int{1, 100, 957, 5000, 40 << 10, MaxReadBytes, 1 << 30} {
		got, err := n.readAll(p0, 1, max)
		if err != nil || len(got) != 120 {
			t.Errorf("chunks of %d bytes: %d records, %v", max, len(got), err)
		}
	}
	for from := Sequence(1); from <= 120; from += 7 {
		c, err := n.read(ReadRequest{Stream: p0, From: from, MaxBytes: 1})
		if err != nil || c == nil || c.First != from || c.Count != 1 {
			t.Fatalf("read of one record from %d: %v, %v", from, c, err)
		}
		c.Release()
	}
	n.close()
}

// What was flushed leaves the page cache, but for partitions whose files somebody reads.
func TestStore_FlushedFilesLeaveThePageCache(t *testing.T) {
	n := openNode(t, simdisk.New(simdisk.Options{}), smallStore(testPool(t)))
	uncached := map[StreamID]bool{}
	n.d.OnStep(func(op *ring.Op) {
		for _, st := range n.s.order {
			for _, seg := range st.segs {
				if op.Kind == ring.Uncache && op.FD == seg.fd {
					uncached[st.id] = true
				}
			}
		}
	})
	for _, test := range []struct {
		when string
		read bool
		wait time.Duration
		want map[StreamID]bool
	}{
		{"nobody reads", false, 0, map[StreamID]bool{p0: true, p2: true}},
		{"the first one is read", true, keepCached - time.Second, map[StreamID]bool{p2: true}},
		{"that was a while ago", false, 2 * time.Second, map[StreamID]bool{p0: true, p2: true}},
	} {
		if test.read {
			if _, err := n.readAll(p0, 1, MaxReadBytes); err != nil {
				t.Fatal(err)
			}
		}
		n.now += test.wait
		n.settle()
		clear(uncached)
		for range 3 {
			n.publish(900, p0, p2, le)
		}
		n.sweep()
		if !maps.Equal(uncached, test.want) {
			t.Errorf("%s: %v left the page cache, want %v", test.when, uncached, test.want)
		}
	}
	n.check()
	n.close()
}

// What is not in the page cache is read past it, once; a second reader fills the cache.
func TestStoreRead_PastThePageCache(t *testing.T) {
	o := smallStore(testPool(t))
	n := filledOn(t, simdisk.Options{Uncached: true}, o, 120, 900)
	var direct, buffered int
	n.d.OnStep(func(op *ring.Op) {
		for _, seg := range n.s.streams.get(p0).segs {
			switch {
			case op.Kind != ring.Read:
			case op.FD == seg.direct:
				direct++
			case op.FD == seg.fd:
				buffered++
			}
		}
	})
	for pass, want := range []bool{true, false} {
		direct, buffered = 0, 0
		got, err := n.readAll(p0, 1, 40<<10)
		if err != nil || len(got) != 120 {
			t.Errorf("pass %d: %d records, %v", pass, len(got), err)
		}
		if want && direct == 0 || !want && buffered == 0 {
			t.Errorf("pass %d: %d direct reads, %d through the page cache", pass, direct, buffered)
		}
	}
	n.close()

	// A larger bound counts where the disk is read only.
	for _, uncached := range []bool{false, true} {
		o := smallStore(testPool(t))
		o.Store.SegmentMaxBytes = 1 << 20
		n := filledOn(t, simdisk.Options{Uncached: uncached}, o, 120, 900)
		c, err := n.read(ReadRequest{Stream: p0, From: 1, MaxBytes: 8 << 10, DiskBytes: 64 << 10})
		if err != nil {
			t.Fatal(err)
		}
		if large := len(c.Bytes()) > 8<<10; large != uncached {
			t.Errorf("uncached %v: a chunk of %d bytes", uncached, len(c.Bytes()))
		}
		c.Release()
		n.close()
	}
}

func TestStoreRead_TellsWhatIsNotThere(t *testing.T) {
	n := filled(t, smallStore(testPool(t)), 10, 100)
	for _, req := range []ReadRequest{
		{Stream: p0, From: 11}, {Stream: p0, From: 1 << 60}, {Stream: p1, From: 1}, {Stream: le, From: 1}, {Stream: StreamID{}},
		{Stream: p0, ByTime: true, TimeMs: testTime(10) + 1},
	} {
		if c, err := n.read(req); c != nil || err != nil {
			t.Errorf("read %+v: %v, %v", req, c, err)
		}
	}
	c, err := n.read(ReadRequest{Stream: p0, From: 0})
	if err != nil || c == nil || c.First != 1 {
		t.Fatalf("a read from 0 starts at the oldest record: %v, %v", c, err)
	}
	c.Release()
	// What is only in memory isn't in the files yet.
	n.publish(100, p0)
	if c, err := n.read(ReadRequest{Stream: p0, From: 11}); c != nil || err != nil {
		t.Errorf("a record that isn't written yet: %v, %v", c, err)
	}
	if first, last, ok := n.s.Bounds(p0); first != 1 || last != 11 || !ok {
		t.Errorf("bounds %d to %d, %v", first, last, ok)
	}
	n.close()
}

func TestStoreRead_ByTimeFindsTheFirstRecordAtOrAfter(t *testing.T) {
	o := smallStore(testPool(t))
	n := filled(t, o, 120, 900)
	check := func() {
		t.Helper()
		for seq := Sequence(2); seq <= 120; seq++ {
			want := seq &^ 1 // pairs have the same time
			if testTime(want) != testTime(seq) {
				t.Fatal("times of the test changed")
			}
			for _, ms := range []uint64{testTime(seq), testTime(seq) - 1} {
				c, err := n.read(ReadRequest{Stream: p0, ByTime: true, TimeMs: ms, MaxBytes: 1})
				if err != nil || c == nil || c.First != want {
					t.Fatalf("time %d: chunk %v, %v; expected sequence %d", ms, c, err, want)
				}
				c.Release()
			}
		}
		c, err := n.read(ReadRequest{Stream: p0, ByTime: true, MaxBytes: 1})
		if err != nil || c == nil || c.First != 1 {
			t.Fatalf("time 0: %v, %v", c, err)
		}
		c.Release()
	}
	check()
	n.close()
	n = n.reopen(n.d, o)
	check()
	n.close()
}

func TestStoreRead_LargeRecordsComeWhole(t *testing.T) {
	o := smallStore(testPool(t))
	o.Journal.FileBytes, o.Journal.MaxRoundBytes = 8<<20, 1<<20
	n := openNode(t, simdisk.New(simdisk.Options{}), o)
	for _, size := range []int{100, 3 << 20, 100, 70 << 10, 100} {
		n.publish(size, p0)
	}
	n.sweep()
	n.check()
	c, err := n.read(ReadRequest{Stream: p0, From: 2, MaxBytes: 10})
	if err != nil || c.Count != 1 || c.First != 2 {
		t.Fatalf("%v, %v", c, err)
	}
	c.Release()
	n.close()
}

// TestStoreRead_MakesIndexesAgain takes index files away or damages them: reads give the same, and the files are back.
func TestStoreRead_MakesIndexesAgain(t *testing.T) {
	for name, damage := range map[string]func(d *simdisk.Disk, path string){
		"missing":   func(d *simdisk.Disk, path string) { d.RemoveFile(path) },
		"empty":     func(d *simdisk.Disk, path string) { d.WriteFile(path, nil) },
		"bit":       func(d *simdisk.Disk, path string) { d.Damage(path, 70, 1) },
		"truncated": func(d *simdisk.Disk, path string) { d.WriteFile(path, d.ReadFile(path)[:90]) },
		"other's": func(d *simdisk.Disk, path string) {
			other := d.ReadFile(streamDir(testDataDir, 0, p0) + "/" + sequenceName(1) + indexSuffix)
			if path == streamDir(testDataDir, 0, p0)+"/"+sequenceName(1)+indexSuffix {
				other = []byte("MMIX")
			}
			d.WriteFile(path, other)
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := smallStore(testPool(t))
			n := filled(t, o, 120, 900)
			n.close()
			indexes := 0
			for _, path := range n.d.Paths() {
				if len(path) > 4 && path[len(path)-4:] == indexSuffix {
					damage(n.d, path)
					indexes++
				}
			}
			if indexes < 3 {
				t.Fatalf("only %d index files", indexes)
			}
			n = n.reopen(n.d, o)
			n.check()
			n.settle()
			n.close()
			again := 0
			for _, path := range n.d.Paths() {
				if len(path) > 4 && path[len(path)-4:] == indexSuffix {
					again++
				}
			}
			if again != indexes {
				t.Errorf("%d index files, %d were there before", again, indexes)
			}
		})
	}
}

// TestStoreRead_CatchesBytesOfAnotherPlace gives a read well-formed bytes of the wrong place, which only the sums of the
// blocks can tell apart.
func TestStoreRead_CatchesBytesOfAnotherPlace(t *testing.T) {
	o := smallStore(testPool(t))
	o.Store.SegmentMaxBytes = 1 << 20
	o.Journal.FileBytes = 1 << 20
	n := filled(t, o, 400, 900)
	remove := n.d.Inject(simdisk.Fault{Kind: ring.Read, Path: "*.mqs", Misdirect: indexBlock})
	_, err := n.readAll(p0, 1, 0)
	var c *CorruptionError
	if !errors.As(err, &c) || c.Stream != p0 || c.Path != segmentPath(p0, 1) {
		t.Fatalf("misdirected read: %v", err)
	}
	remove()
	if _, err := n.readAll(p0, 1, 0); !errors.Is(err, ErrCorrupt) {
		t.Fatalf("a quarantined partition was read: %v", err)
	}
	n.close()

	// The report keeps the partition from being served until it is removed, though the files are good.
	for range 2 {
		n = n.reopen(n.d, o)
		q := n.rec.Quarantined
		if len(q) != 1 || q[0].Stream != p0 || q[0].Report == "" || !strings.Contains(q[0].Cause, c.Path) {
			t.Fatalf("after a start: %+v", q)
		}
		if got := n.rec.LastSequences[p0]; int(got) != len(n.acked[p0]) {
			t.Fatalf("the partition ends with sequence %d of %d", got, len(n.acked[p0]))
		}
		if _, err := n.readAll(p0, 1, 0); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("a quarantined partition was read after a start: %v", err)
		}
		n.publish(100, p0) // from what was on its way
		n.sweep()
		n.close()
	}
	n.removeReports(p0, 1)
	n = n.reopen(n.d, o)
	n.check()
	n.close()
}

// removeReports removes the reports of a partition, of which there are as many as want, as an operator does who has
// repaired it.
func (n *node) removeReports(id StreamID, want int) {
	n.t.Helper()
	found := 0
	for _, p := range n.d.Paths() {
		if strings.HasPrefix(p, streamDir(testDataDir, 0, id)+"/"+reportPrefix) {
			n.d.RemoveFile(p)
			found++
		}
	}
	if found != want {
		n.t.Errorf("%d reports of %v, want %d", found, id, want)
	}
}

// TestStoreRead_OneDamagedPartitionLeavesTheOthers flips bits all over a segment.
func TestStoreRead_OneDamagedPartitionLeavesTheOthers(t *testing.T) {
	for _, where := range []int64{0, 4, 20, 4096, 4100, 4096 + 60, 20000} {
		t.Run(fmt.Sprint(where), func(t *testing.T) {
			o := smallStore(testPool(t))
			n := filled(t, o, 120, 900)
			n.publish(100, p1)
			n.sweep()
			n.d.Damage(segmentPath(p0, 1), where, 0x10)
			var reported []QuarantineReport
			n.s.OnQuarantine(func(r QuarantineReport) { reported = append(reported, r) })
			_, err := n.readAll(p0, 1, 0)
			var c *CorruptionError
			if !errors.As(err, &c) || c.Path != segmentPath(p0, 1) || c.Stream != p0 || c.Sequence == 0 {
				t.Fatalf("reading the damaged segment: %v", err)
			}
			n.settle()
			if len(reported) != 1 || reported[0].Stream != p0 || n.d.ReadFile(reported[0].Report) == nil {
				t.Fatalf("reports: %+v", reported)
			}
			if got, err := n.readAll(p1, 1, 0); err != nil || len(got) != 1 {
				t.Errorf("the other partition: %d records, %v", len(got), err)
			}
			// What is committed from now on still gets to disk.
			n.publish(100, p0, p1)
			n.sweep()
			if err := n.s.Err(); err != nil {
				t.Error(err)
			}
			n.close()
		})
	}
}

func TestStoreRead_WithoutMemoryFailsAndWorksLater(t *testing.T) {
	pool := ring.NewPool(64 << 20)
	o := smallStore(pool)
	n := filled(t, o, 40, 900)
	var hold []*ring.Slab
	for size := 1 << 20; size >= ring.MinSlab; size >>= 1 {
		for slab := pool.Get(size); slab != nil; slab = pool.Get(size) {
			hold = append(hold, slab)
		}
	}
	if c, err := n.read(ReadRequest{Stream: p0, From: 1}); !errors.Is(err, ErrNoMemory) || c != nil {
		t.Errorf("chunk %v, error %v", c, err)
	}
	for _, slab := range hold {
		slab.Release()
	}
	n.check()
	n.close()
}
