package simdisk

import (
	"path"
	"slices"
	"time"

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

	// Delay adds to the time that the operation takes, where the disk has a clock. Hang keeps it from completing until the
	// fault is taken away. A fault with nothing else counts beside the others.
	Delay time.Duration
	Hang  bool

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

// Inject adds a fault and returns the function that takes it away. Of those that match an operation the first one counts
// that does more than delay it.
func (d *Disk) Inject(f Fault) (remove func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	added := &fault{Fault: f}
	d.faults = append(d.faults, added)
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		is := func(x *fault) bool { return x == added }
		d.faults = slices.DeleteFunc(d.faults, is)
		for _, q := range d.queues {
			for _, o := range q.inFlight {
				if !slices.Contains(o.hangs, added) {
					continue
				}
				if o.hangs = slices.DeleteFunc(o.hangs, is); len(o.hangs) == 0 {
					o.due = max(o.due, d.now())
				}
			}
		}
	}
}

// matchFaults finds the faults that hit an operation on a path.
func (d *Disk) matchFaults(o *flight, p string) {
	for _, f := range d.faults {
		delays := f.timing()
		if f.Kind != 0 && f.Kind != o.op.Kind || !f.matches(p) || o.fault != nil && !delays {
			continue
		}
		f.seen++
		if f.seen <= f.Skip || f.Count > 0 && f.hit >= f.Count {
			continue
		}
		f.hit++
		if !delays {
			o.fault = &f.Fault
		}
		if f.Hang {
			o.hangs = append(o.hangs, f)
		}
		if d.opts.Now != nil {
			o.due += f.Delay
		}
	}
}

// timing tells whether a fault only delays.
func (f *fault) timing() bool {
	return (f.Hang || f.Delay > 0) && f.Err == nil && f.Short == 0 && f.Misdirect == 0 && f.Stale == nil && f.Mutate == nil
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
