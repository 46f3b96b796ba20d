package ledger

import (
	"testing"
	"time"
)

func TestSettings_ScheduleDecidesDelaysAndAttempts(t *testing.T) {
	const minute = time.Minute
	for name, tc := range map[string]struct {
		set    Settings
		max    int
		delays []time.Duration // after the first, second, ... failure
	}{
		"the broker's":         {Settings{}, 5, []time.Duration{second, 2 * second, 4 * second, 8 * second, 16 * second, 30 * second, 30 * second}},
		"a maximum of its own": {Settings{MaxAttempts: 2}, 2, []time.Duration{second, 2 * second}},
		"rocketmq": {Settings{Retry: RetryRocketMQ}, 17, []time.Duration{10 * second, 30 * second, minute, 2 * minute, 3 * minute, 4 * minute,
			5 * minute, 6 * minute, 7 * minute, 8 * minute, 9 * minute, 10 * minute, 20 * minute, 30 * minute, 60 * minute, 120 * minute}},
		"rocketmq, three attempts": {Settings{Retry: RetryRocketMQ, MaxAttempts: 3}, 3, []time.Duration{10 * second, 30 * second}},
		"a list":                   {Settings{Retry: RetryList, Delays: []time.Duration{5 * second, 0, second}}, 4, []time.Duration{5 * second, 0, second}},
		"a list, more attempts":    {Settings{Retry: RetryList, Delays: []time.Duration{second, 3 * second}, MaxAttempts: 9}, 9, []time.Duration{second, 3 * second, 3 * second}},
		"ordered":                  {Settings{Ordered: true}, 0, []time.Duration{second, second, second}},
		"ordered, 10 ms":           {Settings{Ordered: true, OrderedInterval: 10 * time.Millisecond}, 0, []time.Duration{10 * time.Millisecond, 10 * time.Millisecond}},
		"ordered, with a maximum":  {Settings{Ordered: true, MaxAttempts: 2}, 2, []time.Duration{second, second}},
	} {
		o := tc.set.Options(30*second, 5)
		if err := o.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if o.MaxAttempts != tc.max || o.Lease != 30*second || o.Ordered != tc.set.Ordered {
			t.Errorf("%s: %+v, want %d attempts", name, o, tc.max)
		}
		for i, want := range tc.delays {
			if got := o.delay(i+1, zeroSource{}); got != want {
				t.Errorf("%s: delay %v after failure %d, want %v", name, got, i+1, want)
			}
		}
	}
	if o := (&Settings{Lease: second}).Options(30*second, 5); o.Lease != second {
		t.Errorf("lease %v", o.Lease)
	}
}

// zeroSource makes no jitter.
type zeroSource struct{}

func (zeroSource) Uint64() uint64 { return 0 }

// An ordered group without a maximum: the first message is tried for ever, every interval, and nothing passes it.
func TestLedger_OrderedGroupRetriesAtItsIntervalAndNothingPasses(t *testing.T) {
	set := Settings{Ordered: true, OrderedInterval: 100 * time.Millisecond}
	b := newBench(t, func(o *Options) { *o = set.Options(30*second, 5) })
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
	ordered := (&Settings{Ordered: true}).Options(30*second, 5)
	b.c.Configure(&ordered)
	b.wantNothing()
	b.ack(two)
	b.nack(one)
	b.commit()
	b.pass(2 * second)
	one = b.take()
	b.wantNothing()
	free := (&Settings{}).Options(30*second, 1)
	b.c.Configure(&free)
	b.take()
	b.nack(one)
	b.commit()
	if len(b.fx.Exhausted) != 1 || b.fx.Exhausted[0].Sequence != 1 {
		t.Fatalf("exhausted %+v, want message 1", b.fx.Exhausted)
	}
}
