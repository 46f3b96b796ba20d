package sim

import (
	"bytes"
	"path"
	"strconv"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/wal"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// What nodes vouch for must be on their disks: of every so many frames and answers one is compared with what a power cut at
// that moment would leave, in some of the runs, since it takes reading whole disks.
const (
	// vouchRuns is of how many runs one does so.
	vouchRuns = 12
	// flushedEvery and visibleEvery are of how many FLUSHED frames, and of how many acknowledgements and deliveries, one is
	// looked at.
	flushedEvery = 64
	visibleEvery = 192
)

// vouching counts what is to be looked at; nil: nothing is, in this run.
type vouching struct {
	flushed, visible int
	buf              []byte
}

// flushed checks a FLUSHED frame that a node sends: its journal has a round as new as the one that it speaks of.
func (w *world) flushed(h *host, f *peerwire.Flushed) {
	if w.vouched == nil || h.victim || f.Index == 0 {
		return
	}
	if w.vouched.flushed++; w.vouched.flushed%flushedEvery != 0 {
		return
	}
	newest := wal.LogIndex(0)
	ofLog := func(p string) bool {
		return journalFile(p) && path.Base(path.Dir(p)) == strconv.Itoa(int(f.Log))
	}
	w.vouched.eachDurable(h, ofLog, func(p string, b []byte) {
		_ = wal.InspectReader(p, bytes.NewReader(b), int64(len(b)), func(f wal.Finding) error {
			if r, ok := f.(*wal.RoundFound); ok && r.Position != nil {
				newest = max(newest, r.Position.Point.Index)
			}
			return nil
		})
	})
	if newest < wal.LogIndex(f.Index) {
		w.fail("node %d says that it has flushed round %d of log %d, its disk has only those up to %d for sure", h.id, f.Index, f.Log, newest)
	}
	w.count(flushedCompared)
}

// visible checks a message that a client hears of: a majority of the disks has it.
func (w *world) visible(p place, id [2]uint64) {
	if w.vouched == nil {
		return
	}
	for _, h := range w.hosts {
		if h.victim {
			return // what it has lost since may have counted
		}
	}
	if w.vouched.visible++; w.vouched.visible%visibleEvery != 0 {
		return
	}
	var on int
	for _, h := range w.hosts {
		if w.vouched.onDisk(h, p, valueOf(id[0], id[1])) {
			on++
		}
	}
	if on < len(w.hosts)/2+1 {
		w.fail("clients see %d of topic %d, partition %d, which %d of %d disks have for sure", p.seq, p.topic, p.partition, on, len(w.hosts))
	}
	w.count(visibleCompared)
}

// onDisk tells whether a disk holds a record for sure, in the journal or in a segment.
func (v *vouching) onDisk(h *host, at place, value []byte) (found bool) {
	stream := wal.StreamID{Kind: wal.Messages, Topic: at.topic, Partition: at.partition}
	records := func(p string) bool { return !found && (journalFile(p) || path.Ext(p) == ".mqs") }
	v.eachDurable(h, records, func(p string, b []byte) {
		_ = wal.InspectReader(p, bytes.NewReader(b), int64(len(b)), func(f wal.Finding) error {
			r, ok := f.(*wal.RecordFound)
			if ok && r.Stream == stream && uint64(r.Record.Sequence) == at.seq && bytes.Equal(r.Record.Value, value) {
				found = true
				return errFull
			}
			return nil
		})
	})
	return found
}

func journalFile(p string) bool { return path.Base(path.Dir(path.Dir(p))) == "journal" }

// eachDurable calls f for the files that are wanted as a power cut now would leave them, but for those that were set aside.
func (v *vouching) eachDurable(h *host, want func(p string) bool, f func(p string, b []byte)) {
	left := h.disk.Crash(func(int, simdisk.Item) simdisk.Fate { return simdisk.Drop })
	for _, p := range left.Paths() {
		if want(p) && !quarantined(p) {
			v.buf = left.ReadFileInto(v.buf, p)
			f(p, v.buf)
		}
	}
}
