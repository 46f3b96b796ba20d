package wal

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// TestJournal_SurvivesRandomCrashes runs a journal of tiny files through many starts, each ended by a power cut that keeps
// a random part of what was in flight, or by a kill, with completions in random order.
func TestJournal_SurvivesRandomCrashes(t *testing.T) {
	pool := ring.NewPool(256 << 20)
	for seed := range seeds(60) {
		rng := rand.New(rand.NewPCG(seed, 1))
		opts := smallJournal(pool)
		opts.FileBytes = int64(4+rng.IntN(6)) * 4096
		opts.MaxRoundBytes = 12 << 10
		opts.MinFiles, opts.MaxFiles, opts.MaxInFlight = 2+rng.IntN(2), 3+rng.IntN(3), 1+rng.IntN(4)
		s := &crashSim{t: t, seed: seed, rng: rng, opts: opts, last: map[StreamID]Sequence{}}
		s.d = simdisk.New(simdisk.Options{Seed: seed + 1})
		for s.start = range 25 {
			s.run()
		}
	}
	if n := pool.InUse(); n != 0 {
		t.Errorf("%d bytes of slabs were not released", n)
	}
}

type crashSim struct {
	t     *testing.T
	seed  uint64
	start int
	rng   *rand.Rand
	opts  JournalOptions
	d     *simdisk.Disk
	// kept is what earlier starts recovered, durable the trimmed point, last the newest sequence of each stream.
	kept    []got
	durable RoundNumber
	last    map[StreamID]Sequence
	acked   []got
	sealed  []got
}

func (s *crashSim) run() {
	j, _, list, err := tryJournal(s.d, s.opts, s.durable)
	if err != nil {
		s.t.Fatalf("seed %d, start %d: %v", s.seed, s.start, err)
	}
	compareRecovered(s.t, "recovery", list, above(s.acked, s.durable), above(s.sealed, s.durable))
	clear(s.last)
	s.kept = append(slices.Clone(s.sealed[:len(s.sealed)-len(above(s.sealed, s.durable))]), list...)
	for _, g := range s.kept {
		s.last[g.stream] = g.seq
	}
	w := newWriter(s.t, s.d, j)
	for st, seq := range s.last {
		w.next[st] = seq
	}
	for range s.rng.IntN(30) {
		s.step(w)
	}
	s.acked = append(slices.Clone(s.kept), w.flushed...)
	s.sealed = append(slices.Clone(s.kept), w.sealed...)
	if len(w.failed) > 0 {
		s.t.Fatalf("seed %d: rounds failed: %v", s.seed, w.failed)
	}
	d := s.d
	if s.rng.IntN(4) == 0 {
		s.d = d.Clone()
	} else {
		odds := s.rng.IntN(5)
		s.d = d.Crash(func(int, simdisk.Item) simdisk.Fate {
			if s.rng.IntN(4) < odds {
				return simdisk.Keep
			}
			return simdisk.Fate(s.rng.IntN(3))
		})
	}
	// The abandoned journal's memory: its writes end, nobody looks at them.
	for d.InFlight() > 0 {
		if err := d.WaitOne(); err != nil {
			s.t.Fatal(err)
		}
	}
	if err := j.Close(d); err != nil {
		s.t.Fatal(err)
	}
}

func (s *crashSim) step(w *writer) {
	j := w.j
	switch s.rng.IntN(8) {
	case 0, 1, 2:
		err := w.append(testStreams[s.rng.IntN(len(testStreams))], s.rng.IntN(9000))
		if err != nil && !errors.Is(err, ErrRoundFull) && !errors.Is(err, ErrJournalFull) {
			s.t.Fatalf("seed %d: append: %v", s.seed, err)
		}
	case 3, 4:
		j.Seal()
	case 5:
		if s.d.InFlight() > 0 {
			_ = s.d.WaitOne()
		}
	case 6:
		s.d.Poll()
		j.Step(0)
		j.Step(markQuiet)
	case 7:
		if n := s.rng.IntN(3); j.Flushed() > s.durable+RoundNumber(n) {
			s.durable = j.Flushed() - RoundNumber(n)
			j.Trim(s.durable)
		}
	}
	j.Step(0)
}

// TestJournal_FileNamesOfAKilledStartAreFlushed is what a seed has found: a start was killed when a file had got its name
// and before the name was durable, the next one wrote rounds to the file, then the power went.
func TestJournal_FileNamesOfAKilledStartAreFlushed(t *testing.T) {
	opts := smallJournal(testPool(t))
	d := simdisk.New(simdisk.Options{})
	killed := (*simdisk.Disk)(nil)
	j, _, _ := openJournal(t, d, opts, 0)
	d.OnStep(func(op *ring.Op) {
		if op.Kind == ring.SyncDir && killed == nil {
			killed = d.Clone()
		}
	})
	w := newWriter(t, d, j)
	size := 15 << 10
	for i := 0; killed == nil; i++ {
		if i > 100 {
			t.Fatal("the journal makes no further file")
		}
		if i < 6 {
			w.round(size, testStreams[2])
		}
		j.Step(0)
		d.Poll()
	}
	sealed := slices.Clone(w.flushed)
	w.close()

	j, _, list := openJournal(t, killed, opts, 0)
	compareRecovered(t, "killed", list, list, sealed)
	w = newWriter(t, killed, j)
	w.next[testStreams[2]] = Sequence(len(list))
	for i := 0; j.files() < 3 || j.cur.number < 3; i++ {
		if i > 100 {
			t.Fatal("the file is never written to")
		}
		w.round(size, testStreams[2])
	}
	acked := append(list, w.flushed...)
	cut := killed.Crash(nil)
	w.close()
	j, _, list = openJournal(t, cut, opts, 0)
	compareRecovered(t, "cut", list, acked, acked)
	newWriter(t, cut, j).close()
}
