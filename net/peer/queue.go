package peer

import (
	"sync"

	"github.com/mortarmq/mortarmq/engine/peerwire"
)

// headRoom is the room for a frame's header and for what stands before a payload.
const headRoom = peerwire.HeaderLen + 48

// outFrame is a frame on its way to a peer.
type outFrame struct {
	head  [headRoom]byte // header, and the body's beginning up to n
	n     int
	rest  []byte            // the rest of the body
	owner peerwire.Releaser // of rest; nil where it belongs to nobody else
}

func (f *outFrame) bytes() int64 { return int64(f.n + len(f.rest)) }

func (f *outFrame) release() {
	if f.owner != nil {
		f.owner.Release()
	}
	f.rest, f.owner = nil, nil
}

// kind returns the frame's kind.
func (f *outFrame) kind() peerwire.Kind { return peerwire.Kind(f.head[2]) }

// set puts the header in front of a body whose first fixed bytes are in the head already.
func (f *outFrame) set(version uint8, k peerwire.Kind, fixed int, rest []byte, owner peerwire.Releaser) {
	peerwire.PutHeader(f.head[:], &peerwire.Header{Version: version, Kind: k, Len: fixed + len(rest)})
	f.n, f.rest, f.owner = peerwire.HeaderLen+fixed, rest, owner
}

// queue holds what waits for one lane of a peer. Any goroutine puts frames in. The writer of the lane's connection takes them
// out, or whoever puts in a small one writes it by itself (direct.go). It takes nothing while there is no connection.
type queue struct {
	wake  chan struct{} // one element: the writer has something to do
	limit int64

	mu      sync.Mutex
	open    bool
	version uint8
	// writing is set while somebody writes to the connection; nobody else does meanwhile.
	writing bool
	direct  *direct // nil where the connection can't be written to without waiting
	pending []outFrame
	// bytes counts pending frames and those that are being written.
	bytes   int64
	refused bool // since the queue was last half empty
	// flushed has the newest FLUSHED of each log: an older one says nothing that it doesn't.
	flushed []peerwire.Flushed
	// What the transport itself has to say: a PING's time, a PONG's; 0 = nothing.
	ping, pong uint64
}

func newQueue(limit int64) *queue { return &queue{wake: make(chan struct{}, 1), limit: limit} }

func (q *queue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// start opens the queue for a connection that speaks version.
func (q *queue) start(version uint8, d *direct) {
	q.mu.Lock()
	q.open, q.version, q.direct, q.writing = true, version, d, false
	q.mu.Unlock()
}

// stop closes the queue and drops what waits in it. Who writes gives back the room of what he has taken.
func (q *queue) stop() {
	q.mu.Lock()
	dropped := q.pending
	q.open, q.direct, q.refused = false, nil, false
	q.pending, q.flushed, q.ping, q.pong = nil, q.flushed[:0], 0, 0
	for i := range dropped {
		q.bytes -= dropped[i].bytes()
	}
	q.mu.Unlock()
	for i := range dropped {
		dropped[i].release()
	}
}

// reserve makes room for a frame of n bytes and returns it, locked: fill it in and call commit. It returns nil, unlocked,
// where the queue is closed or full.
func (q *queue) reserve(n int64) *outFrame {
	q.mu.Lock()
	if !q.open || len(q.pending) >= maxQueued || (q.bytes > 0 && q.bytes+n > q.limit) {
		q.refused = q.open
		q.mu.Unlock()
		return nil
	}
	q.bytes += n
	if len(q.pending) < cap(q.pending) {
		q.pending = q.pending[:len(q.pending)+1]
	} else {
		q.pending = append(q.pending, outFrame{})
	}
	return &q.pending[len(q.pending)-1]
}

// commit unlocks the queue and sees to it that what was put in is written.
func (q *queue) commit() {
	if !q.writeDirectly() {
		q.mu.Unlock()
		q.signal()
	}
}

// put queues a frame whose first fixed bytes are copied from body.
func (q *queue) put(k peerwire.Kind, body, rest []byte, owner peerwire.Releaser) bool {
	f := q.reserve(int64(peerwire.HeaderLen + len(body) + len(rest)))
	if f == nil {
		return false
	}
	copy(f.head[peerwire.HeaderLen:], body)
	f.set(q.version, k, len(body), rest, owner)
	q.commit()
	return true
}

// putFlushed takes the place of an older FLUSHED of the same log. It is never refused while there is a connection.
func (q *queue) putFlushed(f *peerwire.Flushed) bool {
	q.mu.Lock()
	if !q.open {
		q.mu.Unlock()
		return false
	}
	found := false
	for i := range q.flushed {
		if q.flushed[i].Log == f.Log {
			q.flushed[i], found = *f, true
			break
		}
	}
	if !found {
		q.flushed = append(q.flushed, *f)
	}
	q.commit()
	return true
}

// putPing and putPong queue those frames; neither value is ever 0.
func (q *queue) putPing(now uint64)  { q.putOwn(&q.ping, now) }
func (q *queue) putPong(sent uint64) { q.putOwn(&q.pong, sent) }

func (q *queue) putOwn(field *uint64, v uint64) {
	q.mu.Lock()
	if q.open {
		*field = v
	}
	q.mu.Unlock()
	q.signal()
}

// batch is what a writer has taken from the queue.
type batch struct {
	rest   []byte     // of a frame that was written in part
	small  []outFrame // the transport's own frames, FLUSHED
	frames []outFrame // the others
	// writable says that there is room again after frames were refused.
	writable bool
}

func (b *batch) empty() bool { return len(b.rest)+len(b.small)+len(b.frames) == 0 }

// waits reports whether the writer has something to do.
func (q *queue) waits() bool {
	return len(q.pending)+len(q.flushed) > 0 || q.ping+q.pong > 0 || q.refused || (q.direct != nil && len(q.direct.rest) > 0)
}

// take hands everything that waits to the writer, in exchange for the memory of what it took last. Unless b is empty
// afterwards, written must be called next.
func (q *queue) take(b *batch) {
	q.mu.Lock()
	defer q.mu.Unlock()
	b.rest, b.small, b.frames = nil, b.small[:0], b.frames[:0]
	b.writable = q.refused && q.bytes <= q.limit/2
	if b.writable {
		q.refused = false
	}
	if q.writing {
		return // who writes wakes the writer
	}
	if q.direct != nil {
		b.rest = q.direct.rest
	}
	b.frames, q.pending = q.pending, b.frames
	if q.pong > 0 {
		putU64(b.add(), q.version, peerwire.KindPong, q.pong)
	}
	if q.ping > 0 {
		putU64(b.add(), q.version, peerwire.KindPing, q.ping)
	}
	for i := range q.flushed {
		b.add().setFlushed(q.version, &q.flushed[i])
	}
	q.flushed, q.ping, q.pong = q.flushed[:0], 0, 0
	q.writing = !b.empty()
}

func (b *batch) add() *outFrame {
	b.small = append(b.small, outFrame{})
	return &b.small[len(b.small)-1]
}

func (f *outFrame) setFlushed(version uint8, flushed *peerwire.Flushed) {
	peerwire.PutFlushed(f.head[peerwire.HeaderLen:], flushed)
	f.set(version, peerwire.KindFlushed, peerwire.FlushedLen, nil, nil)
}

// written gives back the room of what the writer has taken, and the connection.
func (q *queue) written(n int64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.bytes -= n
	q.writing = false
	if q.direct != nil {
		q.direct.rest = nil
	}
}

// waiting returns the bytes in the queue and at the writer.
func (q *queue) waiting() int64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.bytes
}
