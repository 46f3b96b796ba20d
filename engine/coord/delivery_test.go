package coord

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

func values(n int) [][]byte {
	var vs [][]byte
	for i := range n {
		vs = append(vs, fmt.Appendf(nil, "value %d", i))
	}
	return vs
}

func TestDelivery_StreamBringsMessagesInOrderAndAckIsAnsweredWhenDurable(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, s := r.subscribe(rigGroup, true, nil)
	r.publish(0, values(3)...)
	ms := cl.want(3)
	for i, m := range ms {
		if m.Sequence != uint64(i)+1 || string(m.Value) != fmt.Sprintf("value %d", i) || m.Attempt != 1 || m.SubscriptionID != s.id ||
			m.OwnershipEpoch != 100 || m.ProducerID != 9 || m.DeliveryID>>40 != rigEpoch {
			t.Fatalf("message %d: %+v", i, m)
		}
	}
	r.commit() // the DELIVER record
	first, third := cl.ack(&ms[0], 0), cl.ack(&ms[2], 0)
	r.turn()
	cl.wantAnswer(first, errNoAnswer)
	if n := len(r.journal.proposals); n != 1 {
		t.Fatalf("%d records for two ACKs of one turn", n)
	}
	r.commit()
	cl.wantAnswer(first, nil)
	cl.wantAnswer(third, nil)
	cur := r.d.groups[rigGroup].sets[0].readers[0].cur
	if cur.Floor() != 1 {
		t.Fatalf("floor %d, want 1", cur.Floor())
	}
	again := cl.ack(&ms[0], 0)
	cl.wantAnswer(again, protocol.CodeUnknownDelivery)
	second := cl.ack(&ms[1], 0)
	r.turn()
	r.commit()
	cl.wantAnswer(second, nil)
	if cur.Floor() != 3 {
		t.Fatalf("floor %d, want 3", cur.Floor())
	}
}

func TestDelivery_RequestsAreCheckedByTheirEpochs(t *testing.T) {
	r := newRig(t, 2, nil)
	cl, s := r.subscribe(rigGroup, true, func(s *subscription) { s.membershipEpoch, s.assignmentEpoch = 3, 4 })
	r.publish(0, values(1)...)
	m := cl.want(1)[0]
	stale := m
	stale.OwnershipEpoch++
	cl.wantAnswer(cl.ack(&stale, 0), protocol.CodeStaleOwner)
	cl.wantAnswer(cl.nack(&stale, protocol.NackRetryLater), protocol.CodeStaleOwner)
	other := m
	other.DeliveryID++
	cl.wantAnswer(cl.ack(&other, 0), protocol.CodeUnknownDelivery)
	other = m
	other.Partition = 2
	cl.wantAnswer(cl.ack(&other, 0), protocol.CodeUnknownPartition)
	other = m
	other.SubscriptionID++
	cl.wantAnswer(cl.ack(&other, 0), protocol.CodeUnknownMember)
	other = m
	other.TopicID++
	cl.wantAnswer(cl.ack(&other, 0), protocol.CodeUnknownDelivery)

	pull := func(adjust func(*protocol.Pull)) uint64 {
		return cl.pull(s, func(p *protocol.Pull) {
			p.MembershipEpoch, p.AssignmentEpoch = 3, 4
			adjust(p)
		})
	}
	cl.wantAnswer(pull(func(p *protocol.Pull) { p.MembershipEpoch = 2 }), protocol.CodeStaleGeneration)
	cl.wantAnswer(pull(func(p *protocol.Pull) { p.AssignmentEpoch = 3 }), protocol.CodeStaleGeneration)
	cl.wantAnswer(pull(func(p *protocol.Pull) { p.MemberID++ }), protocol.CodeUnknownMember)
	cl.wantAnswer(pull(func(p *protocol.Pull) { p.OwnershipEpochs = []uint64{100, 99} }), protocol.CodeStaleGeneration)
	for _, epochs := range [][]uint64{nil, {100}, {101, 100}} {
		req := pull(func(p *protocol.Pull) { p.OwnershipEpochs = epochs })
		r.turn()
		cl.wantAnswer(req, nil)
	}

	// The partition moves to another member: its epoch is not ours.
	r.d.disown(rigGroup, 0, 1, 101, true)
	_, s2 := r.subscribe(rigGroup, false, nil)
	r.d.disown(rigGroup, 0, 0, 200, true)
	r.d.own(s, 0, 300)
	_ = s2
	cl.wantAnswer(pull(func(p *protocol.Pull) { p.OwnershipEpochs = []uint64{201} }), protocol.CodeNotOwner)
	cl.wantAnswer(pull(func(p *protocol.Pull) { p.OwnershipEpochs = []uint64{100} }), protocol.CodeStaleGeneration)
	cl.wantAnswer(cl.ack(&m, 0), protocol.CodeStaleOwner)

	s.ended, s.endedText = protocol.CodeUnknownMember, "removed"
	cl.wantAnswer(cl.ack(&m, 0), protocol.CodeUnknownMember)
	cl.send(protocol.OpAck, make([]byte, protocol.HeaderSize+3))
	if cl.shut != protocol.CodeMalformedPayload {
		t.Fatalf("a malformed ACK shut the client with %v", cl.shut)
	}
}

func TestDelivery_PullTakesWhatItAsksFor(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, s := r.subscribe(rigGroup, false, nil)
	for range 10 {
		r.publish(0, make([]byte, 100))
	}
	cl.want(0)
	for _, tc := range []struct {
		name string
		pull func(*protocol.Pull)
		want int
	}{
		{"count", func(p *protocol.Pull) { p.MaxMsgs = 3 }, 3},
		{"bytes", func(p *protocol.Pull) { p.MaxBytes = 250 }, 2},
		{"the first message ignores max_bytes", func(p *protocol.Pull) { p.MaxBytes = 10 }, 1},
		{"all there is", nil, 4},
		{"nothing there, no wait", nil, 0},
	} {
		req := cl.pull(s, tc.pull)
		r.turn()
		cl.wantAnswer(req, nil)
		if n := len(cl.take()); n != tc.want {
			t.Fatalf("%s: %d messages, want %d", tc.name, n, tc.want)
		}
	}
	if n := cl.pulls.Load(); n != 0 {
		t.Fatalf("%d PULLs are counted as waiting", n)
	}
}

