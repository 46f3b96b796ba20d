package harness

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness/fakebroker"
)

func script(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "mortard")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestStart_ReportsExitCodeAndLogOfAProcessThatEnds(t *testing.T) {
	_, err := Start(t.Context(), Options{Binary: script(t, "echo bad luck; exit 3"), DataDir: filepath.Join(t.TempDir(), "data")})
	var start *StartError
	if !errors.As(err, &start) {
		t.Fatalf("got %v", err)
	}
	if start.ExitCode != 3 || !strings.Contains(start.Log, "bad luck") {
		t.Errorf("exit code %d, log %q", start.ExitCode, start.Log)
	}
}

func TestStart_KillsAProcessThatNeverBecomesReady(t *testing.T) {
	_, err := Start(t.Context(), Options{Binary: script(t, "exec sleep 60"), DataDir: filepath.Join(t.TempDir(), "data"), ReadyTimeout: 20 * time.Millisecond})
	var start *StartError
	if !errors.As(err, &start) || start.ExitCode != -1 || !strings.Contains(err.Error(), "not ready") {
		t.Fatalf("got %v", err)
	}
}

func TestReadUsage_OfThisProcess(t *testing.T) {
	u, err := ReadUsage(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if u.RSS <= 0 || u.PeakRSS < u.RSS {
		t.Errorf("implausible: %+v", u)
	}
}

func TestParseStat_NameMayHoldAnything(t *testing.T) {
	line := "42 (a ) b) S 1 42 42 0 -1 4194560 1 2 3 4 150 25 0 0 20 0 1 0 100 1 2"
	user, system, err := parseStat([]byte(line))
	if err != nil || user != 1500*time.Millisecond || system != 250*time.Millisecond {
		t.Errorf("got %v, %v, %v", user, system, err)
	}
	for _, bad := range []string{"", "42 (x) S 1", "42 (x) S 1 42 42 0 -1 4194560 1 2 3 4 x y 0"} {
		if _, _, err := parseStat([]byte(bad)); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

func TestConn_RequestKeepsPushesForNext(t *testing.T) {
	ours, theirs := net.Pipe()
	defer ours.Close()
	go func() {
		io.CopyN(io.Discard, theirs, protocol.HeaderSize)
		m := protocol.Msg{Sequence: 7, Value: []byte("v")}
		theirs.Write(protocol.AppendOKEmpty(m.AppendFrame(nil), protocol.OpPing))
		theirs.Close()
	}()
	c := NewConn(ours)
	if _, err := c.Request(protocol.OpPing, protocol.AppendPing(nil)); err != nil {
		t.Fatal(err)
	}
	f, err := c.Next()
	var m protocol.Msg
	if err != nil || f.Op != protocol.OpMsg || m.Decode(f.Payload) != nil || m.Sequence != 7 {
		t.Errorf("got %v %x, %v", f.Op, f.Payload, err)
	}
	if _, err := c.Next(); !errors.Is(err, io.EOF) {
		t.Errorf("at the end: %v", err)
	}
}

func TestConn_EndOfStreamInsideAFrameIsUnexpected(t *testing.T) {
	for cut := 1; cut < protocol.OKEmptyFrameLen; cut++ {
		ours, theirs := net.Pipe()
		go func() {
			theirs.Write(protocol.AppendOKEmpty(nil, protocol.OpPing)[:cut])
			theirs.Close()
		}()
		if _, err := NewConn(ours).Next(); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("cut at %d: %v", cut, err)
		}
		ours.Close()
	}
}

func TestFakeBroker_DeduplicatesAndRefusesGaps(t *testing.T) {
	b := fakebroker.New()
	addr, err := b.Start()
	if err != nil {
		t.Fatal(err)
	}
	defer b.Crash()
	c, err := Dial(addr, "")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	topic, err := c.Declare("t", 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		seq, want uint64
		dedup     bool
		code      protocol.ErrorCode
	}{
		{seq: 2, code: protocol.CodeSeqGap},
		{seq: 1, want: 1},
		{seq: 2, want: 2},
		{seq: 1, want: 1, dedup: true},
		{seq: 4, code: protocol.CodeSeqGap},
	} {
		res, err := c.Publish(&protocol.Pub{TopicID: topic.TopicID, ProducerID: 9, ProducerSeq: tt.seq, Value: []byte("v")})
		if code, _ := protocol.CodeOf(err); code != tt.code {
			t.Fatalf("producer_seq %d: %v", tt.seq, err)
		}
		if err == nil && (res.Sequence != tt.want || (res.Flags&protocol.ResultFlagDeduplicated != 0) != tt.dedup) {
			t.Errorf("producer_seq %d: %+v, want sequence %d, deduplicated %v", tt.seq, res, tt.want, tt.dedup)
		}
	}
}
