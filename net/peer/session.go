package peer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"time"

	"github.com/klauspost/compress/s2"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
)

const (
	// readBuffer is the size in bytes of a connection's read buffer; bodies that don't fit are read past it.
	readBuffer = 64 << 10
	// firstPiece is how much of a large body is allocated before any of it has arrived; then what has arrived is doubled.
	firstPiece = 1 << 20
	// compressFrom is the smallest body in bytes that the bulk lane tries to compress.
	compressFrom = 4 << 10
	pingLen      = 8
)

var (
	errIdle   = errors.New("nothing was heard from the other node for too long")
	errClosed = errors.New("the transport was closed")
)

// session is one connection of a lane, after its handshake. Its reader runs on the link's goroutine, its writer on
// another one.
type session struct {
	link *link
	conn net.Conn
	peer Peer
	sum  struct{ out, in peerwire.Hasher }
	done chan struct{} // closed with the connection

	closing atomic.Bool
	reason  error // why it was closed; set before done is closed

	// The reader's.
	buf        []byte
	start, end int
	append     peerwire.Append
	flushed    peerwire.Flushed
	reject     peerwire.Reject

	// The writer's.
	batch         batch
	iov, vec      net.Buffers
	plain, packed []byte // a body before and after its compression
}

func newSession(l *link, c *accepted) *session {
	s := &session{link: l, conn: c.conn, peer: c.peer, done: make(chan struct{}), buf: make([]byte, readBuffer)}
	s.sum.out.Seed(c.keys.out)
	s.sum.in.Seed(c.keys.in)
	return s
}

// close ends the connection; the first reason counts. Any goroutine may call it.
func (s *session) close(reason error) {
	if s.closing.Swap(true) {
		return
	}
	s.reason = reason
	_ = s.conn.Close()
	s.link.budget.set(true)
	close(s.done) // last: the link's next connection may begin
}

// run serves the connection until it ends and returns why.
func (s *session) run() error {
	writer := make(chan struct{})
	go func() {
		defer close(writer)
		s.close(s.writeLoop())
	}()
	s.close(s.readLoop())
	<-writer
	<-s.done // somebody else may be in the middle of closing it
	return s.reason
}

// fill reads until n bytes lie in the buffer; n is at most its size.
func (s *session) fill(n int) error {
	if s.end-s.start >= n {
		return nil
	}
	if s.start > 0 {
		copy(s.buf, s.buf[s.start:s.end])
		s.start, s.end = 0, s.end-s.start
	}
	for s.end < n {
		got, err := s.read(s.buf[s.end:])
		s.end += got
		if err != nil && s.end < n {
			return err
		}
	}
	return nil
}

// lastLook is how long a read that found nothing within the idle time looks once more. A process that was stopped for so
// long finds the time over when it goes on, although much has arrived meanwhile.
const lastLook = 10 * time.Millisecond

// read reads some bytes, within the idle time.
func (s *session) read(b []byte) (int, error) {
	n, err := s.readWithin(s.link.t.opt.IdleTimeout, b)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		n, err = s.readWithin(lastLook, b)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = errIdle
	}
	s.link.stats.received.Add(uint64(n))
	return n, err
}

func (s *session) readWithin(d time.Duration, b []byte) (int, error) {
	if err := s.conn.SetReadDeadline(time.Now().Add(d)); err != nil {
		return 0, err
	}
	return s.conn.Read(b)
}

// readLoop takes frames apart and hands them to the handler.
func (s *session) readLoop() error {
	for {
		if err := s.fill(peerwire.HeaderLen); err != nil {
			return err
		}
		head := s.buf[s.start : s.start+peerwire.HeaderLen]
		h, err := peerwire.ParseHeader(head)
		switch {
		case err != nil:
			return err
		case h.Version != s.peer.Version:
			return fmt.Errorf("a frame has version %d, agreed was %d", h.Version, s.peer.Version)
		case !s.link.lane.Carries(h.Kind):
			return fmt.Errorf("%v does not belong on the lane %v", h.Kind, s.link.lane)
		case h.Flags&peerwire.FlagS2 != 0 && s.link.lane != peerwire.Bulk:
			return fmt.Errorf("%v is compressed, which it may not be", h.Kind)
		}
		if peerwire.HasPayload(h.Kind) || h.Flags&peerwire.FlagS2 != 0 || peerwire.HeaderLen+h.Len > len(s.buf) {
			err = s.readOwned(&h)
		} else {
			err = s.readInPlace(&h)
		}
		if err != nil {
			return err
		}
		s.link.stats.framesIn.Add(1)
	}
}

