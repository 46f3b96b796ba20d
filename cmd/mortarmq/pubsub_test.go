package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/tests/harness/fakebroker"
)

func writeFile(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// startBroker starts a broker in memory with a topic called t.
func startBroker(t *testing.T, partitions uint16) *fakebroker.Broker {
	t.Helper()
	b := fakebroker.New()
	addr, err := b.Start()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Crash)
	t.Setenv(envServer, addr)
	c, err := client.Dial(t.Context(), addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Declare(t.Context(), "t", client.DeclareOptions{Partitions: partitions}); err != nil {
		t.Fatal(err)
	}
	return b
}

// hostileText has lines of every kind that are not text.
func hostileText() string {
	r := rand.New(rand.NewPCG(1, 2))
	var b bytes.Buffer
	for range 5000 {
		line := make([]byte, r.IntN(200)*r.IntN(2))
		for i := range line {
			if line[i] = byte(r.IntN(256)); line[i] == '\n' {
				line[i] = '\r'
			}
		}
		b.Write(line)
		b.WriteByte('\n')
	}
	b.WriteString(strings.Repeat("long", lineBuffer))
	b.WriteString("\n\r\n\x00\n\n")
	return b.String()
}

// pubRowOf parses the summary of pub.
func pubRowOf(t *testing.T, r result) pubRow {
	t.Helper()
	var row pubRow
	if err := json.Unmarshal([]byte(r.stdout), &row); err != nil {
		t.Fatalf("output %q: %v; errors: %s", r.stdout, err, r.stderr)
	}
	return row
}

func TestPubSub_FileComesBackByteForByte(t *testing.T) {
	text := hostileText()
	lines := uint64(strings.Count(text, "\n"))
	for _, source := range []string{"file", "stdin"} {
		t.Run(source, func(t *testing.T) {
			startBroker(t, 1)
			var r result
			if source == "file" {
				r = mortarmq(t, "", "pub", "t", "--json", "--file", writeFile(t, "lines", text))
			} else {
				r = mortarmq(t, text, "pub", "t", "--json")
			}
			row := pubRowOf(t, r)
			if r.code != exitDone || row.Acknowledged != lines || row.Bytes != uint64(len(text))-lines {
				t.Fatalf("exit code %d, %+v, want %d lines; errors: %s", r.code, row, lines, r.stderr)
			}
			r = mortarmq(t, "", "sub", "t", "--group", "g", "--count", fmt.Sprint(lines))
			if r.code != exitDone || r.stdout != text {
				t.Errorf("exit code %d, %d bytes came back, want %d; errors: %s", r.code, len(r.stdout), len(text), r.stderr)
			}
		})
	}
}

func TestPub_ArgumentsAndLastLineWithoutNewline(t *testing.T) {
	startBroker(t, 1)
	r := mortarmq(t, "ignored", "pub", "t", "a", "", "c c")
	if r.code != exitDone || !strings.HasPrefix(r.stdout, "3\t4\t") {
		t.Errorf("exit code %d, output %q, errors %s", r.code, r.stdout, r.stderr)
	}
	mortarmq(t, "d\ne", "pub", "t")
	mortarmq(t, "", "pub", "t", "--file", "-")
	mortarmq(t, "", "sub", "t", "--group", "g", "--count", "5").want(t, exitDone, "a\n\nc c\nd\ne\n")
}

func TestPub_KeysComeFromTheLineOrTheFlag(t *testing.T) {
	startBroker(t, 4)
	mortarmq(t, "k1::v1\n::v2\nk3::a::b\n", "pub", "t", "--key-separator", "::")
	mortarmq(t, "", "pub", "t", "--key", "fixed", "v4")
	r := mortarmq(t, "", "sub", "t", "--group", "g", "--count", "4", "--format", `%k=%v\n`)
	for _, want := range []string{"k1=v1\n", "=v2\n", "k3=a::b\n", "fixed=v4\n"} {
		if !strings.Contains(r.stdout, want) {
			t.Errorf("output %q lacks %q", r.stdout, want)
		}
	}
}

func TestPub_PartitionOverridesTheKey(t *testing.T) {
	startBroker(t, 4)
	mortarmq(t, "a:1\nb:2\nc:3\n4\n", "pub", "t", "--partition", "2")
	r := mortarmq(t, "", "pub", "t", "--partition", "4", "x")
	if r.want(t, exitUsage, ""); !strings.Contains(r.stderr, "0 to 3") {
		t.Errorf("the error does not tell what is possible: %s", r.stderr)
	}
	mortarmq(t, "", "sub", "t", "--group", "g", "--count", "4", "--format", `%p %s\n`).want(t, exitDone, "2 1\n2 2\n2 3\n2 4\n")
}

func TestPub_BadLineStopsAndSaysHowManyWereAcknowledged(t *testing.T) {
	startBroker(t, 1)
	for _, c := range []struct {
		name, input string
		args        []string
		about       string
	}{
		{"no separator", "k:v\nk:v\nno key\nk:v\n", []string{"--key-separator", ":"}, "line 3"},
		{"long key", strings.Repeat("k", 256) + ":v\n", []string{"--key-separator", ":"}, "line 1"},
	} {
		r := mortarmq(t, c.input, append([]string{"pub", "t", "--json"}, c.args...)...)
		row := pubRowOf(t, r)
		said := fmt.Sprintf("%d of the %d messages", row.Acknowledged, row.Acknowledged)
		if r.code != exitUsage || !strings.Contains(r.stderr, c.about) || !strings.Contains(r.stderr, said) {
			t.Errorf("%s: exit code %d, %+v, errors %s", c.name, r.code, row, r.stderr)
		}
	}
}

func TestPub_RetriesWhatTheBrokerRefusesForTheMoment(t *testing.T) {
	b := startBroker(t, 2)
	b.SetFaults(fakebroker.Faults{RefuseEvery: 40})
	r := mortarmq(t, strings.Repeat("x\n", 100), "pub", "t", "--json")
	if row := pubRowOf(t, r); r.code != exitDone || row.Acknowledged != 100 {
		t.Errorf("exit code %d, %+v, errors %s", r.code, row, r.stderr)
	}
}

// slowReader gives a line at a time and calls at before one of them.
type slowReader struct {
	n    int
	when int
	at   func()
}

func (s *slowReader) Read(p []byte) (int, error) {
	if s.n++; s.n == s.when {
		s.at()
	}
	return copy(p, "line\n"), nil
}

func TestPub_LostBrokerExitsWith3AndTheCount(t *testing.T) {
	b := startBroker(t, 1)
	var stdout, stderr lockedBuffer
	in := &slowReader{when: 100, at: b.Crash}
	code := run(t.Context(), []string{"pub", "t", "--json", "--timeout", "300ms"}, in, &stdout, &stderr)
	var row pubRow
	if err := json.Unmarshal([]byte(stdout.String()), &row); err != nil {
		t.Fatalf("output %q", stdout.String())
	}
	if _, err := b.Start(); err != nil { // the clean-up closes it
		t.Fatal(err)
	}
	if code != exitUnreachable || row.Acknowledged >= 100 || !strings.Contains(stderr.String(), fmt.Sprintf("%d of the ", row.Acknowledged)) {
		t.Errorf("exit code %d, %+v, errors %s", code, row, stderr.String())
	}
}

func TestPub_InterruptReportsWhatIsAcknowledged(t *testing.T) {
	startBroker(t, 1)
	ctx, cancel := context.WithCancel(t.Context())
	var stdout, stderr lockedBuffer
	code := run(ctx, []string{"pub", "t", "--json"}, &slowReader{when: 50, at: cancel}, &stdout, &stderr)
	var row pubRow
	if err := json.Unmarshal([]byte(stdout.String()), &row); err != nil {
		t.Fatalf("output %q", stdout.String())
	}
	if code != exitLocal || row.Acknowledged == 0 || !strings.Contains(stderr.String(), "interrupted") {
		t.Errorf("exit code %d, %+v, errors %s", code, row, stderr.String())
	}
}

func TestPacer_SpreadsMessages(t *testing.T) {
	start := time.Now()
	p := newPacer(1000, start)
	for range 51 {
		if err := p.wait(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if took := time.Since(start); took < 45*time.Millisecond { // a lower bound: no machine is too slow for it
		t.Errorf("51 messages at 1000/s took %v", took)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	p = newPacer(0.001, time.Now())
	_ = p.wait(ctx)
	if err := p.wait(ctx); err == nil {
		t.Error("an ended context does not end the wait")
	}
}

func TestSub_CountLeavesTheRestToTheGroup(t *testing.T) {
	startBroker(t, 1)
	mortarmq(t, "1\n2\n3\n4\n5\n", "pub", "t")
	mortarmq(t, "", "sub", "t", "--group", "g", "--count", "2").want(t, exitDone, "1\n2\n")
	mortarmq(t, "", "sub", "t", "--group", "g", "--count", "3").want(t, exitDone, "3\n4\n5\n")
	mortarmq(t, "", "sub", "t", "--group", "h", "--count", "1").want(t, exitDone, "1\n")
}

func TestSub_InterruptAcknowledgesWhatWasPrinted(t *testing.T) {
	startBroker(t, 1)
	mortarmq(t, "1\n2\n3\n", "pub", "t")
	ctx, cancel := context.WithCancel(t.Context())
	out := &cancelingWriter{after: "3\n", cancel: cancel}
	var stderr lockedBuffer
	if code := run(ctx, []string{"sub", "t", "--group", "g"}, nil, out, &stderr); code != exitDone {
		t.Errorf("exit code %d: %s", code, stderr.String())
	}
	if out.b.String() != "1\n2\n3\n" {
		t.Errorf("output %q", out.b.String())
	}
	mortarmq(t, "4\n", "pub", "t")
	mortarmq(t, "", "sub", "t", "--group", "g", "--count", "1").want(t, exitDone, "4\n")
}

// cancelingWriter cancels when its content ends like that.
type cancelingWriter struct {
	b      bytes.Buffer
	after  string
	cancel context.CancelFunc
}

func (w *cancelingWriter) Write(p []byte) (int, error) {
	w.b.Write(p)
	if bytes.HasSuffix(w.b.Bytes(), []byte(w.after)) {
		w.cancel()
	}
	return len(p), nil
}

func TestSub_NothingIsAcknowledgedThatWasNotWritten(t *testing.T) {
	startBroker(t, 1)
	mortarmq(t, "1\n2\n3\n", "pub", "t")
	var stderr lockedBuffer
	if code := run(t.Context(), []string{"sub", "t", "--group", "g"}, nil, failingWriter{}, &stderr); code != exitLocal {
		t.Errorf("exit code %d: %s", code, stderr.String())
	}
	mortarmq(t, "", "sub", "t", "--group", "g", "--count", "3").want(t, exitDone, "1\n2\n3\n")
}

// exitEmptyAdmin is the admin interface of a topic with these last sequences. Its ack floors are floor().
func exitEmptyAdmin(t *testing.T, last []uint64, floor func() []uint64) {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/stats" || r.FormValue("topic") != "t" {
			http.Error(w, "there is no topic of this name", http.StatusNotFound)
			return
		}
		type part map[string]uint64
		var parts, floors []part
		for i, f := range floor() {
			parts = append(parts, part{"partition": uint64(i), "last_seq": last[i]})
			floors = append(floors, part{"partition": uint64(i), "ack_floor": f})
		}
		_ = json.NewEncoder(w).Encode(map[string]any{
			"topics": []any{map[string]any{"name": "t", "partition_stats": parts}},
			"groups": []any{map[string]any{"group": "other", "topic": "t", "partitions": parts}, map[string]any{"group": "g", "topic": "t", "partitions": floors}},
		})
	}))
	t.Cleanup(s.Close)
	t.Setenv(envAdmin, s.URL)
}

