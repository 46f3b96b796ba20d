package wal

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/mortarmq/mortarmq/ring"
)

// logState is the recovery of the ledger or the metadata log.
type logState struct {
	st *stream
	// position is what the snapshot includes.
	position uint64
	// unread says why the newest snapshot could not be read, which held everything up to reaches: the log has to go that far.
	unread  error
	reaches Sequence
	// handed is the last record that was given to the handler, or position.
	handed Sequence
	// end is why the files can't be read further than the stream's next, where they have no checkpoint.
	end error
}

// rejectedError wraps why the handler didn't take a metadata record.
type rejectedError struct{ err error }

func (e *rejectedError) Error() string { return e.err.Error() }
func (e *rejectedError) Unwrap() error { return e.err }

// untrusted tells whether an error about the metadata quarantines it.
func untrusted(err error) bool {
	var rejected *rejectedError
	return errors.Is(err, ErrCorrupt) || errors.As(err, &rejected)
}

// record gives a record to the handler, if it is above the snapshot.
func (o *opener) record(id StreamID, r *Record, fromJournal bool) error {
	if id.Kind == Messages {
		return o.h.Record(id, r, fromJournal)
	}
	l := o.logs[id.Kind]
	if l == nil || r.Sequence <= l.handed {
		return nil
	}
	var err error
	if r.Sequence != l.handed+1 {
		err = &CorruptionError{Path: l.st.dir, Stream: id, Sequence: l.handed + 1,
			Cause: fmt.Errorf("%w: the log goes on with sequence %d", errGap, r.Sequence)}
	} else {
		err = o.h.Record(id, r, fromJournal)
	}
	if err == nil {
		l.handed = r.Sequence
		return nil
	}
	if id.Kind == Metadata {
		return &rejectedError{fmt.Errorf("metadata record %d: %w", r.Sequence, err)}
	}
	return err
}

// readSnapshot reads a snapshot file.
func (o *opener) readSnapshot(path string, kind SnapshotKind) (snapshotHeader, []byte, error) {
	b, err := o.readFile(path, MaxSnapshotBytes+snapshotHeaderLen)
	if err != nil {
		return snapshotHeader{}, nil, err
	}
	h, err := decodeSnapshotHeader(b, kind, int64(len(b)))
	if err == nil {
		err = h.checkData(b, b[snapshotHeaderLen:])
	}
	if err != nil {
		return h, nil, wrapFile(path, nil, err)
	}
	return h, b[snapshotHeaderLen:], nil
}

// readDedup hands the producers' windows over. Without them the broker works, but it says so.
func (o *opener) readDedup() error {
	path := o.s.snapshotPath(SnapshotDedup, snapshotID{})
	h, data, err := o.readSnapshot(path, SnapshotDedup)
	var version *VersionError
	switch {
	case errors.As(err, &version):
		return err
	case notExist(err) || errors.Is(err, ErrCorrupt):
		if o.table.Point.Round > 0 || !notExist(err) {
			o.rec.DedupLost = err
			o.s.log.Error("the producers' windows are lost: what a producer sends again from before may be stored twice", "err", err)
		}
		return nil
	case err != nil:
		return err
	case RoundNumber(h.Position) < o.table.Point.Round:
		o.rec.DedupLost = fmt.Errorf("%s is of round %d, the journal begins behind round %d", path, h.Position, o.table.Point.Round)
		o.s.log.Error("the producers' windows are incomplete: what a producer sends again from before may be stored twice",
			"err", o.rec.DedupLost)
	}
	o.s.snaps.dedup = h.Position
	return o.h.Snapshot(SnapshotDedup, h.Position, data)
}

