package engine

import (
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/protocol"
)

// refuseToLead has a node stand for election no more; it goes on voting and serving its peers.
func (n *Node) refuseToLead() {
	done := make(chan struct{})
	n.do(func() {
		n.machine.Resign(n.now())
		close(done)
	})
	<-done
}

// A node that lacks more than another one has in memory is elected all the same where nobody else can be, and has everything
// before it leads: the rounds behind what it catches up with in bulk, those that no leader has committed among them.
// Of several logs each may be ahead elsewhere, so that nobody could lead without.
func TestNode_AnElectedNodeOfSeveralLogsCatchesUpInBulkBeforeItLeads(t *testing.T) {
	t.Parallel()
	c := newTrio(t, func(o *NodeOptions) { o.HistoryBytes, o.Engine.Shards = 32<<10, 3 })
	first := c.leader()
	topic := c.declare("orders", 3)
	away := first%3 + 1
	for i := range uint64(30) {
		c.commit(protocol.Pub{TopicID: topic.TopicID, Partition: uint16(i % 3), ProducerID: 9, ProducerSeq: i/3 + 1, Value: make([]byte, 1000)})
	}
	c.stop(away)
	const each = 300
	for seq := uint64(11); seq <= each; seq += 10 {
		c.publishMany(topic.TopicID, seq, min(seq+10, each+1))
	}
	c.stop(c.leader())
	for _, n := range c.nodes {
		n.refuseToLead()
	}
	c.start(away)
	if leader := c.leader(); leader != away {
		t.Fatalf("node %d leads", leader)
	}
	for p := range uint16(3) {
		old := c.commit(protocol.Pub{TopicID: topic.TopicID, Partition: p, ProducerID: 9, ProducerSeq: each, Value: make([]byte, 1000)})
		if old.Sequence != each || old.Flags&protocol.ResultFlagDeduplicated == 0 {
			t.Errorf("a publish from while it was away: %+v", old)
		}
		if next := c.commit(protocol.Pub{TopicID: topic.TopicID, Partition: p, ProducerID: 9, ProducerSeq: each + 1, Value: []byte("next")}); next.Sequence != each+1 {
			t.Errorf("the next publish: %+v", next)
		}
	}
}

// With one log the node that is ahead can lead, and has to: what catches up gives up rounds that it may be needed for.
func TestNode_AnElectedNodeThatIsTooFarBehindLeavesItToTheOther(t *testing.T) {
	t.Parallel()
	c := newTrio(t, func(o *NodeOptions) { o.HistoryBytes = 32 << 10 })
	first := c.leader()
	topic := c.declare("orders", 3)
	away := first%3 + 1
	c.stop(away)
	const each = 300
	for seq := uint64(1); seq <= each; seq += 10 {
		c.publishMany(topic.TopicID, seq, min(seq+10, each+1))
	}
	c.stop(c.leader())
	c.start(away)
	if leader := c.leader(); leader == away {
		t.Fatal("the node that was away leads")
	}
	for p := range uint16(3) {
		if next := c.commit(protocol.Pub{TopicID: topic.TopicID, Partition: p, ProducerID: 9, ProducerSeq: each + 1, Value: []byte("next")}); next.Sequence != each+1 {
			t.Errorf("the next publish: %+v", next)
		}
	}
}

// publishMany publishes to three partitions the numbers from up to behind, and waits for them.
func (c *trio) publishMany(topic uint16, from, behind uint64) {
	c.t.Helper()
	p := newNodePeer(c.t, c.nodes[c.leader()])
	var reqs []uint64
	var pubs []protocol.Pub
	for seq := from; seq < behind; seq++ {
		for part := range uint16(3) {
			pubs = append(pubs, protocol.Pub{TopicID: topic, Partition: part, ProducerID: 9, ProducerSeq: seq, Value: make([]byte, 1000)})
			reqs = append(reqs, p.c.request())
			p.in.Publish(p.c, reqs[len(reqs)-1], &pubs[len(pubs)-1])
		}
	}
	p.in.Flush()
	for i, r := range reqs {
		if _, err := p.result(r); err != nil {
			c.commit(pubs[i]) // an election on a busy machine: in order, and recognised if it was stored
		}
	}
}

