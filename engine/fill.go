package engine

import (
	"errors"
	"fmt"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/wal"
)

// fill is a log that catches up in bulk: what the leader sends goes through the journal to the store, in rounds that are not
// part of the log, and snapshots take the place of the ledger's and the metadata log's past. It belongs to the shard's
// goroutine. When the last round is flushed the engine is opened anew, so nothing here is told to the coordinator.
type fill struct {
	r        *replication
	peer     replica.NodeID
	transfer peerwire.Transfer
	frames   fifo[fillFrame]
	parts    uint32 // of the transfer that have come
	off      int    // bytes taken of the first frame's payload
	// waiting: the store is busy with a Skip, a Reset or an Install; resets are the partitions that begin anew first.
	waiting bool
	resets  int
	// gathered are the bytes of payloads whose last record is in the gathering round; sealed those of the rounds at the disk.
	gathered int64
	sealed   fifo[int64]
	durable  int64
	pieces   map[uint8][]byte
	last     wal.RoundNumber // newest round that the store was given
	ending   bool            // the last round is at the disk
	err      error
	done     func(error)
}

type fillFrame struct {
	frame   peerwire.BulkFrame
	payload peerwire.Payload
}

var (
	errFillEnded = errors.New("the leader ended the transfer")
	errFillOrder = errors.New("the leader sent records out of order")
	errFillLost  = errors.New("a part of what the leader sent was lost on the way")
)

// startFill gives up what is pending and begins to catch up, or begins again with another transfer. positions, if there is one,
// gets what the log has.
func (r *replication) startFill(ev *replicaEvent) {
	f := r.fill
	if f == nil {
		f = &fill{r: r, last: r.s.published}
		r.giveUp(ev.point)
		r.s.eng.coord.Silence(r.s.id)
		r.fill = f
		r.s.store.inbox.Push(storeMessage{kind: storeGiveUp})
		f.reset()
	}
	f.drop()
	f.peer, f.transfer, f.done, f.pieces = ev.peer, ev.transfer, ev.done, map[uint8][]byte{}
	f.parts, f.durable, f.gathered, f.ending, f.err = 0, 0, 0, false, nil
	for i := range f.sealed.len() {
		*f.sealed.at(i) = 0 // of the transfer before
	}
	if ev.positions != nil {
		ev.positions(r.s.positions())
	} else if id, ok := r.fits(); !ok {
		f.fail(fmt.Errorf("%v turned out damaged after the leader was asked", id))
	}
}

// ask has send get what the log will have when it has given up rounds for a catch-up.
func (r *replication) ask(send func([]peerwire.Position)) {
	r.asked = r.s.positions()
	send(r.asked)
}

// fits tells whether what was asked for goes on with what the log has now, and if not which stream doesn't.
func (r *replication) fits() (wal.StreamID, bool) {
	now := map[peerwire.Stream]uint64{}
	for _, p := range r.s.positions() {
		now[p.Stream] = p.Next
	}
	for _, p := range r.asked {
		if wal.StreamKind(p.Stream.Kind) == wal.Messages && now[p.Stream] < p.Next {
			return streamID(p.Stream), false
		}
	}
	return wal.StreamID{}, true
}

// giveUp forgets everything of the log that is not known to be committed. floor is committed, and durably noted.
func (r *replication) giveUp(floor replica.Point) {
	r.dropIncoming()
	r.s.journal.Discard()
	commit := r.log.Commit()
	r.cut(commit + 1)
	e, _ := r.log.EpochAt(commit)
	nodes := append([]replica.NodeID{r.self}, r.others...)
	log, err := replica.NewLog(r.self, nodes, replica.Point{Epoch: e, Index: commit}, nil)
	if err != nil {
		r.s.fail(err)
		return
	}
	log.Fence(max(r.fenced, r.epoch))
	log.SetFloor(floor)
	r.log, r.epoch, r.leader = log, 0, 0
}

