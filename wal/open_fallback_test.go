package wal

import (
	"errors"
	"strings"
	"testing"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// recycled returns a node that was killed after its journal had used files again that the older half of the checkpoint table
// would need, with options for it, and damages the newer half.
func recycled(t *testing.T) (*node, OpenOptions) {
	t.Helper()
	o := smallStore(testPool(t))
	o.Journal.FileBytes, o.Journal.MaxFiles = 32<<10, 3
	n := lived(t, o)
	o.Deleted = func(topic uint16) bool { return n.dropped[topic] }
	for begins, older := RoundNumber(0), RoundNumber(0); begins <= older+1; {
		n.sweep()
		older = n.s.Durable()
		n.publish(3000, p0, le)
		n.publish(100, p1, p2, md) // known to the newer half only
		n.sweep()
		// Until files of the journal are used again that the older half would need, and without a further sweep.
		for newer := n.s.Durable(); begins <= older+1 && newer == n.s.Durable(); {
			n.publish(3000, p0, le)
			var err error
			if begins, err = journalBegins(n.d.Clone(), o.Journal); err != nil {
				t.Fatal(err)
			}
		}
		older = n.tableBefore()
	}
	n.kill()
	n.d = n.d.Clone()
	n.damageTable(0)
	return n, o
}

// tableBefore returns the round of the older half of the checkpoint table.
func (n *node) tableBefore() RoundNumber {
	older := n.s.Durable()
	b := n.d.ReadFile(tableTestPath)
	slot := len(b) / 2 &^ (ring.BlockSize - 1)
	for i := range 2 {
		if t, ok, err := decodeTable(b[i*slot:(i+1)*slot], 0); ok && err == nil {
			older = min(older, t.Point.Round)
		}
	}
	return older
}

// damageTable damages the newest half of the checkpoint table, or with before 1 the one before.
func (n *node) damageTable(before uint64) {
	n.t.Helper()
	b := n.d.ReadFile(tableTestPath)
	slot := len(b) / 2 &^ (ring.BlockSize - 1)
	newest := uint64(0)
	for i := range 2 {
		if t, ok, err := decodeTable(b[i*slot:(i+1)*slot], 0); ok && err == nil {
			newest = max(newest, t.Generation)
		}
	}
	n.d.Damage(tableTestPath, int64((newest-before)%2)*int64(slot)+20, 1)
}

// TestOpen_WithoutTheNewerHalfOfTheTable: the journal doesn't reach back to the older half, so the files are read. Nothing
// is missing, and the first sweep makes a table that later starts go by.
func TestOpen_WithoutTheNewerHalfOfTheTable(t *testing.T) {
	n, o := recycled(t)
	n = n.reopen(n.d, o)
	n.kill() // interrupted, it is done again
	n = n.reopen(n.d.Clone(), o)
	if n.s.Durable() > 0 {
		t.Fatal("the older half was enough")
	}
	if len(n.rec.Quarantined) > 0 || n.rec.Metadata != nil || n.rec.DedupLost != nil {
		t.Fatalf("quarantined %+v, metadata %+v, windows %v", n.rec.Quarantined, n.rec.Metadata, n.rec.DedupLost)
	}
	n.checkLogs()
	n.check()
	n.publish(100, p0, p1, le, md)
	n.sweep()
	n.kill()
	n = n.reopen(n.d.Crash(nil), o)
	if n.s.Durable() == 0 {
		t.Error("the sweep's checkpoint table isn't gone by")
	}
	n.checkLogs()
	n.check()
	n.close()
}

// TestOpen_WithoutTheNewerHalfPowerCuts cuts the power while the files are read, cut and swept, keeping nothing that wasn't
// flushed, or all of it.
func TestOpen_WithoutTheNewerHalfPowerCuts(t *testing.T) {
	n, o := recycled(t)
	d := n.d
	step := 0
	d.OnStep(func(op *ring.Op) {
		if op.Kind == ring.Read || op.Kind == ring.Stat || op.Kind == ring.Close {
			return // leaves nothing behind
		}
		if step++; step%everyStep(1, 3) != 0 {
			return
		}
		for _, fate := range []simdisk.Fate{simdisk.Drop, simdisk.Keep} {
			m := n.reopen(d.Crash(func(int, simdisk.Item) simdisk.Fate { return fate }), o)
			if len(m.rec.Quarantined) > 0 || m.rec.Metadata != nil {
				t.Fatalf("step %d: quarantined %+v, metadata %+v", step, m.rec.Quarantined, m.rec.Metadata)
			}
			m.checkLogs()
			m.check()
			m.kill()
		}
	})
	m := n.reopen(d, o)
	m.sweep()
	d.OnStep(nil)
	m.check()
	m.close()
	if step < 30 {
		t.Errorf("only %d steps", step)
	}
}

// checkLogs compares what was handed over of ledger and metadata with what was acknowledged.
func (n *node) checkLogs() {
	n.t.Helper()
	for id, kind := range map[StreamID]SnapshotKind{le: SnapshotCursors, md: SnapshotMetadata} {
		want := n.acked[id]
		if pos := int(n.h.positions[kind]); pos+len(n.h.records[id]) != len(want) || int(n.rec.LastSequences[id]) != len(want) {
			n.t.Fatalf("%v: a snapshot of %d records and %d above it, the last sequence is %d, %d were acknowledged",
				id, pos, len(n.h.records[id]), n.rec.LastSequences[id], len(want))
		}
	}
}

// TestOpen_WithoutTheOlderHalfOfTheTable, or with one that a power cut has torn, nothing is missing.
func TestOpen_WithoutTheOlderHalfOfTheTable(t *testing.T) {
	n, o := recycled(t)
	n = n.reopen(n.d, o)
	n.sweep()
	n.publish(100, p0)
	n.sweep()
	n.damageTable(1)
	n.kill()
	n = n.reopen(n.d.Clone(), o)
	if n.s.Durable() == 0 || len(n.rec.Quarantined) > 0 {
		t.Errorf("durable up to %d, quarantined %+v", n.s.Durable(), n.rec.Quarantined)
	}
	n.check()
	n.close()
}

// TestOpen_WithoutTheNewerHalfOtherDamageShows: what else is damaged at the same time, below what the older half knows, is
// found; above it, where records can't be read.
func TestOpen_WithoutTheNewerHalfOtherDamageShows(t *testing.T) {
	for _, c := range []struct {
		name   string
		damage func(d *simdisk.Disk)
		want   string
	}{
		{"a segment is short", func(d *simdisk.Disk) {
			path := segmentPath(p1, newestSegment(d, p1))
			d.WriteFile(path, d.ReadFile(path)[:segmentHeaderLen])
		}, "topic 1 partition 1"},
		{"a segment is missing", func(d *simdisk.Disk) { d.RemoveFile(segmentPath(p1, newestSegment(d, p1))) }, "topic 1 partition 1"},
		{"a directory is missing", func(d *simdisk.Disk) {
			for _, p := range d.Paths() {
				if strings.HasPrefix(p, streamDir(testDataDir, 0, p1)+"/") {
					d.RemoveFile(p)
				}
			}
			d.RemoveFile(streamDir(testDataDir, 0, p1))
		}, "topic 1 partition 1"},
		{"a record is damaged", func(d *simdisk.Disk) { d.Damage(segmentPath(p1, newestSegment(d, p1)), segmentHeaderLen+60, 1) }, "topic 1 partition 1"},
		{"the ledger is short", func(d *simdisk.Disk) {
			path := testDataDir + "/ledger/0/" + ledgerActive
			d.WriteFile(path, d.ReadFile(path)[:segmentHeaderLen])
		}, "ledger"},
		{"the metadata is short", func(d *simdisk.Disk) {
			path := segmentPath(md, newestSegment(d, md))
			d.WriteFile(path, d.ReadFile(path)[:segmentHeaderLen])
		}, "metadata"},
	} {
		t.Run(c.name, func(t *testing.T) {
			n, o := recycled(t)
			c.damage(n.d)
			m, err := tryNode(t, n.d, o)
			switch {
			case err != nil:
				if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), c.want) {
					t.Fatalf("%v, want something about %s", err, c.want)
				}
				return
			case m.rec.Metadata != nil:
				if c.want != "metadata" {
					t.Errorf("the metadata is quarantined: %v", m.rec.Metadata.Err)
				}
			case len(m.rec.Quarantined) != 1 || m.rec.Quarantined[0].Stream.String() != c.want:
				t.Errorf("quarantined: %+v, want %s", m.rec.Quarantined, c.want)
			}
			m.kill()
		})
	}
}

// TestOpen_WithoutTheNewerHalfADeletedTopicStaysDeleted: the older half names its partitions.
func TestOpen_WithoutTheNewerHalfADeletedTopicStaysDeleted(t *testing.T) {
	n, o := recycled(t)
	n = n.reopen(n.d, o)
	n.sweep()
	n.drop(2)
	n.settle()
	for range 40 {
		n.publish(3000, p0)
	}
	n.sweep()
	n.publish(3000, p0)
	n.kill()
	n.damageTable(0)
	n = n.reopen(n.d.Clone(), o)
	if len(n.rec.Quarantined) > 0 || n.rec.LastSequences[p2] > 0 {
		t.Errorf("quarantined: %+v, %d records of the topic", n.rec.Quarantined, n.rec.LastSequences[p2])
	}
	n.check()
	n.close()
}
