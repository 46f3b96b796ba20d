//go:build uring

package ring

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"github.com/pawelgaczynski/giouring"
	"golang.org/x/sys/unix"
)

const (
	// needFeatures came with Linux 5.5, 5.11 and 5.13. The last stands for multishot polls, which have no flag of their
	// own and appeared in the same release.
	needFeatures = giouring.FeatNoDrop | giouring.FeatExtArg | giouring.FeatRcrcTags

	// needKernel is the release that has all of them.
	needKernel = "5.13"
)

// setupParams is the kernel's struct io_uring_params. giouring's own has no exported field, but must have the same
// layout since it hands it to the kernel.
type setupParams struct {
	sqEntries, cqEntries, flags, sqThreadCPU, sqThreadIdle, features, wqFD uint32

	reserved [3]uint32
	offsets  [2][10]uint32
}

var _ [unsafe.Sizeof(setupParams{})]byte = [unsafe.Sizeof(giouring.Params{})]byte{}

// setupChoices are the set-up flags worth trying, best first. The first makes the kernel finish completions on the owner's
// thread when it enters the kernel anyway, instead of interrupting it.
var setupChoices = [...]uint32{
	giouring.SetupSingleIssuer | giouring.SetupDeferTaskrun, // 6.1
	giouring.SetupSingleIssuer | giouring.SetupCoopTaskrun,  // 6.0
	giouring.SetupCoopTaskrun,                               // 5.19
	0,
}

// setup makes a ring that is still disabled: the thread that enables it becomes its only issuer, so that New may run on
// another. The error tells a person what to change.
func setup(entries int, choices []uint32) (*giouring.Ring, uint32, error) {
	const always = giouring.SetupCQSize | giouring.SetupRDisabled
	var err error
	for _, choice := range choices {
		params := setupParams{flags: choice | always, cqEntries: uint32(entries) * cqFactor}
		ring := giouring.NewRing()
		err = ring.QueueInitParams(uint32(entries), (*giouring.Params)(unsafe.Pointer(&params)))
		if errors.Is(err, unix.EINVAL) {
			continue // flags that this kernel doesn't know
		}
		if err != nil {
			break
		}
		if err = check(ring, &params); err != nil {
			ring.QueueExit()
			return nil, 0, err
		}
		return ring, choice, nil
	}
	return nil, 0, explain(err, readEnvironment())
}

// check refuses a kernel that lacks what the backend relies on.
func check(ring *giouring.Ring, params *setupParams) error {
	if missing := needFeatures &^ params.features; missing != 0 {
		return fmt.Errorf("kernel %s is too old for it (features %#x are missing): Linux %s or newer is needed",
			kernelRelease(), missing, needKernel)
	}
	probe, err := ring.GetProbeRing()
	if err != nil {
		return fmt.Errorf("io_uring_register, asking for the supported operations: %w", err)
	}
	for _, op := range [...]uint8{giouring.OpRead, giouring.OpWrite, giouring.OpFsync, giouring.OpPollAdd} {
		if !probe.IsSupported(op) {
			return fmt.Errorf("kernel %s doesn't support io_uring operation %d", kernelRelease(), op)
		}
	}
	return nil
}

// environment is what decides whether a process may use io_uring.
type environment struct {
	kernel string
	// disabled is /proc/sys/kernel/io_uring_disabled, empty where there is none (before 6.6).
	disabled string
	// seccomp tells whether a filter is installed.
	seccomp bool
	// memlock is RLIMIT_MEMLOCK in bytes.
	memlock uint64
}

func readEnvironment() environment {
	env := environment{kernel: kernelRelease()}
	if b, err := os.ReadFile("/proc/sys/kernel/io_uring_disabled"); err == nil {
		env.disabled = strings.TrimSpace(string(b))
	}
	if b, err := os.ReadFile("/proc/self/status"); err == nil {
		for line := range strings.Lines(string(b)) {
			if value, ok := strings.CutPrefix(line, "Seccomp:"); ok {
				env.seccomp = strings.TrimSpace(value) != "0"
			}
		}
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit); err == nil {
		env.memlock = limit.Cur
	}
	return env
}

// explain says why io_uring_setup failed and what to change. The result wraps err.
func explain(err error, env environment) error {
	const call = "io_uring_setup"
	var what string
	switch {
	case errors.Is(err, unix.ENOSYS) && env.seccomp:
		what = "a seccomp filter hides io_uring from this process, or kernel " + env.kernel +
			" was built without it: run with a seccomp profile that allows io_uring_setup, io_uring_enter and io_uring_register"
	case errors.Is(err, unix.ENOSYS):
		what = "kernel " + env.kernel + " has no io_uring (it needs " + needKernel + " or newer, built with CONFIG_IO_URING)"
	case errors.Is(err, unix.EPERM) && env.disabled == "2":
		what = "io_uring is switched off on this machine: sysctl kernel.io_uring_disabled is 2, set it to 0"
	case errors.Is(err, unix.EPERM) && env.disabled == "1":
		what = "io_uring is reserved to privileged processes: sysctl kernel.io_uring_disabled is 1, set it to 0 or add this " +
			"user's group to kernel.io_uring_group"
	case (errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES)) && env.seccomp:
		what = "a seccomp filter forbids io_uring to this process (container runtimes install one): run with a profile that " +
			"allows io_uring_setup, io_uring_enter and io_uring_register"
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		what = "a security policy of this machine forbids io_uring to this process (SELinux, AppArmor or the like)"
	case errors.Is(err, unix.ENOMEM):
		what = "no memory for the rings: RLIMIT_MEMLOCK is " + memlockText(env.memlock) +
			" (ulimit -l); raise it, lower the number of rings or their entries, or add memory"
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		what = "too many open files: raise RLIMIT_NOFILE (ulimit -n)"
	case errors.Is(err, unix.EINVAL):
		what = "kernel " + env.kernel + " refuses even the plainest set-up flags: Linux " + needKernel + " or newer is needed"
	default:
		return fmt.Errorf("%s: %w", call, err)
	}
	return fmt.Errorf("%s (%s: %w)", what, call, err)
}

func memlockText(limit uint64) string {
	if limit == unix.RLIM_INFINITY {
		return "unlimited"
	}
	return strconv.FormatUint(limit>>10, 10) + " KiB"
}

func kernelRelease() string {
	var name syscall.Utsname
	if err := syscall.Uname(&name); err != nil {
		return "unknown"
	}
	var release []byte
	for _, c := range name.Release {
		if c == 0 {
			break
		}
		release = append(release, byte(c))
	}
	return string(release)
}

// flagNames renders the set-up flags that were chosen.
func flagNames(flags uint32) string {
	var names []string
	for _, f := range []struct {
		flag uint32
		name string
	}{
		{giouring.SetupSingleIssuer, "SINGLE_ISSUER"},
		{giouring.SetupDeferTaskrun, "DEFER_TASKRUN"},
		{giouring.SetupCoopTaskrun, "COOP_TASKRUN"},
	} {
		if flags&f.flag != 0 {
			names = append(names, f.name)
		}
	}
	return strings.Join(names, "|")
}
