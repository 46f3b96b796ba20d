package wal

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

const (
	tableTestPath  = testJournalDir + "/" + tableFile
	dedupTestPath  = testJournalDir + "/" + dedupFile
	cursorTestPath = testDataDir + "/ledger/0/" + cursorFile
	ledgerTestPath = testDataDir + "/ledger/0/" + ledgerActive
)

// lived returns a node that has been through everything, with a journal that has been recycled; what it published is in
// its files.
func lived(t *testing.T, o OpenOptions) *node {
	t.Helper()
	n := openNode(t, simdisk.New(simdisk.Options{}), o)
	for i := range 60 {
		n.publish([]int{10, 700, 3000, 6000}[i%4], p0, p1, le, md)
		if i%7 == 6 {
			n.sweep()
		}
		if i == 20 || i == 40 {
			n.s.SaveSnapshot(SnapshotMetadata, uint64(len(n.acked[md])), n.j.Epoch(), []byte("metadata"))
			n.s.SaveSnapshot(SnapshotCursors, uint64(len(n.acked[le])), n.j.Epoch(), []byte("cursors"))
			n.settle()
		}
	}
	n.sweep()
	return n
}

// killedWithMetadata returns one like it that was killed with metadata that only the journal has, and its options.
func killedWithMetadata(t *testing.T) (*node, OpenOptions) {
	t.Helper()
	o := smallStore(testPool(t))
	n := lived(t, o)
	for range 3 {
		n.publish(100, md, p0)
	}
	n.kill()
	return n, o
}

// activePath returns the newest segment of a partition and where its checkpoint is.
func (n *node) activePath(id StreamID) (path string, durable int64) {
	st := n.s.streams.get(id)
	return st.path(st.active), int64(st.saved.Offset)
}

// find returns the only path with this part in it that is a file.
func find(t *testing.T, d *simdisk.Disk, part string) string {
	t.Helper()
	var found []string
	for _, p := range d.Paths() {
		if strings.Contains(p, part) {
			found = append(found, p)
		}
	}
	if len(found) == 0 {
		t.Fatalf("no file with %q in its path", part)
	}
	return found[len(found)-1]
}

// TestOpen_NewerFormatIsRefusedByName raises the version of every file in turn.
func TestOpen_NewerFormatIsRefusedByName(t *testing.T) {
	o := smallStore(testPool(t))
	n := lived(t, o)
	active, _ := n.activePath(p0)
	n.close()
	for _, path := range []string{
		active, tableTestPath, dedupTestPath, cursorTestPath, ledgerTestPath,
		streamDir(testDataDir, 0, p0) + "/" + checkpointFile, find(t, n.d, snapshotPrefix), find(t, n.d, metadataPrefix),
	} {
		t.Run(path, func(t *testing.T) {
			d := n.d.Clone()
			b := d.ReadFile(path)
			newer := func(b []byte) { b[4], b[8] = 2, ^b[8] } // its checksum is not that of version 1
			newer(b)
			if path == tableTestPath {
				newer(b[len(b)/2:])
			}
			d.WriteFile(path, b)
			before := d.Clone()
			_, err := tryNode(t, d, o)
			var v *VersionError
			if !errors.As(err, &v) || v.Path != path || v.Version != 2 {
				t.Fatalf("opened with %v", err)
			}
			if !d.Equal(before) {
				t.Error("the refused start changed something")
			}
		})
	}
}

// damageIndexes changes a byte of every index.
func damageIndexes(d *simdisk.Disk, off int64, mask byte) {
	for _, p := range d.Paths() {
		if strings.HasSuffix(p, indexSuffix) {
			d.Damage(p, off, mask)
		}
	}
}

