package ledger

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
)

// RecordVersion is the newest format version of a ledger record's value. It is written where there are items of members,
// recordVersion1 elsewhere.
const (
	RecordVersion  = 2
	recordVersion1 = 1
)

// MaxRecord is the largest value that AppendRecord makes, in bytes.
const MaxRecord = 256 << 10

// ErrRecord is matched by every error about a ledger record or snapshot that can't be what the ledger has written.
var ErrRecord = errors.New("damaged ledger record")

// ofMember is set in the kind of an item whose cursor belongs to a member.
const ofMember = 0x80

// Kind is the kind of a record's item.
type Kind uint8

// The kinds, as they are recorded; never renumbered.
const (
	KindStart Kind = iota + 1
	KindDeliver
	KindAck
	KindFail
	KindExhausted
	KindDrop
	KindForget
)

func (k Kind) String() string {
	if int(k) < len(kindNames) && kindNames[k] != "" {
		return kindNames[k]
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

var kindNames = [...]string{
	KindStart: "START", KindDeliver: "DELIVER", KindAck: "ACK", KindFail: "FAIL",
	KindExhausted: "EXHAUSTED", KindDrop: "DROP", KindForget: "FORGET",
}

const (
	itemHeader    = 1 + 3*2 // without the member
	maxItemHeader = itemHeader + 8
	deliverBytes  = 8 + 4 + 8
	runBytes      = 8 + 4
	failBytes     = 8 + 2 + 1 + 4 + 8
)

// Item is one decoded item. Elements are read with Run, Delivery and Failure; they alias the record.
type Item struct {
	Kind  Kind
	Key   Key
	Floor Sequence // START
	Owner Owner    // DELIVER
	// LeaseUntilMs is DELIVER's wall-clock deadline.
	LeaseUntilMs uint64
	Seq, Letters Sequence // EXHAUSTED
	// Len is the number of elements of DELIVER, ACK, DROP and FAIL.
	Len      int
	elements []byte
}

// Run returns element i of an ACK, DROP or DELIVER.
func (it *Item) Run(i int) (first Sequence, count uint32) {
	size := runBytes
	if it.Kind == KindDeliver {
		size = deliverBytes
	}
	b := it.elements[i*size:]
	return Sequence(binary.BigEndian.Uint64(b)), binary.BigEndian.Uint32(b[8:])
}

// Delivery returns the first delivery id of element i of a DELIVER.
func (it *Item) Delivery(i int) DeliveryID {
	return DeliveryID(binary.BigEndian.Uint64(it.elements[i*deliverBytes+12:]))
}

// Failure is an element of a FAIL.
type Failure struct {
	Sequence Sequence
	Failures uint16 // in total, with this one
	Reason   Reason
	DelayMs  uint32 // before the next attempt
	DueMs    uint64 // its wall-clock time
}

// Failure returns element i of a FAIL.
func (it *Item) Failure(i int) Failure {
	b := it.elements[i*failBytes:]
	return Failure{
		Sequence: Sequence(binary.BigEndian.Uint64(b)),
		Failures: binary.BigEndian.Uint16(b[8:]),
		Reason:   Reason(b[10]),
		DelayMs:  binary.BigEndian.Uint32(b[11:]),
		DueMs:    binary.BigEndian.Uint64(b[15:]),
	}
}

// Decoder reads the items of one record. It allocates nothing.
type Decoder struct {
	rest    []byte
	err     error
	members bool // items of members are allowed
}

// NewDecoder starts to read value, which it borrows.
func NewDecoder(value []byte) Decoder {
	switch {
	case len(value) == 0:
		return Decoder{err: fmt.Errorf("%w: empty", ErrRecord)}
	case value[0] < recordVersion1 || value[0] > RecordVersion:
		return Decoder{err: fmt.Errorf("%w: format version %d, this program knows up to %d", ErrRecord, value[0], RecordVersion)}
	case len(value) == 1:
		return Decoder{err: fmt.Errorf("%w: no items", ErrRecord)}
	}
	return Decoder{rest: value[1:], members: value[0] > recordVersion1}
}

// Err returns what is wrong with the record, nil at its regular end.
func (d *Decoder) Err() error { return d.err }

func (d *Decoder) fail(it *Item, what string) bool {
	d.err = fmt.Errorf("%w: %s item of %s: %s", ErrRecord, it.Kind, it.Key, what)
	return false
}

// Next reads the next item and checks all of it. It returns false at the end and at an error.
func (d *Decoder) Next(it *Item) bool {
	if d.err != nil || len(d.rest) == 0 {
		return false
	}
	if len(d.rest) < itemHeader {
		d.err = fmt.Errorf("%w: ends within an item's header", ErrRecord)
		return false
	}
	b := d.rest
	*it = Item{Kind: Kind(b[0]), Key: Key{
		Group: binary.BigEndian.Uint16(b[1:]), Topic: binary.BigEndian.Uint16(b[3:]), Partition: binary.BigEndian.Uint16(b[5:]),
	}}
	b = b[itemHeader:]
	if d.members && it.Kind&ofMember != 0 {
		it.Kind &^= ofMember
		if len(b) < 8 {
			return d.fail(it, "ends within its header")
		}
		if it.Key.Member = binary.BigEndian.Uint64(b); it.Key.Member == 0 {
			return d.fail(it, "is of member 0")
		}
		b = b[8:]
	}
	return d.body(it, b)
}

// body reads what follows an item's header.
func (d *Decoder) body(it *Item, b []byte) bool {
	switch it.Kind {
	case KindStart:
		if len(b) < 8 {
			return d.fail(it, "ends early")
		}
		it.Floor = Sequence(binary.BigEndian.Uint64(b))
		if it.Floor > maxSequence {
			return d.fail(it, "floor out of range")
		}
		d.rest = b[8:]
		return true
	case KindDeliver:
		if len(b) < 24 {
			return d.fail(it, "ends early")
		}
		it.Owner = Owner{binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:])}
		it.LeaseUntilMs = binary.BigEndian.Uint64(b[16:])
		return d.elements(it, b[24:], deliverBytes)
	case KindAck, KindDrop:
		return d.elements(it, b, runBytes)
	case KindFail:
		return d.elements(it, b, failBytes)
	case KindExhausted:
		if len(b) < 16 {
			return d.fail(it, "ends early")
		}
		it.Seq = Sequence(binary.BigEndian.Uint64(b))
		it.Letters = Sequence(binary.BigEndian.Uint64(b[8:]))
		d.rest = b[16:]
		return true
	case KindForget:
		d.rest = b
		return true
	default:
		return d.fail(it, "unknown kind")
	}
}

