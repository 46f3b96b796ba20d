package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// quick makes the consumer's second shorter. A test in which a message waits needs MaxProcessing forever then: five minutes
// are over soon.
func quick(d time.Duration) Option { return func(c *config) { c.tick = d } }

const forever = 10000 * time.Hour

// isProgress tells PROGRESS from an ACK.
func isProgress(payload []byte) bool {
	var m protocol.Ack
	return m.Decode(payload) == nil && m.Flags&protocol.AckFlagProgress != 0
}

func newTestConsumer(tb testing.TB, c *Client, opts ConsumerOptions) *Consumer {
	tb.Helper()
	k, err := c.NewConsumer(testContext(tb), "orders", "billing", opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = k.Close(testContext(tb)) })
	return k
}

// eventually waits until cond, which runs with the broker locked, is true.
func eventually(tb testing.TB, b *fakeBroker, what string, cond func() bool) {
	tb.Helper()
	for ctx := testContext(tb); ctx.Err() == nil; time.Sleep(time.Millisecond) {
		ok := false
		b.inspect(func() { ok = cond() })
		if ok {
			return
		}
	}
	tb.Fatalf("it never came true that %s", what)
}

// receive takes n messages from the channel.
func receive(tb testing.TB, k *Consumer, n int) []*Message {
	tb.Helper()
	ctx := testContext(tb)
	var got []*Message
	for len(got) < n {
		select {
		case m, ok := <-k.Messages():
			if !ok {
				tb.Fatalf("the channel was closed after %d of %d messages: %v", len(got), n, k.Err())
			}
			got = append(got, m)
		case <-ctx.Done():
			tb.Fatalf("%d of %d messages arrived", len(got), n)
		}
	}
	return got
}

func TestConsumer_ReceivesInOrderAndAcknowledges(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 3)
	b.fill(topic, 700)
	k := newTestConsumer(t, dialFake(t, b), ConsumerOptions{Start: protocol.StartLatest})
	next := map[uint16]uint64{}
	for range 2100 {
		m := receive(t, k, 1)[0]
		next[m.Partition]++
		if m.Sequence != next[m.Partition] || string(m.Value) != fmt.Sprintf("%d-%d", m.Partition, m.Sequence-1) || m.Topic != "orders" || m.Attempt != 1 {
			t.Fatalf("message %+v, want sequence %d", m, next[m.Partition])
		}
		if !m.Active() {
			t.Fatal("the message is over before it was ended")
		}
		if err := m.Ack(); err != nil {
			t.Fatal(err)
		}
		if err := m.Ack(); !errors.Is(err, ErrDeliveryEnded) {
			t.Fatalf("second Ack: %v", err)
		}
	}
	eventually(t, b, "all are acknowledged", func() bool { return len(b.acks) == 2100 })
	if got := k.Partitions(); !slices.Equal(got, []uint16{0, 1, 2}) {
		t.Errorf("partitions %v", got)
	}
	b.inspect(func() {
		sub := b.subs[0]
		if string(sub.Group) != "billing" || sub.Flags != protocol.SubFlagStream || sub.CreditCount != 256 || sub.CreditBytes != 2<<20 || sub.StartPolicy != protocol.StartLatest {
			t.Errorf("SUB %+v", sub)
		}
		for _, a := range b.control {
			if a.Result != protocol.ControlOK || a.Kind != protocol.NoticeAssign {
				t.Errorf("CONTROL_ACK %+v", a)
			}
		}
		for i, a := range b.acks {
			if a.SubscriptionID != 7 || a.TopicID != topic.id || a.DeliveryID == 0 || a.OwnershipEpoch == 0 || a.Flags != 0 {
				t.Fatalf("ACK %d: %+v", i, a)
			}
		}
	})
}

