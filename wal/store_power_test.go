package wal

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cespare/xxhash/v2"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// storePower cuts the power before every completion of a scripted workload of journal and store, with every choice (see
// simdisk.Subsets) of what survives, and recovers each disk that is left.
type storePower struct {
	t       *testing.T
	o       OpenOptions
	n       *node
	d       *simdisk.Disk
	earlier *node // before this start
	every   int   // the power is cut at every such step
	steps   int
	crashes int
	reopens int
	skipped int
	seen    map[uint64]bool
}

func (p *storePower) watch(d *simdisk.Disk) {
	p.d = d
	d.OnStep(func(op *ring.Op) {
		// What only reads leaves nothing behind.
		switch op.Kind {
		case ring.Read, ring.Stat, ring.ReadDir, ring.Cached, ring.Uncache, ring.StatFS, ring.Close:
		default:
			p.cut()
		}
	})
}

// cut tries everything that a power cut now may leave.
func (p *storePower) cut() {
	p.steps++
	if p.steps%p.every != 0 {
		return
	}
	pending := p.d.Pending()
	for keep := range simdisk.Subsets(len(pending), 8, 64, uint64(p.steps)) {
		left := p.d.Crash(func(i int, _ simdisk.Item) simdisk.Fate {
			if keep(i) {
				return simdisk.Keep
			}
			return simdisk.Drop
		})
		p.check(left, fmt.Sprintf("step %d, %d pending, crash %d", p.steps, len(pending), p.crashes))
	}
	p.check(p.d.Crash(func(int, simdisk.Item) simdisk.Fate { return simdisk.Torn }), fmt.Sprintf("step %d, all torn", p.steps))
	p.check(p.d.Clone(), fmt.Sprintf("step %d, killed", p.steps))
}

// fingerprint tells disks apart that show different things.
func fingerprint(d *simdisk.Disk) uint64 {
	h := xxhash.New()
	for _, path := range d.Paths() {
		b := d.ReadFile(path)
		fmt.Fprintf(h, "%s %d ", path, len(b))
		_, _ = h.Write(b)
	}
	return h.Sum64()
}

func (p *storePower) sets() (acked, sealed map[StreamID][]string, dropped map[uint16]bool) {
	switch {
	case p.n != nil:
		return p.n.acked, p.n.sealed, p.n.dropped
	case p.earlier != nil:
		return p.earlier.acked, p.earlier.acked, p.earlier.dropped
	}
	return nil, nil, nil
}

// check recovers a disk: it opens, has all that was acknowledged, and beyond that only what was on its way.
func (p *storePower) check(d *simdisk.Disk, what string) {
	p.t.Helper()
	acked, sealed, dropped := p.sets()
	acks := 0
	for _, v := range acked {
		acks += len(v)
	}
	key := fingerprint(d)*31 + uint64(acks)
	if p.seen[key] {
		p.skipped++
		return
	}
	p.seen[key] = true
	p.crashes++
	m, err := tryNode(p.t, d, p.o)
	if err != nil {
		p.t.Fatalf("%s: %v", what, err)
	}
	p.compare(m, what, acked, sealed, dropped)
	if p.crashes%16 != 0 {
		m.kill()
		return
	}
	// What was recovered survives the next cut, too, with and without a sweep.
	p.reopens++
	if p.crashes%32 == 0 {
		m.sweep()
	}
	got := map[StreamID][]string{}
	for id := range sealed {
		if id.Kind == Messages && !dropped[id.Topic] {
			got[id] = m.mustReadAll(id, what)
		}
	}
	m.kill()
	m2, err := tryNode(p.t, m.d.Crash(nil), p.o)
	if err != nil {
		p.t.Fatalf("%s, cut again: %v", what, err)
	}
	p.compare(m2, what+", cut again", acked, sealed, dropped)
	for id, values := range got {
		if again := m2.mustReadAll(id, what); !slices.Equal(values, again) {
			p.t.Fatalf("%s, cut again: %v had %d records, has %d", what, id, len(values), len(again))
		}
	}
	m2.kill()
}

func (n *node) mustReadAll(id StreamID, what string) []string {
	values, err := n.readAll(id, 1, 0)
	if err != nil {
		n.t.Fatalf("%s: %v: %v", what, id, err)
	}
	return values
}

