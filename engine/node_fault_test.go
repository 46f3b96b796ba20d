package engine

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/ring"
)

// Three nodes in one process, with disks that fill up and hang.

// newFaultyTrio is newTrio with disks that can fail, by node.
func newFaultyTrio(t *testing.T) (*trio, map[replica.NodeID]*faults) {
	t.Helper()
	f := map[replica.NodeID]*faults{1: {}, 2: {}, 3: {}}
	return newTrio(t, func(o *NodeOptions) { o.Engine.OpenDevice = f[o.Self].open(t) }), f
}

// fill has nothing that needs space succeed, or ends that.
func (f *faults) fill(full bool) {
	if full {
		f.free.Store(1)
		f.set(fullDisk)
		return
	}
	f.set(nil)
	f.free.Store(0)
}

// followers are the nodes that are not leader.
func followers(leader replica.NodeID) (a, b replica.NodeID) {
	return leader%3 + 1, (leader+1)%3 + 1
}

// numbered is the n-th message of a producer, from 1: sent again it is recognised.
func numbered(topic uint16, n, bytes int) protocol.Pub {
	value := make([]byte, bytes)
	copy(value, fmt.Sprint(n))
	return protocol.Pub{TopicID: topic, ProducerID: 9, ProducerSeq: uint64(n), Value: value}
}

// commitAll has the messages from n to last of a producer committed, at the sequences that are their numbers.
func (c *trio) commitAll(topic uint16, n, last, bytes int) {
	c.t.Helper()
	const window = 64
	for ; n <= last; n += window {
		p := newNodePeer(c.t, c.nodes[c.leader()])
		end := min(n+window-1, last)
		var reqs []uint64
		for i := n; i <= end; i++ {
			m := numbered(topic, i, bytes)
			reqs = append(reqs, p.c.request())
			p.in.Publish(p.c, reqs[i-n], &m)
		}
		flush(p.in)
		for i, req := range reqs {
			res, err := p.result(req)
			if err != nil {
				res = c.commit(numbered(topic, n+i, bytes)) // an election on a busy machine
			}
			if res.Sequence != uint64(n+i) {
				c.t.Fatalf("message %d is at %d", n+i, res.Sequence)
			}
		}
	}
}

// acknowledged makes an attempt at having a group acknowledge all messages of partition 0 up to last; false where the
// leadership ended meanwhile.
func (c *trio) acknowledged(group string, topic uint16, last int) bool {
	c.t.Helper()
	n := c.nodes[c.leader()]
	p := newNodePeer(c.t, n)
	defer n.ClientClosed(p.c)
	sub := protocol.Sub{Group: []byte(group), TopicID: topic, Partition: protocol.AnyPartition, CreditCount: 65535, CreditBytes: 64 << 20, Flags: protocol.SubFlagStream}
	if _, err := p.ask(protocol.OpSub, sub.AppendFrame(nil)); err != nil {
		return false
	}
	for parsed := 0; ; {
		op, payload, n, ok := p.c.nextPushed(parsed)
		if !ok {
			return false
		}
		parsed += n
		switch op {
		case protocol.OpMsg:
			var m protocol.Msg
			if err := m.Decode(payload); err != nil {
				c.t.Fatal(err)
			}
			if c.ackEvery > 0 && m.Sequence%c.ackEvery != 0 && m.Sequence < uint64(last) {
				continue
			}
			ack := protocol.Ack{SubscriptionID: m.SubscriptionID, TopicID: m.TopicID, Partition: m.Partition, Sequence: m.Sequence,
				DeliveryID: m.DeliveryID, OwnershipEpoch: m.OwnershipEpoch, Flags: protocol.AckFlagCumulative}
			if _, err := p.ask(protocol.OpAck, ack.AppendFrame(nil)); err != nil {
				return false
			}
			if m.Sequence >= uint64(last) {
				return true
			}
		case protocol.OpNotice:
			_, confirm := confirmation(c.t, payload)
			if _, err := p.ask(protocol.OpControlAck, confirm); err != nil {
				return false
			}
		default:
			c.t.Fatalf("%v was pushed", op)
		}
	}
}

// ask sends a request and waits for its answer.
func (p *nodePeer) ask(op protocol.Op, frame []byte) ([]byte, error) {
	p.t.Helper()
	req := p.c.request()
	p.in.Request(p.c, req, op, payloadOf(frame))
	flush(p.in)
	return p.c.answer(p.t, req)
}