// maxSequence leaves room for arithmetic on sequences.
const maxSequence = 1<<63 - 1

func (d *Decoder) elements(it *Item, b []byte, size int) bool {
	if len(b) < 4 {
		return d.fail(it, "ends early")
	}
	n := uint64(binary.BigEndian.Uint32(b))
	b = b[4:]
	if n == 0 {
		return d.fail(it, "has no elements")
	}
	if n*uint64(size) > uint64(len(b)) {
		return d.fail(it, "ends early")
	}
	it.Len = int(n)
	it.elements, d.rest = b[:it.Len*size], b[it.Len*size:]
	if it.Kind == KindFail {
		return d.checkFailures(it)
	}
	prev := Sequence(0)
	for i := range it.Len {
		first, count := it.Run(i)
		if first == 0 || count == 0 || first > maxSequence {
			return d.fail(it, "run out of range")
		}
		if it.Kind != KindDeliver {
			if first <= prev {
				return d.fail(it, "runs out of order")
			}
			prev = first + Sequence(count) - 1
		}
	}
	return true
}

func (d *Decoder) checkFailures(it *Item) bool {
	prev := Sequence(0)
	for i := range it.Len {
		f := it.Failure(i)
		switch {
		case f.Sequence <= prev || f.Sequence > maxSequence:
			return d.fail(it, "sequences out of order")
		case f.Failures == 0 || f.Failures > maxFailures:
			return d.fail(it, "failures out of range")
		case f.Reason < ReasonNack || f.Reason > ReasonRejected:
			return d.fail(it, "unknown reason")
		}
		prev = f.Sequence
	}
	return true
}

// writer appends items to a record, whose version is the byte at start, until it is full.
type writer struct {
	buf    []byte
	start  int
	limit  int
	wallMs uint64
}

// room returns how many elements of size, after a fixed part, still fit.
func (w *writer) room(fixed, size int) int {
	left := w.limit - len(w.buf) - fixed
	if left < 0 {
		return 0
	}
	if size == 0 {
		return 1
	}
	return left / size
}

