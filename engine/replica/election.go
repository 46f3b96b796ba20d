package replica

import (
	"time"

	"github.com/mortarmq/mortarmq/internal/mutant"
	"github.com/mortarmq/mortarmq/protocol"
)

// election is what a node keeps while it stands for election.
type election struct {
	round    uint64 // numbers pre-votes, so that late answers to an earlier one don't count
	epoch    Epoch
	deadline time.Duration
	resendAt time.Duration
	prepared bool    // the promise to itself is durable and PREPARE was sent
	own      promise // this node's own
	best     []End   // per log the highest end
	from     []NodeID
	missing  []bool // per log whether it is still being fetched
}

// eligible reports whether this node may stand for election: it counts as a voter, its logs' ends are known and hold what it
// knows to be committed, its disk works.
func (n *Node) eligible() bool {
	return n.status == Voter && n.usable() && !n.resigned && n.settled() && !n.incomplete()
}

// incomplete reports whether a log lacks what it has given up, or knows to be committed.
func (n *Node) incomplete() bool {
	for k, e := range n.ends {
		if n.cure.given[k] || e.Last.Less(e.Floor) {
			return true
		}
	}
	return false
}

// followerTick stands for election when the leader's lease ran out.
func (n *Node) followerTick() {
	if n.now < n.leaseUntil || n.now < n.electAt {
		return
	}
	if n.leader != 0 {
		n.leader, n.claimant = 0, 0
		n.emit(LeaderLost{})
	}
	if !n.eligible() {
		n.electAt = n.now + n.cfg.Heartbeat
		if n.settled() && n.incomplete() {
			n.emit(FenceLogs{Epoch: n.state.Promised}) // it may hold more by now
		}
		return
	}
	n.ask()
}

// ask asks the others whether they agree that there is no leader. Nothing is persisted, so that a node that nobody hears, or
// that hears nobody, can't drive the epoch up.
func (n *Node) ask() {
	n.role = asking
	n.elec = election{round: n.elec.round + 1, deadline: n.now + 3*n.cfg.Heartbeat}
	for i := range n.peers {
		n.peers[i].answered, n.peers[i].granted = false, false
	}
	if n.enough() {
		n.stand()
		return
	}
	n.sendPreVotes()
}

func (n *Node) sendPreVotes() {
	n.elec.resendAt = n.now + n.cfg.Heartbeat
	for i := range n.peers {
		if p := &n.peers[i]; !p.answered {
			n.send(p.id, Message{Kind: KindPreVote, Epoch: max(n.seen, n.state.Promised) + 1, Session: n.elec.round})
		}
	}
}

// helps reports whether this node may help another one to leadership.
func (n *Node) helps(id NodeID) (Reason, bool) {
	switch {
	case n.status == Learner || !n.usable():
		return NoVote, false
	case n.now < n.leaseUntil && n.leaseTo != id && !mutant.Is("promise-under-lease"):
		// A leader that asks has stopped serving under its lease.
		return LeaseRuns, false
	case (n.role == leader || n.role == elected) && n.now < n.LeaseEnd():
		return LeaseRuns, false
	}
	return 0, true
}

func (n *Node) onPreVote(from NodeID, m Message) {
	reason, ok := n.helps(from)
	if n.role == candidate || n.role == elected {
		ok = false // it has promised itself an epoch a moment ago
	}
	n.send(from, Message{Kind: KindPreVoteAck, Epoch: n.state.Promised, Session: m.Session, Granted: ok, Reason: reason, Standing: n.status})
}

func (n *Node) onPreVoteAck(p *peerState, m Message) {
	n.seen = max(n.seen, m.Epoch)
	if n.role != asking || m.Session != n.elec.round || p.answered {
		return
	}
	p.answered, p.granted, p.promise = true, m.Granted, promise{standing: m.Standing}
	switch {
	case n.enough():
		n.stand()
	case n.hopeless():
		n.giveUp()
	}
}

// enough reports whether those who granted suffice: a majority, so that no other node can have one in the same epoch; and so
// many voters among them that every majority which may have committed something has one of them. This node is a voter. Where
// all have granted, suspects' ends count, too: whatever there is of the logs, one of them has it.
func (n *Node) enough() bool {
	granted, sound := 1, 1
	for i := range n.peers {
		if p := &n.peers[i]; p.answered && p.granted {
			granted++
			if p.promise.standing == Voter || mutant.Is("suspect-votes") {
				sound++
			}
		}
	}
	all := len(n.cfg.Nodes)
	return granted == all || granted >= majority(all) && sound > all-majority(all)
}

