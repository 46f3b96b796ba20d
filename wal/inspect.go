package wal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/mortarmq/mortarmq/ring"
)

// Finding is one thing that Inspect found in a file: *LogFound, *RecordFound, *PaddingFound, *IndexFound,
// *CheckpointFound, *TableFound, *MarkFound, *ReplicaFound, *CatchupFound, *SnapshotFound, *JournalFound, *RoundFound,
// *UnusedFound or *Damage.
// Findings come in the order of the file.
type Finding interface{ finding() }

// LogFound is the header of a log file: a partition's segment (MMQS), the delivery ledger (MMLQ) or the metadata
// mutation log (MMML), as Stream.Kind tells.
type LogFound struct {
	Stream    StreamID
	Journal   int
	Base      Sequence
	CreatedMs uint64
}

// RecordFound is a whole record whose checksum is right.
type RecordFound struct {
	// Offset and Length locate it in the file, in bytes.
	Offset, Length int64
	Stream         StreamID
	// Record is valid until visit returns.
	Record *Record
}

// PaddingFound is a run of zeros where records could stand: the end of a sweep, or space not used yet.
type PaddingFound struct{ Offset, Length int64 }

// IndexFound is a whole segment index (MMIX).
type IndexFound struct {
	Stream StreamID
	Base   Sequence
	// Covered is the length in bytes of the segment that it describes.
	Covered int64
	Entries []IndexEntry
	// Sums has the checksum of each 64 KiB of the segment; 0 is not known.
	Sums []uint64
}

// IndexEntry locates one record of a segment.
type IndexEntry struct {
	Sequence    Sequence
	TimestampMs uint64
	Offset      uint32
	// Length is that of the whole record, in bytes.
	Length uint32
}

// CheckpointFound is a partition's checkpoint (MMQC).
type CheckpointFound struct {
	Next   Sequence
	Offset uint32
}

// TableFound is one slot of a journal's checkpoint table (MMCK).
type TableFound struct {
	Offset     int64
	Slot       int
	Journal    int
	Generation uint64
	// Current tells the slot that counts: the newer whole one.
	Current bool
	// Epoch and Round are up to where the journal isn't needed any more, Commit the highest round known committed.
	Epoch         Epoch
	Round, Commit RoundNumber
	// Log is the newest round of the replicated log up to there; zero on a node on its own.
	Log  LogPoint
	Rows []TableRow
	// Begins are the partitions that began anew.
	Begins []TableBegin
}

// TableBegin says with which record a partition begins that began anew.
type TableBegin struct {
	Stream StreamID
	First  Sequence
}

// TableRow is how far one log file is durable.
type TableRow struct {
	Stream     StreamID
	Next, Base Sequence
	Offset     uint32
}

// MarkFound is one slot of a journal's mark (MMJM): the journal was durable up to that round.
type MarkFound struct {
	Offset     int64
	Slot       int
	Journal    int
	Generation uint64
	Epoch      Epoch
	Round      RoundNumber
	// Sum is the round's checksum.
	Sum uint64
}

// ReplicaFound is one slot of the state of a node of a cluster (MMRS).
type ReplicaFound struct {
	Offset     int64
	Slot       int
	Generation uint64
	State      ReplicaState
}

// CatchupFound is one slot of the progress of a catch-up (MMCUP).
type CatchupFound struct {
	Offset     int64
	Slot       int
	Generation uint64
	State      CatchupState
}

// SnapshotFound is a snapshot: the metadata (MMMS), the delivery cursors (MMCU) or the producers' windows (MMDD).
type SnapshotFound struct {
	Kind     SnapshotKind
	Epoch    Epoch
	Position uint64
	// Length of the data, in bytes.
	Length int64
	// Data is the owner's encoding, valid until visit returns; nil where it is larger than MaxInspectSnapshot.
	Data []byte
}

