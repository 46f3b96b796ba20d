package peer

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// faultyNet makes the connections of a node's dialler and breaks them as a test wants.
type faultyNet struct {
	// cutAfter ends each new connection when it has written so many bytes; 0 = never.
	cutAfter atomic.Int64
	// flipAt flips a bit of the byte at this offset of what each new connection writes; 0 = never.
	flipAt atomic.Int64
	// silent connections drop what is written and what arrives, without an error: the cable is cut.
	silent atomic.Bool

	mu    sync.Mutex
	conns []*faultyConn
}

// dial takes the place of Options.Dial.
func (f *faultyNet) dial(ctx context.Context, addr string) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	c := &faultyConn{Conn: conn, net: f, cutAfter: f.cutAfter.Load(), flipAt: f.flipAt.Load()}
	f.mu.Lock()
	f.conns = append(f.conns, c)
	f.mu.Unlock()
	return c, nil
}

// dials returns how many connections were made.
func (f *faultyNet) dials() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.conns)
}

type faultyConn struct {
	net.Conn
	net              *faultyNet
	cutAfter, flipAt int64
	written          int64 // the writer's
}

func (c *faultyConn) Write(b []byte) (int, error) {
	if c.net.silent.Load() {
		return len(b), nil
	}
	if at := c.flipAt - 1 - c.written; c.flipAt > 0 && at >= 0 && at < int64(len(b)) {
		flipped := append([]byte(nil), b...)
		flipped[at] ^= 0x10
		b = flipped
	}
	if c.cutAfter > 0 && c.written+int64(len(b)) > c.cutAfter {
		n, _ := c.Conn.Write(b[:c.cutAfter-c.written])
		c.written += int64(n)
		_ = c.Close()
		return n, net.ErrClosed
	}
	n, err := c.Conn.Write(b)
	c.written += int64(n)
	return n, err
}

func (c *faultyConn) Read(b []byte) (int, error) {
	for {
		n, err := c.Conn.Read(b)
		if err != nil || !c.net.silent.Load() {
			return n, err
		}
	}
}

// quick are timeouts for tests in which connections die.
func quick(o *Options) {
	o.PingInterval, o.IdleTimeout, o.HandshakeTimeout = 20*time.Millisecond, 400*time.Millisecond, 2*time.Second
	o.BackoffMin, o.BackoffMax = time.Millisecond, 10*time.Millisecond
}

// alternates fails the test unless connections and their ends take turns, on every lane.
func alternates(t *testing.T, n *node) {
	t.Helper()
	n.rec.mu.Lock()
	defer n.rec.mu.Unlock()
	type key struct {
		peer, lane any
	}
	up := make(map[key]bool)
	for i, e := range n.rec.events {
		k := key{e.from, e.lane}
		switch e.what {
		case "connected":
			if up[k] {
				t.Errorf("event %d of node %d: connected twice on lane %v", i, n.id, e.lane)
			}
			up[k] = true
		case "disconnected":
			if !up[k] {
				t.Errorf("event %d of node %d: disconnected twice on lane %v", i, n.id, e.lane)
			}
			up[k] = false
		case "writable":
		default:
			if !up[k] {
				t.Errorf("event %d of node %d: %s without a connection", i, n.id, e.what)
			}
		}
	}
}
