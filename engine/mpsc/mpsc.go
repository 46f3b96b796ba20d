// Package mpsc is the inbox of a goroutine that owns state: many producers post, one consumer takes everything at once.
//
// The queue is a slice under a mutex that the consumer swaps for an empty one. The critical section is an append (a few
// nanoseconds), nothing is allocated in steady state, and a whole batch costs the consumer one lock. Producers post
// batches, not single messages.
package mpsc

import "sync"

// Queue is a multi-producer, single-consumer queue. Create it with New. Push may be called from any goroutine; Drain and
// Wait only from the consumer's.
type Queue[T any] struct {
	wake func()

	mu       sync.Mutex
	items    []T
	sleeping bool
	closed   bool
}

// New returns a queue. wake is called, outside the lock, by the Push that finds the consumer asleep (see Sleep); it must
// not block.
func New[T any](wake func()) *Queue[T] { return &Queue[T]{wake: wake} }

// Push appends v and reports false if the queue is closed.
func (q *Queue[T]) Push(v T) bool {
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return false
	}
	q.items = append(q.items, v)
	wake := q.sleeping
	q.sleeping = false
	q.mu.Unlock()
	if wake {
		q.wake()
	}
	return true
}

// PushQuietly is Push that lets the consumer sleep on: for what can wait until something else wakes it, or Nudge does.
func (q *Queue[T]) PushQuietly(v T) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false
	}
	q.items = append(q.items, v)
	return true
}

// Offer is PushQuietly that reports whether the consumer sleeps: the caller then sees to v in its place, or calls Nudge.
func (q *Queue[T]) Offer(v T) (ok, asleep bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false, false
	}
	q.items = append(q.items, v)
	return true, q.sleeping
}

// Rouse wakes the consumer if it sleeps, whether or not something is queued.
func (q *Queue[T]) Rouse() {
	q.mu.Lock()
	wake := q.sleeping
	q.sleeping = false
	q.mu.Unlock()
	if wake {
		q.wake()
	}
}

// Nudge wakes the consumer if it sleeps although something is queued.
func (q *Queue[T]) Nudge() {
	q.mu.Lock()
	wake := q.sleeping && len(q.items) > 0
	if wake {
		q.sleeping = false
	}
	q.mu.Unlock()
	if wake {
		q.wake()
	}
}

// Drain takes everything queued and gives back spare, emptied, as the next buffer (pass the slice that the previous
// Drain returned once its items were handled; it is cleared here so that it keeps nothing alive).
func (q *Queue[T]) Drain(spare []T) []T {
	clear(spare)
	q.mu.Lock()
	items := q.items
	q.items = spare[:0]
	q.mu.Unlock()
	return items
}

// Sleep announces that the consumer is about to block. It reports false, and the consumer must not block, if something
// was queued meanwhile or the queue was closed. After true the next Push (or Close) calls wake.
func (q *Queue[T]) Sleep() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.items) > 0 || q.closed {
		return false
	}
	q.sleeping = true
	return true
}

// Awake withdraws Sleep's announcement; the consumer calls it when it wakes for another reason.
func (q *Queue[T]) Awake() {
	q.mu.Lock()
	q.sleeping = false
	q.mu.Unlock()
}

// Empty reports whether nothing is queued.
func (q *Queue[T]) Empty() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.items) == 0
}

// Close refuses further pushes and wakes the consumer. What is queued stays for a last Drain.
func (q *Queue[T]) Close() {
	q.mu.Lock()
	q.closed = true
	wake := q.sleeping
	q.sleeping = false
	q.mu.Unlock()
	if wake {
		q.wake()
	}
}

// Closed reports whether Close was called.
func (q *Queue[T]) Closed() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.closed
}
