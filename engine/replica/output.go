package replica

import (
	"fmt"

	"github.com/mortarmq/mortarmq/protocol"
)

// Output is something that a Node wants done. The host takes outputs with Node.Take and carries them out in order: an output
// may rely on those before it. The types are Send, Persist and so on, below.
type Output interface{ output() }

// Persistent is what a Node must find again after a restart.
type Persistent struct {
	// Cluster is the cluster this node belongs to; zero while it knows none.
	Cluster ClusterID
	// Forming says that Cluster is persisted here but perhaps not everywhere yet.
	Forming bool
	// Logs is the cluster's number of logs.
	Logs uint16
	// Promised is the highest epoch promised or followed, Candidate the node it was promised to (0: to nobody).
	Promised  Epoch
	Candidate NodeID
	// Learner says that this node joined a formed cluster with an empty disk: it may have forgotten promises and rounds.
	Learner bool
	// Suspect says that this node may have lost rounds that it had flushed. The host sets it before it opens a journal whose
	// end is damaged for writing.
	Suspect bool
}

// SendMessage asks to send a message to another node. It may be dropped.
type SendMessage struct {
	To      NodeID
	Message Message
}

// Persist asks to make State durable, then to call Node.Persisted with Token. States are written in order; a newer one may
// take the place of those before it that are not written yet, its token stands for theirs.
type Persist struct {
	Token uint64
	State Persistent
}

// FenceLogs asks to call Fence(Epoch) on every log and to report all their ends with Node.Fenced, on the same goroutine or
// later. Once a log has been fenced nothing leaves this node for it any more under a lower epoch: neither rounds nor FLUSHED,
// nor answers to clients. It is asked for again with the same epoch to learn the ends anew.
type FenceLogs struct{ Epoch Epoch }

// FetchLog asks to fetch the rounds of a log behind index After up to Upto from another node, which has the latter, to
// Adopt them and, when they are durable here, to call Node.Fetched; or Node.FetchFailed. An epoch's fetches run together. The
// peer serves them only while its round at Upto.Index is Upto.
//
// If the peer has not all of these rounds in memory any more, it names the round before its oldest. If this log has that one
// (Log.Has), the fetch goes on from there. Otherwise the log catches up from the peer in bulk first, up to a cut that is
// committed, which is durable and noted with Log.SetFloor before anything is given up. Node.Fetching is called as long as that
// takes.
type FetchLog struct {
	Epoch Epoch
	Log   int
	From  NodeID
	After Index
	Upto  Point
}

// Lead says that this node was elected: every log is to Lead(Epoch) and to seal its opening round. When all of these are
// committed and folded the host calls Node.Opened.
type Lead struct{ Epoch Epoch }

// PeerJoined tells the leader's logs where a follower's logs end: each calls Join.
type PeerJoined struct {
	Epoch    Epoch
	Peer     NodeID
	Instance Instance
	Voter    bool
	Ends     []End
}

// PeerLeft says that a peer is not connected: each log calls Left.
type PeerLeft struct{ Peer NodeID }

// FollowLeader says that this node follows Leader in Epoch, which it has persisted: every log is to Follow(Epoch). FLUSHED
// frames carry Instance and Voter.
type FollowLeader struct {
	Leader   NodeID
	Epoch    Epoch
	Instance Instance
	Voter    bool
}

// LeaderLost says that this node no longer knows a leader.
type LeaderLost struct{}

// LeaderCommits is what the leader says is committed, per log (LeaderCommit).
type LeaderCommits struct {
	Epoch   Epoch
	Commits []Index
}

// Serve says that clients may be served, while the lease lasts (Node.LeaseEnd): every loop that answers or delivers compares
// that deadline with the clock before each batch, since the process may have been stopped in between.
type Serve struct{ Epoch Epoch }

// StopServing says that clients may not be served: writes are refused, leases and sessions freeze. It is in force when the
// host has carried it out, which it does before the outputs behind it.
type StopServing struct {
	Epoch Epoch
	Why   StopReason
}

// StopReason says why a leader stopped serving.
type StopReason uint8

const (
	// LeaseLost: the lease ran out without a majority renewing it.
	LeaseLost StopReason = iota + 1
	// SteppedDown: another epoch begins, or this node can't lead.
	SteppedDown
	// NoQuorum: nothing was committed within the quorum timeout.
	NoQuorum
)

var stopNames = [...]string{"", "lease lost", "stepped down", "no quorum"}

// String returns the reason for logs.
func (r StopReason) String() string {
	if int(r) < len(stopNames) {
		return stopNames[r]
	}
	return fmt.Sprintf("stop reason %d", uint8(r))
}

