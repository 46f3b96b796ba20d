package wal

import (
	"fmt"

	"github.com/mortarmq/mortarmq/internal/mutant"
	"github.com/mortarmq/mortarmq/ring"
)

const (
	// arenaBytes is the size of the slab that small rounds share.
	arenaBytes = 2 << 20
	// minRoundRoom is how much an arena must have left for another round to start in it. A round that outgrows what is
	// left moves to the next arena, so this only trades copying against memory left unused.
	minRoundRoom = 64 << 10
)

// Append encodes a record of stream s into the gathering round. Key and value are copied. Consecutive sequences of one
// stream share an entry; giving the sequences out is the caller's business.
//
// Nothing was appended where it returns an error: ErrRoundFull (seal the round, then append again), ErrJournalFull,
// ErrNoMemory, ErrRecordTooLarge, or the sticky *FailedError. It panics for a record that recovery would refuse: without a
// sequence, with unknown flags, on a stream that doesn't exist or that only Stamp may write.
func (j *Journal) Append(s StreamID, rec *Record) error {
	if j.err != nil {
		return j.err
	}
	if len(rec.Key) > MaxKeyLen || len(rec.Value) > MaxValueLen {
		return ErrRecordTooLarge
	}
	if rec.Sequence == 0 || rec.Flags&^knownFlags != 0 || rec.ReplFlags > MaxReplFlags || !s.valid() || s.Kind == Replica {
		panic(fmt.Sprintf("wal: append to %v of a record that can't be read back: sequence %d, flags %#x, replication flags %d",
			s, rec.Sequence, rec.Flags, rec.ReplFlags))
	}
	size := RecordSize(len(rec.Key), len(rec.Value))
	r := j.gather
	if r == nil {
		return j.appendFirst(s, rec, roundHeaderLen+entryHeaderLen+size+j.stampRoom)
	}
	if r.stamped {
		return ErrRoundFull
	}
	size += r.size + j.stampRoom
	if !r.extends(s, rec.Sequence) {
		size += entryHeaderLen
	}
	if size > j.opts.MaxRoundBytes {
		return ErrRoundFull
	}
	if err := j.room(s.Kind, size); err != nil {
		return err
	}
	if size > len(r.buf) && !j.moveGather() {
		return ErrRoundFull
	}
	r.append(s, rec)
	return nil
}

// appendFirst opens a round with a record that makes it size bytes long, with the position that is still to come.
func (j *Journal) appendFirst(s StreamID, rec *Record, size int) error {
	if size > maxRoundLen || int64(blockAlign(size)) > j.largestFile()-fileHeaderLen {
		return ErrRecordTooLarge
	}
	if err := j.room(s.Kind, size); err != nil {
		return err
	}
	r := j.newRound(size)
	if r == nil {
		return ErrNoMemory
	}
	r.append(s, rec)
	j.gather = r
	return nil
}

// room tells whether a round of size bytes has a place, and leaves messages the reserve of ledger and metadata.
func (j *Journal) room(kind StreamKind, size int) error {
	padded := int64(blockAlign(size))
	left := j.freeBytes
	if here := j.cur.size - j.curOff; padded <= here {
		left += here
	} else if j.freeFor(padded) < 0 {
		return ErrJournalFull
	}
	if kind == Messages && left-padded < j.capacity/reserveDivisor {
		return ErrJournalFull
	}
	return nil
}

// freeFor returns the index of the first free file that holds a round of padded bytes, or -1. Files differ in size only
// where the configuration has changed.
func (j *Journal) freeFor(padded int64) int {
	for i, f := range j.free {
		if padded <= f.payload() {
			return i
		}
	}
	return -1
}

// largestFile returns the size in bytes of the largest file that the journal has or would make.
func (j *Journal) largestFile() int64 {
	size := j.cur.size
	for _, files := range [...][]*journalFile{j.full, j.free} {
		for _, f := range files {
			size = max(size, f.size)
		}
	}
	if j.files() < j.opts.MaxFiles {
		size = max(size, j.opts.FileBytes)
	}
	return size
}

// newRound opens a round with memory for at least size bytes, nil where the pool has none.
func (j *Journal) newRound(size int) *Round {
	need := blockAlign(size)
	if need > j.opts.MaxRoundBytes {
		slab := j.opts.Pool.Get(need)
		if slab == nil {
			return nil
		}
		return j.openRound(slab, slab.Bytes()[:need])
	}
	if j.arenaLeft() < max(need, minRoundRoom) && !j.newArena() && j.arenaLeft() < need {
		return nil
	}
	j.arena.Retain()
	return j.openRound(j.arena, j.arenaRoom())
}

// openRound makes a round of memory in slab, whose reference it takes over.
func (j *Journal) openRound(slab *ring.Slab, buf []byte) *Round {
	r := j.rounds.get()
	r.slab, r.buf, r.journal = slab, buf, j
	r.open()
	return r
}

func (j *Journal) arenaLeft() int {
	if j.arena == nil {
		return 0
	}
	return len(j.arena.Bytes()) - j.arenaOff
}

// arenaRoom returns the memory that a round may take from the arena.
func (j *Journal) arenaRoom() []byte {
	b := j.arena.Bytes()[j.arenaOff:]
	if len(b) > j.opts.MaxRoundBytes {
		b = b[:j.opts.MaxRoundBytes:j.opts.MaxRoundBytes]
	}
	return b
}

