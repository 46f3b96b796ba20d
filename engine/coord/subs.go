package coord

import (
	"time"

	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// maxSubscriptions is the most subscriptions that one connection may have, ended ones that were not closed included.
const maxSubscriptions = 1024

// subscription is one SUB of one connection: a member of a group as seen from its connection. The coordinator makes and
// ends it; delivery keeps its credit and its messages in consumer.
type subscription struct {
	client Client
	// handle is unique for the life of the process; the group machine knows the subscription by it.
	handle uint64
	// id is what the wire calls subscription_id: it belongs to the connection.
	id     uint16
	group  uint16
	topic  uint16
	member uint64
	// stream: MSG is sent whenever there is credit, without PULL.
	stream bool
	// policy is where a member of a broadcast group begins.
	policy protocol.StartPolicy
	// cursors are those that it will have in a broadcast group, until it is counted as a member.
	cursors int
	// windowCount and windowBytes are the credit window asked for at SUB, defaults and clamps applied; all of it is
	// available at the start.
	windowCount uint32
	windowBytes uint64
	// membershipEpoch and assignmentEpoch are those of the member's own last join and last confirmed assignment. A
	// request with an older one is stale (0x0020).
	membershipEpoch uint32
	assignmentEpoch uint32
	// open: it was answered and delivery knows it. gone: its connection is closed.
	open bool
	gone bool
	// req is the SUB itself, until it is answered; rejoin is the member that it wants back (0: it joins).
	req    uint64
	rejoin uint64
	// lastOp is when the client last sent an operation for this subscription.
	lastOp time.Duration
	// ended is 0 while the subscription lives; afterwards every operation on it is answered with this code and text.
	ended     protocol.ErrorCode
	endedText string

	consumer *consumer
}

// session is what the coordinator knows of one connection.
type session struct {
	client Client
	// subs is indexed by subscription id - 1; a freed slot is nil and used again.
	subs []*subscription
	// dirty: frames were queued in this turn and the client is on the coordinator's list for Flush.
	dirty bool
}

// deliverer is what the coordinator asks of the delivery of messages. Every method runs on the coordinator's
// goroutine, with c.now and c.wallMs set. Partitions belong to (group, topic); a group id is never used again.
type deliverer interface {
	// openSub starts a subscription: it was answered (or will be, in this turn). No partition is owned yet.
	openSub(s *subscription)
	// closeSub ends it. Waiting PULLs are answered (s.ended, where set, is the code), what is in flight returns: as a
	// failed attempt unless graceful. s is not used afterwards.
	closeSub(s *subscription, graceful bool)
	// own lets s receive the partition under the ownership epoch. An earlier owner was disowned before.
	own(s *subscription, partition uint16, ownershipEpoch uint64)
	// drain stops new deliveries of a member's partition that is being revoked; what is in flight may still be acknowledged.
	drain(group uint16, member uint64, partition uint16, ownershipEpoch uint64)
	// disown ends the ownership; what is in flight returns: as a failed attempt unless graceful.
	disown(group uint16, member uint64, partition uint16, ownershipEpoch uint64, graceful bool)
	// groupCreated tells of a group that is new; the metadata log has committed it. groupDeleted and topicDeleted likewise;
	// a topic's groups are deleted one by one before it. Not called during recovery: recovered looks at c.meta.
	groupCreated(group, topic uint16, policy protocol.StartPolicy)
	groupDeleted(group uint16)
	topicDeleted(topic uint16)
	// letGo has groups make their dead-letter topic t anew when they need it next, because it is about to be deleted. It is
	// false where a message is on its way there: t must stay then.
	letGo(t *metadata.Topic) bool
	// reset finds the positions that to means for a group that exists and, unless it is a dry run, moves its cursors there.
	// done is called once, possibly at once: when the moves are on record, or with an error that wraps a code.
	reset(group uint16, to protocol.Reset, done func([]protocol.ResetPosition, error))
	// groupConfigured tells that a group's settings have changed; the metadata log has committed it.
	groupConfigured(group uint16)
	// memberJoins tells that a member of a broadcast group is about to join: its cursors begin where the policy says.
	// memberStarted tells whether that is on record, and memberGone that it did not join or is gone for good: its cursors are
	// to be forgotten.
	memberJoins(group uint16, member uint64, policy protocol.StartPolicy)
	memberStarted(group uint16, member uint64) bool
	memberGone(group uint16, member uint64)
	// groupStarted tells whether it is on record where the group starts reading each of its partitions. Until then nobody
	// becomes its member.
	groupStarted(group uint16) bool
	// request takes a PULL, ACK, NACK or CREDIT; a malformed one shuts the client (0x0003). payload is borrowed.
	request(r *Request, payload []byte)
	// round takes a committed round: message entries feed the tail and wake consumers, ledger entries are folded. The
	// reference is the caller's: whoever keeps the round retains it.
	round(journal int, r *wal.Round)
	// failed tells that the journals take nothing any more. Whoever waits for a commit is answered with the code and the
	// text (empty: the code's own); so is every ACK and NACK from then on, which the coordinator sees to.
	failed(code protocol.ErrorCode, text string)
	// refused tells that a message that was proposed (Log.ProposeMessage) is not stored.
	refused(proposal uint64, reason string)
	// written tells that rounds up to n are in segments.
	written(journal int, n wal.RoundNumber)
	// readDone brings back a read; the request was the deliverer's.
	readDone(r *wal.ReadRequest)
	// writable tells that a client's outstanding bytes fell below OutboundPause.
	writable(client Client)
	// interrupt ends the client's waiting PULLs with what there is.
	interrupt(client Client)
	// tick does what is due at c.now and returns when it wants to be called next (0: not at all).
	tick(now time.Duration) (next time.Duration)
	// dueFrozen returns when to call tick again while the time that it is given stands still, and whether at all.
	dueFrozen() (next time.Duration, due bool)

	// Recovery, before the first turn, in this order: restore once per journal that has a snapshot, replay in log order,
	// bounds per partition that holds records, recovered once. Metadata and ledger are replayed side by side: the ledger
	// may name groups and topics that c.meta does not know yet, or no longer. When recovered is called c.meta is complete:
	// what it does not have is to be forgotten, groups that the ledger never mentioned start by their policy.
	restore(journal int, position uint64, snapshot []byte) error
	replay(journal int, r *wal.Record) error
	bounds(topic, partition uint16, first, last wal.Sequence)
	recovered() error
	// follow takes the messages of a round that was committed while another node leads, after its ledger records were
	// replayed and its metadata folded; compact bounds what a start has to replay. Both come between bounds and recovered.
	follow(journal int, r *wal.Round)
	compact()

	// groupStats and topicStats fill in what delivery knows; the identifying fields are set by the caller.
	groupStats(g *GroupStats)
	// standbyStats is groupStats while standing by, from the ledgers alone; the members are filled in too.
	standbyStats(g *GroupStats)
	topicStats(t *TopicStats)
	// endToEnd is Stats.E2E.
	endToEnd() Quantiles
}

// subscription finds the subscription that an operation of client names, and counts the operation as a sign of life
// of its member. nil: the connection never had it (answer 0x0026). Look at ended before anything else.
func (c *Coordinator) subscription(client Client, id uint16) *subscription {
	ss := c.lookup(client)
	if ss == nil || id == 0 || int(id) > len(ss.subs) {
		return nil
	}
	s := ss.subs[id-1]
	if s == nil || !s.open {
		return nil // a client that guesses the id before its SUB is answered
	}
	s.lastOp = c.now
	return s
}

// lookup returns the session of a client, nil if it has none (any more).
func (c *Coordinator) lookup(client Client) *session {
	if c.lastSession != nil && c.lastSession.client == client {
		return c.lastSession
	}
	ss := c.sessions[client.ID()]
	if ss != nil {
		c.lastSession = ss
	}
	return ss
}

// flushLater has client flushed at the end of this turn; call it after every Complete and Push.
func (c *Coordinator) flushLater(client Client) {
	ss := c.lookup(client)
	if ss == nil {
		client.Flush()
		return
	}
	if !ss.dirty {
		ss.dirty = true
		c.dirty = append(c.dirty, ss)
	}
}

// answerErr answers a request with an ERR frame. An empty text stands for the code's default text.
func (c *Coordinator) answerErr(client Client, req uint64, op protocol.Op, code protocol.ErrorCode, text string) {
	c.frame = protocol.AppendErr(c.frame[:0], code, op, text)
	client.Complete(req, c.frame)
	c.flushLater(client)
}

// answerOK answers a request with an empty OK.
func (c *Coordinator) answerOK(client Client, req uint64, op protocol.Op) {
	c.frame = protocol.AppendOKEmpty(c.frame[:0], op)
	client.Complete(req, c.frame)
	c.flushLater(client)
}
