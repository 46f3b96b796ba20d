package client

import (
	"context"
	"net"
	"testing"

	"github.com/mortarmq/mortarmq/protocol"
)

// startSink is a broker that stores nothing: it answers every PUB at once and has always more messages for a consumer,
// so that a benchmark sees the library.
func startSink(tb testing.TB) string {
	tb.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = ln.Close() })
	go func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			go sink(nc)
		}
	}()
	return ln.Addr().String()
}

func sink(nc net.Conn) {
	defer func() { _ = nc.Close() }()
	buf, n := make([]byte, 256<<10), 0
	var out []byte
	result := protocol.PubResult{Durability: protocol.DurabilityQuorum}
	msg := protocol.Msg{SubscriptionID: 1, TopicID: 1, Attempt: 1, OwnershipEpoch: 1, Value: make([]byte, 100)}
	send := func(n int) {
		for range n {
			msg.Sequence++
			msg.DeliveryID++
			out = msg.AppendFrame(out)
		}
	}
	for {
		got, err := nc.Read(buf[n:])
		if err != nil {
			return
		}
		n += got
		at := 0
		for {
			op, payload, size, err := protocol.ParseFrame(buf[at:n])
			if err != nil {
				return
			}
			if size == 0 {
				break
			}
			at += size
			switch op {
			case protocol.OpPub:
				result.Sequence++
				out = result.AppendOK(out)
			case protocol.OpDeclare:
				topic := protocol.DeclareResult{TopicID: 1, Partitions: 4}
				out = topic.AppendOK(out)
			case protocol.OpSub:
				member := protocol.SubResult{SubscriptionID: 1, MemberID: 1, MembershipEpoch: 1, AssignmentEpoch: 1}
				assign := protocol.Notice{NoticeID: 1, OwnershipEpoch: 1, TopicID: 1, MemberID: 1}
				out = assign.AppendFrame(member.AppendOK(out))
			case protocol.OpControlAck:
				out = protocol.AppendOKEmpty(out, op)
				send(defaultCredit)
			case protocol.OpCredit:
				var credit protocol.Credit
				if err := credit.Decode(payload); err != nil {
					return
				}
				out = new(protocol.CreditResult).AppendOK(out)
				send(int(credit.Count))
			default:
				out = protocol.AppendOKEmpty(out, op)
			}
		}
		n = copy(buf, buf[at:n])
		if _, err := nc.Write(out); err != nil {
			return
		}
		out = out[:0]
	}
}

// BenchmarkProducer_SendFunc is one goroutine that publishes 100-byte messages as fast as the limits allow.
func BenchmarkProducer_SendFunc(b *testing.B) {
	c, err := Dial(b.Context(), startSink(b))
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	p, err := c.NewProducer(b.Context(), "orders", ProducerOptions{})
	if err != nil {
		b.Fatal(err)
	}
	m := Record{Value: make([]byte, 100)}
	done := func(_ Result, err error) {
		if err != nil {
			b.Error(err)
		}
	}
	b.ReportAllocs()
	for b.Loop() {
		if err := p.SendFunc(b.Context(), m, done); err != nil {
			b.Fatal(err)
		}
	}
	if err := p.Flush(b.Context()); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkConsumer_Run is one handler that receives 100-byte messages as fast as the default window allows.
func BenchmarkConsumer_Run(b *testing.B) {
	for name, opts := range map[string]ConsumerOptions{"AckEach": {}, "CumulativeAcks": {CumulativeAcks: true}} {
		b.Run(name, func(b *testing.B) {
			c, err := Dial(b.Context(), startSink(b))
			if err != nil {
				b.Fatal(err)
			}
			defer func() { _ = c.Close() }()
			k, err := c.NewConsumer(b.Context(), "orders", "billing", opts)
			if err != nil {
				b.Fatal(err)
			}
			ctx, cancel := context.WithCancel(b.Context())
			defer cancel()
			b.ReportAllocs()
			n := 0
			err = k.Run(ctx, func(context.Context, *Message) error {
				if n++; n == b.N {
					cancel()
				}
				return nil
			})
			if err != nil {
				b.Fatal(err)
			}
		})
	}
}
