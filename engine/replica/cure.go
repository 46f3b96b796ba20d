package replica

import (
	"slices"
	"time"

	"github.com/mortarmq/mortarmq/internal/mutant"
)

// cure is how a node that doesn't count comes to count again.
//
// The leader tells it, with Confirmed, that all its logs count this instance as no voter, and where they end; when the node
// has flushed that much of them, it persists that it is a voter and says so in what it sends from then on.
type cure struct {
	catching    []bool // per log: catch-up in bulk runs, or is to begin
	given       []bool // per log: rounds are given up for it, see GivesUp
	started     []bool // per log: StartCatchup was asked for in this epoch
	damageToken uint64 // of the state that says suspect

	target     []End   // where the leader's logs ended when it confirmed; nil before
	acked      []Index // per log, in the epoch promised
	clearing   bool
	clearToken uint64
}

// dropTarget forgets what belongs to an epoch and instance.
func (n *Node) dropTarget() {
	n.cure.target = nil
	n.cure.acked = make([]Index, n.logs())
	n.cure.started = make([]bool, n.logs())
	if len(n.cure.catching) != n.logs() {
		n.cure.catching, n.cure.given = make([]bool, n.logs()), make([]bool, n.logs())
	}
	// A log that has given nothing up goes on with the next leader, if it fits.
	copy(n.cure.catching, n.cure.given)
}

// cureTarget takes the first confirmation of an epoch and instance.
func (n *Node) cureTarget(ends []End) {
	if n.status != Voter && n.cure.target == nil && !n.cure.clearing {
		n.cure.target = slices.Clone(ends)
		n.tryCure()
	}
}

func (n *Node) cureProgress(log int, p *Progress) {
	n.cure.acked[log] = p.Acked
	n.tryCure()
}

func (n *Node) tryCure() {
	if n.cure.target == nil || n.cure.clearing || slices.Contains(n.cure.catching, true) || n.role != follower || n.leader == 0 || n.status == Voter {
		return
	}
	for k, t := range n.cure.target {
		if n.cure.acked[k] < t.Last.Index && !mutant.Is("learner-cured-early") {
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

// startCatchup begins catch-up where that is due and there is a leader, and not before it is durable that this node is suspect
// if that is the reason.
func (n *Node) startCatchup() {
	c := &n.cure
	if n.leader == 0 || n.role != follower || n.saved < c.damageToken {
		return
	}
	for k, catching := range c.catching {
		if catching && !c.started[k] {
			c.started[k] = true
			n.emit(StartCatchup{Leader: n.leader, Epoch: n.state.Promised, Log: k})
		}
	}
}

// reborn begins a new instance: the leader asks anew what this node's logs hold.
func (n *Node) reborn() {
	n.instance = newInstance(n.cfg.Rand)
	n.cure.target = nil
	clear(n.cure.acked)
	if n.leader != 0 && n.role == follower {
		n.emitFollow()
	}
}

// Behind says that a log of this follower can't go on from what its leader still has in memory (Log.Behind) and is to catch
// up in bulk: StartCatchup follows. While that runs, Behind says nothing new. With the next epoch it is forgotten (Log.Resume),
// unless GivesUp was called.
func (n *Node) Behind(now time.Duration, log int) {
	n.begin(now)
	if n.role != leader && log >= 0 && log < len(n.cure.catching) && !n.cure.catching[log] {
		n.cure.catching[log], n.cure.started[log] = true, false
		n.startCatchup()
	}
	n.update()
}

// GivesUp says that rounds of a log are about to be given up for what catch-up has begun to bring: nothing ends it any more but
// CaughtUp, and this node does not stand for election before.
func (n *Node) GivesUp(log int) {
	if n.role != leader && log >= 0 && log < len(n.cure.given) {
		n.cure.given[log] = true
	}
}

// CallOff says that a catch-up that has given nothing up is not gone on with: the leader finds the log behind again if it is.
func (n *Node) CallOff(log int) {
	if n.Catching(log) && !n.cure.given[log] {
		n.cure.catching[log] = false
	}
}

// Catching reports whether a log is to catch up, or does: whether a StartCatchup that had to wait is still wanted.
func (n *Node) Catching(log int) bool {
	return log >= 0 && log < len(n.cure.catching) && n.cure.catching[log]
}

// CaughtUp says that a log holds what catch-up brought. It may have been opened anew: FenceLogs and FollowLeader come again,
// then the live stream goes on.
func (n *Node) CaughtUp(now time.Duration, log int) {
	n.begin(now)
	if n.Catching(log) {
		n.cure.catching[log], n.cure.given[log] = false, false
		n.awaitFence = n.leader != 0
		n.emit(FenceLogs{Epoch: n.state.Promised})
		n.reborn()
	}
	n.update()
}

// Damaged says that this node found its own data at fault: its logs count for nothing until they have caught up.
func (n *Node) Damaged(now time.Duration) {
	n.begin(now)
	n.retire()
	n.state.Suspect = true
	n.status = standingOf(n.state)
	n.cure.clearing = false
	n.cure.damageToken = n.persist()
	n.reborn()
	n.update()
}
