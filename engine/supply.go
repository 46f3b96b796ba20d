package engine

import (
	"slices"
	"time"

	"github.com/mortarmq/mortarmq/engine/coord"
	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/wal"
)

// Catching up in bulk, on the leader: segments are read and sent, at a pace that leaves live traffic its latency.

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
