package sim

import (
	"fmt"

	"github.com/cespare/xxhash/v2"
)

// digest returns a checksum of a trace.
func digest(trace []string) string {
	h := xxhash.New()
	for _, line := range trace {
		_, _ = h.WriteString(line)
		_, _ = h.WriteString("\n")
	}
	return fmt.Sprintf("%016x", h.Sum64())
}
