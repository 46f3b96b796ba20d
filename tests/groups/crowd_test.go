package groups

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

// groupPlace names a message as one group sees it.
type groupPlace struct {
	group     string
	partition uint16
	sequence  uint64
}

// audience is a broker and crowds of members, which note what they get.
type audience struct {
	t     *testing.T
	d     *harness.Daemon
	addr  string
	dir   string
	topic uint16

	mu  sync.Mutex
	got map[groupPlace]int
}

func newAudience(t *testing.T, partitions int) *audience {
	t.Helper()
	a := &audience{t: t, addr: harness.LastingAddr(), dir: t.TempDir(), got: map[groupPlace]int{}}
	a.start()
	res, err := a.dial().Declare(topic, partitions)
	if err != nil {
		t.Fatal(err)
	}
	a.topic = res.TopicID
	return a
}

func (a *audience) start() {
	a.t.Helper()
	d, err := harness.Start(a.t.Context(), harness.Options{Binary: mortard, DataDir: a.dir, Config: map[string]any{"listen_client": a.addr}})
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(func() { d.EndScenario(a.t) })
	a.d = d
}

func (a *audience) dial() *harness.Conn {
	a.t.Helper()
	c, err := harness.Dial(a.addr, "")
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(func() { c.Close() })
	return c
}

func (a *audience) crowd() *harness.Crowd {
	a.t.Helper()
	c, err := harness.NewCrowd(a.addr, func(m *harness.CrowdMember, msg *protocol.Msg) {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.got[groupPlace{m.Group, msg.Partition, msg.Sequence}]++
	})
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(c.Close)
	return c
}

func (a *audience) join(c *harness.Crowd, group string, member uint64) *harness.CrowdMember {
	a.t.Helper()
	s := protocol.Sub{Group: []byte(group), TopicID: a.topic, Partition: protocol.AnyPartition, Flags: protocol.SubFlagStream}
	if member != 0 {
		s.Flags, s.MemberID = s.Flags|protocol.SubFlagRejoin, member
	}
	m, err := c.Join(&s)
	if err != nil {
		a.t.Fatal(err)
	}
	return m
}

// publish sends n messages to each partition.
func (a *audience) publish(partitions, n int) {
	a.t.Helper()
	c := a.dial()
	defer c.Close()
	var frames []byte
	for range n {
		for p := range partitions {
			m := protocol.Pub{TopicID: a.topic, Partition: uint16(p), Value: []byte("v")}
			frames = m.AppendFrame(frames)
		}
	}
	if err := c.Send(frames); err != nil {
		a.t.Fatal(err)
	}
	for range n * partitions {
		f, err := c.Next()
		if err == nil {
			err = f.Err()
		}
		if err != nil {
			a.t.Fatal(err)
		}
	}
}

// settled waits until a group's members share the partitions, and returns the group.
func (a *audience) settled(group string, members int) *harness.GroupState {
	a.t.Helper()
	return settled(a.t, a.d, topic, group, members)
}

func settled(t *testing.T, d *harness.Daemon, topic, group string, members int) *harness.GroupState {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		g, err := d.GroupState(topic, group)
		if err == nil && g.Settled(members) {
			return g
		}
		if time.Now().After(end) {
			t.Fatalf("group %s never settled with %d members: %+v, %v", group, members, g, err)
		}
	}
}

// done waits until every group has acknowledged everything, and checks that each message came once per group.
func (a *audience) done(groups []string, partitions, perPartition int) {
	a.t.Helper()
	a.doneTimes(groups, partitions, perPartition, 1)
}