func TestConsumer_ReturnsCreditInBatches(t *testing.T) {
	for _, c := range []struct {
		name      string
		opts      ConsumerOptions
		valueSize int
		messages  int
		batch     int // messages per CREDIT
	}{
		{"at 32 messages", ConsumerOptions{}, 1, 320, 32},
		{"at half of a small window", ConsumerOptions{CreditCount: 16}, 1, 80, 8},
		{"at 1 MiB", ConsumerOptions{CreditBytes: 64 << 20}, 256 << 10, 12, 4},
		{"at half of the bytes", ConsumerOptions{CreditBytes: 4000}, 1000, 10, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newFakeBroker(t)
			topic := b.addTopic("orders", 1)
			for range c.messages {
				topic.partitions[0].log = append(topic.partitions[0].log, protocol.Pub{Value: make([]byte, c.valueSize)})
			}
			k := newTestConsumer(t, dialFake(t, b), c.opts)
			inHand := 0
			for range c.messages / c.batch {
				for _, m := range receive(t, k, c.batch) {
					inHand++
					if err := m.Ack(); err != nil {
						t.Fatal(err)
					}
				}
			}
			eventually(t, b, "all credit is back", func() bool {
				count, size := 0, 0
				for _, credit := range b.credits {
					count += int(credit.Count)
					size += int(credit.Bytes)
					if credit.Mode != protocol.CreditAdd || credit.SubscriptionID != 7 || credit.OwnershipEpoch != 0 {
						t.Fatalf("CREDIT %+v", credit)
					}
				}
				return count == c.messages && size == c.messages*c.valueSize
			})
			b.inspect(func() {
				for i, credit := range b.credits {
					if int(credit.Count) > c.batch {
						t.Errorf("CREDIT %d returns %d messages, the batch is %d", i, credit.Count, c.batch)
					}
				}
			})
		})
	}
}

func TestConsumer_ReturnsALittleCreditAfterAWhile(t *testing.T) {
	b := newFakeBroker(t)
	b.fill(b.addTopic("orders", 1), 3)
	k := newTestConsumer(t, dialFake(t, b), ConsumerOptions{})
	for _, m := range receive(t, k, 3) {
		if err := m.Nack(protocol.NackRetryNow); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, b, "the credit of three messages is back", func() bool {
		n := 0
		for _, credit := range b.credits {
			n += int(credit.Count)
		}
		return n == 3
	})
	b.inspect(func() {
		if len(b.nacks) != 3 || b.nacks[0].Reason != protocol.NackRetryNow {
			t.Errorf("NACKs %+v", b.nacks)
		}
	})
}

func TestConsumer_TheWindowBoundsWhatIsInHand(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 1)
	b.fill(topic, 100)
	k := newTestConsumer(t, dialFake(t, b), ConsumerOptions{CreditCount: 10})
	messages := receive(t, k, 10)
	select {
	case m := <-k.Messages():
		t.Errorf("message %d came without credit", m.Sequence)
	case <-time.After(30 * time.Millisecond):
	}
	for _, m := range messages {
		if err := m.Ack(); err != nil {
			t.Fatal(err)
		}
	}
	receive(t, k, 10)
}

func TestConsumer_RaisesTheWindowForALargeMessage(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 1)
	large := bytes.Repeat([]byte("x"), 5<<20)
	topic.partitions[0].log = append(topic.partitions[0].log, protocol.Pub{Value: []byte("small")}, protocol.Pub{Value: large})
	k := newTestConsumer(t, dialFake(t, b), ConsumerOptions{})
	messages := receive(t, k, 2)
	if !bytes.Equal(messages[1].Value, large) || string(messages[0].Value) != "small" {
		t.Error("the values are not what was stored")
	}
}

func TestConsumer_RunEndsMessagesByTheHandlersResult(t *testing.T) {
	b := newFakeBroker(t)
	b.fill(b.addTopic("orders", 1), 4)
	k := newTestConsumer(t, dialFake(t, b), ConsumerOptions{})
	ctx, cancel := context.WithCancel(testContext(t))
	var order []uint64
	ran := make(chan error)
	go func() {
		ran <- k.Run(ctx, func(_ context.Context, m *Message) error {
			order = append(order, m.Sequence)
			switch m.Sequence {
			case 2:
				return errors.New("not now")
			case 3:
				panic("a bug in the handler")
			case 4:
				return fmt.Errorf("never: %w", ErrReject)
			}
			return nil
		})
	}()
	eventually(t, b, "all are answered", func() bool { return len(b.acks) == 1 && len(b.nacks) == 3 })
	cancel()
	if err := <-ran; err != nil {
		t.Error(err)
	}
	if !slices.Equal(order, []uint64{1, 2, 3, 4}) {
		t.Errorf("order %v", order)
	}
	b.inspect(func() {
		for i, want := range []protocol.NackReason{protocol.NackRetryLater, protocol.NackRetryLater, protocol.NackReject} {
			if n := b.nacks[i]; n.Reason != want || n.Sequence != uint64(i+2) {
				t.Errorf("NACK %d: %+v", i, n)
			}
		}
	})
}