// positions lists how far every stream of the shard goes that doesn't begin anew with a catch-up.
func (s *shard) positions() []peerwire.Position {
	list := []peerwire.Position{{Stream: peerwire.Stream{Kind: uint8(wal.Ledger)}, Next: uint64(s.ledgerSeq) + 1}}
	if s.id == 0 {
		list = append(list, peerwire.Position{Stream: peerwire.Stream{Kind: uint8(wal.Metadata)}, Next: uint64(s.metaSeq) + 1})
	}
	for topic, parts := range s.topics {
		for i, p := range parts {
			if p != nil && p.last > 0 && p.refusal == "" {
				list = append(list, peerwire.Position{
					Stream: peerwire.Stream{Kind: uint8(wal.Messages), Topic: uint16(topic), Partition: uint16(i)}, Next: uint64(p.last) + 1,
				})
			}
		}
	}
	return list
}

// reset has partitions begin anew whose files are damaged.
func (f *fill) reset() {
	s := f.r.s
	for topic, parts := range s.topics {
		for i, p := range parts {
			if p == nil || p.refusal == "" {
				continue
			}
			p.last, p.committed, p.lastMs, p.refusal = 0, 0, 0, ""
			f.resets++
			s.store.inbox.Push(storeMessage{kind: storeReset, stream: partitionStream(uint16(topic), uint16(i)), position: 1, done: func() {
				s.inbox.Push(message{kind: msgReplica, replica: &replicaEvent{kind: evStored, step: func() { f.resets-- }}})
			}})
		}
	}
}

func partitionStream(topic, partition uint16) wal.StreamID {
	return wal.StreamID{Kind: wal.Messages, Topic: topic, Partition: partition}
}

// take queues a frame of the transfer.
func (f *fill) take(ev *replicaEvent) {
	if ev.frame.Of() != f.transfer || ev.peer != f.peer || f.err != nil {
		if ev.payload != nil {
			ev.payload.Release()
		}
		return
	}
	if part, ok := ev.frame.(peerwire.NumberedPart); ok {
		if part.PartNumber() != f.parts+1 {
			if ev.payload != nil {
				ev.payload.Release()
			}
			if part.PartNumber() > f.parts {
				// Nothing else tells: the end would say that the log is complete without a partition or a snapshot.
				f.fail(fmt.Errorf("%w: part %d comes behind part %d", errFillLost, part.PartNumber(), f.parts))
			}
			return
		}
		f.parts++
	}
	f.frames.push(fillFrame{ev.frame, ev.payload})
}

// drop forgets what is queued. Records that are in the gathering round stay there: they are counted in their partitions
// already, and committed whoever has sent them.
func (f *fill) drop() {
	for ; f.frames.len() > 0; f.frames.pop() {
		if p := f.frames.front().payload; p != nil {
			p.Release()
		}
	}
	f.off = 0
}

// fail ends the transfer; the node begins again.
func (f *fill) fail(err error) {
	if f.err == nil && f.done != nil {
		f.err = err
		f.done(err)
	}
}

// step does what can be done now.
func (f *fill) step() {
	s := f.r.s
	for !f.waiting && f.resets == 0 && f.frames.len() > 0 && f.err == nil && s.journal.Err() == nil && !f.ending {
		fr := f.frames.front()
		ok, err := f.frame(fr)
		if err != nil {
			f.fail(err)
			return
		}
		if !ok {
			break
		}
		if fr.payload != nil {
			fr.payload.Release()
		}
		f.frames.pop()
		f.off = 0
	}
	f.seal(wal.LogPosition{Flags: wal.CatchupRound})
}

// stalled tells whether something waits for room that no message announces.
func (f *fill) stalled() bool { return f.frames.len() > 0 && !f.waiting && f.resets == 0 }

