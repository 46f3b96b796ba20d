package coord

import (
	"errors"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// resetTo moves the rig's group and returns the positions, once they are on record.
func (r *rig) resetTo(to protocol.Reset) (got []protocol.ResetPosition, err error) {
	r.t.Helper()
	answered := 0
	r.d.reset(rigGroup, to, func(p []protocol.ResetPosition, e error) { got, err, answered = p, e, answered+1 })
	if len(r.journal.proposals) > 0 || r.d.ledgers[0].book.Pending() {
		if answered > 0 {
			r.t.Fatal("answered before it was on record")
		}
	}
	r.turn()
	r.reads()
	r.commit()
	if answered != 1 {
		r.t.Fatalf("answered %d times", answered)
	}
	return got, err
}

func TestReset_GoesOnWhereItIsTold(t *testing.T) {
	times := [2]uint64{}
	for name, tc := range map[string]struct {
		to   func() protocol.Reset
		want []protocol.ResetPosition
		next []uint64 // sequences delivered then
	}{
		"earliest": {func() protocol.Reset {
			return protocol.Reset{To: protocol.ResetEarliest, Partition: protocol.AnyPartition}
		},
			[]protocol.ResetPosition{{Partition: 0, From: 2, To: 0}, {Partition: 1, From: 0, To: 0}}, []uint64{1, 2, 3, 4, 5, 6, 1}},
		"latest": {func() protocol.Reset {
			return protocol.Reset{To: protocol.ResetLatest, Partition: protocol.AnyPartition}
		},
			[]protocol.ResetPosition{{Partition: 0, From: 2, To: 6}, {Partition: 1, From: 0, To: 1}}, nil},
		"a sequence of one partition": {func() protocol.Reset { return protocol.Reset{To: protocol.ResetSequence, Value: 5} },
			[]protocol.ResetPosition{{Partition: 0, From: 2, To: 4}}, []uint64{5, 6}},
		"a sequence beyond the end": {func() protocol.Reset { return protocol.Reset{To: protocol.ResetSequence, Value: 1 << 60} },
			[]protocol.ResetPosition{{Partition: 0, From: 2, To: 6}}, nil},
		"a time on disk": {func() protocol.Reset {
			return protocol.Reset{To: protocol.ResetTime, Value: times[0], Partition: protocol.AnyPartition}
		},
			[]protocol.ResetPosition{{Partition: 0, From: 2, To: 2}, {Partition: 1, From: 0, To: 1}}, []uint64{3, 4, 5, 6}},
		"a time in memory": {func() protocol.Reset { return protocol.Reset{To: protocol.ResetTime, Value: times[1]} },
			[]protocol.ResetPosition{{Partition: 0, From: 2, To: 4}}, []uint64{5, 6}},
		"a time to come": {func() protocol.Reset { return protocol.Reset{To: protocol.ResetTime, Value: times[1] + 1e9} },
			[]protocol.ResetPosition{{Partition: 0, From: 2, To: 6}}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, 2, func(o *Options) { o.DeliveryLease = time.Hour })
			cl, s := r.subscribe(rigGroup, true, nil)
			r.publish(1, values(1)...)
			r.publish(0, values(2)...)
			r.pass(time.Minute)
			times[0] = r.wallMs
			r.publish(0, values(2)...)
			r.pass(time.Minute)
			times[1] = r.wallMs
			r.publish(0, values(2)...)
			if name == "a time in memory" {
				r.store.until = 4
			}
			for _, m := range cl.take() {
				if m.Partition == 0 && m.Sequence <= 2 {
					cl.ack(&m, 0)
				}
			}
			r.turn()
			r.commit()
			// A look changes nothing.
			to := tc.to()
			to.Options = protocol.ResetDryRun
			got, err := r.resetTo(to)
			if err != nil || !reflect.DeepEqual(got, tc.want) {
				t.Fatalf("dry run: %+v, %v, want %+v", got, err, tc.want)
			}
			if g := r.stats(); g.InFlight != 5 || g.Acknowledged != 2 {
				t.Fatalf("after a dry run %+v", g)
			}
			got, err = r.resetTo(tc.to())
			if err != nil || !reflect.DeepEqual(got, tc.want) {
				t.Fatalf("%+v, %v, want %+v", got, err, tc.want)
			}
			var next []uint64
			msgs := cl.take()
			slices.SortStableFunc(msgs, func(a, b protocol.Msg) int { return int(a.Partition) - int(b.Partition) })
			for _, m := range msgs {
				next = append(next, m.Sequence)
			}
			if !reflect.DeepEqual(next, tc.next) {
				t.Fatalf("delivered %v, want %v", next, tc.next)
			}
			r.wantSums()
			r.d.closeSub(s, true)
			r.restart()
			r.wantSums()
			floors := map[uint16]uint64{}
			for _, p := range tc.want {
				floors[p.Partition] = p.To
			}
			for i, rd := range r.d.groups[rigGroup].sets[0].readers {
				if want, moved := floors[uint16(i)]; moved && uint64(rd.cur.Floor()) != want {
					t.Fatalf("after a restart partition %d is at %d, want %d", i, rd.cur.Floor(), want)
				}
			}
		})
	}
}

