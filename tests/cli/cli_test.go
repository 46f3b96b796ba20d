package cli

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/mortarmq/mortarmq/tests/harness"
)

// mortard and mortarmq are the binaries, built once.
var mortard, mortarmq string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "mortarmq-cli-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		if mortard, err = harness.BuildMortard(dir, false); err == nil {
			mortarmq, err = buildCLI(dir)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	}())
}

func buildCLI(dir string) (string, error) {
	path := filepath.Join(dir, "mortarmq")
	out, err := exec.Command("go", "build", "-o", path, "github.com/mortarmq/mortarmq/cmd/mortarmq").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("building mortarmq: %w\n%s", err, out)
	}
	return path, nil
}

func start(t *testing.T, dataDir string) *harness.Daemon {
	t.Helper()
	d, err := harness.Start(t.Context(), harness.Options{Binary: mortard, DataDir: dataDir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.EndScenario(t) })
	return d
}

// run runs mortarmq against d and returns its output; the exit code must be want.
func run(t *testing.T, d *harness.Daemon, want int, stdin string, args ...string) string {
	t.Helper()
	stdout, _ := runBoth(t, d, want, stdin, args...)
	return stdout
}

// runBoth is run that returns standard error too.
func runBoth(t *testing.T, d *harness.Daemon, want int, stdin string, args ...string) (string, string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), mortarmq, append(args, "--server", d.ClientAddr, "--admin", d.AdminAddr)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if got := cmd.ProcessState.ExitCode(); got != want {
		t.Fatalf("mortarmq %s: exit code %d, want %d; errors:\n%s", strings.Join(args, " "), got, want, stderr.String())
	}
	return stdout.String(), stderr.String()
}

// wantError checks that a command ends with an exit code and names something on standard error.
func wantError(t *testing.T, d *harness.Daemon, code int, about string, args ...string) {
	t.Helper()
	if stdout, stderr := runBoth(t, d, code, "", args...); stdout != "" || !strings.Contains(stderr, about) {
		t.Errorf("mortarmq %s prints %q and says, without %q: %s", strings.Join(args, " "), stdout, about, stderr)
	}
}

// hostileText returns lines with every byte but the newline.
func hostileText(lines int) string {
	r := rand.New(rand.NewPCG(3, 5))
	var b strings.Builder
	for range lines {
		for range r.IntN(120) {
			if c := byte(r.IntN(256)); c != '\n' {
				b.WriteByte(c)
			}
		}
		b.WriteByte('\n')
	}
	return b.String()
}

func wantOutput(t *testing.T, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("output %q, want %q", got, want)
	}
}

// A file goes in line by line, the broker is killed, and the file comes back byte for byte.
func TestCLI_FileComesBackByteForByteAfterKill(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "data")
	d := start(t, dir)
	text := hostileText(20_000)
	file := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	wantOutput(t, run(t, d, 0, "", "topics", "create", "lines", "--partitions", "1"), "created\t1\n")
	run(t, d, 0, "", "pub", "lines", "--file", file)
	half := run(t, d, 0, "", "sub", "lines", "--group", "g", "--count", "7000")

	d.Kill()
	d = start(t, dir)
	wantOutput(t, run(t, d, 0, "", "topics", "list"), "lines\t1\tactive\t1\n")
	rest := run(t, d, 0, "", "sub", "lines", "--group", "g", "--exit-empty")
	if half+rest != text {
		t.Errorf("%d + %d bytes came back, want the %d bytes of the file", len(half), len(rest), len(text))
	}
	wantOutput(t, run(t, d, 0, "", "sub", "lines", "--group", "g", "--exit-empty"), "")
	wantOutput(t, run(t, d, 0, "", "groups", "list", "--topic", "lines"), "g\tlines\t0\tempty\n")
	wantOutput(t, run(t, d, 0, "", "leader", "get"), "0\t2\thealthy\n")
	if got := run(t, d, 0, "", "broker", "status"); !strings.HasPrefix(got, "0\t") || strings.Count(got, "\t") != 3 {
		t.Errorf("broker status prints %q", got)
	}
}