// hopeless reports whether those who haven't answered can't make it enough.
func (n *Node) hopeless() bool {
	granted := 1
	for i := range n.peers {
		if p := &n.peers[i]; !p.answered || p.granted {
			granted++
		}
	}
	return granted < majority(len(n.cfg.Nodes))
}

// giveUp ends an attempt; the next one comes after a random delay.
func (n *Node) giveUp() {
	if n.role != asking {
		n.event(EventElectionLost, 0, 0)
	}
	was := n.role
	n.attempt++
	n.role = follower
	n.electAt = n.now + n.cfg.Heartbeat/4 + n.cfg.delay(n.attempt)
	if n.leader != 0 {
		n.leader = 0
		n.emit(LeaderLost{})
	}
	if was == elected {
		// It can't get what it lacks: whoever has that goes first, and need not wait.
		n.electAt += 2 * n.cfg.Lease
		n.resign()
	}
}

// resign tells the others that they need not wait for this node's lease.
func (n *Node) resign() {
	for i := range n.peers {
		n.send(n.peers[i].id, Message{Kind: KindResign, Epoch: n.state.Promised})
	}
}

// stand makes this node a candidate for the next epoch, which it promises to itself first.
func (n *Node) stand() {
	e := max(n.seen, n.state.Promised) + 1
	if e == 0 {
		n.giveUp() // there is none left
		return
	}
	n.promise(e, n.cfg.Self)
	n.role = candidate
	n.elec.epoch, n.elec.prepared = e, false
	n.elec.deadline = n.now + n.cfg.Lease
	n.elec.resendAt = n.elec.deadline
	for i := range n.peers {
		n.peers[i].answered, n.peers[i].granted = false, false
	}
	n.event(EventElection, 0, 0)
}

// prepare goes on when the promise to itself is durable and the logs are fenced.
func (n *Node) prepare() {
	n.elec.prepared = true
	n.elec.own = promise{standing: n.status, ends: n.fenceEnds}
	if n.enough() {
		n.win()
		return
	}
	n.sendPrepares()
}

func (n *Node) sendPrepares() {
	n.elec.resendAt = n.now + n.cfg.Heartbeat
	for i := range n.peers {
		if p := &n.peers[i]; !p.answered {
			n.send(p.id, Message{Kind: KindPrepare, Epoch: n.elec.epoch})
		}
	}
}

func (n *Node) electionTick() {
	switch {
	case n.now >= n.elec.deadline:
		n.giveUp()
	case n.now < n.elec.resendAt:
	case n.role == asking:
		n.sendPreVotes()
	case n.elec.prepared:
		n.sendPrepares()
	}
}

func (n *Node) refuse(to NodeID, asked Epoch, why Reason) {
	n.send(to, Message{Kind: KindRefuse, Epoch: n.state.Promised, Session: uint64(asked), Reason: why})
}

func (n *Node) onPrepare(from NodeID, m Message) {
	promised := m.Epoch == n.state.Promised && n.state.Candidate == from
	if mutant.Is("two-promises-one-epoch") && m.Epoch == n.state.Promised && n.role == follower {
		n.state.Candidate, n.owePromise = from, true
		n.settle()
		return
	}
	if m.Epoch < n.state.Promised || m.Epoch == n.state.Promised && !promised {
		n.refuse(from, m.Epoch, StaleEpoch)
		return
	}
	if n.leader == from && promised {
		return // it leads already: this is an old request
	}
	if why, ok := n.helps(from); !ok {
		n.refuse(from, m.Epoch, why)
		return
	}
	if !promised {
		n.promise(m.Epoch, from)
	}
	n.owePromise = true
	n.settle()
}

func (n *Node) onPromise(p *peerState, m Message) {
	if n.role != candidate || !n.elec.prepared || m.Epoch != n.elec.epoch || p.granted {
		return
	}
	p.answered, p.granted, p.promise = true, true, promise{standing: m.Standing, ends: m.Ends}
	if n.enough() {
		n.win()
	}
}

