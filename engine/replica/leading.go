package replica

import (
	"slices"
	"time"

	"github.com/mortarmq/mortarmq/internal/mutant"
	"github.com/mortarmq/mortarmq/protocol"
)

// Progress is what a log's goroutine reports to the Node, with Log.Progress, whenever it changed; a newer one may take the
// place of one that wasn't handed on yet.
type Progress struct {
	Epoch                 Epoch
	Leading               bool
	Last, Flushed, Commit Index
	Acked                 Index // what a follower vouches for
	Peers                 []PeerProgress
}

// PeerProgress is what a leader's log knows of a follower. LagBytes is filled in by the host: bytes of rounds behind Flushed.
type PeerProgress struct {
	Node     NodeID
	Instance Instance
	Voter    bool
	Flushed  Index
	LagBytes uint64
}

// Progress fills in p, whose slice is used again.
func (l *Log) Progress(p *Progress) {
	_, acked := l.Ack()
	*p = Progress{Epoch: l.epoch, Leading: l.leading, Last: l.runs.last, Flushed: l.flushed, Commit: l.commit, Acked: acked, Peers: p.Peers[:0]}
	if !l.leading {
		return
	}
	for i := range l.peers {
		q := &l.peers[i]
		p.Peers = append(p.Peers, PeerProgress{Node: q.node, Instance: q.instance, Voter: q.voter, Flushed: q.flushed})
	}
}

// leadership is what a node keeps while it is elected or leads.
type leadership struct {
	beatAt  time.Duration
	opened  bool // the opening rounds are committed and folded
	serving bool
	served  bool // it has served in this epoch before
	lost    bool // nothing is served until the barrier is committed
	probing bool // ProbeLogs was asked for
	barrier []Index
	logs    []logState
}

// logState is what a leader's Node knows of a log.
type logState struct {
	known        bool
	last, commit Index
	waiting      bool // something isn't committed, and nothing was since waitsSince
	waitsSince   time.Duration
}

// peerLog is what a leader's Node knows of a follower's log.
type peerLog struct {
	instance Instance
	voter    bool
	mark     Index // the log's end at markAt; the follower has not flushed it yet
	markAt   time.Duration
	behind   bool
	bytes    uint64
}

// beginLeading resets what belongs to a leadership; heartbeats begin with the election, before what is missing was fetched.
func (n *Node) beginLeading() {
	n.lead = leadership{lost: true, logs: make([]logState, n.logs())}
	for i := range n.peers {
		p := &n.peers[i]
		p.bound, p.instance, p.standing, p.hasAcked, p.marked, p.lagging = false, 0, Voter, false, nil, false
		p.session++
		p.logs = make([]peerLog, n.logs())
	}
	n.beat()
}

// startLeading makes the elected node the leader.
func (n *Node) startLeading() {
	n.role = leader
	n.attempt = 0
	clear(n.cure.catching) // its logs are what others catch up with
	clear(n.cure.given)
	n.emit(Lead{Epoch: n.state.Promised})
	for i := range n.peers {
		n.install(&n.peers[i])
	}
}

func (n *Node) install(p *peerState) {
	n.send(p.id, Message{Kind: KindInstall, Epoch: n.state.Promised, Session: p.session})
}

// unbind begins a new session with a peer: what its logs hold has to be asked again.
func (n *Node) unbind(p *peerState) {
	if p.bound {
		n.emit(PeerLeft{Peer: p.id})
	}
	p.bound, p.marked = false, nil
	p.session++
}

// leaderTick renews the lease, unless this node's own disk doesn't answer: then another one shall lead.
func (n *Node) leaderTick() {
	if n.role == elected && n.now >= n.elec.deadline {
		n.giveUp()
		return
	}
	if n.now >= n.lead.beatAt {
		n.beat()
	}
}

func (n *Node) beat() {
	n.lead.beatAt = n.now + n.cfg.Heartbeat
	if !n.usable() {
		return
	}
	for i := range n.peers {
		p := &n.peers[i]
		m := Message{Kind: KindHeartbeat, Epoch: n.state.Promised, Sent: n.now, Commits: n.commits()}
		if p.bound {
			m.Instance = p.instance
			if n.confirms(p) {
				m.Confirmed, m.Ends = true, slices.Clone(p.marked)
			}
		}
		n.send(p.id, m)
		if n.role == leader && !p.bound {
			n.install(p)
		}
	}
}

// commits returns the commit index per log, nothing before all are known.
func (n *Node) commits() []Index {
	c := make([]Index, len(n.lead.logs))
	for k := range n.lead.logs {
		if !n.lead.logs[k].known {
			return nil
		}
		c[k] = n.lead.logs[k].commit
	}
	return c
}

