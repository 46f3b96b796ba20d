package wal

import (
	"encoding/binary"
	"errors"
	"slices"
	"sort"

	"github.com/cespare/xxhash/v2"
)

// An index file (MMIX) stands beside each segment that is full, and beside the newest one after a clean shutdown. It is
// redundant: where it is missing or damaged the segment is read once and the index made again.
//
//	 0      4   5    6     8         10   12         16       24      32       36   40       64
//	+------+---+----+-----+---------+----+----------+--------+-------+--------+----+--------+--------+------+
//	|MMIX  |ver|zero|topic|partition|zero|entries n |base_seq|covered|blocks m|crc |zero    |n entries|m sums|
//	|      |u8 |u8  |u16  |u16      |u16 |u32       |u64     |u64    |u32     |u32 |24 bytes|        |u64   |
//	+------+---+----+-----+---------+----+----------+--------+-------+--------+----+--------+--------+------+
//
//	entry: sequence u64, timestamp_unix_ms u64, file_offset u32, record_len u32, 8 zero bytes
//
// covered is the length in bytes of the segment that the index describes, crc is CRC-32C over the whole file without
// itself. There is one entry for the first record that starts in each 64 KiB of the segment, and one sum for each 64 KiB,
// the last one possibly shorter: XXH64 over the bytes, with a seed made of topic, partition, base sequence and offset, so
// that well-formed bytes of another place or segment don't pass. A sum of 0 means that it is not known.
const (
	indexVersion   = 1
	indexHeaderLen = 64
	indexEntryLen  = 32
	indexCRCOffset = 36

	// indexBlock is the distance in bytes of index entries and the unit of the segment's sums.
	indexBlock = 64 << 10
)

var magicIndex = [4]byte{'M', 'M', 'I', 'X'}

// indexEntry locates one record.
type indexEntry struct {
	Sequence    Sequence
	TimestampMs uint64
	Offset      uint32
	RecordLen   uint32
}

// segIndex is the index of a segment in memory.
type segIndex struct {
	entries []indexEntry
	// sums holds one sum per complete indexBlock, and one for the rest at the end of a segment that is full. 0: unknown.
	sums []uint64
	// covered is the length of the segment that entries and sums describe.
	covered int64
	// from is where entries begin to be known: segmentHeaderLen, or more where the segment was continued after a
	// restart and its older part hasn't been looked at.
	from int64
}

// find returns the entry to start from to reach seq: the last one at or before it. ok is false where there is none.
func (x *segIndex) find(seq Sequence) (indexEntry, bool) {
	i := sort.Search(len(x.entries), func(i int) bool { return x.entries[i].Sequence > seq })
	if i == 0 {
		return indexEntry{}, false
	}
	return x.entries[i-1], true
}

// findTime returns the entry to start from to reach the first record at or after ms: the last one before it, or the
// first of all.
func (x *segIndex) findTime(ms uint64) (indexEntry, bool) {
	if len(x.entries) == 0 {
		return indexEntry{}, false
	}
	i := sort.Search(len(x.entries), func(i int) bool { return x.entries[i].TimestampMs >= ms })
	return x.entries[max(i-1, 0)], true
}

// sum returns the sum of the block that starts at off and ends at end, or 0 where it is not known.
func (x *segIndex) sum(off, end int64) uint64 {
	i := int(off / indexBlock)
	if i >= len(x.sums) || (end-off < indexBlock && end != x.covered) {
		return 0
	}
	return x.sums[i]
}

// blockSeed returns the seed of the sum of the block at off.
func blockSeed(id StreamID, base Sequence, off int64) uint64 {
	var b [20]byte
	binary.BigEndian.PutUint16(b[0:], id.Topic)
	binary.BigEndian.PutUint16(b[2:], id.Partition)
	binary.BigEndian.PutUint64(b[4:], uint64(base))
	binary.BigEndian.PutUint64(b[12:], uint64(off))
	return xxhash.Sum64(b[:])
}

