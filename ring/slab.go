package ring

import (
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const (
	// MinSlab is the capacity in bytes of the smallest slab: one block of direct I/O.
	MinSlab = BlockSize
	// MaxSlab is the capacity in bytes of the largest slab. It holds a round with the largest record.
	MaxSlab = 32 << 20

	minSlabShift = 12
	maxSlabShift = 25
	slabClasses  = maxSlabShift - minSlabShift + 1

	// retainDivisor bounds what a pool keeps mapped but unused to this fraction of its limit.
	retainDivisor = 4

	poisonByte = 0xDB
)

// Pool hands out off-heap buffers and bounds the memory behind them. All methods may be called from any goroutine.
//
// A slab is anonymous memory outside Go's heap: the kernel may write to it at any time without the garbage collector
// knowing, and it is aligned as O_DIRECT wants it. The price is that the garbage collector doesn't keep it alive
// either: a slice of a slab must not be used after the reference that protects it was released.
//
// Capacities are powers of two from MinSlab to MaxSlab. Every slab is a mapping of its own, so small values belong
// together in one slab, not in one each.
type Pool struct {
	limit  int64
	retain int64
	// heap is where slabs come from, nil for the kernel.
	heap *Heap

	inUse  atomic.Int64
	poison atomic.Bool

	mu sync.Mutex
	// mapped counts the bytes of slabs handed out and of slabs in free; never more than limit.
	mapped int64
	// cached counts the bytes of slabs in free.
	cached int64
	free   [slabClasses][]*Slab
}

// Slab is one reference-counted buffer of a Pool.
type Slab struct {
	pool  *Pool
	mem   []byte
	class int
	refs  atomic.Int32
}

// NewPool returns a pool whose slabs, those handed out and those kept for reuse together, never take more than
// limitBytes of memory.
func NewPool(limitBytes int64) *Pool {
	p := &Pool{limit: limitBytes, retain: limitBytes / retainDivisor}
	p.poison.Store(poisonBuild)
	return p
}

// NewPoolFrom returns a pool like NewPool's that takes its memory from heap; nil means the kernel.
func NewPoolFrom(heap *Heap, limitBytes int64) *Pool {
	p := NewPool(limitBytes)
	p.heap = heap
	return p
}

// SetPoison makes the pool overwrite slabs with 0xDB when their last reference is released, so that a use after the
// release shows. Builds with the tag poison do so from the start.
func (p *Pool) SetPoison(on bool) { p.poison.Store(on) }

// Limit returns the bound in bytes given to NewPool.
func (p *Pool) Limit() int64 { return p.limit }

// InUse returns the capacity in bytes of all slabs that are handed out.
func (p *Pool) InUse() int64 { return p.inUse.Load() }

// Get returns a slab with a capacity of at least n bytes and one reference, which the caller owns. The contents are
// undefined. It returns nil where the pool's limit doesn't allow another slab of this size or the kernel has no memory:
// the caller waits for a release or refuses its own caller. It also returns nil for n greater than MaxSlab.
func (p *Pool) Get(n int) *Slab {
	if n > MaxSlab {
		return nil
	}
	class := slabClass(n)
	size := classSize(class)

	p.mu.Lock()
	if list := p.free[class]; len(list) > 0 {
		s := list[len(list)-1]
		list[len(list)-1] = nil
		p.free[class] = list[:len(list)-1]
		p.cached -= size
		p.inUse.Add(size)
		p.mu.Unlock()
		s.refs.Store(1)
		return s
	}
	victims := p.evict(p.mapped + size - p.limit)
	if p.mapped+size > p.limit {
		p.mu.Unlock()
		unmapAll(victims)
		return nil
	}
	p.mapped += size
	p.inUse.Add(size)
	p.mu.Unlock()

	unmapAll(victims)
	mem, err := p.allocate(int(size))
	if err != nil {
		p.mu.Lock()
		p.mapped -= size
		p.inUse.Add(-size)
		p.mu.Unlock()
		return nil
	}
	s := &Slab{pool: p, mem: mem, class: class}
	s.refs.Store(1)
	return s
}

// allocate returns memory, aligned to a block.
func (p *Pool) allocate(size int) ([]byte, error) {
	if p.heap != nil {
		return p.heap.get(size), nil
	}
	return unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
}

// Trim gives the memory that is kept for reuse back to the operating system.
func (p *Pool) Trim() {
	p.mu.Lock()
	victims := p.evict(p.cached)
	p.mu.Unlock()
	unmapAll(victims)
}

// evict takes at least need bytes of unused slabs out of the pool, largest first, or all there are. The caller holds mu
// and unmaps what is returned after it let mu go.
func (p *Pool) evict(need int64) []*Slab {
	var victims []*Slab
	for class := slabClasses - 1; class >= 0 && need > 0; class-- {
		size := classSize(class)
		for need > 0 && len(p.free[class]) > 0 {
			last := len(p.free[class]) - 1
			victims = append(victims, p.free[class][last])
			p.free[class][last] = nil
			p.free[class] = p.free[class][:last]
			p.cached -= size
			p.mapped -= size
			need -= size
		}
	}
	return victims
}

// put takes back a slab without references.
func (p *Pool) put(s *Slab) {
	if p.poison.Load() {
		for i := range s.mem {
			s.mem[i] = poisonByte
		}
	}
	size := classSize(s.class)
	p.mu.Lock()
	p.inUse.Add(-size)
	if p.cached+size <= p.retain {
		p.cached += size
		p.free[s.class] = append(p.free[s.class], s)
		p.mu.Unlock()
		return
	}
	// The memory counts until it is gone: a Get in between must not exceed the limit.
	p.mu.Unlock()
	s.unmap()
	p.mu.Lock()
	p.mapped -= size
	p.mu.Unlock()
}

// Bytes returns the whole capacity of the slab. The slice is valid while the caller holds a reference.
func (s *Slab) Bytes() []byte { return s.mem }

// Retain adds a reference. The caller must hold one already.
func (s *Slab) Retain() {
	if s.refs.Add(1) <= 1 {
		panic("ring: Retain of a slab that was released")
	}
}

// Release drops a reference. With the last one the memory goes back to the pool and must not be touched any more.
func (s *Slab) Release() {
	switch refs := s.refs.Add(-1); {
	case refs == 0:
		s.pool.put(s)
	case refs < 0:
		panic("ring: slab released more often than retained")
	}
}

func (s *Slab) unmap() {
	mem := s.mem
	s.mem = nil
	if s.pool.heap != nil {
		s.pool.heap.put(mem)
		return
	}
	if err := unix.Munmap(mem); err != nil {
		panic(fmt.Sprintf("ring: munmap of a slab of %d bytes: %v", len(mem), err))
	}
}

func unmapAll(slabs []*Slab) {
	for _, s := range slabs {
		s.unmap()
	}
}

// slabClass returns the smallest class that holds n bytes.
func slabClass(n int) int {
	if n <= MinSlab {
		return 0
	}
	return bits.Len(uint(n-1)) - minSlabShift
}

// classSize returns the capacity in bytes of a class.
func classSize(class int) int64 { return MinSlab << class }
