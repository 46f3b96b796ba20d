package engine

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/wal"
)

// Catching up in bulk, as the control loop sees it: on a follower a catching, which asks for what its log lacks and has the
// shard take it (fill); on the leader a supply (supply.go).

// catching is a log of this node that catches up. It begins with asking, which changes nothing: a source that doesn't lead, or
// can't read its files, or is gone leaves the log as it is. Only when something has come is it noted that the log gives up rounds,
// and then they are.
type catching struct {
	out      replica.StartCatchup
	fetch    *fetch // that it is for; nil: it is for following
	transfer peerwire.Transfer
	stage    catchupStage
	// floor is committed, and the log won't end before it.
	floor replica.Point
	// held are the frames of the transfer that have come before the log takes them.
	held []fillFrame
	file *wal.CatchupFile
	// again is when the request is repeated, because nothing was heard; 0: it is not outstanding.
	again time.Duration
	heard time.Duration
	// note is what follows when the catch-up is on record, where there was no space for that: tried again at noteAt.
	note   func()
	noteAt time.Duration
}

type catchupStage uint8

const (
	// catchupAsks: nothing is given up.
	catchupAsks catchupStage = iota
	// catchupNotes: something has come, and that rounds are given up is being put on record.
	catchupNotes
	// catchupFills: they are given up.
	catchupFills
)

// drop lets go of what has come and won't be taken.
func (c *catching) drop() {
	for _, h := range c.held {
		if h.payload != nil {
			h.payload.Release()
		}
	}
	c.held = nil
}

// catchupRetry is after how much silence a follower asks again.
const catchupRetry = 5 * time.Second

// behind takes a leader's word that it has not in memory what this node's log needs next.
func (n *Node) behind(from replica.NodeID, b *peerwire.Behind) {
	leader, epoch := n.machine.Leader()
	e := n.engine.Load()
	if from != leader || b.Epoch != epoch || e == nil || int(b.Log) >= len(e.shards) || n.catchings[int(b.Log)] != nil {
		return
	}
	log := int(b.Log)
	n.post(log, &replicaEvent{kind: evStored, step: func() {
		if e.shards[log].repl.log.Behind(b.Epoch, b.Base) {
			n.do(func() {
				if n.machine.State().Promised != epoch {
					return // the log was resumed
				}
				n.wanted[log] = b.Committed
				n.machine.Behind(n.now(), log)
			})
		}
	}})
}

// raiseFloor notes a point that the log must not end before.
func (n *Node) raiseFloor(log int, p replica.Point) {
	if n.floors[log].Less(p) {
		n.floors[log] = p
	}
}

// catchingOf returns the catch-up of a log, a new one if there is none, which must not end before floor.
func (n *Node) catchingOf(log int, floor replica.Point) *catching {
	c := n.catchings[log]
	if c == nil {
		c = &catching{}
		n.catchings[log] = c
	}
	if c.floor.Less(floor) {
		c.floor = floor
	}
	return c
}

// startCatchup begins to catch up, or begins again from another leader.
func (n *Node) startCatchup(o replica.StartCatchup) {
	c := n.catchingOf(o.Log, n.wanted[o.Log])
	delete(n.wanted, o.Log)
	c.out = o
	n.log.Info("this node's log is too far behind: catching up in bulk", "log", o.Log, "leader", n.nodes[o.Leader].name, "epoch", o.Epoch)
	n.ask(o.Log, c)
}

// callOff ends what has given up nothing and isn't wanted any more: a new epoch has begun, or the engine is another one. The log
// goes on as it is.
func (n *Node) callOff(log int) {
	c := n.catchings[log]
	if c == nil || c.stage != catchupAsks {
		return
	}
	n.machine.CallOff(log)
	if !n.machine.Catching(log) { // nothing was given up before, either
		c.drop()
		delete(n.catchings, log)
	}
}

