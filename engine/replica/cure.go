package replica

import (
	"slices"
	"time"
)

// cure is how a node that doesn't count comes to count again.
//
// The leader tells it, with Confirmed, that all its logs count this instance as no voter, and what is committed; when the
// node has flushed that much of the leader's logs, it persists that it is a voter and says so in what it sends from then on.
type cure struct {
	catching   bool   // catch-up in bulk runs, or is to begin
	startToken uint64 // of the state that says learner: catch-up begins when it is durable

	target     []Index // what was committed when the leader confirmed; nil before
	acked      []Index // per log, in the epoch promised
	clearing   bool
	clearToken uint64
}

// dropTarget forgets what belongs to an epoch and instance.
func (n *Node) dropTarget() {
	n.cure.target = nil
	n.cure.acked = make([]Index, n.logs())
}

// cureTarget takes the first confirmation of an epoch and instance.
func (n *Node) cureTarget(commits []Index) {
	if n.status != Voter && n.cure.target == nil && !n.cure.clearing {
		n.cure.target = slices.Clone(commits)
		n.tryCure()
	}
}

func (n *Node) cureProgress(log int, p *Progress) {
	if len(n.cure.acked) != n.logs() {
		n.cure.acked = make([]Index, n.logs())
	}
	n.cure.acked[log] = p.Acked
	n.tryCure()
}

func (n *Node) tryCure() {
	if n.cure.target == nil || n.cure.clearing || n.cure.catching || n.role != follower || n.leader == 0 || n.status == Voter {
		return
	}
	for k, t := range n.cure.target {
		if n.cure.acked[k] < t && !mutant("learner-cured-early") {
			return
		}
	}
	n.state.Learner, n.state.Suspect = false, false
	n.cure.clearing, n.cure.clearToken = true, n.persist()
}

func (n *Node) cureSaved() {
	if c := &n.cure; c.clearing && n.saved >= c.clearToken {
		c.clearing, c.target = false, nil
		n.status = Voter
		n.event(EventVoter, n.cfg.Self, 0)
		if n.leader != 0 && n.role == follower {
			n.emitFollow()
		}
	}
	n.startCatchup()
}

// startCatchup begins catch-up once that this node is a learner is durable.
func (n *Node) startCatchup() {
	if c := &n.cure; c.catching && c.startToken > 0 && n.saved >= c.startToken && n.leader != 0 && n.role == follower {
		n.emit(StartCatchup{Leader: n.leader, Epoch: n.state.Promised})
	}
}

// disown makes this node count for less, before anything that it vouched for is given up.
func (n *Node) disown(s Standing) uint64 {
	n.state.Learner = n.state.Learner || s == Learner
	n.state.Suspect = n.state.Suspect || s == Suspect
	n.status = standingOf(n.state)
	n.cure.clearing = false
	n.instance = newInstance(n.cfg.Rand)
	n.dropTarget()
	return n.persist()
}

// Behind says that this follower can't go on from what its leader still has in memory and is to catch up in bulk: it becomes
// a learner, then StartCatchup comes. It may be called again to begin anew.
func (n *Node) Behind(now time.Duration) {
	n.begin(now)
	if n.role == follower && !n.cure.catching {
		n.cure.catching = true
		n.cure.startToken = n.disown(Learner)
		n.startCatchup()
	}
	n.update()
}

// CaughtUp says that the logs hold what catch-up brought, and go on in the live stream.
func (n *Node) CaughtUp(now time.Duration) {
	n.begin(now)
	if n.cure.catching {
		n.cure.catching, n.cure.startToken = false, 0
		n.dropTarget()
		if n.formed() {
			n.awaitFence = n.leader != 0
			n.emit(FenceLogs{Epoch: n.state.Promised})
		}
	}
	n.update()
}

// Damaged says that this node found its own data at fault: it counts for nothing until it has caught up (Behind).
func (n *Node) Damaged(now time.Duration) {
	n.begin(now)
	n.retire()
	n.disown(Suspect)
	n.update()
}
