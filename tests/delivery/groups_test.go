package delivery

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

// g3: a window of four messages stays one of four however messages end: acknowledged, refused, rejected, with their leases,
// or with their partitions. Each way is taken more often than the window is large, so that credit that is lost once per
// message would stop the consumer.
func TestCase_CreditComesBackHoweverMessagesEnd(t *testing.T) {
	t.Parallel()
	const window, messages = 4, 80
	d := start(t, t.TempDir())
	topic := declare(t, d, "t", 2)
	c, err := client.Dial(t.Context(), d.ClientAddr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	opts := client.ConsumerOptions{CreditCount: window, GroupSettings: []byte(`{"retry":[10],"lease_ms":3000}`), Lease: 3 * time.Second, MaxProcessing: time.Second}
	k, err := c.NewConsumer(t.Context(), "t", "g", opts)
	if err != nil {
		t.Fatal(err)
	}
	values := make([]string, messages)
	for i := range values {
		values[i] = strconv.Itoa(i)
	}
	publish(t, d, topic, values...)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for m := range k.Messages() {
			n, _ := strconv.Atoi(string(m.Value))
			switch {
			case m.Attempt > 1 || n%4 == 0:
				_ = m.Ack() // where it has ended meanwhile it comes again
			case n%4 == 1:
				_ = m.Nack(protocol.NackRetryNow)
			case n%4 == 2:
				_ = m.Nack(protocol.NackReject)
			default: // its lease runs out
			}
		}
	}()
	for range 3 { // partitions come and go meanwhile
		other := join(t, d, "g", topic, "")
		for end := time.Now().Add(30 * time.Second); len(k.Partitions()) != 1 && time.Now().Before(end); {
			time.Sleep(10 * time.Millisecond)
		}
		other.leave()
	}
	eventually(t, d, "t", "g", "all messages have ended", func(g harness.GroupSums) bool { return g.Acknowledged+g.Dropped == messages && g.Lag == 0 })
	if err := k.Close(t.Context()); err != nil {
		t.Error(err)
	}
	<-done
}

// g8: all members of a group die in the middle of joining it; the next one gets every partition all the same.
func TestCase_GroupIsUsableAfterAllItsJoinersDied(t *testing.T) {
	t.Parallel()
	const partitions = 4
	d := start(t, t.TempDir())
	topic := declare(t, d, "t", partitions)
	var joiners sync.WaitGroup
	for i := range 10 {
		joiners.Go(func() {
			nc, err := net.Dial("tcp", d.ClientAddr)
			if err != nil {
				t.Error(err)
				return
			}
			defer nc.Close()
			connect := protocol.Connect{Version: protocol.WireVersion}
			s := protocol.Sub{Group: []byte("g"), TopicID: topic, Partition: protocol.AnyPartition, Flags: protocol.SubFlagStream}
			if _, err := nc.Write(s.AppendFrame(connect.AppendFrame(nil))); err != nil {
				t.Error(err)
			}
			for range i % 4 { // it sees nothing, or CONNECT's answer, or SUB's, or a NOTICE too
				_ = nc.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
				if _, err := nc.Read(make([]byte, 64)); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
					return
				}
			}
		})
	}
	joiners.Wait()
	m := join(t, d, "g", topic, "")
	c := dial(t, d)
	for p := range partitions {
		if _, err := c.Publish(&protocol.Pub{TopicID: topic, Partition: uint16(p), Value: []byte("v")}); err != nil {
			t.Fatal(err)
		}
	}
	for range partitions {
		msg, ok := m.next(60 * time.Second)
		if !ok {
			t.Fatal("the member did not get every partition")
		}
		m.mustAck(msg)
	}
}

