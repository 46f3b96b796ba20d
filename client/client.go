package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

const (
	// controlIdle is how long the connection for Declare, Lookup and the like is kept without a request: shorter than the
	// broker's patience, so that it needs no keepalive.
	controlIdle = 10 * time.Second
	// callPatience is how long Declare, Lookup and the like go on trying, if their context allows it.
	callPatience = time.Minute
)

// DefaultPort is the broker's client port, for addresses that name none.
const DefaultPort = "7188"

// Client knows the brokers and opens Producers and Consumers on them. It may be used by several goroutines.
type Client struct {
	cfg    config
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup // the sessions of producers and consumers

	nodes nodes
	scout scout

	mu     sync.Mutex
	closed bool

	control chan *link // holds the control connection, or nil, when nobody uses it
	idle    *time.Timer
}

// Topic is what the broker says about a topic.
type Topic struct {
	ID         uint16
	Name       string
	Partitions uint16
	Created    bool // Declare created it just now
}

// DeclareOptions are the settings of Declare.
type DeclareOptions struct {
	// Partitions of a new topic, fixed for its life. 0 takes the existing topic's count, or the broker's default.
	Partitions uint16
	// Settings is a JSON object of topic settings for a new topic, such as {"durability":"local"}. Empty sends none.
	Settings []byte
}

// Dial connects to a broker and authenticates. addr is host:port, or several of them separated by commas: the nodes of one
// cluster, best all of them, in any order. Without a port it is DefaultPort. They are tried in turn, once each, and ctx
// bounds that; from then on the Client finds the node that leads by itself, whenever it changes.
func Dial(ctx context.Context, addr string, opts ...Option) (*Client, error) {
	c := &Client{cfg: defaultConfig(), control: make(chan *link, 1)}
	for _, opt := range opts {
		opt(&c.cfg)
	}
	var err error
	if c.nodes.addrs, err = parseAddrs(addr); err != nil {
		return nil, fmt.Errorf("client: %w", err)
	}
	c.cfg.complete(len(c.nodes.addrs))
	if err := c.cfg.validate(); err != nil {
		return nil, fmt.Errorf("client: %w", err)
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	l, err := c.dialAny(ctx)
	if err != nil {
		c.cancel()
		return nil, err
	}
	c.idle = time.AfterFunc(controlIdle, c.dropControl)
	c.control <- l
	return c, nil
}

// dialAny tries the nodes in turn, once each.
func (c *Client) dialAny(ctx context.Context) (*link, error) {
	var problems []error
	s := c.newSearch()
	for addr := s.next(); addr != "" && ctx.Err() == nil; addr = s.next() {
		l, err := openLink(ctx, &c.cfg, addr, s.timeout())
		if err == nil {
			return l, nil
		}
		s.failed(addr, false, err)
		problems = append(problems, err)
	}
	switch len(problems) {
	case 0:
		return nil, fmt.Errorf("client: %w", ctx.Err())
	case 1:
		return nil, problems[0]
	default:
		return nil, &unreachable{problems}
	}
}

// unreachable is why none of several nodes took the client.
type unreachable struct{ problems []error }

func (u *unreachable) Error() string {
	var b strings.Builder
	b.WriteString("none of the nodes could be used")
	for i, err := range u.problems {
		b.WriteString([]string{": ", "; "}[min(i, 1)])
		b.WriteString(err.Error())
	}
	return b.String()
}

func (u *unreachable) Unwrap() []error { return u.problems }

// Close ends every Producer and Consumer of the Client at once; what they had not finished fails with ErrClosed. Close
// them first, each with its own Close, to finish in an orderly way.
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.cancel()
	c.idle.Stop()
	if l := <-c.control; l != nil {
		l.close()
	}
	c.control <- nil
	c.wg.Wait()
	return nil
}

// session is a Producer's or Consumer's side of a connection that is opened again when it breaks.
type session interface {
	// serve uses l until it breaks. progress says that it did something useful, so the next pause starts small again.
	serve(l *link) (progress bool, err error)
	// down is told why there is no connection, before each pause. An error ends the session.
	down(err error) error
	// ended is called once, at the end of the session.
	ended(err error)
}