// TestOpen_RedundantFilesMayBeLost takes away or damages what is there twice, or can be found otherwise.
func TestOpen_RedundantFilesMayBeLost(t *testing.T) {
	mqc := func(id StreamID) string { return streamDir(testDataDir, 0, id) + "/" + checkpointFile }
	for name, damage := range map[string]func(d *simdisk.Disk){
		"partition checkpoint missing":   func(d *simdisk.Disk) { d.RemoveFile(mqc(p0)) },
		"partition checkpoint damaged":   func(d *simdisk.Disk) { d.Damage(mqc(p0), 12, 1) },
		"partition checkpoint empty":     func(d *simdisk.Disk) { d.WriteFile(mqc(p0), nil) },
		"table missing":                  func(d *simdisk.Disk) { d.RemoveFile(tableTestPath) },
		"table zeroed":                   func(d *simdisk.Disk) { d.WriteFile(tableTestPath, make([]byte, 8192)) },
		"table empty":                    func(d *simdisk.Disk) { d.WriteFile(tableTestPath, nil) },
		"table and checkpoints missing":  func(d *simdisk.Disk) { d.RemoveFile(tableTestPath); d.RemoveFile(mqc(p0)); d.RemoveFile(mqc(p1)) },
		"partition checkpoint's version": func(d *simdisk.Disk) { d.Damage(mqc(p0), 4, 4) },
		"indexes damaged":                func(d *simdisk.Disk) { damageIndexes(d, 70, 1) },
		"indexes' version":               func(d *simdisk.Disk) { damageIndexes(d, 4, 64) },
		"newest metadata snapshot":       func(d *simdisk.Disk) { d.Damage(find(t, d, snapshotPrefix), 33, 1) },
		"newest metadata snapshot short": func(d *simdisk.Disk) { d.WriteFile(find(t, d, snapshotPrefix), []byte("MMMS\x01")) },
		"bytes behind the checkpoint": func(d *simdisk.Disk) {
			for _, part := range []string{"topics/1/0/0", "topics/1/1/0", ledgerActive, metadataPrefix} {
				path := find(t, d, part)
				if strings.HasSuffix(path, indexSuffix) {
					path = strings.TrimSuffix(path, indexSuffix) + segmentSuffix
				}
				d.WriteFile(path, append(d.ReadFile(path), "torn by a power cut, never acknowledged"...))
			}
		},
	} {
		for _, clean := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, clean %v", name, clean), func(t *testing.T) {
				o := smallStore(testPool(t))
				n := lived(t, o)
				if clean {
					n.close()
				} else {
					n.publish(100, p0, p1, le, md)
					n.kill()
				}
				d := n.d.Clone()
				damage(d)
				n = n.reopen(d, o)
				if len(n.rec.Quarantined) > 0 || n.rec.Metadata != nil {
					t.Fatalf("quarantined: %+v %+v", n.rec.Quarantined, n.rec.Metadata)
				}
				n.settle()
				n.check()
				for id, values := range n.acked {
					if got := n.rec.LastSequences[id]; int(got) != len(values) {
						t.Errorf("%v: last sequence %d of %d", id, got, len(values))
					}
				}
				n.publish(100, p0, p1, le, md)
				n.sweep()
				n.check()
				n.close()
			})
		}
	}
}