// While nothing can be committed, the clock of leases, sessions and retries stands still: waiting for what comes due by it would
// be to wait no time at all, again and again.
func TestCoordinator_RestsWhileItsClockStandsStill(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, s := r.subscribe(rigGroup, false, nil)
	r.publish(0, make([]byte, 100))
	cl.pull(s, nil)
	r.turn()
	cl.want(1) // its lease runs
	r.commit()
	turn := func(want time.Duration) {
		t.Helper()
		if got := r.c.Turn(); got != want {
			t.Errorf("the next turn is due in %v, want %v", got, want)
		}
	}
	req := cl.pull(s, func(p *protocol.Pull) { p.WaitMs, p.MinBytes = 2000, 1000 })
	r.c.Freeze("no quorum")
	turn(2 * time.Second)
	r.now += 1500 * time.Millisecond
	turn(500 * time.Millisecond)
	cl.wantAnswer(req, errNoAnswer)
	r.now += 500 * time.Millisecond
	turn(-1)
	cl.wantAnswer(req, nil)
	r.now += time.Hour
	turn(-1)
	r.c.Freeze("")
	if due := r.c.Turn(); due <= 0 || due > time.Minute {
		t.Fatalf("the next turn is due in %v although the lease runs again", due)
	}
}

// A node that stands by may hear of a partition's messages before it hears of the topic, which is in another log: they count all
// the same once it leads, unless the topic is gone by then.
func TestDelivery_KeepsMessagesOfTopicsThatItHasNotHeardOfWhileStandingBy(t *testing.T) {
	r := newRig(t, 1, nil)
	round := func(topic uint16) {
		rec := wal.Record{Sequence: 1, ProducerID: 9, ProducerSeq: 1, LeaderEpoch: r.epoch, Value: []byte("early")}
		r.journal.number++
		rd := wal.NewTestRound(r.pool, r.epoch, r.journal.number,
			wal.TestRun{Stream: wal.StreamID{Kind: wal.Messages, Topic: topic}, Records: []wal.Record{rec}})
		r.d.follow(0, rd)
		rd.Release()
	}
	const later, deleted = 7, 8
	round(later)
	if r.d.known(later, 0) != nil {
		t.Error("a node that leads keeps messages of a topic that does not exist")
	}
	r.c.standby = true
	round(later)
	round(deleted)
	if err := r.meta.Apply(3, 1, &metadata.TopicCreated{Topic: later, Partitions: 1, Name: "later"}); err != nil {
		t.Fatal(err)
	}
	r.c.standby = false
	r.publishTopics()
	if err := r.d.recovered(); err != nil {
		t.Fatal(err)
	}
	if p := r.d.known(later, 0); p == nil || p.first != 1 || p.last != 1 || p.letters {
		t.Errorf("the partition of a topic that was heard of later is %+v", p)
	}
	if r.d.known(deleted, 0) != nil {
		t.Error("a partition of a topic that does not exist is kept")
	}
}

func TestDelivery_PullWaits(t *testing.T) {
	r := newRig(t, 1, func(o *Options) { o.PollMaxWait = 2 * time.Second })
	cl, s := r.subscribe(rigGroup, false, nil)
	wait := func(p *protocol.Pull) { p.WaitMs, p.MinBytes = 60_000, 150 }

	t.Run("for min_bytes", func(t *testing.T) {
		req := cl.pull(s, wait)
		r.publish(0, make([]byte, 100))
		cl.wantAnswer(req, errNoAnswer)
		if cl.pulls.Load() != 1 {
			t.Fatal("the waiting PULL is not counted")
		}
		r.publish(0, make([]byte, 100))
		cl.wantAnswer(req, nil)
		cl.want(2)
	})
	t.Run("at most poll_max_wait", func(t *testing.T) {
		req := cl.pull(s, wait)
		r.pass(1900 * time.Millisecond)
		cl.wantAnswer(req, errNoAnswer)
		r.pass(200 * time.Millisecond)
		cl.wantAnswer(req, nil)
		cl.want(0)
	})
	t.Run("until another request arrives", func(t *testing.T) {
		req := cl.pull(s, wait)
		r.publish(0, make([]byte, 100))
		cl.wantAnswer(req, errNoAnswer)
		r.d.interrupt(cl)
		r.turn()
		cl.wantAnswer(req, nil)
		cl.want(1)
	})
	t.Run("two of them, not three", func(t *testing.T) {
		a, b := cl.pull(s, wait), cl.pull(s, wait)
		third := cl.pull(s, wait)
		cl.wantAnswer(third, protocol.CodeMaxWaitingPulls)
		r.publish(0, make([]byte, 200))
		cl.wantAnswer(a, nil)
		cl.wantAnswer(b, errNoAnswer)
		r.d.interrupt(cl)
		r.turn()
		cl.wantAnswer(b, nil)
		cl.want(1)
	})
	t.Run("until the subscription ends", func(t *testing.T) {
		req := cl.pull(s, wait)
		s.ended, s.endedText = protocol.CodeUnknownMember, "removed"
		r.d.closeSub(s, true)
		cl.wantAnswer(req, protocol.CodeUnknownMember)
		if len(r.d.waiting) != 0 || cl.pulls.Load() != 0 {
			t.Fatal("the PULL is still there")
		}
		r.pass(10 * time.Second)
	})
}

