package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/tests/harness"
)

// ratedRun sends messages at a fixed rate, on time or, where the broker or the window holds it up, as soon as possible; a
// message's stamp and latency count from the time at which it was due.
type ratedRun struct {
	p     *Publisher
	every float64 // nanoseconds
	// due[i % len] is when message i was due; the sender writes ahead of sent, the reader reads behind it.
	due      [maxWindow]int64
	sent     atomic.Uint64
	answered atomic.Uint64
	failed   atomic.Bool
}

// RunRated sends warm+count messages at rate per second, whose latency is recorded but for the first warm ones, and returns
// when all are acknowledged. A refused message is an error: at a fixed rate, that the broker can't keep up is the result. A
// publisher runs so once, and not after Run.
func (p *Publisher) RunRated(ctx context.Context, rate float64, warm, count uint64) error {
	if rate <= 0 {
		return fmt.Errorf("rate is %v messages per second: use more than 0", rate)
	}
	r := &ratedRun{p: p, every: float64(time.Second) / rate}
	stop := context.AfterFunc(ctx, func() { p.conn.Close() })
	defer stop()
	errs := make(chan error, 2)
	go func() { errs <- r.send(warm + count) }()
	go func() { errs <- r.receive(warm, warm+count) }()
	err := <-errs
	if err != nil {
		r.failed.Store(true)
		p.conn.Close()
	}
	return errors.Join(err, <-errs)
}

func (r *ratedRun) send(count uint64) error {
	// A thread of its own with a precise timer: Go's timers and the default timer slack are late by up to 100 us, which
	// the due times would count as the broker's.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0) // less precise without it, not wrong

	start := now() + int64(time.Millisecond)
	window := min(uint64(r.p.opts.Window), maxWindow)
	size := uint64(r.p.frameLen)
	for i := uint64(0); i < count; {
		sleepUntil(start + int64(float64(i)*r.every))
		for i-r.answered.Load() >= window {
			if r.failed.Load() {
				return nil
			}
			time.Sleep(50 * time.Microsecond)
		}
		// Everything that is due goes out together.
		first, n := i%uint64(r.p.opts.Window), uint64(0)
		t := now()
		for i < count && first+n < uint64(r.p.opts.Window) && i-r.answered.Load() < window {
			due := start + int64(float64(i)*r.every)
			if due > t {
				break
			}
			r.p.put(first+n, i, due)
			r.due[i%maxWindow] = due
			i++
			n++
		}
		if n == 0 {
			continue
		}
		r.sent.Store(i)
		if _, err := r.p.conn.Write(r.p.frames[first*size : (first+n)*size]); err != nil {
			return fmt.Errorf("publish at a rate: %w", err)
		}
	}
	return nil
}

func (r *ratedRun) receive(warm, count uint64) error {
	answers := harness.NewConn(r.p.conn)
	var err error
	for i := uint64(0); i < count; i++ {
		var f harness.Frame
		if f, err = answers.Next(); err != nil {
			break
		}
		t := now()
		if i >= r.sent.Load() {
			return fmt.Errorf("publish at a rate: %v without a request", f.Op)
		}
		ok := false
		if ok, err = r.p.answer(f.Op, f.Payload, i); err != nil {
			break
		}
		if !ok {
			err = f.Err()
			break
		}
		if i >= warm {
			record(r.p.latency, t-r.due[i%maxWindow])
		}
		r.answered.Store(i + 1)
		r.p.completed.Add(1)
	}
	if err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("publish at a rate: %w", err)
	}
	return err
}

// sleepUntil blocks the thread until the generator's clock shows t.
func sleepUntil(t int64) {
	for {
		d := t - now()
		if d <= 0 {
			return
		}
		ts := unix.NsecToTimespec(d)
		// EINTR (the runtime preempts by signals) only means another turn.
		_ = unix.Nanosleep(&ts, nil)
	}
}
