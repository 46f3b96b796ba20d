package metadata

import (
	"fmt"

	"github.com/mortarmq/mortarmq/protocol"
)

// Snapshot, version 1 (the payload of an MMMS file; integers big-endian, str as in a mutation):
//
//	u8 version (1) | mutation_id u64 | leader_epoch u32 | leader u16 | last topic u16 | last group u16
//	topics u32, each: id u16, partitions u16, created epoch u32, name str, settings str
//	groups u32, each: id u16, topic u16, policy u8, created epoch u32, name str, settings str, membership epoch u32,
//	                  assignment epoch u32, last ownership u64, last member u64,
//	                  members u32, each: id u64, join epoch u32
//	                  parts, as many as the topic has: owner u64, ownership epoch u64, target u64
//
// Topics, groups and members ascend by id, so equal states have equal bytes.

const (
	topicMinLen  = 2 + 2 + 4 + 2 + 2
	groupMinLen  = 2 + 2 + 1 + 4 + 2 + 2 + 4 + 4 + 8 + 8 + 4
	memberLen    = 8 + 4
	groupPartLen = 8 + 8 + 8
)

// AppendSnapshot appends the encoding of the whole state.
func (s *State) AppendSnapshot(dst []byte) []byte {
	dst = append(dst, Version)
	dst = be.AppendUint64(dst, s.lastID)
	dst = be.AppendUint32(dst, s.epoch)
	dst = be.AppendUint16(dst, s.leader)
	dst = be.AppendUint16(dst, s.lastTopic)
	dst = be.AppendUint16(dst, s.lastGroup)
	topics, groups := s.Topics(), s.Groups()
	dst = be.AppendUint32(dst, uint32(len(topics)))
	for _, t := range topics {
		dst = be.AppendUint16(dst, t.ID)
		dst = be.AppendUint16(dst, t.Partitions)
		dst = be.AppendUint32(dst, t.CreatedEpoch)
		dst = appendString(dst, t.Name)
		dst = appendString(dst, t.Settings.AppendJSON(nil))
	}
	dst = be.AppendUint32(dst, uint32(len(groups)))
	for _, g := range groups {
		dst = g.appendSnapshot(dst)
	}
	return dst
}

func (g *Group) appendSnapshot(dst []byte) []byte {
	dst = be.AppendUint16(dst, g.ID)
	dst = be.AppendUint16(dst, g.Topic)
	dst = append(dst, byte(g.Policy))
	dst = be.AppendUint32(dst, g.CreatedEpoch)
	dst = appendString(dst, g.Name)
	dst = appendString(dst, g.Settings.AppendJSON(nil))
	dst = be.AppendUint32(dst, g.MembershipEpoch)
	dst = be.AppendUint32(dst, g.AssignmentEpoch)
	dst = be.AppendUint64(dst, g.LastOwnership)
	dst = be.AppendUint64(dst, g.LastMember)
	dst = be.AppendUint32(dst, uint32(len(g.Members)))
	for _, m := range g.Members {
		dst = be.AppendUint64(dst, m.ID)
		dst = be.AppendUint32(dst, m.JoinEpoch)
	}
	for _, p := range g.Parts {
		dst = be.AppendUint64(dst, p.Owner)
		dst = be.AppendUint64(dst, p.OwnershipEpoch)
		dst = be.AppendUint64(dst, p.Target)
	}
	return dst
}

// DecodeSnapshot reads a snapshot; nothing of the state aliases b. The error wraps ErrMalformed.
func DecodeSnapshot(b []byte) (*State, error) {
	r := reader{b: b}
	if v := r.u8(); r.err == nil && v != Version {
		return nil, fmt.Errorf("metadata snapshot has version %d, this broker reads version %d: upgrade it: %w", v, Version, ErrMalformed)
	}
	s := NewState()
	s.lastID, s.epoch, s.leader = r.u64(), r.u32(), r.u16()
	s.lastTopic, s.lastGroup = r.u16(), r.u16()
	for range r.count(topicMinLen) {
		t := &Topic{ID: r.u16(), Partitions: r.u16(), CreatedEpoch: r.u32(), Name: r.name()}
		t.Settings = r.topicSettings()
		s.checkTopic(&r, t)
		if r.err != nil {
			break
		}
		s.addTopic(t)
	}
	for range r.count(groupMinLen) {
		g := s.readGroup(&r)
		if r.err != nil {
			break
		}
		s.addGroup(g)
	}
	if err := r.end(); err != nil {
		return nil, fmt.Errorf("metadata snapshot (%d bytes): %w", len(b), err)
	}
	return s, nil
}

