package replica

import (
	"fmt"
	"slices"
	"time"

	"github.com/mortarmq/mortarmq/internal/mutant"
	"github.com/mortarmq/mortarmq/protocol"
)

// role is what a node is doing.
type role uint8

const (
	follower  role = iota // follows a leader, or waits for one
	asking                // asks for pre-votes
	candidate             // has promised itself an epoch and asks for promises
	elected               // has a majority of promises and fetches what it lacks
	leader                // leads
)

var roleNames = [...]string{"follower", "asking", "candidate", "elected", "leader"}

// Node is one broker's part in the cluster: formation, elections, leases, promises, who counts. It belongs to the broker's
// control goroutine. Every input is a method that takes the time; what is to be done is then in Take.
//
// Time is a monotonic clock's that goes on while the machine is suspended (CLOCK_BOOTTIME). A message's time is read after
// the message was received: a time from before would end the lease that it grants too early. One that is read too long ago
// otherwise does no harm.
type Node struct {
	cfg      Config
	now      time.Duration
	out      []Output
	instance Instance

	state  Persistent // as it is to be
	token  uint64     // of the newest Persist
	saved  uint64     // the newest that is durable
	status Standing   // what is durable of Learner and Suspect

	role   role
	leader NodeID // in epoch state.Promised; 0 if unknown

	// The epoch that was promised last, until it is persisted and the logs are fenced.
	promiseToken uint64
	fenced       Epoch
	fenceEnds    []End // when the logs were fenced at that epoch
	ends         []End // newest
	owePromise   bool  // to state.Candidate
	claimant     NodeID
	oweInstall   bool // to claimant, with session
	session      uint64
	awaitFence   bool

	leaseUntil time.Duration // granted to leaseTo; nobody else is helped before
	leaseTo    NodeID
	electAt    time.Duration
	attempt    int
	seen       Epoch // the highest epoch heard of

	peers []peerState
	elec  election
	lead  leadership
	form  formation
	cure  cure

	stalled, failed, resigned bool

	quorumKnown bool
	quorum      SetQuorum
}

// peerState is what this node knows of another one.
type peerState struct {
	id NodeID

	// As a candidate.
	answered, granted bool
	promise           promise

	// As a leader.
	session  uint64
	bound    bool // the session was answered
	instance Instance
	standing Standing
	acked    time.Duration // sending time of the newest renewal that it answered
	hasAcked bool
	heard    time.Duration
	marked   []End // where the leader's logs ended when all counted the instance as no voter, at markedAt; nil before
	markedAt time.Duration
	lagging  bool
	logs     []peerLog
}

type promise struct {
	standing Standing
	ends     []End
}

// New returns a node. state is what was persisted last, or zero for a node that never was part of a cluster and has no data:
// data without a cluster's id must have been moved aside. Nothing is done before the first Tick.
func New(cfg Config, state Persistent, now time.Duration) (*Node, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if state.Cluster != (ClusterID{}) && (state.Logs < 1 || state.Logs > MaxLogs) {
		return nil, fmt.Errorf("%w: the persisted state names %d logs", ErrConfig, state.Logs)
	}
	n := &Node{cfg: cfg, now: now, state: state, instance: newInstance(cfg.Rand)}
	for _, id := range cfg.Nodes {
		if id != cfg.Self {
			n.peers = append(n.peers, peerState{id: id})
		}
	}
	n.form.seen = make([]formSeen, len(n.peers))
	n.status = Learner
	if n.stage() == Formed {
		n.status = standingOf(state)
	}
	// It may have granted a lease just before it stopped.
	n.leaseUntil = now + cfg.Lease
	if mutant.Is("restart-forgets-lease") {
		n.leaseUntil = now
	}
	n.electAt = n.leaseUntil + cfg.delay(0)
	n.form.at = now
	n.dropTarget()
	if n.stage() == Formed {
		n.emit(FenceLogs{Epoch: state.Promised})
	}
	return n, nil
}

func newInstance(rand func() uint64) Instance {
	for {
		if i := Instance(rand()); i != 0 {
			return i
		}
	}
}

func standingOf(s Persistent) Standing {
	switch {
	case s.Learner:
		return Learner
	case s.Suspect:
		return Suspect
	}
	return Voter
}

// Take returns the outputs since the last call, oldest first. They are the caller's.
func (n *Node) Take() []Output {
	out := n.out
	n.out = nil
	return out
}

func (n *Node) emit(o Output) { n.out = append(n.out, o) }

func (n *Node) send(to NodeID, m Message) { n.emit(SendMessage{To: to, Message: m}) }

func (n *Node) event(e EventKind, peer NodeID, code protocol.ErrorCode) {
	n.emit(Event{What: e, Peer: peer, Epoch: n.state.Promised, Log: -1, Code: code})
}

// begin notes the time at the start of an input; time never goes back.
func (n *Node) begin(now time.Duration) { n.now = max(n.now, now) }

