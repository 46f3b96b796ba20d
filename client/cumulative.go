package client

import "github.com/mortarmq/mortarmq/protocol"

// maxUnsettled bounds what is remembered of a partition. Beyond it every message is acknowledged by itself.
const maxUnsettled = 4096

// unsettled knows which messages of a partition a cumulative ACK must not cover: those that were delivered, have not
// been finished well, and are before others that were. It covers all that was delivered to the member up to a sequence,
// and would silently acknowledge what waits for another attempt. While there is any, messages are acknowledged one by
// one. A message that is never delivered again (its attempts ran out) keeps it that way, which is slow but right.
type unsettled struct {
	highest   uint64 // the highest sequence delivered
	sequences map[uint64]struct{}
	overflow  bool
}

// arrived takes note of a delivery. One that comes out of order stands before others that may be finished earlier.
func (u *unsettled) arrived(sequence uint64) {
	if sequence <= u.highest {
		u.add(sequence)
		return
	}
	u.highest = sequence
}

// ended takes note of the end of a delivery.
func (u *unsettled) ended(sequence uint64, done bool) {
	if !done {
		u.add(sequence)
		return
	}
	if len(u.sequences) > 0 {
		delete(u.sequences, sequence)
	}
}

func (u *unsettled) add(sequence uint64) {
	if len(u.sequences) >= maxUnsettled {
		u.overflow = true
		return
	}
	if u.sequences == nil {
		u.sequences = map[uint64]struct{}{}
	}
	u.sequences[sequence] = struct{}{}
}

func (u *unsettled) any() bool { return u.overflow || len(u.sequences) > 0 }

// ackTogether acknowledges messages of a partition that were handled one after the other, with a single ACK if that says
// the same.
func (k *Consumer) ackTogether(part *assigned, batch []*Message) {
	if len(batch) == 0 {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if part.unsettled.any() {
		for _, m := range batch {
			if m.Active() {
				k.request(answer{m: m, op: protocol.OpAck})
				k.end(m, true)
			}
		}
		k.settleRevoke(part)
		return
	}
	var last *Message
	for _, m := range batch {
		if m.Active() {
			last = m
		}
	}
	if last == nil {
		return
	}
	k.request(answer{m: last, op: protocol.OpAck, flags: protocol.AckFlagCumulative})
	for _, m := range batch {
		k.end(m, true)
	}
	k.settleRevoke(part)
}
