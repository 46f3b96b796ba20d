package sim

import (
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// record is what the producers know, and when they did.
type record struct {
	w *world
	// first is when each message was sent for the first time.
	first map[[2]uint64]time.Duration
	// at is where each message was acknowledged, who which message has a sequence.
	at  map[[2]uint64]uint64
	who map[place][2]uint64
	// acks are the acknowledgements, reads the first deliveries of each message, in the order of time.
	acks  []acked
	reads map[place]read
}

// place is a sequence of a partition.
type place struct {
	topic, partition uint16
	seq              uint64
}

// acked is an acknowledgement that was received.
type acked struct {
	place
	at     time.Duration
	commit uint64
}

// read is a delivery, from when it was sent to when it arrived.
type read struct{ sent, at time.Duration }

func newRecord(w *world) *record {
	return &record{
		w: w, first: map[[2]uint64]time.Duration{}, at: map[[2]uint64]uint64{}, who: map[place][2]uint64{},
		reads: map[place]read{},
	}
}

// sent tells whether a message was.
func (r *record) sent(id [2]uint64) bool { _, ok := r.first[id]; return ok }

func (r *record) published(producer, seq uint64) {
	if id := [2]uint64{producer, seq}; !r.sent(id) {
		r.first[id] = r.w.now
	}
}

func (r *record) read(p place, sent time.Duration) {
	if _, ok := r.reads[p]; !ok {
		r.reads[p] = read{sent, r.w.now}
	}
}

func (r *record) acknowledged(topic, partition uint16, producer, seq uint64, res protocol.PubResult) {
	m := [2]uint64{producer, seq}
	if was, ok := r.at[m]; ok && was != res.Sequence {
		r.w.fail("message %v was acknowledged at %d, now at %d", m, was, res.Sequence)
	}
	r.at[m] = res.Sequence
	p := place{topic, partition, res.Sequence}
	if was, ok := r.who[p]; ok && was != m {
		r.w.fail("sequence %d of partition %d was acknowledged for message %v, now for %v", p.seq, p.partition, was, m)
	}
	r.who[p] = m
	if res.CommitSeq < res.Sequence {
		r.w.fail("message %v was acknowledged at %d with the commit point at %d", m, res.Sequence, res.CommitSeq)
	}
	r.acks = append(r.acks, acked{p, r.w.now, res.CommitSeq})
	r.w.visible(p, m)
	if res.Flags&protocol.ResultFlagDeduplicated != 0 {
		r.w.count(duplicateAnswered)
	}
}
