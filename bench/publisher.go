package bench

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

const (
	// maxWindow is the most a producer may have unanswered per partition (wire protocol, rule 4).
	maxWindow = protocol.ProducerWindow
	// writeBatchBytes bounds one write: beyond it, looking at answers in between costs less than it brings.
	writeBatchBytes = 256 << 10
	readBufferBytes = 256 << 10
	// retryBackoff is the pause after a refused publish; retryLimit bounds how often in a row, about ten seconds.
	retryBackoff = 2 * time.Millisecond
	retryLimit   = 5000

	// Offsets in a PUB frame: length, op, topic_id, partition, producer_id, producer_seq.
	offPartition   = protocol.HeaderSize + 2
	offProducerSeq = offPartition + 2 + 8

	// stampBytes at the start of a value carry the time at which the message was due.
	stampBytes = 8
)

// PublisherOptions describe one producer on one connection.
type PublisherOptions struct {
	Addr    string
	TopicID uint16
	// Partitions are used in turn.
	Partitions []uint16
	// ProducerID must be unique per run and not 0: publishes are idempotent, as the client library's are.
	ProducerID uint64
	ValueBytes int
	// Window is the number of unanswered publishes, 1 to 1024.
	Window int
	// Seed makes the value's content.
	Seed uint64
}

// Publisher sends PUBs as fast as its window allows. Frames are laid out once, one per slot of the window; a send patches
// a few fields and writes neighbouring slots with one system call. One goroutine writes and reads in turn: answers are
// small and bounded by the window, so that they always fit into the socket's buffer.
type Publisher struct {
	opts     PublisherOptions
	conn     net.Conn
	frameLen int
	stampOff int

	frames []byte // Window frames one behind the other
	index  []uint64
	sentAt []int64
	head   uint64 // sends so far
	tail   uint64 // answers so far

	next   uint64   // message number to send next; it determines partition and producer_seq
	failed []uint64 // refused message numbers, oldest first, to be sent again before anything new
	streak int

	read      []byte
	have      int
	latency   *hdrhistogram.Histogram
	completed atomic.Uint64

	retried uint64
}

// NewPublisher connects.
func NewPublisher(o PublisherOptions) (*Publisher, error) {
	if o.Window < 1 || o.Window > maxWindow || len(o.Partitions) == 0 || o.ProducerID == 0 || o.ValueBytes < stampBytes {
		return nil, fmt.Errorf("publisher options out of bounds: window %d (1 to %d), %d partitions, producer %d, value of %d bytes (at least %d)",
			o.Window, maxWindow, len(o.Partitions), o.ProducerID, o.ValueBytes, stampBytes)
	}
	c, err := harness.Dial(o.Addr, "")
	if err != nil {
		return nil, err
	}
	p := &Publisher{
		opts:     o,
		conn:     c.Net(), // nothing is buffered after CONNECT's answer: the broker pushes nothing unasked
		frameLen: protocol.PubFrameLen(0, o.ValueBytes),
		index:    make([]uint64, o.Window),
		sentAt:   make([]int64, o.Window),
		read:     make([]byte, readBufferBytes),
		latency:  newHist(),
	}
	p.stampOff = p.frameLen - o.ValueBytes
	value := randomBytes(o.Seed, o.ValueBytes)
	pub := protocol.Pub{TopicID: o.TopicID, ProducerID: o.ProducerID, Value: value}
	for range o.Window {
		p.frames = pub.AppendFrame(p.frames)
	}
	return p, nil
}

// randomBytes returns n bytes that don't compress.
func randomBytes(seed uint64, n int) []byte {
	b := make([]byte, n)
	var s [32]byte
	binary.LittleEndian.PutUint64(s[:], seed)
	// ChaCha8 never fails.
	_, _ = rand.NewChaCha8(s).Read(b)
	return b
}

// Close closes the connection.
func (p *Publisher) Close() error { return p.conn.Close() }

// Completed returns the number of messages acknowledged so far; any goroutine.
func (p *Publisher) Completed() uint64 { return p.completed.Load() }

// Latency returns the histogram of this publisher; not while Run runs.
func (p *Publisher) Latency() *hdrhistogram.Histogram { return p.latency }

// Retries counts publishes that were refused for the moment and sent again; not while Run runs.
func (p *Publisher) Retries() uint64 { return p.retried }

// Unsent is nil: a rated run against mortard sends everything.
func (p *Publisher) Unsent() *hdrhistogram.Histogram { return nil }