// Damage is something wrong in the file.
type Damage struct {
	// Offset is where, Length how many bytes can't be shown because of it (0 where everything else can).
	Offset, Length int64
	// Err is a *CorruptionError or a *VersionError that names the file.
	Err error
}

func (*LogFound) finding()        {}
func (*RecordFound) finding()     {}
func (*PaddingFound) finding()    {}
func (*IndexFound) finding()      {}
func (*CheckpointFound) finding() {}
func (*TableFound) finding()      {}
func (*MarkFound) finding()       {}
func (*ReplicaFound) finding()    {}
func (*CatchupFound) finding()    {}
func (*SnapshotFound) finding()   {}
func (*JournalFound) finding()    {}
func (*RoundFound) finding()      {}
func (*UnusedFound) finding()     {}
func (*Damage) finding()          {}

const (
	// MaxInspectSnapshot is the largest snapshot whose data Inspect hands over, in bytes. Larger ones are only checked.
	MaxInspectSnapshot = 64 << 20
	// maxInspectIndex bounds an index file: that of the largest segment has less than half of it.
	maxInspectIndex = 8 << 20
	// inspectWindow is how much is read at a time.
	inspectWindow = 1 << 20
)

var (
	// ErrUnknownFormat is the cause of the Damage where neither a file's name nor its content is one of this package's.
	ErrUnknownFormat = errors.New("neither name nor content is one of this broker's formats")

	errInspectLarge = errors.New("the file is larger than its format allows")
	errSlot         = errors.New("the slot is torn or damaged")
)

// Inspect reads one file of a data directory, tells visit what is in it and what is wrong with it, and goes on behind
// damage where that is possible. The file is only read, never held in memory whole, and may be in use by a broker: then
// its end may look torn. Errors are those of visit, which end the inspection, and of reading; damage is a Finding.
func Inspect(path string, visit func(Finding) error) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", path)
	}
	return (&inspector{path: path, r: f, size: info.Size(), visit: visit, onDisk: true}).run()
}

// InspectReader is Inspect for size bytes of r. path is used in errors, and where it looks like the path of a file in a
// data directory the file's own statements are compared with it.
func InspectReader(path string, r io.ReaderAt, size int64, visit func(Finding) error) error {
	return (&inspector{path: path, r: r, size: size, visit: visit}).run()
}

func (in *inspector) run() error {
	magic, err := in.at(0, len(catchupFormat.magic))
	if err != nil {
		return err
	}
	if string(magic) == catchupFormat.magic || in.named(catchupFile) {
		// Before the cursors, whose magic is the beginning of this one.
		return in.states(catchupFormat, func(off int64, slot int, generation uint64, b []byte) (Finding, error) {
			s, err := decodeCatchupState(b)
			return &CatchupFound{Offset: off, Slot: slot, Generation: generation, State: s}, err
		})
	}
	switch m := string(magic[:min(len(magic), 4)]); {
	case m == string(magicSegment[:]):
		return in.log(Messages)
	case m == string(magicLedger[:]):
		return in.log(Ledger)
	case m == string(magicMetadata[:]):
		return in.log(Metadata)
	case m == string(magicIndex[:]):
		return in.index()
	case m == string(magicCheckpoint[:]):
		return in.checkpoint()
	case m == string(magicMetadataSnapshot[:]):
		return in.snapshot(SnapshotMetadata)
	case m == string(magicCursors[:]):
		return in.snapshot(SnapshotCursors)
	case m == string(magicDedup[:]):
		return in.snapshot(SnapshotDedup)
	case m == journalMagic:
		return in.journal()
	case m == string(magicTable[:]) || in.named(tableFile):
		return in.table()
	case m == markMagic || in.named(markName):
		return in.mark()
	case m == replicaFormat.magic || in.named(replicaStateFile):
		return in.states(replicaFormat, func(off int64, slot int, generation uint64, b []byte) (Finding, error) {
			s, err := decodeReplicaState(b)
			return &ReplicaFound{Offset: off, Slot: slot, Generation: generation, State: s}, err
		})
	}
	return in.other()
}

