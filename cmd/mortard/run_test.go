package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

const patience = 60 * time.Second

// syncBuffer collects what several goroutines write.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// daemon is run on a goroutine.
type daemon struct {
	ready  ready
	stop   context.CancelFunc
	done   chan error
	stdout syncBuffer
	stderr syncBuffer
}

func startDaemon(t *testing.T, dir string, args ...string) *daemon {
	t.Helper()
	d := &daemon{done: make(chan error, 1)}
	file := filepath.Join(t.TempDir(), "ready")
	ctx, stop := context.WithCancel(context.Background())
	d.stop = stop
	args = append([]string{"--data-dir", dir, "--listen-client", "127.0.0.1:0", "--listen-admin", "127.0.0.1:0",
		"--journal-file-bytes", "4194304", "--ready-file", file}, args...)
	go func() { d.done <- run(ctx, args, &d.stdout, &d.stderr) }()
	for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		if text, err := os.ReadFile(file); err == nil {
			if err := json.Unmarshal(text, &d.ready); err != nil {
				t.Fatal(err)
			}
			return d
		}
		select {
		case err := <-d.done:
			t.Fatalf("run ended: %v\n%s", err, d.stderr.String())
		default:
		}
		if time.Now().After(end) {
			t.Fatalf("not ready:\n%s", d.stderr.String())
		}
	}
}

func (d *daemon) end(t *testing.T) {
	t.Helper()
	d.stop()
	select {
	case err := <-d.done:
		if err != nil {
			t.Errorf("run: %v\n%s", err, d.stderr.String())
		}
	case <-time.After(patience):
		t.Fatalf("run does not end:\n%s", d.stderr.String())
	}
}

func exchange(t *testing.T, conn net.Conn, request []byte, answerLen int) []byte {
	t.Helper()
	_ = conn.SetDeadline(time.Now().Add(patience))
	if _, err := conn.Write(request); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, answerLen)
	if _, err := io.ReadFull(conn, answer); err != nil {
		t.Fatal(err)
	}
	return answer
}

func TestRun_ServesUntilItIsTold(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	for round := range 2 { // the second finds the data of the first
		d := startDaemon(t, dir)
		if line := d.stdout.String(); line != "mortard ready: client="+d.ready.Client+" admin="+d.ready.Admin+"\n" {
			t.Errorf("standard output is %q", line)
		}
		if d.ready.PID != os.Getpid() {
			t.Errorf("ready file: %+v", d.ready)
		}
		conn, err := net.Dial("tcp", d.ready.Client)
		if err != nil {
			t.Fatal(err)
		}
		hello := protocol.Connect{Version: protocol.WireVersion, Token: []byte("any")}
		declare := protocol.Declare{Topic: []byte("orders"), Partitions: 2}
		exchange(t, conn, hello.AppendFrame(nil), protocol.OKEmptyFrameLen)
		answer := exchange(t, conn, declare.AppendFrame(nil), protocol.DeclareResultFrameLen)
		var result protocol.DeclareResult
		if err := result.Decode(answer[protocol.OKEmptyFrameLen:]); err != nil {
			t.Fatalf("% x: %v", answer, err)
		}
		if result.Existed != (round == 1) {
			t.Errorf("round %d: %+v", round, result)
		}
		pub := protocol.Pub{TopicID: result.TopicID, Partition: 1, Value: []byte("hello")}
		exchange(t, conn, pub.AppendFrame(nil), protocol.PubResultFrameLen)
		for path, part := range map[string]string{
			"/healthz": `"healthy": true`, "/topics": `"orders"`, "/broker": `"connections": 1`, "/leader": `"healthy"`,
			"/stats?topic=orders": `"last_seq": ` + strconv.Itoa(round+1), "/metrics": "mortarmq_shard_rounds_total",
		} {
			if body := fetch(t, d, path); !strings.Contains(body, part) {
				t.Errorf("%s lacks %s:\n%s", path, part, body)
			}
		}
		_, err = lockDir(dir)
		if err == nil || !strings.Contains(err.Error(), "in use by process") {
			t.Errorf("the data directory is not locked: %v", err)
		}
		d.end(t)
		if _, err := conn.Read(make([]byte, 1)); err == nil {
			t.Error("the connection is still open")
		}
		_ = conn.Close()
	}
}

func fetch(t *testing.T, d *daemon, path string) string {
	t.Helper()
	resp, err := http.Get("http://" + d.ready.Admin + path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

func TestRun_AdminPortCanBeOff(t *testing.T) {
	d := startDaemon(t, t.TempDir(), "--listen-admin", "off")
	if d.ready.Admin != "off" {
		t.Errorf("%+v", d.ready)
	}
	d.end(t)
}

func TestRun_TokensAreChecked(t *testing.T) {
	d := startDaemon(t, t.TempDir(), "--auth-token-digests", digest) // of "test"
	defer d.end(t)
	for token, op := range map[string]protocol.Op{"test": protocol.OpOK, "toast": protocol.OpErr} {
		conn, err := net.Dial("tcp", d.ready.Client)
		if err != nil {
			t.Fatal(err)
		}
		hello := protocol.Connect{Version: protocol.WireVersion, Token: []byte(token)}
		answer := exchange(t, conn, hello.AppendFrame(nil), protocol.HeaderSize)
		if got := protocol.Op(answer[protocol.LengthSize]); got != op {
			t.Errorf("token %q: %v", token, got)
		}
		_ = conn.Close()
	}
}

func TestRun_CheckConfigStartsNothing(t *testing.T) {
	var out, errs bytes.Buffer
	dir := filepath.Join(t.TempDir(), "data")
	path := configFile(t, `{"listen_client": "127.0.0.1:7188", "data_dir": "`+dir+`"}`)
	if err := run(context.Background(), []string{"--config", path, "--check-config"}, &out, &errs); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "valid") || !strings.Contains(out.String(), dir) {
		t.Errorf("output %q", out.String())
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the data directory was created: %v", err)
	}
}

func TestRun_VersionNamesTheBackend(t *testing.T) {
	var out bytes.Buffer
	if err := run(context.Background(), []string{"--version"}, &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"mortard ", "commit: ", "io backend: ", "go1."} {
		if !strings.Contains(out.String(), part) {
			t.Errorf("%q is missing in %q", part, out.String())
		}
	}
}

func TestRun_FailedStartLeavesNothingOpen(t *testing.T) {
	dir := t.TempDir()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	for _, flag := range []string{"--listen-client", "--listen-admin"} {
		args := []string{"--data-dir", dir, "--listen-client", "127.0.0.1:0", "--listen-admin", "127.0.0.1:0",
			"--journal-file-bytes", "4194304", flag, taken.Addr().String()}
		err := run(context.Background(), args, io.Discard, io.Discard)
		if err == nil || !strings.Contains(err.Error(), "address already in use") {
			t.Errorf("%s: %v", flag, err)
		}
	}
	lock, err := lockDir(dir)
	if err != nil {
		t.Fatalf("the lock was kept: %v", err)
	}
	_ = lock.unlock()
}
