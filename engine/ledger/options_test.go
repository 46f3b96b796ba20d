package ledger

import (
	"testing"
	"time"
)

// An ordered group without a maximum: the first message is tried for ever, every interval, and nothing passes it.
func TestLedger_OrderedGroupRetriesAtItsIntervalAndNothingPasses(t *testing.T) {
	b := newBench(t, func(o *Options) {
		o.MaxAttempts, o.Ordered = 0, true
		o.Fixed([]time.Duration{100 * time.Millisecond})
	})
	b.c.Committed(3)
	for attempt := uint16(1); attempt <= 40; attempt++ {
		d := b.take()
		if d.seq != 1 || d.attempt != attempt {
			t.Fatalf("message %d, attempt %d, want message 1, attempt %d", d.seq, d.attempt, attempt)
		}
		b.wantNothing()
		b.nack(d)
		b.commit()
		b.pass(50 * time.Millisecond)
		b.wantNothing()
		b.pass(50*time.Millisecond + quantum)
	}
	b.ack(b.take())
	b.wantNothing() // until the ACK is on record
	b.commit()
	for want := Sequence(2); want <= 3; want++ {
		d := b.take()
		if d.seq != want || d.attempt != 1 {
			t.Fatalf("message %d, attempt %d, want %d", d.seq, d.attempt, want)
		}
		b.ack(d)
		b.commit()
	}
	b.wantFloor(3)
}

// Settings that change while messages are in flight lose none of them and let none pass in an ordered group.
func TestLedger_SettingsMayChangeAtAnyTime(t *testing.T) {
	b := newBench(t, nil)
	b.c.Committed(4)
	one, two := b.take(), b.take()
	ordered := DefaultOptions()
	ordered.Ordered, ordered.MaxAttempts = true, 0
	ordered.Fixed([]time.Duration{second})
	b.c.Configure(&ordered)
	b.wantNothing()
	b.ack(two)
	b.nack(one)
	b.commit()
	b.pass(2 * second)
	one = b.take()
	b.wantNothing()
	free := DefaultOptions()
	free.MaxAttempts = 1
	b.c.Configure(&free)
	b.take()
	b.nack(one)
	b.commit()
	if len(b.fx.Exhausted) != 1 || b.fx.Exhausted[0].Sequence != 1 {
		t.Fatalf("exhausted %+v, want message 1", b.fx.Exhausted)
	}
}
