package engine

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal"
)

// TestEngine_OutOfDescriptorsLosesNothing lets the opening of segments fail for want of descriptors under load: publishes
// go on, and so do the segments when there are descriptors again.
func TestEngine_OutOfDescriptorsLosesNothing(t *testing.T) {
	t.Parallel()
	f, o, e, p, topic := openFaulty(t)
	var refused atomic.Int32
	f.set(func(op *ring.Op) error {
		if op.Kind == ring.Open && strings.Contains(op.Path, "/topics/") {
			refused.Add(1)
			return unix.EMFILE
		}
		return nil
	})
	go func() {
		for refused.Load() < 2 {
			time.Sleep(time.Millisecond)
		}
		f.set(nil)
	}()
	acked, err := p.publishN(topic, 0, 20<<10)
	if err != nil {
		t.Fatalf("after %d: %v", acked, err)
	}
	if ok, state := e.Healthy(); !ok {
		t.Errorf("state %q", state)
	}
	mustClose(t, e)
	o.OpenDevice = nil
	checkAll(t, o, "t", acked)
}

func TestEngine_OpenFilesAreShared(t *testing.T) {
	for _, c := range []struct{ limit, stores, want int }{
		{0, 1, wal.DefaultMaxOpenFiles}, {0, 4, wal.DefaultMaxOpenFiles}, {128, 1, 128}, {128, 4, minOpenFiles},
		{8192, 4, 2048}, {1 << 20, 1, wal.DefaultMaxOpenFiles},
	} {
		e := &Engine{opts: Options{MaxOpenFiles: c.limit}, stores: make([]*storeLoop, c.stores)}
		if got := e.openFiles(); got != c.want {
			t.Errorf("%d descriptors for %d stores: %d each, want %d", c.limit, c.stores, got, c.want)
		}
	}
}
