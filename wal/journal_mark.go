package wal

import (
	"path/filepath"
	"time"

	"github.com/mortarmq/mortarmq/ring"
)

// markQuiet is how long no round must have been written before the mark is: under load the next round's header says the
// same at no cost.
const markQuiet = 10 * time.Millisecond

// markWriter keeps the mark file: how far the journal was flushed, written when it falls quiet.
type markWriter struct {
	fd   int
	path string
	slab *ring.Slab
	op   ring.Op
	busy bool
	// last is what the newest slot says, pending what is being written.
	last, pending mark
	// sum is the checksum of the newest flushed round.
	sum uint64
	// seen is the newest flushed round that Step knew, since when.
	seen  RoundNumber
	since time.Duration
}

func markPath(dir string) string { return filepath.Join(dir, markName) }

// stepMark writes the mark when the journal has been quiet long enough.
func (j *Journal) stepMark(now time.Duration) time.Duration {
	m := &j.mark
	if m.seen != j.flushed || len(j.flight) > 0 || j.gather != nil {
		m.seen, m.since = j.flushed, now
	}
	if m.busy || j.flushed == m.last.round {
		return Never
	}
	if due := m.since + markQuiet; now < due {
		return due
	}
	j.writeMark()
	return Never
}

// writeMark submits the write of the slot that doesn't hold the newest mark, so that a torn write costs nothing.
func (j *Journal) writeMark() {
	m := &j.mark
	m.pending = mark{
		generation: m.last.generation + 1, round: j.flushed, epoch: j.epoch, sum: m.sum, nonce: j.nonce,
	}
	b := m.slab.Bytes()[:markSlotLen]
	putMark(b, j.opts.ID, &m.pending)
	m.busy = true
	m.op.Kind, m.op.FD, m.op.Buf = ring.WriteSync, m.fd, b
	m.op.Off = int64(m.pending.generation%markSlots) * markSlotLen
	j.disk.Submit(&m.op)
}

func (j *Journal) markWritten(op *ring.Op) {
	m := &j.mark
	m.busy = false
	if op.Err != nil {
		j.fail("write mark to", m.path, op.Err)
		return
	}
	m.last = m.pending
}
