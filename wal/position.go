package wal

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// In a cluster a journal is a replicated log, and every data round ends with one position record, in an entry of its own
// of the stream Replica. Its header carries the round's place in the log: the index as sequence, the epoch under which its
// leader appended it as leader_epoch; key, producer, timestamp and flags are zero. Its value has 16 bytes:
//
//	 0        1         2    4            8               16
//	+--------+---------+----+------------+---------------+
//	|ver u8  |flags u8 |zero|prev_epoch  |commit         |
//	|        |         |u16 |u32         |u64            |
//	+--------+---------+----+------------+---------------+
//
// ver is 1, flags are those of RoundFlags. prev_epoch is the epoch of the round at the index before, 0 for the first of a
// log. commit is the index up to which the leader had committed when it sealed the round. A node that isn't part of a
// cluster writes no position records.
const (
	positionVersion  = 1
	positionValueLen = 16
	positionLen      = RecordHeaderLen + positionValueLen
	// stampLen is what a position takes in a round.
	stampLen = entryHeaderLen + positionLen
)

// replicaStream is the stream of the position records.
var replicaStream = StreamID{Kind: Replica}

// LogIndex numbers the rounds of a replicated log, from 1, without gaps. Unlike a RoundNumber it is the same on all nodes.
type LogIndex uint64

// LogPoint names a round of a replicated log: no two rounds with different contents have the same point, on whatever node.
// The zero point is before the first round.
type LogPoint struct {
	// Epoch is the one under which the round's leader appended it.
	Epoch Epoch
	Index LogIndex
}

func (p LogPoint) String() string { return fmt.Sprintf("index %d of epoch %d", p.Index, p.Epoch) }

// RoundFlags tell what a round of a replicated log is for.
type RoundFlags uint8

const (
	// OpeningRound is the first one of an epoch in its log: with it what earlier epochs have left commits.
	OpeningRound RoundFlags = 1 << iota
	// CatchupRound holds records that the leader had committed before, and that this node fetched in bulk. Its commit index
	// is what this node knew committed of its own log; what it had pending behind that is given up. With index 0 the round is
	// not part of the log. The last round of a catch-up has the point up to which the catch-up brought everything; the log
	// goes on behind that. There is no epoch before either: Prev is 0.
	CatchupRound
)

// LogPosition is what a round's position record says.
type LogPosition struct {
	Point LogPoint
	// Prev is the epoch of the round before; 0 for the first one.
	Prev Epoch
	// Commit is how far the leader knew the log committed when it sealed the round; see CatchupRound.
	Commit LogIndex
	Flags  RoundFlags
}

// Reasons why bytes are no position record, or not one that can be.
var (
	errPositionValue = errors.New("the round's position in its log is malformed")
	errPositionPlace = errors.New("a round has one position in its log at most, as its last entry")
	errNoPosition    = errors.New("the round has no position in a replicated log: it was written by a node on its own")
	errPosition      = errors.New("the round has a position in a replicated log: it was written by a node of a cluster, " +
		"and only as one it can be opened again")
)

// check tells whether a position is one that a node may write.
func (p *LogPosition) check() error {
	ok := (p.Point.Index == 0) == (p.Point.Epoch == 0)
	switch p.Flags {
	case CatchupRound:
		ok = ok && p.Prev == 0
	case 0, OpeningRound:
		ok = ok && p.Point.Index > 0 && p.Prev <= p.Point.Epoch && (p.Prev == 0) == (p.Point.Index == 1) && p.Commit < p.Point.Index
	default:
		ok = false
	}
	if !ok {
		return errPositionValue
	}
	return nil
}

// putPosition encodes the position record at the start of dst, which has positionLen bytes.
func putPosition(dst []byte, p *LogPosition) {
	var value [positionValueLen]byte
	value[0], value[1] = positionVersion, byte(p.Flags)
	binary.BigEndian.PutUint32(value[4:], uint32(p.Prev))
	binary.BigEndian.PutUint64(value[8:], uint64(p.Commit))
	PutRecord(dst, &Record{Sequence: Sequence(p.Point.Index), LeaderEpoch: p.Point.Epoch, Value: value[:]})
}

// decodePosition decodes the data of an entry of the stream Replica, whose record has been checked.
func decodePosition(b []byte) (p LogPosition, err error) {
	if len(b) != positionLen {
		return p, errPositionValue
	}
	var r Record
	if n := PeekRecord(b, &r); n != positionLen {
		return p, errPositionValue
	}
	switch v := r.Value; {
	case len(r.Key) > 0, r.Flags != 0, r.ProducerID != 0, r.ProducerSeq != 0, r.TimestampMs != 0, r.ReplFlags != 0,
		v[0] != positionVersion, v[2] != 0, v[3] != 0:
		return p, errPositionValue
	default:
		p = LogPosition{
			Point:  LogPoint{Epoch: r.LeaderEpoch, Index: LogIndex(r.Sequence)},
			Prev:   Epoch(binary.BigEndian.Uint32(v[4:])),
			Commit: LogIndex(binary.BigEndian.Uint64(v[8:])),
			Flags:  RoundFlags(v[1]),
		}
	}
	return p, p.check()
}

