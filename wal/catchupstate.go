package wal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/mortarmq/mortarmq/ring"
)

// The progress of a catch-up (MMCUP, catchup.mmcup in the journal's directory) is a slot file, see slotfile.go. It is there
// while a log is being filled from another node:
//
//	 0  "MMCUP"                              40  u32 epoch of the target, u32 0
//	 5  u8 format version 1                  48  u64 index of the target
//	 6  u8 flags: 1 metadata, 2 cursors,     56  u64 begun, Unix milliseconds
//	    4 producer windows installed; u8 0   64  u32 streams to fill
//	 8  u64 generation                       68  u32 streams filled
//	16  u16 leader; u16 0                    72  u64 records taken
//	20  u32 leader epoch                     80  u64 their bytes
//	24  u32 epoch of the log's end before    88  32 zero bytes
//	28  u32 0                               120  u64 checksum
//	32  u64 index of the log's end before
const (
	catchupFile = "catchup.mmcup"

	catchupMetadata = 1 << 0
	catchupCursors  = 1 << 1
	catchupWindows  = 1 << 2
)

var catchupFormat = stateFormat{magic: "MMCUP", version: 1}

// CatchupState tells how far one log of a node has got in catching up. It is there for whoever wants to know; a catch-up
// that was interrupted begins with what the files have.
type CatchupState struct {
	// Leader is the node that the records come from, Epoch the one that it leads.
	Leader uint16
	Epoch  Epoch
	// From is where the log ended before, Target the point at which the log goes on once everything is there.
	From, Target LogPoint
	// BegunMs is when it began, Unix milliseconds.
	BegunMs uint64
	// Streams are to be filled, StreamsDone are.
	Streams, StreamsDone uint32
	// Records and Bytes were taken so far.
	Records, Bytes uint64
	// Metadata, Cursors and Windows say which snapshots were installed.
	Metadata, Cursors, Windows bool
}

func (s *CatchupState) encode(b *[stateUsed]byte) {
	*b = [stateUsed]byte{}
	for _, f := range [...]struct {
		set bool
		bit byte
	}{{s.Metadata, catchupMetadata}, {s.Cursors, catchupCursors}, {s.Windows, catchupWindows}} {
		if f.set {
			b[6] |= f.bit
		}
	}
	binary.BigEndian.PutUint16(b[16:], s.Leader)
	binary.BigEndian.PutUint32(b[20:], uint32(s.Epoch))
	binary.BigEndian.PutUint32(b[24:], uint32(s.From.Epoch))
	binary.BigEndian.PutUint64(b[32:], uint64(s.From.Index))
	binary.BigEndian.PutUint32(b[40:], uint32(s.Target.Epoch))
	binary.BigEndian.PutUint64(b[48:], uint64(s.Target.Index))
	binary.BigEndian.PutUint64(b[56:], s.BegunMs)
	binary.BigEndian.PutUint32(b[64:], s.Streams)
	binary.BigEndian.PutUint32(b[68:], s.StreamsDone)
	binary.BigEndian.PutUint64(b[72:], s.Records)
	binary.BigEndian.PutUint64(b[80:], s.Bytes)
}

// decodeCatchupState reads the state from a whole slot.
func decodeCatchupState(b []byte) (s CatchupState, err error) {
	u32 := func(off int) uint32 { return binary.BigEndian.Uint32(b[off:]) }
	u64 := func(off int) uint64 { return binary.BigEndian.Uint64(b[off:]) }
	s = CatchupState{
		Leader: binary.BigEndian.Uint16(b[16:]), Epoch: Epoch(u32(20)),
		From:    LogPoint{Epoch: Epoch(u32(24)), Index: LogIndex(u64(32))},
		Target:  LogPoint{Epoch: Epoch(u32(40)), Index: LogIndex(u64(48))},
		BegunMs: u64(56), Streams: u32(64), StreamsDone: u32(68), Records: u64(72), Bytes: u64(80),
		Metadata: b[6]&catchupMetadata != 0, Cursors: b[6]&catchupCursors != 0, Windows: b[6]&catchupWindows != 0,
	}
	if b[6]&^(catchupMetadata|catchupCursors|catchupWindows) != 0 || b[7] != 0 || b[18] != 0 || b[19] != 0 || u32(28) != 0 ||
		u32(44) != 0 || !allZero(b[88:stateSumOffset]) {
		return s, &CorruptionError{Cause: errStateValue}
	}
	return s, nil
}