// ProbeLogs asks a leader that does not serve to seal an empty round in every log, to see whether a majority flushes it, and
// to report their indexes with Node.Probed.
type ProbeLogs struct{ Epoch Epoch }

// QuorumState is how well the cluster can commit, as the metric mortarmq_quorum_state shows it.
type QuorumState uint8

const (
	// Healthy: all nodes keep up.
	Healthy QuorumState = iota
	// Soft: a majority keeps up, at least one node lags beyond the soft gap.
	Soft
	// ReadOnly: nothing can be committed.
	ReadOnly
)

// SetQuorum reports a change of the quorum state. Code is what writes are refused with in state ReadOnly: 0x6002, or 0x6003
// if no follower was heard for the hard gap.
type SetQuorum struct {
	State QuorumState
	Code  protocol.ErrorCode
}

// StartCatchup asks a follower's host to catch up a log in bulk from Leader, then to call Node.CaughtUp. Before it gives up any
// round of that log, it calls Node.GivesUp, makes a round durable that the leader said is committed and that is not before the
// leader's base, and calls Log.SetFloor with it; so it does again after a restart, until the log ends behind it. It gives up
// nothing of other logs, and nothing at all before the leader has sent something.
//
// A catch-up that has given up something begins again from the next leader, with another StartCatchup. One that has not ends
// with FenceLogs of a higher epoch: the host calls Log.Resume, and if the log is behind that leader, too, it will be told.
type StartCatchup struct {
	Leader NodeID
	Epoch  Epoch
	Log    int
}

// FormedCluster says that the cluster is formed, or that this node learned which one it belongs to, and that it is persisted:
// the host makes Logs logs if there are none and calls Node.LogsReady. It comes before anything that needs a log.
type FormedCluster struct {
	Cluster ClusterID
	Logs    uint16
}

// Event is something an operator should know. Peer and Epoch are 0 where they mean nothing; Code is the wire's code for it,
// if there is one.
type Event struct {
	What  EventKind
	Peer  NodeID
	Epoch Epoch
	Log   int
	Code  protocol.ErrorCode
}

// EventKind is what an Event is about.
type EventKind uint8

const (
	// EventForeignCluster: a peer belongs to another cluster, or another one is being formed.
	EventForeignCluster EventKind = iota + 1
	// EventElection: this node stands for election.
	EventElection
	// EventElectionLost: the election was given up; this node tries again after a delay.
	EventElectionLost
	// EventElected: this node leads once it has fetched what it lacks.
	EventElected
	// EventLosingElection: the election would lose committed rounds and was given up (0x600B).
	EventLosingElection
	// EventSteppedDown: this node led and does no longer.
	EventSteppedDown
	// EventFollows: this node follows Peer.
	EventFollows
	// EventFollowerLag: Peer lags beyond the soft gap (0x6004).
	EventFollowerLag
	// EventFollowerOK: Peer keeps up again.
	EventFollowerOK
	// EventQuorumLost: writes are refused (Code).
	EventQuorumLost
	// EventQuorumRecovered: writes are taken again (0x600A).
	EventQuorumRecovered
	// EventVoter: this node, or Peer, counts as a voter again.
	EventVoter
	// EventTwoLeaders: Peer claims an epoch that another node leads; a node has lost its promises.
	EventTwoLeaders
	// EventFetchFailed: rounds of Log could not be fetched from Peer.
	EventFetchFailed
	// EventLogsDiffer: Peer was started with another number of logs than this node.
	EventLogsDiffer
)

var eventNames = [...]string{"", "peer belongs to another cluster", "standing for election", "election given up", "elected",
	"election would lose committed records", "stepped down", "following", "follower lags", "follower keeps up again", "quorum lost",
	"quorum recovered", "counts as voter", "two leaders in one epoch", "fetch of rounds failed", "peer has another number of logs"}

// String returns the event's text for logs.
func (k EventKind) String() string {
	if int(k) < len(eventNames) {
		return eventNames[k]
	}
	return fmt.Sprintf("event %d", uint8(k))
}

func (SendMessage) output()   {}
func (Persist) output()       {}
func (FenceLogs) output()     {}
func (FetchLog) output()      {}
func (Lead) output()          {}
func (PeerJoined) output()    {}
func (PeerLeft) output()      {}
func (FollowLeader) output()  {}
func (LeaderLost) output()    {}
func (LeaderCommits) output() {}
func (Serve) output()         {}
func (StopServing) output()   {}
func (ProbeLogs) output()     {}
func (SetQuorum) output()     {}
func (StartCatchup) output()  {}
func (FormedCluster) output() {}
func (Event) output()         {}
