package ring

import "sync"

// workers runs operations on a bounded number of goroutines, started when they are needed first.
type workers struct {
	run func(*Op)
	max int

	mu      sync.Mutex
	more    sync.Cond
	queue   opList
	queued  int
	idle    int
	running int
	closing bool
	wg      sync.WaitGroup
}

func newWorkers(limit int, run func(*Op)) *workers {
	w := &workers{run: run, max: limit}
	w.more.L = &w.mu
	return w
}

// submit queues op; it never blocks on I/O.
func (w *workers) submit(op *Op) {
	w.mu.Lock()
	w.queue.push(op)
	w.queued++
	if w.queued > w.idle && w.running < w.max {
		w.running++
		w.wg.Go(w.work)
	} else {
		w.more.Signal()
	}
	w.mu.Unlock()
}

func (w *workers) work() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		for w.queue.empty() && !w.closing {
			w.idle++
			w.more.Wait()
			w.idle--
		}
		op := w.queue.pop()
		if op == nil {
			return
		}
		w.queued--
		w.mu.Unlock()
		w.run(op)
		w.mu.Lock()
	}
}

// close waits until everything queued has run and the goroutines have ended.
func (w *workers) close() {
	w.mu.Lock()
	w.closing = true
	w.more.Broadcast()
	w.mu.Unlock()
	w.wg.Wait()
}
