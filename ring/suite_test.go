package ring

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// eachBackend runs test as the owner of a ring of every backend this build has.
func eachBackend(t *testing.T, opts Options, test func(t *testing.T, r *Ring)) {
	t.Helper()
	for name, open := range testBackends {
		t.Run(name, func(t *testing.T) {
			own(t, func() (*Ring, error) { return open(opts) }, func(r *Ring) { test(t, r) })
		})
	}
}

// withRing runs test as the owner of the ring that New makes of opts.
func withRing(t *testing.T, opts Options, test func(r *Ring)) {
	t.Helper()
	own(t, func() (*Ring, error) { return New(opts) }, test)
}

// own runs test as the owner of a new ring and closes it.
func own(t *testing.T, open func() (*Ring, error), test func(r *Ring)) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r, err := open()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if n := r.InFlight(); n != 0 {
			t.Errorf("%d operations in flight after Close", n)
		}
		if s := r.Stats(); s.Stale != 0 {
			t.Errorf("%d stale completions", s.Stale)
		}
	}()
	test(r)
}

// do runs one operation to its end.
func do(t *testing.T, r *Ring, op *Op) *Op {
	t.Helper()
	ended := false
	op.Done = func(*Op) { ended = true }
	r.Submit(op)
	for !ended {
		if _, err := r.Wait(-1); err != nil {
			t.Fatal(err)
		}
	}
	return op
}

// must is do for operations that have to succeed.
func must(t *testing.T, r *Ring, op *Op) *Op {
	t.Helper()
	if do(t, r, op); op.Err != nil {
		t.Fatal(op.Err)
	}
	return op
}

// openFile opens a new file in the test's directory and closes it at the end.
func openFile(t *testing.T, r *Ring, flags OpenFlags) (fd int, direct bool) {
	t.Helper()
	op := must(t, r, &Op{Kind: Open, Path: filepath.Join(t.TempDir(), "f"), Flags: flags | Create})
	t.Cleanup(func() { _ = unix.Close(op.FD) })
	return op.FD, op.Direct
}

func testPool(t *testing.T) *Pool {
	t.Helper()
	p := NewPool(256 << 20)
	p.SetPoison(true)
	t.Cleanup(p.Trim)
	return p
}

func slab(t *testing.T, p *Pool, n int) *Slab {
	t.Helper()
	s := p.Get(n)
	if s == nil {
		t.Fatalf("no slab of %d bytes", n)
	}
	return s
}

func fill(b []byte, seed byte) []byte {
	for i := range b {
		b[i] = byte(i)*31 + byte(i>>8) + seed
	}
	return b
}

func TestRing_ReadReturnsWhatWasWritten(t *testing.T) {
	eachBackend(t, Options{}, func(t *testing.T, r *Ring) {
		p := testPool(t)
		for _, flags := range []OpenFlags{0, Direct} {
			for _, kind := range []Kind{Write, WriteSync} {
				fd, _ := openFile(t, r, flags)
				out, in := slab(t, p, 256<<10), slab(t, p, 256<<10)
				fill(out.Bytes(), byte(kind))
				w := must(t, r, &Op{Kind: kind, FD: fd, Off: BlockSize, Buf: out.Bytes()})
				if w.N != len(out.Bytes()) {
					t.Fatalf("%v: wrote %d bytes", kind, w.N)
				}
				must(t, r, &Op{Kind: Sync, FD: fd})
				got := must(t, r, &Op{Kind: Read, FD: fd, Off: BlockSize, Buf: in.Bytes()})
				if got.N != len(in.Bytes()) || !bytes.Equal(in.Bytes(), out.Bytes()) {
					t.Fatalf("%v: read %d bytes, other than written", kind, got.N)
				}
				out.Release()
				in.Release()
			}
		}
	})
}

