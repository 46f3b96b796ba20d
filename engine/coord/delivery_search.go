package coord

import (
	"errors"
	"log/slog"

	"github.com/mortarmq/mortarmq/engine/deadletter"
	"github.com/mortarmq/mortarmq/engine/ledger"
	"github.com/mortarmq/mortarmq/wal"
)

// search looks in a group's dead-letter topic for the letters that an earlier start may have written: behind the sequence
// that each one's EXHAUSTED names. Nothing of the group is written before that is known.
func (d *delivery) search(g *groupDelivery) {
	b := &g.letters
	if b.next == 0 {
		b.next, b.last = b.searches[0].after+1, b.part.last
		for _, l := range b.searches {
			b.next = min(b.next, l.after+1)
		}
	}
	if b.next > b.last {
		for _, l := range b.searches {
			l.search = false
		}
		b.searches, b.next = nil, 0
		return
	}
	b.searching = true
	d.office.active++
	d.readLetters(b.part, b.next, wal.DefaultReadBytes, &coldRead{search: g})
}

// searched takes a stretch of the dead-letter topic.
func (d *delivery) searched(g *groupDelivery, chunk *wal.Chunk, err error) {
	b := &g.letters
	b.searching = false
	d.office.active--
	if err != nil || chunk == nil {
		b.pause = d.c.now + readPause
		if err != nil && !errors.Is(err, wal.ErrNoMemory) {
			d.rest(g, "the topic can't be read: "+err.Error())
			d.log.Debug("searching for dead letters", slog.Uint64("from", uint64(b.next)), slog.Any("err", err))
		}
		return
	}
	defer chunk.Release()
	b.next = max(b.next, chunk.Last()+1)
	var rec wal.Record
	for data := chunk.Bytes(); len(data) > 0; {
		data = data[wal.PeekRecord(data, &rec):]
		var e deadletter.Envelope
		if _, err := e.Decode(rec.Value); err != nil {
			continue
		}
		rd := d.reader(g.id, 0, e.Partition)
		if rd == nil || rd.part.topic != e.TopicID {
			continue
		}
		if l := rd.letters[ledger.Sequence(e.Sequence)]; l != nil && l.search && rec.Sequence > l.after {
			l.rd.cur.Drop(l.seq)
			d.closeLetter(l, 0)
		}
	}
}
