package wal

import (
	"path"
	"syscall"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// runFor lets time pass for the store.
func (n *node) runFor(d time.Duration) {
	n.t.Helper()
	for end := n.now + d; ; {
		n.settle()
		if n.now >= end {
			return
		}
		n.now = min(max(n.s.Step(n.now), n.now+1), end)
	}
}

// scrubbed returns a store with several full segments of two partitions, which a scrub reads from a minute on, and the bytes of
// these segments.
func scrubbed(t *testing.T, change func(o *StoreOptions)) (n *node, bytes uint64) {
	t.Helper()
	o := smallStore(testPool(t))
	o.Store.SegmentMaxBytes, o.Store.ScrubAfter, o.Store.ScrubEvery = 192<<10, time.Minute, time.Hour
	o.Journal.FileBytes = 1 << 20
	if change != nil {
		change(&o.Store)
	}
	n = openNode(t, simdisk.New(simdisk.Options{}), o)
	for range 300 {
		n.publish(2000, p0, p1)
		n.now += DefaultWriteOutEvery / 10
		n.settle()
	}
	n.sweep()
	full := 0
	for _, st := range n.s.order {
		for _, seg := range st.segs {
			if seg != st.active {
				bytes += uint64(seg.end)
				full++
			}
		}
	}
	if full < 4 || n.s.scrub.stats != (ScrubStats{}) {
		t.Fatalf("%d full segments, and %+v so far", full, n.s.scrub.stats)
	}
	return n, bytes
}

func TestScrub_ReadsEveryFullSegmentOnceInAWhile(t *testing.T) {
	n, bytes := scrubbed(t, nil)
	n.runFor(2 * time.Minute)
	if got := n.s.Scrubbed(); got != (ScrubStats{Bytes: bytes}) {
		t.Errorf("after the first pass: %+v, want %d bytes", got, bytes)
	}
	n.runFor(50 * time.Minute)
	if got := n.s.Scrubbed(); got.Bytes != bytes {
		t.Errorf("it goes on: %+v", got)
	}
	n.runFor(time.Hour)
	if got := n.s.Scrubbed(); got != (ScrubStats{Bytes: 2 * bytes}) {
		t.Errorf("after the second pass: %+v", got)
	}
	n.check()
	n.close()
}

func TestScrub_KeepsItsPaceAndMemory(t *testing.T) {
	const rate = 64 << 10
	n, bytes := scrubbed(t, func(o *StoreOptions) { o.ScrubBytes = rate })
	before := n.s.o.Pool.InUse()
	n.now = time.Minute
	began := n.now
	for n.s.Scrubbed().Bytes < bytes {
		n.runFor(100 * time.Millisecond)
		if got, most := n.s.Scrubbed().Bytes, uint64((n.now-began).Seconds()*rate)+192<<10; got > most {
			t.Fatalf("%d bytes after %v", got, n.now-began)
		}
		if n.now > 10*time.Minute {
			t.Fatalf("%+v of %d bytes", n.s.Scrubbed(), bytes)
		}
	}
	n.runFor(time.Minute)
	if now := n.s.o.Pool.InUse(); now != before {
		t.Errorf("%d bytes of memory are kept, %d before", now, before)
	}
	n.close()
}

func TestScrub_CanBeSwitchedOff(t *testing.T) {
	n, _ := scrubbed(t, func(o *StoreOptions) { o.ScrubBytes = -1 })
	n.runFor(3 * time.Hour)
	if got := n.s.Scrubbed(); got != (ScrubStats{}) {
		t.Errorf("%+v", got)
	}
	n.close()
}

func TestScrub_FindsDamageBeforeAReader(t *testing.T) {
	first := segmentPath(p0, 1)
	for _, c := range []struct {
		name   string
		harm   func(n *node)
		want   ScrubStats // but for the bytes
		report bool
	}{
		{"a bit of a record", func(n *node) { n.d.Damage(first, 100_000, 0x10) }, ScrubStats{Damaged: 1}, true},
		{"a bit of the header", func(n *node) { n.d.Damage(first, 20, 0x10) }, ScrubStats{Damaged: 1}, true},
		{"a bit of the last byte", func(n *node) { n.d.Damage(first, int64(len(n.d.ReadFile(first)))-1, 1) }, ScrubStats{Damaged: 1}, true},
		{"a missing file", func(n *node) { n.d.RemoveFile(first); n.closeFiles() }, ScrubStats{Damaged: 1}, true},
		{"another block's content", func(n *node) {
			n.d.Inject(simdisk.Fault{Kind: ring.Read, Path: path.Base(first), Misdirect: indexBlock, Count: 1})
		}, ScrubStats{Damaged: 1}, true},
		{"a sector that can't be read", func(n *node) {
			n.d.Inject(simdisk.Fault{Kind: ring.Read, Path: path.Base(first), Err: syscall.EIO, Count: 1})
		}, ScrubStats{Failed: 1}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			n, bytes := scrubbed(t, nil)
			var reports []QuarantineReport
			n.s.OnQuarantine(func(r QuarantineReport) { reports = append(reports, r) })
			c.harm(n)
			n.runFor(3 * time.Minute)
			got := n.s.Scrubbed()
			if got.Bytes < bytes/4 || got.Bytes >= bytes {
				t.Errorf("%d bytes were read without damage, of %d", got.Bytes, bytes)
			}
			if got.Bytes = 0; got != c.want {
				t.Errorf("found %+v, want %+v", got, c.want)
			}
			if c.report != (len(reports) == 1) || c.report && (reports[0].Stream != p0 || reports[0].Path != first || n.d.ReadFile(reports[0].Report) == nil) {
				t.Errorf("reports: %+v", reports)
			}
			if got, err := n.readAll(p1, 1, 0); err != nil || len(got) != len(n.acked[p1]) {
				t.Errorf("the other partition: %d records, %v", len(got), err)
			}
			n.close()
		})
	}
}

