package protocol

import (
	"encoding/binary"
	"fmt"
)

const (
	// LengthSize is the size of a frame's length field.
	LengthSize = 4
	// HeaderSize is the size of a frame's length field and op byte: the smallest complete frame.
	HeaderSize = LengthSize + 1
	// MaxFrameSize is the size of the largest frame, its length field included.
	MaxFrameSize = LengthSize + MaxFrameLen
)

// FrameLen reads the length field at the start of b. It needs the first 4 bytes only, so that a receiver can refuse or
// size a frame before it has any of it. total is the size of the whole frame with its length field. ok is false when b
// holds fewer than 4 bytes. A length outside 1..MaxFrameLen is an error that wraps CodeBadLength; such a connection
// cannot be resynchronized.
func FrameLen(b []byte) (total int, ok bool, err error) {
	if len(b) < LengthSize {
		return 0, false, nil
	}
	length := binary.BigEndian.Uint32(b)
	if length == 0 || length > MaxFrameLen {
		return 0, false, badLength(length)
	}
	return LengthSize + int(length), true, nil
}

// ParseFrame takes the first frame of b apart. n is its size in bytes, the length field included; n == 0 without an
// error means that b holds only a part of it. payload excludes the op byte and aliases b. Errors wrap CodeBadLength, or
// CodeUnknownOp as soon as the op byte is there; after either the connection must be closed.
func ParseFrame(b []byte) (op Op, payload []byte, n int, err error) {
	if len(b) < HeaderSize {
		_, _, err = FrameLen(b)
		return 0, nil, 0, err
	}
	length := binary.BigEndian.Uint32(b)
	if length == 0 || length > MaxFrameLen {
		return 0, nil, 0, badLength(length)
	}
	op = Op(b[LengthSize])
	if !op.Valid() {
		return 0, nil, 0, unknownOp(op)
	}
	total := LengthSize + int(length)
	if len(b) < total {
		return 0, nil, 0, nil
	}
	return op, b[HeaderSize:total:total], total, nil
}

func badLength(length uint32) error {
	return fmt.Errorf("frame length %d is outside 1..%d: %w", length, MaxFrameLen, CodeBadLength)
}

func unknownOp(op Op) error {
	return fmt.Errorf("op 0x%02X is not one of 0x01..0x%02X: %w", uint8(op), uint8(OpCredit), CodeUnknownOp)
}

// appendHeader starts a frame whose payload will have exactly payloadLen bytes.
func appendHeader(dst []byte, op Op, payloadLen int) []byte {
	length := payloadLen + 1
	if length > MaxFrameLen {
		panic(fmt.Sprintf("protocol: %v frame of %d bytes exceeds the limit of %d: the caller must check sizes first",
			op, length, MaxFrameLen))
	}
	return append(dst, byte(length>>24), byte(length>>16), byte(length>>8), byte(length), byte(op))
}

// must checks a size that the caller of an encoder promised to keep: breaking it would desynchronize the connection,
// so it is a bug of ours and never follows from input.
func must(op Op, field string, n, limit int) {
	if n > limit {
		panic(fmt.Sprintf("protocol: %v.%s has %d, the limit is %d: the caller must check it first", op, field, n, limit))
	}
}

// PayloadError says which field of a payload broke the format. It unwraps to CodeMalformedPayload.
type PayloadError struct {
	Op     Op     // the frame's op, for a result the op of its request
	Result bool   // the payload was the result inside an OK
	Field  string // as named in the package documentation
	Offset int    // of the field in the payload (or result), in bytes
	Reason string
}

// Error names op, field and offset.
func (e *PayloadError) Error() string {
	kind := "payload"
	if e.Result {
		kind = "result"
	}
	return fmt.Sprintf("%v %s: %s at byte %d %s", e.Op, kind, e.Field, e.Offset, e.Reason)
}

// Unwrap returns CodeMalformedPayload.
func (e *PayloadError) Unwrap() error { return CodeMalformedPayload }