// newArena replaces the arena by a fresh one; false where the pool has none. Rounds in the old one keep it alive.
func (j *Journal) newArena() bool {
	slab := j.opts.Pool.Get(max(arenaBytes, j.opts.MaxRoundBytes))
	if slab == nil {
		return false
	}
	j.dropArena()
	j.arena = slab
	return true
}

func (j *Journal) dropArena() {
	if j.arena != nil {
		j.arena.Release()
	}
	j.arena, j.arenaOff = nil, 0
}

// moveGather moves the gathering round to a fresh arena, where it can grow to the largest size; false where the pool has
// none. It happens at most once per arena.
func (j *Journal) moveGather() bool {
	if !j.newArena() {
		return false
	}
	r := j.gather
	j.arena.Retain()
	room := j.arenaRoom()
	copy(room, r.buf[:r.size])
	r.slab.Release()
	r.slab, r.buf = j.arena, room
	return true
}

// Seal closes the gathering round, submits its write and returns its number, or 0 where CanSeal is false. The function
// given to OnFlushed hears how it went. With the option Stamped it panics for a round without its position.
func (j *Journal) Seal() RoundNumber {
	if !j.CanSeal() {
		return 0
	}
	r := j.gather
	if j.opts.Stamped && !r.stamped {
		panic("wal: a round of a replicated log is sealed without its position")
	}
	j.gather = nil
	j.submit(r, false)
	return r.Number
}

// submit seals r and sends it to the device, on to the next file where it doesn't fit this one. Append made sure that
// there is a next file.
func (j *Journal) submit(r *Round, start bool) {
	padded := int64(blockAlign(r.size))
	if padded > j.cur.size-j.curOff {
		j.rotate(padded)
	}
	r.seal(roundSeal{
		journal: j.opts.ID, number: j.next, epoch: j.epoch, start: start, nonce: j.nonce, prev: j.lastSum,
		flushed: j.flushed, committed: j.committed, key: j.cur.key,
	})
	if r.slab == j.arena {
		j.arenaOff += r.padded
	}
	j.next++
	j.lastSum = r.sum
	j.flight = append(j.flight, r)

	r.file = j.cur
	r.op.Kind, r.op.FD, r.op.Off, r.op.Buf = ring.WriteSync, j.cur.fd, j.curOff, r.buf[:r.padded]
	// A small round that is alone at the device is written in place: the owner would only wait for it.
	r.op.Inline = r.padded <= j.opts.InlineRoundBytes && len(j.flight) == 1
	j.curOff += padded
	j.disk.Submit(&r.op)
}

// rotate goes on to the next free file that holds padded bytes.
func (j *Journal) rotate(padded int64) {
	i := j.freeFor(padded)
	j.cur.last = j.next - 1
	j.full = append(j.full, j.cur)
	j.cur = j.free[i]
	j.free = append(j.free[:i], j.free[i+1:]...)
	j.freeBytes -= j.cur.payload()
	j.curOff = fileHeaderLen
}

// written is the Done of a round's write. Writes complete in any order; rounds count in the order of their numbers.
func (r *Round) written(*ring.Op) {
	j := r.journal
	r.landed = true
	if mutant.Is("failed-flush-ignored") {
		r.op.Err = nil
	}
	if r.op.Err != nil {
		j.fail("write round to", r.file.path, r.op.Err)
	}
	for len(j.flight) > 0 && j.flight[0].landed {
		first := j.flight[0]
		j.flight = append(j.flight[:0], j.flight[1:]...)
		j.deliver(first)
	}
}

// deliver hands a round that left the device to the owner, with the reference that the journal had.
func (j *Journal) deliver(r *Round) {
	if r.op.Err != nil {
		j.broken = true
	}
	var err error
	if j.broken {
		err = j.err
	} else {
		j.flushed = r.Number
		j.mark.sum = r.sum
		j.recycle()
	}
	if j.onFlushed == nil {
		r.Release()
		return
	}
	j.onFlushed(r, err)
}

// Trim frees the files whose newest round is upTo or older. The file with the newest durable round is kept whatever is
// asked for: it is where recovery finds the end of the chain, the epoch and the number to go on from.
//
// Call it only after the point (upTo with its epoch, and how far rounds are committed) is durable elsewhere, in the
// checkpoint table, together with everything that the rounds up to it say: recovery is told that point and doesn't look
// for the rounds below it.
func (j *Journal) Trim(upTo RoundNumber) {
	j.trimmed = max(j.trimmed, min(upTo, j.flushed))
	j.recycle()
}

// recycle moves trimmed files to the free ones. A file must also be followed by a durable round in a later file: with
// rounds in flight only, a power cut could leave neither them nor, once the file is written again, the newest one.
func (j *Journal) recycle() {
	for len(j.full) > 0 && j.full[0].last <= j.trimmed && (j.full[0].last < j.flushed || mutant.Is("newest-file-recycled")) {
		f := j.full[0]
		j.full = append(j.full[:0], j.full[1:]...)
		j.free = append(j.free, f)
		j.freeBytes += f.payload()
		j.opts.Logger.Debug("a journal file is free again")
	}
}