func (n *Node) onRefuse(p *peerState, m Message) {
	n.seen = max(n.seen, m.Epoch)
	if m.Session != uint64(n.state.Promised) {
		return // about an earlier epoch of this node
	}
	switch n.role {
	case candidate:
		if p.granted {
			return
		}
		p.answered = true
		if n.hopeless() || m.Epoch > n.elec.epoch {
			n.giveUp()
		}
	case elected, leader:
		if m.Reason == StaleEpoch && m.Epoch > n.state.Promised {
			n.abandon()
			n.attempt = 0
			n.electAt = n.now + n.cfg.delay(0)
		}
	default:
	}
}

// win is what follows a majority of promises: per log the highest end is what the new epoch goes on from.
func (n *Node) win() {
	logs := n.logs()
	n.elec.best, n.elec.from, n.elec.missing = make([]End, logs), make([]NodeID, logs), make([]bool, logs)
	copy(n.elec.best, n.elec.own.ends)
	for k := range logs {
		best, floor := &n.elec.best[k], n.elec.own.ends[k].Floor
		n.elec.from[k] = n.cfg.Self
		for i := range n.peers {
			p := &n.peers[i]
			if !p.granted {
				continue
			}
			end := p.promise.ends[k]
			if best.Last.Less(end.Last) {
				*best, n.elec.from[k] = end, p.id
			}
			if floor.Less(end.Floor) {
				floor = end.Floor
			}
		}
		// A log that ends behind a committed round, by epoch and index, has that round.
		if best.Last.Less(floor) {
			n.emit(Event{What: EventLosingElection, Peer: n.elec.from[k], Epoch: n.elec.epoch, Log: k, Code: protocol.CodeUncleanElectionRejected})
			n.giveUp()
			return
		}
	}
	n.role, n.leader = elected, n.cfg.Self
	n.event(EventElected, 0, 0)
	n.beginLeading()
	n.fetch()
}

// fetch asks for what this node lacks; heartbeats meanwhile keep the others from electing someone else.
func (n *Node) fetch() {
	n.elec.deadline = n.now + n.cfg.FetchTimeout
	for k, best := range n.elec.best {
		own := n.elec.own.ends[k]
		if n.elec.from[k] == n.cfg.Self || mutant.Is("candidate-skips-fetch") {
			continue
		}
		after := min(own.Commit, own.Last.Index)
		if own.Last.Epoch == best.Last.Epoch {
			after = own.Last.Index // both have it from the same leader: nothing to replace
		}
		n.elec.missing[k] = true
		n.emit(FetchLog{Epoch: n.elec.epoch, Log: k, From: n.elec.from[k], After: after, Upto: best.Last})
	}
	n.fetchedAll()
}

func (n *Node) fetchedAll() {
	for _, m := range n.elec.missing {
		if m {
			return
		}
	}
	n.startLeading()
}

// Fetches reports whether this node was elected in epoch and still waits for what it fetches.
func (n *Node) Fetches(epoch Epoch) bool { return n.role == elected && epoch == n.elec.epoch }

// Fetching says that a fetch goes on: it may take another FetchTimeout.
func (n *Node) Fetching(now time.Duration, epoch Epoch) {
	n.begin(now)
	if n.role == elected && epoch == n.elec.epoch {
		n.elec.deadline = n.now + n.cfg.FetchTimeout
	}
	n.update()
}

// Fetched says that what FetchLog asked for is durable on this node; end is where the log ends now.
func (n *Node) Fetched(now time.Duration, epoch Epoch, log int, end End) {
	n.begin(now)
	if n.role == elected && epoch == n.elec.epoch && log >= 0 && log < len(n.elec.missing) && n.elec.missing[log] {
		if end.Last.Less(n.elec.best[log].Last) {
			n.fetchFailed(log)
		} else {
			n.elec.missing[log] = false
			n.fetchedAll()
		}
	}
	n.update()
}

// FetchFailed says that a fetch can't be completed: the election is given up.
func (n *Node) FetchFailed(now time.Duration, epoch Epoch, log int) {
	n.begin(now)
	if n.role == elected && epoch == n.elec.epoch && log >= 0 && log < len(n.elec.missing) {
		n.fetchFailed(log)
	}
	n.update()
}

func (n *Node) fetchFailed(log int) {
	n.emit(Event{What: EventFetchFailed, Peer: n.elec.from[log], Epoch: n.elec.epoch, Log: log})
	n.giveUp()
}
