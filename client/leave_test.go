package client

import (
	"bytes"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// TestConsumer_SendsNothingAfterLeave answers LEAVE late: messages still come, leases run, the application answers what
// it has in hand. The broker doesn't know the member any more, so nothing of that may be sent.
func TestConsumer_SendsNothingAfterLeave(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 1)
	b.fill(topic, 50)
	var logged bytes.Buffer
	c := dialFake(t, b, quick(2*time.Millisecond), WithLogger(slog.New(slog.NewTextHandler(&logged, nil))))
	k := newTestConsumer(t, c, ConsumerOptions{CreditCount: 100, Lease: 3 * time.Second, MaxProcessing: forever})
	inHand := receive(t, k, 2)
	left := make(chan *fakeConn, 1)
	var after []protocol.Op
	gone := false
	b.hook(func(c *fakeConn, op protocol.Op, payload []byte) ([]byte, bool, bool) {
		if gone {
			after = append(after, op)
			return protocol.AppendErr(nil, protocol.CodeUnknownMember, op, ""), true, false
		}
		var m protocol.Heartbeat
		if op != protocol.OpHeartbeat || m.Decode(payload) != nil || m.State != protocol.MemberLeave {
			return nil, false, false
		}
		gone = true
		left <- c
		return nil, true, false // answered below
	})
	ended := make(chan error, 1)
	go func() { ended <- k.Close(testContext(t)) }()
	conn := <-left
	b.inspect(func() { // what was on its way when LEAVE came
		for seq := uint64(51); seq <= 50+creditBatchCount; seq++ {
			conn.push(conn.message(&protocol.Pub{Value: []byte("late")}, 0, seq, 1).AppendFrame(nil))
		}
	})
	waitTicks(k, 10) // leases would be renewed, heartbeats and what is left of the credit be sent
	for _, m := range inHand {
		_ = m.Ack() // as an application does that is slow to notice
	}
	waitTicks(k, 4)
	if k.mu.Lock(); !k.live {
		t.Error("the connection was given up")
	}
	k.mu.Unlock()
	b.inspect(func() { conn.push(protocol.AppendOKEmpty(nil, protocol.OpHeartbeat)) })
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	b.inspect(func() {
		if len(after) > 0 {
			t.Errorf("sent after LEAVE: %v", after)
		}
	})
	if strings.Contains(logged.String(), "reconnecting") {
		t.Errorf("logged:\n%s", logged.String())
	}
}

// waitTicks waits until n more ticks of the consumer's connection have passed, or it has none any more.
func waitTicks(k *Consumer, n uint64) {
	until := uint64(0)
	for {
		k.mu.Lock()
		now, live := k.tick, k.live
		k.mu.Unlock()
		if until == 0 {
			until = now + n
		}
		if !live || now >= until {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// TestCredit_IsHeldBackBehindManyUnansweredAcks leaves ACKs unanswered: from maxUnanswered on no credit is sent, and it
// flows again when half of them are answered.
func TestCredit_IsHeldBackBehindManyUnansweredAcks(t *testing.T) {
	b := newFakeBroker(t)
	b.addTopic("orders", 1)
	k := newTestConsumer(t, dialFake(t, b), ConsumerOptions{CreditCount: 65535})
	credits := func() (n int) {
		b.inspect(func() {
			for _, m := range b.credits {
				n += int(m.Count)
			}
		})
		return n
	}
	owe := func(messages int) {
		k.mu.Lock()
		defer k.mu.Unlock()
		for range messages {
			k.credit.add(1)
		}
	}
	unanswered := func(n int) {
		k.mu.Lock()
		defer k.mu.Unlock()
		for k.answers.len() < n {
			k.answers.push(answer{m: &Message{}, op: protocol.OpAck})
		}
	}
	answer := func(n int) {
		k.mu.Lock()
		defer k.mu.Unlock()
		for range n {
			if err := k.acknowledged(protocol.OpAck, nil); err != nil {
				t.Fatal(err)
			}
		}
	}

	unanswered(maxUnanswered - 1)
	owe(creditBatchCount)
	eventually(t, b, "credit flows below the limit", func() bool { return len(b.credits) == 1 })
	unanswered(maxUnanswered)
	owe(3 * creditBatchCount)
	k.onTick()
	answer(maxUnanswered/2 - 1)
	k.onTick()
	if n := credits(); n != creditBatchCount || !held(k) {
		t.Fatalf("%d messages of credit were sent behind %d unanswered ACKs, held back: %v", n, maxUnanswered, held(k))
	}
	answer(1)
	eventually(t, b, "credit flows again", func() bool { return len(b.credits) == 2 })
	if n := credits(); n != 4*creditBatchCount || held(k) {
		t.Errorf("%d messages of credit were returned, of %d; held back: %v", n, 4*creditBatchCount, held(k))
	}
	answer(maxUnanswered / 2)
}

func held(k *Consumer) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.credit.held
}

func TestLink_SaysHowLongTheBrokerWasSilent(t *testing.T) {
	here, there := net.Pipe()
	defer func() { _ = there.Close() }()
	l := &link{nc: here, addr: "broker:1", silence: 20 * time.Millisecond, buf: make([]byte, readBuffer)}
	defer l.close()
	if _, _, err := l.next(); err == nil || !strings.Contains(err.Error(), "broker:1: the broker sent nothing for 20ms") {
		t.Errorf("a silent broker: %v", err)
	}
}
