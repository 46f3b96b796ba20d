package engine

import (
	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
)

// What the transport delivers; any goroutine calls these methods.

// Connected tells that frames reach a peer on a lane again.
func (n *Node) Connected(from replica.NodeID, lane peerwire.Lane) {
	switch lane {
	case peerwire.Control:
		n.inbox.Push(nodeEvent{kind: nodeConnected, from: from})
	case peerwire.Log:
		n.postShards(evConnected, from)
	case peerwire.Bulk, peerwire.Lanes: // who needs something asks again
	}
}

// Disconnected tells that a lane to a peer is gone.
func (n *Node) Disconnected(from replica.NodeID, lane peerwire.Lane) {
	switch lane {
	case peerwire.Control:
		n.inbox.Push(nodeEvent{kind: nodeDisconnected, from: from})
	case peerwire.Bulk:
		n.do(func() { n.dropSupplies(func(s *supply) bool { return s.key.peer == from }) })
	case peerwire.Log, peerwire.Lanes: // what was under way is sent again
	}
}

// Writable tells that there is room on a lane again after a send was refused.
func (n *Node) Writable(to replica.NodeID, lane peerwire.Lane) {
	if lane == peerwire.Log {
		n.postShards(evWritable, to)
	}
}

func (n *Node) postShards(kind replicaKind, peer replica.NodeID) {
	if e := n.engine.Load(); e != nil {
		for _, s := range e.shards {
			s.inbox.Push(message{kind: msgReplica, replica: &replicaEvent{kind: kind, peer: peer}})
		}
	}
}

// Message takes a message of another node's replica.Node, which is handed over.
func (n *Node) Message(from replica.NodeID, m *replica.Message) {
	n.inbox.Push(nodeEvent{kind: nodeMessage, from: from, message: m})
}

// Append takes a round, or a probe if payload is nil. a is borrowed, payload is handed over.
func (n *Node) Append(from replica.NodeID, a *peerwire.Append, payload peerwire.Payload) {
	ev := replicaEvents.Get().(*replicaEvent)
	ev.kind, ev.peer, ev.append, ev.payload = evAppend, from, *a, payload
	n.deliver(int(a.Log), ev)
}

// Flushed takes a follower's acknowledgement, which is borrowed.
func (n *Node) Flushed(from replica.NodeID, f *peerwire.Flushed) {
	ev := replicaEvents.Get().(*replicaEvent)
	ev.kind, ev.peer, ev.epoch, ev.index, ev.instance, ev.voter = evFlushed, from, f.Epoch, f.Index, f.Instance, f.Voter
	n.deliver(int(f.Log), ev)
}

// Reject takes a follower's refusal, which is borrowed.
func (n *Node) Reject(from replica.NodeID, r *peerwire.Reject) {
	ev := replicaEvents.Get().(*replicaEvent)
	ev.kind, ev.peer, ev.epoch, ev.instance, ev.end = evReject, from, r.Epoch, r.Instance, r.End
	n.deliver(int(r.Log), ev)
}

// deliver hands a pooled event to a shard. What is small the transport's goroutine sees to itself, if the shard sleeps: see
// lend.go.
func (n *Node) deliver(log int, ev *replicaEvent) {
	ok, lend := false, false
	e := n.engine.Load()
	if e != nil && log < len(e.shards) {
		s, m := e.shards[log], message{kind: msgReplica, replica: ev}
		if s.lends() && len(evPayload(ev)) <= lentBytes {
			ok, lend = s.inbox.Offer(m)
		} else {
			ok = s.inbox.Push(m)
		}
	}
	switch {
	case lend:
		e.lend(false)
	case !ok:
		if ev.payload != nil {
			ev.payload.Release()
		}
		ev.recycle()
	}
}

// Bulk takes a frame of the bulk lane; frame and payload are handed over.
func (n *Node) Bulk(from replica.NodeID, f peerwire.BulkFrame, payload peerwire.Payload) {
	if fetch, ok := f.(*peerwire.Fetch); ok {
		n.deliver(int(fetch.Log), &replicaEvent{kind: evFetch, peer: from, transfer: fetch.Transfer, index: fetch.After, point: fetch.UpTo})
		return
	}
	if !n.inbox.Push(nodeEvent{kind: nodeBulk, from: from, frame: f, payload: payload}) && payload != nil {
		payload.Release()
	}
}

// bulk handles a frame of the bulk lane.
func (n *Node) bulk(ev *nodeEvent) {
	switch f := ev.frame.(type) {
	case *peerwire.Fetched, *peerwire.FetchEnd:
		n.rounds(ev)
	case *peerwire.Behind:
		if f.ID != 0 {
			n.rounds(ev)
		} else {
			n.behind(ev.from, f)
		}
	default:
		n.bulkCatchup(ev)
	}
	if ev.payload != nil {
		ev.payload.Release()
	}
}
