package engine

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/ring"
)

// fullDisk fails everything that could need space that isn't allocated yet, as a disk does that something else has filled.
// Rounds, marks and checkpoint tables are written over what is there.
func fullDisk(op *ring.Op) error {
	switch op.Kind {
	case ring.Write, ring.Allocate, ring.Mkdir:
		return unix.ENOSPC
	case ring.Open:
		if op.Flags&ring.Create != 0 {
			return unix.ENOSPC
		}
	default:
	}
	return nil
}

// TestEngine_StartsOnAFullDisk starts on what a crash has left, with everything in the journal and no space to write any of
// it to segments: it is delivered and acknowledged, publishes are refused, an orderly stop loses nothing either, and all
// goes on by itself when there is space.
func TestEngine_StartsOnAFullDisk(t *testing.T) {
	t.Parallel()
	const messages = 300
	o := crashedWithEverythingInTheJournal(t, messages)
	f := &faults{}
	o.OpenDevice = f.open(t)
	f.set(fullDisk)
	for start := range 2 {
		e := mustOpen(t, o)
		p := newPeer(t, e)
		topic := p.declare("t", 1).TopicID
		if _, err := p.publishN(topic, messages, 1); code(err) != protocol.CodeStorageHighWatermark {
			t.Fatalf("start %d: a publish on a full disk: %v, want 0x4004", start, err)
		}
		if ok, state := e.Healthy(); !ok || !strings.Contains(state, "full") {
			t.Errorf("start %d: health is %v, %q", start, ok, state)
		}
		r := newPeer(t, e).subscribe([]string{"first", "second"}[start], topic)
		for i := 1; i <= messages; i++ {
			m := r.next()
			wantValue(t, &m, i)
			if err := r.ack(&m); err != nil {
				t.Fatalf("start %d: ACK: %v", start, err)
			}
		}
		if start == 0 {
			e.ClientClosed(r.c)
			mustClose(t, e)
			continue
		}
		f.set(nil)
		acked := messages
		for deadline := time.Now().Add(time.Minute); acked == messages; time.Sleep(time.Millisecond) {
			n, err := p.publishN(topic, acked, 1)
			acked += n
			if err != nil && (code(err) != protocol.CodeStorageHighWatermark || time.Now().After(deadline)) {
				t.Fatalf("with space again: %v", err)
			}
		}
		m := r.next()
		wantValue(t, &m, acked)
		mustClose(t, e)
		checkAll(t, o, "t", acked)
	}
}

// crashedWithEverythingInTheJournal returns the options of a broker that was killed before it wrote anything to a segment.
func crashedWithEverythingInTheJournal(t *testing.T, messages int) Options {
	f, o, e, p, topic := openFaulty(t)
	thaw := make(chan struct{})
	f.set(func(op *ring.Op) error {
		if op.Kind == ring.Write {
			<-thaw // the store stands still; the shard's own writes are of another kind
		}
		return nil
	})
	if acked, err := p.publishN(topic, 0, messages); err != nil {
		t.Fatalf("after %d: %v", acked, err)
	}
	left := t.TempDir()
	copyDir(t, o.DataDir, left)
	f.set(nil)
	close(thaw)
	mustClose(t, e)
	o.DataDir = left
	return o
}

func copyDir(t *testing.T, from, to string) {
	t.Helper()
	if err := os.CopyFS(filepath.Clean(to), os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
}
