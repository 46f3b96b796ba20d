package coord

import (
	"errors"
	"log/slog"
	"time"

	"github.com/mortarmq/mortarmq/engine/ledger"
	"github.com/mortarmq/mortarmq/wal"
)

const (
	// coldBudget bounds the memory of chunks that were read from disk and wait to be delivered. Above it nothing is read
	// ahead and reads are small.
	coldBudget = 64 << 20
	// retryReadBytes is the size of the read for a message that is delivered again, and of all reads above coldBudget.
	retryReadBytes = 64 << 10
	// readPause is how long a reader waits after a read that failed for want of memory, readFault after another failure.
	readPause = 20 * time.Millisecond
	readFault = time.Second
)

// reader brings one partition to one group.
type reader struct {
	cur    *ledger.Cursor
	ledger *ledgerLog
	part   *partition
	group  *groupDelivery
	place  int // in part.readers
	// letters are its messages on their way to the dead-letter topic, until they are stored there; nil if there are none.
	letters map[ledger.Sequence]*letter

	// The owner, while it is connected.
	con      *consumer
	epoch    uint64 // ownership epoch
	at       int    // place in con.readers
	draining bool   // being revoked: nothing new is delivered

	listed     bool // in con.ready, between prev and next
	prev, next *reader
	short      int    // its place in con.short + 1, 0 = not there
	need       uint64 // the credit in bytes that its next message takes

	hot    hotPlace
	cold   coldPlace // of the fresh messages
	ahead  coldPlace // what follows cold
	old    coldPlace // of retries
	read   *coldRead // the one read under way
	noMore wal.Sequence
	paused bool // in delivery.stalled: no read for a while
	faulty bool // the last read failed, and that was logged

	// reported was named in a pushed 0x4005 when the credit had the epoch reportedAt.
	reported   wal.Sequence
	reportedAt uint64
	sample     sample
}

// hotPlace is where the record of seq begins in memory.
type hotPlace struct {
	run uint64
	off int
	seq wal.Sequence
}

// coldPlace is where the record of seq begins in a chunk; it owns a reference of the chunk.
type coldPlace struct {
	chunk *wal.Chunk
	off   int
	seq   wal.Sequence
	index runIndex
}

// sample is a delivery whose way from PUB to ACK is measured; one at a time per reader.
type sample struct {
	seq   ledger.Sequence
	since uint64 // the record's timestamp in Unix milliseconds
}

// coldRead is a read under way.
type coldRead struct {
	req   wal.ReadRequest
	rd    *reader // nil: nobody waits any more
	place *coldPlace
	// letter and search are set where the read is for a dead letter, reset where it finds a time in partition index.
	letter *letter
	search *groupDelivery
	reset  *reset
	index  int
}

// source is where a record lies: a reference on it keeps the record's bytes.
type source interface {
	Releaser
	Retain()
}

func sequence(s wal.Sequence) ledger.Sequence { return ledger.Sequence(s) }

// find reads the record of seq into rec, if it is in memory. Its bytes are valid as long as src is not released, at least
// until the next call.
func (d *delivery) find(rd *reader, seq wal.Sequence, rec *wal.Record) (src source, ok bool) {
	p := rd.part
	if rd.hot.seq == seq && rd.hot.run >= p.runs.head && rd.hot.run < p.runs.tail {
		return rd.readHot(rec), true
	}
	if p.inTail(seq) {
		d.dropBelow(&rd.cold, seq)
		d.dropBelow(&rd.ahead, seq)
		run := p.findRun(seq)
		r := p.runs.at(run)
		rd.hot = hotPlace{run: run, seq: seq, off: r.index.seek(r.data, int(seq-r.first))}
		return rd.readHot(rec), true
	}
	if rd.ahead.has(seq) {
		d.dropPlace(&rd.cold)
		rd.cold, rd.ahead = rd.ahead, coldPlace{}
	}
	switch {
	case rd.cold.has(seq):
		rd.cold.readTo(seq, rec)
		d.readAhead(rd)
		return rd.cold.chunk, true
	case rd.old.has(seq):
		rd.old.readTo(seq, rec)
		return rd.old.chunk, true
	default:
		return nil, false
	}
}

// readHot reads the record at rd.hot and moves on to the next one.
func (rd *reader) readHot(rec *wal.Record) source {
	r := rd.part.runs.at(rd.hot.run)
	rd.hot.off += wal.PeekRecord(r.data[rd.hot.off:], rec)
	rd.hot.seq++
	if rd.hot.off == len(r.data) {
		rd.hot.run++
		rd.hot.off = 0
	}
	return r.round
}

func (p *coldPlace) has(seq wal.Sequence) bool {
	return p.chunk != nil && p.chunk.First <= seq && seq <= p.chunk.Last()
}

// readTo reads the record of seq, which is in the chunk, and moves on to the next one.
func (p *coldPlace) readTo(seq wal.Sequence, rec *wal.Record) {
	data := p.chunk.Bytes()
	if seq != p.seq {
		p.off, p.seq = p.index.seek(data, int(seq-p.chunk.First)), seq
	}
	p.off += wal.PeekRecord(data[p.off:], rec)
	p.seq++
}

func (d *delivery) setPlace(p *coldPlace, c *wal.Chunk) {
	d.dropPlace(p)
	*p = coldPlace{chunk: c, seq: c.First}
	d.coldBytes += int64(c.Size())
}

