package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/engine/coord"
	"github.com/mortarmq/mortarmq/engine/mpsc"
	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/protocol"
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
		floors:  known.floors, unfinished: known.unfinished, history: n.opts.HistoryBytes,
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

// logsKnown is what the control loop knows of logs that are to be opened.
type logsKnown struct {
	floors     []replica.Point
	unfinished []bool
}

func (n *Node) logsKnown(logs int) logsKnown {
	k := logsKnown{make([]replica.Point, logs), make([]bool, logs)}
	for log := range logs {
		k.floors[log], k.unfinished[log] = n.floors[log], n.unfinished[log]
	}
	return k
}

// suspect puts on record that rounds may be missing that this node vouched for, before anything is written. It runs on the
// goroutine that opens the engine.
func (n *Node) suspect(reason error) error {
	n.log.Error("this node's data is damaged: it counts for nothing until it has everything again", "err", reason)
	if n.machine == nil || n.opts.Engine.Stepped {
		// The control loop waits for the engine.
		if n.machine != nil {
			n.machine.Damaged(n.now())
		}
		s := n.file.State()
		s.Suspect = true
		if n.opts.Engine.Stepped {
			return n.file.SaveWait(waiter{n.disk}, s) // an earlier save may be under way there
		}
		return n.withDevice(func(d Device) error {
			n.file.SetDisk(d)
			defer n.file.SetDisk(n.disk)
			return n.file.SaveWait(waiter{d}, s)
		})
	}
	saved := make(chan error, 1)
	n.do(func() {
		n.machine.Damaged(n.now())
		n.carryOut()
		n.file.Save(n.file.State(), func(err error) { saved <- err }) // behind what Damaged has saved
	})
	return <-saved
}

// damaged takes note of files of a log that turned out to be damaged. What is damaged of it isn't served any more.
func (n *Node) damaged(log int) {
	if n.repairs[log] || n.hurt[log] {
		return
	}
	n.hurt[log] = true
	if n.machine.Needed() {
		n.log.Error("files of this node are damaged, and another node is not there to take over: it goes on leading without them", "log", log)
	}
	n.giveWay()
}

// giveWay has this node count for nothing until logs with damaged files were caught up with them made anew. A leader that the
// cluster can't do without waits with that: what is damaged of it may be damaged on the others, too, or they may be gone.
func (n *Node) giveWay() {
	if n.machine.Needed() {
		return
	}
	for log := range int(n.machine.State().Logs) {
		if !n.hurt[log] {
			continue
		}
		delete(n.hurt, log)
		n.repairs[log] = true
		n.log.Error("files of this node are damaged: they are made again from the leader", "log", log)
		n.machine.Damaged(n.now())
		n.machine.GivesUp(log)
	}
}

