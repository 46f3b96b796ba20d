package coord

import "github.com/mortarmq/mortarmq/wal"

// indexStride is how many records a mark of a runIndex stands for.
const indexStride = 64

// runIndex finds a record among many that lie one behind the other: it remembers where every indexStride-th one begins, as
// far as somebody has looked for one. Who reads them in their order does not need it; retries and dead letters do.
type runIndex []uint32

// seek returns the offset in data of record number i, from 0.
func (x *runIndex) seek(data []byte, i int) int {
	var rec wal.Record
	if len(*x) == 0 {
		*x = append(*x, 0)
	}
	k := min(i/indexStride, len(*x)-1)
	off := int((*x)[k])
	for n := k * indexStride; n < i; {
		off += wal.PeekRecord(data[off:], &rec)
		if n++; n%indexStride == 0 && n/indexStride == len(*x) {
			*x = append(*x, uint32(off))
		}
	}
	return off
}
