package peerwire

import (
	"fmt"
	"time"
)

const (
	// FlowWindow bounds the bytes of a catch-up that were sent and not acknowledged.
	FlowWindow = 8 << 20
	// FlowMinRate and FlowMaxRate bound the pace of a catch-up in bytes per second.
	FlowMinRate = 16 << 20
	FlowMaxRate = 2 << 30

	// flowBurst is the time for which the pace may be saved up.
	flowBurst = 20 * time.Millisecond
	// flowPeriod is the time over which a gap is watched before the pace is changed.
	flowPeriod = 250 * time.Millisecond
)

// Flow is the sender's side of a catch-up: it says how much may be sent when, so that live traffic keeps its latency and the
// follower still arrives.
//
// What was sent and is not durable at the receiver stays within a window; and the pace begins at its minimum, so that
// reading and sending take a small part of disk and network. Each quarter of a second it is raised by a half where the gap
// between the leader and the follower did not shrink, otherwise lowered by a quarter where live traffic suffers, and raised by
// a quarter where it does not. With the maximum reached and the gap still growing, publishers have to be slowed down (0x4001):
// Overwhelmed.
//
// The zero value is a flow that begins at time 0.
type Flow struct {
	rate   uint64 // bytes per second; 0 = the minimum
	saved  int64  // bytes that the pace allows now; may be below 0 after a large piece
	last   time.Duration
	sent   uint64
	acked  uint64
	judged time.Duration
	gap    uint64
	known  bool // gap is
	over   bool
}

// Rate returns the pace in bytes per second.
func (f *Flow) Rate() uint64 { return max(f.rate, FlowMinRate) }

// Overwhelmed reports whether the gap doesn't shrink although the pace can't rise any more.
func (f *Flow) Overwhelmed() bool { return f.over }

// Unacknowledged returns the bytes that were sent and not acknowledged.
func (f *Flow) Unacknowledged() uint64 { return f.sent - f.acked }

// Room returns how many bytes may be sent at the time now: any piece may be sent while it is above 0. Where it is 0, wait is
// the time until the pace allows some; 0 if an acknowledgement has to come first.
func (f *Flow) Room(now time.Duration) (bytes int, wait time.Duration) {
	rate := int64(f.Rate())
	burst := rate * int64(flowBurst) / int64(time.Second)
	if since := min(now-f.last, time.Second); since > 0 {
		f.saved, f.last = min(f.saved+rate*int64(since)/int64(time.Second), burst), now
	}
	if f.Unacknowledged() >= FlowWindow {
		return 0, 0
	}
	if f.saved <= 0 {
		return 0, time.Duration((1-f.saved)*int64(time.Second)/rate) + 1
	}
	return int(min(f.saved, int64(FlowWindow-f.Unacknowledged()))), 0
}

// Sent says that a piece of n bytes was handed to the transport.
func (f *Flow) Sent(n int) {
	f.sent += uint64(n)
	f.saved -= int64(n)
}

// Acked takes a CATCHUP_ACK. It returns an error where it acknowledges what was never sent.
func (f *Flow) Acked(bytes uint64) error {
	if bytes > f.sent {
		return fmt.Errorf("%w: %v: %d bytes are acknowledged, %d were sent", ErrBody, KindCatchupAck, bytes, f.sent)
	}
	f.acked = max(f.acked, bytes)
	return nil
}

// Progress takes the bytes by which the follower is behind at the time now, and whether live traffic suffers. It may be
// called as often as one likes.
func (f *Flow) Progress(now time.Duration, gap uint64, suffers bool) {
	if !f.known {
		f.judged, f.gap, f.known = now, gap, true
		return
	}
	if now-f.judged < flowPeriod {
		return
	}
	rate := f.Rate()
	shrunk := gap < f.gap
	switch {
	case !shrunk:
		f.over = rate == FlowMaxRate
		f.rate = min(rate+rate/2, FlowMaxRate)
	case suffers:
		f.over = false
		f.rate = max(rate-rate/4, FlowMinRate)
	default:
		f.over = false
		f.rate = min(rate+rate/4, FlowMaxRate)
	}
	f.judged, f.gap = now, gap
}