// closeFiles closes the files that nobody uses.
func (n *node) closeFiles() {
	for n.s.idle.head != nil {
		seg := n.s.idle.head
		n.s.idle.remove(seg)
		n.s.closeFile(seg)
	}
	n.settle()
}

func TestScrub_GivesWayToReadersForAWhile(t *testing.T) {
	n, bytes := scrubbed(t, nil)
	n.runFor(time.Minute - n.now - time.Second)
	free := n.d.Inject(simdisk.Fault{Kind: ring.Read, Path: "*.mqs", Count: 1, Hang: true})
	req := ReadRequest{Stream: p1, From: 1, Done: func(*ReadRequest) {}}
	n.s.Read(&req)
	for until := n.now + 3*time.Second; n.now < until; n.now += scrubPause {
		n.s.Step(n.now)
		n.d.Poll()
	}
	if got := n.s.Scrubbed(); got.Bytes > 0 || n.s.scrub.slab != nil {
		t.Errorf("it reads beside a reader: %+v", got)
	}
	for until := n.now + 3*scrubPatience; n.now < until && n.s.Scrubbed().Bytes == 0; n.now += scrubPause {
		n.s.Step(n.now)
		for n.d.Poll() > 0 {
		}
	}
	if got := n.s.Scrubbed(); got.Bytes == 0 || got.Bytes == bytes {
		t.Errorf("%+v while a reader waits for ever", got)
	}
	free()
	n.settle()
	if req.Chunk != nil {
		req.Chunk.Release()
	}
	n.runFor(time.Minute)
	if got := n.s.Scrubbed(); got.Bytes != bytes {
		t.Errorf("%+v in the end", got)
	}
	n.close()
}

// Whatever the scrub is at, the store ends, a topic goes, and nothing is left open.
func TestScrub_EndsWithTheStoreAndTheTopic(t *testing.T) {
	for _, end := range []string{"close", "drop", "power cut"} {
		for step := 0; ; step++ {
			n, _ := scrubbed(t, nil)
			n.now = time.Minute
			k := 0
			for ; k < step && n.s.Scrubbed().Bytes == 0; k++ {
				next := n.s.Step(n.now)
				if n.d.InFlight() == 0 {
					n.now = max(next, n.now)
				} else if err := n.d.WaitOne(); err != nil {
					t.Fatal(err)
				}
			}
			switch end {
			case "drop":
				n.drop(p0.Topic)
				n.runFor(2 * time.Minute)
				if got := n.s.Scrubbed(); got.Damaged+got.Failed > 0 {
					t.Fatalf("step %d: %+v", step, got)
				}
				n.close()
			case "close":
				n.close()
			default:
				n.kill()
			}
			if k < step {
				break
			}
		}
	}
}