func TestDelivery_CreditCountsDownAndIsClamped(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, s := r.subscribe(rigGroup, true, func(s *subscription) { s.windowCount, s.windowBytes = 3, 1000 })
	for range 6 {
		r.publish(0, make([]byte, 100))
	}
	ms := cl.want(3)
	cl.ack(&ms[0], 0)
	r.turn()
	r.commit()
	cl.want(0) // an ACK alone returns none
	res := cl.credit(s, protocol.CreditAdd, 1, 100)
	if res != (protocol.CreditResult{GrantedCount: 1, GrantedBytes: 100, OutstandingCount: 2, OutstandingBytes: 200}) {
		t.Fatalf("ADD 1: %+v", res)
	}
	r.turn()
	cl.want(1)
	res = cl.credit(s, protocol.CreditAdd, 100, 100_000)
	if res != (protocol.CreditResult{GrantedCount: 3, GrantedBytes: 300}) {
		t.Fatalf("ADD beyond the window: %+v", res)
	}
	res = cl.credit(s, protocol.CreditSet, 1, 1<<31)
	if res != (protocol.CreditResult{GrantedCount: 1, GrantedBytes: maxCreditBytes, CreditEpoch: 1}) {
		t.Fatalf("SET: %+v", res)
	}
	r.turn()
	cl.want(1)
	cl.credit(s, protocol.CreditSet, 10, 150)
	r.turn()
	cl.want(1) // the last one
	r.publish(0, make([]byte, 100))
	cl.want(0) // 50 bytes are left
	cl.credit(s, protocol.CreditAdd, 1, 50)
	r.turn()
	cl.want(1)
}

func TestDelivery_PullWithoutCreditIsRefused(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, s := r.subscribe(rigGroup, false, func(s *subscription) { s.windowCount, s.windowBytes = 2, 250 })
	r.publishN(0, 3, 100)
	req := cl.pull(s, func(p *protocol.Pull) { p.WaitMs = 1000 })
	r.turn()
	cl.wantAnswer(req, nil)
	cl.want(2)
	cl.wantAnswer(cl.pull(s, nil), protocol.CodeNoCredit)
	cl.credit(s, protocol.CreditAdd, 1, 0)
	req = cl.pull(s, func(p *protocol.Pull) { p.WaitMs = 1000 })
	r.turn()
	cl.wantAnswer(req, protocol.CodeNoCredit) // 50 bytes are left
}

// Case g13: a message larger than the credit window in the middle of small ones.
func TestDelivery_MessageLargerThanTheWindowIsNamedAndNotLost(t *testing.T) {
	for _, stream := range []bool{true, false} {
		t.Run(fmt.Sprintf("stream=%v", stream), func(t *testing.T) {
			r := newRig(t, 2, nil)
			cl, s := r.subscribe(rigGroup, stream, func(s *subscription) { s.windowCount, s.windowBytes = 100, 1000 })
			pull := func() uint64 {
				if stream {
					r.turn()
					return 0
				}
				req := cl.pull(s, func(p *protocol.Pull) { p.WaitMs = 100 })
				r.turn()
				return req
			}
			r.publish(0, make([]byte, 10))
			r.publish(0, make([]byte, 5000))
			r.publish(0, make([]byte, 10))
			r.publish(1, make([]byte, 10))
			req := pull()
			if n := len(cl.take()); n != 2 {
				t.Fatalf("%d messages came before the large one and from the other partition, want 2", n)
			}
			if !stream {
				cl.wantAnswer(req, nil)
			}
			req = pull()
			var err error
			if stream {
				if len(cl.errs) != 1 || cl.errs[0].RequestOp != protocol.OpMsg {
					t.Fatalf("pushed errors: %+v", cl.errs)
				}
				err = cl.errs[0].Err()
			} else {
				err = cl.answer(req)
			}
			for _, part := range []string{"topic 1 ", "partition 0 ", "sequence 2 ", "5000 bytes"} {
				if !errors.Is(err, protocol.CodeMessageExceedsCredit) || !strings.Contains(err.Error(), part) {
					t.Fatalf("error %v does not say %q", err, part)
				}
			}
			// The other partition goes on.
			r.publish(1, make([]byte, 10))
			pull()
			cl.want(1)
			if len(cl.errs) > 1 {
				t.Fatal("the error is pushed again and again")
			}
			cl.credit(s, protocol.CreditSet, 100, 6000)
			pull()
			ms := cl.want(2)
			if len(ms[0].Value) != 5000 || ms[1].Sequence != 3 {
				t.Fatalf("after raising the credit: sequences %d and %d", ms[0].Sequence, ms[1].Sequence)
			}
		})
	}
}

// Case g16: a reader that never reads. (The connection closes itself when nothing has left it for 30 s.)
func TestDelivery_ReaderThatDoesNotReadIsPausedAndOthersAreNot(t *testing.T) {
	r := newRig(t, 1, nil)
	r.addGroup(2, protocol.StartEarliest)
	window := func(s *subscription) { s.windowCount, s.windowBytes = 65535, maxCreditBytes }
	stuck, _ := r.subscribe(rigGroup, true, window)
	stuck.stuck = true
	good, _ := r.subscribe(2, true, window)
	const n, size = 100, 100_000
	for range n {
		r.publish(0, make([]byte, size))
	}
	if stuck.outstanding > OutboundPause+size+1000 {
		t.Fatalf("%d bytes are outstanding", stuck.outstanding)
	}
	good.want(n)
	had := len(stuck.take())
	if had >= n {
		t.Fatal("nothing was paused")
	}
	for len(stuck.msgs)+had < n {
		before := len(stuck.msgs)
		stuck.unstick()
		if len(stuck.msgs) == before {
			t.Fatal("a writable connection gets nothing")
		}
	}
	if n := stuck.values; n != 100 {
		t.Fatalf("%d values were sent without a copy", n)
	}
}

func TestDelivery_ConnectionThatDrainsMeanwhileIsNotPaused(t *testing.T) {
	r := newRig(t, 2, nil)
	cl, s := r.subscribe(rigGroup, true, func(s *subscription) { s.windowCount = 0 })
	r.publish(0, values(20)...)
	r.publish(1, values(20)...)
	cl.outstanding, cl.drains = OutboundPause-10, true // Writable never comes: it was never above
	cl.credit(s, protocol.CreditSet, 100, 100_000)
	r.turn()
	cl.want(40)
	if s.consumer.paused {
		t.Fatal("the consumer is paused for good")
	}
}

