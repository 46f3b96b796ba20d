package ring

import "time"

// preadBackend runs data operations by ordinary system calls on worker goroutines. Their results reach the owner through
// the ring's finished list.
type preadBackend struct {
	pool  *workers
	wake  chan struct{}
	timer *time.Timer
}

func newPread(limit int, run func(*Op)) *preadBackend {
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	return &preadBackend{pool: newWorkers(limit, run), wake: make(chan struct{}, 1), timer: timer}
}

func (b *preadBackend) name() string  { return "pread" }
func (b *preadBackend) submit(op *Op) { b.pool.submit(op) }
func (b *preadBackend) reap() int     { return 0 }
func (b *preadBackend) flush() error  { return nil }

func (b *preadBackend) sleep(d time.Duration) error {
	if d < 0 {
		<-b.wake
		return nil
	}
	b.timer.Reset(d)
	select {
	case <-b.wake:
	case <-b.timer.C:
	}
	b.timer.Stop()
	return nil
}

func (b *preadBackend) signal() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

func (b *preadBackend) close() error {
	b.pool.close()
	return nil
}
