package wal

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// TestOpen_AnyDamageIsHarmless damages one file at a time, anywhere: flips a bit, cuts the file, zeroes a stretch, puts
// another file in its place or takes it away. The node starts or says why not; what it serves is what was committed.
func TestOpen_AnyDamageIsHarmless(t *testing.T) {
	o := smallStore(ring.NewPool(256 << 20))
	n := lived(t, o)
	clean := n.d.Clone()
	n.publish(100, p0, p1, le, md)
	n.kill()
	killed := n.d.Clone()
	opened, refused := 0, 0
	for seed := range seeds(400) {
		rng := rand.New(rand.NewPCG(seed, 5))
		d := clean.Clone()
		if rng.IntN(2) == 0 {
			d = killed.Clone()
		}
		what := damageAnything(rng, d)
		m, err := tryNode(t, d, o)
		if err != nil {
			var v *VersionError
			if !errors.Is(err, ErrCorrupt) && !errors.As(err, &v) {
				t.Fatalf("seed %d: %s: %v", seed, what, err)
			}
			refused++
			continue
		}
		opened++
		m.acked = n.acked
		for _, id := range []StreamID{p0, p1} {
			got, err := m.readAll(id, 1, 10_000)
			var v *VersionError
			if err != nil && !errors.Is(err, ErrCorrupt) && !errors.As(err, &v) {
				t.Fatalf("seed %d: %s: read %v: %v", seed, what, id, err)
			}
			for i, value := range got {
				if value != n.acked[id][i] {
					t.Fatalf("seed %d: %s: %v sequence %d is not what was committed", seed, what, id, i+1)
				}
			}
			if err == nil && len(got) < len(n.acked[id])-1 && m.rec.LastSequences[id] > Sequence(len(got))+1 {
				t.Fatalf("seed %d: %s: %v has only %d records, without an error", seed, what, id, len(got))
			}
		}
		for i, value := range m.h.records[le] {
			if want := n.acked[le][int(m.h.positions[SnapshotCursors])+i]; value != want {
				t.Fatalf("seed %d: %s: ledger record %d is not what was committed", seed, what, i)
			}
		}
		m.settle()
		m.kill()
	}
	t.Logf("%d opened, %d refused", opened, refused)
	if opened == 0 || refused == 0 {
		t.Error("the damage is one-sided")
	}
}

func damageAnything(rng *rand.Rand, d *simdisk.Disk) string {
	var paths []string
	for _, p := range d.Paths() {
		if !strings.HasSuffix(p, ".mmj") {
			paths = append(paths, p)
		}
	}
	path := paths[rng.IntN(len(paths))]
	b := d.ReadFile(path)
	at := 0
	if len(b) > 0 {
		at = rng.IntN(len(b))
	}
	switch kind := rng.IntN(6); {
	case kind == 0:
		d.RemoveFile(path)
		return path + " removed"
	case kind == 1:
		d.WriteFile(path, b[:at])
		return fmt.Sprintf("%s cut to %d bytes", path, at)
	case kind == 2:
		other := paths[rng.IntN(len(paths))]
		d.WriteFile(path, d.ReadFile(other))
		return path + " replaced by " + other
	case kind == 3 && len(b) > 0:
		clear(b[at:min(at+rng.IntN(5000), len(b))])
		d.WriteFile(path, b)
		return fmt.Sprintf("%s zeroed from %d", path, at)
	case len(b) > 0:
		d.Damage(path, int64(at), 1<<rng.IntN(8))
		return fmt.Sprintf("%s with a bit flipped at %d", path, at)
	}
	return path + " unharmed"
}
