// Package fakebroker is a broker of a few hundred lines that lives in the test process: memory only, one lock, one member
// per group. It speaks enough of the protocol for the tests of what measures and tortures the real one, and it can be
// told to break its promises, so that those tests show that a broken promise is noticed.
package fakebroker

import (
	"bufio"
	"net"
	"sync"

	"github.com/mortarmq/mortarmq/protocol"
)

// Faults are promises to break. Crash applies the first four to what is stored, as if recovery had gone wrong.
type Faults struct {
	LoseAcknowledged  bool // drop the newest message of every partition
	DuplicateStored   bool // store the newest message of every partition once more
	CorruptStored     bool // flip a bit of the newest message of every partition
	ForgetAcks        bool // deliver again what was acknowledged
	ForgetProducers   bool // lose the dedup windows
	SkipUnacked       bool // treat what was delivered as acknowledged
	ForgetFailures    bool // start counting attempts from 1 again
	RefuseEvery       int  // answer every n-th PUB with BACKPRESSURE
	refuseCountdown   int
	refusedProducerOf map[producerKey]uint64
}

// Broker is the fake. Its state survives Crash.
type Broker struct {
	mu     sync.Mutex
	faults Faults
	topics []*topic // by id - 1
	groups map[string]*group
	open   map[net.Listener]struct{}
	conns  map[*conn]struct{}
	next   uint64 // delivery, notice and member ids
	epoch  uint64
	wg     sync.WaitGroup
}

type topic struct {
	name       string
	partitions []*partition
}

type partition struct {
	log       []record // log[i] has sequence i+1
	producers map[uint64]*window
}

type record struct {
	producer, producerSeq uint64
	key, value            []byte
}

type window struct {
	last uint64
	seqs map[uint64]uint64 // producer_seq -> sequence
}

type producerKey struct {
	conn        *conn
	topic, part uint16
	producer    uint64
}

type group struct {
	topic  uint16
	cursor []cursor // by partition
	sub    *subscription
	member uint64 // the last one, which may rejoin
}

// cursor is a group's place in one partition.
type cursor struct {
	next      uint64              // lowest sequence never delivered
	done      map[uint64]struct{} // acknowledged
	inFlight  map[uint64]uint64   // sequence -> delivery id
	returned  []uint64            // to deliver again
	failed    map[uint64]uint16   // attempts
	confirmed bool
	owned     bool // confirmed, also while the member is away
}

type subscription struct {
	conn                *conn
	id                  uint16
	group               *group
	credit, window      int
	creditB, windowB    int
	creditEpoch, member uint64
	stream              bool
}

type conn struct {
	b    *Broker
	node *node // nil outside a Cluster
	nc   net.Conn
	subs []*subscription

	mu     sync.Mutex
	out    []byte
	wake   chan struct{}
	closed bool
}

// New returns a broker without topics that isn't listening.
func New() *Broker {
	return &Broker{groups: map[string]*group{}, open: map[net.Listener]struct{}{}, conns: map[*conn]struct{}{}}
}

// SetFaults replaces the promises to break.
func (b *Broker) SetFaults(f Faults) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f.refuseCountdown = f.RefuseEvery
	f.refusedProducerOf = map[producerKey]uint64{}
	b.faults = f
}

// Start listens on a free port of the loopback interface and returns its address.
func (b *Broker) Start() (addr string, err error) { return b.StartAt("127.0.0.1:0") }

// StartAt listens on an address.
func (b *Broker) StartAt(listen string) (addr string, err error) {
	ln, err := net.Listen("tcp", listen)
	if err != nil {
		return "", err
	}
	b.mu.Lock()
	b.epoch++
	b.mu.Unlock()
	b.accept(ln, nil)
	return ln.Addr().String(), nil
}