// logs is the number of logs; 0 while no cluster is known.
func (n *Node) logs() int { return int(n.state.Logs) }

func (n *Node) stage() Stage {
	switch {
	case n.state.Cluster == ClusterID{}:
		return Empty
	case n.state.Forming:
		return Forming
	}
	return Formed
}

// formed reports whether this node belongs to a formed cluster, durably.
func (n *Node) formed() bool { return n.stage() == Formed && n.form.token == 0 }

func (n *Node) peer(id NodeID) *peerState {
	for i := range n.peers {
		if n.peers[i].id == id {
			return &n.peers[i]
		}
	}
	return nil
}

// persist asks for the state to be made durable and returns the token.
func (n *Node) persist() uint64 {
	n.token++
	n.emit(Persist{Token: n.token, State: n.state})
	return n.token
}

// Persisted says that the states up to token are durable.
func (n *Node) Persisted(now time.Duration, token uint64) {
	n.begin(now)
	n.saved = max(n.saved, min(token, n.token))
	n.formSaved()
	n.cureSaved()
	n.settle()
	n.update()
}

// Fenced reports the ends of all logs, fenced at epoch. ends is handed over.
func (n *Node) Fenced(now time.Duration, epoch Epoch, ends []End) {
	n.begin(now)
	if epoch != n.state.Promised || len(ends) != n.logs() {
		return // a higher epoch was promised since
	}
	if n.fenced != epoch || n.fenceEnds == nil {
		n.fenced, n.fenceEnds = epoch, slices.Clone(ends)
	}
	n.ends, n.awaitFence = ends, false
	newest := n.state.Promised
	for _, e := range ends {
		newest = max(newest, e.Last.Epoch)
	}
	if newest > n.state.Promised {
		// The state was rolled back: a round is never flushed before its epoch is persisted.
		n.promise(newest, 0)
	}
	n.settle()
	n.update()
}

// promise binds this node to an epoch: nothing lower counts any more, and nobody else gets this one.
func (n *Node) promise(e Epoch, to NodeID) {
	n.abandon()
	n.state.Promised, n.state.Candidate = e, to
	n.seen = max(n.seen, e)
	n.owePromise, n.oweInstall, n.awaitFence, n.claimant = false, false, false, 0
	n.fenceEnds = nil
	n.dropTarget()
	if mutant.Is("promise-not-persisted") {
		n.promiseToken = n.saved
	} else {
		n.promiseToken = n.persist()
	}
	n.emit(FenceLogs{Epoch: e})
}

// settled reports whether the epoch promised is durable and the logs are fenced at it.
func (n *Node) settled() bool {
	return n.saved >= n.promiseToken && n.fenced == n.state.Promised && n.fenceEnds != nil
}

// settle goes on with what waits for the promised epoch to be durable and the logs to be fenced.
func (n *Node) settle() {
	if !n.formed() || !n.settled() {
		return
	}
	if n.role == candidate && !n.elec.prepared {
		n.prepare()
	}
	if n.owePromise && n.role == follower {
		n.owePromise = false
		n.send(n.state.Candidate, Message{Kind: KindPromise, Epoch: n.state.Promised, Standing: n.status, Ends: slices.Clone(n.fenceEnds)})
		n.grace(n.state.Candidate)
	}
	if n.claimant != 0 && n.role == follower {
		n.follow()
	}
}

// grace leaves a candidate time to be elected before another one is helped.
func (n *Node) grace(to NodeID) {
	if until := n.now + n.cfg.Lease/2; until > n.leaseUntil {
		n.leaseUntil, n.leaseTo = until, to
	}
	n.electAt = max(n.electAt, n.leaseUntil+n.cfg.delay(n.attempt))
}

// abandon ends whatever this node does of its own: standing for election, leading, following.
func (n *Node) abandon() {
	if n.role == leader || n.role == elected {
		n.stop(SteppedDown)
		n.event(EventSteppedDown, 0, protocol.CodeStaleLeaderEpoch)
	}
	n.role = follower
	if n.leader != 0 {
		n.leader = 0
		n.emit(LeaderLost{})
	}
}

// usable reports whether this node's disk answers.
func (n *Node) usable() bool { return !n.stalled && !n.failed }

// Receive takes a message from another node. now was read after the message arrived.
func (n *Node) Receive(now time.Duration, from NodeID, m Message) {
	n.begin(now)
	p := n.peer(from)
	if p == nil || !n.wellFormed(&m) {
		return
	}
	p.heard = n.now
	switch m.Kind {
	case KindProbe, KindProbeAck, KindForm, KindFormAck:
		n.receiveForming(p, m)
	default:
		if !n.formed() {
			return // formation goes first
		}
		n.receiveFormed(p, m)
	}
	n.update()
}

