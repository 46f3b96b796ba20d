package coord

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// Bounds of what waits in the inbox. Beyond them requests are answered with 0x4001; rounds, reads and closed connections
// are never refused: their number is bounded where they come from.
const (
	maxQueuedRequests = 1 << 16
	maxQueuedBytes    = 64 << 20
)

// ErrClosed is returned by what needs the coordinator's goroutine after it has ended.
var ErrClosed = errors.New("the coordinator has stopped")

type eventKind uint8

const (
	evBatch eventKind = iota
	evRound
	evWritten
	evRead
	evClosed
	evWritable
	evInterrupt
	evStats
	evLogFailed
	evRefused
	evLead
	evDepose
	evFreeze
	evSnapshot
	evSilence
)

// event is one item of the inbox.
type event struct {
	kind    eventKind
	journal int
	batch   *Batch
	round   *wal.Round
	number  wal.RoundNumber
	read    *wal.ReadRequest
	client  Client
	stats   chan<- *Stats
	text    string
	id      uint64
	epoch   wal.Epoch
	served  func(error)

	snapshot func(Snapshots, error)
}

// Bounds of a batch that who submits it may handle in the coordinator's place, see Lend.
const (
	lentRequests = 32
	lentBytes    = 8 << 10
)

// Submit hands over a batch of requests; the batch belongs to the coordinator afterwards. If it reports lend, the batch is
// small and the coordinator sleeps on: the caller calls Lend soon.
func (c *Coordinator) Submit(b *Batch) (lend bool) {
	requests, bytes := int64(len(b.Requests)), int64(len(b.Data))
	n, size := c.queuedRequests.Add(requests), c.queuedBytes.Add(bytes)
	if n > maxQueuedRequests || size > maxQueuedBytes {
		c.queuedRequests.Add(-requests)
		c.queuedBytes.Add(-bytes)
		refuse(b, protocol.CodeBackpressure, "")
		return false
	}
	ok := false
	if requests <= lentRequests && bytes <= lentBytes {
		ok, lend = c.inbox.Offer(event{kind: evBatch, batch: b})
	} else {
		ok = c.inbox.Push(event{kind: evBatch, batch: b})
	}
	if !ok {
		refuse(b, protocol.CodeReadOnlyDegraded, "the broker is shutting down: reconnect and send again")
	}
	return lend
}

// refuse answers every request of a batch with an error, on the caller's goroutine.
func refuse(b *Batch, code protocol.ErrorCode, text string) {
	var frame []byte
	for i := range b.Requests {
		r := &b.Requests[i]
		frame = protocol.AppendErr(frame[:0], code, r.Op, text)
		r.Client.Complete(r.Req, frame)
		r.Client.Flush()
	}
	PutBatch(b)
}

// CommitRound queues a committed round of a journal, with one reference, without waking the coordinator. Rounds of a
// journal come in order. It reports whether somebody waits for what is in it: Nudge has to follow at once then, and
// otherwise within a few milliseconds. Waking another thread for every round would cost publishers more than it is worth.
func (c *Coordinator) CommitRound(journal int, r *wal.Round) (urgent bool) {
	urgent = c.watching.Load() ||
		slices.ContainsFunc(r.Entries, func(e wal.Entry) bool { return e.Stream.Kind != wal.Messages })
	if !c.inbox.PushQuietly(event{kind: evRound, journal: journal, round: r}) {
		r.Release()
	}
	return urgent
}

// Nudge has the coordinator look at the rounds that it was not told of.
func (c *Coordinator) Nudge() { c.inbox.Nudge() }

// Written tells that a journal's rounds up to n are in their segments.
func (c *Coordinator) Written(journal int, n wal.RoundNumber) {
	c.inbox.Push(event{kind: evWritten, journal: journal, number: n})
}

// ReadDone brings back a finished cold read.
func (c *Coordinator) ReadDone(req *wal.ReadRequest) {
	if !c.inbox.Push(event{kind: evRead, read: req}) && req.Chunk != nil {
		req.Chunk.Release()
	}
}

// Closed tells that a connection is gone. Nothing of that client may be submitted afterwards.
func (c *Coordinator) Closed(client Client) { c.inbox.Push(event{kind: evClosed, client: client}) }

// Stopping tells that the broker is about to close all connections: what is in flight on them returns as after a restart,
// without using up an attempt. Call it before the first of them is closed. Any goroutine.
func (c *Coordinator) Stopping() { c.stopping.Store(true) }

// Writable tells that a client's outstanding bytes fell below OutboundPause.
func (c *Coordinator) Writable(client Client) { c.inbox.Push(event{kind: evWritable, client: client}) }

// Interrupt ends a client's waiting PULLs: another request arrived behind them. Submit what came before first.
func (c *Coordinator) Interrupt(client Client) {
	c.inbox.Push(event{kind: evInterrupt, client: client})
}

// LogFailed tells that a journal has failed: nothing that is proposed will be committed any more. Who waits for a
// commit gets 0x2003.
func (c *Coordinator) LogFailed(reason string) {
	c.inbox.Push(event{kind: evLogFailed, text: reason})
}

