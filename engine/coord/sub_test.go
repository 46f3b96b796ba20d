package coord

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// withTopic returns a bench with topic 1 of the given partition count, and a client.
func withTopic(t testing.TB, partitions uint16, change ...func(*Options)) (*bench, *stubClient) {
	t.Helper()
	b := newBench(t, change...)
	c := b.client()
	b.want("DECLARE", b.do(c, declare("t", partitions, 0)), "OK DECLARE id=1")
	b.d.take()
	return b, c
}

func heartbeat(subscription uint16, member uint64, m, a uint32, state protocol.MemberState) []byte {
	return (&protocol.Heartbeat{SubscriptionID: subscription, MemberID: member, MembershipEpoch: m, AssignmentEpoch: a, State: state}).AppendFrame(nil)
}

const firstMember = 1<<48 + 1 // of group 1

func TestSub_JoinsAndReceivesItsPartitions(t *testing.T) {
	b, c := withTopic(t, 2)
	b.want("SUB", b.do(c, sub("g", 1)), "OK SUB sub=1 member=1000000000001 epochs=1/0")
	if got := strings.Join(c.order[1:], ", "); !strings.HasSuffix(got, "NOTICE 0 p0, NOTICE 0 p1") || !strings.HasPrefix(got, "OK SUB") {
		t.Fatalf("sent: %s", got)
	}
	b.want("delivery", b.d.take(), "group+ g1 t1 policy=0; open 1 g1 t1 stream=false window=256/2097152")
	b.confirm(c)
	b.want("delivery", b.d.take(), "own 1 p0 e1; own 1 p1 e2")
	b.want("heartbeat", b.do(c, heartbeat(1, firstMember, 1, 1, protocol.MemberActive)), "OK HEARTBEAT")
	s := b.c.subscription(c, 1)
	if s.member != firstMember || s.membershipEpoch != 1 || s.assignmentEpoch != 1 {
		t.Fatalf("subscription %+v", s)
	}
}

func TestSub_NothingIsSaidBeforeTheCommit(t *testing.T) {
	b, c := withTopic(t, 1)
	req := b.send(c, sub("g", 1))
	if len(b.log.pending) != 1 {
		t.Fatalf("%d proposals for a new group", len(b.log.pending))
	}
	if _, answered := c.answers[req]; answered || len(c.pushed) > 0 || b.d.take() != "" {
		t.Fatal("something happened before the group was committed")
	}
	// An operation on the id that the subscription will have is refused meanwhile.
	b.want("early", c.answers[b.send(c, heartbeat(1, firstMember, 1, 0, protocol.MemberActive))], "ERR 0x0026")
	b.commit()
	b.want("SUB", c.answers[req], "OK SUB sub=1")
}

func TestSub_Refusals(t *testing.T) {
	b, c := withTopic(t, 1)
	with := func(change func(*protocol.Sub)) []byte {
		m := protocol.Sub{Group: []byte("g"), TopicID: 1, Partition: protocol.AnyPartition}
		change(&m)
		return m.AppendFrame(nil)
	}
	b.want("unknown topic", b.do(c, sub("g", 9)), "ERR 0x0008 topic id 9 does not exist: create the topic first")
	b.want("broadcast settings that make no sense", b.do(c, with(func(m *protocol.Sub) {
		m.Flags, m.Settings = protocol.SubFlagBroadcast|protocol.SubFlagSettings, []byte(`{"ordered":true}`)
	})), "ERR 0x2002")
	b.want("rejoin of nobody", b.do(c, with(func(m *protocol.Sub) { m.Flags, m.MemberID = protocol.SubFlagRejoin, 0 })), "ERR 0x0026")
	b.want("rejoin of a group that is gone", b.do(c, with(func(m *protocol.Sub) { m.Flags, m.MemberID = protocol.SubFlagRejoin, 5 })), "ERR 0x2005")
	for what, frame := range map[string][]byte{
		"a partition":  with(func(m *protocol.Sub) { m.Partition = 0 }),
		"a bad group":  with(func(m *protocol.Sub) { m.Group = []byte("g g") }),
		"start policy": with(func(m *protocol.Sub) { m.StartPolicy = 2 }),
	} {
		c := b.client()
		if b.do(c, frame); c.shut != protocol.CodeMalformedPayload || c.shutMsg == "" {
			t.Errorf("%s: shut with %v %q", what, c.shut, c.shutMsg)
		}
	}
	if len(b.c.byHandle) != 0 || len(b.c.refs) != 0 {
		t.Errorf("%d subscriptions and %d requests are left", len(b.c.byHandle), len(b.c.refs))
	}
}