// g11: what a member knows from before a rebalance is refused by its epochs, and the new owner doesn't notice.
func TestCase_EpochsFromBeforeARebalanceAreRefused(t *testing.T) {
	t.Parallel()
	d := start(t, t.TempDir())
	topic := declare(t, d, "t", 2)
	c := dial(t, d)
	for p := range uint16(2) {
		if _, err := c.Publish(&protocol.Pub{TopicID: topic, Partition: p, Value: []byte("v")}); err != nil {
			t.Fatal(err)
		}
	}
	old := join(t, d, "g", topic, quick)
	had := map[uint16]protocol.Msg{}
	for range 2 {
		msg, ok := old.next(30 * time.Second)
		if !ok {
			t.Fatal("nothing came")
		}
		had[msg.Partition] = msg
	}
	fresh := join(t, d, "g", topic, quick)
	var moved protocol.Msg
	for found := false; !found; { // the old member confirms REVOKE while it waits for messages
		if msg, ok := old.next(10 * time.Millisecond); ok {
			t.Fatalf("message %d came again to the old owner", msg.Sequence)
		}
		moved, found = fresh.next(10 * time.Millisecond)
	}
	stale := had[moved.Partition]
	if moved.Attempt != 1 || moved.OwnershipEpoch <= stale.OwnershipEpoch || moved.Sequence != stale.Sequence {
		t.Fatalf("the message came as attempt %d under epoch %d, before it was under %d", moved.Attempt, moved.OwnershipEpoch, stale.OwnershipEpoch)
	}
	if err := old.ack(&stale); !errors.Is(err, protocol.CodeStaleOwner) {
		t.Errorf("ACK: %v, want 0x0022", err)
	}
	if err := old.nack(&stale, protocol.NackReject); !errors.Is(err, protocol.CodeStaleOwner) {
		t.Errorf("NACK: %v, want 0x0022", err)
	}
	stale.OwnershipEpoch = moved.OwnershipEpoch // guessed
	if err := old.ack(&stale); !errors.Is(err, protocol.CodeStaleOwner) {
		t.Errorf("ACK with the new epoch: %v, want 0x0022", err)
	}
	pull := protocol.Pull{SubscriptionID: old.sub.SubscriptionID, MemberID: old.sub.MemberID, MembershipEpoch: old.sub.MembershipEpoch,
		AssignmentEpoch: old.sub.AssignmentEpoch, MaxMsgs: 1}
	for epoch, want := range map[uint64]protocol.ErrorCode{had[moved.Partition].OwnershipEpoch: protocol.CodeStaleGeneration, moved.OwnershipEpoch: protocol.CodeNotOwner} {
		pull.OwnershipEpochs = []uint64{epoch}
		if err := old.call(pull.AppendFrame(nil)); !errors.Is(err, want) {
			t.Errorf("PULL with ownership epoch %d: %v, want %v", epoch, err, want)
		}
	}
	fresh.mustAck(moved)
	other := had[1-moved.Partition] // of the partition that has stayed
	old.mustAck(other)
	if g := stats(t, d, "t", "g"); g.Acknowledged != 2 || g.Lag != 0 {
		t.Fatalf("%+v", g)
	}
}

