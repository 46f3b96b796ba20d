package wal

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"path/filepath"
	"strconv"

	"github.com/mortarmq/mortarmq/ring"
)

// A partition's checkpoint (MMQC, checkpoint.mqc) is 21 bytes:
//
//	 0      4   5        9               17                21
//	+------+---+--------+---------------+-----------------+
//	|MMQC  |ver|crc u32 |next_sequence  |durable_offset   |
//	|      |u8 |        |u64            |u32              |
//	+------+---+--------+---------------+-----------------+
//
// crc is CRC-32C over the other 17 bytes. durable_offset is a block boundary in the segment that holds the record before
// next_sequence: everything below it was durable when the checkpoint was written. It is a lower bound: refreshed when a
// segment is full and at clean shutdown, while the table below is current.
const (
	checkpointVersion = 1
	checkpointLen     = 21
)

var magicCheckpoint = [4]byte{'M', 'M', 'Q', 'C'}

// checkpoint is how far one log file is durable.
type checkpoint struct {
	// Next is the sequence after the last durable record.
	Next Sequence
	// Base names the file: the sequence of its first record. 0 where only an MMQC is known.
	Base Sequence
	// Offset is where the next record goes.
	Offset uint32
	// LastMs is the timestamp of the last durable record, Unix milliseconds; 0 where only an MMQC is known.
	LastMs uint64
}

func putCheckpoint(dst []byte, c checkpoint) {
	dst = dst[:checkpointLen]
	copy(dst, magicCheckpoint[:])
	dst[4] = checkpointVersion
	binary.BigEndian.PutUint64(dst[9:], uint64(c.Next))
	binary.BigEndian.PutUint32(dst[17:], c.Offset)
	binary.BigEndian.PutUint32(dst[5:], crcWithout(dst, 5))
}

var errCheckpointLen = errors.New("a partition checkpoint has 21 bytes")

// decodeCheckpoint decodes an MMQC file. Errors are a *VersionError or a *CorruptionError without path.
func decodeCheckpoint(b []byte) (c checkpoint, err error) {
	if len(b) < 5 {
		return c, &CorruptionError{Offset: int64(len(b)), Cause: errCheckpointLen}
	}
	sum := func(b []byte) error {
		if len(b) != checkpointLen {
			return &CorruptionError{Offset: int64(len(b)), Cause: errCheckpointLen}
		}
		return checkCRC(b, 5)
	}
	if err := (format{magicCheckpoint, checkpointVersion}).check(b, sum); err != nil {
		return c, err
	}
	if err := sum(b); err != nil {
		return c, err
	}
	c.Next = Sequence(binary.BigEndian.Uint64(b[9:]))
	c.Offset = binary.BigEndian.Uint32(b[17:])
	return c, c.check()
}

var errCheckpointValue = errors.New("the checkpoint's offset or sequence is impossible")

func (c checkpoint) check() error {
	if c.Next < 2 || c.Base >= c.Next || c.Offset < segmentHeaderLen || c.Offset%ring.BlockSize != 0 {
		return &CorruptionError{Sequence: c.Next, Cause: errCheckpointValue}
	}
	return nil
}

// A journal's checkpoint table (MMCK, partitions.mmck in the journal's directory) holds, for every log file that has
// been written to, how far it is durable, and from where on the journal is still needed. It is written once per sweep,
// by one write, into the older of two slots; both are written with zeros and flushed before the file gets its name. It
// grows by a new file under the same name.
//
//	+---------------------------------+---------------------------------+
//	| slot 0                          | slot 1                          |
//	+---------------------------------+---------------------------------+
//	 0      4   5    6       8          16         20     24    28   32
//	+------+---+----+-------+----------+----------+------+-----+----+-----
//	|MMCK  |ver|zero|journal|generation|slot_bytes|rows n|epoch|zero|
//	|      |u8 |u8  |u16    |u64       |u32       |u32   |u32  |u32 |
//	+------+---+----+-------+----------+----------+------+-----+----+-----
//	 32     40      48    52        64
//	+------+-------+-----+---------+------------------------+
//	|round |commit |crc  |log point|n rows                  |
//	|u64   |u64    |u32  |u32, u64 |                        |
//	+------+-------+-----+---------+------------------------+
//
//	row: kind u8, type u8, topic u16, partition u16, last_timestamp_unix_ms u48, durable_offset u32,
//	     next_sequence u64, base_sequence u64
//
// The type is 0 for how far a file is durable. Behind those rows come, with type 1, the partitions that began anew
// (Store.Skip, Store.Reset), as long as they don't begin with record 1 or may have files of before: next_sequence is where
// they begin; timestamp, offset and base are 0.
//
// crc is CRC-32C over header and rows without itself. round is the journal round up to which everything is durable in
// the files named here, epoch that round's, commit the highest round known committed. log point is, in a cluster, epoch
// and index of the newest round of the replicated log up to there, so that a journal that was trimmed as a whole still
// knows where its log ends; zeros on a node on its own. The valid slot with the higher generation counts.
const (
	tableVersion   = 1
	tableHeaderLen = 64
	tableRowLen    = 32
	tableCRCOffset = 48
	tableFile      = "partitions.mmck"

	// minTableRows is how many rows a new table has room for.
	minTableRows = 126
	// maxTableRows bounds the streams of one store: the table is written from one slab.
	maxTableRows = (ring.MaxSlab - tableHeaderLen) / tableRowLen
)