func TestSub_ExitEmptyEndsWhenEverythingIsAcknowledged(t *testing.T) {
	startBroker(t, 1)
	const n = 2500 // several batches
	var want strings.Builder
	for i := range n {
		fmt.Fprintf(&want, "line %d\n", i)
	}
	mortarmq(t, want.String(), "pub", "t")
	var out lockedBuffer
	exitEmptyAdmin(t, []uint64{n}, func() []uint64 { return []uint64{uint64(strings.Count(out.String(), "\n"))} })
	var stderr lockedBuffer
	code := run(t.Context(), []string{"sub", "t", "--group", "g", "--exit-empty"}, nil, &out, &stderr)
	if code != exitDone || out.String() != want.String() {
		t.Errorf("exit code %d, %d bytes, errors %s", code, len(out.String()), stderr.String())
	}
}

func TestSub_ExitEmptyWaitsForTheSlowestPartition(t *testing.T) {
	startBroker(t, 2)
	var polls atomic.Int64
	exitEmptyAdmin(t, []uint64{3, 1}, func() []uint64 {
		if polls.Add(1) < 4 {
			return []uint64{3, 0} // somebody else has the second partition
		}
		return []uint64{3, 1}
	})
	r := mortarmq(t, "", "sub", "t", "--group", "g", "--exit-empty")
	r.want(t, exitDone, "")
	if polls.Load() < 4 {
		t.Errorf("it ended after %d polls", polls.Load())
	}
}

