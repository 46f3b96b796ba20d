package wal

import (
	"testing"

	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// TestStore_ReadsBackWhatWasCommitted covers write-out, roll, sweep, clean restart and restart after a kill.
func TestStore_ReadsBackWhatWasCommitted(t *testing.T) {
	o := smallStore(testPool(t))
	n := openNode(t, simdisk.New(simdisk.Options{}), o)
	for i := range 40 {
		n.publish([]int{10, 700, 3000, 9000}[i%4], p0, p1, p2, le, md)
		if i%7 == 6 {
			n.sweep()
		}
	}
	n.sweep()
	n.check()
	if got, want := n.s.Durable(), n.j.Flushed(); got != want {
		t.Errorf("after a sweep round %d is durable, %d was flushed", got, want)
	}
	n.close()
	n = n.reopen(n.d, o)
	if n.rec.Bytes != 0 && n.rec.Rounds > 1 {
		t.Errorf("after a clean shutdown %d rounds were replayed", n.rec.Rounds)
	}
	n.check()
	n.publish(100, p0, p1, p2, le, md)
	n.sweep()
	n.check()
	n.publish(100, p0, p1, p2, le, md)
	n.kill()
	n = n.reopen(n.d.Clone(), o)
	n.settle()
	n.check()
	n.close()
}
