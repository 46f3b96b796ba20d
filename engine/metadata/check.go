package metadata

import (
	"fmt"

	"github.com/mortarmq/mortarmq/protocol"
)

// Limits of one broker's metadata.
const (
	// MaxTopicID and MaxGroupID are the last ids there are; ids of deleted topics and groups are not used again.
	MaxTopicID = 65535
	MaxGroupID = 65535
	// MaxPartitionsPerTopic leaves out the number that means "any" on the wire.
	MaxPartitionsPerTopic = 65534
	// MaxPartitions bounds the partitions of all topics together, so that their bookkeeping stays within memory.
	MaxPartitions = 1 << 20
	// MaxAssignments bounds the cursors of all groups together, see Group.Cursors.
	MaxAssignments = 1 << 21
)

// CheckCreateTopic checks, before a topic is proposed, that a client may create it. pendingTopics and pendingPartitions
// count what is proposed but not applied yet. The error wraps the code to answer with.
func (s *State) CheckCreateTopic(name string, partitions uint16, pendingTopics, pendingPartitions int) error {
	if err := protocol.ValidateTopic([]byte(name)); err != nil {
		return err
	}
	return s.checkRoom(name, partitions, pendingTopics, pendingPartitions)
}

// CheckCreateSystemTopic is CheckCreateTopic for the broker's own topics, whose names start with '$'.
func (s *State) CheckCreateSystemTopic(name string, partitions uint16, pendingTopics, pendingPartitions int) error {
	if err := protocol.ValidateLookup([]byte(name)); err != nil {
		return err
	}
	return s.checkRoom(name, partitions, pendingTopics, pendingPartitions)
}

func (s *State) checkRoom(name string, partitions uint16, pendingTopics, pendingPartitions int) error {
	switch {
	case s.topicNames[name] != nil:
		return fmt.Errorf("topic %q exists: %w", name, protocol.CodeTopicExistsMismatch)
	case partitions == 0 || partitions > MaxPartitionsPerTopic:
		return fmt.Errorf("topic %q can't have %d partitions, use 1 to %d: %w", name, partitions, MaxPartitionsPerTopic, protocol.CodeQuotaExceeded)
	case int(s.lastTopic)+pendingTopics >= MaxTopicID:
		return fmt.Errorf("all %d topic ids are used, they are not given twice: %w", MaxTopicID, protocol.CodeQuotaExceeded)
	case s.partitions+pendingPartitions+int(partitions) > MaxPartitions:
		return fmt.Errorf("the broker has %d partitions and holds at most %d: use fewer or delete topics: %w", s.partitions+pendingPartitions, MaxPartitions, protocol.CodeQuotaExceeded)
	}
	return nil
}

// CheckSameTopic checks what a DECLARE of an existing topic asks for: partitions 0 and settings nil ask for nothing. The
// error wraps protocol.CodeTopicExistsMismatch.
func (t *Topic) CheckSameTopic(partitions uint16, settings *TopicSettings) error {
	if partitions != 0 && partitions != t.Partitions {
		return fmt.Errorf("topic %q has %d partitions, not %d: the count is fixed, declare it with %d or 0: %w", t.Name, t.Partitions, partitions, t.Partitions, protocol.CodeTopicExistsMismatch)
	}
	if settings != nil && settings.EffectiveDurability() != t.Settings.EffectiveDurability() {
		return fmt.Errorf("topic %q has durability %v, not %v: declare it without settings: %w", t.Name, t.Settings.EffectiveDurability(), settings.EffectiveDurability(), protocol.CodeTopicExistsMismatch)
	}
	return nil
}

// CheckCreateGroup checks, before a group is proposed, that it may be created; pending counts groups that are proposed
// but not applied yet, pendingAssignments the cursors of these and of members that are joining. The error wraps the code to
// answer with.
func (s *State) CheckCreateGroup(name string, topic uint16, pending, pendingAssignments int) error {
	if s.topics[topic] == nil {
		return fmt.Errorf("topic %d does not exist: create it first (mortarmq topics create NAME): %w", topic, protocol.CodeUnknownTopic)
	}
	if err := protocol.ValidateGroup([]byte(name)); err != nil {
		return err
	}
	if s.groupNames[groupKey{name, topic}] != nil {
		return fmt.Errorf("group %q exists on topic %d: %w", name, topic, protocol.CodeGroupExistsMismatch)
	}
	if int(s.lastGroup)+pending >= MaxGroupID {
		return fmt.Errorf("all %d group ids are used, they are not given twice: %w", MaxGroupID, protocol.CodeQuotaExceeded)
	}
	return s.CheckCursors(int(s.topics[topic].Partitions), pendingAssignments)
}

// CheckCursors checks that the groups may have n cursors more, beside those that are pending. The error wraps the code to
// answer with.
func (s *State) CheckCursors(n, pending int) error {
	if s.assignments+pending+n > MaxAssignments {
		return fmt.Errorf("the broker's groups have %d partitions to assign and can't have %d more: delete groups: %w", s.assignments+pending, n, protocol.CodeGroupAssignmentLimit)
	}
	return nil
}

// CheckSetGroup checks new settings for a group that exists. The error wraps the code to answer with.
func (g *Group) CheckSetGroup(settings *GroupSettings) error {
	if settings.Broadcast != g.Settings.Broadcast {
		return fmt.Errorf("group %q can't change between broadcast and shared: its cursors are other ones: use another group: %w", g.Name, protocol.CodeGroupExistsMismatch)
	}
	return nil
}

// CheckSameKind checks that a client that wants to join a group takes it for the kind that it is. The error wraps
// protocol.CodeGroupExistsMismatch.
func (g *Group) CheckSameKind(broadcast bool) error {
	switch {
	case broadcast == g.Settings.Broadcast:
		return nil
	case broadcast:
		return fmt.Errorf("group %q shares its partitions among its members: subscribe without BROADCAST, or as another group: %w", g.Name, protocol.CodeGroupExistsMismatch)
	default:
		return fmt.Errorf("group %q is a broadcast group: subscribe with BROADCAST, or as another group: %w", g.Name, protocol.CodeGroupExistsMismatch)
	}
}

// CheckSameGroup checks the settings that a client names for a group that exists; nil names none. The error wraps
// protocol.CodeGroupExistsMismatch.
func (g *Group) CheckSameGroup(settings *GroupSettings) error {
	if settings != nil && !settings.Equal(&g.Settings) {
		return fmt.Errorf("group %q has the settings %s: subscribe without settings, or with these: %w", g.Name, g.Settings.AppendJSON(nil), protocol.CodeGroupExistsMismatch)
	}
	return nil
}
