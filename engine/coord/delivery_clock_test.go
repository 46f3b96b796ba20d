package coord

import (
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// g10: the wall clock steps back and forth by an hour; leases, retries and waiting PULLs go by the other clock.
func TestDelivery_WallClockStepsDisturbNothing(t *testing.T) {
	for name, step := range map[string]int64{"back": -3_600_000, "forth": 3_600_000} {
		r := newRig(t, 1, nil)
		jump := func() {
			r.wallMs = uint64(int64(r.wallMs) + step)
			r.turn()
		}
		cl, s := r.subscribe(rigGroup, false, nil)
		wait := func(p *protocol.Pull) { p.WaitMs, p.MinBytes = 4000, 1 }
		req := cl.pull(s, wait)
		jump()
		r.pass(3 * time.Second)
		cl.wantAnswer(req, errNoAnswer)
		r.pass(time.Second)
		cl.wantAnswer(req, nil)

		r.publish(0, []byte("x"))
		cl.pull(s, wait)
		r.turn()
		m := cl.want(1)[0]
		r.commit()
		jump()
		r.pass(29 * time.Second)
		r.commit()
		cl.pull(s, nil)
		r.turn()
		cl.want(0)
		jump()
		r.pass(2 * time.Second) // the lease is over
		r.commit()
		jump()
		r.pass(900 * time.Millisecond)
		cl.pull(s, nil)
		r.turn()
		cl.want(0) // the retry is not due
		r.pass(time.Second)
		cl.pull(s, nil)
		r.turn()
		if again := cl.want(1)[0]; again.Sequence != m.Sequence || again.Attempt != 2 {
			t.Errorf("%s: message %d comes as attempt %d", name, again.Sequence, again.Attempt)
		}
	}
}

// A process that was stopped, or starved, has not heard its members: what it was not there for is not their silence.
func TestClock_TimeWithoutTheProcessIsLeftOut(t *testing.T) {
	now := time.Duration(0)
	c := New(Options{Now: func() time.Duration { return now }, WallMs: func() uint64 { return 0 }}, nil, nil, nil, 1)
	for _, s := range []struct {
		resting    bool
		step, want time.Duration
	}{
		{true, 1900 * time.Millisecond, 1900 * time.Millisecond}, // a busy machine
		{true, 20 * time.Second, maxRest},
		{true, time.Millisecond, time.Millisecond},
		{false, 20 * time.Second, 20 * time.Second}, // nothing was due
	} {
		before := c.now
		c.resting = s.resting
		now += s.step
		c.readClocks()
		if got := c.now - before; got != s.want || c.real != now {
			t.Errorf("%v without a turn, resting %t: the clock has moved by %v, want %v", s.step, s.resting, got, s.want)
		}
	}
}
