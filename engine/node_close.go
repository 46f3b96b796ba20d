package engine

import (
	"context"
	"errors"
)

// How a node ends: it hands over, resigns and gives everything back.

// Close ends the node: it stops leading, which lets another one take over at once, and closes the engine. The clients'
// connections must be closed before, the transport behind it.
func (n *Node) Close(ctx context.Context) error {
	if n.opts.Engine.Stepped {
		return n.closeStepped()
	}
	n.inbox.Push(nodeEvent{kind: nodeClose})
	if err := await(ctx, n.done, "the control loop"); err != nil {
		return err
	}
	return n.err
}

// closeStep goes on with the end: what is on its way commits, then this node resigns and gives its engine up.
func (n *Node) closeStep() {
	if n.leaving && !n.closing {
		n.leave()
		return
	}
	if !n.closing || n.ended {
		return
	}
	if e := n.serving.Load(); e != nil && n.now() < n.closeBy && !e.settled() {
		return
	}
	n.machine.Resign(n.now())
	n.carryOut()
	n.ended = !n.reopening
}

// HandOver has this node stop leading as soon as everything that it has taken is committed, so that another one leads while it
// still takes leave of its clients. It doesn't wait; Close is to follow. Any goroutine.
func (n *Node) HandOver() { n.inbox.Push(nodeEvent{kind: nodeLeave}) }

// leave hands over once that costs nobody anything.
func (n *Node) leave() {
	if e := n.serving.Load(); e != nil && n.now() >= n.leaveAt && (n.now() >= n.leaveBy || e.settled()) {
		n.machine.Resign(n.now())
		n.carryOut()
	}
}

// settled tells whether everything that was taken is committed.
func (e *Engine) settled() bool {
	for _, s := range e.shards {
		g := &s.repl.progress
		g.mu.Lock()
		open := g.log.Commit < g.log.Last
		g.mu.Unlock()
		if open || s.queued.Load() > 0 {
			return false
		}
	}
	return true
}

// end closes what the control loop owns.
func (n *Node) end() {
	n.serving.Store(nil)
	e := n.engine.Swap(nil)
	for _, c := range n.catchings {
		c.drop()
	}
	n.inbox.Close()
	for _, ev := range n.inbox.Drain(nil) {
		if ev.payload != nil {
			ev.payload.Release()
		}
		if ev.engine != nil {
			e = ev.engine
		}
	}
	n.err = errors.Join(n.err, n.closeEngine(e), n.file.Close(waiter{n.disk}), n.closeDevice())
}
