package peer

import (
	"math/bits"
	"sync"
)

const (
	minPayloadShift = 12 // 4 KiB
	maxPayloadShift = 25 // 32 MiB, more than a frame's body
	payloadClasses  = maxPayloadShift - minPayloadShift + 1

	// keptPayloads bounds the bytes of buffers that are kept for reuse.
	keptPayloads = 32 << 20
)

// Payload is the memory of a frame that was received. It belongs to the handler until Release.
type Payload struct {
	buf    []byte // the whole buffer
	data   []byte // what is handed out of it
	charge int64  // what the budget gets back
	budget *budget
	pool   *payloadPool
}

// Bytes returns the payload, which is valid until Release.
func (p *Payload) Bytes() []byte { return p.data }

// Release gives the memory back. It may be called from any goroutine, exactly once.
func (p *Payload) Release() {
	if p.data == nil {
		panic("peer: payload released twice")
	}
	p.data = nil
	p.budget.give(p.charge)
	p.pool.put(p)
}

// payloadPool keeps buffers of powers of two for reuse.
type payloadPool struct {
	mu   sync.Mutex
	kept int64
	free [payloadClasses][]*Payload
}

func payloadClass(n int) int {
	if n <= 1<<minPayloadShift {
		return 0
	}
	return bits.Len(uint(n-1)) - minPayloadShift
}

// get returns a payload with a buffer of n bytes or more; n is at most 32 MiB.
func (pp *payloadPool) get(n int) *Payload {
	class := payloadClass(n)
	pp.mu.Lock()
	if list := pp.free[class]; len(list) > 0 {
		p := list[len(list)-1]
		list[len(list)-1] = nil
		pp.free[class] = list[:len(list)-1]
		pp.kept -= int64(len(p.buf))
		pp.mu.Unlock()
		return p
	}
	pp.mu.Unlock()
	return &Payload{pool: pp, buf: make([]byte, 1<<(minPayloadShift+class))}
}

// grow exchanges p, which is full, for a payload with a buffer of n bytes or more and the same content.
func (pp *payloadPool) grow(p *Payload, n int) *Payload {
	larger := pp.get(n)
	copy(larger.buf, p.buf)
	larger.budget, larger.charge = p.budget, p.charge
	pp.put(p)
	return larger
}

func (pp *payloadPool) put(p *Payload) {
	p.data, p.budget = nil, nil
	pp.mu.Lock()
	defer pp.mu.Unlock()
	if pp.kept+int64(len(p.buf)) > keptPayloads {
		return
	}
	class := payloadClass(len(p.buf))
	pp.free[class] = append(pp.free[class], p)
	pp.kept += int64(len(p.buf))
}

// budget bounds the bytes that a lane's handler has not released.
type budget struct {
	mu     sync.Mutex
	wake   sync.Cond
	limit  int64
	taken  int64
	closed bool
}

func newBudget(limit int64) *budget {
	b := &budget{limit: limit}
	b.wake.L = &b.mu
	return b
}

// take waits until n more bytes may be taken, which is also where nothing else is taken. It returns false once the budget
// is closed.
func (b *budget) take(n int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for !b.closed && b.taken > 0 && b.taken+n > b.limit {
		b.wake.Wait()
	}
	if b.closed {
		return false
	}
	b.taken += n
	return true
}

// force takes n bytes without waiting.
func (b *budget) force(n int64) {
	b.mu.Lock()
	b.taken += n
	b.mu.Unlock()
}

func (b *budget) give(n int64) {
	b.mu.Lock()
	b.taken -= n
	b.mu.Unlock()
	b.wake.Broadcast()
}

// set opens the budget or closes it, which ends everybody's waiting. What is taken stays taken.
func (b *budget) set(closed bool) {
	b.mu.Lock()
	b.closed = closed
	b.mu.Unlock()
	b.wake.Broadcast()
}
