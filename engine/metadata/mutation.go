package metadata

import "github.com/mortarmq/mortarmq/protocol"

// Type is the type byte of a mutation.
type Type uint8

// The mutation types; their numbers are never used for anything else.
const (
	TypeTopicCreated Type = iota + 1
	TypeTopicDeleted
	TypeGroupCreated
	TypeGroupDeleted
	TypeMemberJoined
	TypeMemberLeft
	TypeAssigned
	TypeLeaderChanged
	TypeGroupChanged
)

func (t Type) String() string {
	switch t {
	case TypeTopicCreated:
		return "topic created"
	case TypeTopicDeleted:
		return "topic deleted"
	case TypeGroupCreated:
		return "group created"
	case TypeGroupDeleted:
		return "group deleted"
	case TypeMemberJoined:
		return "member joined"
	case TypeMemberLeft:
		return "member left"
	case TypeAssigned:
		return "assigned"
	case TypeLeaderChanged:
		return "leader changed"
	case TypeGroupChanged:
		return "group changed"
	default:
		return "unknown"
	}
}

// Mutation is one change of the metadata: *TopicCreated, *TopicDeleted, *GroupCreated, *GroupDeleted, *MemberJoined,
// *MemberLeft, *Assigned, *LeaderChanged or *GroupChanged. It is immutable once proposed or applied.
type Mutation interface {
	Type() Type
	appendFields(dst []byte) []byte
}

// TopicCreated adds a topic. IDs are given in ascending order and never twice.
type TopicCreated struct {
	Topic      uint16
	Partitions uint16
	Name       string
	Settings   TopicSettings
}

// TopicDeleted removes a topic and the groups that read it. It is the tombstone: the id is never used again, the name may
// be, for a topic with a new id.
type TopicDeleted struct{ Topic uint16 }

// GroupCreated adds a consumer group: the cursor of one group name on one topic. The same name on another topic is
// another group with an id of its own. IDs are given in ascending order and never twice.
type GroupCreated struct {
	Group    uint16
	Topic    uint16
	Policy   protocol.StartPolicy
	Name     string
	Settings GroupSettings
}

// GroupDeleted removes a group.
type GroupDeleted struct{ Group uint16 }

// MemberJoined adds a member; MembershipEpoch is the group's epoch after it. Member ids of a group ascend and are never
// used twice.
type MemberJoined struct {
	Group           uint16
	Member          uint64
	MembershipEpoch uint32
}

// MemberLeft removes a member and frees the partitions it owns or was to own.
type MemberLeft struct {
	Group           uint16
	Member          uint64
	MembershipEpoch uint32
}

// Assigned changes who owns partitions. AssignmentEpoch is the group's own (a step towards the target it already has) or
// the next one (a new target).
type Assigned struct {
	Group           uint16
	MembershipEpoch uint32
	AssignmentEpoch uint32
	// Parts ascend by partition.
	Parts []AssignedPart
}

// AssignedPart gives a partition to a member. OwnershipEpoch 0 names the member as the target only: the present owner
// keeps the partition until it has given it up. Otherwise the member owns it from now on under that epoch, which is
// higher than any the group has used before.
type AssignedPart struct {
	Partition      uint16
	Member         uint64
	OwnershipEpoch uint64
}

// LeaderChanged opens a leader epoch (that of its record): the first mutation of every leader, and of every start of a
// node that is alone.
type LeaderChanged struct{ Node uint16 }

// GroupChanged gives a group other settings.
type GroupChanged struct {
	Group    uint16
	Settings GroupSettings
}

// Type returns TypeTopicCreated.
func (*TopicCreated) Type() Type { return TypeTopicCreated }

// Type returns TypeTopicDeleted.
func (*TopicDeleted) Type() Type { return TypeTopicDeleted }

// Type returns TypeGroupCreated.
func (*GroupCreated) Type() Type { return TypeGroupCreated }

// Type returns TypeGroupDeleted.
func (*GroupDeleted) Type() Type { return TypeGroupDeleted }

// Type returns TypeMemberJoined.
func (*MemberJoined) Type() Type { return TypeMemberJoined }

// Type returns TypeMemberLeft.
func (*MemberLeft) Type() Type { return TypeMemberLeft }

// Type returns TypeAssigned.
func (*Assigned) Type() Type { return TypeAssigned }

// Type returns TypeLeaderChanged.
func (*LeaderChanged) Type() Type { return TypeLeaderChanged }

// Type returns TypeGroupChanged.
func (*GroupChanged) Type() Type { return TypeGroupChanged }
