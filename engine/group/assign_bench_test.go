package group

import (
	"fmt"
	"testing"
)

// BenchmarkAssign adds one member to a balanced group.
func BenchmarkAssign(b *testing.B) {
	for _, size := range []struct{ members, partitions int }{{4, 16}, {10, 100}, {100, 1000}} {
		b.Run(fmt.Sprintf("%d members, %d partitions", size.members, size.partitions), func(b *testing.B) {
			members := make([]uint64, size.members)
			for i := range members {
				members[i] = uint64(i) + 1
			}
			previous := Assign(members[:size.members-1], make([]uint64, size.partitions))
			b.ReportAllocs()
			for b.Loop() {
				Assign(members, previous)
			}
		})
	}
}
