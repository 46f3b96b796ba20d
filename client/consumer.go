package client

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

const (
	// takeBatch is how many messages of a lane a handler takes at once.
	takeBatch = 32
	// leaveTimeout bounds the good-bye of Close.
	leaveTimeout = 2 * time.Second
	// messageBlock and valueBlock are how many Message structs, and bytes of keys and values, are allocated at once.
	messageBlock = 64
	valueBlock   = 64 << 10
)

// Handler processes a message. nil acknowledges it; an error has it delivered again later, ErrReject moves it to the
// dead-letter topic. A panic counts as an error. ctx ends when Run is asked to stop; the message at hand should still be
// finished if that does not take long.
type Handler func(ctx context.Context, m *Message) error

// Consumer is a member of a group that reads one topic, over a connection of its own. Use either Run or Messages.
//
// The broker assigns partitions to the members. Messages of a partition are handed out in order. Everything about the
// membership (notices, heartbeats, credit, leases, reconnecting) happens in the background.
type Consumer struct {
	client *Client
	opts   ConsumerOptions
	topic  Topic
	group  string

	cancel    context.CancelFunc
	done      chan struct{} // the session has ended
	joined    chan struct{} // closed with the first successful SUB, or at the end
	link      *link         // belongs to the session's goroutine
	joinOnce  sync.Once
	messages  chan *Message
	pump      sync.Once
	processes sync.WaitGroup // handlers and the pump

	mu      sync.Mutex
	takers  sync.Cond // waited on by processes for a ready partition, by Close for answers
	err     error     // why the session ended
	trouble error     // why there is no connection, as far as it has been tried
	closing bool
	gone    bool        // LEAVE was sent on this connection: nothing may follow it
	stop    atomic.Bool // equals closing

	// The connection. Guarded by mu like everything below.
	live    bool
	pulling bool // a PULL is unanswered
	out     outbox
	answers ring[answer]  // ACKs and NACKs without an answer, in the order sent
	retry   []answer      // refused for the moment, sent again at the next tick
	stuck   int           // ACKs and NACKs that were refused for the moment and have not succeeded since
	beats   int           // heartbeats without an answer
	left    chan struct{} // closed when closing is set
	subID   uint16
	member  uint64 // 0: not a member
	joinEp  uint32 // the newest membership_epoch
	assEp   uint32 // the newest assignment_epoch

	// Callbacks. over: the session has ended, nothing will be added.
	calls  ring[callback]
	due    int           // calls and the one that is made at present
	called sync.Cond     // waited on by runCallbacks for work, by Close for its end
	quiet  chan struct{} // closed at the end of runCallbacks
	over   bool

	parts  map[uint16]*assigned
	recent *assigned // the one looked up last
	lanes  int       // of each partition
	seed   maphash.Seed
	ready  ring[*lane]
	tick   uint64 // seconds connected

	credit creditAccount
	msgs   []Message // what is left of the current blocks
	bytes  []byte
}

// answer is an ACK or NACK on its way.
type answer struct {
	m      *Message
	op     protocol.Op
	reason protocol.NackReason
	flags  uint16
	again  bool // it was refused for the moment; counted in stuck
	waiter chan error
}

// assigned is a partition that this member has, or had: the object lives as long as the Consumer, so that there is
// never more than one handler at work on one of its lanes.
type assigned struct {
	id       uint16
	owned    bool
	epoch    uint64   // ownership_epoch
	fenced   uint64   // the last one that was revoked
	lanes    []lane   // what is handed out, in the order of delivery within a lane
	head     *Message // the unfinished messages, in the order of delivery
	tail     *Message
	revoke   *protocol.Notice // to be confirmed when the messages at hand are finished
	revokeBy uint64           // tick
	stop     atomic.Bool      // revoke is set: what is not begun must not begin
	told     bool             // OnAssign was called, or will be, and OnRevoke not since
	calls    int              // callbacks that are due; meanwhile no message is handed out

	unsettled unsettled
}