func TestRing_ReadStopsWhereTheFileEnds(t *testing.T) {
	eachBackend(t, Options{}, func(t *testing.T, r *Ring) {
		p := testPool(t)
		const size = 3*BlockSize + 904
		content := fill(make([]byte, size), 7)
		path := filepath.Join(t.TempDir(), "f")
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		for _, flags := range []OpenFlags{ReadOnly, ReadOnly | Direct} {
			fd := must(t, r, &Op{Kind: Open, Path: path, Flags: flags}).FD
			for _, c := range []struct{ off, length, want int }{
				{0, size / BlockSize * BlockSize, size / BlockSize * BlockSize},
				{0, 16 * BlockSize, size},
				{BlockSize, 8 * BlockSize, size - BlockSize},
				{3 * BlockSize, BlockSize, 904},
				{4 * BlockSize, BlockSize, 0},
				{1 << 30, BlockSize, 0},
				{0, 0, 0},
			} {
				s := slab(t, p, max(c.length, 1))
				op := must(t, r, &Op{Kind: Read, FD: fd, Off: int64(c.off), Buf: s.Bytes()[:c.length]})
				if op.N != c.want {
					t.Errorf("flags %b: read %d bytes at %d of %d: got %d", flags, c.length, c.off, size, op.N)
				} else if op.N > 0 && !bytes.Equal(op.Buf[:op.N], content[c.off:c.off+op.N]) {
					t.Errorf("flags %b: wrong bytes at %d", flags, c.off)
				}
				s.Release()
			}
			must(t, r, &Op{Kind: Close, FD: fd})
		}
	})
}

func TestRing_ErrorsNameOperationAndCause(t *testing.T) {
	eachBackend(t, Options{}, func(t *testing.T, r *Ring) {
		p := testPool(t)
		s := slab(t, p, BlockSize)
		defer s.Release()
		full := must(t, r, &Op{Kind: Open, Path: "/dev/full"}).FD
		file, _ := openFile(t, r, 0)
		missing := filepath.Join(t.TempDir(), "missing")
		existing := filepath.Join(t.TempDir(), "existing")
		must(t, r, &Op{Kind: Mkdir, Path: existing})
		for name, c := range map[string]struct {
			op   Op
			want error
			text string
		}{
			"write, no space":      {Op{Kind: Write, FD: full, Buf: s.Bytes()}, unix.ENOSPC, ""},
			"write-sync, no space": {Op{Kind: WriteSync, FD: full, Off: 8192, Buf: s.Bytes()}, unix.ENOSPC, "4096 bytes at offset 8192"},
			"read, bad fd":         {Op{Kind: Read, FD: 1 << 20, Buf: s.Bytes()}, unix.EBADF, "read fd 1048576"},
			"write, bad fd":        {Op{Kind: WriteSync, FD: 1 << 20, Buf: s.Bytes()}, unix.EBADF, "write-sync fd 1048576"},
			"sync, bad fd":         {Op{Kind: Sync, FD: 1 << 20}, unix.EBADF, "sync fd 1048576"},
			"close, bad fd":        {Op{Kind: Close, FD: 1 << 20}, unix.EBADF, "close fd 1048576"},
			"negative offset":      {Op{Kind: Read, FD: file, Off: -1, Buf: s.Bytes()}, unix.EINVAL, "offset -1"},
			"no kind":              {Op{}, unix.EINVAL, "kind(0)"},
			"unknown kind":         {Op{Kind: StatFS + 1}, unix.EINVAL, ""},
			"open, missing":        {Op{Kind: Open, Path: missing}, fs.ErrNotExist, missing},
			"open, exclusive":      {Op{Kind: Open, Path: existing, Flags: Create | Exclusive}, fs.ErrExist, existing},
			"remove, missing":      {Op{Kind: Remove, Path: missing}, fs.ErrNotExist, missing},
			"rename, missing":      {Op{Kind: Rename, Path: missing, Path2: existing}, fs.ErrNotExist, missing + " to " + existing},
			"stat, missing":        {Op{Kind: Stat, Path: missing}, fs.ErrNotExist, missing},
			"read-dir, missing":    {Op{Kind: ReadDir, Path: missing}, fs.ErrNotExist, missing},
			"sync-dir, missing":    {Op{Kind: SyncDir, Path: missing}, fs.ErrNotExist, missing},
			"stat-fs, missing":     {Op{Kind: StatFS, Path: missing}, fs.ErrNotExist, missing},
			"truncate, negative":   {Op{Kind: Truncate, FD: file, Size: -1}, unix.EINVAL, "truncate fd"},
			"allocate, nothing":    {Op{Kind: Allocate, FD: file}, unix.EINVAL, "allocate fd"},
		} {
			op := do(t, r, &c.op)
			var opErr *OpError
			if !errors.Is(op.Err, c.want) || !errors.As(op.Err, &opErr) || opErr.Kind != op.Kind {
				t.Errorf("%s: got %v, want %v", name, op.Err, c.want)
			} else if !bytes.Contains([]byte(op.Err.Error()), []byte(c.text)) {
				t.Errorf("%s: %q doesn't tell %q", name, op.Err, c.text)
			}
		}
		must(t, r, &Op{Kind: Close, FD: full})
	})
}

