package wal

import (
	"errors"
	"fmt"
	"path/filepath"
	"sort"
	"time"
)

// run is a stretch of committed records that waits to be written. It holds a reference to its round.
type run struct {
	round *Round
	data  []byte
	first Sequence
	last  Sequence
	// pos is how much of data is written already.
	pos int
	// roll says that the records don't follow the ones before: they begin a new file.
	roll bool
}

// stream is one stream of records and its files.
type stream struct {
	id  StreamID
	dir string

	// runs[head:] wait to be written, pending bytes in all; next is the sequence after them.
	runs    []run
	head    int
	pending int64
	next    Sequence

	// segs are the stream's files by base; the last one, active, is written at off with the record wnext. off is 0
	// where it has no header yet. index describes it.
	segs   []*segment
	active *segment
	off    int64
	wnext  Sequence
	index  indexBuilder
	// lastMs is the timestamp of the record before wnext.
	lastMs uint64
	// cut says that the active file was found at start: what it holds behind cutAt is of before a crash. The next
	// record goes to off, the block boundary behind.
	cut   bool
	cutAt int64
	// indexed says that there is an index file for the active file as it was found.
	indexed bool
	// stale are files found at start that no checkpoint knows; the journal has what they hold.
	stale []Sequence
	// staleActive says the same of delivery.mql, staleMQC that the partition's checkpoint is of before it began anew.
	staleActive bool
	staleMQC    bool

	queued   bool // in Store.dirtyStreams
	unsealed bool // in Store.unsealed
	inPass   bool
	busy     bool // opening, rolling
	// advancing says that Store.advance is at work on the stream.
	advancing bool
	// held is the active file while it is kept open for the pass.
	held     *segment
	inflight int // writes at the disk

	// readNext is the record behind the last completed write, readSeg and readOff its place: so far the files can be
	// read.
	readNext Sequence
	readSeg  *segment
	readOff  int64
	// readFrom is where this start went on in the file that was the newest then.
	readFrom int64
	// readAt is when the files were read last, if ever.
	readAt  time.Duration
	wasRead bool
	// settling are loads of indexes that wait for writes to end.
	settling []*indexLoad

	// sealed is what the next checkpoint table says, saved what the last one that is durable said.
	sealed, saved checkpoint
	// mqc is the Next of the last MMQC published or queued.
	mqc Sequence

	// first is the stream's first record: 1, but for a partition that began anew, see Store.Skip.
	first Sequence
	// anew says that the checkpoint table names first: a start could not tell otherwise, or would take files of before the
	// partition began anew for its own.
	anew bool
	// rolls says that the next record begins a new file.
	rolls bool
	// restarting: records are passed over, see Store.Reset. passed is the newest round that had some.
	restarting bool
	passed     RoundNumber

	dirMade bool
	dropped bool
	jobs    int // files of the stream being published
	// bad is why the stream's files aren't read any more, report the file that says so or is going to.
	bad    error
	report string
}

// streamTable finds streams: those of messages by topic and partition, since each entry of each round looks for one.
type streamTable struct {
	messages [][]*stream
	others   map[StreamID]*stream
}

func newStreamTable() streamTable { return streamTable{others: make(map[StreamID]*stream)} }

// get returns a stream, nil if there is none.
func (t *streamTable) get(id StreamID) *stream {
	if id.Kind != Messages {
		return t.others[id]
	}
	if int(id.Topic) < len(t.messages) {
		if parts := t.messages[id.Topic]; int(id.Partition) < len(parts) {
			return parts[id.Partition]
		}
	}
	return nil
}

func (t *streamTable) put(st *stream) {
	id := st.id
	if id.Kind != Messages {
		t.others[id] = st
		return
	}
	if n := int(id.Topic) + 1 - len(t.messages); n > 0 {
		t.messages = append(t.messages, make([][]*stream, n)...)
	}
	parts := t.messages[id.Topic]
	if n := int(id.Partition) + 1 - len(parts); n > 0 {
		parts = append(parts, make([]*stream, n)...)
		t.messages[id.Topic] = parts
	}
	parts[id.Partition] = st
}

func (t *streamTable) remove(id StreamID) {
	switch {
	case id.Kind != Messages:
		delete(t.others, id)
	case t.get(id) != nil:
		t.messages[id.Topic][id.Partition] = nil
	}
}

func newStream(s *Store, id StreamID) *stream {
	st := &stream{id: id, dir: streamDir(s.o.Dir, s.o.Journal, id), next: firstSequence, first: firstSequence}
	s.streams.put(st)
	s.order = append(s.order, st)
	return st
}

