package client_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/tests/harness/fakebroker"
)

func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// startCluster starts three nodes, the first of which leads, with a topic "orders" of two partitions.
func startCluster(t *testing.T) *fakebroker.Cluster {
	t.Helper()
	cluster, err := fakebroker.NewCluster(3)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cluster.Close)
	c := dial(t, cluster.Addr(0))
	if _, err := c.Declare(testContext(t), "orders", client.DeclareOptions{Partitions: 2}); err != nil {
		t.Fatal(err)
	}
	return cluster
}

func dial(t *testing.T, addr string, opts ...client.Option) *client.Client {
	t.Helper()
	opts = append([]client.Option{client.WithBackoff(time.Millisecond, 10*time.Millisecond)}, opts...)
	c, err := client.Dial(testContext(t), addr, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func produce(t *testing.T, c *client.Client) *client.Producer {
	t.Helper()
	p, err := c.NewProducer(testContext(t), "orders", client.ProducerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close(testContext(t)) })
	return p
}

// publish sends a message with each of the values to partition 0, in one pipeline, and calls at before each hundredth.
func publish(t *testing.T, p *client.Producer, count int, at func(i int)) {
	t.Helper()
	ctx := testContext(t)
	var futures []*client.Future
	for i := range count {
		if i%100 == 0 && at != nil {
			at(i / 100)
		}
		futures = append(futures, p.SendAsync(ctx, client.Record{Key: []byte("b"), Value: fmt.Appendf(nil, "%d", i)}))
	}
	for i, f := range futures {
		if _, err := f.Wait(ctx); err != nil {
			t.Fatalf("message %d: %v", i, err)
		}
	}
}

// requireStoredOnce checks that a partition holds 0 .. count-1, in this order.
func requireStoredOnce(t *testing.T, cluster *fakebroker.Cluster, partition uint16, count int) {
	t.Helper()
	stored := cluster.Stored(1, partition)
	for i, m := range stored {
		if string(m.Value) != fmt.Sprint(i) {
			t.Fatalf("message %d is %s", i, m.Value)
		}
	}
	if len(stored) != count {
		t.Fatalf("%d messages are stored, %d were sent", len(stored), count)
	}
}

// until waits until cond is true.
func until(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for ctx := testContext(t); !cond(); time.Sleep(time.Millisecond) {
		if ctx.Err() != nil {
			t.Fatalf("it never came true that %s", what)
		}
	}
}

func TestCluster_APipelineIsStoredOnceAndInOrderWhileTheLeaderMoves(t *testing.T) {
	for _, tt := range []struct {
		name string
		move func(c *fakebroker.Cluster, i int)
	}{
		{"stepping down", func(c *fakebroker.Cluster, i int) { c.Lead(i % 3) }},
		{"killed", func(c *fakebroker.Cluster, i int) {
			_ = c.Revive((i + 1) % 3)
			c.Kill(i % 3)
			c.Lead((i + 1) % 3)
		}},
		{"an interregnum", func(c *fakebroker.Cluster, i int) {
			c.Lead(-1)
			time.AfterFunc(5*time.Millisecond, func() { c.Lead(i % 3) })
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cluster := startCluster(t)
			p := produce(t, dial(t, cluster.Addrs()))
			publish(t, p, 2500, func(i int) { tt.move(cluster, i) })
			part := p.Topic().Partitions - 1
			if len(cluster.Stored(1, 0)) > 0 {
				part = 0
			}
			requireStoredOnce(t, cluster, part, 2500)
		})
	}
}

func TestCluster_AnyNodeIsGoodEnoughToBeginWith(t *testing.T) {
	cluster := startCluster(t)
	cluster.Kill(2)
	for _, addr := range []string{cluster.Addr(1), cluster.Addr(2) + "," + cluster.Addr(1), cluster.Addr(0) + " , " + cluster.Addr(2)} {
		c := dial(t, addr)
		if topic, err := c.Declare(testContext(t), "orders", client.DeclareOptions{Partitions: 2}); err != nil || topic.Created {
			t.Errorf("with %s: %+v, %v", addr, topic, err)
		}
		if _, err := produce(t, c).Send(testContext(t), client.Record{Value: []byte("v")}); err != nil {
			t.Errorf("with %s: %v", addr, err)
		}
	}
}

func TestCluster_AProducerThatKnowsOneNodeOutlivesIt(t *testing.T) {
	cluster := startCluster(t)
	p := produce(t, dial(t, cluster.Addr(1)))
	if _, err := p.Send(testContext(t), client.Record{Value: []byte("v")}); err != nil {
		t.Fatal(err)
	}
	cluster.Kill(1)
	cluster.Kill(0)
	if err := cluster.Revive(0); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Send(testContext(t), client.Record{Value: []byte("v")}); err != nil {
		t.Error(err)
	}
}

func TestCluster_AConsumerGoesOnAtItsFloorsWithItsPartitions(t *testing.T) {
	cluster := startCluster(t)
	c := dial(t, cluster.Addrs())
	p := produce(t, c)
	var assigned, revoked atomic.Int32
	k, err := c.NewConsumer(testContext(t), "orders", "billing", client.ConsumerOptions{
		OnAssign: func(uint16) { assigned.Add(1) },
		OnRevoke: func(uint16, bool) { revoked.Add(1) },
	})
	if err != nil {
		t.Fatal(err)
	}
	acknowledged := map[string]bool{}
	take := func(n int) {
		t.Helper()
		for range n {
			select {
			case m := <-k.Messages():
				name := fmt.Sprintf("%d/%d", m.Partition, m.Sequence)
				if acknowledged[name] {
					t.Fatalf("%s came again after its ACK was answered", name)
				}
				switch err := m.AckSync(testContext(t)); {
				case err == nil:
					acknowledged[name] = true
				case !errors.Is(err, client.ErrConnectionLost) && !errors.Is(err, client.ErrDeliveryEnded):
					t.Fatal(err)
				}
			case <-testContext(t).Done():
				t.Fatal("no message came")
			}
		}
	}
	for round := range 6 {
		for i := range 40 {
			if _, err := p.Send(testContext(t), client.Record{Value: fmt.Appendf(nil, "%d", i)}); err != nil {
				t.Fatal(err)
			}
		}
		take(20)
		if round%2 == 1 {
			cluster.Kill(round % 3)
		}
		cluster.Lead((round + 1) % 3)
		if round%2 == 1 {
			if err := cluster.Revive(round % 3); err != nil {
				t.Fatal(err)
			}
		}
	}
	for cluster.Unacknowledged("billing", 0)+cluster.Unacknowledged("billing", 1) > 0 {
		take(1)
	}
	if assigned.Load() != 2 || revoked.Load() != 0 {
		t.Errorf("OnAssign was called %d times for 2 partitions, OnRevoke %d times", assigned.Load(), revoked.Load())
	}
	if err := k.Close(testContext(t)); err != nil {
		t.Error(err)
	}
}

// Nodes that name each other, or themselves, are asked a bounded number of times before a pause.
func TestCluster_ALoopOfHintsIsBounded(t *testing.T) {
	cluster := startCluster(t)
	c := dial(t, cluster.Addr(0)+","+cluster.Addr(1), client.WithBackoff(50*time.Millisecond, time.Hour))
	cluster.Lead(-1)
	cluster.Hint(0, "leader=1 "+cluster.Addr(1))
	cluster.Hint(1, "leader=0 "+cluster.Addr(0))
	cluster.Hint(2, "leader=2 "+cluster.Addr(2))
	before := cluster.Connects(0) + cluster.Connects(1)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	began := time.Now()
	_, err := c.Lookup(ctx, "orders")
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "STALE_LEADER_EPOCH") {
		t.Errorf("the error does not tell that nobody led: %v", err)
	}
	// 50, eleven times 100, 200, 400, 800 and 1000 ms at least: fifteen rounds with each node once in the two seconds, and the
	// first connection, which was open already.
	rounds := 15 + int(time.Since(began)-2*time.Second)/int(time.Second)
	if n := cluster.Connects(0) + cluster.Connects(1) - before; n > 2*rounds {
		t.Errorf("%d connections in %d rounds of two nodes", n, rounds)
	}
	cluster.Lead(1)
	if _, err := c.Lookup(testContext(t), "orders"); err != nil {
		t.Errorf("with a leader again: %v", err)
	}
}

