package client

import (
	"sync"
	"sync/atomic"

	"github.com/mortarmq/mortarmq/protocol"
)

// frameClasses are the capacities of the buffers that incomplete frames are assembled in. The last holds any frame.
// A buffer moves up a class only when it is full, so its capacity is at most four times what has really arrived (or the
// smallest class): a declared length alone allocates nothing.
var frameClasses = [...]int{4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, protocol.MaxFrameSize}

// framePool hands out frame buffers and counts the memory that is in use, in bytes of capacity.
type framePool struct {
	maxPartial, maxOwned int64
	partial, owned       atomic.Int64
	classes              [len(frameClasses)]sync.Pool
}

// frameBuf holds the first bytes of a frame, from its length field on.
type frameBuf struct {
	b     []byte // len = what has arrived
	class int
	pool  *framePool
	owned bool // counted under owned, not partial
}

// get returns an empty buffer with room for at least n bytes, n <= protocol.MaxFrameSize, or nil if the budget for
// incomplete frames is used up.
func (p *framePool) get(n int) *frameBuf {
	class := 0
	for frameClasses[class] < n {
		class++
	}
	size := int64(frameClasses[class])
	if p.partial.Add(size) > p.maxPartial {
		p.partial.Add(-size)
		return nil
	}
	f, _ := p.classes[class].Get().(*frameBuf)
	if f == nil {
		f = &frameBuf{b: make([]byte, 0, frameClasses[class]), class: class, pool: p}
	}
	f.owned = false
	return f
}

// own moves f from the budget of incomplete frames to that of frames the engine holds. False: the latter is used up.
func (f *frameBuf) own() bool {
	size := int64(cap(f.b))
	if f.pool.owned.Add(size) > f.pool.maxOwned {
		f.pool.owned.Add(-size)
		return false
	}
	f.pool.partial.Add(-size)
	f.owned = true
	return true
}

// Release gives the buffer back; it must not be used afterwards. It implements coord.Releaser.
func (f *frameBuf) Release() {
	if f.owned {
		f.pool.owned.Add(-int64(cap(f.b)))
	} else {
		f.pool.partial.Add(-int64(cap(f.b)))
	}
	f.b = f.b[:0]
	f.pool.classes[f.class].Put(f)
}

// partial is a frame of which a part has arrived. The first bytes, up to the op, lie in head: a buffer is taken only
// for a frame whose length and op are known and allowed.
type partial struct {
	head  [protocol.HeaderSize]byte
	n     int // bytes in head, while buf is nil
	total int // size of the whole frame, once buf is there
	buf   *frameBuf
}

func (p *partial) active() bool { return p.n > 0 || p.buf != nil }

// room makes sure that buf can take more, of which arriving bytes are at hand, and returns how many of them to take.
// It returns 0 if the budget is used up.
func (p *partial) room(pool *framePool, arriving int) int {
	have := p.n
	if p.buf != nil {
		have = len(p.buf.b)
	}
	take := min(arriving, p.total-have)
	if p.buf != nil && cap(p.buf.b)-have >= take {
		return take
	}
	next := pool.get(have + take)
	if next == nil {
		return 0
	}
	if p.buf != nil {
		next.b = append(next.b, p.buf.b...)
		p.buf.Release()
	} else {
		next.b = append(next.b, p.head[:p.n]...)
		p.n = 0
	}
	p.buf = next
	return take
}

// drop forgets the frame.
func (p *partial) drop() {
	if p.buf != nil {
		p.buf.Release()
	}
	*p = partial{}
}
