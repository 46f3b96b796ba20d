package coord

import (
	"errors"
	"log/slog"
	"strings"
	"time"

	"github.com/mortarmq/mortarmq/engine/deadletter"
	"github.com/mortarmq/mortarmq/engine/ledger"
	"github.com/mortarmq/mortarmq/internal/mutant"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// A message that is out of attempts, or was rejected, moves to its group's dead-letter topic in three steps, each of which
// is on record before the next one begins:
//
//	EXHAUSTED   in the ledger, with the last sequence of the dead-letter topic
//	the letter  a record of the dead-letter topic, behind that sequence
//	DROP        in the ledger: the message is done
//
// Wherever the broker dies in between, the ledger tells the next start what is left to do, and for a message that is
// EXHAUSTED it looks for the letter behind that sequence before it writes one: so there is exactly one. What can't be
// written stays where it is, open and undelivered, and only the writing is tried again.

// Bounds of the work on dead letters.
const (
	// maxActiveLetters is how many messages may be between two of the steps; the others wait for their turn.
	maxActiveLetters = 64
	// letterBudget is how many bytes of letters may be proposed and not committed; a letter beyond it waits, if it is not
	// the only one.
	letterBudget = 8 << 20
	// letterPause is how long a group's letters rest after one was refused. It doubles up to maxLetterPause.
	letterPause    = time.Second
	maxLetterPause = 30 * time.Second
)

// Texts of the answers to a NACK that ended a message. They keep to what a client may know.
const (
	textNoLetters = "the group's dead-letter topic can't be written at the moment: the message is kept and is not delivered again, its letter is tried again"
	textLoop      = "the message is a dead letter already: it is counted as dropped and stays where it is"
)

type letterState uint8

const (
	letterQueued  letterState = iota // in its group's queue, or in stuckLetters
	letterParking                    // its EXHAUSTED is queued or proposed
	letterReading                    // the message is being read from disk
	letterWritten                    // the letter is proposed
	letterOver
)

// letter is a message on its way to the dead-letter topic.
type letter struct {
	rd       *reader
	seq      ledger.Sequence
	failures int
	reason   ledger.Reason
	endedMs  uint64
	state    letterState
	// after is the end of the dead-letter topic before the letter, once EXHAUSTED is on record. search says that it was
	// found by recovery: the letter may be there already.
	after    wal.Sequence
	search   bool
	proposal uint64
	bytes    int64
	// waiting are the NACKs that are answered when the message is in the dead-letter topic, or can't get there.
	waiting []answer
}

// letterPlace names a letter by what is stored: the dead-letter topic and the message.
type letterPlace struct {
	letters, topic, partition uint16
	seq                       uint64
}

func (l *letter) place() letterPlace {
	return letterPlace{l.rd.group.letters.part.topic, l.rd.part.topic, l.rd.part.id, uint64(l.seq)}
}

// letterBox is a group's way to its dead-letter topic.
type letterBox struct {
	name    string
	part    *partition // nil until the topic is known to exist
	opening bool       // its creation is under way
	queue   deque[*letter]
	listed  bool // in delivery.lettering
	// pause is when the next letter may be tried, backoff how long the last rest was. down says that the last try failed.
	pause, backoff time.Duration
	down           bool
	refusals       uint64
	// searches are the letters in the queue that are to be looked for; next and last say where.
	searches   []*letter
	searching  bool
	next, last wal.Sequence
}

// letterOffice is delivery's state of all letters.
type letterOffice struct {
	// open counts the letters from the moment their messages ended until they are stored: those in reader.letters.
	open      int
	written   map[letterPlace]*letter
	active    int
	bytes     int64
	proposal  uint64
	lettering []*groupDelivery // groups with letters in their queues
	served    []*groupDelivery // scratch
	stuck     agenda[*letter]  // their messages can't be read at the moment
	loops     uint64
}

func newLetterOffice() letterOffice {
	return letterOffice{written: make(map[letterPlace]*letter)}
}

// isLetterTopic tells whether a topic of this name holds dead letters.
func isLetterTopic(name string) bool { return strings.HasPrefix(name, protocol.DLQPrefix) }

// exhausted takes a message that is out of attempts or was rejected.
func (d *delivery) exhausted(e *ledger.Exhausted) {
	rd := d.readerOf(e.Cursor.Key())
	if rd == nil {
		return
	}
	if rd.group.broadcast {
		// The other members have it, and there is no second attempt: nobody is served by a letter for each of them.
		e.Cursor.Drop(e.Sequence)
		return
	}
	if rd.part.letters {
		// A dead letter that nobody wants either: another letter of it would only go round in circles.
		if e.Cursor.Drop(e.Sequence) {
			if d.office.loops++; d.office.loops&(d.office.loops-1) == 0 {
				d.log.Warn("a dead letter was given up again; it stays in its topic", slog.Int("group", int(rd.group.id)),
					slog.Int("topic", int(rd.part.topic)), slog.Uint64("sequence", uint64(e.Sequence)), slog.Uint64("such_messages", d.office.loops))
			}
		}
		return
	}
	if rd.letters[e.Sequence] != nil {
		return // the cursor was set back while the letter was on its way, which ends this message as well
	}
	l := &letter{rd: rd, seq: e.Sequence, failures: e.Failures, reason: e.Reason, endedMs: d.c.wallMs}
	d.openLetter(l)
	d.queueLetter(l)
}

// parked takes a message whose EXHAUSTED is on record: on the leader that has proposed it the letter follows, a start
// looks for it first.
func (d *delivery) parked(p *ledger.Parked) {
	rd := d.readerOf(p.Cursor.Key())
	if rd == nil || !p.Cursor.Recorded() {
		return
	}
	if l := rd.letters[p.Sequence]; l != nil {
		l.after = wal.Sequence(p.Letters)
		d.writeLetter(l)
		return
	}
	l := &letter{
		rd: rd, seq: p.Sequence, failures: p.Failures, reason: p.Reason, endedMs: d.c.wallMs,
		after: wal.Sequence(p.Letters), search: true,
	}
	d.openLetter(l)
	if !mutant.Is("letter-written-twice") {
		rd.group.letters.searches = append(rd.group.letters.searches, l)
	}
	d.queueLetter(l)
}

func (d *delivery) openLetter(l *letter) {
	if l.rd.letters == nil {
		l.rd.letters = make(map[ledger.Sequence]*letter)
	}
	l.rd.letters[l.seq] = l
	d.office.open++
	d.log.Debug("a message moves to its dead-letter topic")
}

func (d *delivery) queueLetter(l *letter) {
	l.state = letterQueued
	g := l.rd.group
	g.letters.queue.push(l)
	if !g.letters.listed {
		g.letters.listed = true
		d.office.lettering = append(d.office.lettering, g)
	}
}

// serveLetters goes on with the letters that may, and returns when the next one may, 0 if that needs another event.
func (d *delivery) serveLetters(now time.Duration) (next time.Duration) {
	stuck := &d.office.stuck
	for l, ok := stuck.due(now); ok; l, ok = stuck.due(now) {
		if l.state != letterOver {
			d.queueLetter(l)
		}
	}
	return earliest(stuck.next(), d.serveBoxes(now))
}

// serveBoxes goes on with the letters of each group. The first group may take all the places that are free, so those that
// got one go behind those that got none.
func (d *delivery) serveBoxes(now time.Duration) (next time.Duration) {
	o := &d.office
	groups := o.lettering[:0]
	for _, g := range o.lettering {
		active := o.active
		next = earliest(next, d.serveBox(g, now))
		switch {
		case g.letters.queue.len() == 0:
			g.letters.listed = false
		case o.active > active:
			o.served = append(o.served, g)
		default:
			groups = append(groups, g)
		}
	}
	groups = append(groups, o.served...)
	clear(o.lettering[len(groups):])
	o.lettering = groups
	clear(o.served)
	o.served = o.served[:0]
	return next
}

func (d *delivery) serveBox(g *groupDelivery, now time.Duration) (next time.Duration) {
	b := &g.letters
	if b.pause > now {
		return b.pause
	}
	if b.part == nil {
		d.openBox(g)
	}
	for b.part != nil && !b.searching && b.queue.len() > 0 && b.pause <= now && d.office.active < maxActiveLetters {
		if len(b.searches) > 0 {
			d.search(g)
			continue
		}
		if d.office.bytes >= letterBudget {
			return 0
		}
		d.advance(b.queue.pop())
	}
	if b.pause > now {
		return b.pause
	}
	return 0
}

// openBox makes sure that the dead-letter topic exists.
func (d *delivery) openBox(g *groupDelivery) {
	b := &g.letters
	if b.opening {
		return
	}
	b.opening = true
	d.deps.ensureTopic(b.name, 1, func(topic uint16, err error) {
		b.opening = false
		if err == nil {
			if b.part = d.partition(topic, 0); b.part == nil {
				err = errors.New("its topic is gone")
			}
		}
		if err != nil {
			d.rest(g, err.Error())
		}
	})
}

// advance takes the next step with a letter from the queue.
func (d *delivery) advance(l *letter) {
	if l.state == letterOver {
		return
	}
	switch cur := l.rd.cur; {
	case l.rd.ledger.err != nil:
		d.closeLetter(l, protocol.CodeInternal)
	case cur.Parked(l.seq):
		d.office.active++
		d.writeLetter(l)
	case cur.Park(l.seq, sequence(l.rd.group.letters.part.last)):
		d.office.active++
		l.state = letterParking
	default:
		d.closeLetter(l, 0) // the cursor was moved
	}
}

// writeLetter proposes the letter of a message whose EXHAUSTED is on record, once it has the message. The letter is active.
func (d *delivery) writeLetter(l *letter) {
	var rec wal.Record
	if p := l.rd.part; p.inTail(wal.Sequence(l.seq)) {
		r := p.runs.at(p.findRun(wal.Sequence(l.seq)))
		wal.PeekRecord(r.data[r.index.seek(r.data, int(wal.Sequence(l.seq)-r.first)):], &rec)
		d.proposeLetter(l, &rec)
		return
	}
	l.state = letterReading
	d.readLetters(l.rd.part, wal.Sequence(l.seq), retryReadBytes, &coldRead{letter: l})
}

// readLetters starts a read that is not for a consumer.
func (d *delivery) readLetters(p *partition, from wal.Sequence, size int, r *coldRead) {
	d.readTag++
	r.req = wal.ReadRequest{
		Stream: wal.StreamID{Kind: wal.Messages, Topic: p.topic, Partition: p.id},
		From:   from, MaxBytes: size, Done: d.deps.readDone, Tag: d.readTag,
	}
	d.reads[r.req.Tag] = r
	d.c.store.Read(p.journal, &r.req)
}

// letterRead goes on with a letter whose message was read from disk, or could not be.
func (d *delivery) letterRead(l *letter, chunk *wal.Chunk, err error) {
	if chunk != nil {
		defer chunk.Release()
	}
	switch {
	case l.state == letterOver:
	case err != nil || chunk == nil:
		d.office.active--
		l.state = letterQueued
		pause := readPause
		if err != nil && !errors.Is(err, wal.ErrNoMemory) {
			pause = maxLetterPause
			d.log.Error("a message that is out of attempts can't be read for its dead letter: it is kept",
				slog.Int("topic", int(l.rd.part.topic)), slog.Int("partition", int(l.rd.part.id)), slog.Uint64("sequence", uint64(l.seq)), slog.Any("err", err))
			d.answerLetter(l, protocol.CodeDLQUnavailable, textNoLetters)
		}
		d.office.stuck.add(d.c.now+pause, l)
	case chunk.First > wal.Sequence(l.seq):
		d.log.Warn("a message that is out of attempts was removed by retention before its dead letter could be written",
			slog.Int("topic", int(l.rd.part.topic)), slog.Int("partition", int(l.rd.part.id)), slog.Uint64("sequence", uint64(l.seq)))
		l.rd.cur.Drop(l.seq)
		d.closeLetter(l, 0)
	default:
		var rec wal.Record
		for data := chunk.Bytes(); rec.Sequence != wal.Sequence(l.seq); {
			data = data[wal.PeekRecord(data, &rec):]
		}
		d.proposeLetter(l, &rec)
	}
}

// proposeLetter puts the letter into the journal. rec is borrowed.
func (d *delivery) proposeLetter(l *letter, rec *wal.Record) {
	topic, ok := d.c.Registry().Topic(l.rd.part.topic)
	if !ok || !l.rd.cur.Parked(l.seq) {
		d.closeLetter(l, 0) // the topic was deleted, or the cursor moved
		return
	}
	e := deadletter.Envelope{
		TopicID: l.rd.part.topic, Partition: l.rd.part.id, Sequence: uint64(l.seq), Topic: []byte(topic.Name),
		ProducerID: rec.ProducerID, ProducerSeq: rec.ProducerSeq,
		Attempts: uint16(min(l.failures, 1<<16-1)), Reason: deadletter.Reason(l.reason), Flags: rec.Flags & wal.FlagTombstone,
		PublishedMs: rec.TimestampMs, EndedMs: l.endedMs,
	}
	d.head = e.AppendHeader(d.head[:0])
	o := &d.office
	o.proposal++
	l.state, l.proposal = letterWritten, o.proposal
	l.bytes = int64(wal.RecordSize(len(rec.Key), len(d.head)+len(rec.Value)))
	o.bytes += l.bytes
	o.written[l.place()] = l
	d.c.proposed = true
	if err := d.c.log.ProposeMessage(l.rd.group.letters.part.topic, 0, l.proposal, rec.Key, d.head, rec.Value); err != nil {
		d.letterRefused(l, err.Error())
	}
}

// letterCommitted looks at a record of a dead-letter topic that is committed: the message is there, so it is done.
func (d *delivery) letterCommitted(p *partition, rec *wal.Record) {
	var e deadletter.Envelope
	if _, err := e.Decode(rec.Value); err != nil {
		return
	}
	place := letterPlace{p.topic, e.TopicID, e.Partition, e.Sequence}
	l := d.office.written[place]
	if l == nil {
		return
	}
	b := &l.rd.group.letters
	b.down, b.backoff = false, 0
	l.rd.cur.Drop(l.seq)
	d.closeLetter(l, 0)
}

// refused implements deliverer.
func (d *delivery) refused(proposal uint64, reason string) {
	for _, l := range d.office.written {
		if l.proposal == proposal {
			d.letterRefused(l, reason)
			return
		}
	}
}

// letterRefused puts a letter back that the journal did not take.
func (d *delivery) letterRefused(l *letter, reason string) {
	d.unwrite(l)
	d.office.active--
	d.answerLetter(l, protocol.CodeDLQUnavailable, textNoLetters)
	d.queueLetter(l)
	d.rest(l.rd.group, reason)
}

func (d *delivery) unwrite(l *letter) {
	delete(d.office.written, l.place())
	d.office.bytes -= l.bytes
	l.bytes = 0
}

// rest leaves a group's dead-letter topic alone for a while. Who waits for a letter is told.
func (d *delivery) rest(g *groupDelivery, reason string) {
	b := &g.letters
	if b.pause > d.c.now {
		return // several were refused together, each has told who waits for it
	}
	b.backoff = min(max(2*b.backoff, letterPause), maxLetterPause)
	b.pause, b.down = d.c.now+b.backoff, true
	for i := b.queue.head; i != b.queue.tail; i++ {
		d.answerLetter(*b.queue.at(i), protocol.CodeDLQUnavailable, textNoLetters)
	}
	if b.refusals++; b.refusals&(b.refusals-1) == 0 {
		d.log.Error("a dead letter can't be written: its message is kept, the writing is tried again", slog.String("topic", b.name),
			slog.String("reason", reason), slog.Duration("again_in", b.backoff), slog.Int("waiting", b.queue.len()), slog.Uint64("refusals", b.refusals))
	}
}

// closeLetter ends the work on a letter and answers who waits for it: with OK, or with code.
func (d *delivery) closeLetter(l *letter, code protocol.ErrorCode) {
	switch l.state {
	case letterParking, letterReading:
		d.office.active--
	case letterWritten:
		d.unwrite(l)
		d.office.active--
	case letterQueued, letterOver:
	}
	l.state = letterOver
	if l.rd.letters[l.seq] == l {
		delete(l.rd.letters, l.seq)
		d.office.open--
		d.log.Debug("a message is done with its dead letter")
	}
	d.answerLetter(l, code, "")
}

func (d *delivery) answerLetter(l *letter, code protocol.ErrorCode, text string) {
	for i := range l.waiting {
		d.answerNow(&l.waiting[i], code, text)
	}
	l.waiting = nil
}

// abandon forgets the letters of a cursor that is moved or removed. What is proposed is committed nevertheless.
func (d *delivery) abandon(rd *reader) {
	for _, l := range rd.letters {
		if l.state != letterWritten {
			d.closeLetter(l, 0)
		}
	}
}

// endOfMessage tells what a NACK is answered with: code 0 is OK. hold says that the answer follows when the message's
// letter is stored or refused.
func (d *delivery) endOfMessage(a *answer) (code protocol.ErrorCode, text string, hold bool) {
	rd, seq := a.nacked, ledger.Sequence(a.since)
	if !rd.cur.Ended(seq) {
		return 0, "", false
	}
	if rd.part.letters {
		return protocol.CodeDLQPathOverflow, textLoop, false
	}
	l := rd.letters[seq]
	switch {
	case l == nil:
		return 0, "", false
	case rd.group.letters.down:
		return protocol.CodeDLQUnavailable, textNoLetters, false
	default:
		l.waiting = append(l.waiting, *a)
		return 0, "", true
	}
}
