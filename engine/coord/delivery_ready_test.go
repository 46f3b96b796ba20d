package coord

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// Partitions whose next messages the credit does not allow are not tried again by each PULL: this test ends soon, or takes
// minutes if they are.
func TestDelivery_PullsWithoutEnoughCreditAreCheapHoweverManyPartitionsWait(t *testing.T) {
	const partitions = 4096
	pulls := 1 << 15
	if testing.Short() {
		pulls >>= 5
	}
	r := newRig(t, partitions, nil)
	for p := range uint16(partitions) {
		r.publish(p, make([]byte, 100))
	}
	cl, s := r.subscribe(rigGroup, false, func(s *subscription) { s.windowCount, s.windowBytes = 100, 99 })
	for range pulls {
		req := cl.pull(s, nil)
		r.turn()
		cl.wantAnswer(req, protocol.CodeMessageExceedsCredit)
	}
	cl.credit(s, protocol.CreditSet, 100, 250)
	req := cl.pull(s, nil)
	r.turn()
	cl.wantAnswer(req, nil)
	cl.want(2)
	for range pulls {
		req := cl.pull(s, nil)
		r.turn()
		cl.wantAnswer(req, protocol.CodeNoCredit)
	}
	cl.credit(s, protocol.CreditAdd, 3, 150)
	req = cl.pull(s, nil)
	r.turn()
	cl.wantAnswer(req, nil)
	cl.want(2)
}

func TestDelivery_SmallMessagesOfOtherPartitionsPassALargeOne(t *testing.T) {
	r := newRig(t, 3, nil)
	r.publish(0, make([]byte, 500))
	r.publish(1, make([]byte, 1000))
	r.publish(2, make([]byte, 10), make([]byte, 10))
	cl, s := r.subscribe(rigGroup, true, func(s *subscription) { s.windowCount, s.windowBytes = 10, 100 })
	for _, m := range cl.want(2) {
		if m.Partition != 2 {
			t.Fatalf("a message of partition %d came", m.Partition)
		}
	}
	if len(cl.errs) != 1 || !strings.Contains(string(cl.errs[0].Message), "partition 0 sequence 1 has 500 bytes") {
		t.Fatalf("pushed %+v", cl.errs)
	}
	r.turn()
	if len(cl.errs) != 1 {
		t.Fatalf("it is said again: %+v", cl.errs)
	}
	cl.credit(s, protocol.CreditSet, 10, 600)
	r.turn()
	if m := cl.want(1); m[0].Partition != 0 || len(cl.errs) != 2 || !strings.Contains(string(cl.errs[1].Message), "partition 1 sequence 1 has 1000 bytes") {
		t.Fatalf("got %+v, pushed %+v", m, cl.errs)
	}
	// One that is taken away meanwhile is not waited for.
	r.d.disown(rigGroup, 0, 1, s.consumer.readers[slices.IndexFunc(s.consumer.readers, func(rd *reader) bool { return rd.part.id == 1 })].epoch, true)
	if n := len(s.consumer.short); n != 0 {
		t.Fatalf("%d partitions wait for credit", n)
	}
}

// Redeliveries out of order do not walk through all of a round's, or a chunk's, records.
func TestRunIndex_FindsEveryRecord(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		n := 1 + rnd.IntN(500)
		var data []byte
		var offsets []int
		for i := range n {
			rec := wal.Record{Sequence: wal.Sequence(i + 1), Value: make([]byte, rnd.IntN(20))}
			offsets = append(offsets, len(data))
			data = append(data, make([]byte, wal.RecordSize(0, len(rec.Value)))...)
			wal.PutRecord(data[offsets[i]:], &rec)
		}
		var x runIndex
		for range 200 {
			i := rnd.IntN(n)
			if got := x.seek(data, i); got != offsets[i] {
				t.Fatalf("record %d of %d is at %d, found at %d", i, n, offsets[i], got)
			}
		}
		if len(x) > (n-1)/indexStride+1 {
			t.Fatalf("%d marks for %d records", len(x), n)
		}
	}
}

func TestAgenda_EarliestFirst(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	var a agenda[time.Duration]
	if _, ok := a.due(1 << 40); ok || a.next() != 0 {
		t.Fatal("something is due in an empty agenda")
	}
	for now := time.Duration(1); now < 2000; now++ {
		for range rnd.IntN(3) {
			at := now + time.Duration(rnd.IntN(50))
			a.add(at, at)
		}
		for at, ok := a.due(now); ok; at, ok = a.due(now) {
			if at != now {
				t.Fatalf("at %d what is due at %d comes", now, at)
			}
		}
		if next := a.next(); next != 0 && next <= now {
			t.Fatalf("at %d the next thing is due at %d", now, next)
		}
	}
}

func TestReset_OnlySoManyAtOnce(t *testing.T) {
	r := newRig(t, 2, nil)
	answered := map[string]int{}
	for range maxResets + 10 {
		r.d.reset(rigGroup, protocol.Reset{Partition: protocol.AnyPartition}, func(_ []protocol.ResetPosition, err error) {
			code, _ := protocol.CodeOf(err)
			answered[code.Error()]++
		})
	}
	if n := answered[protocol.CodeBackpressure.Error()]; n != 10 || len(answered) != 1 {
		t.Fatalf("answered %v", answered)
	}
	r.turn()
	r.commit()
	if r.d.resetting != 0 || len(answered) != 2 {
		t.Fatalf("%d resets are under way, answered %v", r.d.resetting, answered)
	}
}