// TestOpen_DamagedPartitionIsQuarantined damages what a checkpoint vouches for: the partition isn't served, with a
// report; the others are; what is committed is still written and the next start knows it.
func TestOpen_DamagedPartitionIsQuarantined(t *testing.T) {
	for name, damage := range map[string]func(d *simdisk.Disk, active string, durable int64){
		"checkpoint beyond the end": func(d *simdisk.Disk, active string, durable int64) {
			d.WriteFile(active, d.ReadFile(active)[:durable-4096])
		},
		"header":          func(d *simdisk.Disk, active string, _ int64) { d.Damage(active, 17, 1) },
		"empty file":      func(d *simdisk.Disk, active string, _ int64) { d.WriteFile(active, nil) },
		"file missing":    func(d *simdisk.Disk, active string, _ int64) { d.RemoveFile(active) },
		"another segment": func(d *simdisk.Disk, active string, _ int64) { d.WriteFile(active, d.ReadFile(segmentPath(p0, 1))) },
		"directory missing": func(d *simdisk.Disk, active string, _ int64) {
			for _, p := range d.Paths() {
				if strings.HasPrefix(p, streamDir(testDataDir, 0, p0)+"/") {
					d.RemoveFile(p)
				}
			}
			d.RemoveFile(streamDir(testDataDir, 0, p0))
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := smallStore(testPool(t))
			n := lived(t, o)
			active, durable := n.activePath(p0)
			n.close()
			damage(n.d, active, durable)
			n = n.reopen(n.d, o)
			if len(n.rec.Quarantined) != 1 || n.rec.Quarantined[0].Stream != p0 {
				t.Fatalf("quarantined: %+v", n.rec.Quarantined)
			}
			var c *CorruptionError
			if err := n.rec.Quarantined[0].Err; !errors.As(err, &c) || c.Path == "" || c.Stream != p0 || c.Sequence == 0 {
				t.Errorf("reported: %#v", err)
			}
			if got := n.rec.LastSequences[p0]; int(got) != len(n.acked[p0]) {
				t.Errorf("last sequence %d of %d", got, len(n.acked[p0]))
			}
			if _, err := n.readAll(p0, 1, 0); !errors.Is(err, ErrCorrupt) {
				t.Errorf("reading the quarantined partition: %v", err)
			}
			if got := n.mustReadAll(p1, "the other partition"); len(got) != len(n.acked[p1]) {
				t.Errorf("the other partition has %d records", len(got))
			}
			n.publish(100, p0, p1)
			n.publish(100, p0, p1)
			n.sweep()
			if n.d.ReadFile(n.rec.Quarantined[0].Report) == nil && name != "directory missing" {
				t.Error("no report was written")
			}
			n.close()
			reports := 1
			if name == "directory missing" {
				reports = 0
			}
			n.removeReports(p0, reports)
			n = n.reopen(n.d, o)
			if got := n.rec.LastSequences[p0]; int(got) != len(n.acked[p0]) {
				t.Errorf("after another start: last sequence %d of %d", got, len(n.acked[p0]))
			}
			last := Sequence(len(n.acked[p0]))
			c1, err := n.read(ReadRequest{Stream: p0, From: last - 1})
			if err != nil || c1 == nil || c1.First != last-1 || c1.Last() != last {
				t.Errorf("what was written since: %v, %v", c1, err)
			}
			if c1 != nil {
				c1.Release()
			}
			n.close()
		})
	}
}

// TestOpen_UntrustedMetadataIsMovedAway damages the metadata log: it is moved to quarantine with a report, and no metadata
// is served by this start or the next.
func TestOpen_UntrustedMetadataIsMovedAway(t *testing.T) {
	for name, damage := range map[string]func(d *simdisk.Disk) func(StreamID, *Record) error{
		"bit in the log": func(d *simdisk.Disk) func(StreamID, *Record) error {
			d.Damage(find(t, d, metadataPrefix), 4096+60, 1)
			return nil
		},
		"truncated log": func(d *simdisk.Disk) func(StreamID, *Record) error {
			d.WriteFile(find(t, d, metadataPrefix), d.ReadFile(find(t, d, metadataPrefix))[:5000])
			return nil
		},
		"log missing": func(d *simdisk.Disk) func(StreamID, *Record) error {
			d.RemoveFile(find(t, d, metadataPrefix))
			return nil
		},
		"a record that isn't understood": func(*simdisk.Disk) func(StreamID, *Record) error {
			return func(s StreamID, r *Record) error {
				if s.Kind == Metadata && r.Sequence == 58 {
					return errors.New("unknown mutation 77")
				}
				return nil
			}
		},
		"a record in the journal that isn't understood": func(*simdisk.Disk) func(StreamID, *Record) error {
			return func(s StreamID, r *Record) error {
				if s.Kind == Metadata && r.Sequence == 62 {
					return errors.New("unknown mutation 77")
				}
				return nil
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			n, o := killedWithMetadata(t)
			d := n.d.Clone()
			reject := damage(d)
			h := newMemory()
			h.reject = reject
			j, s, rec, err := Open(o, d, h)
			if err != nil {
				t.Fatal(err)
			}
			if rec.Metadata == nil || d.ReadFile(rec.Metadata.Report) == nil || rec.Metadata.Cause == "" {
				t.Fatalf("metadata: %+v", rec.Metadata)
			}
			for _, p := range d.Paths() {
				if strings.HasPrefix(p, testDataDir+"/"+metadataDir+"/mm") {
					t.Errorf("%s is still there", p)
				}
			}
			m := &node{t: t, d: d, j: j, s: s, rec: rec, acked: n.acked}
			m.check()
			m.settle()
			m.s.RequestSweep()
			m.settle()
			m.kill()
			d = d.Crash(nil)
			again := openNode(t, d, o)
			if again.rec.Metadata == nil || again.rec.LastSequences[md] != 0 {
				t.Errorf("the next start serves metadata: %+v", again.rec)
			}
			again.close()
		})
	}
}

