package client

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/panjf2000/gnet/v2"

	"github.com/mortarmq/mortarmq/engine/coord"
	"github.com/mortarmq/mortarmq/protocol"
)

// phase is where a connection stands; it only moves forward.
type phase uint8

const (
	phaseConnecting phase = iota // no valid CONNECT yet
	phaseDenied                  // wrong token, the answer waits for AuthDelay
	phaseOpen                    // authenticated
	phaseClosing                 // reads nothing more; closes when the answers it owes have left
	phaseLinger                  // everything has left and our side is shut; waits for the client to close
)

// conn is one client connection. It implements coord.Client.
type conn struct {
	id   uint64
	srv  *Server
	loop *loop
	gc   gnet.Conn // nil once gnet has closed it
	fd   int       // of gc, or a duplicate, see keepWriting; changed with the writing mutex held

	// Of the loop.
	eof         bool // the client has shut its side; seen by readInto
	kept        bool // fd is our own: gnet has closed its side
	phase       phase
	announced   bool   // the engine has seen a request, so it hears of the close
	polled      bool   // the poller knows the fd
	pulled      bool   // pull is set
	next        uint64 // number of the next request
	pull        uint64 // number of the last PULL
	interrupted uint64 // 1 + number of the last PULL that was interrupted
	final       []byte // the ERR that ends the connection, waiting for its turn in phaseClosing
	part        partial
	wheel       wheelEntry
	kernelQueue int // bytes that the kernel held for the client

	// Times on the server's clock.
	opened    time.Duration
	heard     time.Duration // end of the last complete frame
	partSince time.Duration // begin of the incomplete frame
	progress  time.Duration // the client last took bytes, or there were none
	sampled   time.Duration // kernelQueue was last looked at, while blocked
	unpin     time.Duration // what owners hold for the connection is copied, while blocked
	until     time.Duration // end of phaseDenied, phaseClosing, phaseLinger

	// Of any goroutine.
	queued      atomic.Bool   // in the loop's list, or being served
	unblocked   atomic.Bool   // set by the poller
	head        atomic.Uint64 // copy of answers.head, for the loop
	outstanding atomic.Int64  // copy of out.bytes
	pulls       atomic.Int32

	// direct: the connection is open, so that whoever flushes it may write to the socket, see tryWrite. writing is held
	// by whoever takes bytes off the queue; it is locked before mu. It guards blocked, which only the loop changes: the
	// socket is full, and the poller will say when it is not.
	direct  atomic.Bool
	writing sync.Mutex
	blocked bool

	mu      sync.Mutex
	closed  bool
	cut     bool // nothing more is queued: the last frame is there
	above   bool // outstanding was above coord.OutboundPause
	counted int  // of out.copied, in srv.outbound
	answers answerRing
	out     outQueue
	early   []early // subscriptions that the client does not know of yet
}

var _ coord.Client = (*conn)(nil)

var lastConnID atomic.Uint64

// ID implements coord.Client.
func (c *conn) ID() uint64 { return c.id }

// Pulls implements coord.Client.
func (c *conn) Pulls() *atomic.Int32 { return &c.pulls }

// Outstanding implements coord.Client. It counts answers too: they share the socket.
func (c *conn) Outstanding() int { return int(c.outstanding.Load()) }

// Complete implements coord.Client.
func (c *conn) Complete(req uint64, frame []byte) {
	c.mu.Lock()
	if c.closed || c.cut {
		c.mu.Unlock()
		return
	}
	c.answer(req, frame)
	c.mu.Unlock()
}

// answer is Complete under the mutex.
func (c *conn) answer(req uint64, frame []byte) {
	r := &c.answers
	if req != r.head {
		r.put(req, frame)
		c.overtakes(req, frame)
		return
	}
	r.at(req).open(req)
	c.out.copyIn(frame)
	r.head++
	c.drain()
}

// drain passes on the answers whose turn has come.
func (c *conn) drain() {
	for c.answers.pop(&c.out, c.srv.busyPub) {
		c.passed(c.answers.head - 1)
	}
	c.head.Store(c.answers.head)
	c.account()
}

// account publishes the size of the queue and keeps it in its bounds. It runs under the mutex after every append.
func (c *conn) account() {
	bytes, copied := c.toSend()
	c.outstanding.Store(int64(bytes))
	if bytes > coord.OutboundPause {
		c.above = true
	}
	c.count(outboundGrain)
	if copied > c.srv.opts.MaxOutbound || copied > minOutboundShare && c.srv.greedy(copied) {
		c.srv.slowClosed.Add(1)
		c.last(protocol.CodeSlowConsumer, 0, "")
	}
}

