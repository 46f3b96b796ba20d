package ring

import (
	"bytes"
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

func TestRing_InlineOperationsRunInsideTheNextPollOrWait(t *testing.T) {
	eachBackend(t, Options{}, func(t *testing.T, r *Ring) {
		fd, _ := openFile(t, r, Direct)
		pool := NewPool(1 << 20)
		slab := pool.Get(4 * BlockSize)
		defer slab.Release()
		buf := slab.Bytes()[:2*BlockSize]
		for i := range buf {
			buf[i] = byte(i)
		}
		ended := 0
		op := &Op{Kind: WriteSync, FD: fd, Buf: buf, Inline: true, Done: func(*Op) { ended++ }}
		r.Submit(op)
		if ended != 0 {
			t.Fatal("Done ran inside Submit")
		}
		if n := r.Poll(); n != 1 || ended != 1 || op.Err != nil || op.N != len(buf) {
			t.Fatalf("Poll ran %d Done, %d of this operation, with %d bytes, %v", n, ended, op.N, op.Err)
		}
		back := slab.Bytes()[2*BlockSize : 4*BlockSize]
		read := &Op{Kind: Read, FD: fd, Buf: back, Inline: true, Done: func(*Op) { ended++ }}
		r.Submit(read)
		if n, err := r.Wait(-1); n != 1 || err != nil || !bytes.Equal(buf, back) {
			t.Fatalf("Wait ran %d Done, %v; the bytes are equal: %v", n, err, bytes.Equal(buf, back))
		}
		if s := r.Stats(); s.Flushes != 1 || s.BytesWritten != uint64(len(buf)) {
			t.Errorf("counted %+v", s)
		}
	})
}

func TestRing_InlineErrorsArriveThroughDone(t *testing.T) {
	eachBackend(t, Options{}, func(t *testing.T, r *Ring) {
		if op := do(t, r, &Op{Kind: WriteSync, FD: -1, Buf: make([]byte, 8), Inline: true}); !errors.Is(op.Err, unix.EBADF) {
			t.Errorf("a bad descriptor gives %v", op.Err)
		}
	})
}

func TestRing_InlineDoesNotAllocate(t *testing.T) {
	eachBackend(t, Options{}, func(t *testing.T, r *Ring) {
		fd, _ := openFile(t, r, Direct)
		slab := NewPool(1 << 20).Get(BlockSize)
		defer slab.Release()
		op := &Op{Kind: WriteSync, FD: fd, Buf: slab.Bytes(), Inline: true, Done: func(*Op) {}}
		if n := testing.AllocsPerRun(50, func() {
			r.Submit(op)
			r.Poll()
		}); n > 0 {
			t.Errorf("%v allocations", n)
		}
	})
}
