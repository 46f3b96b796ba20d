package groups

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// process is a member in a process of its own.
type process struct {
	name string
	cmd  *exec.Cmd
	log  tail
	// ended is closed when the process is gone and everything that it has reported was taken; err is how it ended.
	ended chan struct{}
	err   error
	// stopped says that it was sent SIGTERM, killed that it was sent SIGKILL: only the main goroutine looks.
	stopped, killed bool
	// frozenUntil is when it is to be woken; zero: it is awake.
	frozenUntil time.Time
}

// startMember starts the present program as a member, see RunIfMember. take is called with each event and the member that
// the process is, on a goroutine of its own.
func startMember(name string, cfg *memberConfig, take func(e *event, member uint64)) (*process, error) {
	text, err := json.Marshal(cfg)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{name: name, cmd: exec.Command(self), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), memberVariable+"="+string(text))
	p.cmd.Stderr = &p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	events, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start a member: %w", err)
	}
	go func() {
		defer close(p.ended)
		member := uint64(0)
		readEvents(events, func(e *event) {
			if e.Kind == eventJoined {
				member = e.Member
			}
			take(e, member)
		})
		_, _ = io.Copy(io.Discard, events) // nothing, unless an event was not readable: the process must not block
		p.err = p.cmd.Wait()
	}()
	return p, nil
}

func (p *process) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) } // an error means that it has ended

// kill ends it without warning.
func (p *process) kill() {
	p.killed = true
	p.signal(syscall.SIGKILL)
	<-p.ended
}

// leave asks it to leave in an orderly way.
func (p *process) leave() {
	p.stopped = true
	p.signal(syscall.SIGTERM)
}

// freeze stops it where it is, wake has it go on.
func (p *process) freeze(until time.Time) {
	p.frozenUntil = until
	p.signal(syscall.SIGSTOP)
}

func (p *process) wake() {
	p.frozenUntil = time.Time{}
	p.signal(syscall.SIGCONT)
}

// failed returns an error if it has ended otherwise than it was told to.
func (p *process) failed() error {
	select {
	case <-p.ended:
	default:
		return nil
	}
	if p.killed || p.stopped && (p.err == nil || terminated(p.err)) {
		return nil
	}
	if p.stopped {
		return fmt.Errorf("%s did not leave as it should: %w\n%s", p.name, p.err, p.log.String())
	}
	return fmt.Errorf("%s ended by itself: %w\n%s", p.name, p.err, p.log.String())
}

// terminated tells whether a process was ended by SIGTERM itself: it had not begun to listen for it, nor to do anything else.
func terminated(err error) bool {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return false
	}
	status, ok := exit.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGTERM
}

// tailBytes is how much of a process's error output is kept.
const tailBytes = 8 << 10

// tail keeps the end of what is written to it.
type tail struct {
	mu sync.Mutex
	b  []byte
}

// Write implements io.Writer.
func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, b...)
	if n := len(t.b) - tailBytes; n > 0 {
		t.b = t.b[n:]
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.b)
}
