package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal"
)

// How a node's engine is opened, given up and opened anew.

// open makes the node ready for its first turn.
func (n *Node) open() error {
	dev := &Engine{opts: n.opts.Engine, log: n.log}
	d, err := dev.openDevice()
	if err != nil {
		return err
	}
	n.disk = d
	n.device.set(d)
	n.pool = ring.NewPoolFrom(n.opts.Engine.Heap, statePoolBytes)
	if n.file, err = wal.OpenReplicaFile(waiter{d}, n.pool, n.opts.Engine.DataDir, uint16(n.opts.Self)); err != nil {
		return errors.Join(err, n.closeDevice())
	}
	state := persistentOf(n.file.State())
	if err := n.start(state); err != nil {
		return errors.Join(err, n.file.Close(waiter{d}), n.closeDevice())
	}
	return nil
}

// statePoolBytes is the memory for the node's state file.
const statePoolBytes = 1 << 20

func (n *Node) closeDevice() error {
	n.device.clear()
	return n.disk.Close()
}

// start opens the engine of a node that belongs to a cluster, and makes the machine.
func (n *Node) start(state replica.Persistent) error {
	if state.Cluster != (replica.ClusterID{}) && !state.Forming {
		if err := n.readFloors(int(state.Logs)); err != nil {
			return err
		}
		e, err := n.openEngine(int(state.Logs), n.logsKnown(int(state.Logs)))
		if err != nil {
			return err
		}
		n.formed = true
		n.engine.Store(e)
		state = persistentOf(n.file.State()) // the journals may have been found damaged
	}
	m, err := replica.New(replica.Config{
		Self: n.opts.Self, Nodes: n.ids, Rank: n.opts.Rank, Logs: max(n.opts.Engine.Shards, 1),
		Heartbeat: n.opts.Heartbeat, Lease: n.opts.Lease, QuorumTimeout: n.opts.QuorumTimeout, SoftGap: n.opts.SoftGap, HardGap: n.opts.HardGap, SoftGapBytes: n.opts.SoftGapBytes,
		Rand: n.opts.Random,
	}, state, n.now())
	if err != nil {
		return errors.Join(err, n.closeEngine(n.engine.Load()))
	}
	n.machine = m
	for log := range n.unfinished {
		// Where the log ends doesn't tell what is missing: partitions may have begun anew to be made again.
		n.repairs[log] = true
		m.GivesUp(log)
	}
	n.publish()
	return nil
}

// openEngine opens the engine; any goroutine but one at a time. Data that can't be trusted is set aside: this node then begins
// with nothing, and gets everything from the others.
func (n *Node) openEngine(logs int, known logsKnown) (*Engine, error) {
	e, err := n.tryEngine(logs, known)
	if err == nil || !untrusted(err) {
		return e, err
	}
	if err := n.suspect(err); err != nil {
		return nil, err
	}
	if err := n.setAside(err); err != nil {
		return nil, err
	}
	return n.tryEngine(logs, known)
}

// untrusted tells whether what is on the disk is the reason why an engine can't be opened. A file of the version after this
// build's is none: a newer build has written it, so the start is refused and the file left alone. As nodes skip no version,
// any other number is a damaged byte.
func untrusted(err error) bool {
	if v := (*wal.VersionError)(nil); errors.As(err, &v) {
		return v.Version != v.Supported+1
	}
	return errors.Is(err, wal.ErrCorrupt)
}

func (n *Node) tryEngine(logs int, known logsKnown) (*Engine, error) {
	o := n.opts.Engine
	o.cluster = &clusterOptions{
		self: n.opts.Self, nodes: n.ids, logs: logs, peers: n.opts.Peers,
		suspect: n.suspect, failed: n.failed, random: n.opts.Random,
		damaged: func(log int) { n.do(func() { n.damaged(log) }) },
		history: n.opts.HistoryBytes, logsKnown: known,
	}
	return Open(o)
}

// setAside moves the data out of the way.
func (n *Node) setAside(reason error) error {
	to := fmt.Sprintf("quarantine-%d", n.wallMs())
	n.log.Error("this node's data can't be trusted: it is set aside, and made again from the other nodes", "where", to, "err", reason)
	return n.withDevice(func(d Device) error {
		return wal.SetAside(waiter{d}, n.opts.Engine.DataDir, to, []string{wal.ReplicaStateName, "LOCK", layoutFile})
	})
}