// CatchupFile keeps the CatchupState of one log. All methods belong to the goroutine that owns its disk; saves complete
// inside that disk's Poll.
type CatchupFile struct {
	f     *slotFile
	state CatchupState
}

// OpenCatchupFile opens the file of a journal in the data directory dir, or makes it where it is missing; the journal's
// directory must be there. A damaged one is made anew: it says nothing that can't be found out again. pool provides 8 KiB
// until it is closed or removed.
func OpenCatchupFile(w Waiter, pool *ring.Pool, dir string, journal int) (*CatchupFile, error) {
	path := filepath.Join(journalPath(dir, journal), catchupFile)
	io := newBlockingDisk(w)
	for range 2 {
		var initial [stateUsed]byte
		f, err := openSlotFile(w, pool, path, catchupFormat, initial[:])
		var state CatchupState
		if err == nil {
			if state, err = decodeCatchupState(f.current[:]); err == nil {
				return &CatchupFile{f: f, state: state}, nil
			}
			err = errors.Join(err, f.close(w))
		}
		if !errors.Is(err, ErrCorrupt) {
			return nil, fmt.Errorf("open the progress of the catch-up: %w", err)
		}
		if _, err := io.run(ring.Op{Kind: ring.Remove, Path: path}); err != nil {
			return nil, fmt.Errorf("remove the progress of a catch-up that can't be read: %w", err)
		}
	}
	return nil, &CorruptionError{Path: path, Cause: errStateSlots}
}

// State returns the state that was saved last, whether or not it is durable yet.
func (c *CatchupFile) State() CatchupState { return c.state }

// SetDisk makes the file use another disk from now on. Nothing may be in flight.
func (c *CatchupFile) SetDisk(d Disk) { c.f.disk = d }

// Save writes a state, see ReplicaFile.Save.
func (c *CatchupFile) Save(s CatchupState, done func(error)) {
	c.state = s
	var b [stateUsed]byte
	s.encode(&b)
	c.f.save(&b, done)
}

// Err returns the sticky error, a *FailedError, or nil.
func (c *CatchupFile) Err() error { return c.f.err }

// Idle tells that no operation of the file is at the disk.
func (c *CatchupFile) Idle() bool { return !c.f.busy }

// Close waits for what is being saved, driving w, and closes the file, which stays.
func (c *CatchupFile) Close(w Waiter) error { return c.f.close(w) }

// RemoveCatchupFile removes the file of a journal, once its log has caught up; it is no error where there is none.
func RemoveCatchupFile(w Waiter, dir string, journal int) error {
	path := filepath.Join(journalPath(dir, journal), catchupFile)
	io := newBlockingDisk(w)
	if _, err := io.run(ring.Op{Kind: ring.Remove, Path: path}); err != nil && !isNotExist(err) {
		return err
	}
	_, err := io.run(ring.Op{Kind: ring.SyncDir, Path: filepath.Dir(path)})
	return err
}

// ReadCatchupState reads the progress of a journal's catch-up that was interrupted; found is false where there is none.
func ReadCatchupState(w Waiter, pool *ring.Pool, dir string, journal int) (s CatchupState, found bool, err error) {
	path := filepath.Join(journalPath(dir, journal), catchupFile)
	if _, err := newBlockingDisk(w).run(ring.Op{Kind: ring.Stat, Path: path}); err != nil {
		if isNotExist(err) {
			err = nil
		}
		return s, false, err
	}
	f, err := OpenCatchupFile(w, pool, dir, journal)
	if err != nil {
		return s, false, err
	}
	return f.State(), true, f.Close(w)
}