// frame handles the first frame; false means that it has to wait.
func (f *fill) frame(fr *fillFrame) (bool, error) {
	switch frame := fr.frame.(type) {
	case *peerwire.Records:
		return f.records(frame, fr.payload.Bytes())
	case *peerwire.Skip:
		return f.skip(frame)
	case *peerwire.Snapshot:
		return f.snapshot(frame, fr.payload)
	case *peerwire.CatchupDone:
		return f.end(frame)
	case *peerwire.CatchupCancel:
		return false, fmt.Errorf("%w: %s", errFillEnded, frame.Reason)
	default:
		return true, nil
	}
}

// records appends the records of a frame.
func (f *fill) records(frame *peerwire.Records, b []byte) (bool, error) {
	s := f.r.s
	id := wal.StreamID{Kind: wal.StreamKind(frame.Stream.Kind), Topic: frame.Stream.Topic, Partition: frame.Stream.Partition}
	if id.Kind != wal.Messages {
		return false, fmt.Errorf("%w: of %v, which comes as a snapshot", errFillOrder, id)
	}
	if s.gone.has(id.Topic) {
		f.gathered += int64(len(b))
		return true, nil
	}
	p := s.partitionOf(id.Topic, id.Partition)
	var rec wal.Record
	for f.off < len(b) {
		n, err := wal.DecodeRecord(b[f.off:], &rec)
		switch {
		case err != nil:
			return false, fmt.Errorf("a record of %v from the leader: %w", id, err)
		case rec.Sequence > p.last+1:
			return false, fmt.Errorf("%w: sequence %d of %v in the place of %d", errFillOrder, rec.Sequence, id, p.last+1)
		case rec.Sequence == p.last+1:
			if s.store.pending.Load() > maxStorePending {
				return false, nil
			}
			if err := s.journal.Append(id, &rec); err != nil {
				if errors.Is(err, wal.ErrRecordTooLarge) {
					return false, fmt.Errorf("sequence %d of %v: %w", rec.Sequence, id, err)
				}
				s.appendFailed(err)
				return false, nil
			}
			p.last, p.committed, p.lastMs = rec.Sequence, rec.Sequence, max(p.lastMs, rec.TimestampMs)
			s.dedup.replay(id, &rec)
		}
		f.off += n
	}
	f.gathered += int64(len(b))
	return true, nil
}

// quiet tells whether all records taken are at the store.
func (f *fill) quiet() bool {
	records, _ := f.r.s.journal.Gathered()
	return records == 0 && f.sealed.len() == 0
}

// skip has a partition go on behind what the leader doesn't keep any more.
func (f *fill) skip(frame *peerwire.Skip) (bool, error) {
	s := f.r.s
	if wal.StreamKind(frame.Stream.Kind) != wal.Messages || frame.Next == 0 {
		return false, fmt.Errorf("%w: a skip of stream kind %d to %d", errFillOrder, frame.Stream.Kind, frame.Next)
	}
	if s.gone.has(frame.Stream.Topic) {
		return true, nil
	}
	p := s.partitionOf(frame.Stream.Topic, frame.Stream.Partition)
	if uint64(p.last)+1 >= frame.Next {
		return true, nil
	}
	if !f.quiet() {
		return false, nil
	}
	p.last, p.committed = wal.Sequence(frame.Next-1), wal.Sequence(frame.Next-1)
	f.store(storeMessage{kind: storeSkip, stream: partitionStream(frame.Stream.Topic, frame.Stream.Partition), position: frame.Next})
	return true, nil
}

// store asks the store for something and waits for it.
func (f *fill) store(m storeMessage) {
	s := f.r.s
	f.waiting = true
	m.done = func() {
		s.inbox.Push(message{kind: msgReplica, replica: &replicaEvent{kind: evStored, step: func() { f.waiting = false }}})
	}
	s.store.inbox.Push(m)
}

// maxSnapshotBytes bounds a snapshot that another node sends.
const maxSnapshotBytes = 1 << 30