// indexBuilder makes a segment's index from its bytes in order.
type indexBuilder struct {
	segIndex
	id   StreamID
	base Sequence
	// off is how far the segment's bytes have been hashed.
	off    int64
	digest xxhash.Digest
	// marked is the first block without an entry yet.
	marked int64
	// blind says that the hash of the block at off is not known, since its start was not seen.
	blind bool
}

// start prepares the builder for the segment's bytes from off on. Entries and sums of what lies before are not known.
func (b *indexBuilder) start(id StreamID, base Sequence, off int64) {
	b.id, b.base, b.off = id, base, off
	b.entries, b.sums = b.entries[:0], b.sums[:0]
	b.covered = off
	b.from = max(off, segmentHeaderLen)
	b.marked = off / indexBlock
	for range off / indexBlock {
		b.sums = append(b.sums, 0)
	}
	b.blind = off%indexBlock != 0
	b.digest.ResetWithSeed(blockSeed(id, base, off))
}

// write hashes the segment's next bytes.
func (b *indexBuilder) write(p []byte) {
	for len(p) > 0 {
		n := min(int(indexBlock-b.off%indexBlock), len(p))
		if !b.blind {
			_, _ = b.digest.Write(p[:n])
		}
		b.off += int64(n)
		p = p[n:]
		if b.off%indexBlock == 0 {
			b.endBlock()
		}
	}
	b.covered = b.off
}

func (b *indexBuilder) endBlock() {
	b.sums = append(b.sums, b.blockSum())
	b.blind = false
	b.digest.ResetWithSeed(blockSeed(b.id, b.base, b.off))
}

func (b *indexBuilder) blockSum() uint64 {
	if b.blind {
		return 0
	}
	return max(b.digest.Sum64(), 1)
}

// finish ends the segment: the block at its end gets its sum.
func (b *indexBuilder) finish() {
	if b.off%indexBlock != 0 {
		b.sums = append(b.sums, b.blockSum())
	}
}

// complete tells whether the index describes the segment from its first record to covered.
func (b *indexBuilder) complete() bool {
	return b.from == segmentHeaderLen && !slices.Contains(b.sums, 0)
}

// mark gives the record at off an entry if it is the first of its block.
func (b *indexBuilder) mark(r *Record, off int64, size int) {
	if block := off / indexBlock; block >= b.marked {
		b.marked = block + 1
		b.entries = append(b.entries, indexEntry{
			Sequence: r.Sequence, TimestampMs: r.TimestampMs, Offset: uint32(off), RecordLen: uint32(size - recordLenBias),
		})
	}
}

// markRun marks the records of data, which is to stand at off, and returns the last one's timestamp.
func (b *indexBuilder) markRun(data []byte, off int64) (lastMs uint64) {
	var r Record
	for len(data) > 0 {
		n := PeekRecord(data, &r)
		b.mark(&r, off, n)
		data = data[n:]
		off += int64(n)
	}
	return r.TimestampMs
}

// indexSize returns the length in bytes of the index file.
func indexSize(x *segIndex) int { return indexHeaderLen + indexEntryLen*len(x.entries) + 8*len(x.sums) }

// putIndex encodes an index into dst, which has indexSize bytes.
func putIndex(dst []byte, id StreamID, base Sequence, x *segIndex) {
	dst = dst[:indexSize(x)]
	clear(dst[:indexHeaderLen])
	copy(dst, magicIndex[:])
	dst[4] = indexVersion
	binary.BigEndian.PutUint16(dst[6:], id.Topic)
	binary.BigEndian.PutUint16(dst[8:], id.Partition)
	binary.BigEndian.PutUint32(dst[12:], uint32(len(x.entries)))
	binary.BigEndian.PutUint64(dst[16:], uint64(base))
	binary.BigEndian.PutUint64(dst[24:], uint64(x.covered))
	binary.BigEndian.PutUint32(dst[32:], uint32(len(x.sums)))
	b := dst[indexHeaderLen:]
	for i := range x.entries {
		e := &x.entries[i]
		binary.BigEndian.PutUint64(b[0:], uint64(e.Sequence))
		binary.BigEndian.PutUint64(b[8:], e.TimestampMs)
		binary.BigEndian.PutUint32(b[16:], e.Offset)
		binary.BigEndian.PutUint32(b[20:], e.RecordLen)
		binary.BigEndian.PutUint64(b[24:], 0)
		b = b[indexEntryLen:]
	}
	for _, sum := range x.sums {
		binary.BigEndian.PutUint64(b, sum)
		b = b[8:]
	}
	binary.BigEndian.PutUint32(dst[indexCRCOffset:], crcWithout(dst, indexCRCOffset))
}