// Two nodes may ask each other with the same number: what one of them cancels is what it was asked for, not what it asks for.
func TestNode_ACancelledTransferIsTheOneThatWasAskedFor(t *testing.T) {
	const peer = replica.NodeID(2)
	transfer := peerwire.Transfer{Log: 0, ID: 7}
	n := &Node{catchings: map[int]*catching{0: {transfer: transfer, out: replica.StartCatchup{Leader: peer}}}}
	n.supplies = []*supply{{n: n, key: supplyKey{peer, transfer}}}
	n.bulkCatchup(&nodeEvent{from: peer, frame: &peerwire.CatchupCancel{Transfer: transfer, Reason: "it leads no more"}})
	if len(n.supplies) != 1 || n.supplies[0].done {
		t.Error("what this node sends was ended by the one that it asks")
	}
}

// A follower that is to catch up finds no space to put that on record: it waits for space, and takes part then.
func TestNode_ACatchUpThatCanNotBeNotedWaitsForSpace(t *testing.T) {
	t.Parallel()
	said := &lines{}
	f := map[replica.NodeID]*faults{1: {}, 2: {}, 3: {}}
	c := newTrio(t, func(o *NodeOptions) {
		o.HistoryBytes = 64 << 10
		o.Engine.OpenDevice = f[o.Self].open(t)
		o.Engine.Logger = slog.New(slog.NewTextHandler(said, nil))
	})
	topic := c.declare("orders", 1).TopicID
	away, other := followers(c.leader())
	c.stop(away)
	const messages = 1000
	c.commitAll(topic, 1, messages, 1000)
	f[away].fill(true)
	c.start(away)
	c.eventually("there is no space to note the catch-up", func() bool { return said.has("no space to note that this log catches up") })
	if st := c.nodes[away].Status(); st.Failed {
		t.Errorf("the node has given up: %+v", st)
	}
	f[away].fill(false)
	c.tellsTheSame("with space", away)
	c.stop(other)
	c.commitAll(topic, messages+1, messages+20, 100)
}

// A follower that is too far behind gives up nothing of its log before something has come for it: a leader that can't send, or
// isn't there any more, leaves it a log that counts, and the next leader may have what it lacks in memory.
func TestNode_ACatchUpGivesUpNothingBeforeSomethingHasCome(t *testing.T) {
	t.Parallel()
	c := newTrio(t, func(o *NodeOptions) { o.HistoryBytes = 64 << 10 })
	var nothing atomic.Bool
	var asked atomic.Int32
	c.m.lose(func(f peerwire.BulkFrame) bool {
		switch f.(type) {
		case *peerwire.Catchup:
			asked.Add(1)
		case *peerwire.Records, *peerwire.Skip, *peerwire.Snapshot, *peerwire.CatchupDone:
			return nothing.Load()
		}
		return false
	})
	topic := c.declare("orders", 1).TopicID
	away, _ := followers(c.leader())
	c.stop(away)
	const messages = 1000
	c.commitAll(topic, 1, messages, 1000)
	nothing.Store(true)
	c.start(away)
	c.eventually("the follower asks for what it lacks", func() bool { return asked.Load() > 0 })
	noted := func() bool {
		_, err := os.Stat(filepath.Join(c.dirs[away], "journal", "0", "catchup.mmcup"))
		return err == nil
	}
	first := asked.Load()
	c.stop(c.leader(away)) // whoever leads next is asked again
	c.start(stopped(c))
	c.eventually("the follower asks the next leader", func() bool { return asked.Load() > first })
	if noted() {
		t.Error("rounds were given up for nothing")
	}
	nothing.Store(false)
	c.tellsTheSame("once something comes", away)
	c.eventually("the catch-up is over", func() bool { return !noted() })
}

// stopped returns the node that does not run.
func stopped(c *trio) replica.NodeID {
	for id := replica.NodeID(1); id <= 3; id++ {
		if c.nodes[id] == nil {
			return id
		}
	}
	c.t.Fatal("all nodes run")
	return 0
}
