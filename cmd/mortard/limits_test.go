package main

import "testing"

func TestShareOf_LeavesTheConnectionsTheirs(t *testing.T) {
	for limit, want := range map[uint64]int{100: 64, 1024: 128, 65536: 8192, 1 << 63: 1 << 17} {
		if got := shareOf(limit); got != want {
			t.Errorf("of %d descriptors: %d for files, want %d", limit, got, want)
		}
	}
}
