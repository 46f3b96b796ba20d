package cluster

import (
	"bytes"
	"context"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

// quorumState returns the metric mortarmq_quorum_state, as text; empty where it is not to be had.
func quorumState(d *harness.Daemon) string {
	var b bytes.Buffer
	if d.Fetch("/metrics", &b) != nil {
		return ""
	}
	for line := range strings.Lines(b.String()) {
		if value, ok := strings.CutPrefix(line, "mortarmq_quorum_state "); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// alone kills the followers of a leader, which it returns.
func (r *rig) alone() int {
	r.t.Helper()
	for {
		leader := r.leader()
		for _, i := range others(leader) {
			r.Node(i).Kill()
		}
		alone := false
		r.await(leader, "a leader without a majority, or none", func(ok bool, state string) bool {
			alone = strings.Contains(state, "without a majority")
			return alone || !ok && !strings.HasPrefix(state, "leader")
		})
		if alone {
			return leader
		}
		for _, i := range others(leader) { // another one led by the time that it was killed
			r.launch(i)
		}
		r.healthy()
	}
}

func TestFollowersGone_WritesAreRefusedReadsGoOnAndOneIsEnoughToResume(t *testing.T) {
	r := start(t, harness.ClusterOptions{Config: with(map[string]any{
		"quorum_timeout_ms": 500, "follower_hard_gap_ms": 1500, "delivery_lease_ms": 120_000,
	})})
	// A consumer goes on while a window of ACKs has been refused, so it can read nearly two windows.
	const messages, window = 90, 64
	c := r.client()
	topic := r.declare(c, "t")
	r.publish(c, "t", "m", messages, 100)
	var k *client.Consumer
	r.do("join", func(ctx context.Context) (err error) {
		k, err = c.NewConsumer(ctx, "t", "g", client.ConsumerOptions{CreditCount: window, Concurrency: 1})
		return err
	})
	// The broker may send what the window allows; all the rest comes while nothing can be committed.
	first := receive(t, k)
	leader := r.alone()

	conn := r.conn(leader)
	for _, want := range []protocol.ErrorCode{protocol.CodeReadOnlyDegraded, protocol.CodeInSyncReplicasNotEnough} {
		r.await(leader, "refusing with "+want.Name(), func(ok bool, state string) bool {
			if ok {
				t.Fatalf("the leader is alone and says %s", state)
			}
			code, err := answer(conn, topic, "refused")
			if err != nil || code == 0 {
				t.Fatalf("a publish to a leader that is alone got %v, %v", code, err)
			}
			return code == want
		})
	}
	if state := quorumState(r.Node(leader)); state != "2" {
		t.Errorf("mortarmq_quorum_state is %q", state)
	}
	if err := first.Ack(); err != nil {
		t.Error(err)
	}
	for want := first.Sequence + 1; want <= messages; want++ {
		m := receive(t, k)
		if err := m.Ack(); err != nil || m.Sequence != want {
			t.Fatalf("sequence %d came in place of %d (%v)", m.Sequence, want, err)
		}
	}

	// One of them is a majority with the leader. (Which of the two leads then doesn't matter.)
	back := others(leader)[0]
	r.launch(back)
	r.leader(leader, back)
	r.publish(c, "t", "resumed", 10, 100)
	for range 10 {
		m := receive(t, k)
		if !strings.HasPrefix(string(m.Value), "resumed") {
			t.Errorf("sequence %d came with %.20q", m.Sequence, m.Value)
		}
		if err := m.Ack(); err != nil {
			t.Error(err)
		}
	}
	drained := nothingLeftOf(t.Context(), r.Cluster, "t", "g", leader, back)
	r.do("all acknowledged", func(ctx context.Context) error { return until(ctx, drained) })
	if state := quorumState(r.Node(r.leader(leader, back))); state == "2" {
		t.Errorf("mortarmq_quorum_state is still %s", state)
	}
	r.do("leave", k.Close)
}

// receive takes a message.
func receive(t *testing.T, k *client.Consumer) *client.Message {
	t.Helper()
	select {
	case m, ok := <-k.Messages():
		if !ok {
			t.Fatalf("the consumer ended: %v", k.Err())
		}
		return m
	case <-time.After(patience):
		t.Fatal("no message comes")
	}
	return nil
}

// until waits for a condition.
func until(ctx context.Context, done func() bool) error {
	for !done() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
	return nil
}

// The leader is stopped for longer than its lease: what it finds in its sockets when it goes on is not acknowledged.
func TestStoppedLeader_AcknowledgesNothingAndFollows(t *testing.T) {
	r := start(t, harness.ClusterOptions{Config: small})
	c := r.client()
	topic := r.declare(c, "t")
	r.publish(c, "t", "before", 50, 100)
	old := r.leader()
	conn := r.conn(old)
	if err := r.Node(old).Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	r.leader(others(old)...)
	const late = 20
	var frames []byte
	for range late {
		p := protocol.Pub{TopicID: topic, Value: []byte("late")}
		frames = p.AppendFrame(frames)
	}
	if err := conn.Send(frames); err != nil {
		t.Fatal(err)
	}
	r.publish(c, "t", "meanwhile", 50, 100)
	if err := r.Node(old).Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if err := conn.Net().SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	for range late {
		f, err := conn.Next()
		if err != nil {
			break // it closes connections as it steps down, which is no acknowledgement
		}
		if f.Err() == nil {
			t.Fatalf("the old leader has answered %v", f.Op)
		}
	}
	r.await(old, "following", harness.Follows)
	r.do("read", func(ctx context.Context) error {
		found, err := ReadAll(ctx, c, "t", 100)
		for at, value := range found {
			if value == "late" {
				t.Errorf("%v holds a message that the old leader never acknowledged", at)
			}
		}
		if len(found) != 100 {
			t.Errorf("%d messages are stored", len(found))
		}
		return err
	})
}

// defaultLease is that of brokers whose configuration has none.
const defaultLease = time.Second

// takeOver has leaders stop, one after the other, until node i leads.
func (r *rig) takeOver(i int) {
	r.t.Helper()
	for {
		leader := r.leader()
		if leader == i {
			return
		}
		// A node that has just started helps nobody to leadership before the lease has run out that it may have granted before,
		// and is itself the first afterwards.
		time.Sleep(defaultLease + 200*time.Millisecond)
		r.stop(leader)
		r.leader(others(leader)...)
		r.launch(leader)
		r.healthy()
	}
}

// A follower that was away while more was written than leaders keep in memory gets it in bulk, counts again, and can lead.
func TestFarBehind_CatchesUpInBulkAndCanLead(t *testing.T) {
	if testing.Short() {
		t.Skip("writes 96 MiB to three disks")
	}
	r := start(t, harness.ClusterOptions{Config: map[string]any{"journal_file_bytes": 16 << 20}})
	c := r.client()
	r.declare(c, "t")
	r.publish(c, "t", "before", 10, 100)
	away := others(r.leader())[0]
	r.stop(away)
	const messages, bytes = 1536, 64 << 10
	r.publish(c, "t", "missed", messages, bytes)
	r.launch(away)
	// It counts with what it has until it must give some of that up.
	r.do("a catch-up in bulk", func(ctx context.Context) error {
		return until(ctx, func() bool { return bulkBytes(t, r.Node(away)) > 1<<20 })
	})
	r.await(away, "following", harness.Follows)
	r.publish(c, "t", "after", 10, 100)
	r.takeOver(away)
	r.do("read", func(ctx context.Context) error {
		found, err := ReadAll(ctx, c, "t", messages+20)
		if len(found) != messages+20 {
			t.Errorf("%d messages are stored", len(found))
		}
		return err
	})
}

// bulkBytes returns what a node has received in catch-ups, 0 where it doesn't say.
func bulkBytes(t *testing.T, d *harness.Daemon) (n float64) {
	t.Helper()
	var b bytes.Buffer
	if d.Fetch("/metrics", &b) != nil {
		return 0
	}
	for line := range strings.Lines(b.String()) {
		if strings.HasPrefix(line, "mortarmq_peer_received_bytes_total{") && strings.Contains(line, `lane="bulk"`) {
			n += number(t, line)
		}
	}
	return n
}

// A node whose data is gone comes back under its old node_id as a learner, which counts for nothing until it has everything.
func TestWipedNode_LearnsAndThenCounts(t *testing.T) {
	r := start(t, harness.ClusterOptions{Config: small})
	c := r.client()
	r.declare(c, "t")
	r.publish(c, "t", "before", 400, 1000)
	leader := r.leader()
	wiped, other := others(leader)[0], others(leader)[1]
	r.Node(wiped).Kill()
	if err := os.RemoveAll(r.DataDir(wiped)); err != nil {
		t.Fatal(err)
	}
	r.launch(wiped)
	r.await(wiped, "following", func(ok bool, state string) bool {
		if ok && !harness.Follows(ok, state) && !harness.Leads(ok, state) {
			t.Errorf("a node without its data is healthy and says %s", state)
		}
		return harness.Follows(ok, state)
	})
	if log := r.Node(wiped).Log(); !strings.Contains(log, "counts as voter") {
		t.Errorf("nothing in its log says that it counts again:\n%s", log)
	}
	// With one of those that had everything gone, it is half of the majority.
	r.stop(other)
	r.publish(c, "t", "after", 100, 1000)
	r.stop(r.leader(leader, wiped))
	r.launch(other)
	r.publish(c, "t", "last", 10, 100)
	r.do("read", func(ctx context.Context) error {
		found, err := ReadAll(ctx, c, "t", 510)
		if len(found) != 510 {
			t.Errorf("%d messages are stored", len(found))
		}
		return err
	})
}

// A leader that is told to stop hands over at once. On a machine that is busy that may take as long as the lease now and then,
// but not each time.
func TestStoppingLeader_HandsOverBeforeItsLeaseEnds(t *testing.T) {
	const lease, attempts = 5 * time.Second, 5
	r := start(t, harness.ClusterOptions{Config: with(map[string]any{"lease_ms": lease.Milliseconds()})})
	c := r.client()
	r.declare(c, "t")
	for n := 1; ; n++ {
		r.publish(c, "t", "before", 20, 100)
		old := r.leader()
		asked := time.Now() // the lease was renewed a moment ago
		stopped := make(chan error, 1)
		go func() { stopped <- r.Node(old).Stop(harness.DefaultStopTimeout) }()
		r.leader(others(old)...) // the old one may be taking leave of its clients still
		took := time.Since(asked)
		if err := <-stopped; err != nil {
			t.Fatal(err)
		}
		r.launch(old)
		t.Logf("the next leader serves after %v", took)
		if took < lease-time.Second {
			break
		}
		if n == attempts {
			t.Fatalf("a hand-over takes as long as the lease of %v, each of %d times", lease, attempts)
		}
		r.healthy()
	}
	r.publish(c, "t", "after", 20, 100)
}
