package harness

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// DefaultReadyTimeout is how long Start waits for a broker to serve.
	DefaultReadyTimeout = 90 * time.Second
	// DefaultStopTimeout is longer than the time after which mortard itself gives up a clean shutdown.
	DefaultStopTimeout = 90 * time.Second

	readyPoll    = 2 * time.Millisecond
	portAttempts = 5
	logTailBytes = 8 << 10
)

// Options says how to start a mortard process.
type Options struct {
	// Binary is the path of mortard.
	Binary string
	// DataDir holds the broker's data; it is created where missing.
	DataDir string
	// Config are further keys of the JSON configuration, over those that the harness sets (addresses, data_dir).
	Config map[string]any
	// Args are further command line arguments, Env further variables ("K=V").
	Args []string
	Env  []string
	// LogPath is the file to which the process's output is appended; DataDir + ".log" by default.
	LogPath string
	// ReadyTimeout replaces DefaultReadyTimeout.
	ReadyTimeout time.Duration
	// ClientAddr and AdminAddr are where to listen; free ports of the loopback interface if they are empty.
	ClientAddr, AdminAddr string
}

// Daemon is a running mortard process. Its methods may be called from any goroutine.
type Daemon struct {
	// ClientAddr and AdminAddr are host:port of the client listener and of the admin HTTP listener.
	ClientAddr string
	AdminAddr  string
	// DataDir is the broker's data directory.
	DataDir string
	// ReadyIn is the time from the start of the process until it could serve.
	ReadyIn time.Duration

	cmd     *exec.Cmd
	logPath string
	logFrom int64
	exited  chan struct{}
	exitErr error // valid once exited is closed
	ended   atomic.Bool
}

// StartError tells that a mortard process ended, or never became ready, instead of serving.
type StartError struct {
	// ExitCode is the process's exit status, -1 where it was killed or did not end by itself.
	ExitCode int
	// Log is the end of what the process wrote.
	Log string
	Err error
}

// Error names the cause and quotes the end of the process's log.
func (e *StartError) Error() string {
	return fmt.Sprintf("mortard did not start: %v (exit code %d)\n%s", e.Err, e.ExitCode, e.Log)
}

// Unwrap returns the cause.
func (e *StartError) Unwrap() error { return e.Err }

// Start starts a broker and waits until /healthz answers 200. Ports are free ones of the loopback interface. The process
// is killed when the calling process dies. An error is a *StartError where the process ran.
func Start(ctx context.Context, o Options) (*Daemon, error) {
	if err := os.MkdirAll(o.DataDir, 0o750); err != nil {
		return nil, err
	}
	var err error
	for range portAttempts {
		var d *Daemon
		d, err = start(ctx, o)
		if err == nil {
			return d, nil
		}
		if !strings.Contains(err.Error(), "address already in use") {
			break // another process took the port between our look and the broker's bind: look again
		}
	}
	return nil, err
}

func start(ctx context.Context, o Options) (*Daemon, error) {
	began := time.Now()
	d, err := Launch(o)
	if err != nil {
		return nil, err
	}
	timeout := o.ReadyTimeout
	if timeout == 0 {
		timeout = DefaultReadyTimeout
	}
	if err := d.awaitReady(ctx, timeout); err != nil {
		code := -1
		select {
		case <-d.exited:
			code = d.cmd.ProcessState.ExitCode()
		default:
			d.Kill()
		}
		return nil, &StartError{ExitCode: code, Log: d.Log(), Err: err}
	}
	d.ReadyIn = time.Since(began)
	return d, nil
}

// Launch is Start without waiting: the process may not serve yet, or end at once. The data directory must exist.
func Launch(o Options) (*Daemon, error) {
	addrs, err := freeAddrs(2)
	if err != nil {
		return nil, err
	}
	d := &Daemon{ClientAddr: cmp.Or(o.ClientAddr, addrs[0]), AdminAddr: cmp.Or(o.AdminAddr, addrs[1]), DataDir: o.DataDir, exited: make(chan struct{})}
	config, err := d.writeConfig(&o)
	if err != nil {
		return nil, err
	}
	d.logPath = o.LogPath
	if d.logPath == "" {
		d.logPath = filepath.Clean(o.DataDir) + ".log"
	}
	log, err := os.OpenFile(d.logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return nil, err
	}
	defer log.Close() // the process has its own descriptor
	if d.logFrom, err = log.Seek(0, io.SeekEnd); err != nil {
		return nil, err
	}
	d.cmd = exec.Command(o.Binary, append([]string{"--config", config}, o.Args...)...)
	d.cmd.Stdout, d.cmd.Stderr = log, log
	d.cmd.Env = append(os.Environ(), o.Env...)
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := d.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", o.Binary, err)
	}
	go func() {
		d.exitErr = d.cmd.Wait()
		close(d.exited)
	}()
	return d, nil
}

