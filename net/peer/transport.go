package peer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
)

const (
	// maxHandshakes bounds the connections whose handshake is not complete; more are closed at once.
	maxHandshakes = 64
	// refusalDelay is how long a node with the wrong secret waits for its refusal.
	refusalDelay = 100 * time.Millisecond
	// acceptPause is the pause after a failure to accept, which is mostly a lack of descriptors.
	acceptPause = 100 * time.Millisecond
	// refusalLogEvery bounds how often refused connections are logged.
	refusalLogEvery = 10 * time.Second
)

// Transport keeps this node connected with the others. All methods may be called from any goroutine.
type Transport struct {
	opt      Options
	log      *slog.Logger
	listener net.Listener
	links    map[replica.NodeID]*[peerwire.Lanes]*link
	payloads payloadPool
	began    time.Time

	ctx     context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup
	tokens  chan struct{} // one per handshake in progress

	refusals struct {
		mu         sync.Mutex
		logged     time.Time
		suppressed int
	}
	refused atomic.Uint64
}

// New returns a transport that is ready to Start. It reports every mistake in the options at once.
func New(o Options) (*Transport, error) {
	o.setDefaults()
	if err := o.validate(); err != nil {
		return nil, fmt.Errorf("peer transport: %w", err)
	}
	t := &Transport{
		opt: o, log: o.Logger, links: make(map[replica.NodeID]*[peerwire.Lanes]*link, len(o.Peers)), began: time.Now(),
		tokens: make(chan struct{}, maxHandshakes),
	}
	for id, addr := range o.Peers {
		lanes, h := new([peerwire.Lanes]*link), new(health)
		for lane := range lanes {
			lanes[lane] = newLink(t, id, peerwire.Lane(lane), addr, h)
		}
		t.links[id] = lanes
	}
	return t, nil
}

// Start listens and begins to connect. The context is for the listening only; Close ends the transport.
func (t *Transport) Start(ctx context.Context) error {
	t.listener = t.opt.Listener
	if t.listener == nil {
		var lc net.ListenConfig
		l, err := lc.Listen(ctx, "tcp", t.opt.Addr)
		if err != nil {
			return fmt.Errorf("listening for peers: %w", err)
		}
		t.listener = l
	}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.running.Go(t.accept)
	for _, lanes := range t.links {
		for _, l := range lanes {
			t.running.Go(func() { l.run(t.ctx) })
		}
	}
	return nil
}

// Addr returns the address that the transport listens on.
func (t *Transport) Addr() net.Addr { return t.listener.Addr() }

// Close ends all connections and returns when no goroutine of the transport runs any more. What is queued is dropped.
func (t *Transport) Close() error {
	if t.cancel == nil {
		return nil
	}
	t.cancel()
	err := t.listener.Close()
	t.running.Wait()
	for _, lanes := range t.links {
		for _, l := range lanes {
			select {
			case c := <-l.arrived:
				_ = c.conn.Close() // never served
			default:
			}
		}
	}
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// Reconnect ends all connections, so that new handshakes tell what Identity says now.
func (t *Transport) Reconnect() {
	for _, lanes := range t.links {
		for _, l := range lanes {
			l.end(errIdentity)
		}
	}
}

var errIdentity = errors.New("this node has a new identity to tell")

// name is how people know a node.
func (t *Transport) name(id replica.NodeID) string {
	if name, ok := t.opt.Names[id]; ok {
		return name
	}
	return strconv.Itoa(int(id))
}

// clock is the time since the transport was made, never 0.
func (t *Transport) clock() time.Duration { return time.Since(t.began) + 1 }

// pause waits, or returns when the transport is closed.
func (t *Transport) pause(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-t.ctx.Done():
	}
}

// accept takes the connections that others make until the listener is closed.
func (t *Transport) accept() {
	for {
		conn, err := t.listener.Accept()
		if err != nil {
			if t.ctx.Err() != nil {
				return
			}
			t.log.Warn("a peer's connection can't be accepted; trying on", "error", err)
			t.pause(acceptPause)
			continue
		}
		select {
		case t.tokens <- struct{}{}:
			t.running.Go(func() {
				defer func() { <-t.tokens }()
				t.welcome(conn)
			})
		default:
			_ = conn.Close()
			t.noteRefusal(conn, errors.New("too many connections are in their handshake"))
		}
	}
}

// welcome completes the handshake of a connection and hands it to its link.
func (t *Transport) welcome(conn net.Conn) {
	a, err := t.handshake(conn, func() (*accepted, error) { return t.acceptHandshake(conn) })
	if err != nil {
		_ = conn.Close() // the handshake's error counts
		t.noteRefusal(conn, err)
		return
	}
	t.links[a.from][a.lane].offer(a)
}

// handshake runs one within its time, or until the transport is closed.
func (t *Transport) handshake(conn net.Conn, f func() (*accepted, error)) (*accepted, error) {
	stop := context.AfterFunc(t.ctx, func() { _ = conn.Close() })
	defer stop()
	if err := conn.SetDeadline(time.Now().Add(t.opt.HandshakeTimeout)); err != nil {
		return nil, err
	}
	a, err := f()
	if err != nil {
		return nil, fmt.Errorf("handshake: %w", describe(err))
	}
	return a, conn.SetDeadline(time.Time{})
}

