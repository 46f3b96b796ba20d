package wal

import (
	"fmt"
	"testing"
)

// recordSizes are those of the values in the benchmarks of the whole broker.
var recordSizes = []int{100, 1 << 10, 16 << 10}

func benchRecord(size int) (Record, []byte) {
	r := Record{Sequence: 7, ProducerID: 8, ProducerSeq: 9, TimestampMs: 1_700_000_000_000, LeaderEpoch: 3, Value: make([]byte, size)}
	return r, make([]byte, RecordSize(0, size))
}

func BenchmarkRecord_Put(b *testing.B) {
	for _, size := range recordSizes {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			r, buf := benchRecord(size)
			b.SetBytes(int64(len(buf)))
			b.ReportAllocs()
			for b.Loop() {
				r.Sequence++
				PutRecord(buf, &r)
			}
		})
	}
}

func BenchmarkRecord_Decode(b *testing.B) {
	for _, size := range recordSizes {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			r, buf := benchRecord(size)
			PutRecord(buf, &r)
			b.SetBytes(int64(len(buf)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := DecodeRecord(buf, &r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
