package sim

import (
	"time"

	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/protocol"
)

// maxAttempts is how many attempts a message gets.
const maxAttempts = 3

// group is what the clients know of a consumer group.
type group struct {
	w       *world
	name    string
	topic   uint16
	members []*consumer
	// picky: some messages are refused, again and again or for good.
	picky bool
	// messages has everything that was delivered.
	messages map[place]*delivered
	// told is the highest ownership epoch of each partition that a member heard of.
	told map[uint16]told
	// owners says which member a partition was assigned to under an ownership epoch.
	owners map[ownership]uint64
}

// told is an ownership epoch that a member heard of, and who has said so when.
type told struct {
	ownership uint64
	by        sending
}

type ownership struct {
	partition uint16
	epoch     uint64
}

// delivered is what a group's members know of a message.
type delivered struct {
	id [2]uint64
	// attempt is the highest one seen, at is when its delivery arrived, epoch the highest of the leaders that delivered it.
	attempt uint16
	at      time.Duration
	epoch   replica.Epoch
	// acked: an acknowledgement was answered with OK, at ackedAt. tried: one was sent.
	acked, tried bool
	ackedAt      time.Duration
	// refusals were answered with OK, the last one at refusedAt; rejected: one of them was for good.
	refusals  int
	refusedAt time.Duration
	rejected  bool
}

func newGroup(w *world, name string, topic uint16, picky bool) *group {
	return &group{
		w: w, name: name, topic: topic, picky: picky,
		messages: map[place]*delivered{}, owners: map[ownership]uint64{}, told: map[uint16]told{},
	}
}

// join adds a member.
func (g *group) join(r *record) {
	c := newConsumer(g.w, r, g)
	g.members = append(g.members, c)
	c.begin(0)
}

// stop ends all members.
func (g *group) stop() {
	for _, c := range g.members {
		c.stop()
	}
}

// poisonous tells whether a picky group refuses a message, and whether it does so for good.
func poisonous(id [2]uint64) (refused, forGood bool) {
	h := (id[0]*31 + id[1]) % 41
	return h < 2, h == 0
}

// assigned checks a NOTICE: a partition has one owner for each ownership epoch.
func (g *group) assigned(c *consumer, n *protocol.Notice, sent sending) {
	g.owned(n.Partition, n.OwnershipEpoch, sent)
	o := ownership{n.Partition, n.OwnershipEpoch}
	if was, ok := g.owners[o]; ok && was != n.MemberID {
		g.w.fail("group %s: partition %d was given to member %d under ownership epoch %d, and to member %d before", g.name, n.Partition, n.MemberID, n.OwnershipEpoch, was)
	}
	g.owners[o] = n.MemberID
	for _, other := range g.members {
		if other != c && other.unconfirmed[n.Partition] && n.Kind == protocol.NoticeAssign {
			g.w.count(forcedRevoke)
		}
	}
}

// owned checks the ownership epoch of a partition that a node speaks of. What a member was told of an assignment is committed:
// no later leader knows less.
func (g *group) owned(partition uint16, epoch uint64, sent sending) {
	t := g.told[partition]
	if epoch < t.ownership && sent.epoch > t.by.epoch {
		g.w.fail("group %s: the leader of epoch %d has partition %d under ownership epoch %d, of which a member heard of %d from the leader of epoch %d",
			g.name, sent.epoch, partition, epoch, t.ownership, t.by.epoch)
	}
	if epoch > t.ownership {
		g.told[partition] = told{epoch, sent}
	}
}

// delivery checks a delivery to a member that was sent at a time.
func (g *group) delivery(member uint64, m *protocol.Msg, p place, id [2]uint64, by sending) *delivered {
	w, sent := g.w, by.at
	g.owned(p.partition, m.OwnershipEpoch, by)
	if m.Attempt < 1 || m.Attempt > maxAttempts {
		w.fail("group %s gets %d of partition %d for the %dth time, of at most %d", g.name, p.seq, p.partition, m.Attempt, maxAttempts)
	}
	d := g.messages[p]
	if d == nil {
		d = &delivered{id: id}
		g.messages[p] = d
	}
	switch {
	case d.id != id:
		w.fail("group %s gets message %v at %d of partition %d, before it was %v", g.name, id, p.seq, p.partition, d.id)
	case by.epoch < d.epoch:
		// It was the leader, and has no quorum any more: members go on reading what is committed, and it can't know what they
		// have answered to the leader after it.
	case d.acked && sent > d.ackedAt:
		w.fail("group %s gets %d of partition %d again (attempt %d) although its acknowledgement was answered", g.name, p.seq, p.partition, m.Attempt)
	case d.rejected && sent > d.refusedAt:
		w.fail("group %s gets %d of partition %d again (attempt %d) although it was rejected", g.name, p.seq, p.partition, m.Attempt)
	case sent > d.at && m.Attempt < d.attempt:
		w.fail("group %s gets %d of partition %d as attempt %d, before it was attempt %d", g.name, p.seq, p.partition, m.Attempt, d.attempt)
	case sent > d.refusedAt && int(m.Attempt) <= d.refusals:
		w.fail("group %s gets %d of partition %d as attempt %d, although %d failed", g.name, p.seq, p.partition, m.Attempt, d.refusals)
	}
	if owner, ok := g.owners[ownership{p.partition, m.OwnershipEpoch}]; ok && owner != member {
		w.fail("member %d of group %s gets %d of partition %d under ownership epoch %d, which is member %d's", member, g.name, p.seq, p.partition, m.OwnershipEpoch, owner)
	}
	if by.epoch >= d.epoch {
		d.attempt, d.at, d.epoch = max(d.attempt, m.Attempt), w.now, by.epoch
	}
	return d
}