// withDevice runs f with a disk of its own.
func (n *Node) withDevice(f func(Device) error) error {
	d, err := (&Engine{opts: n.opts.Engine, log: n.log}).openDevice()
	if err != nil {
		return err
	}
	return errors.Join(f(d), d.Close())
}

// readFloors looks for catch-ups that were interrupted.
func (n *Node) readFloors(logs int) error {
	for log := range logs {
		st, found, err := wal.ReadCatchupState(waiter{n.disk}, n.pool, n.shardDir(log), log)
		if err != nil {
			return err
		}
		if found {
			n.floors[log], n.unfinished[log] = replicaPoint(st.Target), true
		}
	}
	return nil
}

// logsKnown is a copy, for the goroutine that opens the engine.
func (n *Node) logsKnown(logs int) logsKnown {
	k := logsKnown{make([]replica.Point, logs), make([]bool, logs)}
	for log := range logs {
		k.floors[log], k.unfinished[log] = n.floors[log], n.unfinished[log]
	}
	return k
}

// closeEngine ends an engine; nil is none.
func (n *Node) closeEngine(e *Engine) error {
	if e == nil {
		return nil
	}
	if e.opts.Stepped {
		return e.Close(context.Background()) // real time means nothing
	}
	return closeWithPatience(e, closeEngineFor)
}

// closeEngineFor is after how long the end of an engine is told of: a disk hangs.
const closeEngineFor = 10 * time.Second

// closeWithPatience ends an engine, which takes as long as its disks do: what is on its way to a disk that hangs must not reach
// files that another engine has opened meanwhile. It logs when that takes longer than patience.
func closeWithPatience(e *Engine, patience time.Duration) error {
	said := time.AfterFunc(patience, func() {
		e.log.Error("an engine that has to end waits for its disk: this node takes no part until the disk has answered, or it is restarted",
			"waiting", patience)
	})
	defer said.Stop()
	return e.Close(context.Background())
}

// reopen closes the engine and opens it anew, on a goroutine of its own; outputs for the logs wait until it is open.
func (n *Node) reopen(logs int) {
	n.formed, n.reopening, n.led = true, true, 0
	n.dropSupplies(func(*supply) bool { return true })
	old := n.engine.Swap(nil)
	n.serving.Store(nil)
	known := n.logsKnown(logs)
	again := func() nodeEvent {
		if err := n.closeEngine(old); err != nil {
			n.log.Warn("closing the engine before it is opened anew", "err", err)
		}
		e, err := n.openEngine(logs, known)
		return nodeEvent{kind: nodeReopened, engine: e, err: err}
	}
	if n.opts.Engine.Stepped {
		n.inbox.Push(again())
		return
	}
	go func() {
		ev := again()
		if !n.inbox.Push(ev) && ev.engine != nil {
			_ = n.closeEngine(ev.engine) // the node has ended meanwhile
		}
	}()
}

func (n *Node) reopened(ev *nodeEvent) {
	n.reopening = false
	if ev.err != nil {
		n.log.Error("the engine can't be opened: this node takes no part until it is repaired and restarted", "err", ev.err)
		n.err = ev.err
		n.machine.DiskFailed(n.now())
		return
	}
	e := ev.engine
	n.engine.Store(e)
	// The machine knows the logs as fenced at what it has promised.
	promised := n.machine.State().Promised
	n.postAll(replicaEvent{kind: evFence, epoch: promised, refusal: notLeading(n.leader.Load()), fenced: func(replica.End) {}})
	for log := range e.shards {
		n.callOff(log)
	}
	for _, f := range n.afterOpen {
		f()
	}
	n.afterOpen = nil
	n.resumeTransfers()
	deferred := n.deferred
	n.deferred = nil
	for _, o := range deferred {
		if n.engine.Load() != nil {
			n.carry(o)
		} else {
			n.deferred = append(n.deferred, o)
		}
	}
	n.carryOut()
}

func persistentOf(s wal.ReplicaState) replica.Persistent {
	return replica.Persistent{
		Cluster: s.Cluster, Forming: s.Forming, Logs: s.Logs, Promised: replica.Epoch(s.Promised),
		Candidate: replica.NodeID(s.Candidate), Learner: s.Learner, Suspect: s.Suspect,
	}
}

func stateOf(p replica.Persistent) wal.ReplicaState {
	return wal.ReplicaState{
		Cluster: p.Cluster, Forming: p.Forming, Logs: p.Logs, Promised: wal.Epoch(p.Promised),
		Candidate: uint16(p.Candidate), Learner: p.Learner, Suspect: p.Suspect,
	}
}
