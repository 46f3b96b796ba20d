package ring

import (
	"sync"
	"sync/atomic"
)

// opList is a FIFO of operations threaded through the operations themselves. It needs no memory of its own and is as
// long as the number of operations their owner has made.
type opList struct {
	head, tail *Op
}

func (l *opList) empty() bool { return l.head == nil }

func (l *opList) push(op *Op) {
	op.next = nil
	if l.tail == nil {
		l.head = op
	} else {
		l.tail.next = op
	}
	l.tail = op
}

// pop returns the oldest operation, nil if there is none.
func (l *opList) pop() *Op {
	op := l.head
	if op == nil {
		return nil
	}
	l.head = op.next
	if l.head == nil {
		l.tail = nil
	}
	op.next = nil
	return op
}

// finished collects operations that ended outside the owner's goroutine, for the owner to run Done of.
type finished struct {
	// some is set after an operation was added and cleared before the list is taken, so that the owner can look
	// without the lock.
	some atomic.Bool
	mu   sync.Mutex
	list opList
}

func (f *finished) add(op *Op) {
	f.mu.Lock()
	f.list.push(op)
	f.some.Store(true)
	f.mu.Unlock()
}

// take returns everything added so far.
func (f *finished) take() opList {
	if !f.some.Load() {
		return opList{}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	l := f.list
	f.list = opList{}
	f.some.Store(false)
	return l
}
