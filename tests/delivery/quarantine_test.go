package delivery

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

// g5: the group's dead-letter partition is damaged and quarantined. A message that is out of attempts is kept, whoever rejects
// it is told, and nothing else is held up; when the files are restored its letter is written, once.
func TestCase_QuarantinedDeadLettersKeepTheMessage(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	d := start(t, dir)
	topic := declare(t, d, "t", 1)
	publish(t, d, topic, "first")
	m := join(t, d, "g", topic, quick)
	msg := m.want(1, 1)
	if err := m.nack(&msg, protocol.NackReject); err != nil {
		t.Fatal(err)
	}
	wantLetters(t, d, "g", "first 1 rejected")
	m.leave()
	files := filepath.Join(dir, "topics", fmt.Sprint(topicOf(t, d, "$dlq.g")), "0")
	stop(t, d)
	segment, whole := onlySegment(t, files)
	if err := os.Truncate(segment, 4096); err != nil {
		t.Fatal(err)
	}

	d = start(t, dir)
	publish(t, d, topic, "second", "third")
	m = join(t, d, "g", topic, quick)
	msg = m.want(2, 1)
	if err := m.nack(&msg, protocol.NackReject); !errors.Is(err, protocol.CodeDLQUnavailable) {
		t.Fatalf("a message was rejected whose letter can't be written: %v, want 0x0031", err)
	}
	m.mustAck(m.want(3, 1))
	m.silent(300 * time.Millisecond) // only the writing is tried again
	if g := stats(t, d, "t", "g"); g.Lag != 2 || g.Waiting != 1 || g.Dropped != 1 || g.DLQ != 1 || g.Acknowledged != 1 {
		t.Fatalf("the message is not kept: %+v", g)
	}
	m.leave()
	stop(t, d)

	if err := os.WriteFile(segment, whole, 0o600); err != nil {
		t.Fatal(err)
	}
	reports, err := filepath.Glob(filepath.Join(files, "quarantine-*.json"))
	if err != nil || len(reports) == 0 {
		t.Fatalf("no report of the damage in %s: %v", files, err)
	}
	for _, r := range reports {
		if err := os.Remove(r); err != nil {
			t.Fatal(err)
		}
	}
	d = start(t, dir)
	eventually(t, d, "t", "g", "the letter is written", func(g harness.GroupSums) bool { return g.Lag == 0 && g.DLQ == 2 && g.Dropped == 2 })
	wantLetters(t, d, "g", "first 1 rejected", "second 1 rejected")
	m = join(t, d, "g", topic, quick)
	m.silent(100 * time.Millisecond)
}

// stop ends a broker in order.
func stop(t *testing.T, d *harness.Daemon) {
	t.Helper()
	if err := d.Stop(time.Minute); err != nil {
		t.Fatal(err)
	}
}

// onlySegment returns the path and the bytes of a partition's only segment.
func onlySegment(t *testing.T, dir string) (string, []byte) {
	t.Helper()
	list, err := filepath.Glob(filepath.Join(dir, "*.mqs"))
	if err != nil || len(list) != 1 {
		t.Fatalf("segments %v in %s: %v", list, dir, err)
	}
	b, err := os.ReadFile(list[0])
	if err != nil {
		t.Fatal(err)
	}
	return list[0], b
}
