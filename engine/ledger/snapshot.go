package ledger

import (
	"encoding/binary"
	"fmt"
	"slices"
	"time"
)

// SnapshotVersion is the format version of a book's snapshot:
//
//	version u8, cursors u32, then by key
//	  group u16 | topic u16 | partition u16 | member u64 | start u64 | next u64 | acked u64 | dropped u64 | buried u64 | open u32,
//	  then by sequence
//	    seq u64 | failures u16 | reason u8 | parked u8 | delay_ms u32 | due_ms u64 | letters_last u64
//
// Version 2 does not have member, which is 0; it is written where no cursor belongs to a member. Version 1 does not have
// buried either, the number of the dropped that have a dead letter; it is only read.
//
// Open messages without a failure have reason, delay_ms and due_ms 0. Everything below next that is not listed is done.
const SnapshotVersion = 3

const (
	snapshotCursor = 6 + 6*8 + 4
	snapshotEntry  = 8 + 2 + 1 + 1 + 4 + 8 + 8
)

// AppendSnapshot appends the state that the committed records up to now have made. What is queued or proposed beyond it
// does no harm: the snapshot may know of more deliveries than are on record, nothing else.
func (b *Book) AppendSnapshot(dst []byte, now time.Duration, wallMs uint64) []byte {
	all := b.Cursors()
	version := byte(2)
	if slices.ContainsFunc(all, func(c *Cursor) bool { return c.key.Member != 0 }) {
		version = SnapshotVersion
	}
	dst = append(dst, version)
	count := len(dst)
	dst = binary.BigEndian.AppendUint32(dst, 0)
	n := uint32(0)
	for _, c := range all {
		if !c.begun {
			continue
		}
		n++
		dst = binary.BigEndian.AppendUint16(dst, c.key.Group)
		dst = binary.BigEndian.AppendUint16(dst, c.key.Topic)
		dst = binary.BigEndian.AppendUint16(dst, c.key.Partition)
		if version > 2 {
			dst = binary.BigEndian.AppendUint64(dst, c.key.Member)
		}
		dst = binary.BigEndian.AppendUint64(dst, uint64(c.start))
		dst = binary.BigEndian.AppendUint64(dst, uint64(c.next))
		dst = binary.BigEndian.AppendUint64(dst, c.total.Acked)
		dst = binary.BigEndian.AppendUint64(dst, c.total.Dropped)
		dst = binary.BigEndian.AppendUint64(dst, c.total.Buried)
		dst = binary.BigEndian.AppendUint32(dst, uint32(c.win.live))
		for p := c.win.head; p != c.win.tail; p++ {
			if e := c.win.at(p); e.state != done {
				dst = c.appendEntry(dst, e, now, wallMs)
			}
		}
	}
	binary.BigEndian.PutUint32(dst[count:], n)
	return dst
}

func (c *Cursor) appendEntry(dst []byte, e *entry, now time.Duration, wallMs uint64) []byte {
	dst = binary.BigEndian.AppendUint64(dst, uint64(e.seq))
	dst = binary.BigEndian.AppendUint16(dst, e.failures)
	var (
		reason, isParked byte
		delayMs          uint32
		due, letters     uint64
	)
	if e.failures > 0 {
		reason = byte(e.reason)
		if e.state == waiting {
			delayMs = e.delayMs
			due = wallMs
			if !c.book.live {
				due = uint64(e.at)
			} else if e.at > now {
				due += uint64((e.at - now).Milliseconds())
			}
		}
		if e.state == parked || e.state == burying {
			isParked, letters = 1, uint64(e.delivery)
		}
	}
	dst = append(dst, reason, isParked)
	dst = binary.BigEndian.AppendUint32(dst, delayMs)
	dst = binary.BigEndian.AppendUint64(dst, due)
	return binary.BigEndian.AppendUint64(dst, letters)
}

