package engine

import (
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/ring"
)

// Device is the disk as one goroutine of the engine uses it. *ring.Ring is one; tests and simulations bring their own.
// All methods but Wake and Stats belong to that goroutine, which is locked to its thread.
type Device interface {
	// Submit starts an operation, see ring.Op.
	Submit(op *ring.Op)
	// Poll submits what is queued and runs the Done of what has completed, without blocking. It returns their number.
	Poll() int
	// Wait is Poll that blocks until something has completed, Wake is called, or timeout has passed; negative: for ever.
	Wait(timeout time.Duration) (int, error)
	// Wake ends a Wait. Any goroutine.
	Wake()
	// Stats returns the counters. Any goroutine.
	Stats() ring.Stats
	// Backend names how the disk is reached, Reason says why not io_uring.
	Backend() string
	Reason() string
	// Close waits for what is in flight and gives everything back.
	Close() error
}

// openDevice opens a device for the goroutine that calls it.
func (e *Engine) openDevice() (Device, error) {
	open := e.opts.OpenDevice
	if open == nil {
		open = e.openRing
	}
	d, err := open()
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	e.backend, e.reason = d.Backend(), d.Reason()
	e.mu.Unlock()
	return d, nil
}

func (e *Engine) openRing() (Device, error) {
	backend := ring.Auto
	switch e.opts.IOBackend {
	case "uring":
		backend = ring.Uring
	case "pread":
		backend = ring.Pread
	}
	r, err := ring.New(ring.Options{Backend: backend, Entries: ringEntries, Logger: e.log})
	if err != nil {
		return nil, err
	}
	return r, nil
}

// deviceRef lets other goroutines wake the owner of a device and read its counters.
type deviceRef struct{ p atomic.Pointer[Device] }

func (r *deviceRef) set(d Device) { r.p.Store(&d) }
func (r *deviceRef) clear()       { r.p.Store(nil) }

// live tells whether there is a device.
func (r *deviceRef) live() bool { return r.p.Load() != nil }

func (r *deviceRef) wake() {
	if d := r.p.Load(); d != nil {
		(*d).Wake()
	}
}

func (r *deviceRef) stats() ring.Stats {
	if d := r.p.Load(); d != nil {
		return (*d).Stats()
	}
	return ring.Stats{}
}

// waiter lets recovery block on a device.
type waiter struct{ Device }

func (w waiter) WaitOne() error {
	for {
		n, err := w.Wait(-1)
		if n > 0 || err != nil {
			return err
		}
	}
}
