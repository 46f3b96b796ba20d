package coord

import (
	"strings"
	"testing"

	"github.com/mortarmq/mortarmq/protocol"
)

func TestDeclare_IsAnsweredWhenCommitted(t *testing.T) {
	b := newBench(t)
	c := b.client()
	req := b.send(c, declare("orders", 3, 0))
	if _, answered := c.answers[req]; answered {
		t.Fatal("answered before the mutation was committed")
	}
	if _, visible := b.c.Registry().Topic(1); visible {
		t.Fatal("the topic is visible before the mutation was committed")
	}
	b.commit()
	b.want("DECLARE", c.answers[req], "OK DECLARE id=1 parts=3 existed=false")
	if c.flushes == 0 {
		t.Error("the answer was not flushed")
	}
	topic, ok := b.c.Registry().Topic(1)
	if !ok || topic.Name != "orders" || topic.Partitions != 3 || topic.Durability != protocol.DurabilityQuorum {
		t.Fatalf("registry has %+v", topic)
	}
}

func TestDeclare_ExistingMissingAndMismatchedTopics(t *testing.T) {
	b := newBench(t)
	c := b.client()
	settings := func(json string, flags uint16) []byte {
		return (&protocol.Declare{Topic: []byte("s"), Partitions: 1, Flags: flags | protocol.DeclareFlagSettings, Settings: []byte(json)}).AppendFrame(nil)
	}
	for _, s := range []struct {
		what  string
		frame []byte
		want  string
	}{
		{"create", declare("t", 2, 0), "OK DECLARE id=1 parts=2 existed=false"},
		{"the same", declare("t", 2, 0), "OK DECLARE id=1 parts=2 existed=true"},
		{"count left open", declare("t", 0, 0), "OK DECLARE id=1 parts=2 existed=true"},
		{"other count", declare("t", 3, 0), "ERR 0x2001 topic \"t\" has 2 partitions, not 3"},
		{"default count", declare("d", 0, 0), "OK DECLARE id=2 parts=4 existed=false"},
		{"bad name", declare("a..b", 1, 0), "ERR 0x000B"},
		{"reserved name", declare("$dlq.g", 1, 0), "ERR 0x000B"},
		{"count of 65535", declare("x", 65535, 0), "ERR 0x4002"},
		{"lookup", declare("t", 0, protocol.DeclareFlagLookup), "OK DECLARE id=1 parts=2 existed=true"},
		{"lookup of a missing one", declare("no", 1, protocol.DeclareFlagLookup), "ERR 0x0008"},
		{"lookup of a missing system topic", declare("$dlq.g", 0, protocol.DeclareFlagLookup), "ERR 0x0008"},
		{"settings", settings(`{"durability":"local"}`, 0), "OK DECLARE id=3 parts=1 existed=false"},
		{"the same settings", settings(`{"durability": "local"}`, 0), "OK DECLARE id=3 parts=1 existed=true"},
		{"other settings", settings(`{"durability":"memory"}`, 0), "ERR 0x2001"},
		{"no settings", declare("s", 1, 0), "OK DECLARE id=3 parts=1 existed=true"},
		{"unknown setting", settings(`{"retention":1}`, 0), "ERR 0x000B topic settings: unknown key: retention"},
		{"delete", declare("t", 0, protocol.DeclareFlagDelete), "OK DECLARE id=1 parts=2 existed=true"},
		{"delete again", declare("t", 0, protocol.DeclareFlagDelete), "OK DECLARE id=0 parts=0 existed=false"},
		{"delete a system topic", declare("$other.g", 0, protocol.DeclareFlagDelete), "ERR 0x000B"},
		{"create again", declare("t", 5, 0), "OK DECLARE id=4 parts=5 existed=false"},
	} {
		b.want(s.what, b.do(c, s.frame), s.want)
	}
	if local, _ := b.c.Registry().Topic(3); local.Durability != protocol.DurabilityLocal {
		t.Errorf("topic s has durability %v", local.Durability)
	}
	if len(b.c.topics.waiting) != 0 || b.c.topics.creating != 0 || b.c.topics.partitions != 0 || len(b.c.topics.deleting) != 0 {
		t.Errorf("something of the changes is left: %+v", b.c.topics)
	}
	if b.want("dropped", b.d.take(), "topic- t1"); len(b.store.dropped) != 1 || b.store.dropped[0] != 1 {
		t.Errorf("the store was told to drop %v", b.store.dropped)
	}
}

