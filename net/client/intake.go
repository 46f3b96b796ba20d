package client

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"log/slog"

	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/protocol"
)

// intake takes the frames of one readable event apart. All of b is used before it returns: whole frames where they lie,
// the beginning of one that is not complete by copying it away, since b is the loop's buffer.
func (c *conn) intake(b []byte) {
	for len(b) > 0 && c.reading() {
		if c.part.active() {
			b = c.resume(b)
			continue
		}
		op, payload, n, err := protocol.ParseFrame(b)
		switch {
		case err != nil:
			c.refuseFrame(b, err)
		case n == 0:
			c.partSince = c.loop.now
			c.begin(b)
			return
		default:
			b = b[n:]
			c.frame(op, payload, nil)
		}
	}
}

// refuseFrame answers a frame whose header broke the rules.
func (c *conn) refuseFrame(head []byte, err error) {
	code, ok := protocol.CodeOf(err)
	if !ok {
		code = protocol.CodeMalformedPayload
	}
	var op protocol.Op
	if len(head) >= protocol.HeaderSize {
		op = protocol.Op(head[protocol.LengthSize])
	}
	c.refuse(code, op, errorText(err, code))
}

// errorText is what went wrong, followed by what to do about it.
func errorText(err error, code protocol.ErrorCode) string {
	return err.Error() + " (" + code.Text() + ")"
}

// begin keeps the first bytes of a frame, fewer than the frame has; their header is known to be sound.
func (c *conn) begin(b []byte) {
	p := &c.part
	if len(b) < protocol.HeaderSize {
		p.n = copy(p.head[:], b)
		return
	}
	p.total, _, _ = protocol.FrameLen(b)
	c.take(b)
}

// resume adds the bytes at the start of b to the incomplete frame, handles it if it is complete, and returns the rest.
func (c *conn) resume(b []byte) []byte {
	p := &c.part
	if p.buf == nil {
		n := copy(p.head[p.n:], b)
		p.n += n
		b = b[n:]
		op, _, n, err := protocol.ParseFrame(p.head[:p.n])
		switch {
		case err != nil:
			c.refuseFrame(p.head[:p.n], err)
			return nil
		case n > 0: // the smallest frame is a header
			p.n = 0
			c.frame(op, nil, nil)
			return b
		case p.n < protocol.HeaderSize:
			return b
		}
		p.total, _, _ = protocol.FrameLen(p.head[:])
		if len(b) == 0 {
			return nil // the buffer can wait for the byte behind the op
		}
	}
	b = c.take(b)
	c.complete()
	return b
}

// take moves bytes of b into the incomplete frame's buffer and returns the rest.
func (c *conn) take(b []byte) []byte {
	n := c.room(len(b))
	if n == 0 {
		return nil
	}
	buf := c.part.buf
	buf.b = append(buf.b, b[:n]...)
	return b[n:]
}

// room is partial.room; where there is none the connection is closed and 0 returned.
func (c *conn) room(arriving int) int {
	n := c.part.room(&c.srv.frames, arriving)
	if n == 0 {
		c.srv.warn("a connection was closed: the memory for incomplete frames is used up", slog.Int64("limit_bytes", c.srv.opts.PartialBytes))
		c.refuse(protocol.CodeBackpressure, 0, "the broker's memory for incomplete frames is used up: reconnect later, send smaller messages")
	}
	return n
}

// complete handles the incomplete frame if it is none any more.
func (c *conn) complete() {
	buf := c.part.buf
	if buf == nil || len(buf.b) < c.part.total {
		return
	}
	c.part = partial{}
	if !c.frame(protocol.Op(buf.b[protocol.LengthSize]), buf.b[protocol.HeaderSize:], buf) {
		buf.Release()
	}
}

// readInto continues a large frame straight from the socket into its buffer, which saves a copy. False: the client has
// closed, or the socket is broken.
func (c *conn) readInto() bool {
	p := &c.part
	for left := turnBytes; left > 0 && p.buf != nil && p.total-len(p.buf.b) >= readIntoMin; {
		if len(p.buf.b) == cap(p.buf.b) && c.room(1) == 0 {
			return true
		}
		have := len(p.buf.b)
		n, err := unix.Read(c.fd, p.buf.b[have:min(cap(p.buf.b), p.total)])
		switch {
		case errors.Is(err, unix.EAGAIN):
			return true
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil || n == 0:
			c.eof = err == nil
			return false
		}
		p.buf.b = p.buf.b[:have+n]
		left -= n
		c.srv.bytesIn.Add(uint64(n))
		c.complete()
	}
	return true
}

// frame handles one complete frame. payload aliases buf's memory, if there is a buf; true says that buf was handed on.
func (c *conn) frame(op protocol.Op, payload []byte, buf *frameBuf) (kept bool) {
	c.heard = c.loop.now
	if c.phase == phaseConnecting && op != protocol.OpConnect && op != protocol.OpPing && op != protocol.OpErr {
		c.refuse(protocol.CodeNotAuthenticated, op, "")
		return false
	}
	switch op {
	case protocol.OpPub:
		return c.publish(payload, buf)
	case protocol.OpConnect:
		c.connect(payload)
	case protocol.OpPing:
		if err := protocol.DecodePing(payload); err != nil {
			c.refuse(protocol.CodeMalformedPayload, op, errorText(err, protocol.CodeMalformedPayload))
			return false
		}
		c.interruptPulls()
		c.Complete(c.request(), pong)
	case protocol.OpErr:
		c.logErr(payload)
	case protocol.OpOK, protocol.OpMsg, protocol.OpNotice:
		c.refuse(protocol.CodeMalformedPayload, op, "only the broker sends "+op.String()+": fix the client")
	case protocol.OpDeclare, protocol.OpSub, protocol.OpAck, protocol.OpNack, protocol.OpPull, protocol.OpHeartbeat,
		protocol.OpControlAck, protocol.OpCredit:
		c.control(op, payload)
	}
	return false
}

