package group

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// harness runs a machine whose log commits when told to, and keeps what came out.
type harness struct {
	t       *testing.T
	now     time.Duration
	m       *Machine
	fx      Effects
	pending []Change
	answers map[uint64]Effect
	notices map[uint64][]protocol.Notice // by session
	owned   map[string]bool              // "session/partition/epoch"
	ended   map[uint64]Effect
	nextRef uint64
}

func newHarness(t *testing.T, partitions, maxMembers int) *harness {
	return &harness{
		t: t, now: time.Second, nextRef: 1 << 20,
		m:       New(time.Second, Options{Group: 3, Topic: 9, MaxMembers: maxMembers, MemberBase: 3 << 48, NoticeBase: 1 << 32}, State{Parts: make([]PartState, partitions)}),
		answers: make(map[uint64]Effect), notices: make(map[uint64][]protocol.Notice), owned: make(map[string]bool), ended: make(map[uint64]Effect),
	}
}

func (h *harness) step(ev Event) {
	h.t.Helper()
	h.fx.Reset()
	h.m.Step(h.now, &ev, &h.fx)
	for _, e := range slices.Clone(h.fx.List) {
		switch e.Kind {
		case Propose:
			h.pending = append(h.pending, e.Changes...)
		case Answer:
			if _, twice := h.answers[e.Ref]; twice {
				h.t.Fatalf("request %d answered twice", e.Ref)
			}
			h.answers[e.Ref] = e
		case Send:
			h.notices[e.Session] = append(h.notices[e.Session], e.Notice)
		case Install:
			h.owned[fmt.Sprintf("%d/%d/%d", e.Session, e.Partition, e.OwnershipEpoch)] = true
		case Remove:
			delete(h.owned, fmt.Sprintf("%d/%d/%d", e.Session, e.Partition, e.OwnershipEpoch))
		case End:
			h.ended[e.Session] = e
		case Confirmed, Drain, Forget:
		}
	}
}

func (h *harness) commit() {
	h.t.Helper()
	for len(h.pending) > 0 {
		h.pending = h.pending[1:]
		h.step(Event{Kind: Committed})
	}
}

// join subscribes on a session and returns the answer, once committed.
func (h *harness) join(session uint64) Effect {
	h.t.Helper()
	ref := h.ref()
	h.step(Event{Kind: Join, Ref: ref, Session: session})
	h.commit()
	return h.answers[ref]
}

func (h *harness) ref() uint64 { h.nextRef++; return h.nextRef }

// confirm answers every notice of a session that it has got so far.
func (h *harness) confirm(session uint64, result protocol.ControlResult) {
	h.t.Helper()
	all := h.notices[session]
	h.notices[session] = nil
	for _, n := range all {
		h.step(Event{Kind: Confirm, Session: session, Ack: echo(n, result)})
	}
	h.commit()
}

func echo(n protocol.Notice, result protocol.ControlResult) protocol.ControlAck {
	return protocol.ControlAck{NoticeID: n.NoticeID, Kind: n.Kind, GroupID: n.GroupID, MembershipEpoch: n.MembershipEpoch,
		AssignmentEpoch: n.AssignmentEpoch, OwnershipEpoch: n.OwnershipEpoch, Result: result}
}

// advance lets time pass, ticking whenever the machine wants to.
func (h *harness) advance(d time.Duration) {
	h.t.Helper()
	end := h.now + d
	for {
		at, ok := h.m.Deadline()
		if !ok || at > end {
			break
		}
		h.now = max(h.now, at)
		h.step(Event{Kind: Tick})
		h.commit()
	}
	h.now = end
}

