package engine

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/engine/mpsc"
	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal"
)

// NodeInfo is one of a cluster's nodes.
type NodeInfo struct {
	ID replica.NodeID
	// Name is what operators know it by.
	Name string
	// ClientAddr is the host:port that clients are sent to when it leads.
	ClientAddr string
}

// NodeOptions configures a Node.
type NodeOptions struct {
	// Engine is what the node's engine is opened with; Shards is the number of logs of a cluster that this node forms.
	Engine Options
	Self   replica.NodeID
	// Nodes are all nodes of the cluster, this one too.
	Nodes []NodeInfo
	// Rank is this node's place among the preferred leaders, from 0.
	Rank int
	// QuorumTimeout, SoftGap, SoftGapBytes and HardGap are as in replica.Config; 0 means its default.
	Heartbeat, Lease, QuorumTimeout, SoftGap, HardGap time.Duration
	SoftGapBytes                                      uint64
	// Peers sends to the other nodes.
	Peers Peers
	// HistoryBytes is how many bytes of committed rounds each log keeps in memory for followers that lag; one that lacks
	// more catches up in bulk. 0 means 48 MiB.
	HistoryBytes int64
	// Rejoin is called when what this node tells the others about itself (Identity) has changed; nil: nobody is told.
	Rejoin func()
	// Random is a source of random numbers that differs between nodes and starts; nil means the system's.
	Random func() uint64
}

// stallAfter is how old a flush may become before this node gives up leading.
const stallAfter = 2 * time.Second

// resignFor is how long a leader that ends waits for what is on its way to commit.
const resignFor = time.Second

// answerFor is how long a leader that hands over goes on at least, so that what its clients have sent before is answered.
const answerFor = 100 * time.Millisecond

// Node is a broker as one of a cluster: it carries out what replica.Node decides, with an engine that stands by, leads or is
// being opened anew. Its control loop is a goroutine of its own, locked to its thread; what clients and other nodes send may
// be handed in from any goroutine.
//
// A node that stops leading opens its engine anew: what it had in memory of unfinished proposals is of no use any more, and
// recovery knows how to begin.
type Node struct {
	opts  NodeOptions
	log   *slog.Logger
	ids   []replica.NodeID
	nodes map[replica.NodeID]*hint
	inbox *mpsc.Queue[nodeEvent]
	done  chan struct{}

	// Read by other goroutines.
	engine  atomic.Pointer[Engine] // open
	serving atomic.Pointer[Engine] // takes clients' requests
	leader  atomic.Pointer[hint]   // nil if unknown
	status  atomic.Pointer[NodeStatus]
	device  deviceRef

	// The rest is the control loop's.
	disk    Device
	pool    *ring.Pool
	file    *wal.ReplicaFile
	machine *replica.Node
	formed  bool // there is an engine, or one is being opened
	// reopening: the engine was closed and is being opened; deferred are the outputs that wait for it.
	reopening bool
	deferred  []replica.Output
	led       replica.Epoch // the epoch that the engine leads or led in
	fencing   gather
	opened    gather
	probing   gather
	fetches   map[int]*fetch // by log
	// catchings are the logs that catch up in bulk, supplies the followers' that this node leads; floors are the points that
	// the logs must not end before.
	catchings map[int]*catching
	supplies  []*supply
	floors    map[int]replica.Point
	// wanted are the floors that catch-ups are to have once they give something up.
	wanted map[int]replica.Point
	// unfinished are the logs for which a catch-up is on record that has not ended: they may lack anything.
	unfinished map[int]bool
	// hurt are the logs with damaged files, repairs those of which they are made again; lastOf is where the logs ended when the machine last heard of them.
	hurt      map[int]bool
	repairs   map[int]bool
	lastOf    map[int]replica.Point
	afterOpen []func()
	lastFetch uint32
	stalled   bool
	broken    bool // the disk has failed, for as long as this process lives
	// slowDisks were reported and are not as fast as the others again; disksSeen is when that was looked at.
	slowDisks map[slowDisk]bool
	disksSeen time.Duration
	progress  replica.Progress
	spare     []nodeEvent
	// leaving: it hands over between leaveAt and leaveBy, and leads and follows no more; closing: it ends, too.
	leaving          bool
	leaveAt, leaveBy time.Duration

	closing bool
	ended   bool
	closeBy time.Duration
	err     error
}

