package coord

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// traffic is random clients over the coordinator: topics and groups come and go while members do, commits are late and
// partial, the log refuses, the broker restarts. Whatever happens, the log must fold (what is proposed is valid in the
// order in which it is proposed), and every request of a connection that stays open is answered exactly once.
type traffic struct {
	*bench
	rng     *rand.Rand
	clients []*trafficClient
}

type trafficClient struct {
	*stubClient
	subs map[uint16]protocol.SubResult // as the client knows them
	sent map[uint64]protocol.Op
}

func (x *traffic) pick() *trafficClient {
	if len(x.clients) == 0 || x.rng.IntN(12) == 0 {
		x.clients = append(x.clients, &trafficClient{stubClient: x.client(), subs: make(map[uint16]protocol.SubResult), sent: make(map[uint64]protocol.Op)})
	}
	return x.clients[x.rng.IntN(len(x.clients))]
}

func (x *traffic) ask(c *trafficClient, frame []byte) {
	op, _, _, _ := protocol.ParseFrame(frame)
	c.sent[x.send(c.stubClient, frame)] = op
}

func (x *traffic) topicID() uint16 {
	if all := x.c.meta.Topics(); len(all) > 0 && x.rng.IntN(8) > 0 {
		return all[x.rng.IntN(len(all))].ID
	}
	return uint16(x.rng.IntN(int(x.c.meta.LastTopic()) + 2))
}

func (x *traffic) subscribe(c *trafficClient) {
	m := protocol.Sub{Group: fmt.Appendf(nil, "g%d", x.rng.IntN(3)), TopicID: x.topicID(), Partition: protocol.AnyPartition, StartPolicy: protocol.StartPolicy(x.rng.IntN(2))}
	if x.rng.IntN(3) == 0 {
		if all := x.c.meta.Groups(); len(all) > 0 {
			g := all[x.rng.IntN(len(all))]
			m.Group, m.TopicID, m.Flags = []byte(g.Name), g.Topic, protocol.SubFlagRejoin
			m.MemberID = g.LastMember - uint64(x.rng.IntN(2))
		}
	}
	x.ask(c, m.AppendFrame(nil))
}

func (x *traffic) heartbeat(c *trafficClient) {
	id := uint16(x.rng.IntN(4))
	s := x.c.subscription(c.stubClient, id)
	if s == nil {
		x.ask(c, heartbeat(id, 1, 1, 1, protocol.MemberActive))
		return
	}
	state := protocol.MemberState(0)
	if x.rng.IntN(4) == 0 {
		state = protocol.MemberLeave
	}
	x.ask(c, heartbeat(id, s.member, s.membershipEpoch, s.assignmentEpoch, state))
}

func (x *traffic) controlAck(c *trafficClient) {
	if len(c.pushed) == 0 {
		return
	}
	n := c.pushed[0]
	if x.rng.IntN(5) > 0 {
		c.pushed = c.pushed[1:]
	}
	x.ask(c, (&protocol.ControlAck{NoticeID: n.NoticeID, Kind: n.Kind, GroupID: n.GroupID, MembershipEpoch: n.MembershipEpoch,
		AssignmentEpoch: n.AssignmentEpoch, OwnershipEpoch: n.OwnershipEpoch, Result: protocol.ControlResult(x.rng.IntN(20) / 18)}).AppendFrame(nil))
}

// commitSome commits a prefix of what is proposed, as one round.
func (x *traffic) commitSome() {
	n := x.rng.IntN(len(x.log.pending) + 1)
	if n == 0 {
		return
	}
	records := x.log.pending[:n]
	x.log.pending = x.log.pending[n:]
	for i := range records {
		x.seq++
		records[i].Sequence, records[i].LeaderEpoch = x.seq, x.epoch
	}
	x.records = append(x.records, records...)
	x.round++
	x.c.CommitRound(0, wal.NewTestRound(x.pool, x.epoch, x.round, wal.TestRun{Stream: wal.StreamID{Kind: wal.Metadata}, Records: records}))
	x.c.turn()
}

