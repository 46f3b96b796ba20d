package simdisk

import (
	"bytes"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/mortarmq/mortarmq/ring"
)

// user runs one operation at a time on a disk.
type user struct {
	t *testing.T
	d *Disk
}

func (u user) try(op ring.Op) (*ring.Op, error) {
	u.t.Helper()
	done := false
	op.Done = func(*ring.Op) { done = true }
	u.d.Submit(&op)
	for !done {
		if err := u.d.WaitOne(); err != nil {
			u.t.Fatal(err)
		}
	}
	return &op, op.Err
}

func (u user) do(op ring.Op) *ring.Op {
	u.t.Helper()
	res, err := u.try(op)
	if err != nil {
		u.t.Fatal(err)
	}
	return res
}

func (u user) create(p string) int {
	u.t.Helper()
	return u.do(ring.Op{Kind: ring.Open, Path: p, Flags: ring.Create}).FD
}

func newUser(t *testing.T, opts Options) user { return user{t, New(opts)} }

func fill(b byte, n int) []byte { return bytes.Repeat([]byte{b}, n) }

func keepAll(int, Item) Fate { return Keep }

func TestDisk_PowerCutKeepsOnlyWhatWasFlushed(t *testing.T) {
	u := newUser(t, Options{})
	fd := u.create("a")
	u.do(ring.Op{Kind: ring.SyncDir, Path: "."})
	u.do(ring.Op{Kind: ring.Write, FD: fd, Buf: fill('x', 1000)})
	if got := u.d.Crash(nil).ReadFile("a"); len(got) != 0 {
		t.Errorf("a write without a flush survived: %d bytes", len(got))
	}
	if got := u.d.Crash(keepAll).ReadFile("a"); !bytes.Equal(got, fill('x', 1000)) {
		t.Errorf("everything kept, and %d bytes are there", len(got))
	}
	u.do(ring.Op{Kind: ring.Sync, FD: fd})
	u.do(ring.Op{Kind: ring.Write, FD: fd, Off: 512, Buf: fill('y', 1024)})
	got := u.d.Crash(func(i int, it Item) Fate {
		if it.Kind == Sector && it.Offset == 1024 || it.Kind == Size {
			return Keep
		}
		return Drop
	}).ReadFile("a")
	want := append(append(fill('x', 1000), fill(0, 24)...), fill('y', 512)...)
	if !bytes.Equal(got, want) {
		t.Errorf("only the second sector kept: %q", got)
	}
	got = u.d.Crash(func(int, Item) Fate { return Torn }).ReadFile("a")
	if got[512] != 'y' || got[512+255] != 'y' || got[512+256] != 'x' {
		t.Errorf("torn sector: %q", got[500:800])
	}
}

func TestDisk_WriteSyncCoversItselfOnly(t *testing.T) {
	u := newUser(t, Options{})
	fd := u.create("a")
	u.do(ring.Op{Kind: ring.SyncDir, Path: "."})
	u.do(ring.Op{Kind: ring.Write, FD: fd, Buf: fill('x', 4096)})
	op := ring.Op{Kind: ring.WriteSync, FD: fd, Off: 4096, Buf: fill('y', 4096), Done: func(*ring.Op) {}}
	u.d.Submit(&op)
	if n := len(u.d.Pending()); n != 17 {
		t.Errorf("%d items pending while the second block is in flight, want 16 sectors and the size", n)
	}
	u.d.Poll()
	if got, want := u.d.Crash(nil).ReadFile("a"), append(make([]byte, 4096), fill('y', 4096)...); !bytes.Equal(got, want) {
		t.Error("after WriteSync its own bytes must be there and the others not")
	}
}

func TestDisk_SyncCoversWhatWasWrittenBeforeIt(t *testing.T) {
	u := newUser(t, Options{})
	fd := u.create("a")
	u.do(ring.Op{Kind: ring.SyncDir, Path: "."})
	u.do(ring.Op{Kind: ring.Write, FD: fd, Buf: fill('x', 512)})
	nop := func(*ring.Op) {}
	sync := ring.Op{Kind: ring.Sync, FD: fd, Done: nop}
	u.d.Submit(&sync)
	late := ring.Op{Kind: ring.Write, FD: fd, Buf: fill('y', 1024), Done: nop}
	u.d.Submit(&late)
	u.d.Poll()
	if got := u.d.Crash(nil).ReadFile("a"); !bytes.Equal(got, fill('x', 512)) {
		t.Errorf("survived: %q", got)
	}
	if got := u.d.Clone().ReadFile("a"); !bytes.Equal(got, fill('y', 1024)) {
		t.Errorf("a killed process lost a write: %q", got)
	}
}

