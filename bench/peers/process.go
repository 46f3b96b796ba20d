package peers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/mortarmq/mortarmq/bench"
)

const (
	// startTimeout is how long a server may take to answer; RabbitMQ's three nodes are the slowest.
	startTimeout = 120 * time.Second
	// stopTimeout is how long a server may take to end by itself before it is killed. Its data is thrown away.
	stopTimeout = 10 * time.Second
	startPoll   = 20 * time.Millisecond
	// requestTimeout bounds connecting and each set-up request.
	requestTimeout = 30 * time.Second
)

// process is a server with all the processes that it started: they form a group.
type process struct {
	cmd  *exec.Cmd
	done chan struct{}
	err  error // valid once done is closed
}

// launch starts a program in dir with its output appended to the log.
func launch(o *bench.PeerOptions, dir string, env []string, name string, args ...string) (*process, error) {
	log, err := os.OpenFile(o.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return nil, err
	}
	defer log.Close() // the process has its own descriptor
	cmd := exec.Command(name, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, log, log
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	// Nothing is written there. Erlang's virtual machine, which may not be a direct child, ends when it is closed, and so
	// when this process dies.
	if _, err := cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &process{cmd: cmd, done: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// pids lists the processes of the group: those whose fifth field of /proc/<pid>/stat (proc(5), pgrp) is the leader's id.
func (p *process) pids() []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var list []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		text, err := os.ReadFile(filepath.Join("/proc", e.Name(), "stat"))
		if err != nil {
			continue // it has ended
		}
		// The second field is the command's name in parentheses and may hold anything.
		f := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
		if len(f) > 2 && f[2] == strconv.Itoa(p.cmd.Process.Pid) {
			list = append(list, pid)
		}
	}
	return list
}

// kill ends the group at once and waits for its leader.
func (p *process) kill() {
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) // an error means that it has ended already
	<-p.done
}

// stop asks the leader to end, and kills the group when it has or when it takes too long.
func (p *process) stop() {
	select {
	case <-p.done: // the group's number may be another's by now
		return
	default:
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(stopTimeout):
		p.kill()
	}
}

// await polls until ready returns nil, the process has ended or the time is up.
func (p *process) await(ctx context.Context, what string, ready func() error) error {
	deadline := time.Now().Add(startTimeout)
	for {
		err := ready()
		if err == nil {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("%s ended before it served: %w", what, errors.Join(p.err, err))
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(startPoll):
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s did not serve within %v: %w", what, startTimeout, err)
		}
	}
}

// processes are the nodes of a peer.
type processes []*process

func (l processes) pids() []int {
	var list []int
	for _, p := range l {
		list = append(list, p.pids()...)
	}
	return list
}

func (l processes) stop() {
	done := make(chan struct{})
	for _, p := range l {
		go func() {
			p.stop()
			done <- struct{}{}
		}()
	}
	for range l {
		<-done
	}
}

// freePorts returns n loopback ports that were free a moment ago.
func freePorts(n int) ([]int, error) {
	ports := make([]int, n)
	for i := range ports {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close() // keeps the ports of one call apart
		ports[i] = l.Addr().(*net.TCPAddr).Port
	}
	return ports, nil
}

func local(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

func dial(ctx context.Context, addr string) (net.Conn, error) {
	d := net.Dialer{Timeout: requestTimeout}
	return d.DialContext(ctx, "tcp", addr)
}

// program finds a server program: where install.sh puts it, else on the PATH.
func program(o *bench.PeerOptions, name string) (string, error) {
	path, err := filepath.Abs(filepath.Join(o.Cache, "bin", name))
	if err == nil {
		if _, err = os.Stat(path); err == nil {
			return path, nil
		}
	}
	if path, err := exec.LookPath(name); err == nil {
		return path, nil
	}
	return "", fmt.Errorf("%s is not installed: run bench/peers/install.sh", name)
}

// needs returns the Missing function of a peer that consists of one program.
func needs(name string) func(*bench.PeerOptions) error {
	return func(o *bench.PeerOptions) error {
		_, err := program(o, name)
		return err
	}
}

// version returns the Version function of a peer whose program tells it on its first line.
func version(name, flag string) func(*bench.PeerOptions) string {
	return func(o *bench.PeerOptions) string {
		path, err := program(o, name)
		if err != nil {
			return ""
		}
		out, err := exec.Command(path, flag).Output()
		if err != nil {
			return ""
		}
		line, _, _ := strings.Cut(string(out), "\n")
		return line
	}
}

// exchange writes a request and hands what comes back to parse until that has consumed an answer: it returns how many bytes
// the answer had, 0 if it is incomplete. Bytes behind the answer are an error: nothing else is due.
func exchange(c net.Conn, request []byte, parse func(b []byte) (n int, err error)) error {
	return exchangeWithin(requestTimeout, c, request, parse)
}

func exchangeWithin(timeout time.Duration, c net.Conn, request []byte, parse func(b []byte) (n int, err error)) error {
	if err := c.SetDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	if len(request) > 0 {
		if _, err := c.Write(request); err != nil {
			return err
		}
	}
	var b []byte
	for {
		n, err := parse(b)
		if err != nil {
			return err
		}
		if n > 0 {
			if n < len(b) {
				return fmt.Errorf("%d bytes behind an answer", len(b)-n)
			}
			return c.SetDeadline(time.Time{})
		}
		chunk := make([]byte, 16<<10)
		k, err := c.Read(chunk)
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
		b = append(b, chunk[:k]...)
	}
}