// Position returns the round's place in its replicated log. ok is false for a round without one: a START round, and every
// round of a node that isn't part of a cluster.
func (r *Round) Position() (p LogPosition, ok bool) { return r.position, r.stamped }

// Log returns the round's point in its replicated log; ok as with Position. A catch-up round may have index 0.
func (r *Round) Log() (p LogPoint, ok bool) { return r.position.Point, r.stamped }

// LogCommit returns how far the round's leader knew the log committed when it sealed the round; 0 without a position.
func (r *Round) LogCommit() LogIndex { return r.position.Commit }

// LogFlags returns what the round is for in its log; 0 without a position.
func (r *Round) LogFlags() RoundFlags { return r.position.Flags }

// LogPrev returns the epoch of the round before in the log; 0 without a position, and for the log's first.
func (r *Round) LogPrev() Epoch { return r.position.Prev }

// Payload returns the encoded entries of a sealed round, headers and position record included: what is shipped to the
// followers, byte for byte, for their AppendPayload. It is immutable and valid as long as the caller holds a reference.
func (r *Round) Payload() []byte { return r.buf[roundHeaderLen:r.size:r.size] }

// stamp appends the position; the caller has checked it and that buf has room.
func (r *Round) stamp(p *LogPosition) {
	r.size += entryHeaderLen
	r.Entries = append(r.Entries, Entry{
		Stream: replicaStream, First: Sequence(p.Point.Index), Count: 1, Off: uint32(r.size), Len: positionLen,
	})
	putPosition(r.buf[r.size:], p)
	r.size += positionLen
	r.position, r.stamped = *p, true
}

// loadPosition takes the position over from the last entry read.
func (r *Round) loadPosition(e *Entry) error {
	if e.Count != 1 {
		return errPositionPlace
	}
	p, err := decodePosition(r.Data(e))
	if err != nil {
		return err
	}
	r.position, r.stamped = p, true
	return nil
}

// Stamp ends the gathering round of a journal whose option Stamped is set with its place in the replicated log; Seal
// follows. Nothing can be appended behind it. Where nothing is gathered it makes a round of the position alone.
//
// prev is the epoch of the round before in the log, commit how far the log is known committed. It panics for a position
// that can't be. Errors are ErrJournalFull and ErrNoMemory, only where nothing was gathered, and the sticky *FailedError.
func (j *Journal) Stamp(point LogPoint, prev Epoch, commit LogIndex, flags RoundFlags) error {
	if j.err != nil {
		return j.err
	}
	p := LogPosition{Point: point, Prev: prev, Commit: commit, Flags: flags}
	if err := p.check(); err != nil || !j.opts.Stamped || j.gather != nil && j.gather.stamped {
		panic(fmt.Sprintf("wal: a round can't be stamped with %+v: %v", p, err))
	}
	if j.gather == nil {
		const size = roundHeaderLen + stampLen
		if err := j.room(Replica, size); err != nil {
			return err
		}
		r := j.newRound(size)
		if r == nil {
			return ErrNoMemory
		}
		j.gather = r
	}
	j.gather.stamp(&p)
	return nil
}

// AppendPayload makes the gathering round of a payload that another node has sealed (Round.Payload): one round here holds
// what one round there did. payload is borrowed until it returns; Seal follows, Stamp doesn't.
//
// It is checked like everything that comes from outside: entries and records must be what a journal writes and the last
// entry must be the position, or the error says why not (errors.Is ErrPayload). Other errors are those of Append;
// ErrRoundFull says that something is gathered already. Nothing was appended where it returns an error.
func (j *Journal) AppendPayload(payload []byte) error {
	switch {
	case j.err != nil:
		return j.err
	case !j.opts.Stamped:
		panic("wal: AppendPayload to a journal without Stamped")
	case j.gather != nil:
		return ErrRoundFull
	}
	size := roundHeaderLen + len(payload)
	if size > maxRoundLen || int64(blockAlign(size)) > j.largestFile()-fileHeaderLen {
		return ErrRecordTooLarge
	}
	// Whatever it holds leaves the reserve alone: a follower that comes to lead needs room for its opening round, and what
	// it can't take yet waits at the leader.
	if err := j.room(Messages, size); err != nil {
		return err
	}
	r := j.newRound(size)
	if r == nil {
		return ErrNoMemory
	}
	r.size += copy(r.buf[r.size:], payload)
	err := r.loadEntries()
	if err == nil && !r.stamped {
		err = errNoPosition
	}
	if err != nil {
		r.Release()
		return &payloadError{err}
	}
	j.gather = r
	return nil
}

// ErrPayload is matched by the error of AppendPayload for bytes that are no round's payload.
var ErrPayload = errors.New("not the payload of a journal round")

// payloadError says what is wrong with a payload.
type payloadError struct{ cause error }

func (e *payloadError) Error() string        { return fmt.Sprintf("%v: %v", ErrPayload, e.cause) }
func (e *payloadError) Unwrap() error        { return e.cause }
func (e *payloadError) Is(target error) bool { return target == ErrPayload }
