package wal

import (
	"fmt"
	"path/filepath"
)

// A checkpoint table with a half that can't be read: where that was the older one, or torn by the power cut that ended the
// last start, nothing is missing, since the journal has everything above the other. But where the journal begins later than
// that, the newer half was durable once and has been damaged since: rounds were recycled that it spoke for. All they held
// is in the files, flushed; only where the files end is not known any more. So they are read, as without a table, with what
// the older half says as the least that has to be there.

// fallBack looks whether the newer half of the table is lost, and goes on with the files then.
func (o *opener) fallBack(path string) error {
	begins, err := journalBegins(o.disk, o.o.Journal)
	if err != nil {
		return err
	}
	known := o.table.Point.Round
	if begins <= known+1 {
		return nil
	}
	if o.o.Replicated {
		return &CorruptionError{Path: path, Round: known + 1, Cause: fmt.Errorf(
			"the newer half of the checkpoint table is damaged, the older one knows of rounds up to %d, the journal begins with %d: %w",
			known, begins, errNoTable)}
	}
	o.s.log.Error("the newer half of the checkpoint table is damaged; the files are read to find out where they end",
		"path", path, "known_round", known, "journal_begins", begins)
	o.floors, o.rows = o.rows, map[StreamID]checkpoint{}
	o.found, o.table = false, table{}
	o.s.table.rebuilt = false
	return nil
}

// journalBegins returns the oldest round of a journal, 0 where it has none.
func journalBegins(disk Waiter, opts JournalOptions) (oldest RoundNumber, err error) {
	opts, err = opts.withDefaults()
	if err != nil {
		return 0, err
	}
	rc := &recoverer{opts: opts, disk: disk, io: newBlockingDisk(disk), j: &Journal{opts: opts, mark: markWriter{fd: -1}}}
	rc.rd = &roundReader{io: rc.io, pool: opts.Pool, journal: opts.ID}
	if err = rc.openFiles(); err == nil {
		err = rc.readFirsts()
	}
	rc.rd.close()
	rc.abandon()
	for _, h := range rc.firsts {
		if oldest == 0 || h.number < oldest {
			oldest = h.number
		}
	}
	return oldest, err
}

// reaches checks that a log's files, which were read because the newer half of the table is lost, reach as far as the older
// one says.
func (o *opener) reaches(st *stream) error {
	floor, ok := o.floors[st.id]
	if !ok || st.next >= floor.Next {
		return nil
	}
	return &CorruptionError{Path: filepath.Join(st.dir, logName(st.id.Kind, floor.Base, true)), Stream: st.id, Sequence: st.next,
		Cause: fmt.Errorf("the file ends here, the checkpoint table names sequence %d", floor.Next)}
}
