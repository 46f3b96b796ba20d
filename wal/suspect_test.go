package wal

import (
	"errors"
	"fmt"
	"testing"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// vouched is the disk of a node of a cluster that has flushed eight rounds, and marked them, and where each lies.
type vouched struct {
	o      OpenOptions
	pool   *ring.Pool
	d      *simdisk.Disk
	log    []logRound
	places []place
	// table is the newest round in the checkpoint table, epoch that of the start that wrote them.
	table RoundNumber
	epoch Epoch
}

// vouch makes one with a checkpoint at index swept.
func vouch(t *testing.T, pool *ring.Pool, swept LogIndex) *vouched {
	t.Helper()
	v := &vouched{o: smallStore(pool), pool: pool}
	v.o.Replicated = true
	v.o.Journal.FileBytes, v.o.Journal.MaxRoundBytes = 32<<10, 16<<10
	f, err := openFollower(t, simdisk.New(simdisk.Options{}), v.o, pool)
	if err != nil {
		t.Fatal(err)
	}
	for i := LogIndex(1); i <= 8; i++ {
		p := position(3, i, 3, i-1)
		if i == 1 {
			p.Prev = 0
		}
		f.write(p, []int{100, 3000, 6000}[i%3], false, p0, le)
		r := f.rounds[f.numbers[i-1]]
		v.places = append(v.places, place{r.Number, r.file.path, r.op.Off, int64(r.size)})
		f.commitTo(min(i, swept))
		if i == swept {
			f.sweep()
		}
	}
	v.log, v.table, v.epoch = f.written, f.s.durable, f.j.Epoch()
	f.closeJournal()
	v.d = f.d.Clone()
	f.kill()
	return v
}

// open opens a disk that may be suspect, and checks what it has against the log up to a point.
func (v *vouched) open(t *testing.T, d *simdisk.Disk, what string, suspect func(error) error) (*follower, error) {
	t.Helper()
	o := v.o
	o.Suspect = suspect
	f, err := openFollower(t, d, o, v.pool)
	if err != nil {
		return nil, err
	}
	last, known := f.rec.Log.Last, f.rec.Log.Committed.Index
	l := replayLog(v.log)
	if last.Index > 8 || last != l.point(int(last.Index)) || len(f.rec.Pending) != int(last.Index-known) {
		t.Fatalf("%s: the log ends with %v, committed %d, %d rounds pending", what, last, known, len(f.rec.Pending))
	}
	f.settle()
	got, want := f.recovered(what), logValues(nil, v.log[:known])
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Fatalf("%s: records are\n%.200v, not\n%.200v", what, got, want)
	}
	f.adopt(v.log[:last.Index])
	f.commit = known
	return f, nil
}

// TestOpen_SuspectEnd damages each round in turn: a node on its own would refuse to start; one of a cluster starts with what
// lies before, says so before it writes anything, and goes on behind. The next start is an ordinary one.
func TestOpen_SuspectEnd(t *testing.T) {
	pool := testPool(t)
	for _, swept := range []LogIndex{0, 1, 4, 7, 8} {
		v := vouch(t, pool, swept)
		for i, at := range v.places {
			what := fmt.Sprintf("checkpoint at %d, round %d damaged", swept, i+1)
			d := v.d.Clone()
			d.Damage(at.path, at.off+at.size-1, 1)
			if i+1 < int(swept) {
				// Whether its file is read at all depends on where the checkpoint lies.
				if f, err := v.open(t, d.Clone(), what, nil); err == nil {
					f.kill()
					continue
				}
			}
			v.suspect(t, d, what, i+1, swept)
		}
	}
}

