package client

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// maxRenewals is how many times in a row a partition's producer id is replaced because the broker sees a gap, before the
// publish fails: a broker that sees a gap before sequence 1 is not going to change its mind.
const maxRenewals = 3

// The producer id and sequence in a PUB frame: behind length, op, topic_id and partition.
const (
	frameProducerID  = protocol.HeaderSize + 2 + 2
	frameProducerSeq = frameProducerID + 8
)

// partition is a producer's side of a partition.
//
// It is open as long as all goes well: messages go straight to the connection. When one is refused in a way that asks
// for a retry, or fails for good and so leaves a hole in the sequence, the partition is holding: the messages behind
// the refused one, which the broker refuses as well, gather in held, and new ones behind them in fresh. When nothing of
// the partition is in flight any more and the pause is over, both are sent in order and the partition is open.
type partition struct {
	id         uint16
	producerID uint64
	next       uint64 // the next message's sequence
	unanswered int    // in flight, held and fresh
	inflight   int
	held       ring[entry]
	fresh      ring[entry]
	holding    bool
	renew      bool // number what is held anew, under a new producer id
	pause      bool // wait before it is sent again
	resending  bool // the timer for it runs
	renewals   int
	failures   int
	since      time.Time // of the first failure without a success behind it
	last       error
}

// entry is an unanswered message.
type entry struct {
	part   *partition
	chunk  *chunk // holds its frame at off
	off    int
	size   int
	seq    uint64
	tag    uint64
	future *Future
	f      func(Result, error)
	again  bool // it was sent before: the broker may have it
}

func (e *entry) frame() []byte { return e.chunk.buf[e.off : e.off+e.size] }

// hold puts e into its partition's queue, with its frame in memory of its own: a chunk is shared with messages that are
// answered long before.
func (p *Producer) hold(e entry) {
	own := &chunk{buf: append(make([]byte, 0, e.size), e.frame()...), refs: 1}
	p.out.release(e.chunk)
	e.chunk, e.off = own, 0
	e.again = true
	e.part.held.push(e)
}

// transmit appends e's frame to the stream.
func (p *Producer) transmit(e entry) {
	old, frame := e.chunk, e.frame()
	e.chunk, e.off = p.out.reserve(e.size)
	e.chunk.buf = append(e.chunk.buf, frame...)
	p.out.release(old)
	p.inflight.push(e)
	e.part.inflight++
}

// resend sends what a partition holds.
func (p *Producer) resend(part *partition) {
	if part.renew {
		part.producerID = p.newProducerID()
		part.next = 1
		p.renumber(part, &part.held)
		p.renumber(part, &part.fresh)
	}
	part.renew, part.pause, part.holding = false, false, false
	for part.held.len() > 0 {
		p.transmit(part.held.pop())
	}
	for part.fresh.len() > 0 {
		p.transmit(part.fresh.pop())
	}
	p.out.wake()
}

// renumber writes the partition's producer id and the next sequences into the frames of queue.
func (p *Producer) renumber(part *partition, queue *ring[entry]) {
	for i := range queue.len() {
		e := queue.at(i)
		e.seq = part.next
		e.again = false
		part.next++
		if part.producerID != 0 {
			binary.BigEndian.PutUint64(e.frame()[frameProducerID:], part.producerID)
			binary.BigEndian.PutUint64(e.frame()[frameProducerSeq:], e.seq)
		}
	}
}

// settle sends a holding partition's messages again as soon as that is possible: when all that is in flight is answered
// and, if the broker asked for patience, after a pause.
func (p *Producer) settle(part *partition) {
	if !part.holding || part.inflight > 0 || part.resending {
		return
	}
	if !part.pause {
		p.resend(part)
		return
	}
	if time.Since(part.since) > p.opts.DeliveryTimeout {
		p.giveUp(part, part.last)
		return
	}
	part.resending = true
	code, _ := protocol.CodeOf(part.last)
	pause := p.client.cfg.refusalBackoff(code, part.failures)
	part.failures++
	time.AfterFunc(pause, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		part.resending = false
		if part.holding && part.inflight == 0 {
			p.resend(part)
		}
	})
}

// giveUp fails all that a partition holds. The broker may have some of it, so the rest starts under a new producer id.
func (p *Producer) giveUp(part *partition, cause error) {
	p.failAll(part, fmt.Errorf("publish to %q, partition %d: %w: %w", p.topic.Name, part.id, ErrDeliveryTimeout, cause))
	part.renew = !p.opts.Plain
	part.failures, part.since, part.last = 0, time.Time{}, nil
	p.resend(part)
}

