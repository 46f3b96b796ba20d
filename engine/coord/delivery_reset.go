package coord

import (
	"fmt"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

const (
	// maxResetReads is how many partitions of a reset look for a time at once.
	maxResetReads = 8
	// maxResets is how many resets may be under way.
	maxResets = 64
)

// reset is a move of a group's cursors that is under way: first every new floor is found, then all cursors are moved, and
// when all moves are on record it is answered.
type reset struct {
	g         *groupDelivery
	to        protocol.Reset
	readers   []*reader
	positions []protocol.ResetPosition // as readers
	next      int                      // the first reader without a new floor, or a read for one
	reading   int
	moved     int // of readers, how many at their start are known to have their moves on record
	err       error
	done      func([]protocol.ResetPosition, error)
}

// reset implements deliverer.
func (d *delivery) reset(group uint16, to protocol.Reset, done func([]protocol.ResetPosition, error)) {
	g := d.groups[group]
	switch {
	case g == nil:
		done(nil, fmt.Errorf("the group is not served, see the broker's log: %w", protocol.CodeInternal))
		return
	case g.broadcast:
		done(nil, fmt.Errorf("a broadcast group has no positions of its own: each member begins where its SUB says: %w", protocol.CodeGroupExistsMismatch))
		return
	}
	readers := g.sets[0].readers
	if to.Partition != protocol.AnyPartition {
		if int(to.Partition) >= len(readers) {
			done(nil, fmt.Errorf("the topic has %d partitions, none is number %d: %w", len(readers), to.Partition, protocol.CodeUnknownPartition))
			return
		}
		readers = readers[to.Partition : to.Partition+1]
	}
	if d.resetting >= maxResets {
		done(nil, fmt.Errorf("%d resets are under way: try again later: %w", maxResets, protocol.CodeBackpressure))
		return
	}
	d.resetting++
	rs := &reset{g: g, to: to, readers: readers, done: func(p []protocol.ResetPosition, err error) {
		d.resetting--
		done(p, err)
	}}
	rs.positions = make([]protocol.ResetPosition, len(rs.readers))
	for i, rd := range rs.readers {
		if rd.ledger.err != nil {
			rs.done(nil, fmt.Errorf("the ledger of partition %d can't be trusted, see the broker's log: %w", rd.part.id, protocol.CodeInternal))
			return
		}
		rs.positions[i] = protocol.ResetPosition{Partition: rd.part.id, From: uint64(rd.cur.Floor())}
	}
	d.findFloors(rs)
}

// findFloors finds what is still missing of the new floors, and goes on when nothing is.
func (d *delivery) findFloors(rs *reset) {
	for rs.err == nil && rs.next < len(rs.readers) && rs.reading < maxResetReads {
		i := rs.next
		rs.next++
		p := rs.readers[i].part
		lowest := max(p.first, 1) - 1
		floor := lowest
		switch rs.to.To {
		case protocol.ResetEarliest:
		case protocol.ResetLatest:
			floor = p.last
		case protocol.ResetSequence:
			floor = min(max(wal.Sequence(max(rs.to.Value, 1)-1), lowest), p.last)
		case protocol.ResetTime:
			rs.reading++
			d.readTag++
			r := &coldRead{reset: rs, index: i}
			r.req = wal.ReadRequest{
				Stream:   wal.StreamID{Kind: wal.Messages, Topic: p.topic, Partition: p.id},
				MaxBytes: 1, ByTime: true, TimeMs: rs.to.Value, Done: d.deps.readDone, Tag: d.readTag,
			}
			d.reads[r.req.Tag] = r
			d.c.store.Read(p.journal, &r.req)
			continue
		}
		rs.positions[i].To = uint64(floor)
	}
	if rs.reading > 0 {
		return
	}
	switch {
	case rs.err != nil:
		rs.done(nil, rs.err)
	case d.groups[rs.g.id] != rs.g:
		rs.done(nil, errGroupGone)
	case rs.to.Options&protocol.ResetDryRun != 0:
		rs.done(rs.positions, nil)
	default:
		d.move(rs)
	}
}

var errGroupGone = fmt.Errorf("the group was deleted meanwhile: %w", protocol.CodeUnknownGroup)

// timeFound takes the answer of the disk to where a time begins in a partition.
func (d *delivery) timeFound(rs *reset, i int, chunk *wal.Chunk, err error) {
	rs.reading--
	p := rs.readers[i].part
	switch {
	case err != nil:
		rs.err = fmt.Errorf("partition %d can't be read, see the broker's log: %w: %w", p.id, err, protocol.CodeInternal)
	case chunk != nil:
		rs.positions[i].To = uint64(chunk.First - 1)
		chunk.Release()
	default:
		rs.positions[i].To = uint64(p.lastBefore(rs.to.Value))
	}
	d.findFloors(rs)
}

// lastBefore returns the sequence before the first message in memory that was stored at or after ms, else the last one.
func (p *partition) lastBefore(ms uint64) wal.Sequence {
	var rec wal.Record
	for n := p.runs.head; n != p.runs.tail; n++ {
		for data := p.runs.at(n).data; len(data) > 0; {
			if data = data[wal.PeekRecord(data, &rec):]; rec.TimestampMs >= ms {
				return rec.Sequence - 1
			}
		}
	}
	return p.last
}

// move queues the moves of all cursors.
func (d *delivery) move(rs *reset) {
	for i, rd := range rs.readers {
		d.abandon(rd)
		d.dropCold(rd)
		rd.reported, rd.sample = 0, sample{}
		rd.cur.Seek(sequence(wal.Sequence(rs.positions[i].To)))
	}
	d.resets = append(d.resets, rs)
}

// finishResets answers the resets whose moves are on record.
func (d *delivery) finishResets() {
	kept := d.resets[:0]
	for _, rs := range d.resets {
		switch {
		case d.groups[rs.g.id] != rs.g:
			rs.done(nil, errGroupGone)
		case rs.recorded():
			rs.done(rs.positions, nil)
		default:
			kept = append(kept, rs)
		}
	}
	clear(d.resets[len(kept):])
	d.resets = kept
}

func (rs *reset) recorded() bool {
	for ; rs.moved < len(rs.readers); rs.moved++ {
		if !rs.readers[rs.moved].cur.Recorded() {
			return false
		}
	}
	return true
}
