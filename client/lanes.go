package client

import (
	"context"
	"hash/maphash"
	"slices"
)

// lanesPerHandler is how many lanes a partition has for each handler with ConsumerOptions.ParallelKeys, up to maxLanes: more
// than one, so that a slow message holds up few other keys.
const (
	lanesPerHandler = 4
	maxLanes        = 256
)

// lane is what one handler works on at a time: a partition, or those of its messages whose keys share the lane. Messages
// leave it in the order of their delivery.
type lane struct {
	part   *assigned
	queue  ring[*Message]
	busy   bool // a process has messages of it
	queued bool // in ready
}

func (o *ConsumerOptions) lanes() int {
	if !o.ParallelKeys {
		return 1
	}
	return min(lanesPerHandler*o.Concurrency, maxLanes)
}

// lane returns where a message belongs. Those without key have no order to keep.
func (k *Consumer) lane(part *assigned, m *Message) *lane {
	switch {
	case len(part.lanes) == 1:
		return &part.lanes[0]
	case len(m.Key) == 0:
		return &part.lanes[m.Sequence%uint64(len(part.lanes))]
	default: // not the hash that partitions are chosen by: within one of them it takes few values
		return &part.lanes[maphash.Bytes(k.seed, m.Key)%uint64(len(part.lanes))]
	}
}

func (k *Consumer) newAssigned(id uint16) *assigned {
	part := &assigned{id: id, lanes: make([]lane, k.lanes)}
	for i := range part.lanes {
		part.lanes[i].part = part
	}
	return part
}

// take waits for messages of a lane that no other process is at, and takes some. A nil lane means the end.
func (k *Consumer) take(ctx context.Context, batch []*Message) (*lane, int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for {
		if ctx.Err() != nil || k.closing {
			return nil, 0
		}
		for k.ready.len() > 0 {
			l := k.ready.pop()
			l.queued = false
			if l.part.calls > 0 {
				continue // offered again when they are done
			}
			n := 0
			for n < len(batch) && l.queue.len() > 0 {
				if m := l.queue.pop(); m.Active() {
					batch[n] = m
					n++
				}
			}
			if n > 0 {
				l.busy = true
				return l, n
			}
		}
		k.takers.Wait()
	}
}

// giveBack ends a take; rest is what was not begun.
func (k *Consumer) giveBack(l *lane, rest []*Message) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, m := range slices.Backward(rest) {
		switch {
		case !m.Active():
		case l.part.revoke != nil:
			k.end(m, false)
		default:
			l.queue.pushFront(m)
		}
	}
	l.busy = false
	k.settleRevoke(l.part)
	k.offer(l)
}

// offer makes a lane ready if it has something for a process.
func (k *Consumer) offer(l *lane) {
	if l.busy || l.queued || l.part.calls > 0 || l.queue.len() == 0 {
		return
	}
	l.queued = true
	k.ready.push(l)
	k.takers.Signal()
}

// offerAll is offer for all of a partition.
func (k *Consumer) offerAll(part *assigned) {
	for i := range part.lanes {
		k.offer(&part.lanes[i])
	}
}
