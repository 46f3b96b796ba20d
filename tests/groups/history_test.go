package groups

import (
	"bytes"
	"strings"
	"testing"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/engine/deadletter"
)

// tale tells a history what has happened to message 7, at sequence 1 of partition 0.
type tale struct {
	h     *history
	cause cause
}

func (w tale) published() { w.h.published(&client.Result{Sequence: 1}, 7, w.cause) }

func (w tale) delivered(id uint64, attempt uint16) { w.deliveredTo(id, attempt, 1) }

func (w tale) deliveredTo(id uint64, attempt uint16, member uint64) {
	w.h.take(&event{Kind: eventDelivered, Sequence: 1, Number: 7, Cause: w.cause, Delivery: id, Attempt: attempt, Epoch: 1}, member)
}

func (w tale) handled() { w.h.take(&event{Kind: eventHandled, Sequence: 1}, 1) }

func (w tale) acked(id uint64) {
	w.h.take(&event{Kind: eventAcking, Sequence: 1, Delivery: id}, 1)
	w.h.take(&event{Kind: eventAcked, Sequence: 1, Delivery: id}, 1)
}

func (w tale) buried(attempts uint16, reason deadletter.Reason) {
	w.h.buried(&deadletter.Envelope{Sequence: 1, Attempts: attempts, Reason: reason}, 1, valueOf(7, w.cause))
}

func (w tale) failedFiveTimes() {
	for i := range uint16(5) {
		w.delivered(uint64(i)+1, i+1)
		w.handled()
	}
	w.buried(5, deadletter.ReasonNack)
}

// A checker that accepts everything would be worth nothing.
func TestHistory_NoticesBrokenPromises(t *testing.T) {
	for _, tt := range []struct {
		name  string
		cause cause
		tell  func(w tale)
		want  string // "": it is as it should be
	}{
		{"acknowledged", good, func(w tale) { w.published(); w.delivered(1, 1); w.handled(); w.acked(1) }, ""},
		{"given up", failing, func(w tale) { w.published(); w.failedFiveTimes() }, ""},
		{"rejected", rejected, func(w tale) { w.published(); w.delivered(1, 1); w.handled(); w.buried(1, deadletter.ReasonRejected) }, ""},
		{"late delivery of an acknowledged message", good, func(w tale) { w.published(); w.delivered(1, 1); w.handled(); w.acked(1); w.delivered(2, 2) }, "after the ACK"},
		{"the same, heard of in another order", good, func(w tale) { w.published(); w.delivered(2, 2); w.handled(); w.acked(1); w.delivered(1, 1) }, "after the ACK"},
		{"two ACKs", good, func(w tale) { w.published(); w.delivered(1, 1); w.acked(1); w.delivered(2, 1); w.acked(2) }, "ACKs of two deliveries"},
		{"lost", good, func(w tale) { w.published(); w.delivered(1, 1) }, "is lost"},
		{"poison that is lost", failing, func(w tale) { w.published(); w.delivered(1, 1) }, "in no dead letter"},
		{"invented", good, func(w tale) { w.delivered(1, 1); w.handled(); w.acked(1) }, "never published"},
		{"two letters", failing, func(w tale) { w.published(); w.failedFiveTimes(); w.buried(5, deadletter.ReasonNack) }, "2 dead letters"},
		{"given up too early", panicking, func(w tale) { w.published(); w.delivered(1, 1); w.buried(3, deadletter.ReasonNack) }, "given up after 3"},
		{"one attempt too many", failing, func(w tale) { w.published(); w.failedFiveTimes(); w.delivered(6, 6) }, "attempt 6 of at most 5"},
		{"attempts begin anew", failing, func(w tale) { w.published(); w.failedFiveTimes(); w.delivered(6, 1) }, "attempt 1 after attempt 5"},
		{"acknowledged and given up", good, func(w tale) {
			w.published()
			w.delivered(1, 1)
			w.handled()
			w.acked(1)
			w.buried(5, deadletter.ReasonExpired)
		}, "was acknowledged and is in a dead letter"},
		{"given up for no reason", good, func(w tale) { w.published(); w.delivered(1, 1); w.buried(5, deadletter.ReasonNack) }, "nobody has refused it"},
		{"two owners", good, func(w tale) { w.published(); w.delivered(1, 1); w.deliveredTo(2, 1, 2); w.handled(); w.acked(2) }, "members 1 and 2"},
		{"handled twice", good, func(w tale) {
			w.published()
			w.delivered(1, 1)
			w.handled()
			w.delivered(2, 1)
			w.handled()
			w.acked(2)
		}, "handled 2 times"},
		{"an attempt more than failed", good, func(w tale) { w.published(); w.delivered(1, 2); w.handled(); w.acked(1) }, "was not attempt 1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := newHistory()
			tt.tell(tale{h, tt.cause})
			h.checkEnd(5, true)
			switch err := h.err(); {
			case tt.want == "" && err != nil:
				t.Fatal(err)
			case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
				t.Fatalf("noticed %v, want %q", err, tt.want)
			}
		})
	}
}

func TestHistory_NoticesDisorder(t *testing.T) {
	for _, tt := range []struct {
		name string
		ids  [3]uint64 // of the deliveries of messages 1, 2 and 1 again
		want bool
	}{{"in order", [3]uint64{1, 3, 2}, true}, {"out of order", [3]uint64{1, 2, 3}, false}} {
		h := newHistory()
		for i, seq := range []uint64{1, 2, 1} {
			h.take(&event{Kind: eventDelivered, Sequence: seq, Number: seq, Delivery: tt.ids[i], Attempt: 1, Epoch: 1}, 1)
		}
		h.checkOrder()
		if err := h.err(); (err == nil) != tt.want {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

func TestEvents_ArriveAsTheyWereSent(t *testing.T) {
	var b bytes.Buffer
	r := &reporter{w: &b}
	sent := []event{{Kind: eventJoined, Member: 9}, {Kind: eventDelivered, Cause: rejected, Partition: 1, Attempt: 2, Sequence: 3, Delivery: 4, Epoch: 5, Number: 6}}
	if err := r.report(sent...); err != nil {
		t.Fatal(err)
	}
	b.Write(make([]byte, eventSize-1)) // of one that was never written to its end
	var got []event
	readEvents(&b, func(e *event) { got = append(got, *e) })
	if len(got) != 2 || got[0] != sent[0] || got[1] != sent[1] {
		t.Fatalf("got %+v, want %+v", got, sent)
	}
}