// repair begins to make damaged files again once there is a leader to get them from.
func (n *Node) repair(e *Engine) {
	leader, _ := n.machine.Leader()
	if leader == 0 || leader == n.opts.Self {
		return
	}
	if e.beyondRepair() != nil {
		n.reopen(len(e.shards)) // which sets everything aside
		return
	}
	for log := range e.shards {
		if n.repairs[log] && n.catchings[log] == nil {
			n.wanted[log] = n.lastOf[log]
			n.machine.Behind(n.now(), log)
		}
	}
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

// Close ends the node: it stops leading, which lets another one take over at once, and closes the engine. The clients'
// connections must be closed before, the transport behind it.
func (n *Node) Close(ctx context.Context) error {
	if n.opts.Engine.Stepped {
		return n.closeStepped()
	}
	n.inbox.Push(nodeEvent{kind: nodeClose})
	if err := await(ctx, n.done, "the control loop"); err != nil {
		return err
	}
	return n.err
}

// closeStep goes on with the end: what is on its way commits, then this node resigns and gives its engine up.
func (n *Node) closeStep() {
	if n.leaving && !n.closing {
		n.leave()
		return
	}
	if !n.closing || n.ended {
		return
	}
	if e := n.serving.Load(); e != nil && n.now() < n.closeBy && !e.settled() {
		return
	}
	n.machine.Resign(n.now())
	n.carryOut()
	n.ended = !n.reopening
}

// HandOver has this node stop leading as soon as everything that it has taken is committed, so that another one leads while it
// still takes leave of its clients. It doesn't wait; Close is to follow. Any goroutine.
func (n *Node) HandOver() { n.inbox.Push(nodeEvent{kind: nodeLeave}) }

// leave hands over once that costs nobody anything.
func (n *Node) leave() {
	if e := n.serving.Load(); e != nil && n.now() >= n.leaveAt && (n.now() >= n.leaveBy || e.settled()) {
		n.machine.Resign(n.now())
		n.carryOut()
	}
}

// settled tells whether everything that was taken is committed.
func (e *Engine) settled() bool {
	for _, s := range e.shards {
		g := &s.repl.progress
		g.mu.Lock()
		open := g.log.Commit < g.log.Last
		g.mu.Unlock()
		if open || s.queued.Load() > 0 {
			return false
		}
	}
	return true
}

// end closes what the control loop owns.
func (n *Node) end() {
	n.serving.Store(nil)
	e := n.engine.Swap(nil)
	for _, c := range n.catchings {
		c.drop()
	}
	n.inbox.Close()
	for _, ev := range n.inbox.Drain(nil) {
		if ev.payload != nil {
			ev.payload.Release()
		}
		if ev.engine != nil {
			e = ev.engine
		}
	}
	n.err = errors.Join(n.err, n.closeEngine(e), n.file.Close(waiter{n.disk}), n.closeDevice())
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

// nodeIngress is the intake of one event loop: it hands requests to the engine that serves, or says who leads.
type nodeIngress struct {
	n       *Node
	eng     *Engine
	in      *Ingress
	scratch []byte
	touched []coord.Client
}

// Ingress is what NewIngress of a Node returns.
type NodeIngress = *nodeIngress

// NewIngress returns the intake for one event loop, as Engine.NewIngress.
func (n *Node) NewIngress() *nodeIngress { return &nodeIngress{n: n} }

// current returns the intake of the engine that serves, nil if none does.
func (i *nodeIngress) current() *Ingress {
	if e := i.n.serving.Load(); e != i.eng {
		if i.in != nil {
			if i.in.Flush() { // the old engine answers, or refuses
				i.in.Lend()
			}
		}
		i.eng, i.in = e, nil
		if e != nil {
			i.in = e.NewIngress()
		}
	}
	return i.in
}

func (i *nodeIngress) refuse(c coord.Client, req uint64, op protocol.Op) {
	f := notLeading(i.n.leader.Load())
	i.scratch = protocol.AppendErr(i.scratch[:0], f.code, op, f.text)
	c.Complete(req, i.scratch)
	if k := len(i.touched); k == 0 || i.touched[k-1] != c {
		i.touched = append(i.touched, c)
	}
}

// Publish takes a PUB, see Ingress.Publish.
func (i *nodeIngress) Publish(c coord.Client, req uint64, p *protocol.Pub) {
	if in := i.current(); in != nil {
		in.Publish(c, req, p)
		return
	}
	i.refuse(c, req, protocol.OpPub)
}

// PublishOwned takes a PUB, see Ingress.PublishOwned.
func (i *nodeIngress) PublishOwned(c coord.Client, req uint64, p *protocol.Pub, own coord.Releaser) {
	if in := i.current(); in != nil {
		in.PublishOwned(c, req, p, own)
		return
	}
	i.refuse(c, req, protocol.OpPub)
	own.Release()
}

// Request takes any other request, see Ingress.Request.
func (i *nodeIngress) Request(c coord.Client, req uint64, op protocol.Op, payload []byte) {
	if in := i.current(); in != nil {
		in.Request(c, req, op, payload)
		return
	}
	i.refuse(c, req, op)
}

// Interrupt ends c's waiting PULLs, see Ingress.Interrupt.
func (i *nodeIngress) Interrupt(c coord.Client) {
	if in := i.current(); in != nil {
		in.Interrupt(c)
	}
}

// Lend sees to what Flush has left, see Ingress.Lend.
func (i *nodeIngress) Lend() {
	if i.in != nil {
		i.in.Lend()
	}
}

// Flush hands over what was taken, see Ingress.Flush.
func (i *nodeIngress) Flush() (lend bool) {
	if i.in != nil {
		lend = i.in.Flush()
	}
	for k, c := range i.touched {
		c.Flush()
		i.touched[k] = nil
	}
	i.touched = i.touched[:0]
	return lend
}

// ClientClosed tells that a connection is gone, see Engine.ClientClosed.
func (n *Node) ClientClosed(c coord.Client) {
	if e := n.engine.Load(); e != nil {
		e.ClientClosed(c)
	}
}

// ClientWritable tells that a connection's outstanding bytes have drained, see Engine.ClientWritable.
func (n *Node) ClientWritable(c coord.Client) {
	if e := n.engine.Load(); e != nil {
		e.ClientWritable(c)
	}
}

// Stopping is Engine.Stopping.
func (n *Node) Stopping() {
	if e := n.engine.Load(); e != nil {
		e.Stopping()
	}
}
