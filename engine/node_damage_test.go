package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// flip flips a bit of the byte at an offset, from the end if it is negative, of each of the files.
func flip(at int) func(t *testing.T, path string) {
	return func(t *testing.T, path string) {
		damage(t, path, func(b []byte) int {
			if at < 0 {
				return len(b) + at
			}
			return min(at, len(b)-1)
		})
	}
}

func remove(t *testing.T, path string) {
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
}

func truncate(t *testing.T, path string) {
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, info.Size()/2); err != nil {
		t.Fatal(err)
	}
}

// A follower that finds its files damaged or gone at the start gets everything from the leader again: it forgets no topic and
// no message, and can lead.
func TestNode_DamagedFilesAreMadeAgainFromTheOthers(t *testing.T) {
	t.Parallel()
	const version = 4 // where the version is, behind the magic
	partition := filepath.Join("topics", "*", "*")
	for name, cases := range map[string][]struct {
		what  string
		files string // a pattern in the data directory
		harm  func(t *testing.T, path string)
	}{
		"files of partitions": {
			{"no checkpoint", filepath.Join(partition, "checkpoint.mqc"), remove},
			{"a checkpoint's version", filepath.Join(partition, "checkpoint.mqc"), flip(version)},
			{"a checkpoint's content", filepath.Join(partition, "checkpoint.mqc"), flip(-1)},
			{"a segment's version", filepath.Join(partition, "*.mqs"), flip(version)},
			{"a record", filepath.Join(partition, "*.mqs"), flip(4096 + 70)},
			{"no segment", filepath.Join(partition, "*.mqs"), remove},
			{"half a segment", filepath.Join(partition, "*.mqs"), truncate},
			{"no partition", partition, remove},
		},
		"the checkpoint table and the journal": {
			{"no table", filepath.Join("journal", "0", "partitions.mmck"), remove},
			{"the table's version", filepath.Join("journal", "0", "partitions.mmck"), flip(version)},
			{"a journal file's version", filepath.Join("journal", "0", "*.mmj"), flip(version)},
			{"no journal", filepath.Join("journal", "0", "*.mmj"), remove},
			{"the mark", filepath.Join("journal", "0", "mark"), flip(version)},
			{"no mark", filepath.Join("journal", "0", "mark"), remove},
			{"producer windows", filepath.Join("journal", "0", "dedup.mmdd"), flip(-1)},
		},
		"metadata and ledger": {
			{"the metadata log's version", filepath.Join("metadata", "mmml-*.log"), flip(version)},
			{"a mutation", filepath.Join("metadata", "mmml-*.log"), flip(4096 + 70)},
			{"a snapshot", filepath.Join("metadata", "mmms-*.bin"), flip(-1)},
			{"no metadata", "metadata", remove},
			{"the ledger's version", filepath.Join("ledger", "0", "delivery*.mql"), flip(version)},
			{"a ledger record", filepath.Join("ledger", "0", "delivery*.mql"), flip(4096 + 70)},
			{"cursors", filepath.Join("ledger", "0", "cursor.mqc"), flip(-1)},
			{"no ledger", filepath.Join("ledger", "0", "*"), remove},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newTrio(t, func(o *NodeOptions) { o.Engine.MetadataSnapshotRecords = 8 })
			topic := c.declare("orders", 2)
			for i := range 8 {
				c.declare(fmt.Sprint("another-", i), 1)
			}
			messages := 50
			c.commitAll(topic.TopicID, 1, messages, 1000)
			c.eventually("the group has begun", func() bool { return c.acknowledged("g", topic.TopicID, messages) })
			hurt, _ := followers(c.leader())
			for i, d := range cases {
				c.waitStanding(hurt, replica.Voter)
				c.declare(fmt.Sprint("more-", i), 1) // a log that was made again may be in a snapshot as a whole
				c.commitAll(topic.TopicID, messages+1, messages+10, 100)
				messages += 10
				c.tellsTheSame("before "+d.what, hurt)
				c.stop(hurt)
				files, err := filepath.Glob(filepath.Join(c.dirs[hurt], d.files))
				if err != nil || len(files) == 0 {
					t.Fatalf("%s: no %s: %v", d.what, d.files, err)
				}
				for _, path := range files {
					d.harm(t, path)
				}
				c.commitAll(topic.TopicID, messages+1, messages+10, 100)
				messages += 10
				c.start(hurt)
				c.tellsTheSame(d.what, hurt)
			}
			c.takeOver(hurt)
			c.commitAll(topic.TopicID, 1, messages, 1000) // recognised, as it was sent before
			c.eventually("a new group gets everything", func() bool { return c.acknowledged("h", topic.TopicID, messages) })
		})
	}
}

