package ring

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// SetTimerSlack sets the time by which the kernel may delay timed sleeps of this process's threads, 50 us by default. Go's
// idle processors sleep that way: with a slack of a nanosecond the owner of a ring resumes about 40 us sooner after a
// completion.
//
// A thread's slack is its own and passed on to the threads it creates, so call it first in main, and again on a thread
// that matters once a goroutine is locked to it. It sets the calling thread's, then tries all other threads, which the
// kernel allows only with CAP_SYS_NICE; that error may be ignored. Nothing depends on the slack but latency.
func SetTimerSlack(slack time.Duration) error {
	ns := max(slack.Nanoseconds(), 1) // 0 would mean the default
	err := unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(ns), 0, 0, 0)
	threads, listErr := os.ReadDir("/proc/self/task")
	err = errors.Join(err, listErr)
	self := strconv.Itoa(unix.Gettid())
	for _, t := range threads {
		if t.Name() == self {
			continue
		}
		// Not below /proc/self/task: the file exists only below a thread's own entry, which /proc has but doesn't list.
		file := filepath.Join("/proc", t.Name(), "timerslack_ns")
		if writeErr := os.WriteFile(file, strconv.AppendInt(nil, ns, 10), 0); writeErr != nil && !errors.Is(writeErr, os.ErrNotExist) {
			return errors.Join(err, writeErr) // the same for all the others
		}
	}
	return err
}