// LeaseEnd returns until when this node may serve as the leader; 0 if it isn't one. A loop that serves clients compares it
// with the clock before each batch.
func (n *Node) LeaseEnd() time.Duration {
	start, ok := n.leaseStart()
	if !ok {
		return 0
	}
	return start + n.cfg.leaderLease()
}

// leaseStart returns the time since when a majority, this node included, has helped nobody else.
func (n *Node) leaseStart() (time.Duration, bool) {
	if n.role != leader && n.role != elected {
		return 0, false
	}
	need := majority(len(n.cfg.Nodes)) - 1
	if need == 0 {
		return n.now, true
	}
	var times [MaxNodes]time.Duration
	acked := times[:0]
	for i := range n.peers {
		if n.peers[i].hasAcked {
			acked = append(acked, n.peers[i].acked)
		}
	}
	if len(acked) < need {
		return 0, false
	}
	slices.Sort(acked)
	return acked[len(acked)-need], true
}

// Serving reports whether this node may serve clients at that time.
func (n *Node) Serving(now time.Duration) bool {
	return n.lead.serving && now < n.LeaseEnd()
}

func (n *Node) onInstallAck(p *peerState, m Message) {
	if n.role != leader || m.Epoch != n.state.Promised || m.Session != p.session || p.bound || m.Instance == 0 {
		return
	}
	p.bound, p.marked = true, nil
	p.instance, p.standing = m.Instance, m.Standing
	n.emit(PeerJoined{Epoch: m.Epoch, Peer: p.id, Instance: m.Instance, Voter: m.Standing == Voter, Ends: m.Ends})
}

func (n *Node) onHeartbeatAck(p *peerState, m Message) {
	if n.role != leader && n.role != elected || m.Epoch != n.state.Promised {
		return
	}
	// A learner may have forgotten whom it promised what.
	if m.Standing != Learner {
		sent := min(m.Sent, n.now)
		if mutant.Is("lease-from-receipt") {
			sent = n.now
		}
		p.acked, p.hasAcked = max(p.acked, sent), true
	}
	switch {
	case n.role != leader || !p.bound:
	case m.Instance != p.instance:
		n.unbind(p)
		n.install(p)
	case m.Standing == Voter && p.standing != Voter:
		p.standing = Voter
		n.event(EventVoter, p.id, 0)
	}
}

// confirms reports whether a follower that doesn't count may be told what makes it count again: the ends of the leader's logs
// at a time when all of them counted that instance as no voter. Whatever was committed before lies below them; what is
// committed later is committed without it. So a follower that has all of that misses nothing that was ever answered. And a
// lease that was renewed since, for which a learner's own answers don't count, means that a majority has not gone over to a
// higher epoch through a promise which the learner has forgotten.
func (n *Node) confirms(p *peerState) bool {
	if p.standing == Voter || n.role != leader {
		return false
	}
	for k := range p.logs {
		if !n.lead.logs[k].known || p.logs[k].instance != p.instance || p.logs[k].voter {
			p.marked = nil
			return false
		}
	}
	if p.marked == nil {
		p.marked, p.markedAt = make([]End, len(p.logs)), n.now
		for k := range p.logs {
			p.marked[k].Last = Point{Epoch: n.state.Promised, Index: n.lead.logs[k].last}
		}
	}
	start, ok := n.leaseStart()
	return ok && start >= p.markedAt && n.now < start+n.cfg.leaderLease()
}

// Progress takes a log's report. p is borrowed.
func (n *Node) Progress(now time.Duration, log int, p *Progress) {
	n.begin(now)
	if log < 0 || log >= n.logs() || p.Epoch != n.state.Promised {
		return
	}
	if !p.Leading {
		n.cureProgress(log, p)
	} else if n.role == leader {
		n.leadingProgress(log, p)
	}
	n.update()
}

func (n *Node) leadingProgress(log int, p *Progress) {
	s := &n.lead.logs[log]
	moved := p.Commit > s.commit || !s.known
	s.known = true
	s.last, s.commit = p.Last, max(s.commit, p.Commit)
	switch {
	case s.commit >= s.last:
		s.waiting = false
	case moved || !s.waiting:
		s.waiting, s.waitsSince = true, n.now
	}
	for i := range p.Peers {
		q := &p.Peers[i]
		peer := n.peer(q.Node)
		if peer == nil {
			continue
		}
		l := &peer.logs[log]
		l.instance, l.voter, l.bytes = q.Instance, q.Voter, q.LagBytes
		if q.Flushed >= l.mark {
			l.mark, l.markAt = p.Last, n.now
		}
		l.behind = q.Flushed < p.Last
	}
}

