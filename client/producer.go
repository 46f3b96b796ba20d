package client

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	mathrand "math/rand/v2"
	"sync"

	"github.com/mortarmq/mortarmq/protocol"
)

// Producer publishes to one topic over a connection of its own. It may be used by several goroutines; messages of one
// goroutine to one partition are stored in the order of the calls.
//
// Every message is sent with a producer id and a sequence number, and kept until it is answered: after a lost
// connection the unanswered ones are sent again, in order, and the broker recognises those that it had stored.
type Producer struct {
	client *Client
	opts   ProducerOptions
	topic  Topic
	flags  uint16

	cancel context.CancelFunc
	done   chan struct{} // the session has ended
	link   *link         // belongs to the session's goroutine

	mu       sync.Mutex
	closed   bool  // no more Sends
	err      error // why the session ended
	parts    []*partition
	spread   int // the partition that the next message without key goes to
	inflight ring[entry]
	bytes    int // of all unanswered frames
	count    int // all unanswered messages
	waiting  int // goroutines that wait for room (or for Flush)
	room     chan struct{}
	out      outbox
	finished []completion // delivered by finishLocked's caller after unlocking
}

// NewProducer returns a Producer for an existing topic; ErrUnknownTopic if Declare never created it.
func (c *Client) NewProducer(ctx context.Context, topic string, opts ProducerOptions) (*Producer, error) {
	if err := opts.setDefaults(); err != nil {
		return nil, fmt.Errorf("producer for %q: %w", topic, err)
	}
	t, err := c.Lookup(ctx, topic)
	if err != nil {
		return nil, fmt.Errorf("producer: %w", err)
	}
	if t.Partitions == 0 {
		return nil, fmt.Errorf("producer for %q: the broker says that the topic has no partitions", topic)
	}
	p := &Producer{
		client: c, opts: opts, topic: t, flags: uint16(opts.Durability), room: make(chan struct{}),
		parts: make([]*partition, t.Partitions),
	}
	p.out.init(&p.mu)
	p.spread = mathrand.IntN(len(p.parts)) // many short-lived producers spread as well as one that lives long
	id := p.newProducerID()
	for i := range p.parts {
		p.parts[i] = &partition{id: uint16(i), producerID: id, next: 1}
	}
	if p.cancel, p.done, err = c.start(p); err != nil {
		return nil, err
	}
	return p, nil
}

// newProducerID draws a random id; 0 means a plain publish.
func (p *Producer) newProducerID() uint64 {
	if p.opts.Plain {
		return 0
	}
	for {
		var b [8]byte
		_, _ = rand.Read(b[:]) // never fails, by its documentation
		if id := binary.BigEndian.Uint64(b[:]); id != 0 {
			return id
		}
	}
}

// Topic returns what the broker said about the topic.
func (p *Producer) Topic() Topic { return p.topic }

// waiters are the futures of Send, reused because nobody else sees them.
var waiters = sync.Pool{New: func() any { return &waiter{ch: make(chan struct{}, 1)} }}

type waiter struct {
	ch     chan struct{}
	result Result
	err    error
	wake   func(Result, error)
}

func getWaiter() *waiter {
	w := waiters.Get().(*waiter)
	if w.wake == nil {
		w.wake = func(r Result, err error) {
			w.result, w.err = r, err
			w.ch <- struct{}{}
		}
	}
	return w
}

// Send publishes a message and waits for the broker's answer. If ctx ends first the message may be stored all the same.
func (p *Producer) Send(ctx context.Context, m Record) (Result, error) {
	w := getWaiter()
	if err := p.enqueue(ctx, &m, nil, w.wake); err != nil {
		waiters.Put(w)
		return Result{}, err
	}
	select {
	case <-w.ch:
		r, err := w.result, w.err
		waiters.Put(w)
		return r, err
	case <-ctx.Done(): // w is left to the answer that is still to come
		return Result{}, fmt.Errorf("publish to %q: %w; the message may be stored", p.topic.Name, ctx.Err())
	}
}

// SendAsync publishes a message without waiting for the answer. It blocks, at most until ctx ends, while
// MaxInFlight or MaxBufferedBytes is used up. Errors of the call itself are in the Future too.
func (p *Producer) SendAsync(ctx context.Context, m Record) *Future {
	f := new(Future)
	if err := p.enqueue(ctx, &m, f, nil); err != nil {
		f.finish(Result{Tag: m.Tag}, err)
	}
	return f
}

