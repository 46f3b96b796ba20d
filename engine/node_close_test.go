package engine

import (
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/ring"
)

// saying is a log that somebody waits for a line of.
type saying struct {
	what string
	once sync.Once
	said chan struct{}
}

// Write implements io.Writer.
func (s *saying) Write(line []byte) (int, error) {
	if strings.Contains(string(line), s.what) {
		s.once.Do(func() { close(s.said) })
	}
	return len(line), nil
}

// The files of an engine whose disk hangs must not be opened by another one: its close may not give up.
func TestCloseWithPatience_WaitsForAsLongAsTheDiskHangs(t *testing.T) {
	log := &saying{what: "waits for its disk", said: make(chan struct{})}
	f, o := &faults{}, testOptions(t.TempDir())
	o.OpenDevice, o.Logger = f.open(t), slog.New(slog.NewTextHandler(log, nil))
	e := mustOpen(t, o)
	newPeer(t, e).declare("t", 1)

	answers := make(chan struct{})
	f.set(func(op *ring.Op) error {
		if op.Kind == ring.WriteSync || op.Kind == ring.Sync {
			<-answers
		}
		return nil
	})
	closed := make(chan error, 1)
	go func() { closed <- closeWithPatience(e, time.Millisecond) }()
	select {
	case <-log.said:
	case <-time.After(time.Minute):
		t.Fatal("nobody says that the disk hangs")
	}
	select {
	case err := <-closed:
		t.Fatalf("the engine was closed while its disk hung: %v", err)
	default:
	}
	close(answers)
	select {
	case err := <-closed:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("the engine doesn't end although its disk has answered")
	}
}