// NodeStatus is what the node is at the moment, for operators.
type NodeStatus struct {
	// LeaderName and LeaderAddr say who leads, as operators and clients know it; empty if unknown.
	LeaderName, LeaderAddr string
	Epoch                  replica.Epoch
	Role                   string
	Standing               replica.Standing
	Quorum                 replica.QuorumState
	Cluster                replica.ClusterID
	Serving                bool
	Reopening              bool
	// Failed says that the engine could not be opened, or that the disk has failed: this node neither leads nor votes until it
	// is restarted.
	Failed bool
}

type nodeEventKind uint8

const (
	nodeMessage nodeEventKind = iota
	nodeConnected
	nodeDisconnected
	nodeFenced
	nodeLogOpened
	nodeProbed
	nodeServed
	nodeFetched
	nodeBulk
	nodeFailed
	nodeDo
	nodeReopened
	nodeLeave
	nodeClose
)

type nodeEvent struct {
	kind    nodeEventKind
	from    replica.NodeID
	message *replica.Message
	epoch   replica.Epoch
	log     int
	end     replica.End
	id      uint32
	frame   peerwire.BulkFrame
	payload peerwire.Payload
	engine  *Engine
	err     error
	do      func()
}

// do has f run on the control loop.
func (n *Node) do(f func()) { n.inbox.Push(nodeEvent{kind: nodeDo, do: f}) }

// OpenNode reads what the node has promised, opens its engine if it belongs to a cluster already, and starts its control
// loop. The transport may deliver from then on; Peers must take what is sent.
func OpenNode(o NodeOptions) (*Node, error) {
	if o.Engine.Logger == nil {
		o.Engine.Logger = slog.Default()
	}
	if o.Random == nil {
		o.Random = rand.Uint64
	}
	if err := o.Engine.Validate(); err != nil {
		return nil, err
	}
	n := &Node{
		opts: o, log: o.Engine.Logger, done: make(chan struct{}),
		nodes: map[replica.NodeID]*hint{}, fetches: map[int]*fetch{},
		catchings: map[int]*catching{}, floors: map[int]replica.Point{}, wanted: map[int]replica.Point{}, unfinished: map[int]bool{},
		hurt: map[int]bool{}, repairs: map[int]bool{}, lastOf: map[int]replica.Point{}, slowDisks: map[slowDisk]bool{},
	}
	for _, info := range o.Nodes {
		n.ids = append(n.ids, info.ID)
		n.nodes[info.ID] = &hint{info.Name, info.ClientAddr}
	}
	slices.Sort(n.ids)
	if self := n.nodes[o.Self]; self != nil {
		n.log = n.log.With("node", self.name)
	}
	n.inbox = mpsc.New[nodeEvent](n.device.wake)
	n.status.Store(&NodeStatus{Role: "starting"})
	if o.Engine.Stepped {
		return n, n.open()
	}
	ready := make(chan error, 1)
	go n.run(ready)
	if err := <-ready; err != nil {
		<-n.done
		return nil, err
	}
	return n, nil
}

// run is the control loop's goroutine.
func (n *Node) run(ready chan<- error) {
	runtime.LockOSThread()
	defer close(n.done)
	if err := n.open(); err != nil {
		ready <- err
		return
	}
	ready <- nil
	for !n.ended {
		progress, next := n.turn()
		if progress || n.ended || !n.inbox.Sleep() {
			continue
		}
		timeout := max(next-n.now(), 0)
		if _, err := n.disk.Wait(timeout); err != nil {
			n.failed(fmt.Errorf("waiting for the disk: %w", err))
			time.Sleep(10 * time.Millisecond)
		}
		n.inbox.Awake()
	}
	n.end()
}

// failed tells the control loop that a disk has failed. Any goroutine.
func (n *Node) failed(err error) { n.inbox.Push(nodeEvent{kind: nodeFailed, err: err}) }

// now is the clock of leases: monotonic, and it goes on while the machine is suspended.
func (n *Node) now() time.Duration {
	if c := n.opts.Engine.Clock; c != nil {
		return c.Now()
	}
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic(fmt.Sprintf("engine: CLOCK_BOOTTIME: %v", err)) // there since Linux 2.6.39
	}
	return time.Duration(ts.Nano())
}

