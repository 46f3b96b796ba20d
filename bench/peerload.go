package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"golang.org/x/sys/unix"
)

const (
	// peerSlots bounds how far a peer's acknowledgements may be out of order, in messages.
	peerSlots = 4 * maxWindow
	// peerSilence is how long a peer may say nothing while an answer is due.
	peerSilence = 60 * time.Second
	// ratedPatience is how much longer than planned a run at a fixed rate may take.
	ratedPatience = 2 * time.Second
	// groupPoll is how often a member of a group of several looks whether the group has received everything.
	groupPoll = 50 * time.Millisecond
)

// peerPublisher loads a peer as Publisher loads mortard: a window of unanswered messages, written together where several
// fit. A run without a rate has one goroutine that writes and reads in turn.
type peerPublisher struct {
	w      ProducerConn
	window uint64
	value  []byte
	out    []byte
	read   []byte
	have   int

	sentAt [peerSlots]int64 // by id modulo peerSlots: when sent, or due
	done   [peerSlots]bool
	next   atomic.Uint64 // the id to send next
	low    atomic.Uint64 // every id below is acknowledged
	count  atomic.Uint64 // acknowledged
	goal   atomic.Uint64 // of a rated run: how many messages will be sent

	at       int64 // when the last read returned
	silence  int64 // when the read deadline was set
	warm     uint64
	latency  *hdrhistogram.Histogram
	unsent   *hdrhistogram.Histogram
	patience time.Duration
	onDone   func(id uint64, all bool)
	stray    error
}

func newPeerPublisher(w ProducerConn, window, valueBytes int, seed uint64) *peerPublisher {
	p := &peerPublisher{w: w, window: uint64(window), value: randomBytes(seed, valueBytes), read: make([]byte, readBufferBytes), latency: newHist()}
	p.onDone, p.patience = p.acknowledged, ratedPatience
	p.goal.Store(unknownYet)
	return p
}

func (p *peerPublisher) Close() error                     { return p.w.Conn().Close() }
func (p *peerPublisher) Completed() uint64                { return p.count.Load() }
func (p *peerPublisher) Latency() *hdrhistogram.Histogram { return p.latency }
func (p *peerPublisher) Retries() uint64                  { return 0 }
func (p *peerPublisher) Unsent() *hdrhistogram.Histogram  { return p.unsent }

// Run publishes until count messages were acknowledged (0: no limit) or more was given and returned false, and returns
// when everything sent has been acknowledged.
func (p *peerPublisher) Run(count uint64, more func() bool) error {
	stop := uint64(1<<63 - 1)
	if count > 0 {
		stop = p.next.Load() + count
	}
	p.warm = p.next.Load()
	for {
		if more != nil && !more() {
			stop = min(stop, p.next.Load())
		}
		if err := p.fill(stop); err != nil {
			return fmt.Errorf("publish: %w", err)
		}
		if p.low.Load() == p.next.Load() {
			return nil
		}
		if err := p.reap(); err != nil {
			return fmt.Errorf("publish: %w", err)
		}
	}
}

// room tells whether another message may be sent: by the window, and by how far answers may overtake one another.
func (p *peerPublisher) room(next uint64) bool {
	return next-p.count.Load() < p.window && next-p.low.Load() < peerSlots
}

func (p *peerPublisher) fill(stop uint64) error {
	next := p.next.Load()
	t := now()
	for next < stop && p.room(next) {
		p.put(next, t)
		next++
		if len(p.out) >= writeBatchBytes {
			if err := p.flush(next); err != nil {
				return err
			}
			t = now()
		}
	}
	return p.flush(next)
}

func (p *peerPublisher) put(id uint64, t int64) {
	binary.BigEndian.PutUint64(p.value, uint64(t))
	p.sentAt[id%peerSlots] = t
	p.out = p.w.Append(p.out, id, p.value)
}

func (p *peerPublisher) flush(next uint64) error {
	p.next.Store(next)
	if len(p.out) == 0 {
		return nil
	}
	_, err := p.w.Conn().Write(p.out)
	p.out = p.out[:0]
	return err
}

// reap reads once and handles every complete answer.
func (p *peerPublisher) reap() error {
	conn := p.w.Conn()
	if t := now(); p.silence == 0 || t-p.silence > int64(time.Second) {
		p.silence = t
		if err := conn.SetReadDeadline(time.Now().Add(peerSilence)); err != nil {
			return err
		}
	}
	if p.low.Load() >= p.goal.Load() {
		return nil // a rated run was cut short; its own deadline may just have been overwritten
	}
	n, err := conn.Read(p.read[p.have:])
	if err != nil {
		if errors.Is(err, io.EOF) {
			return errors.New("the server closed the connection")
		}
		return err
	}
	p.at = now()
	p.have += n
	n, reply, err := p.w.Answers(p.read[:p.have], nil, p.onDone)
	if err = errors.Join(err, p.stray); err != nil {
		return err
	}
	p.have = copy(p.read, p.read[n:p.have])
	if p.have == len(p.read) {
		return fmt.Errorf("an answer of more than %d bytes", len(p.read))
	}
	if len(reply) > 0 {
		_, err = conn.Write(reply)
	}
	return err
}

