package engine

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mortarmq/mortarmq/protocol"
)

// copyTree copies the files below a directory, making the directories.
func copyTree(t *testing.T, from, to string) {
	t.Helper()
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
}

func removeAll(t *testing.T, paths ...string) {
	t.Helper()
	for _, p := range paths {
		if err := os.RemoveAll(p); err != nil {
			t.Fatal(err)
		}
	}
}

// TestEngine_RestoredMetadataIsServedAgain damages the metadata, starts three times in quarantine, puts the files back:
// topics and cursors are there again, and ids go on where they were.
func TestEngine_RestoredMetadataIsServedAgain(t *testing.T) {
	o := testOptions(t.TempDir())
	e := mustOpen(t, o)
	p := newPeer(t, e)
	topic := p.declare("orders", 1).TopicID
	if acked, err := p.publishN(topic, 0, 3); err != nil || acked != 3 {
		t.Fatalf("published %d: %v", acked, err)
	}
	r := p.subscribe("g", topic)
	m := r.next()
	if err := r.ack(&m); err != nil {
		t.Fatal(err)
	}
	mustClose(t, e)

	dir := filepath.Join(o.DataDir, "metadata")
	good := t.TempDir()
	copyTree(t, dir, good)
	logs, err := filepath.Glob(filepath.Join(dir, "mmml-*.log"))
	if err != nil || len(logs) == 0 {
		t.Fatalf("metadata logs %v: %v", logs, err)
	}
	b, err := os.ReadFile(logs[0])
	if err != nil {
		t.Fatal(err)
	}
	b[4096+60] ^= 1
	if err := os.WriteFile(logs[0], b, 0o644); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		e = mustOpen(t, o)
		if ok, state := e.Healthy(); ok {
			t.Fatalf("healthy with damaged metadata: %s", state)
		}
		if _, err := newPeer(t, e).lookup("orders"); code(err) != protocol.CodeMetadataQuarantined {
			t.Fatalf("a lookup is answered %v", err)
		}
		mustClose(t, e)
	}

	copyTree(t, good, dir)
	e = mustOpen(t, o)
	if ok, state := e.Healthy(); !ok || state != "serving" {
		t.Fatalf("with its metadata back the broker is %q", state)
	}
	p = newPeer(t, e)
	if d := p.declare("orders", 1); d.TopicID != topic {
		t.Errorf("the topic's id was %d and is %d", topic, d.TopicID)
	}
	if d := p.declare("new", 1); d.TopicID != topic+1 {
		t.Errorf("the next topic got id %d", d.TopicID)
	}
	s, err := e.Stats(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if g := s.Coord.Groups; len(g) != 1 || g[0].Name != "g" || g[0].Acknowledged != 1 || g[0].Lag != 2 {
		t.Errorf("groups: %+v", g)
	}
	mustClose(t, e)
}

// TestEngine_MetadataOlderThanTheDataIsRefused takes the metadata away from a data directory, or puts an older state
// there, and hides that from the checkpoint table: neither a topic's nor a group's id may be given out a second time.
func TestEngine_MetadataOlderThanTheDataIsRefused(t *testing.T) {
	o := testOptions(t.TempDir())
	metadata, topics, ledger := filepath.Join(o.DataDir, "metadata"), filepath.Join(o.DataDir, "topics"), filepath.Join(o.DataDir, "ledger")
	e := mustOpen(t, o)
	p := newPeer(t, e)
	first := p.declare("first", 1).TopicID
	if _, err := p.publishN(first, 0, 1); err != nil {
		t.Fatal(err)
	}
	mustClose(t, e)
	older := t.TempDir()
	copyTree(t, metadata, older)
	e = mustOpen(t, o)
	p = newPeer(t, e)
	second := p.declare("second", 1).TopicID
	if _, err := p.publishN(second, 0, 1); err != nil {
		t.Fatal(err)
	}
	r := p.subscribe("g", first)
	m := r.next()
	if err := r.ack(&m); err != nil {
		t.Fatal(err)
	}
	mustClose(t, e)
	whole := t.TempDir()
	copyTree(t, o.DataDir, whole)

	for name, c := range map[string]struct {
		change func()
		want   string
	}{
		"no metadata":       {func() { removeAll(t, metadata) }, "topic id 2"},
		"older metadata":    {func() { removeAll(t, metadata); copyTree(t, older, metadata) }, "topic id 2"},
		"only cursors know": {func() { removeAll(t, metadata, topics); copyTree(t, older, metadata) }, "group 1"},
		"nothing newer is left": {func() {
			removeAll(t, metadata, ledger, filepath.Join(topics, "2"))
			copyTree(t, older, metadata)
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			removeAll(t, o.DataDir)
			copyTree(t, whole, o.DataDir)
			removeAll(t, filepath.Join(o.DataDir, "journal"))
			c.change()
			e, err := Open(o)
			switch {
			case err == nil:
				mustClose(t, e)
				if c.want != "" {
					t.Error("the broker serves")
				}
			case c.want == "" || !strings.Contains(err.Error(), c.want):
				t.Errorf("refused with %v, want %q", err, c.want)
			}
		})
	}
}

// TestEngine_ReportKeepsAPartitionQuarantined has a report beside the files of a partition, as a read leaves it that finds
// damage: the partition refuses publishes start after start until the report is removed.
func TestEngine_ReportKeepsAPartitionQuarantined(t *testing.T) {
	o := testOptions(t.TempDir())
	e := mustOpen(t, o)
	topic := newPeer(t, e).declare("t", 2).TopicID
	for partition := range uint16(2) {
		publishTo(t, e, topic, partition, 1)
	}
	mustClose(t, e)
	report := filepath.Join(o.DataDir, "topics", "1", "0", "quarantine-1700000000000.json")
	if err := os.WriteFile(report, []byte(`{"cause": "bad block"}`), 0o644); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		e = mustOpen(t, o)
		publishRefused(t, e, topic, 0)
		publishTo(t, e, topic, 1, 0)
		if ok, state := e.Healthy(); !ok || !strings.Contains(state, "1 quarantined") {
			t.Errorf("state %q", state)
		}
		mustClose(t, e)
	}
	removeAll(t, report)
	e = mustOpen(t, o)
	publishTo(t, e, topic, 0, 2)
	mustClose(t, e)
}

// publish sends one message to a partition and waits for the answer.
func publish(t *testing.T, e *Engine, topic, partition uint16) (protocol.PubResult, error) {
	t.Helper()
	p := newPeer(t, e)
	req := p.send(protocol.Pub{TopicID: topic, Partition: partition, Value: []byte("value")})
	flush(p.in)
	return p.result(req)
}

// publishTo publishes a message that must get the sequence want; 0 stands for any.
func publishTo(t *testing.T, e *Engine, topic, partition uint16, want uint64) {
	t.Helper()
	res, err := publish(t, e, topic, partition)
	if err != nil || want != 0 && res.Sequence != want {
		t.Fatalf("publish to partition %d: sequence %d, want %d: %v", partition, res.Sequence, want, err)
	}
}

func publishRefused(t *testing.T, e *Engine, topic, partition uint16) {
	t.Helper()
	if _, err := publish(t, e, topic, partition); err == nil || !strings.Contains(err.Error(), "quarantined") {
		t.Fatalf("publish to the quarantined partition %d: %v", partition, err)
	}
}