// TestOpen_DamagedLedgerIsAnError damages the ledger or its checkpoint where nothing can replace them.
func TestOpen_DamagedLedgerIsAnError(t *testing.T) {
	for name, damage := range map[string]func(d *simdisk.Disk) string{
		"bit in the ledger": func(d *simdisk.Disk) string { d.Damage(ledgerTestPath, 4096+60, 1); return ledgerTestPath },
		"ledger's header":   func(d *simdisk.Disk) string { d.Damage(ledgerTestPath, 20, 1); return ledgerTestPath },
		"truncated ledger": func(d *simdisk.Disk) string {
			d.WriteFile(ledgerTestPath, d.ReadFile(ledgerTestPath)[:4096])
			return ledgerTestPath
		},
		"ledger missing":            func(d *simdisk.Disk) string { d.RemoveFile(ledgerTestPath); return ledgerTestPath },
		"cursor checkpoint damaged": func(d *simdisk.Disk) string { d.Damage(cursorTestPath, 33, 1); return cursorTestPath },
		"cursor checkpoint missing": func(d *simdisk.Disk) string { d.RemoveFile(cursorTestPath); return "ledger/0" },
	} {
		t.Run(name, func(t *testing.T) {
			o := smallStore(ring.NewPool(256 << 20))
			n := lived(t, o)
			n.close()
			path := damage(n.d)
			before := n.d.Clone()
			_, err := tryNode(t, n.d, o)
			if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), path) {
				t.Fatalf("opened with %v", err)
			}
			if !before.Equal(n.d) {
				t.Error("the refused start changed something")
			}
		})
	}
}

func TestOpen_LostDedupSnapshotIsReported(t *testing.T) {
	for name, damage := range map[string]func(d *simdisk.Disk){
		"missing": func(d *simdisk.Disk) { d.RemoveFile(dedupTestPath) },
		"damaged": func(d *simdisk.Disk) { d.Damage(dedupTestPath, 33, 1) },
		"short":   func(d *simdisk.Disk) { d.WriteFile(dedupTestPath, d.ReadFile(dedupTestPath)[:34]) },
	} {
		t.Run(name, func(t *testing.T) {
			o := smallStore(testPool(t))
			n := lived(t, o)
			n.close()
			damage(n.d)
			n = n.reopen(n.d, o)
			if n.rec.DedupLost == nil {
				t.Error("not reported")
			}
			n.check()
			n.close()
		})
	}
}

func TestOpen_DedupSnapshotOfOtherDataIsReported(t *testing.T) {
	o := smallStore(testPool(t))
	old := lived(t, o)
	old.close()
	n := openNode(t, simdisk.New(simdisk.Options{}), o)
	n.publish(100, p0)
	n.sweep()
	n.close()
	n = n.reopen(n.d, o)
	if n.rec.DedupLost != nil {
		t.Errorf("its own windows are reported: %v", n.rec.DedupLost)
	}
	n.close()
	n.d.WriteFile(dedupTestPath, old.d.ReadFile(dedupTestPath))
	n = n.reopen(n.d, o)
	if n.rec.DedupLost == nil || !strings.Contains(n.rec.DedupLost.Error(), dedupTestPath) {
		t.Errorf("windows of a longer life are taken: %v", n.rec.DedupLost)
	}
	n.check()
	n.close()
}

