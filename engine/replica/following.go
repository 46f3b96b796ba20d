package replica

import "slices"

// onLeader takes a heartbeat or INSTALL.
func (n *Node) onLeader(from NodeID, m Message) {
	if m.Epoch < n.state.Promised {
		n.refuse(from, m.Epoch, StaleEpoch)
		return
	}
	if m.Epoch > n.state.Promised {
		n.promise(m.Epoch, from)
	} else if n.leader != 0 && n.leader != from {
		n.event(EventTwoLeaders, from, 0)
		n.refuse(from, m.Epoch, StaleEpoch)
		return
	}
	n.role = follower // an election of its own is over
	if n.claimant != from {
		n.claimant, n.oweInstall = from, false
	}
	following := n.leader == from
	if m.Kind == KindInstall {
		n.session, n.oweInstall = m.Session, true
		if following && !n.awaitFence {
			n.awaitFence = true
			n.emit(FenceLogs{Epoch: m.Epoch})
		}
	}
	n.settle()
	if m.Kind == KindHeartbeat {
		n.heartbeat(from, m)
	}
}

// follow goes on when the leader's epoch is durable here and the logs are fenced.
func (n *Node) follow() {
	if n.leader != n.claimant {
		n.leader = n.claimant
		n.attempt = 0
		n.emitFollow()
		n.event(EventFollows, n.leader, 0)
		n.startCatchup()
	}
	if n.oweInstall && !n.awaitFence {
		n.oweInstall = false
		n.send(n.leader, Message{Kind: KindInstallAck, Epoch: n.state.Promised, Session: n.session, Instance: n.instance, Standing: n.status, Ends: slices.Clone(n.ends)})
	}
}

func (n *Node) emitFollow() {
	n.emit(FollowLeader{Leader: n.leader, Epoch: n.state.Promised, Instance: n.instance, Voter: n.status == Voter})
}

// heartbeat renews the lease that this node grants. While the epoch isn't durable here, nothing is granted; but no election
// is begun either.
func (n *Node) heartbeat(from NodeID, m Message) {
	n.leaseUntil, n.leaseTo = max(n.leaseUntil, n.now+n.cfg.Lease), from
	n.electAt = n.leaseUntil + n.cfg.delay(0)
	if n.leader != from {
		return
	}
	if len(m.Commits) > 0 {
		n.emit(LeaderCommits{Epoch: m.Epoch, Commits: m.Commits})
	}
	n.send(from, Message{Kind: KindHeartbeatAck, Epoch: m.Epoch, Sent: m.Sent, Instance: n.instance, Standing: n.status})
	if m.Confirmed && m.Instance == n.instance {
		n.cureTarget(m.Ends)
	}
}

// onResign ends the lease of a leader that has stopped.
func (n *Node) onResign(from NodeID, m Message) {
	if m.Epoch != n.state.Promised || n.leaseTo != from || n.role != follower {
		return
	}
	n.leaseUntil = n.now
	if n.leader == from {
		n.leader = 0
		n.emit(LeaderLost{})
	}
	n.claimant = 0
	n.electAt = n.now + n.cfg.delay(0)
}
