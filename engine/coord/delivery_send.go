package coord

import (
	"fmt"
	"sync"

	"github.com/mortarmq/mortarmq/engine/ledger"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

const (
	// turnBytes is how much is sent to one consumer before it is the next one's turn.
	turnBytes = 512 << 10
	// loopBytes is how much is sent before the coordinator looks at its inbox again.
	loopBytes = 4 << 20
	// partitionBytes is how much one partition sends before the consumer's next one does.
	partitionBytes = 64 << 10
	// sendBufferBytes is the size of the buffers in which small messages leave together.
	sendBufferBytes = 64 << 10
	// pushBytes is the size up to which frames are left to the connection to copy: a buffer each would be wasted.
	pushBytes = 4 << 10
)

// sendBuffer is the memory of frames on their way out.
type sendBuffer struct{ b []byte }

var sendBuffers = sync.Pool{New: func() any { return &sendBuffer{make([]byte, 0, sendBufferBytes)} }}

// Release gives the buffer back to the pool.
func (s *sendBuffer) Release() {
	if cap(s.b) == sendBufferBytes {
		s.b = s.b[:0]
		sendBuffers.Put(s)
	}
}

// stop is why no more messages are sent to a consumer.
type stop uint8

const (
	stopNone     stop = iota
	stopEmpty         // nothing is deliverable
	stopReading       // nothing but what is being read from disk
	stopCredit        // the available credit is used up, or too small for every next message
	stopShort         // it is too small for the next message of a partition
	stopOversize      // every next message is larger than the whole window
	stopLimit         // the PULL has all it asked for
	stopTurn          // others are next
	stopPaused        // the connection has enough to send
)

// serveTurn sends to every consumer in turn, each at most once.
func (d *delivery) serveTurn() {
	for n, sent := d.turn.len(), 0; n > 0 && sent < loopBytes; n-- {
		con := d.turn.pop()
		con.queued = false
		if con.wants() {
			sent += d.serve(con)
		}
	}
}

// serve sends what a consumer may get now and answers the PULLs that are done. It returns the bytes sent.
func (d *delivery) serve(con *consumer) int {
	budget := turnBytes
	for {
		p := con.pulls[0]
		if p == nil && !con.sub.stream {
			break
		}
		why, big := d.fill(con, p, &budget)
		if p != nil && d.answerPull(p, why, big) {
			continue
		}
		switch why {
		case stopOversize:
			d.pushOversize(con, big)
		case stopPaused:
			con.paused = true
		case stopTurn:
			d.enqueue(con)
		case stopNone, stopEmpty, stopReading, stopCredit, stopShort, stopLimit:
		}
		break
	}
	d.flushOut(con)
	return turnBytes - budget
}

// answerPull answers a PULL if it is done, and reports whether it did.
func (d *delivery) answerPull(p *pull, why stop, big *reader) bool {
	some := p.msgs > 0
	enough := some && p.bytes >= p.minBytes
	switch why {
	case stopLimit:
	case stopCredit:
		if !some {
			d.finish(p, protocol.CodeNoCredit, "")
			return true
		}
	case stopOversize:
		if !some {
			d.finish(p, protocol.CodeMessageExceedsCredit, d.oversizeText(big))
			return true
		}
	case stopEmpty:
		if !enough && !p.expired && !p.hurried {
			return false
		}
	case stopReading:
		if !enough && !p.hurried && !(p.expired && some) {
			if !p.expired {
				return false
			}
			// It gets what the disk has, if that comes in time: without it a reader of old messages that does not wait
			// would never get any.
			if p.latest > d.c.real {
				p.expired, p.deadline = false, p.latest
				d.waiting.push(p)
				return false
			}
		}
	case stopTurn:
		if !p.hurried || !some {
			return false
		}
	case stopPaused:
		if !p.hurried && !p.expired {
			return false
		}
	case stopNone, stopShort:
		return false
	}
	d.finish(p, 0, "")
	return true
}

// fill sends messages of the consumer's partitions, one after the other, until something stops it. With stopOversize it
// returns the partition whose next message is larger than the window.
func (d *delivery) fill(con *consumer, p *pull, budget *int) (why stop, big *reader) {
	reading := false
	for con.ready.n > 0 {
		if d.full(con) {
			return stopPaused, nil
		}
		rd := con.ready.pop()
		switch why := d.sendFrom(con, rd, p, budget); why {
		case stopEmpty:
		case stopReading:
			reading = true
		case stopShort:
			con.short.push(rd, uint64(len(d.rec.Key)+len(d.rec.Value)))
		case stopCredit, stopLimit, stopTurn:
			con.ready.push(rd)
			return why, nil
		case stopNone, stopOversize, stopPaused:
			con.ready.push(rd)
		}
	}
	switch {
	case len(con.short) > 0 && con.short[0].need > con.credit.windowBytes:
		return stopOversize, con.short[0]
	case len(con.short) > 0:
		return stopCredit, nil
	case reading:
		return stopReading, nil
	default:
		return stopEmpty, nil
	}
}

// sendFrom sends messages of one partition, until something stops it or the next partition's turn has come (stopNone).
func (d *delivery) sendFrom(con *consumer, rd *reader, p *pull, budget *int) stop {
	if rd.draining || rd.ledger.err != nil {
		return stopEmpty
	}
	floor := *budget - partitionBytes
	for {
		seq, attempt, ok := rd.cur.Peek(d.c.now)
		if !ok {
			d.dropPlace(&rd.old)
			d.dropBelow(&rd.cold, wal.Sequence(rd.cur.Next()))
			d.dropBelow(&rd.ahead, wal.Sequence(rd.cur.Next()))
			return stopEmpty
		}
		if con.credit.count == 0 {
			return stopCredit
		}
		src, ok := d.find(rd, wal.Sequence(seq), &d.rec)
		if !ok {
			d.demand(rd, wal.Sequence(seq), seq == rd.cur.Next())
			return stopReading
		}
		size := uint64(len(d.rec.Key) + len(d.rec.Value))
		switch {
		case size > con.credit.bytes:
			return stopShort
		case p != nil && p.msgs > 0 && p.maxBytes > 0 && p.bytes+size > p.maxBytes:
			return stopLimit
		}
		d.deliver(con, rd, seq, attempt, src)
		con.credit.take(size)
		*budget -= protocol.MsgFrameLen(len(d.rec.Key), len(d.rec.Value))
		if p != nil {
			p.msgs++
			p.bytes += size
			if p.msgs == p.maxMsgs {
				return stopLimit
			}
		}
		if *budget <= 0 {
			return stopTurn
		}
		if *budget <= floor {
			return stopNone
		}
	}
}

// deliveryIDEpochBits is how many bits of a delivery id, at the top, hold the leader epoch.
const deliveryIDEpochBits = 24

// deliver sends one message, d.rec, and puts it under a lease.
func (d *delivery) deliver(con *consumer, rd *reader, seq ledger.Sequence, attempt uint16, src source) {
	d.deliveries++
	id := uint64(d.deps.epoch())<<(64-deliveryIDEpochBits) | d.deliveries
	rd.cur.Take(seq, ledger.DeliveryID(id), d.c.now)
	if rd.sample.seq == 0 && attempt == 1 {
		rd.sample = sample{seq: seq, since: d.rec.TimestampMs}
	}
	m := &d.msg
	m.SubscriptionID, m.TopicID, m.Partition = con.sub.id, rd.part.topic, rd.part.id
	m.Sequence, m.DeliveryID, m.Attempt, m.OwnershipEpoch = uint64(seq), id, attempt, rd.epoch
	m.ProducerID, m.ProducerSeq, m.Key, m.Value = d.rec.ProducerID, d.rec.ProducerSeq, d.rec.Key, d.rec.Value
	m.Flags = 0
	if d.rec.Flags&wal.FlagRedriven != 0 {
		m.Flags = protocol.MsgFlagRedriven
	}
	if len(m.Value) >= ZeroCopyMin {
		d.sendLarge(con, m, src)
		return
	}
	if need := protocol.MsgFrameLen(len(m.Key), len(m.Value)); d.out != nil && len(d.out.b)+need > sendBufferBytes {
		d.flushOut(con)
	}
	if d.out == nil {
		d.out = sendBuffers.Get().(*sendBuffer)
	}
	d.out.b = m.AppendFrame(d.out.b)
}

// sendLarge sends a message without copying its value.
func (d *delivery) sendLarge(con *consumer, m *protocol.Msg, src source) {
	d.flushOut(con)
	client := con.sub.client
	d.head = m.AppendHeader(d.head[:0], len(m.Value))
	src.Retain()
	client.PushValue(d.head, m.Value, src)
	d.c.flushLater(client)
}

// full tells whether the consumer's connection has enough to send. What was gathered is pushed before the question is
// settled: Writable follows only if the connection itself has seen more than OutboundPause.
func (d *delivery) full(con *consumer) bool {
	client := con.sub.client
	if d.out != nil && client.Outstanding()+len(d.out.b) > OutboundPause {
		d.flushOut(con)
	}
	return client.Outstanding() > OutboundPause
}

// flushOut pushes the frames that were gathered for a consumer.
func (d *delivery) flushOut(con *consumer) {
	if d.out == nil || len(d.out.b) == 0 {
		return
	}
	client := con.sub.client
	if len(d.out.b) <= pushBytes {
		client.Push(d.out.b)
		d.out.b = d.out.b[:0]
	} else {
		client.PushOwned(d.out.b, d.out)
		d.out = nil
	}
	d.c.flushLater(client)
}

// pushOversize tells a streaming consumer, once per message and window, why it gets no more of the partition.
func (d *delivery) pushOversize(con *consumer, rd *reader) {
	seq, _, ok := rd.cur.Peek(d.c.now)
	if !ok || !con.sub.stream || rd.reported == wal.Sequence(seq) && rd.reportedAt == con.credit.epoch {
		return
	}
	rd.reported, rd.reportedAt = wal.Sequence(seq), con.credit.epoch
	d.flushOut(con)
	d.frame = protocol.AppendErr(d.frame[:0], protocol.CodeMessageExceedsCredit, protocol.OpMsg, d.oversizeText(rd))
	con.sub.client.Push(d.frame)
	d.c.flushLater(con.sub.client)
}

// oversizeText names the next message of a partition, which is in con.short.
func (d *delivery) oversizeText(rd *reader) string {
	seq, _, ok := rd.cur.Peek(d.c.now)
	if !ok {
		return ""
	}
	return fmt.Sprintf("topic %d partition %d sequence %d has %d bytes, more than the whole credit window: raise credit_bytes", rd.part.topic, rd.part.id, seq, rd.need)
}