func TestConsumer_RunKeepsTheOrderOfEachPartition(t *testing.T) {
	b := newFakeBroker(t)
	b.fill(b.addTopic("orders", 5), 400)
	k := newTestConsumer(t, dialFake(t, b), ConsumerOptions{Concurrency: 3})
	var mu sync.Mutex
	atWork, most := map[uint16]bool{}, 0
	next := map[uint16]uint64{}
	ctx, cancel := context.WithCancel(testContext(t))
	ran := make(chan error)
	go func() {
		ran <- k.Run(ctx, func(_ context.Context, m *Message) error {
			mu.Lock()
			if atWork[m.Partition] {
				t.Errorf("two handlers are at work on partition %d", m.Partition)
			}
			atWork[m.Partition] = true
			most = max(most, len(atWork))
			if next[m.Partition]++; m.Sequence != next[m.Partition] {
				t.Errorf("partition %d: sequence %d, want %d", m.Partition, m.Sequence, next[m.Partition])
			}
			mu.Unlock()
			if m.Sequence%50 == 0 {
				time.Sleep(time.Millisecond)
			}
			mu.Lock()
			delete(atWork, m.Partition)
			mu.Unlock()
			return nil
		})
	}()
	eventually(t, b, "all are acknowledged", func() bool { return len(b.acks) == 2000 })
	cancel()
	if err := <-ran; err != nil {
		t.Error(err)
	}
	if most > 3 {
		t.Errorf("%d handlers were at work", most)
	}
}

func TestConsumer_RejoinsAfterALostConnection(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 2)
	b.fill(topic, 5)
	k := newTestConsumer(t, dialFake(t, b), ConsumerOptions{})
	before := receive(t, k, 10)
	var member uint64
	b.inspect(func() { member = b.groups["billing"].member })
	b.dropConnections()
	eventually(t, b, "it has rejoined", func() bool { return len(b.subs) == 2 && b.groups["billing"].conn != nil })
	b.inspect(func() {
		if m := b.subs[1]; m.Flags&protocol.SubFlagRejoin == 0 || m.MemberID != member {
			t.Errorf("the second SUB is %+v", m)
		}
	})
	if err := before[0].Ack(); !errors.Is(err, ErrDeliveryEnded) {
		t.Errorf("Ack of a delivery of the lost connection: %v", err)
	}
	b.fill(topic, 3)
	b.inspect(func() { c := b.groups["billing"].conn; c.deliver(); c.push(c.out); c.out = nil })
	for _, m := range receive(t, k, 6) {
		if err := m.AckSync(testContext(t)); err != nil {
			t.Error(err)
		}
	}
}

func TestConsumer_JoinsAsANewMemberWhenItIsTooLateToRejoin(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 2)
	k := newTestConsumer(t, dialFake(t, b), ConsumerOptions{})
	eventually(t, b, "both partitions are assigned", func() bool { return len(b.control) == 2 })
	b.inspect(func() { b.groups["billing"].member = 999999 })
	b.dropConnections()
	eventually(t, b, "both partitions are assigned anew", func() bool { return len(b.control) == 4 })
	b.inspect(func() {
		if len(b.subs) != 3 || b.subs[2].Flags&protocol.SubFlagRejoin != 0 {
			t.Errorf("SUBs %+v", b.subs)
		}
	})
	b.fill(topic, 1)
	b.inspect(func() { c := b.groups["billing"].conn; c.deliver(); c.push(c.out); c.out = nil })
	receive(t, k, 2)
}

func TestConsumer_ARemovedMemberJoinsAnew(t *testing.T) {
	b := newFakeBroker(t)
	b.addTopic("orders", 1)
	newTestConsumer(t, dialFake(t, b, quick(2*time.Millisecond)), ConsumerOptions{})
	removed := false
	b.hook(func(_ *fakeConn, op protocol.Op, _ []byte) ([]byte, bool, bool) {
		if op == protocol.OpHeartbeat && !removed {
			removed = true
			return protocol.AppendErr(nil, protocol.CodeUnknownMember, op, ""), true, false
		}
		return nil, false, false
	})
	eventually(t, b, "it has joined again", func() bool { return len(b.subs) == 2 && len(b.beats) > 0 })
	b.inspect(func() {
		if b.subs[1].Flags&protocol.SubFlagRejoin != 0 {
			t.Error("it rejoins as the removed member")
		}
	})
}