// accept serves what connects to ln until shut closes it.
func (b *Broker) accept(ln net.Listener, n *node) {
	b.mu.Lock()
	b.open[ln] = struct{}{}
	b.mu.Unlock()
	b.wg.Go(func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			c := &conn{b: b, node: n, nc: nc, wake: make(chan struct{}, 1)}
			b.mu.Lock()
			if _, open := b.open[ln]; !open { // accepted in the last moment
				nc.Close()
			}
			b.conns[c] = struct{}{}
			b.mu.Unlock()
			b.wg.Go(c.readLoop)
			b.wg.Go(c.writeLoop)
		}
	})
}

// Crash closes everything at once, answers that were not sent yet included, and applies the faults. Start goes on.
func (b *Broker) Crash() {
	b.mu.Lock()
	for ln := range b.open {
		b.shut(ln)
	}
	for c := range b.conns {
		c.nc.Close()
	}
	b.mu.Unlock()
	b.wg.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, t := range b.topics {
		for _, p := range t.partitions {
			b.damage(p)
		}
	}
	for _, g := range b.groups {
		g.sub = nil
		for i := range g.cursor {
			g.cursor[i].restart(b.faults)
		}
	}
}

// shut closes a listener. The lock is held.
func (b *Broker) shut(ln net.Listener) {
	ln.Close()
	delete(b.open, ln)
}

func (b *Broker) damage(p *partition) {
	n := len(p.log)
	if n == 0 {
		return
	}
	if b.faults.LoseAcknowledged {
		p.log = p.log[:n-1]
	}
	if b.faults.DuplicateStored {
		p.log = append(p.log, p.log[n-1])
	}
	if b.faults.CorruptStored {
		v := append([]byte(nil), p.log[n-1].value...)
		if len(v) > 0 {
			v[len(v)-1] ^= 1
		}
		p.log[n-1].value = v
	}
	if b.faults.ForgetProducers {
		clear(p.producers)
	}
}

func (c *cursor) restart(f Faults) {
	c.confirmed = false
	for seq := range c.inFlight {
		c.returned = append(c.returned, seq)
	}
	clear(c.inFlight)
	if f.SkipUnacked {
		for _, seq := range c.returned {
			c.done[seq] = struct{}{}
		}
		c.returned = nil
	}
	if f.ForgetFailures {
		clear(c.failed)
	}
	if f.ForgetAcks {
		c.next, c.returned = 1, nil
		clear(c.done)
	}
}

func (c *conn) readLoop() {
	defer c.drop()
	r := bufio.NewReaderSize(c.nc, 256<<10)
	var frame []byte
	for {
		head, err := r.Peek(protocol.LengthSize)
		if err != nil {
			return
		}
		total, _, err := protocol.FrameLen(head)
		if err != nil {
			c.send(protocol.AppendErr(nil, protocol.CodeBadLength, 0, ""))
			return
		}
		if cap(frame) < total {
			frame = make([]byte, total)
		}
		frame = frame[:total]
		for have := 0; have < total; {
			n, err := r.Read(frame[have:])
			if err != nil {
				return
			}
			have += n
		}
		op, payload, _, err := protocol.ParseFrame(frame)
		if err != nil {
			return
		}
		if !c.b.handle(c, op, payload) {
			return
		}
	}
}

func (c *conn) writeLoop() {
	defer c.nc.Close()
	var out []byte
	for range c.wake {
		c.mu.Lock()
		out, c.out = c.out, out[:0]
		closed := c.closed
		c.mu.Unlock()
		if _, err := c.nc.Write(out); err != nil || closed {
			return
		}
	}
}

// send queues frames; the caller may reuse the bytes.
func (c *conn) send(frames []byte) {
	c.mu.Lock()
	c.out = append(c.out, frames...)
	c.mu.Unlock()
	c.signal()
}

func (c *conn) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// drop forgets the connection; what was in flight on it goes back. The write loop sends what is left and closes it.
func (c *conn) drop() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.signal()
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	delete(c.b.conns, c)
	c.leave()
}

// leave ends the subscriptions of a connection; what was in flight goes back. The lock is held.
func (c *conn) leave() {
	for _, s := range c.subs {
		if s.group.sub == s {
			s.group.sub = nil
			for i := range s.group.cursor {
				s.group.cursor[i].restart(Faults{})
			}
		}
	}
}
