package client

import (
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// maxStop bounds how long a connection may wait for its last answers during a shutdown; the context of Shutdown usually
// ends it earlier.
const maxStop = time.Hour

// slowSamples is how often a full socket is looked at within the slow-consumer time.
const slowSamples = 8

// due is the first moment at which expire could have something to do.
func (c *conn) due() time.Duration {
	o := &c.srv.opts
	var due time.Duration
	switch c.phase {
	case phaseConnecting:
		due = c.opened + o.AuthTimeout
	case phaseOpen:
		due = c.heard + o.Keepalive
	case phaseDenied, phaseClosing, phaseLinger:
		due = c.until
	}
	if c.part.active() {
		due = min(due, c.partSince+o.HalfFrame)
	}
	if c.blocked && c.phase < phaseClosing {
		due = min(due, c.sampled+o.SlowConsumer/slowSamples)
	}
	if c.blocked {
		due = min(due, c.unpin)
	}
	return due
}

// sample notes whether the client has taken bytes since the last look. The socket alone does not tell: it is writable
// again only when a third of the kernel's buffer is free, which a client that reads slowly may need minutes for.
func (c *conn) sample() {
	c.sampled = c.loop.now
	if n := unsent(c.fd); n != c.kernelQueue {
		c.kernelQueue, c.progress = n, c.loop.now
	}
}

// expire does what is due. False: the connection is to be destroyed.
func (c *conn) expire() bool {
	o, now := &c.srv.opts, c.loop.now
	stuck := c.blocked && c.phase < phaseClosing
	if stuck {
		c.sample()
	}
	if c.blocked && now >= c.unpin {
		c.copyBorrowed()
	}
	if stuck && now-c.progress >= o.SlowConsumer {
		// Whatever the connection's phase, its bytes do not leave; nor may the ERR, but it is tried.
		c.srv.slowClosed.Add(1)
		c.srv.debug(c, "closed: the client takes no bytes")
		c.Shut(protocol.CodeSlowConsumer, 0, "")
		c.closing(now + o.Linger)
		return true
	}
	if c.part.active() && now-c.partSince >= o.HalfFrame {
		c.srv.debug(c, "closed: a frame stayed incomplete")
		return false
	}
	switch c.phase {
	case phaseConnecting:
		if now-c.opened >= o.AuthTimeout {
			c.srv.debug(c, "closed: no valid CONNECT in time")
			c.refuse(protocol.CodeAuthTimeout, 0, "")
		}
	case phaseDenied:
		if now >= c.until {
			c.refuse(protocol.CodeAuthFailed, protocol.OpConnect, "")
		}
	case phaseOpen:
		if now-c.heard >= o.Keepalive {
			c.srv.debug(c, "closed: silent for longer than the keepalive")
			return false
		}
		c.trim()
	case phaseClosing:
		if now >= c.until {
			return c.giveUp()
		}
	case phaseLinger:
		return now < c.until
	}
	return true
}

// giveUp ends phaseClosing: the answers that are still missing are not waited for.
func (c *conn) giveUp() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cut || c.final == nil {
		return false
	}
	c.end(c.final)
	c.until = c.loop.now + c.srv.opts.Linger
	return true
}