func (s *State) checkTopic(r *reader, t *Topic) {
	after := uint16(0)
	if last := s.topicOrder.last(); last != nil {
		after = last.ID
	}
	switch {
	case r.err != nil:
	case t.ID <= after || t.ID > s.lastTopic:
		r.fail("topic id %d after %d, the last one given is %d", t.ID, after, s.lastTopic)
	case t.Partitions == 0 || t.Partitions == protocol.AnyPartition:
		r.fail("topic %d has %d partitions", t.ID, t.Partitions)
	case s.topicNames[t.Name] != nil:
		r.fail("two topics are called %q", t.Name)
	case protocol.ValidateLookup([]byte(t.Name)) != nil:
		r.fail("topic %d has an invalid name", t.ID)
	case t.CreatedEpoch > s.epoch:
		r.fail("topic %d was created in epoch %d, the log is at %d", t.ID, t.CreatedEpoch, s.epoch)
	}
}

func (s *State) readGroup(r *reader) *Group {
	g := &Group{ID: r.u16(), Topic: r.u16(), Policy: r.policy(), CreatedEpoch: r.u32(), Name: r.name()}
	g.Settings = r.groupSettings()
	g.MembershipEpoch, g.AssignmentEpoch = r.u32(), r.u32()
	g.LastOwnership, g.LastMember = r.u64(), r.u64()
	if s.checkGroup(r, g); r.err != nil {
		return nil
	}
	if n := r.count(memberLen); n > 0 {
		g.Members = make([]Member, n)
	}
	last := uint64(0)
	for i := range g.Members {
		m := Member{ID: r.u64(), JoinEpoch: r.u32()}
		if r.err == nil && (m.ID <= last || m.ID > g.LastMember || m.JoinEpoch > g.MembershipEpoch) {
			r.fail("member %d of group %d", m.ID, g.ID)
		}
		g.Members[i], last = m, m.ID
	}
	n := int(s.topics[g.Topic].Partitions)
	if len(r.b) < n*groupPartLen {
		r.fail("the partitions of group %d are incomplete", g.ID)
		return nil
	}
	g.Parts = make([]Part, n)
	for i := range g.Parts {
		p := Part{Owner: r.u64(), OwnershipEpoch: r.u64(), Target: r.u64()}
		if r.err == nil && (!g.isMemberOrNobody(p.Owner) || !g.isMemberOrNobody(p.Target) || p.OwnershipEpoch > g.LastOwnership) {
			r.fail("partition %d of group %d", i, g.ID)
		}
		g.Parts[i] = p
	}
	return g
}

func (s *State) checkGroup(r *reader, g *Group) {
	after := uint16(0)
	if last := s.groupOrder.last(); last != nil {
		after = last.ID
	}
	switch {
	case r.err != nil:
	case g.ID <= after || g.ID > s.lastGroup:
		r.fail("group id %d after %d, the last one given is %d", g.ID, after, s.lastGroup)
	case s.topics[g.Topic] == nil:
		r.fail("group %d reads topic %d, which does not exist", g.ID, g.Topic)
	case s.groupNames[groupKey{g.Name, g.Topic}] != nil:
		r.fail("two groups on topic %d are called %q", g.Topic, g.Name)
	case protocol.ValidateGroup([]byte(g.Name)) != nil:
		r.fail("group %d has an invalid name", g.ID)
	case g.CreatedEpoch > s.epoch:
		r.fail("group %d was created in epoch %d, the log is at %d", g.ID, g.CreatedEpoch, s.epoch)
	}
}

func (g *Group) isMemberOrNobody(id uint64) bool {
	if id == 0 {
		return true
	}
	_, ok := g.member(id)
	return ok
}
