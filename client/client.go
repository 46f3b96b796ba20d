package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

const (
	// controlIdle is how long the connection for Declare, Lookup and DeleteTopic is kept without a request: shorter than
	// the broker's patience, so that it needs no keepalive.
	controlIdle = 10 * time.Second
	// maxRedirects is how many times in a row a follower's hint is followed without a pause.
	maxRedirects = 4
	// maxCallAttempts bounds the attempts of Declare, Lookup and DeleteTopic, about a minute with the default backoff.
	maxCallAttempts = 8
)

// Client knows the brokers and opens Producers and Consumers on them. It may be used by several goroutines.
type Client struct {
	cfg    config
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup // the sessions of producers and consumers

	mu     sync.Mutex
	addrs  []string
	at     int    // the address in addrs to try next
	leader string // what a follower said; tried first
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

// Dial connects to a broker and authenticates. addr is host:port, or several of them separated by commas, the nodes of
// one cluster. ctx bounds the first connection only. With several addresses they are tried in turn, once each.
func Dial(ctx context.Context, addr string, opts ...Option) (*Client, error) {
	c := &Client{cfg: defaultConfig(), control: make(chan *link, 1)}
	for _, opt := range opts {
		opt(&c.cfg)
	}
	for a := range strings.SplitSeq(addr, ",") {
		if a = strings.TrimSpace(a); a != "" {
			c.addrs = append(c.addrs, a)
		}
	}
	if len(c.addrs) == 0 {
		return nil, errors.New("client: no address to connect to")
	}
	if err := c.cfg.validate(); err != nil {
		return nil, fmt.Errorf("client: %w", err)
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	var problems []error
	for range c.addrs {
		l, err := c.connect(ctx)
		if err == nil {
			c.idle = time.AfterFunc(controlIdle, c.dropControl)
			c.control <- l
			return c, nil
		}
		problems = append(problems, err)
		if fatal(err) || ctx.Err() != nil {
			break
		}
	}
	c.cancel()
	return nil, errors.Join(problems...)
}

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

// connect opens a connection to the leader, as far as it is known, otherwise to the next address. Each call is one
// attempt.
func (c *Client) connect(ctx context.Context) (*link, error) {
	c.mu.Lock()
	addr := c.leader
	if addr == "" {
		addr = c.addrs[c.at]
	}
	c.mu.Unlock()
	l, err := openLink(ctx, &c.cfg, addr)
	if err != nil {
		c.avoid(addr)
	}
	return l, err
}

// avoid makes the next attempt go elsewhere.
func (c *Client) avoid(addr string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leader == addr {
		c.leader = ""
		return
	}
	if c.addrs[c.at] == addr {
		c.at = (c.at + 1) % len(c.addrs)
	}
}

// redirect follows the hint of err, the refusal of a node that does not lead. It reports whether there was one.
func (c *Client) redirect(from string, err error) bool {
	leader, redirected := leaderOf(err)
	if !redirected {
		return false
	}
	c.avoid(from)
	c.mu.Lock()
	defer c.mu.Unlock()
	if leader != "" && leader != from {
		c.leader = leader
		return true
	}
	return false
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
	failures, redirects := 0, 0
	for {
		l, err := c.connect(ctx)
		if err == nil {
			var progress bool
			since := time.Now()
			stop := context.AfterFunc(ctx, l.close)
			progress, err = s.serve(l)
			stop()
			l.close()
			if progress || time.Since(since) > c.cfg.backoffMax {
				failures, redirects = 0, 0
			}
		}
		if ctx.Err() != nil {
			s.ended(ErrClosed)
			return
		}
		if fatal(err) {
			s.ended(err)
			return
		}
		if end := s.down(err); end != nil {
			s.ended(end)
			return
		}
		if l != nil && c.redirect(l.addr, err) && redirects < maxRedirects {
			redirects++
			continue
		}
		pause := c.cfg.backoff(failures)
		failures++
		c.cfg.logger.Warn("connection lost, reconnecting", "error", err, "pause", pause)
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
// otherwise idempotent.
func (c *Client) DeleteTopic(ctx context.Context, name string) error {
	if err := protocol.ValidateTopic([]byte(name)); err != nil {
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

// call sends one idempotent request over the control connection and waits for the answer. Broken connections,
// redirections and retriable refusals are tried again until ctx ends, at most maxCallAttempts times.
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
	var last error
	redirects := 0
	for attempt := 0; ; attempt++ {
		if c.ctx.Err() != nil {
			return nil, ErrClosed
		}
		reused := l != nil
		result, err := c.tryCall(ctx, &l, op, frame)
		if err == nil {
			return bytes.Clone(result), nil // it lies in the buffer of the connection, which is given back here
		}
		if ctx.Err() != nil {
			return nil, errors.Join(ctx.Err(), last)
		}
		last = err
		if attempt+1 >= maxCallAttempts {
			return nil, err
		}
		if leader, redirected := leaderOf(err); redirected {
			if leader != "" && redirects < maxRedirects {
				redirects++
				continue
			}
		} else if code, refused := protocol.CodeOf(err); refused && !code.Retriable() {
			return nil, err
		} else if !refused && reused {
			continue // the old connection was dead; a new one is opened at once
		}
		if err := sleep(ctx, c.cfg.backoff(attempt)); err != nil {
			return nil, errors.Join(err, last)
		}
	}
}

// tryCall makes one attempt on *l, which it opens if it is nil, and closes and clears when it is of no use any more.
func (c *Client) tryCall(ctx context.Context, l **link, op protocol.Op, frame []byte) ([]byte, error) {
	if *l == nil {
		opened, err := c.connect(ctx)
		if err != nil {
			return nil, err
		}
		*l = opened
	}
	used := *l
	stop := context.AfterFunc(ctx, used.close)
	stopClosing := context.AfterFunc(c.ctx, used.close)
	_, err := used.nc.Write(frame)
	var result []byte
	if err == nil {
		result, err = used.answer(op)
	}
	stopClosing()
	if !stop() {
		*l = nil // ctx has ended, the connection is closed
	}
	if err == nil {
		return result, nil
	}
	var refusal *Error
	if isRefusal := errors.As(err, &refusal); !isRefusal || refusal.Code.Closes() || refusal.Code == protocol.CodeStaleLeaderEpoch {
		used.close()
		*l = nil
		if !c.redirect(used.addr, err) {
			c.avoid(used.addr)
		}
	}
	return nil, err
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
