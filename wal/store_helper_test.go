package wal

import (
	"encoding/json"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

const testDataDir = "data"

// smallStore returns options for segments of a few blocks and a journal of small files.
func smallStore(pool *ring.Pool) OpenOptions {
	j := smallJournal(pool)
	return OpenOptions{
		Journal: j,
		Store: StoreOptions{
			Dir: testDataDir, SegmentMaxBytes: 32 << 10, Pool: pool, Logger: quietLog,
			Wall: func() uint64 { return 1_700_000_000_000 }, LogRollBytes: 8 << 10, DirectBytes: 16 << 10,
		},
	}
}

// memory is a Handler that remembers what it gets.
type memory struct {
	snapshots map[SnapshotKind]string
	positions map[SnapshotKind]uint64
	records   map[StreamID][]string
	replayed  map[StreamID][]Sequence
	reject    func(s StreamID, r *Record) error
}

func newMemory() *memory {
	return &memory{snapshots: map[SnapshotKind]string{}, positions: map[SnapshotKind]uint64{}, records: map[StreamID][]string{},
		replayed: map[StreamID][]Sequence{}}
}

func (m *memory) Snapshot(kind SnapshotKind, position uint64, data []byte) error {
	m.snapshots[kind], m.positions[kind] = string(data), position
	return nil
}

func (m *memory) Record(s StreamID, r *Record, _ bool) error {
	if m.reject != nil {
		if err := m.reject(s, r); err != nil {
			return err
		}
	}
	if s.Kind == Messages {
		m.replayed[s] = append(m.replayed[s], r.Sequence)
		return nil
	}
	m.records[s] = append(m.records[s], string(r.Value))
	return nil
}

// node is a journal with its store on one simulated disk, and what it acknowledged.
type node struct {
	t   testing.TB
	d   *simdisk.Disk
	j   *Journal
	s   *Store
	h   *memory
	rec *Recovery
	now time.Duration
	// acked holds the values of all committed records by stream, sealed also those on their way.
	acked, sealed map[StreamID][]string
	dedup         bool
	dropped       map[uint16]bool
}

func openNode(t testing.TB, d *simdisk.Disk, o OpenOptions) *node {
	t.Helper()
	n, err := tryNode(t, d, o)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func tryNode(t testing.TB, d *simdisk.Disk, o OpenOptions) (*node, error) {
	n := &node{t: t, d: d, h: newMemory(), acked: map[StreamID][]string{}, sealed: map[StreamID][]string{},
		dedup: true, dropped: map[uint16]bool{}}
	var err error
	if n.j, n.s, n.rec, err = Open(o, d, n.h); err != nil {
		return nil, err
	}
	n.j.OnFlushed(func(r *Round, err error) {
		if err != nil {
			r.Release()
			return
		}
		n.remember(r)
		if err := n.s.Add(r); err != nil {
			t.Error(err)
		}
	})
	n.s.OnDurable(func(upTo RoundNumber) { n.j.Trim(upTo) })
	n.s.OnSweepStart(func(upTo RoundNumber) {
		n.saveDedup()
	})
	n.j.Trim(n.s.Durable())
	return n, nil
}

// saveDedup saves what the producers' windows cover.
func (n *node) saveDedup() {
	covered := map[string]int{}
	for id, values := range n.acked {
		covered[id.String()] = len(values)
	}
	data, err := json.Marshal(covered)
	if err != nil {
		n.t.Fatal(err)
	}
	position := n.j.Flushed()
	if n.s.replicated {
		position = n.s.added.Round // what is flushed need not be committed
	}
	n.s.SaveSnapshot(SnapshotDedup, uint64(position), n.j.Epoch(), data)
}

// remember notes the records of a round that is committed.
func (n *node) remember(r *Round) {
	var rec Record
	for i := range r.Entries {
		e := &r.Entries[i]
		for b := r.Data(e); len(b) > 0; {
			b = b[PeekRecord(b, &rec):]
			n.acked[e.Stream] = append(n.acked[e.Stream], string(rec.Value))
		}
	}
}

// step lets the store work once.
func (n *node) step() bool {
	n.j.Step(n.now)
	n.s.Step(n.now)
	if n.d.InFlight() == 0 {
		return false
	}
	if err := n.d.WaitOne(); err != nil {
		n.t.Fatal(err)
	}
	return true
}

// settle lets the store work until it has nothing to do at the present time, letting the pauses of slices pass.
func (n *node) settle() {
	n.t.Helper()
	for range 1_000_000 {
		if n.step() {
			continue
		}
		if next := n.s.Step(n.now); next > n.now && next <= n.now+DefaultSlicePause {
			n.now = next
			continue
		}
		if n.d.InFlight() == 0 {
			return
		}
	}
	n.t.Fatal("the store doesn't settle")
}

// sweep makes everything durable.
func (n *node) sweep() {
	n.t.Helper()
	n.s.RequestSweep()
	n.settle()
	if err := n.s.Err(); err != nil {
		n.t.Fatal(err)
	}
}

// publish commits one round with a record of size value bytes per stream.
func (n *node) publish(size int, streams ...StreamID) {
	n.t.Helper()
	for _, id := range streams {
		n.append(id, size)
	}
	n.j.Seal()
	for n.j.InFlight() > 0 {
		if err := n.d.WaitOne(); err != nil {
			n.t.Fatal(err)
		}
	}
}

func (n *node) append(id StreamID, size int) {
	n.t.Helper()
	seq := Sequence(len(n.sealed[id])) + 1
	rec := testRecord(id, seq, size)
	for err := n.j.Append(id, &rec); err != nil; err = n.j.Append(id, &rec) {
		switch {
		case errors.Is(err, ErrRoundFull):
			n.j.Seal()
		case errors.Is(err, ErrJournalFull):
			n.now += time.Millisecond // the journal makes its files at a pace
			if n.j.CanSeal() {
				n.j.Seal()
			}
			n.s.RequestSweep()
		default:
			n.t.Fatalf("append: %v", err)
		}
		if n.step() {
			continue
		}
		if next := n.s.Step(n.now); next > n.now && next <= n.now+DefaultSlicePause {
			n.now = next
		} else if n.d.InFlight() == 0 {
			n.t.Fatalf("append: %v, and nothing is under way; store: %v", err, n.s.Err())
		}
	}
	n.sealed[id] = append(n.sealed[id], string(rec.Value))
}

// testRecord returns the record that tests store at a sequence.
func testRecord(id StreamID, seq Sequence, size int) Record {
	return Record{
		Sequence: seq, Key: []byte("k"), Value: testValue(1, id, seq, size), TimestampMs: testTime(seq),
		ProducerID: 7, ProducerSeq: uint64(seq), LeaderEpoch: 1,
	}
}

func testTime(seq Sequence) uint64 { return 1_600_000_000_000 + 10*uint64(seq/2) }

// read reads one chunk.
func (n *node) read(req ReadRequest) (*Chunk, error) {
	n.t.Helper()
	done := false
	req.Done = func(*ReadRequest) { done = true }
	n.s.Read(&req)
	for range 100_000 {
		if done {
			return req.Chunk, req.Err
		}
		if !n.step() && !done {
			n.t.Fatal("a read never ends")
		}
	}
	n.t.Fatal("a read takes forever")
	return nil, nil
}

// readAll reads a partition's files from a sequence on, in chunks of at most max bytes.
func (n *node) readAll(id StreamID, from Sequence, max int) ([]string, error) {
	n.t.Helper()
	var values []string
	for {
		c, err := n.read(ReadRequest{Stream: id, From: from, MaxBytes: max})
		if err != nil || c == nil {
			return values, err
		}
		if c.First != from {
			n.t.Fatalf("asked for sequence %d, the chunk begins with %d", from, c.First)
		}
		records := 0
		for b := c.Bytes(); len(b) > 0; records++ {
			var r Record
			k, err := DecodeRecord(b, &r)
			if err != nil || r.Sequence != from {
				n.t.Fatalf("record %d of a chunk, expected sequence %d, is %d: %v", records, from, r.Sequence, err)
			}
			values = append(values, string(r.Value))
			b = b[k:]
			from++
		}
		if records != c.Count || c.Last() != from-1 {
			n.t.Fatalf("chunk says %d records to %d, has %d to %d", c.Count, c.Last(), records, from-1)
		}
		c.Release()
	}
}

// check reads every partition back and compares it with what was acknowledged.
func (n *node) check() {
	n.t.Helper()
	for id, want := range n.acked {
		if id.Kind != Messages || n.dropped[id.Topic] {
			continue
		}
		got, err := n.readAll(id, 1, 0)
		if err != nil {
			n.t.Fatalf("%v: %v", id, err)
		}
		if !slices.Equal(got, want) {
			n.t.Fatalf("%v: %d records read, %d acknowledged", id, len(got), len(want))
		}
	}
}

// close ends the node cleanly.
func (n *node) close() {
	n.t.Helper()
	n.closeStore()
	n.closeJournal()
}

func (n *node) closeStore() {
	n.t.Helper()
	n.saveDedup()
	n.s.StartClose()
	for range 1_000_000 {
		n.s.Step(n.now)
		if n.s.Closed() {
			return
		}
		if n.d.InFlight() > 0 {
			if err := n.d.WaitOne(); err != nil {
				n.t.Fatal(err)
			}
		}
	}
	n.t.Fatal("the store doesn't close")
}

func (n *node) closeJournal() {
	n.t.Helper()
	if err := n.j.Close(n.d); err != nil {
		n.t.Fatal(err)
	}
}

// kill forgets the node as if its process had died, giving its memory back.
func (n *node) kill() {
	n.j.releaseMemory()
	n.s.discardAll()
	n.s.freeBuffers()
}

// reopen opens the disk again and carries over what was acknowledged.
func (n *node) reopen(d *simdisk.Disk, o OpenOptions) *node {
	n.t.Helper()
	m := openNode(n.t, d, o)
	for id, values := range n.acked {
		m.acked[id] = slices.Clone(values)
		m.sealed[id] = slices.Clone(values)
	}
	for t := range n.dropped {
		m.dropped[t] = true
	}
	return m
}

func segmentPath(id StreamID, base Sequence) string {
	return streamDir(testDataDir, 0, id) + "/" + logName(id.Kind, base, false)
}

var (
	p0 = StreamID{Kind: Messages, Topic: 1, Partition: 0}
	p1 = StreamID{Kind: Messages, Topic: 1, Partition: 1}
	p2 = StreamID{Kind: Messages, Topic: 2, Partition: 0}
	le = StreamID{Kind: Ledger}
	md = StreamID{Kind: Metadata}
)