// giveUp begins to give up rounds, now that something has come for them.
func (n *Node) giveUp(log int, c *catching) {
	c.stage = catchupNotes
	if c.fetch == nil {
		n.machine.GivesUp(log)
	}
	n.raiseFloor(log, c.floor)
	from := c.out.Leader
	n.noteCatchup(log, c, func() {
		c.stage = catchupFills
		switch {
		case n.engine.Load() == nil:
			c.drop() // it is asked for again once the engine is open
		case c.out.Leader != from:
			n.ask(log, c)
		default:
			n.beginFill(log, c, nil)
			for _, h := range c.held {
				n.post(log, &replicaEvent{kind: evFillFrame, peer: from, frame: h.frame, payload: h.payload})
			}
			c.held = nil
		}
	})
}

// noteCatchup puts on record that rounds of the log are given up, before they are. A disk without space for that is waited for.
func (n *Node) noteCatchup(log int, c *catching, then func()) {
	c.note = nil
	failed := func(err error) {
		err = fmt.Errorf("noting the progress of a catch-up: %w", err)
		if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
			n.failed(err)
			return
		}
		n.log.Warn("no space to note that this log catches up; trying again until there is", "log", log, "err", err)
		c.note, c.noteAt = then, n.now()+noteRetry
	}
	if c.file != nil && c.file.Err() != nil {
		_ = c.file.Close(waiter{n.disk}) // its error is known
		c.file = nil
	}
	if c.file == nil {
		var err error
		if c.file, err = wal.OpenCatchupFile(waiter{n.disk}, n.pool, n.shardDir(log), log); err != nil {
			failed(err)
			return
		}
	}
	floor := n.floors[log]
	c.file.Save(wal.CatchupState{
		Leader: uint16(c.out.Leader), Epoch: wal.Epoch(c.out.Epoch), Target: logPoint(floor), BegunMs: n.wallMs(),
	}, func(err error) {
		if err != nil {
			failed(err)
			return
		}
		n.unfinished[log] = true
		then()
	})
}

// noteRetry is after how long a catch-up that could not be noted is noted again.
const noteRetry = time.Second

func (n *Node) shardDir(log int) string { return (&Engine{opts: n.opts.Engine}).shardDir(log) }

func (n *Node) wallMs() uint64 { return (&Engine{opts: n.opts.Engine}).wallMs() }

// ask asks the leader for what the log lacks.
func (n *Node) ask(log int, c *catching) {
	if c.stage == catchupNotes {
		return // what has come is taken first
	}
	n.lastFetch++
	c.drop()
	c.transfer = peerwire.Transfer{Log: uint16(log), ID: n.lastFetch}
	c.heard = n.now()
	c.again = c.heard + catchupRetry
	leader, transfer := c.out.Leader, c.transfer
	positions := func(list []peerwire.Position) {
		for {
			k := min(len(list), peerwire.MaxPositions)
			n.opts.Peers.Bulk(leader, &peerwire.Catchup{Transfer: transfer, More: k < len(list), Positions: list[:k]}, nil, nil)
			if list = list[k:]; len(list) == 0 {
				return
			}
		}
	}
	if c.stage == catchupFills {
		n.beginFill(log, c, positions)
		return
	}
	e := n.engine.Load()
	n.post(log, &replicaEvent{kind: evStored, step: func() { e.shards[log].repl.ask(positions) }})
}

// beginFill has the shard give up what it has, if it has not yet, and take the transfer. positions gets what it has then.
func (n *Node) beginFill(log int, c *catching, positions func([]peerwire.Position)) {
	transfer := c.transfer
	n.post(log, &replicaEvent{kind: evFill, peer: c.out.Leader, transfer: transfer, point: n.floors[log], positions: positions,
		done: func(err error) { n.do(func() { n.filled(log, transfer, err) }) },
	})
}