func TestDisk_FailedSyncIsNotMadeGoodByTheNext(t *testing.T) {
	u := newUser(t, Options{})
	fd := u.create("a")
	u.do(ring.Op{Kind: ring.SyncDir, Path: "."})
	u.do(ring.Op{Kind: ring.Allocate, FD: fd, Size: 4096})
	u.do(ring.Op{Kind: ring.Sync, FD: fd})
	u.do(ring.Op{Kind: ring.Write, FD: fd, Buf: fill('x', 512)})
	u.d.Inject(Fault{Kind: ring.Sync, Path: "a", Count: 1, Err: syscall.EIO})
	if _, err := u.try(ring.Op{Kind: ring.Sync, FD: fd}); !errors.Is(err, syscall.EIO) {
		t.Fatalf("Sync: %v", err)
	}
	u.do(ring.Op{Kind: ring.Sync, FD: fd})
	if got := u.d.Crash(nil).ReadFile("a"); got[0] != 0 {
		t.Error("a second Sync made durable what the first one failed to")
	}
	u.do(ring.Op{Kind: ring.Write, FD: fd, Buf: fill('z', 512)})
	u.do(ring.Op{Kind: ring.Sync, FD: fd})
	if got := u.d.Crash(nil).ReadFile("a"); got[0] != 'z' {
		t.Error("written again and flushed, and not durable")
	}
}

func TestDisk_NamesAreDurableAfterSyncDirOnly(t *testing.T) {
	u := newUser(t, Options{})
	u.do(ring.Op{Kind: ring.Mkdir, Path: "d/e"})
	fd := u.create("d/e/a")
	u.do(ring.Op{Kind: ring.WriteSync, FD: fd, Buf: fill('x', 512)})
	u.do(ring.Op{Kind: ring.SyncDir, Path: "d/e"})
	if got := u.d.Crash(nil).Paths(); len(got) != 0 {
		t.Errorf("%v survived though its directories did not", got)
	}
	u.do(ring.Op{Kind: ring.SyncDir, Path: "d"})
	u.do(ring.Op{Kind: ring.SyncDir, Path: "."})
	if got := u.d.Crash(nil).ReadFile("d/e/a"); !bytes.Equal(got, fill('x', 512)) {
		t.Errorf("flushed with all its directories, and gone: %q", got)
	}
	u.do(ring.Op{Kind: ring.Rename, Path: "d/e/a", Path2: "d/e/b"})
	u.create("d/e/c")
	u.do(ring.Op{Kind: ring.Remove, Path: "d/e/b"})
	for mask, want := range [][]string{
		0b000: {"d/e/a"}, 0b001: {"d/e/b"}, 0b010: {"d/e/a", "d/e/c"}, 0b011: {"d/e/b", "d/e/c"},
		0b100: {"d/e/a"}, 0b101: nil, 0b110: {"d/e/a", "d/e/c"}, 0b111: {"d/e/c"},
	} {
		got := u.d.Crash(func(i int, _ Item) Fate { return Fate(mask >> i & 1) }).Paths()
		if !slices.Equal(got, want) {
			t.Errorf("changes %03b kept: %v, want %v", mask, got, want)
		}
	}
	u.do(ring.Op{Kind: ring.SyncDir, Path: "d/e"})
	if got := u.d.Crash(nil).Paths(); !slices.Equal(got, []string{"d/e/c"}) {
		t.Errorf("after SyncDir %v survives", got)
	}
	if names := u.do(ring.Op{Kind: ring.ReadDir, Path: "d"}).Names; !slices.Equal(names, []string{"e"}) {
		t.Errorf("ReadDir: %v", names)
	}
}

