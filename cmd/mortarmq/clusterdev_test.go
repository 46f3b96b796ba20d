package main

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// program writes a script that takes mortard's place.
func program(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "mortard")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestClusterDev_ANodeThatDoesNotStartEndsItWithItsLog(t *testing.T) {
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	r := mortarmq(t, "", "cluster", "dev", "--port", "0", "--mortard", program(t, "echo bad luck >&2; exit 3"))
	if r.code != exitLocal || !strings.Contains(r.stderr, "did not start: exit status 3") || !strings.Contains(r.stderr, "bad luck") {
		t.Errorf("exit code %d, %s", r.code, r.stderr)
	}
	if left, err := os.ReadDir(temp); err != nil || len(left) > 0 {
		t.Errorf("%v is left, %v", left, err)
	}
}

func TestClusterDev_NamesWhatIsInTheWay(t *testing.T) {
	sleeping := program(t, "exec sleep 60")
	r := mortarmq(t, "", "cluster", "dev", "--port", "65520", "--mortard", sleeping)
	if r.code != exitUsage || !strings.Contains(r.stderr, "--port") {
		t.Errorf("a port that is too high: exit code %d, %s", r.code, r.stderr)
	}
	r = mortarmq(t, "", "cluster", "dev", "--port", "0", "--mortard", filepath.Join(t.TempDir(), "mortard"))
	if r.code != exitUsage || !strings.Contains(r.stderr, "--mortard") {
		t.Errorf("no such program: exit code %d, %s", r.code, r.stderr)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	r = mortarmq(t, "", "cluster", "dev", "--port", port, "--mortard", sleeping)
	if want := map[bool]int{true: exitUsage, false: exitLocal}[len(port) == 5 && port > "65513"]; r.code != want || !strings.Contains(r.stderr, "--port") {
		t.Errorf("a port that is taken: exit code %d, %s", r.code, r.stderr)
	}
}

func TestClusterDev_TableLinesUp(t *testing.T) {
	got := string(devTable([]devRow{
		{0, 17, "127.0.0.1:7188", "127.0.0.1:7190", "leader of epoch 2, quorum healthy, serving"},
		{1, 0, "127.0.0.1:17198", "127.0.0.1:17200", "ended: signal: killed"},
	}))
	want := "NODE  PID  CLIENT           ADMIN            STATE\x1b[K\n" +
		"0     17   127.0.0.1:7188   127.0.0.1:7190   leader of epoch 2, quorum healthy, serving\x1b[K\n" +
		"1     0    127.0.0.1:17198  127.0.0.1:17200  ended: signal: killed\x1b[K\n"
	if got != want {
		t.Errorf("got\n%q\nwant\n%q", got, want)
	}
}