// readInPlace handles a frame that lies in the buffer as a whole.
func (s *session) readInPlace(h *peerwire.Header) error {
	size := peerwire.HeaderLen + h.Len
	if err := s.fill(size); err != nil {
		return err
	}
	frame := s.buf[s.start : s.start+size]
	s.start += size
	if s.sum.in.Sum(frame, frame[peerwire.HeaderLen:], nil) != h.Sum {
		return fmt.Errorf("%v: %w", h.Kind, peerwire.ErrChecksum)
	}
	return s.dispatch(h.Kind, frame[peerwire.HeaderLen:], nil)
}

// readOwned handles a frame whose body gets memory of its own.
func (s *session) readOwned(h *peerwire.Header) error {
	p, err := s.receive(h)
	if err != nil {
		return err
	}
	body := p.buf[:h.Len]
	if h.Flags&peerwire.FlagS2 != 0 {
		if p, body, err = s.decompress(p, body); err != nil {
			return err
		}
	}
	if !peerwire.HasPayload(h.Kind) {
		err = s.dispatch(h.Kind, body, nil)
		p.data = body
		p.Release()
		return err
	}
	return s.dispatch(h.Kind, body, p)
}

// payload gets memory for n bytes of which not all have arrived.
func (s *session) payload(n, first int) (*Payload, error) {
	if !s.link.budget.take(int64(n)) {
		return nil, errClosed
	}
	p := s.link.t.payloads.get(min(n, first))
	p.budget, p.charge = s.link.budget, int64(n)
	return p, nil
}

// giveUp releases a payload that nobody has seen.
func (p *Payload) giveUp() {
	p.data = p.buf
	p.Release()
}

// receive reads a body into a payload's buffer and checks it.
func (s *session) receive(h *peerwire.Header) (*Payload, error) {
	head := [peerwire.HeaderLen]byte(s.buf[s.start:])
	s.start += peerwire.HeaderLen
	p, err := s.payload(h.Len, firstPiece)
	if err != nil {
		return nil, err
	}
	n := copy(p.buf[:min(h.Len, len(p.buf))], s.buf[s.start:s.end])
	s.start += n
	for n < h.Len {
		if n == len(p.buf) {
			p = s.link.t.payloads.grow(p, min(h.Len, 2*n))
		}
		got, err := s.read(p.buf[n:min(h.Len, len(p.buf))])
		n += got
		if err != nil && n < h.Len {
			p.giveUp()
			return nil, err
		}
	}
	if s.sum.in.Sum(head[:], p.buf[:h.Len], nil) != h.Sum {
		p.giveUp()
		return nil, fmt.Errorf("%v: %w", h.Kind, peerwire.ErrChecksum)
	}
	return p, nil
}

// decompress exchanges a payload with a compressed body for one with the body.
func (s *session) decompress(packed *Payload, body []byte) (*Payload, []byte, error) {
	defer packed.giveUp()
	n, err := s2.DecodedLen(body)
	switch {
	case err != nil:
		return nil, nil, fmt.Errorf("a compressed frame: %w", err)
	case n > peerwire.MaxBody:
		return nil, nil, fmt.Errorf("a compressed frame: %w: %d bytes", peerwire.ErrLen, n)
	}
	// The packed body is charged as well while it is unpacked, so this one must not wait for it.
	s.link.budget.force(int64(n))
	p := s.link.t.payloads.get(n)
	p.budget, p.charge = s.link.budget, int64(n)
	plain, err := s2.Decode(p.buf[:n], body)
	if err != nil {
		p.giveUp()
		return nil, nil, fmt.Errorf("a compressed frame: %w", err)
	}
	return p, plain, nil
}

// dispatch hands a frame to the handler. p owns body where it isn't nil.
func (s *session) dispatch(k peerwire.Kind, body []byte, p *Payload) error {
	h, from := s.link.t.opt.Handler, s.link.id
	switch k {
	case peerwire.KindPing, peerwire.KindPong:
		if len(body) != pingLen {
			return fmt.Errorf("%v has %d bytes", k, len(body))
		}
		s.ping(k, binary.BigEndian.Uint64(body))
	case peerwire.KindMessage:
		m := new(replica.Message)
		if err := peerwire.DecodeMessage(body, m); err != nil {
			return err
		}
		h.Message(from, m)
	case peerwire.KindAppend:
		data, err := peerwire.DecodeAppend(body, &s.append)
		if err != nil {
			p.giveUp()
			return err
		}
		p.data = data
		h.Append(from, &s.append, p)
	case peerwire.KindFlushed:
		if err := peerwire.DecodeFlushed(body, &s.flushed); err != nil {
			return err
		}
		h.Flushed(from, &s.flushed)
	case peerwire.KindReject:
		if err := peerwire.DecodeReject(body, &s.reject); err != nil {
			return err
		}
		h.Reject(from, &s.reject)
	default:
		f, data, err := peerwire.DecodeBulk(k, body)
		if err != nil {
			if p != nil {
				p.giveUp()
			}
			return err
		}
		if p == nil {
			h.Bulk(from, f, nil)
			break
		}
		p.data = data
		h.Bulk(from, f, p)
	}
	return nil
}

