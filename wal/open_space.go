package wal

import (
	"fmt"

	"github.com/mortarmq/mortarmq/ring"
)

// memoryDivisor: a recovery that finds no space on the disk keeps in memory what only the journal has, up to this part of
// the buffer pool.
const memoryDivisor = 2

// keep remembers a round until its messages are in files.
func (o *opener) keep(r *Round) {
	for i := range r.Entries {
		if r.Entries[i].Stream.Kind == Messages {
			r.Retain()
			o.unwritten = append(o.unwritten, r)
			return
		}
	}
}

// forgetWritten forgets the rounds that are in files.
func (o *opener) forgetWritten() {
	n := 0
	for n < len(o.unwritten) && o.unwritten[n].Number <= o.s.written.Round {
		o.unwritten[n].Release()
		o.unwritten[n] = nil
		n++
	}
	o.unwritten = append(o.unwritten[:0], o.unwritten[n:]...)
}

// spill writes everything out that waits. Where the disk has no space for it, it stays in memory, and is written when there
// is: the journal has it, so that a start needs no space, up to what memory there is.
func (o *opener) spill() error {
	s := o.s
	retried := false
	for s.Step(0); s.pending > 0 || s.pass.active; s.Step(0) {
		switch {
		case s.err != nil:
			return s.err
		case s.inflight > 0 || !s.space.full:
			if err := o.disk.WaitOne(); err != nil {
				return err
			}
		case !retried && len(s.space.list) > 0:
			// What was cut off other files may have made room.
			retried = true
			s.space.run()
		default:
			o.forgetWritten()
			return o.mayWait()
		}
	}
	o.forgetWritten()
	return s.err
}

// mayWait tells whether what waits for space leaves memory to serve with.
func (o *opener) mayWait() error {
	pool := o.s.o.Pool
	if used, limit := pool.InUse(), pool.Limit()/memoryDivisor; used > limit {
		return fmt.Errorf("the disk is full, and what only the journal has takes more than %d bytes of memory: make room in %s and start again",
			limit, o.s.o.Dir)
	}
	return nil
}

// lookUpSpace finds out how much space is free before anybody publishes.
func (o *opener) lookUpSpace() error {
	s := o.s
	s.freeBusy = true
	s.do(ring.Op{Kind: ring.StatFS, Path: s.o.Dir}, s.spaceFound)
	return o.io.waitFor(func() bool { return !s.freeBusy })
}
