package client

import (
	"context"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/panjf2000/gnet/v2"
	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/engine/coord"
	"github.com/mortarmq/mortarmq/protocol"
)

// loop is what belongs to one event loop of gnet.
type loop struct {
	srv *Server
	gl  gnet.EventLoop

	// Of the loop.
	ingress   Ingress
	submitted bool // ingress holds something
	now       time.Duration
	wheel     wheel
	conns     int
	pub       protocol.Pub     // the PUB in hand
	iov       []unix.Iovec     // of one writev
	done      []coord.Releaser // owners of what it sent
	spare     []*conn
	stopping  bool

	// Of any goroutine.
	waking   atomic.Int32 // calls of wake in progress
	mu       sync.Mutex
	list     []*conn // connections to look at
	tickDue  bool
	stopDue  bool
	lendDue  bool // the ingress asked for the loop's thread
	awake    bool // the loop has been told, and has not looked yet
	detached bool // gnet is ending: the loop cannot be woken any more
}

func newLoop(s *Server, gl gnet.EventLoop) *loop {
	l := &loop{
		srv: s, gl: gl,
		ingress: s.opts.Handler.NewIngress(),
		now:     s.now(),
		iov:     make([]unix.Iovec, 0, maxIovecs),
	}
	l.wheel.tick = s.tick
	l.wheel.current = int64(l.now / s.tick)
	return l
}

// post has the loop look at c. Any goroutine.
func (l *loop) post(c *conn) {
	l.mu.Lock()
	l.list = append(l.list, c)
	l.wakeLocked()
}

// postTick has the loop serve its timers. Any goroutine.
func (l *loop) postTick() {
	l.mu.Lock()
	l.tickDue = true
	l.wakeLocked()
}

// postStop has the loop close its connections gracefully. Any goroutine.
func (l *loop) postStop() {
	l.mu.Lock()
	l.stopDue = true
	l.wakeLocked()
}

// wakeLocked unlocks l.mu and wakes the loop unless that was done already.
func (l *loop) wakeLocked() {
	wake := !l.awake && !l.detached
	if wake {
		l.awake = true
		l.waking.Add(1)
	}
	l.mu.Unlock()
	if wake {
		// The only error is that the engine is shutting down; there is nobody to wake then.
		_ = l.gl.Execute(context.Background(), l)
		l.waking.Add(-1)
	}
}

// detach ends the wake-ups before gnet closes the descriptor that they write to: its number may be another file's next.
func (l *loop) detach() {
	l.mu.Lock()
	l.detached = true
	l.mu.Unlock()
	for l.waking.Load() != 0 {
		runtime.Gosched()
	}
}

// Run implements gnet.Runnable: it serves what was posted.
func (l *loop) Run(context.Context) error {
	l.now = l.srv.now()
	l.mu.Lock()
	list, tick, stop, lend := l.list, l.tickDue, l.stopDue, l.lendDue
	l.list = l.spare[:0]
	l.tickDue, l.stopDue, l.lendDue, l.awake = false, false, false, false
	l.mu.Unlock()

	for i, c := range list {
		list[i] = nil
		c.queued.Store(false) // before looking: what is queued from now on posts again
		if c.gc != nil || c.kept {
			l.settleOrClose(c)
		}
	}
	l.spare = list[:0]
	if stop && !l.stopping {
		l.stopping = true
		l.wheel.each(l.beginStop)
	}
	if tick {
		l.wheel.advance(l.now, l.look)
	}
	if l.submitted {
		l.flush()
	}
	if lend {
		l.ingress.Lend()
	}
	return nil
}

// flush hands over what the ingress has. It may want the loop's thread, but not before the other connections that have sent
// something were looked at: what they bring is to be part of it.
func (l *loop) flush() {
	l.submitted = false
	switch lend := l.ingress.Flush(); {
	case lend && l.conns == 1:
		l.ingress.Lend()
	case lend:
		l.mu.Lock()
		l.lendDue = true
		l.wakeLocked()
	}
}

// open takes a connection in.
func (l *loop) open(c *conn) {
	l.now = l.srv.now()
	l.conns++
	c.opened, c.heard, c.progress = l.now, l.now, l.now
	l.wheel.schedule(c, c.due())
	if l.stopping {
		l.beginStop(c)
	}
}

// traffic serves a readable event.
func (l *loop) traffic(c *conn, b []byte) gnet.Action {
	l.now = l.srv.now()
	l.srv.bytesIn.Add(uint64(len(b)))
	c.queued.Store(true) // answers that come meanwhile need no wake-up
	c.intake(b)
	alive := c.readInto()
	if l.submitted {
		l.flush()
	}
	c.queued.Store(false)
	if !alive || !l.settle(c) {
		return gnet.Close
	}
	return gnet.None
}

// settle writes what c has to send and sees to its timers. False: c is to be destroyed.
func (l *loop) settle(c *conn) bool {
	if !c.write() {
		return false
	}
	l.wheel.schedule(c, c.due())
	return true
}

func (l *loop) settleOrClose(c *conn) {
	if !l.settle(c) {
		l.destroy(c)
	}
}

// destroy closes c's socket at once. Errors of close(2) on a socket tell nothing that could be acted on.
func (l *loop) destroy(c *conn) {
	if !c.kept {
		_ = l.gl.Close(c.gc)
		return
	}
	fd := c.fd
	l.closed(c)
	_ = unix.Close(fd)
}

// keepWriting is called when gnet is about to close c because the client has shut its side, or closed the connection:
// which of the two can't be told before something is written. What was asked is still answered, through a duplicate of the
// descriptor. It returns false where nothing is owed.
func (l *loop) keepWriting(c *conn) bool {
	c.mu.Lock()
	owed := c.next != c.answers.head || c.out.bytes > 0
	c.mu.Unlock()
	if !owed || c.phase != phaseOpen && c.phase != phaseClosing {
		return false
	}
	fd, err := unix.FcntlInt(uintptr(c.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		l.srv.warn("a client that has shut its side gets no more answers: its socket can't be duplicated", slog.Any("error", err))
		return false
	}
	l.now = l.srv.now()
	l.srv.poller.forget(c)
	c.writing.Lock()
	c.fd, c.gc, c.kept, c.polled, c.blocked = fd, nil, true, false, false
	c.writing.Unlock()
	c.interruptPulls()
	if l.submitted {
		l.flush()
	}
	c.closing(l.now + l.srv.opts.AnswerGrace)
	l.settleOrClose(c)
	return true
}

// destroyKept closes the connections that gnet doesn't know any more.
func (l *loop) destroyKept() {
	l.wheel.each(func(c *conn) {
		if c.kept {
			l.destroy(c)
		}
	})
}

// closed lets go of c; its socket is closed afterwards.
func (l *loop) closed(c *conn) {
	l.conns--
	l.wheel.remove(c)
	l.srv.poller.forget(c)
	c.release()
	c.gc, c.kept = nil, false
	if c.announced {
		l.srv.opts.Handler.ClientClosed(c)
	}
	l.srv.connections.Add(-1)
}

// look serves c's timers; c has just left the wheel.
func (l *loop) look(c *conn) {
	if c.expire() {
		l.settleOrClose(c)
	} else {
		l.destroy(c)
	}
}

// beginStop closes c gracefully: what it has asked is answered.
func (l *loop) beginStop(c *conn) {
	c.interruptPulls()
	c.closing(l.now + maxStop)
	l.settleOrClose(c)
}