// nextPushed waits for the frame pushed behind so many bytes; false if the connection is shut first.
func (c *testClient) nextPushed(parsed int) (op protocol.Op, payload []byte, n int, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.pushed) == parsed && c.shut == 0 {
		c.changed.Wait()
	}
	if len(c.pushed) == parsed {
		return 0, nil, 0, false
	}
	op, payload, n, err := protocol.ParseFrame(c.pushed[parsed:])
	return op, payload, n, err == nil && n > 0
}

// refused makes the disk of whoever leads full, and waits until a publish there gets 0x4004. It returns the leader.
func (c *trio) refused(f map[replica.NodeID]*faults, topic uint16) (leader replica.NodeID) {
	c.t.Helper()
	c.eventually("a publish is refused with 0x4004", func() bool {
		leader = c.leader()
		for id := range f {
			if id != leader {
				f[id].fill(false)
			}
		}
		f[leader].fill(true)
		_, err := newNodePeer(c.t, c.nodes[leader]).publish(protocol.Pub{TopicID: topic, Value: []byte("refused")})
		return code(err) == protocol.CodeStorageHighWatermark
	})
	return leader
}

func TestNode_ALeaderWithAFullDiskRefusesPublishesAndNothingElse(t *testing.T) {
	t.Parallel()
	c, f := newFaultyTrio(t)
	topic := c.declare("orders", 1)
	other := c.declare("others", 1) // takes what is published until the disk counts as full
	c.commitAll(topic.TopicID, 1, 100, 100)
	c.refused(f, other.TopicID)
	c.eventually("a group acknowledges everything while the disk is full", func() bool { return c.acknowledged("g", topic.TopicID, 100) })
	for id := range f {
		f[id].fill(false)
	}
	c.commitAll(topic.TopicID, 101, 200, 100) // by itself
	c.eventually("the group goes on", func() bool { return c.acknowledged("g", topic.TopicID, 200) })
}

func TestNode_AFollowerWithAFullDiskLeavesTheQuorumToTheOthers(t *testing.T) {
	t.Parallel()
	c, f := newFaultyTrio(t)
	topic := c.declare("orders", 1)
	full, other := followers(c.leader())
	f[full].fill(true)
	// More than its journal holds, which can't grow or be emptied.
	const many, bytes = 1200, 16 << 10
	c.commitAll(topic.TopicID, 1, many, bytes)
	f[full].fill(false)
	c.waitStanding(full, replica.Voter)
	// Now it is half of the majority, so it has to have everything.
	c.stop(other)
	c.commitAll(topic.TopicID, many+1, many+100, 100)
}

func TestNode_StartsWithAFullDiskAndServesReading(t *testing.T) {
	t.Parallel()
	c, f := newFaultyTrio(t)
	topic := c.declare("orders", 1)
	c.commitAll(topic.TopicID, 1, 100, 100)
	full, _ := followers(c.leader())
	c.stop(full)
	f[full].fill(true)
	c.start(full)
	c.waitStanding(full, replica.Voter)
	c.takeOver(full)
	c.eventually("a publish is refused with 0x4004", func() bool {
		if !c.nodes[full].Status().Serving {
			return false
		}
		_, err := newNodePeer(t, c.nodes[full]).publish(protocol.Pub{TopicID: topic.TopicID, Value: []byte("refused")})
		return code(err) == protocol.CodeStorageHighWatermark
	})
	c.eventually("a group acknowledges everything", func() bool { return c.acknowledged("g", topic.TopicID, 100) })
	f[full].fill(false)
	c.commit(protocol.Pub{TopicID: topic.TopicID, Value: []byte("taken")})
}

// takeOver has node id lead: the others resign, and aren't elected again before they are restarted.
func (c *trio) takeOver(id replica.NodeID) {
	c.t.Helper()
	a, b := followers(id)
	for _, other := range []replica.NodeID{a, b} {
		n := c.nodes[other]
		n.do(func() { n.machine.Resign(n.now()) })
	}
	c.eventually(fmt.Sprintf("node %d leads", id), func() bool { return c.nodes[id].Status().Serving })
}

// hang has what is written at once, on the thread that seals a round, never end, until free is called.
func (f *faults) hang() (free func()) {
	stuck := make(chan struct{})
	f.set(func(op *ring.Op) error {
		if op.Kind == ring.WriteSync && op.Inline {
			<-stuck
		}
		return nil
	})
	return sync.OnceFunc(func() {
		f.set(nil)
		close(stuck)
	})
}

