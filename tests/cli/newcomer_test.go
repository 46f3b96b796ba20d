package cli

import (
	"bufio"
	"errors"
	"io"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/tests/harness"
)

// What is wrong is said, and what to do about it.
func TestCLI_MistakesAreExplained(t *testing.T) {
	t.Parallel()
	d := start(t, t.TempDir())
	run(t, d, 0, "", "topics", "create", "orders", "--partitions", "2")
	run(t, d, 0, "", "groups", "create", "billing", "--topic", "orders")
	wantError(t, d, 4, "topics create", "pub", "missing", "v")
	wantError(t, d, 4, "topics list", "topics", "describe", "missing")
	wantError(t, d, 4, "groups list", "groups", "describe", "missing")
	for _, command := range []string{"list", "export", "redrive"} {
		wantError(t, d, 4, "groups list", "dlq", command, "missing")
	}
	if out := run(t, d, 0, "", "dlq", "list", "billing"); out != "" {
		t.Errorf("a group without dead letters has %q", out)
	}
	stdout, stderr := runBoth(t, d, 4, "", "groups", "create", "billing", "--topic", "orders", "--ordered")
	if stdout != "mismatch\n" || !strings.Contains(stderr, "groups set billing --topic orders") {
		t.Errorf("a mismatch prints %q and says %s", stdout, stderr)
	}
}

// The two ports are easily mistaken for one another.
func TestCLI_TheWrongPortIsNamed(t *testing.T) {
	t.Parallel()
	d := start(t, t.TempDir())
	swapped := &harness.Daemon{ClientAddr: d.AdminAddr, AdminAddr: d.ClientAddr}
	wantError(t, swapped, 4, "admin port", "topics", "create", "t")
	wantError(t, swapped, 3, "client port", "topics", "list")
}

func TestCLI_TopicsDescribe(t *testing.T) {
	t.Parallel()
	d := start(t, t.TempDir())
	run(t, d, 0, "", "topics", "create", "orders", "--partitions", "2", "--durability", "local")
	run(t, d, 0, "", "pub", "orders", "a", "b", "c", "--partition", "1")
	run(t, d, 0, "", "groups", "create", "billing", "--topic", "orders")
	want := "name\torders\nid\t1\nstate\tactive\npartitions\t2\ndurability\tlocal\ncreated_epoch\t1\n" +
		"partition\t0\t0\t0\t0\npartition\t1\t1\t3\t3\ngroup\tbilling\tempty\t3\t0\n"
	wantOutput(t, run(t, d, 0, "", "topics", "describe", "orders"), want)
	if out := run(t, d, 0, "", "sub", "orders", "--group", "billing", "--count", "1", "--json"); !strings.HasPrefix(out, `{"topic":"orders","partition":1,"sequence":1,`) {
		t.Errorf("sub --json prints %s", out)
	}
}

func TestCLI_GroupsWithMembersAreDeletedByForceOnly(t *testing.T) {
	t.Parallel()
	d := start(t, t.TempDir())
	run(t, d, 0, "", "topics", "create", "orders", "--partitions", "1")
	k := consume(t, d, "orders", "billing")
	wantError(t, d, 4, "--force", "groups", "delete", "billing", "--topic", "orders")
	_, stderr := runBoth(t, d, 0, "", "groups", "describe", "billing")
	for _, part := range []string{"1 connected member,", "strategy sticky", "max_attempts 5", "lease_ms 30000"} {
		if !strings.Contains(stderr, part) {
			t.Errorf("describe does not tell %q: %s", part, stderr)
		}
	}
	if out := run(t, d, 0, "", "groups", "describe", "billing", "--settings"); !strings.Contains(out, "lease_ms\t30000\n") {
		t.Errorf("the settings are %s", out)
	}
	wantOutput(t, run(t, d, 0, "", "groups", "delete", "billing", "--topic", "orders", "--force"), "deleted\n")
	for range k.Messages() { // the consumer ends with its group
		t.Error("a message came")
	}
	noAdmin := &harness.Daemon{ClientAddr: d.ClientAddr, AdminAddr: "127.0.0.1:1"}
	wantError(t, noAdmin, 3, "--force", "groups", "delete", "billing", "--topic", "orders")
}

// started is a mortarmq that runs beside the test.
type started struct {
	*exec.Cmd
	stdout io.ReadCloser
	stderr *bufio.Reader
}

func launch(t *testing.T, d *harness.Daemon, args ...string) *started {
	t.Helper()
	s := &started{Cmd: exec.CommandContext(t.Context(), mortarmq, append(args, "--server", d.ClientAddr, "--admin", d.AdminAddr)...)}
	stderr, err := s.StderrPipe()
	if err == nil {
		s.stderr = bufio.NewReader(stderr)
		s.stdout, err = s.StdoutPipe()
	}
	if err == nil {
		err = s.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Process.Kill() })
	return s
}

// end waits for the command and returns its exit code and what else it said.
func (s *started) end(t *testing.T) (code int, said string) {
	t.Helper()
	text, err := io.ReadAll(s.stderr)
	if err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := s.Wait(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return s.ProcessState.ExitCode(), string(text)
}

// A member for which there is no partition says so, and gets one when it is free.
func TestSub_ASpareMemberSaysThatItWaits(t *testing.T) {
	t.Parallel()
	d := start(t, t.TempDir())
	run(t, d, 0, "", "topics", "create", "orders", "--partitions", "1")
	run(t, d, 0, "", "pub", "orders", "a", "b")
	first := launch(t, d, "sub", "orders", "--group", "billing")
	out := bufio.NewReader(first.stdout)
	if line, err := out.ReadString('\n'); err != nil || line != "a\n" {
		t.Fatalf("%q, %v", line, err)
	}
	second := launch(t, d, "sub", "orders", "--group", "billing", "--count", "1")
	if said, err := second.stderr.ReadString('\n'); err != nil || !strings.Contains(said, "spare") {
		t.Fatalf("the spare member says %q, %v", said, err)
	}
	if line, err := out.ReadString('\n'); err != nil || line != "b\n" {
		t.Fatalf("%q, %v", line, err)
	}
	if err := first.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if code, said := first.end(t); code != 0 || said != "" {
		t.Errorf("after an interrupt: exit code %d, %s", code, said)
	}
	run(t, d, 0, "", "pub", "orders", "c")
	if line, err := bufio.NewReader(second.stdout).ReadString('\n'); err != nil || line != "c\n" {
		t.Errorf("%q, %v", line, err)
	}
	if code, said := second.end(t); code != 0 || said != "" {
		t.Errorf("exit code %d, %s", code, said)
	}
}

// As in `mortarmq sub ... | head -1`: no complaint, no member left behind, and what was not read comes again.
func TestSub_AReaderThatHasSeenEnoughEndsIt(t *testing.T) {
	t.Parallel()
	d := start(t, t.TempDir())
	run(t, d, 0, "", "topics", "create", "lines", "--partitions", "1")
	run(t, d, 0, hostileText(20_000), "pub", "lines")
	s := launch(t, d, "sub", "lines", "--group", "g")
	if _, err := s.stdout.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if err := s.stdout.Close(); err != nil {
		t.Fatal(err)
	}
	if code, said := s.end(t); code != 1 || said != "" {
		t.Errorf("exit code %d, it says %q", code, said)
	}
	for end := time.Now().Add(time.Minute); run(t, d, 0, "", "groups", "describe", "g") != ""; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("its member is still there")
		}
	}
}
