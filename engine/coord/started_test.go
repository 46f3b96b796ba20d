package coord

import (
	"testing"

	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// emptyRound commits a round without records: what every group's start waits for looks at each of them.
func (b *bench) emptyRound() {
	b.round++
	b.c.CommitRound(0, wal.NewTestRound(b.pool, b.epoch, b.round))
	b.c.Nudge()
	b.c.turn()
}

func TestSub_IsAnsweredWhenTheGroupsStartIsOnRecord(t *testing.T) {
	b, c := withTopic(t, 1)
	b.d.starting = true
	first := b.send(c, sub("g", 1))
	b.commit()
	second := b.send(c, sub("g", 1))
	b.emptyRound()
	if c.answers[first] != "" || c.answers[second] != "" {
		t.Fatalf("answered before the start: %q, %q", c.answers[first], c.answers[second])
	}
	b.d.starting = false
	b.emptyRound()
	b.commit()
	b.want("first", c.answers[first], "OK SUB sub=1")
	b.want("second", c.answers[second], "OK SUB sub=2")
}

func TestSub_ThatWaitsForAStartIsAnsweredIfThereIsNone(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(b *bench, c *stubClient)
		want string
	}{
		"failed journal": {func(b *bench, _ *stubClient) { b.c.LogFailed("write error"); b.c.turn() }, "ERR 0x2003"},
		"deleted topic":  {func(b *bench, c *stubClient) { b.do(c, declare("t", 0, protocol.DeclareFlagDelete)) }, "ERR 0x0008"},
	} {
		b, cl := withTopic(t, 1)
		b.d.starting = true
		req := b.send(cl, sub("g", 1))
		b.commit()
		c.end(b, cl)
		b.want(name, cl.answers[req], c.want)
		if len(b.c.groups.starting)+len(b.c.byHandle)+len(b.c.refs) != 0 {
			t.Errorf("%s: something is left over", name)
		}
	}
}

func TestDelivery_GroupHasStartedWithItsRecord(t *testing.T) {
	r := newRig(t, 2, nil)
	r.apply(&metadata.GroupCreated{Group: 9, Topic: rigTopic, Policy: protocol.StartLatest, Name: "g9"})
	r.d.groupCreated(9, rigTopic, protocol.StartLatest)
	r.turn()
	if r.d.groupStarted(9) {
		t.Fatal("started before the record is committed")
	}
	r.commit()
	if !r.d.groupStarted(9) {
		t.Fatal("not started")
	}
}