// ping answers a PING and learns the round-trip time from a PONG.
func (s *session) ping(k peerwire.Kind, sent uint64) {
	if k == peerwire.KindPing {
		s.link.queue.putPong(sent)
		return
	}
	if took := int64(s.link.t.clock()) - int64(sent); took > 0 {
		s.link.stats.roundTrip.Store(took)
	}
}

// writeLoop writes what is queued, and a PING from time to time when there is nothing.
func (s *session) writeLoop() error {
	ticker := time.NewTicker(s.link.t.opt.PingInterval)
	defer ticker.Stop()
	q := s.link.queue
	for {
		q.take(&s.batch)
		if s.batch.writable {
			s.link.t.opt.Handler.Writable(s.link.id, s.link.lane)
		}
		if !s.batch.empty() {
			if err := s.write(); err != nil {
				return err
			}
			continue
		}
		select {
		case <-q.wake:
		case <-s.done:
			return nil
		case <-ticker.C:
			q.putPing(uint64(s.link.t.clock()))
		}
	}
}

// write writes the frames that were taken from the queue and releases them, whether or not it succeeds.
func (s *session) write() error {
	b := &s.batch
	if len(b.rest) > 0 {
		s.iov = append(s.iov, b.rest)
	}
	for i := range b.small {
		s.encode(&b.small[i])
	}
	var taken int64
	err := error(nil)
	for i := range b.frames {
		f := &b.frames[i]
		taken += f.bytes()
		if err != nil {
			continue
		}
		s.encode(f)
		if s.link.lane == peerwire.Bulk {
			err = s.flush() // one at a time: they share the memory of the compression
		}
	}
	if err == nil {
		err = s.flush()
	}
	for i := range b.frames {
		b.frames[i].release()
	}
	s.link.stats.framesOut.Add(uint64(len(b.small) + len(b.frames)))
	s.link.queue.written(taken)
	return err
}

// flush writes what was encoded.
func (s *session) flush() error {
	s.vec = s.iov // consumed by WriteTo
	n, err := s.vec.WriteTo(s.conn)
	s.link.stats.sent.Add(uint64(n))
	clear(s.iov)
	s.iov = s.iov[:0]
	return err
}

// encode computes a frame's checksum and adds it to what is to be written.
func (s *session) encode(f *outFrame) {
	head, rest := f.head[:f.n], f.rest
	if s.link.lane == peerwire.Bulk && len(rest) >= compressFrom {
		head, rest = s.compress(f)
	}
	peerwire.PutSum(head, s.sum.out.Sum(head, head[peerwire.HeaderLen:], rest))
	s.iov = append(s.iov, head)
	if len(rest) > 0 {
		s.iov = append(s.iov, rest)
	}
}

// compress returns a frame compressed, where that saves an eighth, or as it is.
func (s *session) compress(f *outFrame) (head, rest []byte) {
	s.plain = append(append(s.plain[:0], f.head[peerwire.HeaderLen:f.n]...), f.rest...)
	if n := s2.MaxEncodedLen(len(s.plain)); cap(s.packed) < n {
		s.packed = make([]byte, n)
	}
	packed := s2.Encode(s.packed[:cap(s.packed)], s.plain)
	if len(packed) > len(s.plain)-len(s.plain)/8 {
		return f.head[:f.n], f.rest
	}
	peerwire.PutHeader(f.head[:], &peerwire.Header{
		Version: s.peer.Version, Kind: f.kind(), Flags: peerwire.FlagS2, Len: len(packed),
	})
	return f.head[:peerwire.HeaderLen], packed
}

func putU64(f *outFrame, version uint8, k peerwire.Kind, v uint64) {
	binary.BigEndian.PutUint64(f.head[peerwire.HeaderLen:], v)
	f.set(version, k, pingLen, nil, nil)
}