// acknowledged is called by the ProducerConn.
func (p *peerPublisher) acknowledged(id uint64, all bool) {
	low := p.low.Load()
	if id >= p.next.Load() || (id < low && !all) {
		p.stray = fmt.Errorf("an answer for message %d, of which none is due", id)
		return
	}
	first := id
	if all {
		first = low
	}
	n := uint64(0)
	for ; first <= id; first++ {
		slot := first % peerSlots
		if p.done[slot] {
			continue
		}
		p.done[slot] = true
		n++
		if first >= p.warm {
			record(p.latency, p.at-p.sentAt[slot])
		}
	}
	for low < p.next.Load() && p.done[low%peerSlots] {
		p.done[low%peerSlots] = false
		low++
	}
	p.low.Store(low)
	p.count.Add(n)
}

// RunRated sends warm+count messages at a fixed rate, with latencies from when each was due, and returns when all are
// acknowledged. A publisher runs once. A peer that can't keep up is given ratedPatience more than the run should take; what
// is not sent by then is in Unsent, as late as it is at that time.
func (p *peerPublisher) RunRated(ctx context.Context, rate float64, warm, count uint64) error {
	stop := context.AfterFunc(ctx, func() { p.Close() })
	defer stop()
	p.warm = warm
	var failed atomic.Bool
	errs := make(chan error, 2)
	p.goal.Store(warm + count)
	go func() { errs <- p.sendRated(rate, warm+count, &failed) }()
	go func() { errs <- p.receiveRated() }()
	err := <-errs
	if err != nil {
		failed.Store(true)
		p.Close()
	}
	return errors.Join(err, <-errs)
}

func (p *peerPublisher) sendRated(rate float64, total uint64, failed *atomic.Bool) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0) // less precise without it, not wrong

	every := float64(time.Second) / rate
	start := now() + int64(time.Millisecond)
	end := start + int64(every*float64(total)) + int64(p.patience)
	for i := uint64(0); i < total; {
		sleepUntil(start + int64(float64(i)*every))
		for !p.room(i) && now() < end {
			if failed.Load() {
				return nil
			}
			time.Sleep(50 * time.Microsecond)
		}
		if t := now(); t >= end {
			p.unsent = newHist()
			for j := i; j < total; j++ {
				record(p.unsent, t-start-int64(float64(j)*every))
			}
			p.goal.Store(i)
			return p.w.Conn().SetReadDeadline(time.Now()) // the reader may be waiting for nothing more
		}
		for t := now(); i < total && p.room(i) && len(p.out) < writeBatchBytes; i++ {
			due := start + int64(float64(i)*every)
			if due > t {
				break
			}
			p.put(i, due)
		}
		if err := p.flush(i); err != nil {
			return fmt.Errorf("publish at a rate: %w", err)
		}
	}
	return nil
}

func (p *peerPublisher) receiveRated() error {
	excused := false
	for p.low.Load() < p.goal.Load() {
		err := p.reap()
		if errors.Is(err, os.ErrDeadlineExceeded) && p.goal.Load() == p.next.Load() && !excused {
			// The sender has given up: what it has sent is still waited for.
			p.silence, excused = 0, true
			continue
		}
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return err
			}
			return fmt.Errorf("publish at a rate: %w", err)
		}
	}
	return nil
}

// peerConsumer is a member of a peer's group.
type peerConsumer struct {
	w       ConsumerConn
	total   *Tally
	stamped bool
	read    []byte
	have    int
	out     []byte

	at                 int64
	due                []int64 // of the messages whose acknowledgement is unanswered, oldest first
	dueHead            int
	answers            bool // this system answers acknowledgements
	delivered, ackedAt *hdrhistogram.Histogram
}

func newPeerConsumer(w ConsumerConn, total *Tally, stamped bool) *peerConsumer {
	return &peerConsumer{w: w, total: total, stamped: stamped, read: make([]byte, 1<<20), delivered: newHist(), ackedAt: newHist()}
}

func (c *peerConsumer) Close() error { return c.w.Conn().Close() }

func (c *peerConsumer) Latencies() (delivered, acked *hdrhistogram.Histogram) {
	return c.delivered, c.ackedAt
}

