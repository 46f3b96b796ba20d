package engine

import (
	"errors"
	"time"

	"github.com/mortarmq/mortarmq/wal"
)

// A stepped engine (Options.Stepped) has no goroutines: who opened it drives it, on one goroutine, and gives it a clock and
// disks to match. It runs the same code as one with goroutines, turn by turn.

// Step does everything that can be done without blocking: each part of the engine takes one turn. It reports whether there
// may be more to do at once, and otherwise on the engine's clock when there will be; wal.Never without something to come.
func (e *Engine) Step() (progress bool, next time.Duration) {
	next = wal.Never
	for _, s := range e.shards {
		if s.ended || s.disk == nil {
			continue
		}
		more, at := s.turn()
		if s.timeoutShort() {
			at = min(at, e.now()+retryRefused)
		}
		progress, next = progress || more || !s.inbox.Empty(), min(next, at)
	}
	for _, l := range e.stores {
		if l.ended || l.store == nil {
			continue
		}
		more, at := l.turn()
		progress, next = progress || more || !l.inbox.Empty(), min(next, at)
	}
	if e.coordBegun {
		if after := e.coord.Turn(); after >= 0 {
			next = min(next, e.now()+after)
		}
		progress = progress || e.coord.Queued()
	}
	for _, s := range e.shards {
		progress = progress || !s.ended && !s.inbox.Empty()
	}
	return progress, next
}

func (e *Engine) startStepped() error {
	for _, s := range e.shards {
		if err := s.begin(); err != nil {
			return err
		}
	}
	e.coord.Begin()
	e.coordBegun = true
	return nil
}

// closeStepped is Close of a stepped engine, and abandon of one that could not be opened: it waits on the disks.
func (e *Engine) closeStepped() error {
	if e.coordBegun {
		e.coord.End()
		e.coordBegun = false
	}
	var err error
	for _, s := range e.shards {
		if s.disk == nil {
			continue
		}
		s.closing = true
		for !s.ended {
			if progress, _ := s.turn(); !progress && !s.ended && s.inbox.Empty() {
				if _, werr := s.disk.Wait(retryRefused); werr != nil {
					return errors.Join(err, werr)
				}
			}
		}
		s.end()
		s.leave()
	}
	for _, l := range e.stores {
		if l.store == nil {
			continue
		}
		l.inbox.Push(storeMessage{kind: storeClose})
		for !l.ended {
			if progress, next := l.turn(); !progress && !l.ended && l.inbox.Empty() {
				if _, werr := l.disk.Wait(e.until(next)); werr != nil {
					return errors.Join(err, werr)
				}
			}
		}
		l.end()
		l.inbox.Close()
	}
	return errors.Join(err, e.Err())
}

// Step is Engine.Step for a node opened with Engine.Stepped: its control loop takes a turn, then its engine.
func (n *Node) Step() (progress bool, next time.Duration) {
	progress, next = n.turn()
	if e := n.engine.Load(); e != nil {
		more, at := e.Step()
		progress = progress || more
		if at != wal.Never {
			next = min(next, at)
		}
	}
	return progress || !n.inbox.Empty(), next
}

// closeStepped is Close of a stepped node.
func (n *Node) closeStepped() error {
	n.machine.Resign(n.now())
	n.carryOut()
	n.end()
	return n.err
}
