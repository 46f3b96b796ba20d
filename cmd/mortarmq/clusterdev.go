package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
)

// devNodes is the size of a cluster on one machine.
const devNodes = 3

const (
	// devStep is how far the ports of two nodes are apart: a node has the client port, the peer port and the admin port.
	devStep = 10
	// devRestart is how long a node that has ended stays away: time to watch what the others do.
	devRestart = 5 * time.Second
	// devStopping is how long the nodes have for their orderly end.
	devStopping = 75 * time.Second
	// devLogTail is how much of a log is shown of a node that does not start, in bytes.
	devLogTail = 2 << 10
)

// devCluster is what cluster dev runs.
type devCluster struct {
	app     *app
	mortard string
	dir     string
	nodes   [devNodes]*devNode
	ended   chan *devNode
}

// devNode is one of the processes.
type devNode struct {
	id                  int
	client, peer, admin string
	config, log         string
	cmd                 *exec.Cmd // nil while it does not run
	err                 error     // how it ended
	served              bool      // it answered in this life
	back                time.Time // when it is started again
	state               string
}

func (a *app) clusterCommand() *cobra.Command {
	return group("cluster", "Run a cluster on this machine", a.clusterDev())
}

func (a *app) clusterDev() *cobra.Command {
	var dir, mortard string
	var port int
	c := &cobra.Command{
		Use:   "dev",
		Short: "Run three nodes on this machine to try things out, until Ctrl-C: node, pid, client, admin, state",
		Long: `Run a cluster of three mortard processes on loopback, show what state each is in, and end them with Ctrl-C.

On a terminal that is a table that stays up to date; otherwise there is a line for each change. The lines before it set
MORTAR_SERVER and MORTAR_ADMIN for other terminals, so that mortarmq there knows all three nodes.

Kill one (kill -9 PID) or stop it (kill -STOP PID) and watch the others: one that has ended is started again after 5 s.
Without --dir the data is in a temporary directory that is removed at the end.`,
		Example: `  mortarmq cluster dev
  mortarmq cluster dev --dir ./cluster --port 17188`,
		Args: cobra.NoArgs,
	}
	f := c.Flags()
	f.StringVar(&dir, "dir", "", "where the nodes keep their data and logs, for the next time too; nothing there is removed")
	f.IntVar(&port, "port", 7188, "client port of the first node; its peer and admin ports follow, the next nodes' are 10 and 20 higher. 0 takes free ones")
	f.StringVar(&mortard, "mortard", "", "the broker's program; without it the one beside this program, or in PATH")
	c.RunE = does(func(ctx context.Context, _ []string) error { return a.runDev(ctx, dir, mortard, port) })
	return c
}

// runDev runs the cluster until ctx ends.
func (a *app) runDev(ctx context.Context, dir, mortard string, port int) (err error) {
	if port != 0 && (port < 1 || port+devStep*(devNodes-1)+2 > 65535) {
		return usagef("--port is %d: use 1 to %d, or 0 for free ones", port, 65535-devStep*(devNodes-1)-2)
	}
	d := &devCluster{app: a, ended: make(chan *devNode, devNodes)}
	if d.mortard, err = findMortard(mortard); err != nil {
		return err
	}
	temporary := dir == ""
	if temporary {
		dir, err = os.MkdirTemp("", "mortarmq-dev-")
	} else {
		err = os.MkdirAll(dir, 0o750)
	}
	if err != nil {
		return fmt.Errorf("the nodes' directory: %w", err)
	}
	if temporary {
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	}
	if d.dir, err = filepath.Abs(dir); err != nil {
		return err
	}
	if err := d.place(port); err != nil {
		return err
	}
	// The kernel ends the nodes with the thread that started them, so this goroutine keeps it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer d.stop() // before the data is removed
	for _, n := range d.nodes {
		if err := d.start(n); err != nil {
			return err
		}
	}
	kept := "removed at the end"
	if !temporary {
		kept = "kept"
	}
	a.note("three nodes with their data and logs in %s, which is %s; Ctrl-C ends them", d.dir, kept)
	if a.json {
		fmt.Fprintf(a.stderr, "%s", d.exports())
	} else if err := a.write(d.exports()); err != nil {
		return err
	}
	return d.watch(ctx)
}

// findMortard returns the broker's program.
func findMortard(named string) (string, error) {
	if named != "" {
		path, err := exec.LookPath(named)
		if err != nil {
			return "", usagef("--mortard: %w", err)
		}
		return filepath.Abs(path)
	}
	if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), "mortard")
		if path, err := exec.LookPath(beside); err == nil {
			return path, nil
		}
	}
	path, err := exec.LookPath("mortard")
	if err != nil {
		return "", usagef("mortard is neither beside this program nor in PATH: name it with --mortard (make build makes both)")
	}
	return filepath.Abs(path)
}