func TestSub_CreditDefaultsAndClamps(t *testing.T) {
	b, _ := withTopic(t, 1)
	for _, s := range []struct {
		count uint16
		bytes uint32
		want  string
	}{
		{0, 0, "window=256/2097152"},
		{10, 1000, "window=10/1000"},
		{65535, 1<<32 - 1, "window=65535/67108864"},
		{10, 0, "window=10/2097152"},
	} {
		c := b.client()
		b.do(c, (&protocol.Sub{Group: []byte("g"), TopicID: 1, Partition: protocol.AnyPartition, CreditCount: s.count, CreditBytes: s.bytes,
			Flags: protocol.SubFlagStream}).AppendFrame(nil))
		if got := b.d.take(); !strings.Contains(got, "stream=true "+s.want) {
			t.Errorf("credit %d/%d: %s", s.count, s.bytes, got)
		}
	}
}

func TestSub_SecondMemberIsRefusedUnlessTheFirstLostItsConnection(t *testing.T) {
	b, c := withTopic(t, 1, func(o *Options) { o.MaxMembers = 1 })
	d := b.client()
	b.do(c, sub("g", 1))
	b.confirm(c)
	b.want("second", b.do(d, sub("g", 1)), "ERR 0x0024 the group has 1 members and can't have more")
	b.want("other group", b.do(d, sub("h", 1)), "OK SUB sub=1 member=2000000000001")
	b.d.take()
	b.closeClient(c)
	b.want("closed", b.d.take(), "close 1 graceful=false ended=0x0026")
	b.want("third", b.do(d, sub("g", 1)), "OK SUB sub=2 member=1000000000002 epochs=3/1")
	b.confirm(d)
	if got := b.d.take(); !strings.HasSuffix(got, "own 2 p0 e2") {
		t.Errorf("delivery: %s", got)
	}
}

func TestSub_ManyAtOnceShareTheGroupsCreation(t *testing.T) {
	b, c := withTopic(t, 3)
	d, e := b.client(), b.client()
	r1, r2, r3 := b.send(c, sub("g", 1)), b.send(d, sub("g", 1)), b.send(e, sub("h", 1))
	b.commit()
	b.want("first", c.answers[r1], "OK SUB sub=1 member=1000000000001")
	b.want("second", d.answers[r2], "OK SUB sub=1 member=1000000000002")
	b.want("other", e.answers[r3], "OK SUB sub=1 member=2000000000001")
	for range 3 {
		b.confirm(c)
		b.confirm(d)
		b.confirm(e)
	}
	owners := map[uint64]int{}
	for _, p := range b.c.groups.byID[1].m.Parts() {
		if !p.Installed {
			t.Errorf("partition not installed: %+v", p)
		}
		owners[p.Owner]++
	}
	if len(owners) != 2 {
		t.Errorf("owners %v", owners)
	}
}

