package engine

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/internal/mutant"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// Peers sends to the other nodes of the cluster; *peer.Transport is one. Any goroutine may call it, nothing blocks. Where a
// method returns false nothing was queued.
type Peers interface {
	// Message sends a message of replica.Node.
	Message(to replica.NodeID, m *replica.Message) bool
	// Append sends a round, or a probe without a payload. payload belongs to owner; one reference is taken over where it
	// returns true.
	Append(to replica.NodeID, a *peerwire.Append, payload []byte, owner Releaser) bool
	// Flushed and Reject send those frames, which are borrowed.
	Flushed(to replica.NodeID, f *peerwire.Flushed) bool
	Reject(to replica.NodeID, r *peerwire.Reject) bool
	// Bulk sends a frame of the bulk lane, which is borrowed; payload and owner as in Append.
	Bulk(to replica.NodeID, f peerwire.BulkFrame, payload []byte, owner Releaser) bool
}

// Releaser is memory with a reference count.
type Releaser = peerwire.Releaser

// Payload is memory that a frame from another node arrived in. It is its receiver's until Release.
type Payload = peerwire.Payload

const (
	// historyBytes is the default of what bounds the committed rounds that a shard keeps for followers that lag; behind that they catch up in bulk.
	historyBytes = 48 << 20
	// maxIncoming bounds the rounds from the leader that wait for the journal. The transport bounds their bytes.
	maxIncoming = 1 << 14
	// resendAfter is after how long without an answer a follower gets everything once more that it has not vouched for.
	resendAfter = time.Second
)

// replicaRound is what a shard of a cluster knows of a round beside what is owed for it.
type replicaRound struct {
	r      *wal.Round // with one reference
	point  replica.Point
	ticket uint64
	sealed time.Duration
	// upTo is replication.sealedBytes behind it.
	upTo int64
	// flushed here; emitted: it is committed and its producers have their answers.
	flushed, emitted bool
}

// replicaKind says what a replicaEvent is.
type replicaKind uint8

const (
	evAppend replicaKind = iota
	evFlushed
	evReject
	evFence
	evLead
	evFollow
	evJoin
	evLeft
	evCommit
	evConnected
	evWritable
	evProbe
	evQuorum
	evFetch
	evAdopt
	evAdopted
	evFill
	evFillFrame
	evStored
	evCut
)

// replicaEvent is what the control loop and the peer transport tell a shard. Those for rounds and acknowledgements are
// pooled.
type replicaEvent struct {
	kind     replicaKind
	peer     replica.NodeID
	epoch    replica.Epoch
	index    replica.Index
	instance replica.Instance
	voter    bool
	resume   bool // with evFence: the log goes on if it was behind
	append   peerwire.Append
	payload  Payload
	end      replica.End
	point    replica.Point
	refusal  *refusal
	transfer peerwire.Transfer
	// fenced gets the log's end, done the outcome of what was asked for; both are called on the shard's goroutine.
	fenced func(replica.End)
	done   func(error)
	// Of a catch-up in bulk, on the shard's goroutine too.
	frame     peerwire.BulkFrame
	positions func([]peerwire.Position)
	step      func()
	cut       func(logCut)
}

var replicaEvents = sync.Pool{New: func() any { return new(replicaEvent) }}

func (ev *replicaEvent) recycle() {
	*ev = replicaEvent{}
	replicaEvents.Put(ev)
}

// progress is what a shard lets the control loop see of its log.
type progress struct {
	mu      sync.Mutex
	log     replica.Progress
	changed bool
	// stalled is since when the oldest round that is not flushed here is at the device, on the engine's clock; 0: none is.
	stalled time.Duration
}

// take copies the progress to p, whose slice is used again, and reports whether it has changed since the last call.
func (g *progress) take(p *replica.Progress) (changed bool, stalled time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if changed = g.changed; changed {
		peers := append(p.Peers[:0], g.log.Peers...)
		*p = g.log
		p.Peers = peers
		g.changed = false
	}
	return changed, g.stalled
}

