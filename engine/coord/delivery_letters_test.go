package coord

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/engine/deadletter"
	"github.com/mortarmq/mortarmq/engine/ledger"
	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/protocol"
)

// letterTexts describes the stored dead letters of all topics: "sequence reason xAttempts", with the partition if it is
// not 0.
func (r *rig) letterTexts() (texts []string) {
	r.t.Helper()
	for topic, stored := range r.store.letters {
		for i := range stored {
			var e deadletter.Envelope
			value, err := e.Decode(stored[i].Value)
			if err != nil {
				r.t.Fatalf("topic %d: %v", topic, err)
			}
			if m := r.store.records[e.Partition][e.Sequence-1]; !bytes.Equal(m.Value, value) || e.PublishedMs != m.TimestampMs || e.ProducerID != m.ProducerID {
				r.t.Fatalf("the letter of %d is not the message", e.Sequence)
			}
			text := fmt.Sprintf("%d %v x%d", e.Sequence, e.Reason, e.Attempts)
			if e.Partition > 0 {
				text = fmt.Sprintf("%d:%s", e.Partition, text)
			}
			texts = append(texts, text)
		}
	}
	slices.Sort(texts)
	return texts
}

func (r *rig) wantLetters(want ...string) {
	r.t.Helper()
	if got := r.letterTexts(); !slices.Equal(got, want) {
		r.t.Fatalf("dead letters %q, want %q", got, want)
	}
}

func (r *rig) stats() GroupStats {
	var g GroupStats
	g.ID = rigGroup
	r.d.groupStats(&g)
	return g
}

// wantSums checks what must hold of the group's numbers at any moment.
func (r *rig) wantSums() {
	r.t.Helper()
	if g := r.stats(); g.Published != g.Acknowledged+g.Dropped+g.InFlight+g.Waiting || g.DLQ > g.Dropped {
		r.t.Fatalf("the group's numbers don't add up: %+v", g)
	}
}

func TestLetters_FifthFailureMovesTheMessageOnce(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, _ := r.subscribe(rigGroup, true, nil)
	r.publish(0, values(2)...)
	for attempt := uint16(1); attempt <= 5; attempt++ {
		for _, m := range cl.take() {
			if m.Sequence == 2 {
				cl.ack(&m, 0)
				continue
			}
			if m.Attempt != attempt {
				t.Fatalf("attempt %d, want %d", m.Attempt, attempt)
			}
			req := cl.nack(&m, protocol.NackRetryLater)
			r.turn()
			r.commit()
			cl.wantAnswer(req, nil)
		}
		r.wantSums()
		r.pass(31 * time.Second)
		r.commit()
	}
	cl.want(0)
	r.wantLetters("1 nack x5")
	if g := r.stats(); g.Acknowledged != 1 || g.Dropped != 1 || g.DLQ != 1 || g.Waiting != 0 || g.Lag != 0 {
		t.Fatalf("%+v", g)
	}
	if r.d.office.open+len(r.d.office.written)+r.d.office.active != 0 || r.d.office.bytes != 0 {
		t.Fatalf("something is left: %+v", r.d.office)
	}
	r.restart()
	if g := r.stats(); g.Acknowledged != 1 || g.Dropped != 1 || g.DLQ != 1 {
		t.Fatalf("after a restart %+v", g)
	}
}

func TestLetters_RejectIsAnsweredWhenTheLetterIsStored(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, _ := r.subscribe(rigGroup, true, nil)
	r.publish(0, values(1)...)
	m := cl.want(1)[0]
	r.commit()
	req := cl.nack(&m, protocol.NackReject)
	for steps := 0; len(r.store.letters) == 0; steps++ {
		cl.wantAnswer(req, errNoAnswer)
		if steps > 5 {
			t.Fatal("no letter comes")
		}
		r.turn()
		r.round()
	}
	cl.wantAnswer(req, nil)
	r.turn()
	r.commit()
	r.wantLetters("1 rejected x1")
}

func TestLetters_MessageNoLongerInMemoryIsReadFromDisk(t *testing.T) {
	r := newRig(t, 1, func(o *Options) { o.TailBytes = 1 })
	r.publish(0, values(3)...)
	r.d.written(0, r.journal.number)
	cl, _ := r.subscribe(rigGroup, true, nil)
	r.reads()
	m := cl.want(3)[1]
	r.commit()
	cl.nack(&m, protocol.NackReject)
	r.turn()
	r.commit()
	r.wantLetters()
	r.reads()
	r.commit()
	r.wantLetters("2 rejected x1")
}

