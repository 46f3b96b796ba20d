package metadata

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/mortarmq/mortarmq/protocol"
)

// Why a mutation can't be applied. A mutation from the past (an old mutation_id or leader_epoch) wraps
// protocol.CodeMutationFenced instead.
var (
	// ErrGap: mutations before this one are missing.
	ErrGap = errors.New("gap in mutation_id")
	// ErrInvalid: the mutation contradicts the state that the ones before it made.
	ErrInvalid = errors.New("mutation contradicts the state")
)

// Topic is one live topic.
type Topic struct {
	ID           uint16
	Partitions   uint16
	CreatedEpoch uint32 // leader epoch of the mutation that created it
	Name         string
	Settings     TopicSettings

	groups order[*Group] // that read it
	gone   bool
}

func (t *Topic) isGone() bool { return t.gone }

// Group is one live consumer group.
type Group struct {
	ID           uint16
	Topic        uint16
	Policy       protocol.StartPolicy
	CreatedEpoch uint32
	Name         string
	Settings     GroupSettings

	MembershipEpoch uint32
	AssignmentEpoch uint32
	// LastOwnership is the highest ownership epoch given so far, LastMember the highest member id.
	LastOwnership uint64
	LastMember    uint64
	// Members ascend by id.
	Members []Member
	// Parts has one element per partition of the topic.
	Parts []Part

	gone bool
}

func (g *Group) isGone() bool { return g.gone }

// Cursors is how many cursors the group has: one for each partition, in a broadcast group that for each member.
func (g *Group) Cursors() int {
	if g.Settings.Broadcast {
		return len(g.Parts) * len(g.Members)
	}
	return len(g.Parts)
}

// Member is one member of a group.
type Member struct {
	ID        uint64
	JoinEpoch uint32 // the membership epoch that its joining made
}

// Part is the ownership of one partition by a group. Member ids are 0 where there is nobody.
type Part struct {
	// Owner holds the partition under OwnershipEpoch. The epoch stays when the owner leaves.
	Owner          uint64
	OwnershipEpoch uint64
	// Target is who shall own it; it differs from Owner while the partition is being moved.
	Target uint64
}

func (g *Group) member(id uint64) (int, bool) {
	return slices.BinarySearchFunc(g.Members, id, func(m Member, id uint64) int { return cmp.Compare(m.ID, id) })
}

// State is the fold over the log up to MutationID. It belongs to one goroutine; what its methods return is to be read
// only, and only until the next Apply.
type State struct {
	lastID      uint64
	epoch       uint32
	leader      uint16
	lastTopic   uint16
	lastGroup   uint16
	partitions  int // of all topics
	assignments int // cursors of all groups, see Group.Cursors

	topics     map[uint16]*Topic
	topicNames map[string]*Topic
	topicOrder order[*Topic] // by id

	groups     map[uint16]*Group
	groupNames map[groupKey]*Group
	groupOrder order[*Group] // by id
}

type groupKey struct {
	name  string
	topic uint16
}

// NewState returns the state before the first mutation.
func NewState() *State {
	return &State{
		topics:     make(map[uint16]*Topic),
		topicNames: make(map[string]*Topic),
		groups:     make(map[uint16]*Group),
		groupNames: make(map[groupKey]*Group),
	}
}

// MutationID returns the id of the last mutation applied; the next one must have the id after it.
func (s *State) MutationID() uint64 { return s.lastID }

// Epoch returns the highest leader epoch applied.
func (s *State) Epoch() uint32 { return s.epoch }

// Leader returns the node of the last leader change.
func (s *State) Leader() uint16 { return s.leader }

// LastTopic and LastGroup return the highest id ever given.
func (s *State) LastTopic() uint16 { return s.lastTopic }

// LastGroup returns the highest group id ever given.
func (s *State) LastGroup() uint16 { return s.lastGroup }

// Topic returns the live topic with the id, nil if there is none.
func (s *State) Topic(id uint16) *Topic { return s.topics[id] }

// TopicByName returns the live topic with the name, nil if there is none.
func (s *State) TopicByName(name string) *Topic { return s.topicNames[name] }

// TopicDeleted reports whether the id belonged to a topic that is no more.
func (s *State) TopicDeleted(id uint16) bool {
	return id != 0 && id <= s.lastTopic && s.topics[id] == nil
}

// Topics returns the live topics in the order of their ids.
func (s *State) Topics() []*Topic { return s.topicOrder.all() }

// Group returns the live group with the id, nil if there is none.
func (s *State) Group(id uint16) *Group { return s.groups[id] }

// GroupByName returns the live group of that name on that topic, nil if there is none.
func (s *State) GroupByName(name string, topic uint16) *Group {
	return s.groupNames[groupKey{name, topic}]
}

// Groups returns the live groups in the order of their ids.
func (s *State) Groups() []*Group { return s.groupOrder.all() }