func TestMachine_NothingIsSaidBeforeItIsCommitted(t *testing.T) {
	h := newHarness(t, 2, 1)
	h.step(Event{Kind: Join, Ref: 1, Session: 7})
	if len(h.pending) != 2 || h.pending[0].Kind != Joined || h.pending[1].Kind != Assigned {
		t.Fatalf("proposed %+v", h.pending)
	}
	h.step(Event{Kind: Committed})
	if len(h.answers) != 0 || len(h.notices) != 0 {
		t.Fatal("something was said although the batch is not committed")
	}
	h.step(Event{Kind: Committed})
	a := h.answers[1]
	if a.Code != 0 || a.Member != 3<<48+1 || a.MembershipEpoch != 1 || a.AssignmentEpoch != 0 {
		t.Fatalf("answer %+v", a)
	}
	if got := h.notices[7]; len(got) != 2 || got[0].Kind != protocol.NoticeAssign || got[0].AssignmentEpoch != 1 || got[0].OwnershipEpoch != 1 || got[1].OwnershipEpoch != 2 || got[1].Partition != 1 {
		t.Fatalf("notices %+v", got)
	}
	if len(h.owned) != 0 {
		t.Fatal("delivery started before CONTROL_ACK")
	}
	h.pending = nil
	h.confirm(7, protocol.ControlOK)
	if !h.owned["7/0/1"] || !h.owned["7/1/2"] || !h.m.Settled() {
		t.Fatalf("owned %v", h.owned)
	}
}

func TestMachine_SecondMemberIsRefusedUntilTheFirstLosesItsConnection(t *testing.T) {
	h := newHarness(t, 2, 1)
	first := h.join(1)
	h.confirm(1, protocol.ControlOK)
	if a := h.join(2); a.Code != protocol.CodeGroupMemberLimit {
		t.Fatalf("answer %+v", a)
	}
	h.step(Event{Kind: SessionClosed, Session: 1})
	a := h.join(3)
	if a.Code != 0 || a.Member <= first.Member || a.MembershipEpoch != 3 {
		t.Fatalf("answer %+v", a)
	}
	h.confirm(3, protocol.ControlOK)
	if !h.owned["3/0/3"] || !h.owned["3/1/4"] {
		t.Fatalf("owned %v", h.owned)
	}
	if h.step(Event{Kind: Rejoin, Ref: 90, Session: 4, Member: first.Member}); h.answers[90].Code != protocol.CodeUnknownMember {
		t.Fatalf("the first member rejoined: %+v", h.answers[90])
	}
}

func TestMachine_TwoJoinersOfOneBatchRespectTheLimit(t *testing.T) {
	h := newHarness(t, 2, 1)
	h.step(Event{Kind: Join, Ref: 1, Session: 1})
	h.step(Event{Kind: Join, Ref: 2, Session: 2})
	h.step(Event{Kind: Join, Ref: 3, Session: 3})
	h.commit()
	if h.answers[1].Code != 0 || h.answers[2].Code != protocol.CodeGroupMemberLimit || h.answers[3].Code != protocol.CodeGroupMemberLimit {
		t.Fatalf("answers %+v", h.answers)
	}
}

func TestMachine_RejoinKeepsPartitionsAndEpochs(t *testing.T) {
	h := newHarness(t, 2, 0)
	a := h.join(1)
	h.confirm(1, protocol.ControlOK)
	h.step(Event{Kind: SessionClosed, Session: 1})
	h.advance(LostTimeout - time.Millisecond)
	h.step(Event{Kind: Rejoin, Ref: 50, Session: 2, Member: a.Member})
	got := h.answers[50]
	if got.Code != 0 || got.Member != a.Member || got.MembershipEpoch != a.MembershipEpoch || got.AssignmentEpoch != 1 {
		t.Fatalf("answer %+v", got)
	}
	if !h.owned["2/0/1"] || !h.owned["2/1/2"] || len(h.pending) != 0 || len(h.notices[2]) != 0 {
		t.Fatalf("owned %v, pending %v, notices %v", h.owned, h.pending, h.notices[2])
	}
	h.advance(2 * LostTimeout)
	if len(h.m.Members()) != 1 {
		t.Fatal("the old connection's timer removed the member")
	}
}