// A write that doesn't end keeps the leader's shard, for as long as it likes: another node leads meanwhile. What the old leader
// was sent is stored once, or not at all.
func TestNode_ALeaderWhoseDiskHangsIsReplaced(t *testing.T) {
	t.Parallel()
	c, f := newFaultyTrio(t)
	topic := c.declare("orders", 1)
	c.commitAll(topic.TopicID, 1, 50, 100)
	first := c.leader()
	free := f[first].hang()
	t.Cleanup(free)
	late := make(chan error, 1)
	old := newNodePeer(t, c.nodes[first])
	go func() { // the publisher's thread may be the one that writes
		m := numbered(topic.TopicID, 51, 100)
		_, err := old.publish(m)
		late <- err
	}()
	second := c.leader(first)
	c.eventually("the next leader stores the message that the old one was sent", func() bool {
		res, err := newNodePeer(t, c.nodes[second]).publish(numbered(topic.TopicID, 51, 100))
		if err == nil && res.Sequence != 51 {
			t.Fatalf("it is at %d", res.Sequence)
		}
		if err != nil {
			second = c.leader(first)
		}
		return err == nil
	})
	free()
	if err := <-late; err != nil && code(err) != protocol.CodeStaleLeaderEpoch && code(err) != protocol.CodeReadOnlyDegraded {
		t.Errorf("the old leader has answered %v", err)
	}
	c.waitStanding(first, replica.Voter)
	c.commitAll(topic.TopicID, 52, 80, 100)
	c.eventually("nothing is there twice", func() bool { return c.acknowledged("g", topic.TopicID, 80) })
}

// A follower that comes and goes costs no acknowledged write, and no election.
func TestNode_AFlappingFollowerCostsLatencyOnly(t *testing.T) {
	t.Parallel()
	c := newTrio(t, nil)
	topic := c.declare("orders", 1)
	flapping, _ := followers(c.leader())
	before := c.nodes[c.leader()].Status().Epoch
	const flaps, messages = 6, 20
	for i := range flaps {
		c.m.isolate(flapping, true)
		c.commitAll(topic.TopicID, 2*i*messages+1, (2*i+1)*messages, 100)
		time.Sleep(500 * time.Millisecond)
		c.m.isolate(flapping, false)
		c.commitAll(topic.TopicID, (2*i+1)*messages+1, (2*i+2)*messages, 100)
		time.Sleep(500 * time.Millisecond)
	}
	c.waitStanding(flapping, replica.Voter)
	if after := c.nodes[c.leader()].Status().Epoch; after-before >= flaps {
		t.Errorf("from epoch %d to %d in %d times that a follower was cut off", before, after, flaps)
	}
	c.eventually("everything is acknowledged", func() bool { return c.acknowledged("g", topic.TopicID, 2*flaps*messages) })
}

// A write to the journal fails once and would succeed the next time: that node is out until a restart, the others go on.
func TestNode_AFailedWriteTakesTheNodeOutUntilARestart(t *testing.T) {
	t.Parallel()
	for _, role := range []string{"the leader", "a follower"} {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			c, f := newFaultyTrio(t)
			topic := c.declare("orders", 1)
			c.commitAll(topic.TopicID, 1, 50, 100)
			hurt := c.leader()
			if role == "a follower" {
				hurt, _ = followers(hurt)
			}
			var failed atomic.Int32
			f[hurt].set(func(op *ring.Op) error {
				if op.Kind == ring.WriteSync && op.Inline && failed.Add(1) == 1 {
					return unix.EIO
				}
				return nil
			})
			c.eventually("the write has failed", func() bool {
				c.commit(numbered(topic.TopicID, 51, 100))
				_, _ = newNodePeer(t, c.nodes[c.leader()]).publish(protocol.Pub{TopicID: topic.TopicID, Value: []byte("one more")})
				return failed.Load() > 0
			})
			before := failed.Load()
			c.leader(hurt)
			for n := 52; n <= 80; n++ {
				c.commit(numbered(topic.TopicID, n, 100))
			}
			if e := c.nodes[hurt].Engine(); e == nil || e.Err() == nil || !c.nodes[hurt].Status().Failed {
				t.Error("the node does not say that its disk has failed")
			}
			if again := failed.Load(); again > before+1 {
				t.Errorf("%d rounds were written to a journal that has failed", again-before)
			}
			f[hurt].set(nil)
			c.kill(hurt)
			c.start(hurt)
			c.tellsTheSame("restarted", hurt)
			_, other := followers(hurt)
			c.stop(other)
			c.commit(numbered(topic.TopicID, 81, 100))
		})
	}
}

// kill ends a node whose disk has failed, which it says as it closes.
func (c *trio) kill(id replica.NodeID) {
	c.t.Helper()
	n := c.nodes[id]
	c.m.set(id, nil)
	delete(c.nodes, id)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := n.Close(ctx); err == nil || ctx.Err() != nil {
		c.t.Errorf("closing node %d, whose disk has failed: %v", id, err)
	}
}
