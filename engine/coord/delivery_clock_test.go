package coord

import (
	"fmt"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// An operator, or ntpd, sets the wall clock: retries, leases and waiting PULLs keep to the time that really passes.
func TestDelivery_SteppedWallClockDisturbsNothing(t *testing.T) {
	for _, step := range []time.Duration{time.Hour, -time.Hour} {
		t.Run(fmt.Sprint(step), func(t *testing.T) {
			r := newRig(t, 1, func(o *Options) { o.DeliveryLease, o.PollMaxWait = 10*time.Second, 5*time.Second })
			set := func() { r.wallMs += uint64(step.Milliseconds()) }
			cl, s := r.subscribe(rigGroup, false, nil)
			r.publish(0, values(2)...)
			cl.pull(s, nil)
			r.turn()
			ms := cl.want(2)
			r.commit()
			cl.nack(&ms[0], protocol.NackRetryLater)
			r.turn()
			r.commit()
			set()
			waits := cl.pull(s, func(p *protocol.Pull) { p.WaitMs, p.MinBytes = 60_000, 1<<20 })
			r.pass(900 * time.Millisecond) // the retry is due between 1 s and 1.25 s
			cl.want(0)
			r.pass(400 * time.Millisecond)
			if m := cl.want(1)[0]; m.Sequence != 1 || m.Attempt != 2 {
				t.Fatalf("message %d came, attempt %d", m.Sequence, m.Attempt)
			}
			r.commit()
			set()
			r.pass(3500 * time.Millisecond)
			cl.wantAnswer(waits, errNoAnswer)
			r.pass(300 * time.Millisecond) // 5.1 s since it began to wait
			cl.wantAnswer(waits, nil)
			r.pass(4 * time.Second) // 9.1 s since message 2 was delivered
			r.commit()
			if n := s.consumer.set.readers[0].cur.InFlight(); n != 2 {
				t.Fatalf("%d messages are in flight before a lease is over", n)
			}
			set()
			r.pass(1200 * time.Millisecond)
			r.commit()
			if n := s.consumer.set.readers[0].cur.InFlight(); n != 1 {
				t.Fatalf("%d messages are in flight after the first lease", n)
			}
		})
	}
}

// What is left of a retry's pause after a restart comes from the wall clock: never more than the pause itself, never less
// than nothing.
func TestDelivery_WallClockThatWasSteppedBeforeARestartDelaysNoRetryFurther(t *testing.T) {
	for _, step := range []time.Duration{time.Hour, 0, -time.Hour} {
		t.Run(fmt.Sprint(step), func(t *testing.T) {
			r := newRig(t, 1, nil)
			cl, _ := r.subscribe(rigGroup, true, nil)
			r.publish(0, values(1)...)
			ms := cl.want(1)
			r.commit()
			cl.nack(&ms[0], protocol.NackRetryLater)
			r.turn()
			r.commit()
			r.wallMs += uint64(step.Milliseconds())
			r.restart()
			next, _ := r.subscribe(rigGroup, true, nil)
			r.commit()
			if step <= 0 {
				r.pass(900 * time.Millisecond)
				r.reads()
				next.want(0)
			}
			r.pass(400 * time.Millisecond)
			r.reads()
			if m := next.want(1)[0]; m.Sequence != 1 || m.Attempt != 2 {
				t.Fatalf("message %d came, attempt %d", m.Sequence, m.Attempt)
			}
		})
	}
}