func TestMachine_RejoinTakesOverFromAConnectionThatStillSeemsOpen(t *testing.T) {
	h := newHarness(t, 1, 0)
	a := h.join(1)
	h.confirm(1, protocol.ControlOK)
	h.step(Event{Kind: Rejoin, Ref: 50, Session: 2, Member: a.Member})
	if h.ended[1].Code != protocol.CodeUnknownMember || h.owned["1/0/1"] || !h.owned["2/0/1"] {
		t.Fatalf("ended %+v, owned %v", h.ended, h.owned)
	}
	// The old connection's end must not touch the member any more.
	h.step(Event{Kind: SessionClosed, Session: 1})
	if !h.m.Members()[0].Connected {
		t.Fatal("the old session's end disconnected the member")
	}
}

func TestMachine_LostConnectionGivesUpItsPlaceAfterThreeSeconds(t *testing.T) {
	h := newHarness(t, 2, 0)
	h.join(1)
	h.confirm(1, protocol.ControlOK)
	h.step(Event{Kind: SessionClosed, Session: 1})
	h.advance(LostTimeout)
	if len(h.m.Members()) != 0 || h.m.Parts()[0].Owner != 0 {
		t.Fatalf("members %v, parts %v", h.m.Members(), h.m.Parts())
	}
}

func TestMachine_SilentMemberIsRemoved(t *testing.T) {
	h := newHarness(t, 1, 0)
	a := h.join(1)
	h.confirm(1, protocol.ControlOK)
	h.advance(SessionTimeout - 1)
	h.step(Event{Kind: Touch, Member: a.Member, At: h.now})
	h.advance(SessionTimeout - 1)
	if len(h.m.Members()) != 1 {
		t.Fatal("a member that sent something was removed")
	}
	h.advance(1)
	if len(h.m.Members()) != 0 || h.ended[1].Code != protocol.CodeUnknownMember || h.ended[1].Graceful || len(h.owned) != 0 {
		t.Fatalf("members %v, ended %+v, owned %v", h.m.Members(), h.ended, h.owned)
	}
	if h.step(Event{Kind: Heartbeat, Ref: 60, Session: 1, Member: a.Member, MembershipEpoch: 1, AssignmentEpoch: 1}); h.answers[60].Code != protocol.CodeUnknownMember {
		t.Fatalf("heartbeat of the removed member: %+v", h.answers[60])
	}
}

func TestMachine_HeartbeatFencesByEpochs(t *testing.T) {
	h := newHarness(t, 2, 0)
	a := h.join(1)
	h.confirm(1, protocol.ControlOK) // installed: assignment epoch 1
	h.join(2)
	h.confirm(1, protocol.ControlOK) // the REVOKE: assignment epoch 2
	for i, c := range []struct {
		session uint64
		member  uint64
		m, as   uint32
		want    protocol.ErrorCode
	}{
		{1, a.Member, 1, 2, 0},
		{1, a.Member, 2, 2, 0},
		{1, a.Member, 0, 2, protocol.CodeStaleGeneration},
		{1, a.Member, 1, 1, protocol.CodeStaleGeneration},
		{1, a.Member, 3, 2, protocol.CodeStaleGeneration},
		{1, a.Member, 2, 3, protocol.CodeStaleGeneration},
		{1, a.Member + 9, 2, 2, protocol.CodeUnknownMember},
		{2, a.Member, 2, 2, protocol.CodeUnknownMember},
	} {
		ref := uint64(100 + i)
		h.step(Event{Kind: Heartbeat, Ref: ref, Session: c.session, Member: c.member, MembershipEpoch: c.m, AssignmentEpoch: c.as})
		if got := h.answers[ref].Code; got != c.want {
			t.Errorf("case %d: %v, want %v", i, got, c.want)
		}
	}
}