func TestDelivery_LargeValuesAreNotCopiedAndKeepTheirRound(t *testing.T) {
	r := newRig(t, 1, func(o *Options) { o.TailBytes = 1 })
	cl, _ := r.subscribe(rigGroup, true, nil)
	cl.stuck = true
	before := r.pool.InUse()
	big := bytes.Repeat([]byte("x"), ZeroCopyMin)
	rd := r.publish(0, big)
	r.d.written(0, rd.Number)
	if r.d.tailBytes != 0 {
		t.Fatalf("the tail keeps %d bytes", r.d.tailBytes)
	}
	if cl.values != 1 || r.pool.InUse() <= before {
		t.Fatal("the value is not held by its round")
	}
	if m := cl.want(1)[0]; !bytes.Equal(m.Value, big) {
		t.Fatal("another value came")
	}
	cl.unstick()
	if r.pool.InUse() != before {
		t.Fatal("the round is still held")
	}
}

func TestDelivery_LostConnectionIsAFailedAttemptAndLeavingIsNot(t *testing.T) {
	for _, graceful := range []bool{false, true} {
		r := newRig(t, 1, nil)
		cl, s := r.subscribe(rigGroup, true, nil)
		r.publish(0, values(1)...)
		cl.want(1)
		s.ended = protocol.CodeUnknownMember
		r.d.closeSub(s, graceful)
		r.d.closeSub(s, graceful) // harmless
		r.turn()
		next, _ := r.subscribe(rigGroup, true, nil)
		if graceful {
			if m := next.want(1)[0]; m.Attempt != 1 {
				t.Fatalf("after leaving: attempt %d", m.Attempt)
			}
			continue
		}
		next.want(0)
		r.commit()
		r.pass(900 * time.Millisecond)
		next.want(0)
		r.pass(time.Second)
		if m := next.want(1)[0]; m.Attempt != 2 {
			t.Fatalf("after the connection was lost: attempt %d", m.Attempt)
		}
	}
}

func TestDelivery_ConnectionsLostWhileTheBrokerStopsUseUpNoAttempt(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, s := r.subscribe(rigGroup, true, nil)
	r.publish(0, values(1)...)
	cl.want(1)
	r.c.Stopping()
	s.ended = protocol.CodeUnknownMember
	r.d.closeSub(s, false)
	r.turn()
	next, _ := r.subscribe(rigGroup, true, nil)
	if m := next.want(1)[0]; m.Attempt != 1 {
		t.Fatalf("attempt %d, want 1", m.Attempt)
	}
}

func TestDelivery_ExpiredLeaseRedeliversOnceTheFailureIsOnRecord(t *testing.T) {
	r := newRig(t, 1, func(o *Options) { o.DeliveryLease = 10 * time.Second })
	cl, _ := r.subscribe(rigGroup, true, nil)
	r.publish(0, values(2)...)
	ms := cl.want(2)
	r.pass(deliverDelay)
	r.commit()
	r.pass(9 * time.Second)
	cl.wantAnswer(cl.ack(&ms[1], protocol.AckFlagProgress), nil) // at once
	r.pass(2 * time.Second)
	if len(r.journal.proposals) != 1 {
		t.Fatalf("%d records are proposed, want the failure of message 1", len(r.journal.proposals))
	}
	r.pass(5 * time.Second)
	cl.want(0)
	r.commit()
	if m := cl.want(1)[0]; m.Sequence != 1 || m.Attempt != 2 {
		t.Fatalf("redelivered %d, attempt %d", m.Sequence, m.Attempt)
	}
	late := cl.ack(&ms[0], 0)
	cl.wantAnswer(late, protocol.CodeUnknownDelivery)
}

func TestDelivery_NackReasons(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, _ := r.subscribe(rigGroup, true, nil)
	r.publish(0, values(3)...)
	ms := cl.want(3)
	r.commit()
	reqs := []uint64{cl.nack(&ms[0], protocol.NackRetryLater), cl.nack(&ms[1], protocol.NackRetryNow), cl.nack(&ms[2], protocol.NackReject)}
	r.turn()
	for _, q := range reqs {
		cl.wantAnswer(q, errNoAnswer)
	}
	r.commit()
	for _, q := range reqs {
		cl.wantAnswer(q, nil)
	}
	if m := cl.want(1)[0]; m.Sequence != 2 || m.Attempt != 2 {
		t.Fatalf("retried at once: %d, attempt %d", m.Sequence, m.Attempt)
	}
	r.pass(2 * time.Second)
	if m := cl.want(1)[0]; m.Sequence != 1 || m.Attempt != 2 {
		t.Fatalf("retried later: %d, attempt %d", m.Sequence, m.Attempt)
	}
	r.pass(40 * time.Second) // expires the two
	r.commit()
	for _, m := range cl.take() {
		if m.Sequence == 3 {
			t.Fatal("the rejected message is delivered again")
		}
	}
	if got := r.letterTexts(); len(got) != 1 || got[0] != "3 rejected x1" {
		t.Fatalf("dead letters %q, want message 3", got)
	}
}

func TestDelivery_CumulativeAckIsOneRangeOnRecord(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, _ := r.subscribe(rigGroup, true, nil)
	r.publish(0, values(200)...)
	ms := cl.want(200)
	r.pass(deliverDelay)
	r.commit()
	req := cl.ack(&ms[199], protocol.AckFlagCumulative)
	r.turn()
	if n := len(r.journal.proposals[0].Value); n > 40 {
		t.Fatalf("the record has %d bytes", n)
	}
	r.commit()
	cl.wantAnswer(req, nil)
	if f := r.d.groups[rigGroup].sets[0].readers[0].cur.Floor(); f != 200 {
		t.Fatalf("floor %d", f)
	}
}

