package client

import "context"

// callback is a call of OnAssign or OnRevoke that is due.
type callback struct {
	part   *assigned
	revoke bool
	lost   bool
}

// hasCallbacks reports whether the application wants to hear of assignments.
func (k *Consumer) hasCallbacks() bool { return k.opts.OnAssign != nil || k.opts.OnRevoke != nil }

// callAssign has OnAssign called for a partition; its messages wait until that is done.
func (k *Consumer) callAssign(part *assigned) {
	if !k.hasCallbacks() || k.closing { // while closing nothing of it is handed out any more
		return
	}
	k.callRevoke(part, true) // if it is still one of an earlier assignment
	part.told = true
	k.callLater(callback{part: part})
}

// callRevoke has OnRevoke called for a partition that OnAssign was called for.
func (k *Consumer) callRevoke(part *assigned, lost bool) {
	if part.told {
		part.told = false
		k.callLater(callback{part: part, revoke: true, lost: lost})
	}
}

// callRevokeAll is callRevoke for everything.
func (k *Consumer) callRevokeAll(lost bool) {
	for _, part := range k.parts {
		k.callRevoke(part, lost)
	}
}

func (k *Consumer) callLater(c callback) {
	c.part.calls++
	k.due++
	k.calls.push(c)
	k.called.Broadcast()
}

// callRevokes has OnRevoke called for everything and waits for it.
func (k *Consumer) callRevokes(ctx context.Context) {
	defer k.wakeAtEnd(ctx, &k.called)()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.callRevokeAll(!k.live)
	for k.due > 0 && ctx.Err() == nil {
		k.called.Wait()
	}
}

// runCallbacks is the goroutine on which the callbacks are called, one at a time, in order. It ends when the session has
// and nothing is left to call.
func (k *Consumer) runCallbacks() {
	defer close(k.quiet)
	k.mu.Lock()
	defer k.mu.Unlock()
	for {
		for k.calls.len() == 0 {
			if k.over {
				return
			}
			k.called.Wait()
		}
		c := k.calls.pop()
		k.mu.Unlock()
		switch {
		case c.revoke && k.opts.OnRevoke != nil:
			k.opts.OnRevoke(c.part.id, c.lost)
		case !c.revoke && k.opts.OnAssign != nil:
			k.opts.OnAssign(c.part.id)
		}
		k.mu.Lock()
		c.part.calls--
		k.due--
		k.settleRevoke(c.part)
		k.offerAll(c.part)
		k.called.Broadcast()
	}
}
