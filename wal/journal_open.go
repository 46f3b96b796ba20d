package wal

import (
	"fmt"
	"slices"

	"github.com/mortarmq/mortarmq/ring"
)

// openMark reads the mark file, or makes it where it is missing.
func (rc *recoverer) openMark() error {
	m := &rc.j.mark
	m.op.Done = rc.j.markWritten
	if m.slab = rc.opts.Pool.Get(markSlots * markSlotLen); m.slab == nil {
		return ErrNoMemory
	}
	b := m.slab.Bytes()[:markSlots*markSlotLen]
	op, err := rc.io.run(ring.Op{Kind: ring.Open, Path: m.path, Flags: ring.Direct})
	if isNotExist(err) {
		rc.result.MarkLost = true
		return rc.makeMark(b)
	}
	if err != nil {
		return err
	}
	m.fd = op.FD
	op, err = rc.io.run(ring.Op{Kind: ring.Read, FD: m.fd, Buf: b})
	if err != nil {
		return err
	}
	readable := false
	for slot := range op.N / markSlotLen {
		v, ok, err := decodeMark(m.path, b[slot*markSlotLen:][:markSlotLen], rc.opts.ID)
		if err != nil {
			return err
		}
		if ok && v.generation >= rc.mark.generation {
			rc.mark = v
		}
		readable = readable || ok || allZero(b[slot*markSlotLen:][:markSlotLen])
	}
	rc.result.MarkLost = !readable
	m.last = rc.mark
	return nil
}

// makeMark makes an empty mark file: complete and flushed before it gets its name.
func (rc *recoverer) makeMark(b []byte) error {
	m := &rc.j.mark
	tmp := m.path + tmpSuffix
	op, err := rc.io.run(ring.Op{Kind: ring.Open, Path: tmp, Flags: ring.Create | ring.Direct})
	if err != nil {
		return err
	}
	m.fd = op.FD
	clear(b)
	for _, op := range []ring.Op{
		{Kind: ring.Write, FD: m.fd, Buf: b},
		{Kind: ring.Sync, FD: m.fd},
		{Kind: ring.Rename, Path: tmp, Path2: m.path},
		{Kind: ring.SyncDir, Path: rc.opts.Dir},
	} {
		if _, err := rc.io.run(op); err != nil {
			return err
		}
	}
	return nil
}

// openEpoch readies the journal for appends behind the tail: what was read is made durable, what was refused is wiped,
// and the START round of the new epoch is written.
func (rc *recoverer) openEpoch() error {
	if err := rc.settle(); err != nil {
		return err
	}
	if err := rc.wipe(); err != nil {
		return err
	}
	for len(rc.files) < rc.opts.MinFiles {
		err := rc.makeFile()
		if len(rc.files) > 0 && noSpace(err) {
			// The journal makes what it needs when there is space.
			rc.opts.Logger.Warn("the disk is full: the journal starts with fewer files", "files", len(rc.files), "err", err)
			break
		}
		if err != nil {
			return err
		}
	}
	j, t := rc.j, &rc.tail
	if t.file == nil {
		t.file, t.off = rc.files[0], fileHeaderLen
		rc.chain = append(rc.chain, t.file)
	}
	if t.off == t.file.size && len(rc.chain) == len(rc.files) {
		// Every file is full to its end. One more than MaxFiles, for a block, is better than not to start.
		if err := rc.makeFile(); err != nil {
			return err
		}
	}
	j.full = slices.Clone(rc.chain[:len(rc.chain)-1])
	j.cur, j.curOff = t.file, t.off
	for _, f := range rc.files {
		if !slices.Contains(rc.chain, f) {
			j.free = append(j.free, f)
			j.freeBytes += f.payload()
		}
	}
	j.epoch, j.nonce = t.epoch+1, rc.opts.Random()
	j.next, j.lastSum = t.number+1, t.sum
	j.flushed, j.committed, j.trimmed = t.number, t.number, rc.from
	if rc.committed != nil {
		j.committed = min(rc.committed(), t.number)
	}
	return rc.writeStart()
}