// SendFunc is SendAsync with a function in place of a Future: the cheapest way to publish much. done is called exactly
// once if SendFunc returns nil, else never. It runs on the goroutine that reads the broker's answers, in the order of
// the messages of each partition, and must not block: calling Send, Flush or Close from it deadlocks.
func (p *Producer) SendFunc(ctx context.Context, m Record, done func(Result, error)) error {
	return p.enqueue(ctx, &m, nil, done)
}

// enqueue encodes a message behind the others, once there is room for it.
func (p *Producer) enqueue(ctx context.Context, m *Record, future *Future, f func(Result, error)) error {
	if len(m.Key) > protocol.MaxKeyLen {
		return fmt.Errorf("publish to %q: %w: %d bytes", p.topic.Name, ErrKeyTooLarge, len(m.Key))
	}
	if len(m.Value) > protocol.MaxValueLen {
		return fmt.Errorf("publish to %q: %w: %d bytes", p.topic.Name, ErrValueTooLarge, len(m.Value))
	}
	size := protocol.PubFrameLen(len(m.Key), len(m.Value))
	p.mu.Lock()
	defer p.mu.Unlock()
	part, err := p.route(m.Key)
	if err != nil {
		return err
	}
	for !p.closed && (part.unanswered >= p.opts.MaxInFlight || (p.count > 0 && p.bytes+size > p.opts.MaxBufferedBytes)) {
		if err := p.wait(ctx); err != nil {
			return fmt.Errorf("publish to %q: no room for more unanswered messages: %w", p.topic.Name, err)
		}
	}
	if p.closed {
		return p.closedError()
	}
	e := entry{part: part, seq: part.next, future: future, f: f, tag: m.Tag, size: size}
	pub := protocol.Pub{TopicID: p.topic.ID, Partition: part.id, ProducerID: part.producerID, Flags: p.flags,
		Key: m.Key, Value: m.Value}
	if part.producerID != 0 {
		pub.ProducerSeq = e.seq
	}
	if m.Redriven {
		pub.Flags |= protocol.PubFlagRedriven
	}
	part.next++
	part.unanswered++
	p.count++
	p.bytes += size
	if part.holding {
		e.chunk = &chunk{buf: pub.AppendFrame(make([]byte, 0, size)), refs: 1}
		part.fresh.push(e)
		return nil
	}
	e.chunk, e.off = p.out.reserve(size)
	e.chunk.buf = pub.AppendFrame(e.chunk.buf)
	p.inflight.push(e)
	part.inflight++
	p.out.wake()
	return nil
}

// route picks the partition of a key. Messages without key go round by turns.
func (p *Producer) route(key []byte) (*partition, error) {
	if p.opts.Route != nil {
		id := p.opts.Route(key, uint16(len(p.parts)))
		if int(id) >= len(p.parts) {
			return nil, fmt.Errorf("publish to %q: Route chose partition %d of %d", p.topic.Name, id, len(p.parts))
		}
		return p.parts[id], nil
	}
	if len(key) > 0 {
		return p.parts[protocol.Route(key, uint16(len(p.parts)))], nil
	}
	part := p.parts[p.spread]
	if p.spread++; p.spread == len(p.parts) {
		p.spread = 0
	}
	return part, nil
}

// wait releases the lock until something was answered or the session ended.
func (p *Producer) wait(ctx context.Context) error {
	ch := p.room
	p.waiting++
	p.mu.Unlock()
	var err error
	select {
	case <-ch:
	case <-ctx.Done():
		err = ctx.Err()
	}
	p.mu.Lock()
	p.waiting--
	return err
}

// broadcast wakes everybody in wait.
func (p *Producer) broadcast() {
	if p.waiting > 0 {
		close(p.room)
		p.room = make(chan struct{})
	}
}

func (p *Producer) closedError() error {
	if p.err != nil {
		return fmt.Errorf("publish to %q: %w", p.topic.Name, p.err)
	}
	return fmt.Errorf("publish to %q: %w", p.topic.Name, ErrClosed)
}

// Flush waits until nothing is unanswered. Messages that others send meanwhile make it wait longer.
func (p *Producer) Flush(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.count > 0 {
		if err := p.wait(ctx); err != nil {
			return fmt.Errorf("flush %q: %d messages are unanswered: %w", p.topic.Name, p.count, err)
		}
	}
	return nil
}

// Close refuses further messages, waits for the answers to the earlier ones until ctx ends, and closes the connection.
// What is unanswered then fails with ErrClosed, and may be stored all the same.
func (p *Producer) Close(ctx context.Context) error {
	p.mu.Lock()
	p.closed = true
	p.broadcast()
	p.mu.Unlock()
	err := p.Flush(ctx)
	p.cancel()
	<-p.done
	return err
}