var (
	errIndexLen    = errors.New("the index's length disagrees with its counts")
	errIndexOther  = errors.New("the index belongs to another segment")
	errIndexOrder  = errors.New("index entries are not in order or out of bounds")
	errIndexBlocks = errors.New("the index's sums don't cover the segment")
)

// decodeIndex decodes the index file of the segment (id, base). Errors are a *VersionError or a *CorruptionError without
// path.
func decodeIndex(b []byte, id StreamID, base Sequence) (*segIndex, error) {
	if len(b) < indexHeaderLen {
		return nil, &CorruptionError{Offset: int64(len(b)), Cause: errHeaderShort}
	}
	sum := func(b []byte) error { return checkCRC(b, indexCRCOffset) }
	if err := (format{magicIndex, indexVersion}).check(b, sum); err != nil {
		return nil, err
	}
	if err := sum(b); err != nil {
		return nil, err
	}
	n, m := int64(binary.BigEndian.Uint32(b[12:])), int64(binary.BigEndian.Uint32(b[32:]))
	covered := binary.BigEndian.Uint64(b[24:])
	switch {
	case int64(len(b)) != indexHeaderLen+n*indexEntryLen+m*8:
		return nil, &CorruptionError{Cause: errIndexLen}
	case binary.BigEndian.Uint16(b[6:]) != id.Topic || binary.BigEndian.Uint16(b[8:]) != id.Partition ||
		Sequence(binary.BigEndian.Uint64(b[16:])) != base:
		return nil, &CorruptionError{Cause: errIndexOther}
	case covered > 1<<32 || m != (int64(covered)+indexBlock-1)/indexBlock:
		return nil, &CorruptionError{Cause: errIndexBlocks}
	case b[5] != 0 || binary.BigEndian.Uint16(b[10:]) != 0 || !allZero(b[40:indexHeaderLen]):
		return nil, &CorruptionError{Cause: errHeaderZero}
	}
	x := &segIndex{covered: int64(covered), from: segmentHeaderLen,
		entries: make([]indexEntry, n), sums: make([]uint64, m)}
	if err := x.decodeEntries(b[indexHeaderLen:], base); err != nil {
		return nil, err
	}
	return x, nil
}

// decodeEntries fills the entries and sums, whose slices have their lengths.
func (x *segIndex) decodeEntries(b []byte, base Sequence) error {
	next, from := base, int64(segmentHeaderLen)
	for i := range x.entries {
		e := indexEntry{
			Sequence: Sequence(binary.BigEndian.Uint64(b[0:])), TimestampMs: binary.BigEndian.Uint64(b[8:]),
			Offset: binary.BigEndian.Uint32(b[16:]), RecordLen: binary.BigEndian.Uint32(b[20:]),
		}
		end := int64(e.Offset) + int64(e.RecordLen) + recordLenBias
		if e.Sequence < next || int64(e.Offset) < from || e.RecordLen < minRecordLen || end > x.covered ||
			binary.BigEndian.Uint64(b[24:]) != 0 {
			return &CorruptionError{Cause: errIndexOrder}
		}
		x.entries[i] = e
		next, from = e.Sequence+1, end
		b = b[indexEntryLen:]
	}
	for i := range x.sums {
		x.sums[i] = binary.BigEndian.Uint64(b)
		b = b[8:]
	}
	return nil
}
