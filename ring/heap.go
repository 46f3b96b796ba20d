package ring

import (
	"slices"
	"sync"
	"unsafe"
)

// Heap is memory for pools that lies in Go's heap and outlives them: a simulation that kills a process drops its pools with
// all their slabs, and takes the memory back with Reclaim. The zero value is ready. All methods may be called from any goroutine.
type Heap struct {
	mu sync.Mutex
	// free and out have the memory by class: unused, and at pools.
	free, out [slabClasses][][]byte
}

// Reclaim takes back all memory that pools have got. Nothing may use them or their slabs any more.
func (h *Heap) Reclaim() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for class := range h.out {
		h.free[class] = append(h.free[class], h.out[class]...)
		clear(h.out[class])
		h.out[class] = h.out[class][:0]
	}
}

// get returns memory of the size of a class, with undefined contents, aligned to a block.
func (h *Heap) get(size int) []byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	class := slabClass(size)
	var mem []byte
	if list := h.free[class]; len(list) > 0 {
		mem = list[len(list)-1]
		list[len(list)-1] = nil
		h.free[class] = list[:len(list)-1]
	} else {
		mem = make([]byte, size)
		if blockOffset(mem) != 0 { // the allocator promises nothing
			mem = make([]byte, size+BlockSize)
			mem = mem[BlockSize-blockOffset(mem):]
		}
		mem = mem[:size:size]
	}
	h.out[class] = append(h.out[class], mem)
	return mem
}

// put takes back what get has returned.
func (h *Heap) put(mem []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	class := slabClass(len(mem))
	first := unsafe.SliceData(mem)
	i := slices.IndexFunc(h.out[class], func(o []byte) bool { return unsafe.SliceData(o) == first })
	h.out[class] = slices.Delete(h.out[class], i, i+1)
	h.free[class] = append(h.free[class], mem)
}

// blockOffset returns how far behind the start of a block memory begins.
func blockOffset(mem []byte) uintptr {
	return uintptr(unsafe.Pointer(unsafe.SliceData(mem))) % BlockSize
}
