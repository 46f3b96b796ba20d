//go:build uring

package ring

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/pawelgaczynski/giouring"
	"golang.org/x/sys/unix"
)

// testBackends has an io_uring backend for every set of flags that some kernel would get.
var testBackends = map[string]func(Options) (*Ring, error){
	"pread":        newTestPread,
	"io_uring":     newTestUring(setupChoices[:]),
	"single, coop": newTestUring(setupChoices[1:2]),
	"coop":         newTestUring(setupChoices[2:3]),
	"plain":        newTestUring(setupChoices[3:]),
}

func newTestUring(choices []uint32) func(Options) (*Ring, error) {
	return func(opts Options) (*Ring, error) {
		opts.Backend = Uring
		return newRing(opts, func(entries int, r *Ring) (backend, error) { return newUringWith(entries, r, choices) })
	}
}

func TestUring_IsTakenWhereItWorks(t *testing.T) {
	withRing(t, Options{}, func(r *Ring) {
		if r.Backend() != "io_uring" || r.Reason() != "" {
			t.Errorf("backend %q, reason %q", r.Backend(), r.Reason())
		}
	})
}

func TestUring_SetupTriesTheNextFlagsWhereTheKernelRefuses(t *testing.T) {
	const unknown = 1 << 31
	ring, flags, err := setup(8, []uint32{unknown, giouring.SetupCoopTaskrun})
	if err != nil {
		t.Fatal(err)
	}
	defer ring.QueueExit()
	if flags != giouring.SetupCoopTaskrun || flagNames(flags) != "COOP_TASKRUN" {
		t.Errorf("flags %#x, %s", flags, flagNames(flags))
	}
	if _, _, err = setup(8, []uint32{unknown}); !errors.Is(err, unix.EINVAL) || !strings.Contains(err.Error(), needKernel) {
		t.Errorf("nothing but unknown flags: %v", err)
	}
}

