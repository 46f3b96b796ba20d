package simdisk

import (
	"path"
	"slices"

	"github.com/mortarmq/mortarmq/ring"
)

// Fault makes operations go wrong.
type Fault struct {
	// Kind is the kind of operation; 0 means any.
	Kind ring.Kind
	// Path is a path.Match pattern for the whole path or its last element; "" means any.
	Path string
	// Skip lets that many matching operations pass first; then Count are hit, all with 0.
	Skip, Count int

	// Err makes the operation fail. The sectors of a failed write may or may not be on the device; a failed Sync makes
	// nothing durable, ever.
	Err error
	// Short, for a Read, is the most bytes it returns.
	Short int
	// Misdirect, for a Read, is added to its offset: well-formed bytes from the wrong place.
	Misdirect int64
	// Stale, for a Read, is an earlier copy of the disk that the bytes come from.
	Stale *Disk
	// Mutate, for a Read, may change the bytes that were read at off.
	Mutate func(off int64, b []byte)
}

type fault struct {
	Fault
	seen, hit int
}

// Inject adds a fault and returns the function that takes it away. The first fault that matches an operation counts.
func (d *Disk) Inject(f Fault) (remove func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	added := &fault{Fault: f}
	d.faults = append(d.faults, added)
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.faults = slices.DeleteFunc(d.faults, func(x *fault) bool { return x == added })
	}
}

// matchFault returns the fault that hits an operation, if any.
func (d *Disk) matchFault(kind ring.Kind, p string) *Fault {
	for _, f := range d.faults {
		if f.Kind != 0 && f.Kind != kind || !f.matches(p) {
			continue
		}
		f.seen++
		if f.seen <= f.Skip || f.Count > 0 && f.hit >= f.Count {
			continue
		}
		f.hit++
		return &f.Fault
	}
	return nil
}

func (f *fault) matches(p string) bool {
	if f.Path == "" {
		return true
	}
	whole, _ := path.Match(f.Path, p)
	base, _ := path.Match(f.Path, path.Base(p))
	return whole || base
}

// SetCapacity changes how many bytes the blocks of all files may take; 0 means no bound.
func (d *Disk) SetCapacity(bytes int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.opts.CapacityBytes = bytes
}
