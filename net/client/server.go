package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/panjf2000/gnet/v2"
	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/protocol"
)

// Server serves the client port. Create it with New, then Start, then Shutdown.
type Server struct {
	gnet.BuiltinEventEngine

	opts    Options
	tick    time.Duration
	epoch   time.Time
	busyPub []byte // "0x4001 to PUB"
	frames  framePool

	listener net.Listener
	engine   *gnet.Client
	poller   *writePoller
	accepts  sync.WaitGroup
	ticks    sync.WaitGroup
	stopTick chan struct{}
	stopping atomic.Bool
	stopOnce sync.Once
	stopErr  error

	mu    sync.Mutex
	loops []*loop

	connections  atomic.Int64
	accepted     atomic.Uint64
	rejected     atomic.Uint64
	authFailures atomic.Uint64
	slowClosed   atomic.Uint64
	busy         atomic.Uint64
	bytesIn      atomic.Uint64
	bytesOut     atomic.Uint64
	outbound     atomic.Int64 // copied bytes that connections have not taken yet

	lastWarn   atomic.Int64 // time of the last warning about a client, on the server's clock
	suppressed atomic.Uint64
}

// Stats counts what has happened since the start, but Connections and the two Bytes of memory, which are current.
type Stats struct {
	Connections  int64
	Accepted     uint64
	Rejected     uint64 // beyond MaxConnections
	AuthFailures uint64
	SlowClosed   uint64 // closed with 0x4007
	Busy         uint64 // PUBs answered 0x4001 before they reached the engine
	BytesIn      uint64
	BytesOut     uint64
	PartialBytes int64 // memory of incomplete frames
	OwnedBytes   int64 // memory of large frames in the engine's hands
}

// New checks the options and returns a server that does not listen yet.
func New(opts Options) (*Server, error) {
	opts = opts.withDefaults()
	if err := opts.validate(); err != nil {
		return nil, fmt.Errorf("client port: %w", err)
	}
	s := &Server{
		opts:     opts,
		tick:     opts.tick(),
		epoch:    time.Now(),
		busyPub:  protocol.AppendErr(nil, protocol.CodeBackpressure, protocol.OpPub, "the broker has no room for more publishes of this connection: wait for answers, then send it again"),
		stopTick: make(chan struct{}),
	}
	s.frames.maxPartial, s.frames.maxOwned = opts.PartialBytes, opts.OwnedBytes
	return s, nil
}

// Start listens and serves until Shutdown. The context bounds the start only.
func (s *Server) Start(ctx context.Context) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", s.opts.Addr)
	if err != nil {
		return fmt.Errorf("client port: listening on %q: %w", s.opts.Addr, err)
	}
	engine, err := gnet.NewClient(s,
		gnet.WithNumEventLoop(s.opts.Loops),
		gnet.WithReadBufferCap(readBufferBytes),
		gnet.WithTCPNoDelay(gnet.TCPDelay), // leaves the option alone; package net has set no-delay already
		gnet.WithLogger(gnetLogger{s.opts.Logger}))
	if err == nil {
		s.poller, err = newWritePoller()
	}
	if err == nil {
		if err = engine.Start(); err != nil {
			err = errors.Join(err, s.poller.stop())
		}
	}
	if err != nil {
		return fmt.Errorf("client port: starting %d event loops: %w", s.opts.Loops, errors.Join(err, listener.Close()))
	}
	s.listener, s.engine = listener, engine
	s.accepts.Add(1)
	go s.accept()
	s.ticks.Add(1)
	go s.runTicks()
	return nil
}

// Addr returns the address that the server listens on.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// Stats returns the current counters. Any goroutine.
func (s *Server) Stats() Stats {
	return Stats{
		Connections:  s.connections.Load(),
		Accepted:     s.accepted.Load(),
		Rejected:     s.rejected.Load(),
		AuthFailures: s.authFailures.Load(),
		SlowClosed:   s.slowClosed.Load(),
		Busy:         s.busy.Load(),
		BytesIn:      s.bytesIn.Load(),
		BytesOut:     s.bytesOut.Load(),
		PartialBytes: s.frames.partial.Load(),
		OwnedBytes:   s.frames.owned.Load(),
	}
}

// Shutdown stops accepting and reading, waits until everything that was asked has been answered and has left, closes
// the connections and ends the loops. When the context ends first, the remaining connections are closed as they are and
// the error says how many. The engine must go on answering meanwhile.
func (s *Server) Shutdown(ctx context.Context) error {
	s.stopOnce.Do(func() { s.stopErr = s.shutdown(ctx) })
	return s.stopErr
}

