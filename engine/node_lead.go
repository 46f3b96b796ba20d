package engine

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// How the logs of a node are fenced, led and made to follow, and when its clients are served.

// gather waits for an answer of every log.
type gather struct {
	epoch replica.Epoch
	ends  []replica.End
	left  int
}

func (g *gather) begin(epoch replica.Epoch, logs int) {
	*g = gather{epoch: epoch, ends: make([]replica.End, logs), left: logs}
}

// take notes a log's answer and reports whether it was the last one.
func (g *gather) take(epoch replica.Epoch, log int, end replica.End) bool {
	if epoch != g.epoch || g.left == 0 {
		return false
	}
	g.ends[log] = end
	g.left--
	return g.left == 0
}

// fence has all logs refuse lower epochs and tell their ends.
func (n *Node) fence(epoch replica.Epoch) {
	e := n.engine.Load()
	n.fencing.begin(epoch, len(e.shards))
	for i := range e.shards {
		c := n.catchings[i]
		if c != nil && c.out.Epoch < epoch {
			n.callOff(i)
		}
		resume := n.catchings[i] == nil && !n.unfinished[i] && !n.repairs[i]
		n.post(i, &replicaEvent{kind: evFence, epoch: epoch, resume: resume, refusal: notLeading(n.leader.Load()), fenced: func(end replica.End) {
			n.inbox.Push(nodeEvent{kind: nodeFenced, epoch: epoch, log: i, end: end})
		}})
	}
}

func (n *Node) fencedAll() {
	for log, end := range n.fencing.ends {
		n.lastOf[log] = end.Last
	}
	n.machine.Fenced(n.now(), n.fencing.epoch, n.fencing.ends)
	if n.led != 0 && n.fencing.epoch > n.led {
		// It led before. What it knows beyond what is committed is worth nothing any more. What the machine wants of the logs now
		// is for the engine that is opened anew: this one would forget whom it follows.
		n.engine.Load().coord.Depose(notLeading(n.leader.Load()).text)
		if n.broken || n.leaving {
			// A disk that has failed is read again by a restart, and until then the node says so. One that leaves needs no engine.
			n.led = 0
			return
		}
		n.reopen(len(n.fencing.ends))
	}
}

// lead makes this node's logs open their epoch.
func (n *Node) lead(epoch replica.Epoch) {
	e := n.engine.Load()
	n.led = epoch
	n.leader.Store(n.nodes[n.opts.Self])
	n.opened.begin(epoch, len(e.shards))
	for i := range e.shards {
		n.post(i, &replicaEvent{kind: evLead, epoch: epoch,
			fenced: func(end replica.End) {
				n.inbox.Push(nodeEvent{kind: nodeLogOpened, epoch: epoch, log: i, end: end})
			},
			done: func(err error) {
				if err != nil {
					n.inbox.Push(nodeEvent{kind: nodeServed, epoch: epoch, err: fmt.Errorf("log %d: %w", i, err)})
				}
			},
		})
	}
}

// openedAll goes on when everything of earlier epochs is committed and in the coordinator's hands.
func (n *Node) openedAll() {
	e, epoch := n.engine.Load(), n.opened.epoch
	if e == nil || epoch != n.led {
		return
	}
	e.epoch.Store(uint32(epoch))
	e.coord.Lead(wal.Epoch(epoch), func(err error) {
		n.inbox.Push(nodeEvent{kind: nodeServed, epoch: epoch, err: err})
	})
}

func (n *Node) follow(o replica.FollowLeader) {
	n.leader.Store(n.nodes[o.Leader])
	if n.leaving {
		return // its engine was deposed
	}
	n.postAll(replicaEvent{kind: evFollow, epoch: o.Epoch, peer: o.Leader, instance: o.Instance, voter: o.Voter, done: func(err error) {
		if err != nil {
			n.log.Error("a log can't follow the leader", "leader", n.nodes[o.Leader].name, "epoch", o.Epoch, "err", err)
		}
	}})
}

func (n *Node) serve() {
	e := n.engine.Load()
	if e == nil {
		return
	}
	n.refuseWrites(e, nil)
	e.coord.Freeze("")
	n.serving.Store(e)
}

func (n *Node) stopServing(o replica.StopServing) {
	e := n.engine.Load()
	if o.Why == replica.SteppedDown {
		n.serving.Store(nil)
	}
	if e == nil {
		return
	}
	text := "the cluster can't commit at the moment (" + o.Why.String() + "): send again, with the same producer_seq"
	n.refuseWrites(e, &refusal{protocol.CodeReadOnlyDegraded, text})
	e.coord.Freeze(text)
}

// refuseWrites has all shards answer publishes with f, those that wait too; nil: they are taken.
func (n *Node) refuseWrites(e *Engine, f *refusal) {
	for i, s := range e.shards {
		s.repl.readOnly.Store(f)
		n.post(i, &replicaEvent{kind: evQuorum, refusal: f})
	}
}

func (n *Node) setQuorum(o replica.SetQuorum) {
	st := *n.status.Load()
	st.Quorum = o.State
	n.status.Store(&st)
	if e := n.serving.Load(); e != nil && o.State == replica.ReadOnly {
		n.refuseWrites(e, &refusal{o.Code, "no majority of the cluster's nodes is there to commit: send again, with the same producer_seq, when it is"})
	}
}

func (n *Node) probe(epoch replica.Epoch) {
	e := n.engine.Load()
	n.probing.begin(epoch, len(e.shards))
	for i := range e.shards {
		n.post(i, &replicaEvent{kind: evProbe, epoch: epoch, fenced: func(end replica.End) {
			n.inbox.Push(nodeEvent{kind: nodeProbed, epoch: epoch, log: i, end: end})
		}})
	}
}

// tell logs what an operator should know.
func (n *Node) tell(o replica.Event) {
	level := slog.LevelInfo
	switch o.What {
	case replica.EventForeignCluster, replica.EventLosingElection, replica.EventTwoLeaders, replica.EventLogsDiffer:
		level = slog.LevelError
	case replica.EventFollowerLag, replica.EventQuorumLost, replica.EventSteppedDown, replica.EventFetchFailed:
		level = slog.LevelWarn
	case replica.EventElection, replica.EventElectionLost:
		level = slog.LevelDebug
	case replica.EventElected, replica.EventFollows, replica.EventFollowerOK, replica.EventQuorumRecovered, replica.EventVoter:
	}
	attrs := []any{"epoch", o.Epoch}
	if o.Peer != 0 {
		attrs = append(attrs, "peer", n.nodes[o.Peer].name)
	}
	if o.Log >= 0 {
		attrs = append(attrs, "log", o.Log)
	}
	if o.Code != 0 {
		attrs = append(attrs, "code", o.Code)
	}
	n.log.Log(context.Background(), level, "cluster: "+o.What.String(), attrs...)
}