// TestStore_FlushErrorIsForEver fails one flush: nothing becomes durable any more, the journal keeps everything, and a
// restart has it all.
func TestStore_FlushErrorIsForEver(t *testing.T) {
	for _, f := range []simdisk.Fault{
		{Kind: ring.Sync, Path: "*.mqs"}, {Kind: ring.Write, Path: "*.mqs"}, {Kind: ring.SyncDir, Path: "0"},
		{Kind: ring.WriteSync, Path: tableFile}, {Kind: ring.Sync, Path: ledgerActive}, {Kind: ring.Open, Path: "*.mqs"},
		{Kind: ring.Sync, Path: dedupFile + ".tmp"}, {Kind: ring.Rename, Path: dedupFile + ".tmp"},
	} {
		t.Run(fmt.Sprintf("%v %s", f.Kind, f.Path), func(t *testing.T) {
			o := smallStore(testPool(t))
			n := openNode(t, simdisk.New(simdisk.Options{}), o)
			n.publish(100, p0, le, md)
			n.sweep()
			durable := n.s.Durable()
			n.publish(7000, p0, p1)
			n.publish(7000, p0, p1, le)
			n.publish(7000, p0)
			n.publish(7000, p0)
			n.publish(7000, p0)
			f.Err, f.Count = syscall.EIO, 1
			n.d.Inject(f)
			n.s.RequestSweep()
			n.settle()
			err := n.s.Err()
			var failed *FailedError
			if !errors.As(err, &failed) || !errors.Is(err, ErrFailed) || !errors.Is(err, syscall.EIO) || failed.Path == "" {
				t.Fatalf("error: %v", err)
			}
			n.publish(100, p0)
			n.s.RequestSweep()
			n.now += DefaultSweepEvery
			n.settle()
			if n.s.Durable() != durable || !errors.Is(n.s.Err(), err) {
				t.Errorf("durable moved from %d to %d, error %v", durable, n.s.Durable(), n.s.Err())
			}
			n.s.StartClose()
			n.settle()
			if !n.s.Closed() {
				t.Error("a failed store doesn't close")
			}
			n.j.releaseMemory()
			n = n.reopen(n.d.Crash(nil), o)
			n.settle()
			n.check()
			n.close()
		})
	}
}

// TestStore_FullDiskHoldsWriteOutUntilThereIsRoom fills the disk under the store.
func TestStore_FullDiskHoldsWriteOutUntilThereIsRoom(t *testing.T) {
	o := smallStore(testPool(t))
	n := openNode(t, simdisk.New(simdisk.Options{}), o)
	n.publish(100, p0, le, md)
	n.sweep()
	n.d.SetCapacity(n.d.Used())
	for range 4 {
		n.publish(5000, p0)
	}
	n.publish(100, p1, le, md)
	n.s.SaveSnapshot(SnapshotCursors, 1, 1, make([]byte, 100_000))
	n.s.RequestSweep()
	n.now += DefaultWriteOutEvery
	n.settle()
	if err := n.s.Err(); err != nil {
		t.Fatalf("a full disk is no failure: %v", err)
	}
	if n.s.FreeBytes() != 0 {
		t.Errorf("%d bytes are free", n.s.FreeBytes())
	}
	if n.s.Durable() == n.j.Flushed() {
		t.Error("everything is durable on a full disk")
	}
	n.d.SetCapacity(0)
	for range 5 {
		n.now += retryEvery
		n.settle()
	}
	if err := n.s.Err(); err != nil || n.s.Durable() != n.j.Flushed() || n.s.PendingBytes() != 0 || n.s.FreeBytes() <= 0 {
		t.Errorf("with room again: durable %d of %d, %d bytes pending, %d free, %v",
			n.s.Durable(), n.j.Flushed(), n.s.PendingBytes(), n.s.FreeBytes(), err)
	}
	n.check()
	n.close()
	n = n.reopen(n.d, o)
	n.check()
	n.close()
}
