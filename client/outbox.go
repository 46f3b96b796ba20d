package client

import (
	"io"
	"net"
	"runtime"
	"sync"
)

const (
	chunkSize     = 64 << 10 // frames are gathered into buffers of this size; a larger frame gets one of its own
	maxFreeChunks = 64       // empty buffers kept for reuse
	maxWritev     = 16       // buffers per write
)

// chunk is a buffer that holds whole frames back to back. Its array never moves, so that the writer can send one part
// while senders append behind it. It is reused when nobody refers to it.
type chunk struct {
	buf     []byte
	written int // how much of buf the writer has taken
	refs    int // unanswered messages in it, and the writer while it writes
}

// outbox is the stream of frames to a connection: senders append under the lock, one writer goroutine per connection
// sends everything that has gathered in one call.
type outbox struct {
	mu     *sync.Mutex // the owner's
	cond   sync.Cond   // the writer waits on it
	idle   bool        // the writer waits
	stop   bool        // the writer must end
	queue  []*chunk    // with unwritten bytes, oldest first; the last may be the current one
	cur    *chunk      // appended to
	free   []*chunk
	sent   uint64 // frames or parts taken by the writer; for the keepalive
	buffer net.Buffers
}

func (o *outbox) init(mu *sync.Mutex) {
	o.mu = mu
	o.cond.L = mu
}

// reserve returns the chunk, with one reference added, to which the caller must append a frame of n bytes at off.
func (o *outbox) reserve(n int) (c *chunk, off int) {
	if o.cur == nil || cap(o.cur.buf)-len(o.cur.buf) < n {
		full := o.cur
		o.cur = o.take(n)
		if full != nil {
			o.recycle(full)
		}
	}
	c = o.cur
	if c.written == len(c.buf) { // not in the queue
		o.queue = append(o.queue, c)
	}
	c.refs++
	return c, len(c.buf)
}

func (o *outbox) take(n int) *chunk {
	if n > chunkSize {
		return &chunk{buf: make([]byte, 0, n)}
	}
	if last := len(o.free) - 1; last >= 0 {
		c := o.free[last]
		o.free = o.free[:last]
		return c
	}
	return &chunk{buf: make([]byte, 0, chunkSize)}
}

// release drops a reference.
func (o *outbox) release(c *chunk) {
	c.refs--
	o.recycle(c)
}

// recycle keeps c for reuse if nobody needs it any more.
func (o *outbox) recycle(c *chunk) {
	if c.refs != 0 || c == o.cur || c.written != len(c.buf) {
		return
	}
	if cap(c.buf) == chunkSize && len(o.free) < maxFreeChunks {
		c.buf, c.written = c.buf[:0], 0
		o.free = append(o.free, c)
	}
}

// wake makes the writer look for unwritten bytes.
func (o *outbox) wake() {
	if o.idle {
		o.idle = false
		o.cond.Signal()
	}
}

// reset forgets everything unwritten, for a new connection. Chunks that are still referred to live on with their
// owners; there must be no writer.
func (o *outbox) reset() {
	for _, c := range o.queue {
		c.written = len(c.buf)
	}
	clear(o.queue)
	o.queue = o.queue[:0]
	o.cur = nil
	o.stop = false
	o.idle = false
}

// write sends what is appended to w until halt or an error.
func (o *outbox) write(w io.Writer) error {
	var taken [maxWritev]*chunk
	o.mu.Lock()
	defer o.mu.Unlock()
	for {
		for len(o.queue) == 0 && !o.stop {
			o.idle = true
			o.cond.Wait()
			if len(o.queue) > 0 && !o.stop { // let those who are about to send do so: one write for all
				o.mu.Unlock()
				runtime.Gosched()
				o.mu.Lock()
			}
		}
		o.idle = false
		if o.stop {
			return nil
		}
		n := min(len(o.queue), maxWritev)
		o.buffer = o.buffer[:0]
		for i, c := range o.queue[:n] {
			taken[i] = c
			c.refs++
			o.buffer = append(o.buffer, c.buf[c.written:])
			c.written = len(c.buf)
		}
		rest := copy(o.queue, o.queue[n:])
		clear(o.queue[rest:])
		o.queue = o.queue[:rest]
		o.sent++
		whole := o.buffer
		o.mu.Unlock()
		var err error
		if n == 1 {
			_, err = w.Write(whole[0])
		} else {
			rest := whole // WriteTo consumes it
			_, err = rest.WriteTo(w)
		}
		o.mu.Lock()
		for i, c := range taken[:n] {
			o.release(c)
			taken[i] = nil
		}
		clear(whole)
		if err != nil {
			return err
		}
	}
}

// start writes to l on a goroutine of its own until halt or an error, which closes l: its reader reports it. written is closed
// at the end.
func (o *outbox) start(l *link) (written chan struct{}) {
	written = make(chan struct{})
	go func() {
		defer close(written)
		if err := o.write(l.nc); err != nil {
			l.close()
		}
	}()
	return written
}

// halt ends the writer after the write that it is in.
func (o *outbox) halt() {
	o.stop = true
	o.cond.Broadcast()
}

// ring is a queue in a growing circular buffer.
type ring[T any] struct {
	items []T // its length is a power of two
	head  int
	n     int
}

func (r *ring[T]) len() int { return r.n }

func (r *ring[T]) push(v T) {
	if r.n == len(r.items) {
		r.grow()
	}
	r.items[(r.head+r.n)&(len(r.items)-1)] = v
	r.n++
}

// pushFront puts v before the others.
func (r *ring[T]) pushFront(v T) {
	if r.n == len(r.items) {
		r.grow()
	}
	r.head = (r.head - 1) & (len(r.items) - 1)
	r.items[r.head] = v
	r.n++
}

func (r *ring[T]) grow() {
	items := make([]T, max(16, 2*len(r.items)))
	for i := range r.n {
		items[i] = *r.at(i)
	}
	r.items, r.head = items, 0
}

// at returns the i-th element from the front.
func (r *ring[T]) at(i int) *T { return &r.items[(r.head+i)&(len(r.items)-1)] }

// pop takes the first element; there must be one.
func (r *ring[T]) pop() T {
	var zero T
	v := r.items[r.head]
	r.items[r.head] = zero
	r.head = (r.head + 1) & (len(r.items) - 1)
	r.n--
	return v
}