// g15: connections come, subscribe and go; in the end nothing of them is left. MORTARMQ_FULL_TESTS=1 has 100 000 of them.
func TestCase_ChurnLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	const workers = 8
	each := 500
	switch {
	case os.Getenv("MORTARMQ_FULL_TESTS") != "":
		each = 6250
	case testing.Short():
		each = 100
	}
	d := start(t, t.TempDir())
	c := dial(t, d)
	res, err := c.Declare("t", 4)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	topic := res.TopicID
	files := func() int {
		list, err := os.ReadDir(filepath.Join("/proc", strconv.Itoa(d.PID()), "fd"))
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	goroutines := func() int {
		var text strings.Builder
		if err := d.Fetch("/debug/pprof/goroutine?debug=1", &text); err != nil {
			t.Fatal(err)
		}
		var n int
		if _, err := fmt.Sscanf(text.String(), "goroutine profile: total %d", &n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	heap := func() (bytes int) { // what is in use after a garbage collection
		var text strings.Builder
		if err := d.Fetch("/debug/pprof/heap?gc=1&debug=1", &text); err != nil {
			t.Fatal(err)
		}
		_, rest, _ := strings.Cut(text.String(), "\n# HeapAlloc = ")
		if _, err := fmt.Sscan(rest, &bytes); err != nil {
			t.Fatal(err)
		}
		return bytes
	}
	wave := func() {
		var all sync.WaitGroup
		for w := range workers {
			all.Go(func() {
				for i := range each {
					if err := comeAndGo(d.ClientAddr, topic, fmt.Sprintf("g%d", (w+i)%5), i); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		all.Wait()
	}
	gone := func() bool {
		var text strings.Builder
		if err := d.Fetch("/metrics", &text); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(text.String(), "\nmortarmq_connections 0\n") {
			return false
		}
		for g := range 5 {
			s, err := d.GroupState("t", fmt.Sprintf("g%d", g))
			if err != nil {
				t.Fatal(err)
			}
			if s.State != "empty" {
				return false
			}
		}
		return true
	}
	await := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(60 * time.Second); !ok(); time.Sleep(20 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("it never came true that %s", what)
			}
		}
	}
	wave() // what is allocated once and kept is there now
	await("everybody is gone", gone)
	filesBefore, before, heapBefore := files(), goroutines(), heap()
	wave()
	await("everybody is gone", gone)
	const slack = 16 // the broker has files and workers of its own; each wave had hundreds of connections
	await("descriptors are given back", func() bool { return files() <= filesBefore+slack })
	await("goroutines have ended", func() bool { return goroutines() <= before+slack })
	await("memory is given back", func() bool { return heap() <= heapBefore+4<<20 })
}

// comeAndGo is the life of one connection, which ends at another point each time. Its own address is one of many, since each has
// ports for some ten thousands.
func comeAndGo(addr string, topic uint16, group string, i int) error {
	from := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, byte(1+i%250))}}
	nc, err := from.Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer nc.Close()
	connect := protocol.Connect{Version: protocol.WireVersion}
	s := protocol.Sub{Group: []byte(group), TopicID: topic, Partition: protocol.AnyPartition, Flags: protocol.SubFlagStream}
	if _, err := nc.Write(s.AppendFrame(connect.AppendFrame(nil))); err != nil {
		return err
	}
	for range i % 3 {
		if _, err := nc.Read(make([]byte, 64)); err != nil {
			return err
		}
	}
	if i%2 == 0 {
		return nc.(*net.TCPConn).SetLinger(0)
	}
	return nil
}

// g16: a consumer that never reads what it is sent is paused and, when it has taken nothing for 30 s, told 0x4007 and closed.
// That costs the broker little memory and other consumers nothing.
func TestCase_ReaderThatNeverReadsHurtsNobody(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("takes the 30 s that the broker waits")
	}
	const messages, size = 60, 1 << 20
	d := start(t, t.TempDir())
	topic := declare(t, d, "t", 1)
	values := make([]string, messages)
	for i := range values {
		values[i] = strings.Repeat("x", size)
	}
	all := func(s *protocol.Sub) { s.CreditCount, s.CreditBytes = 65535, 64<<20 }
	deaf := dial(t, d)
	if err := deaf.Net().(*net.TCPConn).SetReadBuffer(4 << 10); err != nil {
		t.Fatal(err)
	}
	s := protocol.Sub{Group: []byte("deaf"), TopicID: topic, Partition: protocol.AnyPartition, Flags: protocol.SubFlagStream, CreditCount: 65535, CreditBytes: 64 << 20}
	sub, err := deaf.Subscribe(&s)
	if err != nil {
		t.Fatal(err)
	}
	f, err := deaf.Next()
	if err != nil || f.Op != protocol.OpNotice {
		t.Fatalf("%v, %v", f.Op, err)
	}
	var n protocol.Notice
	if err := n.Decode(f.Payload); err != nil {
		t.Fatal(err)
	}
	if err := deaf.Send(harness.ConfirmNotice(&n)); err != nil {
		t.Fatal(err)
	}
	publish(t, d, topic, values...)
	other := join(t, d, "other", topic, quick, all)
	for seq := uint64(1); seq <= messages; seq++ {
		other.mustAck(other.want(seq, 1))
	}
	// The deaf one goes on sending heartbeats: it is its connection that ends, not its session.
	beat := protocol.Heartbeat{SubscriptionID: sub.SubscriptionID, MemberID: sub.MemberID, MembershipEpoch: n.MembershipEpoch, AssignmentEpoch: n.AssignmentEpoch}
	for end := time.Now().Add(90 * time.Second); deaf.Send(beat.AppendFrame(nil)) == nil; time.Sleep(time.Second) {
		if time.Now().After(end) {
			t.Fatal("the connection that is not read was not closed")
		}
		if g := stats(t, d, "t", "deaf"); g.InFlight > 16 {
			t.Fatalf("%d messages of 1 MiB each are in flight to a consumer that does not read", g.InFlight)
		}
	}
	again := join(t, d, "deaf", topic, "", all)
	for { // what was on its way has failed once, and comes after a pause
		msg, ok := again.next(30 * time.Second)
		if !ok {
			t.Fatal("the first message did not come again")
		}
		if msg.Sequence == 1 {
			break
		}
		again.mustAck(msg)
	}
}