// run keeps s connected until ctx ends or an error that no reconnection can mend.
func (c *Client) run(ctx context.Context, s session) {
	way := c.newSearch()
	for {
		addr := way.next()
		l, err := openLink(ctx, &c.cfg, addr, way.timeout())
		opened, progress := err == nil, false
		if opened {
			since := time.Now()
			stop := context.AfterFunc(ctx, l.close)
			progress, err = s.serve(l)
			stop()
			l.close()
			if progress || time.Since(since) > c.cfg.backoffMax {
				way.succeeded()
			}
		}
		if ctx.Err() != nil {
			s.ended(ErrClosed)
			return
		}
		if end := s.down(err); end != nil {
			s.ended(end)
			return
		}
		way.failed(addr, opened, err)
		if next := way.next(); next != "" {
			level := slog.LevelInfo
			if progress {
				level = slog.LevelWarn
			}
			c.cfg.logger.Log(ctx, level, "connection lost, trying another node", "error", err, "next", next)
			continue
		}
		if end := way.hopeless(); end != nil {
			s.ended(end)
			return
		}
		level := slog.LevelWarn
		if way.elections > 0 && way.electing {
			level = slog.LevelInfo // said before: the cluster has no leader yet
		}
		pause := way.pause()
		c.cfg.logger.Log(ctx, level, "connection lost, reconnecting", "error", err, "pause", pause)
		if sleep(ctx, pause) != nil {
			s.ended(ErrClosed)
			return
		}
	}
}

// start runs s in a goroutine of its own until cancel is called or the Client is closed. done is closed at its end.
func (c *Client) start(s session) (cancel context.CancelFunc, done chan struct{}, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, nil, ErrClosed
	}
	ctx, cancel := context.WithCancel(c.ctx)
	done = make(chan struct{})
	c.wg.Add(1)
	go func() {
		defer c.wg.Done()
		defer close(done)
		defer cancel()
		c.run(ctx, s)
	}()
	return cancel, done, nil
}

// Declare creates a topic, or finds it if it exists. An existing topic with another partition count is
// ErrTopicExistsMismatch, a name that is not allowed ErrInvalidTopic.
func (c *Client) Declare(ctx context.Context, name string, opts DeclareOptions) (Topic, error) {
	if err := protocol.ValidateTopic([]byte(name)); err != nil {
		return Topic{}, fmt.Errorf("declare: %w", err)
	}
	m := protocol.Declare{Topic: []byte(name), Partitions: opts.Partitions}
	if len(opts.Settings) > 0 {
		if len(opts.Settings) > 0xFFFF {
			return Topic{}, fmt.Errorf("declare %q: settings of %d bytes, at most 65535 are possible", name, len(opts.Settings))
		}
		m.Flags |= protocol.DeclareFlagSettings
		m.Settings = opts.Settings
	}
	return c.declare(ctx, "declare", &m)
}

// Lookup finds a topic without ever creating it; ErrUnknownTopic if there is none. It also finds system topics, such as
// "$dlq.billing".
func (c *Client) Lookup(ctx context.Context, name string) (Topic, error) {
	if err := protocol.ValidateLookup([]byte(name)); err != nil {
		return Topic{}, fmt.Errorf("look up: %w", err)
	}
	return c.declare(ctx, "look up", &protocol.Declare{Topic: []byte(name), Flags: protocol.DeclareFlagLookup})
}

// DeleteTopic deletes a topic with everything in it. Deleting what does not exist may be ErrUnknownTopic; it is
// otherwise idempotent. A dead-letter topic, $dlq.<group>, is made anew when the next message needs it; while one is on its
// way there deleting it is refused with protocol.CodeBackpressure.
func (c *Client) DeleteTopic(ctx context.Context, name string) error {
	if err := protocol.ValidateDelete([]byte(name)); err != nil {
		return fmt.Errorf("delete: %w", err)
	}
	_, err := c.declare(ctx, "delete", &protocol.Declare{Topic: []byte(name), Flags: protocol.DeclareFlagDelete})
	return err
}