func (d *Daemon) writeConfig(o *Options) (path string, err error) {
	keys := map[string]any{
		"listen_client": d.ClientAddr,
		"listen_admin":  d.AdminAddr,
		"data_dir":      o.DataDir,
	}
	for k, v := range o.Config {
		keys[k] = v
	}
	text, err := json.MarshalIndent(keys, "", "  ")
	if err != nil {
		return "", err
	}
	path = filepath.Clean(o.DataDir) + ".json"
	return path, os.WriteFile(path, text, 0o600)
}

func (d *Daemon) awaitReady(ctx context.Context, timeout time.Duration) error {
	deadline := time.Now().Add(timeout)
	state := "no answer on " + d.AdminAddr
	for time.Now().Before(deadline) {
		select {
		case <-d.exited:
			return errors.New("the process ended")
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(readyPoll):
		}
		switch ok, text, err := d.Health(); {
		case err != nil:
		case ok:
			return nil
		default:
			state = "healthz says " + text
		}
	}
	return fmt.Errorf("not ready after %v: %s", timeout, state)
}

// healthClient gives up on a process that doesn't answer, such as a stopped one.
var healthClient = &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

// Health asks /healthz, for 2 s at most. An error is no answer.
func (d *Daemon) Health() (ok bool, state string, err error) {
	resp, err := healthClient.Get("http://" + d.AdminAddr + "/healthz")
	if err != nil {
		return false, "", err
	}
	defer resp.Body.Close()
	var h struct {
		State string `json:"state"`
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 4<<10)).Decode(&h); err != nil {
		return false, "", fmt.Errorf("%s: %w", d.AdminAddr, err)
	}
	return resp.StatusCode == http.StatusOK, h.State, nil
}

// Signal sends a signal, such as SIGSTOP, to the process.
func (d *Daemon) Signal(s syscall.Signal) error { return d.cmd.Process.Signal(s) }

// PID returns the process id.
func (d *Daemon) PID() int { return d.cmd.Process.Pid }

// Exited is closed when the process has ended.
func (d *Daemon) Exited() <-chan struct{} { return d.exited }

// Stop sends SIGTERM and waits for the process to end. It is an error where the process doesn't exit with status 0 or
// takes longer than timeout (it is killed then).
func (d *Daemon) Stop(timeout time.Duration) error {
	d.ended.Store(true)
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-d.exited:
	case <-time.After(timeout):
		_ = d.cmd.Process.Signal(syscall.SIGQUIT) // the stacks go to the log
		select {
		case <-d.exited:
		case <-time.After(2 * time.Second):
			d.Kill()
		}
		return fmt.Errorf("mortard still ran %v after SIGTERM\n%s", timeout, d.Log())
	}
	if d.exitErr != nil {
		return fmt.Errorf("mortard after SIGTERM: %w\n%s", d.exitErr, d.Log())
	}
	return nil
}

// Kill ends the process with SIGKILL, as kill -9 does, and waits until it is gone. Killing a process that has ended is a
// no-op.
func (d *Daemon) Kill() {
	d.ended.Store(true)
	_ = d.cmd.Process.Kill() // an error means that it has ended already
	<-d.exited
}

var errExitedZero = errors.New("exit status 0")

// Crashed returns an error if the process ended though neither Stop nor Kill was called, with the end of its log.
func (d *Daemon) Crashed() error {
	select {
	case <-d.exited:
		if !d.ended.Load() {
			return fmt.Errorf("mortard ended by itself: %w\n%s", cmp.Or(d.exitErr, errExitedZero), d.Log())
		}
	default:
	}
	return nil
}

// Log returns the end of what this process wrote to its log.
func (d *Daemon) Log() string {
	f, err := os.Open(d.logPath)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return err.Error()
	}
	from := max(d.logFrom, end-logTailBytes)
	text := make([]byte, end-from)
	n, _ := f.ReadAt(text, from)
	return string(text[:n])
}

// freeAddrs returns n loopback addresses whose ports were free a moment ago.
func freeAddrs(n int) ([]string, error) {
	addrs := make([]string, n)
	for i := range addrs {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close() // keeps the ports of one call apart
		addrs[i] = l.Addr().String()
	}
	return addrs, nil
}

// LastingAddr returns a loopback address at which a broker can be started again and again. The port of an ordinary one,
// 127.0.0.1, may be gone in the meantime: to somebody else's outgoing connection, even to one that a client opens to the
// broker that is not there, which the kernel may connect to itself. An address of 127.0.0.0/8 that is drawn at random is
// nobody else's.
func LastingAddr() string {
	host := net.IPv4(127, byte(1+rand.N(254)), byte(rand.N(256)), byte(1+rand.N(254)))
	return net.JoinHostPort(host.String(), strconv.Itoa(10_000+rand.N(20_000)))
}