func (p *storePower) compare(m *node, what string, acked, sealed map[StreamID][]string, dropped map[uint16]bool) {
	p.t.Helper()
	for id, last := range m.rec.LastSequences {
		m.acked[id] = sealed[id][:min(int(last), len(sealed[id]))]
	}
	for _, q := range m.rec.Quarantined {
		p.t.Fatalf("%s: quarantined: %v", what, q.Err)
	}
	if m.rec.Metadata != nil || m.rec.DedupLost != nil {
		p.t.Fatalf("%s: metadata %+v, dedup %v", what, m.rec.Metadata, m.rec.DedupLost)
	}
	m.settle()
	if err := m.s.Err(); err != nil {
		p.t.Fatalf("%s: %v", what, err)
	}
	for _, path := range m.d.Paths() {
		if dropped[2] && strings.HasPrefix(path, topicDir(testDataDir, 2)) || strings.Contains(path, deletedPrefix) {
			p.t.Fatalf("%s: %s is left of a deleted topic", what, path)
		}
	}
	prefix := func(id StreamID, got []string) {
		p.t.Helper()
		if len(got) < len(acked[id]) || len(got) > len(sealed[id]) || !slices.Equal(got, sealed[id][:len(got)]) {
			p.t.Fatalf("%s: %v: recovered %d records, %d were acknowledged, %d sealed", what, id, len(got), len(acked[id]), len(sealed[id]))
		}
		if last := m.rec.LastSequences[id]; int(last) != len(got) {
			p.t.Fatalf("%s: %v: last sequence is %d, there are %d records", what, id, last, len(got))
		}
		if len(got) > 0 && id.Kind == Messages {
			if ms := m.rec.LastTimes[id]; ms != testTime(Sequence(len(got))) {
				p.t.Fatalf("%s: %v: last time is %d, not %d", what, id, ms, testTime(Sequence(len(got))))
			}
		}
	}
	for id := range sealed {
		switch {
		case id.Kind == Messages && dropped[id.Topic]:
			if m.rec.LastSequences[id] > 0 {
				p.t.Fatalf("%s: %v is back", what, id)
			}
		case id.Kind == Messages:
			prefix(id, m.mustReadAll(id, what))
		default:
			kind := SnapshotCursors
			if id.Kind == Metadata {
				kind = SnapshotMetadata
			}
			pos := m.h.positions[kind]
			if int(pos) > len(sealed[id]) {
				p.t.Fatalf("%s: %v: snapshot at %d of %d", what, id, pos, len(sealed[id]))
			}
			prefix(id, append(slices.Clone(sealed[id][:pos]), m.h.records[id]...))
		}
	}
	p.checkDedup(m, what, acked, dropped)
}

// checkDedup checks that dedup snapshot and replayed records cover every acknowledged record.
func (p *storePower) checkDedup(m *node, what string, acked map[StreamID][]string, dropped map[uint16]bool) {
	covered := map[string]int{}
	if data := m.h.snapshots[SnapshotDedup]; data != "" {
		if err := json.Unmarshal([]byte(data), &covered); err != nil {
			p.t.Fatalf("%s: dedup snapshot %q: %v", what, data, err)
		}
	}
	for id, values := range acked {
		if id.Kind != Messages || dropped[id.Topic] {
			continue
		}
		for _, seq := range m.h.replayed[id] {
			if int(seq) == covered[id.String()]+1 {
				covered[id.String()]++
			}
		}
		if covered[id.String()] < len(values) {
			p.t.Fatalf("%s: %v: the producers' windows reach sequence %d of %d", what, id, covered[id.String()], len(values))
		}
	}
}

func (p *storePower) open(d *simdisk.Disk) {
	p.t.Helper()
	p.watch(d)
	m := openNode(p.t, d, p.o)
	if p.earlier != nil {
		for id, values := range p.earlier.acked {
			m.acked[id], m.sealed[id] = slices.Clone(values), slices.Clone(values)
		}
		m.dropped = p.earlier.dropped
	}
	p.n = m
}

// leave ends a start.
func (p *storePower) leave() {
	p.earlier, p.n = p.n, nil
	for id, values := range p.earlier.sealed {
		p.earlier.acked[id] = slices.Clone(values) // all rounds were waited for
	}
}

// life is what happens between two starts: every kind of file is made, filled, rolled, swept and superseded.
func (p *storePower) life(drop bool) {
	n := p.n
	snapshots := func() {
		n.s.SaveSnapshot(SnapshotMetadata, uint64(len(n.acked[md])), n.j.Epoch(), []byte("metadata"))
		n.s.SaveSnapshot(SnapshotCursors, uint64(len(n.acked[le])), n.j.Epoch(), []byte("cursors"))
	}
	n.publish(300, p0, le, md)
	n.now += DefaultWriteOutEvery
	n.settle()
	n.publish(5000, p0, p1)
	n.sweep()
	n.publish(4000, p0, le, md)
	if n.dropped[2] {
		n.publish(4000, p0)
	} else {
		n.publish(4000, p0, p2)
	}
	snapshots()
	n.now += DefaultWriteOutEvery
	n.settle()
	n.publish(4000, le, md, p1)
	n.sweep()
	snapshots()
	n.publish(700, p0, le, md)
	n.sweep()
	if drop {
		n.publish(100, p2) // not swept
		n.drop(2)          // the metadata knows of it from here on
		n.settle()
	}
	n.publish(100, p1, le, md)
}

// TestStore_SurvivesPowerCutsAtEveryStep covers write-out, roll of segments and logs, sweeps, checkpoints, snapshots,
// the deletion of a topic, a clean shutdown, a kill and a power cut, each followed by a restart.
func TestStore_SurvivesPowerCutsAtEveryStep(t *testing.T) {
	t.Parallel()
	o := smallStore(ring.NewPool(512 << 20))
	o.Store.SegmentMaxBytes, o.Store.LogRollBytes = 12<<10, 5000
	o.Journal.FileBytes, o.Journal.MaxFiles, o.Journal.MaxRoundBytes = 48<<10, 3, 16<<10
	p := &storePower{t: t, o: o, every: everyStep(1, 30), seen: map[uint64]bool{}}
	p.o.Deleted = func(topic uint16) bool {
		_, _, dropped := p.sets()
		return dropped[topic]
	}
	p.open(simdisk.New(simdisk.Options{SectorBytes: 4096}))
	p.life(true)
	p.n.close()
	p.leave()
	p.open(p.d)
	p.life(false)
	p.n.kill()
	d := p.d.Clone()
	p.leave()
	p.open(d)
	p.n.sweep()
	p.n.kill()
	d = p.d.Crash(nil)
	p.leave()
	p.open(d)
	p.n.close()
	t.Logf("%d steps, %d power cuts, %d of them twice, %d alike", p.steps, p.crashes, p.reopens, p.skipped)
}