// maxRowMs is the largest timestamp that a row can hold.
const maxRowMs = 1<<48 - 1

var magicTable = [4]byte{'M', 'M', 'C', 'K'}

// journalPoint is up to where a journal isn't needed any more.
type journalPoint struct {
	Epoch  Epoch
	Round  RoundNumber
	Commit RoundNumber
	// Log is the point of the newest round of a replicated log up to there; zero on a node on its own.
	Log LogPoint
}

// tableRow is the checkpoint of one stream.
type tableRow struct {
	Stream StreamID
	checkpoint
}

// table is the decoded content of a slot.
type table struct {
	Journal    int
	Generation uint64
	SlotBytes  int
	Point      journalPoint
	Rows       []tableRow
	Begins     []tableBegin
}

// tableBegin says with which record a partition begins that began anew.
type tableBegin struct {
	Stream StreamID
	First  Sequence
}

// Types of a row.
const (
	rowDurable = 0
	rowBegin   = 1
)

func journalPath(dir string, journal int) string {
	return filepath.Join(dir, journalDir, strconv.Itoa(journal))
}

// tableSlotBytes returns the length of a slot with room for n rows.
func tableSlotBytes(n int) int { return blockAlign(tableHeaderLen + n*tableRowLen) }

// putTableHeader encodes t without its rows into dst; the caller puts t's rows behind it with putTableRow and ends with
// sealTable.
func putTableHeader(dst []byte, t *table, rows int) {
	clear(dst[:tableHeaderLen])
	copy(dst, magicTable[:])
	dst[4] = tableVersion
	binary.BigEndian.PutUint16(dst[6:], uint16(t.Journal))
	binary.BigEndian.PutUint64(dst[8:], t.Generation)
	binary.BigEndian.PutUint32(dst[16:], uint32(t.SlotBytes))
	binary.BigEndian.PutUint32(dst[20:], uint32(rows))
	binary.BigEndian.PutUint32(dst[24:], uint32(t.Point.Epoch))
	binary.BigEndian.PutUint64(dst[32:], uint64(t.Point.Round))
	binary.BigEndian.PutUint64(dst[40:], uint64(t.Point.Commit))
	binary.BigEndian.PutUint32(dst[52:], uint32(t.Point.Log.Epoch))
	binary.BigEndian.PutUint64(dst[56:], uint64(t.Point.Log.Index))
}

// putTableRow encodes one row into the first tableRowLen bytes of dst.
func putTableRow(dst []byte, id StreamID, c checkpoint) {
	lastMs := min(c.LastMs, maxRowMs)
	dst = dst[:tableRowLen]
	dst[0], dst[1] = uint8(id.Kind), rowDurable
	binary.BigEndian.PutUint16(dst[2:], id.Topic)
	binary.BigEndian.PutUint16(dst[4:], id.Partition)
	binary.BigEndian.PutUint16(dst[6:], uint16(lastMs>>32))
	binary.BigEndian.PutUint32(dst[8:], uint32(lastMs))
	binary.BigEndian.PutUint32(dst[12:], c.Offset)
	binary.BigEndian.PutUint64(dst[16:], uint64(c.Next))
	binary.BigEndian.PutUint64(dst[24:], uint64(c.Base))
}

// putTableBegin encodes a row that says where a partition begins into the first tableRowLen bytes of dst.
func putTableBegin(dst []byte, b tableBegin) {
	putTableRow(dst, b.Stream, checkpoint{Next: b.First})
	dst[1] = rowBegin
}

