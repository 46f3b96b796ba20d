package delivery

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

func broadcast(s *protocol.Sub) { s.Flags |= protocol.SubFlagBroadcast }

// Each member of a broadcast group has a position of its own, which outlives the broker; what one gives up is its own affair.
func TestBroadcast_PositionsBelongToTheMembersAndSurviveAKill(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	d := start(t, dir)
	topic := declare(t, d, "t", 1)
	one, two := join(t, d, "g", topic, "", broadcast), join(t, d, "g", topic, "", broadcast)
	publish(t, d, topic, "1", "2", "3", "4", "5", "6")
	for seq := uint64(1); seq <= 6; seq++ {
		one.mustAck(one.want(seq, 1))
		msg := two.want(seq, 1)
		switch {
		case seq <= 3:
			two.mustAck(msg)
		case seq == 4:
			if err := two.nack(&msg, protocol.NackRetryNow); err != nil {
				t.Fatal(err)
			}
		}
	}
	two.silent(100 * time.Millisecond) // 4 is not tried again
	eventually(t, d, "t", "g", "all is answered", func(g harness.GroupSums) bool {
		return g.Published == 12 && g.Acknowledged == 9 && g.Dropped == 1 && g.DLQ == 0 && g.InFlight == 2
	})
	shared := protocol.Sub{Group: []byte("g"), TopicID: topic, Partition: protocol.AnyPartition}
	if _, err := dial(t, d).Subscribe(&shared); !errors.Is(err, protocol.CodeGroupExistsMismatch) {
		t.Fatalf("a SUB without BROADCAST: %v", err)
	}
	d.Kill()
	<-d.Exited()
	d = start(t, dir)
	before := [2]uint64{one.sub.MemberID, two.sub.MemberID}
	one, two = join(t, d, "g", topic, "", broadcast, one.rejoin), join(t, d, "g", topic, "", broadcast, two.rejoin)
	if before != [2]uint64{one.sub.MemberID, two.sub.MemberID} {
		t.Log("the machine is so slow that the sessions are over: the members are new ones, with new positions")
		return
	}
	publish(t, d, topic, "7")
	one.mustAck(one.want(7, 1))
	for seq := uint64(5); seq <= 7; seq++ {
		two.mustAck(two.want(seq, 1))
	}
	one.leave()
	eventually(t, d, "t", "g", "its position went with the first member", func(g harness.GroupSums) bool {
		return g.Published == 7 && g.Acknowledged == 6 && g.Dropped == 1
	})
	late := join(t, d, "g", topic, "", broadcast, func(s *protocol.Sub) { s.StartPolicy = protocol.StartLatest })
	publish(t, d, topic, "8")
	late.mustAck(late.want(8, 1))
	two.mustAck(two.want(8, 1))
}

// The same with the client library, whose members come back by themselves.
func TestBroadcast_ClientsHearEverythingThoughTheBrokerDies(t *testing.T) {
	t.Parallel()
	const partitions, half = 4, 200
	dir := t.TempDir()
	d := start(t, dir)
	declare(t, d, "t", partitions)
	c, err := client.Dial(t.Context(), d.ClientAddr, client.WithBackoff(10*time.Millisecond, 100*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var mu sync.Mutex
	heard := [2]map[string]bool{{}, {}}
	for i := range heard {
		k, err := c.NewConsumer(t.Context(), "t", "g", client.ConsumerOptions{Broadcast: true})
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			_ = k.Run(context.Background(), func(_ context.Context, m *client.Message) error {
				mu.Lock()
				defer mu.Unlock()
				heard[i][string(m.Value)] = true
				return nil
			})
		}()
	}
	p, err := c.NewProducer(t.Context(), "t", client.ProducerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	hear := func(n int) {
		t.Helper()
		for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			mu.Lock()
			a, b := len(heard[0]), len(heard[1])
			mu.Unlock()
			if a == n && b == n {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("%d and %d messages were heard, want %d", a, b, n)
			}
		}
	}
	send := func(from int) {
		t.Helper()
		for i := range half {
			if _, err := p.Send(t.Context(), client.Record{Key: fmt.Append(nil, i), Value: fmt.Append(nil, from+i)}); err != nil {
				t.Fatal(err)
			}
		}
	}
	send(0)
	hear(half)
	d.Kill()
	<-d.Exited()
	d, err = harness.Start(t.Context(), harness.Options{Binary: mortard, DataDir: dir, Config: map[string]any{"listen_client": d.ClientAddr}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.EndScenario(t) })
	send(half)
	hear(2 * half)
}
