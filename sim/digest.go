package sim

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	"github.com/cespare/xxhash/v2"
)

// digest returns a checksum of all that has happened: the trace, the moments at which something did, and what was counted.
func (w *world) digest() uint64 {
	h := xxhash.New()
	for _, line := range w.trace {
		_, _ = h.WriteString(line)
		_, _ = h.WriteString("\n")
	}
	_, _ = h.Write(binary.BigEndian.AppendUint64(nil, w.moments))
	for _, what := range slices.Sorted(maps.Keys(w.seen)) {
		_, _ = fmt.Fprintln(h, what, w.seen[what])
	}
	return h.Sum64()
}

// momentPrime spreads moments over a checksum (FNV-1a's prime).
const momentPrime = 0x100000001b3

// moment adds a moment at which something happens to the digest.
func (w *world) moment() { w.moments = (w.moments ^ uint64(w.now)) * momentPrime }