func TestDeclare_RequestsBehindAChangeInFlightWaitForIt(t *testing.T) {
	b := newBench(t)
	c, d := b.client(), b.client()
	r1 := b.send(c, declare("t", 2, 0))
	r2 := b.send(d, declare("t", 2, 0))
	r3 := b.send(c, declare("t", 3, 0))
	look := b.send(c, declare("t", 0, protocol.DeclareFlagLookup))
	del := b.send(c, declare("t", 0, protocol.DeclareFlagDelete))
	other := b.send(c, declare("u", 1, 0))
	again := b.send(c, declare("t", 7, 0))
	b.want("lookup", c.answers[look], "ERR 0x0008")
	b.commit()
	b.want("first", c.answers[r1], "OK DECLARE id=1 parts=2 existed=false")
	b.want("second", d.answers[r2], "OK DECLARE id=1 parts=2 existed=true")
	b.want("mismatch", c.answers[r3], "ERR 0x2001")
	b.want("delete", c.answers[del], "OK DECLARE id=1")
	b.want("other topic", c.answers[other], "OK DECLARE id=2 parts=1")
	b.want("created anew", c.answers[again], "OK DECLARE id=3 parts=7 existed=false")
}

func TestDeclare_MalformedPayloadShutsTheConnection(t *testing.T) {
	b := newBench(t)
	c := b.client()
	frame := declare("t", 1, 0)
	frame = append(frame, 0)
	frame[3]++
	b.send(c, frame)
	if c.shut != protocol.CodeMalformedPayload || c.shutMsg == "" {
		t.Fatalf("shut with %v %q", c.shut, c.shutMsg)
	}
}

func TestDeclare_SystemTopicsAreTheBrokersToMake(t *testing.T) {
	b := newBench(t)
	var got []string
	for range 2 {
		b.c.ensureSystemTopic("$dlq.g", 1, func(topic uint16, err error) {
			if err != nil {
				t.Error(err)
			}
			got = append(got, string(rune('0'+topic)))
		})
	}
	b.commit()
	if strings.Join(got, "") != "11" {
		t.Fatalf("topic ids %v", got)
	}
	b.want("lookup", b.do(b.client(), declare("$dlq.g", 0, protocol.DeclareFlagLookup)), "OK DECLARE id=1 parts=1 existed=true")
	cl := b.client()
	b.want("create", b.do(cl, declare("$dlq.h", 1, 0)), "ERR 0x000B")
	b.want("delete", b.do(cl, declare("$other", 0, protocol.DeclareFlagDelete)), "ERR 0x000B")
	b.want("delete a dead-letter topic", b.do(cl, declare("$dlq.g", 0, protocol.DeclareFlagDelete)), "OK DECLARE id=1")
	b.want("lookup", b.do(cl, declare("$dlq.g", 0, protocol.DeclareFlagLookup)), "ERR 0x0008")
	b.c.ensureSystemTopic("$dlq.g", 1, func(topic uint16, err error) {
		if topic != 2 || err != nil {
			t.Errorf("made anew as %d, %v", topic, err)
		}
	})
	b.commit()
}

func TestDeclare_ReadOnlyLogAnswersAndRecovers(t *testing.T) {
	b := newBench(t)
	c := b.client()
	b.log.failAt = 1
	b.want("refused", b.do(c, declare("t", 1, 0)), "ERR 0x2003")
	if s := b.c.statistics(); s.MetadataState != "read_only" || s.MetadataReason == "" {
		t.Errorf("state %q, %q", s.MetadataState, s.MetadataReason)
	}
	b.log.fail = nil
	b.want("accepted", b.do(c, declare("t", 1, 0)), "OK DECLARE id=1")
	if s := b.c.statistics(); s.MetadataState != "ok" {
		t.Errorf("state %q", s.MetadataState)
	}
}

