package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// result is what a command line did.
type result struct {
	code           int
	stdout, stderr string
}

// mortarmq runs a command line.
func mortarmq(t *testing.T, stdin string, args ...string) result {
	t.Helper()
	var stdout, stderr lockedBuffer
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	code := run(ctx, args, strings.NewReader(stdin), &stdout, &stderr)
	return result{code, stdout.String(), stderr.String()}
}

// want checks the exit code and standard output.
func (r result) want(t *testing.T, code int, stdout string) {
	t.Helper()
	if r.code != code || r.stdout != stdout {
		t.Errorf("exit code %d, want %d; output %q, want %q; errors:\n%s", r.code, code, r.stdout, stdout, r.stderr)
	}
}

// lockedBuffer may be read while it is written to.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func TestRun_BadArgumentsExitWith2(t *testing.T) {
	t.Setenv(envServer, closedPort(t)) // whatever gets as far as connecting exits with 3
	t.Setenv(envAdmin, closedPort(t))
	for _, c := range []struct {
		args  string
		about string // what standard error must name
	}{
		{"", "topics"},
		{"topcs", "did you mean topics?"},
		{"topics creat x", "did you mean create?"},
		{"topics create x --server http://localhost", "without a scheme"},
		{"topics create x --server localhost:port", "--server"},
		{"topics", "create, delete, describe, list"},
		{"topics bogus", "bogus"},
		{"topics create", "arg"},
		{"topics create a b", "arg"},
		{"topics create a --partitions -1", "partitions"},
		{"topics create a --partitions 70000", "partitions"},
		{"topics create a --durability sometimes", "memory, local or quorum"},
		{"topics list x", "x"},
		{"topics list --bogus", "--bogus"},
		{"groups describe", "arg"},
		{"leader", "get"},
		{"broker", "status"},
		{"pub", "arg"},
		{"pub t v --file x", "--file"},
		{"pub t --file /does/not/exist", "/does/not/exist"},
		{"pub t v --key k --key-separator :", "--key-separator"},
		{"pub t v --durability x", "--durability"},
		{"pub t v --rate -1", "--rate"},
		{"pub t v --partition 65535", "--partition"},
		{"pub t v --partition -2", "--partition"},
		{"pub t v --key " + strings.Repeat("k", 256), "--key"},
		{"pub t v --timeout 0s", "--timeout"},
		{"pub t v --token a --token-file b", "--token-file"},
		{"pub t v --token-file /does/not/exist", "/does/not/exist"},
		{"sub t", "--group"},
		{"sub t --group a..b", "--group"},
		{"sub t --group g --from never", "--from"},
		{"sub t --group g --format values", "--format"},
		{"sub t --group g --format %x", "%x"},
		{"sub t --group g --format v%", "%"},
		{`sub t --group g --format %v\x`, `\x`},
		{"sub t --group g --count -1", "count"},
		{"bench --messages 0", "--messages"},
		{"dump", "arg"},
		{"dump /does/not/exist", "/does/not/exist"},
		{"hash-token a b", "arg"},
		{"hash-token", "empty"},
		{"topics list --admin http:://", "--admin"},
		{"topics list --admin localhost:port", "--admin"},
		{"topics list --admin ,", "--admin"},
	} {
		t.Run(c.args, func(t *testing.T) {
			r := mortarmq(t, "", strings.Fields(c.args)...)
			r.want(t, exitUsage, "")
			if !strings.Contains(r.stderr, c.about) {
				t.Errorf("the error does not name %q: %s", c.about, r.stderr)
			}
		})
	}
}

// closedPort returns an address that nobody listens on.
func closedPort(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

func TestRun_UnreachableBrokerExitsWith3(t *testing.T) {
	addr := closedPort(t)
	for _, args := range []string{
		"topics create t", "topics delete t", "topics list", "groups list", "groups describe g", "leader get", "broker status",
		"pub t v", "sub t --group g", "sub t --group g --exit-empty", "bench",
	} {
		t.Run(args, func(t *testing.T) {
			r := mortarmq(t, "", append(strings.Fields(args), "--server", addr, "--admin", addr)...)
			r.want(t, exitUnreachable, "")
			if !strings.Contains(r.stderr, addr) {
				t.Errorf("the error does not name %s: %s", addr, r.stderr)
			}
		})
	}
}

func TestRun_SilentBrokerExitsWith3(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	r := mortarmq(t, "", "topics", "create", "t", "--server", ln.Addr().String(), "--timeout", "50ms")
	r.want(t, exitUnreachable, "")
	if !strings.Contains(r.stderr, "--timeout") {
		t.Errorf("the error does not say what to do: %s", r.stderr)
	}
}

func TestRun_HelpAndCompletion(t *testing.T) {
	for _, args := range []string{"--help", "pub --help", "help sub", "completion bash"} {
		if r := mortarmq(t, "", strings.Fields(args)...); r.code != exitDone || r.stdout == "" {
			t.Errorf("%s: exit code %d, output %q", args, r.code, r.stdout)
		}
	}
}

func TestHashToken_ArgumentAndInputAgree(t *testing.T) {
	const digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" // FIPS 180-2, appendix B.1
	mortarmq(t, "", "hash-token", "abc").want(t, exitDone, digest+"\n")
	mortarmq(t, "abc\n", "hash-token").want(t, exitDone, digest+"\n")
	mortarmq(t, "abc", "hash-token", "--json").want(t, exitDone, `{"sha256":"`+digest+"\"}\n")
}

func TestVersion_PrintsThreeColumns(t *testing.T) {
	r := mortarmq(t, "", "version")
	if r.code != exitDone || strings.Count(r.stdout, "\t") != 2 {
		t.Errorf("exit code %d, output %q", r.code, r.stdout)
	}
	var v map[string]string
	if r := mortarmq(t, "", "version", "--json"); json.Unmarshal([]byte(r.stdout), &v) != nil || v["version"] == "" {
		t.Errorf("JSON output %q", r.stdout)
	}
}

func TestVersion_FlagSaysTheSame(t *testing.T) {
	r := mortarmq(t, "", "--version")
	for _, part := range []string{"mortarmq ", "commit: ", "go1."} {
		if r.code != exitDone || !strings.Contains(r.stdout, part) {
			t.Errorf("exit code %d, no %q in %q", r.code, part, r.stdout)
		}
	}
}

// failingWriter refuses everything, like a full disk.
type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, io.ErrShortWrite }

func TestRun_OutputThatCannotBeWrittenExitsWith1(t *testing.T) {
	var stderr bytes.Buffer
	if code := run(t.Context(), []string{"version"}, nil, failingWriter{}, &stderr); code != exitLocal {
		t.Errorf("exit code %d: %s", code, &stderr)
	}
}
