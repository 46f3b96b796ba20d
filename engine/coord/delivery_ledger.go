package coord

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/mortarmq/mortarmq/engine/ledger"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

const (
	// maxProposals is how many ledger records of a journal may be proposed and not committed; what happens meanwhile
	// gathers for the next one, so the batches grow with the load.
	maxProposals = 2
	// proposePause is how long a record waits that the journal did not take.
	proposePause = 10 * time.Millisecond
	// Deliveries alone are put on record when they are deliverDelay old or deliverRuns runs: nobody waits for that, and a
	// round of their own would delay the publishes and ACKs that come next. With an ACK or NACK they go at once.
	deliverDelay = 20 * time.Millisecond
	deliverRuns  = 32
	// A cursor checkpoint is written when this many bytes, or records, have been folded since the last one; later where the
	// checkpoint is large, so that writing it costs no more than what it saves: see checkpointDue.
	checkpointBytes   = 16 << 20
	checkpointRecords = 1 << 16
	// checkpointPerRecord is the bytes of a checkpoint for which one record more is waited.
	checkpointPerRecord = 256
)

// ledgerLog is the ledger of one journal's partitions: the pure book, and the way of its records through the journal.
type ledgerLog struct {
	journal int
	book    *ledger.Book
	fx      ledger.Effects
	// err is the reason why the ledger can't be trusted any more: a committed record that it can't fold.
	err error

	buf      []byte // the record that is being proposed
	held     bool   // buf was not taken and is proposed again
	refused  bool   // and that was logged
	again    time.Duration
	proposal uint64
	// lazyUntil is when deliveries that wait for company are put on record without it; 0: none wait.
	lazyUntil time.Duration
	// answers wait for their records, in the order of the events: first those of the records in proposed, each with its
	// number of answers, then gathered ones that have no record yet.
	answers  deque[answer]
	proposed deque[proposed]
	gathered int

	position     wal.Sequence // the last record folded
	sinceBytes   int          // folded since the last checkpoint
	sinceRecords int
	snapshotSize int
}

// proposed is a record on its way.
type proposed struct {
	id      uint64
	answers int
}

// answer is an ACK or NACK that is answered when its record has committed.
type answer struct {
	client Client
	req    uint64
	op     protocol.Op
	// since is, for an ACK, a sample: when the message was published, in Unix milliseconds; 0 = none. For a NACK of nacked's
	// partition it is the sequence.
	since  uint64
	nacked *reader
}

func newLedgerLog(journal int, seed uint64, room *ledger.Room) *ledgerLog {
	return &ledgerLog{journal: journal, book: ledger.NewBook(rand.NewPCG(seed, uint64(journal)), room)}
}

// later has the client answered when everything that is queued now has committed.
func (l *ledgerLog) later(a answer) {
	l.answers.push(a)
	l.gathered++
}

// propose sends what has gathered to the journal.
func (d *delivery) propose(l *ledgerLog) {
	for l.err == nil && l.proposed.len() < maxProposals {
		if !l.held {
			if l.putOff(d.c.now) {
				return
			}
			if l.buf = l.book.AppendRecord(l.buf[:0], d.c.wallMs); len(l.buf) == 0 {
				d.settle(l, l.gathered, 0) // their events were withdrawn by a move of the cursor
				l.gathered = 0
				return
			}
		}
		if l.held = false; l.again > d.c.now {
			l.held = true
			return
		}
		d.c.proposed = true
		if err := d.c.log.ProposeLedger(l.journal, l.proposal+1, l.buf); err != nil {
			// The events are in the record now, so it is kept. A journal that has failed for good ends the broker.
			if !l.refused {
				d.log.Warn("the journal does not take a ledger record, it is tried again", slog.Int("journal", l.journal), slog.Any("err", err))
			}
			l.held, l.refused, l.again = true, true, d.c.now+proposePause
			return
		}
		l.refused = false
		l.proposal++
		p := proposed{id: l.proposal}
		if !l.book.Pending() {
			p.answers, l.gathered = l.gathered, 0
		}
		l.proposed.push(p)
	}
}

// putOff tells whether what is queued can wait for something that can't, see deliverDelay.
func (l *ledgerLog) putOff(now time.Duration) bool {
	if !l.book.Pending() || l.gathered > 0 || !l.book.OnlyDelivers(deliverRuns) {
		l.lazyUntil = 0
		return false
	}
	if l.lazyUntil == 0 {
		l.lazyUntil = now + deliverDelay
	}
	if now >= l.lazyUntil {
		l.lazyUntil = 0
		return false
	}
	return true
}