func TestMachine_UntouchedMemberMayUseItsOlderEpochs(t *testing.T) {
	h := newHarness(t, 3, 0)
	a := h.join(1)
	h.confirm(1, protocol.ControlOK)
	h.join(2)
	h.confirm(1, protocol.ControlOK)
	h.confirm(2, protocol.ControlOK)
	b := h.join(3) // takes one from session 1, which holds two; session 2 is not touched
	h.confirm(1, protocol.ControlOK)
	h.confirm(3, protocol.ControlOK)
	if len(h.notices[2]) != 0 {
		t.Fatalf("the untouched member got %+v", h.notices[2])
	}
	second := h.m.Members()[1]
	if second.ID == a.Member || second.ID == b.Member {
		t.Fatal("members are not in the order of their joining")
	}
	h.step(Event{Kind: Heartbeat, Ref: 200, Session: 2, Member: second.ID, MembershipEpoch: 2, AssignmentEpoch: 2})
	if h.answers[200].Code != 0 {
		t.Fatalf("answer %+v", h.answers[200])
	}
}

func TestMachine_FourthMemberMovesThreeOfTwelve(t *testing.T) {
	h := newHarness(t, 12, 0)
	for s := uint64(1); s <= 3; s++ {
		h.join(s)
		for range 3 {
			for c := uint64(1); c <= s; c++ {
				h.confirm(c, protocol.ControlOK)
			}
		}
	}
	before := h.m.Parts()
	h.join(4)
	for range 2 {
		for c := uint64(1); c <= 4; c++ {
			h.confirm(c, protocol.ControlOK)
		}
	}
	moved := 0
	for i, p := range h.m.Parts() {
		switch {
		case !p.Installed:
			t.Errorf("partition %d is not installed", i)
		case p.Owner != before[i].Owner:
			moved++
		case p.OwnershipEpoch != before[i].OwnershipEpoch:
			t.Errorf("partition %d kept its owner but not its ownership epoch", i)
		}
	}
	if moved != 3 {
		t.Errorf("%d partitions moved", moved)
	}
}

func TestMachine_RevokeComesBeforeAssignElsewhere(t *testing.T) {
	h := newHarness(t, 2, 0)
	h.join(1)
	h.confirm(1, protocol.ControlOK)
	h.join(2)
	if len(h.notices[2]) != 0 {
		t.Fatal("ASSIGN before the owner gave the partition up")
	}
	revoke := h.notices[1]
	if len(revoke) != 1 || revoke[0].Kind != protocol.NoticeRevoke || revoke[0].OwnershipEpoch != 2 || revoke[0].AssignmentEpoch != 2 {
		t.Fatalf("notices %+v", revoke)
	}
	h.advance(NoticeRepeat)
	if len(h.notices[1]) != 2 || h.notices[1][1] != revoke[0] {
		t.Fatalf("the notice was not repeated: %+v", h.notices[1])
	}
	h.confirm(1, protocol.ControlOK)
	if h.owned["1/1/2"] || !h.owned["1/0/1"] {
		t.Fatalf("owned %v", h.owned)
	}
	if got := h.notices[2]; len(got) != 1 || got[0].Kind != protocol.NoticeAssign || got[0].OwnershipEpoch != 3 || got[0].AssignmentEpoch != 2 {
		t.Fatalf("notices %+v", got)
	}
	h.confirm(2, protocol.ControlOK)
	if !h.owned["2/1/3"] {
		t.Fatalf("owned %v", h.owned)
	}
}

func TestMachine_UnconfirmedRevokeIsCarriedOut(t *testing.T) {
	h := newHarness(t, 2, 0)
	a := h.join(1)
	h.confirm(1, protocol.ControlOK)
	h.join(2)
	late := h.notices[1]
	h.advance(RevokeTimeout)
	if h.owned["1/1/2"] || len(h.m.Members()) != 2 {
		t.Fatalf("owned %v, members %v", h.owned, h.m.Members())
	}
	h.confirm(2, protocol.ControlOK)
	// The late confirmation and its repetition are harmless.
	for range 2 {
		h.step(Event{Kind: Confirm, Session: 1, Ack: echo(late[0], protocol.ControlOK)})
	}
	if !h.owned["2/1/3"] || !h.owned["1/0/1"] || len(h.pending) != 0 {
		t.Fatalf("owned %v, pending %v", h.owned, h.pending)
	}
	h.step(Event{Kind: Heartbeat, Ref: 77, Session: 1, Member: a.Member, MembershipEpoch: 1, AssignmentEpoch: 2})
	if h.answers[77].Code != 0 {
		t.Fatalf("the old owner itself must stay a member: %+v", h.answers[77])
	}
}

