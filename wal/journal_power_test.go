package wal

import (
	"fmt"
	"slices"
	"testing"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// powerTest cuts the power before every completion of a scripted workload, with every choice (see simdisk.Subsets) of
// what survives, and recovers each disk that is left.
type powerTest struct {
	t    *testing.T
	opts JournalOptions
	// d is the disk that the workload runs on, w the workload's writer, nil before the journal is open.
	d *simdisk.Disk
	w *writer
	// durable is the point that the checkpoint table would name: what lies below may be gone from the journal.
	durable RoundNumber
	// acked and sealed are what earlier starts had flushed and sealed.
	acked, sealed []got

	steps   int
	crashes int
	// reopens recovers a few of the recovered disks after another power cut.
	reopens int
}

func (p *powerTest) watch(d *simdisk.Disk) {
	p.d = d
	d.OnStep(func(*ring.Op) { p.cut() })
}

// cut tries everything that a power cut now may leave.
func (p *powerTest) cut() {
	p.steps++
	pending := p.d.Pending()
	for keep := range simdisk.Subsets(len(pending), 8, 64, uint64(p.steps)) {
		p.crashes++
		left := p.d.Crash(func(i int, _ simdisk.Item) simdisk.Fate {
			if keep(i) {
				return simdisk.Keep
			}
			return simdisk.Drop
		})
		p.check(left, fmt.Sprintf("step %d, %d pending, crash %d", p.steps, len(pending), p.crashes))
	}
	// Sectors that are half written, too.
	p.check(p.d.Crash(func(i int, _ simdisk.Item) simdisk.Fate { return simdisk.Torn }), fmt.Sprintf("step %d, all torn", p.steps))
	for k := range min(len(pending), 8) {
		left := p.d.Crash(func(i int, _ simdisk.Item) simdisk.Fate {
			if i == k {
				return simdisk.Torn
			}
			return simdisk.Keep
		})
		p.check(left, fmt.Sprintf("step %d, item %d torn", p.steps, k))
	}
	// A killed process leaves the caches alone.
	p.check(p.d.Clone(), fmt.Sprintf("step %d, killed", p.steps))
}

// check recovers a disk: it opens, has all that was acknowledged, and beyond that only whole rounds that were sealed, in
// their order.
func (p *powerTest) check(d *simdisk.Disk, what string) {
	p.t.Helper()
	acked, sealed := p.acked, p.sealed
	if p.w != nil {
		acked = append(slices.Clone(acked), p.w.flushed...)
		sealed = append(slices.Clone(sealed), p.w.sealed...)
	}
	j, rec, list, err := tryJournal(d, p.opts, p.durable)
	if err != nil {
		p.t.Fatalf("%s: %v", what, err)
	}
	compareRecovered(p.t, what, list, above(acked, p.durable), above(sealed, p.durable))
	j.releaseMemory()
	if p.crashes%16 != 0 {
		return
	}
	// What was recovered counts as durable from here on: it survives the next power cut, and the next epoch is a new one.
	p.reopens++
	j2, rec2, again, err := tryJournal(d.Crash(nil), p.opts, p.durable)
	if err != nil {
		p.t.Fatalf("%s, cut again: %v", what, err)
	}
	if !slices.Equal(list, again) || rec2.Epoch != rec.Epoch+1 || rec2.Last != rec.Last+1 {
		p.t.Fatalf("%s, cut again: recovered %v (%+v)\nbefore %v (%+v)", what, again, rec2, list, rec)
	}
	j2.releaseMemory()
}

// compareRecovered checks that list has all of acked and is a prefix of sealed that ends with a whole round.
func compareRecovered(t testing.TB, what string, list, acked, sealed []got) {
	t.Helper()
	if len(list) < len(acked) || !slices.Equal(list[:len(acked)], acked) {
		t.Fatalf("%s: %d records were acknowledged, %d recovered\nacknowledged %.200v\nrecovered %.200v",
			what, len(acked), len(list), acked, list)
	}
	if len(list) > len(sealed) || !slices.Equal(list, sealed[:len(list)]) {
		t.Fatalf("%s: recovered %d records that are not the first of the %d sealed", what, len(list), len(sealed))
	}
	if n := len(list); n > 0 && n < len(sealed) && list[n-1].round == sealed[n].round {
		t.Fatalf("%s: round %d was recovered in part", what, list[n-1].round)
	}
}

func above(list []got, from RoundNumber) []got {
	i := slices.IndexFunc(list, func(g got) bool { return g.round > from })
	if i < 0 {
		return nil
	}
	return list[i:]
}

// finish ends a start: by a clean close or by a power cut that drops everything, and remembers what must be there.
func (p *powerTest) nextStart(d *simdisk.Disk) {
	p.acked = append(p.acked, p.w.flushed...)
	p.sealed = slices.Clone(p.acked)
	p.w = nil
	p.watch(d)
}

func (p *powerTest) open() {
	p.t.Helper()
	j, _, list, err := tryJournal(p.d, p.opts, p.durable)
	if err != nil {
		p.t.Fatal(err)
	}
	compareRecovered(p.t, "start", list, above(p.acked, p.durable), above(p.sealed, p.durable))
	p.w = newWriter(p.t, p.d, j)
}

// TestJournal_SurvivesPowerCutsAtEveryStep covers creation, rounds, rotation, trimming and recycling, growth, the mark
// file, a restart after a clean close and one after a power cut.
func TestJournal_SurvivesPowerCutsAtEveryStep(t *testing.T) {
	for _, inFlight := range []int{1, 3} {
		t.Run(fmt.Sprintf("%d in flight", inFlight), func(t *testing.T) {
			opts := smallJournal(ring.NewPool(256 << 20))
			opts.FileBytes, opts.MaxFiles, opts.MaxInFlight = 32<<10, 3, inFlight
			p := &powerTest{t: t, opts: opts}
			p.watch(simdisk.New(simdisk.Options{}))
			p.open()
			p.script(inFlight)
			p.w.close()
			p.nextStart(p.d)
			p.open()
			p.script(inFlight)
			p.nextStart(p.d.Crash(nil))
			p.open()
			p.script(inFlight)
			p.cut()
			t.Logf("%d steps, %d power cuts, %d second power cuts; %d rounds in %d files", p.steps, p.crashes, p.reopens,
				p.w.j.Flushed(), p.w.j.files())
		})
	}
}

// script writes rounds of several sizes over more than all files, trimming as it goes.
func (p *powerTest) script(inFlight int) {
	w := p.w
	for i := range 14 {
		size := []int{10, 3000, 10, 9000}[i%4]
		for len(w.j.flight) >= inFlight {
			p.wait()
		}
		s := testStreams[i%len(testStreams)]
		if err := w.append(s, size); err != nil {
			// Full: what is flushed moves to the segments, the table says so, the journal is trimmed.
			for w.j.InFlight() > 0 {
				p.wait()
			}
			p.durable = w.j.Flushed()
			w.j.Trim(p.durable)
			p.wait()
			if err := w.append(s, size); err != nil {
				p.t.Fatal(err)
			}
		}
		w.j.Seal()
		w.j.Step(0)
		if i%5 == 4 {
			for w.j.InFlight() > 0 {
				p.wait()
			}
			w.j.Step(0)
			w.j.Step(markQuiet)
			p.wait()
		}
	}
	for !w.j.Idle() {
		p.wait()
	}
}

// wait completes one operation, if there is one.
func (p *powerTest) wait() {
	if p.d.InFlight() == 0 {
		return
	}
	if err := p.d.WaitOne(); err != nil {
		p.t.Fatal(err)
	}
	p.w.j.Step(0)
}