func TestConsumer_SendsHeartbeatsAndLeaves(t *testing.T) {
	b := newFakeBroker(t)
	b.addTopic("orders", 1)
	k := newTestConsumer(t, dialFake(t, b, quick(2*time.Millisecond)), ConsumerOptions{})
	eventually(t, b, "there are heartbeats", func() bool { return len(b.beats) >= 2 })
	if err := k.Close(testContext(t)); err != nil {
		t.Fatal(err)
	}
	b.inspect(func() {
		last := b.beats[len(b.beats)-1]
		if last.State != protocol.MemberLeave || last.MemberID != b.groups["billing"].member || last.SubscriptionID != 7 {
			t.Errorf("the last heartbeat is %+v", last)
		}
		if b.beats[0].State != protocol.MemberActive {
			t.Errorf("the first heartbeat is %+v", b.beats[0])
		}
	})
	if _, open := <-k.Messages(); open {
		t.Error("the channel is open after Close")
	}
	if err := k.Run(testContext(t), nil); err != nil {
		t.Errorf("Run after Close: %v", err)
	}
}

func TestConsumer_CloseSendsTheLastAcks(t *testing.T) {
	b := newFakeBroker(t)
	b.fill(b.addTopic("orders", 1), 20)
	k := newTestConsumer(t, dialFake(t, b), ConsumerOptions{})
	for _, m := range receive(t, k, 20) {
		if err := m.Ack(); err != nil {
			t.Fatal(err)
		}
	}
	if err := k.Close(testContext(t)); err != nil {
		t.Fatal(err)
	}
	b.inspect(func() {
		if len(b.acks) != 20 || b.beats[len(b.beats)-1].State != protocol.MemberLeave {
			t.Errorf("%d ACKs before LEAVE", len(b.acks))
		}
	})
}