// count adds what the queue's copied bytes have changed by to the sum of all connections, if that is at least grain. It
// runs under the mutex.
func (c *conn) count(grain int) {
	_, copied := c.toSend()
	if d := copied - c.counted; d >= grain || -d >= grain {
		c.counted += d
		c.srv.outbound.Add(int64(d))
	}
}

// greedy tells whether a connection with copied bytes has more than what all connections together have left: the
// threshold falls as the memory fills, so that the sum stays below the limit whatever the order in which they grow
// ("Dynamic queue length thresholds for shared-memory packet switches", Choudhury and Hahne 1998, with alpha 1).
func (s *Server) greedy(copied int) bool {
	return int64(copied) > s.opts.OutboundBytes-s.outbound.Load()
}

// Push implements coord.Client.
func (c *conn) Push(frames []byte) {
	c.mu.Lock()
	if !c.closed && !c.cut {
		c.queueOf(frames).copyIn(frames)
		c.account()
	}
	c.mu.Unlock()
}

// PushOwned implements coord.Client.
func (c *conn) PushOwned(frames []byte, owner coord.Releaser) {
	c.mu.Lock()
	gone := c.closed || c.cut
	if !gone {
		c.queueOf(frames).own(frames, owner)
		c.account()
	}
	c.mu.Unlock()
	if gone {
		owner.Release()
	}
}

// PushValue implements coord.Client: head is copied and value sent from where it lies, with nothing in between.
func (c *conn) PushValue(head, value []byte, owner coord.Releaser) {
	c.mu.Lock()
	gone := c.closed || c.cut
	if !gone {
		q := c.queueOf(head)
		q.copyIn(head)
		q.own(value, owner)
		c.account()
	}
	c.mu.Unlock()
	if gone {
		owner.Release()
	}
}

// Flush implements coord.Client.
func (c *conn) Flush() {
	// While the connection is queued the loop is going to look at it anyway: it clears the mark before it looks.
	if c.queued.Load() || c.tryWrite() {
		return
	}
	c.later()
}

// later has the loop look at the connection.
func (c *conn) later() {
	if c.queued.CompareAndSwap(false, true) {
		c.loop.post(c)
	}
}

// Shut implements coord.Client. Answers that are not ready are never sent.
func (c *conn) Shut(code protocol.ErrorCode, op protocol.Op, text string) {
	c.mu.Lock()
	if !c.closed && !c.cut {
		c.last(code, op, text)
	}
	c.mu.Unlock()
	c.Flush()
}

// last queues the connection's last frame, under the mutex; the loop closes the connection when it has left.
func (c *conn) last(code protocol.ErrorCode, op protocol.Op, text string) {
	c.end(protocol.AppendErr(nil, code, op, text))
}

func (c *conn) end(frame []byte) {
	c.cut = true
	c.out.copyIn(frame)
	c.outstanding.Store(int64(c.out.bytes))
}

// The rest of this file runs on the loop.

// request returns the number of the next request.
func (c *conn) request() uint64 {
	if c.next-c.head.Load() >= uint64(len(c.answers.slots)) { // the slice itself changes on the loop only
		c.mu.Lock()
		if c.next-c.answers.head >= uint64(len(c.answers.slots)) {
			c.answers.grow()
		}
		c.mu.Unlock()
	}
	req := c.next
	c.next++
	return req
}

// pending is the number of requests whose answers have not been queued.
func (c *conn) pending() int { return int(c.next - c.head.Load()) }

// reading reports whether frames are still taken in.
func (c *conn) reading() bool { return c.phase == phaseConnecting || c.phase == phaseOpen }

// refuse answers what the client did wrong, in its turn, and closes the connection behind that.
func (c *conn) refuse(code protocol.ErrorCode, op protocol.Op, text string) {
	c.interruptPulls()
	req := c.request()
	c.final = protocol.AppendErr(nil, code, op, text)
	c.Complete(req, c.final)
	c.closing(c.loop.now + c.srv.opts.AnswerGrace)
}

