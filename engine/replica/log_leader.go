package replica

import "fmt"

// Stamp is what a leader writes into a round that it seals.
type Stamp struct {
	Point  Point
	Prev   Point // the round before
	Commit Index // committed when the round was sealed
	// Opening is set in the first round of an epoch.
	Opening bool
	// Ticket is to be handed to Flushed when the round is durable.
	Ticket uint64
}

// Send is a round or a probe to be sent to a follower.
type Send struct {
	Epoch Epoch
	// Prev is the round before: a follower that has another one there refuses.
	Prev Point
	// Index is the round to send, 0 for a probe, which carries no round: it tells the follower how far it agrees.
	Index  Index
	Commit Index
}

// Lead makes this node the log's leader in epoch. The log holds everything durable that the election found. The caller seals
// the opening round next; followers get rounds once Join was called for them.
func (l *Log) Lead(epoch Epoch) error {
	if epoch < l.fence || epoch == l.epoch || epoch <= l.runs.lastEpoch() {
		return fmt.Errorf("%w: lead epoch %d (fenced at %d, in epoch %d, last round %s)", ErrLogState, epoch, l.fence, l.epoch, l.Last())
	}
	l.fence, l.epoch, l.leading, l.lapsed = epoch, epoch, true, false
	l.opening = l.runs.last + 1
	for i := range l.peers {
		l.peers[i] = logPeer{node: l.peers[i].node}
	}
	return nil
}

// Opening returns the index of the leader's opening round: while Commit is below it, nothing may be answered.
func (l *Log) Opening() Index { return l.opening }

// Seal numbers the round that the leader writes next.
func (l *Log) Seal() (Stamp, error) {
	if !l.leading {
		return Stamp{}, fmt.Errorf("%w: seal without leading", ErrLogState)
	}
	prev := l.Last()
	ticket := l.wrote(l.epoch)
	return Stamp{Point: l.Last(), Prev: prev, Commit: l.commit, Opening: l.runs.last == l.opening, Ticket: ticket}, nil
}

func (l *Log) peer(n NodeID) *logPeer {
	for i := range l.peers {
		if l.peers[i].node == n {
			return &l.peers[i]
		}
	}
	return nil
}

// Join tells a leader where a follower's log ends (Node's PeerJoined): rounds go there from now on. A new instance counts
// from nothing again, whatever the one before had flushed. It returns ErrDivergent if the follower knows rounds as committed
// that this log does not have or has otherwise.
func (l *Log) Join(peer NodeID, epoch Epoch, instance Instance, voter bool, end End) error {
	p := l.peer(peer)
	if p == nil || !l.leading || epoch != l.epoch {
		return fmt.Errorf("%w: node %d joins epoch %d (in epoch %d, leading %t)", ErrLogState, peer, epoch, l.epoch, l.leading)
	}
	if p.instance != instance {
		*p = logPeer{node: peer, instance: instance}
	}
	p.voter, p.again = p.voter || voter, 0
	if err := l.position(p, end); err != nil {
		return err
	}
	l.advance()
	return nil
}

// position finds out where a follower's log leaves this one.
func (l *Log) position(p *logPeer, end End) error {
	p.joined = false
	last, commit := end.Last, min(end.Commit, end.Last.Index)
	if commit > l.runs.last {
		return fmt.Errorf("%w: node %d has committed round %d, this log ends at %s", ErrDivergent, p.node, commit, l.Last())
	}
	agree, epoch := commit, Epoch(0)
	switch e, known := l.runs.epochAt(last.Index); {
	case known && e == last.Epoch:
		agree = last.Index
		p.flushed = max(p.flushed, agree)
	case known && last.Index == commit:
		return fmt.Errorf("%w: node %d has committed round %s, this log has %s", ErrDivergent, p.node, last, Point{Epoch: e, Index: last.Index})
	default:
		// Logs that have a round of one epoch each agree up to the older of the newest two.
		if i, found := l.runs.lastOf(last.Epoch); found {
			if i = min(i, last.Index); i > agree {
				agree, epoch = i, last.Epoch
			}
		}
	}
	if agree < p.flushed {
		agree, epoch = p.flushed, 0 // what it vouched for stays, and this was said before
	}
	p.epoch, p.base = epoch, 0
	p.joined, p.agreed, p.next, p.probe, p.heard = true, agree, agree+1, true, false
	return nil
}