func TestLogFailed_AnswersEverybodyWhoWaits(t *testing.T) {
	b := newBench(t)
	c := b.client()
	b.do(c, declare("t", 1, 0))
	create := b.send(c, declare("u", 1, 0))
	behind := b.send(c, declare("u", 1, 0))
	newGroup := b.send(c, sub("g", 1))
	del := b.send(c, declare("t", 0, protocol.DeclareFlagDelete))
	b.log.pending = nil
	b.c.LogFailed("write error")
	b.c.turn()
	for _, req := range []uint64{create, behind, newGroup, del} {
		b.want("waiting", c.answers[req], "ERR 0x2003")
	}
	b.want("later", b.do(c, declare("v", 1, 0)), "ERR 0x2003")
	b.want("lookup", b.do(c, declare("t", 1, protocol.DeclareFlagLookup)), "OK DECLARE id=1")
	b.want("delivery", b.d.take(), "failed 0x6002")
	b.want("ACK", b.do(c, (&protocol.Ack{}).AppendFrame(nil)), "ERR 0x6002")
	b.want("NACK", b.do(c, (&protocol.Nack{}).AppendFrame(nil)), "ERR 0x6002")
	b.do(c, (&protocol.Pull{}).AppendFrame(nil))
	b.want("PULL goes on", b.d.take(), "request PULL")
}

func TestMetadata_BadRecordQuarantinesInsteadOfGuessing(t *testing.T) {
	b := newBench(t)
	c := b.client()
	b.do(c, declare("t", 1, 0))
	waiting := b.send(c, declare("u", 1, 0))
	b.log.pending[0].Value = []byte{1, 99}
	b.commit()
	b.want("waiting", c.answers[waiting], "ERR 0x2004")
	b.want("lookup", b.do(c, declare("t", 0, protocol.DeclareFlagLookup)), "ERR 0x2004")
	b.want("sub", b.do(c, sub("g", 1)), "ERR 0x2004")
	if r := b.c.Registry(); !r.Quarantined() || len(r.Topics()) != 0 {
		t.Error("topics of quarantined metadata are still served")
	}
	if s := b.c.statistics(); s.MetadataState != "quarantined" || len(s.Topics) != 0 {
		t.Errorf("statistics %+v", s)
	}
}

func TestMetadata_SnapshotsBoundTheLog(t *testing.T) {
	b := newBench(t, func(o *Options) { o.MetadataSnapshotRecords = 5 })
	c := b.client()
	for i := range 12 {
		b.do(c, declare("t"+string(rune('a'+i)), 1, 0))
	}
	if got := strings.Join(b.store.snapshots, " "); got != "1@5 1@10" {
		t.Fatalf("snapshots %s", got)
	}
	// A restart from the snapshot and the records above it knows the same.
	r := New(Options{}, b.log, b.store, nil, 1)
	r.delivery = &stubDelivery{}
	if err := r.RestoreMetadata(10, b.store.data); err != nil {
		t.Fatal(err)
	}
	for i := range b.records[10:] {
		if err := r.ReplayMetadata(&b.records[10+i]); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.Recovered(); err != nil {
		t.Fatal(err)
	}
	if got, want := string(r.meta.AppendSnapshot(nil)), string(b.c.meta.AppendSnapshot(nil)); got != want {
		t.Fatal("the restarted coordinator has other metadata")
	}
	if len(r.Registry().Topics()) != 12 {
		t.Fatalf("%d topics after the restart", len(r.Registry().Topics()))
	}
	if err := r.RestoreMetadata(11, b.store.data); err == nil {
		t.Fatal("a snapshot under a wrong position was accepted")
	}
}
