// Package group decides who is a member of a consumer group and who owns which partition.
//
// It is pure: a Machine is stepped with the time and one event and answers with effects; it does no I/O, has no clock, no
// goroutine and no lock. Its owner proposes the changes it asks for to the metadata log, tells it when they are
// committed, sends its notices and answers, and starts and stops delivery.
//
// # How a partition changes hands
//
//	free --------- Assigned(owner, new ownership epoch) committed --> assigned: ASSIGN is repeated
//	assigned ----- CONTROL_ACK -----------------------------------> installed: Install, delivery runs
//	installed ---- another target committed ----------------------> revoking: Drain, REVOKE is repeated
//	revoking ----- CONTROL_ACK, or RevokeTimeout ------------------> released: Remove, delivery has stopped
//	released ----- Assigned(target, new ownership epoch) committed -> assigned (to the other member)
//	any ---------- its owner leaves or is removed ----------------> free
//
// The REVOKE of a partition that was taken from a member without its confirmation is repeated until that comes: it may have
// had no connection, and learns of the loss when it rejoins. That is not on record: a member that does so when the broker has
// started again meanwhile goes on believing, and what it asks of the partition is refused by the ownership epoch.
//
// In a broadcast group every member owns every partition by being a member: there is no target and no REVOKE, and the
// ownership epoch of all that a member owns is the membership epoch of its joining.
//
// At most one batch of changes (leaves, joins, one assignment) is in flight; what happens meanwhile waits for it. So the
// machine's state is always the committed one, and no answer or notice can tell of an epoch that is not (invariant 9).
//
// A batch that changes the members costs one pass over members and partitions, every other one what it hands on.
package group