func (c *Client) declare(ctx context.Context, what string, m *protocol.Declare) (Topic, error) {
	result, err := c.call(ctx, protocol.OpDeclare, m.AppendFrame(nil))
	if err != nil {
		return Topic{}, fmt.Errorf("%s %q: %w", what, m.Topic, err)
	}
	var r protocol.DeclareResult
	if err := r.Decode(result); err != nil {
		return Topic{}, fmt.Errorf("%s %q: %w", what, m.Topic, err)
	}
	return Topic{ID: r.TopicID, Name: string(m.Topic), Partitions: r.Partitions, Created: !r.Existed}, nil
}

// call sends one idempotent request over the control connection and waits for the answer. Broken connections, nodes that
// do not lead and retriable refusals are dealt with by trying again until ctx or callPatience ends.
func (c *Client) call(ctx context.Context, op protocol.Op, frame []byte) ([]byte, error) {
	var l *link
	select {
	case l = <-c.control:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() {
		c.idle.Reset(controlIdle)
		c.control <- l
	}()
	deadline := time.Now().Add(callPatience)
	way := c.newSearch()
	var last error
	for {
		if c.ctx.Err() != nil {
			return nil, ErrClosed
		}
		reused := l != nil
		result, addr, err := c.tryCall(ctx, &l, way, op, frame)
		if err == nil {
			return bytes.Clone(result), nil // it lies in the buffer of the connection, which is given back here
		}
		if end := ended(ctx); end != nil {
			return nil, outOfTime(end, last)
		}
		last = err
		code, refused := protocol.CodeOf(err)
		switch {
		case !refused && reused:
			continue // the old connection was dead; a new one is opened at once
		case refused && !fatal(err) && !elsewhere(err) && !code.Retriable():
			return nil, err
		}
		if l == nil {
			way.failed(addr, refused, err)
			if way.next() != "" {
				continue
			}
			if end := way.hopeless(); end != nil {
				return nil, end
			}
		}
		way.waitFor(err)
		pause := way.pause()
		if time.Now().Add(pause).After(deadline) {
			return nil, err
		}
		if ctxErr := sleep(ctx, pause); ctxErr != nil {
			return nil, outOfTime(ctxErr, err)
		}
	}
}

// ended is ctx.Err() that does not wait for the timer: a connection may notice the deadline first.
func ended(ctx context.Context) error {
	if deadline, ok := ctx.Deadline(); ok && ctx.Err() == nil && !time.Now().Before(deadline) {
		return context.DeadlineExceeded
	}
	return ctx.Err()
}

// outOfTime is the error of a call whose context has ended; last is what the attempt before failed with.
func outOfTime(ctxErr, last error) error {
	if last == nil {
		return ctxErr
	}
	return fmt.Errorf("%w; the last attempt: %w", ctxErr, last)
}

// tryCall makes one attempt on *l, which it opens if it is nil, and closes and clears when it is of no use any more. addr
// is the node that was tried.
func (c *Client) tryCall(ctx context.Context, l **link, way *search, op protocol.Op, frame []byte) (result []byte, addr string, err error) {
	if *l == nil {
		addr = way.next()
		opened, err := openLink(ctx, &c.cfg, addr, way.timeout())
		if err != nil {
			return nil, addr, err
		}
		*l = opened
	}
	used := *l
	stop := context.AfterFunc(ctx, used.close)
	stopClosing := context.AfterFunc(c.ctx, used.close)
	stopDoubting := c.doubtFrom(quietLimit, used)
	_, err = used.nc.Write(frame)
	if err == nil {
		result, err = used.answer(op)
	}
	stopDoubting()
	stopClosing()
	if !stop() {
		*l = nil // ctx has ended, the connection is closed
	}
	if err == nil {
		return result, used.addr, nil
	}
	var refusal *Error
	if isRefusal := errors.As(err, &refusal); !isRefusal || c.leaves(refusal) {
		used.close()
		*l = nil
	}
	return nil, used.addr, err
}

// leaves reports whether a refused request is tried on another connection, at another node if there is one.
func (c *Client) leaves(refusal *Error) bool {
	return refusal.Code.Closes() || fatal(refusal) || elsewhere(refusal) || (withoutQuorum(refusal.Code) && c.nodes.count() > 1)
}

// dropControl closes the control connection when it has been idle.
func (c *Client) dropControl() {
	select {
	case l := <-c.control:
		if l != nil {
			l.close()
		}
		c.control <- nil
	default: // in use
	}
}
