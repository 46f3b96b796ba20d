package engine

import (
	"errors"
	"fmt"
	"time"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
)

// An elected node completes its logs from others before it leads. What another node has in memory comes as rounds (FETCH). Where
// a log lacks what lies before those, and the cluster has one log, the election fails: the node that has more can lead. With
// several, one may be far ahead in this log and another in that, so the log catches up in bulk from that node first, as a
// follower does from its leader. Only then: a log that catches up gives up rounds, and depends on a single source meanwhile.

// fetch is one log that this node completes. It belongs to the control loop.
type fetch struct {
	out replica.FetchLog
	// id is the transfer under way; heard is when something came of it last, again when it is asked for once more, 0: not
	// before something else happens.
	id           uint32
	heard, again time.Duration
	// adopting: everything was sent, and is on its way to this node's disk.
	adopting bool
	// opened is since when the engine is being opened anew behind a catch-up, 0: it is open.
	opened time.Duration
}

const (
	// fetchRetry is after how much silence a FETCH is repeated, fetchPatience after how much the fetch fails.
	fetchRetry    = 500 * time.Millisecond
	fetchPatience = 5 * time.Second
	// fetchOpening bounds how long an election waits for the engine that is opened behind a catch-up.
	fetchOpening = time.Minute
)

var errTooFar = errors.New("what the other node has in memory lies beyond the end of this node's log: that node is to lead")

// fetch begins to get the rounds of a log that this node lacks to lead.
func (n *Node) fetch(o replica.FetchLog) {
	f := &fetch{out: o, heard: n.now()}
	n.fetches[o.Log] = f
	n.askRounds(f)
}

// askRounds asks for the rounds behind those that the log has in common with the other node's.
func (n *Node) askRounds(f *fetch) {
	n.lastFetch++
	f.id, f.again, f.adopting, f.opened = n.lastFetch, n.now()+fetchRetry, false, 0
	e, o, id := n.engine.Load(), f.out, f.id
	n.post(o.Log, &replicaEvent{kind: evStored, step: func() {
		r := e.shards[o.Log].repl
		after := r.fetchAfter(o.Upto)
		if after >= o.Upto.Index {
			r.handle(n.adopted(o, id))
			return
		}
		// Where the transport refuses it is asked again.
		r.peers.Bulk(o.From, &peerwire.Fetch{Transfer: peerwire.Transfer{Log: uint16(o.Log), ID: id}, After: after, UpTo: o.Upto}, nil, nil)
	}})
}

// adopted is for the shard: it reports, when everything that was fetched is on this disk.
func (n *Node) adopted(o replica.FetchLog, id uint32) *replicaEvent {
	return &replicaEvent{kind: evAdopted, point: o.Upto, fenced: func(end replica.End) {
		n.inbox.Push(nodeEvent{kind: nodeFetched, log: o.Log, id: id, end: end})
	}}
}

// fetchOf returns the fetch that a frame belongs to, nil if it isn't wanted any more.
func (n *Node) fetchOf(from replica.NodeID, t peerwire.Transfer) *fetch {
	f := n.fetches[int(t.Log)]
	if f == nil || f.id != t.ID || f.out.From != from || !n.machine.Fetches(f.out.Epoch) {
		return nil
	}
	return f
}

// rounds handles the frames that answer FETCH.
func (n *Node) rounds(ev *nodeEvent) {
	now := n.now()
	f := n.fetchOf(ev.from, ev.frame.Of())
	if f == nil {
		return
	}
	f.heard, f.again = now, now+fetchRetry
	switch frame := ev.frame.(type) {
	case *peerwire.Fetched:
		n.machine.Fetching(now, f.out.Epoch)
		n.post(f.out.Log, &replicaEvent{kind: evAdopt, peer: ev.from, payload: ev.payload,
			append: peerwire.Append{Log: frame.Log, Epoch: f.out.Epoch, Prev: frame.Prev, Point: frame.Point, Commit: frame.Commit}})
		ev.payload = nil
	case *peerwire.FetchEnd:
		if !frame.OK {
			n.failFetch(f, errors.New(frame.Reason))
			return
		}
		f.adopting, f.again = true, 0
		n.post(f.out.Log, n.adopted(f.out, f.id))
	case *peerwire.Behind:
		f.again = 0
		n.fetchBehind(f, frame.Base, frame.Committed)
	default:
	}
}