var (
	pong      = protocol.AppendOKEmpty(nil, protocol.OpPing)
	connected = protocol.AppendOKEmpty(nil, protocol.OpConnect)
)

// publish hands a PUB on, or answers that there is no room.
func (c *conn) publish(payload []byte, buf *frameBuf) (kept bool) {
	l := c.loop
	if err := l.pub.Decode(payload); err != nil {
		c.refuse(protocol.CodeMalformedPayload, protocol.OpPub, errorText(err, protocol.CodeMalformedPayload))
		return false
	}
	c.interruptPulls()
	if !c.hasRoom(protocol.OpPub) {
		return false
	}
	req := c.request()
	large := buf != nil && len(buf.b) >= ownedFrameMin
	if c.pending() > c.srv.opts.MaxPending || large && !buf.own() {
		c.completeBusy(req)
		return false
	}
	c.announce()
	l.submitted = true
	if large {
		l.ingress.PublishOwned(c, req, &l.pub, buf)
		return true
	}
	l.ingress.Publish(c, req, &l.pub)
	return false
}

// control hands any other request on.
func (c *conn) control(op protocol.Op, payload []byte) {
	if op != protocol.OpPull {
		c.interruptPulls()
	}
	if !c.hasRoom(op) {
		return
	}
	req := c.request()
	if op == protocol.OpPull {
		c.pulled, c.pull = true, req
	}
	c.announce()
	c.loop.submitted = true
	c.loop.ingress.Request(c, req, op, payload)
}

// announce notes that the engine knows the connection. Set once: other goroutines read it, see taken.
func (c *conn) announce() {
	if !c.announced {
		c.announced = true
	}
}

// interruptPulls ends the PULLs that are not answered yet, once: a request has arrived behind them. Whether they are
// waiting already is not asked: the PULL may be on its way to where that is known.
func (c *conn) interruptPulls() {
	if !c.pulled || c.interrupted == c.pull+1 || c.head.Load() > c.pull {
		return
	}
	c.interrupted = c.pull + 1
	c.loop.submitted = true
	c.loop.ingress.Interrupt(c)
}

// hasRoom ends a connection that goes on sending without minding that it gets no answers.
func (c *conn) hasRoom(op protocol.Op) bool {
	if c.pending() < 2*c.srv.opts.MaxPending {
		return true
	}
	c.Shut(protocol.CodeBackpressure, op, "too many requests on this connection wait for their answers: read the answers, send less at a time")
	c.closing(c.loop.now + c.srv.opts.Linger)
	return false
}

// completeBusy answers a PUB with 0x4001 in its turn; the slot needs no memory for it.
func (c *conn) completeBusy(req uint64) {
	c.srv.busy.Add(1)
	c.mu.Lock()
	if !c.cut {
		c.answers.putBusy(req)
		c.drain()
	}
	c.mu.Unlock()
}

// connect checks version and token.
func (c *conn) connect(payload []byte) {
	if c.phase != phaseConnecting {
		c.refuse(protocol.CodeMalformedPayload, protocol.OpConnect, "CONNECT was sent already: send it once")
		return
	}
	if len(payload) > 0 && payload[0] != protocol.WireVersion { // another version's payload may look different
		c.refuse(protocol.CodeUnsupportedVersion, protocol.OpConnect, "")
		return
	}
	var m protocol.Connect
	if err := m.Decode(payload); err != nil {
		c.refuse(protocol.CodeMalformedPayload, protocol.OpConnect, errorText(err, protocol.CodeMalformedPayload))
		return
	}
	if !c.srv.authentic(m.Token) {
		c.srv.authFailures.Add(1)
		c.srv.warn("a client was refused: wrong token", slog.String("remote", c.remote()))
		c.phase = phaseDenied
		c.until = c.loop.now + c.srv.opts.AuthDelay
		return
	}
	c.phase = phaseOpen
	c.direct.Store(true)
	c.Complete(c.request(), connected)
}

// authentic compares the token's digest with all configured ones, in time that depends on their number only.
func (s *Server) authentic(token []byte) bool {
	if len(s.opts.TokenDigests) == 0 {
		return true
	}
	digest := sha256.Sum256(token)
	match := 0
	for i := range s.opts.TokenDigests {
		match |= subtle.ConstantTimeCompare(digest[:], s.opts.TokenDigests[i][:])
	}
	return match == 1
}

// logErr notes what a client complains about; nothing answers an ERR.
func (c *conn) logErr(payload []byte) {
	var m protocol.ErrFrame
	if err := m.Decode(payload); err != nil {
		c.refuse(protocol.CodeMalformedPayload, protocol.OpErr, errorText(err, protocol.CodeMalformedPayload))
		return
	}
	c.srv.debug(c, "the client reports an error", slog.Any("error", m.Err()))
}

func (c *conn) remote() string {
	if c.gc != nil {
		if addr := c.gc.RemoteAddr(); addr != nil {
			return addr.String()
		}
	}
	return "unknown"
}