func TestDelivery_DeliveriesWaitForCompanyOnTheirWayToTheRecord(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, _ := r.subscribe(rigGroup, true, nil)
	r.commit()
	r.publish(0, values(1)...)
	ms := cl.want(1)
	r.turn()
	if n := len(r.journal.proposals); n != 0 {
		t.Fatalf("%d records are proposed for a delivery that nobody waits for", n)
	}
	req := cl.ack(&ms[0], 0)
	r.turn()
	if n := len(r.journal.proposals); n != 1 {
		t.Fatalf("%d records are proposed for an ACK", n)
	}
	r.commit()
	cl.wantAnswer(req, nil)

	r.publish(0, values(1)...)
	cl.want(1)
	r.pass(deliverDelay)
	if n := len(r.journal.proposals); n != 1 {
		t.Fatalf("%d records are proposed when the delivery is old enough", n)
	}
	r.commit()
}

func TestDelivery_AtMostTwoProposalsAreOutstanding(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, _ := r.subscribe(rigGroup, true, nil)
	r.publish(0, values(20)...)
	ms := cl.want(20)
	r.commit()
	var reqs []uint64
	for i := range ms {
		reqs = append(reqs, cl.ack(&ms[i], 0))
		r.turn()
	}
	if n := len(r.journal.proposals); n != maxProposals {
		t.Fatalf("%d proposals are outstanding", n)
	}
	r.round()
	cl.wantAnswer(reqs[1], nil)
	cl.wantAnswer(reqs[2], errNoAnswer)
	r.turn()
	r.commit()
	for _, q := range reqs {
		cl.wantAnswer(q, nil)
	}
}

func TestDelivery_RefusedProposalIsKept(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, _ := r.subscribe(rigGroup, true, nil)
	r.publish(0, values(1)...)
	m := cl.want(1)[0]
	r.commit()
	r.journal.fail = errors.New("no room")
	req := cl.ack(&m, 0)
	r.turn()
	r.journal.fail = nil
	r.turn()
	cl.wantAnswer(req, errNoAnswer)
	r.pass(proposePause)
	r.commit()
	cl.wantAnswer(req, nil)
}

func TestDelivery_TailKeepsWhatIsNotWritten(t *testing.T) {
	r := newRig(t, 1, func(o *Options) { o.TailBytes = 64 << 10 })
	var last *wal.Round
	for range 100 {
		last = r.publish(0, make([]byte, 3000))
	}
	if n := r.d.tails[0].rounds.len(); n != 100 {
		t.Fatalf("%d rounds are kept, want all 100", n)
	}
	r.d.written(0, last.Number-50)
	if n := r.d.tails[0].rounds.len(); n != 50 {
		t.Fatalf("%d rounds are kept, want 50", n)
	}
	r.d.written(0, last.Number)
	if r.d.tailBytes > 64<<10 || r.d.tailBytes < 32<<10 {
		t.Fatalf("%d bytes are kept", r.d.tailBytes)
	}
	p := r.d.known(rigTopic, 0)
	if p.runs.len() != r.d.tails[0].rounds.len() || p.inTail(1) || !p.inTail(100) {
		t.Fatal("the partition's runs are not those of the rounds")
	}
}

// cold publishes messages and lets all but the last of them go to disk.
func (r *rig) toDisk(partition uint16, n, size int) {
	for range n {
		rd := r.publish(partition, make([]byte, size))
		r.d.written(0, rd.Number)
	}
}

func TestDelivery_ColdMessagesComeFromDiskAndThenFromTheTail(t *testing.T) {
	r := newRig(t, 1, func(o *Options) { o.TailBytes = 32 << 10 })
	const n = 2000
	r.toDisk(0, n, 1000)
	tail := r.d.tailBytes
	cl, _ := r.subscribe(rigGroup, true, func(s *subscription) { s.windowCount, s.windowBytes = 65535, maxCreditBytes })
	for r.reads() > 0 {
		if len(r.store.reads) > 1 {
			t.Fatalf("%d reads of one partition are under way", len(r.store.reads))
		}
	}
	ms := cl.want(n)
	for i, m := range ms {
		if m.Sequence != uint64(i)+1 {
			t.Fatalf("message %d has sequence %d", i, m.Sequence)
		}
	}
	if r.store.done > 6 {
		t.Fatalf("%d reads for 2 MB", r.store.done)
	}
	if r.d.tailBytes != tail {
		t.Fatal("the reader far behind has changed the tail")
	}
	if r.d.coldBytes != 0 {
		t.Fatalf("%d bytes of chunks are kept", r.d.coldBytes)
	}
	// One is delivered again, from disk.
	r.commit()
	cl.nack(&ms[10], protocol.NackRetryNow)
	r.turn()
	r.commit()
	r.reads()
	if m := cl.want(1)[0]; m.Sequence != 11 || m.Attempt != 2 {
		t.Fatalf("redelivered %d, attempt %d", m.Sequence, m.Attempt)
	}
	if r.d.coldBytes != 0 || len(r.d.reads) != 0 {
		t.Fatal("a chunk is kept")
	}
}

func TestDelivery_PullWithoutWaitGetsColdMessages(t *testing.T) {
	r := newRig(t, 1, func(o *Options) { o.TailBytes = 1 })
	r.toDisk(0, 5, 100)
	cl, s := r.subscribe(rigGroup, false, nil)
	req := cl.pull(s, nil)
	r.turn()
	cl.wantAnswer(req, errNoAnswer)
	r.reads()
	cl.wantAnswer(req, nil)
	cl.want(5)
	// But it does not wait longer than it may.
	cl.nackAll(r, cl, s)
}

// nackAll has everything delivered again, from a disk that does not answer.
func (c *fakeClient) nackAll(r *rig, cl *fakeClient, s *subscription) {
	r.commit()
	r.pass(31 * time.Second)
	r.commit()
	r.pass(2 * time.Second)
	req := cl.pull(s, nil)
	r.turn()
	cl.wantAnswer(req, errNoAnswer)
	r.pass(6 * time.Second)
	cl.wantAnswer(req, nil)
	cl.want(0)
}

func TestDelivery_FailedReadIsTriedAgain(t *testing.T) {
	r := newRig(t, 1, func(o *Options) { o.TailBytes = 1 })
	r.toDisk(0, 5, 100)
	for _, fault := range []error{wal.ErrNoMemory, errors.New("input/output error")} {
		r.store.err = fault
		cl, s := r.subscribe(rigGroup, true, nil)
		if r.reads() != 1 {
			t.Fatal("no read")
		}
		cl.want(0)
		r.store.err = nil
		r.pass(2 * time.Second)
		r.reads()
		cl.want(5)
		s.ended = protocol.CodeUnknownMember
		r.d.closeSub(s, true)
	}
}