// A member that was away while a REVOKE was carried out still believes to own the partition when it comes back.
func TestMachine_RejoinedMemberLearnsWhatWasTakenFromIt(t *testing.T) {
	h := newHarness(t, 2, 0)
	a := h.join(1)
	h.confirm(1, protocol.ControlOK)
	h.join(2)
	revoke := h.notices[1][0]
	if revoke.Kind != protocol.NoticeRevoke || revoke.Partition != 1 || revoke.OwnershipEpoch != 2 {
		t.Fatalf("got %+v", revoke)
	}
	h.advance(3 * time.Second)
	h.step(Event{Kind: SessionClosed, Session: 1})
	h.advance(LostTimeout - time.Second/2)
	h.confirm(2, protocol.ControlOK)
	if !h.owned["2/1/3"] {
		t.Fatalf("owned %v", h.owned)
	}
	for session := uint64(3); session <= 4; session++ { // and again, if its connection is lost before it has confirmed
		h.step(Event{Kind: Rejoin, Ref: 50 + session, Session: session, Member: a.Member})
		h.advance(NoticeRepeat)
		if got := h.notices[session]; len(got) != 2 || got[0] != revoke || got[1] != revoke {
			t.Fatalf("session %d got %+v, want %+v twice", session, got, revoke)
		}
	}
	h.confirm(4, protocol.ControlOK)
	h.advance(2 * time.Second)
	if len(h.notices[4]) != 0 || !h.owned["4/0/1"] || !h.owned["2/1/3"] || !h.m.Settled() {
		t.Fatalf("notices %+v, owned %v", h.notices[4], h.owned)
	}
	// The partition comes back to it under another epoch, and a late confirmation of the old loss changes nothing.
	h.step(Event{Kind: Leave, Ref: 60, Session: 2, Member: h.m.members[1].id})
	h.commit()
	h.confirm(4, protocol.ControlOK)
	h.step(Event{Kind: Confirm, Session: 4, Ack: echo(revoke, protocol.ControlOK)})
	if !h.owned["4/1/4"] || !h.m.Settled() {
		t.Fatalf("owned %v", h.owned)
	}
}

func TestMachine_UnconfirmedAssignRemovesTheMember(t *testing.T) {
	h := newHarness(t, 1, 0)
	a := h.join(1)
	for range int(AssignTimeout / time.Second) {
		h.step(Event{Kind: Touch, Member: a.Member, At: h.now})
		h.advance(time.Second)
	}
	if len(h.m.Members()) != 0 || h.ended[1].Code != protocol.CodeUnknownMember {
		t.Fatalf("members %v, ended %+v", h.m.Members(), h.ended)
	}
	if n := len(h.notices[1]); n != int(AssignTimeout/NoticeRepeat) {
		t.Fatalf("the notice was sent %d times", n)
	}
}

func TestMachine_AssignAnsweredWithErrorRemovesTheMember(t *testing.T) {
	h := newHarness(t, 2, 0)
	h.join(1)
	h.confirm(1, protocol.ControlError)
	if len(h.m.Members()) != 0 || h.ended[1].Code != protocol.CodeUnknownMember || len(h.owned) != 0 {
		t.Fatalf("members %v, ended %+v", h.m.Members(), h.ended)
	}
}