// snapshot takes a piece of a snapshot, and installs it when it is complete.
func (f *fill) snapshot(frame *peerwire.Snapshot, payload peerwire.Payload) (bool, error) {
	s := f.r.s
	var b []byte
	if payload != nil {
		b = payload.Bytes()
	}
	have := f.pieces[frame.What]
	if frame.Total > maxSnapshotBytes || frame.Offset != uint64(len(have)) {
		return false, fmt.Errorf("%w: a snapshot's bytes from %d on, of %d, behind %d", errFillOrder, frame.Offset, frame.Total, len(have))
	}
	complete := frame.Offset+uint64(len(b)) == frame.Total
	if complete && !f.quiet() {
		return false, nil
	}
	have = append(have, b...)
	f.pieces[frame.What] = have
	f.gathered += int64(len(b))
	if !complete {
		return true, nil
	}
	delete(f.pieces, frame.What)
	f.r.logger.Debug("a snapshot from the leader takes the place of a log's past", "log", s.id, "what", frame.What, "position", frame.Position)
	m := storeMessage{kind: storeInstall, position: frame.Position, epoch: wal.Epoch(frame.Epoch), data: have}
	switch frame.What {
	case peerwire.SnapshotMetadata:
		m.snapshotKind = wal.SnapshotMetadata
		s.metaSeq = max(s.metaSeq, wal.Sequence(frame.Position))
	case peerwire.SnapshotCursors:
		m.snapshotKind = wal.SnapshotCursors
		s.ledgerSeq = max(s.ledgerSeq, wal.Sequence(frame.Position))
	default:
		windows := newDedup(dedupMaxBytes)
		if err := windows.restore(have); err != nil {
			return false, fmt.Errorf("the producer windows from the leader: %w", err)
		}
		s.dedup = windows
		m.snapshotKind, m.position = wal.SnapshotDedup, uint64(f.last)
	}
	f.store(m)
	return true, nil
}

// end seals the round that says up to where the log is complete.
func (f *fill) end(frame *peerwire.CatchupDone) (bool, error) {
	if !f.quiet() || f.r.s.journal.Busy() {
		return false, nil
	}
	if len(f.pieces) > 0 || frame.Point.Index == 0 {
		return false, fmt.Errorf("%w: the end comes before a snapshot is complete", errFillOrder)
	}
	p := wal.LogPosition{Point: logPoint(frame.Point), Flags: wal.CatchupRound}
	if !f.seal(p) {
		return false, nil
	}
	f.ending = true
	return true, nil
}

// seal submits what is gathered as a round that is not part of the log or, with an index, as the last one of the catch-up.
func (f *fill) seal(p wal.LogPosition) bool {
	s := f.r.s
	if records, _ := s.journal.Gathered(); s.journal.Busy() || s.journal.Err() != nil || records == 0 && p.Point.Index == 0 {
		return false
	}
	// Recovery has to know what of the log before the catch-up was committed: the records taken now follow those.
	if err := s.journal.Stamp(p.Point, p.Prev, wal.LogIndex(f.r.log.Commit()), p.Flags); err != nil {
		s.appendFailed(err)
		return false
	}
	if s.journal.SealRound() == nil {
		return false
	}
	f.r.flight.push(0)
	f.sealed.push(f.gathered)
	f.gathered = 0
	return true
}

// flushed takes a round of the catch-up that reached the disk, borrowed.
func (f *fill) flushed(round *wal.Round) {
	s := f.r.s
	bytes := *f.sealed.front()
	f.sealed.pop()
	f.last = round.Number
	round.Retain()
	s.storeRound(round)
	s.store.inbox.Nudge()
	if f.ending && f.sealed.len() == 0 {
		f.err = errors.New("the catch-up has ended")
		f.done(nil)
		return
	}
	f.durable += bytes
	if bytes > 0 {
		f.r.peers.Bulk(f.peer, &peerwire.CatchupAck{Transfer: f.transfer, Bytes: uint64(f.durable)}, nil, nil)
	}
}