// doneTimes is done where each message is to come so many times.
func (a *audience) doneTimes(groups []string, partitions, perPartition, times int) {
	a.t.Helper()
	want := uint64(partitions * perPartition)
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		sums, err := a.d.Groups()
		if err != nil {
			a.t.Fatal(err)
		}
		left := len(groups)
		for _, g := range sums {
			if g.Acknowledged == want && g.Lag == 0 {
				left--
			}
		}
		if left == 0 {
			break
		}
		if time.Now().After(end) {
			a.t.Fatalf("%d of %d groups have not acknowledged %d messages", left, len(groups), want)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, g := range groups {
		for p := range partitions {
			for seq := range perPartition {
				if n := a.got[groupPlace{g, uint16(p), uint64(seq + 1)}]; n != times {
					a.t.Fatalf("group %s: message %d of partition %d came %d times", g, seq+1, p, n)
				}
			}
		}
	}
}

func TestCrowd_ThousandGroupsReadOneTopic(t *testing.T) {
	t.Parallel()
	const groupCount, partitions, connections = 1000, 4, 4
	a := newAudience(t, partitions)
	groups := make([]string, groupCount)
	members := make([]*harness.CrowdMember, groupCount)
	crowds := make([]*harness.Crowd, connections)
	for i := range crowds {
		crowds[i] = a.crowd()
	}
	var wg sync.WaitGroup
	for i, c := range crowds {
		wg.Go(func() {
			for g := i; g < groupCount; g += connections {
				groups[g] = fmt.Sprintf("group-%d", g)
				members[g] = a.join(c, groups[g], 0)
			}
		})
	}
	wg.Wait()
	a.publish(partitions, 5)
	a.done(groups, partitions, 5)

	// They come back after a restart, as the members they were.
	a.d.Kill()
	for _, c := range crowds {
		c.Close()
	}
	a.start()
	for i := range crowds {
		crowds[i] = a.crowd()
	}
	for i, c := range crowds {
		wg.Go(func() {
			for g := i; g < groupCount; g += connections {
				a.join(c, groups[g], members[g].ID())
			}
		})
	}
	wg.Wait()
	a.publish(partitions, 5)
	a.done(groups, partitions, 10)
	for _, c := range crowds {
		if err := c.Err(); err != nil {
			t.Error(err)
		}
	}
}

func TestCrowd_HundredMembersShareAThousandPartitions(t *testing.T) {
	t.Parallel()
	const memberCount, partitions = 100, 1000
	a := newAudience(t, partitions)
	one, other := a.crowd(), a.crowd()
	members := make([]*harness.CrowdMember, memberCount)
	for i := range members {
		c := one
		if i >= memberCount/2 {
			c = other
		}
		members[i] = a.join(c, group, 0)
	}
	before := a.settled(group, memberCount)
	a.publish(partitions, 2)
	a.done([]string{group}, partitions, 2)
	for _, m := range members {
		if n := m.Received(); n != 2*partitions/memberCount {
			t.Errorf("a member has got %d messages", n)
		}
	}

	// One that leaves moves its own partitions only.
	if err := members[7].Leave(); err != nil {
		t.Fatal(err)
	}
	after := a.settled(group, memberCount-1)
	for p := range before.Partitions {
		was, is := before.Partitions[p], after.Partitions[p]
		if moved := was.Member == members[7].ID(); moved != (was.Member != is.Member) || moved != (was.OwnershipEpoch != is.OwnershipEpoch) {
			t.Errorf("partition %d: %+v became %+v", p, was, is)
		}
	}

	// Half of them go at once.
	other.Close()
	a.settled(group, memberCount/2-1)
	a.publish(partitions, 1)
	a.done([]string{group}, partitions, 3)
	if err := one.Err(); err != nil {
		t.Error(err)
	}
}

// Cursors are set back, by force, while the group's members read: everything comes once more, to them.
func TestCrowd_CursorsAreSetBackWhileMembersRead(t *testing.T) {
	t.Parallel()
	const partitions, perPartition = 6, 50
	a := newAudience(t, partitions)
	c := a.crowd()
	for range 3 {
		a.join(c, group, 0)
	}
	a.publish(partitions, perPartition)
	a.done([]string{group}, partitions, perPartition)
	a.settled(group, 3)
	back := protocol.Declare{Topic: []byte(topic), Flags: protocol.DeclareFlagGroup | protocol.DeclareFlagReset, Group: []byte(group),
		Reset: protocol.Reset{To: protocol.ResetEarliest, Partition: protocol.AnyPartition, Options: protocol.ResetForce}}
	result, err := a.dial().Request(protocol.OpDeclare, back.AppendFrame(nil))
	var moves protocol.ResetResult
	if err == nil {
		err = moves.Decode(result)
	}
	if err != nil || len(moves.Positions) != partitions || moves.Positions[0].From != perPartition || moves.Positions[0].To != 0 {
		t.Fatalf("%+v, %v", moves, err)
	}
	a.doneTimes([]string{group}, partitions, perPartition, 2)
	if err := c.Err(); err != nil {
		t.Error(err)
	}
}

// A fourth member takes three of twelve partitions; the nine others stay as they are, also when it dies.
func TestCrowd_FourthMemberLeavesNineOfTwelveAlone(t *testing.T) {
	t.Parallel()
	s := scenario(t, 1)
	r := newRun(&s)
	t.Cleanup(r.end)
	s.Members = 3
	if err := r.prepare(t.Context()); err != nil {
		t.Fatal(err)
	}
	settled := func(members int) *harness.GroupState {
		t.Helper()
		return settled(t, r.d, scenarioTopic, scenarioGroup, members)
	}
	before := settled(3)
	fourth, err := r.newMember()
	if err != nil {
		t.Fatal(err)
	}
	r.members = append(r.members, fourth)
	joined := settled(4)
	was := map[uint64]bool{}
	for _, m := range before.Members {
		was[m.Member] = true
	}
	moved := 0
	for p := range before.Partitions {
		switch old, now := before.Partitions[p], joined.Partitions[p]; {
		case !was[now.Member]:
			moved++
			if now.OwnershipEpoch <= old.OwnershipEpoch {
				t.Errorf("partition %d has moved, its ownership epoch was %d and is %d", p, old.OwnershipEpoch, now.OwnershipEpoch)
			}
		case old != now:
			t.Errorf("partition %d was %+v and is %+v", p, old, now)
		}
	}
	if moved != 3 {
		t.Errorf("%d partitions have moved", moved)
	}
	fourth.kill()
	left := settled(3)
	for p := range left.Partitions {
		if old, now := joined.Partitions[p], left.Partitions[p]; was[old.Member] && old != now {
			t.Errorf("partition %d was %+v and is %+v", p, old, now)
		}
	}
	if err := r.h.err(); err != nil {
		t.Error(err)
	}
}