// A follower that is stopped while a partition is made again, which begins anew for that, knows after its restart that the
// partition isn't complete.
func TestNode_ARepairThatWasInterruptedGoesOnAfterARestart(t *testing.T) {
	t.Parallel()
	c := newTrio(t, nil)
	topic := c.declare("orders", 1)
	const messages = 50
	c.commitAll(topic.TopicID, 1, messages, 1000)
	hurt, _ := followers(c.leader())
	c.tellsTheSame("before", hurt)
	c.stop(hurt)
	segments := filepath.Join(c.dirs[hurt], "topics", "*", "*", "*.mqs")
	files, err := filepath.Glob(segments)
	if err != nil || len(files) == 0 {
		t.Fatalf("no segments: %v", err)
	}
	truncate(t, files[0])
	c.m.lose(func(f peerwire.BulkFrame) bool {
		_, ok := f.(*peerwire.Records)
		return ok
	})
	c.start(hurt)
	c.eventually("the damaged partition begins anew", func() bool {
		files, err := filepath.Glob(segments)
		return err == nil && len(files) == 0
	})
	c.stop(hurt)
	c.m.lose(nil)
	c.start(hurt)
	c.tellsTheSame("made again", hurt)
	c.takeOver(hurt)
	c.eventually("a new group gets everything", func() bool { return c.acknowledged("h", topic.TopicID, messages) })
}

