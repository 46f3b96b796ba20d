package wal

import (
	"errors"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// copyFiles copies the files of one disk whose paths begin with prefix to another one, durably.
func copyFiles(t *testing.T, from, to *simdisk.Disk, prefix string) {
	t.Helper()
	io := newBlockingDisk(to)
	run := func(op ring.Op) *ring.Op {
		t.Helper()
		done, err := io.run(op)
		if err != nil {
			t.Fatal(err)
		}
		return done
	}
	for _, p := range from.Paths() {
		b := from.ReadFile(p)
		if b == nil || !strings.HasPrefix(p, prefix) {
			continue
		}
		dir := path.Dir(p)
		if err := errors.Join(makeDir(io, path.Dir(dir)), makeDir(io, dir)); err != nil {
			t.Fatal(err)
		}
		fd := run(ring.Op{Kind: ring.Open, Path: p, Flags: ring.Create}).FD
		run(ring.Op{Kind: ring.Truncate, FD: fd})
		run(ring.Op{Kind: ring.Write, FD: fd, Buf: b})
		run(ring.Op{Kind: ring.Sync, FD: fd})
		run(ring.Op{Kind: ring.Close, FD: fd})
		run(ring.Op{Kind: ring.SyncDir, Path: dir})
	}
}

// TestOpen_RestoredMetadataGoesOnAfterAnyNumberOfStarts quarantines the metadata, starts again and again with it, in
// order and by crashes, then puts the good files back: nothing of it is lost, neither what the files hold nor what only
// the journal has.
func TestOpen_RestoredMetadataGoesOnAfterAnyNumberOfStarts(t *testing.T) {
	for name, damage := range map[string]func(d *simdisk.Disk){
		"bit in the log": func(d *simdisk.Disk) { d.Damage(find(t, d, metadataPrefix), 4096+60, 1) },
		"log missing":    func(d *simdisk.Disk) { d.RemoveFile(find(t, d, metadataPrefix)) },
	} {
		t.Run(name, func(t *testing.T) {
			n, o := killedWithMetadata(t)
			d := n.d.Clone()
			damage(d)
			last := n
			for i := range 4 {
				m := last.reopen(d, o)
				if m.rec.Metadata == nil || m.rec.LastSequences[md] != 0 {
					t.Fatalf("start %d serves metadata: %+v", i, m.rec)
				}
				m.check()
				m.publish(100, p0, p1, le)
				m.now += DefaultSweepEvery
				m.sweep()
				if m.s.unswept() || m.s.Durable() > n.s.Durable() {
					t.Fatalf("start %d: files unflushed %v, the journal is given up to round %d", i, m.s.unswept(), m.s.Durable())
				}
				if i%2 == 0 {
					m.close()
				} else {
					m.kill()
					d = d.Crash(nil)
				}
				last = m
			}

			copyFiles(t, n.d, d, testDataDir+"/"+metadataDir+"/")
			m := last.reopen(d, o)
			if m.rec.Metadata != nil || len(m.rec.Quarantined) > 0 {
				t.Fatalf("still quarantined: %+v %+v", m.rec.Metadata, m.rec.Quarantined)
			}
			from := int(m.h.positions[SnapshotMetadata])
			if from == 0 || !slices.Equal(m.h.records[md], m.acked[md][from:]) {
				t.Fatalf("from record %d on %d of %d records came back", from, len(m.h.records[md]), len(m.acked[md])-from)
			}
			m.check()
			m.publish(100, md, p0)
			m.sweep()
			m.close()
			m = m.reopen(d, o)
			if got := m.rec.LastSequences[md]; int(got) != len(m.acked[md]) || m.rec.Rounds > 1 {
				t.Errorf("then the metadata ends with record %d of %d, %d rounds replayed", got, len(m.acked[md]), m.rec.Rounds)
			}
			m.close()
		})
	}
}

// TestOpen_UnaccountedFilesAreNeverStale puts files into a data directory whose checkpoint table and journal know nothing
// of them: they are neither overwritten nor removed.
func TestOpen_UnaccountedFilesAreNeverStale(t *testing.T) {
	for name, c := range map[string]struct {
		stream StreamID
		prefix string
	}{
		"metadata":  {md, testDataDir + "/" + metadataDir + "/"},
		"snapshot":  {md, testDataDir + "/" + metadataDir + "/" + snapshotPrefix},
		"log":       {md, testDataDir + "/" + metadataDir + "/" + metadataPrefix},
		"ledger":    {le, testDataDir + "/" + ledgerDir + "/"},
		"cursors":   {le, cursorTestPath},
		"delivery":  {le, ledgerTestPath},
		"partition": {p1, streamDir(testDataDir, 0, p1) + "/"},
	} {
		t.Run(name, func(t *testing.T) {
			o := smallStore(testPool(t))
			n := lived(t, o)
			n.close()
			// Another broker, which has swept twice and never had the stream.
			other := openNode(t, simdisk.New(simdisk.Options{}), o)
			for range 2 {
				other.publish(100, p0)
				other.sweep()
			}
			other.close()
			copyFiles(t, n.d, other.d, c.prefix)
			if c.stream.Kind == Messages {
				other.d.RemoveFile(c.prefix + checkpointFile) // it would account for them
			}
			before := other.d.Clone()

			m, err := tryNode(t, other.d, o)
			if c.stream.Kind == Messages {
				if err != nil {
					t.Fatal(err)
				}
				if q := m.rec.Quarantined; len(q) != 1 || q[0].Stream != c.stream || !errors.Is(q[0].Err, ErrCorrupt) {
					t.Fatalf("quarantined: %+v", q)
				}
				m.publish(100, p0)
				m.sweep()
				m.close()
			} else if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), strings.TrimSuffix(c.prefix, "/")) {
				t.Fatalf("opened with %v", err)
			}
			for _, p := range before.Paths() {
				if b := before.ReadFile(p); strings.HasPrefix(p, c.prefix) && string(b) != string(other.d.ReadFile(p)) {
					t.Errorf("%s has changed", p)
				}
			}
		})
	}
}

