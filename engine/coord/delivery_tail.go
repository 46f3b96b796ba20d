package coord

import (
	"sort"

	"github.com/mortarmq/mortarmq/engine/ledger"
	"github.com/mortarmq/mortarmq/wal"
)

// tailRun is a run of consecutive records of a partition in a round that is still in memory. The runs of a partition
// follow each other without a gap.
type tailRun struct {
	round *wal.Round
	first wal.Sequence
	count uint32
	data  []byte
	index runIndex
}

// tail is what is in memory of one journal: its latest committed rounds, those with messages. It holds one reference on
// each.
type tail struct {
	rounds  deque[*wal.Round]
	written wal.RoundNumber
}

// partition is what delivery knows of a partition, whatever group reads it.
type partition struct {
	topic, id uint16
	journal   int
	// first is the oldest sequence that is stored, last the last committed one.
	first, last wal.Sequence
	runs        deque[tailRun]
	readers     []*reader
	letters     bool // it holds dead letters
	// Since the broker's start.
	produced, producedBytes uint64
	settled                 ledger.Counts // by groups that are deleted
}

// addTail takes in the messages of a committed round and wakes who waits for them.
func (d *delivery) addTail(journal int, r *wal.Round) {
	d.keepRound(journal, r, true, func(p *partition, run tailRun) {
		p.produced += uint64(run.count)
		p.producedBytes += uint64(len(run.data)) - uint64(run.count)*wal.RecordHeaderLen
		if p.letters && len(d.office.written) > 0 {
			var rec wal.Record
			for data := run.data; len(data) > 0; {
				data = data[wal.PeekRecord(data, &rec):]
				d.letterCommitted(p, &rec)
			}
		}
		for _, rd := range p.readers {
			if rd.cur.Committed(sequence(p.last)) {
				d.wake(rd)
			}
		}
	})
	d.trimTail()
}

// restoreTail takes in the messages of a round that was committed before this start and isn't written out.
func (d *delivery) restoreTail(journal int, r *wal.Round) {
	d.keepRound(journal, r, false, func(*partition, tailRun) {})
}

// keepRound makes the messages of a round the newest that are in memory, and calls added behind each of its entries. With
// fresh those that the partition has already are left out: a catch-up may have brought what the live stream brings again.
func (d *delivery) keepRound(journal int, r *wal.Round, fresh bool, added func(*partition, tailRun)) {
	kept := false
	for i := range r.Entries {
		e := &r.Entries[i]
		if e.Stream.Kind != wal.Messages {
			continue
		}
		p := d.partition(e.Stream.Topic, e.Stream.Partition)
		if p == nil {
			continue // the topic was deleted meanwhile
		}
		run := tailRun{round: r, first: e.First, count: e.Count, data: r.Data(e)}
		if fresh && !run.skipTo(p.last+1) {
			continue
		}
		if !kept {
			kept = true
			r.Retain()
			d.tails[journal].rounds.push(r)
			d.tailBytes += int64(r.Bytes())
		}
		p.runs.push(run)
		if p.first == 0 {
			p.first = run.first
		}
		p.last = e.Last()
		added(p, run)
	}
}

// skipTo drops the records before next, and reports whether any is left.
func (t *tailRun) skipTo(next wal.Sequence) bool {
	if t.first+wal.Sequence(t.count) <= next {
		return false
	}
	var rec wal.Record
	for t.first < next {
		t.data = t.data[wal.PeekRecord(t.data, &rec):]
		t.first++
		t.count--
	}
	return true
}

// follow implements deliverer.
func (d *delivery) follow(journal int, r *wal.Round) { d.addTail(journal, r) }

// trimTail drops the oldest rounds that are written out while more is kept than the budget (Options.TailBytes) allows.
// Others are kept beyond it: they are nowhere else to be read.
func (d *delivery) trimTail() {
	for d.tailBytes > d.tailBudget {
		oldest := -1
		for j := range d.tails {
			t := &d.tails[j]
			if t.rounds.len() > 0 && (*t.rounds.front()).Number <= t.written &&
				(oldest < 0 || t.rounds.len() > d.tails[oldest].rounds.len()) {
				oldest = j
			}
		}
		if oldest < 0 {
			return
		}
		d.dropRound(d.tails[oldest].rounds.pop())
	}
}

func (d *delivery) dropRound(r *wal.Round) {
	d.tailBytes -= int64(r.Bytes())
	for i := range r.Entries {
		e := &r.Entries[i]
		if e.Stream.Kind != wal.Messages {
			continue
		}
		// A partition's runs are in the order of the rounds, so its first one is this round's, if it has any of it.
		p := d.known(e.Stream.Topic, e.Stream.Partition)
		if p != nil && p.runs.len() > 0 && p.runs.front().round == r && p.runs.front().first <= e.Last() {
			p.runs.pop()
		}
	}
	r.Release()
}

// inTail tells whether the message is in memory.
func (p *partition) inTail(seq wal.Sequence) bool {
	return p.runs.len() > 0 && p.runs.front().first <= seq && seq <= p.last
}

// findRun returns the number of the run that holds seq, which is in memory.
func (p *partition) findRun(seq wal.Sequence) uint64 {
	n := sort.Search(p.runs.len(), func(i int) bool { return p.runs.at(p.runs.head+uint64(i)).first > seq })
	return p.runs.head + uint64(n) - 1
}

// partitionTable has partitions by topic and number; nil where nothing is known of one. It is looked at for each entry of each
// round, so it is no map.
type partitionTable [][]*partition

func (t *partitionTable) add(p *partition) {
	if n := int(p.topic) + 1 - len(*t); n > 0 {
		*t = append(*t, make([][]*partition, n)...)
	}
	parts := (*t)[p.topic]
	if n := int(p.id) + 1 - len(parts); n > 0 {
		parts = append(parts, make([]*partition, n)...)
		(*t)[p.topic] = parts
	}
	parts[p.id] = p
}

// forget drops the partitions of a topic.
func (t partitionTable) forget(topic uint16) {
	if int(topic) < len(t) {
		t[topic] = nil
	}
}

// known returns the partition if anything is known of it, nil otherwise.
func (d *delivery) known(topic, id uint16) *partition {
	if int(topic) < len(d.parts) {
		if parts := d.parts[topic]; int(id) < len(parts) {
			return parts[id]
		}
	}
	return nil
}

func (p *partition) addReader(rd *reader) {
	rd.place = len(p.readers)
	p.readers = append(p.readers, rd)
}

func (p *partition) removeReader(rd *reader) {
	last := len(p.readers) - 1
	p.readers[rd.place] = p.readers[last]
	p.readers[rd.place].place = rd.place
	p.readers[last] = nil
	p.readers = p.readers[:last]
}

// partition returns the partition, which is made on first use; nil if there is no such topic. While this node stands by it may
// not have heard of the topic yet: the metadata is in another log than the messages of some partitions. Then recovered decides.
func (d *delivery) partition(topic, id uint16) *partition {
	p := d.known(topic, id)
	if p == nil {
		t, ok := d.c.Registry().Topic(topic)
		if (!ok || id >= t.Partitions) && !d.c.standby {
			return nil
		}
		p = &partition{topic: topic, id: id, journal: d.c.placement(topic, id), letters: ok && isLetterTopic(t.Name)}
		d.parts.add(p)
	}
	return p
}
