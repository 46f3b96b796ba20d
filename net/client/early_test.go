package client

import (
	"sync/atomic"
	"testing"

	"github.com/mortarmq/mortarmq/protocol"
)

// A client that sends several requests without waiting learns of a subscription before it gets a message of it, whatever
// the request before takes; messages of other subscriptions don't wait.
func TestPush_MessagesWaitForTheAnswerToTheirSub(t *testing.T) {
	e := newFakeEngine(1)
	e.hold = func(job) bool { return true }
	s := serve(t, e, nil)
	p := connect(t, s)
	slow, sub, pull := protocol.Heartbeat{}, protocol.Sub{Group: []byte("g"), Partition: protocol.AnyPartition}, protocol.Pull{}
	p.send(pull.AppendFrame(sub.AppendFrame(slow.AppendFrame(nil))))
	jobs := e.takeHeld(t, 3)
	c := jobs[0].c
	var releases atomic.Int64
	message := func(subscription uint16, seq uint64, size int) []byte {
		return (&protocol.Msg{SubscriptionID: subscription, Sequence: seq, Value: make([]byte, size)}).AppendFrame(nil)
	}
	pushOwned := func(seq uint64) {
		b := message(5, seq, 10_000)
		c.PushOwned(b, &testOwner{b: b, total: &releases})
	}
	answer := protocol.SubResult{SubscriptionID: 5, MemberID: 7}

	c.Complete(jobs[1].req, answer.AppendOK(nil))
	c.Push(message(5, 1, 10))
	c.Push(message(4, 1, 10))
	pushOwned(2)
	value := make([]byte, 20_000)
	large := protocol.Msg{SubscriptionID: 5, Sequence: 3}
	c.PushValue(large.AppendHeader(nil, len(value)), value, &testOwner{b: value, total: &releases})
	c.Complete(jobs[2].req, protocol.AppendOKEmpty(nil, protocol.OpPull))
	c.Flush()
	p.expect(message(4, 1, 10))
	if got := c.Outstanding(); got < 30_000 {
		t.Errorf("%d bytes are outstanding: those that wait don't count", got)
	}
	c.Complete(jobs[0].req, protocol.AppendOKEmpty(nil, protocol.OpHeartbeat))
	c.Flush()
	p.expectOK(protocol.OpHeartbeat)
	p.expect(answer.AppendOK(nil))
	p.expect(message(5, 1, 10))
	p.expect(message(5, 2, 10_000))
	p.expect(message(5, 3, 20_000))
	p.expectOK(protocol.OpPull)
	eventually(t, "the owners have their memory back", func() bool { return releases.Load() == 2 })

	// From now on nothing waits, and what waits for an answer that never comes is given back with the connection.
	c.Push(message(5, 4, 10))
	c.Flush()
	p.expect(message(5, 4, 10))
	p.send(sub.AppendFrame(slow.AppendFrame(nil)))
	jobs = e.takeHeld(t, 2)
	c.Complete(jobs[1].req, answer.AppendOK(nil))
	pushOwned(5)
	_ = p.conn.SetLinger(0) // a reset: the broker does not go on answering
	p.conn.Close()
	eventually(t, "the owner has its memory back", func() bool { return releases.Load() == 3 })
}
