package engine

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/ring"
)

// remove deletes a topic.
func (p *peer) remove(name string) {
	p.t.Helper()
	req := p.c.request()
	del := protocol.Declare{Topic: []byte(name), Flags: protocol.DeclareFlagDelete}
	p.in.Request(p.c, req, protocol.OpDeclare, payloadOf(del.AppendFrame(nil)))
	flush(p.in)
	if _, err := p.c.answer(p.t, req); err != nil {
		p.t.Fatalf("deleting %s: %v", name, err)
	}
}

// topicDirs returns the directories of topics in all shards, those of deletions under way included.
func topicDirs(t testing.TB, o Options) (dirs []string) {
	t.Helper()
	for i := range o.Shards {
		dir := o.DataDir
		if i > 0 {
			dir = filepath.Join(dir, fmt.Sprintf("shard-%d", i))
		}
		list, err := os.ReadDir(filepath.Join(dir, "topics"))
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range list {
			dirs = append(dirs, filepath.Join(dir, "topics", d.Name()))
		}
	}
	return dirs
}

// waitForTopicDirs waits until there are no directories but of the topics given.
func waitForTopicDirs(t testing.TB, o Options, topics ...uint16) {
	t.Helper()
	known := map[string]bool{}
	for _, id := range topics {
		known[fmt.Sprint(id)] = true
	}
	deadline := time.Now().Add(time.Minute)
	for {
		var left []string
		for _, dir := range topicDirs(t, o) {
			if !known[filepath.Base(dir)] {
				left = append(left, dir)
			}
		}
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("left of deleted topics: %v", left)
		}
		time.Sleep(time.Millisecond)
	}
}

// TestEngine_DeletionGoesOnAfterACrash: the metadata knows that a topic is deleted, the stores die before they have moved
// its files. The next start removes them, in every journal, and finds nothing wrong with them.
func TestEngine_DeletionGoesOnAfterACrash(t *testing.T) {
	o := testOptions(t.TempDir())
	o.Shards = 2
	var f faults
	o.OpenDevice = f.open(t)
	e := mustOpen(t, o)
	p := newPeer(t, e)
	topic := p.declare("t", 4).TopicID
	for part := range uint16(4) {
		req := p.send(protocol.Pub{TopicID: topic, Partition: part, Value: []byte("v")})
		flush(p.in)
		if _, err := p.result(req); err != nil {
			t.Fatal(err)
		}
	}
	f.set(func(op *ring.Op) error {
		if op.Kind == ring.Rename && strings.Contains(op.Path2, ".deleted-") {
			return unix.EIO
		}
		return nil
	})
	p.remove("t")
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_ = e.Close(ctx) // the stores have failed, as they were meant to
	f.set(nil)

	e = mustOpen(t, o)
	if ok, state := e.Healthy(); !ok || state != "serving" {
		t.Errorf("after the crash: %v, %s", ok, state)
	}
	waitForTopicDirs(t, o)
	mustClose(t, e)
}

// TestEngine_RefusesPublishesBehindTheDeletionOfTheirTopic: they were checked while the topic was there.
func TestEngine_RefusesPublishesBehindTheDeletionOfTheirTopic(t *testing.T) {
	o := testOptions(t.TempDir())
	o.Shards = 2
	e := mustOpen(t, o)
	defer mustClose(t, e)
	p, other := newPeer(t, e), newPeer(t, e)
	topic := p.declare("t", 2).TopicID
	var late []uint64
	for part := range uint16(2) {
		late = append(late, p.send(protocol.Pub{TopicID: topic, Partition: part, ProducerID: 7, ProducerSeq: 1, Value: []byte("late")}))
	}
	other.remove("t")
	flush(p.in)
	for _, req := range late {
		if res, err := p.result(req); !isCode(err, protocol.CodeUnknownTopic) {
			t.Errorf("a publish behind the deletion: %+v, %v", res, err)
		}
	}
	waitForTopicDirs(t, o)
}

func isCode(err error, want protocol.ErrorCode) bool {
	code, ok := protocol.CodeOf(err)
	return ok && code == want
}

// TestEngine_StopsWhateverItsStoresAreDoing stops and starts a broker of three shards in the middle of publishes and
// deletions of topics, whose files are being made, written and moved at that time.
func TestEngine_StopsWhateverItsStoresAreDoing(t *testing.T) {
	o := testOptions(t.TempDir())
	o.Shards = 3
	o.SegmentMaxBytes = minSegmentMaxBytes
	const rounds = 5
	for round := range uint64(rounds) {
		e := mustOpen(t, o)
		if ok, state := e.Healthy(); !ok || state != "serving" {
			t.Fatalf("start %d: %s", round, state)
		}
		keep := newPeer(t, e).declare("keep", 5).TopicID
		var wg sync.WaitGroup
		for worker := range uint64(2) {
			rng := rand.New(rand.NewPCG(round, worker))
			wg.Go(func() {
				p := newPeer(t, e)
				for i := range 4 + rng.IntN(4) {
					name := fmt.Sprintf("t-%d-%d-%d", round, worker, i)
					topic := p.declare(name, 3).TopicID
					var last uint64
					for range 10 + rng.IntN(200) {
						p.send(protocol.Pub{TopicID: topic, Partition: uint16(rng.IntN(3)), Value: make([]byte, rng.IntN(4000))})
						last = p.send(protocol.Pub{TopicID: keep, Partition: uint16(rng.IntN(5)), Value: make([]byte, rng.IntN(4000))})
					}
					flush(p.in)
					if rng.IntN(2) == 0 {
						if _, err := p.result(last); err != nil {
							t.Errorf("publish: %v", err)
						}
					}
					p.remove(name)
				}
			})
		}
		wg.Wait()
		mustClose(t, e)
	}
	e := mustOpen(t, o)
	keep := newPeer(t, e).declare("keep", 5).TopicID
	waitForTopicDirs(t, o, keep)
	mustClose(t, e)
}
