package wal

import (
	"errors"
	"syscall"
	"time"

	"github.com/mortarmq/mortarmq/ring"
)

const (
	// retryEvery is how long what failed for lack of space, memory or descriptors waits before it is tried again.
	retryEvery = time.Second
	// A shortage is logged when it begins, after warnAfter, then each time it has lasted twice as long, and when nothing
	// has run short for calmAfter.
	warnAfter = time.Minute
	calmAfter = 5 * time.Second
	// roomAfter is how long nothing must have failed for want of space for there to be some: everything is tried again
	// meanwhile.
	roomAfter = 2 * retryEvery
	// earlyFlushes bounds the files that are flushed at once to get their descriptors back.
	earlyFlushes = 64
)

// noSpace tells whether an operation failed for lack of space, noFiles for lack of file descriptors: failures that leave
// everything as it was.
func noSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

func noFiles(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}

// shortage is what waits because something has run short, and how long that has been so.
type shortage struct {
	// what says in the log what is missing, over that there is enough again.
	what, over string
	list       []func()
	retryAt    time.Duration

	active      bool
	full        bool          // it is the disk's space, and nothing says that there is some again
	since, last time.Duration // when it began, when something last ran short
	warnAt      time.Duration
}

// wait adds something to try again.
func (w *shortage) wait(s *Store, op string, err error, retry func()) {
	if !w.active {
		w.active, w.since, w.warnAt = true, s.now, s.now+warnAfter
		s.log.Warn(w.what, "op", op, "err", err)
	} else if s.now >= w.warnAt {
		w.warnAt = s.now + (s.now - w.since)
		s.log.Warn(w.what, "op", op, "err", err, "since", s.now-w.since)
	}
	w.full = w.full || noSpace(err)
	w.last = s.now
	if len(w.list) == 0 {
		w.retryAt = s.now + retryEvery
	}
	w.list = append(w.list, retry)
}

// step tries again when it is time to, and ends a shortage that is over.
func (w *shortage) step(s *Store) {
	if len(w.list) > 0 && s.now >= w.retryAt {
		w.run()
	}
	if w.full && len(w.list) == 0 && s.now >= w.last+roomAfter {
		w.full = false
	}
	if w.active && len(w.list) == 0 && s.now >= w.last+calmAfter {
		w.active = false
		s.log.Info(w.over, "lasted", w.last-w.since)
	}
}

// run tries everything again.
func (w *shortage) run() {
	list := w.list
	w.list = nil
	for _, retry := range list {
		retry()
	}
}

// next returns when step has something to do.
func (w *shortage) next() time.Duration {
	switch {
	case len(w.list) > 0:
		return w.retryAt
	case w.full:
		return w.last + roomAfter
	case w.active:
		return w.last + calmAfter
	default:
		return Never
	}
}

// starve lets retry run when there may be space again.
func (s *Store) starve(what string, err error, retry func()) {
	s.space.wait(s, what, err, retry)
}

// starveFiles lets retry run when there may be descriptors again, and sees to it. It returns false where that is hopeless:
// a recovery isn't held up for descriptors that others have.
func (s *Store) starveFiles(what string, err error, retry func()) bool {
	freeing := s.freeFiles()
	if s.recovering && !freeing {
		return false
	}
	s.files.wait(s, what, err, retry)
	return true
}

// freeFiles closes the files that nobody uses. Where there are none it flushes some of those that were written, which
// keeps them open otherwise. It returns whether descriptors are on their way.
func (s *Store) freeFiles() bool {
	s.closeIdle()
	for _, seg := range s.dirtySegs {
		if s.closes+s.flushes >= earlyFlushes || s.err != nil {
			break
		}
		if seg.fd >= 0 && seg.users == 0 && !seg.opening && seg.dirty > 0 && seg.sweeping == 0 {
			s.flushEarly(seg)
		}
	}
	return s.closes+s.flushes > 0
}

// flushEarly flushes a file that nobody uses, ahead of its sweep, and closes it.
func (s *Store) flushEarly(seg *segment) {
	s.use(seg)
	s.flushes++
	flushed := seg.dirty
	s.do(ring.Op{Kind: ring.Sync, FD: seg.fd}, func(op *ring.Op) {
		s.flushes--
		switch {
		case op.Err == nil:
			seg.dirty -= flushed
			s.dirty -= flushed
			// A sweep that has begun meanwhile counts them, too.
			seg.sweeping = max(seg.sweeping-flushed, 0)
		case !seg.st.dropped:
			s.fail("flush segment", seg.st.path(seg), op.Err)
		}
		s.uncache(seg)
		s.release(seg)
		if len(s.files.list) > 0 {
			s.closeIdle()
		}
		s.freed()
	})
}

// freed is called when a file was closed, or flushed early: what waits for a descriptor goes on behind the last one.
func (s *Store) freed() {
	if s.closes+s.flushes == 0 && len(s.files.list) > 0 {
		s.files.run()
	}
}