func TestConsumer_ARevokeWaitsForTheMessageAtHand(t *testing.T) {
	b := newFakeBroker(t)
	b.fill(b.addTopic("orders", 1), 5)
	k := newTestConsumer(t, dialFake(t, b), ConsumerOptions{})
	begun, goOn := make(chan struct{}), make(chan struct{})
	handled := 0
	go func() {
		_ = k.Run(context.Background(), func(_ context.Context, m *Message) error {
			handled++
			close(begun)
			<-goOn
			return nil
		})
	}()
	<-begun
	b.inspect(func() {
		c := b.groups["billing"].conn
		c.sub.owned[0] = false
		n := c.notice(protocol.NoticeRevoke, 0)
		c.push(n.AppendFrame(nil))
		c.push(n.AppendFrame(nil)) // repeated
	})
	for len(k.Partitions()) > 0 {
		time.Sleep(time.Millisecond)
	}
	b.inspect(func() {
		if len(b.control) != 1 {
			t.Errorf("the REVOKE was confirmed with a message at hand: %+v", b.control)
		}
	})
	close(goOn)
	eventually(t, b, "the REVOKE is confirmed behind the ACK", func() bool {
		// The repeated notice may arrive after the confirmation, and is confirmed as well then.
		return len(b.control) >= 2 && b.control[1].Kind == protocol.NoticeRevoke && b.control[1].Result == protocol.ControlOK && len(b.acks) == 1
	})
	eventually(t, b, "the credit of all five is back", func() bool {
		n := 0
		for _, credit := range b.credits {
			n += int(credit.Count)
		}
		return n == 5
	})
	if err := k.Close(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if handled != 1 {
		t.Errorf("%d messages were handled, one was at hand", handled)
	}
}

func TestConsumer_ARevokeDoesNotWaitForEver(t *testing.T) {
	b := newFakeBroker(t)
	b.fill(b.addTopic("orders", 1), 1)
	k := newTestConsumer(t, dialFake(t, b, quick(2*time.Millisecond)), ConsumerOptions{MaxProcessing: forever})
	m := receive(t, k, 1)[0]
	b.inspect(func() {
		c := b.groups["billing"].conn
		n := c.notice(protocol.NoticeRevoke, 0)
		c.push(n.AppendFrame(nil))
	})
	eventually(t, b, "the REVOKE is confirmed", func() bool { return len(b.control) == 2 })
	if m.Active() {
		t.Error("the delivery is still active")
	}
	if err := m.Ack(); !errors.Is(err, ErrDeliveryEnded) {
		t.Errorf("Ack: %v", err)
	}
}

func TestConsumer_AnswersForeignNoticesAsStale(t *testing.T) {
	b := newFakeBroker(t)
	b.addTopic("orders", 1)
	k := newTestConsumer(t, dialFake(t, b), ConsumerOptions{})
	eventually(t, b, "the partition is assigned", func() bool { return len(b.control) == 1 })
	b.inspect(func() {
		c := b.groups["billing"].conn
		foreign, old := c.notice(protocol.NoticeAssign, 0), c.notice(protocol.NoticeRevoke, 0)
		foreign.MemberID++
		old.OwnershipEpoch--
		c.push(old.AppendFrame(foreign.AppendFrame(nil)))
	})
	eventually(t, b, "both are answered", func() bool { return len(b.control) == 3 })
	b.inspect(func() {
		for _, a := range b.control[1:] {
			if a.Result != protocol.ControlStale {
				t.Errorf("CONTROL_ACK %+v", a)
			}
		}
	})
	if got := k.Partitions(); !slices.Equal(got, []uint16{0}) {
		t.Errorf("partitions %v", got)
	}
}

func TestConsumer_RenewsTheLeaseOfWhatTakesLongUpToALimit(t *testing.T) {
	b := newFakeBroker(t)
	b.fill(b.addTopic("orders", 1), 1)
	k := newTestConsumer(t, dialFake(t, b, quick(3*time.Millisecond)),
		ConsumerOptions{Lease: 6 * time.Second, MaxProcessing: 20 * time.Second})
	m := receive(t, k, 1)[0]
	eventually(t, b, "the lease is renewed", func() bool { return len(b.renewed) >= 3 })
	b.inspect(func() {
		for _, a := range b.renewed {
			if a.Flags != protocol.AckFlagProgress || a.Sequence != 1 {
				t.Errorf("ACK %+v", a)
			}
		}
	})
	for ctx := testContext(t); m.Active(); time.Sleep(time.Millisecond) { // a simulated 26 s
		if ctx.Err() != nil {
			t.Fatal("the delivery never ends")
		}
	}
	eventually(t, b, "its credit is back", func() bool { return len(b.credits) == 1 && b.credits[0].Count == 1 })
	if err := m.Progress(); !errors.Is(err, ErrDeliveryEnded) {
		t.Errorf("Progress: %v", err)
	}
}

func TestConsumer_ARedeliveryEndsTheOlderDelivery(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 1)
	b.fill(topic, 1)
	k := newTestConsumer(t, dialFake(t, b), ConsumerOptions{})
	first := receive(t, k, 1)[0]
	b.inspect(func() {
		c := b.groups["billing"].conn
		c.push(c.message(&topic.partitions[0].log[0], 0, 1, 2).AppendFrame(nil))
	})
	second := receive(t, k, 1)[0]
	if second.Sequence != 1 || second.Attempt != 2 || first.Active() || !second.Active() {
		t.Errorf("second %+v, first is active: %v", second, first.Active())
	}
}

func TestConsumer_SendsARefusedAckAgain(t *testing.T) {
	b := newFakeBroker(t)
	b.fill(b.addTopic("orders", 1), 1)
	k := newTestConsumer(t, dialFake(t, b, quick(2*time.Millisecond)), ConsumerOptions{MaxProcessing: forever})
	m := receive(t, k, 1)[0]
	refused := 0
	b.hook(func(_ *fakeConn, op protocol.Op, payload []byte) ([]byte, bool, bool) {
		if op == protocol.OpAck && !isProgress(payload) && refused < 2 {
			refused++
			return protocol.AppendErr(nil, protocol.CodeReadOnlyDegraded, op, ""), true, false
		}
		return nil, false, false
	})
	if err := m.AckSync(testContext(t)); err != nil {
		t.Error(err)
	}
	b.inspect(func() {
		if refused != 2 || len(b.acks) != 1 {
			t.Errorf("refused %d times, %d ACKs", refused, len(b.acks))
		}
	})
}

