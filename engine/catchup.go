package engine

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/engine/coord"
	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/wal"
)

// Catching up in bulk, as the control loop sees it: on a follower a catching, which asks for what its log lacks and has the
// shard take it (fill); on the leader a supply, which reads segments and sends them, at a pace that leaves live traffic its
// latency.

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
	held []heldFrame
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

type heldFrame struct {
	frame   peerwire.BulkFrame
	payload peerwire.Payload
}

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

// startCatchup begins to catch up, or begins again from another leader.
func (n *Node) startCatchup(o replica.StartCatchup) {
	c := n.catchings[o.Log]
	if c == nil {
		c = &catching{}
		n.catchings[o.Log] = c
	}
	c.out = o
	if c.floor.Less(n.wanted[o.Log]) {
		c.floor = n.wanted[o.Log]
	}
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
	n.noteCatchup(log, c, func() {
		c.stage = catchupFills
		if n.engine.Load() == nil {
			c.drop() // it is asked for again once the engine is open
			return
		}
		n.beginFill(log, c, nil)
		for _, h := range c.held {
			n.post(log, &replicaEvent{kind: evFillFrame, peer: c.out.Leader, frame: h.frame, payload: h.payload})
		}
		c.held = nil
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

// supplyKey names a transfer to another node.
type supplyKey struct {
	peer     replica.NodeID
	transfer peerwire.Transfer
}

// supply sends a follower what its log lacks. It belongs to the control loop.
type supply struct {
	n   *Node
	key supplyKey
	log int
	// have is what the follower's streams go on with; plan what they are to reach, up to next.
	have map[wal.StreamID]uint64
	more bool
	plan []peerwire.Position
	next int
	cut  logCut
	flow peerwire.Flow
	// busy: an answer of a shard, a store or the coordinator is to come. chunk and out wait to be sent.
	busy  bool
	chunk *wal.Chunk
	out   []outPiece
	// parts is how many parts of the answer there are so far; a chunk has the last one's number.
	parts uint32
	again time.Duration // when to look again, without anything to wait for
	done  bool
	// calm is the commit latency when the transfer began; taken and takenBytes are the records sent and their bytes.
	calm, judged      time.Duration
	taken, takenBytes uint64
}

// outPiece is a frame that waits for room.
type outPiece struct {
	frame   peerwire.BulkFrame
	payload []byte
}

// readPiece is how much is read of a segment at once, snapshotPiece how much of a snapshot goes into a frame.
const (
	readPiece     = 1 << 20
	snapshotPiece = 1 << 20
	supplyPause   = 100 * time.Millisecond
)

// judgeEvery is how often the pace is looked at.
const judgeEvery = 100 * time.Millisecond

// maxSupplies bounds the transfers of one node at a time: each log of each follower has one.
const maxSupplies = 2 * maxShards

// supply takes a request for catch-up.
func (n *Node) supply(from replica.NodeID, c *peerwire.Catchup) {
	s := n.supplyOf(from, c.Transfer)
	if s == nil {
		n.dropSupplies(func(old *supply) bool { return old.key.peer == from && old.log == int(c.Log) }) // it asks anew
		// A node that was elected catches up from those who have promised it the epoch.
		asked := n.led != 0 || n.machine.State().Candidate == from
		reason := ""
		switch e := n.engine.Load(); {
		case e == nil || int(c.Log) >= len(e.shards) || !asked || len(n.supplies) >= maxSupplies:
			reason = "this node does not lead, nor has it elected the one that asks"
		case n.unfinished[int(c.Log)]:
			reason = "this node's own log is incomplete: it was catching up itself"
		}
		if reason != "" {
			n.opts.Peers.Bulk(from, &peerwire.CatchupCancel{Transfer: c.Transfer, Reason: reason}, nil, nil)
			return
		}
		s = &supply{n: n, key: supplyKey{from, c.Transfer}, log: int(c.Log), have: map[wal.StreamID]uint64{}, more: true}
		s.calm = n.engine.Load().shards[s.log].repl.latency.get()
		n.supplies = append(n.supplies, s)
		n.log.Info("a follower catches up in bulk", "peer", n.nodes[from].name, "log", s.log)
	}
	for _, p := range c.Positions {
		s.have[streamID(p.Stream)] = p.Next
	}
	if s.more = c.More; !s.more {
		s.takeCut()
	}
}

func streamID(s peerwire.Stream) wal.StreamID {
	return wal.StreamID{Kind: wal.StreamKind(s.Kind), Topic: s.Topic, Partition: s.Partition}
}

// supplyOf returns the transfer to a peer, nil if there is none.
func (n *Node) supplyOf(peer replica.NodeID, t peerwire.Transfer) *supply {
	for _, s := range n.supplies {
		if s.key == (supplyKey{peer, t}) {
			return s
		}
	}
	return nil
}

// dropSupplies ends those transfers for which drop returns true.
func (n *Node) dropSupplies(drop func(*supply) bool) {
	n.supplies = slices.DeleteFunc(n.supplies, func(s *supply) bool {
		if !drop(s) {
			return false
		}
		s.done = true
		if s.chunk != nil {
			s.chunk.Release()
			s.chunk = nil
		}
		return true
	})
}

// end ends the transfer.
func (s *supply) end() { s.n.dropSupplies(func(o *supply) bool { return o == s }) }

// then has f run on the control loop, unless the transfer has ended.
func (s *supply) then(f func()) {
	s.n.do(func() {
		s.busy = false
		if !s.done {
			f()
		}
	})
}

// takeCut begins a pass: up to the newest point that is in the segments.
func (s *supply) takeCut() {
	s.busy = true
	s.n.post(s.log, &replicaEvent{kind: evCut, cut: func(c logCut) {
		s.then(func() {
			if !c.ok {
				s.again = s.n.now() + supplyPause // the store writes out soon
				return
			}
			s.cut, s.plan, s.next = c, c.partitions, 0
		})
	}})
}

// step goes on as far as it can, and returns when to look again.
func (s *supply) step(now time.Duration) (next time.Duration) {
	for !s.busy && !s.done {
		if s.again > now {
			return s.again
		}
		s.again = 0
		if now-s.judged >= judgeEvery {
			s.judged = now
			s.flow.Progress(now, s.gap(), s.suffers())
		}
		if !s.send(now) {
			return s.again
		}
		switch {
		case s.done:
		case s.more:
			return wal.Never
		case !s.cut.ok:
			s.takeCut()
		case s.next < len(s.plan):
			s.read()
		default:
			s.finish()
		}
	}
	return wal.Never
}

// suffers tells whether slow rounds of live traffic take longer than before the transfer: half as long again and more.
func (s *supply) suffers() bool {
	e := s.n.engine.Load()
	return e != nil && e.shards[s.log].repl.latency.get() > s.calm*3/2+time.Millisecond/2
}

// gap estimates the bytes that are still to be sent.
func (s *supply) gap() uint64 {
	if s.taken == 0 {
		return 0
	}
	records := uint64(0)
	for _, p := range s.plan[min(s.next, len(s.plan)):] {
		if have := max(s.have[streamID(p.Stream)], 1); have < p.Next {
			records += p.Next - have
		}
	}
	return records * (s.takenBytes / s.taken)
}

// send sends what waits; false means that it has to wait on, and again says for how long (wal.Never: for the follower).
func (s *supply) send(now time.Duration) bool {
	for s.chunk != nil || len(s.out) > 0 {
		room, wait := s.flow.Room(now)
		if room <= 0 {
			s.again = now + wait
			if wait == 0 {
				s.again = now + supplyPause // an acknowledgement looks sooner
			}
			return false
		}
		if c := s.chunk; c != nil {
			f := &peerwire.Records{
				Part:   peerwire.Part{Transfer: s.key.transfer, Number: s.parts},
				Stream: s.plan[s.next].Stream, First: uint64(c.First), Count: uint32(c.Count),
			}
			if !s.n.opts.Peers.Bulk(s.key.peer, f, c.Bytes(), c) {
				s.again = now + supplyPause/10
				return false
			}
			s.flow.Sent(len(c.Bytes()))
			s.taken, s.takenBytes = s.taken+uint64(c.Count), s.takenBytes+uint64(len(c.Bytes()))
			s.have[c.Stream] = uint64(c.Last()) + 1
			s.chunk = nil
			continue
		}
		p := s.out[0]
		if !s.n.opts.Peers.Bulk(s.key.peer, p.frame, p.payload, nil) {
			s.again = now + supplyPause/10
			return false
		}
		s.flow.Sent(len(p.payload))
		if s.out = s.out[1:]; len(s.out) == 0 {
			if _, last := p.frame.(*peerwire.CatchupDone); last {
				s.n.log.Info("a follower was sent everything it lacked", "peer", s.n.nodes[s.key.peer].name, "log", s.log, "point", s.cut.point)
				s.end()
				return false
			}
		}
	}
	return true
}

// read reads the next records of the plan.
func (s *supply) read() {
	p := s.plan[s.next]
	id := streamID(p.Stream)
	from := max(s.have[id], 1)
	if from >= p.Next {
		s.next++
		return
	}
	s.busy = true
	req := &wal.ReadRequest{Stream: id, From: wal.Sequence(from), MaxBytes: readPiece}
	req.Done = func(req *wal.ReadRequest) {
		chunk, err := req.Chunk, req.Err
		s.n.do(func() {
			s.busy = false
			if s.done {
				if chunk != nil {
					chunk.Release()
				}
				return
			}
			s.took(id, from, chunk, err)
		})
	}
	if e := s.n.engine.Load(); e == nil || !e.stores[s.log].inbox.Push(storeMessage{kind: storeRead, read: req}) {
		s.cancel("the engine is being opened anew")
	}
}

// took takes what was read.
func (s *supply) took(id wal.StreamID, from uint64, chunk *wal.Chunk, err error) {
	switch {
	case err != nil:
		s.n.log.Warn("what a follower lacks can't be read", "stream", id, "err", err)
		s.again = s.n.now() + supplyPause
	case chunk == nil:
		s.next++ // the rest is in memory, and comes with the live stream
	default:
		if first := uint64(chunk.First); first > from {
			s.out = append(s.out, outPiece{frame: &peerwire.Skip{Part: s.part(), Stream: s.plan[s.next].Stream, Next: first}})
			s.have[id] = first
			chunk.Release() // it is read again behind the skip
			return
		}
		s.part()
		s.chunk = chunk
	}
}

// part begins the next frame; they are sent in this order.
func (s *supply) part() peerwire.Part {
	s.parts++
	return peerwire.Part{Transfer: s.key.transfer, Number: s.parts}
}

// cancel ends the transfer from this side.
func (s *supply) cancel(reason string) {
	s.n.opts.Peers.Bulk(s.key.peer, &peerwire.CatchupCancel{Transfer: s.key.transfer, Reason: reason}, nil, nil)
	s.end()
}

// finish looks whether the live stream can go on behind the cut, and sends the snapshots if so; otherwise another pass brings
// what has come meanwhile.
func (s *supply) finish() {
	s.busy = true
	point := s.cut.point
	s.n.post(s.log, &replicaEvent{kind: evCut, index: point.Index, cut: func(c logCut) {
		s.then(func() {
			if !c.ok || c.point != point {
				s.cut = logCut{}
				return
			}
			s.cut.windows, s.cut.commit = c.windows, c.commit
			s.snapshots()
		})
	}})
}

// snapshots asks the coordinator for its state, which is not older than the cut.
func (s *supply) snapshots() {
	e := s.n.engine.Load()
	if e == nil {
		s.cancel("the engine is being opened anew")
		return
	}
	s.busy = true
	e.coord.Snapshot(s.log, func(sn coord.Snapshots, err error) {
		s.then(func() {
			if err != nil {
				s.cancel(err.Error())
				return
			}
			if s.log == 0 {
				s.piece(peerwire.SnapshotMetadata, sn.MutationID, sn.Metadata)
			}
			s.piece(peerwire.SnapshotCursors, sn.LedgerPosition, sn.Cursors)
			s.piece(peerwire.SnapshotWindows, uint64(s.cut.point.Index), s.cut.windows)
			s.out = append(s.out, outPiece{frame: &peerwire.CatchupDone{Part: s.part(), Point: s.cut.point, Commit: s.cut.commit}})
		})
	})
}

// piece queues a snapshot in pieces.
func (s *supply) piece(what uint8, position uint64, b []byte) {
	total := uint64(len(b))
	for off := 0; off == 0 || off < len(b); off += snapshotPiece {
		s.out = append(s.out, outPiece{
			frame:   &peerwire.Snapshot{Part: s.part(), What: what, Epoch: s.n.led, Position: position, Offset: uint64(off), Total: total},
			payload: b[off:min(off+snapshotPiece, len(b))],
		})
	}
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
		c.held = append(c.held, heldFrame{ev.frame, ev.payload})
		if c.stage == catchupAsks {
			n.giveUp(int(t.Log), c)
		}
	}
	ev.payload = nil
}