// turn does everything that can be done without blocking, and returns when the next turn is due.
func (n *Node) turn() (progress bool, next time.Duration) {
	events := n.inbox.Drain(n.spare)
	for i := range events {
		n.handle(&events[i])
		n.carryOut()
	}
	n.spare = events
	n.look()
	if now := n.now(); now >= n.machine.Deadline() {
		n.machine.Tick(now)
	}
	n.carryOut()
	next = min(n.stepCatchups(n.now()), n.stepFetches(n.now()))
	progress = n.disk.Poll() > 0
	n.carryOut()
	n.publish()
	n.closeStep()
	// A flush that hangs is seen by looking, and so is progress.
	now := n.now()
	return progress || len(events) > 0, max(min(next, n.machine.Deadline(), now+lookEvery), now+minPause)
}

// minPause keeps the control loop from spinning on something that is due and can't be done.
const minPause = time.Millisecond

// lookEvery bounds how old the machine's picture of the logs gets.
const lookEvery = 50 * time.Millisecond

// look tells the machine how far the logs are.
func (n *Node) look() {
	e := n.engine.Load()
	if e == nil {
		return
	}
	stalled := false
	for i, s := range e.shards {
		changed, since := s.repl.progress.take(&n.progress)
		if changed {
			n.machine.Progress(n.now(), i, &n.progress)
		}
		stalled = stalled || since != 0 && e.now()-since > stallAfter
	}
	if len(n.hurt) > 0 {
		n.giveWay()
	}
	if len(n.repairs) > 0 {
		n.repair(e)
	}
	n.lookAtDisks(e)
	if stalled != n.stalled {
		n.stalled = stalled
		if stalled {
			n.log.Error("a flush has not completed for long: this node does not lead until its disk answers", "after", stallAfter)
		}
		n.machine.DiskStalled(n.now(), stalled)
	}
}

func (n *Node) handle(ev *nodeEvent) {
	now := n.now()
	switch ev.kind {
	case nodeMessage:
		n.machine.Receive(now, ev.from, *ev.message)
	case nodeConnected:
		n.machine.Connected(now, ev.from)
	case nodeDisconnected:
		n.machine.Disconnected(now, ev.from)
	case nodeFenced:
		if n.fencing.take(ev.epoch, ev.log, ev.end) {
			n.fencedAll()
		}
	case nodeLogOpened:
		if n.opened.take(ev.epoch, ev.log, ev.end) {
			n.openedAll()
		}
	case nodeProbed:
		if n.probing.take(ev.epoch, ev.log, ev.end) {
			lasts := make([]replica.Index, len(n.probing.ends))
			for i := range lasts {
				lasts[i] = n.probing.ends[i].Last.Index
			}
			n.machine.Probed(now, ev.epoch, lasts)
		}
	case nodeServed:
		if ev.epoch != n.machine.State().Promised {
			return // it leads no more
		}
		if ev.err != nil {
			n.log.Error("this node was elected but can't serve what is committed", "epoch", ev.epoch, "err", ev.err)
			n.machine.DiskFailed(now)
			return
		}
		n.machine.Opened(now, ev.epoch)
	case nodeFetched:
		n.fetched(ev)
	case nodeBulk:
		n.bulk(ev)
	case nodeFailed:
		n.broken = true
		n.log.Error("this node's disk failed: it neither leads nor votes until it is restarted", "err", ev.err)
		n.machine.DiskFailed(now)
	case nodeDo:
		ev.do()
	case nodeReopened:
		n.reopened(ev)
	case nodeLeave:
		n.leaving, n.leaveAt, n.leaveBy = true, now+answerFor, now+resignFor
	case nodeClose:
		n.closing, n.closeBy = true, now+resignFor
	}
}

// carryOut does what the machine wants done, in order. What needs the logs waits while there are none.
func (n *Node) carryOut() {
	for {
		outs := n.machine.Take()
		if len(outs) == 0 {
			return
		}
		for _, o := range outs {
			if n.needsLogs(o) && n.engine.Load() == nil {
				n.deferred = append(n.deferred, o)
				continue
			}
			n.carry(o)
		}
	}
}

