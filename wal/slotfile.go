package wal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/cespare/xxhash/v2"

	"github.com/mortarmq/mortarmq/ring"
)

// A slot file holds one small state in two slots of 4096 bytes, both with the same content: every save writes one, durably,
// then the other. So a save that is cut short leaves at least the state before it, and once a save has been acknowledged
// the loss of either slot costs nothing. A slot has 128 bytes and is zero behind them:
//
//	 0  the format's magic, its version, and what it says of itself
//	 8  u64 generation: of two slots that differ the higher one counts
//	16  the state
//	120 u64 xxhash64 of bytes 0 to 120
const (
	stateSlots     = 2
	stateSlotLen   = ring.BlockSize
	stateUsed      = 128
	stateGenOffset = 8
	stateSumOffset = 120
)

// stateFormat is what tells the formats of slot files apart.
type stateFormat struct {
	magic   string
	version uint8
}

var errStateSlots = errors.New("neither of its slots can be read")

// check tells whether b is a whole slot of the format.
func (f stateFormat) check(path string, b []byte) (ok bool, err error) {
	if string(b[:len(f.magic)]) != f.magic || binary.BigEndian.Uint64(b[stateSumOffset:]) != xxhash.Sum64(b[:stateSumOffset]) ||
		!allZero(b[stateUsed:stateSlotLen]) {
		return false, nil
	}
	switch v := b[len(f.magic)]; {
	case v > f.version:
		return false, &VersionError{Path: path, Version: v, Supported: f.version}
	case v == 0:
		return false, nil
	}
	return true, nil
}

// seal puts what every slot has into b, which holds the state.
func (f stateFormat) seal(b []byte, generation uint64) {
	copy(b, f.magic)
	b[len(f.magic)] = f.version
	binary.BigEndian.PutUint64(b[stateGenOffset:], generation)
	binary.BigEndian.PutUint64(b[stateSumOffset:], xxhash.Sum64(b[:stateSumOffset]))
}

// slotFile is an open slot file. It belongs to the goroutine of its disk.
type slotFile struct {
	format     stateFormat
	path       string
	disk       Disk
	fd         int
	slab       *ring.Slab
	generation uint64
	err        error

	// current is the state that was saved last, or is being saved; next, if set, the one to save after it.
	current, next [stateUsed]byte
	queued        bool
	busy          bool
	slot          int // the one being written
	op            ring.Op
	// waiting are told when current is durable, later when next is.
	waiting, later []func(error)
}

// openSlotFile opens the file at path, or makes it with the state in initial, and leaves what it holds in current. Both
// slots are whole when it returns.
func openSlotFile(w Waiter, pool *ring.Pool, path string, format stateFormat, initial []byte) (*slotFile, error) {
	f := &slotFile{format: format, path: path, disk: w, fd: -1}
	f.op.Done = f.written
	if f.slab = pool.Get(stateSlots * stateSlotLen); f.slab == nil {
		return nil, ErrNoMemory
	}
	io := newBlockingDisk(w)
	err := f.load(io)
	if isNotExist(err) {
		copy(f.current[:], initial)
		err = f.make(io)
	}
	if err != nil {
		if f.fd >= 0 {
			_, _ = io.run(ring.Op{Kind: ring.Close, FD: f.fd})
		}
		f.slab.Release()
		return nil, err
	}
	return f, nil
}

// load reads the file. A slot that isn't whole, or behind the other one, is written again before anything is built on the
// other: a save that writes over that one must not leave none.
func (f *slotFile) load(io *blockingDisk) error {
	op, err := io.run(ring.Op{Kind: ring.Open, Path: f.path, Flags: ring.Direct})
	if err != nil {
		return err
	}
	f.fd = op.FD
	b := f.slab.Bytes()[:stateSlots*stateSlotLen]
	clear(b)
	// Each on its own: both have every state, so that a disk that returns older content for a read takes none back.
	for i := range stateSlots {
		op := ring.Op{Kind: ring.Read, FD: f.fd, Off: int64(i) * stateSlotLen, Buf: b[i*stateSlotLen:][:stateSlotLen]}
		if _, err = io.run(op); err != nil {
			return err
		}
	}
	var generations [stateSlots]uint64
	best := -1
	for i := range stateSlots {
		slot := b[i*stateSlotLen:][:stateSlotLen]
		ok, err := f.format.check(f.path, slot)
		if err != nil {
			return err
		}
		if !ok {
			continue
		}
		generations[i] = binary.BigEndian.Uint64(slot[stateGenOffset:])
		if best < 0 || generations[i] > generations[best] {
			best = i
		}
	}
	if best < 0 {
		return &CorruptionError{Path: f.path, Cause: errStateSlots}
	}
	copy(f.current[:], b[best*stateSlotLen:])
	f.generation = generations[best]
	// What was read, and the name that it was found under, may be in a cache only.
	for _, op := range []ring.Op{{Kind: ring.Sync, FD: f.fd}, {Kind: ring.SyncDir, Path: filepath.Dir(f.path)}} {
		if _, err := io.run(op); err != nil {
			return &FailedError{Op: "flush", Path: f.path, Err: err}
		}
	}
	for i, g := range generations {
		if g == f.generation {
			continue
		}
		op := ring.Op{Kind: ring.WriteSync, FD: f.fd, Off: int64(i) * stateSlotLen, Buf: b[best*stateSlotLen:][:stateSlotLen]}
		if _, err := io.run(op); err != nil {
			return &FailedError{Op: "write", Path: f.path, Err: err}
		}
	}
	return nil
}