func TestMachine_ConfirmationsThatFitNothingAreHarmless(t *testing.T) {
	h := newHarness(t, 1, 0)
	h.join(1)
	good := echo(h.notices[1][0], protocol.ControlOK)
	for name, bad := range map[string]func(a *protocol.ControlAck){
		"notice":     func(a *protocol.ControlAck) { a.NoticeID++ },
		"kind":       func(a *protocol.ControlAck) { a.Kind = protocol.NoticeRevoke },
		"group":      func(a *protocol.ControlAck) { a.GroupID++ },
		"membership": func(a *protocol.ControlAck) { a.MembershipEpoch++ },
		"assignment": func(a *protocol.ControlAck) { a.AssignmentEpoch-- },
		"ownership":  func(a *protocol.ControlAck) { a.OwnershipEpoch++ },
		"stale":      func(a *protocol.ControlAck) { a.Result = protocol.ControlStale },
	} {
		ack := good
		bad(&ack)
		if h.step(Event{Kind: Confirm, Session: 1, Ack: ack}); len(h.fx.List) != 0 {
			t.Errorf("wrong %s: %+v", name, h.fx.List)
		}
	}
	if h.step(Event{Kind: Confirm, Session: 2, Ack: good}); len(h.fx.List) != 0 {
		t.Errorf("another's session: %+v", h.fx.List)
	}
	h.step(Event{Kind: Confirm, Session: 1, Ack: good})
	if !h.owned["1/0/1"] {
		t.Fatal("the good one did not count")
	}
	if h.step(Event{Kind: Confirm, Session: 1, Ack: good}); len(h.fx.List) != 0 {
		t.Errorf("repeated: %+v", h.fx.List)
	}
}

func TestMachine_LeaveIsAnsweredWhenCommittedAndGraceful(t *testing.T) {
	h := newHarness(t, 2, 0)
	a := h.join(1)
	h.confirm(1, protocol.ControlOK)
	h.step(Event{Kind: Leave, Ref: 70, Session: 1, Member: a.Member})
	if _, answered := h.answers[70]; answered || !h.ended[1].Graceful || h.ended[1].Code != 0 || len(h.owned) != 0 {
		t.Fatalf("answers %v, ended %+v, owned %v", h.answers, h.ended, h.owned)
	}
	h.commit()
	if got, ok := h.answers[70]; !ok || got.Code != 0 {
		t.Fatalf("answer %+v", got)
	}
}

func TestMachine_AllMembersKilledWhileJoiningLeaveAUsableGroup(t *testing.T) {
	h := newHarness(t, 4, 1)
	h.step(Event{Kind: Join, Ref: 1, Session: 1})
	h.step(Event{Kind: Join, Ref: 2, Session: 2})
	h.step(Event{Kind: SessionClosed, Session: 1})
	h.step(Event{Kind: SessionClosed, Session: 2})
	h.commit()
	a := h.join(3)
	if a.Code != 0 {
		t.Fatalf("answer %+v", a)
	}
	h.confirm(3, protocol.ControlOK)
	if len(h.owned) != 4 {
		t.Fatalf("owned %v", h.owned)
	}
}

func TestMachine_RefusedProposalIsAnsweredAndRemovalsAreTriedAgain(t *testing.T) {
	h := newHarness(t, 1, 0)
	h.join(1)
	h.confirm(1, protocol.ControlOK)
	h.step(Event{Kind: Join, Ref: 80, Session: 2})
	h.pending = nil
	h.step(Event{Kind: Refused})
	if h.answers[80].Code != protocol.CodeMetadataReadOnly {
		t.Fatalf("answer %+v", h.answers[80])
	}
	h.step(Event{Kind: SessionClosed, Session: 1})
	h.now += LostTimeout
	h.step(Event{Kind: Tick})
	h.pending = nil
	h.step(Event{Kind: Refused})
	h.advance(ProposeRetry)
	if len(h.m.members) != 0 {
		t.Fatal("the removal was not proposed again")
	}
}