func TestSub_ClosedWhileWaitingLeavesNothing(t *testing.T) {
	b, c := withTopic(t, 1)
	b.send(c, sub("g", 1)) // waits for the group
	b.c.Closed(c)
	b.c.turn()
	b.commit()
	d := b.client()
	b.send(d, sub("g", 1)) // waits for its membership
	b.c.Closed(d)
	b.c.turn()
	b.commit()
	b.advance(5 * time.Second)
	if len(b.c.byHandle) != 0 || len(b.c.refs) != 0 || len(b.c.sessions) != 0 || len(b.c.groups.byID[1].subs) != 0 {
		t.Errorf("left: %d subscriptions, %d requests, %d sessions", len(b.c.byHandle), len(b.c.refs), len(b.c.sessions))
	}
	if n := len(b.c.meta.Group(1).Members); n != 0 {
		t.Errorf("%d members are left", n)
	}
	b.want("next", b.do(b.client(), sub("g", 1)), "OK SUB")
}

func TestSub_ChurnLeaksNothing(t *testing.T) {
	b, c := withTopic(t, 1)
	b.closeClient(c)
	for range 2000 {
		c := b.client()
		b.want("SUB", b.do(c, sub("g", 1)), "OK SUB sub=1")
		b.closeClient(c)
	}
	b.advance(4 * time.Second)
	if len(b.c.byHandle)+len(b.c.refs)+len(b.c.sessions)+len(b.c.groups.byID[1].subs)+len(b.c.meta.Group(1).Members) != 0 {
		t.Errorf("left: %d subscriptions, %d requests, %d sessions", len(b.c.byHandle), len(b.c.refs), len(b.c.sessions))
	}
}

func TestSub_IdsOfAConnectionAreUsedAgainAfterLeave(t *testing.T) {
	b, c := withTopic(t, 1)
	b.do(c, sub("g", 1))
	b.do(c, sub("h", 1))
	b.want("leave", b.do(c, heartbeat(1, firstMember, 1, 0, protocol.MemberLeave)), "OK HEARTBEAT")
	b.want("gone", b.do(c, heartbeat(1, firstMember, 1, 0, protocol.MemberActive)), "ERR 0x0026")
	b.want("next", b.do(c, sub("i", 1)), "OK SUB sub=1 member=3000000000001")
}

func TestSub_AConnectionHasAMaximum(t *testing.T) {
	b, c := withTopic(t, 1)
	for range maxSubscriptions {
		b.c.open(c).addSub(&subscription{client: c})
	}
	b.want("one more", b.do(c, sub("g", 1)), "ERR 0x4002")
	b.c.open(c).subs[7].ended = protocol.CodeUnknownMember
	b.want("in place of an ended one", b.do(c, sub("g", 1)), "OK SUB sub=8")
}

func TestLeave_IsGraceful(t *testing.T) {
	b, c := withTopic(t, 1)
	b.do(c, sub("g", 1))
	b.confirm(c)
	b.d.take()
	b.want("leave", b.do(c, heartbeat(1, firstMember, 1, 1, protocol.MemberLeave)), "OK HEARTBEAT")
	b.want("delivery", b.d.take(), "disown g1 p0 e1 graceful=true; close 1 graceful=true ended=0x0026")
}

func TestRejoin_KeepsMemberAndPartitions(t *testing.T) {
	b, c := withTopic(t, 1)
	b.do(c, sub("g", 1))
	b.confirm(c)
	b.closeClient(c)
	b.advance(2 * time.Second)
	b.d.take()
	d := b.client()
	rejoin := (&protocol.Sub{Group: []byte("g"), TopicID: 1, Partition: protocol.AnyPartition, Flags: protocol.SubFlagRejoin, MemberID: firstMember}).AppendFrame(nil)
	b.want("rejoin", b.do(d, rejoin), "OK SUB sub=1 member=1000000000001 epochs=1/1")
	b.want("delivery", b.d.take(), "open 1 g1 t1 stream=false window=256/2097152; own 1 p0 e1")
	b.closeClient(d)
	b.advance(4 * time.Second)
	b.want("too late", b.do(b.client(), rejoin), "ERR 0x0026")
}

