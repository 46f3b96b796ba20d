package engine

import (
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal"
)

// A lone publish costs a write to the disk and the wake-ups of the threads that it passes, and on idle processors these take
// as long as the write. So an event loop that has taken in little, and finds the shard asleep, runs the shard's turn itself,
// on its own thread: gathering, write, commit, answer, and the delivery to who waits for the message. The coordinator does
// the same for its ledger records. What arrives meanwhile waits in the sockets and makes the next round, as it does for a
// shard on its own thread. Under load shards do not sleep, and nothing is lent.

const (
	// lentRequests and lentBytes bound a batch that its event loop may see to in the shard's place.
	lentRequests = 32
	lentBytes    = 32 << 10
	// lentTurns is how many turns in a row a thread is lent for, and lentPasses how often shards and coordinator are looked
	// at in turn: an ACK takes coordinator, shard, coordinator. What is left then they see to themselves.
	lentTurns  = 4
	lentPasses = 3
	// slowWrite is how long writes may take on average to be made on a lent thread; where they take longer none is used for
	// lentRest. A single write counts for worstWrite at most.
	slowWrite  = time.Millisecond
	worstWrite = 4 * time.Millisecond
	lentRest   = 200 * time.Millisecond
)

// executor is a Device that can run an operation on any thread, see ring.Ring.Execute.
type executor interface {
	Execute(op *ring.Op)
}

// lentDisk is the disk of a shard whose turn runs on another thread than its own.
type lentDisk struct {
	// on runs the operations; nil: the device has no such thing.
	on  executor
	ops []*ring.Op
	// lendable: the shard's goroutine sleeps, until wakeAt unless it is woken, and nothing of the shard is at the disk.
	lendable bool
	wakeAt   time.Duration
	// average is how long lent turns have taken lately; until restUntil there are none, because that was too long.
	average, restUntil time.Duration
	// urgent: the coordinator is to be looked at for what a lent turn has committed.
	urgent bool
	// active: a turn runs on another thread, which looks at the inbox once more afterwards. Set by who drives.
	active atomic.Bool
}

// Submit implements wal.Disk.
func (d *lentDisk) Submit(op *ring.Op) { d.ops = append(d.ops, op) }

// Poll implements wal.Disk.
func (d *lentDisk) Poll() (n int) {
	for ; len(d.ops) > 0; n++ {
		op := d.ops[0]
		d.ops = append(d.ops[:0], d.ops[1:]...)
		d.on.Execute(op)
	}
	return n
}

// wait has the shard's goroutine sleep until the disk has something, it is woken, or next has come. If it waits for the disk
// the shard stays its own, otherwise others may run its turns meanwhile.
func (s *shard) wait(next time.Duration) error {
	timeout := s.timeout(next)
	lend := s.lends() && s.journal.Idle() && timeout != 0 && !s.timeoutShort() && (s.repl == nil || s.repl.calm())
	if lend {
		s.lent.lendable, s.lent.wakeAt = true, next
		s.driving.Unlock()
	}
	_, err := s.disk.Wait(timeout)
	if lend {
		s.driving.Lock()
		s.lent.lendable = false
	}
	return err
}

// lends tells whether other threads may ever run turns of the shard.
func (s *shard) lends() bool { return s.lent.on != nil }

// lend runs turns on the caller's thread if the shard's goroutine sleeps and something is queued. It reports whether the
// coordinator is to be looked at for what was committed. What is left undone is seen to by the shard's goroutine.
func (s *shard) lend() (urgent bool) {
	if !s.lends() {
		s.inbox.Nudge()
		return false
	}
	for range lentTurns {
		if s.inbox.Empty() {
			return urgent
		}
		if !s.driving.TryLock() {
			if !s.lent.active.Load() {
				s.inbox.Nudge()
			}
			return urgent
		}
		rouse := s.lentTurn()
		urgent = urgent || s.lent.urgent
		s.lent.urgent = false
		s.driving.Unlock()
		if rouse {
			s.inbox.Rouse()
			return urgent
		}
	}
	s.inbox.Nudge()
	return urgent
}

// lentTurn is turn on another thread than the shard's. It reports whether the shard's goroutine is to be woken, for what is
// left or to sleep less long.
func (s *shard) lentTurn() (rouse bool) {
	l := &s.lent
	now := s.eng.now()
	if !l.lendable || now < l.restUntil {
		return true
	}
	l.active.Store(true)
	defer l.active.Store(false)
	s.take()
	s.encode()
	if _, bytes := s.journal.Gathered(); bytes > wal.DefaultInlineRoundBytes || s.repl != nil && !s.repl.calm() {
		return true
	}
	s.journal.SetDisk(l)
	s.submitRounds()
	s.flushClients() // of publishes that do not wait for the disk
	wrote := l.Poll() > 0
	s.journal.SetDisk(s.disk)
	began, next := now, wal.Never
	now = s.eng.now()
	if wrote {
		l.account(now, now-began)
		next = now + nudgeAfter // the journal's own steps are the shard's
	}
	if s.repl != nil {
		next = min(next, s.repl.afterPoll(now))
	}
	s.flushClients()
	if s.nudgeAt != 0 && now >= s.nudgeAt {
		s.nudge()
	}
	if s.nudgeAt != 0 {
		next = min(next, s.nudgeAt)
	}
	return s.closing || !s.idle() || s.timeoutShort() || next < l.wakeAt
}

// account adds a turn that took so long to the average.
func (l *lentDisk) account(now, took time.Duration) {
	l.average += (min(took, worstWrite) - l.average) / 8
	if l.average > slowWrite {
		l.average, l.restUntil = 0, now+lentRest
	}
}

// lend sees to what was handed over without waking anybody, on the caller's thread as far as that is quick. control: the
// coordinator got something.
func (e *Engine) lend(control bool) {
	for range lentPasses {
		if control {
			e.coord.Lend()
		}
		control = false
		for _, s := range e.shards {
			control = s.lend() || control
		}
		if !control {
			return
		}
	}
	e.coord.Nudge()
}