// NewConsumer joins a group, which is created if it is new, and returns when the broker has accepted the member.
// ErrUnknownTopic if Declare never created the topic, ErrGroupMemberLimit if the group has enough members.
func (c *Client) NewConsumer(ctx context.Context, topic, group string, opts ConsumerOptions) (*Consumer, error) {
	if err := opts.setDefaults(); err != nil {
		return nil, fmt.Errorf("consumer for %q: %w", topic, err)
	}
	if err := protocol.ValidateGroup([]byte(group)); err != nil {
		return nil, fmt.Errorf("consumer for %q: %w", topic, err)
	}
	t, err := c.Lookup(ctx, topic)
	if err != nil {
		return nil, fmt.Errorf("consumer: %w", err)
	}
	k := &Consumer{client: c, opts: opts, topic: t, group: group, joined: make(chan struct{}), messages: make(chan *Message, takeBatch),
		parts: map[uint16]*assigned{}, lanes: opts.lanes(), seed: maphash.MakeSeed(), left: make(chan struct{}), quiet: make(chan struct{})}
	k.takers.L, k.called.L = &k.mu, &k.mu
	k.out.init(&k.mu)
	k.credit.init(k)
	if k.cancel, k.done, err = c.start(k); err != nil {
		return nil, err
	}
	go k.runCallbacks()
	select {
	case <-k.joined:
		if err := k.Err(); err != nil {
			return nil, fmt.Errorf("consumer for %q in group %q: %w", topic, group, err)
		}
		if c.ctx.Err() != nil {
			return nil, ErrClosed
		}
		return k, nil
	case <-ctx.Done():
		k.cancel()
		<-k.done
		k.mu.Lock()
		defer k.mu.Unlock()
		return nil, fmt.Errorf("consumer for %q in group %q: %w", topic, group, outOfTime(ctx.Err(), k.trouble))
	}
}

// Topic returns what the broker said about the topic.
func (k *Consumer) Topic() Topic { return k.topic }

// Partitions returns the partitions that are assigned to this member now, in order.
func (k *Consumer) Partitions() []uint16 {
	k.mu.Lock()
	defer k.mu.Unlock()
	var ids []uint16
	for id, part := range k.parts {
		if part.owned && part.revoke == nil {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// Err returns why the consumer ended by itself: the topic or the group was deleted (ErrUnknownTopic, ErrUnknownGroup), or the
// broker does not accept this client any more. It is nil while the consumer works, and after Close.
func (k *Consumer) Err() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.err
}

// Run calls h for every message, up to ConsumerOptions.Concurrency at a time and one at a time per partition (per key
// with ConsumerOptions.ParallelKeys), until ctx ends (it then waits for the handlers and returns nil) or the consumer does (its Err).
func (k *Consumer) Run(ctx context.Context, h Handler) error {
	defer k.wakeAtEnd(ctx, &k.takers)()
	var wg sync.WaitGroup
	for range k.opts.Concurrency {
		if !k.join() {
			break
		}
		wg.Add(1)
		go func() {
			defer k.processes.Done()
			defer wg.Done()
			k.handle(ctx, h)
		}()
	}
	wg.Wait()
	return k.Err()
}

// wakeAtEnd wakes who waits on cond when ctx ends, unless stop was called before.
func (k *Consumer) wakeAtEnd(ctx context.Context, cond *sync.Cond) (stop func() bool) {
	return context.AfterFunc(ctx, func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		cond.Broadcast()
	})
}

// join counts a process in, unless the consumer is closing.
func (k *Consumer) join() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closing {
		return false
	}
	k.processes.Add(1)
	return true
}

// handle is one process of Run.
func (k *Consumer) handle(ctx context.Context, h Handler) {
	var batch [takeBatch]*Message
	for {
		work, n := k.take(ctx, batch[:])
		if work == nil {
			return
		}
		part := work.part
		i, acked := 0, 0
		for ; i < n && ctx.Err() == nil && !part.stop.Load() && !k.stop.Load(); i++ {
			m := batch[i]
			if !m.Active() {
				continue
			}
			err := k.call(ctx, h, m)
			if err == nil && k.opts.CumulativeAcks {
				continue
			}
			k.ackTogether(part, batch[acked:i])
			acked = i + 1
			k.conclude(m, err)
		}
		k.ackTogether(part, batch[acked:i])
		k.giveBack(work, batch[i:n])
		clear(batch[:n])
	}
}