// sealTable puts the checksum over header and rows, which are the whole of b.
func sealTable(b []byte) {
	binary.BigEndian.PutUint32(b[tableCRCOffset:], crcWithout(b, tableCRCOffset))
}

var (
	errTableRows    = errors.New("the table's rows don't fit its slot")
	errTableRow     = errors.New("a row of the table is malformed")
	errTablePoint   = errors.New("the table's point in the replicated log is impossible")
	errTableJournal = errors.New("the table belongs to another journal")
)

// decodeTable decodes one slot. ok is false, without an error, where the slot was never written. Errors are a
// *VersionError or a *CorruptionError without path.
func decodeTable(b []byte, journal int) (t table, ok bool, err error) {
	if len(b) < tableHeaderLen {
		return t, false, &CorruptionError{Offset: int64(len(b)), Cause: errHeaderShort}
	}
	if allZero(b[:tableHeaderLen]) {
		return t, false, nil
	}
	n := int64(binary.BigEndian.Uint32(b[20:]))
	end := tableHeaderLen + n*tableRowLen
	sum := func(b []byte) error {
		if end > int64(len(b)) {
			return &CorruptionError{Cause: errTableRows}
		}
		return checkCRC(b[:end], tableCRCOffset)
	}
	if err := (format{magicTable, tableVersion}).check(b, sum); err != nil {
		return t, false, err
	}
	if err := sum(b); err != nil {
		return t, false, err
	}
	b = b[:end]
	t.Journal = int(binary.BigEndian.Uint16(b[6:]))
	t.Generation = binary.BigEndian.Uint64(b[8:])
	t.SlotBytes = int(binary.BigEndian.Uint32(b[16:]))
	t.Point.Epoch = Epoch(binary.BigEndian.Uint32(b[24:]))
	t.Point.Round = RoundNumber(binary.BigEndian.Uint64(b[32:]))
	t.Point.Commit = RoundNumber(binary.BigEndian.Uint64(b[40:]))
	t.Point.Log = LogPoint{Epoch: Epoch(binary.BigEndian.Uint32(b[52:])), Index: LogIndex(binary.BigEndian.Uint64(b[56:]))}
	switch {
	case t.Journal != journal:
		return t, false, &CorruptionError{Cause: errTableJournal}
	case b[5] != 0 || binary.BigEndian.Uint32(b[28:]) != 0:
		return t, false, &CorruptionError{Cause: errHeaderZero}
	case (t.Point.Log.Epoch == 0) != (t.Point.Log.Index == 0):
		return t, false, &CorruptionError{Cause: errTablePoint}
	}
	t.Rows = make([]tableRow, 0, n)
	for off := tableHeaderLen; off < len(b); off += tableRowLen {
		if err := t.decodeRow(b[off : off+tableRowLen]); err != nil {
			return t, false, &CorruptionError{Offset: int64(off), Cause: err}
		}
	}
	return t, true, nil
}

// decodeRow adds the row in b.
func (t *table) decodeRow(b []byte) error {
	var r tableRow
	r.decode(b)
	if b[1] == rowBegin {
		if r.Stream.Kind != Messages || r.checkpoint != (checkpoint{Next: r.Next}) || r.Next < firstSequence {
			return errTableRow
		}
		t.Begins = append(t.Begins, tableBegin{Stream: r.Stream, First: r.Next})
		return nil
	}
	if r.Stream.Kind < Messages || r.Stream.Kind > Metadata || b[1] != rowDurable || r.Base < 1 || r.check() != nil ||
		len(t.Begins) > 0 {
		return errTableRow
	}
	t.Rows = append(t.Rows, r)
	return nil
}

// decode reads the fields of the row in b.
func (r *tableRow) decode(b []byte) {
	r.Stream = StreamID{Kind: StreamKind(b[0]), Topic: binary.BigEndian.Uint16(b[2:]),
		Partition: binary.BigEndian.Uint16(b[4:])}
	r.LastMs = uint64(binary.BigEndian.Uint16(b[6:]))<<32 | uint64(binary.BigEndian.Uint32(b[8:]))
	r.Offset = binary.BigEndian.Uint32(b[12:])
	r.Next = Sequence(binary.BigEndian.Uint64(b[16:]))
	r.Base = Sequence(binary.BigEndian.Uint64(b[24:]))
}