// Apply folds the mutation of record (id, epoch) into the state. On an error the state is unchanged; it wraps
// protocol.CodeMutationFenced, ErrGap or ErrInvalid, and on a committed log each of them means that the log can't be
// trusted.
func (s *State) Apply(id uint64, epoch uint32, m Mutation) error {
	switch {
	case id <= s.lastID:
		return fmt.Errorf("mutation %d steps back, %d is applied: %w", id, s.lastID, protocol.CodeMutationFenced)
	case id != s.lastID+1:
		return fmt.Errorf("mutation %d follows %d: %w", id, s.lastID, ErrGap)
	case epoch < s.epoch:
		return fmt.Errorf("mutation %d has leader epoch %d, the log is at %d: %w", id, epoch, s.epoch, protocol.CodeMutationFenced)
	}
	var err error
	switch m := m.(type) {
	case *TopicCreated:
		err = s.topicCreated(epoch, m)
	case *TopicDeleted:
		err = s.topicDeleted(m)
	case *GroupCreated:
		err = s.groupCreated(epoch, m)
	case *GroupDeleted:
		err = s.groupDeleted(m)
	case *MemberJoined:
		err = s.memberJoined(m)
	case *MemberLeft:
		err = s.memberLeft(m)
	case *Assigned:
		err = s.assigned(m)
	case *LeaderChanged:
		s.leader = m.Node
	case *GroupChanged:
		err = s.groupChanged(m)
	default:
		err = invalid("unknown type %T", m)
	}
	if err != nil {
		return fmt.Errorf("mutation %d (%v): %w", id, m.Type(), err)
	}
	s.lastID, s.epoch = id, epoch
	return nil
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), ErrInvalid)
}

func (s *State) topicCreated(epoch uint32, m *TopicCreated) error {
	switch {
	case m.Topic <= s.lastTopic:
		return invalid("topic id %d, but ids up to %d are used", m.Topic, s.lastTopic)
	case m.Partitions == 0 || m.Partitions == protocol.AnyPartition:
		return invalid("topic %q with %d partitions", m.Name, m.Partitions)
	case s.topicNames[m.Name] != nil:
		return invalid("topic %q exists with id %d", m.Name, s.topicNames[m.Name].ID)
	}
	if err := protocol.ValidateLookup([]byte(m.Name)); err != nil {
		return invalid("%v", err)
	}
	s.addTopic(&Topic{ID: m.Topic, Partitions: m.Partitions, CreatedEpoch: epoch, Name: m.Name, Settings: m.Settings})
	s.lastTopic = m.Topic
	return nil
}

func (s *State) addTopic(t *Topic) {
	s.topics[t.ID] = t
	s.topicNames[t.Name] = t
	s.topicOrder.add(t)
	s.partitions += int(t.Partitions)
}

func (s *State) topicDeleted(m *TopicDeleted) error {
	t := s.topics[m.Topic]
	if t == nil {
		return invalid("topic %d does not exist", m.Topic)
	}
	for _, g := range t.groups.all() {
		s.removeGroup(g)
	}
	t.gone = true
	delete(s.topics, t.ID)
	delete(s.topicNames, t.Name)
	s.topicOrder.removed()
	s.partitions -= int(t.Partitions)
	return nil
}

func (s *State) groupCreated(epoch uint32, m *GroupCreated) error {
	t := s.topics[m.Topic]
	switch {
	case m.Group <= s.lastGroup:
		return invalid("group id %d, but ids up to %d are used", m.Group, s.lastGroup)
	case t == nil:
		return invalid("group %q reads topic %d, which does not exist", m.Name, m.Topic)
	case s.groupNames[groupKey{m.Name, m.Topic}] != nil:
		return invalid("group %q exists on topic %d", m.Name, m.Topic)
	}
	if err := protocol.ValidateGroup([]byte(m.Name)); err != nil {
		return invalid("%v", err)
	}
	s.addGroup(&Group{
		ID: m.Group, Topic: m.Topic, Policy: m.Policy, CreatedEpoch: epoch, Name: m.Name, Settings: m.Settings,
		Parts: make([]Part, t.Partitions),
	})
	s.lastGroup = m.Group
	return nil
}

func (s *State) addGroup(g *Group) {
	s.groups[g.ID] = g
	s.groupNames[groupKey{g.Name, g.Topic}] = g
	s.groupOrder.add(g)
	s.topics[g.Topic].groups.add(g)
	s.assignments += g.Cursors()
}

func (s *State) removeGroup(g *Group) {
	g.gone = true
	delete(s.groups, g.ID)
	delete(s.groupNames, groupKey{g.Name, g.Topic})
	s.groupOrder.removed()
	s.assignments -= g.Cursors()
}