func (s *Server) shutdown(ctx context.Context) error {
	s.stopping.Store(true)
	errs := []error{ignoreClosed(s.listener.Close())}
	s.accepts.Wait()
	s.eachLoop((*loop).postStop)
	poll := time.NewTicker(s.tick)
	defer poll.Stop()
	for s.connections.Load() > 0 && ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-poll.C:
		}
	}
	if n := s.connections.Load(); n > 0 {
		errs = append(errs, fmt.Errorf("client port: %d connections were closed before all their answers had left: %w", n, ctx.Err()))
	}
	close(s.stopTick)
	s.ticks.Wait()
	s.eachLoop((*loop).detach)
	errs = append(errs, s.engine.Stop())
	s.eachLoop((*loop).destroyKept) // the loops have ended
	errs = append(errs, s.poller.stop())
	return errors.Join(errs...)
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// now is the server's monotonic clock.
func (s *Server) now() time.Duration { return time.Since(s.epoch) }

func (s *Server) eachLoop(f func(*loop)) {
	s.mu.Lock()
	loops := s.loops
	s.mu.Unlock()
	for _, l := range loops {
		f(l)
	}
}

// runTicks drives the timers of all loops.
func (s *Server) runTicks() {
	defer s.ticks.Done()
	ticker := time.NewTicker(s.tick)
	defer ticker.Stop()
	for {
		select {
		case <-s.stopTick:
			return
		case <-ticker.C:
			if s.connections.Load() > 0 {
				s.eachLoop((*loop).postTick)
			}
		}
	}
}

// accept enrolls new connections in the event loops.
func (s *Server) accept() {
	defer s.accepts.Done()
	const shortest, longest = 5 * time.Millisecond, time.Second
	pause := shortest
	for {
		nc, err := s.listener.Accept()
		if err != nil {
			if s.stopping.Load() || errors.Is(err, net.ErrClosed) {
				return
			}
			// Mostly: out of file descriptors. Those who are connected go on; the others wait in the kernel's queue.
			s.warn("cannot accept connections; trying again", slog.Any("error", err), slog.Duration("in", pause))
			time.Sleep(pause)
			pause = min(2*pause, longest)
			continue
		}
		pause = shortest
		if s.connections.Load() >= int64(s.opts.MaxConnections) {
			s.rejected.Add(1)
			s.warn("a connection was refused: there are too many", slog.Int("limit", s.opts.MaxConnections))
			_ = nc.Close()
			continue
		}
		s.enroll(nc)
	}
}

// enroll gives nc to an event loop; gnet duplicates its descriptor and closes nc.
func (s *Server) enroll(nc net.Conn) {
	c := &conn{id: lastConnID.Add(1), srv: s}
	s.connections.Add(1)
	s.accepted.Add(1)
	_, err := s.engine.EnrollContext(nc, c)
	if c.loop == nil { // OnOpen has not seen it, so OnClose will not either
		s.connections.Add(-1)
		s.warn("an accepted connection could not be served", slog.Any("error", err))
	}
}

// OnOpen implements gnet.EventHandler.
func (s *Server) OnOpen(g gnet.Conn) ([]byte, gnet.Action) {
	c := g.Context().(*conn)
	c.gc, c.fd, c.loop = g, g.Fd(), s.loopOf(g.EventLoop())
	c.loop.open(c)
	return nil, gnet.None
}

// loopOf finds what belongs to a loop of gnet. On that loop.
func (s *Server) loopOf(gl gnet.EventLoop) *loop {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.loops {
		if l.gl == gl {
			return l
		}
	}
	l := newLoop(s, gl)
	s.loops = append(s.loops[:len(s.loops):len(s.loops)], l) // eachLoop reads the old slice without the lock
	return l
}

// OnTraffic implements gnet.EventHandler.
func (s *Server) OnTraffic(g gnet.Conn) gnet.Action {
	c := g.Context().(*conn)
	b, _ := g.Next(-1) // everything: what stayed would be copied again at each event
	return c.loop.traffic(c, b)
}

// OnClose implements gnet.EventHandler.
func (s *Server) OnClose(g gnet.Conn, err error) gnet.Action {
	c := g.Context().(*conn)
	if (errors.Is(err, io.EOF) || c.eof) && c.loop.keepWriting(c) {
		return gnet.None
	}
	c.loop.closed(c)
	return gnet.None
}

func shutdownWrite(fd int) bool { return unix.Shutdown(fd, unix.SHUT_WR) == nil }

// unsent is the number of bytes that the kernel holds for the peer, 0 if it does not say.
func unsent(fd int) int {
	n, err := unix.IoctlGetInt(fd, unix.SIOCOUTQ)
	if err != nil {
		return 0
	}
	return n
}

func wouldBlock(err error) bool { return errors.Is(err, unix.EAGAIN) }

// defaultMaxConnections leaves some file descriptors to the rest of the broker.
func defaultMaxConnections() int {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil || limit.Cur > 1<<22 {
		return 1 << 20
	}
	n := int(limit.Cur)
	return max(n-max(n/8, 64), 16)
}