// A snapshot file holds a state that replaces the records up to its position: MMMS (mmms-<offset>-<epoch>.bin) the
// metadata, MMCU (cursor.mqc) the delivery cursors, MMDD (dedup.mmdd in the journal's directory) the producers' windows.
//
//	 0      4   5       8     12      16        24       32
//	+------+---+-------+-----+-------+---------+--------+------+
//	|magic |ver|zero   |crc  |epoch  |position |length  |data  |
//	|      |u8 |3 bytes|u32  |u32    |u64      |u64     |      |
//	+------+---+-------+-----+-------+---------+--------+------+
//
// crc is CRC-32C over the whole file without itself. The data is its owner's.
const (
	snapshotVersion   = 1
	snapshotHeaderLen = 32
	snapshotCRCOffset = 8
	// MaxSnapshotBytes bounds the data of a snapshot.
	MaxSnapshotBytes = 1 << 30
)

var (
	magicMetadataSnapshot = [4]byte{'M', 'M', 'M', 'S'}
	magicCursors          = [4]byte{'M', 'M', 'C', 'U'}
	magicDedup            = [4]byte{'M', 'M', 'D', 'D'}
)

// snapshotHeader is the decoded header of a snapshot file.
type snapshotHeader struct {
	Kind     SnapshotKind
	Epoch    Epoch
	Position uint64
	Length   uint64
	crc      uint32
}

func snapshotMagic(k SnapshotKind) [4]byte {
	switch k {
	case SnapshotCursors:
		return magicCursors
	case SnapshotDedup:
		return magicDedup
	case SnapshotMetadata:
	}
	return magicMetadataSnapshot
}

// putSnapshotHeader encodes the header of a snapshot with this data.
func putSnapshotHeader(dst []byte, h *snapshotHeader, data []byte) {
	dst = dst[:snapshotHeaderLen]
	clear(dst)
	magic := snapshotMagic(h.Kind)
	copy(dst, magic[:])
	dst[4] = snapshotVersion
	binary.BigEndian.PutUint32(dst[12:], uint32(h.Epoch))
	binary.BigEndian.PutUint64(dst[16:], h.Position)
	binary.BigEndian.PutUint64(dst[24:], uint64(len(data)))
	binary.BigEndian.PutUint32(dst[snapshotCRCOffset:],
		crc32.Update(crcWithout(dst, snapshotCRCOffset), castagnoli, data))
}

var errSnapshotLen = errors.New("the file's length disagrees with the snapshot's")

// decodeSnapshotHeader decodes the header of a snapshot file of size bytes, of which b is the whole or the beginning. Errors are a *VersionError or a
// *CorruptionError without path.
func decodeSnapshotHeader(b []byte, kind SnapshotKind, size int64) (h snapshotHeader, err error) {
	if len(b) < snapshotHeaderLen {
		return h, &CorruptionError{Offset: int64(len(b)), Cause: errHeaderShort}
	}
	sum := func(b []byte) error {
		if int64(len(b)) != size {
			return errSnapshotLen // unknown without the rest
		}
		h := snapshotHeader{crc: binary.BigEndian.Uint32(b[snapshotCRCOffset:])}
		return h.checkData(b, b[snapshotHeaderLen:])
	}
	if err := (format{snapshotMagic(kind), snapshotVersion}).check(b, sum); err != nil {
		return h, err
	}
	h.Kind = kind
	h.crc = binary.BigEndian.Uint32(b[snapshotCRCOffset:])
	h.Epoch = Epoch(binary.BigEndian.Uint32(b[12:]))
	h.Position = binary.BigEndian.Uint64(b[16:])
	h.Length = binary.BigEndian.Uint64(b[24:])
	switch {
	case h.Length > MaxSnapshotBytes || int64(h.Length)+snapshotHeaderLen != size:
		return h, &CorruptionError{Offset: size, Cause: errSnapshotLen}
	case b[5] != 0 || b[6] != 0 || b[7] != 0:
		return h, &CorruptionError{Cause: errHeaderZero}
	}
	return h, nil
}

// checkData checks the data of the snapshot whose encoded header is head.
func (h *snapshotHeader) checkData(head, data []byte) error {
	got := crc32.Update(crcWithout(head[:snapshotHeaderLen], snapshotCRCOffset), castagnoli, data)
	if got != h.crc {
		return &CorruptionError{Cause: &checksumError{uint64(h.crc), uint64(got)}}
	}
	return nil
}
