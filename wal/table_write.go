package wal

import (
	"path/filepath"
	"slices"

	"github.com/mortarmq/mortarmq/ring"
)

// tableWriter writes the checkpoint table.
type tableWriter struct {
	fd         int
	generation uint64
	slotBytes  int
	slab       *ring.Slab
	// point is what the newest table says, or the one that is being written.
	point journalPoint
	// rebuilt says that the newest table names all files that are durable; it doesn't where a start found it damaged, until
	// the first sweep.
	rebuilt bool
	// unlisting: a table is being written that belongs to no sweep, see unlistTable.
	unlisting bool
}

func (t *tableWriter) free() {
	if t.slab != nil {
		t.slab.Release()
		t.slab = nil
	}
}

// reserve gets memory for a slot.
func (t *tableWriter) reserve(pool *ring.Pool, slotBytes int) bool {
	if t.slab != nil && len(t.slab.Bytes()) >= slotBytes {
		return true
	}
	slab := pool.Get(slotBytes)
	if slab == nil {
		return false
	}
	t.free()
	t.slab = slab
	return true
}

// fits tells whether a table of n rows needs no new file.
func (t *tableWriter) fits(n int) bool { return t.fd >= 0 && tableSlotBytes(n) <= t.slotBytes }

// writeTable writes the sweep's rows.
func (s *Store) writeTable() {
	point := s.sweep.upTo
	point.Round = s.tableRound()
	s.makeTable(point, s.sweep.rows, func() { s.endSweep(point) })
}

// unlistTable writes the last table once more without the topics that were deleted since. While something waits for space no
// sweep gets to its end, and deleting topics is what makes some.
func (s *Store) unlistTable() {
	t := &s.table
	if !s.space.full || !s.pass.active || s.sweep.phase > sweepWriting || s.held || t.unlisting || !t.rebuilt || s.unsettled() ||
		!slices.ContainsFunc(s.drops, func(d *drop) bool { return d.phase == dropSweeping && !d.unlisted }) {
		return
	}
	var rows []sealedRow
	for _, st := range s.order {
		if st.saved.Next > 0 {
			rows = append(rows, sealedRow{st, st.saved})
		}
	}
	if !t.fits(s.tableRows(rows)) {
		return
	}
	t.unlisting = true
	s.makeTable(t.point, rows, func() {
		t.unlisting = false
		s.sweptDrops()
		s.stepRestarts()
		s.stepSweep()
	})
}

// tableRows counts the rows of a table.
func (s *Store) tableRows(rows []sealedRow) (n int) {
	for i := range rows {
		if !rows[i].st.dropped {
			n++
		}
	}
	for _, st := range s.order {
		if st.anew {
			n++
		}
	}
	return n
}

// makeTable writes a table into the older slot of the file, or a new file where it doesn't fit, and calls done when it is
// durable.
func (s *Store) makeTable(point journalPoint, rows []sealedRow, done func()) {
	t := &s.table
	if s.err != nil {
		return // as in chain
	}
	s.unlistDrops()
	n := s.tableRows(rows)
	path := filepath.Join(s.journalDir, tableFile)
	grow := !t.fits(n)
	slotBytes := t.slotBytes
	if grow {
		slotBytes = max(tableSlotBytes(minTableRows), tableSlotBytes(n+n/2), slotBytes)
		slotBytes = min(slotBytes, tableSlotBytes(maxTableRows))
	}
	if n > maxTableRows {
		s.fail("write checkpoint table", path, errTableRows)
		return
	}
	if !t.reserve(s.o.Pool, slotBytes) {
		s.starve("make checkpoint table", ErrNoMemory, func() { s.makeTable(point, rows, done) })
		return
	}
	t.point = point
	t.generation++
	b := t.slab.Bytes()[:blockAlign(tableHeaderLen+n*tableRowLen)]
	clear(b)
	putTableHeader(b, &table{Journal: s.o.Journal, Generation: t.generation, SlotBytes: slotBytes, Point: point}, n)
	end := tableHeaderLen
	for i := range rows {
		if row := &rows[i]; !row.st.dropped {
			putTableRow(b[end:], row.st.id, row.c)
			end += tableRowLen
		}
	}
	for _, st := range s.order {
		if st.anew {
			putTableBegin(b[end:], tableBegin{Stream: st.id, First: st.first})
			end += tableRowLen
		}
	}
	sealTable(b[:end])
	if grow {
		s.newTable(path, slotBytes, end, done)
		return
	}
	off := int64(t.generation%2) * int64(slotBytes)
	s.do(ring.Op{Kind: ring.WriteSync, FD: t.fd, Off: off, Buf: b}, func(op *ring.Op) { s.tableWritten(path, op.Err, done) })
}

func (s *Store) tableWritten(path string, err error, done func()) {
	if err != nil {
		s.fail("write checkpoint table", path, err)
		return
	}
	done()
}

// newTable writes a table complete and flushed before it gets the name. The content goes into both slots, so that both
// are written; the next generation replaces the older one as always.
func (s *Store) newTable(path string, slotBytes, used int, done func()) {
	t := &s.table
	if s.err != nil {
		return // as in chain
	}
	b := t.slab.Bytes()[:slotBytes]
	clear(b[used:])
	tmp := path + tmpSuffix
	fd := -1
	fail := func(op *ring.Op) bool {
		switch {
		case op.Err == nil:
			return false
		case noSpace(op.Err):
			if fd >= 0 {
				s.do(ring.Op{Kind: ring.Close, FD: fd}, func(*ring.Op) {})
			}
			s.starve("make checkpoint table", op.Err, func() { s.newTable(path, slotBytes, used, done) })
		case noFiles(op.Err) && s.starveFiles("make checkpoint table", op.Err, func() { s.newTable(path, slotBytes, used, done) }):
		default:
			s.fail("make checkpoint table", tmp, op.Err)
		}
		return true
	}
	s.do(ring.Op{Kind: ring.Open, Path: tmp, Flags: ring.Create}, func(op *ring.Op) {
		if fail(op) {
			return
		}
		fd = op.FD
		steps := []ring.Op{
			{Kind: ring.Truncate, FD: fd},
			{Kind: ring.Write, FD: fd, Buf: b},
			{Kind: ring.Write, FD: fd, Off: int64(slotBytes), Buf: b},
			{Kind: ring.Sync, FD: fd},
			{Kind: ring.Rename, Path: tmp, Path2: path},
			{Kind: ring.SyncDir, Path: filepath.Dir(path)},
		}
		if t.fd >= 0 {
			steps = append(steps, ring.Op{Kind: ring.Close, FD: t.fd})
		}
		s.sequence(steps, fail, func() {
			t.fd, t.slotBytes = fd, slotBytes
			s.tableWritten(path, nil, done)
		})
	})
}
