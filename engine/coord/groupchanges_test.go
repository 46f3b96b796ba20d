package coord

import (
	"fmt"
	"strings"
	"testing"

	"github.com/mortarmq/mortarmq/protocol"
)

func declareGroup(topic, name, settings string, flags uint16) []byte {
	m := protocol.Declare{Topic: []byte(topic), Flags: flags | protocol.DeclareFlagGroup, Group: []byte(name)}
	if settings != "" {
		m.Flags |= protocol.DeclareFlagSettings
		m.Settings = []byte(settings)
	}
	return m.AppendFrame(nil)
}

func subWith(group, settings string) []byte {
	return (&protocol.Sub{Group: []byte(group), TopicID: 1, Partition: protocol.AnyPartition, Flags: protocol.SubFlagSettings, Settings: []byte(settings)}).AppendFrame(nil)
}

func TestDeclareGroup_CreatesFindsChangesAndDeletes(t *testing.T) {
	b, c := withTopic(t, 2)
	for _, step := range []struct{ what, settings, want, delivery string }{
		{"lookup of none", "L", "ERR 0x2005", ""},
		{"update of none", `U{"ordered":true}`, "ERR 0x2005", ""},
		{"delete of none", "D", "OK DECLARE id=1 parts=2 existed=false", ""},
		{"broadcast and ordered", `{"broadcast":true,"ordered":true}`, "ERR 0x2002 group settings: a broadcast group has no retries", ""},
		{"create", `{"max_attempts":3}`, "OK DECLARE id=1 parts=2 existed=false", "group+ g1 t1 policy=0"},
		{"again", `{"max_attempts":3}`, "OK DECLARE id=1 parts=2 existed=true", ""},
		{"other settings", `{"max_attempts":4}`, "ERR 0x2002", ""},
		{"no settings", "", "OK DECLARE id=1 parts=2 existed=true", ""},
		{"lookup", "L", "OK DECLARE id=1 parts=2 existed=true", ""},
		{"bad settings", `{"max_attempts":0}`, "ERR 0x2002", ""},
		{"update", `U{"ordered":true}`, "OK DECLARE id=1 parts=2 existed=true", "group= g1"},
		{"the new ones", `{"ordered":true}`, "OK DECLARE id=1 parts=2 existed=true", ""},
		{"update to broadcast", `U{"broadcast":true}`, "ERR 0x2002", ""},
		{"delete", "D", "OK DECLARE id=1 parts=2 existed=true", "group- g1"},
		{"delete again", "D", "OK DECLARE id=1 parts=2 existed=false", ""},
		{"create anew", "", "OK DECLARE id=1 parts=2 existed=false", "group+ g2 t1 policy=0"},
	} {
		flags := map[byte]uint16{'L': protocol.DeclareFlagLookup, 'U': protocol.DeclareFlagUpdate, 'D': protocol.DeclareFlagDelete}
		settings, flag := step.settings, uint16(0)
		if settings != "" && flags[settings[0]] != 0 {
			settings, flag = settings[1:], flags[settings[0]]
		}
		b.want(step.what, b.do(c, declareGroup("t", "g", settings, flag)), step.want)
		b.want(step.what+", delivery", b.d.take(), step.delivery)
	}
	b.want("no topic", b.do(c, declareGroup("x", "g", "", 0)), "ERR 0x0008")
	if n := len(b.c.groups.changes.waiting) + b.c.groups.changes.creating + b.c.groups.changes.assignments; n != 0 {
		t.Errorf("%d changes are left over", n)
	}
}

func TestDeclareGroup_SettingsSurviveARestart(t *testing.T) {
	b, c := withTopic(t, 2)
	b.do(c, declareGroup("t", "g", `{"strategy":"circle"}`, 0))
	b.do(c, declareGroup("t", "g", `{"strategy":"averagely"}`, protocol.DeclareFlagUpdate))
	b.start()
	c = b.client()
	b.want("the same", b.do(c, declareGroup("t", "g", `{"strategy":"averagely"}`, 0)), "OK DECLARE id=1 parts=2 existed=true")
	b.want("others", b.do(c, subWith("g", `{"strategy":"circle"}`)), "ERR 0x2002")
}

func TestDeclareGroup_WaitsForWhatIsInFlight(t *testing.T) {
	b := newBench(t)
	c := b.client()
	topic := b.send(c, declare("t", 2, 0))
	create := b.send(c, declareGroup("t", "g", "", 0))
	b.commit()
	same := b.send(c, declareGroup("t", "h", `{"ordered":true}`, 0))
	other := b.send(c, declareGroup("t", "h", `{"ordered":false,"max_attempts":2}`, 0))
	join := b.send(c, sub("h", 1))
	update := b.send(c, declareGroup("t", "h", `{"max_attempts":2}`, protocol.DeclareFlagUpdate))
	del := b.send(c, declareGroup("t", "h", "", protocol.DeclareFlagDelete))
	late := b.send(c, sub("h", 1))
	b.commit()
	for req, want := range map[uint64]string{
		topic: "OK DECLARE id=1", create: "OK DECLARE id=1 parts=2 existed=false", same: "OK DECLARE id=1 parts=2 existed=false",
		other: "ERR 0x2002", join: "ERR 0x2005", update: "OK DECLARE id=1 parts=2 existed=true",
		del: "OK DECLARE id=1 parts=2 existed=true", late: "OK SUB sub=2 member=3",
	} {
		b.want(fmt.Sprint("request ", req), c.answers[req], want)
	}
}