func TestConsumer_StopsReadingWhileItsAcksAreRefused(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 1)
	b.fill(topic, 200)
	readOnly, refused := true, 0
	b.hook(func(_ *fakeConn, op protocol.Op, payload []byte) ([]byte, bool, bool) {
		if op == protocol.OpAck && !isProgress(payload) && readOnly {
			refused++
			return protocol.AppendErr(nil, protocol.CodeReadOnlyDegraded, op, ""), true, false
		}
		return nil, false, false
	})
	k := newTestConsumer(t, dialFake(t, b, quick(time.Millisecond)), ConsumerOptions{CreditCount: 10, MaxProcessing: forever})
	go func() { _ = k.Run(context.Background(), func(context.Context, *Message) error { return nil }) }()
	eventually(t, b, "many ACKs were refused", func() bool { return refused > 500 })
	b.inspect(func() {
		if n := topic.partitions[0].next["billing"]; n > 40 {
			t.Errorf("%d messages were taken with a window of 10", n)
		}
		readOnly = false
	})
	eventually(t, b, "everything is acknowledged", func() bool {
		distinct := map[uint64]bool{}
		for _, a := range b.acks {
			distinct[a.Sequence] = true
		}
		return len(distinct) == 200
	})
}

func TestConsumer_SteadyStateDoesNotAllocatePerMessage(t *testing.T) {
	c, err := Dial(testContext(t), startSink(t))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	k, err := c.NewConsumer(testContext(t), "orders", "billing", ConsumerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(testContext(t))
	const warm, measured = 5000, 20000
	n := 0
	var before, after runtime.MemStats
	err = k.Run(ctx, func(context.Context, *Message) error {
		switch n++; n {
		case warm:
			runtime.ReadMemStats(&before)
		case warm + measured:
			runtime.ReadMemStats(&after)
			cancel()
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if per := float64(after.Mallocs-before.Mallocs) / measured; per > 0.5 {
		t.Errorf("%.2f allocations per message, the broker's included", per)
	}
}

func TestConsumer_AckSyncReportsAFinishedDelivery(t *testing.T) {
	b := newFakeBroker(t)
	b.fill(b.addTopic("orders", 1), 1)
	k := newTestConsumer(t, dialFake(t, b), ConsumerOptions{})
	m := receive(t, k, 1)[0]
	b.hook(func(_ *fakeConn, op protocol.Op, _ []byte) ([]byte, bool, bool) {
		return protocol.AppendErr(nil, protocol.CodeUnknownDelivery, op, ""), op == protocol.OpAck, false
	})
	if err := m.AckSync(testContext(t)); !errors.Is(err, ErrUnknownDelivery) {
		t.Errorf("%v", err)
	}
}

func TestNewConsumer_ReportsRefusals(t *testing.T) {
	b := newFakeBroker(t)
	b.addTopic("orders", 1)
	c := dialFake(t, b)
	ctx := testContext(t)
	if _, err := c.NewConsumer(ctx, "missing", "billing", ConsumerOptions{}); !errors.Is(err, ErrUnknownTopic) {
		t.Errorf("unknown topic: %v", err)
	}
	if _, err := c.NewConsumer(ctx, "orders", "a group", ConsumerOptions{}); err == nil {
		t.Error("a bad group name was accepted")
	}
	if _, err := c.NewConsumer(ctx, "orders", "billing", ConsumerOptions{CreditCount: 70000, Lease: 1, Concurrency: -1}); err == nil {
		t.Error("bad options were accepted")
	}
	b.hook(func(_ *fakeConn, op protocol.Op, _ []byte) ([]byte, bool, bool) {
		return protocol.AppendErr(nil, protocol.CodeGroupMemberLimit, op, ""), op == protocol.OpSub, false
	})
	if _, err := c.NewConsumer(ctx, "orders", "billing", ConsumerOptions{}); !errors.Is(err, ErrGroupMemberLimit) {
		t.Errorf("too many members: %v", err)
	}
}

func TestConsumer_EndsWhenItsTopicIsDeleted(t *testing.T) {
	b := newFakeBroker(t)
	b.addTopic("orders", 1)
	c := dialFake(t, b)
	k := newTestConsumer(t, c, ConsumerOptions{})
	if err := c.DeleteTopic(testContext(t), "orders"); err != nil {
		t.Fatal(err)
	}
	b.dropConnections()
	if err := k.Run(testContext(t), func(context.Context, *Message) error { return nil }); !errors.Is(err, ErrUnknownTopic) {
		t.Errorf("Run: %v", err)
	}
}

// Whoever gives up waiting is told why there was nothing to wait for.
func TestNewConsumer_SaysWhyItWaited(t *testing.T) {
	b := newFakeBroker(t)
	b.addTopic("orders", 1)
	c := dialFake(t, b)
	refused := make(chan struct{}, 100)
	b.hook(func(_ *fakeConn, op protocol.Op, _ []byte) ([]byte, bool, bool) {
		if op != protocol.OpSub {
			return nil, false, false
		}
		refused <- struct{}{}
		return protocol.AppendErr(nil, protocol.CodeQuotaExceeded, protocol.OpSub, "all ids are used"), true, false
	})
	ctx, cancel := context.WithCancel(testContext(t))
	go func() {
		for range 2 { // with the second SUB the first refusal has arrived
			<-refused
		}
		cancel()
	}()
	if _, err := c.NewConsumer(ctx, "orders", "billing", ConsumerOptions{}); !errors.Is(err, context.Canceled) || !errors.Is(err, protocol.CodeQuotaExceeded) {
		t.Errorf("%v, want 0x4002", err)
	}
}

func TestConsumer_SurvivesCutsAtRandomTimes(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 2)
	b.fill(topic, 3000)
	k := newTestConsumer(t, dialFake(t, b), ConsumerOptions{Concurrency: 2})
	var mu sync.Mutex
	last := map[uint16]uint64{}
	ctx, cancel := context.WithCancel(testContext(t))
	ran := make(chan error)
	go func() {
		ran <- k.Run(ctx, func(_ context.Context, m *Message) error {
			mu.Lock()
			defer mu.Unlock()
			if m.Sequence <= last[m.Partition] { // the fake never redelivers
				t.Errorf("partition %d: %d after %d", m.Partition, m.Sequence, last[m.Partition])
			}
			last[m.Partition] = m.Sequence
			return nil
		})
	}()
	for range 20 {
		time.Sleep(2 * time.Millisecond)
		b.dropConnections()
	}
	eventually(t, b, "everything is delivered", func() bool {
		return topic.partitions[0].next["billing"] == 3000 && topic.partitions[1].next["billing"] == 3000
	})
	cancel()
	if err := <-ran; err != nil {
		t.Error(err)
	}
}

func TestConsumer_CumulativeAcksNeverCoverAMessageThatFailed(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 1)
	const total = 300
	b.fill(topic, total)
	k := newTestConsumer(t, dialFake(t, b), ConsumerOptions{CumulativeAcks: true})
	failed := false
	goOn := make(chan struct{})
	go func() {
		_ = k.Run(context.Background(), func(_ context.Context, m *Message) error {
			if m.Sequence == 100 && !failed {
				failed = true
				return errors.New("not now")
			}
			if m.Sequence == total {
				<-goOn
			}
			return nil
		})
	}()
	eventually(t, b, "the message was refused", func() bool { return len(b.nacks) == 1 })
	b.inspect(func() {
		for _, a := range b.acks {
			if a.Flags != 0 && a.Sequence >= 100 {
				t.Errorf("ACK up to %d covers what failed", a.Sequence)
			}
		}
		c := b.groups["billing"].conn
		c.push(c.message(&topic.partitions[0].log[99], 0, 100, 2).AppendFrame(nil))
	})
	close(goOn)
	acknowledged := func() int {
		n, upTo := map[uint64]bool{}, uint64(0)
		for _, a := range b.acks {
			if a.Flags == protocol.AckFlagCumulative {
				upTo = max(upTo, a.Sequence)
			}
			n[a.Sequence] = true
		}
		if upTo >= 100 && !n[100] {
			t.Fatal("100 was acknowledged along with others")
		}
		for i := range upTo {
			n[i+1] = true
		}
		return len(n)
	}
	eventually(t, b, "all are acknowledged", func() bool { return acknowledged() == total })
	b.inspect(func() {
		if len(b.acks) >= total-50 {
			t.Errorf("%d ACKs for %d messages", len(b.acks), total)
		}
	})
}
