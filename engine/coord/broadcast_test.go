package coord

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// broadcastSub is a SUB with BROADCAST, of a new member or, with member, of one that comes back.
func broadcastSub(group string, policy protocol.StartPolicy, member uint64) []byte {
	m := protocol.Sub{Group: []byte(group), TopicID: 1, Partition: protocol.AnyPartition, StartPolicy: policy,
		Flags: protocol.SubFlagBroadcast | protocol.SubFlagStream}
	if member != 0 {
		m.Flags |= protocol.SubFlagRejoin
		m.MemberID = member
	}
	return m.AppendFrame(nil)
}

func TestBroadcast_KindsDoNotMixInOneGroup(t *testing.T) {
	b, c := withTopic(t, 2)
	b.want("a new group", b.do(c, broadcastSub("all", protocol.StartEarliest, 0)), "OK SUB sub=1 member=1000000000001 epochs=1/0")
	b.want("a second member", b.do(c, broadcastSub("all", protocol.StartLatest, 0)), "OK SUB sub=2 member=1000000000002 epochs=2/0")
	b.want("a member that shares", b.do(c, sub("all", 1)), `ERR 0x2002 group "all" is a broadcast group: subscribe with BROADCAST`)
	b.want("settings that share", b.do(c, subWith("all", `{}`)), "ERR 0x2002")
	b.want("settings that do not", b.do(c, subWith("all", `{"broadcast":true}`)), "OK SUB sub=3")
	b.want("a shared group", b.do(c, sub("some", 1)), "OK SUB")
	b.want("a member that does not share", b.do(c, broadcastSub("some", 0, 0)), `ERR 0x2002 group "some" shares its partitions`)
	b.want("declared", b.do(c, declareGroup("t", "later", `{"broadcast":true,"lease_ms":5000}`, 0)), "OK DECLARE")
	b.want("joined by the flag alone", b.do(c, broadcastSub("later", 0, 0)), "OK SUB")
	b.want("another lease", b.do(c, subWith("later", `{"broadcast":true,"lease_ms":6000}`)), "ERR 0x2002")
	b.want("reset", b.do(c, (&protocol.Declare{Topic: []byte("t"), Group: []byte("later"), Flags: protocol.DeclareFlagGroup | protocol.DeclareFlagReset,
		Reset: protocol.Reset{Partition: protocol.AnyPartition, Options: protocol.ResetForce}}).AppendFrame(nil)), "OK RESET") // by the stub
	if n := b.c.groups.changes.assignments; n != 0 {
		t.Errorf("%d cursors are reserved for nobody", n)
	}
}

func TestBroadcast_MemberIsLetInWhenItsCursorsAreOnRecord(t *testing.T) {
	b, c := withTopic(t, 2)
	b.do(c, declareGroup("t", "all", `{"broadcast":true}`, 0))
	b.d.take()
	b.d.starting = true
	first := b.send(c, broadcastSub("all", protocol.StartLatest, 0))
	b.commit()
	b.want("delivery", b.d.take(), "member+ g1 m1000000000001 policy=1")
	second := b.send(c, broadcastSub("all", protocol.StartEarliest, 0))
	b.emptyRound()
	if c.answers[first] != "" || len(c.pushed) != 0 {
		t.Fatalf("answered %q, noticed %v", c.answers[first], c.pushed)
	}
	b.d.starting = false
	b.emptyRound()
	b.commit()
	b.want("first", c.answers[first], "OK SUB sub=1")
	b.want("second", c.answers[second], "OK SUB sub=2")
	if len(c.pushed) != 4 || c.pushed[0].OwnershipEpoch != 1 || c.pushed[3].OwnershipEpoch != 2 || c.pushed[3].Partition != 1 {
		t.Fatalf("noticed %+v", c.pushed)
	}
	b.confirm(c)
	b.want("delivery", b.d.take(), "open 1 g1 t1 stream=true window=256/2097152; member+ g1 m1000000000002 policy=0; "+
		"open 2 g1 t1 stream=true window=256/2097152; own 1 p0 e1; own 1 p1 e1; own 2 p0 e2; own 2 p1 e2")
	b.want("leave", b.do(c, heartbeat(1, firstMember, 1, 0, protocol.MemberLeave)), "OK HEARTBEAT")
	b.want("delivery", b.d.take(), "disown g1 p0 e1 graceful=true; disown g1 p1 e1 graceful=true; close 1 graceful=true ended=0x0026; member- g1 m1000000000001")
	b.closeClient(c)
	b.d.take()
	b.advance(4 * time.Second)
	b.want("expired", b.d.take(), "member- g1 m1000000000002")
}

