package cluster

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/tests/harness"
)

// nextVersion are changes that the next version may have: another version of the peer protocol, and of a file's format.
var nextVersion = []harness.Change{
	{File: "engine/peerwire/frame.go", Old: "MaxVersion = 1\n", New: "MaxVersion = 2\n"},
	{File: "wal/checkpoint.go", Old: "checkpointVersion = 1\n", New: "checkpointVersion = 2\n"},
}

// All nodes restart under load, one by one, with the next version of the broker: old and new ones speak the older version of the
// peer protocol meanwhile, and what the old ones have written is read. There is no way back once a file has the newer format: the
// old version says so, and changes nothing. (With the race detector the restarts are of the same version.)
func TestRollingUpgrade_UnderLoadLosesNothing(t *testing.T) {
	next := mortard
	if !testing.Short() {
		var err error
		if next, err = harness.BuildSuccessor(t.TempDir(), raceEnabled, nextVersion...); err != nil {
			t.Fatal(err)
		}
	}
	r := start(t, harness.ClusterOptions{Config: small})
	o := DefaultLoad
	o.Addrs, o.Topic = r.Addrs(), "load"
	l, err := StartLoad(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	last := r.leader()
	for _, i := range append(others(last), last) {
		if err := l.AwaitMore(t.Context(), 100); err != nil {
			t.Fatal(err)
		}
		r.stop(i)
		r.Install(i, next)
		r.launch(i)
		r.healthy()
	}
	if err := l.AwaitMore(t.Context(), 100); err != nil {
		t.Fatal(err)
	}
	if next != mortard {
		first := others(last)[0]
		for _, version := range []string{"version=1", "version=2"} {
			if !logged(t, r, first, "a node is connected", version) {
				t.Errorf("node %d, which was the first, has never spoken the peer protocol's %s", first, version)
			}
		}
		r.goBack(first, next)
	}
	if err := l.Finish(t.Context(), nothingLeft(t.Context(), r.Cluster, o.Topic)); err != nil {
		t.Fatal(err)
	}
	if err := r.Crashed(); err != nil {
		t.Error(err)
	}
}

// goBack installs the older version on a node, which must refuse to start, and then the newer one again.
func (r *rig) goBack(i int, next string) {
	r.t.Helper()
	r.stop(i) // which writes the partitions' checkpoints
	newer, err := filepath.Glob(filepath.Join(r.DataDir(i), "topics", "*", "*", "checkpoint.mqc"))
	if err != nil || len(newer) == 0 {
		r.t.Fatalf("node %d has no checkpoints: %v", i, err)
	}
	r.Install(i, mortard)
	r.launch(i)
	select {
	case <-r.Node(i).Exited():
	case <-time.After(patience):
		r.t.Fatalf("the older version runs on the newer one's data:\n%s", r.Node(i).Log())
	}
	if log := r.Node(i).Log(); !strings.Contains(log, "checkpoint.mqc has format version 2, this build reads versions up to 1") {
		r.t.Errorf("the older version doesn't say which file is too new for it:\n%s", log)
	}
	r.Install(i, next)
	r.launch(i)
	r.healthy()
}

// logged tells whether a line of a node's log, of all its lives, has all of the parts.
func logged(t *testing.T, r *rig, i int, parts ...string) bool {
	t.Helper()
	text, err := os.ReadFile(r.DataDir(i) + ".log")
	if err != nil {
		t.Fatal(err)
	}
lines:
	for line := range strings.Lines(string(text)) {
		for _, part := range parts {
			if !strings.Contains(line, part) {
				continue lines
			}
		}
		return true
	}
	return false
}
