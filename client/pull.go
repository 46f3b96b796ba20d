package client

import (
	"math"

	"github.com/mortarmq/mortarmq/protocol"
)

// pullWaitMs is how long the broker may wait for a message before it answers a PULL with none. Any other request on the
// connection ends the wait earlier.
const pullWaitMs = 1000

// pull asks for messages, in the mode without STREAM. There is at most one PULL unanswered; its answer, an assignment
// and returned credit ask for the next one, and every tick does in case that all of these were of no use.
func (k *Consumer) pull() {
	if !k.opts.Pull || !k.live || k.closing || k.pulling || k.credit.leftCount <= 0 || k.credit.leftBytes <= 0 {
		return
	}
	k.pulling = true
	m := protocol.Pull{SubscriptionID: k.subID, MemberID: k.member, MembershipEpoch: k.joinEp, AssignmentEpoch: k.assEp,
		MaxMsgs: uint16(min(k.credit.leftCount, math.MaxUint16)), MaxBytes: uint32(min(k.credit.leftBytes, math.MaxUint32)),
		WaitMs: pullWaitMs, MinBytes: 1} // no ownership epochs: whatever this member owns
	k.send(m.AppendFrame)
}

// pulled handles the answer to a PULL.
func (k *Consumer) pulled(refusal *protocol.Error) {
	k.pulling = false
	switch {
	case refusal == nil:
		k.pull()
	case refusal.Code == protocol.CodeMessageExceedsCredit:
		k.raiseCredit(refusal)
		k.pull()
	default: // no credit, or a view of the group that is too old: credit or a NOTICE will come, else the next tick
	}
}
