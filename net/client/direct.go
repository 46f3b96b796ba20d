package client

import (
	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/engine/coord"
)

// Whoever flushes a connection writes to its socket itself where that is a matter of one short system call: handing the
// connection to its loop costs two wake-ups more, which is a good part of the latency of a lone publish. Larger batches
// go through the loop, so that a shard is not kept from its journal.
const (
	directBytes  = 16 << 10
	directIovecs = 8
)

// tryWrite writes what is queued and reports whether nothing is left for the loop to do. Any goroutine.
func (c *conn) tryWrite() bool {
	if !c.direct.Load() || !c.writing.TryLock() {
		return false
	}
	defer c.writing.Unlock()
	if c.blocked {
		return false
	}
	var iovs [directIovecs]unix.Iovec
	c.mu.Lock()
	if c.closed || c.cut {
		c.mu.Unlock()
		return false
	}
	total := c.out.bytes
	iov, n := c.out.gather(iovs[:0], directBytes)
	c.mu.Unlock()
	if total > directBytes || n < total {
		return false
	}
	if n == 0 {
		return true
	}
	sent, err := writev(c.fd, iov)
	if err != nil {
		return false // the loop meets it again, and does what is to be done
	}
	var owners [directIovecs]coord.Releaser
	c.taken(sent, owners[:0])
	return sent == n
}

// taken takes sent bytes off the queue. The writing mutex is held; done is memory for the owners to release.
func (c *conn) taken(sent int, done []coord.Releaser) []coord.Releaser {
	c.srv.bytesOut.Add(uint64(sent))
	writable := false
	c.mu.Lock()
	done = c.out.consume(sent, done)
	c.count(outboundGrain)
	left, _ := c.toSend()
	c.outstanding.Store(int64(left))
	if c.above && left <= coord.OutboundPause/2 {
		c.above, writable = false, true
	}
	c.mu.Unlock()
	for i, owner := range done {
		owner.Release()
		done[i] = nil
	}
	if writable && c.announced {
		c.srv.opts.Handler.ClientWritable(c)
	}
	return done
}