// make makes the file: complete and flushed before it gets its name.
func (f *slotFile) make(io *blockingDisk) error {
	f.generation = 1
	f.format.seal(f.current[:], f.generation)
	b := f.slab.Bytes()[:stateSlots*stateSlotLen]
	clear(b)
	for i := range stateSlots {
		copy(b[i*stateSlotLen:], f.current[:])
	}
	tmp := f.path + tmpSuffix
	op, err := io.run(ring.Op{Kind: ring.Open, Path: tmp, Flags: ring.Create | ring.Direct})
	if err != nil {
		return err
	}
	f.fd = op.FD
	for _, op := range []ring.Op{
		{Kind: ring.Truncate, FD: f.fd},
		{Kind: ring.Write, FD: f.fd, Buf: b},
		{Kind: ring.Sync, FD: f.fd},
		{Kind: ring.Rename, Path: tmp, Path2: f.path},
		{Kind: ring.SyncDir, Path: filepath.Dir(f.path)},
	} {
		if _, err := io.run(op); err != nil {
			return err
		}
	}
	return nil
}

// save writes a state; done hears when it, or a later one, is durable in both slots, or of the sticky error. A state that
// waits behind the one being written is replaced by the next. done may be nil.
func (f *slotFile) save(state *[stateUsed]byte, done func(error)) {
	if done == nil {
		done = func(error) {}
	}
	switch {
	case f.err != nil:
		done(f.err)
	case f.busy:
		f.next, f.queued = *state, true
		f.later = append(f.later, done)
	default:
		f.waiting = append(f.waiting, done)
		f.begin(state)
	}
}

func (f *slotFile) begin(state *[stateUsed]byte) {
	f.current, f.busy, f.slot = *state, true, 0
	f.generation++
	f.format.seal(f.current[:], f.generation)
	b := f.slab.Bytes()[:stateSlotLen]
	clear(b)
	copy(b, f.current[:])
	f.write()
}

func (f *slotFile) write() {
	f.op.Kind, f.op.FD, f.op.Off, f.op.Buf = ring.WriteSync, f.fd, int64(f.slot)*stateSlotLen, f.slab.Bytes()[:stateSlotLen]
	f.disk.Submit(&f.op)
}

// written ends the write of a slot.
func (f *slotFile) written(op *ring.Op) {
	if op.Err != nil {
		f.err = &FailedError{Op: "write", Path: f.path, Err: op.Err}
		f.waiting = append(f.waiting, f.later...)
		f.later, f.queued = nil, false
	} else if f.slot++; f.slot < stateSlots {
		f.write()
		return
	}
	f.busy = false
	told := f.waiting
	f.waiting, f.later = f.later, nil
	if f.queued {
		f.queued = false
		next := f.next
		f.begin(&next)
	}
	for _, done := range told {
		done(f.err)
	}
}

// close waits for what is being written and closes the file.
func (f *slotFile) close(w Waiter) error {
	io := newBlockingDisk(w)
	if err := io.waitFor(func() bool { return !f.busy }); err != nil {
		return err
	}
	err := f.err
	if _, cerr := io.run(ring.Op{Kind: ring.Close, FD: f.fd}); err == nil {
		err = cerr
	}
	f.slab.Release()
	if f.err == nil {
		f.err = &FailedError{Op: "use", Path: f.path, Err: errStateClosed}
	}
	return err
}

var errStateClosed = errors.New("the file is closed")

// wait drives the disk until the state is durable.
func (f *slotFile) wait(w Waiter, state *[stateUsed]byte) error {
	var result error
	done := false
	f.save(state, func(err error) { result, done = err, true })
	if err := newBlockingDisk(w).waitFor(func() bool { return done }); err != nil {
		return fmt.Errorf("wait for %s: %w", f.path, err)
	}
	return result
}
