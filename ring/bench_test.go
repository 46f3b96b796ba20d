package ring

import (
	"fmt"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// BenchmarkRing_WriteSync writes 4 KiB durably to a zeroed file, with a number of operations in flight; one iteration is
// one operation.
func BenchmarkRing_WriteSync(b *testing.B) {
	for name, open := range testBackends {
		for _, depth := range []int{1, 4, 16, 64} {
			b.Run(fmt.Sprintf("%s/depth=%d", name, depth), func(b *testing.B) {
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				r, err := open(Options{Workers: depth})
				if err != nil {
					b.Fatal(err)
				}
				defer func() { _ = r.Close() }()
				benchWriteSync(b, r, depth)
			})
		}
	}
}

func benchWriteSync(b *testing.B, r *Ring, depth int) {
	const blocks = 1024
	p := NewPool(2 * blocks * BlockSize)
	zero := p.Get(blocks * BlockSize)
	run := func(op *Op) *Op {
		op.Done = func(*Op) {}
		r.Submit(op)
		for r.InFlight() > 0 {
			if _, err := r.Wait(-1); err != nil {
				b.Fatal(err)
			}
		}
		if op.Err != nil {
			b.Fatal(op.Err)
		}
		return op
	}
	fd := run(&Op{Kind: Open, Path: filepath.Join(b.TempDir(), "f"), Flags: Create | Direct}).FD
	defer func() { _ = unix.Close(fd) }()
	run(&Op{Kind: WriteSync, FD: fd, Buf: zero.Bytes()})

	var idle []*Op
	for range depth {
		idle = append(idle, &Op{Kind: WriteSync, FD: fd, Buf: zero.Bytes()[:BlockSize], Done: func(op *Op) { idle = append(idle, op) }})
	}
	next := 0
	b.ReportAllocs()
	b.SetBytes(BlockSize)
	for b.Loop() {
		for len(idle) == 0 {
			if _, err := r.Wait(-1); err != nil {
				b.Fatal(err)
			}
		}
		op := idle[len(idle)-1]
		idle = idle[:len(idle)-1]
		op.Off = int64(next%blocks) * BlockSize
		next++
		r.Submit(op)
	}
	for r.InFlight() > 0 {
		if _, err := r.Wait(-1); err != nil {
			b.Fatal(err)
		}
	}
}
