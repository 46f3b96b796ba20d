package client

import (
	"context"
	"time"
)

// ticker calls a function at intervals, on a goroutine of its own.
type ticker struct {
	cancel context.CancelFunc
	done   chan struct{}
}

func newTicker(interval time.Duration, f func()) *ticker {
	ctx, cancel := context.WithCancel(context.Background())
	t := &ticker{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(t.done)
		for sleep(ctx, interval) == nil {
			f()
		}
	}()
	return t
}

// stop returns when f is not running and will not run again.
func (t *ticker) stop() {
	t.cancel()
	<-t.done
}