// Refused tells that a proposed message was not stored and won't be.
func (c *Coordinator) Refused(proposal uint64, reason string) {
	c.inbox.Push(event{kind: evRefused, id: proposal, text: reason})
}

// Stats returns a picture of the present state.
func (c *Coordinator) Stats(ctx context.Context) (*Stats, error) {
	answer := make(chan *Stats, 1)
	if !c.inbox.Push(event{kind: evStats, stats: answer}) {
		return nil, ErrClosed
	}
	select {
	case s := <-answer:
		return s, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("waiting for the coordinator's statistics: %w", ctx.Err())
	}
}

func (c *Coordinator) handle(ev *event) {
	switch ev.kind {
	case evBatch:
		c.batch(ev.batch)
	case evRound:
		switch {
		case c.deposed:
			ev.round.Release()
		case c.standby:
			c.follow(ev.journal, ev.round)
		default:
			c.round(ev.journal, ev.round)
		}
	case evWritten:
		c.delivery.written(ev.journal, ev.number)
	case evRead:
		c.delivery.readDone(ev.read)
	case evClosed:
		c.closed(ev.client)
	case evWritable:
		c.delivery.writable(ev.client)
	case evInterrupt:
		c.delivery.interrupt(ev.client)
	case evStats:
		ev.stats <- c.statistics()
	case evLogFailed:
		c.logHasFailed(ev.text)
	case evRefused:
		c.delivery.refused(ev.id, ev.text)
	case evLead:
		c.lead(ev.epoch, ev.served)
	case evDepose:
		c.depose(ev.text)
	case evSilence:
		c.silenced[ev.journal] = true
	case evSnapshot:
		ev.snapshot(c.snapshots(ev.journal))
	case evFreeze:
		c.frozen = ev.text
	}
}

func (c *Coordinator) batch(b *Batch) {
	c.queuedRequests.Add(-int64(len(b.Requests)))
	c.queuedBytes.Add(-int64(len(b.Data)))
	if c.standby || c.deposed {
		refuse(b, protocol.CodeStaleLeaderEpoch, "this node does not lead the cluster")
		return
	}
	for i := range b.Requests {
		r := &b.Requests[i]
		c.request(r, b.Payload(r))
	}
	PutBatch(b)
}

// round feeds a committed round to delivery first: a topic's deletion in the same round comes after its messages.
func (c *Coordinator) round(journal int, r *wal.Round) {
	c.delivery.round(journal, r)
	for i := range r.Entries {
		if e := &r.Entries[i]; e.Stream.Kind == wal.Metadata {
			c.foldEntry(r, e)
		}
	}
	if len(c.groups.starting) > 0 {
		c.startGroups()
	}
	if len(c.groups.arrivals) > 0 {
		c.letIn()
	}
	r.Release()
}

// request handles one request. payload is borrowed.
func (c *Coordinator) request(r *Request, payload []byte) {
	c.open(r.Client)
	switch r.Op {
	case protocol.OpDeclare:
		c.handleDeclare(r, payload)
	case protocol.OpSub:
		c.handleSub(r, payload)
	case protocol.OpHeartbeat:
		c.handleHeartbeat(r, payload)
	case protocol.OpControlAck:
		c.handleControlAck(r, payload)
	case protocol.OpAck, protocol.OpNack:
		if c.logFailed != "" {
			c.answerErr(r.Client, r.Req, r.Op, protocol.CodeReadOnlyDegraded, journalFailed)
			return
		}
		if c.frozen != "" {
			c.answerErr(r.Client, r.Req, r.Op, protocol.CodeReadOnlyDegraded, c.frozen)
			return
		}
		c.delivery.request(r, payload)
	case protocol.OpPull, protocol.OpCredit:
		c.delivery.request(r, payload)
	case protocol.OpConnect, protocol.OpPub, protocol.OpPing, protocol.OpErr, protocol.OpOK, protocol.OpMsg, protocol.OpNotice:
		c.misrouted(r)
	default:
		c.misrouted(r)
	}
}

func (c *Coordinator) misrouted(r *Request) {
	c.answerErr(r.Client, r.Req, r.Op, protocol.CodeInternal, "diagnostic: coord-op")
	c.logger.Error("the coordinator got an operation that is not its own", "op", r.Op)
}

// refuseErr answers with the code that err wraps (0x000A if none); a code that closes the connection does so.
func (c *Coordinator) refuseErr(client Client, req uint64, op protocol.Op, err error) {
	code, ok := protocol.CodeOf(err)
	if !ok {
		c.logger.Error("a request failed without a code", "op", op, "err", err)
		c.answerErr(client, req, op, protocol.CodeInternal, "diagnostic: coord-code")
		return
	}
	if code.Closes() {
		client.Shut(code, op, withoutCode(err, code))
		return
	}
	c.answerErr(client, req, op, code, withoutCode(err, code))
}