// TestOpen_ScannedFilesGetCheckpointsAtOnce takes the journal away, so that all files are read, and ends the start that
// did so by a crash as soon as it is at rest: the next one knows the files by their checkpoints.
func TestOpen_ScannedFilesGetCheckpointsAtOnce(t *testing.T) {
	o := smallStore(testPool(t))
	n := lived(t, o)
	n.close()
	n.removeFiles(testDataDir + "/" + journalDir + "/")
	m := n.reopen(n.d, o)
	m.settle()
	m.kill()
	m = m.reopen(n.d.Crash(nil), o)
	if len(m.rec.Quarantined) > 0 || m.rec.Metadata != nil {
		t.Fatalf("quarantined: %+v %+v", m.rec.Quarantined, m.rec.Metadata)
	}
	m.check()
	m.close()
}

// removeFiles removes the files whose paths begin with prefix.
func (n *node) removeFiles(prefix string) {
	for _, p := range n.d.Paths() {
		if strings.HasPrefix(p, prefix) && n.d.ReadFile(p) != nil {
			n.d.RemoveFile(p)
		}
	}
}

// TestOpen_ReportedPartitionIsNotCutWhereItCantBeRead has a report beside files that must be read to know where they end,
// and that can't be.
func TestOpen_ReportedPartitionIsNotCutWhereItCantBeRead(t *testing.T) {
	o := smallStore(testPool(t))
	n := lived(t, o)
	active, durable := n.activePath(p0)
	n.close()
	n.removeFiles(testDataDir + "/" + journalDir + "/")
	n.removeFiles(streamDir(testDataDir, 0, p0) + "/" + checkpointFile)
	report := simdisk.New(simdisk.Options{})
	io := newBlockingDisk(report)
	path := streamDir(testDataDir, 0, p0) + "/" + reportPrefix + "1" + reportSuffix
	if err := makeDir(io, streamDir(testDataDir, 0, p0)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.run(ring.Op{Kind: ring.Open, Path: path, Flags: ring.Create}); err != nil {
		t.Fatal(err)
	}
	report.WriteFile(path, []byte("looked odd"))
	copyFiles(t, report, n.d, path)
	n.d.Damage(active, durable-5000, 1)
	before := n.d.ReadFile(active)

	n = n.reopen(n.d, o)
	if q := n.rec.Quarantined; len(q) != 1 || q[0].Report != path || !strings.Contains(q[0].Cause, "looked odd") {
		t.Fatalf("quarantined: %+v", q)
	}
	n.sweep()
	n.close()
	if string(n.d.ReadFile(active)) != string(before) {
		t.Error("the damaged file was changed")
	}
}

// TestOpen_TakesTimeFromItsOptions has clocks that stand, go, and aren't there.
func TestOpen_TakesTimeFromItsOptions(t *testing.T) {
	o := smallStore(testPool(t))
	n := lived(t, o)
	n.close()
	for want, clock := range map[time.Duration]func() time.Duration{
		0: nil,
		time.Second: func() func() time.Duration {
			now := time.Duration(0)
			return func() time.Duration { now += time.Second; return now }
		}(),
	} {
		o.Now = clock
		n = n.reopen(n.d, o)
		if n.rec.Duration != want {
			t.Errorf("the start took %v by its clock, want %v", n.rec.Duration, want)
		}
		n.close()
	}
	o.Store.Wall = nil
	if _, err := tryNode(t, n.d, o); err == nil || !strings.Contains(err.Error(), "no clock") {
		t.Errorf("opened without a clock: %v", err)
	}
}
