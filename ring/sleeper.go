package ring

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Sleeper lets a goroutine that is locked to its thread sleep in the kernel until another one wakes it. Unlike a channel
// it involves no scheduler: waking is one write to an eventfd, and the sleeper goes on where it stopped, on its own
// thread. That is what a goroutine beside the commit path wants, whose wake-up is part of a message's latency.
type Sleeper struct {
	mu sync.RWMutex // held for reading around each use of fd by Wake, for writing by Close
	fd int          // -1 after Close

	// Memory for the owner's system calls.
	poll  [1]unix.PollFd
	until unix.Timespec
	count [8]byte
}

// wakeUp is what Wake writes: an eventfd adds it up in the machine's byte order, and anything but 0 wakes.
var wakeUp = [8]byte{1}

// NewSleeper returns a Sleeper; Close it.
func NewSleeper() (*Sleeper, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("eventfd to sleep on: %w (is the limit of open files reached?)", err)
	}
	return &Sleeper{fd: fd}, nil
}

// Wake ends the present or the next Sleep. Any goroutine may call it, also after Close.
func (s *Sleeper) Wake() {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.fd < 0 {
		return
	}
	for {
		// EAGAIN means that the counter is full: the sleeper is being woken already.
		if _, err := unix.Write(s.fd, wakeUp[:]); !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// Sleep blocks until Wake was called since the last Sleep returned, or until timeout has passed; negative means for ever.
// It may return early. Only the owner calls it.
func (s *Sleeper) Sleep(timeout time.Duration) {
	var until *unix.Timespec
	if timeout >= 0 {
		s.until = unix.NsecToTimespec(timeout.Nanoseconds())
		until = &s.until
	}
	s.poll[0] = unix.PollFd{Fd: int32(s.fd), Events: unix.POLLIN}
	if n, err := unix.Ppoll(s.poll[:], until, nil); err != nil || n == 0 {
		return
	}
	_, _ = unix.Read(s.fd, s.count[:]) // it was readable, and nobody else reads
}

// Close gives the descriptor back. Only the owner calls it, after its last Sleep.
func (s *Sleeper) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	fd := s.fd
	s.fd = -1
	return unix.Close(fd)
}