func TestLetters_UnreadableMessageIsKeptAndTriedAgain(t *testing.T) {
	r := newRig(t, 1, func(o *Options) { o.TailBytes = 1 })
	r.publish(0, values(1)...)
	r.d.written(0, r.journal.number)
	cl, _ := r.subscribe(rigGroup, true, nil)
	r.reads()
	m := cl.want(1)[0]
	req := cl.nack(&m, protocol.NackReject)
	r.turn()
	r.commit()
	r.store.err = errors.New("bad sector")
	r.reads()
	cl.wantAnswer(req, protocol.CodeDLQUnavailable)
	r.store.err = nil
	r.pass(maxLetterPause + time.Second)
	r.reads()
	r.commit()
	r.wantLetters("1 rejected x1")
	cl.want(0)
}

func TestLetters_UnwritableTopicKeepsTheMessageAndOnlyTheWritingIsRetried(t *testing.T) {
	for name, broken := range map[string]func(r *rig, on bool){
		"the letter is refused": func(r *rig, on bool) {
			r.journal.refuse = ""
			if on {
				r.journal.refuse = "no space"
			}
		},
		"the topic can't be created": func(r *rig, on bool) {
			r.noTopics = nil
			if on {
				r.noTopics = protocol.CodeMetadataReadOnly
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, 1, nil)
			cl, _ := r.subscribe(rigGroup, true, nil)
			r.publish(0, values(3)...)
			ms := cl.want(3)
			r.commit()
			broken(r, true)
			for i := range ms {
				req := cl.nack(&ms[i], protocol.NackReject)
				r.turn()
				r.commit()
				cl.wantAnswer(req, protocol.CodeDLQUnavailable)
			}
			tries := 0
			for range 600 {
				r.pass(100 * time.Millisecond)
				tries += len(r.journal.refused)
				r.commit()
			}
			cl.want(0)
			if g := r.stats(); g.Waiting != 3 || g.Dropped != 0 || tries > 20 {
				t.Fatalf("%d tries in a minute, %+v", tries, g)
			}
			r.restart()
			cl, _ = r.subscribe(rigGroup, true, nil)
			r.pass(time.Minute)
			r.commit()
			cl.want(0)
			broken(r, false)
			r.pass(maxLetterPause)
			for range 3 {
				r.commit()
				r.reads()
			}
			r.wantLetters("1 rejected x1", "2 rejected x1", "3 rejected x1")
			r.wantSums()
		})
	}
}

// The broker dies after every possible number of commits between the rejection and the end.
func TestLetters_ExactlyOneWhereverTheBrokerDies(t *testing.T) {
	for _, snapshot := range []bool{false, true} {
		for dies := range 6 {
			r := newRig(t, 2, nil)
			cl, _ := r.subscribe(rigGroup, true, nil)
			r.publish(0, values(40)...)
			r.publish(1, values(1)...)
			ms := cl.take()
			r.commit()
			for i := range ms {
				cl.nack(&ms[i], protocol.NackReject)
			}
			r.turn()
			for range dies {
				r.round()
				r.turn()
			}
			if snapshot {
				r.d.checkpoint(r.d.ledgers[0])
				r.journal.committed = nil
			}
			for range 2 {
				r.restart()
				cl, _ = r.subscribe(rigGroup, true, nil)
				r.turn()
				r.reads()
				r.commit()
			}
			for range 10 {
				for _, m := range cl.take() {
					if len(r.letterTexts()) == 41 {
						t.Fatalf("dead after %d rounds: %d is delivered although it has a letter", dies, m.Sequence)
					}
					cl.nack(&m, protocol.NackReject) // its rejection was lost
				}
				r.turn()
				r.reads()
				r.commit()
			}
			if n := len(r.letterTexts()); n != 41 {
				t.Fatalf("dead after %d rounds (snapshot %v): %d letters, want 41", dies, snapshot, n)
			}
			if g := r.stats(); g.Dropped != 41 || g.DLQ != 41 || g.Lag != 0 {
				t.Fatalf("dead after %d rounds: %+v", dies, g)
			}
		}
	}
}

func TestLetters_NoLetterOfALetter(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, _ := r.subscribe(rigGroup, true, nil)
	r.publish(0, values(1)...)
	m := cl.want(1)[0]
	cl.nack(&m, protocol.NackReject)
	r.turn()
	r.commit()
	r.wantLetters("1 rejected x1")
	// The group reads its own dead letters and rejects them.
	topic := r.meta.TopicByName("$dlq.g").ID
	second := r.addReader(topic)
	dl, s := r.subscribe(second, true, func(s *subscription) { s.topic = topic })
	for range 3 {
		r.reads()
		letter := dl.want(1)[0]
		req := dl.nack(&letter, protocol.NackReject)
		r.turn()
		r.commit()
		dl.wantAnswer(req, protocol.CodeDLQPathOverflow)
		r.wantLetters("1 rejected x1")
		g := GroupStats{ID: second}
		r.d.groupStats(&g)
		if g.Dropped != 1 || g.DLQ != 0 || g.Lag != 0 {
			t.Fatalf("%+v", g)
		}
		// Another look at the same letter: the record is still there.
		r.d.closeSub(s, true)
		second = r.addReader(topic)
		dl, s = r.subscribe(second, true, func(s *subscription) { s.topic = topic })
	}
}