func TestRing_FileOperations(t *testing.T) {
	eachBackend(t, Options{}, func(t *testing.T, r *Ring) {
		dir := t.TempDir()
		sub := filepath.Join(dir, "a", "b")
		must(t, r, &Op{Kind: Mkdir, Path: sub})
		must(t, r, &Op{Kind: Mkdir, Path: sub}) // there already
		for _, name := range []string{"two", "one", "three"} {
			op := must(t, r, &Op{Kind: Open, Path: filepath.Join(sub, name), Flags: Create | Exclusive | Direct})
			must(t, r, &Op{Kind: Allocate, FD: op.FD, Size: 3 * BlockSize})
			if st := must(t, r, &Op{Kind: Stat, FD: op.FD}); st.Size != 3*BlockSize {
				t.Errorf("allocated file has %d bytes", st.Size)
			}
			must(t, r, &Op{Kind: Truncate, FD: op.FD, Size: 100})
			must(t, r, &Op{Kind: Close, FD: op.FD})
			if st := must(t, r, &Op{Kind: Stat, Path: filepath.Join(sub, name)}); st.Size != 100 {
				t.Errorf("truncated file has %d bytes", st.Size)
			}
		}
		must(t, r, &Op{Kind: Rename, Path: filepath.Join(sub, "two"), Path2: filepath.Join(sub, "one")})
		must(t, r, &Op{Kind: SyncDir, Path: sub})
		if names := must(t, r, &Op{Kind: ReadDir, Path: sub}).Names; len(names) != 2 || names[0] != "one" || names[1] != "three" {
			t.Errorf("directory holds %q", names)
		}
		if op := do(t, r, &Op{Kind: Remove, Path: sub}); !errors.Is(op.Err, unix.ENOTEMPTY) {
			t.Errorf("removing a full directory: %v", op.Err)
		}
		must(t, r, &Op{Kind: Remove, Path: filepath.Join(sub, "one")})
		must(t, r, &Op{Kind: Remove, Path: filepath.Join(sub, "three")})
		must(t, r, &Op{Kind: Remove, Path: sub})
		if op := must(t, r, &Op{Kind: StatFS, Path: dir}); op.Size <= 0 {
			t.Errorf("file system has %d bytes available", op.Size)
		}
	})
}

func TestRing_CachedTellsWhatIsInThePageCache(t *testing.T) {
	eachBackend(t, Options{}, func(t *testing.T, r *Ring) {
		path := filepath.Join(t.TempDir(), "f")
		const size = 64 * BlockSize
		if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
		fd := must(t, r, &Op{Kind: Open, Path: path}).FD
		defer func() { must(t, r, &Op{Kind: Close, FD: fd}) }()
		if op := must(t, r, &Op{Kind: Cached, FD: fd, Size: size}); op.Size != size {
			t.Errorf("%d of %d bytes that were just written are in the page cache", op.Size, size)
		}
		// A hole that nobody has read has nothing there; where the kernel doesn't tell, all of it counts as if it were.
		hole := must(t, r, &Op{Kind: Open, Path: path + ".hole", Flags: Create}).FD
		defer func() { must(t, r, &Op{Kind: Close, FD: hole}) }()
		must(t, r, &Op{Kind: Truncate, FD: hole, Size: size})
		if op := must(t, r, &Op{Kind: Cached, FD: hole, Size: size}); op.Size != 0 && op.Size != size {
			t.Errorf("%d of %d bytes of a hole are in the page cache", op.Size, size)
		}
		if op := do(t, r, &Op{Kind: Cached, FD: 1 << 20, Size: size}); op.Err == nil && op.Size != size {
			t.Errorf("a file that is not open: %d bytes", op.Size)
		}
	})
}

func TestRing_UncacheLosesNothing(t *testing.T) {
	eachBackend(t, Options{}, func(t *testing.T, r *Ring) {
		path := filepath.Join(t.TempDir(), "f")
		want := bytes.Repeat([]byte("kept"), 16*BlockSize)
		if err := os.WriteFile(path, want, 0o600); err != nil {
			t.Fatal(err)
		}
		fd := must(t, r, &Op{Kind: Open, Path: path}).FD
		must(t, r, &Op{Kind: Uncache, FD: fd, Off: BlockSize}) // not written back yet
		must(t, r, &Op{Kind: Sync, FD: fd})
		must(t, r, &Op{Kind: Uncache, FD: fd})
		must(t, r, &Op{Kind: Uncache, FD: fd, Off: 1 << 40, Size: BlockSize})
		if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, want) {
			t.Errorf("the file has %d bytes, wrote %d: %v", len(got), len(want), err)
		}
		must(t, r, &Op{Kind: Close, FD: fd})
		if op := do(t, r, &Op{Kind: Uncache, FD: 1 << 20}); op.Err == nil {
			t.Error("a file that is not open was taken out of the page cache")
		}
	})
}