func TestReset_Refusals(t *testing.T) {
	r := newRig(t, 1, nil)
	var err error
	done := func(_ []protocol.ResetPosition, e error) { err = e }
	r.d.reset(99, protocol.Reset{}, done)
	if !errors.Is(err, protocol.CodeInternal) {
		t.Error(err)
	}
	if _, err := r.resetTo(protocol.Reset{Partition: 1}); !errors.Is(err, protocol.CodeUnknownPartition) {
		t.Error(err)
	}
	r.publish(0, values(1)...)
	r.store.err = errors.New("bad sector")
	if _, err := r.resetTo(protocol.Reset{To: protocol.ResetTime, Value: 1}); !errors.Is(err, protocol.CodeInternal) {
		t.Error(err)
	}
	r.store.err = nil
	r.d.reset(rigGroup, protocol.Reset{}, done)
	r.d.groupDeleted(rigGroup)
	r.turn()
	r.commit()
	if !errors.Is(err, protocol.CodeUnknownGroup) || len(r.d.resets) > 0 {
		t.Error(err)
	}
}

func TestReset_FailedJournalAnswers(t *testing.T) {
	r := newRig(t, 1, nil)
	var err error
	r.d.reset(rigGroup, protocol.Reset{}, func(_ []protocol.ResetPosition, e error) { err = e })
	r.d.failed(protocol.CodeReadOnlyDegraded, "the disk is on fire")
	if !errors.Is(err, protocol.CodeReadOnlyDegraded) {
		t.Fatal(err)
	}
}

// A reset comes between the steps of a dead letter: nothing hangs, nothing is lost, and what fails again gets a letter again.
func TestReset_BetweenTheStepsOfALetter(t *testing.T) {
	for step := range 5 {
		r := newRig(t, 1, nil)
		cl, _ := r.subscribe(rigGroup, true, nil)
		r.publish(0, values(1)...)
		m := cl.want(1)[0]
		r.commit()
		req := cl.nack(&m, protocol.NackReject)
		r.turn()
		for range step {
			r.round()
			r.turn()
		}
		if _, err := r.resetTo(protocol.Reset{To: protocol.ResetEarliest}); err != nil {
			t.Fatal(err)
		}
		cl.wantAnswer(req, nil)
		again := cl.want(1)[0]
		cl.nack(&again, protocol.NackReject)
		r.turn()
		r.commit()
		if n := len(r.letterTexts()); n < 1 || n > 2 {
			t.Fatalf("reset after %d rounds: %d letters", step, n)
		}
		if g := r.stats(); g.Waiting != 0 || g.InFlight != 0 || g.Dropped != 1 {
			t.Fatalf("reset after %d rounds: %+v", step, g)
		}
		if o := &r.d.office; o.open+len(o.written)+o.active != 0 || o.bytes != 0 {
			t.Fatalf("reset after %d rounds: something is left: %+v", step, o)
		}
	}
}

func TestReset_IsRefusedWhileTheGroupHasMembersUnlessForced(t *testing.T) {
	b, c := withTopic(t, 1)
	reset := func(group string, options uint8) []byte {
		return (&protocol.Declare{Topic: []byte("t"), Flags: protocol.DeclareFlagGroup | protocol.DeclareFlagReset, Group: []byte(group),
			Reset: protocol.Reset{Partition: protocol.AnyPartition, Options: options}}).AppendFrame(nil)
	}
	b.want("reset of no group", b.do(c, reset("g", 0)), "ERR 0x2005")
	b.do(c, sub("g", 1))
	b.want("with a member", b.do(c, reset("g", 0)), "ERR 0x2002")
	b.want("dry run", b.do(c, reset("g", protocol.ResetDryRun)), "OK RESET [{0 1 2}]")
	b.want("forced", b.do(c, reset("g", protocol.ResetForce)), "OK RESET [{0 1 2}]")
}
