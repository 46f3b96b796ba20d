package coord

import (
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// coordinatorOps are the operations that an event loop passes on to the coordinator.
var coordinatorOps = []protocol.Op{protocol.OpDeclare, protocol.OpSub, protocol.OpAck, protocol.OpNack, protocol.OpPull,
	protocol.OpHeartbeat, protocol.OpControlAck, protocol.OpCredit}

// FuzzRequests sends whatever it is given to a coordinator with the real delivery. Nothing may panic, and every request is
// answered, or waits as a PULL, or shuts the connection.
func FuzzRequests(f *testing.F) {
	script := func(frames ...[]byte) (all []byte) {
		for _, frame := range frames {
			op, payload, _, err := protocol.ParseFrame(frame)
			if err != nil {
				f.Fatal(err)
			}
			for i, o := range coordinatorOps {
				if o == op {
					all = append(append(all, byte(i), byte(len(payload))), payload...)
				}
			}
		}
		return all
	}
	stream := (&protocol.Sub{Group: []byte("g"), TopicID: 1, Partition: protocol.AnyPartition, Flags: protocol.SubFlagStream}).AppendFrame(nil)
	f.Add(script(declare("u", 2, 0), sub("g", 1), heartbeat(1, firstMember, 1, 0, protocol.MemberLeave), sub("g", 1)))
	f.Add(script(stream, (&protocol.ControlAck{NoticeID: 1<<32 + 1, GroupID: 1, MembershipEpoch: 1, AssignmentEpoch: 1, OwnershipEpoch: 1}).AppendFrame(nil),
		(&protocol.Ack{SubscriptionID: 1, TopicID: 1, Sequence: 1, DeliveryID: 1<<40 + 1, OwnershipEpoch: 1}).AppendFrame(nil),
		(&protocol.Nack{SubscriptionID: 1, TopicID: 1, Sequence: 2, DeliveryID: 1<<40 + 2, OwnershipEpoch: 1}).AppendFrame(nil),
		(&protocol.Credit{SubscriptionID: 1, MembershipEpoch: 1, Mode: protocol.CreditAdd, Count: 3, Bytes: 100}).AppendFrame(nil)))
	f.Add(script(sub("g", 1), (&protocol.Pull{SubscriptionID: 1, MemberID: firstMember, MembershipEpoch: 1, MaxMsgs: 5, MaxBytes: 1000, WaitMs: 9}).AppendFrame(nil),
		declare("t", 0, protocol.DeclareFlagDelete), declare("t", 1, 0), sub("h", 2)))
	f.Fuzz(func(t *testing.T, in []byte) {
		b := newBench(t)
		b.deliver()
		c := b.client()
		b.do(c, declare("t", 1, 0))
		b.publish(1, 3)
		asked := map[uint64]protocol.Op{}
		for len(in) >= 2 && c.shut == 0 {
			op, n := coordinatorOps[int(in[0])%len(coordinatorOps)], min(int(in[1]), len(in)-2)
			c.next++
			asked[c.next] = op
			batch := GetBatch()
			batch.Add(c, c.next, op, in[2:2+n])
			b.c.Submit(batch)
			b.c.turn()
			b.commit()
			in = in[2+n:]
		}
		b.advance(6 * time.Second)
		for req, op := range asked {
			if _, answered := c.answers[req]; !answered && c.shut == 0 {
				t.Fatalf("request %d (%v) has no answer", req, op)
			}
		}
		b.closeClient(c)
		b.advance(time.Minute)
		if c.pulls.Load() != 0 {
			t.Fatalf("%d PULLs wait for a connection that is gone", c.pulls.Load())
		}
	})
}

// deliver puts the real delivery in the stub's place.
func (b *bench) deliver() {
	b.t.Helper()
	b.c.delivery = newDelivery(b.c, deliveryDeps{
		meta: func() *metadata.State { return b.c.meta }, epoch: func() wal.Epoch { return b.epoch }, readDone: b.c.ReadDone,
	})
	if err := b.c.delivery.recovered(); err != nil {
		b.t.Fatal(err)
	}
}

// publish commits n messages to partition 0 of a topic, as a shard would.
func (b *bench) publish(topic uint16, n int) {
	records := make([]wal.Record, n)
	for i := range records {
		records[i] = wal.Record{Sequence: wal.Sequence(i + 1), LeaderEpoch: b.epoch, Value: []byte("value")}
	}
	b.round++
	b.c.CommitRound(0, wal.NewTestRound(b.pool, b.epoch, b.round, wal.TestRun{Stream: wal.StreamID{Kind: wal.Messages, Topic: topic}, Records: records}))
	b.c.turn()
}

// quietDelivery ignores everything, so that the coordinator's own allocations show.
type quietDelivery struct{ stubDelivery }

func (d *quietDelivery) request(r *Request, _ []byte) {}

func TestSubmit_AllocatesNothingPerRequest(t *testing.T) {
	b, c := withTopic(t, 1)
	b.c.delivery = &quietDelivery{}
	ack := (&protocol.Ack{SubscriptionID: 1}).AppendFrame(nil)[protocol.HeaderSize:]
	perRun := testing.AllocsPerRun(200, func() {
		batch := GetBatch()
		for range 64 {
			batch.Add(c, 1, protocol.OpAck, ack)
		}
		b.c.Submit(batch)
		b.c.turn()
	})
	// The pool may lose a batch to a garbage collection now and then.
	if perRun > 4 {
		t.Errorf("%.1f allocations per 64 requests", perRun)
	}
}

func TestCoordinator_StreamsAcknowledgesAndEndsWithTheTopic(t *testing.T) {
	b, c := withTopic(t, 1)
	b.deliver()
	b.publish(1, 2)
	b.want("SUB", b.do(c, (&protocol.Sub{Group: []byte("g"), TopicID: 1, Partition: protocol.AnyPartition, Flags: protocol.SubFlagStream}).AppendFrame(nil)), "OK SUB sub=1")
	b.confirm(c)
	if n := len(c.order); n < 4 || c.order[n-1] != "MSG" || c.order[n-2] != "MSG" || c.order[n-3] != "OK CONTROL_ACK" {
		t.Fatalf("sent %q", c.order)
	}
	ack := func(seq uint64) []byte {
		return (&protocol.Ack{SubscriptionID: 1, TopicID: 1, Sequence: seq, DeliveryID: uint64(b.epoch)<<(64-deliveryIDEpochBits) | seq, OwnershipEpoch: 1}).AppendFrame(nil)
	}
	req := b.send(c, ack(1))
	if _, early := c.answers[req]; early {
		t.Fatal("an ACK was answered before it was committed")
	}
	b.commit()
	b.want("ACK", c.answers[req], "OK ACK")
	b.want("ACK again", b.do(c, ack(1)), "ERR 0x0023")
	g := b.c.statistics().Groups[0]
	if g.Lag != 1 || g.InFlight != 1 || g.Acknowledged != 1 || g.Parts[0].AckFloor != 1 {
		t.Errorf("group %+v", g)
	}
	b.want("delete", b.do(c, declare("t", 0, protocol.DeclareFlagDelete)), "OK DECLARE id=1")
	b.want("ACK of a deleted topic's", b.do(c, ack(2)), "ERR 0x0008")
	b.want("create again", b.do(c, declare("t", 1, 0)), "OK DECLARE id=2")
	b.want("SUB", b.do(c, sub("g", 2)), "OK SUB sub=2")
	if g := b.c.statistics().Groups; len(g) != 1 || g[0].Lag != 0 || g[0].TopicID != 2 {
		t.Errorf("groups %+v", g)
	}
}