func TestBroadcast_MemberThatIsNotLetInLeavesNothing(t *testing.T) {
	for name, end := range map[string]func(*bench){
		"the log takes nothing": func(b *bench) { b.log.fail = fmt.Errorf("full") },
		"the journal fails":     func(b *bench) { b.c.LogFailed("write error"); b.c.turn() },
	} {
		b, c := withTopic(t, 2)
		b.do(c, declareGroup("t", "all", `{"broadcast":true}`, 0))
		b.d.starting = true
		if name == "the log takes nothing" {
			end(b)
		}
		req := b.send(c, broadcastSub("all", 0, 0))
		b.commit()
		if name != "the log takes nothing" {
			end(b)
		}
		b.want(name, c.answers[req], "ERR 0x2003")
		if n := len(b.c.groups.arrivals) + len(b.c.byHandle) + len(b.c.refs) + b.c.groups.changes.assignments; n != 0 {
			t.Errorf("%s: something is left", name)
		}
	}
}

// airwave is a coordinator with its real delivery, and a topic of two partitions that messages are published to and read
// from as if all of them were on disk.
type airwave struct {
	*bench
	stored [2][]wal.Record // by partition
}

func newAirwave(t *testing.T) *airwave {
	a := &airwave{bench: newBench(t)}
	a.c.store = (*airStore)(a)
	a.deliver()
	a.do(a.client(), declare("t", 2, 0))
	return a
}

// airStore is the airwave as what the coordinator reads from.
type airStore airwave

func (s *airStore) SaveSnapshot(int, wal.SnapshotKind, uint64, []byte) {}
func (s *airStore) DropTopic(uint16)                                   {}
func (s *airStore) Read(_ int, req *wal.ReadRequest) {
	if records := s.stored[req.Stream.Partition]; int(req.From) <= len(records) {
		req.Chunk = newChunk(s.t, s.pool, req.Stream, records[req.From-1:])
	}
	s.c.ReadDone(req)
}

// publish publishes n messages to each partition.
func (a *airwave) publish(n int) {
	a.publishTo(0, n)
	a.publishTo(1, n)
	a.commit()
}

func (a *airwave) publishTo(partition uint16, n int) {
	stored := &a.stored[partition]
	records := make([]wal.Record, n)
	for i := range records {
		seq := len(*stored) + 1
		records[i] = wal.Record{Sequence: wal.Sequence(seq), LeaderEpoch: a.epoch, Value: fmt.Appendf(nil, "p%d.%d", partition, seq)}
		*stored = append(*stored, records[i])
	}
	a.round++
	a.c.CommitRound(0, wal.NewTestRound(a.pool, a.epoch, a.round, wal.TestRun{Stream: wal.StreamID{Kind: wal.Messages, Topic: 1, Partition: partition}, Records: records}))
	a.c.turn()
}

// restart is kill -9 and a new start.
func (a *airwave) restart() {
	a.t.Helper()
	ledger := a.ledger
	a.log.ledger = nil
	a.bench.start()
	a.c.store = (*airStore)(a)
	d := newDelivery(a.c, deliveryDeps{
		meta: func() *metadata.State { return a.c.meta }, epoch: func() wal.Epoch { return a.epoch }, readDone: a.c.ReadDone,
	})
	a.c.delivery = d
	for i := range ledger {
		if err := d.replay(0, &ledger[i]); err != nil {
			a.t.Fatal(err)
		}
	}
	for p := range uint16(2) {
		if n := len(a.stored[p]); n > 0 {
			d.bounds(1, p, 1, wal.Sequence(n))
		}
	}
	if err := d.recovered(); err != nil {
		a.t.Fatal(err)
	}
	a.c.turn()
	a.commit()
}

// listener is a member of a broadcast group.
type listener struct {
	a      *airwave
	c      *stubClient
	member uint64
	sub    uint16
	heard  []string
}

