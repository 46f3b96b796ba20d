package client

import (
	"fmt"
	"math"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// Credit goes back to the broker in batches: whichever of these comes first, or half of the window.
const (
	creditBatchCount = 32
	creditBatchBytes = 1 << 20
	creditDelay      = 20 * time.Millisecond
	// maxUnanswered is how many ACKs and NACKs may wait for the broker's answer before credit is held back. A consumer
	// is quicker than the broker's disk; unbounded, it would be cut off as one that does not read its answers.
	maxUnanswered = 16 << 10
)

// creditAccount counts what the broker may still send, and what finished messages have cost and the broker has not got
// back yet. It is guarded by the consumer's lock.
type creditAccount struct {
	k           *Consumer
	windowCount int
	windowBytes int
	leftCount   int // what the broker may still send
	leftBytes   int
	count       int // to be returned
	bytes       int
	timer       *time.Timer
	armed       bool
	held        bool // credit waits for answers, see answered
}

func (a *creditAccount) init(k *Consumer) {
	a.k = k
	a.windowCount, a.windowBytes = k.opts.CreditCount, k.opts.CreditBytes
	a.timer = time.AfterFunc(math.MaxInt64, func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		a.armed = false
		if k.live && a.count > 0 {
			a.flush()
		}
	})
}

// reset starts a window: of a new subscription, or a larger one. Nothing is owed.
func (a *creditAccount) reset() {
	a.leftCount, a.leftBytes = a.windowCount, a.windowBytes
	a.count, a.bytes = 0, 0
	a.held = false
}

// spend accounts for a message of the given cost. It fails if the broker sends more than it may: the window is what
// bounds the consumer's memory. The last message may exceed what is left of the bytes.
func (a *creditAccount) spend(bytes int) error {
	a.leftCount--
	a.leftBytes -= bytes
	if a.leftCount < 0 || a.leftBytes < -largestMessage {
		return fmt.Errorf("client: the broker sends more than the window of %d messages, %d bytes", a.windowCount, a.windowBytes)
	}
	return nil
}

// add takes up the cost of a message that has ended, however it did.
func (a *creditAccount) add(bytes int) {
	a.count++
	a.bytes += bytes
	switch {
	case a.count >= creditBatchCount, a.bytes >= creditBatchBytes, 2*a.count >= a.windowCount, 2*a.bytes >= a.windowBytes:
		a.flush()
	case !a.armed:
		a.armed = true
		a.timer.Reset(creditDelay)
	}
}

// answered continues what flush held back, when enough answers have come.
func (a *creditAccount) answered() {
	if a.held && a.k.answers.len() <= maxUnanswered/2 {
		a.flush()
	}
}

// flush returns what is owed, unless a whole window of ACKs waits for the broker to accept them, or very many for their
// answers, until half of those have come: more messages would only make that queue longer.
func (a *creditAccount) flush() {
	if a.k.stuck >= a.windowCount {
		return
	}
	limit := maxUnanswered
	if a.held {
		limit = maxUnanswered/2 + 1
	}
	if a.held = a.k.answers.len() >= limit; a.held {
		return
	}
	for a.count > 0 || a.bytes > 0 {
		m := protocol.Credit{SubscriptionID: a.k.subID, MembershipEpoch: a.k.joinEp, Mode: protocol.CreditAdd,
			Count: uint16(min(a.count, math.MaxUint16)), Bytes: uint32(min(a.bytes, math.MaxUint32))}
		a.count -= int(m.Count)
		a.bytes -= int(m.Bytes)
		a.leftCount = min(a.leftCount+int(m.Count), a.windowCount)
		a.leftBytes = min(a.leftBytes+int(m.Bytes), a.windowBytes)
		a.send(&m)
	}
	a.k.pull()
}

// raise sets a window that every message fits in.
func (a *creditAccount) raise() {
	a.windowBytes = max(a.windowBytes, largestMessage)
	a.reset()
	a.send(&protocol.Credit{SubscriptionID: a.k.subID, MembershipEpoch: a.k.joinEp, Mode: protocol.CreditSet,
		Count: uint16(a.windowCount), Bytes: uint32(a.windowBytes)})
}

func (a *creditAccount) send(m *protocol.Credit) {
	a.k.send(func(dst []byte) []byte { return m.AppendFrame(dst) })
}
