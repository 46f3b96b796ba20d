package client

import (
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

func TestConsumer_PullReceivesEverythingInOrder(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 2)
	b.fill(topic, 500)
	topic.partitions[1].log = append(topic.partitions[1].log, protocol.Pub{Value: make([]byte, 3<<20)})
	k := newTestConsumer(t, dialFake(t, b, quick(5*time.Millisecond)), ConsumerOptions{Pull: true, CreditCount: 20, MaxProcessing: forever})
	next := map[uint16]uint64{}
	for range 1001 {
		m := receive(t, k, 1)[0]
		if next[m.Partition]++; m.Sequence != next[m.Partition] {
			t.Fatalf("partition %d: sequence %d, want %d", m.Partition, m.Sequence, next[m.Partition])
		}
		if err := m.Ack(); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, b, "all are acknowledged", func() bool { return len(b.acks) == 1001 })
	b.inspect(func() {
		if b.subs[0].Flags&protocol.SubFlagStream != 0 {
			t.Error("SUB asks for STREAM")
		}
	})
	b.dropConnections()
	eventually(t, b, "it has rejoined", func() bool { return len(b.subs) == 2 && b.groups["billing"].conn != nil })
	b.fill(topic, 1)
	for _, m := range receive(t, k, 2) {
		if err := m.AckSync(testContext(t)); err != nil {
			t.Error(err)
		}
	}
}

func TestConsumer_PullsOneAtATimeAndOnlyWithCredit(t *testing.T) {
	b := newFakeBroker(t)
	b.fill(b.addTopic("orders", 1), 100)
	pulls := 0
	b.hook(func(c *fakeConn, op protocol.Op, payload []byte) ([]byte, bool, bool) {
		if op != protocol.OpPull {
			return nil, false, false
		}
		pulls++
		var m protocol.Pull
		if err := m.Decode(payload); err != nil {
			t.Error(err)
		}
		if c.sub.count <= 0 || int(m.MaxMsgs) > c.sub.count || m.MemberID != c.sub.group.member {
			t.Errorf("%+v with a credit of %d", m, c.sub.count)
		}
		if c.pullWaits > 0 {
			t.Error("a PULL behind a waiting one")
		}
		return nil, false, false
	})
	k := newTestConsumer(t, dialFake(t, b), ConsumerOptions{Pull: true, CreditCount: 10})
	for range 10 {
		for _, m := range receive(t, k, 10) {
			if err := m.Ack(); err != nil {
				t.Fatal(err)
			}
		}
	}
	b.inspect(func() {
		if pulls == 0 {
			t.Error("no PULL was sent")
		}
	})
}