func TestRejoin_AfterARestart(t *testing.T) {
	b, c := withTopic(t, 2)
	b.do(c, sub("g", 1))
	b.confirm(c)
	before := b.c.meta.Group(1).Parts[1]
	b.now += time.Minute
	b.start()
	d := b.client()
	b.want("rejoin", b.do(d, (&protocol.Sub{Group: []byte("g"), TopicID: 1, Partition: protocol.AnyPartition, Flags: protocol.SubFlagRejoin, MemberID: firstMember}).AppendFrame(nil)),
		"OK SUB sub=1 member=1000000000001 epochs=1/1")
	b.want("delivery", b.d.take(), "open 1 g1 t1 stream=false window=256/2097152; own 1 p0 e1; own 1 p1 e2")
	if b.c.meta.Group(1).Parts[1] != before {
		t.Error("the ownership changed")
	}
	if len(d.pushed) != 2 || d.pushed[0].NoticeID>>32 != 2 {
		t.Errorf("notices %+v", d.pushed)
	}
}

func TestRestart_NewMemberTakesThePlaceOfOneWithoutConnection(t *testing.T) {
	b, c := withTopic(t, 1, func(o *Options) { o.MaxMembers = 1 })
	b.do(c, sub("g", 1))
	b.confirm(c)
	b.start(func(o *Options) { o.MaxMembers = 1 })
	d := b.client()
	b.want("SUB", b.do(d, sub("g", 1)), "OK SUB sub=1 member=1000000000002")
	b.confirm(d)
	if got := b.d.take(); !strings.HasSuffix(got, "own 1 p0 e2") {
		t.Errorf("delivery: %s", got)
	}
}

func TestSession_SilentMemberIsRemovedAnyOperationKeepsIt(t *testing.T) {
	b, c := withTopic(t, 1)
	b.do(c, sub("g", 1))
	b.confirm(c)
	b.advance(9 * time.Second)
	b.c.subscription(c, 1) // what delivery does for each PULL, ACK, NACK and CREDIT
	b.advance(9 * time.Second)
	if len(b.c.meta.Group(1).Members) != 1 {
		t.Fatal("a member that sends operations was removed")
	}
	b.d.take()
	b.advance(2 * time.Second)
	b.want("delivery", b.d.take(), "disown g1 p0 e1 graceful=false; close 1 graceful=false ended=0x0026")
	b.want("next op", b.do(c, heartbeat(1, firstMember, 1, 1, protocol.MemberActive)), "ERR 0x0026 the member sent nothing")
	if s := b.c.subscription(c, 1); s == nil || s.ended != protocol.CodeUnknownMember {
		t.Errorf("delivery finds %+v", s)
	}
}

func TestNotice_IsRepeatedAndItsSilenceRemovesTheMember(t *testing.T) {
	b, c := withTopic(t, 1)
	b.do(c, sub("g", 1))
	for range 3 {
		b.c.subscription(c, 1)
		b.advance(3 * time.Second)
	}
	if len(c.pushed) != 10 || c.pushed[9] != c.pushed[0] {
		t.Errorf("%d notices", len(c.pushed))
	}
	b.c.subscription(c, 1)
	b.advance(time.Second)
	b.want("next op", b.do(c, heartbeat(1, firstMember, 1, 0, protocol.MemberActive)), "ERR 0x0026 the member did not confirm")
}

func TestControlAck_ThatFitsNothingIsAnsweredOK(t *testing.T) {
	b, c := withTopic(t, 1)
	b.do(c, sub("g", 1))
	b.d.take()
	n := c.pushed[0]
	for _, a := range []protocol.ControlAck{
		{NoticeID: 99, GroupID: 1}, {NoticeID: n.NoticeID, GroupID: 7}, {NoticeID: n.NoticeID, GroupID: 1, OwnershipEpoch: 9},
	} {
		b.want("CONTROL_ACK", b.do(c, a.AppendFrame(nil)), "OK CONTROL_ACK")
		b.want("a stranger's", b.do(b.client(), a.AppendFrame(nil)), "OK CONTROL_ACK")
	}
	if got := b.d.take(); got != "" {
		t.Errorf("delivery: %s", got)
	}
	b.confirm(c)
	b.want("delivery", b.d.take(), "own 1 p0 e1")
}