// failAll fails what a partition holds.
func (p *Producer) failAll(part *partition, err error) {
	for _, queue := range []*ring[entry]{&part.held, &part.fresh} {
		for queue.len() > 0 {
			e := queue.pop()
			p.finish(&e, Result{}, err)
		}
	}
}

// finish ends e; the completion is delivered by whoever unlocks.
func (p *Producer) finish(e *entry, r Result, err error) {
	r.Partition, r.Tag = e.part.id, e.tag
	p.out.release(e.chunk)
	e.part.unanswered--
	p.count--
	p.bytes -= e.size
	p.finished = append(p.finished, completion{future: e.future, f: e.f, result: r, err: err})
}

// serve is one connection's life: everything unanswered is sent again, then answers are read.
func (p *Producer) serve(l *link) (progress bool, err error) {
	p.mu.Lock()
	p.out.reset()
	p.repeat()
	p.broadcast()
	p.unlock(nil)

	p.link = l // only read by this goroutine
	written := p.out.start(l)
	var before uint64
	keepalive := newTicker(p.client.cfg.keepalive, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.out.sent == before {
			p.ping()
		}
		before = p.out.sent
	})
	watch := newTicker(p.client.cfg.tick, func() {
		if p.waits() {
			p.client.owes(l)
		}
	})
	progress, err = p.read(l)
	watch.stop()
	keepalive.stop()
	l.close()
	p.mu.Lock()
	p.out.halt()
	p.mu.Unlock()
	<-written
	return progress, err
}

// waits reports whether the broker owes an answer.
func (p *Producer) waits() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.inflight.len() > 0
}

// repeat puts everything unanswered into the new stream: first what was in flight, then what was held, which for each
// partition is the order of its sequences.
func (p *Producer) repeat() {
	for n := p.inflight.len(); n > 0; n-- {
		e := p.inflight.pop()
		e.part.inflight--
		e.again = true
		if e.part.holding { // behind a refused one: it must not overtake
			p.hold(e)
			continue
		}
		p.transmit(e)
	}
	for _, part := range p.parts {
		p.settle(part)
	}
}

func (p *Producer) ping() {
	c, _ := p.out.reserve(protocol.HeaderSize)
	c.buf = protocol.AppendPing(c.buf)
	c.refs--
	p.out.wake()
}

// read takes answers until the connection breaks. The lock is taken once per batch of received frames.
func (p *Producer) read(l *link) (progress bool, err error) {
	var done []completion
	for {
		op, payload, err := l.next()
		if err != nil {
			return progress, err
		}
		p.mu.Lock()
		for {
			var ok bool
			if ok, err = p.answer(op, payload); ok {
				progress = true
			}
			if err != nil || !l.buffered() {
				break
			}
			if op, payload, err = l.next(); err != nil {
				break
			}
		}
		p.broadcast()
		done = p.unlock(done)
		if err != nil {
			return progress, err
		}
	}
}

// unlock unlocks and delivers what finished. spare is memory to use for the next completions; it returns the present
// one for the same purpose.
func (p *Producer) unlock(spare []completion) []completion {
	done := p.finished
	p.finished = spare[:0]
	p.mu.Unlock()
	for i := range done {
		done[i].deliver()
	}
	clear(done)
	return done
}

// answer handles one frame from the broker. stored says that a message was stored. An error means that the connection
// is of no further use.
func (p *Producer) answer(op protocol.Op, payload []byte) (stored bool, err error) {
	switch op {
	case protocol.OpOK:
		var ok protocol.OKFrame
		if err := ok.Decode(payload); err != nil {
			return false, err
		}
		if ok.RequestOp != protocol.OpPub {
			return false, nil // PING's
		}
		return true, p.stored(ok.Result)
	case protocol.OpErr:
		var refusal protocol.ErrFrame
		if err := refusal.Decode(payload); err != nil {
			return false, err
		}
		return false, p.refused(refusal.Err())
	default:
		return false, nil // not for a producer
	}
}

func (p *Producer) unexpected(op protocol.Op) error {
	return fmt.Errorf("client: %v answers a PUB although none is unanswered", op)
}

