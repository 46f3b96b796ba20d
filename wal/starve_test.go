package wal

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// TestStore_OutOfDescriptorsWaitsAndGoesOn lets every opening of a file fail for lack of descriptors: the store gives back
// what it can, waits and loses nothing, and goes on by itself.
func TestStore_OutOfDescriptorsWaitsAndGoesOn(t *testing.T) {
	for _, err := range []error{syscall.EMFILE, syscall.ENFILE} {
		t.Run(err.Error(), func(t *testing.T) {
			o := smallStore(testPool(t))
			var logged bytes.Buffer
			o.Store.Logger = slog.New(slog.NewTextHandler(&logged, nil))
			n := lived(t, o)
			n.publish(3000, p0, p1) // written, and so kept open
			n.now += DefaultWriteOutEvery
			n.settle()
			if n.s.openFiles == 0 {
				t.Fatal("the test needs open files")
			}

			remove := n.d.Inject(simdisk.Fault{Kind: ring.Open, Err: err})
			for range 4 {
				n.publish(3000, p0, p1, p2, le, md)
			}
			n.s.SaveSnapshot(SnapshotCursors, uint64(len(n.acked[le])), n.j.Epoch(), []byte("cursors"))
			n.now += DefaultWriteOutEvery
			n.settle()
			done := false
			req := ReadRequest{Stream: p0, From: 1, Done: func(*ReadRequest) { done = true }}
			n.s.Read(&req)
			for range 30 {
				n.s.RequestSweep()
				n.now += retryEvery
				n.settle()
			}
			if n.s.Err() != nil || done {
				t.Fatalf("failed with %v, the read with %v", n.s.Err(), req.Err)
			}
			if n.s.openFiles > 0 {
				t.Errorf("%d files are kept open", n.s.openFiles)
			}
			if got := strings.Count(logged.String(), "out of file descriptors"); got != 1 {
				t.Errorf("logged %d times:\n%s", got, logged.String())
			}

			remove()
			n.now += retryEvery
			n.settle()
			if !done || req.Err != nil || req.Chunk == nil {
				t.Fatalf("the read that waited: %v, %v", req.Chunk, req.Err)
			}
			req.Chunk.Release()
			n.now += calmAfter
			n.sweep()
			if !strings.Contains(logged.String(), "there are file descriptors again") || n.s.unswept() {
				t.Errorf("it isn't over, unswept %v:\n%s", n.s.unswept(), logged.String())
			}
			n.check()
			n.close()
			n = n.reopen(n.d, o)
			if n.rec.Rounds > 1 {
				t.Errorf("%d rounds were replayed after an orderly end", n.rec.Rounds)
			}
			n.check()
			n.close()
		})
	}
}

// TestStore_OutOfDescriptorsWhileFailed has a read wait for a descriptor when the store fails: reads go on, so does this one.
func TestStore_OutOfDescriptorsWhileFailed(t *testing.T) {
	o := smallStore(testPool(t))
	n := lived(t, o)
	n.s.closeIdle()
	n.settle()
	remove := n.d.Inject(simdisk.Fault{Kind: ring.Open, Err: syscall.EMFILE})
	done := false
	req := ReadRequest{Stream: p0, From: 1, Done: func(*ReadRequest) { done = true }}
	n.s.Read(&req)
	n.publish(100, p0)
	n.now += DefaultWriteOutEvery
	n.settle()
	n.s.fail("test", "file", errors.New("broken"))
	remove()
	if next := n.s.Step(n.now); next > n.now+retryEvery {
		t.Fatalf("wants to be called in %v", next-n.now)
	}
	n.now += retryEvery
	n.settle()
	if !done || req.Err != nil || req.Chunk == nil {
		t.Fatalf("the read that waited: %v, %v", req.Chunk, req.Err)
	}
	req.Chunk.Release()
	n.closeStore()
	n.closeJournal()
}

// TestOpen_OutOfDescriptorsIsAnError gives the descriptors of a start to others: it says so, and works once they are back.
func TestOpen_OutOfDescriptorsIsAnError(t *testing.T) {
	o := smallStore(testPool(t))
	n := lived(t, o)
	n.kill()
	d := n.d.Crash(nil)
	remove := d.Inject(simdisk.Fault{Kind: ring.Open, Path: "*" + segmentSuffix, Err: syscall.EMFILE})
	if _, err := tryNode(t, d, o); !errors.Is(err, syscall.EMFILE) {
		t.Fatalf("opened with %v", err)
	}
	remove()
	n = n.reopen(d, o)
	n.check()
	n.close()
}

// TestShortage_IsLoggedRarely has a shortage for an hour, tried again each second.
func TestShortage_IsLoggedRarely(t *testing.T) {
	var logged bytes.Buffer
	s := &Store{log: slog.New(slog.NewTextHandler(&logged, nil))}
	w := &shortage{what: "nothing left", over: "there is some again"}
	fail := true
	var try func()
	try = func() {
		if fail {
			w.wait(s, "write", syscall.ENOSPC, try)
		}
	}
	try()
	for ; s.now < time.Hour; s.now += retryEvery {
		w.step(s)
	}
	if got := strings.Count(logged.String(), "nothing left"); got != 7 { // at 0, 1, 2, 4, 8, 16 and 32 minutes
		t.Errorf("logged %d times:\n%s", got, logged.String())
	}
	if strings.Contains(logged.String(), w.over) {
		t.Error("it was called over")
	}
	fail = false
	for range 60 {
		s.now += retryEvery
		w.step(s)
	}
	if got := strings.Count(logged.String(), w.over); got != 1 || w.next() != Never {
		t.Errorf("its end was logged %d times, next step at %v", got, w.next())
	}
}