func TestCluster_AHintThatLeadsNowhereIsNamed(t *testing.T) {
	cluster := startCluster(t)
	c := dial(t, cluster.Addr(0))
	cluster.Kill(2)
	cluster.Lead(-1)
	cluster.Hint(0, "leader=2 "+cluster.Addr(2))
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if _, err := c.Lookup(ctx, "orders"); err == nil || !strings.Contains(err.Error(), cluster.Addr(2)) {
		t.Errorf("%v", err)
	}
}

// After the leader's death the others name it until they have elected.
func TestCluster_AStaleHintDoesNotHoldUpTheSearch(t *testing.T) {
	cluster := startCluster(t)
	p := produce(t, dial(t, cluster.Addrs()))
	cluster.Hint(1, "leader=0 "+cluster.Addr(0))
	cluster.Hint(2, "leader=0 "+cluster.Addr(0))
	cluster.Kill(0)
	future := p.SendAsync(testContext(t), client.Record{Key: []byte("b"), Value: []byte("0")})
	until(t, "the others were asked", func() bool { return cluster.Connects(1) > 0 && cluster.Connects(2) > 0 })
	cluster.Lead(2)
	if _, err := future.Wait(testContext(t)); err != nil {
		t.Error(err)
	}
}

func TestCluster_NonsenseInAHintIsNoLeader(t *testing.T) {
	for _, text := range []string{"", "leader=", "leader=1", "leader=none", "leader=1 nonsense", "leader=1 :7188", "leader=1 host:port", "leader=1 host:0"} {
		t.Run(text, func(t *testing.T) {
			cluster := startCluster(t)
			cluster.Hint(1, text)
			c := dial(t, cluster.Addr(1)+","+cluster.Addr(0))
			if _, err := c.Lookup(testContext(t), "orders"); err != nil {
				t.Error(err)
			}
		})
	}
}