// fold applies the ledger entries of a committed round and answers what waited for them.
func (d *delivery) fold(journal int, r *wal.Round) {
	l := d.ledgers[journal]
	for i := range r.Entries {
		e := &r.Entries[i]
		if e.Stream.Kind != wal.Ledger {
			continue
		}
		var rec wal.Record
		for data := r.Data(e); len(data) > 0; {
			data = data[wal.PeekRecord(data, &rec):]
			d.foldRecord(l, &rec)
		}
	}
}

func (d *delivery) foldRecord(l *ledgerLog, rec *wal.Record) {
	if l.err != nil {
		return
	}
	l.position = rec.Sequence
	l.sinceRecords++
	l.sinceBytes += len(rec.Value)
	if err := l.book.Apply(rec.Value, d.c.now, &l.fx); err != nil {
		d.distrust(l, fmt.Errorf("ledger record %d of journal %d: %w", rec.Sequence, l.journal, err))
		return
	}
	d.effects(l)
	if l.proposed.len() > 0 && l.proposed.front().id == rec.ProducerSeq {
		d.settle(l, l.proposed.pop().answers, 0)
	}
}

// distrust stops the deliveries of a journal's partitions: going on could acknowledge what is not on record.
func (d *delivery) distrust(l *ledgerLog, err error) {
	l.err = err
	d.log.Error("the delivery ledger can't be trusted, its partitions are not delivered any more: keep the files, restart the broker, and report this", slog.Any("err", err))
	d.settle(l, l.answers.len(), protocol.CodeInternal)
	l.gathered = 0
}

// settle answers the n oldest: with OK, or with code.
func (d *delivery) settle(l *ledgerLog, n int, code protocol.ErrorCode) {
	for range n {
		a := l.answers.pop()
		if a.nacked == nil || code != 0 {
			d.answerNow(&a, code, "")
			if a.nacked == nil && a.since != 0 && code == 0 {
				d.latency.record(d.c.wallMs, a.since)
			}
			continue
		}
		if code, text, hold := d.endOfMessage(&a); !hold {
			d.answerNow(&a, code, text)
		}
	}
}

// answerNow answers an ACK or NACK: with OK, or with code.
func (d *delivery) answerNow(a *answer, code protocol.ErrorCode, text string) {
	if code != 0 {
		d.c.answerErr(a.client, a.req, a.op, code, text)
		return
	}
	d.c.answerOK(a.client, a.req, a.op)
}

// effects carries out what the ledger asks for.
func (d *delivery) effects(l *ledgerLog) {
	for _, cur := range l.fx.Ready {
		if rd := d.readerOf(cur.Key()); rd != nil {
			d.wake(rd)
		}
	}
	for i := range l.fx.Exhausted {
		d.exhausted(&l.fx.Exhausted[i])
	}
	for i := range l.fx.Parked {
		d.parked(&l.fx.Parked[i])
	}
	l.fx.Reset()
}

// checkpointDue bounds what a start has to replay: the records since the last checkpoint have at most as many bytes as that
// had, or checkpointBytes.
func (l *ledgerLog) checkpointDue() bool {
	return l.sinceBytes >= max(checkpointBytes, l.snapshotSize) ||
		l.sinceRecords >= max(checkpointRecords, l.snapshotSize/checkpointPerRecord)
}

// checkpoint writes the cursors down, so that the records before need not be read again.
func (d *delivery) checkpoint(l *ledgerLog) {
	if l.err != nil || d.c.quarantined != "" || d.c.silenced[l.journal] {
		return
	}
	data := l.book.AppendSnapshot(make([]byte, 0, l.snapshotSize+l.snapshotSize/8), d.c.now, d.c.wallMs)
	l.snapshotSize = len(data)
	d.c.store.SaveSnapshot(l.journal, wal.SnapshotCursors, uint64(l.position), data)
	l.sinceBytes, l.sinceRecords = 0, 0
}

// compact implements deliverer.
func (d *delivery) compact() {
	for _, l := range d.ledgers {
		if l.checkpointDue() {
			d.checkpoint(l)
		}
	}
}

// restore implements deliverer.
func (d *delivery) restore(journal int, position uint64, snapshot []byte) error {
	l := d.ledgers[journal]
	if err := l.book.Load(snapshot); err != nil {
		return fmt.Errorf("cursor checkpoint of journal %d at ledger record %d: %w", journal, position, err)
	}
	l.position = wal.Sequence(position)
	l.snapshotSize = len(snapshot)
	return nil
}

// replay implements deliverer.
func (d *delivery) replay(journal int, r *wal.Record) error {
	l := d.ledgers[journal]
	if r.Sequence <= l.position {
		return nil
	}
	if err := l.book.Apply(r.Value, 0, &l.fx); err != nil {
		return fmt.Errorf("ledger record %d of journal %d: %w", r.Sequence, journal, err)
	}
	l.fx.Reset()
	l.position = r.Sequence
	l.sinceRecords++
	l.sinceBytes += len(r.Value)
	return nil
}