func (a *airwave) listen(policy protocol.StartPolicy, member uint64) *listener {
	a.t.Helper()
	l := &listener{a: a, c: a.client()}
	if _, err := fmt.Sscanf(a.do(l.c, broadcastSub("all", policy, member)), "OK SUB sub=%d member=%x", &l.sub, &l.member); err != nil {
		a.t.Fatalf("SUB: %v", l.c.order)
	}
	a.confirm(l.c)
	return l
}

// hear returns what came since the last call, and answers it.
func (l *listener) hear(answer func(m *protocol.Msg) []byte) string {
	l.a.t.Helper()
	l.heard = nil
	for len(l.c.msgs) > 0 {
		msgs := l.c.msgs
		l.c.msgs = nil
		for i := range msgs {
			m := &msgs[i]
			l.heard = append(l.heard, fmt.Sprintf("%s#%d", m.Value, m.Attempt))
			if answer != nil {
				if got := l.a.do(l.c, answer(m)); !strings.HasPrefix(got, "OK") {
					l.a.t.Fatalf("%s: %s", m.Value, got)
				}
			}
		}
	}
	slices.Sort(l.heard)
	return strings.Join(l.heard, " ")
}

func acked(m *protocol.Msg) []byte {
	return (&protocol.Ack{SubscriptionID: m.SubscriptionID, TopicID: m.TopicID, Partition: m.Partition, Sequence: m.Sequence,
		DeliveryID: m.DeliveryID, OwnershipEpoch: m.OwnershipEpoch}).AppendFrame(nil)
}

func nacked(reason protocol.NackReason) func(m *protocol.Msg) []byte {
	return func(m *protocol.Msg) []byte {
		return (&protocol.Nack{SubscriptionID: m.SubscriptionID, TopicID: m.TopicID, Partition: m.Partition, Sequence: m.Sequence,
			DeliveryID: m.DeliveryID, OwnershipEpoch: m.OwnershipEpoch, Reason: reason}).AppendFrame(nil)
	}
}

func (l *listener) want(what, got, want string) {
	l.a.t.Helper()
	if got != want {
		l.a.t.Errorf("%s: member %x heard %q, want %q", what, l.member, got, want)
	}
}

func TestBroadcast_EveryMemberGetsEveryMessageFromWhereItBegan(t *testing.T) {
	a := newAirwave(t)
	a.publish(1)
	one := a.listen(protocol.StartEarliest, 0)
	two := a.listen(protocol.StartLatest, 0)
	one.want("from the beginning", one.hear(acked), "p0.1#1 p1.1#1")
	two.want("from now on", two.hear(acked), "")
	a.publish(1)
	one.want("both get", one.hear(acked), "p0.2#1 p1.2#1")
	two.want("both get", two.hear(nil), "p0.2#1 p1.2#1") // and does not acknowledge
	s := a.c.statistics().Groups[0]
	if s.Published != 6 || s.Acknowledged != 4 || s.InFlight != 2 || s.Waiting != 0 || s.Dropped != 0 || s.Lag != 1 {
		t.Errorf("stats %+v", s)
	}
	if len(s.Members) != 2 || s.Members[0].Lag != 0 || s.Members[1].Lag != 1 || s.Members[0].OwnershipEpoch != 1 || s.Members[1].OwnershipEpoch != 2 {
		t.Errorf("members %+v", s.Members)
	}
	if p := s.Parts[0]; p.AckFloor != 1 || p.Lag != 1 || p.InFlight != 1 || p.Member != 0 {
		t.Errorf("partition 0: %+v", p)
	}
}

func TestBroadcast_CursorBelongsToTheMemberAcrossConnectionsAndRestarts(t *testing.T) {
	a := newAirwave(t)
	one, two := a.listen(0, 0), a.listen(0, 0)
	a.publish(2)
	one.want("first", one.hear(nil), "p0.1#1 p0.2#1 p1.1#1 p1.2#1")
	two.want("first", two.hear(acked), "p0.1#1 p0.2#1 p1.1#1 p1.2#1")
	// A lost connection is no failed attempt: there is only one, and the member comes back.
	a.closeClient(one.c)
	one = a.listen(0, one.member)
	one.want("on the next connection", one.hear(acked), "p0.1#1 p0.2#1 p1.1#1 p1.2#1")
	a.publish(1)
	one.want("before the restart", one.hear(acked), "p0.3#1 p1.3#1")
	two.want("before the restart", two.hear(nil), "p0.3#1 p1.3#1")
	a.restart()
	a.publish(1)
	one, two = a.listen(0, one.member), a.listen(protocol.StartLatest, two.member)
	one.want("after the restart", one.hear(acked), "p0.4#1 p1.4#1")
	two.want("after the restart", two.hear(nil), "p0.3#1 p0.4#1 p1.3#1 p1.4#1")
	for _, s := range a.c.delivery.(*delivery).groups[1].sets {
		for _, rd := range s.readers {
			if want := map[uint64]uint64{one.member: 4, two.member: 2}[s.member]; uint64(rd.cur.Floor()) != want {
				t.Errorf("the cursor of member %x on partition %d is at %d, want %d", s.member, rd.part.id, rd.cur.Floor(), want)
			}
		}
	}
}