func TestHeartbeat_ForAnotherMemberIsRefused(t *testing.T) {
	b, c := withTopic(t, 1)
	b.do(c, sub("g", 1))
	b.want("other member", b.do(c, heartbeat(1, firstMember+1, 1, 0, protocol.MemberActive)), "ERR 0x0026")
	b.want("no subscription", b.do(c, heartbeat(2, firstMember, 1, 0, protocol.MemberActive)), "ERR 0x0026")
	b.want("id 0", b.do(c, heartbeat(0, firstMember, 1, 0, protocol.MemberActive)), "ERR 0x0026")
	b.want("newer epoch", b.do(c, heartbeat(1, firstMember, 2, 0, protocol.MemberActive)), "ERR 0x0020")
}

func TestDeleteTopic_EndsItsSubscriptionsAndStartsAfresh(t *testing.T) {
	b, c := withTopic(t, 2)
	b.do(c, sub("g", 1))
	b.confirm(c)
	b.d.take()
	d := b.client()
	waiting := b.send(d, sub("new", 1)) // the group's creation is in flight
	del := b.send(c, declare("t", 0, protocol.DeclareFlagDelete))
	late := b.send(d, sub("late", 1))
	b.want("sub while deleting", d.answers[late], "ERR 0x0008 topic id 1 was deleted")
	b.commit()
	b.want("delete", c.answers[del], "OK DECLARE id=1")
	b.want("waiting", d.answers[waiting], "ERR 0x0008")
	b.want("heartbeat", b.do(c, heartbeat(1, firstMember, 1, 1, protocol.MemberActive)), "ERR 0x0008 topic t was deleted")
	b.want("delivery", b.d.take(), "disown g1 p0 e1 graceful=true; disown g1 p1 e2 graceful=true; close 1 graceful=true ended=0x0008; group- g1; topic- t1")
	if len(b.store.dropped) != 1 {
		t.Errorf("dropped %v", b.store.dropped)
	}
	b.want("create again", b.do(c, declare("t", 2, 0)), "OK DECLARE id=2")
	b.want("old id", b.do(c, sub("g", 1)), "ERR 0x0008 topic id 1 was deleted")
	b.want("new id", b.do(c, sub("g", 2)), "OK SUB sub=2 member=3000000000001 epochs=1/0")
	b.want("new cursor", b.d.take(), "group+ g3 t2")
}

func TestGroup_RefusedProposalIsAnsweredAndTriedAgain(t *testing.T) {
	b, c := withTopic(t, 1)
	b.do(c, sub("g", 1))
	b.confirm(c)
	b.log.failAt = 1
	b.want("refused", b.do(b.client(), sub("g", 1)), "ERR 0x2003")
	b.closeClient(c)
	b.advance(3 * time.Second)
	if len(b.c.meta.Group(1).Members) != 1 {
		t.Fatal("the removal went through a log that refuses")
	}
	b.log.fail = nil
	b.advance(2 * time.Second)
	if len(b.c.meta.Group(1).Members) != 0 {
		t.Fatal("the removal was not tried again")
	}
	b.want("accepted", b.do(b.client(), sub("g", 1)), "OK SUB")
}

func TestGroup_HalfAcceptedBatchStopsMetadata(t *testing.T) {
	b, c := withTopic(t, 1, func(o *Options) { o.MaxMembers = 1 })
	b.do(c, sub("g", 1))
	b.closeClient(c)
	d := b.client()
	b.log.failAt = 2 // of left, joined, assigned
	b.want("refused", b.do(d, sub("g", 1)), "ERR 0x2003")
	b.log.fail = nil
	b.want("afterwards", b.do(d, declare("x", 1, 0)), "ERR 0x2003")
}

