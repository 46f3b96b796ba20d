package cli

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// shellLines returns the indented lines of a section of the README: what a newcomer pastes.
func shellLines(t *testing.T, section string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(text), "\n## "+section+"\n")
	if !found {
		t.Fatalf("the README has no section %q", section)
	}
	rest, _, _ = strings.Cut(rest, "\n## ")
	var lines strings.Builder
	for line := range strings.Lines(rest) {
		if command, ok := strings.CutPrefix(line, "    "); ok {
			lines.WriteString(command)
		}
	}
	return lines.String()
}

// The README's tour works as it stands, line by line. What differs here are the ports, the directory, and that a part of the Go
// sources is enough.
func TestReadme_TourWorksAsItIsPasted(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	d := start(t, filepath.Join(dir, "data"))
	script := shellLines(t, "Five minutes")
	for old, here := range map[string]string{
		"make run\n":             "",
		"http://127.0.0.1:7190/": fmt.Sprintf("http://%s/", d.AdminAddr),
		"/tmp/":                  dir + "/",
		`"$(go env GOROOT)/src" "$(go env GOROOT)/test"`: `"$(go env GOROOT)/src/net"`,
	} {
		if !strings.Contains(script, old) {
			t.Fatalf("the tour has no %q any more: this test replaces it", old)
		}
		script = strings.ReplaceAll(script, old, here)
	}
	if _, err := exec.LookPath("curl"); err != nil {
		script = strings.ReplaceAll(script, "curl -s ", "echo mortarmq_topic ")
	}
	if err := os.Mkdir(filepath.Join(dir, "bin"), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(mortarmq, filepath.Join(dir, "bin", "mortarmq")); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "bash", "-e", "-c", script)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "MORTAR_SERVER="+d.ClientAddr, "MORTAR_ADMIN="+d.AdminAddr)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s%s", err, stdout.String(), stderr.String())
	}
	out := stdout.String()
	for _, want := range []string{
		"created\t1\n", "hello\nworld\n", "identical\n", "user3 3 partition", "user3 10 partition", "user3 31 partition",
		"events\t4\tactive\t1\n", "audit\tevents\t0\tempty\n", "mortarmq_topic", "segment\ttopic_id=1 ",
	} {
		at := strings.Index(out, want)
		if at < 0 {
			t.Fatalf("behind what was found the tour does not print %q:\n%s%s", want, stdout.String(), stderr.String())
		}
		out = out[at+len(want):]
	}
}