func TestDelivery_ReadForNobodyGivesItsMemoryBack(t *testing.T) {
	r := newRig(t, 1, func(o *Options) { o.TailBytes = 1 })
	r.toDisk(0, 5, 100)
	before := r.pool.InUse()
	_, s := r.subscribe(rigGroup, true, nil)
	if len(r.store.reads) != 1 {
		t.Fatal("no read")
	}
	s.ended = protocol.CodeUnknownMember
	r.d.closeSub(s, true)
	r.reads()
	if r.pool.InUse() != before || r.d.coldBytes != 0 || len(r.d.reads) != 0 {
		t.Fatal("memory is kept")
	}
}

func TestDelivery_MessagesThatAreGoneAreSkippedAndCounted(t *testing.T) {
	r := newRig(t, 1, func(o *Options) { o.TailBytes = 1 })
	r.toDisk(0, 10, 100)
	r.store.oldest = 8
	cl, _ := r.subscribe(rigGroup, true, nil)
	r.reads()
	cl.want(0) // the gap goes on record first
	r.commit()
	r.reads()
	if ms := cl.want(3); ms[0].Sequence != 8 {
		t.Fatalf("the first message is %d", ms[0].Sequence)
	}
	g := GroupStats{ID: rigGroup, Parts: make([]GroupPartitionStats, 1)}
	r.d.groupStats(&g)
	if g.Dropped != 7 || g.InFlight != 3 || g.Waiting != 0 || g.Parts[0].AckFloor != 7 {
		t.Fatalf("stats %+v", g)
	}
}

func TestDelivery_RestartBringsBackUnacknowledgedOnly(t *testing.T) {
	for _, snapshot := range []bool{false, true} {
		r := newRig(t, 1, nil)
		cl, _ := r.subscribe(rigGroup, true, nil)
		r.publish(0, values(10)...)
		ms := cl.want(10)
		r.commit()
		for i := range ms {
			switch {
			case i == 3:
				cl.nack(&ms[i], protocol.NackRetryNow)
			case i%2 == 0:
				cl.ack(&ms[i], 0)
			}
		}
		r.turn()
		r.round() // committed; nothing more happens before the end
		if snapshot {
			r.d.checkpoint(r.d.ledgers[0])
			if len(r.store.snapshots) != 1 {
				t.Fatal("no checkpoint")
			}
		}
		cl.ack(&ms[1], 0)
		r.turn() // proposed, but never committed
		r.restart()
		next, _ := r.subscribe(rigGroup, true, nil)
		r.commit()
		r.reads()
		attempts := map[uint64]uint16{}
		for _, m := range next.take() {
			attempts[m.Sequence] = m.Attempt
			if m.DeliveryID>>40 != rigEpoch+1 {
				t.Fatalf("delivery id %x", m.DeliveryID)
			}
		}
		if want := map[uint64]uint16{2: 1, 4: 2, 6: 1, 8: 1, 10: 1}; fmt.Sprint(attempts) != fmt.Sprint(want) {
			t.Fatalf("snapshot=%v: after the restart %v were delivered, want %v", snapshot, attempts, want)
		}
		next.wantAnswer(next.ack(&ms[1], 0), protocol.CodeStaleOwner)
	}
}

func TestDelivery_StartPolicies(t *testing.T) {
	r := newRig(t, 1, nil)
	r.publish(0, values(5)...)
	r.addGroup(2, protocol.StartLatest)
	r.addGroup(3, protocol.StartEarliest)
	latest, _ := r.subscribe(2, true, nil)
	earliest, _ := r.subscribe(3, true, nil)
	latest.want(0)
	earliest.want(5)
	r.publish(0, values(1)...)
	if m := latest.want(1)[0]; m.Sequence != 6 {
		t.Fatalf("sequence %d", m.Sequence)
	}
}

func TestDelivery_NothingIsDeliveredBeforeTheCursorIsOnRecord(t *testing.T) {
	r := newRig(t, 1, nil)
	r.publish(0, values(1)...)
	r.apply(&metadata.GroupCreated{Group: 2, Topic: rigTopic, Name: "g2"})
	r.d.groupCreated(2, rigTopic, protocol.StartEarliest)
	cl, _ := r.subscribe(2, true, nil)
	cl.want(0)
	r.commit()
	cl.want(1)
}

func TestDelivery_DeletedGroupAndTopicLeaveNothingBehind(t *testing.T) {
	r := newRig(t, 2, nil)
	cl, s := r.subscribe(rigGroup, true, nil)
	r.publish(0, values(3)...)
	m := cl.want(3)[0]
	r.commit()
	req := cl.ack(&m, 0)
	s.ended, s.endedText = protocol.CodeUnknownTopic, "deleted"
	r.d.closeSub(s, true)
	r.d.groupDeleted(rigGroup)
	r.d.topicDeleted(rigTopic)
	r.c.registry.Store(&Registry{})
	r.turn()
	r.commit()
	cl.wantAnswer(req, nil)
	if n := len(r.d.ledgers[0].book.Cursors()); n != 0 {
		t.Fatalf("%d cursors are left", n)
	}
	r.publish(0, values(3)...) // a straggler
	if slices.ContainsFunc(r.d.parts, func(parts []*partition) bool { return parts != nil }) || len(r.d.groups) != 0 {
		t.Fatal("the topic is still known")
	}
	tailEnd := r.journal.number
	r.d.tailBudget = 0
	r.d.written(0, tailEnd)
	if r.d.tailBytes != 0 {
		t.Fatalf("%d bytes are kept", r.d.tailBytes)
	}
}