func (p *Producer) stored(result []byte) error {
	if p.inflight.len() == 0 {
		return p.unexpected(protocol.OpOK)
	}
	var r protocol.PubResult
	if err := r.Decode(result); err != nil {
		return err
	}
	e := p.inflight.pop()
	part := e.part
	part.inflight--
	if part.failures != 0 || part.renewals != 0 || part.last != nil {
		part.failures, part.renewals, part.since, part.last = 0, 0, time.Time{}, nil
	}
	p.finish(&e, Result{
		Sequence: r.Sequence, Durability: r.Durability, LeaderEpoch: r.LeaderEpoch, CommitSeq: r.CommitSeq,
		Deduplicated: r.Flags&protocol.ResultFlagDeduplicated != 0,
	}, nil)
	p.settle(part)
	return nil
}

// refused handles an ERR.
func (p *Producer) refused(refusal *protocol.Error) error {
	code := refusal.Code
	if elsewhere(refusal) {
		return refusal // everything unanswered goes to the leader
	}
	p.client.refused(p.link, code)
	if refusal.RequestOp != protocol.OpPub {
		if code.Closes() {
			return refusal
		}
		return nil
	}
	if p.inflight.len() == 0 {
		return p.unexpected(protocol.OpErr)
	}
	if code.Closes() && code != protocol.CodeMalformedPayload {
		return refusal
	}
	e := p.inflight.pop()
	part := e.part
	part.inflight--
	switch {
	case code.Retriable():
		p.fail(part, refusal)
		part.holding, part.pause = true, true
		p.hold(e)
	case code == protocol.CodeSeqGap && part.holding:
		p.hold(e) // because of the refused one before it
	case code == protocol.CodeSeqExpired && e.again:
		p.finish(&e, Result{Deduplicated: true}, nil) // stored by the earlier attempt
	case (code == protocol.CodeSeqGap || code == protocol.CodeSeqExpired) && part.renewals < maxRenewals && !p.opts.Plain:
		// All earlier ones are answered, so the broker has forgotten this producer.
		p.client.cfg.logger.Warn("registering the producer anew", "topic", p.topic.Name, "partition", part.id, "cause", refusal)
		part.renewals++
		part.holding, part.renew = true, true
		p.hold(e)
	default:
		// It will not be stored under this sequence, or perhaps it will: the ones behind it start anew.
		p.finish(&e, Result{}, refusal)
		if !p.opts.Plain {
			part.holding, part.renew = true, true
		}
	}
	p.settle(part)
	if code.Closes() {
		return refusal
	}
	return nil
}

func (p *Producer) fail(part *partition, cause error) {
	if part.since.IsZero() {
		part.since = time.Now()
	}
	part.last = cause
}

// down is called while there is no connection. Partitions that fail for too long give up.
func (p *Producer) down(cause error) error {
	if cause == nil {
		cause = ErrConnectionLost
	}
	p.mu.Lock()
	if p.count > 0 {
		stuck := false
		for _, part := range p.parts {
			if part.unanswered == 0 {
				continue
			}
			p.fail(part, cause)
			stuck = stuck || time.Since(part.since) > p.opts.DeliveryTimeout
		}
		if stuck {
			p.abandon(cause)
		}
	}
	p.unlock(nil)
	return nil
}

// abandon gives up the unanswered messages of the partitions whose time is over; there is no connection.
func (p *Producer) abandon(cause error) {
	for n := p.inflight.len(); n > 0; n-- {
		e := p.inflight.pop()
		if time.Since(e.part.since) <= p.opts.DeliveryTimeout {
			p.inflight.push(e)
			continue
		}
		e.part.inflight--
		p.hold(e)
	}
	for _, part := range p.parts {
		if part.unanswered > 0 && time.Since(part.since) > p.opts.DeliveryTimeout {
			p.giveUp(part, cause)
		}
	}
	p.broadcast()
}

// ended fails all that is unanswered.
func (p *Producer) ended(err error) {
	p.mu.Lock()
	p.closed = true
	if !errors.Is(err, ErrClosed) {
		p.err = err
	}
	err = fmt.Errorf("publish to %q: %w; the message may be stored", p.topic.Name, err)
	for p.inflight.len() > 0 {
		e := p.inflight.pop()
		p.finish(&e, Result{}, err)
	}
	for _, part := range p.parts {
		p.failAll(part, err)
	}
	p.broadcast()
	p.unlock(nil)
}