// Rejected tells a leader that a follower refused a round or probe because its log ends at end, or isn't the leader's there.
// While what was sent is being sent again, further refusals say nothing: they come from rounds that were on their way. What
// gets lost a second time is for Resend.
func (l *Log) Rejected(peer NodeID, epoch Epoch, instance Instance, end End) error {
	p := l.peer(peer)
	if p == nil || !l.leading || epoch != l.epoch || !p.joined || p.instance != instance {
		return nil // of another epoch or life
	}
	if p.flushed < p.again {
		return nil
	}
	p.again = p.next - 1
	return l.position(p, end)
}

// Left tells a leader that nothing can be sent to a follower. What it has flushed still counts. It gets rounds again after
// Join.
func (l *Log) Left(peer NodeID) {
	if p := l.peer(peer); p != nil {
		p.joined, p.base = false, 0
	}
}

// Skip tells a leader that the round which Next named isn't in memory any more; base is the one before the oldest that is. The
// host tells the follower so until it answers or begins to catch up. It gets rounds again when it vouches for base.
func (l *Log) Skip(peer NodeID, base Point) {
	if p := l.peer(peer); p != nil && p.joined {
		p.joined, p.base = false, base.Index
	}
}

// Next returns what to send to a follower next; false if there is nothing, or the follower hasn't joined.
func (l *Log) Next(peer NodeID) (Send, bool) {
	p := l.peer(peer)
	if p == nil || !l.leading || !p.joined {
		return Send{}, false
	}
	e, known := l.runs.epochAt(p.next - 1)
	switch {
	case known:
	case p.next-1 == p.agreed:
		e = p.epoch
	default:
		e = 0 // forgotten; the follower knows the round as committed, or has it from this leader
	}
	s := Send{Epoch: l.epoch, Prev: Point{Epoch: e, Index: p.next - 1}, Commit: l.commit}
	if p.next <= l.runs.last {
		s.Index = p.next
		return s, true
	}
	return s, p.probe
}

// Sent says that what Next returned was handed to the transport.
func (l *Log) Sent(peer NodeID, s Send) {
	p := l.peer(peer)
	if p == nil || s.Epoch != l.epoch || !p.joined || s.Prev.Index+1 != p.next {
		return
	}
	p.probe = false
	if s.Index > 0 {
		p.next = s.Index + 1
	}
}

// Unanswered reports whether a follower that has joined owes FLUSHED for something that was sent; for how long is the host's
// to know, which then calls Resend.
func (l *Log) Unanswered(peer NodeID) bool {
	p := l.peer(peer)
	return p != nil && l.leading && p.joined && (!p.heard || max(p.flushed, p.agreed)+1 < p.next)
}

// Resend makes the leader send everything that a follower hasn't flushed once more: for a transport that had to drop rounds,
// and for a follower that hasn't answered for long.
func (l *Log) Resend(peer NodeID) {
	if p := l.peer(peer); p != nil && p.joined {
		p.next, p.probe, p.again = min(p.next, max(p.flushed, p.agreed)+1), true, 0
	}
}

// PeerFlushed takes a follower's FLUSHED: its log agrees with the leader's and is durable up to index. voter is whether it
// counts itself as one. Those of another epoch or instance say nothing. It reports whether Commit moved.
func (l *Log) PeerFlushed(peer NodeID, epoch Epoch, instance Instance, voter bool, index Index) bool {
	p := l.peer(peer)
	if p == nil || !l.leading || epoch != l.epoch || p.instance != instance || instance == 0 || index > l.runs.last {
		return false
	}
	p.voter = p.voter || voter
	p.heard = true
	p.flushed = max(p.flushed, index)
	p.next = max(p.next, p.flushed+1)
	if p.base > 0 && p.flushed >= p.base {
		p.joined, p.base = true, 0
	}
	before := l.commit
	l.advance()
	return l.commit > before
}

// PeerWindow returns up to where a follower is known to have this log's rounds, and the next one to be sent there; the host
// bounds the bytes between them.
func (l *Log) PeerWindow(peer NodeID) (has, next Index) {
	if p := l.peer(peer); p != nil {
		return max(p.flushed, p.agreed), p.next
	}
	return 0, 0
}