func (x *traffic) step(opts func(*Options)) {
	name := fmt.Sprintf("t%d", x.rng.IntN(3))
	switch r := x.rng.IntN(100); {
	case r < 8:
		x.ask(x.pick(), declare(name, uint16(x.rng.IntN(4)), 0))
	case r < 11:
		x.ask(x.pick(), declare(name, 0, protocol.DeclareFlagDelete))
	case r < 13:
		x.ask(x.pick(), declare(name, 0, protocol.DeclareFlagLookup))
	case r < 16:
		settings := []string{"", `{}`, `{"strategy":"circle"}`, `{"strategy":"averagely","max_attempts":2}`}[x.rng.IntN(4)]
		flags := []uint16{0, 0, protocol.DeclareFlagUpdate, protocol.DeclareFlagDelete, protocol.DeclareFlagLookup}[x.rng.IntN(5)]
		if flags == protocol.DeclareFlagUpdate && settings == "" {
			flags = 0
		}
		x.ask(x.pick(), declareGroup(name, fmt.Sprintf("g%d", x.rng.IntN(3)), settings, flags))
	case r < 30:
		x.subscribe(x.pick())
	case r < 40:
		x.heartbeat(x.pick())
	case r < 60:
		x.controlAck(x.pick())
	case r < 64 && len(x.clients) > 0:
		at := x.rng.IntN(len(x.clients))
		x.c.Closed(x.clients[at].stubClient)
		x.c.turn()
		x.clients = append(x.clients[:at], x.clients[at+1:]...)
	case r < 65 && x.rng.IntN(4) == 0:
		x.clients = nil
		x.start(opts)
	case r < 66:
		x.log.failAt = 1 // of the next batch of proposals, the first
		x.c.turn()
		x.ask(x.pick(), declare(name, 2, 0))
		x.log.fail, x.log.failAt = nil, 0
	case r < 90:
		x.commitSome()
	default:
		x.now += time.Duration(x.rng.IntN(1200)) * time.Millisecond
		x.c.turn()
	}
	if x.c.quarantined != "" {
		x.t.Fatalf("the log does not fold: %s", x.c.quarantined)
	}
}

func (x *traffic) settle() {
	x.commit()
	for _, c := range x.clients {
		for req, op := range c.sent {
			if _, answered := c.answers[req]; !answered && c.shut == 0 {
				x.t.Fatalf("request %d (%v) of client %d was never answered", req, op, c.id)
			}
		}
		x.closeClient(c.stubClient)
	}
	x.advance(11 * time.Second)
	if n := len(x.c.byHandle) + len(x.c.refs) + len(x.c.sessions) + len(x.c.topics.waiting) + len(x.c.topics.deleting) + len(x.c.groups.changes.waiting) + len(x.c.groups.starting) +
		x.c.groups.changes.creating + x.c.groups.changes.assignments +
		x.c.topics.creating + x.c.topics.partitions + len(x.c.proposals.pending); n != 0 {
		x.t.Fatalf("%d things are left over", n)
	}
	for _, g := range x.c.meta.Groups() {
		if len(g.Members) != 0 {
			x.t.Fatalf("group %d has members %v without a connection", g.ID, g.Members)
		}
	}
}

func TestCoordinator_RandomTrafficFoldsAndIsAnswered(t *testing.T) {
	const seeds, steps = 100, 400
	for seed := range uint64(seeds) {
		ok := t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			x := &traffic{rng: rand.New(rand.NewPCG(seed, 3))}
			limit := x.rng.IntN(4) - 1
			opts := func(o *Options) { o.MaxMembers, o.MetadataSnapshotRecords = limit, 40 }
			x.bench = newBench(t, opts)
			for range steps {
				x.step(opts)
			}
			x.settle()
		})
		if !ok {
			return
		}
	}
}