func (s *State) groupDeleted(m *GroupDeleted) error {
	g := s.groups[m.Group]
	if g == nil {
		return invalid("group %d does not exist", m.Group)
	}
	s.removeGroup(g)
	s.topics[g.Topic].groups.removed()
	return nil
}

func (s *State) groupChanged(m *GroupChanged) error {
	g := s.groups[m.Group]
	switch {
	case g == nil:
		return invalid("group %d does not exist", m.Group)
	case g.Settings.Broadcast != m.Settings.Broadcast:
		return invalid("group %d changes between broadcast and shared", m.Group)
	}
	g.Settings = m.Settings
	return nil
}

func (s *State) memberJoined(m *MemberJoined) error {
	g := s.groups[m.Group]
	switch {
	case g == nil:
		return invalid("group %d does not exist", m.Group)
	case m.Member <= g.LastMember:
		return invalid("member id %d of group %d, but ids up to %d are used", m.Member, m.Group, g.LastMember)
	case m.MembershipEpoch != g.MembershipEpoch+1:
		return invalid("membership epoch %d of group %d follows %d", m.MembershipEpoch, m.Group, g.MembershipEpoch)
	}
	s.assignments -= g.Cursors()
	g.Members = append(g.Members, Member{ID: m.Member, JoinEpoch: m.MembershipEpoch})
	s.assignments += g.Cursors()
	g.LastMember, g.MembershipEpoch = m.Member, m.MembershipEpoch
	return nil
}

func (s *State) memberLeft(m *MemberLeft) error {
	g := s.groups[m.Group]
	if g == nil {
		return invalid("group %d does not exist", m.Group)
	}
	at, ok := g.member(m.Member)
	switch {
	case !ok:
		return invalid("member %d is not in group %d", m.Member, m.Group)
	case m.MembershipEpoch != g.MembershipEpoch+1:
		return invalid("membership epoch %d of group %d follows %d", m.MembershipEpoch, m.Group, g.MembershipEpoch)
	}
	s.assignments -= g.Cursors()
	g.Members = slices.Delete(g.Members, at, at+1)
	s.assignments += g.Cursors()
	g.MembershipEpoch = m.MembershipEpoch
	for i := range g.Parts {
		p := &g.Parts[i]
		if p.Owner == m.Member {
			p.Owner = 0
		}
		if p.Target == m.Member {
			p.Target = 0
		}
	}
	return nil
}

func (s *State) assigned(m *Assigned) error {
	g := s.groups[m.Group]
	switch {
	case g == nil:
		return invalid("group %d does not exist", m.Group)
	case m.MembershipEpoch != g.MembershipEpoch:
		return invalid("assignment of group %d for membership epoch %d, it is at %d", m.Group, m.MembershipEpoch, g.MembershipEpoch)
	case g.Settings.Broadcast:
		return invalid("assignment of group %d, which is a broadcast one", m.Group)
	case m.AssignmentEpoch != g.AssignmentEpoch && m.AssignmentEpoch != g.AssignmentEpoch+1:
		return invalid("assignment epoch %d of group %d follows %d", m.AssignmentEpoch, m.Group, g.AssignmentEpoch)
	case len(m.Parts) == 0:
		return invalid("assignment of group %d changes nothing", m.Group)
	}
	if err := g.checkParts(m); err != nil {
		return err
	}
	for _, a := range m.Parts {
		p := &g.Parts[a.Partition]
		p.Target = a.Member
		if a.OwnershipEpoch != 0 {
			p.Owner, p.OwnershipEpoch = a.Member, a.OwnershipEpoch
			g.LastOwnership = a.OwnershipEpoch
		}
	}
	g.AssignmentEpoch = m.AssignmentEpoch
	return nil
}

// checkParts checks an assignment's parts before any of them is applied.
func (g *Group) checkParts(m *Assigned) error {
	ownership := g.LastOwnership
	for i, a := range m.Parts {
		if int(a.Partition) >= len(g.Parts) {
			return invalid("group %d has no partition %d", g.ID, a.Partition)
		}
		if i > 0 && a.Partition <= m.Parts[i-1].Partition {
			return invalid("partition %d of group %d is out of order", a.Partition, g.ID)
		}
		if _, ok := g.member(a.Member); !ok {
			return invalid("partition %d of group %d goes to %d, which is not a member", a.Partition, g.ID, a.Member)
		}
		switch {
		case a.OwnershipEpoch == 0:
			if m.AssignmentEpoch == g.AssignmentEpoch {
				return invalid("partition %d of group %d gets a new target under the old assignment epoch %d", a.Partition, g.ID, m.AssignmentEpoch)
			}
		case a.OwnershipEpoch <= ownership:
			return invalid("ownership epoch %d of partition %d of group %d follows %d", a.OwnershipEpoch, a.Partition, g.ID, ownership)
		default:
			ownership = a.OwnershipEpoch
		}
	}
	return nil
}
