package client

import (
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// writePoller waits until full sockets can be written again: gnet reports readable sockets only. It is an epoll
// instance beside gnet's with a goroutine that blocks in it; sockets are armed for one event at a time.
type writePoller struct {
	epfd, wakefd int
	done         chan struct{}

	mu    sync.Mutex
	conns map[uint64]*conn // by id, those that were ever armed; an event for an id that is gone is stale
}

// stopID is the id of the descriptor that ends the poller; connections count from 1.
const stopID = 0

func newWritePoller() (*writePoller, error) {
	epfd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll for full sockets: %w", err)
	}
	wakefd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err == nil {
		ev := event(unix.EPOLLIN, stopID)
		if err = unix.EpollCtl(epfd, unix.EPOLL_CTL_ADD, wakefd, &ev); err != nil {
			err = errors.Join(err, unix.Close(wakefd))
		}
	}
	if err != nil {
		return nil, fmt.Errorf("eventfd for full sockets: %w", errors.Join(err, unix.Close(epfd)))
	}
	p := &writePoller{epfd: epfd, wakefd: wakefd, done: make(chan struct{}), conns: make(map[uint64]*conn)}
	go p.run()
	return p, nil
}

// event carries a connection's id in the 64 bits that epoll gives back.
func event(events uint32, id uint64) unix.EpollEvent {
	return unix.EpollEvent{Events: events, Fd: int32(uint32(id)), Pad: int32(uint32(id >> 32))}
}

// arm asks for one event when c's socket is writable or broken. On c's loop.
func (p *writePoller) arm(c *conn) {
	op := unix.EPOLL_CTL_MOD
	if !c.polled {
		c.polled = true
		op = unix.EPOLL_CTL_ADD
		p.mu.Lock()
		p.conns[c.id] = c
		p.mu.Unlock()
	}
	ev := event(unix.EPOLLOUT|unix.EPOLLONESHOT, c.id)
	if err := unix.EpollCtl(p.epfd, op, c.fd, &ev); err != nil {
		// Out of kernel memory or of epoll watches. The connection is stuck then: the slow-consumer timer ends it.
		c.srv.opts.Logger.Error("cannot wait for a full socket to drain; the connection will be closed as a slow consumer", "error", err)
	}
}

// forget removes c. On c's loop, before its socket closes.
func (p *writePoller) forget(c *conn) {
	if !c.polled {
		return
	}
	_ = unix.EpollCtl(p.epfd, unix.EPOLL_CTL_DEL, c.fd, nil) // closing the socket would remove it as well
	p.mu.Lock()
	delete(p.conns, c.id)
	p.mu.Unlock()
}

func (p *writePoller) run() {
	defer close(p.done)
	events := make([]unix.EpollEvent, 128)
	for {
		n, err := unix.EpollWait(p.epfd, events, -1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			panic(fmt.Sprintf("net/client: epoll_wait on our own descriptor: %v", err))
		}
		for _, ev := range events[:max(n, 0)] {
			id := uint64(uint32(ev.Fd)) | uint64(uint32(ev.Pad))<<32
			if id == stopID {
				return
			}
			p.mu.Lock()
			c := p.conns[id]
			p.mu.Unlock()
			if c != nil {
				c.unblocked.Store(true)
				c.Flush()
			}
		}
	}
}

// stop ends the goroutine and closes the descriptors. The loops must have ended.
func (p *writePoller) stop() error {
	_, err := unix.Write(p.wakefd, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	if err != nil {
		return fmt.Errorf("waking the poller of full sockets: %w", err)
	}
	<-p.done
	return errors.Join(unix.Close(p.wakefd), unix.Close(p.epfd))
}