func (d *delivery) dropPlace(p *coldPlace) {
	if p.chunk != nil {
		d.coldBytes -= int64(p.chunk.Size())
		p.chunk.Release()
		*p = coldPlace{}
	}
}

// dropBelow gives back a chunk that ends before seq.
func (d *delivery) dropBelow(p *coldPlace, seq wal.Sequence) {
	if p.chunk != nil && p.chunk.Last() < seq {
		d.dropPlace(p)
	}
}

// dropCold gives back what a reader has read from disk; a read under way is for nobody.
func (d *delivery) dropCold(rd *reader) {
	d.dropPlace(&rd.cold)
	d.dropPlace(&rd.ahead)
	d.dropPlace(&rd.old)
	if rd.read != nil {
		rd.read.rd = nil
		rd.read = nil
	}
	rd.noMore = 0
}

// readAhead starts to read what follows the chunk that is being delivered.
func (d *delivery) readAhead(rd *reader) {
	next := rd.cold.chunk.Last() + 1
	if rd.read == nil && rd.ahead.chunk == nil && next <= rd.part.last && next != rd.noMore &&
		!rd.part.inTail(next) && d.coldBytes < coldBudget {
		d.startRead(rd, next, &rd.ahead, wal.DefaultReadBytes)
	}
}

// demand starts to read seq, which is not in memory, unless a read is under way.
func (d *delivery) demand(rd *reader, seq wal.Sequence, fresh bool) {
	if rd.read != nil || rd.paused {
		return
	}
	place, size := &rd.old, retryReadBytes
	if fresh {
		place = &rd.cold
		if d.coldBytes < coldBudget {
			size = wal.DefaultReadBytes
		}
	}
	d.dropPlace(place)
	d.startRead(rd, seq, place, size)
}

func (d *delivery) startRead(rd *reader, seq wal.Sequence, place *coldPlace, size int) {
	var r *coldRead
	if n := len(d.spareReads); n > 0 {
		r, d.spareReads = d.spareReads[n-1], d.spareReads[:n-1]
	} else {
		r = new(coldRead)
	}
	d.readTag++
	r.rd, r.place = rd, place
	r.req = wal.ReadRequest{
		Stream: wal.StreamID{Kind: wal.Messages, Topic: rd.part.topic, Partition: rd.part.id},
		From:   seq, MaxBytes: size, Done: d.deps.readDone, Tag: d.readTag,
	}
	if size == wal.DefaultReadBytes && d.coldBytes < coldBudget/2 {
		r.req.DiskBytes = wal.MaxReadBytes
	}
	rd.read = r
	d.reads[r.req.Tag] = r
	d.c.store.Read(rd.part.journal, &r.req)
}

// readDone implements deliverer.
func (d *delivery) readDone(req *wal.ReadRequest) {
	r := d.reads[req.Tag]
	if r == nil || &r.req != req {
		return
	}
	delete(d.reads, req.Tag)
	switch {
	case r.letter != nil:
		d.letterRead(r.letter, req.Chunk, req.Err)
		return
	case r.search != nil:
		d.searched(r.search, req.Chunk, req.Err)
		return
	case r.reset != nil:
		d.timeFound(r.reset, r.index, req.Chunk, req.Err)
		return
	}
	rd, place, chunk, err, from := r.rd, r.place, req.Chunk, req.Err, req.From
	*r = coldRead{}
	d.spareReads = append(d.spareReads, r)
	if rd == nil {
		if chunk != nil {
			chunk.Release()
		}
		return
	}
	rd.read = nil
	switch {
	case err != nil:
		pause := readFault
		if errors.Is(err, wal.ErrNoMemory) {
			pause = readPause
		} else if !rd.faulty {
			rd.faulty = true
			d.log.Error("a partition can't be read: its consumers wait", slog.Int("topic", int(rd.part.topic)),
				slog.Int("partition", int(rd.part.id)), slog.Uint64("sequence", uint64(from)), slog.Any("err", err))
		}
		d.stall(rd, pause)
	case chunk == nil && place == &rd.ahead:
		rd.noMore = from // it is still in memory, or was dropped from there a moment ago
		d.wake(rd)
	case chunk == nil:
		d.stall(rd, readPause)
	default:
		rd.faulty = false
		d.setPlace(place, chunk)
		if chunk.First > from {
			d.gone(rd, place, from, chunk.First)
		}
		d.wake(rd)
	}
}

// gone ends messages that are not stored any more: retention has removed them.
func (d *delivery) gone(rd *reader, place *coldPlace, from, first wal.Sequence) {
	rd.part.first = max(rd.part.first, first)
	if place == &rd.old {
		rd.cur.Discard(sequence(from))
		return
	}
	rd.cur.Skip(sequence(first))
}

// stall lets a reader try again later.
func (d *delivery) stall(rd *reader, pause time.Duration) {
	if !rd.paused {
		rd.paused = true
		d.stalled.add(d.c.now+pause, rd)
	}
}

// resume wakes the readers whose pause is over and returns when the next one is, 0 if none waits.
func (d *delivery) resume(now time.Duration) (next time.Duration) {
	for rd, ok := d.stalled.due(now); ok; rd, ok = d.stalled.due(now) {
		rd.paused = false
		d.wake(rd)
	}
	return d.stalled.next()
}

// earliest returns the earlier of two times of which 0 means none.
func earliest(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}
