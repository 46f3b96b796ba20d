package peer

import (
	"errors"
	"net"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/engine/peerwire"
)

// directBytes is the largest frame that its sender writes by itself. Above that it pays to wake the writer: it computes the
// checksum and copies into the kernel while the sender goes on.
const directBytes = 16 << 10

// direct lets the goroutine that sends a small frame write it, where nothing else waits and the socket takes it at once. It
// spares the waking of the writer, which a lone round would wait for twice: as APPEND and as FLUSHED.
type direct struct {
	s    *session
	raw  syscall.RawConn
	buf  []byte // the frame
	rest []byte // what the socket did not take of it: the writer's next
	// n and err are what try, which is made once, finds.
	n   int
	err error
	try func(fd uintptr) bool
}

// newDirect returns nil for the lane bulk, whose frames are compressed, and for connections that aren't the kernel's.
func newDirect(s *session) *direct {
	tcp, ok := s.conn.(*net.TCPConn)
	if !ok || s.link.lane == peerwire.Bulk {
		return nil
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return nil
	}
	d := &direct{s: s, raw: raw, buf: make([]byte, 0, directBytes+headRoom)}
	d.try = func(fd uintptr) bool {
		d.n, d.err = unix.Write(int(fd), d.buf)
		return true // also where it would block
	}
	return d
}

// writeDirectly is called with the queue locked and one more frame in it. It returns false, still locked, where that has to
// be left to the writer; otherwise the frame is written, in part at least, and the queue unlocked.
func (q *queue) writeDirectly() bool {
	d := q.direct
	if d == nil || q.writing || q.bytes > directBytes || len(q.pending)+len(q.flushed) != 1 || q.ping+q.pong > 0 || len(d.rest) > 0 {
		return false
	}
	q.writing = true
	owner, taken := d.stage(q)
	q.mu.Unlock()
	if owner != nil {
		owner.Release()
	}
	err := d.write()

	q.mu.Lock()
	q.bytes -= taken
	wake := false
	if q.direct == d { // else the connection is over, and this was lost with it
		q.writing = false
		d.rest = d.buf[d.n:]
		wake = q.waits()
	}
	q.mu.Unlock()
	if wake {
		q.signal()
	}
	if err != nil {
		d.s.close(err)
	}
	return true
}

// stage moves the only frame of the queue into buf.
func (d *direct) stage(q *queue) (owner peerwire.Releaser, taken int64) {
	if len(q.flushed) > 0 {
		var f outFrame
		f.setFlushed(q.version, &q.flushed[0])
		d.buf = append(d.buf[:0], f.head[:f.n]...)
		q.flushed = q.flushed[:0]
		return nil, 0
	}
	f := &q.pending[0]
	d.buf = append(append(d.buf[:0], f.head[:f.n]...), f.rest...)
	owner, taken = f.owner, f.bytes()
	f.rest, f.owner = nil, nil
	q.pending = q.pending[:0]
	return owner, taken
}

// write completes the frame in buf and offers it to the socket once.
func (d *direct) write() error {
	peerwire.PutSum(d.buf, d.s.sum.out.Sum(d.buf, d.buf[peerwire.HeaderLen:], nil))
	d.n, d.err = 0, nil
	if err := d.raw.Write(d.try); err != nil {
		return err
	}
	d.n = max(d.n, 0)
	st := &d.s.link.stats
	st.sent.Add(uint64(d.n))
	st.framesOut.Add(1)
	if errors.Is(d.err, unix.EAGAIN) || errors.Is(d.err, unix.EINTR) {
		return nil
	}
	return d.err
}