func TestSub_ExitEmptyOfAnUnknownTopic(t *testing.T) {
	startBroker(t, 1)
	exitEmptyAdmin(t, nil, func() []uint64 { return nil })
	r := mortarmq(t, "", "sub", "missing", "--group", "g", "--exit-empty")
	r.want(t, exitRefused, "")
	if !strings.Contains(r.stderr, "topics create missing") {
		t.Errorf("the error does not say what to do: %s", r.stderr)
	}
}

func TestRanges_AgreeWithASet(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 7))
	for range 200 {
		var got ranges
		want := map[uint64]bool{}
		for range 300 {
			seq := 1 + r.Uint64N(60)
			if got.add(seq) == want[seq] {
				t.Fatalf("add(%d) disagrees; runs %v", seq, got.runs)
			}
			want[seq] = true
			for i := 1; i < len(got.runs); i++ {
				if got.runs[i].first <= got.runs[i-1].last+1 {
					t.Fatalf("runs %v are not apart", got.runs)
				}
			}
		}
	}
}

func TestRanges_AreBounded(t *testing.T) {
	var got ranges
	for seq := uint64(0); seq < 4*maxRanges; seq += 2 {
		got.add(seq)
	}
	if len(got.runs) != maxRanges || got.add(4*maxRanges-2) {
		t.Errorf("%d runs", len(got.runs))
	}
}