// place gives the nodes their addresses, which must be free, and writes their configurations.
func (d *devCluster) place(port int) error {
	var held []net.Listener // keeps free ports apart
	defer func() {
		for _, l := range held {
			l.Close()
		}
	}()
	for i := range d.nodes {
		n := &devNode{id: i, log: filepath.Join(d.dir, fmt.Sprintf("node-%d.log", i)), config: filepath.Join(d.dir, fmt.Sprintf("node-%d.json", i))}
		for k, addr := range []*string{&n.client, &n.peer, &n.admin} {
			number := 0
			if port != 0 {
				number = port + devStep*i + k
			}
			l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(number)))
			if err != nil {
				return fmt.Errorf("%w: is a broker running there? --port 17188 uses others, --port 0 free ones", err)
			}
			held = append(held, l)
			*addr = l.Addr().String()
		}
		d.nodes[i] = n
	}
	type peer struct {
		NodeID     int    `json:"node_id"`
		Addr       string `json:"addr"`
		ClientAddr string `json:"client_addr"`
	}
	var peers []peer
	for _, n := range d.nodes {
		peers = append(peers, peer{n.id, n.peer, n.client})
	}
	for _, n := range d.nodes {
		text, err := json.MarshalIndent(map[string]any{
			"node_id": n.id, "peers": peers, "listen_client": n.client, "listen_peer": n.peer, "listen_admin": n.admin,
			"data_dir":           filepath.Join(d.dir, fmt.Sprintf("node-%d", n.id)),
			"journal_file_bytes": 20 << 20, // three nodes share one disk; the largest message fits
		}, "", "  ")
		if err == nil {
			err = os.WriteFile(n.config, append(text, '\n'), 0o600)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// exports are the lines for other terminals.
func (d *devCluster) exports() []byte {
	var clients, admins []string
	for _, n := range d.nodes {
		clients, admins = append(clients, n.client), append(admins, n.admin)
	}
	return fmt.Appendf(nil, "export %s=%s\nexport %s=%s\n", envServer, strings.Join(clients, ","), envAdmin, strings.Join(admins, ","))
}

// start starts a node.
func (d *devCluster) start(n *devNode) error {
	log, err := os.OpenFile(n.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return err
	}
	defer log.Close() // the process has its own descriptor
	cmd := exec.Command(d.mortard, "--config", n.config)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = ownEnvironment()
	// A group of its own: Ctrl-C at the terminal is for this program, which then ends the nodes in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting %s: %w", d.mortard, err)
	}
	n.cmd, n.err, n.served, n.state = cmd, nil, false, "starting"
	go func() {
		n.err = cmd.Wait()
		d.ended <- n
	}()
	return nil
}

// ownEnvironment is this program's environment without the broker's settings: the configuration has them all.
func ownEnvironment() []string {
	var env []string
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "MORTAR_") {
			env = append(env, v)
		}
	}
	return env
}

// gone notes that a node has ended. One that never answered has something that another start does not mend.
func (d *devCluster) gone(n *devNode) error {
	n.cmd = nil
	how := "exit status 0"
	if n.err != nil {
		how = n.err.Error()
	}
	if !n.served {
		return fmt.Errorf("node %d did not start: %s\n%s", n.id, how, tailOf(n.log))
	}
	n.back = time.Now().Add(devRestart)
	n.state = "ended: " + how
	return nil
}

// tailOf returns the end of a file.
func tailOf(path string) string {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	if err != nil {
		return err.Error()
	}
	text = text[max(0, len(text)-devLogTail):]
	return string(bytes.TrimSpace(text))
}

// stop ends what runs: in order, and by force what takes too long.
func (d *devCluster) stop() {
	running := 0
	for _, n := range d.nodes {
		if n.cmd == nil {
			continue
		}
		running++
		_ = n.cmd.Process.Signal(syscall.SIGTERM) // it has ended by itself if that fails
		_ = n.cmd.Process.Signal(syscall.SIGCONT) // somebody may have stopped it
	}
	killAt := time.After(devStopping)
	for ; running > 0; running-- {
		select {
		case n := <-d.ended:
			n.cmd = nil
		case <-killAt:
			for _, n := range d.nodes {
				if n.cmd != nil {
					_ = n.cmd.Process.Kill() // likewise
				}
			}
			n := <-d.ended
			n.cmd = nil
		}
	}
}