func TestDispatch_PassesDeliverysInputsOn(t *testing.T) {
	b, c := withTopic(t, 1)
	b.c.Written(0, 5)
	b.c.Writable(c)
	b.c.Interrupt(c)
	b.c.ReadDone(nil)
	b.send(c, (&protocol.Ack{}).AppendFrame(nil))
	b.send(c, (&protocol.Pull{}).AppendFrame(nil))
	b.want("delivery", b.d.take(), "written 0 5; writable 1; interrupt 1; read; request ACK; request PULL")
}

func TestSubmit_BeyondTheBoundGetsBackpressure(t *testing.T) {
	b, c := withTopic(t, 1)
	big := GetBatch()
	for i := range maxQueuedRequests {
		big.Add(c, uint64(1000+i), protocol.OpDeclare, nil)
	}
	b.c.Submit(big)
	over := GetBatch()
	over.Add(c, 5, protocol.OpAck, nil)
	b.c.Submit(over)
	b.want("over", c.answers[5], "ERR 0x4001")
	b.c.turn()
	after := GetBatch()
	after.Add(c, 6, protocol.OpControlAck, (&protocol.ControlAck{}).AppendFrame(nil)[5:])
	b.c.Submit(after)
	b.c.turn()
	b.want("after", c.answers[6], "OK CONTROL_ACK")
}

func TestRun_ServesUntilTheContextEnds(t *testing.T) {
	b := newBench(t)
	c := New(Options{NodeID: 3}, b.log, b.store, nil, 1)
	c.delivery = &stubDelivery{}
	c.Epoch(9)
	if err := c.Recovered(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- c.Run(ctx) }()
	s, err := c.Stats(t.Context())
	if err != nil || s.Epoch != 9 {
		t.Fatalf("%+v, %v", s, err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if len(b.log.pending) != 1 {
		t.Errorf("%d mutations were proposed at the start, want the leader change", len(b.log.pending))
	}
	if _, err := c.Stats(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("Stats after the end: %v", err)
	}
	client := b.client()
	late := GetBatch()
	late.Add(client, 1, protocol.OpDeclare, nil)
	c.Submit(late)
	b.want("late", client.answers[1], "ERR 0x6002")
}

func TestStats_ShowsTopicsGroupsAndMembers(t *testing.T) {
	b, c := withTopic(t, 2)
	b.do(c, sub("g", 1))
	s := b.c.statistics()
	if len(s.Topics) != 1 || s.Topics[0].Name != "t" || s.Topics[0].State != "active" || s.Topics[0].CreatedEpoch != 1 || s.Topics[0].Durability == "" || len(s.Topics[0].Parts) != 2 {
		t.Errorf("topics %+v", s.Topics)
	}
	if len(s.Groups) != 1 {
		t.Fatalf("groups %+v", s.Groups)
	}
	g := s.Groups[0]
	if g.Name != "g" || g.Topic != "t" || g.State != "rebalancing" || g.Lag != 7 || len(g.Members) != 1 || g.Members[0].Lag != 7 || g.Members[0].AssignmentEpoch != 1 ||
		g.Members[0].InstalledEpoch != 0 || g.Members[0].OwnershipEpoch != 2 || !g.Members[0].Connected {
		t.Errorf("group %+v", g)
	}
	b.confirm(c)
	if got := b.c.statistics(); got.Groups[0].State != "stable" || got.Groups[0].Members[0].InstalledEpoch != 1 || got.Subscriptions != 1 || got.Sessions != 1 {
		t.Errorf("stats %+v", got)
	}
	b.closeClient(c)
	b.advance(3 * time.Second)
	if got := b.c.statistics(); got.Groups[0].State != "empty" || got.Sessions != 0 {
		t.Errorf("stats %+v", got)
	}
}
