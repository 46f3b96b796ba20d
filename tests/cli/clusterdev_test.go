package cli

import (
	"bufio"
	"bytes"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

const patience = time.Minute

// dev is a running `mortarmq cluster dev`.
type dev struct {
	t      *testing.T
	cmd    *exec.Cmd
	env    []string // what it says that other terminals should export
	lines  chan []string
	states map[string]string // by node
	pids   map[string]int
	stderr bytes.Buffer
}

// devPort draws a port for a cluster's first node. It and those of the others are free, and below those that the kernel gives
// to whoever doesn't care, so that none is lost while a node is down.
func devPort(t *testing.T) string {
	t.Helper()
	free := func(first int) bool {
		for node := range 3 {
			for k := range 3 {
				l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(first+10*node+k)))
				if err != nil {
					return false
				}
				l.Close()
			}
		}
		return true
	}
	for range 100 {
		if first := 10_000 + rand.N(20_000); free(first) {
			return strconv.Itoa(first)
		}
	}
	t.Fatal("no free ports")
	return ""
}

func startDev(t *testing.T, dir, temp string) *dev {
	t.Helper()
	args := []string{"cluster", "dev", "--port", devPort(t), "--mortard", mortard}
	if dir != "" {
		args = append(args, "--dir", dir)
	}
	d := &dev{t: t, cmd: exec.Command(mortarmq, args...), lines: make(chan []string, 1000), states: map[string]string{}, pids: map[string]int{}}
	d.cmd.Env = append(os.Environ(), "TMPDIR="+temp)
	d.cmd.Stderr = &d.stderr
	out, err := d.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = d.cmd.Process.Kill() // it has ended unless the test failed
		_ = d.cmd.Wait()
	})
	go d.read(out)
	return d
}

func (d *dev) read(out io.Reader) {
	defer close(d.lines)
	for lines := bufio.NewScanner(out); lines.Scan(); {
		d.lines <- strings.Split(lines.Text(), "\t")
	}
}

// until takes lines until done.
func (d *dev) until(what string, done func() bool) {
	d.t.Helper()
	deadline := time.After(patience)
	for !done() {
		select {
		case f, ok := <-d.lines:
			if !ok {
				d.t.Fatalf("cluster dev ended before %s: %s", what, d.stderr.String())
			}
			if len(f) == 1 {
				d.env = append(d.env, strings.TrimPrefix(f[0], "export "))
				continue
			}
			d.states[f[0]] = f[4]
			d.pids[f[0]], _ = strconv.Atoi(f[1])
		case <-deadline:
			d.t.Fatalf("waiting until %s: %v", what, d.states)
		}
	}
}

// leader returns who leads, "" unless there is a leader and the others follow.
func (d *dev) leader() string {
	leader, followers := "", 0
	for node, state := range d.states {
		switch {
		case strings.HasPrefix(state, "leader of epoch") && strings.Contains(state, "serving"):
			leader = node
		case strings.HasPrefix(state, "follows node"):
			followers++
		}
	}
	if followers != 2 {
		return ""
	}
	return leader
}

// run runs mortarmq as in another terminal.
func (d *dev) run(stdin string, args ...string) string {
	d.t.Helper()
	cmd := exec.CommandContext(d.t.Context(), mortarmq, args...)
	cmd.Env = append(os.Environ(), d.env...)
	cmd.Stdin = strings.NewReader(stdin)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		d.t.Fatalf("mortarmq %s: %v: %s", strings.Join(args, " "), err, stderr.String())
	}
	return string(out)
}

// end interrupts it and checks that nothing runs any more.
func (d *dev) end() {
	d.t.Helper()
	if err := d.cmd.Process.Signal(syscall.SIGINT); err != nil {
		d.t.Fatal(err)
	}
	for deadline, open := time.After(2*patience), true; open; { // what it says while it ends
		select {
		case _, open = <-d.lines:
		case <-deadline:
			d.t.Fatalf("it does not end: %s", d.stderr.String())
		}
	}
	if err := d.cmd.Wait(); err != nil {
		d.t.Errorf("after SIGINT: %v: %s", err, d.stderr.String())
	}
	for node, pid := range d.pids {
		if pid != 0 && syscall.Kill(pid, 0) == nil {
			d.t.Errorf("node %s still runs as process %d", node, pid)
		}
	}
}

func TestClusterDev_RunsACluster(t *testing.T) {
	t.Parallel()
	temp := t.TempDir()
	d := startDev(t, "", temp)
	d.until("the cluster serves", func() bool { return d.leader() != "" })
	wantOutput(t, d.run("", "topics", "create", "t", "--partitions", "1"), "created\t1\n")
	d.run("a\nb\n", "pub", "t")
	old := d.leader()
	killed := d.pids[old]
	if err := syscall.Kill(killed, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	d.until("another node leads", func() bool {
		return d.states[old] != "" && d.leader() != old && d.leader() != "" && d.pids[old] != killed
	})
	d.run("c\n", "pub", "t")
	wantOutput(t, d.run("", "sub", "t", "--group", "g", "--count", "3"), "a\nb\nc\n")
	d.until("it says who leads as leader get does", func() bool { return strings.HasPrefix(d.run("", "leader", "get"), d.leader()+"\t") })
	d.end()
	if left, err := os.ReadDir(temp); err != nil || len(left) > 0 {
		t.Errorf("%v is left, %v", left, err)
	}
}

func TestClusterDev_KeepsWhatIsInItsDirectory(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "cluster")
	for _, want := range []string{"created\t1\n", "existed\t1\n"} {
		d := startDev(t, dir, t.TempDir())
		d.until("the cluster serves", func() bool { return d.leader() != "" })
		wantOutput(t, d.run("", "topics", "create", "t", "--partitions", "1"), want)
		d.end()
	}
}