// conclude ends a message by its handler's result.
func (k *Consumer) conclude(m *Message, err error) {
	if err == nil {
		_ = m.Ack() // if it has ended otherwise there is nothing to do: the broker knows
		return
	}
	k.client.cfg.logger.Warn("message failed", "topic", m.Topic, "partition", m.Partition, "sequence", m.Sequence,
		"attempt", m.Attempt, "error", err)
	reason := protocol.NackRetryLater
	if errors.Is(err, ErrReject) {
		reason = protocol.NackReject
	}
	_ = m.Nack(reason) // likewise
}

func (k *Consumer) call(ctx context.Context, h Handler, m *Message) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("the handler panicked: %v\n%s", r, debug.Stack())
		}
	}()
	return h(ctx, m)
}

// Messages returns a channel of messages, for applications that have a loop of their own; each one must be ended by
// Ack or Nack. The channel is closed when the consumer is, or ends; see Err.
func (k *Consumer) Messages() <-chan *Message {
	k.pump.Do(func() {
		if !k.join() {
			close(k.messages)
			return
		}
		go func() {
			defer k.processes.Done()
			defer close(k.messages)
			k.feed()
		}()
	})
	return k.messages
}

// feed moves messages to the channel.
func (k *Consumer) feed() {
	var batch [takeBatch]*Message
	for {
		work, n := k.take(context.Background(), batch[:])
		if work == nil {
			return
		}
		i, stopped := 0, false
		for ; i < n && !stopped && !work.part.stop.Load(); i++ {
			if !batch[i].Active() {
				continue
			}
			select {
			case k.messages <- batch[i]:
			case <-k.left:
				stopped = true
				i--
			}
		}
		k.giveBack(work, batch[i:n])
		clear(batch[:n])
	}
}

// Close stops handing out messages, waits for the handlers of Run, sends the last ACKs and leaves the group, so that
// its partitions move to other members at once and what was not begun is delivered there without a failed attempt. ctx
// bounds all of that; the connection is closed in any case. It must not be called by OnAssign or OnRevoke, which it waits
// for.
func (k *Consumer) Close(ctx context.Context) error {
	k.mu.Lock()
	k.stopLocked()
	k.mu.Unlock()
	err := k.waitProcesses(ctx)
	if err == nil {
		k.callRevokes(ctx) // before others can have the partitions
		bounded, cancel := context.WithTimeout(ctx, leaveTimeout)
		defer cancel()
		k.leave(bounded)
	}
	k.cancel()
	<-k.done
	select {
	case <-k.quiet:
	case <-ctx.Done():
	}
	if err != nil {
		return fmt.Errorf("close consumer of %q in group %q: a handler is still at work: %w", k.topic.Name, k.group, err)
	}
	return nil
}

// stopLocked ends the processes after what they are at.
func (k *Consumer) stopLocked() {
	if !k.closing {
		k.closing = true
		k.stop.Store(true)
		close(k.left)
	}
	k.takers.Broadcast()
}

func (k *Consumer) waitProcesses(ctx context.Context) error {
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		k.processes.Wait()
	}()
	select {
	case <-finished:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// leave waits for the answers to the last ACKs and sends the good-bye. What fails here the broker's timers repair.
func (k *Consumer) leave(ctx context.Context) {
	defer k.wakeAtEnd(ctx, &k.takers)()
	k.mu.Lock()
	defer k.mu.Unlock()
	for k.live && (k.answers.len() > 0 || len(k.retry) > 0) && ctx.Err() == nil {
		k.takers.Wait()
	}
	if !k.live || ctx.Err() != nil {
		return
	}
	k.heartbeat(protocol.MemberLeave)
	k.gone = true
	for k.live && k.beats > 0 && ctx.Err() == nil {
		k.takers.Wait()
	}
}