import (
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// The times that decide liveness. Safety rests on the epochs alone.
const (
	// SessionTimeout is how long a member may send nothing.
	SessionTimeout = 10 * time.Second
	// LostTimeout is how long a member whose connection closed keeps its place.
	LostTimeout = 3 * time.Second
	// AssignTimeout is how long a member may take to confirm ASSIGN.
	AssignTimeout = 10 * time.Second
	// RevokeTimeout is how long a member may take to confirm REVOKE before it is carried out without it.
	RevokeTimeout = 5 * time.Second
	// NoticeRepeat is the time between two sendings of a notice that is not confirmed.
	NoticeRepeat = time.Second
	// ProposeRetry is the time until a change that the metadata log refused is proposed again.
	ProposeRetry = time.Second
)

// MaxWaiting is the most joins that may wait for the batch in flight; more get 0x4001.
const MaxWaiting = 1024

// MaxBroadcastAssignments is the most members times partitions of a broadcast group; more get 0x0025.
const MaxBroadcastAssignments = 1 << 16

// minMemberLimit is what every group may have, however few partitions its topic has.
const minMemberLimit = 10

// Options configures a Machine.
type Options struct {
	Group    uint16
	Topic    uint16
	Strategy Strategy
	// Broadcast gives every member every partition.
	Broadcast bool
	// MaxMembers is the most members; 0 means max(10, partition count).
	MaxMembers int
	// MemberBase and NoticeBase are where ids of members and notices start: bases that no other group and no earlier
	// machine of this group uses make the ids unmistakable.
	MemberBase uint64
	NoticeBase uint64
}

// State is what the metadata log knows of the group; a Machine starts from it.
type State struct {
	MembershipEpoch uint32
	AssignmentEpoch uint32
	LastOwnership   uint64
	LastMember      uint64
	// Members ascend by id.
	Members []MemberState
	// Parts has one element per partition of the topic. What it says does not matter in a broadcast group.
	Parts []PartState
}

// MemberState is one member in the metadata log.
type MemberState struct {
	ID        uint64
	JoinEpoch uint32
}

// PartState is one partition in the metadata log: its owner and the member that shall own it (0: nobody).
type PartState struct {
	Owner          uint64
	OwnershipEpoch uint64
	Target         uint64
}

// EventKind says what happened.
type EventKind uint8

const (
	// Join asks for a new member. Ref, Session.
	Join EventKind = iota + 1
	// Rejoin asks for a member's place after its connection was lost. Ref, Session, Member.
	Rejoin
	// Heartbeat checks a member's epochs and keeps it. Ref, Session, Member, MembershipEpoch, AssignmentEpoch.
	Heartbeat
	// Leave removes a member at its own wish. Ref, Session, Member.
	Leave
	// Touch tells when a member's client was last heard. Member, At.
	Touch
	// SessionClosed tells that a connection is gone. Session.
	SessionClosed
	// Confirm is a CONTROL_ACK; it is harmless if it fits no notice. Session, Ack.
	Confirm
	// Committed tells that the oldest change of the batch in flight is committed.
	Committed
	// Refused tells that the batch in flight was not accepted, none of it.
	Refused
	// Configure sets another strategy. Strategy.
	Configure
	// Close ends the group: it was deleted. Code and Text are what its members are told.
	Close
	// Tick lets time pass; see Machine.Deadline.
	Tick
)

// Event is one input of a Machine; which fields count depends on Kind.
type Event struct {
	Kind EventKind
	// Ref is the owner's name for a request that gets exactly one Answer.
	Ref uint64
	// Session is the owner's name for one subscription of one connection, never 0 and never used twice.
	Session uint64
	Member  uint64

	MembershipEpoch uint32
	AssignmentEpoch uint32
	Ack             protocol.ControlAck
	At              time.Duration
	Strategy        Strategy
	Code            protocol.ErrorCode
	Text            string
}

// EffectKind says what the owner has to do.
type EffectKind uint8

const (
	// Propose puts Changes into the metadata log, in this order, and reports each with Committed (or all with Refused).
	Propose EffectKind = iota + 1
	// Answer answers the request Ref: with Code and Text, or, where Code is 0, positively. After a join Member,
	// MembershipEpoch and AssignmentEpoch are those of the member, and it is bound to Session.
	Answer
	// Send sends Notice to Session.
	Send
	// Confirmed raises the assignment epoch that Session's member has confirmed to AssignmentEpoch.
	Confirmed
	// Install starts delivery of Partition to Session under OwnershipEpoch.
	Install
	// Drain stops new deliveries of Partition; what is in flight may still be acknowledged.
	Drain
	// Remove ends delivery of Partition under OwnershipEpoch; Graceful returns what is in flight without using an attempt.
	Remove
	// End ends Session: its member is gone (or has another session). Code and Text answer what it still sends; Code is
	// 0 after Leave.
	End
	// Forget tells that Member of a broadcast group is gone for good, and its cursors with it.
	Forget
)

// Effect is one output of a Machine; which fields count depends on Kind.
type Effect struct {
	Kind    EffectKind
	Ref     uint64
	Session uint64
	Member  uint64

	Partition       uint16
	OwnershipEpoch  uint64
	MembershipEpoch uint32
	AssignmentEpoch uint32
	Graceful        bool
	Code            protocol.ErrorCode
	Text            string
	Notice          protocol.Notice
	Changes         []Change
}

// Effects collects what a Step asks for, in the order in which it is to be done. The owner empties it between steps.
type Effects struct{ List []Effect }

func (fx *Effects) add(e Effect) { fx.List = append(fx.List, e) }

// Reset empties the list and keeps its memory.
func (fx *Effects) Reset() {
	clear(fx.List)
	fx.List = fx.List[:0]
}

// ChangeKind says what a Change does.
type ChangeKind uint8

const (
	// Joined adds Member.
	Joined ChangeKind = iota + 1
	// Left removes Member and frees what it owns.
	Left
	// Assigned sets targets and owners.
	Assigned
)

// Change is one mutation of the group for the metadata log. The epochs are those after it.
type Change struct {
	Kind   ChangeKind
	Member uint64
	// Session is whose member it will be, of a Joined; it is not for the log. 0: the connection closed meanwhile.
	Session         uint64
	MembershipEpoch uint32
	AssignmentEpoch uint32
	// Parts ascend by partition.
	Parts []PartChange
}

// PartChange gives a partition to Member: as its target only where OwnershipEpoch is 0.
type PartChange struct {
	Partition      uint16
	Member         uint64
	OwnershipEpoch uint64
}
