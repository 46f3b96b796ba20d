package cluster

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

// mortard is the binary, built once.
var mortard string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "mortarmq-cluster-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		if raceEnabled {
			// A broker that finds a race ends at once, so that it is noticed although some brokers here end by a kill.
			os.Setenv("GORACE", "halt_on_error=1 atexit_sleep_ms=0")
		}
		if mortard, err = harness.BuildMortard(dir, raceEnabled); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	}())
}

// small keeps three brokers from filling a small machine.
var small = map[string]any{"journal_file_bytes": 4 << 20}

// with returns small with further settings.
func with(more map[string]any) map[string]any {
	config := map[string]any{}
	for _, m := range []map[string]any{small, more} {
		for k, v := range m {
			config[k] = v
		}
	}
	return config
}

// rig is a running cluster with what tests ask of it.
type rig struct {
	*harness.Cluster
	t *testing.T
}

func start(t *testing.T, o harness.ClusterOptions) *rig {
	t.Helper()
	o.Binary, o.Dir = mortard, t.TempDir()
	c, err := harness.NewCluster(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.EndScenario(t) })
	r := &rig{c, t}
	r.do("start", c.Start)
	return r
}

// do fails the test where f does not succeed in time.
func (r *rig) do(what string, f func(ctx context.Context) error) {
	r.t.Helper()
	if err := bounded(r.t.Context(), f); err != nil {
		r.t.Fatalf("%s: %v", what, err)
	}
}

// leader returns who leads, among these nodes or all.
func (r *rig) leader(nodes ...int) (id int) {
	r.t.Helper()
	r.do("leader", func(ctx context.Context) (err error) {
		id, err = r.Leader(ctx, nodes...)
		return err
	})
	return id
}

// others returns the nodes that are not this one.
func others(node int) []int {
	return []int{(node + 1) % harness.ClusterSize, (node + 2) % harness.ClusterSize}
}

func (r *rig) await(i int, what string, wanted func(ok bool, state string) bool) {
	r.t.Helper()
	r.do(fmt.Sprintf("node %d", i), func(ctx context.Context) error { return r.Await(ctx, i, what, wanted) })
}

func (r *rig) launch(i int) {
	r.t.Helper()
	if err := r.Launch(i); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) healthy(nodes ...int) {
	r.t.Helper()
	r.do("healthy", func(ctx context.Context) error { return r.AwaitHealthy(ctx, nodes...) })
}

func (r *rig) stop(i int) {
	r.t.Helper()
	if err := r.Node(i).Stop(harness.DefaultStopTimeout); err != nil {
		r.t.Fatal(err)
	}
}

// client returns a client of all nodes.
func (r *rig) client() *client.Client {
	r.t.Helper()
	var c *client.Client
	r.do("connect", func(ctx context.Context) (err error) {
		c, err = client.Dial(ctx, r.Addrs(), client.WithBackoff(100*time.Millisecond, time.Second))
		return err
	})
	r.t.Cleanup(func() { c.Close() })
	return c
}

// declare creates a topic of one partition and returns its id.
func (r *rig) declare(c *client.Client, topic string) uint16 {
	r.t.Helper()
	var id uint16
	r.do("declare", func(ctx context.Context) error {
		t, err := c.Declare(ctx, topic, client.DeclareOptions{Partitions: 1})
		id = t.ID
		return err
	})
	return id
}

// publish has n messages of so many bytes acknowledged.
func (r *rig) publish(c *client.Client, topic, prefix string, n, bytes int) {
	r.t.Helper()
	r.do("publish", func(ctx context.Context) error {
		p, err := c.NewProducer(ctx, topic, client.ProducerOptions{})
		if err != nil {
			return err
		}
		futures := make([]*client.Future, n)
		random := rand.NewChaCha8([32]byte{1})
		for i := range futures {
			value := make([]byte, bytes)
			_, _ = random.Read(value) // what doesn't compress; never fails
			copy(value, fmt.Sprintf("%s-%d", prefix, i))
			futures[i] = p.SendAsync(ctx, client.Record{Value: value})
		}
		for _, f := range futures {
			if _, err := f.Wait(ctx); err != nil {
				return err
			}
		}
		return p.Close(ctx)
	})
}

// conn returns a raw connection to a node.
func (r *rig) conn(i int) *harness.Conn {
	r.t.Helper()
	c, err := harness.Dial(r.ClientAddr(i), "")
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	return c
}

// answer publishes on a raw connection and returns the code of the answer, 0 for OK.
func answer(c *harness.Conn, topic uint16, value string) (protocol.ErrorCode, error) {
	_, err := c.Publish(&protocol.Pub{TopicID: topic, Value: []byte(value)})
	if code, ok := protocol.CodeOf(err); ok {
		return code, nil
	}
	return 0, err
}

// number is the value of a line of /metrics.
func number(t *testing.T, line string) float64 {
	t.Helper()
	fields := strings.Fields(line)
	n, err := strconv.ParseFloat(fields[len(fields)-1], 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