func TestUring_NewMayRunOnAnotherThread(t *testing.T) {
	var r *Ring
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		var err error
		r, err = New(Options{Backend: Uring})
		made <- err
	}()
	if err := <-made; err != nil {
		t.Fatal(err)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := must(t, r, &Op{Kind: Sync, FD: syncable(t)}).Err; err != nil {
		t.Error(err)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

func syncable(t *testing.T) int {
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return int(f.Fd())
}

func TestUring_ADriverOnAnotherThreadIsTold(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r, err := New(Options{Backend: Uring})
	if err != nil {
		t.Fatal(err)
	}
	must(t, r, &Op{Kind: Sync, FD: syncable(t)})
	told := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		_, err := r.Wait(time.Millisecond)
		told <- err
	}()
	if err := <-told; !errors.Is(err, unix.EEXIST) || !strings.Contains(err.Error(), "locked to its thread") {
		t.Errorf("Wait from another thread: %v", err)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

func TestUring_StaleCompletionsAreDetected(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var out bytes.Buffer
	r, err := New(Options{Backend: Uring, Entries: 8, Logger: slog.New(slog.NewTextHandler(&out, nil))})
	if err != nil {
		t.Fatal(err)
	}
	b := r.b.(*uringBackend)
	ended := 0
	r.Submit(&Op{Kind: Sync, FD: syncable(t), Done: func(*Op) { ended++ }})
	used := b.free[:cap(b.free)][len(b.free)]
	gen := b.slots[used].gen
	for name, data := range map[string]uint64{
		"earlier generation":    userData(used, gen-1),
		"later generation":      userData(used, gen+1),
		"a slot not in use":     userData(b.free[0], b.slots[b.free[0]].gen),
		"a slot that is not":    userData(uint32(len(b.slots)), gen),
		"a poll that is not":    userData(wakeSlot, b.wakeGen),
		"an earlier poll":       userData(wakeSlot, b.wakeGen-1),
		"what a pointer may be": uint64(uintptr(unsafe.Pointer(b))),
	} {
		before := r.Stats().Stale
		if n := b.completed(data, 0, 0); n != 0 || r.Stats().Stale != before+1 {
			t.Errorf("%s: passed for a completion", name)
		}
	}
	if ended != 0 || !strings.Contains(out.String(), "not in flight") {
		t.Errorf("%d operations ended; log: %s", ended, out.String())
	}
	if err := r.Close(); err != nil || ended != 1 {
		t.Errorf("close: %v, %d ended", err, ended)
	}
	if n := b.completed(userData(used, gen), 0, 0); n != 0 {
		t.Error("an operation ended twice")
	}
}

// The result of an interrupted or partial transfer, as the kernel may give it, is continued.
func TestUring_PartialTransfersContinue(t *testing.T) {
	withRing(t, Options{Backend: Uring, Entries: 8}, func(r *Ring) {
		b := r.b.(*uringBackend)
		p := testPool(t)
		s := slab(t, p, 4*BlockSize)
		defer s.Release()
		fd, _ := openFile(t, r, 0)
		op := &Op{Kind: WriteSync, FD: fd, Buf: s.Bytes(), Done: func(*Op) {}}
		r.Submit(op)
		index := b.free[:cap(b.free)][len(b.free)]
		for _, res := range []int32{-int32(unix.EINTR), BlockSize, -int32(unix.EAGAIN), 100} {
			if n := b.completed(userData(index, b.slots[index].gen), res, 0); n != 0 {
				t.Fatalf("result %d ended the operation: %v", res, op.Err)
			}
		}
		if start, length := op.part(); start != BlockSize+100 || start+length != len(op.Buf) {
			t.Errorf("continues at %d with %d bytes", start, length)
		}
		// The entries made on the way carry generations that are stale now; let the kernel's answers come and go.
		for r.InFlight() > 0 {
			if _, err := r.Wait(-1); err != nil {
				t.Fatal(err)
			}
		}
		if op.Err != nil || op.N != len(op.Buf) {
			t.Errorf("%d bytes, %v", op.N, op.Err)
		}
		r.stats.stale.Store(0)
	})
}

func TestUring_RoundTripDoesNotAllocate(t *testing.T) {
	for name, timeout := range map[string]time.Duration{"no limit": -1, "limit": time.Hour} {
		t.Run(name, func(t *testing.T) {
			withRing(t, Options{Backend: Uring}, func(r *Ring) {
				p := testPool(t)
				s := slab(t, p, BlockSize)
				defer s.Release()
				fd, _ := openFile(t, r, Direct)
				op := &Op{Kind: WriteSync, FD: fd, Buf: s.Bytes(), Done: func(*Op) {}}
				n := testing.AllocsPerRun(200, func() {
					r.Submit(op)
					for r.InFlight() > 0 {
						if _, err := r.Wait(timeout); err != nil {
							t.Fatal(err)
						}
					}
				})
				if n != 0 || op.Err != nil {
					t.Errorf("%v allocations per round trip, error %v", n, op.Err)
				}
			})
		})
	}
}

func TestUring_OneSystemCallPerRound(t *testing.T) {
	withRing(t, Options{Backend: Uring}, func(r *Ring) {
		p := testPool(t)
		fd, _ := openFile(t, r, Direct)
		s := slab(t, p, BlockSize)
		defer s.Release()
		op := must(t, r, &Op{Kind: WriteSync, FD: fd, Buf: s.Bytes()})
		const rounds = 100
		before := r.Stats()
		for range rounds {
			must(t, r, op)
		}
		after := r.Stats()
		// An interruption of io_uring_enter by a signal costs another call.
		if calls := after.Syscalls - before.Syscalls; calls > rounds*11/10 {
			t.Errorf("%d system calls for %d rounds", calls, rounds)
		}
		if sqes := after.SQEs - before.SQEs; sqes != rounds {
			t.Errorf("%d entries for %d rounds", sqes, rounds)
		}
	})
}

func TestExplain_NamesWhatToChange(t *testing.T) {
	for _, c := range []struct {
		err  error
		env  environment
		want string
	}{
		{unix.ENOSYS, environment{kernel: "4.19"}, "kernel 4.19 has no io_uring"},
		{unix.ENOSYS, environment{seccomp: true}, "seccomp"},
		{unix.EPERM, environment{disabled: "2"}, "kernel.io_uring_disabled is 2"},
		{unix.EPERM, environment{disabled: "1", seccomp: true}, "kernel.io_uring_group"},
		{unix.EPERM, environment{disabled: "0", seccomp: true}, "seccomp"},
		{unix.EACCES, environment{}, "SELinux"},
		{unix.ENOMEM, environment{memlock: 8 << 20}, "RLIMIT_MEMLOCK is 8192 KiB"},
		{unix.ENOMEM, environment{memlock: unix.RLIM_INFINITY}, "unlimited"},
		{unix.EMFILE, environment{}, "RLIMIT_NOFILE"},
		{unix.EINVAL, environment{kernel: "5.4"}, "5.13 or newer"},
		{unix.EFAULT, environment{}, "io_uring_setup"},
	} {
		if err := explain(c.err, c.env); !errors.Is(err, c.err) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v in %+v: %v", c.err, c.env, err)
		}
	}
}

func TestReadEnvironment_KnowsThisProcess(t *testing.T) {
	env := readEnvironment()
	if env.kernel == "" || env.kernel == "unknown" || env.memlock == 0 {
		t.Errorf("%+v", env)
	}
}

const forbidden = "RING_TEST_FORBID_IO_URING"

// A seccomp filter can't be taken off again, so a process of its own gets it.
func TestNew_FallsBackUnderSeccomp(t *testing.T) {
	if os.Getenv(forbidden) != "" {
		reportUnderSeccomp(t)
		return
	}
	for errno, want := range map[string]string{"EPERM": "seccomp filter forbids", "ENOSYS": "seccomp filter hides", "ENOMEM": "RLIMIT_MEMLOCK"} {
		cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
		cmd.Env = append(os.Environ(), forbidden+"="+errno)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v\n%s", errno, err, out)
		}
		for _, part := range []string{"auto: pread: ", "forced: ring: io_uring can't be used: ", want, "works: true"} {
			if !bytes.Contains(out, []byte(part)) {
				t.Errorf("%s: %q is missing in\n%s", errno, part, out)
			}
		}
	}
}

func reportUnderSeccomp(t *testing.T) {
	errno := map[string]unix.Errno{"EPERM": unix.EPERM, "ENOSYS": unix.ENOSYS, "ENOMEM": unix.ENOMEM}[os.Getenv(forbidden)]
	forbidSyscall(t, unix.SYS_IO_URING_SETUP, errno)
	_, err := New(Options{Backend: Uring})
	t.Logf("forced: %v", err)
	withRing(t, Options{}, func(r *Ring) {
		t.Logf("auto: %s: %s", r.Backend(), r.Reason())
		op := must(t, r, &Op{Kind: StatFS, Path: "/"})
		t.Logf("works: %v", op.Size > 0)
	})
}

// forbidSyscall lets a system call fail with errno in the whole process from now on.
func forbidSyscall(t *testing.T, nr uint32, errno unix.Errno) {
	t.Helper()
	program := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}, // the number is the first field of struct seccomp_data
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: nr, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(errno)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	filter := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	_, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&filter)))
	if e != 0 {
		t.Fatal(e)
	}
}
