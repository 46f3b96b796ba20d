package client

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

func TestProducer_EndsWhenItsTokenIsRefused(t *testing.T) {
	b := newFakeBroker(t)
	b.addTopic("orders", 1)
	p := newTestProducer(t, b, "orders", ProducerOptions{})
	if _, err := p.Send(testContext(t), Record{Value: []byte("v")}); err != nil {
		t.Fatal(err)
	}
	b.inspect(func() { b.token = "changed" })
	b.dropConnections()
	if _, err := p.Send(testContext(t), Record{Value: []byte("v")}); !errors.Is(err, ErrAuthFailed) {
		t.Errorf("the message on its way: %v", err)
	}
	if _, err := p.Send(testContext(t), Record{Value: []byte("v")}); !errors.Is(err, ErrAuthFailed) {
		t.Errorf("a message after the end: %v", err)
	}
}

func TestProducer_LeavesAConnectionThatHasGoneSilent(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 1)
	c := dialFake(t, b, func(c *config) { c.silence = 30 * time.Millisecond })
	p, err := c.NewProducer(testContext(t), "orders", ProducerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	swallowed := false
	b.hook(func(_ *fakeConn, op protocol.Op, _ []byte) ([]byte, bool, bool) {
		if op == protocol.OpPub && !swallowed {
			swallowed = true
			return nil, true, false
		}
		return nil, false, false
	})
	if r, err := p.Send(testContext(t), Record{Value: []byte("v")}); err != nil || r.Sequence != 1 {
		t.Errorf("%+v, %v", r, err)
	}
	requireStored(t, b, topic, 0, []string{"v"})
}

func TestConsumer_LeavesABrokerThatIgnoresTheWindow(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 1)
	b.fill(topic, 1)
	k := newTestConsumer(t, dialFake(t, b), ConsumerOptions{CreditCount: 4})
	receive(t, k, 1)
	b.inspect(func() {
		c := b.groups["billing"].conn
		for i := range 10 {
			c.push(c.message(&topic.partitions[0].log[0], 0, uint64(i+2), 1).AppendFrame(nil))
		}
	})
	eventually(t, b, "it has connected again", func() bool { return len(b.subs) == 2 })
}

// randomFrame returns a frame that a broken broker might send: any operation, with a payload that is random, a valid
// payload of another operation, or valid but out of place.
func randomFrame(rng *rand.Rand) []byte {
	payload := make([]byte, rng.IntN(80))
	for i := range payload {
		payload[i] = byte(rng.Uint32() >> (8 * rng.IntN(4)))
	}
	frame := binary.BigEndian.AppendUint32(nil, uint32(len(payload)+1))
	frame = append(append(frame, byte(1+rng.IntN(15))), payload...)
	ok, msg := protocol.PubResult{Sequence: rng.Uint64()}, protocol.Msg{Partition: uint16(rng.Uint32()), Sequence: rng.Uint64N(5),
		Attempt: uint16(rng.IntN(3)), OwnershipEpoch: rng.Uint64N(3), Value: payload}
	notice := protocol.Notice{NoticeID: rng.Uint64(), Kind: protocol.NoticeKind(rng.IntN(2)), OwnershipEpoch: rng.Uint64N(3),
		TopicID: 1, Partition: uint16(rng.IntN(3)), MemberID: 101 + rng.Uint64N(2)}
	switch rng.IntN(8) {
	case 0:
		return ok.AppendOK(nil)
	case 1:
		return msg.AppendFrame(nil)
	case 2:
		return notice.AppendFrame(nil)
	case 3:
		return protocol.AppendOKEmpty(nil, protocol.Op(rng.IntN(17)))
	case 4:
		return protocol.AppendErr(nil, protocol.ErrorCode(rng.IntN(0x30)), protocol.Op(rng.IntN(17)), "leader=1 nonsense")
	default:
		return frame
	}
}

func TestClient_SurvivesABrokerThatSendsNonsense(t *testing.T) {
	for seed := range uint64(30) {
		b := newFakeBroker(t)
		topic := b.addTopic("orders", 2)
		b.fill(topic, 5)
		c := dialFake(t, b, func(c *config) { c.silence = 50 * time.Millisecond }) // ends the wait for a swallowed answer
		p, err := c.NewProducer(testContext(t), "orders", ProducerOptions{})
		if err != nil {
			t.Fatal(err)
		}
		k, err := c.NewConsumer(testContext(t), "orders", "billing", ConsumerOptions{})
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			_ = k.Run(context.Background(), func(context.Context, *Message) error { return nil })
		}()
		rng := rand.New(rand.NewPCG(seed, 1))
		nonsense := 0
		b.hook(func(_ *fakeConn, op protocol.Op, _ []byte) ([]byte, bool, bool) {
			switch op {
			case protocol.OpPub, protocol.OpAck, protocol.OpControlAck, protocol.OpCredit:
			default:
				return nil, false, false
			}
			if nonsense++; nonsense > 40 || rng.IntN(3) != 0 {
				return nil, false, false
			}
			return randomFrame(rng), true, false
		})
		for _, v := range numbers(100) {
			_ = p.SendAsync(testContext(t), Record{Value: []byte(v)})
		}
		b.fill(topic, 5)
		if err := p.Flush(testContext(t)); err != nil {
			t.Errorf("seed %d: %v", seed, err)
		}
		if err := k.Close(testContext(t)); err != nil {
			t.Errorf("seed %d: %v", seed, err)
		}
		if err := c.Close(); err != nil {
			t.Errorf("seed %d: %v", seed, err)
		}
		b.close()
	}
}