func TestMachine_RestartKeepsMembersUntilTheirSessionTimeout(t *testing.T) {
	st := State{MembershipEpoch: 4, AssignmentEpoch: 3, LastOwnership: 9, LastMember: 6,
		Members: []MemberState{{5, 3}, {6, 4}}, Parts: []PartState{{5, 8, 5}, {6, 9, 6}}}
	h := newHarness(t, 0, 0)
	h.m = New(h.now, Options{Group: 3, Topic: 9, NoticeBase: 2 << 32}, st)
	h.advance(SessionTimeout - 1)
	if len(h.m.Members()) != 2 {
		t.Fatal("members were removed before their session timeout")
	}
	h.step(Event{Kind: Rejoin, Ref: 1, Session: 1, Member: 5})
	if a := h.answers[1]; a.Code != 0 || a.MembershipEpoch != 3 || a.AssignmentEpoch != 3 {
		t.Fatalf("answer %+v", a)
	}
	// Delivery goes on, behind the notice; its confirmation changes nothing more.
	if !h.owned["1/0/8"] || len(h.notices[1]) != 1 {
		t.Fatalf("owned %v, notices %v", h.owned, h.notices)
	}
	h.confirm(1, protocol.ControlOK)
	h.advance(1)
	if len(h.m.Members()) != 1 || h.m.Parts()[1].Owner != 5 {
		t.Fatalf("members %v, parts %v", h.m.Members(), h.m.Parts())
	}
}

func TestMachine_RestartFinishesAnInterruptedMove(t *testing.T) {
	h := newHarness(t, 0, 0)
	h.m = New(h.now, Options{Group: 3, Topic: 9}, State{MembershipEpoch: 2, AssignmentEpoch: 2, LastOwnership: 1, LastMember: 2,
		Members: []MemberState{{1, 1}, {2, 2}}, Parts: []PartState{{1, 1, 2}}})
	h.step(Event{Kind: Rejoin, Ref: 1, Session: 11, Member: 1})
	h.step(Event{Kind: Rejoin, Ref: 2, Session: 12, Member: 2})
	if n := h.notices[11]; len(n) != 1 || n[0].Kind != protocol.NoticeRevoke {
		t.Fatalf("notices %+v", n)
	}
	h.confirm(11, protocol.ControlOK)
	h.confirm(12, protocol.ControlOK)
	if !h.owned["12/0/2"] || len(h.owned) != 1 {
		t.Fatalf("owned %v", h.owned)
	}
}

func TestMachine_RestartAssignsWhatNobodyHas(t *testing.T) {
	h := newHarness(t, 0, 0)
	h.m = New(h.now, Options{Group: 3, Topic: 9}, State{MembershipEpoch: 1, LastMember: 1, Members: []MemberState{{1, 1}}, Parts: make([]PartState, 2)})
	h.step(Event{Kind: Rejoin, Ref: 1, Session: 11, Member: 1})
	h.advance(0)
	h.confirm(11, protocol.ControlOK)
	if len(h.owned) != 2 {
		t.Fatalf("owned %v", h.owned)
	}
}

func TestMachine_CloseEndsAndAnswersEverything(t *testing.T) {
	h := newHarness(t, 2, 0)
	a := h.join(1)
	h.confirm(1, protocol.ControlOK)
	h.join(2)
	h.step(Event{Kind: Leave, Ref: 40, Session: 1, Member: a.Member})
	h.step(Event{Kind: Join, Ref: 41, Session: 3})
	h.step(Event{Kind: Close, Code: protocol.CodeUnknownTopic, Text: "deleted"})
	if h.ended[2].Code != protocol.CodeUnknownTopic || h.answers[41].Code != protocol.CodeUnknownTopic || h.answers[40].Ref != 40 {
		t.Fatalf("ended %+v, answers %+v", h.ended, h.answers)
	}
	h.step(Event{Kind: Committed})
	h.step(Event{Kind: Join, Ref: 42, Session: 5})
	if _, due := h.m.Deadline(); due || h.answers[42].Code != protocol.CodeUnknownGroup {
		t.Fatal("a closed group goes on")
	}
}

func TestMachine_JoinsBeyondTheQueueGetBackpressure(t *testing.T) {
	h := newHarness(t, 1, 0)
	for ref := uint64(1); ref <= MaxWaiting+2; ref++ {
		h.step(Event{Kind: Join, Ref: ref, Session: ref})
	}
	if h.answers[MaxWaiting+2].Code != protocol.CodeBackpressure {
		t.Fatalf("answer %+v", h.answers[MaxWaiting+2])
	}
	h.commit()
	if len(h.answers) != MaxWaiting+2 {
		t.Fatalf("%d of %d joins were answered", len(h.answers), MaxWaiting+2)
	}
}