// reader walks a payload. Its first error sticks: the reads that follow return zero values, so a decoder checks once.
type reader struct {
	b      []byte
	off    int
	op     Op
	result bool
	err    *PayloadError
}

func (r *reader) fail(field string, off int, reason string) {
	if r.err == nil {
		r.err = &PayloadError{Op: r.op, Result: r.result, Field: field, Offset: off, Reason: reason}
	}
	r.b = r.b[:r.off]
}

// field is a field of fixed size, for the error text.
type field struct {
	name string
	size int
}

// fixed takes size bytes that hold the given fields, for one check instead of one per field: the codecs of the hot path
// use it. It returns nil after naming the first field that is not there.
func (r *reader) fixed(size int, fields []field) []byte {
	if left := len(r.b) - r.off; left < size {
		for _, f := range fields {
			if len(r.b)-r.off < f.size {
				r.short(f.name, f.size)
				break
			}
			r.off += f.size
		}
		return nil
	}
	h := r.b[r.off : r.off+size]
	r.off += size
	return h
}

func (r *reader) short(field string, want int) {
	r.fail(field, r.off, fmt.Sprintf("needs %d bytes, %d are left", want, len(r.b)-r.off))
}

func (r *reader) u8(field string) uint8 {
	if len(r.b)-r.off < 1 {
		r.short(field, 1)
		return 0
	}
	v := r.b[r.off]
	r.off++
	return v
}

func (r *reader) u16(field string) uint16 {
	if len(r.b)-r.off < 2 {
		r.short(field, 2)
		return 0
	}
	v := binary.BigEndian.Uint16(r.b[r.off:])
	r.off += 2
	return v
}

func (r *reader) u32(field string) uint32 {
	if len(r.b)-r.off < 4 {
		r.short(field, 4)
		return 0
	}
	v := binary.BigEndian.Uint32(r.b[r.off:])
	r.off += 4
	return v
}

func (r *reader) u64(field string) uint64 {
	if len(r.b)-r.off < 8 {
		r.short(field, 8)
		return 0
	}
	v := binary.BigEndian.Uint64(r.b[r.off:])
	r.off += 8
	return v
}

// bytes takes n bytes, aliasing the payload. lo and hi bound n; the length field, of lengthSize bytes, was just read.
func (r *reader) bytes(field string, n, lo, hi, lengthSize int) []byte {
	if n < lo || n > hi {
		r.fail(field, r.off-lengthSize, fmt.Sprintf("has length %d, outside %d..%d", n, lo, hi))
		return nil
	}
	if n > len(r.b)-r.off {
		r.short(field, n)
		return nil
	}
	v := r.b[r.off : r.off+n : r.off+n]
	r.off += n
	return v
}

// atMost reads a u8 that enumerates 0..limit.
func (r *reader) atMost(field string, limit uint8) uint8 {
	v := r.u8(field)
	if v > limit {
		r.fail(field, r.off-1, fmt.Sprintf("is %d, outside 0..%d", v, limit))
	}
	return v
}

// flags reads a u16 in which only the bits of defined may be set.
func (r *reader) flags(field string, defined uint16) uint16 {
	v := r.u16(field)
	r.checkFlags(v, defined, field, r.off-2)
	return v
}

func (r *reader) checkFlags(v, defined uint16, field string, off int) {
	if v&^defined != 0 {
		r.fail(field, off, fmt.Sprintf("sets undefined bits 0x%04X", v&^defined))
	}
}

func (r *reader) reserved32() {
	if v := r.u32("reserved"); v != 0 {
		r.fail("reserved", r.off-4, fmt.Sprintf("is 0x%08X, must be 0", v))
	}
}

// end reports the first error, bytes left over included.
func (r *reader) end() error {
	if r.err == nil && r.off != len(r.b) {
		r.fail("end", r.off, fmt.Sprintf("is followed by %d trailing bytes", len(r.b)-r.off))
	}
	if r.err != nil {
		return r.err
	}
	return nil
}