// A file that the next version of the broker has written is no damaged one: the start is refused, and nothing is changed.
func TestNode_AFileOfTheNextVersionIsLeftAlone(t *testing.T) {
	t.Parallel()
	c := newTrio(t, nil)
	topic := c.declare("orders", 1)
	c.commitAll(topic.TopicID, 1, 50, 100)
	newer, _ := followers(c.leader())
	c.tellsTheSame("before", newer)
	c.stop(newer)
	for _, pattern := range []string{"topics/*/*/checkpoint.mqc", "journal/0/partitions.mmck", "metadata/mmml-*.log"} {
		files, err := filepath.Glob(filepath.Join(c.dirs[newer], filepath.FromSlash(pattern)))
		if err != nil || len(files) == 0 {
			t.Fatalf("no %s: %v", pattern, err)
		}
		was, err := os.ReadFile(files[0])
		if err != nil {
			t.Fatal(err)
		}
		next := slices.Clone(was)
		next[4]++
		next[8]++ // as it is with this version, the checksum would tell that a byte is damaged
		if err := os.WriteFile(files[0], next, 0o600); err != nil {
			t.Fatal(err)
		}
		if n, err := c.open(newer); err == nil {
			c.nodes[newer] = n
			t.Fatalf("a node starts with %s of another version", pattern)
		} else if v := (*wal.VersionError)(nil); !errors.As(err, &v) || v.Path != files[0] || v.Version != was[4]+1 {
			t.Errorf("%s: %v", pattern, err)
		}
		if now, err := os.ReadFile(files[0]); err != nil || !bytes.Equal(now, next) {
			t.Errorf("%s was changed (%v)", pattern, err)
		}
		if err := os.WriteFile(files[0], was, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c.start(newer)
	c.tellsTheSame("afterwards", newer)
}

// Metadata from before the newest topics, as of an old backup, is not believed: no topic is forgotten.
func TestNode_MetadataOlderThanTheDataIsMadeAgain(t *testing.T) {
	t.Parallel()
	c := newTrio(t, nil)
	c.declare("first", 1)
	hurt, _ := followers(c.leader())
	c.waitStanding(hurt, replica.Voter)
	c.tellsTheSame("before", hurt)
	c.stop(hurt)
	old := t.TempDir()
	metadata := filepath.Join(c.dirs[hurt], "metadata")
	if err := os.CopyFS(old, os.DirFS(metadata)); err != nil {
		t.Fatal(err)
	}
	c.start(hurt)
	topic := c.declare("second", 1)
	c.commitAll(topic.TopicID, 1, 100, 100)
	c.tellsTheSame("with more topics", hurt)
	c.stop(hurt)
	remove(t, metadata)
	if err := os.CopyFS(metadata, os.DirFS(old)); err != nil {
		t.Fatal(err)
	}
	c.start(hurt)
	c.tellsTheSame("with old metadata", hurt)
	c.takeOver(hurt)
	c.commitAll(topic.TopicID, 101, 200, 100)
	c.eventually("a group gets everything", func() bool { return c.acknowledged("g", topic.TopicID, 200) })
}

// tellsTheSame waits until a node counts and knows of all topics and messages what the leader knows.
func (c *trio) tellsTheSame(what string, id replica.NodeID) {
	c.t.Helper()
	c.waitStanding(id, replica.Voter)
	ends := func(id replica.NodeID) (list []string) {
		e := c.nodes[id].Engine()
		if e == nil {
			return nil
		}
		s, err := e.Stats(context.Background())
		if err != nil {
			return nil
		}
		for _, t := range s.Coord.Topics {
			line := t.Name + t.State
			for _, p := range t.Parts {
				line += fmt.Sprint(" ", p.LastSeq)
			}
			list = append(list, line)
		}
		slices.Sort(list)
		return append(list, fmt.Sprint(len(s.Coord.Groups), " groups, ", len(s.Quarantined), " quarantined"))
	}
	c.eventually(fmt.Sprintf("%s: node %d knows what the leader knows", what, id), func() bool {
		want := ends(c.leader())
		return len(want) > 1 && slices.Equal(ends(id), want)
	})
}

// coldTrio is a trio whose nodes keep little in memory, with messages that are in segments on all nodes.
func coldTrio(t *testing.T, messages int) (*trio, uint16) {
	t.Helper()
	c := newTrio(t, func(o *NodeOptions) { o.Engine.TailBytes = 1 << 20 })
	topic := c.declare("orders", 1).TopicID
	c.commitAll(topic, 1, messages, 1000)
	for id := range c.nodes {
		c.tellsTheSame("before", id)
	}
	c.eventually("everything is in segments", func() bool {
		for _, n := range c.nodes {
			for _, s := range n.Engine().shards {
				if s.store.pending.Load() > 0 {
					return false
				}
			}
		}
		return true
	})
	return c, topic
}

// hurtRecord flips a bit of a record's value in a node's first segment of a topic.
func (c *trio) hurtRecord(id replica.NodeID, topic uint16) {
	c.t.Helper()
	files, err := filepath.Glob(filepath.Join(c.dirs[id], "topics", fmt.Sprint(topic), "0", "*.mqs"))
	if err != nil || len(files) == 0 {
		c.t.Fatalf("node %d has no segment of topic %d: %v", id, topic, err)
	}
	damage(c.t, files[0], func([]byte) int { return 4096 + 20_000 })
}

// A record rots in a segment of the leader while it serves: whoever reads it gets the right one, as another node leads; the
// damaged node counts for nothing until it has the partition again.
func TestNode_ARecordThatRotsIsServedByAnotherNodeAndRepaired(t *testing.T) {
	t.Parallel()
	const messages = 3000
	c, topic := coldTrio(t, messages)
	c.ackEvery = 64
	hurt := c.leader()
	c.hurtRecord(hurt, topic)
	attempt := 0
	c.eventually("a group gets everything", func() bool {
		attempt++ // with a group of its own: the next leader waits for the members of the one before
		return c.acknowledged(fmt.Sprint("g", attempt), topic, messages)
	})
	c.eventually("the damaged node counts again", func() bool {
		reports, err := filepath.Glob(filepath.Join(c.dirs[hurt], "topics", fmt.Sprint(topic), "0", "quarantine-*"))
		return err == nil && len(reports) == 0 && c.nodes[hurt].Status().Standing == replica.Voter
	})
	c.tellsTheSame("afterwards", hurt)
	c.takeOver(hurt)
	c.eventually("a new group gets everything from it", func() bool { return c.acknowledged("h", topic, messages) })
}

// The same record rots on all nodes: its partition is an error, nothing of it is skipped and no sequence given out again, and all
// else is served. When the topic is deleted all nodes count again.
func TestNode_ARecordThatRotsEverywhereIsAnError(t *testing.T) {
	t.Parallel()
	const messages = 3000
	c, topic := coldTrio(t, messages)
	other := c.declare("others", 1).TopicID
	c.commitAll(other, 1, 10, 100)
	for id := range c.nodes {
		c.hurtRecord(id, topic)
	}
	read := make(chan struct{})
	go func() { // which finds it, on one node after the other
		defer close(read)
		c.acknowledged("g", topic, messages)
		c.acknowledged("h", topic, messages)
	}()
	c.eventually("publishes to the damaged partition are refused with 0x000A", func() bool {
		res, err := newNodePeer(t, c.nodes[c.leader()]).publish(protocol.Pub{TopicID: topic, Value: []byte("x")})
		if err == nil && res.Sequence <= messages {
			t.Fatalf("sequence %d was given out again", res.Sequence)
		}
		return code(err) == protocol.CodeInternal
	})
	c.commitAll(other, 11, 100, 100)
	c.eventually("a group gets everything else", func() bool { return c.acknowledged("k", other, 100) })
	c.eventually("the topic is deleted", func() bool {
		d := protocol.Declare{Topic: []byte("orders"), Flags: protocol.DeclareFlagDelete}
		_, err := newNodePeer(t, c.nodes[c.leader()]).ask(protocol.OpDeclare, d.AppendFrame(nil))
		return err == nil
	})
	<-read
	for id := range c.nodes {
		c.tellsTheSame("without the topic", id)
	}
}

// A record rots on a follower, where nobody reads it: its scrub does, and the follower gets the partition again.
func TestNode_RotOnAFollowerIsFoundAndRepairedBeforeAnybodyReadsThere(t *testing.T) {
	t.Parallel()
	const messages = 3000
	said := &lines{}
	c := newTrio(t, func(o *NodeOptions) {
		o.Engine.TailBytes = 1 << 20
		o.Engine.ScrubAfter, o.Engine.ScrubEvery = time.Second, time.Second
		o.Engine.Logger = slog.New(slog.NewTextHandler(said, nil))
	})
	topic := c.declare("orders", 1).TopicID
	c.commitAll(topic, 1, messages, 1000)
	hurt, _ := followers(c.leader())
	scrubbed := func() uint64 {
		e := c.nodes[hurt].Engine()
		if e == nil {
			return 0
		}
		s, err := e.Stats(context.Background())
		if err != nil {
			return 0
		}
		return s.Shards[0].Scrub.Bytes
	}
	c.eventually("a scrub has read the segments", func() bool { return scrubbed() > 0 })
	c.hurtRecord(hurt, topic)
	c.eventually("the damage is found", func() bool { return said.has("reading all segments has found a damaged one", "topic 1 partition 0") })
	c.eventually("it is repaired", func() bool { return said.has("caught up in bulk", fmt.Sprint("node=", hurt)) })
	c.tellsTheSame("afterwards", hurt)
	c.takeOver(hurt)
	c.eventually("a group gets everything from it", func() bool { return c.acknowledged("g", topic, messages) })
}