// fetchBehind goes on when the other node has in memory only what lies behind base: from there, if this log has that round, or
// else with a catch-up up to something that is committed.
func (n *Node) fetchBehind(f *fetch, base, committed replica.Point) {
	e, log, id := n.engine.Load(), f.out.Log, f.id
	n.post(log, &replicaEvent{kind: evStored, step: func() {
		r := e.shards[log].repl
		has := r.log.Has(base)
		if has {
			r.agreed = max(r.agreed, base.Index)
		}
		n.do(func() {
			switch {
			case n.fetches[log] != f || f.id != id || !n.machine.Fetches(f.out.Epoch):
			case has:
				n.askRounds(f)
			case n.logs() == 1:
				n.failFetch(f, errTooFar)
			default:
				n.fetchInBulk(f, committed)
			}
		})
	}})
}

// fetchInBulk has the log catch up from the node that it is fetched from. floor is committed and not before that node's base.
func (n *Node) fetchInBulk(f *fetch, floor replica.Point) {
	log := f.out.Log
	c := n.catchingOf(log, floor)
	c.fetch, c.out = f, replica.StartCatchup{Leader: f.out.From, Epoch: f.out.Epoch, Log: log}
	n.log.Info("elected, but too far behind to lead: catching up in bulk first", "log", log, "peer", n.nodes[f.out.From].name, "epoch", f.out.Epoch)
	n.ask(log, c)
}

// fetched tells the machine that everything is here.
func (n *Node) fetched(ev *nodeEvent) {
	if f := n.fetches[ev.log]; f != nil && f.id == ev.id {
		delete(n.fetches, ev.log)
		n.machine.Fetched(n.now(), f.out.Epoch, ev.log, ev.end)
	}
}

// failFetch gives the election up.
func (n *Node) failFetch(f *fetch, err error) {
	n.log.Warn("the rounds that this node lacks to lead can't be fetched", "peer", n.nodes[f.out.From].name, "log", f.out.Log, "err", err)
	n.machine.FetchFailed(n.now(), f.out.Epoch, f.out.Log)
	n.dropFetch(f)
}

// dropFetch ends a fetch that nobody needs any more. A log that has given up rounds for it goes on with that, from the next
// leader if there is one.
func (n *Node) dropFetch(f *fetch) {
	log := f.out.Log
	delete(n.fetches, log)
	if c := n.catchings[log]; c != nil && c.fetch == f {
		if c.stage == catchupAsks {
			n.callOff(log)
			return
		}
		c.fetch = nil
		n.machine.Behind(n.now(), log)
		n.machine.GivesUp(log)
	}
}

// stepFetches repeats what nobody answers, and returns when to look again.
func (n *Node) stepFetches(now time.Duration) (next time.Duration) {
	next = now + fetchPatience
	for log := range int(n.machine.State().Logs) {
		f := n.fetches[log]
		switch {
		case f == nil:
		case !n.machine.Fetches(f.out.Epoch):
			n.dropFetch(f)
		case n.engine.Load() == nil:
			if f.opened == 0 {
				f.opened = now
			}
			if now-f.opened < fetchOpening {
				n.machine.Fetching(now, f.out.Epoch)
			}
			next = min(next, now+fetchRetry)
		case f.again == 0:
		case now-f.heard >= fetchPatience:
			n.failFetch(f, fmt.Errorf("nothing was heard for %v", fetchPatience))
		case now >= f.again:
			n.askRounds(f)
			next = min(next, f.again)
		default:
			next = min(next, f.again)
		}
	}
	return next
}

// resumeTransfers goes on with what the logs were getting when the engine was closed.
func (n *Node) resumeTransfers() {
	now := n.now()
	for log := range n.logs() {
		if c := n.catchings[log]; c != nil && c.again != 0 {
			c.again = now
		} else if f := n.fetches[log]; f != nil && (c == nil || c.fetch != f) {
			f.heard = now
			n.askRounds(f)
		}
	}
}
