package replica

import (
	"encoding/binary"
	"time"

	"github.com/mortarmq/mortarmq/internal/mutant"
)

// formation is what a node keeps until it belongs to a formed cluster.
//
// The node with the lowest id forms the cluster: it asks all others what they are; when all are empty, or have persisted
// the same unfinished cluster, it persists an id, has all others persist it, and then declares the cluster formed. A node
// that finds a formed cluster and has the same id persisted completes it; one that knows none is a learner there.
//
// What arrives late must not pass for news: a node whose disk was emptied after the cluster was formed would count as one that
// took part in forming it. So an answer names the instance that asked, and KindForm the one that said it was empty.
type formation struct {
	at    time.Duration
	seen  []formSeen // as peers
	token uint64     // of the state that is being persisted
	// Who is told when it is durable.
	ackTo       NodeID
	ackInstance Instance
}

type formSeen struct {
	known    bool
	stage    Stage
	cluster  ClusterID
	logs     uint16
	instance Instance
	acked    bool // it has persisted this node's Cluster
	told     bool // that it was started with another number of logs
}

// formMessage returns a message about this node's stage; to is the other node's instance, if that is known.
func (n *Node) formMessage(k Kind, to Instance) Message {
	m := Message{Kind: k, Stage: n.stage(), Cluster: n.state.Cluster, Logs: n.state.Logs, Instance: n.instance, Session: uint64(to)}
	if m.Stage == Empty {
		m.Logs = uint16(n.cfg.Logs)
	}
	return m
}

// saving reports whether a stage of the formation is still on its way to the disk.
func (n *Node) saving() bool { return n.form.token > n.saved }

func (n *Node) formTick() {
	if n.now < n.form.at {
		return
	}
	n.form.at = n.now + 2*n.cfg.Heartbeat
	for i := range n.peers {
		n.send(n.peers[i].id, n.formMessage(KindProbe, 0))
		if s := &n.form.seen[i]; n.forms() && n.stage() == Forming && !n.saving() && s.known && !s.acked {
			n.send(n.peers[i].id, n.formMessage(KindForm, s.instance))
		}
	}
	n.considerForming()
}

// forms reports whether this node is the one that forms the cluster.
func (n *Node) forms() bool { return n.cfg.Self == n.cfg.Nodes[0] }

func (n *Node) receiveForming(p *peerState, m Message) {
	seen := n.seenOf(p.id)
	switch m.Kind {
	case KindProbe:
		if !n.saving() { // what isn't durable isn't told
			n.send(p.id, n.formMessage(KindProbeAck, m.Instance))
		}
	case KindProbeAck:
		if m.Session == uint64(n.instance) {
			*seen = formSeen{known: true, stage: m.Stage, cluster: m.Cluster, logs: m.Logs, instance: m.Instance, acked: seen.acked && seen.instance == m.Instance, told: seen.told}
			n.considerForming()
		}
	case KindForm:
		if m.Session == uint64(n.instance) {
			n.onForm(p.id, m)
		}
	case KindFormAck:
		if m.Cluster == n.state.Cluster && n.stage() == Forming && !n.saving() && m.Instance == seen.instance {
			seen.acked = true
			n.considerForming()
		}
	default:
	}
}

func (n *Node) seenOf(id NodeID) *formSeen {
	for i := range n.peers {
		if n.peers[i].id == id {
			return &n.form.seen[i]
		}
	}
	return nil
}

// onForm takes the id of a cluster that is being formed.
func (n *Node) onForm(from NodeID, m Message) {
	switch {
	case m.Cluster == ClusterID{} || m.Logs < 1 || m.Logs > MaxLogs || n.saving():
	case n.stage() == Empty && m.Stage == Forming:
		n.become(Persistent{Cluster: m.Cluster, Logs: m.Logs, Forming: true})
		n.form.ackTo, n.form.ackInstance = from, m.Instance
	case n.state.Cluster != m.Cluster:
		n.event(EventForeignCluster, from, 0)
	default:
		n.send(from, n.formMessage(KindFormAck, m.Instance))
	}
}

// become persists the next stage.
func (n *Node) become(s Persistent) {
	n.state = s
	n.form.token = n.persist()
}

// considerForming goes as far with forming as what the others said allows.
func (n *Node) considerForming() {
	if n.stage() == Formed || n.saving() {
		return
	}
	if n.joinFormed() || !n.forms() {
		return
	}
	cluster, logs, acks := n.state.Cluster, n.state.Logs, 0
	for i := range n.form.seen {
		s := &n.form.seen[i]
		if s.known && s.stage == Empty && int(s.logs) != n.cfg.Logs && !s.told {
			s.told = true
			n.event(EventLogsDiffer, n.peers[i].id, 0)
		}
		switch {
		case !s.known:
			return
		case s.stage == Forming && cluster == ClusterID{}:
			cluster, logs = s.cluster, s.logs // this node began before, and lost its disk
		case s.stage == Forming && s.cluster != cluster:
			n.event(EventForeignCluster, n.peers[i].id, 0)
			return
		}
		if s.acked {
			acks++
		}
	}
	switch {
	case n.stage() == Empty:
		if cluster == (ClusterID{}) {
			binary.BigEndian.PutUint64(cluster[:], n.cfg.Rand()|1)
			binary.BigEndian.PutUint64(cluster[8:], n.cfg.Rand())
			logs = uint16(n.cfg.Logs)
		}
		n.become(Persistent{Cluster: cluster, Logs: logs, Forming: true})
	case acks == len(n.peers):
		n.become(Persistent{Cluster: n.state.Cluster, Logs: n.state.Logs, Promised: 1})
	}
}

// joinFormed makes this node part of a cluster that another node says is formed: all had persisted its id then.
func (n *Node) joinFormed() bool {
	for i := range n.form.seen {
		s := &n.form.seen[i]
		if !s.known || s.stage != Formed || s.logs < 1 || s.logs > MaxLogs {
			continue
		}
		switch {
		case n.stage() == Empty:
			// It may have been part of the cluster before and forgotten what it promised and flushed.
			n.become(Persistent{Cluster: s.cluster, Logs: s.logs, Learner: !mutant.Is("empty-disk-votes")})
		case s.cluster == n.state.Cluster:
			n.become(Persistent{Cluster: s.cluster, Logs: s.logs, Promised: 1})
		default:
			n.event(EventForeignCluster, n.peers[i].id, 0)
			continue
		}
		return true
	}
	return false
}

// formSaved goes on when a stage of the formation is durable.
func (n *Node) formSaved() {
	if n.form.token == 0 || n.saving() {
		return
	}
	n.form.token = 0
	if to := n.form.ackTo; to != 0 {
		n.form.ackTo = 0
		n.send(to, n.formMessage(KindFormAck, n.form.ackInstance))
	}
	if n.stage() != Formed {
		n.form.at = n.now // go on at once
		return
	}
	n.status = standingOf(n.state)
	n.seen = max(n.seen, n.state.Promised)
	n.leaseUntil = max(n.leaseUntil, n.now)
	n.electAt = n.leaseUntil + n.cfg.delay(0)
	n.dropTarget()
	n.emit(FormedCluster{Cluster: n.state.Cluster, Logs: n.state.Logs})
	n.emit(FenceLogs{Epoch: n.state.Promised})
}
