package engine

import (
	"fmt"
	"testing"

	"github.com/mortarmq/mortarmq/wal"
)

// BenchmarkDedup_Publish checks and records one new publish after the other, from so many producers in turn: one run per
// producer where it is alone on its partition, many where they share it.
func BenchmarkDedup_Publish(b *testing.B) {
	for _, producers := range []int{1, 16, 1000} {
		b.Run(fmt.Sprint(producers, " producers"), func(b *testing.B) {
			d := newDedup(dedupMaxBytes)
			stream := wal.StreamID{Topic: 1}
			next := make([]uint64, producers)
			seq, at := wal.Sequence(0), 0
			b.ReportAllocs()
			for b.Loop() {
				seq++
				next[at]++
				key := windowKey{stream, uint64(at) + 1}
				w, v, _ := d.check(nil, key, next[at])
				if v != accept {
					b.Fatalf("verdict %d", v)
				}
				d.record(w, key, next[at], seq)
				if at++; at == producers {
					at = 0
				}
			}
		})
	}
}

// BenchmarkDedup_Duplicate looks up a publish in the middle of a full window of single runs: the most that a lookup costs.
func BenchmarkDedup_Duplicate(b *testing.B) {
	d := newDedup(dedupMaxBytes)
	key := windowKey{wal.StreamID{Topic: 1}, 1}
	var w *window
	const sent = 2000
	for i := uint64(1); i <= sent; i++ {
		w = d.record(w, key, i, wal.Sequence(2*i)) // every second sequence is somebody else's
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, v, seq := d.check(nil, key, sent-500); v != duplicate || seq != 2*(sent-500) {
			b.Fatalf("verdict %d, sequence %d", v, seq)
		}
	}
}
