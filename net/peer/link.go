package peer

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
)

// link is one lane to one peer, over all its connections. A goroutine of its own makes or awaits a connection, serves it
// to its end, and begins again.
type link struct {
	t      *Transport
	id     replica.NodeID
	lane   peerwire.Lane
	addr   string
	queue  *queue
	budget *budget
	stats  linkStats
	health *health // of all lanes to the peer

	// arrived has the newest connection that the peer has made, where it is the peer that dials.
	arrived chan *accepted

	mu      sync.Mutex
	current *session // nil without a connection
}

// linkStats are counted by the lane's goroutines and read by any.
type linkStats struct {
	sent, received      atomic.Uint64
	framesOut, framesIn atomic.Uint64
	refused, connects   atomic.Uint64
	roundTrip           atomic.Int64
	version             atomic.Uint32 // 0 without a connection
}

func newLink(t *Transport, id replica.NodeID, lane peerwire.Lane, addr string, h *health) *link {
	limit := [peerwire.Lanes]int64{peerwire.Control: controlQueue, peerwire.Log: t.opt.LogQueue, peerwire.Bulk: t.opt.BulkQueue}[lane]
	return &link{
		t: t, id: id, lane: lane, addr: addr, queue: newQueue(limit), budget: newBudget(t.opt.Unreleased),
		arrived: make(chan *accepted, 1), health: h,
	}
}

// dials reports whether it is this node that makes the connections: of two nodes the one with the lower number does.
func (l *link) dials() bool { return l.t.opt.Self < l.id }

// run keeps the lane connected until ctx ends.
func (l *link) run(ctx context.Context) {
	backoff := l.t.opt.BackoffMin
	var last string // the failure that was logged
	for ctx.Err() == nil {
		var c *accepted
		var err error
		if l.dials() {
			c, err = l.dial(ctx)
		} else {
			c, err = l.await(ctx)
		}
		if err != nil {
			if ctx.Err() != nil {
				return
			}
			level := slog.LevelDebug
			if text := err.Error(); text != last && l.lane == peerwire.Control { // the others fail alike
				last, level = text, slog.LevelWarn
			}
			l.t.log.Log(ctx, level, "a node can't be reached; trying on", "peer", l.t.name(l.id), "lane", l.lane.String(),
				"addr", l.addr, "error", err)
			l.t.pause(backoff/2 + rand.N(backoff/2+1))
			backoff = min(2*backoff, l.t.opt.BackoffMax)
			continue
		}
		last = ""
		began := time.Now()
		l.serve(ctx, c)
		// A connection that ends at once, time after time, must not be made again without a pause.
		if time.Since(began) > l.t.opt.BackoffMax {
			backoff = l.t.opt.BackoffMin
		} else if l.dials() {
			l.t.pause(backoff/2 + rand.N(backoff/2+1))
			backoff = min(2*backoff, l.t.opt.BackoffMax)
		}
	}
}

// dial makes a connection and completes its handshake.
func (l *link) dial(ctx context.Context) (*accepted, error) {
	dialing, cancel := context.WithTimeout(ctx, l.t.opt.DialTimeout)
	defer cancel()
	conn, err := l.t.opt.Dial(dialing, l.addr)
	if err != nil {
		return nil, err
	}
	c, err := l.t.handshake(conn, func() (*accepted, error) { return l.t.dialHandshake(conn, l.id, l.lane) })
	if err != nil {
		_ = conn.Close() // the handshake's error counts
		return nil, err
	}
	return c, nil
}

// await waits for the peer to make a connection.
func (l *link) await(ctx context.Context) (*accepted, error) {
	select {
	case c := <-l.arrived:
		return c, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// errReplaced ends a connection in whose place the peer has made a new one: it knows nothing of this one any more.
var errReplaced = errors.New("the other node has made a new connection")

// offer hands over a connection that the peer has made. It takes the place of an older one. The lock keeps the link from
// making it the current one before the older one is closed.
func (l *link) offer(c *accepted) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.current != nil {
		l.current.close(errReplaced)
	}
	select {
	case old := <-l.arrived:
		_ = old.conn.Close() // never served
	default:
	}
	l.arrived <- c // has room: only this function fills it
}

// serve runs a connection to its end.
func (l *link) serve(ctx context.Context, c *accepted) {
	tune(c.conn)
	s := newSession(l, c)
	l.budget.set(false)
	l.mu.Lock()
	l.current = s
	l.mu.Unlock()
	stop := context.AfterFunc(ctx, func() { s.close(errClosed) })
	defer stop()

	l.stats.connects.Add(1)
	l.stats.version.Store(uint32(c.peer.Version))
	l.queue.start(c.peer.Version, newDirect(s))
	l.health.up(l, &c.peer)
	h := l.t.opt.Handler
	h.Connected(l.id, l.lane, c.peer)
	err := describe(s.run())
	l.queue.stop()
	l.stats.version.Store(0)
	l.mu.Lock()
	l.current = nil
	l.mu.Unlock()
	h.Disconnected(l.id, l.lane, err)
	l.health.down(l, err)
}

// health counts a peer's connected lanes, so that a log has one line when a node comes and one when it goes, not one per
// lane.
type health struct {
	mu        sync.Mutex
	connected peerwire.Lane
}

func (h *health) up(l *link, p *Peer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.connected++
	l.t.log.Debug("a lane is connected", "peer", l.t.name(l.id), "lane", l.lane.String(), "addr", p.Addr, "version", p.Version)
	if h.connected == peerwire.Lanes {
		l.t.log.Info("a node is connected", "peer", l.t.name(l.id), "addr", l.addr, "version", p.Version)
	}
}

func (h *health) down(l *link, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l.t.log.Debug("a lane's connection ended", "peer", l.t.name(l.id), "lane", l.lane.String(), "error", err)
	if h.connected == peerwire.Lanes && !errors.Is(err, errClosed) {
		l.t.log.Warn("a node's connection ended", "peer", l.t.name(l.id), "addr", l.addr, "error", err)
	}
	h.connected--
}

// end closes the current connection, if there is one; another one takes its place.
func (l *link) end(reason error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.current != nil {
		l.current.close(reason)
	}
}

// describe says in plain words how a connection ended.
func describe(err error) error {
	switch {
	case err == nil || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		return errors.New("the other node closed the connection")
	case errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE):
		return errors.New("the other node is gone: " + err.Error())
	default:
		return err
	}
}

// unsentBytes is how much the kernel takes of a connection that has not been sent yet. More would only wait there, in
// front of what is queued later.
const unsentBytes = 256 << 10

// tune sets a connection's options. What can't be set costs speed only.
func tune(conn net.Conn) {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return
	}
	_ = tcp.SetNoDelay(true)
	raw, err := tcp.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, unsentBytes)
	})
}
