package peerwire

import (
	"encoding/binary"

	"github.com/mortarmq/mortarmq/engine/replica"
)

// reader takes a body apart. The first thing that doesn't fit makes everything after it zero and is remembered.
type reader struct {
	b   []byte
	bad bool
}

func (r *reader) take(n int) []byte {
	if r.bad || n < 0 || n > len(r.b) {
		r.bad, r.b = true, nil
		return nil
	}
	b := r.b[:n:n]
	r.b = r.b[n:]
	return b
}

func (r *reader) u8() uint8 {
	if b := r.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (r *reader) u16() uint16 {
	if b := r.take(2); b != nil {
		return binary.BigEndian.Uint16(b)
	}
	return 0
}

func (r *reader) u32() uint32 {
	if b := r.take(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

func (r *reader) u64() uint64 {
	if b := r.take(8); b != nil {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

// zeros takes n reserved bytes.
func (r *reader) zeros(n int) {
	for _, c := range r.take(n) {
		r.bad = r.bad || c != 0
	}
}

// flag takes a byte that is 0 or 1.
func (r *reader) flag() bool {
	v := r.u8()
	r.bad = r.bad || v > 1
	return v == 1
}

func (r *reader) point() replica.Point {
	return replica.Point{Epoch: replica.Epoch(r.u32()), Index: replica.Index(r.u64())}
}

// count takes a number of elements of size bytes each, which must all be there.
func (r *reader) count(size int) int {
	n := int(r.u32())
	if r.bad || n < 0 || n > len(r.b)/size {
		r.bad, r.b = true, nil
		return 0
	}
	return n
}

func appendPoint(b []byte, p replica.Point) []byte {
	b = binary.BigEndian.AppendUint32(b, uint32(p.Epoch))
	return binary.BigEndian.AppendUint64(b, uint64(p.Index))
}

func appendFlag(b []byte, v bool) []byte {
	if v {
		return append(b, 1)
	}
	return append(b, 0)
}