// Run receives until the group has received everything.
func (c *peerConsumer) Run(ctx context.Context) error {
	conn := c.w.Conn()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	c.out = c.w.Open(c.out)
	silent := now()
	for !c.total.complete() || c.answers && c.dueHead < len(c.due) {
		if len(c.out) > 0 {
			if _, err := conn.Write(c.out); err != nil {
				return c.failed(err)
			}
			c.out = c.out[:0]
		}
		if err := conn.SetReadDeadline(time.Now().Add(groupPoll)); err != nil {
			return c.failed(err)
		}
		n, err := conn.Read(c.read[c.have:])
		c.at = now()
		if n == 0 && errors.Is(err, os.ErrDeadlineExceeded) {
			if c.at-silent > int64(peerSilence) && c.total.idle(c.at) > peerSilence {
				return c.failed(fmt.Errorf("nothing arrived for %v", peerSilence))
			}
			continue
		}
		if err != nil {
			return c.failed(err)
		}
		silent = c.at
		c.have += n
		if n, c.out, err = c.w.Take(c.read[:c.have], c.out, c); err != nil {
			return c.failed(err)
		}
		c.have = copy(c.read, c.read[n:c.have])
		if c.have == len(c.read) {
			c.read = append(c.read, make([]byte, len(c.read))...)
		}
	}
	if len(c.out) > 0 { // the last acknowledgements
		if _, err := conn.Write(c.out); err != nil {
			return c.failed(err)
		}
	}
	return nil
}

func (c *peerConsumer) failed(err error) error {
	return fmt.Errorf("consume, after %v: %w", c.total, err)
}

// Message implements Inbox.
func (c *peerConsumer) Message(value []byte) {
	due := int64(0)
	if c.stamped && len(value) >= stampBytes && c.total.received.Load() >= c.total.warm {
		due = int64(binary.BigEndian.Uint64(value))
		record(c.delivered, c.at-due)
	}
	if c.dueHead > 64<<10 {
		c.due = c.due[:copy(c.due, c.due[c.dueHead:])]
		c.dueHead = 0
	}
	if c.answers || len(c.due) < 64<<10 { // a system that never answers leaves nothing to remember
		c.due = append(c.due, due)
	}
	c.total.add(c.at, 1, len(value))
}

// Acknowledged implements Inbox.
func (c *peerConsumer) Acknowledged(n int) {
	c.answers = true
	for ; n > 0 && c.dueHead < len(c.due); n-- {
		if due := c.due[c.dueHead]; due != 0 {
			record(c.ackedAt, c.at-due)
		}
		c.dueHead++
	}
}

// Tally counts what the members of a group receive together.
type Tally struct {
	want            atomic.Uint64 // messages until the group is done
	warm            uint64        // of these, uncounted ones at the beginning
	received, bytes atomic.Uint64
	last            atomic.Int64
}

// unknownYet as a Tally's want means that the number is set later.
const unknownYet = 1<<64 - 1

// NewTally returns a tally of a group that is done after want messages, of which the first warm ones don't count for
// latencies.
func NewTally(want, warm uint64) *Tally {
	t := &Tally{warm: warm}
	t.want.Store(want)
	t.last.Store(now())
	return t
}

func (t *Tally) add(at int64, messages, bytes int) {
	t.received.Add(uint64(messages))
	t.bytes.Add(uint64(bytes))
	t.last.Store(at)
}

func (t *Tally) complete() bool { return t.received.Load() >= t.want.Load() }

func (t *Tally) idle(at int64) time.Duration { return time.Duration(at - t.last.Load()) }

// String says how far the group is.
func (t *Tally) String() string {
	if w := t.want.Load(); w != unknownYet {
		return fmt.Sprintf("%d of %d messages", t.received.Load(), w)
	}
	return fmt.Sprintf("%d messages", t.received.Load())
}

// TryPeer starts a peer, publishes messages one by one and pipelined, reads all of them through a group of several members,
// and stops it: for tests of drivers.
func TryPeer(ctx context.Context, p *Peer, o *PeerOptions, messages uint64, members int) (err error) {
	srv, err := p.Start(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, srv.Stop()) }()
	if err := srv.Create(ctx, 0, 2); err != nil {
		return err
	}
	const queue, size = 1, 300 // 2 queues exist: queue 0 stays empty
	total := NewTally(messages, 0)
	conn, err := srv.Producer(ctx, queue)
	if err != nil {
		return err
	}
	pub := newPeerPublisher(conn, pipelineWindow, size, 1)
	defer pub.Close()
	group, ctx := newTeam(ctx)
	for i := range members {
		conn, err := srv.Consumer(ctx, queue, i, members == 1)
		if err != nil {
			return err
		}
		c := newPeerConsumer(conn, total, true)
		defer c.Close()
		group.start(func() error { return c.Run(ctx) })
	}
	few := min(messages, 10)
	pub.window = 1
	if err := pub.Run(few, nil); err != nil {
		return err
	}
	pub.window = pipelineWindow
	if err := pub.Run(messages-few, nil); err != nil {
		return err
	}
	if err := group.wait(); err != nil {
		return err
	}
	if got, want := total.bytes.Load(), messages*size; got != want || pub.Completed() != messages {
		return fmt.Errorf("%d of %d messages were acknowledged, %d of %d bytes received", pub.Completed(), messages, got, want)
	}
	if len(srv.Processes()) == 0 {
		return errors.New("no server processes were found")
	}
	return nil
}
