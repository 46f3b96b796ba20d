package engine

import (
	"sync"

	"github.com/mortarmq/mortarmq/engine/coord"
	"github.com/mortarmq/mortarmq/protocol"
)

// Bounds of what waits between the event loops and a shard.
const (
	// maxQueuedBytes is how many bytes of publishes may wait in front of one shard; beyond it PUB gets 0x4001.
	maxQueuedBytes = 64 << 20
	// batchBytes is the size from which a batch is handed over before its event ends.
	batchBytes = 256 << 10
	// batchRequests likewise, in requests.
	batchRequests = 4096
	// requestCost is what a request counts against maxQueuedBytes beside its key and value.
	requestCost = 96
)

// pubRequest is one publish on its way to its shard. Key and value lie in the batch's data, or in memory of their own.
type pubRequest struct {
	client      coord.Client
	req         uint64
	producerID  uint64
	producerSeq uint64
	off         uint32 // of the key in data; the value follows it
	valueLen    uint32
	keyLen      uint16
	topic       uint16
	partition   uint16
	durability  protocol.Durability
	redriven    bool
	owned       int32 // index in pubBatch.owned, or -1
}

// ownedPub is a large publish whose bytes were handed over instead of copied.
type ownedPub struct {
	key, value []byte
	owner      coord.Releaser
}

// pubBatch carries the publishes of one readable event to one shard: one hand-over, one lock, one wake-up.
type pubBatch struct {
	requests []pubRequest
	data     []byte
	owned    []ownedPub
	bytes    int64
}

var pubBatches = sync.Pool{New: func() any { return new(pubBatch) }}

func (b *pubBatch) recycle() {
	clear(b.requests) // clients must not be kept alive
	b.requests = b.requests[:0]
	b.data = b.data[:0]
	clear(b.owned)
	b.owned = b.owned[:0]
	b.bytes = 0
	pubBatches.Put(b)
}

// Ingress takes the requests of one event loop, checks what can be checked without a shard, and hands them on in
// batches. It belongs to the goroutine of its loop.
type Ingress struct {
	eng     *Engine
	batches []*pubBatch // by shard
	control *coord.Batch
	// turn spreads messages without key and producer over the partitions.
	turn uint32
	// lent: a batch for a shard was left to Lend; lentControl: one for the coordinator.
	lent, lentControl bool
	// scratch holds an error answer while it is handed to the client.
	scratch []byte
}

// NewIngress returns the intake for one event loop.
func (e *Engine) NewIngress() *Ingress {
	return &Ingress{eng: e, batches: make([]*pubBatch, len(e.shards))}
}

// Publish takes a PUB. p and what it points to are borrowed: key and value are copied before it returns. The answer
// comes through c.Complete(req, ...), possibly before Publish returns.
func (in *Ingress) Publish(c coord.Client, req uint64, p *protocol.Pub) {
	in.publish(c, req, p, nil)
}

// PublishOwned is Publish without the copy: p's key and value stay valid until own.Release is called, exactly once.
func (in *Ingress) PublishOwned(c coord.Client, req uint64, p *protocol.Pub, own coord.Releaser) {
	in.publish(c, req, p, own)
}

func (in *Ingress) publish(c coord.Client, req uint64, p *protocol.Pub, own coord.Releaser) {
	topic, partition, code, text := in.route(p)
	var sh *shard
	if code == 0 {
		sh = in.eng.shardOf(p.TopicID, partition)
		code, text = sh.admit()
	}
	if code != 0 {
		in.refuse(c, req, code, text)
		if own != nil {
			own.Release()
		}
		return
	}
	b := in.batches[sh.id]
	if b == nil {
		b = pubBatches.Get().(*pubBatch)
		in.batches[sh.id] = b
	}
	d := protocol.Durability(p.Flags & protocol.PubFlagDurability)
	if d == protocol.DurabilityTopic {
		d = topic.Durability
	}
	r := pubRequest{
		client: c, req: req,
		producerID: p.ProducerID, producerSeq: p.ProducerSeq,
		keyLen: uint16(len(p.Key)), valueLen: uint32(len(p.Value)),
		topic: p.TopicID, partition: partition,
		durability: d, redriven: p.Flags&protocol.PubFlagRedriven != 0, owned: -1,
	}
	if own != nil {
		r.owned = int32(len(b.owned))
		b.owned = append(b.owned, ownedPub{key: p.Key, value: p.Value, owner: own})
	} else {
		r.off = uint32(len(b.data))
		b.data = append(b.data, p.Key...)
		b.data = append(b.data, p.Value...)
	}
	b.requests = append(b.requests, r)
	b.bytes += requestCost + int64(len(p.Key)) + int64(len(p.Value))
	if b.bytes >= batchBytes || len(b.requests) >= batchRequests {
		in.handOver(sh, b)
	}
}

