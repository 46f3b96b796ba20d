package wal

import "github.com/mortarmq/mortarmq/ring"

// blockingDisk runs one operation at a time and waits for it: for recovery and shutdown, where nothing else goes on.
type blockingDisk struct {
	w    Waiter
	op   ring.Op
	done bool
}

func newBlockingDisk(w Waiter) *blockingDisk { return &blockingDisk{w: w} }

// run submits a copy of op and returns it completed. What is returned is valid until the next run.
func (b *blockingDisk) run(op ring.Op) (*ring.Op, error) {
	b.op, b.done = op, false
	b.op.Done = b.completed
	b.w.Submit(&b.op)
	for !b.done {
		if err := b.w.WaitOne(); err != nil {
			return nil, err
		}
	}
	return &b.op, b.op.Err
}

func (b *blockingDisk) completed(*ring.Op) { b.done = true }

// waitFor drives the disk until done.
func (b *blockingDisk) waitFor(done func() bool) error {
	for !done() {
		if err := b.w.WaitOne(); err != nil {
			return err
		}
	}
	return nil
}