// checkDedup reports windows that are ahead of the journal: they are not of this data, but of what was set aside here before, or
// the disk has given the content of another time. A journal whose end is lost says so itself.
func (o *opener) checkDedup(j *Journal, found *journalRecovery) {
	if at := RoundNumber(o.s.snaps.dedup); at > j.Flushed() && found.Suspect == nil && o.rec.DedupLost == nil {
		path := o.s.snapshotPath(SnapshotDedup, snapshotID{})
		o.rec.DedupLost = fmt.Errorf("%s is of round %d, the journal ends with round %d: the file is not of this data", path, at, j.Flushed())
		o.s.log.Error("the producers' windows are not those of this journal: what a producer sends may be taken for what it has sent before",
			"err", o.rec.DedupLost)
	}
}

// readLedger hands the delivery cursors and the ledger over. Without them consumers would start over, so that anything
// wrong with them is an error.
func (o *opener) readLedger() error {
	l := &logState{st: newStream(o.s, StreamID{Kind: Ledger})}
	o.logs[Ledger] = l
	l.st.dirMade = true
	path := o.s.snapshotPath(SnapshotCursors, snapshotID{})
	h, data, err := o.readSnapshot(path, SnapshotCursors)
	switch {
	case errors.Is(err, ErrCorrupt) && o.o.Replicated:
		return err // it may have been installed: then there is nothing before it, and perhaps nothing behind it that shows so
	case errors.Is(err, ErrCorrupt):
		o.s.log.Warn("the cursor checkpoint can't be read; the ledger must go back to its start", "err", err)
	case err != nil && !notExist(err):
		return err
	case err == nil:
		l.position = h.Position
		o.s.snaps.cursors = h.Position
		if err := o.h.Snapshot(SnapshotCursors, h.Position, data); err != nil {
			return err
		}
	}
	if lerr := o.readLog(l); lerr != nil {
		if err != nil && errors.Is(err, ErrCorrupt) {
			return fmt.Errorf("%w (and the cursor checkpoint can't be read: %w)", lerr, err)
		}
		return lerr
	}
	return nil
}

// readMetadata hands the newest valid metadata snapshot and the log above it over, or quarantines the metadata.
func (o *opener) readMetadata() error {
	if o.s.o.Journal != 0 {
		return nil
	}
	l := &logState{st: newStream(o.s, StreamID{Kind: Metadata})}
	o.logs[Metadata] = l
	l.st.dirMade = true
	op, err := o.io.run(ring.Op{Kind: ring.ReadDir, Path: l.st.dir})
	if err != nil {
		return err
	}
	names := slices.Clone(op.Names)
	if err := o.earlierQuarantine(names); err != nil || o.rec.Metadata != nil {
		return err
	}
	err = o.metadataSnapshot(l, names)
	if err == nil {
		err = o.readLog(l)
	}
	if untrusted(err) {
		return o.quarantineMetadata(err)
	}
	return err
}