func TestDelivery_CursorsOfGroupsThatWereDeletedAreForgottenAtTheStart(t *testing.T) {
	r := newRig(t, 1, nil)
	if err := r.meta.Apply(3, 2, &metadata.GroupDeleted{Group: rigGroup}); err != nil {
		t.Fatal(err)
	}
	r.restart()
	r.turn()
	r.commit()
	if n := len(r.d.ledgers[0].book.Cursors()); n != 0 {
		t.Fatalf("%d cursors are left", n)
	}
}

func TestDelivery_QuarantinedMetadataLeavesTheCursorsAlone(t *testing.T) {
	r := newRig(t, 1, nil)
	r.meta = metadata.NewState()
	committed := r.journal.committed
	topic := &Topic{ID: rigTopic, Partitions: 1}
	r.c = New(r.opts, r.journal, r.store, func(uint16, uint16) int { return 0 }, 1)
	r.c.registry.Store((&Registry{}).with(topic.ID, topic))
	r.c.quarantined = "damaged"
	r.d = r.c.delivery.(*delivery)
	for i := range committed {
		if err := r.d.replay(0, &committed[i]); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.d.recovered(); err != nil {
		t.Fatal(err)
	}
	r.turn()
	if len(r.journal.proposals) != 0 || len(r.d.ledgers[0].book.Cursors()) != 1 {
		t.Fatal("the cursors were touched")
	}
}

func TestDelivery_DamagedLedgerRecordsAreErrors(t *testing.T) {
	r := newRig(t, 1, nil)
	if err := r.d.replay(0, &wal.Record{Sequence: 1000, Value: []byte{9}}); err == nil {
		t.Fatal("a damaged record is accepted")
	}
	if err := r.d.restore(0, 5, []byte{9}); err == nil {
		t.Fatal("a damaged checkpoint is accepted")
	}
	cl, _ := r.subscribe(rigGroup, true, nil)
	r.publish(0, values(2)...)
	ms := cl.want(2)
	r.commit()
	req := cl.ack(&ms[0], 0)
	r.turn()
	r.journal.proposals[0].Value = []byte{9}
	r.round()
	cl.wantAnswer(req, protocol.CodeInternal)
	r.turn()
	cl.wantAnswer(cl.ack(&ms[1], 0), protocol.CodeInternal)
}

func TestDelivery_DrainedPartitionDeliversNothingNewButTakesAcks(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, _ := r.subscribe(rigGroup, true, nil)
	r.publish(0, values(1)...)
	m := cl.want(1)[0]
	r.d.drain(rigGroup, 0, 0, 99) // somebody else's
	r.publish(0, values(1)...)
	cl.want(1)
	r.d.drain(rigGroup, 0, 0, 100)
	r.publish(0, values(1)...)
	cl.want(0)
	r.commit()
	req := cl.ack(&m, 0)
	r.turn()
	r.commit()
	cl.wantAnswer(req, nil)
	r.d.disown(rigGroup, 0, 0, 100, true)
	next, _ := r.subscribe(rigGroup, true, nil)
	if ms := next.want(2); ms[0].Sequence != 2 || ms[0].Attempt != 1 {
		t.Fatalf("the next owner got %+v", ms[0])
	}
}

func TestDelivery_PartitionsAndConsumersTakeTurns(t *testing.T) {
	r := newRig(t, 2, nil)
	r.addGroup(2, protocol.StartEarliest)
	for range 20 {
		r.publish(0, make([]byte, 10_000))
		r.publish(1, make([]byte, 10_000))
	}
	cl, _ := r.subscribe(rigGroup, true, nil)
	seen := map[uint16]int{}
	for _, m := range cl.want(40)[:20] {
		seen[m.Partition]++
	}
	if seen[0] < 7 || seen[1] < 7 {
		t.Fatalf("of the first 20 messages partition 0 has %d and 1 has %d", seen[0], seen[1])
	}
	// No consumer gets more than its turn before the other one.
	budget := turnBytes
	_, s := r.subscribe(2, false, nil)
	s.stream = true
	why, _ := r.d.fill(s.consumer, nil, &budget)
	if why != stopEmpty && why != stopTurn {
		t.Fatalf("stopped by %d", why)
	}
	if sent := turnBytes - budget; sent > turnBytes+11_000 {
		t.Fatalf("%d bytes in one turn", sent)
	}
	r.d.flushOut(s.consumer)
}

func TestDelivery_LargePullGoesOnOverManyTurns(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, s := r.subscribe(rigGroup, false, func(s *subscription) { s.windowCount, s.windowBytes = 65535, maxCreditBytes })
	for range 300 {
		r.publish(0, make([]byte, 10_000))
	}
	req := cl.pull(s, func(p *protocol.Pull) { p.MaxBytes = 2_000_000 })
	r.c.real, r.c.now = r.now, r.now
	if next := r.d.tick(r.now); next != r.now {
		t.Fatalf("after one turn the next one is at %v", next)
	}
	if n := len(cl.msgs); n < 20 || n > 60 {
		t.Fatalf("%d messages in the first turn", n)
	}
	r.turn()
	cl.wantAnswer(req, nil)
	cl.want(200)
}

func TestDelivery_PullOfAConnectionThatDoesNotReadIsAnsweredInTime(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, s := r.subscribe(rigGroup, false, func(s *subscription) { s.windowCount, s.windowBytes = 65535, maxCreditBytes })
	cl.stuck = true
	for range 300 {
		r.publish(0, make([]byte, 10_000))
	}
	req := cl.pull(s, func(p *protocol.Pull) { p.WaitMs = 500 })
	r.turn()
	cl.wantAnswer(req, errNoAnswer)
	if cl.outstanding > OutboundPause+100_000 {
		t.Fatalf("%d bytes are outstanding", cl.outstanding)
	}
	r.pass(time.Second)
	cl.wantAnswer(req, nil)
	some := len(cl.take())
	req = cl.pull(s, func(p *protocol.Pull) { p.WaitMs = 500 })
	r.turn()
	cl.wantAnswer(req, errNoAnswer)
	for cl.answer(req) != nil {
		cl.unstick()
	}
	cl.want(300 - some)
}

func TestDelivery_GroupsHaveTheirOwnMaximumOfAttempts(t *testing.T) {
	r := newRig(t, 1, nil)
	r.apply(&metadata.GroupCreated{Group: 2, Topic: rigTopic, Name: "other", Settings: metadata.GroupSettings{MaxAttempts: 1}})
	r.d.groupCreated(2, rigTopic, protocol.StartEarliest)
	r.turn()
	r.commit()
	cl, _ := r.subscribe(2, true, nil)
	r.publish(0, values(1)...)
	m := cl.want(1)[0]
	cl.nack(&m, protocol.NackRetryNow)
	r.turn()
	r.commit()
	cl.want(0)
	r.wantLetters("1 nack x1")
}

func TestDelivery_StatsAddUp(t *testing.T) {
	r := newRig(t, 2, nil)
	cl, _ := r.subscribe(rigGroup, true, func(s *subscription) { s.windowCount = 6 })
	r.publish(0, values(5)...)
	r.publish(1, values(5)...)
	ms := cl.want(6)
	r.commit()
	for i := range 3 {
		cl.ack(&ms[i], 0)
	}
	cl.nack(&ms[3], protocol.NackRetryLater)
	r.wallMs += 40
	r.turn()
	r.commit()
	g := GroupStats{ID: rigGroup, Parts: make([]GroupPartitionStats, 2)}
	r.d.groupStats(&g)
	if g.Acknowledged != 3 || g.InFlight != 2 || g.Waiting != 5 || g.Acknowledged+g.Dropped+g.InFlight+g.Waiting != 10 {
		t.Fatalf("group %+v", g)
	}
	ts := TopicStats{ID: rigTopic, Parts: make([]PartitionStats, 2)}
	r.d.topicStats(&ts)
	if ts.Produced != 10 || ts.ProducedBytes != 70 || ts.Delivered != 3 || ts.Parts[0].LastSeq != 5 || ts.Parts[1].Depth == 0 {
		t.Fatalf("topic %+v", ts)
	}
	r.restart()
	g, ts = GroupStats{ID: rigGroup}, TopicStats{ID: rigTopic, Parts: make([]PartitionStats, 2)}
	r.d.groupStats(&g)
	r.d.topicStats(&ts)
	if g.Acknowledged != 3 || g.Published != 10 || ts.Delivered != 0 || g.Waiting != 7 || g.InFlight != 0 {
		t.Fatalf("after a restart: group %+v, topic %+v", g, ts)
	}
	next, s := r.subscribe(rigGroup, true, nil)
	r.commit()
	r.reads()
	m := next.take()[0]
	next.ack(&m, 0)
	r.turn()
	r.commit()
	s.ended = protocol.CodeUnknownMember
	r.d.closeSub(s, true)
	r.d.groupDeleted(rigGroup)
	ts = TopicStats{ID: rigTopic, Parts: make([]PartitionStats, 2)}
	if r.d.topicStats(&ts); ts.Delivered != 1 {
		t.Fatalf("after its group was deleted: topic %+v", ts)
	}
}

func TestDelivery_LatencyIsSampledOverAMinute(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, _ := r.subscribe(rigGroup, true, nil)
	r.publish(0, values(1)...)
	m := cl.want(1)[0]
	r.commit()
	cl.ack(&m, 0)
	r.wallMs += 40
	r.turn()
	r.commit()
	if q := r.d.endToEnd(); q.Count == 0 || q.P50Ms < 39 || q.P50Ms > 42 {
		t.Fatalf("latency %+v", q)
	}
	r.pass(2 * time.Minute)
	if q := r.d.endToEnd(); q.Count != 0 {
		t.Fatalf("latency after two minutes %+v", q)
	}
}

func TestDelivery_DeliverAndAckDoNotAllocate(t *testing.T) {
	r := newRig(t, 1, func(o *Options) { o.TailBytes = 1 << 20 })
	cl, s := r.subscribe(rigGroup, true, func(s *subscription) { s.windowCount, s.windowBytes = 65535, maxCreditBytes })
	const n = 500
	cl.counting = true
	rd := r.d.groups[rigGroup].sets[0].readers[0]
	run := wal.TestRun{Stream: wal.StreamID{Kind: wal.Messages, Topic: rigTopic}, Records: make([]wal.Record, n)}
	for i := range run.Records {
		run.Records[i].Value = make([]byte, 100)
	}
	ack := protocol.Ack{SubscriptionID: s.id, TopicID: rigTopic, OwnershipEpoch: rd.epoch}
	credit := (&protocol.Credit{SubscriptionID: s.id, Mode: protocol.CreditSet, Count: 65535, Bytes: maxCreditBytes}).AppendFrame(nil)[protocol.HeaderSize:]
	frame := ack.AppendFrame(nil)
	req := Request{Client: cl}
	sequence := uint64(0)
	// A round of n messages, their delivery, n ACKs, and the round with the ACKs' record.
	cycle := func() {
		for i := range run.Records {
			sequence++
			run.Records[i].Sequence = wal.Sequence(sequence)
		}
		r.d.written(0, r.round(run).Number-1)
		r.turn()
		r.round()
		for i := range uint64(n) {
			req.Req, req.Op = i, protocol.OpAck
			ack.Sequence, ack.DeliveryID = sequence-n+1+i, uint64(rigEpoch)<<40|(r.d.deliveries-n+1+i)
			frame = ack.AppendFrame(frame[:0])
			r.d.request(&req, frame[protocol.HeaderSize:])
		}
		req.Op = protocol.OpCredit
		r.d.request(&req, credit)
		r.turn()
		r.round()
		r.now += time.Millisecond
		r.turn()
	}
	for range 50 {
		cycle()
	}
	allocs := testing.AllocsPerRun(100, cycle)
	if f := uint64(rd.cur.Floor()); f != sequence || r.d.deliveries != sequence {
		t.Fatalf("floor %d and %d deliveries of %d", f, r.d.deliveries, sequence)
	}
	if allocs > n/10 { // the fake journal makes its rounds and records anew
		t.Fatalf("%v allocations for %d deliveries and ACKs", allocs, n)
	}
}
