package ring

import (
	"math/rand/v2"
	"sync"
	"testing"
	"unsafe"
)

func TestPool_SlabsAreAlignedPowersOfTwo(t *testing.T) {
	slabsAreAlignedPowersOfTwo(t, testPool(t))
}

func TestHeap_SlabsAreAlignedPowersOfTwo(t *testing.T) {
	p := NewPoolFrom(&Heap{}, 2*MaxSlab)
	slabsAreAlignedPowersOfTwo(t, p)
	p.Trim()
	if p.mapped != 0 {
		t.Errorf("%d bytes are counted after all was given back", p.mapped)
	}
}

func TestHeap_MemoryOfPoolsThatAreGoneIsUsedAgain(t *testing.T) {
	h := &Heap{}
	a, b := slab(t, NewPoolFrom(h, MaxSlab), BlockSize), slab(t, NewPoolFrom(h, MaxSlab), BlockSize)
	first, second := unsafe.SliceData(a.Bytes()), unsafe.SliceData(b.Bytes())
	if first == second {
		t.Fatal("two slabs share memory")
	}
	h.Reclaim()
	p := NewPoolFrom(h, MaxSlab)
	c, d := unsafe.SliceData(slab(t, p, BlockSize).Bytes()), unsafe.SliceData(slab(t, p, BlockSize).Bytes())
	if c == d || c != first && c != second || d != first && d != second {
		t.Error("memory that was reclaimed isn't used again")
	}
}

func slabsAreAlignedPowersOfTwo(t *testing.T, p *Pool) {
	t.Helper()
	for _, c := range []struct{ n, want int }{
		{-1, 4 << 10}, {0, 4 << 10}, {1, 4 << 10}, {4096, 4 << 10}, {4097, 8 << 10}, {64 << 10, 64 << 10},
		{64<<10 + 1, 128 << 10}, {17 << 20, 32 << 20}, {MaxSlab, MaxSlab},
	} {
		s := slab(t, p, c.n)
		if got := len(s.Bytes()); got != c.want || cap(s.Bytes()) != c.want {
			t.Errorf("Get(%d): %d bytes, want %d", c.n, got, c.want)
		}
		if addr := uintptr(unsafe.Pointer(unsafe.SliceData(s.Bytes()))); addr%BlockSize != 0 {
			t.Errorf("Get(%d): address %#x isn't aligned", c.n, addr)
		}
		s.Release()
	}
	if p.Get(MaxSlab+1) != nil {
		t.Error("a slab larger than MaxSlab")
	}
}

func TestPool_RefusesBeyondItsLimit(t *testing.T) {
	p := NewPool(64 << 10)
	a, b := slab(t, p, 32<<10), slab(t, p, 32<<10)
	if p.InUse() != 64<<10 || p.Limit() != 64<<10 {
		t.Errorf("%d of %d in use", p.InUse(), p.Limit())
	}
	if p.Get(1) != nil {
		t.Error("a slab beyond the limit")
	}
	a.Release()
	c := slab(t, p, 16<<10)
	c.Release()
	b.Release()
	if p.InUse() != 0 {
		t.Errorf("%d in use after all releases", p.InUse())
	}
	// What is kept for reuse gives way to another size.
	d := slab(t, p, 64<<10)
	d.Release()
	if p.mapped != 0 {
		t.Errorf("%d bytes kept, more than a quarter of the limit", p.mapped)
	}
}

func TestPool_ReusesReleasedSlabs(t *testing.T) {
	p := testPool(t)
	s := slab(t, p, BlockSize)
	addr := unsafe.SliceData(s.Bytes())
	s.Release()
	s = slab(t, p, BlockSize)
	if unsafe.SliceData(s.Bytes()) != addr {
		t.Error("not reused")
	}
	for i, b := range s.Bytes() {
		if b != poisonByte {
			t.Fatalf("byte %d of a released slab is %#x", i, b)
		}
	}
	s.Release()
	if n := testing.AllocsPerRun(100, func() { p.Get(BlockSize).Release() }); n != 0 {
		t.Errorf("%v allocations for Get and Release", n)
	}
	p.Trim()
	if p.mapped != 0 || p.cached != 0 {
		t.Errorf("%d bytes mapped, %d cached after Trim", p.mapped, p.cached)
	}
}

func TestSlab_WrongReferenceCountPanics(t *testing.T) {
	for name, f := range map[string]func(*Slab){
		"release": func(s *Slab) { s.Release() },
		"retain":  func(s *Slab) { s.Retain() },
	} {
		p := testPool(t)
		s := slab(t, p, 1)
		s.Retain()
		s.Release()
		s.Release()
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s of a released slab: no panic", name)
				}
			}()
			f(s)
		}()
	}
}

// Random traffic from several goroutines: nobody sees another's bytes, and the accounts add up.
func TestPool_ConcurrentUse(t *testing.T) {
	const limit = 8 << 20
	p := NewPool(limit)
	p.SetPoison(true)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(1, uint64(g)))
			var held []*Slab
			for range 3000 {
				if len(held) > 0 && rnd.IntN(2) == 0 {
					i := rnd.IntN(len(held))
					s := held[i]
					held[i] = held[len(held)-1]
					held = held[:len(held)-1]
					if b := s.Bytes(); b[0] != byte(g) || b[len(b)-1] != byte(g) {
						t.Errorf("a slab was changed by another")
					}
					s.Release()
					continue
				}
				s := p.Get(1 << rnd.IntN(21))
				if s == nil {
					continue
				}
				s.Bytes()[0], s.Bytes()[len(s.Bytes())-1] = byte(g), byte(g)
				held = append(held, s)
				if used := p.InUse(); used > limit {
					t.Errorf("%d bytes in use", used)
				}
			}
			for _, s := range held {
				s.Release()
			}
		})
	}
	wg.Wait()
	if p.InUse() != 0 || p.mapped != p.cached || p.cached > limit/retainDivisor {
		t.Errorf("in use %d, mapped %d, cached %d", p.InUse(), p.mapped, p.cached)
	}
	p.Trim()
}