// Opened says that the opening rounds of all logs are committed and folded: clients can be served.
func (n *Node) Opened(now time.Duration, epoch Epoch) {
	n.begin(now)
	if n.role == leader && epoch == n.state.Promised {
		n.lead.opened = true
	}
	n.update()
}

// Probed reports the indexes of the rounds that ProbeLogs asked for, per log. lasts is handed over.
func (n *Node) Probed(now time.Duration, epoch Epoch, lasts []Index) {
	n.begin(now)
	if n.role == leader && epoch == n.state.Promised && n.lead.probing && len(lasts) == n.logs() {
		n.lead.probing, n.lead.barrier = false, lasts
	}
	n.update()
}

// stop ends serving.
func (n *Node) stop(why StopReason) {
	if n.lead.serving {
		n.lead.serving = false
		n.emit(StopServing{Epoch: n.state.Promised, Why: why})
	}
}

// update brings what is served and what is reported in line with the state; it ends every input.
func (n *Node) update() {
	if n.role == leader {
		n.updateServing()
	}
	n.updateQuorum()
}

// updateServing stops serving when the lease is gone or nothing gets committed, and begins again, once something was
// committed since.
func (n *Node) updateServing() {
	l := &n.lead
	lease := n.now < n.LeaseEnd()
	switch {
	case !l.opened:
	case !lease || n.stuck():
		if !l.lost {
			l.lost, l.barrier = true, nil
			if lease {
				n.stop(NoQuorum)
			} else {
				n.stop(LeaseLost)
			}
		}
	case !l.lost:
	case !n.lead.barrierNeeded():
		n.serve()
	case l.barrier == nil && !l.probing:
		l.probing = true
		n.emit(ProbeLogs{Epoch: n.state.Promised})
	case l.barrier != nil && l.reached():
		n.serve()
	}
}

// barrierNeeded reports whether this leader has served before: the opening rounds are barrier enough for the first time.
func (l *leadership) barrierNeeded() bool { return l.served }

func (l *leadership) reached() bool {
	for k, b := range l.barrier {
		if l.logs[k].commit < b {
			return false
		}
	}
	return true
}

func (n *Node) serve() {
	n.lead.lost, n.lead.serving, n.lead.served, n.lead.barrier = false, true, true, nil
	n.emit(Serve{Epoch: n.state.Promised})
}

// stuck reports whether a log's oldest round waits for a majority for too long.
func (n *Node) stuck() bool {
	for k := range n.lead.logs {
		if s := &n.lead.logs[k]; s.waiting && n.now-s.waitsSince >= n.cfg.QuorumTimeout {
			return true
		}
	}
	return false
}

// lags reports whether a follower is beyond the soft gap.
func (n *Node) lags(p *peerState) bool {
	if n.now-p.heard > n.cfg.SoftGap {
		return true
	}
	for k := range p.logs {
		l := &p.logs[k]
		if l.bytes > n.cfg.SoftGapBytes || l.behind && n.now-l.markAt > n.cfg.SoftGap {
			return true
		}
	}
	return false
}

func (n *Node) updateQuorum() {
	q := SetQuorum{State: Healthy}
	switch {
	case n.role == leader && !n.lead.lost:
		for i := range n.peers {
			p := &n.peers[i]
			lags := n.lags(p)
			if lags != p.lagging {
				p.lagging = lags
				if lags {
					n.event(EventFollowerLag, p.id, protocol.CodeFollowerLag)
				} else {
					n.event(EventFollowerOK, p.id, 0)
				}
			}
			if lags {
				q.State = Soft
			}
		}
	case n.role != follower || n.leader == 0:
		q = SetQuorum{State: ReadOnly, Code: n.lostCode()}
	}
	if n.quorumKnown && q == n.quorum {
		return
	}
	was := n.quorum.State
	n.quorumKnown, n.quorum = true, q
	n.emit(q)
	switch {
	case n.role != leader:
	case q.State == ReadOnly:
		n.event(EventQuorumLost, 0, q.Code)
	case was == ReadOnly:
		n.event(EventQuorumRecovered, 0, protocol.CodeQuorumRecovered)
	}
}

// lostCode is what writes are refused with: 0x6003 if a leader has heard no follower for the hard gap.
func (n *Node) lostCode() protocol.ErrorCode {
	for i := range n.peers {
		if n.now-n.peers[i].heard <= n.cfg.HardGap {
			return protocol.CodeReadOnlyDegraded
		}
	}
	if n.role != leader {
		return protocol.CodeReadOnlyDegraded
	}
	return protocol.CodeInSyncReplicasNotEnough
}
