package bench

import (
	"context"
	"sync"
)

// team runs functions side by side; the first error cancels the context that all were given.
type team struct {
	wg     sync.WaitGroup
	cancel context.CancelFunc
	mu     sync.Mutex
	first  error
}

// newTeam returns a team and the context of its members.
func newTeam(ctx context.Context) (*team, context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	return &team{cancel: cancel}, ctx
}

func (t *team) start(fn func() error) {
	t.wg.Go(func() {
		err := fn()
		if err == nil {
			return
		}
		t.mu.Lock()
		if t.first == nil {
			t.first = err // later ones are consequences of it
		}
		t.mu.Unlock()
		t.cancel()
	})
}

// wait returns when all have ended, with the first error.
func (t *team) wait() error {
	t.wg.Wait()
	t.cancel()
	return t.first
}