// g17: a topic is deleted while it is used, and created again.
func TestCase_DeletedTopicStartsAfresh(t *testing.T) {
	t.Parallel()
	d := start(t, t.TempDir())
	topic := declare(t, d, "t", 1)
	publish(t, d, topic, "old 1", "old 2")
	m := join(t, d, "g", topic, quick)
	first := m.want(1, 1)
	m.mustAck(first)
	second := m.want(2, 1)
	producer := dial(t, d)
	remove := protocol.Declare{Topic: []byte("t"), Flags: protocol.DeclareFlagDelete}
	if _, err := dial(t, d).Request(protocol.OpDeclare, remove.AppendFrame(nil)); err != nil {
		t.Fatal(err)
	}
	if _, err := producer.Publish(&protocol.Pub{TopicID: topic, Value: []byte("lost")}); !errors.Is(err, protocol.CodeUnknownTopic) {
		t.Errorf("a publish to the deleted topic: %v, want 0x0008", err)
	}
	if err := m.ack(&second); !errors.Is(err, protocol.CodeUnknownTopic) {
		t.Errorf("an ACK: %v, want 0x0008", err)
	}
	if err := m.call(m.heartbeat(protocol.MemberActive)); !errors.Is(err, protocol.CodeUnknownTopic) {
		t.Errorf("a heartbeat: %v, want 0x0008", err)
	}
	s := protocol.Sub{Group: []byte("g"), TopicID: topic, Partition: protocol.AnyPartition}
	if _, err := dial(t, d).Subscribe(&s); !errors.Is(err, protocol.CodeUnknownTopic) {
		t.Errorf("a SUB to the deleted topic: %v, want 0x0008", err)
	}
	again := declare(t, d, "t", 1)
	if again == topic {
		t.Fatalf("the new topic has the old one's id %d", topic)
	}
	publish(t, d, again, "new 1")
	fresh := join(t, d, "g", again, quick)
	msg := fresh.want(1, 1)
	if string(msg.Value) != "new 1" {
		t.Fatalf("%q came", msg.Value)
	}
	fresh.mustAck(msg)
	if g := stats(t, d, "t", "g"); g.Published != 1 || g.Acknowledged != 1 || g.Lag != 0 {
		t.Fatalf("%+v", g)
	}
}