// replication is a shard's part in a cluster: which rounds the log has, who gets them, and what is committed. Its state but
// the atomics belongs to the shard's goroutine.
//
// Rounds that are not both committed and flushed here are in shard.inFlight, in the order of the log; behind that the newest
// are kept in history, so that a follower that was away for a moment gets them from memory.
type replication struct {
	s      *shard
	self   replica.NodeID
	log    *replica.Log
	fenced replica.Epoch // nothing lower is taken
	fill   *fill         // catches up in bulk; nil: it doesn't
	peers  Peers
	others []replica.NodeID
	logger *slog.Logger

	latency commitLatency
	// paces are how long rounds take until they are on this node's disk, and on those of others, in their order, while it leads.
	paces []pace
	// readOnly is the answer to publishes while nothing can be committed; nil: they are taken.
	readOnly atomic.Pointer[refusal]
	progress progress

	leading  bool
	epoch    replica.Epoch
	leader   replica.NodeID // that is followed
	instance replica.Instance
	voter    bool
	// deposed is the answer to publishes while another node leads, or nobody.
	deposed *refusal
	// opening: the opening round is to be sealed. probing likewise, an empty round.
	opening, probing bool
	// opened is called when the opening round is committed and in the hands of the coordinator; probed with the index of an
	// empty round that was asked for.
	opened func()
	probed func(replica.Index)

	flight  fifo[uint64] // tickets of the rounds at the device, 0 where there is none
	history fifo[keptRound]
	// keepBytes bounds history.
	keepBytes int64
	oldest    replica.Index // of history's front, if it has one
	kept      int64         // bytes of history
	// pin is the lowest round that is kept for a follower that catches up, until pinUntil.
	pin      replica.Index
	pinUntil time.Duration
	// sealedBytes adds up the bytes of all rounds of the log since the start.
	sealedBytes int64
	incoming    fifo[*replicaEvent]
	acked       peerwire.Flushed // the last FLUSHED that was sent
	// asked are the positions that the last catch-up was asked for with.
	asked    []peerwire.Position
	adopting *replicaEvent // says how far a candidate's log has to come
	// agreed is up to where the log was found to be that of the node that this one completes it from, since it was fenced.
	agreed  replica.Index
	heard   []followerState // by others
	scratch replica.Progress
}

// refusal is the answer to publishes at the moment.
func (r *replication) refusal() *refusal {
	if !r.leading {
		return r.deposed
	}
	return r.readOnly.Load()
}

// handle takes an event. It belongs to the replication until it is recycled.
func (r *replication) handle(ev *replicaEvent) {
	switch ev.kind {
	case evAppend, evAdopt:
		r.queue(ev)
		return
	case evFlushed:
		r.measure(ev.peer, ev.epoch, ev.index)
		if r.log.PeerFlushed(ev.peer, ev.epoch, ev.instance, ev.voter, ev.index) {
			r.advance()
		}
	case evReject:
		r.distrust(ev.peer, r.log.Rejected(ev.peer, ev.epoch, ev.instance, ev.end))
	case evFence:
		r.fence(ev)
	case evLead:
		ev.done(r.lead(ev))
	case evFollow:
		ev.done(r.follow(ev))
	case evJoin:
		r.distrust(ev.peer, r.log.Join(ev.peer, ev.epoch, ev.instance, ev.voter, ev.end))
		r.joined(ev.peer)
		r.advance()
	case evLeft:
		r.log.Left(ev.peer)
	case evCommit:
		r.log.LeaderCommit(ev.epoch, ev.index)
		r.advance()
	case evConnected:
		r.connected(ev.peer)
	case evWritable:
	case evProbe:
		if r.leading && ev.epoch == r.epoch {
			probed := ev.fenced
			r.probing, r.probed = true, func(i replica.Index) { probed(replica.End{Last: replica.Point{Epoch: r.epoch, Index: i}}) }
		}
	case evQuorum:
		r.setQuorum(ev.refusal)
	case evFetch:
		r.serveFetch(ev)
	case evAdopted:
		r.adopting = ev
		r.adopted()
		return
	case evFill:
		r.startFill(ev)
	case evFillFrame:
		if r.fill == nil {
			r.drop(ev)
			return
		}
		r.fill.take(ev)
	case evStored:
		ev.step()
	case evCut:
		ev.cut(r.cutOf(ev.index))
	}
	ev.recycle()
}

// distrust logs that another node's log contradicts this one's.
func (r *replication) distrust(peer replica.NodeID, err error) {
	switch {
	case err == nil:
	case errors.Is(err, replica.ErrDivergent):
		r.logger.Error("a node's log differs from this one at or below what is committed: it gets nothing more; its data must be made again from the others",
			"code", protocol.CodeDivergentCommitted, "peer", peer, "err", err)
	default:
		r.logger.Debug("a peer's log was not joined", "peer", peer, "err", err)
	}
}

// fence stops everything of lower epochs and reports where the log ends.
func (r *replication) fence(ev *replicaEvent) {
	if ev.epoch > r.fenced {
		r.fenced, r.agreed = ev.epoch, 0
		if ev.resume {
			r.log.Resume()
		}
	}
	end := r.log.Fence(ev.epoch)
	if r.leading && !r.log.Leading() {
		r.depose(ev.refusal)
	}
	if r.log.Epoch() == 0 {
		r.epoch, r.leader = 0, 0
		r.dropIncoming()
	}
	ev.fenced(end)
}

// waiting tells whether something waits for room in the journal, which no message announces.
func (r *replication) waiting() bool {
	return r.incoming.len() > 0 || r.opening || r.probing || r.fill != nil && r.fill.stalled()
}

// calm tells that nothing goes on but rounds of the leader.
func (r *replication) calm() bool {
	return r.fill == nil && r.adopting == nil && !r.opening && !r.probing
}

// turn does what can be done before the disk is polled: rounds are sealed and sent, rounds of the leader taken. The control
// loop hears of them before: the poll may be a write that does not end.
func (r *replication) turn() {
	defer r.report()
	switch {
	case r.fill != nil:
		r.fill.step()
	case r.leading:
		r.seal()
	default:
		r.receive()
	}
}

