package coord

import (
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

func TestDelivery_FailedJournalAnswersWhoWaitsAndDeliversOn(t *testing.T) {
	r := newRig(t, 1, nil)
	cl, s := r.subscribe(rigGroup, true, func(s *subscription) { s.windowCount = 2 })
	r.publish(0, values(4)...)
	ms := cl.want(2)
	r.commit()
	ack, nack := cl.ack(&ms[0], 0), cl.nack(&ms[1], protocol.NackRetryNow)
	r.turn()
	proposed := len(r.journal.proposals)
	r.d.failed(protocol.CodeReadOnlyDegraded, journalFailed)
	cl.wantAnswer(ack, protocol.CodeReadOnlyDegraded)
	cl.wantAnswer(nack, protocol.CodeReadOnlyDegraded)
	r.pass(time.Hour) // every lease is over; none of it can be put on record
	if n := len(r.journal.proposals); n != proposed {
		t.Errorf("%d records were proposed to a failed journal", n-proposed)
	}
	cl.credit(s, protocol.CreditAdd, 2, 100)
	r.turn()
	if ms := cl.want(2); ms[0].Sequence != 3 || ms[1].Sequence != 4 {
		t.Errorf("delivered %d and %d", ms[0].Sequence, ms[1].Sequence)
	}
}