func TestDisk_ErrorsAreThoseOfTheSystem(t *testing.T) {
	u := newUser(t, Options{})
	u.create("a")
	u.do(ring.Op{Kind: ring.Mkdir, Path: "d"})
	u.create("d/f")
	tests := []struct {
		name string
		op   ring.Op
		want error
	}{
		{"open missing", ring.Op{Kind: ring.Open, Path: "b"}, fs.ErrNotExist},
		{"create in missing directory", ring.Op{Kind: ring.Open, Path: "x/b", Flags: ring.Create}, fs.ErrNotExist},
		{"create exclusively", ring.Op{Kind: ring.Open, Path: "a", Flags: ring.Create | ring.Exclusive}, fs.ErrExist},
		{"open a directory", ring.Op{Kind: ring.Open, Path: "d"}, syscall.EISDIR},
		{"remove missing", ring.Op{Kind: ring.Remove, Path: "b"}, fs.ErrNotExist},
		{"remove full directory", ring.Op{Kind: ring.Remove, Path: "d"}, syscall.ENOTEMPTY},
		{"rename missing", ring.Op{Kind: ring.Rename, Path: "b", Path2: "c"}, fs.ErrNotExist},
		{"stat missing", ring.Op{Kind: ring.Stat, Path: "b"}, fs.ErrNotExist},
		{"list missing", ring.Op{Kind: ring.ReadDir, Path: "b"}, fs.ErrNotExist},
		{"sync missing directory", ring.Op{Kind: ring.SyncDir, Path: "b"}, fs.ErrNotExist},
		{"read a closed file", ring.Op{Kind: ring.Read, FD: 99}, syscall.EBADF},
		{"mkdir over a file", ring.Op{Kind: ring.Mkdir, Path: "a"}, syscall.ENOTDIR},
	}
	for _, tt := range tests {
		if _, err := u.try(tt.op); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
		}
	}
	fd := u.do(ring.Op{Kind: ring.Open, Path: "a", Flags: ring.Direct}).FD
	if _, err := u.try(ring.Op{Kind: ring.Write, FD: fd, Buf: make([]byte, 100)}); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("a misaligned direct write: %v", err)
	}
	fd = u.do(ring.Op{Kind: ring.Open, Path: "a", Flags: ring.ReadOnly}).FD
	if _, err := u.try(ring.Op{Kind: ring.Write, FD: fd, Buf: make([]byte, 100)}); !errors.Is(err, syscall.EBADF) {
		t.Errorf("a write to a file open for reading: %v", err)
	}
}

func TestDisk_CapacityIsEnforcedAndGivenBack(t *testing.T) {
	u := newUser(t, Options{CapacityBytes: 64 << 10})
	fd := u.create("a")
	u.do(ring.Op{Kind: ring.Allocate, FD: fd, Size: 32 << 10})
	u.do(ring.Op{Kind: ring.Write, FD: fd, Buf: fill('x', 32<<10)})
	if n := u.do(ring.Op{Kind: ring.StatFS, Path: "."}).Size; n != 32<<10 {
		t.Errorf("%d bytes free after 32 KiB of 64 were reserved and written", n)
	}
	if _, err := u.try(ring.Op{Kind: ring.Write, FD: fd, Off: 32 << 10, Buf: fill('x', 33<<10)}); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("a write beyond the capacity: %v", err)
	}
	if _, err := u.try(ring.Op{Kind: ring.Allocate, FD: fd, Size: 65 << 10}); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("an allocation beyond the capacity: %v", err)
	}
	u.do(ring.Op{Kind: ring.Truncate, FD: fd, Size: 4096})
	if n := u.d.Used(); n != 4096 {
		t.Errorf("%d bytes used after the file was cut to a block", n)
	}
	u.do(ring.Op{Kind: ring.Remove, Path: "a"})
	if n := u.d.Used(); n != 4096 {
		t.Errorf("%d bytes used by a file that is still open", n)
	}
	u.do(ring.Op{Kind: ring.Close, FD: fd})
	if n := u.d.Used(); n != 0 {
		t.Errorf("%d bytes used by no file", n)
	}
}

func TestDisk_TruncateIsVolatileUntilSynced(t *testing.T) {
	u := newUser(t, Options{})
	fd := u.create("a")
	u.do(ring.Op{Kind: ring.Write, FD: fd, Buf: fill('x', 6000)})
	u.do(ring.Op{Kind: ring.Sync, FD: fd})
	u.do(ring.Op{Kind: ring.SyncDir, Path: "."})
	u.do(ring.Op{Kind: ring.Truncate, FD: fd, Size: 100})
	u.do(ring.Op{Kind: ring.Truncate, FD: fd, Size: 200})
	if got, want := u.d.ReadFile("a"), append(fill('x', 100), fill(0, 100)...); !bytes.Equal(got, want) {
		t.Errorf("cut and grown again: %q", got)
	}
	if got := u.d.Crash(nil).ReadFile("a"); !bytes.Equal(got, fill('x', 6000)) {
		t.Errorf("the cut survived without a flush: %d bytes", len(got))
	}
	u.do(ring.Op{Kind: ring.Sync, FD: fd})
	if got := u.d.Crash(nil).ReadFile("a"); len(got) != 200 || got[150] != 0 {
		t.Errorf("the flushed cut did not survive: %d bytes", len(got))
	}
}

