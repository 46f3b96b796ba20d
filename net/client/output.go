package client

import (
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/engine/coord"
)

// Blocks hold copied bytes on their way out. A connection with little to send takes a small one, so that thousands of
// slow readers cost little; under load the large ones keep the number of iovecs down.
const (
	smallBlock = 4 << 10
	largeBlock = 64 << 10
	// maxIovecs bounds one writev.
	maxIovecs = 64
)

type block struct{ b []byte }

var (
	smallBlocks = sync.Pool{New: func() any { return &block{make([]byte, 0, smallBlock)} }}
	largeBlocks = sync.Pool{New: func() any { return &block{make([]byte, 0, largeBlock)} }}
)

func (b *block) free() {
	switch cap(b.b) {
	case smallBlock:
		smallBlocks.Put(b)
	case largeBlock:
		largeBlocks.Put(b)
	default: // the copy of an owner's memory, made to measure
	}
}

// segment is a run of bytes to send: copied into a block, or lying in memory of an owner.
type segment struct {
	b     []byte // what is left of it
	block *block
	owner coord.Releaser
}

// outQueue is what a connection has to send, in order. The connection's mutex guards it, but the bytes that gather
// returned may be read without: they stay where they are until consume.
type outQueue struct {
	segs   []segment
	head   int // first segment in use
	bytes  int // to send, all of them
	copied int // of these, those in blocks
}

// copyIn appends a copy of frame.
func (q *outQueue) copyIn(frame []byte) {
	q.bytes += len(frame)
	q.copied += len(frame)
	for len(frame) > 0 {
		var s *segment
		if n := len(q.segs); n > q.head && q.segs[n-1].block != nil && cap(q.segs[n-1].b) > len(q.segs[n-1].b) {
			s = &q.segs[n-1]
		} else {
			blk := q.newBlock(len(frame))
			q.push(segment{b: blk.b[:0], block: blk})
			s = &q.segs[len(q.segs)-1]
		}
		n := min(len(frame), cap(s.b)-len(s.b))
		s.b = append(s.b, frame[:n]...)
		frame = frame[n:]
	}
}

func (q *outQueue) newBlock(n int) *block {
	if q.copied <= smallBlock && n <= smallBlock {
		return smallBlocks.Get().(*block)
	}
	return largeBlocks.Get().(*block)
}

// own appends b without copying it.
func (q *outQueue) own(b []byte, owner coord.Releaser) {
	q.bytes += len(b)
	q.push(segment{b: b, owner: owner})
}

func (q *outQueue) push(s segment) {
	if q.head > 0 && len(q.segs) == cap(q.segs) {
		n := copy(q.segs, q.segs[q.head:])
		clear(q.segs[n:])
		q.segs, q.head = q.segs[:n], 0
	}
	q.segs = append(q.segs, s)
}

// gather fills iov with the first segments of the queue, up to the one that reaches limit bytes, and returns what it
// filled and its bytes.
func (q *outQueue) gather(iov []unix.Iovec, limit int) ([]unix.Iovec, int) {
	iov = iov[:0]
	total := 0
	for i := q.head; i < len(q.segs) && len(iov) < cap(iov) && total < limit; i++ {
		b := q.segs[i].b
		if len(b) == 0 {
			continue
		}
		v := unix.Iovec{Base: unsafe.SliceData(b)}
		v.SetLen(len(b))
		iov = append(iov, v)
		total += len(b)
	}
	return iov, total
}

// consume takes the first n bytes off the queue. The owners of finished segments are appended to done, for the caller
// to release once it has let go of the mutex.
func (q *outQueue) consume(n int, done []coord.Releaser) []coord.Releaser {
	q.bytes -= n
	for q.head < len(q.segs) {
		s := &q.segs[q.head]
		if n < len(s.b) {
			s.b = s.b[n:]
			if s.block != nil {
				q.copied -= n
			}
			break
		}
		n -= len(s.b)
		if s.block != nil {
			q.copied -= len(s.b)
			s.block.free()
		} else {
			done = append(done, s.owner)
		}
		*s = segment{}
		q.head++
	}
	if q.head == len(q.segs) {
		q.segs, q.head = q.segs[:0], 0
	}
	return done
}

// borrowed is a segment in memory of an owner, and where it stands: the number of segments in use before it, which only
// consume changes.
type borrowed struct {
	b  []byte
	at int
}

// borrowedUpTo appends to list the first segments that lie in memory of owners, as far as no more than limit bytes would
// be copied ones if they were.
func (q *outQueue) borrowedUpTo(limit int, list []borrowed) []borrowed {
	room := limit - q.copied
	for i := q.head; i < len(q.segs); i++ {
		s := &q.segs[i]
		if s.owner == nil {
			continue
		}
		if room -= len(s.b); room < 0 {
			break
		}
		list = append(list, borrowed{s.b, i - q.head})
	}
	return list
}

// replace puts copies, which are to be in memory of their own, in the place of what borrowedUpTo returned; owners as in
// consume, which must not have been called in between.
func (q *outQueue) replace(copies []borrowed, done []coord.Releaser) []coord.Releaser {
	for _, c := range copies {
		s := &q.segs[q.head+c.at]
		done = append(done, s.owner)
		*s = segment{b: c.b, block: &block{c.b[:0]}}
		q.copied += len(c.b)
	}
	return done
}

// take appends everything that o has, and empties it.
func (q *outQueue) take(o *outQueue) {
	for _, s := range o.segs[o.head:] {
		q.push(s)
	}
	q.bytes += o.bytes
	q.copied += o.copied
	*o = outQueue{}
}

// drop empties the queue; owners as in consume.
func (q *outQueue) drop(done []coord.Releaser) []coord.Releaser {
	return q.consume(q.bytes, done)
}

// writev writes iov to a non-blocking socket and returns what it took, 0 and unix.EAGAIN if that was nothing.
func writev(fd int, iov []unix.Iovec) (int, error) {
	for {
		n, _, errno := unix.Syscall(unix.SYS_WRITEV, uintptr(fd), uintptr(unsafe.Pointer(&iov[0])), uintptr(len(iov)))
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}