// noteRefusal logs a connection that was refused, not more often than refusalLogEvery.
func (t *Transport) noteRefusal(conn net.Conn, err error) {
	if t.ctx.Err() != nil {
		return
	}
	t.refused.Add(1)
	r := &t.refusals
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := time.Now(); now.Sub(r.logged) >= refusalLogEvery {
		t.log.Warn("a connection to the peer port was refused", "addr", conn.RemoteAddr().String(), "error", err,
			"not_logged", r.suppressed)
		r.logged, r.suppressed = now, 0
	} else {
		r.suppressed++
	}
}

// link returns the lane to a peer, nil for a node that is none.
func (t *Transport) link(to replica.NodeID, lane peerwire.Lane) *link {
	if lanes := t.links[to]; lanes != nil {
		return lanes[lane]
	}
	return nil
}

// Message sends a message of replica.Node, which is borrowed. It reports whether it was queued: it isn't where there is no
// connection or the queue is full.
func (t *Transport) Message(to replica.NodeID, m *replica.Message) bool {
	l := t.link(to, peerwire.Control)
	return l != nil && l.count(l.queue.put(peerwire.KindMessage, nil, peerwire.AppendMessage(nil, m), nil))
}

// Append sends a round. payload belongs to owner, which must hold it until its Release: the transport takes one reference
// over and gives it back when the round was written or dropped. Where Append returns false nothing was queued and owner
// is the caller's: there is no connection, or too much waits; Connected or Writable tells when that has changed.
func (t *Transport) Append(to replica.NodeID, a *peerwire.Append, payload []byte, owner peerwire.Releaser) bool {
	l := t.link(to, peerwire.Log)
	if l == nil {
		return false
	}
	f := l.queue.reserve(int64(peerwire.HeaderLen + peerwire.AppendLen + len(payload)))
	if f == nil {
		return l.count(false)
	}
	peerwire.PutAppend(f.head[peerwire.HeaderLen:], a)
	f.set(l.queue.version, peerwire.KindAppend, peerwire.AppendLen, payload, owner)
	l.queue.commit()
	return true
}

// Flushed tells a leader what is durable here. A FLUSHED of the same log that still waits is replaced. It returns false
// only where there is no connection.
func (t *Transport) Flushed(to replica.NodeID, f *peerwire.Flushed) bool {
	l := t.link(to, peerwire.Log)
	return l != nil && l.queue.putFlushed(f)
}

// Reject tells a leader that an APPEND was not taken. r is borrowed.
func (t *Transport) Reject(to replica.NodeID, r *peerwire.Reject) bool {
	l := t.link(to, peerwire.Log)
	if l == nil {
		return false
	}
	f := l.queue.reserve(peerwire.HeaderLen + peerwire.RejectLen)
	if f == nil {
		return l.count(false)
	}
	peerwire.PutReject(f.head[peerwire.HeaderLen:], r)
	f.set(l.queue.version, peerwire.KindReject, peerwire.RejectLen, nil, nil)
	l.queue.commit()
	return true
}

// Bulk sends a frame of the lane bulk, which is borrowed. payload and owner are as in Append; owner may be nil where
// nobody changes the payload any more.
func (t *Transport) Bulk(to replica.NodeID, f peerwire.BulkFrame, payload []byte, owner peerwire.Releaser) bool {
	l := t.link(to, peerwire.Bulk)
	if l == nil {
		return false
	}
	body := f.AppendBody(make([]byte, 0, headRoom))
	if !peerwire.HasPayload(f.Kind()) {
		return l.count(l.queue.put(f.Kind(), nil, body, nil))
	}
	return l.count(l.queue.put(f.Kind(), body, payload, owner))
}

// count counts what was refused.
func (l *link) count(queued bool) bool {
	if !queued {
		l.stats.refused.Add(1)
	}
	return queued
}

// LaneStats is the state of one lane to one peer. Counters run from the start.
type LaneStats struct {
	Peer replica.NodeID
	Lane peerwire.Lane
	// Version is the connection's version of the protocol, 0 without a connection.
	Version                    uint8
	SentBytes, ReceivedBytes   uint64
	SentFrames, ReceivedFrames uint64
	// Connects counts the connections that were made, Refused the frames that were not queued.
	Connects, Refused uint64
	// QueuedBytes wait to be written.
	QueuedBytes int64
	// RoundTrip is the last one that was measured, 0 before the first.
	RoundTrip time.Duration
}

// Stats returns the state of every lane, ordered by peer and lane, and how many connections were refused.
func (t *Transport) Stats() (lanes []LaneStats, refused uint64) {
	ids := make([]replica.NodeID, 0, len(t.links))
	for id := range t.links {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	for _, id := range ids {
		for _, l := range t.links[id] {
			s := &l.stats
			lanes = append(lanes, LaneStats{
				Peer: id, Lane: l.lane, Version: uint8(s.version.Load()),
				SentBytes: s.sent.Load(), ReceivedBytes: s.received.Load(),
				SentFrames: s.framesOut.Load(), ReceivedFrames: s.framesIn.Load(),
				Connects: s.connects.Load(), Refused: s.refused.Load(),
				QueuedBytes: l.queue.waiting(), RoundTrip: time.Duration(s.roundTrip.Load()),
			})
		}
	}
	return lanes, t.refused.Load()
}
