package replica

import (
	"fmt"
	"time"
)

// Kind is what a Message is about. The numbers are part of the peer protocol.
type Kind uint8

const (
	// KindProbe asks a node what it is, while the cluster isn't formed or the sender doesn't belong to it yet: Cluster,
	// Stage, Logs and Instance of the sender.
	KindProbe Kind = iota + 1
	// KindProbeAck answers with the same of the answering node; Session is the instance that asked.
	KindProbeAck
	// KindForm asks a node to persist Cluster and Logs; Session is its instance when it said that it is empty.
	KindForm
	// KindFormAck says that it is persisted: Instance, Session as in KindProbeAck.
	KindFormAck
	// KindPreVote asks whether the receiver agrees that the leader's lease ran out. Epoch is the one that would be next;
	// nothing is persisted.
	KindPreVote
	// KindPreVoteAck answers: Granted, and the epoch that the receiver has promised.
	KindPreVoteAck
	// KindPrepare asks for a promise for Epoch.
	KindPrepare
	// KindPromise gives it: persisted, with Standing and Ends.
	KindPromise
	// KindRefuse answers Prepare, Install or Heartbeat: Epoch is the one that the receiver has promised, Reason says why.
	KindRefuse
	// KindInstall tells a follower to follow Epoch and to say where its logs end. Session numbers the leader's requests.
	KindInstall
	// KindInstallAck answers with Session, Instance, Standing and Ends.
	KindInstallAck
	// KindHeartbeat renews the lease: Sent is the leader's time of sending, Commits its commit index per log. Instance is the
	// receiver's as the leader knows it; Confirmed says that all the leader's logs count that instance as no voter, and Ends
	// where they ended when they did.
	KindHeartbeat
	// KindHeartbeatAck answers with Sent as it came, Instance and Standing.
	KindHeartbeatAck
	// KindResign says that the leader of Epoch has stopped on its own: its lease need not be waited for.
	KindResign

	kindEnd
)

var kindNames = [...]string{"", "probe", "probe ack", "form", "form ack", "pre-vote", "pre-vote ack", "prepare", "promise",
	"refuse", "install", "install ack", "heartbeat", "heartbeat ack", "resign"}

// String returns the kind's name.
func (k Kind) String() string {
	if int(k) < len(kindNames) && k > 0 {
		return kindNames[k]
	}
	return fmt.Sprintf("message kind %d", uint8(k))
}

// Valid reports whether k is a kind of this version.
func (k Kind) Valid() bool { return k > 0 && k < kindEnd }

// Stage is how far a node is with forming its cluster.
type Stage uint8

const (
	// Empty is a node that knows no cluster and has no data.
	Empty Stage = iota
	// Forming is a node that has persisted the cluster's id; not all others may have.
	Forming
	// Formed is a node of a cluster all of whose nodes had persisted its id.
	Formed
)

var stageNames = [...]string{"empty", "forming", "formed"}

// String returns the stage's name.
func (s Stage) String() string {
	if int(s) < len(stageNames) {
		return stageNames[s]
	}
	return fmt.Sprintf("stage %d", uint8(s))
}

// Reason says why something was refused.
type Reason uint8

const (
	// StaleEpoch: the receiver has promised a higher epoch, or this one to another node (0x6005).
	StaleEpoch Reason = iota + 1
	// LeaseRuns: the receiver follows a leader whose lease has not run out, or it may have granted one before its restart.
	LeaseRuns
	// NoVote: the receiver is a learner, or its disk does not answer.
	NoVote
)

var reasonNames = [...]string{"", "stale epoch", "lease runs", "no vote"}

// String returns the reason's name.
func (r Reason) String() string {
	if int(r) < len(reasonNames) {
		return reasonNames[r]
	}
	return fmt.Sprintf("reason %d", uint8(r))
}

// Message is one message between the Nodes of a cluster. Which fields mean something depends on Kind; the others are zero.
// Messages may be lost, delayed, duplicated and reordered. The slices have one element per log and belong to the message: a
// receiver may keep them, a sender that hands them to a transport in its own process copies them first.
type Message struct {
	Kind      Kind
	Epoch     Epoch
	Cluster   ClusterID
	Stage     Stage
	Logs      uint16
	Reason    Reason
	Granted   bool
	Confirmed bool
	Standing  Standing
	Instance  Instance
	Session   uint64
	// Sent is a time of the leader's clock; it means something to that leader only.
	Sent    time.Duration
	Ends    []End
	Commits []Index
}
