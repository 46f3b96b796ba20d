package group

import (
	"fmt"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// crew drives a machine whose members confirm everything and whose log commits at once.
type crew struct {
	m   *Machine
	now time.Duration
	ref uint64
	// members are the ids by session, members that have left are 0.
	members []uint64
	steps   int
}

func newCrew(partitions int) *crew {
	return &crew{m: New(0, Options{}, State{Parts: make([]PartState, partitions)}), members: []uint64{0}}
}

// step handles an event and everything that follows from it.
func (c *crew) step(ev Event) {
	c.steps++
	var fx Effects
	c.m.Step(c.now, &ev, &fx)
	for i := range fx.List {
		switch e := &fx.List[i]; e.Kind {
		case Propose:
			for range e.Changes {
				c.step(Event{Kind: Committed})
			}
		case Answer:
			if e.Code == 0 && e.Member != 0 && e.Session != 0 {
				c.members[e.Session] = e.Member
			}
		case Send:
			c.step(Event{Kind: Confirm, Session: e.Session, Ack: echo(e.Notice, protocol.ControlOK)})
		case Confirmed, Install, Drain, Remove, End, Forget:
		}
	}
}

func (c *crew) join() (session uint64) {
	c.ref++
	session = uint64(len(c.members))
	c.members = append(c.members, 0)
	c.step(Event{Kind: Join, Ref: c.ref, Session: session})
	return session
}

func (c *crew) leave(session uint64) {
	c.ref++
	c.step(Event{Kind: Leave, Ref: c.ref, Session: session, Member: c.members[session]})
	c.members[session] = 0
}

func (c *crew) heartbeat(session uint64) {
	c.ref++
	mEpoch, aEpoch := c.m.Epochs()
	c.step(Event{Kind: Heartbeat, Ref: c.ref, Session: session, Member: c.members[session], MembershipEpoch: mEpoch, AssignmentEpoch: aEpoch})
}

var groupSizes = []struct{ members, partitions int }{{10, 100}, {100, 1000}, {1000, 10_000}}

// BenchmarkGroup_OneMoreJoinsAndLeaves is what a member more costs a group, with every partition that moves: it grows with
// the number of partitions and not faster.
func BenchmarkGroup_OneMoreJoinsAndLeaves(b *testing.B) {
	for _, size := range groupSizes {
		b.Run(fmt.Sprintf("members=%d/partitions=%d", size.members, size.partitions), func(b *testing.B) {
			c := newCrew(size.partitions)
			for range size.members {
				c.join()
			}
			for b.Loop() {
				c.leave(c.join())
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(size.partitions), "ns/partition")
		})
	}
}

// BenchmarkGroup_EverybodyJoins is a group that fills one by one: each join is one pass over members and partitions.
func BenchmarkGroup_EverybodyJoins(b *testing.B) {
	for _, size := range groupSizes {
		b.Run(fmt.Sprintf("members=%d/partitions=%d", size.members, size.partitions), func(b *testing.B) {
			for b.Loop() {
				c := newCrew(size.partitions)
				for range size.members {
					c.join()
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(size.members)/float64(size.partitions), "ns/member/partition")
		})
	}
}

// BenchmarkGroup_Heartbeat costs the same in a group of any size.
func BenchmarkGroup_Heartbeat(b *testing.B) {
	for _, size := range groupSizes {
		b.Run(fmt.Sprintf("members=%d/partitions=%d", size.members, size.partitions), func(b *testing.B) {
			c := newCrew(size.partitions)
			for range size.members {
				c.join()
			}
			b.ReportAllocs()
			for i := uint64(0); b.Loop(); i++ {
				c.now += time.Millisecond
				c.heartbeat(1 + i%uint64(size.members))
			}
		})
	}
}

// BenchmarkGroup_SilentMembersGo is the end of members that all fell silent together.
func BenchmarkGroup_SilentMembersGo(b *testing.B) {
	for _, size := range groupSizes {
		b.Run(fmt.Sprintf("members=%d/partitions=%d", size.members, size.partitions), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				c := newCrew(size.partitions)
				for range size.members {
					c.join()
				}
				c.now += SessionTimeout
				b.StartTimer()
				c.step(Event{Kind: Tick})
				if n := len(c.m.Members()); n != 0 {
					b.Fatalf("%d members are left", n)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(size.partitions), "ns/partition")
		})
	}
}

// The number of steps that a change of members takes is that of the partitions that move, not that of all.
func TestGroup_JoiningAndLeavingTakesStepsForWhatMoves(t *testing.T) {
	const members, partitions = 100, 1000
	c := newCrew(partitions)
	for range members {
		c.join()
	}
	before := c.steps
	s := c.join()
	if got, most := c.steps-before, 10*(partitions/members)+10; got > most {
		t.Errorf("one more member took %d steps, at most %d are due", got, most)
	}
	before = c.steps
	c.leave(s)
	if got, most := c.steps-before, 10*(partitions/members)+10; got > most {
		t.Errorf("its leaving took %d steps, at most %d are due", got, most)
	}
}