// inspector reads one file through a window.
type inspector struct {
	path  string
	r     io.ReaderAt
	size  int64
	visit func(Finding) error
	// onDisk tells that path is a file, so that others stand beside it.
	onDisk bool

	buf  []byte
	base int64 // where in the file buf starts
}

// at returns n bytes from off, fewer only at the end of the file. They are valid until the next call.
func (in *inspector) at(off int64, n int) ([]byte, error) {
	if off >= in.size {
		return nil, nil
	}
	if int64(n) > in.size-off {
		n = int(in.size - off)
	}
	if off < in.base || off+int64(n) > in.base+int64(len(in.buf)) {
		want := int(min(int64(max(n, inspectWindow)), in.size-off))
		if cap(in.buf) < want {
			in.buf = make([]byte, want)
		}
		got, err := in.r.ReadAt(in.buf[:want], off)
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("reading %s: %w", in.path, err)
		}
		in.buf, in.base = in.buf[:got], off
	}
	b := in.buf[off-in.base:]
	return b[:min(n, len(b))], nil
}

// named tells whether the file has this name, perhaps not published yet.
func (in *inspector) named(name string) bool {
	return strings.TrimSuffix(filepath.Base(in.path), tmpSuffix) == name
}

// damage reports err, which may be an error of a decoder without a path; off is added to the offset it has.
func (in *inspector) damage(off, length int64, err error) error {
	var corrupt *CorruptionError
	var version *VersionError
	switch {
	case errors.As(err, &version):
		c := *version
		c.Path = in.path
		return in.visit(&Damage{Offset: off, Length: length, Err: &c})
	case errors.As(err, &corrupt):
		c := *corrupt
		c.Path = in.path
		c.Offset += off
		return in.visit(&Damage{Offset: c.Offset, Length: length, Err: &c})
	default:
		return in.visit(&Damage{Offset: off, Length: length, Err: &CorruptionError{Path: in.path, Offset: off, Cause: err}})
	}
}

// other is a file whose start tells nothing.
func (in *inspector) other() error {
	name := strings.TrimSuffix(filepath.Base(in.path), tmpSuffix)
	_, isJournal := parseJournalFileName(name)
	_, isSegment := parseLogName(Messages, name)
	_, isLedger := parseLogName(Ledger, name)
	_, isMetadata := parseLogName(Metadata, name)
	cause := errMagic
	switch {
	case in.size == 0:
		cause = errHeaderShort
	case isJournal:
		cause = errFileMagic
	case !isSegment && !isLedger && !isMetadata && name != ledgerActive && name != checkpointFile:
		cause = ErrUnknownFormat
	}
	return in.damage(0, in.size, cause)
}

// checkpoint is an MMQC file.
func (in *inspector) checkpoint() error {
	b, err := in.at(0, checkpointLen+1) // one more, to see that there is more
	if err != nil {
		return err
	}
	c, err := decodeCheckpoint(b)
	if err != nil {
		return in.damage(0, in.size, err)
	}
	return in.visit(&CheckpointFound{Next: c.Next, Offset: c.Offset})
}

// index is an MMIX file.
func (in *inspector) index() error {
	if in.size > maxInspectIndex {
		return in.damage(maxInspectIndex, in.size, errInspectLarge)
	}
	b, err := in.at(0, int(in.size))
	if err != nil {
		return err
	}
	if len(b) < indexHeaderLen {
		return in.damage(int64(len(b)), in.size, errHeaderShort)
	}
	id := StreamID{Kind: Messages, Topic: binary.BigEndian.Uint16(b[6:]), Partition: binary.BigEndian.Uint16(b[8:])}
	base := Sequence(binary.BigEndian.Uint64(b[16:]))
	x, err := decodeIndex(b, id, base)
	if err != nil {
		return in.damage(0, in.size, err)
	}
	found := &IndexFound{Stream: id, Base: base, Covered: x.covered, Sums: x.sums, Entries: make([]IndexEntry, len(x.entries))}
	for i, e := range x.entries {
		found.Entries[i] = IndexEntry{e.Sequence, e.TimestampMs, e.Offset, e.RecordLen + recordLenBias}
	}
	if err := in.visit(found); err != nil {
		return err
	}
	if err := in.checkPlace(id, base, indexSuffix); err != nil || !in.onDisk {
		return err
	}
	return in.checkSums(id, base, x)
}