// filled ends a transfer.
func (n *Node) filled(log int, transfer peerwire.Transfer, err error) {
	c := n.catchings[log]
	if c == nil || c.transfer != transfer {
		return
	}
	if err != nil {
		n.interrupted(log, c, err)
		return
	}
	delete(n.catchings, log)
	delete(n.repairs, log)
	if err := c.file.Close(waiter{n.disk}); err != nil {
		n.log.Warn("closing the progress of a catch-up", "log", log, "err", err)
	}
	n.log.Info("caught up in bulk", "log", log)
	if !n.reopening { // as it is when another log was complete a moment ago: this one is, too, on the disk
		n.reopen(len(n.engine.Load().shards))
	}
	n.afterOpen = append(n.afterOpen, func() {
		// The log ends behind the floor now.
		if err := wal.RemoveCatchupFile(waiter{n.disk}, n.shardDir(log), log); err != nil {
			n.log.Warn("removing the progress of a catch-up that has ended", "log", log, "err", err)
		}
		delete(n.unfinished, log)
		if e := n.engine.Load(); e != nil {
			n.post(log, &replicaEvent{kind: evStored, step: func() { e.shards[log].repl.log.Resume() }})
		}
		n.machine.CaughtUp(n.now(), log) // says nothing where it was for a fetch, which goes on
	})
}

// interrupted has the log ask again after a while.
func (n *Node) interrupted(log int, c *catching, err error) {
	n.log.Warn("catching up in bulk was interrupted and begins again", "log", log, "err", err)
	c.again = n.now() + time.Second
}

// stepCatchups repeats requests that nobody answers, and returns when to look again.
func (n *Node) stepCatchups(now time.Duration) (next time.Duration) {
	next = wal.Never
	for log := range n.logs() {
		c := n.catchings[log]
		if c != nil && c.note != nil {
			if now >= c.noteAt {
				n.noteCatchup(log, c, c.note)
			}
			next = min(next, now+noteRetry)
		}
		if c == nil || c.again == 0 || c.stage == catchupNotes || n.engine.Load() == nil {
			continue
		}
		if now >= c.again {
			n.ask(log, c)
		}
		next = min(next, c.again)
	}
	for _, s := range slices.Clone(n.supplies) {
		next = min(next, s.step(now))
	}
	return next
}

func (n *Node) logs() int {
	if e := n.engine.Load(); e != nil {
		return len(e.shards)
	}
	return 0
}

// bulkCatchup handles the frames of catch-ups.
func (n *Node) bulkCatchup(ev *nodeEvent) {
	switch f := ev.frame.(type) {
	case *peerwire.Catchup:
		n.supply(ev.from, f)
	case *peerwire.CatchupAck:
		if s := n.supplyOf(ev.from, f.Transfer); s != nil {
			if err := s.flow.Acked(f.Bytes); err != nil {
				n.log.Error("a follower acknowledges what it was not sent", "peer", n.nodes[ev.from].name, "err", err)
				s.cancel("the acknowledgements are wrong")
				return
			}
			s.again = 0
		}
	case *peerwire.Records, *peerwire.Skip, *peerwire.Snapshot, *peerwire.CatchupDone, *peerwire.CatchupCancel:
		n.fillFrame(ev)
	default:
	}
}

// fillFrame hands a frame of a transfer to the log that catches up.
func (n *Node) fillFrame(ev *nodeEvent) {
	t := ev.frame.Of()
	c := n.catchings[int(t.Log)]
	if c == nil || c.transfer != t || c.out.Leader != ev.from || n.engine.Load() == nil {
		return
	}
	c.heard = n.now()
	c.again = c.heard + catchupRetry
	cancel, refused := ev.frame.(*peerwire.CatchupCancel)
	if c.fetch != nil && !refused {
		n.machine.Fetching(c.heard, c.fetch.out.Epoch) // an election that nothing comes for any more ends
	}
	switch {
	case c.stage == catchupFills:
		n.post(int(t.Log), &replicaEvent{kind: evFillFrame, peer: ev.from, frame: ev.frame, payload: ev.payload})
	case refused && c.stage == catchupAsks:
		n.interrupted(int(t.Log), c, fmt.Errorf("%w: %s", errFillEnded, cancel.Reason))
		return
	default:
		c.held = append(c.held, fillFrame{ev.frame, ev.payload})
		if c.stage == catchupAsks {
			n.giveUp(int(t.Log), c)
		}
	}
	ev.payload = nil
}
