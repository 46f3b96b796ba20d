package delivery

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

// g9: a group's position that can't be read is found by other means or refuses the start, with the file's name: it never
// begins at the start or the end of its topic instead.
func TestCase_UnreadableCursorsAreNeverGuessed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	d := start(t, dir)
	topic := declare(t, d, "t", 1)
	publish(t, d, topic, "1", "2", "3", "4")
	m := join(t, d, "g", topic, quick)
	var msgs []protocol.Msg
	for seq := uint64(1); seq <= 4; seq++ {
		msgs = append(msgs, m.want(seq, 1))
	}
	m.mustAck(msgs[0], msgs[2])
	m.leave()
	stop(t, d)

	checkpoint, ledger := filepath.Join("ledger", "0", "cursor.mqc"), filepath.Join("ledger", "0", "delivery.mql")
	flip := func(t *testing.T, dir, name string, at func(size int) int) {
		t.Helper()
		path := filepath.Join(dir, name)
		b, err := os.ReadFile(path)
		if err == nil {
			b[at(len(b))] ^= 1
			err = os.WriteFile(path, b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	last := func(size int) int { return size - 1 }
	remove := func(t *testing.T, dir, name string) {
		t.Helper()
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name   string
		damage func(t *testing.T, dir string)
		// names is what the refusal says; empty: the start finds the positions all the same.
		names string
	}{
		{"nothing", func(*testing.T, string) {}, ""},
		{"the checkpoint is damaged, the ledger has all", func(t *testing.T, dir string) { flip(t, dir, checkpoint, last) }, ""},
		{"the checkpoint is gone, the ledger has all", func(t *testing.T, dir string) { remove(t, dir, checkpoint) }, ""},
		{"the ledger is damaged and the checkpoint, too", func(t *testing.T, dir string) {
			flip(t, dir, checkpoint, last)
			flip(t, dir, ledger, func(int) int { return 4096 + 60 })
		}, "ledger"},
		{"the ledger is gone and the checkpoint, too", func(t *testing.T, dir string) {
			remove(t, dir, checkpoint)
			remove(t, dir, ledger)
		}, "ledger"},
	} {
		t.Run(c.name, func(t *testing.T) {
			copied := t.TempDir()
			if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
				t.Fatal(err)
			}
			_ = os.Remove(filepath.Join(copied, "LOCK"))
			c.damage(t, copied)
			d, err := harness.Start(t.Context(), harness.Options{Binary: mortard, DataDir: copied, Config: map[string]any{"delivery_lease_ms": 60_000}})
			if c.names != "" {
				if err == nil {
					d.Kill()
					t.Fatal("the broker starts")
				}
				if !strings.Contains(err.Error(), filepath.Join(copied, c.names)) {
					t.Fatalf("the refusal does not name the files: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { d.EndScenario(t) })
			m := join(t, d, "g", topic, quick)
			m.mustAck(m.want(2, 1), m.want(4, 1))
			m.silent(100 * time.Millisecond)
		})
	}
}
