package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

const (
	// readBuffer is the size of a connection's receive buffer. It grows for a larger frame.
	readBuffer = 64 << 10
	// keepBuffer is the largest receive buffer that is kept for the next frames.
	keepBuffer = 4 << 20
)

// link is one authenticated connection. One goroutine reads it; writes are up to its owner.
type link struct {
	nc         net.Conn
	addr       string
	silence    time.Duration
	buf        []byte
	start, end int          // the received bytes not yet taken
	heard      atomic.Int64 // when something was received last, in Unix nanoseconds
	left       atomic.Pointer[error]
}

// openLink connects to addr and authenticates, within timeout.
func openLink(ctx context.Context, cfg *config, addr string, timeout time.Duration) (*link, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	nc, err := cfg.dial(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", addr, err)
	}
	l := &link{nc: nc, addr: addr, silence: timeout, buf: make([]byte, readBuffer)}
	stop := context.AfterFunc(ctx, l.close)
	defer stop()
	connect := protocol.Connect{Version: protocol.WireVersion, Token: cfg.token}
	if _, err := nc.Write(connect.AppendFrame(nil)); err != nil {
		l.close()
		return nil, fmt.Errorf("connect to %s: %w", addr, err)
	}
	if _, err := l.answer(protocol.OpConnect); err != nil {
		l.close()
		if ctxErr := ctx.Err(); ctxErr != nil {
			err = ctxErr
		}
		return nil, fmt.Errorf("connect to %s: %w", addr, err)
	}
	l.silence = cfg.silence
	return l, nil
}

func (l *link) close() { _ = l.nc.Close() } // nothing to save: unanswered requests are repeated elsewhere

// leave closes the connection; its reader gets err.
func (l *link) leave(err error) {
	l.left.CompareAndSwap(nil, &err)
	l.close()
}

// quiet returns for how long nothing was received.
func (l *link) quiet() time.Duration { return time.Since(time.Unix(0, l.heard.Load())) }

// next returns the next frame. payload is valid until the next call of next.
func (l *link) next() (protocol.Op, []byte, error) {
	for {
		op, payload, n, err := protocol.ParseFrame(l.buf[l.start:l.end])
		if err != nil {
			if bytes.HasPrefix(l.buf[l.start:l.end], []byte("HTTP/")) {
				return 0, nil, fmt.Errorf("%s answers in HTTP: is that a broker's admin port? The client port is %s by default", l.addr, DefaultPort)
			}
			return 0, nil, fmt.Errorf("frame from %s: %w", l.addr, err)
		}
		if n > 0 {
			l.start += n
			return op, payload, nil
		}
		if err := l.fill(); err != nil {
			return 0, nil, err
		}
	}
}

// buffered reports whether next has a whole frame without reading.
func (l *link) buffered() bool {
	total, ok, err := protocol.FrameLen(l.buf[l.start:l.end])
	return err != nil || (ok && total <= l.end-l.start)
}

// fill reads more bytes behind an incomplete frame.
func (l *link) fill() error {
	need := protocol.HeaderSize
	if total, ok, _ := protocol.FrameLen(l.buf[l.start:l.end]); ok { // its error was reported by ParseFrame
		need = total
	}
	switch {
	case need > len(l.buf):
		larger := make([]byte, need+readBuffer)
		l.end = copy(larger, l.buf[l.start:l.end])
		l.buf, l.start = larger, 0
	case l.start == l.end && len(l.buf) > keepBuffer:
		l.buf, l.start, l.end = make([]byte, readBuffer), 0, 0
	case l.start > 0:
		l.end = copy(l.buf, l.buf[l.start:l.end])
		l.start = 0
	}
	if err := l.nc.SetReadDeadline(time.Now().Add(l.silence)); err != nil {
		return err
	}
	n, err := l.nc.Read(l.buf[l.end:])
	l.end += n
	if n > 0 {
		l.heard.Store(time.Now().UnixNano())
		return nil
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("read from %s: the broker sent nothing for %v: %w", l.addr, l.silence, os.ErrDeadlineExceeded)
	}
	if err == nil {
		return nil
	}
	if left := l.left.Load(); left != nil {
		return *left
	}
	return fmt.Errorf("read from %s: %w", l.addr, err)
}

// answer reads frames up to the answer to op, for connections on which nothing else is going on. The result is valid
// until the next read.
func (l *link) answer(op protocol.Op) ([]byte, error) {
	for {
		got, payload, err := l.next()
		if err != nil {
			return nil, err
		}
		result, answered, err := answerTo(op, got, payload)
		if err != nil || answered {
			return result, err
		}
	}
}

// answerTo looks whether a frame is the answer to op. An ERR that answers something else is an error too if it closes the
// connection, and one that answers nothing always: a node that gives the lead up says so to all its clients.
func answerTo(op, got protocol.Op, payload []byte) (result []byte, answered bool, err error) {
	switch got {
	case protocol.OpOK:
		var ok protocol.OKFrame
		if err := ok.Decode(payload); err != nil {
			return nil, false, err
		}
		return ok.Result, ok.RequestOp == op, nil
	case protocol.OpErr:
		var refusal protocol.ErrFrame
		if err := refusal.Decode(payload); err != nil {
			return nil, false, err
		}
		if refusal.RequestOp == op || !refusal.RequestOp.Valid() || refusal.Code.Closes() {
			return nil, false, refusal.Err()
		}
	default: // a push that nobody waits for
	}
	return nil, false, nil
}

// backoff is the pause before attempt n (from 0): first * 2^n with up to a quarter added at random, at most longest.
func (c *config) backoff(n int) time.Duration { return backoff(c.backoffMin, c.backoffMax, n) }

// electionBackoff is the pause before attempt n while a cluster elects a leader. For as long as that takes as a rule the pauses
// stay short: one that had doubled a few times would be longer than what is left of the election.
func (c *config) electionBackoff(n int) time.Duration {
	first, longest := min(c.backoffMin, electionPause), min(c.backoffMax, maxElectionPause)
	if n >= quickElections {
		return backoff(first, longest, n-quickElections+2)
	}
	d := min(2*first, longest)
	if n == 0 {
		d = first
	}
	return d + rand.N(d/4+1)
}

// refusalBackoff is the pause before a request that was refused with code is sent again, for the time n.
func (c *config) refusalBackoff(code protocol.ErrorCode, n int) time.Duration {
	if withoutQuorum(code) {
		return c.electionBackoff(n) // as long as a new leader opens its epoch
	}
	return c.backoff(n)
}

func backoff(first, longest time.Duration, n int) time.Duration {
	d := longest
	if n < 32 && first<<n < longest && first<<n > 0 {
		d = first << n
	}
	return min(d+rand.N(d/4+1), longest)
}

// sleep waits for d or the end of ctx.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