func (v *vouched) suspect(t *testing.T, d *simdisk.Disk, what string, damaged int, swept LogIndex) {
	t.Helper()
	before := d.Clone()
	if _, err := v.open(t, d, what, nil); !errors.Is(err, ErrCorrupt) {
		t.Fatalf("%s: opened without being asked to: %v", what, err)
	}
	refuse := errors.New("refused")
	if _, err := v.open(t, d, what, func(error) error { return refuse }); !errors.Is(err, refuse) || !d.Equal(before) {
		t.Fatalf("%s: refused, and the error is %v, or the disk was changed", what, err)
	}
	var reasons []error
	f, err := v.open(t, d, what, func(reason error) error {
		reasons = append(reasons, reason)
		if !d.Equal(before) {
			t.Errorf("%s: something was written before it was asked", what)
		}
		return nil
	})
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	want := max(LogIndex(damaged-1), swept)
	if len(reasons) != 1 || !errors.Is(reasons[0], ErrCorrupt) || !errors.Is(f.rec.Suspect, reasons[0]) || f.rec.Log.Last.Index != want {
		t.Fatalf("%s: asked %v, suspect %v, the log ends at %d, not %d", what, reasons, f.rec.Suspect, f.rec.Log.Last.Index, want)
	}
	if f.j.Epoch() <= v.epoch {
		t.Errorf("%s: the start's epoch is %d, there are rounds of %d", what, f.j.Epoch(), v.epoch)
	}
	// What another leader has in its place comes next; both starts after it find nothing wrong.
	f.write(opening(position(9, want+1, f.rec.Log.Last.Epoch, f.commit)), 3000, true, p1)
	f.write(position(9, want+2, 9, want+1), 100, true, p1)
	f.commitTo(want + 1)
	log := f.written
	for cut := range 2 {
		left := f.d.Crash(nil)
		f.kill()
		next := &vouched{o: v.o, pool: v.pool, log: log, epoch: f.j.Epoch()}
		f, err = openFollower(t, left, next.o, next.pool)
		if err != nil {
			t.Fatalf("%s, cut %d: %v", what, cut, err)
		}
		if f.rec.Log.Last != (LogPoint{Epoch: 9, Index: want + 2}) || f.rec.Log.Committed.Index != want+1 || f.rec.Suspect != nil {
			t.Fatalf("%s, cut %d: %+v, suspect %v", what, cut, f.rec.Log, f.rec.Suspect)
		}
		f.adopt(log)
		f.sweep()
	}
	f.kill()
}

// TestOpen_SuspectEndSurvivesPowerCutsAtEveryStep cuts the power while a node with a damaged end starts: the next start is
// told of it once more, or finds what this one has made of it.
func TestOpen_SuspectEndSurvivesPowerCutsAtEveryStep(t *testing.T) {
	pool := testPool(t)
	tried := 0
	defer func() {
		if tried < 4 && !t.Failed() {
			t.Errorf("%d ends were suspect", tried)
		}
	}()
	for _, swept := range []LogIndex{0, 4, 8} {
		v := vouch(t, pool, swept)
		for _, damaged := range []int{5, 8} {
			at := v.places[damaged-1]
			d := v.d.Clone()
			d.Damage(at.path, at.off+at.size-1, 1)
			if f, err := v.open(t, d.Clone(), "unread", nil); err == nil {
				f.kill() // the checkpoint lies behind it
				continue
			}
			want := max(LogIndex(damaged-1), swept)
			steps, cuts, asked, told := 0, 0, false, 0
			check := func(left *simdisk.Disk) {
				cuts++
				what := fmt.Sprintf("checkpoint at %d, round %d damaged, cut %d", swept, damaged, cuts)
				f, err := v.open(t, left, what, func(error) error { told++; return nil })
				if err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				if f.rec.Log.Last.Index != want || f.rec.Suspect == nil && !asked {
					t.Fatalf("%s: the log ends at %d, not %d, suspect %v", what, f.rec.Log.Last.Index, want, f.rec.Suspect)
				}
				f.kill()
			}
			d.OnStep(func(op *ring.Op) {
				if op.Kind == ring.Read || op.Kind == ring.Stat || op.Kind == ring.ReadDir {
					return
				}
				if steps++; steps%everyStep(2, 10) != 0 {
					return
				}
				pending := d.Pending()
				for keep := range simdisk.Subsets(len(pending), 4, 4, uint64(cuts)) {
					check(d.Crash(func(i int, _ simdisk.Item) simdisk.Fate {
						if keep(i) {
							return simdisk.Keep
						}
						return simdisk.Drop
					}))
				}
				check(d.Clone())
			})
			f, err := v.open(t, d, "start", func(error) error { asked = true; return nil })
			if err != nil {
				t.Fatal(err)
			}
			f.kill()
			if cuts == 0 || told == 0 {
				t.Errorf("%d cuts, told %d times", cuts, told)
			}
			tried++
		}
	}
}