// settle flushes the files that were read, and the names of all of them. A round may have been read that no flush ever
// covered, a file found under a name that isn't durable: a killed process leaves its last writes in a cache, and the START
// round's own flush covers only itself on some devices.
func (rc *recoverer) settle() error {
	if _, err := rc.io.run(ring.Op{Kind: ring.SyncDir, Path: rc.opts.Dir}); err != nil {
		return &FailedError{Op: "flush directory", Path: rc.opts.Dir, Err: err}
	}
	for _, f := range rc.chain {
		if _, err := rc.io.run(ring.Op{Kind: ring.Sync, FD: f.fd}); err != nil {
			return &FailedError{Op: "flush", Path: f.path, Err: err}
		}
	}
	return nil
}

// wipe overwrites first rounds that are newer than the tail: they were in flight behind a round that was torn, and were
// refused. Left alone, one could later pass for the place to start reading at.
func (rc *recoverer) wipe() error {
	var slab *ring.Slab
	for _, f := range rc.files {
		if h, ok := rc.firsts[f]; !ok || h.number <= rc.tail.number {
			continue
		}
		if slab == nil {
			if slab = rc.opts.Pool.Get(ring.BlockSize); slab == nil {
				return ErrNoMemory
			}
			defer slab.Release()
			clear(slab.Bytes()[:ring.BlockSize])
		}
		op := ring.Op{Kind: ring.WriteSync, FD: f.fd, Off: fileHeaderLen, Buf: slab.Bytes()[:ring.BlockSize]}
		if _, err := rc.io.run(op); err != nil {
			return &FailedError{Op: "wipe a refused round in", Path: f.path, Err: err}
		}
	}
	return nil
}

// makeFile makes one more file and waits for it.
func (rc *recoverer) makeFile() error {
	m := newFileMaker(&rc.opts, rc.j.lastFile+1)
	if m == nil {
		return ErrNoMemory
	}
	for !m.ended() {
		m.step(rc.disk)
		if err := rc.io.waitFor(func() bool { return !m.busy }); err != nil {
			return err
		}
	}
	if m.err != nil {
		return fmt.Errorf("make journal file %s: %w", m.file.path, m.err)
	}
	rc.files = append(rc.files, m.file)
	rc.j.adopt(m.file)
	return nil
}

// writeStart writes the START round and waits until it is durable.
func (rc *recoverer) writeStart() error {
	j := rc.j
	r := j.newRound(roundHeaderLen)
	if r == nil {
		return ErrNoMemory
	}
	j.submit(r, true)
	if err := rc.io.waitFor(func() bool { return len(j.flight) == 0 }); err != nil {
		return err
	}
	return j.err
}

// abandon gives back what a recovery that failed holds.
func (rc *recoverer) abandon() {
	j := rc.j
	for _, f := range rc.files {
		_, _ = rc.io.run(ring.Op{Kind: ring.Close, FD: f.fd})
	}
	if j.mark.fd >= 0 {
		_, _ = rc.io.run(ring.Op{Kind: ring.Close, FD: j.mark.fd})
	}
	j.releaseMemory()
}

// Close writes the mark and closes the journal's files, waiting on w, which must be the journal's disk. Everything must
// be flushed: what is still gathering is dropped. Whoever holds rounds may keep them.
func (j *Journal) Close(w Waiter) error {
	io := newBlockingDisk(w)
	if err := io.waitFor(j.Idle); err != nil {
		return err
	}
	if j.err == nil && j.flushed != j.mark.last.round {
		j.writeMark()
		if err := io.waitFor(j.Idle); err != nil {
			return err
		}
	}
	if m := j.grow.maker; m != nil {
		m.abandon()
		for !m.ended() {
			m.step(w)
			if err := io.waitFor(j.Idle); err != nil {
				return err
			}
		}
		if m.state == makeDone {
			j.free = append(j.free, m.file)
		}
		j.grow.maker = nil
	}
	err := j.err
	for _, f := range append(append(j.full, j.cur), j.free...) {
		if _, cerr := io.run(ring.Op{Kind: ring.Close, FD: f.fd}); err == nil {
			err = cerr
		}
	}
	if _, cerr := io.run(ring.Op{Kind: ring.Close, FD: j.mark.fd}); err == nil {
		err = cerr
	}
	j.releaseMemory()
	if j.err == nil {
		j.err = &FailedError{Op: "use", Path: j.opts.Dir, Err: errClosed}
	}
	return err
}

func (j *Journal) releaseMemory() {
	if j.gather != nil {
		j.gather.Release()
		j.gather = nil
	}
	j.dropArena()
	if j.mark.slab != nil {
		j.mark.slab.Release()
		j.mark.slab = nil
	}
}
