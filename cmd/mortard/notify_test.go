package main

import (
	"net"
	"path/filepath"
	"testing"
	"time"
)

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