// acknowledgeAll acknowledges what comes until nothing is left.
func acknowledgeAll(t *testing.T, cluster *fakebroker.Cluster, k *client.Consumer) {
	t.Helper()
	until(t, "everything is acknowledged at the new leader", func() bool {
		select {
		case m := <-k.Messages():
			_ = m.Ack()
		default:
		}
		return cluster.Unacknowledged("billing", 0)+cluster.Unacknowledged("billing", 1) == 0
	})
}

// A leader that is cut off from the others does not know that another one leads: its clients find out.
func TestCluster_ALeaderThatIsCutOffIsLeft(t *testing.T) {
	cluster := startCluster(t)
	c := dial(t, cluster.Addrs())
	p := produce(t, c)
	k, err := c.NewConsumer(testContext(t), "orders", "billing", client.ConsumerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = k.Close(testContext(t)) }()
	publish(t, p, 10, nil)
	inHand := <-k.Messages()
	cluster.CutOff(0, true)
	cluster.Lead(1)
	publish(t, p, 10, nil)
	_ = inHand.Ack()
	acknowledgeAll(t, cluster, k)
}

// A leader that says nothing any more, because its process or the network stands still, is left long before its connection
// counts as dead.
func TestCluster_ALeaderThatIsFrozenIsLeft(t *testing.T) {
	cluster := startCluster(t)
	c := dial(t, cluster.Addrs(), client.WithKeepalive(40*time.Second))
	p, k := produce(t, c), consume(t, c)
	publish(t, p, 10, nil)
	<-k.Messages()
	if _, err := c.Lookup(testContext(t), "orders"); err != nil { // over the connection that Lookup uses below
		t.Fatal(err)
	}
	t.Cleanup(cluster.Freeze(0))
	cluster.Lead(1)
	if _, err := c.Lookup(testContext(t), "orders"); err != nil {
		t.Error(err)
	}
	publish(t, p, 10, nil)
	acknowledgeAll(t, cluster, k)
}

// When the others are gone too there is nowhere to go: a consumer that left could not come back.
func TestCluster_ALeaderWithoutQuorumIsKeptWhileNobodyElseLeads(t *testing.T) {
	cluster := startCluster(t)
	p := produce(t, dial(t, cluster.Addrs()))
	publish(t, p, 1, nil)
	cluster.Kill(1)
	cluster.Lead(-1)
	cluster.CutOff(0, true)
	before, asked := cluster.Connects(0), cluster.Connects(2)
	future := p.SendAsync(testContext(t), client.Record{Key: []byte("b"), Value: []byte("1")})
	until(t, "another node was asked", func() bool { return cluster.Connects(2) > asked })
	cluster.Lead(0)
	cluster.CutOff(0, false)
	if _, err := future.Wait(testContext(t)); err != nil {
		t.Error(err)
	}
	if n := cluster.Connects(0) - before; n != 0 {
		t.Errorf("the leader was left and connected to %d times", n)
	}
}

func TestCluster_ANodeThatRefusesTheTokenIsPassedOver(t *testing.T) {
	cluster := startCluster(t)
	cluster.RequireToken(0, "other")
	cluster.RequireToken(1, "secret")
	cluster.Lead(1)
	c := dial(t, cluster.Addrs(), client.WithToken("secret"))
	p := produce(t, c)
	publish(t, p, 10, nil)

	for i := range 3 {
		cluster.RequireToken(i, "changed")
	}
	cluster.Kill(1)
	if _, err := p.Send(testContext(t), client.Record{Value: []byte("v")}); !errors.Is(err, client.ErrAuthFailed) {
		t.Errorf("no node takes the token: %v", err)
	}
	if _, err := client.Dial(testContext(t), cluster.Addrs(), client.WithToken("secret")); !errors.Is(err, client.ErrAuthFailed) {
		t.Errorf("Dial: %v", err)
	} else if strings.Contains(err.Error(), "\n") {
		t.Errorf("the error has several lines: %v", err)
	}
}

func TestCompleteAddr_AddsThePortWhereItIsMissing(t *testing.T) {
	for addr, want := range map[string]string{
		"localhost": "localhost:7188", "localhost:": "localhost:7188", "localhost:80": "localhost:80", "10.0.0.1": "10.0.0.1:7188",
		"::1": "[::1]:7188", "[::1]": "[::1]:7188", "[::1]:80": "[::1]:80", "broker.example.com": "broker.example.com:7188",
	} {
		if got, err := client.CompleteAddr(addr, client.DefaultPort); err != nil || got != want {
			t.Errorf("%s is %s, %v, want %s", addr, got, err, want)
		}
	}
	for _, addr := range []string{"localhost:http", "localhost:0", "localhost:70000", "localhost:-1", "http://localhost", "tcp://localhost:7188", "a:b:c"} {
		if got, err := client.CompleteAddr(addr, client.DefaultPort); err == nil || !strings.Contains(err.Error(), addr) {
			t.Errorf("%s is %s, %v", addr, got, err)
		}
	}
}
