package client

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/mortarmq/mortarmq/protocol"
)

// fillKeys stores n messages of each of the keys in partition 0, the keys in turn; the values count up per key.
func fillKeys(b *fakeBroker, topic *fakeTopic, keys []string, n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := topic.partitions[0]
	for i := range n {
		for _, key := range keys {
			p.log = append(p.log, protocol.Pub{TopicID: topic.id, Key: []byte(key), Value: fmt.Appendf(nil, "%d", i)})
		}
	}
}

func keys(n int) []string {
	list := make([]string, n)
	for i := range list {
		list[i] = fmt.Sprintf("key-%d", i)
	}
	return list
}

func TestParallelKeys_HandlersWorkOnOnePartitionAtTheSameTime(t *testing.T) {
	b := newFakeBroker(t)
	fillKeys(b, b.addTopic("orders", 1), keys(200), 1)
	k := newTestConsumer(t, dialFake(t, b), ConsumerOptions{Concurrency: 4, ParallelKeys: true})
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	var together sync.WaitGroup
	together.Add(4)
	arrived := make(chan struct{}, 4)
	err := k.Run(ctx, func(ctx context.Context, _ *Message) error {
		select {
		case arrived <- struct{}{}: // one of the first four: nobody goes on before all four are here
			together.Done()
			together.Wait()
		default:
			cancel()
		}
		return nil
	})
	if err != nil || len(arrived) < 4 {
		t.Errorf("%d handlers were at work together: %v", len(arrived), err)
	}
}

func TestParallelKeys_KeepTheOrderOfEachKeyAcrossLostConnections(t *testing.T) {
	const perKey = 60
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 1)
	fillKeys(b, topic, append(keys(40), ""), perKey)
	k := newTestConsumer(t, dialFake(t, b), ConsumerOptions{Concurrency: 8, ParallelKeys: true})
	var mu sync.Mutex
	atWork := map[string]bool{}
	last := map[string]uint64{}
	handled := 0
	ctx, cancel := context.WithCancel(testContext(t))
	ran := make(chan error, 1)
	work := func(_ context.Context, m *Message) error {
		key := string(m.Key)
		mu.Lock()
		if key != "" {
			if atWork[key] {
				t.Errorf("two handlers are at work on %s", key)
			}
			atWork[key] = true
			if m.Sequence <= last[key] {
				t.Errorf("%s: sequence %d after %d", key, m.Sequence, last[key])
			}
			last[key] = m.Sequence
		}
		handled++
		n := handled
		mu.Unlock()
		if n%500 == 0 {
			b.dropConnections() // the fake broker goes on behind what it has sent
		}
		mu.Lock()
		atWork[key] = false
		mu.Unlock()
		return nil
	}
	go func() { ran <- k.Run(ctx, work) }()
	eventually(t, b, "everything was sent", func() bool { return topic.partitions[0].next["billing"] == 41*perKey })
	cancel()
	if err := <-ran; err != nil {
		t.Error(err)
	}
}

func TestParallelKeys_RevokeWaitsForEveryHandler(t *testing.T) {
	b := newFakeBroker(t)
	fillKeys(b, b.addTopic("orders", 1), keys(100), 1)
	k := newTestConsumer(t, dialFake(t, b), ConsumerOptions{Concurrency: 3, ParallelKeys: true})
	goOn, begun := make(chan struct{}), make(chan struct{}, 100)
	ctx, cancel := context.WithCancel(testContext(t))
	ran := make(chan error, 1)
	go func() {
		ran <- k.Run(ctx, func(context.Context, *Message) error {
			begun <- struct{}{}
			<-goOn
			return nil
		})
	}()
	for range 3 {
		<-begun
	}
	b.inspect(func() {
		n := b.groups["billing"].conn.notice(protocol.NoticeRevoke, 0)
		b.groups["billing"].conn.push(n.AppendFrame(nil))
	})
	eventually(t, b, "the REVOKE has arrived", func() bool { return len(k.Partitions()) == 0 })
	b.inspect(func() {
		if len(b.control) != 1 {
			t.Errorf("the REVOKE was confirmed while handlers were at work: %+v", b.control)
		}
	})
	close(goOn)
	eventually(t, b, "the REVOKE is confirmed", func() bool { return len(b.control) == 2 })
	cancel()
	if err := <-ran; err != nil {
		t.Error(err)
	}
	b.inspect(func() {
		if len(b.acks) != 3 || len(begun) != 0 {
			t.Errorf("%d messages were acknowledged and %d begun after the REVOKE, want 3 and 0", len(b.acks), len(begun))
		}
	})
}

func TestParallelKeys_ExcludeCumulativeAcks(t *testing.T) {
	b := newFakeBroker(t)
	b.addTopic("orders", 1)
	_, err := dialFake(t, b).NewConsumer(testContext(t), "orders", "billing", ConsumerOptions{ParallelKeys: true, CumulativeAcks: true})
	if err == nil || !strings.Contains(err.Error(), "exclude") || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}