// A dead-letter topic may go unless a message is on its way there, and is made anew for the next one.
func TestLetters_TopicMayGoWhileNothingIsOnItsWay(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, _ := r.subscribe(rigGroup, true, nil)
	r.publish(0, values(2)...)
	got := cl.want(2)
	cl.nack(&got[0], protocol.NackReject)
	r.turn()
	for { // EXHAUSTED is proposed, then the letter, then DROP
		letters := r.meta.TopicByName("$dlq.g")
		if letters != nil && len(r.d.groups[rigGroup].reader0().letters) > 0 && r.d.letGo(letters) {
			t.Fatal("the topic may go though a letter is on its way there")
		}
		if len(r.journal.proposals)+len(r.journal.letters) == 0 {
			break
		}
		r.round()
		r.turn()
	}
	r.wantLetters("1 rejected x1")
	old := r.meta.TopicByName("$dlq.g")
	if !r.d.letGo(old) {
		t.Fatal("nothing is on its way, and the topic can't go")
	}
	r.apply(&metadata.TopicDeleted{Topic: old.ID})
	r.publishTopics()
	r.d.topicDeleted(old.ID)
	cl.nack(&got[1], protocol.NackReject)
	r.turn()
	r.commit()
	anew := r.meta.TopicByName("$dlq.g")
	if anew == nil || anew.ID == old.ID {
		t.Fatalf("the topic after a deletion: %+v", anew)
	}
	if p := r.d.partition(anew.ID, 0); p == nil || p.last != 1 {
		t.Fatalf("%+v", p)
	}
	r.restart()
	r.turn()
	r.commit()
	if p := r.d.partition(anew.ID, 0); p.last != 1 {
		t.Fatalf("%d letters of one message", p.last)
	}
	r.wantSums()
}

// reader0 is the group's reader of partition 0.
func (g *groupDelivery) reader0() *reader {
	for rd := range g.readers() {
		return rd
	}
	return nil
}

// addReader makes a group of the next id that reads topic.
func (r *rig) addReader(topic uint16) uint16 {
	id := r.meta.LastGroup() + 1
	r.apply(&metadata.GroupCreated{Group: id, Topic: topic, Name: fmt.Sprint("g", id)})
	r.d.groupCreated(id, topic, protocol.StartEarliest)
	r.turn()
	r.commit()
	return id
}

func TestLetters_WorkIsBounded(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, _ := r.subscribe(rigGroup, true, func(s *subscription) { s.windowCount = 5000; s.windowBytes = 64 << 20 })
	for range 40 {
		r.publish(0, values(50)...)
	}
	ms := cl.take()
	r.commit()
	for i := range ms {
		cl.nack(&ms[i], protocol.NackReject)
	}
	r.turn()
	for len(r.journal.proposals)+len(r.journal.letters) > 0 {
		if n := len(r.journal.letters); n > maxActiveLetters || r.d.office.active > maxActiveLetters {
			t.Fatalf("%d letters are proposed, %d under way", n, r.d.office.active)
		}
		r.round()
		r.turn()
	}
	if n := len(r.letterTexts()); n != 2000 {
		t.Fatalf("%d letters of 2000", n)
	}
	if c := r.d.groups[rigGroup].sets[0].readers[0].cur; c.Floor() != ledger.Sequence(2000) {
		t.Fatalf("floor %d", c.Floor())
	}
}

func TestLetters_DeletedGroupLeavesNothing(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, s := r.subscribe(rigGroup, true, nil)
	r.publish(0, values(100)...)
	ms := cl.take()
	r.commit()
	var reqs []uint64
	for i := range ms {
		reqs = append(reqs, cl.nack(&ms[i], protocol.NackReject))
	}
	r.turn()
	r.round()
	r.turn()
	r.round()
	r.turn()
	r.d.closeSub(s, true)
	r.d.groupDeleted(rigGroup)
	r.turn()
	r.commit()
	for _, q := range reqs {
		cl.wantAnswer(q, nil)
	}
	if o := &r.d.office; o.open+len(o.written)+o.active+len(o.lettering) != 0 || o.bytes != 0 {
		t.Fatalf("something is left: %+v", o)
	}
}