// checkSums compares the segment beside an index with the index's sums: bytes that belong elsewhere can be well-formed.
// Where there is no segment there is nothing to compare.
func (in *inspector) checkSums(id StreamID, base Sequence, x *segIndex) error {
	path := strings.TrimSuffix(in.path, indexSuffix) + segmentSuffix
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	block := make([]byte, indexBlock)
	var digest xxhash.Digest
	for i, want := range x.sums {
		off := int64(i) * indexBlock
		n := min(indexBlock, x.covered-off)
		if want == 0 {
			continue
		}
		got, err := f.ReadAt(block[:n], off)
		if err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("reading %s: %w", path, err)
		}
		if int64(got) < n {
			err := fmt.Errorf("%s has %d bytes, its index describes %d", path, off+int64(got), x.covered)
			return in.damage(indexHeaderLen+int64(len(x.entries))*indexEntryLen+int64(i)*8, 0, err)
		}
		digest.ResetWithSeed(blockSeed(id, base, off))
		_, _ = digest.Write(block[:n])
		if sum := max(digest.Sum64(), 1); sum != want {
			err := fmt.Errorf("%s has other bytes from %d to %d than its index says: %w", path, off, off+n, &checksumError{want, sum})
			if err := in.damage(indexHeaderLen+int64(len(x.entries))*indexEntryLen+int64(i)*8, 0, err); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkPlace compares what a file of a partition says about itself with its path, as far as that tells anything.
func (in *inspector) checkPlace(id StreamID, base Sequence, suffix string) error {
	digits, ok := strings.CutSuffix(filepath.Base(in.path), suffix)
	if ok {
		if named, isLog := parseLogName(Messages, digits+segmentSuffix); isLog && named != base {
			return in.damage(0, 0, errMisplaced)
		}
	}
	dir := filepath.Dir(in.path)
	partition, okPartition := parseID(filepath.Base(dir))
	topic, okTopic := parseID(filepath.Base(filepath.Dir(dir)))
	if okPartition && okTopic && filepath.Base(filepath.Dir(filepath.Dir(dir))) == topicsDir &&
		(partition != id.Partition || topic != id.Topic) {
		return in.damage(0, 0, errMisplaced)
	}
	return nil
}

// table is an MMCK file.
func (in *inspector) table() error {
	slot := in.size / 2
	if in.size%2 != 0 || slot < tableHeaderLen || slot > ring.MaxSlab {
		return in.damage(0, in.size, errTableRows)
	}
	var found [2]*TableFound
	for i := range found {
		off := int64(i) * slot
		b, err := in.at(off, int(slot))
		if err != nil {
			return err
		}
		if len(b) < tableHeaderLen {
			return in.damage(off, in.size-off, errHeaderShort)
		}
		t, ok, err := decodeTable(b, int(binary.BigEndian.Uint16(b[6:])))
		if err == nil && ok && int64(t.SlotBytes) != slot {
			err = errTableRows
		}
		if err == nil && !ok && !allZero(b) {
			err = errSlot
		}
		if err != nil {
			if err := in.damage(off, slot, err); err != nil {
				return err
			}
			continue
		}
		if ok {
			found[i] = newTableFound(&t, i, off)
		}
	}
	switch a, b := found[0], found[1]; {
	case a != nil && (b == nil || b.Generation < a.Generation):
		a.Current = true
	case b != nil:
		b.Current = true
	}
	for _, t := range found {
		if t == nil {
			continue
		}
		if err := in.visit(t); err != nil {
			return err
		}
	}
	return nil
}

func newTableFound(t *table, slot int, off int64) *TableFound {
	f := &TableFound{Offset: off, Slot: slot, Journal: t.Journal, Generation: t.Generation,
		Epoch: t.Point.Epoch, Round: t.Point.Round, Commit: t.Point.Commit, Log: t.Point.Log, Rows: make([]TableRow, len(t.Rows))}
	for i := range t.Rows {
		r := &t.Rows[i]
		f.Rows[i] = TableRow{Stream: r.Stream, Next: r.Next, Base: r.Base, Offset: r.Offset}
	}
	for _, b := range t.Begins {
		f.Begins = append(f.Begins, TableBegin(b))
	}
	return f
}

// mark is an MMJM file. One slot may be torn: then the other one counts.
func (in *inspector) mark() error {
	for i := range markSlots {
		off := int64(i) * markSlotLen
		b, err := in.at(off, markSlotLen)
		if err != nil {
			return err
		}
		if len(b) < markSlotLen {
			return in.damage(off, int64(len(b)), errFileShort)
		}
		if allZero(b) {
			continue // never written
		}
		journal := int(binary.BigEndian.Uint16(b[6:]))
		m, ok, err := decodeMark(in.path, b, journal)
		if err == nil && !ok {
			err = errSlot
		}
		if err != nil {
			if err := in.damage(off, markSlotLen, err); err != nil {
				return err
			}
			continue
		}
		found := &MarkFound{Offset: off, Slot: i, Journal: journal, Generation: m.generation, Epoch: m.epoch, Round: m.round, Sum: m.sum}
		if err := in.visit(found); err != nil {
			return err
		}
	}
	return nil
}

// states is a slot file, an MMRS or MMCUP. One slot may be torn: then the other one counts.
func (in *inspector) states(format stateFormat, decode func(off int64, slot int, generation uint64, b []byte) (Finding, error)) error {
	for i := range stateSlots {
		off := int64(i) * stateSlotLen
		b, err := in.at(off, stateSlotLen)
		if err != nil {
			return err
		}
		if len(b) < stateSlotLen {
			return in.damage(off, int64(len(b)), errFileShort)
		}
		ok, err := format.check(in.path, b)
		if err == nil && !ok {
			err = errSlot
		}
		var found Finding
		if err == nil {
			found, err = decode(off, i, binary.BigEndian.Uint64(b[stateGenOffset:]), b)
		}
		if err != nil {
			err = in.damage(off, stateSlotLen, err)
		} else {
			err = in.visit(found)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// snapshot is an MMMS, MMCU or MMDD file.
func (in *inspector) snapshot(kind SnapshotKind) error {
	head, err := in.at(0, snapshotHeaderLen)
	if err != nil {
		return err
	}
	h, err := decodeSnapshotHeader(head, kind, in.size)
	if err != nil {
		return in.damage(0, in.size, err)
	}
	sum := crcWithout(head, snapshotCRCOffset)
	found := &SnapshotFound{Kind: kind, Epoch: h.Epoch, Position: h.Position, Length: int64(h.Length)}
	keep := h.Length <= MaxInspectSnapshot
	if keep {
		found.Data = make([]byte, 0, h.Length)
	}
	for off := int64(snapshotHeaderLen); off < in.size; {
		b, err := in.at(off, inspectWindow)
		if err != nil {
			return err
		}
		if len(b) == 0 {
			return in.damage(off, in.size-off, errFileShort)
		}
		sum = crc32.Update(sum, castagnoli, b)
		if keep {
			found.Data = append(found.Data, b...)
		}
		off += int64(len(b))
	}
	if sum != h.crc {
		return in.damage(0, in.size, &checksumError{uint64(h.crc), uint64(sum)})
	}
	return in.visit(found)
}
