package simdisk

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

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

// TestDisk_ADirectoryIsRenamedWithEverythingInIt: a power cut leaves it whole, under one name or the other.
func TestDisk_ADirectoryIsRenamedWithEverythingInIt(t *testing.T) {
	u := newUser(t, Options{})
	u.do(ring.Op{Kind: ring.Mkdir, Path: "a/0"})
	fd := u.create("a/0/x")
	u.do(ring.Op{Kind: ring.Write, FD: fd, Buf: fill('x', 512)})
	u.do(ring.Op{Kind: ring.Sync, FD: fd})
	for _, dir := range []string{"a/0", "a", "."} {
		u.do(ring.Op{Kind: ring.SyncDir, Path: dir})
	}
	u.create("a/0/later") // not durable
	u.do(ring.Op{Kind: ring.Rename, Path: "a", Path2: "b"})
	for i := range 2 {
		d := u.d.Crash(func(_ int, it Item) Fate {
			if strings.HasPrefix(it.Path, "rename") && i == 1 {
				return Keep
			}
			return Drop
		})
		if got, want := d.Paths(), [][]string{{"a/0/x"}, {"b/0/x"}}[i]; !slices.Equal(got, want) {
			t.Errorf("the new name kept: %t: %v, want %v", i == 1, got, want)
		}
	}
	u.do(ring.Op{Kind: ring.SyncDir, Path: "."})
	if got, want := u.d.Crash(nil).Paths(), []string{"b/0/x"}; !slices.Equal(got, want) {
		t.Errorf("flushed: %v, want %v", got, want)
	}
	if got, want := u.d.Crash(keepAll).Paths(), []string{"b/0/later", "b/0/x"}; !slices.Equal(got, want) {
		t.Errorf("flushed, and all else kept: %v, want %v", got, want)
	}
	u.do(ring.Op{Kind: ring.SyncDir, Path: "b/0"})
	if got, want := u.d.Crash(nil).Paths(), []string{"b/0/later", "b/0/x"}; !slices.Equal(got, want) {
		t.Errorf("flushed under the new name: %v, want %v", got, want)
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

func TestDisk_FlushedZerosKeepTheirBlocks(t *testing.T) {
	u := newUser(t, Options{})
	fd := u.create("a")
	u.do(ring.Op{Kind: ring.Write, FD: fd, Buf: fill(0, 8192)})
	u.do(ring.Op{Kind: ring.SyncDir, Path: "."})
	if n := u.d.Crash(nil).Used(); n != 0 {
		t.Errorf("zeros that were not flushed have %d bytes of blocks", n)
	}
	u.do(ring.Op{Kind: ring.Sync, FD: fd})
	u.do(ring.Op{Kind: ring.WriteSync, FD: fd, Off: 8192, Buf: fill(0, 4096)})
	for name, d := range map[string]*Disk{"a crash": u.d.Crash(nil), "a clone": u.d.Clone().Crash(nil)} {
		if n := d.Used(); n != 12288 {
			t.Errorf("12288 bytes of flushed zeros have %d bytes of blocks after %s", n, name)
		}
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

// clock is a simulated time.
type clock struct{ now time.Duration }

func (c *clock) read() time.Duration { return c.now }

// TestDisk_ClockOrdersCompletions gives every kind of operation a latency of its own: completions come in the order of
// time, not before it, and NextDue says when.
func TestDisk_ClockOrdersCompletions(t *testing.T) {
	c := &clock{}
	latency := map[ring.Kind]time.Duration{ring.Write: 30, ring.WriteSync: 20, ring.Read: 10, ring.Sync: 20}
	d := New(Options{Now: c.read, Latency: func(op *ring.Op, _ *rand.Rand) time.Duration { return latency[op.Kind] }})
	u := user{t, d}
	fd := u.create("a")
	if _, ok := d.NextDue(); ok {
		t.Error("something is due on an idle disk")
	}
	q := d.NewQueue()
	var order []ring.Kind
	submit := func(w interface{ Submit(*ring.Op) }, kind ring.Kind) {
		w.Submit(&ring.Op{Kind: kind, FD: fd, Buf: fill('x', 512), Done: func(op *ring.Op) { order = append(order, op.Kind) }})
	}
	for _, kind := range []ring.Kind{ring.Write, ring.WriteSync, ring.Sync} {
		submit(d, kind)
	}
	submit(q, ring.Read)
	if at, ok := d.NextDue(); !ok || at != 10 {
		t.Errorf("next due at %v, %v", at, ok)
	}
	for c.now = 5; c.now <= 30; c.now += 5 {
		d.Poll()
		q.Poll()
	}
	if want := []ring.Kind{ring.Read, ring.WriteSync, ring.Sync, ring.Write}; !slices.Equal(order, want) {
		t.Errorf("completed in the order %v, want %v", order, want)
	}
}

// TestDisk_WaitOneLetsTimePass waits for an operation whose time hasn't come.
func TestDisk_WaitOneLetsTimePass(t *testing.T) {
	c := &clock{}
	opts := Options{Now: c.read, Latency: func(*ring.Op, *rand.Rand) time.Duration { return 7 }}
	newUser(t, opts).create("a")
	if c.now != 0 {
		t.Errorf("time went to %v by itself", c.now)
	}
	opts.Wait = func(until time.Duration) { c.now = until }
	u := newUser(t, opts)
	fd := u.create("a")
	u.do(ring.Op{Kind: ring.Write, FD: fd, Buf: fill('x', 512)})
	if c.now != 14 {
		t.Errorf("two operations of 7 took %v", c.now)
	}
}

func TestDisk_DelaysAndHangsCountBesideOtherFaults(t *testing.T) {
	c := &clock{now: 100}
	d := New(Options{Now: c.read})
	fd := user{t, d}.create("a")
	d.Inject(Fault{Kind: ring.Sync, Delay: 50})
	release := d.Inject(Fault{Kind: ring.Sync, Hang: true, Skip: 1, Count: 1})
	d.Inject(Fault{Kind: ring.Sync, Err: syscall.EIO})
	var errs []error
	for range 2 {
		d.Submit(&ring.Op{Kind: ring.Sync, FD: fd, Done: func(op *ring.Op) { errs = append(errs, op.Err) }})
	}
	if d.Poll(); len(errs) != 0 {
		t.Error("a delayed operation completed at once")
	}
	c.now = 150
	if d.Poll(); len(errs) != 1 || !errors.Is(errs[0], syscall.EIO) {
		t.Errorf("after the delay: %v", errs)
	}
	c.now = 10_000
	if _, ok := d.NextDue(); ok || d.Poll() > 0 || !errors.Is(d.WaitOne(), ErrStuck) {
		t.Error("a hanging operation completed, or would")
	}
	release()
	if at, ok := d.NextDue(); !ok || at != 10_000 {
		t.Errorf("when it hangs no longer it is due at %v, %v", at, ok)
	}
	if d.Poll(); len(errs) != 2 {
		t.Error("it doesn't complete when it hangs no longer")
	}
}

// TestDisk_SameSeedSameRun runs random work twice: times, results, crashes and what is pending agree.
func TestDisk_SameSeedSameRun(t *testing.T) {
	run := func(seed uint64) string {
		var log strings.Builder
		c := &clock{}
		rng := rand.New(rand.NewPCG(seed, 2))
		d := New(Options{Seed: seed, Now: c.read, Latency: func(_ *ring.Op, r *rand.Rand) time.Duration {
			return time.Duration(r.IntN(1000))
		}})
		for life := range 4 {
			u := user{t, d}
			fds := []int{u.create("a"), u.create("b"), u.create("c")}
			for i := range 200 {
				op := &ring.Op{Kind: []ring.Kind{ring.Write, ring.WriteSync, ring.Sync, ring.Read}[rng.IntN(4)], FD: fds[rng.IntN(3)],
					Off: rng.Int64N(20_000), Buf: fill(byte(i), 1+rng.IntN(9000))}
				op.Done = func(op *ring.Op) { fmt.Fprintf(&log, "%d: %d %d %v\n", c.now, op.Kind, op.N, op.Err) }
				d.Submit(op)
				c.now += time.Duration(rng.IntN(200))
				d.Poll()
			}
			fmt.Fprintf(&log, "life %d: %v\n", life, d.Pending())
			p, off, _ := d.Rot(rng, func(p string) bool { return p != "b" })
			fmt.Fprintln(&log, p, off)
			d = d.Crash(RandomFates(rng))
		}
		for _, p := range d.Paths() {
			fmt.Fprintf(&log, "%s %x\n", p, d.ReadFile(p))
		}
		return log.String()
	}
	for seed := range uint64(5) {
		if first, again := run(seed), run(seed); first != again {
			t.Errorf("seed %d: two runs differ", seed)
		}
	}
	if run(1) == run(2) {
		t.Error("two seeds give the same run")
	}
}

// TestDisk_AgreesWithASlowModel compares what a power cut leaves with a model that keeps every sector on its own.
func TestDisk_AgreesWithASlowModel(t *testing.T) {
	const size = 5 * 4096
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 3))
		u := newUser(t, Options{SectorBytes: []int{64, 512, 4096}[seed%3]})
		sector := u.d.opts.SectorBytes
		fd := u.create("a")
		u.do(ring.Op{Kind: ring.SyncDir, Path: "."})
		u.do(ring.Op{Kind: ring.WriteSync, FD: fd, Buf: make([]byte, size)})
		seen, kept := make([]byte, size), make([]byte, size)
		lost := make([]bool, size/sector)
		eachSector := func(off, n int, f func(s int)) {
			for s := off / sector; s*sector < off+n; s++ {
				f(s)
			}
		}
		persist := func(s int) { copy(kept[s*sector:][:sector], seen[s*sector:]) }
		for step := range 200 {
			off := rng.IntN(size)
			b := fill(byte(rng.IntN(3)), 1+rng.IntN(min(9000, size-off)))
			switch rng.IntN(5) {
			case 0, 1:
				u.do(ring.Op{Kind: ring.Write, FD: fd, Off: int64(off), Buf: b})
				copy(seen[off:], b)
				eachSector(off, len(b), func(s int) { lost[s] = false })
			case 2:
				u.do(ring.Op{Kind: ring.WriteSync, FD: fd, Off: int64(off), Buf: b})
				copy(seen[off:], b)
				eachSector(off, len(b), func(s int) { persist(s); lost[s] = false })
			case 3:
				u.do(ring.Op{Kind: ring.Sync, FD: fd})
				eachSector(0, size, func(s int) {
					if !lost[s] {
						persist(s)
					}
				})
			case 4:
				remove := u.d.Inject(Fault{Kind: ring.Sync, Err: syscall.EIO})
				if _, err := u.try(ring.Op{Kind: ring.Sync, FD: fd}); err == nil {
					t.Fatal("the fault didn't hit")
				}
				remove()
				eachSector(0, size, func(s int) {
					lost[s] = lost[s] || !bytes.Equal(seen[s*sector:][:sector], kept[s*sector:][:sector])
				})
			}
			if got := u.d.ReadFile("a"); !bytes.Equal(got, seen) {
				t.Fatalf("seed %d, step %d: what processes see differs", seed, step)
			}
			if got := u.d.Crash(nil).ReadFile("a"); !bytes.Equal(got, kept) {
				t.Fatalf("seed %d, step %d: what a power cut leaves at least differs", seed, step)
			}
			var want []int64
			eachSector(0, size, func(s int) {
				if !bytes.Equal(seen[s*sector:][:sector], kept[s*sector:][:sector]) {
					want = append(want, int64(s*sector))
				}
			})
			var got []int64
			for _, it := range u.d.Pending() {
				got = append(got, it.Offset)
			}
			if !slices.Equal(got, want) {
				t.Fatalf("seed %d, step %d: pending at %v, want %v", seed, step, got, want)
			}
		}
	}
}

// BenchmarkDisk_Round is what a small round of a journal costs.
func BenchmarkDisk_Round(b *testing.B) {
	d := New(Options{SectorBytes: 4096})
	nop := func(*ring.Op) {}
	op := ring.Op{Kind: ring.Open, Path: "a", Flags: ring.Create, Done: nop}
	d.Submit(&op)
	d.Poll()
	fd := op.FD
	buf := fill('x', 4096)
	for i := 0; b.Loop(); i++ {
		buf[0] = byte(i)
		op = ring.Op{Kind: ring.WriteSync, FD: fd, Off: int64(i%16) * 4096, Buf: buf, Done: nop}
		d.Submit(&op)
		d.Poll()
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