// Messages with one key stay in order, whatever else is in the topic.
func TestCLI_OrderPerKey(t *testing.T) {
	t.Parallel()
	d := start(t, filepath.Join(t.TempDir(), "data"))
	run(t, d, 0, "", "topics", "create", "events", "--partitions", "8")
	var input strings.Builder
	want := map[string][]string{}
	r := rand.New(rand.NewPCG(1, 9))
	for i := range 10_000 {
		key, value := fmt.Sprintf("user%d", r.IntN(50)), fmt.Sprint(i)
		want[key] = append(want[key], value)
		fmt.Fprintf(&input, "%s:%s\n", key, value)
	}
	run(t, d, 0, input.String(), "pub", "events", "--key-separator", ":")
	out := run(t, d, 0, "", "sub", "events", "--group", "g", "--exit-empty", "--format", `%k:%v\n`)
	got := map[string][]string{}
	for line := range strings.Lines(out) {
		key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ":")
		got[key] = append(got[key], value)
	}
	for key := range want {
		if !slices.Equal(got[key], want[key]) {
			t.Errorf("%s: %d values in another order or missing, want %d", key, len(got[key]), len(want[key]))
		}
	}
}

func TestCLI_MissingThingsExitWith4(t *testing.T) {
	t.Parallel()
	d := start(t, filepath.Join(t.TempDir(), "data"))
	run(t, d, 0, "", "topics", "create", "gone")
	run(t, d, 0, "", "pub", "gone", "a")
	wantOutput(t, run(t, d, 0, "", "topics", "delete", "gone"), "deleted\n")
	wantOutput(t, run(t, d, 0, "", "topics", "delete", "gone"), "not_found\n")
	run(t, d, 4, "", "pub", "gone", "a")
	run(t, d, 4, "", "sub", "gone", "--group", "g")
	run(t, d, 4, "", "sub", "gone", "--group", "g", "--exit-empty")
	run(t, d, 4, "", "groups", "describe", "g")
	run(t, d, 4, "", "topics", "create", "a..b")
}

// Every file that a broker writes can be printed and is whole, after a kill as after an orderly end; one flipped bit isn't.
func TestCLI_DumpReadsWhatTheBrokerWrites(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "data")
	d := start(t, dir)
	run(t, d, 0, "", "topics", "create", "lines", "--partitions", "2")
	run(t, d, 0, hostileText(5_000), "pub", "lines")
	run(t, d, 0, "", "sub", "lines", "--group", "g", "--exit-empty")
	d.Kill()
	wantOutput(t, run(t, d, 0, "", "dump", "--check", dir), "")
	d = start(t, dir)
	if err := d.Stop(harness.DefaultStopTimeout); err != nil {
		t.Fatal(err)
	}
	wantOutput(t, run(t, d, 0, "", "dump", "--check", dir), "")
	out := run(t, d, 0, "", "dump", dir)
	for _, want := range []string{"\tsegment\t", "\tindex\t", "\tcheckpoint\t", "\tledger\t", "item=ACK", "\tmetadata_log\t", "mutation=topic_created",
		"\tjournal\t", "\tstart_round\t", "\ttable\t", "\tmark\t", "\tdedup_snapshot\t", "\tproducer\t"} {
		if !strings.Contains(out, want) {
			t.Errorf("dump prints no %q", want)
		}
	}
	if strings.Contains(out, "\tother\t") && !strings.Contains(out, "layout.json") {
		t.Error("dump does not know a file of the broker's")
	}
	segments, err := filepath.Glob(filepath.Join(dir, "topics", "*", "*", "*.mqs"))
	if err != nil || len(segments) != 2 {
		t.Fatalf("segments %v, %v", segments, err)
	}
	b, err := os.ReadFile(segments[0])
	if err != nil {
		t.Fatal(err)
	}
	b[4096+20] ^= 4
	if err := os.WriteFile(segments[0], b, 0o600); err != nil {
		t.Fatal(err)
	}
	out = run(t, d, 1, "", "dump", "--check", dir)
	if !strings.Contains(out, segments[0]+"\t4096\tdamage\t") || !strings.Contains(out, ".mqi\t") {
		t.Errorf("dump of a flipped bit prints %s", out)
	}
}