func TestRing_OpenWithoutDirectWhereRefused(t *testing.T) {
	eachBackend(t, Options{}, func(t *testing.T, r *Ring) {
		// procfs has no direct I/O on any kernel; tmpfs has from 6.6 on.
		op := must(t, r, &Op{Kind: Open, Path: "/proc/self/status", Flags: ReadOnly | Direct})
		if op.Direct {
			t.Error("procfs claims direct I/O")
		}
		must(t, r, &Op{Kind: Close, FD: op.FD})
	})
}

func TestRing_DirectOnTmpfsWorksEitherWay(t *testing.T) {
	dir, err := os.MkdirTemp("/dev/shm", "ring")
	if err != nil {
		t.Skip("no tmpfs to write to: ", err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	eachBackend(t, Options{}, func(t *testing.T, r *Ring) {
		p := testPool(t)
		s := slab(t, p, BlockSize)
		defer s.Release()
		path := filepath.Join(dir, "f")
		op := must(t, r, &Op{Kind: Open, Path: path, Flags: Create | Exclusive | Direct})
		must(t, r, &Op{Kind: WriteSync, FD: op.FD, Buf: fill(s.Bytes(), 3)})
		clear(s.Bytes())
		must(t, r, &Op{Kind: Read, FD: op.FD, Buf: s.Bytes()})
		if !bytes.Equal(s.Bytes(), fill(make([]byte, BlockSize), 3)) {
			t.Error("read other than written")
		}
		must(t, r, &Op{Kind: Close, FD: op.FD})
		must(t, r, &Op{Kind: Remove, Path: path})
	})
}

func TestRing_OpenLeavesNoDescriptorBehind(t *testing.T) {
	eachBackend(t, Options{}, func(t *testing.T, r *Ring) {
		open := func() int { return len(must(t, r, &Op{Kind: ReadDir, Path: "/proc/self/fd"}).Names) }
		dir := t.TempDir()
		before := open()
		for range 10 {
			op := must(t, r, &Op{Kind: Open, Path: filepath.Join(dir, "f"), Flags: Create | Direct})
			must(t, r, &Op{Kind: Close, FD: op.FD})
			op = must(t, r, &Op{Kind: Open, Path: "/proc/self/status", Flags: ReadOnly | Direct})
			must(t, r, &Op{Kind: Close, FD: op.FD})
			do(t, r, &Op{Kind: Open, Path: dir, Flags: Direct})
		}
		if after := open(); after != before {
			t.Errorf("%d descriptors before, %d after", before, after)
		}
	})
}

func TestRing_ManyMoreOperationsThanEntries(t *testing.T) {
	eachBackend(t, Options{Entries: 8}, func(t *testing.T, r *Ring) {
		const ops, blocks = 10_000, 64
		p := testPool(t)
		fd, _ := openFile(t, r, 0)
		data := slab(t, p, blocks*BlockSize)
		defer data.Release()
		fill(data.Bytes(), 1)
		ended := 0
		count := func(op *Op) {
			if ended++; op.Err != nil || op.N != BlockSize {
				t.Errorf("operation %d: %d bytes, %v", op.Tag, op.N, op.Err)
			}
		}
		all := make([]Op, ops)
		for i := range all {
			block := i % blocks * BlockSize
			all[i] = Op{Kind: Write, FD: fd, Off: int64(block), Buf: data.Bytes()[block : block+BlockSize], Done: count, Tag: uint64(i)}
			r.Submit(&all[i])
		}
		if r.InFlight() != ops {
			t.Errorf("%d operations in flight, submitted %d", r.InFlight(), ops)
		}
		for r.InFlight() > 0 {
			if _, err := r.Wait(-1); err != nil {
				t.Fatal(err)
			}
		}
		if s := r.Stats(); ended != ops || s.BytesWritten != ops*BlockSize {
			t.Errorf("%d operations ended, %+v", ended, s)
		}
	})
}

func TestRing_DoneMaySubmitAgain(t *testing.T) {
	eachBackend(t, Options{Entries: 8}, func(t *testing.T, r *Ring) {
		p := testPool(t)
		fd, _ := openFile(t, r, 0)
		const chains, length = 20, 50
		ended := 0
		for c := range chains {
			s := slab(t, p, BlockSize)
			defer s.Release()
			left := length
			op := &Op{Kind: WriteSync, FD: fd, Off: int64(c) * BlockSize, Buf: s.Bytes()}
			op.Done = func(op *Op) {
				if op.Err != nil {
					t.Error(op.Err)
				}
				ended++
				if left--; left > 0 {
					r.Submit(op)
				}
			}
			r.Submit(op)
		}
		for r.InFlight() > 0 {
			if _, err := r.Wait(-1); err != nil {
				t.Fatal(err)
			}
		}
		if s := r.Stats(); ended != chains*length || s.Flushes != chains*length {
			t.Errorf("%d operations ended, %+v", ended, s)
		}
	})
}

func TestRing_PollCompletesWithoutBlocking(t *testing.T) {
	eachBackend(t, Options{}, func(t *testing.T, r *Ring) {
		if n := r.Poll(); n != 0 {
			t.Errorf("an idle ring completed %d operations", n)
		}
		p := testPool(t)
		fd, _ := openFile(t, r, 0)
		s := slab(t, p, BlockSize)
		defer s.Release()
		ended := 0
		r.Submit(&Op{Kind: WriteSync, FD: fd, Buf: s.Bytes(), Done: func(*Op) { ended++ }})
		if ended != 0 {
			t.Error("Done ran inside Submit")
		}
		for n := 0; n == 0; n = r.Poll() {
			runtime.Gosched()
		}
		if ended != 1 {
			t.Errorf("Done ran %d times", ended)
		}
	})
}

func TestRing_WaitReturnsAfterTimeout(t *testing.T) {
	eachBackend(t, Options{}, func(t *testing.T, r *Ring) {
		for _, d := range []time.Duration{0, time.Nanosecond, 20 * time.Millisecond} {
			start := time.Now()
			n, err := r.Wait(d)
			if n != 0 || err != nil {
				t.Errorf("Wait(%v) = %d, %v", d, n, err)
			}
			if took := time.Since(start); took < d {
				t.Errorf("Wait(%v) returned after %v", d, took)
			}
		}
	})
}

func TestRing_WaitWithZeroTimeoutSubmits(t *testing.T) {
	eachBackend(t, Options{}, func(t *testing.T, r *Ring) {
		p := testPool(t)
		fd, _ := openFile(t, r, 0)
		s := slab(t, p, BlockSize)
		defer s.Release()
		r.Submit(&Op{Kind: Write, FD: fd, Buf: s.Bytes(), Done: func(*Op) {}})
		for r.InFlight() > 0 {
			if _, err := r.Wait(0); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestRing_WakeBeforeWaitIsNotLost(t *testing.T) {
	eachBackend(t, Options{}, func(t *testing.T, r *Ring) {
		for range 100 {
			r.Wake()
			r.Poll() // doesn't consume it
			if n, err := r.Wait(-1); n != 0 || err != nil {
				t.Fatalf("Wait = %d, %v", n, err)
			}
		}
	})
}

func TestRing_NoWakeIsLost(t *testing.T) {
	eachBackend(t, Options{}, func(t *testing.T, r *Ring) {
		const rounds = 5_000
		turn := make(chan struct{}, 1)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for range rounds {
				<-turn
				r.Wake()
			}
		}()
		for range rounds {
			turn <- struct{}{}
			if _, err := r.Wait(-1); err != nil { // a lost wake-up hangs here
				t.Fatal(err)
			}
		}
		<-ended
	})
}

func TestRing_WakeAmidOperations(t *testing.T) {
	eachBackend(t, Options{Entries: 8}, func(t *testing.T, r *Ring) {
		p := testPool(t)
		fd, _ := openFile(t, r, 0)
		s := slab(t, p, BlockSize)
		defer s.Release()
		stop, ended := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			for {
				select {
				case <-stop:
					return
				default:
					r.Wake()
					runtime.Gosched()
				}
			}
		}()
		left := 2000
		for range 16 {
			op := &Op{Kind: Write, FD: fd, Buf: s.Bytes()}
			op.Done = func(op *Op) {
				if left--; left > 0 {
					r.Submit(op)
				}
			}
			r.Submit(op)
		}
		for r.InFlight() > 0 {
			if _, err := r.Wait(-1); err != nil {
				t.Fatal(err)
			}
		}
		close(stop)
		<-ended
		r.Wake() // harmless, also after Close
	})
}

func TestRing_CloseWaitsForOperations(t *testing.T) {
	for name, open := range testBackends {
		t.Run(name, func(t *testing.T) {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			r, err := open(Options{Entries: 8})
			if err != nil {
				t.Fatal(err)
			}
			p := testPool(t)
			fd, _ := openFile(t, r, 0)
			ended, refused := 0, 0
			late := &Op{Kind: Sync, FD: fd, Done: func(op *Op) {
				if errors.Is(op.Err, ErrClosed) {
					refused++
				}
			}}
			for i := range 100 {
				s := slab(t, p, 64<<10)
				kind := WriteSync
				if i%2 == 0 {
					kind = Read
				}
				r.Submit(&Op{Kind: kind, FD: fd, Buf: s.Bytes(), Done: func(op *Op) {
					if op.Err != nil {
						t.Error(op.Err)
					}
					if ended++; ended == 50 {
						r.Submit(late)
					}
					s.Release()
				}})
			}
			r.Submit(&Op{Kind: StatFS, Path: "/", Done: func(*Op) { ended++ }})
			if err := r.Close(); err != nil {
				t.Fatal(err)
			}
			if ended != 101 || refused != 1 || p.InUse() != 0 {
				t.Errorf("%d ended, %d refused, %d bytes still in use", ended, refused, p.InUse())
			}
			if err := r.Close(); err != nil {
				t.Errorf("second Close: %v", err)
			}
			r.Wake()
			r.Submit(late)
			if n, err := r.Wait(-1); n != 1 || !errors.Is(err, ErrClosed) || refused != 2 {
				t.Errorf("Wait after Close = %d, %v; %d refused", n, err, refused)
			}
		})
	}
}

func TestRing_MisuseOfAnOpPanics(t *testing.T) {
	eachBackend(t, Options{}, func(t *testing.T, r *Ring) {
		panics := func(what string, f func()) {
			t.Helper()
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", what)
				}
			}()
			f()
		}
		panics("no Done", func() { r.Submit(&Op{Kind: StatFS, Path: "/"}) })
		op := &Op{Kind: StatFS, Path: "/", Done: func(*Op) {}}
		r.Submit(op)
		panics("submitted twice", func() { r.Submit(op) })
	})
}

// Garbage collection at every opportunity while the kernel writes to buffers: nothing on the heap may change, and every
// read must deliver what was written.
func TestRing_ReadsSurviveGarbageCollection(t *testing.T) {
	defer setGCPercent(1)()
	eachBackend(t, Options{Entries: 16}, func(t *testing.T, r *Ring) {
		const size, depth = 16 << 10, 32
		p := testPool(t)
		fd, _ := openFile(t, r, Direct)
		want := slab(t, p, size)
		defer want.Release()
		fill(want.Bytes(), 99)
		must(t, r, &Op{Kind: WriteSync, FD: fd, Buf: want.Bytes()})

		var witnesses [][]byte
		left := 2000
		for range depth {
			s := slab(t, p, size)
			op := &Op{Kind: Read, FD: fd, Buf: s.Bytes()}
			op.Done = func(op *Op) {
				if op.Err != nil || !bytes.Equal(s.Bytes(), want.Bytes()) {
					t.Errorf("read %d bytes, error %v, other than written", op.N, op.Err)
				}
				s.Release()
				if left--; left <= 0 {
					return
				}
				witnesses = append(witnesses, make([]byte, 1+left%8192))
				if len(witnesses) > 64 {
					witnesses = witnesses[32:]
				}
				if left%64 == 0 {
					runtime.GC()
				}
				s = p.Get(size)
				op.Buf = s.Bytes()
				r.Submit(op)
			}
			r.Submit(op)
		}
		for r.InFlight() > 0 {
			if _, err := r.Wait(-1); err != nil {
				t.Fatal(err)
			}
			for _, w := range witnesses {
				if bytes.IndexFunc(w, func(c rune) bool { return c != 0 }) >= 0 {
					t.Fatal("a heap object was overwritten")
				}
			}
		}
		if p.InUse() != size {
			t.Errorf("%d bytes in use", p.InUse())
		}
	})
}