// needsLogs tells whether an output is for the logs.
func (n *Node) needsLogs(o replica.Output) bool {
	switch o.(type) {
	case replica.FenceLogs, replica.FetchLog, replica.Lead, replica.PeerJoined, replica.PeerLeft, replica.FollowLeader,
		replica.LeaderCommits, replica.ProbeLogs, replica.StartCatchup:
		return true
	}
	return false
}

func (n *Node) carry(o replica.Output) {
	switch o := o.(type) {
	case replica.SendMessage:
		n.opts.Peers.Message(o.To, &o.Message)
	case replica.Persist:
		n.file.Save(stateOf(o.State), func(err error) {
			if err != nil {
				n.failed(fmt.Errorf("saving what this node has promised: %w", err))
				return
			}
			n.machine.Persisted(n.now(), o.Token)
		})
	case replica.FormedCluster:
		n.log.Info("the cluster is formed", "cluster", fmt.Sprintf("%x", o.Cluster), "logs", o.Logs)
		n.reopen(int(o.Logs))
	case replica.FenceLogs:
		n.fence(o.Epoch)
	case replica.FetchLog:
		n.fetch(o)
	case replica.Lead:
		n.lead(o.Epoch)
	case replica.PeerJoined:
		for i, end := range o.Ends {
			n.post(i, &replicaEvent{kind: evJoin, peer: o.Peer, epoch: o.Epoch, instance: o.Instance, voter: o.Voter, end: end})
		}
	case replica.PeerLeft:
		n.postAll(replicaEvent{kind: evLeft, peer: o.Peer})
	case replica.FollowLeader:
		n.follow(o)
	case replica.LeaderLost:
		n.leader.Store(nil)
	case replica.LeaderCommits:
		for i, c := range o.Commits {
			n.post(i, &replicaEvent{kind: evCommit, epoch: o.Epoch, index: c})
		}
	case replica.Serve:
		n.serve()
	case replica.StopServing:
		n.stopServing(o)
	case replica.ProbeLogs:
		n.probe(o.Epoch)
	case replica.SetQuorum:
		n.setQuorum(o)
	case replica.StartCatchup:
		// It may have waited while another catch-up ended: the machine would hear nothing of the end of this one, and follow
		// nobody behind it.
		if n.machine.Catching(o.Log) {
			n.startCatchup(o)
		}
	case replica.Event:
		n.tell(o)
	}
}

// post hands an event to a shard.
func (n *Node) post(log int, ev *replicaEvent) {
	e := n.engine.Load()
	if e == nil || log >= len(e.shards) {
		return
	}
	e.shards[log].inbox.Push(message{kind: msgReplica, replica: ev})
}

func (n *Node) postAll(ev replicaEvent) {
	e := n.engine.Load()
	for i := range e.shards {
		c := ev
		n.post(i, &c)
	}
}

// publish makes the node's state readable.
func (n *Node) publish() {
	leader, epoch := n.machine.Leader()
	st := NodeStatus{
		Epoch: epoch, Role: n.machine.Role(), Standing: n.machine.Standing(),
		Cluster: n.machine.State().Cluster, Serving: n.serving.Load() != nil && n.machine.Serving(n.now()), Reopening: n.reopening, Failed: n.broken || n.err != nil,
		Quorum: n.status.Load().Quorum,
	}
	if h := n.nodes[leader]; h != nil {
		st.LeaderName, st.LeaderAddr = h.name, h.addr
	}
	was := n.status.Load()
	if st == *was {
		return
	}
	changed := st // st itself stays off the heap: this runs every turn
	n.status.Store(&changed)
	if st.Cluster != was.Cluster && was.Cluster != (replica.ClusterID{}) && n.opts.Rejoin != nil {
		n.opts.Rejoin()
	}
}

// Status returns what the node is at the moment. Any goroutine.
func (n *Node) Status() NodeStatus { return *n.status.Load() }

// Engine returns the engine, nil while there is none. Any goroutine.
func (n *Node) Engine() *Engine { return n.engine.Load() }

// Identity is what this node tells the others when they connect. Any goroutine.
func (n *Node) Identity() (cluster replica.ClusterID, logs int) {
	if e := n.engine.Load(); e != nil {
		logs = len(e.shards)
	}
	return n.status.Load().Cluster, logs
}