// route finds the topic and the partition of p, or says why there is none.
func (in *Ingress) route(p *protocol.Pub) (topic *coord.Topic, partition uint16, code protocol.ErrorCode, text string) {
	registry := in.eng.coord.Registry()
	topic, ok := registry.Topic(p.TopicID)
	if !ok && registry.Quarantined() {
		return nil, 0, protocol.CodeMetadataQuarantined, protocol.CodeMetadataQuarantined.Text()
	}
	if !ok {
		return nil, 0, protocol.CodeUnknownTopic, "no topic has this id: DECLARE the topic first (mortarmq topics create NAME)"
	}
	if (p.ProducerID == 0) != (p.ProducerSeq == 0) {
		return nil, 0, protocol.CodeProducerSeqInvalid, "producer_id and producer_seq must both be zero (a plain publish) or both be set (producer_seq counts from 1)"
	}
	if topic.Name[0] == '$' {
		return nil, 0, protocol.CodeInvalidTopic, "topics whose names begin with '$' are written by the broker alone: publish to a topic of your own"
	}
	partition = p.Partition
	if partition == protocol.AnyPartition {
		switch {
		case len(p.Key) > 0:
			partition = protocol.Route(p.Key, topic.Partitions)
		case p.ProducerID != 0:
			partition = uint16(p.ProducerID % uint64(topic.Partitions))
		default:
			partition = uint16(in.turn % uint32(topic.Partitions))
			in.turn++
		}
	}
	if partition >= topic.Partitions {
		return nil, 0, protocol.CodeUnknownPartition, "the topic has fewer partitions than that: DECLARE tells their number"
	}
	return topic, partition, 0, ""
}

func (in *Ingress) refuse(c coord.Client, req uint64, code protocol.ErrorCode, text string) {
	in.scratch = protocol.AppendErr(in.scratch[:0], code, protocol.OpPub, text)
	c.Complete(req, in.scratch)
}

// Request takes any request that is the coordinator's: DECLARE, SUB, ACK, NACK, PULL, HEARTBEAT, CONTROL_ACK, CREDIT.
// The payload is borrowed (copied). It is decoded there; a malformed one shuts the connection.
func (in *Ingress) Request(c coord.Client, req uint64, op protocol.Op, payload []byte) {
	if in.control == nil {
		in.control = coord.GetBatch()
	}
	in.control.Add(c, req, op, payload)
	if len(in.control.Data) >= batchBytes || len(in.control.Requests) >= batchRequests {
		in.flushControl()
	}
}

// Interrupt ends c's waiting PULLs: another request arrived behind them. It takes effect in order with Request.
func (in *Ingress) Interrupt(c coord.Client) {
	in.flushControl()
	in.eng.coord.Interrupt(c)
}

// Flush hands over everything taken since the last one. The loop calls it at the end of each readable event. If it reports
// lend, little was taken in and nobody was woken for it: the loop calls Lend when it has looked at its other events.
func (in *Ingress) Flush() (lend bool) {
	for i, b := range in.batches {
		if b != nil {
			in.handOver(in.eng.shards[i], b)
		}
	}
	in.flushControl()
	return in.lent || in.lentControl
}

// Lend sees to what Flush has left, on the loop's thread. It may take as long as a write to the disk.
func (in *Ingress) Lend() {
	if !in.lent && !in.lentControl {
		return
	}
	control := in.lentControl
	in.lent, in.lentControl = false, false
	in.eng.lend(control)
}

func (in *Ingress) handOver(sh *shard, b *pubBatch) {
	in.batches[sh.id] = nil
	sh.queued.Add(b.bytes)
	ok := false
	if in.small(sh, b) {
		var asleep bool
		ok, asleep = sh.inbox.Offer(message{kind: msgPublish, batch: b})
		in.lent = in.lent || asleep
	} else {
		ok = sh.inbox.Push(message{kind: msgPublish, batch: b})
	}
	if !ok {
		sh.refuseBatch(b, protocol.CodeReadOnlyDegraded, "the broker is shutting down: reconnect and send again")
	}
}

func (in *Ingress) flushControl() {
	if b := in.control; b != nil {
		in.control = nil
		if in.eng.coord.Submit(b) {
			in.lentControl = true
		}
	}
}

// small tells whether b may be seen to on the loop's thread.
func (in *Ingress) small(sh *shard, b *pubBatch) bool {
	return sh.lends() && len(b.requests) <= lentRequests && b.bytes <= lentBytes
}