func TestDelivery_ChangedSettingsApplyToWhatIsUnderWay(t *testing.T) {
	r := newRig(t, 1, func(o *Options) { o.DeliveryMaxAttempts = 3 })
	cl, _ := r.subscribe(rigGroup, true, nil)
	r.publish(0, values(1)...)
	m := cl.want(1)[0]
	cl.nack(&m, protocol.NackRetryNow)
	r.turn()
	r.commit()
	m = cl.want(1)[0]
	r.meta.Group(rigGroup).Settings.MaxAttempts = 2
	r.d.groupConfigured(rigGroup)
	cl.nack(&m, protocol.NackRetryNow)
	r.turn()
	r.commit()
	cl.want(0)
	r.wantLetters("1 nack x2")
}

func TestDelivery_RetryScheduleIsTheGroups(t *testing.T) {
	r := newRig(t, 1, nil)
	r.meta.Group(rigGroup).Settings = metadata.GroupSettings{Retry: metadata.RetryList, Delays: []time.Duration{5 * time.Second, 10 * time.Second}, MaxAttempts: 3}
	r.d.groupConfigured(rigGroup)
	cl, _ := r.subscribe(rigGroup, true, nil)
	r.publish(0, values(1)...)
	for _, delay := range []time.Duration{5 * time.Second, 10 * time.Second} {
		m := cl.want(1)[0]
		cl.nack(&m, protocol.NackRetryLater)
		r.turn()
		r.commit()
		r.pass(delay - 100*time.Millisecond)
		cl.want(0)
		r.pass(200 * time.Millisecond)
	}
	m := cl.want(1)[0]
	cl.nack(&m, protocol.NackRetryLater)
	r.turn()
	r.commit()
	r.wantLetters("1 nack x3")
}

// g4: a set maximum is obeyed in ordered groups too, and the partition goes on behind the dead letter.
func TestDelivery_OrderedGroupGoesOnBehindADeadLetter(t *testing.T) {
	r := newRig(t, 1, nil)
	r.meta.Group(rigGroup).Settings = metadata.GroupSettings{Ordered: true, MaxAttempts: 2}
	r.d.groupConfigured(rigGroup)
	cl, _ := r.subscribe(rigGroup, true, nil)
	r.publish(0, values(3)...)
	for attempt := uint16(1); attempt <= 2; attempt++ {
		m := cl.want(1)[0]
		if m.Sequence != 1 || m.Attempt != attempt {
			t.Fatalf("message %d, attempt %d", m.Sequence, m.Attempt)
		}
		cl.nack(&m, protocol.NackRetryLater)
		r.turn()
		r.commit()
		r.pass(1100 * time.Millisecond)
	}
	r.commit()
	for want := uint64(2); want <= 3; want++ {
		m := cl.want(1)[0]
		if m.Sequence != want {
			t.Fatalf("message %d, want %d", m.Sequence, want)
		}
		cl.ack(&m, 0)
		r.turn()
		r.commit()
	}
	r.wantLetters("1 nack x2")
	r.wantSums()
}

// Letters that are refused together are all told at once.
func TestLetters_RefusedTogetherAreAllAnswered(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, _ := r.subscribe(rigGroup, true, nil)
	r.publish(0, values(5)...)
	ms := cl.want(5)
	r.commit()
	r.journal.refuse = "no space"
	var reqs []uint64
	for i := range ms {
		reqs = append(reqs, cl.nack(&ms[i], protocol.NackReject))
	}
	r.turn()
	r.commit()
	for _, q := range reqs {
		cl.wantAnswer(q, protocol.CodeDLQUnavailable)
	}
}

// A group with very many letters does not keep those of another one waiting.
func TestLetters_GroupsTakeTurns(t *testing.T) {
	r := newRig(t, 1, nil)
	r.addGroup(2, protocol.StartEarliest)
	wide := func(s *subscription) { s.windowCount, s.windowBytes = 5000, 64<<20 }
	one, _ := r.subscribe(rigGroup, true, wide)
	two, _ := r.subscribe(2, true, wide)
	for range 20 {
		r.publish(0, values(50)...)
	}
	many, few := one.take(), two.take()[:3]
	r.commit()
	for i := range many {
		one.nack(&many[i], protocol.NackReject)
	}
	for i := range few {
		two.nack(&few[i], protocol.NackReject)
	}
	r.turn()
	for len(r.journal.proposals)+len(r.journal.letters) > 0 {
		r.round()
		r.turn()
		if g := (GroupStats{ID: 2}); true {
			if r.d.groupStats(&g); g.DLQ == 3 {
				break
			}
		}
	}
	if n := r.stats().DLQ; n > 500 {
		t.Fatalf("the other group's three letters waited for %d", n)
	}
	r.commit()
}
