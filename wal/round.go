package wal

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/mortarmq/mortarmq/ring"
)

// Round is a batch of entries that became durable together, by one write and one flush. It is immutable once sealed and
// may be read from any goroutine that holds a reference; Release of the last one gives its memory back. Everything
// reached through it (Entries, Data, records peeked from Data) is valid only that long.
type Round struct {
	Number RoundNumber
	Epoch  Epoch
	// Start tells the round that opened an epoch. It has no entries.
	Start bool
	// Flushed and Committed are the highest rounds known durable, and known committed, when this one was sealed.
	Flushed, Committed RoundNumber
	// Entries are the runs of records, in the order of their appends. In a replicated log the last one is the round's
	// position, of the stream Replica.
	Entries []Entry

	// prev and sum are the checksums of the round before and of this one: the chain.
	prev, sum uint64

	slab *ring.Slab
	// buf is the memory reserved for the round inside slab while it gathers; buf[:size] is the encoded round and
	// buf[:padded] what goes to the device once it is sealed.
	buf          []byte
	size, padded int
	records      int
	// position is the round's place in its replicated log, if stamped says so.
	position LogPosition
	stamped  bool

	refs atomic.Int32
	pool *roundPool

	// The write at the device; see submit and written in journal_append.go.
	op      ring.Op
	journal *Journal
	file    *journalFile
	landed  bool
}

// Data returns the encoded records of one of the round's entries, back to back. PeekRecord reads them: they were
// encoded by this process or checked when they were read.
func (r *Round) Data(e *Entry) []byte {
	end := e.Off + e.Len
	return r.buf[e.Off:end:end]
}

// Bytes returns how much buffer memory in bytes the round accounts for: its own padded length. Small rounds share a slab,
// which is freed with the last of them.
func (r *Round) Bytes() int { return r.padded }

// Records returns the number of records in all entries, without the position's.
func (r *Round) Records() int { return r.records }

// Retain adds a reference. The caller must hold one already.
func (r *Round) Retain() {
	if r.refs.Add(1) <= 1 {
		panic("wal: Retain of a round that was released")
	}
}

// Release drops a reference. After the last one neither the round nor anything reached through it may be touched.
func (r *Round) Release() {
	switch refs := r.refs.Add(-1); {
	case refs == 0:
		r.pool.put(r)
	case refs < 0:
		panic("wal: round released more often than retained")
	}
}

// maxIdleRounds bounds how many unused Round values a pool keeps.
const maxIdleRounds = 4096

// roundPool recycles Round values with their entry slices. Rounds are released on whatever goroutine used them last.
type roundPool struct {
	mu   sync.Mutex
	free []*Round
}

// get returns an empty round with one reference and no memory.
func (p *roundPool) get() *Round {
	p.mu.Lock()
	defer p.mu.Unlock()
	var r *Round
	if n := len(p.free); n > 0 {
		r = p.free[n-1]
		p.free[n-1] = nil
		p.free = p.free[:n-1]
	} else {
		r = &Round{pool: p}
		r.op.Done = r.written
	}
	r.refs.Store(1)
	return r
}

func (p *roundPool) put(r *Round) {
	if r.slab != nil {
		r.slab.Release()
	}
	r.Number, r.Epoch, r.Start, r.Flushed, r.Committed = 0, 0, false, 0, 0
	r.Entries = r.Entries[:0]
	r.prev, r.sum = 0, 0
	r.slab, r.buf, r.size, r.padded, r.records = nil, nil, 0, 0, 0
	r.position, r.stamped = LogPosition{}, false
	r.op.Buf, r.op.Err, r.journal, r.file, r.landed = nil, nil, nil, nil, false
	p.mu.Lock()
	if len(p.free) < maxIdleRounds {
		p.free = append(p.free, r)
	}
	p.mu.Unlock()
}

// TestRun is one run of records of NewTestRound.
type TestRun struct {
	Stream StreamID
	// Records have consecutive sequences.
	Records []Record
}

// NewTestRound returns a sealed round as a journal would deliver it, with memory from pool and one reference, for the
// tests of what consumes rounds. It panics where the pool has no memory.
func NewTestRound(pool *ring.Pool, epoch Epoch, number RoundNumber, runs ...TestRun) *Round {
	return newTestRound(pool, epoch, number, nil, runs)
}

// NewStampedTestRound is NewTestRound for a round of a replicated log. It panics for a position that can't be.
func NewStampedTestRound(pool *ring.Pool, epoch Epoch, number RoundNumber, position LogPosition, runs ...TestRun) *Round {
	if err := position.check(); err != nil {
		panic(fmt.Sprintf("wal: a test's position %+v: %v", position, err))
	}
	return newTestRound(pool, epoch, number, &position, runs)
}

func newTestRound(pool *ring.Pool, epoch Epoch, number RoundNumber, position *LogPosition, runs []TestRun) *Round {
	size := roundHeaderLen + stampLen
	for _, run := range runs {
		size += entryHeaderLen
		for i := range run.Records {
			size += RecordSize(len(run.Records[i].Key), len(run.Records[i].Value))
		}
	}
	r := (&roundPool{}).get()
	r.slab = pool.Get(blockAlign(size))
	if r.slab == nil {
		panic("wal: the test's pool has no memory for the round")
	}
	r.buf = r.slab.Bytes()[:blockAlign(size)]
	r.open()
	for _, run := range runs {
		for i := range run.Records {
			r.append(run.Stream, &run.Records[i])
		}
	}
	if position != nil {
		r.stamp(position)
	}
	r.seal(roundSeal{number: number, epoch: epoch, flushed: number - 1, committed: number - 1})
	return r
}
