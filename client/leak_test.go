package client_test

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness/fakebroker"
)

// requireNoMoreGoroutines waits until there are no more goroutines than before.
func requireNoMoreGoroutines(t *testing.T, before int) {
	t.Helper()
	for ctx := testContext(t); runtime.NumGoroutine() > before; time.Sleep(time.Millisecond) {
		if ctx.Err() != nil {
			stacks := make([]byte, 1<<20)
			t.Fatalf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, stacks[:runtime.Stack(stacks, true)])
		}
	}
}

// Whatever becomes of producers and consumers: when the Client is closed nothing of it is left.
func TestClient_LeavesNoGoroutineBehind(t *testing.T) {
	for name, use := range map[string]func(t *testing.T, cluster *fakebroker.Cluster, c *client.Client){
		"an orderly end": func(t *testing.T, _ *fakebroker.Cluster, c *client.Client) {
			p, k := produce(t, c), consume(t, c)
			publish(t, p, 100, nil)
			running, stop := context.WithCancel(testContext(t))
			if err := k.Run(running, func(context.Context, *client.Message) error { stop(); return nil }); err != nil {
				t.Error(err)
			}
			if err := k.Close(testContext(t)); err != nil {
				t.Error(err)
			}
			if err := p.Close(testContext(t)); err != nil {
				t.Error(err)
			}
		},
		"only the Client is closed": func(t *testing.T, _ *fakebroker.Cluster, c *client.Client) {
			publish(t, produce(t, c), 100, nil)
			<-consume(t, c).Messages()
		},
		"while it looks for a leader": func(t *testing.T, cluster *fakebroker.Cluster, c *client.Client) {
			p, k := produce(t, c), consume(t, c)
			cluster.Lead(-1)
			_ = p.SendAsync(testContext(t), client.Record{Value: []byte("v")})
			_ = k.Messages()
		},
		"while it asks whether another node leads": func(t *testing.T, cluster *fakebroker.Cluster, c *client.Client) {
			p := produce(t, c)
			cluster.CutOff(0, true)
			cluster.Lead(-1)
			_ = p.SendAsync(testContext(t), client.Record{Value: []byte("v")})
		},
		"the broker is gone": func(t *testing.T, cluster *fakebroker.Cluster, c *client.Client) {
			p, _ := produce(t, c), consume(t, c)
			cluster.Crash()
			_ = p.SendAsync(testContext(t), client.Record{Value: []byte("v")})
		},
		"the token is refused": func(t *testing.T, cluster *fakebroker.Cluster, c *client.Client) {
			p, k := produce(t, c), consume(t, c)
			for i := range 3 {
				cluster.RequireToken(i, "changed")
			}
			cluster.Kill(0)
			if _, err := p.Send(testContext(t), client.Record{Value: []byte("v")}); err == nil {
				t.Error("a message was stored without a token")
			}
			for range k.Messages() {
			}
		},
		"joining is refused": func(t *testing.T, _ *fakebroker.Cluster, c *client.Client) {
			consume(t, c)
			if _, err := c.NewConsumer(testContext(t), "orders", "billing", client.ConsumerOptions{}); err == nil {
				t.Error("the fake broker took a second member")
			}
			if _, err := c.NewConsumer(testContext(t), "missing", "billing", client.ConsumerOptions{}); err == nil {
				t.Error("a topic that is missing was consumed")
			}
			if _, err := c.NewProducer(testContext(t), "missing", client.ProducerOptions{}); err == nil {
				t.Error("a topic that is missing was published to")
			}
		},
		"joining is given up": func(t *testing.T, cluster *fakebroker.Cluster, c *client.Client) {
			if _, err := c.Lookup(testContext(t), "orders"); err != nil {
				t.Fatal(err)
			}
			cluster.CutOff(0, true) // looks up, but takes no members
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
			defer cancel()
			if _, err := c.NewConsumer(ctx, "orders", "billing", client.ConsumerOptions{}); err == nil {
				t.Error("a leader without quorum took a member")
			}
		},
		"a topic comes and goes": func(t *testing.T, _ *fakebroker.Cluster, c *client.Client) {
			if _, err := c.Declare(testContext(t), "other", client.DeclareOptions{Partitions: 1, Settings: []byte(`{}`)}); err != nil {
				t.Error(err)
			}
			if _, err := c.Lookup(testContext(t), "nothing"); protocol.CodeUnknownTopic != mustCode(err) {
				t.Error(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			cluster := startCluster(t)
			before := runtime.NumGoroutine()
			c, err := client.Dial(testContext(t), cluster.Addr(0)+","+cluster.Addr(1), client.WithBackoff(time.Millisecond, 10*time.Millisecond))
			if err != nil {
				t.Fatal(err)
			}
			use(t, cluster, c)
			if err := c.Close(); err != nil {
				t.Error(err)
			}
			requireNoMoreGoroutines(t, before)
		})
	}
}

func mustCode(err error) protocol.ErrorCode {
	code, _ := protocol.CodeOf(err)
	return code
}

func consume(t *testing.T, c *client.Client) *client.Consumer {
	t.Helper()
	k, err := c.NewConsumer(testContext(t), "orders", "billing", client.ConsumerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = k.Close(testContext(t)) })
	return k
}
