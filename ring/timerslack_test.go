package ring

import (
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestSetTimerSlack_SetsTheCallingThreadAndOthersWhereAllowed(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer func() { _ = SetTimerSlack(50 * time.Microsecond) }()

	// A thread of its own that is there before the call and only sleeps.
	other, end := make(chan int), make(chan struct{})
	defer close(end)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		other <- unix.Gettid()
		<-end
	}()
	tid := <-other

	err := SetTimerSlack(time.Nanosecond)
	if got, prctlErr := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0); prctlErr != nil || got != 1 {
		t.Errorf("this thread's slack is %d ns, %v", got, prctlErr)
	}
	if err != nil {
		t.Logf("other threads: %v", err) // no CAP_SYS_NICE
		return
	}
	b, err := os.ReadFile("/proc/" + strconv.Itoa(tid) + "/timerslack_ns")
	if err != nil || strings.TrimSpace(string(b)) != "1" {
		t.Errorf("another thread's slack is %q, %v", b, err)
	}
}