func TestBroadcast_NoMessageIsTriedTwiceOrBuried(t *testing.T) {
	a := newAirwave(t)
	one, two := a.listen(0, 0), a.listen(0, 0)
	for _, reason := range []protocol.NackReason{protocol.NackRetryLater, protocol.NackRetryNow, protocol.NackReject} {
		a.publish(1)
		if one.hear(nacked(reason)) == "" || two.hear(acked) == "" {
			t.Fatal("nothing came")
		}
	}
	a.publish(1)
	one.want("to be left alone", one.hear(nil), "p0.4#1 p1.4#1")
	two.hear(acked)
	for range 12 { // until the lease has run out
		a.advance(3 * time.Second)
		for _, l := range []*listener{one, two} {
			a.do(l.c, heartbeat(l.sub, l.member, 2, 0, protocol.MemberActive))
		}
	}
	one.want("after everything failed", one.hear(nil), "")
	s := a.c.statistics()
	if g := s.Groups[0]; g.Dropped != 8 || g.DLQ != 0 || g.Acknowledged != 8 || g.Lag != 0 || g.Retries != 0 {
		t.Errorf("stats %+v", g)
	}
	if len(s.Topics) != 1 {
		t.Errorf("there are %d topics: a dead-letter topic, too", len(s.Topics))
	}
}

func TestBroadcast_CursorsGoWithTheirMember(t *testing.T) {
	a := newAirwave(t)
	d := a.c.delivery.(*delivery)
	cursors := func() int { return len(d.ledgers[0].book.Cursors()) }
	one, two := a.listen(0, 0), a.listen(0, 0)
	three := a.listen(0, 0)
	if n := cursors(); n != 6 {
		t.Fatalf("%d cursors for three members", n)
	}
	a.do(one.c, heartbeat(one.sub, one.member, 3, 0, protocol.MemberLeave))
	if n := cursors(); n != 4 {
		t.Errorf("%d cursors after one has left", n)
	}
	a.closeClient(two.c)
	a.advance(4 * time.Second)
	if n := cursors(); n != 2 {
		t.Errorf("%d cursors after one has expired", n)
	}
	// Whoever comes back too late is another member and begins anew.
	a.publish(1)
	late := a.client()
	a.want("rejoin", a.do(late, broadcastSub("all", 0, two.member)), "ERR 0x0026")
	three.want("undisturbed", three.hear(acked), "p0.1#1 p1.1#1")
	a.want("delete", a.do(late, declareGroup("t", "all", "", protocol.DeclareFlagDelete)), "OK DECLARE")
	if n := cursors() + len(d.groups) + len(d.known(1, 0).readers); n != 0 {
		t.Errorf("%d things are left after the group's end", n)
	}
}

// The broker dies between a member's end and its cursors', or before they are made: the next start puts it right.
func TestBroadcast_StartForgetsCursorsWithoutMemberAndMakesMissingOnes(t *testing.T) {
	a := newAirwave(t)
	one := a.listen(0, 0)
	a.publish(1)
	one.hear(acked)
	ledger := a.ledger
	a.do(one.c, heartbeat(one.sub, one.member, 1, 0, protocol.MemberLeave))
	two := a.listen(0, 0)
	a.ledger = ledger // neither the end of the first member's cursors nor the start of the second's is on record
	a.restart()
	d := a.c.delivery.(*delivery)
	var of []uint64
	for _, cur := range d.ledgers[0].book.Cursors() {
		of = append(of, cur.Key().Member)
	}
	if want := []uint64{two.member, two.member}; !slices.Equal(of, want) {
		t.Errorf("there are cursors of %x, want %x", of, want)
	}
}