func (w *writer) header(kind Kind, k Key) {
	if k.Member != 0 {
		kind |= ofMember
		w.buf[w.start] = RecordVersion
	}
	w.buf = append(w.buf, byte(kind))
	w.buf = binary.BigEndian.AppendUint16(w.buf, k.Group)
	w.buf = binary.BigEndian.AppendUint16(w.buf, k.Topic)
	w.buf = binary.BigEndian.AppendUint16(w.buf, k.Partition)
	if k.Member != 0 {
		w.u64(k.Member)
	}
}

func (w *writer) u64(v uint64) { w.buf = binary.BigEndian.AppendUint64(w.buf, v) }
func (w *writer) u32(v uint32) { w.buf = binary.BigEndian.AppendUint32(w.buf, v) }

// take moves the events of q into the record, in the order in which they have to be applied, and reports whether all of
// them found room.
func (w *writer) take(q *queue) bool {
	k, opts := q.cursor.key, q.cursor.opts
	if q.seek {
		if w.room(maxItemHeader+8, 0) == 0 {
			return false
		}
		w.header(KindStart, k)
		w.u64(uint64(q.floor))
		q.seek = false
	}
	for len(q.delivers) > 0 {
		n := w.room(maxItemHeader+28, deliverBytes)
		if n == 0 {
			return false
		}
		w.delivers(k, &q.delivers, n, w.wallMs+uint64(opts.Lease.Milliseconds()))
	}
	if q.acks = merge(q.acks); !w.runs(KindAck, k, &q.acks) {
		return false
	}
	if !w.failures(k, &q.fails) {
		return false
	}
	for len(q.parks) > 0 {
		if w.room(maxItemHeader+16, 0) == 0 {
			return false
		}
		w.header(KindExhausted, k)
		w.u64(uint64(q.parks[0].seq))
		w.u64(uint64(q.parks[0].letters))
		q.parks = shift(q.parks, 1)
	}
	if q.drops = merge(q.drops); !w.runs(KindDrop, k, &q.drops) {
		return false
	}
	if q.forget {
		if w.room(maxItemHeader, 0) == 0 {
			return false
		}
		w.header(KindForget, k)
		q.forget = false
	}
	return true
}

// delivers writes an item with the first runs that were delivered to the same owner, at most limit.
func (w *writer) delivers(k Key, list *[]deliverRun, limit int, until uint64) {
	owner, n := (*list)[0].owner, 1
	for n < len(*list) && n < limit && (*list)[n].owner == owner {
		n++
	}
	w.header(KindDeliver, k)
	w.u64(owner.Member)
	w.u64(owner.Epoch)
	w.u64(until)
	w.u32(uint32(n))
	for _, d := range (*list)[:n] {
		w.u64(uint64(d.first))
		w.u32(d.count)
		w.u64(uint64(d.delivery))
	}
	*list = shift(*list, n)
}

func (w *writer) runs(kind Kind, k Key, list *[]run) bool {
	if len(*list) == 0 {
		return true
	}
	n := min(len(*list), w.room(maxItemHeader+4, runBytes))
	if n == 0 {
		return false
	}
	w.header(kind, k)
	w.u32(uint32(n))
	for _, r := range (*list)[:n] {
		w.u64(uint64(r.first))
		w.u32(r.count)
	}
	*list = shift(*list, n)
	return len(*list) == 0
}

func (w *writer) failures(k Key, list *[]failure) bool {
	if len(*list) == 0 {
		return true
	}
	n := min(len(*list), w.room(maxItemHeader+4, failBytes))
	if n == 0 {
		return false
	}
	slices.SortFunc(*list, func(a, b failure) int { return cmp.Compare(a.seq, b.seq) })
	w.header(KindFail, k)
	w.u32(uint32(n))
	for _, f := range (*list)[:n] {
		w.u64(uint64(f.seq))
		w.buf = binary.BigEndian.AppendUint16(w.buf, f.failures)
		w.buf = append(w.buf, byte(f.reason))
		w.u32(f.delayMs)
		w.u64(w.wallMs + uint64(f.delayMs))
	}
	*list = shift(*list, n)
	return len(*list) == 0
}

// shift removes the first n elements and keeps the memory.
func shift[T any](s []T, n int) []T { return s[:copy(s, s[n:])] }