// firstSequence is that of a stream's first record. Segments are never removed from the front, so that it is the oldest
// record of every partition, too, but for those that began anew; a partition that has lost it says so when it is read.
const firstSequence Sequence = 1

// oldest returns the sequence of the oldest record that there is, or should be.
func (st *stream) oldest() Sequence {
	switch {
	case st.id.Kind == Messages:
		return st.first
	case len(st.segs) > 0:
		return st.segs[0].base
	default:
		return st.next
	}
}

// segmentOf returns the index in segs of the file that holds seq, or -1.
func (st *stream) segmentOf(seq Sequence) int {
	return sort.Search(len(st.segs), func(i int) bool { return st.segs[i].base > seq }) - 1
}

// path returns the path of one of the stream's files.
func (st *stream) path(seg *segment) string {
	return filepath.Join(st.dir, logName(st.id.Kind, seg.base, seg == st.active))
}

var errGap = errors.New("records before this one are missing")

// Add takes over one reference to a committed round. Rounds come in the order of their numbers; those left out hold
// nothing that is committed. The records are copied to write buffers and the round released during a later write-out.
// Records that a stream has already are passed over: a follower that catches up gets some of them twice.
//
// The error is one about records that are missing before some of the round's: those were not taken and the round doesn't
// count, so that nothing is forgotten that the journal has. Whoever fills a store from elsewhere starts over then.
func (s *Store) Add(r *Round) error {
	defer r.Release()
	for i := range r.Entries {
		if err := s.addEntry(r, &r.Entries[i]); err != nil {
			return err
		}
	}
	log := s.added.Log
	if r.position.Point.Index > 0 {
		log = r.position.Point
	}
	s.added = journalPoint{Epoch: r.Epoch, Round: r.Number, Commit: max(s.added.Commit, r.Number), Log: log}
	return nil
}

func (s *Store) addEntry(r *Round, e *Entry) error {
	if e.Stream.Kind == Replica || e.Stream.Kind == Metadata && s.noMetadata {
		return nil
	}
	st := s.streams.get(e.Stream)
	if st == nil {
		if _, gone := s.dropped[e.Stream.Topic]; gone && e.Stream.Kind == Messages {
			return nil
		}
		st = newStream(s, e.Stream)
	}
	if st.restarting {
		st.passed = r.Number
		return nil
	}
	data, first := r.Data(e), e.First
	if first > st.next && s.replicated {
		st.jump(s.snaps.newest(st.id.Kind)) // a snapshot that was installed has what is missing
	}
	roll := st.rolls
	switch {
	case e.Last() < st.next:
		return nil
	case first < st.next:
		data = skipRecords(data, int(st.next-first))
		first = st.next
	case first > st.next:
		gap := &CorruptionError{Path: st.dir, Stream: st.id, Sequence: st.next, Round: r.Number,
			Cause: fmt.Errorf("%w: the journal goes on with sequence %d", errGap, first)}
		if !s.recovering {
			return gap
		}
		// The journal was trimmed although the records before had not reached their file, or that file was lost. What
		// is here is kept in a file of its own.
		st.abandonActive()
		s.quarantine(st, gap)
		roll = true
	}
	r.Retain()
	if st.head == len(st.runs) {
		st.runs, st.head = st.runs[:0], 0
	}
	st.rolls = false
	st.runs = append(st.runs, run{round: r, data: data, first: first, last: e.Last(), roll: roll})
	st.next = e.Last() + 1
	if s.pending == 0 {
		s.oldest = s.now
	}
	s.pending += int64(len(data))
	st.pending += int64(len(data))
	if !st.queued {
		st.queued = true
		s.dirtyStreams = append(s.dirtyStreams, st)
	}
	return nil
}

// abandonActive leaves the newest file as it was found at start; what follows goes to another one.
func (st *stream) abandonActive() {
	if st.cut {
		st.active, st.cut, st.off = nil, false, 0
	}
}

// skipRecords returns data without its first n records.
func skipRecords(data []byte, n int) []byte {
	var r Record
	for range n {
		data = data[PeekRecord(data, &r):]
	}
	return data
}

// discard forgets what waits to be written.
func (s *Store) discard(st *stream) {
	for i := st.head; i < len(st.runs); i++ {
		r := &st.runs[i]
		s.pending -= int64(len(r.data) - r.pos)
		r.round.Release()
		*r = run{}
	}
	st.runs, st.head, st.pending = st.runs[:0], 0, 0
}