func TestDisk_FaultsHitTheNthOperation(t *testing.T) {
	u := newUser(t, Options{})
	fd := u.create("d-1")
	u.do(ring.Op{Kind: ring.Write, FD: fd, Buf: append(fill('x', 4096), fill('y', 4096)...)})
	old := u.d.Clone()
	u.do(ring.Op{Kind: ring.Write, FD: fd, Buf: fill('z', 4096)})
	read := func() string {
		buf := make([]byte, 4096)
		op, err := u.try(ring.Op{Kind: ring.Read, FD: fd, Buf: buf})
		if err != nil {
			return err.Error()
		}
		return string(buf[:min(op.N, 1)]) + strings.Repeat("+", op.N/4096)
	}
	for _, tt := range []struct {
		f    Fault
		want []string
	}{
		{Fault{Skip: 1, Count: 1, Err: syscall.EIO}, []string{"z+", "input/output error", "z+"}},
		{Fault{Misdirect: 4096}, []string{"y+", "y+"}},
		{Fault{Stale: old, Count: 1}, []string{"x+", "z+"}},
		{Fault{Short: 1}, []string{"z", "z"}},
		{Fault{Mutate: func(_ int64, b []byte) { b[0] ^= 1 }, Count: 1}, []string{"{+", "z+"}},
		{Fault{Path: "e-*", Err: syscall.EIO}, []string{"z+"}},
	} {
		tt.f.Kind = ring.Read
		if tt.f.Path == "" {
			tt.f.Path = "d-*"
		}
		remove := u.d.Inject(tt.f)
		for i, want := range tt.want {
			if got := read(); !strings.HasSuffix(got, want) {
				t.Errorf("%+v, read %d: %q, want %q", tt.f, i, got, want)
			}
		}
		remove()
	}
	if got := read(); got != "z+" {
		t.Errorf("after all faults were removed: %q", got)
	}
}

func TestDisk_HoldAndSeedOrderCompletions(t *testing.T) {
	order := func(seed uint64) string {
		u := newUser(t, Options{Seed: seed})
		fd := u.create("a")
		var got []byte
		ops := make([]ring.Op, 6)
		for i := range ops {
			ops[i] = ring.Op{Kind: ring.Write, FD: fd, Off: int64(i) * 512, Buf: fill('x', 512), Tag: uint64(i),
				Done: func(op *ring.Op) { got = append(got, byte('0'+op.Tag)) }}
			u.d.Submit(&ops[i])
		}
		u.d.Hold(func(op *ring.Op) bool { return op.Tag == 2 })
		u.d.Poll()
		if u.d.InFlight() != 1 || !errors.Is(u.d.WaitOne(), ErrStuck) {
			t.Errorf("seed %d: %d in flight while one is held", seed, u.d.InFlight())
		}
		u.d.Hold(nil)
		u.d.Poll()
		return string(got)
	}
	if got := order(0); got != "013452" {
		t.Errorf("without a seed: %s", got)
	}
	if a, b := order(7), order(7); a != b || a == "013452" {
		t.Errorf("seed 7: %s and %s", a, b)
	}
}

func TestDisk_QueuesAreSeparate(t *testing.T) {
	d := New(Options{})
	q := d.NewQueue()
	done := 0
	op := ring.Op{Kind: ring.Mkdir, Path: "d", Done: func(*ring.Op) { done++ }}
	q.Submit(&op)
	if d.Poll() != 0 || done != 0 || q.Poll() != 1 || done != 1 {
		t.Error("an operation completed in another queue's Poll")
	}
}

func TestSubsets_AreExhaustiveWhereTheyMustBe(t *testing.T) {
	count := func(n int) (total, all, none int) {
		for keep := range Subsets(n, 8, 64, 1) {
			kept := 0
			for i := range n {
				if keep(i) {
					kept++
				}
			}
			total++
			if kept == n {
				all++
			}
			if kept == 0 {
				none++
			}
		}
		return total, all, none
	}
	if total, all, none := count(8); total != 256 || all != 1 || none != 1 {
		t.Errorf("8 items: %d subsets", total)
	}
	if total, all, none := count(20); total != 2*21+20+64 || all < 2 || none < 2 {
		t.Errorf("20 items: %d subsets, %d of all, %d of none", total, all, none)
	}
}
