package group

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

func (h *harness) owners() []uint64 {
	var all []uint64
	for _, p := range h.m.Parts() {
		all = append(all, p.Owner&0xFFFF)
	}
	return all
}

// settle has sessions confirm until nothing more is asked of them.
func (h *harness) settle(sessions ...uint64) {
	h.t.Helper()
	for range 100 {
		for _, s := range sessions {
			h.confirm(s, protocol.ControlOK)
		}
		if h.m.Settled() {
			return
		}
	}
	h.t.Fatal("not settled")
}

func TestMachine_StrategyCanBeChangedAlsoWhileABatchIsInFlight(t *testing.T) {
	h := newHarness(t, 8, 0)
	h.join(1)
	h.join(2)
	h.step(Event{Kind: Join, Ref: h.ref(), Session: 3})
	h.step(Event{Kind: Configure, Strategy: Averagely}) // the join is not committed yet
	h.commit()
	h.settle(1, 2, 3)
	if got, want := h.owners(), []uint64{1, 1, 1, 2, 2, 2, 3, 3}; !slices.Equal(got, want) {
		t.Fatalf("averagely: %v, want %v", got, want)
	}
	h.step(Event{Kind: Configure, Strategy: Circle})
	h.commit()
	h.settle(1, 2, 3)
	if got, want := h.owners(), []uint64{1, 2, 3, 1, 2, 3, 1, 2}; !slices.Equal(got, want) {
		t.Fatalf("circle: %v, want %v", got, want)
	}
	before := h.m.Parts()
	h.step(Event{Kind: Configure, Strategy: Sticky})
	h.commit()
	if after := h.m.Parts(); !slices.Equal(before, after) || !h.m.Settled() {
		t.Fatalf("sticky moved a balanced assignment: %v, then %v", before, after)
	}
}

func newBroadcast(t *testing.T, partitions, maxMembers int) *harness {
	h := newHarness(t, partitions, maxMembers)
	h.m = New(h.now, Options{Group: 3, Topic: 9, MaxMembers: maxMembers, MemberBase: 3 << 48, NoticeBase: 1 << 32, Broadcast: true},
		State{Parts: make([]PartState, partitions)})
	return h
}

func TestMachine_BroadcastGivesEveryMemberEverything(t *testing.T) {
	h := newBroadcast(t, 2, 0)
	a, b := h.join(1), h.join(2)
	h.settle(1, 2)
	for _, want := range []string{"1/0/1", "1/1/1", "2/0/2", "2/1/2"} { // the ownership epoch is that of the joining
		if !h.owned[want] {
			t.Errorf("%s is not delivered: %v", want, h.owned)
		}
	}
	h.step(Event{Kind: SessionClosed, Session: 1})
	delete(h.owned, "1/0/1")
	delete(h.owned, "1/1/1")
	h.step(Event{Kind: Rejoin, Ref: h.ref(), Session: 3, Member: a.Member})
	if len(h.owned) != 4 || !h.owned["3/0/1"] || !h.owned["3/1/1"] || len(h.notices[3]) != 0 {
		t.Errorf("after the rejoin: %v", h.owned)
	}
	h.step(Event{Kind: Leave, Ref: h.ref(), Session: 2, Member: b.Member})
	if len(h.owned) != 2 {
		t.Errorf("after the leave: %v", h.owned)
	}
	h.pending = nil
	h.step(Event{Kind: Committed})
	if !slices.ContainsFunc(h.fx.List, func(e Effect) bool { return e.Kind == Forget && e.Member == b.Member }) {
		t.Errorf("the leaver's cursors are not forgotten: %+v", h.fx.List)
	}
	if h.join(4); h.notices[1] != nil || h.notices[3] != nil {
		t.Error("a member heard of another one's joining")
	}
}

func TestMachine_BroadcastAssignmentsHaveALimit(t *testing.T) {
	const partitions = 40_000
	h := newBroadcast(t, partitions, 0)
	if a := h.join(1); a.Code != 0 {
		t.Fatalf("first member: %+v", a)
	}
	if a := h.join(2); a.Code != protocol.CodeGroupAssignmentLimit || a.Text == "" {
		t.Fatalf("second member: %+v", a)
	}
}

func TestMachine_HundredMembersShareAThousandPartitions(t *testing.T) {
	const members, partitions = 100, 1000
	h := newHarness(t, partitions, 0)
	var all []uint64
	for s := uint64(1); s <= members; s++ {
		if a := h.join(s); a.Code != 0 {
			t.Fatalf("member %d: %+v", s, a)
		}
		all = append(all, s)
		h.settle(all...)
	}
	count := map[uint64]int{}
	for _, id := range h.owners() {
		count[id]++
	}
	for id, n := range count {
		if n != partitions/members {
			t.Errorf("member %d has %d partitions", id, n)
		}
	}
	for range 20 { // heartbeats alone keep everybody, and cost no more than a tick now and then
		h.now += 3 * time.Second
		for _, s := range all {
			h.step(Event{Kind: Heartbeat, Ref: h.ref(), Session: s, Member: h.m.bySession[s].id, MembershipEpoch: members, AssignmentEpoch: h.m.assignmentEpoch})
		}
		if at, ok := h.m.Deadline(); ok && at <= h.now {
			h.step(Event{Kind: Tick})
		}
	}
	if n := len(h.m.Members()); n != members {
		t.Errorf("%d members are left", n)
	}
}

func BenchmarkMachine_Heartbeat(b *testing.B) {
	for _, size := range []int{10, 100, 1000} {
		b.Run(fmt.Sprint(size, " members"), func(b *testing.B) { benchmarkHeartbeat(b, size) })
	}
}

func benchmarkHeartbeat(b *testing.B, members int) {
	m := New(0, Options{MaxMembers: members}, State{Parts: make([]PartState, 10*members)})
	var fx Effects
	for s := range uint64(members) {
		m.Step(0, &Event{Kind: Join, Session: s + 1}, &fx)
		for m.flight.left > 0 {
			m.Step(0, &Event{Kind: Committed}, &fx)
		}
		fx.Reset()
	}
	ev := Event{Kind: Heartbeat, Session: 1, Member: m.bySession[1].id, MembershipEpoch: m.membershipEpoch, AssignmentEpoch: m.assignmentEpoch}
	b.ReportAllocs()
	for b.Loop() {
		fx.Reset()
		m.Step(time.Second, &ev, &fx)
		m.Deadline()
	}
}
