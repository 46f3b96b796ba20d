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

// queue holds what waits for one lane of a peer. Any goroutine puts frames in; the writer of the lane's connection takes
// them out. It takes nothing while there is no connection.
type queue struct {
	wake  chan struct{} // one element: the writer has something to do
	limit int64

	mu      sync.Mutex
	open    bool
	version uint8
	pending []outFrame
	// bytes counts pending frames and those that the writer has taken and not yet written.
	bytes   int64
	refused bool // since the queue was last half empty
	// flushed has the newest FLUSHED of each log: an older one says nothing that it doesn't.
	flushed []peerwire.Flushed
	pong    uint64
	hasPong bool
}

func newQueue(limit int64) *queue { return &queue{wake: make(chan struct{}, 1), limit: limit} }

func (q *queue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// start opens the queue for a connection that speaks version.
func (q *queue) start(version uint8) {
	q.mu.Lock()
	q.open, q.version = true, version
	q.mu.Unlock()
}

// stop closes the queue and drops what waits in it. The writer gives back the room of what it has taken.
func (q *queue) stop() {
	q.mu.Lock()
	dropped := q.pending
	q.open, q.pending, q.flushed, q.hasPong, q.refused = false, nil, q.flushed[:0], false, false
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

func (q *queue) commit() {
	q.mu.Unlock()
	q.signal()
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

func (q *queue) putPong(sent uint64) {
	q.mu.Lock()
	q.pong, q.hasPong = sent, q.open
	q.commit()
}

// take hands everything that waits to the writer: the transport's own frames and the FLUSHED ones appended to frames, and
// the others in exchange for the empty slice spare.
func (q *queue) take(small []outFrame, spare []outFrame) (own, frames []outFrame) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.hasPong {
		small = append(small, outFrame{})
		putU64(&small[len(small)-1], q.version, peerwire.KindPong, q.pong)
		q.hasPong = false
	}
	for i := range q.flushed {
		small = append(small, outFrame{})
		f := &small[len(small)-1]
		peerwire.PutFlushed(f.head[peerwire.HeaderLen:], &q.flushed[i])
		f.set(q.version, peerwire.KindFlushed, peerwire.FlushedLen, nil, nil)
	}
	q.flushed = q.flushed[:0]
	frames, q.pending = q.pending, spare[:0]
	return small, frames
}

// written gives room back and reports whether somebody waits for it.
func (q *queue) written(n int64) (writable bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.bytes -= n
	if writable = q.refused && q.bytes <= q.limit/2; writable {
		q.refused = false
	}
	return writable
}

// waiting returns the bytes in the queue and at the writer.
func (q *queue) waiting() int64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.bytes
}
