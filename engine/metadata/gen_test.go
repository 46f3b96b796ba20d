package metadata

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// script is a seeded writer: it produces mutations that are valid one after the other, as a leader would.
type script struct {
	rng   *rand.Rand
	state *State
}

func newScript(seed uint64) *script {
	return &script{rng: rand.New(rand.NewPCG(seed, 1)), state: NewState()}
}

// next returns a valid mutation and the epoch of its record, and applies it.
func (s *script) next() (Mutation, uint32) {
	epoch := s.state.Epoch()
	m := s.pick()
	if m.Type() == TypeLeaderChanged {
		epoch++
	}
	if err := s.state.Apply(s.state.MutationID()+1, epoch, m); err != nil {
		panic(fmt.Sprintf("the script made an invalid mutation: %v", err))
	}
	return m, epoch
}

func (s *script) pick() Mutation {
	st := s.state
	for {
		switch s.rng.IntN(10) {
		case 0:
			if s.rng.IntN(4) == 0 {
				return &LeaderChanged{Node: uint16(s.rng.IntN(3))}
			}
		case 1:
			id := st.LastTopic() + 1 + uint16(s.rng.IntN(2))
			return &TopicCreated{Topic: id, Partitions: uint16(1 + s.rng.IntN(6)), Name: fmt.Sprintf("t.%d", id),
				Settings: TopicSettings{Durability: protocol.Durability(s.rng.IntN(3))}}
		case 2:
			if t := s.topic(); t != nil && s.rng.IntN(6) == 0 {
				return &TopicDeleted{Topic: t.ID}
			}
		case 3:
			if t := s.topic(); t != nil {
				id := st.LastGroup() + 1
				return &GroupCreated{Group: id, Topic: t.ID, Policy: protocol.StartPolicy(s.rng.IntN(2)), Name: fmt.Sprintf("g%d", id),
					Settings: s.groupSettings()}
			}
		case 4:
			if g := s.group(); g != nil && s.rng.IntN(6) == 0 {
				return &GroupDeleted{Group: g.ID}
			}
			if g := s.group(); g != nil {
				m := &GroupChanged{Group: g.ID, Settings: s.groupSettings()}
				if m.Settings.Broadcast == g.Settings.Broadcast {
					return m
				}
			}
		case 5, 6:
			if g := s.group(); g != nil {
				return &MemberJoined{Group: g.ID, Member: g.LastMember + 1 + uint64(s.rng.IntN(3)), MembershipEpoch: g.MembershipEpoch + 1}
			}
		case 7:
			if g := s.group(); g != nil && len(g.Members) > 0 {
				return &MemberLeft{Group: g.ID, Member: g.Members[s.rng.IntN(len(g.Members))].ID, MembershipEpoch: g.MembershipEpoch + 1}
			}
		default:
			if m := s.assignment(); m != nil {
				return m
			}
		}
	}
}

func (s *script) groupSettings() GroupSettings {
	g := GroupSettings{Lease: time.Duration(s.rng.IntN(2)) * time.Minute}
	if s.rng.IntN(4) == 0 {
		g.Broadcast = true
		return g
	}
	g.Strategy, g.Ordered, g.MaxAttempts = Strategy(s.rng.IntN(3)), s.rng.IntN(2) == 0, uint16(s.rng.IntN(2)*7)
	switch s.rng.IntN(3) {
	case 0:
		g.Retry, g.Delays = RetryList, []time.Duration{MinRetryDelay, time.Second, MaxOrderedDelay}[:1+s.rng.IntN(3)]
	case 1:
		if !g.Ordered {
			g.Retry = RetryRocketMQ
		}
	}
	return g
}

func (s *script) topic() *Topic {
	if all := s.state.Topics(); len(all) > 0 {
		return all[s.rng.IntN(len(all))]
	}
	return nil
}

func (s *script) group() *Group {
	if all := s.state.Groups(); len(all) > 0 {
		return all[s.rng.IntN(len(all))]
	}
	return nil
}

func (s *script) assignment() Mutation {
	g := s.group()
	if g == nil || len(g.Members) == 0 || g.Settings.Broadcast {
		return nil
	}
	m := &Assigned{Group: g.ID, MembershipEpoch: g.MembershipEpoch, AssignmentEpoch: g.AssignmentEpoch + uint32(s.rng.IntN(2))}
	ownership := g.LastOwnership
	for p := range g.Parts {
		if s.rng.IntN(2) == 0 {
			continue
		}
		part := AssignedPart{Partition: uint16(p), Member: g.Members[s.rng.IntN(len(g.Members))].ID}
		if m.AssignmentEpoch == g.AssignmentEpoch || s.rng.IntN(2) == 0 {
			ownership++
			part.OwnershipEpoch = ownership
		}
		m.Parts = append(m.Parts, part)
	}
	if len(m.Parts) == 0 {
		return nil
	}
	return m
}
