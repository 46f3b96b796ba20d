package engine

// fifo is a queue over one slice that is reused whenever it runs empty, so steady use does not allocate.
type fifo[T any] struct {
	items []T
	head  int
}

func (q *fifo[T]) len() int    { return len(q.items) - q.head }
func (q *fifo[T]) front() *T   { return &q.items[q.head] }
func (q *fifo[T]) back() *T    { return &q.items[len(q.items)-1] }
func (q *fifo[T]) at(i int) *T { return &q.items[q.head+i] }

func (q *fifo[T]) push(v T) {
	if q.head > 64 && q.head >= len(q.items)/2 {
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items = q.items[:n]
		q.head = 0
	}
	q.items = append(q.items, v)
}

func (q *fifo[T]) dropBack() {
	var zero T
	q.items[len(q.items)-1] = zero
	q.items = q.items[:len(q.items)-1]
	if q.head == len(q.items) {
		q.items, q.head = q.items[:0], 0
	}
}

func (q *fifo[T]) pop() {
	var zero T
	q.items[q.head] = zero
	q.head++
	if q.head == len(q.items) {
		q.items = q.items[:0]
		q.head = 0
	}
}