// Run publishes until count messages were acknowledged (0: no limit) or more was given and returned false, and returns
// when every message sent has been acknowledged. Several runs continue one another.
func (p *Publisher) Run(count uint64, more func() bool) error {
	stop := uint64(1<<63 - 1)
	if count > 0 {
		stop = p.next + count
	}
	for {
		if more != nil && !more() {
			stop = min(stop, p.next)
		}
		if err := p.fill(stop); err != nil {
			return fmt.Errorf("publish: %w", err)
		}
		if p.head == p.tail {
			return nil
		}
		if err := p.reap(); err != nil {
			return fmt.Errorf("publish: %w", err)
		}
	}
}

// fill sends as many messages below stop as there are free slots. After a refusal it waits for every answer that is
// outstanding, and starts again with the refused messages, so that the order per partition is kept.
func (p *Publisher) fill(stop uint64) error {
	resend := len(p.failed) > 0
	if resend {
		if p.head != p.tail {
			return nil
		}
		if p.streak++; p.streak > retryLimit {
			return fmt.Errorf("the broker has refused message %d %d times", p.failed[0], retryLimit)
		}
		time.Sleep(retryBackoff)
	}
	window := uint64(p.opts.Window)
	for p.head-p.tail < window {
		first := p.head % window
		limit := min(window-first, window-(p.head-p.tail))
		if bytes := uint64(max(1, writeBatchBytes/p.frameLen)); limit > bytes {
			limit = bytes
		}
		t := now()
		n := uint64(0)
		for ; n < limit; n++ {
			switch {
			case len(p.failed) > 0:
				p.put(first+n, p.failed[0], t)
				p.failed = p.failed[1:]
			case p.next < stop && !resend:
				p.put(first+n, p.next, t)
				p.next++
			default:
				limit = n
			}
		}
		n = limit
		if n == 0 {
			return nil
		}
		p.head += n
		if _, err := p.conn.Write(p.frames[first*uint64(p.frameLen) : (first+n)*uint64(p.frameLen)]); err != nil {
			return err
		}
	}
	return nil
}

// put writes message number i into a slot.
func (p *Publisher) put(slot, i uint64, t int64) {
	f := p.frames[slot*uint64(p.frameLen):]
	parts := uint64(len(p.opts.Partitions))
	binary.BigEndian.PutUint16(f[offPartition:], p.opts.Partitions[i%parts])
	binary.BigEndian.PutUint64(f[offProducerSeq:], i/parts+1)
	binary.BigEndian.PutUint64(f[p.stampOff:], uint64(t))
	p.index[slot] = i
	p.sentAt[slot] = t
}

// reap reads once and handles every complete answer.
func (p *Publisher) reap() error {
	n, err := p.conn.Read(p.read[p.have:])
	if err != nil {
		if errors.Is(err, io.EOF) {
			return errors.New("the broker closed the connection")
		}
		return err
	}
	p.have += n
	t := now()
	off := 0
	answered := uint64(0)
	for {
		op, payload, n, err := protocol.ParseFrame(p.read[off:p.have])
		if err != nil {
			return err
		}
		if n == 0 {
			break
		}
		off += n
		if p.head == p.tail {
			return fmt.Errorf("%v without a request", op)
		}
		slot := p.tail % uint64(p.opts.Window)
		ok, err := p.answer(op, payload, p.index[slot])
		if err != nil {
			return err
		}
		p.tail++
		if ok {
			answered++
			record(p.latency, t-p.sentAt[slot])
		}
	}
	p.have = copy(p.read, p.read[off:p.have])
	if answered > 0 {
		p.streak = 0
		p.completed.Add(answered)
	}
	return nil
}

// answer handles the answer to message number i: true where it is acknowledged, false where it must be sent again.
func (p *Publisher) answer(op protocol.Op, payload []byte, i uint64) (bool, error) {
	switch op {
	case protocol.OpOK:
		var f protocol.OKFrame
		var res protocol.PubResult
		if err := f.Decode(payload); err != nil {
			return false, err
		}
		if f.RequestOp != protocol.OpPub {
			return false, fmt.Errorf("an answer to %v in place of one to PUB", f.RequestOp)
		}
		if err := res.Decode(f.Result); err != nil {
			return false, err
		}
		return true, nil
	case protocol.OpErr:
		var f protocol.ErrFrame
		if err := f.Decode(payload); err != nil {
			return false, err
		}
		// Behind a refused publish those that were already on their way get SEQ_GAP.
		if f.Code == protocol.CodeSeqGap && len(p.failed) > 0 || f.Code.Retriable() {
			p.failed = append(p.failed, i)
			p.retried++
			return false, nil
		}
		return false, f.Err()
	default:
		return false, fmt.Errorf("unexpected %v from the broker", op)
	}
}