// closing stops the intake. What is owed leaves, until at the latest.
func (c *conn) closing(until time.Duration) {
	if c.phase >= phaseClosing {
		return
	}
	c.phase = phaseClosing
	c.direct.Store(false) // the loop must see the last byte leave
	c.until = until
	c.part.drop()
}

// write sends what is queued and moves a closing connection along. It reports false when the connection is to be
// destroyed.
func (c *conn) write() bool {
	c.writing.Lock()
	if c.blocked && c.unblocked.Swap(false) {
		c.blocked = false
	}
	ok, empty, cut := c.send()
	c.writing.Unlock()
	if !ok {
		return false
	}
	if cut && c.phase < phaseClosing {
		c.closing(c.loop.now + c.srv.opts.Linger)
	}
	if c.phase == phaseClosing && empty && cut {
		c.phase = phaseLinger
		c.until = c.loop.now + c.srv.opts.Linger
		// Closing now would answer bytes that the client is still sending with a reset, and a reset throws away what
		// the client has not read yet: the error it should see. So only our side closes, and the loop goes on
		// throwing away what comes until the client closes too; it may have done so.
		return !c.kept && shutdownWrite(c.fd)
	}
	return true
}

// send writes until the queue is empty, the socket is full or the connection's turn is over, with the writing mutex held.
// ok is false when the socket is broken; cut says that nothing more will be queued.
func (c *conn) send() (ok, empty, cut bool) {
	l := c.loop
	left := turnBytes
	for {
		var n int
		c.mu.Lock()
		l.iov, n = c.out.gather(l.iov, left)
		empty = c.out.bytes == 0
		if empty && c.next == c.answers.head && c.phase == phaseClosing {
			c.cut = true // a push that comes now would find our side shut
		}
		cut = c.cut
		c.mu.Unlock()
		if empty {
			c.progress = l.now
			return true, true, cut
		}
		if c.blocked {
			return true, false, cut
		}
		if left <= 0 {
			c.later()
			return true, false, cut
		}
		sent, err := writev(c.fd, l.iov)
		clear(l.iov)
		if err != nil && !wouldBlock(err) {
			return false, false, cut
		}
		if sent > 0 {
			left -= sent
			c.progress = l.now
			l.done = c.taken(sent, l.done[:0])
		}
		if sent < n { // the socket is full
			c.blocked = true
			c.progress, c.sampled, c.kernelQueue = l.now, l.now, unsent(c.fd)
			c.unpin = l.now + unpinAfter
			c.srv.poller.arm(c)
		}
	}
}

// copyBorrowed gives the memory of owners back to them, with the rest of the bytes copied: a value of 16 KiB may lie in a
// slab a hundred times as large, and a reader that takes nothing would hold as many slabs as values. Values that do not
// fit in half of MaxOutbound any more stay where they are; they are about as large as their slabs.
func (c *conn) copyBorrowed() {
	c.unpin = c.loop.now + unpinAfter
	c.writing.Lock()
	defer c.writing.Unlock()
	c.mu.Lock()
	list := c.out.borrowedUpTo(c.srv.opts.MaxOutbound/2, nil)
	c.mu.Unlock()
	for i := range list { // only who holds the writing mutex takes bytes off the queue, so they stay without the other
		list[i].b = append(make([]byte, 0, len(list[i].b)), list[i].b...)
	}
	c.mu.Lock()
	done := c.out.replace(list, nil)
	if !c.closed && !c.cut {
		c.account()
	}
	c.mu.Unlock()
	for _, owner := range done {
		owner.Release()
	}
}

// release gives back everything when gnet has closed the connection.
func (c *conn) release() {
	c.part.drop()
	c.writing.Lock() // nobody writes to the descriptor once it may be another file's
	defer c.writing.Unlock()
	c.mu.Lock()
	c.closed = true
	done := c.dropEarly(c.out.drop(nil))
	c.count(1)
	c.answers = answerRing{head: c.answers.head}
	c.out.segs = nil
	c.outstanding.Store(0)
	c.mu.Unlock()
	for _, owner := range done {
		owner.Release()
	}
}

// trim gives back the memory that a burst has left behind on a connection that is idle now.
func (c *conn) trim() {
	c.mu.Lock()
	if c.next == c.answers.head && len(c.answers.slots) > minSlots {
		c.answers = answerRing{head: c.answers.head}
	}
	if c.out.bytes == 0 && cap(c.out.segs) > maxIovecs {
		c.out.segs = nil
	}
	c.mu.Unlock()
}