func TestDeleteGroup_TellsItsMembers(t *testing.T) {
	b, c := withTopic(t, 1)
	b.do(c, sub("g", 1))
	b.confirm(c)
	b.d.take()
	b.want("delete", b.do(b.client(), declareGroup("t", "g", "", protocol.DeclareFlagDelete)), "OK DECLARE")
	b.want("delivery", b.d.take(), "disown g1 p0 e1 graceful=true; close 1 graceful=true ended=0x2005; group- g1")
	b.want("member", b.do(c, heartbeat(1, firstMember, 1, 1, protocol.MemberActive)), "ERR 0x2005 group \"g\" was deleted")
	b.want("anew", b.do(c, sub("g", 1)), "OK SUB sub=2 member=2000000000001 epochs=1/0")
}

func TestDeleteGroup_BehindTheDeletionOfItsTopicIsRefused(t *testing.T) {
	b, c := withTopic(t, 1)
	b.do(c, sub("g", 1))
	b.send(c, declare("t", 0, protocol.DeclareFlagDelete))
	b.want("delete", c.answers[b.send(c, declareGroup("t", "g", "", protocol.DeclareFlagDelete))], "")
	b.commit()
	if b.c.quarantined != "" {
		t.Fatal(b.c.quarantined)
	}
	b.want("afterwards", b.do(c, declareGroup("t", "g", "", protocol.DeclareFlagDelete)), "ERR 0x0008")
}

func TestSub_SettingsMakeTheGroupOrMustBeItsOwn(t *testing.T) {
	b, c := withTopic(t, 2)
	b.want("creates", b.do(c, subWith("g", `{"ordered":true}`)), "OK SUB sub=1")
	b.want("same", b.do(c, subWith("g", `{"ordered":true}`)), "OK SUB sub=2")
	b.want("none", b.do(c, sub("g", 1)), "OK SUB sub=3")
	b.want("other", b.do(c, subWith("g", `{}`)), "ERR 0x2002 group \"g\" has the settings {\"ordered\":true}")
	b.want("bad", b.do(c, subWith("h", `{"orderd":true}`)), "ERR 0x2002")
	if b.c.meta.GroupByName("h", 1) != nil {
		t.Error("a refused SUB created its group")
	}
}

// owners tells who owns each partition, members numbered from 0.
func (b *bench) owners(group uint16) string {
	var s strings.Builder
	first := b.c.groups.byID[group].m.Members()[0].ID
	for _, p := range b.c.groups.byID[group].m.Parts() {
		fmt.Fprintf(&s, "%d", p.Owner-first)
	}
	return s.String()
}

func TestGroup_StrategiesAreAppliedAndChanged(t *testing.T) {
	b, c := withTopic(t, 8)
	clients := []*stubClient{c, b.client(), b.client()}
	settle := func() {
		for range 5 {
			for _, c := range clients {
				b.confirm(c)
			}
		}
	}
	for _, c := range clients {
		b.want("SUB", b.do(c, subWith("g", `{"strategy":"averagely"}`)), "OK SUB")
		settle()
	}
	if got := b.owners(1); got != "00011122" {
		t.Errorf("averagely: %s", got)
	}
	b.want("update", b.do(c, declareGroup("t", "g", `{"strategy":"circle"}`, protocol.DeclareFlagUpdate)), "OK DECLARE")
	settle()
	if got := b.owners(1); got != "01201201" {
		t.Errorf("circle: %s", got)
	}
}

// Changes of one name that are sent together are carried out one by one, each of which hands the others on to the next: this
// test ends soon, or takes minutes if each of them is queued again.
func TestDeclare_PipelinedChangesOfOneNameDoNotQueueAgainAndAgain(t *testing.T) {
	n := 1 << 15
	if testing.Short() {
		n >>= 5
	}
	b, c := withTopic(t, 1)
	requests := func(first []byte, second []byte) {
		batch := GetBatch()
		from := c.next + 1
		for i := range n {
			frame := first
			if i%2 == 1 {
				frame = second
			}
			c.next++
			batch.Add(c, c.next, protocol.OpDeclare, frame[protocol.HeaderSize:])
		}
		b.c.Submit(batch)
		b.c.turn()
		b.records = nil // or committing takes longer than what is tested
		for len(b.log.pending) > 0 {
			b.commit()
		}
		for req := from; req <= c.next; req++ {
			if !strings.HasPrefix(c.answers[req], "OK DECLARE") {
				t.Fatalf("request %d of %d: %s", req-from, n, c.answers[req])
			}
		}
		b.d.take()
	}
	requests(declareGroup("t", "g", "", 0), declareGroup("t", "g", "", protocol.DeclareFlagDelete))
	requests(declare("u", 1, 0), declare("u", 0, protocol.DeclareFlagDelete))
}