// notLeading is the answer to clients of a node that does not lead: it names the leader where it is known.
func notLeading(h *hint) *refusal {
	if h == nil || h.addr == "" {
		return &refusal{protocol.CodeStaleLeaderEpoch, "this node does not lead and knows no leader at the moment: try the other nodes, or again"}
	}
	return &refusal{protocol.CodeStaleLeaderEpoch, h.String()}
}

// hint is where the leader is.
type hint struct {
	name string // as operators know the node
	addr string // its client port
}

// String is the text of 0x6005 that client libraries follow.
func (h *hint) String() string { return fmt.Sprintf("leader=%s %s", h.name, h.addr) }

// flushed runs when a round has reached this node's disk. The reference to round is the shard's.
func (r *replication) flushed(round *wal.Round, err error) {
	defer round.Release()
	ticket := *r.flight.front()
	r.flight.pop()
	if err != nil {
		r.s.fail(err)
		return
	}
	f := &r.s.inFlight
	for i := range f.len() {
		if e := &f.at(i).repl; e.ticket == ticket {
			e.flushed = true
			r.paces[0].add(r.s.eng.now() - e.sealed)
			break
		}
	}
	switch {
	case ticket != 0:
		r.log.Flushed(ticket)
	case r.fill != nil:
		r.fill.flushed(round)
	}
	r.advance()
}

// advance carries out what the log's commit index and this node's disk allow: producers get their answers once a majority
// has flushed their round, and what is also on this disk goes to the coordinator and the store.
func (r *replication) advance() {
	s, commit := r.s, r.log.Commit()
	if mutant.Is("answer-before-quorum") && r.leading {
		commit = r.log.Last().Index
	}
	for i := range s.inFlight.len() {
		e := s.inFlight.at(i)
		if e.repl.point.Index > commit {
			break
		}
		if e.repl.emitted {
			continue
		}
		e.repl.emitted = true
		if r.leading {
			r.latency.add(s.eng.now() - e.repl.sealed)
		}
		s.markCommitted(e.repl.r)
		for k := range e.answers {
			s.emit(&e.answers[k])
		}
		s.keep(e)
	}
	bytes, urgent := 0, false
	for s.inFlight.len() > 0 {
		e := s.inFlight.front()
		if !e.repl.emitted || !e.repl.flushed {
			break
		}
		if !r.leading {
			s.fold(e.repl.r)
		}
		round := e.repl.r
		bytes += round.Bytes()
		round.Retain() // publishRound takes one, history keeps the other
		urgent = s.publishRound(round) || urgent
		r.keep(e.repl.point.Index, keptRound{round, e.repl.upTo, e.repl.sealed})
		s.inFlight.pop()
	}
	if bytes > 0 {
		s.flushClients()
		s.announce(bytes, urgent)
	}
	if r.leading && r.opened != nil && commit >= r.log.Opening() && r.log.FlushedIndex() >= r.log.Opening() {
		opened := r.opened
		r.opened = nil
		opened()
	}
	if r.adopting != nil {
		r.adopted()
	}
}

// afterPoll sends what completions have made sendable, and returns when there is something to do on its own.
func (r *replication) afterPoll(now time.Duration) (next time.Duration) {
	next = wal.Never
	if r.leading {
		r.ship()
		next = r.resend(now)
	} else {
		r.vouch()
	}
	r.report()
	return next
}

// report updates what the control loop sees.
func (r *replication) report() {
	p := &r.scratch
	r.log.Progress(p)
	for i := range p.Peers {
		q := &p.Peers[i]
		q.LagBytes = uint64(r.sealedBytes - r.bytesUpTo(q.Flushed))
	}
	stalled := time.Duration(0)
	for f, i := &r.s.inFlight, 0; i < f.len() && stalled == 0; i++ {
		if e := &f.at(i).repl; !e.flushed {
			stalled = e.sealed
		}
	}
	g := &r.progress
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stalled = stalled
	if same(p, &g.log) {
		return
	}
	peers := append(g.log.Peers[:0], p.Peers...)
	g.log = *p
	g.log.Peers, g.changed = peers, true
}

func same(a, b *replica.Progress) bool {
	return a.Epoch == b.Epoch && a.Leading == b.Leading && a.Last == b.Last && a.Flushed == b.Flushed &&
		a.Commit == b.Commit && a.Acked == b.Acked && slices.Equal(a.Peers, b.Peers)
}

func logPoint(p replica.Point) wal.LogPoint {
	return wal.LogPoint{Epoch: wal.Epoch(p.Epoch), Index: wal.LogIndex(p.Index)}
}

// release gives the rounds back at the end.
func (r *replication) release() {
	r.dropIncoming()
	if r.fill != nil {
		r.fill.drop()
	}
	for f := &r.s.inFlight; f.len() > 0; f.pop() {
		f.front().repl.r.Release()
	}
	for ; r.history.len() > 0; r.history.pop() {
		r.history.front().r.Release()
	}
}
