package harness

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// dialTimeout bounds connecting and each request. Loopback answers in microseconds, but a busy machine may not.
const dialTimeout = time.Minute

// connReadBuffer holds many answers per read; larger frames get memory of their own.
const connReadBuffer = 64 << 10

// Conn is one raw client connection. One goroutine may read (Next, Request and what builds on it) while another sends.
type Conn struct {
	nc    net.Conn
	r     *bufio.Reader
	frame []byte
	// pushes are MSG and NOTICE frames that arrived while Request waited for its answer.
	pushes []Frame
}

// Frame is one frame as received.
type Frame struct {
	Op      protocol.Op
	Payload []byte
}

// Err returns the frame as an error if it is an ERR, otherwise nil.
func (f *Frame) Err() error {
	if f.Op != protocol.OpErr {
		return nil
	}
	var e protocol.ErrFrame
	if err := e.Decode(f.Payload); err != nil {
		return err
	}
	return e.Err()
}

// Dial connects to a broker and sends CONNECT with token.
func Dial(addr, token string) (*Conn, error) {
	nc, err := net.DialTimeout("tcp", addr, dialTimeout)
	if err != nil {
		return nil, err
	}
	c := NewConn(nc)
	connect := protocol.Connect{Version: protocol.WireVersion, Token: []byte(token)}
	if _, err := c.Request(protocol.OpConnect, connect.AppendFrame(nil)); err != nil {
		nc.Close()
		return nil, fmt.Errorf("connect to %s: %w", addr, err)
	}
	return c, nil
}

// NewConn wraps an open connection on which nothing was sent yet.
func NewConn(nc net.Conn) *Conn {
	return &Conn{nc: nc, r: bufio.NewReaderSize(nc, connReadBuffer)}
}

// Net returns the connection below, for deadlines and socket options.
func (c *Conn) Net() net.Conn { return c.nc }

// Close closes the connection at once, without a goodbye.
func (c *Conn) Close() error { return c.nc.Close() }

// Send writes whole frames.
func (c *Conn) Send(frames []byte) error {
	_, err := c.nc.Write(frames)
	return err
}

// Next returns the next frame. Its payload is valid until the next call of Next or Request. At the end of the stream the
// error is io.EOF, in the middle of a frame io.ErrUnexpectedEOF.
func (c *Conn) Next() (Frame, error) {
	if len(c.pushes) > 0 {
		f := c.pushes[0]
		c.pushes = c.pushes[1:]
		return f, nil
	}
	return c.read()
}

// Buffered tells whether Next has bytes to look at without waiting for the socket.
func (c *Conn) Buffered() bool { return len(c.pushes) > 0 || c.r.Buffered() > 0 }

func (c *Conn) read() (Frame, error) {
	head, err := c.r.Peek(protocol.LengthSize)
	if err != nil {
		if errors.Is(err, io.EOF) && len(head) > 0 {
			err = io.ErrUnexpectedEOF
		}
		return Frame{}, err
	}
	total, _, err := protocol.FrameLen(head)
	if err != nil {
		return Frame{}, err
	}
	if cap(c.frame) < total {
		c.frame = make([]byte, total)
	}
	c.frame = c.frame[:total]
	if _, err := io.ReadFull(c.r, c.frame); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return Frame{}, err
	}
	op, payload, _, err := protocol.ParseFrame(c.frame)
	return Frame{Op: op, Payload: payload}, err
}

// Request sends one request frame and waits for its answer: the result of the OK (valid until the next read), or the ERR
// as an error. No other request may be outstanding. MSG and NOTICE frames met on the way are kept for Next.
func (c *Conn) Request(op protocol.Op, frame []byte) (result []byte, err error) {
	if err := c.nc.SetReadDeadline(time.Now().Add(dialTimeout)); err != nil {
		return nil, err
	}
	defer func() { _ = c.nc.SetReadDeadline(time.Time{}) }() // fails on a closed connection only
	if err := c.Send(frame); err != nil {
		return nil, err
	}
	for {
		f, err := c.read()
		if err != nil {
			return nil, err
		}
		switch f.Op {
		case protocol.OpMsg, protocol.OpNotice:
			c.pushes = append(c.pushes, Frame{Op: f.Op, Payload: append([]byte(nil), f.Payload...)})
		case protocol.OpOK:
			var ok protocol.OKFrame
			if err := ok.Decode(f.Payload); err != nil {
				return nil, err
			}
			if ok.RequestOp != op {
				return nil, fmt.Errorf("an answer to %v arrived in place of one to %v", ok.RequestOp, op)
			}
			return ok.Result, nil
		case protocol.OpErr:
			return nil, f.Err()
		default:
			return nil, fmt.Errorf("unexpected %v from the broker", f.Op)
		}
	}
}

// Declare creates or finds a topic.
func (c *Conn) Declare(topic string, partitions int) (protocol.DeclareResult, error) {
	var res protocol.DeclareResult
	req := protocol.Declare{Topic: []byte(topic), Partitions: uint16(partitions)}
	result, err := c.Request(protocol.OpDeclare, req.AppendFrame(nil))
	if err != nil {
		return res, fmt.Errorf("declare %q: %w", topic, err)
	}
	return res, res.Decode(result)
}

// Publish sends one PUB and waits for its answer.
func (c *Conn) Publish(p *protocol.Pub) (protocol.PubResult, error) {
	var res protocol.PubResult
	result, err := c.Request(protocol.OpPub, p.AppendFrame(nil))
	if err != nil {
		return res, err
	}
	return res, res.Decode(result)
}

// Subscribe sends SUB.
func (c *Conn) Subscribe(s *protocol.Sub) (protocol.SubResult, error) {
	var res protocol.SubResult
	result, err := c.Request(protocol.OpSub, s.AppendFrame(nil))
	if err != nil {
		return res, fmt.Errorf("subscribe group %q: %w", s.Group, err)
	}
	return res, res.Decode(result)
}

// ConfirmNotice returns the CONTROL_ACK frame that accepts a NOTICE.
func ConfirmNotice(n *protocol.Notice) []byte {
	ack := protocol.ControlAck{NoticeID: n.NoticeID, Kind: n.Kind, GroupID: n.GroupID, MembershipEpoch: n.MembershipEpoch,
		AssignmentEpoch: n.AssignmentEpoch, OwnershipEpoch: n.OwnershipEpoch, Result: protocol.ControlOK}
	return ack.AppendFrame(nil)
}
