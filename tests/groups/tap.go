package groups

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"

	"github.com/mortarmq/mortarmq/protocol"
)

// tap is a connection of the client library that reports what passes through it: what is tested is the library as it is,
// what is believed is what was on the wire.
type tap struct {
	net.Conn
	out *reporter

	mu    sync.Mutex
	in    []byte // the beginning of a frame from the broker
	sent  []byte // of one to it
	asked []request
	open  map[uint16][]delivery // delivered and not answered, by partition
}

// delivery is one that was not answered yet.
type delivery struct{ sequence, id uint64 }

// request is one that is not answered.
type request struct {
	op protocol.Op
	// ack is set for an ACK that ends its delivery.
	ack *protocol.Ack
}

// tapped is a dialer for client.WithDialer.
func tapped(out *reporter) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		nc, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &tap{Conn: nc, out: out, open: map[uint16][]delivery{}}, nil
	}
}

// Read reports what it returns.
func (t *tap) Read(b []byte) (int, error) {
	n, err := t.Conn.Read(b)
	t.mu.Lock()
	defer t.mu.Unlock()
	var list []event
	rest, perr := frames(append(t.in, b[:n]...), func(op protocol.Op, payload []byte) error {
		return t.received(op, payload, &list)
	})
	t.in = rest
	if len(list) > 0 {
		perr = errors.Join(perr, t.out.report(list...))
	}
	if perr != nil {
		return 0, perr
	}
	return n, err
}

// Write reports what it is about to send.
func (t *tap) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var list []event
	rest, err := frames(append(t.sent, b...), func(op protocol.Op, payload []byte) error {
		return t.sending(op, payload, &list)
	})
	t.sent = rest
	if len(list) > 0 {
		err = errors.Join(err, t.out.report(list...))
	}
	if err != nil {
		return 0, err
	}
	return t.Conn.Write(b)
}

// frames calls do for each whole frame in b and returns what is behind them.
func frames(b []byte, do func(op protocol.Op, payload []byte) error) (rest []byte, err error) {
	for {
		op, payload, n, err := protocol.ParseFrame(b)
		if err != nil || n == 0 {
			return append([]byte(nil), b...), err
		}
		if err := do(op, payload); err != nil {
			return nil, err
		}
		b = b[n:]
	}
}

func (t *tap) sending(op protocol.Op, payload []byte, list *[]event) error {
	r := request{op: op}
	switch op {
	case protocol.OpAck:
		var a protocol.Ack
		if err := a.Decode(payload); err != nil {
			return err
		}
		if a.Flags&protocol.AckFlagProgress != 0 {
			break
		}
		cumulative := a.Flags&protocol.AckFlagCumulative != 0
		if !cumulative {
			r.ack = &a // of one for many the answer does not tell which of them it has ended
		}
		t.open[a.Partition] = slices.DeleteFunc(t.open[a.Partition], func(d delivery) bool {
			meant := d.id == a.DeliveryID || cumulative && d.sequence <= a.Sequence && d.id < a.DeliveryID
			if meant {
				*list = append(*list, event{Kind: eventAcking, Partition: a.Partition, Sequence: d.sequence, Delivery: d.id, Epoch: a.OwnershipEpoch})
			}
			return meant
		})
	case protocol.OpNack:
		var a protocol.Nack
		if err := a.Decode(payload); err != nil {
			return err
		}
		t.open[a.Partition] = slices.DeleteFunc(t.open[a.Partition], func(d delivery) bool { return d.id == a.DeliveryID })
		*list = append(*list, event{Kind: eventNacking, Partition: a.Partition, Sequence: a.Sequence, Delivery: a.DeliveryID, Epoch: a.OwnershipEpoch})
	default:
	}
	t.asked = append(t.asked, r)
	return nil
}

func (t *tap) received(op protocol.Op, payload []byte, list *[]event) error {
	switch op {
	case protocol.OpMsg:
		var m protocol.Msg
		if err := m.Decode(payload); err != nil {
			return err
		}
		n, c, ok := parseValue(m.Value)
		if !ok {
			return fmt.Errorf("sequence %d of partition %d has a value that nobody has published: %x", m.Sequence, m.Partition, m.Value)
		}
		t.open[m.Partition] = append(t.open[m.Partition], delivery{m.Sequence, m.DeliveryID})
		*list = append(*list, event{Kind: eventDelivered, Cause: c, Number: n, Partition: m.Partition, Attempt: m.Attempt, Sequence: m.Sequence,
			Delivery: m.DeliveryID, Epoch: m.OwnershipEpoch})
		return nil
	case protocol.OpNotice:
		return nil
	case protocol.OpOK:
		var f protocol.OKFrame
		if err := f.Decode(payload); err != nil {
			return err
		}
		return t.answered(f.RequestOp, f.Result, 0, list)
	case protocol.OpErr:
		var f protocol.ErrFrame
		if err := f.Decode(payload); err != nil {
			return err
		}
		if f.RequestOp == protocol.OpMsg || f.Code.Closes() {
			return nil
		}
		return t.answered(f.RequestOp, nil, f.Code, list)
	default:
		return fmt.Errorf("the broker has sent a %v", op)
	}
}

// answered takes the answer to the oldest request.
func (t *tap) answered(op protocol.Op, result []byte, code protocol.ErrorCode, list *[]event) error {
	if len(t.asked) == 0 || t.asked[0].op != op {
		return fmt.Errorf("an answer to %v has come, which is not the oldest request without one", op)
	}
	r := t.asked[0]
	t.asked = t.asked[1:]
	switch {
	case op == protocol.OpSub && code == 0:
		var s protocol.SubResult
		if err := s.Decode(result); err != nil {
			return err
		}
		*list = append(*list, event{Kind: eventJoined, Member: s.MemberID})
	case r.ack != nil:
		e := event{Kind: eventAcked, Partition: r.ack.Partition, Sequence: r.ack.Sequence, Delivery: r.ack.DeliveryID, Epoch: r.ack.OwnershipEpoch}
		if code != 0 {
			e.Kind, e.Code = eventRefused, uint16(code)
		}
		*list = append(*list, e)
	}
	return nil
}
