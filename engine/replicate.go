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

// commitLatency estimates what 98 of 100 rounds stay below, from seal to commit, in nanoseconds; any goroutine can read it. A
// round that took longer raises the estimate by a quarter, each other one lowers it by a half per cent, so that it stands where
// one of fifty is longer, whatever the distribution is, and follows a change within some hundred rounds.
type commitLatency struct{ ns atomic.Int64 }

func (l *commitLatency) add(d time.Duration) {
	q := l.ns.Load()
	switch {
	case q == 0:
		q = int64(d)
	case int64(d) > q:
		q = min(q+q/4+1, int64(d))
	default:
		q -= q / 200
	}
	l.ns.Store(q)
}

func (l *commitLatency) get() time.Duration { return time.Duration(l.ns.Load()) }

// keptRound is a committed round that is kept for followers; upTo and sealed are as in replicaRound.
type keptRound struct {
	r      *wal.Round
	upTo   int64
	sealed time.Duration
}

// followerState is what a leading shard remembers of a follower between two looks.
type followerState struct {
	at      time.Duration // when it last vouched for something, or had everything
	vouched replica.Index
	// behind: it needs what is not in memory; told is when it was last told so.
	behind bool
	told   time.Duration
	// measured is the newest round that says how long it takes, see measure.
	measured replica.Index
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

// depose ends leading: whoever waits for a commit is answered, what was sealed stays where it is.
func (r *replication) depose(f *refusal) {
	r.leading, r.opening, r.probing, r.opened, r.probed = false, false, false, nil, nil
	r.deposed = f
	r.s.refuseUncommitted(f)
	r.s.journal.Discard()
}

// lead makes the log this node's own: what is pending of earlier epochs goes before its opening round.
func (r *replication) lead(ev *replicaEvent) error {
	if err := r.log.Lead(ev.epoch); err != nil {
		return err
	}
	r.dropIncoming()
	r.s.journal.Discard()
	if last, commit := r.log.Last(), r.log.Commit(); last.Index > commit {
		r.logger.Debug("this log has rounds of earlier epochs that may not be committed", "log", r.s.id, "last", last, "committed", commit)
	}
	r.epoch, r.leader, r.leading, r.opening = ev.epoch, 0, true, true
	opened := ev.fenced
	r.opened = func() { opened(r.log.End()) }
	r.s.epoch = wal.Epoch(ev.epoch)
	for i := range r.s.inFlight.len() {
		if mutant.Is("sequence-reused") {
			break
		}
		r.s.fold(r.s.inFlight.at(i).repl.r)
	}
	for i := range r.heard {
		r.heard[i] = followerState{at: r.s.eng.now()}
	}
	return nil
}

// connected sends again what was under way when the connection to a node ended.
func (r *replication) connected(peer replica.NodeID) {
	if r.leading {
		r.log.Resend(peer)
	} else if peer == r.leader {
		r.acked = peerwire.Flushed{}
	}
}

// follow takes rounds of a leader from now on.
func (r *replication) follow(ev *replicaEvent) error {
	if err := r.log.Follow(ev.epoch); err != nil {
		return err
	}
	r.leading, r.epoch, r.leader, r.instance, r.voter = false, ev.epoch, ev.peer, ev.instance, ev.voter
	r.acked = peerwire.Flushed{}
	return nil
}

func (r *replication) setQuorum(f *refusal) {
	r.readOnly.Store(f)
	if f != nil && r.leading {
		r.s.refuseUncommitted(f)
	}
}

// waiting tells whether something waits for room in the journal, which no message announces.
func (r *replication) waiting() bool {
	return r.incoming.len() > 0 || r.opening || r.probing || r.fill != nil && r.fill.stalled()
}

// calm tells that nothing goes on but rounds of the leader.
func (r *replication) calm() bool {
	return r.fill == nil && r.adopting == nil && !r.opening && !r.probing
}

// queue puts a round from another node in line for the journal.
func (r *replication) queue(ev *replicaEvent) {
	if r.incoming.len() >= maxIncoming {
		r.drop(ev)
		return
	}
	r.incoming.push(ev)
}

// drop lets go of a round that is not taken; its sender sends it again.
func (r *replication) drop(ev *replicaEvent) {
	if ev.payload != nil {
		ev.payload.Release()
	}
	ev.recycle()
}

// dropIncoming forgets what waits for the journal.
func (r *replication) dropIncoming() {
	for r.incoming.len() > 0 {
		ev := *r.incoming.front()
		r.incoming.pop()
		r.drop(ev)
	}
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

// seal submits the gathering round and ships it at once, so that the disks of all nodes work at the same time.
func (r *replication) seal() {
	s := r.s
	records, _ := s.journal.Gathered()
	if s.journal.Busy() || s.journal.Err() != nil || records == 0 && !r.opening && !r.probing {
		return
	}
	prev := r.log.Last()
	point := replica.Point{Epoch: r.epoch, Index: prev.Index + 1}
	var flags wal.RoundFlags
	if r.opening {
		flags = wal.OpeningRound
	}
	if err := s.journal.Stamp(logPoint(point), wal.Epoch(prev.Epoch), wal.LogIndex(r.log.Commit()), flags); err != nil {
		s.appendFailed(err)
		return
	}
	stamp, err := r.log.Seal()
	if err != nil || stamp.Point != point {
		s.fail(fmt.Errorf("a round at %s of the log was to be %s: %w", stamp.Point, point, errors.Join(err, replica.ErrLogState)))
		return
	}
	if r.probing && r.probed != nil {
		r.probed(point.Index)
	}
	r.opening, r.probing, r.probed = false, false, nil
	r.sealed(stamp.Point, stamp.Ticket, s.gathering.answers)
	s.gathering = roundAnswers{}
	if n := len(s.freeLists); n > 0 {
		s.gathering.answers = s.freeLists[n-1]
		s.freeLists = s.freeLists[:n-1]
	}
	r.ship()
}

// sealed seals the gathering round, which is stamped, and notes it.
func (r *replication) sealed(p replica.Point, ticket uint64, answers []answer) {
	s := r.s
	round := s.journal.SealRound()
	if round == nil {
		s.fail(errors.New("the journal did not take a round that it had room for"))
		return
	}
	round.Retain()
	r.flight.push(ticket)
	r.sealedBytes += int64(round.Bytes())
	s.inFlight.push(roundAnswers{round: round.Number, answers: answers, repl: replicaRound{
		r: round, point: p, ticket: ticket, upTo: r.sealedBytes, sealed: s.eng.now(),
	}})
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

// round returns the round at an index, if it is in memory.
func (r *replication) round(i replica.Index) *wal.Round {
	if n := r.history.len(); n > 0 && i >= r.oldest && i < r.oldest+replica.Index(n) {
		return r.history.at(int(i - r.oldest)).r
	}
	if f := &r.s.inFlight; f.len() > 0 {
		if first := f.front().repl.point.Index; i >= first && i < first+replica.Index(f.len()) {
			return f.at(int(i - first)).repl.r
		}
	}
	return nil
}

// ship sends every follower what it does not have yet, as far as the transport takes it.
func (r *replication) ship() {
	for i, peer := range r.others {
		for {
			send, ok := r.log.Next(peer)
			if !ok {
				r.heard[i].behind = false
				break
			}
			a := peerwire.Append{Log: uint16(r.s.id), Epoch: send.Epoch, Prev: send.Prev, Commit: send.Commit}
			if send.Index == 0 {
				if !r.peers.Append(peer, &a, nil, nil) {
					break
				}
				r.log.Sent(peer, send)
				continue
			}
			round := r.round(send.Index)
			if round == nil {
				r.tellBehind(i)
				break
			}
			p, _ := round.Log()
			a.Point = replica.Point{Epoch: replica.Epoch(p.Epoch), Index: replica.Index(p.Index)}
			if a.Point.Epoch < r.epoch && a.Point.Index > a.Commit {
				r.logger.Debug("a round of an earlier epoch is sent again")
			}
			round.Retain()
			if !r.peers.Append(peer, &a, round.Payload(), round) {
				round.Release()
				break
			}
			r.log.Sent(peer, send)
		}
	}
}

// lowest returns the lowest index that is in memory; the next one to come if there is none.
func (r *replication) lowest() replica.Index {
	switch {
	case r.history.len() > 0:
		return r.oldest
	case r.s.inFlight.len() > 0:
		return r.s.inFlight.front().repl.point.Index
	}
	return r.log.Last().Index + 1
}

// base returns the round before the lowest one in memory.
func (r *replication) base() replica.Point {
	lowest := r.lowest()
	round := r.round(lowest)
	if round == nil {
		return r.log.Last()
	}
	return replica.Point{Epoch: replica.Epoch(round.LogPrev()), Index: lowest - 1}
}

// tellBehind tells a follower, now and then, that it needs what is no longer in memory.
func (r *replication) tellBehind(i int) {
	h, now := &r.heard[i], r.s.eng.now()
	if h.behind && now-h.told < resendAfter {
		return
	}
	h.behind, h.told = true, now
	r.peers.Bulk(r.others[i], &peerwire.Behind{
		Transfer: peerwire.Transfer{Log: uint16(r.s.id)}, Epoch: r.epoch, Base: r.base(), Committed: r.committed(),
	}, nil, nil)
}

// logCut is a point of a log up to which everything is in the segments, and what goes with it.
type logCut struct {
	ok         bool
	point      replica.Point
	commit     replica.Index
	partitions []peerwire.Position // Next is behind the last committed record
	windows    []byte
}

// Rounds behind a cut are kept for pinFor for the follower that catches up to it, up to pinTimes as many as usually.
const (
	pinFor   = 10 * time.Second
	pinTimes = 3
)

// damagedPartition tells whether a partition isn't served because its files are damaged: what it knows of it may be less than
// what is committed.
func (s *shard) damagedPartition() bool {
	for _, parts := range s.topics {
		for _, p := range parts {
			if p != nil && p.refusal != "" {
				return true
			}
		}
	}
	return false
}

// cutOf returns a cut at index at, or with 0 the newest there is, and keeps what lies behind it for a while.
func (r *replication) cutOf(at replica.Index) logCut {
	s := r.s
	if r.fill != nil || s.damagedPartition() {
		return logCut{} // not all that is committed is here
	}
	if at == 0 {
		written := wal.RoundNumber(s.store.written.Load())
		for i := r.history.len() - 1; i >= 0; i-- {
			if r.history.at(i).r.Number <= written {
				at = r.oldest + replica.Index(i)
				break
			}
		}
		if at == 0 && r.history.len() == 0 && written >= s.unwritten {
			at = r.lowest() - 1 // all of it was there at the start, and recovery writes everything out that the disk has room for
		}
	}
	e, ok := r.log.EpochAt(at)
	if at == 0 || !ok || at+1 < r.lowest() {
		return logCut{}
	}
	r.pin, r.pinUntil = at+1, s.eng.now()+pinFor
	c := logCut{ok: true, point: replica.Point{Epoch: e, Index: at}, commit: r.log.Commit()}
	for topic, parts := range s.topics {
		for i, p := range parts {
			if p != nil && p.committed > 0 {
				c.partitions = append(c.partitions, peerwire.Position{
					Stream: peerwire.Stream{Kind: uint8(wal.Messages), Topic: uint16(topic), Partition: uint16(i)}, Next: uint64(p.committed) + 1,
				})
			}
		}
	}
	c.windows = s.dedup.snapshot(func(id wal.StreamID) wal.Sequence {
		return s.partitionOf(id.Topic, id.Partition).committed
	})
	return c
}

// receive takes rounds of the leader, and those that a candidate fetched.
func (r *replication) receive() {
	s := r.s
	if r.adopting != nil {
		defer r.advance()
	}
	for r.incoming.len() > 0 && s.journal.Err() == nil {
		ev := *r.incoming.front()
		if len(evPayload(ev)) > 0 && s.journal.Busy() {
			return
		}
		if !r.take(ev) {
			return
		}
		r.incoming.pop()
		if ev.payload != nil {
			ev.payload.Release()
		}
		ev.recycle()
	}
}

func evPayload(ev *replicaEvent) []byte {
	if ev.payload == nil {
		return nil
	}
	return ev.payload.Bytes()
}

// take handles a round or a probe from another node; false means that it has to wait for the journal.
func (r *replication) take(ev *replicaEvent) bool {
	s, a := r.s, &ev.append
	payload := evPayload(ev)
	if len(payload) > 0 {
		switch err := s.journal.AppendPayload(payload); {
		case err == nil:
		case errors.Is(err, wal.ErrPayload):
			r.logger.Error("a round from another node is malformed and was not taken", "peer", ev.peer, "point", a.Point, "err", err)
			return true
		default:
			s.appendFailed(err)
			return false
		}
		if p := s.journal.GatheredPosition(); p.Point != logPoint(a.Point) || p.Prev != wal.Epoch(a.Prev.Epoch) {
			s.journal.Discard()
			r.logger.Error("a round from another node is not the one that it was announced as, and was not taken", "peer", ev.peer, "announced", a.Point, "is", p.Point)
			return true
		}
	}
	var v replica.Verdict
	if ev.kind == evAdopt {
		if v = r.log.Adopt(a.Prev, a.Point); v.Kind == replica.Accept || v.Kind == replica.Replace || v.Kind == replica.Duplicate {
			r.agreed = max(r.agreed, a.Point.Index)
		}
	} else {
		v = r.log.Append(a.Epoch, a.Prev, a.Point, a.Commit)
	}
	switch v.Kind {
	case replica.Replace:
		r.cut(v.From)
		r.sealed(a.Point, v.Ticket, nil)
	case replica.Accept:
		r.sealed(a.Point, v.Ticket, nil)
	default:
		s.journal.Discard()
		r.refused(ev, v)
	}
	r.advance()
	return true
}

// refused handles a round that is not written.
func (r *replication) refused(ev *replicaEvent, v replica.Verdict) {
	switch v.Kind {
	case replica.Gap, replica.Stale, replica.Divergent:
		if v.Kind == replica.Divergent {
			r.logger.Error("the leader has another round where this node has a committed one: this log takes nothing more; its data must be made again from the others",
				"code", protocol.CodeDivergentCommitted, "peer", ev.peer, "log", r.s.id, "point", ev.append.Point, "committed", r.log.Commit())
		}
		if ev.kind == evAppend && (v.Reject || v.Kind != replica.Gap) {
			r.peers.Reject(ev.peer, &peerwire.Reject{
				Log: uint16(r.s.id), Verdict: v.Kind, Epoch: ev.append.Epoch, Known: r.log.Epoch(), End: r.log.End(), Instance: r.instance,
			})
		}
	default: // there already, or of no interest
	}
}

// cut forgets the pending rounds from index on: another leader has others in their place.
func (r *replication) cut(from replica.Index) {
	f := &r.s.inFlight
	if f.len() > 0 && f.back().repl.point.Index >= from {
		r.logger.Debug("rounds that were never committed are cut off", "log", r.s.id, "from", from, "last", f.back().repl.point)
	}
	for f.len() > 0 && f.back().repl.point.Index >= from {
		f.back().repl.r.Release()
		f.dropBack()
	}
}

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

// keep adds a committed round, with its reference, to those kept for followers.
func (r *replication) keep(i replica.Index, round keptRound) {
	if r.history.len() == 0 {
		r.oldest = i
	}
	r.history.push(round)
	r.kept += int64(round.r.Bytes())
	for r.kept > r.keepBytes && r.history.len() > 1 && !r.pinned() {
		old := r.history.front().r
		r.history.pop()
		r.kept -= int64(old.Bytes())
		old.Release()
		r.oldest++
	}
}

// pinned tells whether the oldest round that is kept is kept for a follower that catches up.
func (r *replication) pinned() bool {
	return r.oldest >= r.pin && r.kept < pinTimes*r.keepBytes && r.s.eng.now() < r.pinUntil
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

// vouch tells the leader what is flushed here.
func (r *replication) vouch() {
	epoch, index := r.log.Ack()
	if epoch == 0 || r.leader == 0 || r.fill != nil {
		return
	}
	f := peerwire.Flushed{Log: uint16(r.s.id), Voter: r.voter, Epoch: epoch, Index: index, Instance: r.instance}
	if f != r.acked && r.peers.Flushed(r.leader, &f) {
		r.acked = f
	}
}

// resend has a follower get everything again that it has not vouched for in a while: the transport may have lost it.
func (r *replication) resend(now time.Duration) (next time.Duration) {
	next = wal.Never
	for i, peer := range r.others {
		h := &r.heard[i]
		if h.behind {
			next = min(next, h.told+resendAfter)
		}
		has, _ := r.log.PeerWindow(peer)
		if !r.log.Unanswered(peer) {
			h.vouched, h.at = has, now
			continue
		}
		if has != h.vouched {
			h.vouched, h.at = has, now
		}
		if now-h.at >= resendAfter {
			h.at = now
			r.log.Resend(peer)
			r.ship()
		}
		next = min(next, h.at+resendAfter)
	}
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

// bytesUpTo returns sealedBytes as it was behind the round at an index; of one no longer in memory, that behind the last
// one before those.
func (r *replication) bytesUpTo(i replica.Index) int64 {
	if f := &r.s.inFlight; f.len() > 0 {
		if first := f.front().repl.point.Index; i >= first && i < first+replica.Index(f.len()) {
			return f.at(int(i - first)).repl.upTo
		}
	}
	n := r.history.len()
	switch {
	case n == 0:
		return r.sealedBytes
	case i < r.oldest:
		return r.history.front().upTo - int64(r.history.front().r.Bytes())
	}
	return r.history.at(min(int(i-r.oldest), n-1)).upTo
}

// serveFetch sends an elected node the rounds of the log that it lacks, or says what is in memory of them.
func (r *replication) serveFetch(ev *replicaEvent) {
	end := func(ok bool, reason string) {
		r.peers.Bulk(ev.peer, &peerwire.FetchEnd{Transfer: ev.transfer, OK: ok, Reason: reason}, nil, nil)
	}
	if e, ok := r.log.EpochAt(ev.point.Index); !ok || e != ev.point.Epoch || r.log.FlushedIndex() < ev.point.Index || r.fill != nil {
		end(false, fmt.Sprintf("node has no round %s that is flushed", ev.point))
		return
	}
	if ev.index+1 < r.lowest() {
		r.peers.Bulk(ev.peer, &peerwire.Behind{Transfer: ev.transfer, Epoch: r.fenced, Base: r.base(), Committed: r.committed()}, nil, nil)
		return
	}
	for i := ev.index + 1; i <= ev.point.Index; i++ {
		round := r.round(i)
		if round == nil {
			end(false, fmt.Sprintf("round %d is not in memory", i))
			return
		}
		p, _ := round.Position()
		f := peerwire.Fetched{
			Transfer: ev.transfer, Prev: replica.Point{Epoch: replica.Epoch(p.Prev), Index: i - 1},
			Point: replica.Point{Epoch: replica.Epoch(p.Point.Epoch), Index: i}, Commit: r.log.Commit(),
		}
		round.Retain()
		if !r.peers.Bulk(ev.peer, &f, round.Payload(), round) {
			round.Release()
			return // the other node asks again, from where it is then
		}
	}
	end(true, "")
}

// fetchAfter returns up to where this log has what another one has that ends at upto.
func (r *replication) fetchAfter(upto replica.Point) replica.Index {
	last := r.log.Last()
	if last.Epoch == upto.Epoch {
		return min(last.Index, upto.Index) // both have it from the same leader
	}
	return max(r.agreed, min(r.log.Commit(), last.Index))
}

// committed returns the newest round that is known to be committed.
func (r *replication) committed() replica.Point {
	commit := r.log.Commit()
	e, _ := r.log.EpochAt(commit)
	return replica.Point{Epoch: e, Index: commit}
}

// adopted reports, once everything that a candidate fetched is flushed here or can't be any more.
func (r *replication) adopted() {
	ev := r.adopting
	if r.s.journal.Err() == nil && (r.incoming.len() > 0 || r.log.FlushedIndex() < min(ev.point.Index, r.log.Last().Index)) {
		return
	}
	r.adopting = nil
	ev.fenced(r.log.End())
	ev.recycle()
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

// fold advances sequences and producer windows by a round that another node has sealed: one that is committed, or one of an
// earlier leader that this node appends its own behind. Doing so twice changes nothing.
func (s *shard) fold(r *wal.Round) {
	var rec wal.Record
	for i := range r.Entries {
		e := &r.Entries[i]
		if e.Stream.Kind == wal.Messages && s.gone.has(e.Stream.Topic) {
			continue
		}
		switch e.Stream.Kind {
		case wal.Ledger:
			s.ledgerSeq = max(s.ledgerSeq, e.Last())
		case wal.Metadata:
			s.metaSeq = max(s.metaSeq, e.Last())
		case wal.Messages:
			p := s.partitionOf(e.Stream.Topic, e.Stream.Partition)
			p.last = max(p.last, e.Last())
			for data := r.Data(e); len(data) > 0; {
				data = data[wal.PeekRecord(data, &rec):]
				if !mutant.Is("windows-forgotten") {
					s.dedup.replay(e.Stream, &rec)
				}
				p.lastMs = max(p.lastMs, rec.TimestampMs)
			}
		case wal.Replica:
		}
	}
}