// Load fills an empty book from a snapshot, which it borrows. A damaged one leaves the book in no usable state.
func (b *Book) Load(data []byte) error {
	if len(data) < 5 {
		return fmt.Errorf("%w: snapshot of %d bytes", ErrRecord, len(data))
	}
	version := data[0]
	size := snapshotCursor
	switch version {
	case 1:
		size -= 16
	case 2:
		size -= 8
	case SnapshotVersion:
	default:
		return fmt.Errorf("%w: snapshot of format version %d, this program knows up to %d", ErrRecord, version, SnapshotVersion)
	}
	n := binary.BigEndian.Uint32(data[1:])
	data = data[5:]
	prev := Key{}
	for i := range n {
		if len(data) < size {
			return fmt.Errorf("%w: snapshot ends within cursor %d of %d", ErrRecord, i+1, n)
		}
		k := Key{Group: binary.BigEndian.Uint16(data), Topic: binary.BigEndian.Uint16(data[2:]), Partition: binary.BigEndian.Uint16(data[4:])}
		data = data[6:]
		if version > 2 {
			k.Member = binary.BigEndian.Uint64(data)
			data = data[8:]
		}
		if i > 0 && prev.Compare(k) >= 0 {
			return fmt.Errorf("%w: snapshot has %s out of order", ErrRecord, k)
		}
		prev = k
		if b.cursors[k] != nil {
			return fmt.Errorf("%w: snapshot has %s, which the book has already", ErrRecord, k)
		}
		c := b.insert(k)
		var err error
		if data, err = c.load(data, version); err != nil {
			return fmt.Errorf("%w: snapshot of %s: %w", ErrRecord, k, err)
		}
	}
	if len(data) > 0 {
		return fmt.Errorf("%w: %d bytes behind the snapshot", ErrRecord, len(data))
	}
	return nil
}

func (c *Cursor) load(data []byte, version byte) ([]byte, error) {
	c.begun = true
	c.start = Sequence(binary.BigEndian.Uint64(data))
	c.next = Sequence(binary.BigEndian.Uint64(data[8:]))
	n := &c.total
	n.Acked = binary.BigEndian.Uint64(data[16:])
	n.Dropped = binary.BigEndian.Uint64(data[24:])
	data = data[32:]
	if version > 1 {
		n.Buried = binary.BigEndian.Uint64(data)
		data = data[8:]
	}
	open := binary.BigEndian.Uint32(data)
	data = data[4:]
	c.last = c.next - 1
	switch {
	case c.next == 0 || c.next > maxSequence || c.start >= c.next:
		return nil, fmt.Errorf("positions %d and %d out of range", c.start, c.next)
	case open > maxOpen || uint64(open) > uint64(len(data))/snapshotEntry:
		return nil, fmt.Errorf("%d open messages do not fit", open)
	case n.Acked > uint64(c.next) || n.Dropped > uint64(c.next) || n.Acked+n.Dropped+uint64(open) != uint64(c.next-c.start-1):
		return nil, fmt.Errorf("%d acknowledged, %d dropped and %d open do not make %d", n.Acked, n.Dropped, open, c.next-c.start-1)
	case n.Buried > n.Dropped:
		return nil, fmt.Errorf("%d dead letters of %d dropped messages", n.Buried, n.Dropped)
	}
	prev := c.start
	for range open {
		e, letters, err := decodeEntry(data)
		if err != nil {
			return nil, err
		}
		if e.seq <= prev || e.seq >= c.next {
			return nil, fmt.Errorf("sequence %d out of order", e.seq)
		}
		prev = e.seq
		if e.state == parked {
			e.delivery = DeliveryID(letters)
		}
		c.push(e)
		data = data[snapshotEntry:]
	}
	return data, nil
}

func decodeEntry(b []byte) (e entry, letters uint64, err error) {
	e = entry{
		seq:      Sequence(binary.BigEndian.Uint64(b)),
		failures: binary.BigEndian.Uint16(b[8:]),
		reason:   Reason(b[10]),
		delayMs:  binary.BigEndian.Uint32(b[12:]),
		state:    waiting,
	}
	due := binary.BigEndian.Uint64(b[16:])
	letters = binary.BigEndian.Uint64(b[24:])
	switch {
	case b[11] > 1 || e.failures > maxFailures || due > maxSequence:
		return e, 0, fmt.Errorf("sequence %d: field out of range", e.seq)
	case e.failures == 0 && (e.reason != 0 || b[11] != 0 || e.delayMs != 0 || due != 0):
		return e, 0, fmt.Errorf("sequence %d: details of a failure that did not happen", e.seq)
	case e.failures > 0 && (e.reason < ReasonNack || e.reason > ReasonRejected):
		return e, 0, fmt.Errorf("sequence %d: unknown reason", e.seq)
	case letters != 0 && b[11] == 0:
		return e, 0, fmt.Errorf("sequence %d: a dead letter's place, but it is not parked", e.seq)
	}
	if b[11] == 1 {
		e.state = parked
		if e.delayMs != 0 || due != 0 {
			return e, 0, fmt.Errorf("sequence %d: parked, but waiting for a retry", e.seq)
		}
	}
	e.at = time.Duration(due)
	return e, letters, nil
}