func (n *Node) receiveFormed(p *peerState, m Message) {
	switch m.Kind {
	case KindPreVote:
		n.onPreVote(p.id, m)
	case KindPreVoteAck:
		n.onPreVoteAck(p, m)
	case KindPrepare:
		n.onPrepare(p.id, m)
	case KindPromise:
		n.onPromise(p, m)
	case KindRefuse:
		n.onRefuse(p, m)
	case KindInstall, KindHeartbeat:
		n.onLeader(p.id, m)
	case KindInstallAck:
		n.onInstallAck(p, m)
	case KindHeartbeatAck:
		n.onHeartbeatAck(p, m)
	case KindResign:
		n.onResign(p.id, m)
	default:
	}
}

// maxEpochJump is how far beyond its own a node believes an epoch: the numbers must not be used up by one bad message.
const maxEpochJump = 1 << 24

// wellFormed reports whether a message can be used; other versions' and hostile ones may not be.
func (n *Node) wellFormed(m *Message) bool {
	if m.Epoch > n.state.Promised && m.Epoch-n.state.Promised > maxEpochJump {
		return false
	}
	switch m.Kind {
	case KindPromise, KindInstallAck:
		return len(m.Ends) == n.logs() && m.Standing <= Learner
	case KindHeartbeat:
		return (len(m.Commits) == 0 || len(m.Commits) == n.logs()) && (!m.Confirmed || len(m.Ends) == n.logs())
	case KindHeartbeatAck, KindPreVoteAck:
		return m.Standing <= Learner
	default:
		return m.Kind.Valid()
	}
}

// Tick lets time pass. It is due at Deadline at the latest; calling it more often does no harm.
func (n *Node) Tick(now time.Duration) {
	n.begin(now)
	switch {
	case !n.formed():
		n.formTick()
	case n.role == follower:
		n.followerTick()
	case n.role == asking, n.role == candidate:
		n.electionTick()
	default:
		n.leaderTick()
	}
	n.update()
}

// Deadline returns when Tick is due next.
func (n *Node) Deadline() time.Duration {
	switch {
	case !n.formed():
		return n.form.at
	case n.role == follower:
		return max(n.electAt, n.leaseUntil)
	case n.role == asking, n.role == candidate:
		return min(n.elec.deadline, n.elec.resendAt)
	}
	d := n.lead.beatAt
	if end := n.LeaseEnd(); end > n.now {
		d = min(d, end)
	}
	return d
}

// DiskStalled says whether a flush of this node is outstanding for too long: meanwhile it renews no lease and isn't elected.
func (n *Node) DiskStalled(now time.Duration, stalled bool) {
	n.begin(now)
	n.stalled = stalled
	n.update()
}

// DiskFailed says that this node's disk failed for good: until a restart it neither leads nor promises.
func (n *Node) DiskFailed(now time.Duration) {
	n.begin(now)
	n.failed = true
	n.retire()
}

// Resign makes a leader stop and tell the others, so that they need not wait for its lease; this node isn't elected again
// before a restart. A host that ends calls it and goes on serving peers for a moment.
func (n *Node) Resign(now time.Duration) {
	n.begin(now)
	n.resigned = true
	n.retire()
}

// retire gives up any leadership and says so.
func (n *Node) retire() {
	if was := n.role; was != follower {
		n.abandon()
		if was == leader || was == elected {
			n.resign()
		}
	}
	n.update()
}

// Needed reports whether this node leads and another one isn't there, or doesn't count: then those that are left might be unable
// to elect anybody if this one stopped counting, too.
func (n *Node) Needed() bool {
	if n.role != leader {
		return false
	}
	for i := range n.peers {
		if p := &n.peers[i]; !p.bound || p.standing != Voter {
			return true
		}
	}
	return false
}

// Connected says that messages reach a peer again: a leader asks where its logs end.
func (n *Node) Connected(now time.Duration, id NodeID) {
	n.begin(now)
	if p := n.peer(id); p != nil && n.role == leader {
		n.unbind(p)
		n.install(p)
	}
	n.update()
}

// Disconnected says that the connection to a peer is lost.
func (n *Node) Disconnected(now time.Duration, id NodeID) {
	n.begin(now)
	if p := n.peer(id); p != nil && n.role == leader {
		n.unbind(p)
	}
	n.update()
}

// Leader returns the leader that this node knows of, itself included; 0 if none.
func (n *Node) Leader() (NodeID, Epoch) { return n.leader, n.state.Promised }

// Standing returns how much this node's word is worth.
func (n *Node) Standing() Standing { return n.status }

// Instance returns this node's instance, for FLUSHED.
func (n *Node) Instance() Instance { return n.instance }

// State returns what was last asked to be persisted.
func (n *Node) State() Persistent { return n.state }

// Role returns what the node is doing, for the admin port: follower, asking, candidate, elected, leader.
func (n *Node) Role() string { return roleNames[n.role] }