// metadataSnapshot hands the newest valid snapshot over. One that can't be read is passed over: the one before and the
// log give the same state, or a gap shows, or the log ends before that snapshot (logState.reaches).
func (o *opener) metadataSnapshot(l *logState, names []string) error {
	var ids []snapshotID
	for _, name := range names {
		if id, ok := parseMetadataSnapshotName(name); ok {
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, func(a, b snapshotID) int {
		if a.less(b) {
			return -1
		}
		return 1
	})
	for i, id := range slices.Backward(ids) {
		h, data, err := o.readSnapshot(o.s.snapshotPath(SnapshotMetadata, id), SnapshotMetadata)
		if err == nil && h.Position != id.Position {
			err = &CorruptionError{Path: o.s.snapshotPath(SnapshotMetadata, id), Cause: errMisplaced}
		}
		if errors.Is(err, ErrCorrupt) {
			o.s.log.Error("a metadata snapshot can't be read; trying the one before", "err", err)
			if l.unread == nil {
				l.unread, l.reaches = err, Sequence(id.Position)
			}
			continue
		}
		if err != nil {
			return err
		}
		o.s.snaps.metadata = ids[max(i-1, 0) : i+1]
		l.position = h.Position
		if err := o.h.Snapshot(SnapshotMetadata, h.Position, data); err != nil {
			return &rejectedError{fmt.Errorf("%s: %w", o.s.snapshotPath(SnapshotMetadata, id), err)}
		}
		return nil
	}
	return nil
}

// readLog finds the files of a log, hands over their records above the snapshot and lets the stream go on behind them. In a
// cluster it does without files that can't be read where the snapshot has all that they should hold: it was installed in
// their place, or is as good.
func (o *opener) readLog(l *logState) error {
	st := l.st
	err := o.readLogFiles(l)
	cp, listed := o.rows[st.id]
	if !o.o.Replicated || !listed || !errors.Is(err, ErrCorrupt) || Sequence(l.position)+1 < cp.Next {
		return err
	}
	o.s.log.Warn("the files of a log can't be read; its snapshot has what they should hold", "stream", st.id, "err", err)
	o.s.closeStream(st)
	st.forgetFiles()
	st.off, st.cut, st.next, st.wnext, l.end = 0, false, firstSequence, firstSequence, nil
	st.sealed, st.saved = checkpoint{}, checkpoint{}
	return nil
}

func (o *opener) readLogFiles(l *logState) error {
	st := l.st
	l.handed = Sequence(l.position)
	cp, listed := o.rows[st.id]
	if err := o.listLog(st, cp, listed); err != nil {
		return err
	}
	if !listed && !o.scan {
		// The journal has all of it.
		st.forgetFiles()
		return nil
	}
	if listed {
		st.next, st.wnext = cp.Next, cp.Next
		st.sealed, st.saved = cp, cp
	}
	for i, seg := range st.segs {
		last := i+1 == len(st.segs)
		if !last && st.segs[i+1].base <= l.handed+1 {
			continue // the snapshot has all of it
		}
		end := int64(0)
		if last && listed {
			end = int64(cp.Offset)
		}
		c, err := o.scanLog(seg, end)
		if err != nil && (listed || !last || !errors.Is(err, ErrCorrupt)) {
			return err
		}
		if !last {
			if next := st.segs[i+1].base; c.next != next {
				return &CorruptionError{Path: st.path(seg), Offset: c.off, Stream: st.id, Sequence: c.next,
					Cause: fmt.Errorf("the file ends here, the next one begins with sequence %d", next)}
			}
			continue
		}
		if listed && c.next != cp.Next {
			return &CorruptionError{Path: st.path(seg), Offset: c.off, Stream: st.id, Sequence: c.next,
				Cause: fmt.Errorf("the file ends here, the checkpoint names sequence %d", cp.Next)}
		}
		o.resumeLog(l, seg, c, err)
	}
	if !listed {
		o.s.distrust(st)
		return o.reaches(st)
	}
	return nil
}

// forgetFiles makes all files of a log stale.
func (st *stream) forgetFiles() {
	for _, seg := range st.segs {
		if st.id.Kind == Ledger && seg == st.active {
			st.staleActive = true
		} else {
			st.stale = append(st.stale, seg.base)
		}
	}
	st.segs, st.active = nil, nil
}

// resumeLog lets the stream go on in its newest file, which c has read to its end or, without a checkpoint, to where it
// can't be read.
func (o *opener) resumeLog(l *logState, seg *segment, c *scanner, err error) {
	st := l.st
	l.end = err
	if c.next == seg.base {
		// A file without a whole record is no file: it is made again when there is one.
		if st.id.Kind == Ledger {
			st.staleActive = true
		} else {
			st.stale = append(st.stale, seg.base)
		}
		st.segs, st.active = st.segs[:len(st.segs)-1], nil
		st.next, st.wnext = seg.base, seg.base
		return
	}
	st.active, st.next, st.wnext = seg, c.next, c.next
	st.off = c.off + int64(padLen(c.off))
	st.cut, st.cutAt = true, c.off
	st.sealed = checkpoint{Next: c.next, Base: seg.base, Offset: uint32(st.off)}
}

// distrust makes the next sweep flush the files of a stream that had no checkpoint: they can be read, but whether they
// are durable isn't known.
func (s *Store) distrust(st *stream) {
	for _, seg := range st.segs {
		s.markDirty(seg, 1)
	}
	s.syncDirLater(st.dir)
	if st.id.Kind == Messages {
		s.syncDirLater(filepath.Dir(st.dir))
		s.syncDirLater(filepath.Join(s.o.Dir, topicsDir))
	}
}

// scanLog reads a file of a log and hands its records over; end is where it ends, 0 for the end of the file. An error is
// about the record at the scanner's offset.
func (o *opener) scanLog(seg *segment, end int64) (*scanner, error) {
	s := o.s
	var result error
	done := false
	c := &scanner{s: s, seg: seg, end: end}
	c.record = func(r *Record) error { return o.record(seg.st.id, r, false) }
	s.acquire(seg, func(err error) {
		if err != nil {
			if notExist(err) {
				err = &CorruptionError{Path: seg.st.path(seg), Stream: seg.st.id, Sequence: seg.base, Cause: errNoFile}
			}
			result, done = err, true
			return
		}
		run := func() {
			c.run(func(err error) {
				s.release(seg)
				result, done = err, true
			})
		}
		if end > 0 {
			run()
			return
		}
		s.do(ring.Op{Kind: ring.Stat, FD: seg.fd}, func(op *ring.Op) {
			c.end = op.Size
			run()
		})
	})
	if err := o.io.waitFor(func() bool { return done }); err != nil {
		return c, err
	}
	return c, result
}

// listLog finds the files of a log. Those behind the checkpoint are stale.
func (o *opener) listLog(st *stream, cp checkpoint, listed bool) error {
	op, err := o.io.run(ring.Op{Kind: ring.ReadDir, Path: st.dir})
	if err != nil {
		return err
	}
	var bases []Sequence
	active := false
	for _, name := range op.Names {
		if base, ok := parseLogName(st.id.Kind, name); ok {
			bases = append(bases, base)
		}
		active = active || st.id.Kind == Ledger && name == ledgerActive
	}
	slices.Sort(bases)
	if st.id.Kind == Ledger {
		if bases, err = o.activeLedger(st, bases, active, cp, listed); err != nil {
			return err
		}
	}
	for _, base := range bases {
		if listed && base > cp.Base {
			st.stale = append(st.stale, base)
			continue
		}
		st.segs = append(st.segs, newSegment(st, base))
	}
	if n := len(st.segs); n > 0 {
		st.active = st.segs[n-1]
	}
	if listed && (st.active == nil || st.active.base != cp.Base) {
		return &CorruptionError{Path: filepath.Join(st.dir, logName(st.id.Kind, cp.Base, true)), Stream: st.id,
			Sequence: cp.Base, Cause: errNoFile}
	}
	return nil
}

// activeLedger adds the base of delivery.mql, which its name doesn't tell, to those of the older files. A file that the
// checkpoint names but that was already renamed gets its name back: what followed it is in the journal.
func (o *opener) activeLedger(st *stream, bases []Sequence, active bool, cp checkpoint, listed bool) ([]Sequence, error) {
	path := filepath.Join(st.dir, ledgerActive)
	renamed := Sequence(0)
	switch {
	case listed && slices.Contains(bases, cp.Base):
		renamed = cp.Base
	case !active && !listed && len(bases) > 0:
		renamed = bases[len(bases)-1]
	case !active:
		return bases, nil
	}
	if renamed > 0 {
		for _, op := range []ring.Op{
			{Kind: ring.Rename, Path: filepath.Join(st.dir, logName(Ledger, renamed, false)), Path2: path},
			{Kind: ring.SyncDir, Path: st.dir},
		} {
			if _, err := o.io.run(op); err != nil {
				return nil, err
			}
		}
		return bases, nil
	}
	base, err := o.ledgerBase(path)
	if errors.Is(err, ErrCorrupt) && !listed {
		// Without a checkpoint it never was durable, or the journal will show a gap.
		st.staleActive = true
		return bases, nil
	}
	if err != nil {
		return nil, err
	}
	if listed && base != cp.Base {
		return nil, &CorruptionError{Path: path, Stream: st.id, Sequence: cp.Base,
			Cause: fmt.Errorf("the file begins with sequence %d, the checkpoint names the one that begins with %d", base, cp.Base)}
	}
	return append(bases, base), nil
}

// ledgerBase reads the base sequence of delivery.mql.
func (o *opener) ledgerBase(path string) (Sequence, error) {
	slab := o.s.o.Pool.Get(segmentHeaderLen)
	if slab == nil {
		return 0, ErrNoMemory
	}
	defer slab.Release()
	op, err := o.io.run(ring.Op{Kind: ring.Open, Path: path, Flags: ring.ReadOnly})
	if err != nil {
		return 0, err
	}
	fd := op.FD
	op, err = o.io.run(ring.Op{Kind: ring.Read, FD: fd, Buf: slab.Bytes()[:segmentHeaderLen]})
	var h segmentHeader
	if err == nil {
		h, err = decodeSegmentHeader(op.Buf[:op.N], Ledger)
	}
	if err != nil {
		err = wrapFile(path, nil, err)
	}
	_, closeErr := o.io.run(ring.Op{Kind: ring.Close, FD: fd})
	return h.Base, errors.Join(err, closeErr)
}

var errUnaccounted = errors.New("neither the checkpoint table nor the journal accounts for what is here, and the next " +
	"record would take its place: put back the files that belong together, or remove what doesn't belong here")

// unaccounted returns an error where the journal and the files behind the checkpoint don't lead up to what else there
// is of a stream: a snapshot, files that no checkpoint knows. They come from elsewhere, or what led up to them is lost.
// Without a checkpoint table there is nothing to compare them with but the journal.
func (o *opener) unaccounted(st *stream, position uint64) error {
	path := ""
	switch {
	case uint64(st.next) <= position && st.id.Kind == Ledger:
		path = o.s.snapshotPath(SnapshotCursors, snapshotID{})
	case uint64(st.next) <= position:
		path = o.s.snapshotPath(SnapshotMetadata, o.s.snaps.metadata[len(o.s.snaps.metadata)-1])
	case o.scan:
		return nil
	case o.o.Replicated:
		// What was committed when a file was made need not be known to be now, and a partition may have begun anew. That
		// nothing is missing the positions in the replicated log show.
		return nil
	case st.staleActive && st.next == firstSequence:
		path = filepath.Join(st.dir, ledgerActive)
	default:
		i := slices.IndexFunc(st.stale, func(base Sequence) bool { return base >= st.next })
		if i < 0 {
			return nil
		}
		path = filepath.Join(st.dir, logName(st.id.Kind, st.stale[i], false))
	}
	return &CorruptionError{Path: path, Stream: st.id, Sequence: st.next, Cause: errUnaccounted}
}

// checkLogs is called behind the replay of the journal: a log that ended early must have gone on there, and there may be
// no gap between snapshot, files and journal.
func (o *opener) checkLogs() error {
	for _, l := range o.logs {
		if l == nil {
			continue
		}
		if o.o.Replicated {
			// It was installed, and nothing followed; that nothing is missing the log's positions show.
			l.st.jump(l.position)
		}
		if err := o.unaccounted(l.st, l.position); err != nil {
			// Nothing is moved away: these are files that somebody has put back, as likely as not.
			return err
		}
		err := l.end
		if err != nil && l.st.next > l.st.sealed.Next {
			err = nil // the journal had it
		}
		if err == nil && l.st.bad != nil {
			err = l.st.bad
		}
		if err == nil && l.st.next <= l.reaches {
			err = l.unread
		}
		if err == nil {
			continue
		}
		if l.st.id.Kind != Metadata {
			return err
		}
		if err := o.quarantineMetadata(err); err != nil {
			return err
		}
	}
	return nil
}

// quarantineMetadata moves the metadata's files away: it can't be trusted and isn't served.
func (o *opener) quarantineMetadata(cause error) error {
	st := o.logs[Metadata].st
	s := o.s
	dir := filepath.Join(s.o.Dir, metadataDir)
	r := newReport(st.id, cause, s.o.Wall())
	place := filepath.Join(dir, quarantineDir, time.UnixMilli(int64(r.TimeMs)).UTC().Format("20060102T150405.000Z"))
	r.Report = filepath.Join(place, metadataReport)
	s.log.Error("the metadata can't be trusted: it is moved away and not served", "to", place, "err", cause)
	if err := makeDir(o.io, place); err != nil {
		return err
	}
	// The report comes first: without metadata files it is what tells the next start that there should be some.
	if err := o.writeReport(&r); err != nil {
		return err
	}
	op, err := o.io.run(ring.Op{Kind: ring.ReadDir, Path: dir})
	if err != nil {
		return err
	}
	for _, name := range slices.Clone(op.Names) {
		if name == quarantineDir {
			continue
		}
		op := ring.Op{Kind: ring.Rename, Path: filepath.Join(dir, name), Path2: filepath.Join(place, name)}
		if _, err := o.io.run(op); err != nil {
			return err
		}
	}
	for _, d := range []string{place, dir} {
		if _, err := o.io.run(ring.Op{Kind: ring.SyncDir, Path: d}); err != nil {
			return err
		}
	}
	o.rec.Metadata = &r
	o.holdMetadata()
	return nil
}

// holdMetadata goes on without metadata. What the journal has of it stays there, for the start that finds good files.
func (o *opener) holdMetadata() {
	s, st := o.s, o.logs[Metadata].st
	o.logs[Metadata] = nil
	s.noMetadata, s.held = true, true
	s.discard(st)
	st.dropped = true // its files are closed with their last user
	s.closeStream(st)
	s.streams.remove(st.id)
	s.order = slices.DeleteFunc(s.order, func(x *stream) bool { return x == st })
	s.dirtyStreams = slices.DeleteFunc(s.dirtyStreams, func(x *stream) bool { return x == st })
}

// earlierQuarantine finds metadata that an earlier start has quarantined: as long as nothing has been put in its place the
// broker has none.
func (o *opener) earlierQuarantine(names []string) error {
	quarantined := false
	for _, name := range names {
		_, snapshot := parseMetadataSnapshotName(name)
		_, log := parseLogName(Metadata, name)
		if snapshot || log {
			return nil
		}
		quarantined = quarantined || name == quarantineDir
	}
	if !quarantined {
		return nil
	}
	dir := filepath.Join(o.s.o.Dir, metadataDir, quarantineDir)
	op, err := o.io.run(ring.Op{Kind: ring.ReadDir, Path: dir})
	if err != nil {
		return err
	}
	for _, name := range slices.Backward(slices.Clone(op.Names)) {
		path := filepath.Join(dir, name, metadataReport)
		b, err := o.readFile(path, maxReportBytes)
		if notExist(err) {
			continue
		}
		if err != nil {
			return err
		}
		r := decodeReport(path, b)
		o.s.log.Error("the metadata was quarantined by an earlier start; nothing is served until it is restored", "report", path)
		o.rec.Metadata = &r
		o.holdMetadata()
		return nil
	}
	return nil
}

// writeReport writes a report durably.
func (o *opener) writeReport(r *QuarantineReport) error {
	b := r.encode()
	slab := o.s.o.Pool.Get(len(b))
	if slab == nil {
		return ErrNoMemory
	}
	defer slab.Release()
	n := copy(slab.Bytes(), b)
	op, err := o.io.run(ring.Op{Kind: ring.Open, Path: r.Report, Flags: ring.Create})
	if err != nil {
		return err
	}
	fd := op.FD
	for _, op := range []ring.Op{
		{Kind: ring.Write, FD: fd, Buf: slab.Bytes()[:n]},
		{Kind: ring.Sync, FD: fd},
		{Kind: ring.Close, FD: fd},
		{Kind: ring.SyncDir, Path: filepath.Dir(r.Report)},
	} {
		if _, err := o.io.run(op); err != nil {
			return err
		}
	}
	return nil
}
