package main

import (
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// The unit file belongs to what the broker does.
func TestUnit_FitsTheBroker(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "deploy", "systemd", "mortarmq.service"))
	if err != nil {
		t.Fatal(err)
	}
	unit := string(text)
	for _, line := range []string{"Type=notify", "KillSignal=SIGTERM", "RestartPreventExitStatus=" + strconv.Itoa(exitUsage)} {
		if !strings.Contains(unit, "\n"+line+"\n") {
			t.Errorf("the unit lacks %s", line)
		}
	}
	stop := regexp.MustCompile(`(?m)^TimeoutStopSec=(\d+)$`).FindStringSubmatch(unit)
	if stop == nil {
		t.Fatal("the unit has no TimeoutStopSec")
	}
	seconds, err := strconv.Atoi(stop[1])
	if least := drainTimeout + closeTimeout + adminTimeout; err != nil || time.Duration(seconds)*time.Second <= least {
		t.Errorf("TimeoutStopSec is %s, an orderly end may take %v", stop[1], least)
	}
}

func TestRun_TellsTheServiceManager(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "notify")
	manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram", Name: socket})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = manager.Close() }()
	t.Setenv(notifySocket, socket)
	receive := func(want string) {
		t.Helper()
		_ = manager.SetReadDeadline(time.Now().Add(patience))
		buf := make([]byte, 100)
		if n, err := manager.Read(buf); err != nil || string(buf[:n]) != want {
			t.Errorf("the service manager got %q, %v, want %q", buf[:n], err, want)
		}
	}
	d := startDaemon(t, t.TempDir())
	receive(stateReady)
	d.end(t)
	receive(stateStopping)
}

func TestRun_AServiceManagerThatIsGoneDoesNotMatter(t *testing.T) {
	t.Setenv(notifySocket, filepath.Join(t.TempDir(), "nobody"))
	startDaemon(t, t.TempDir()).end(t)
}
