package coord

import (
	"testing"

	"github.com/mortarmq/mortarmq/engine/ledger"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// Three million messages, enough for two checkpoints, are delivered and acknowledged, out of order and with a few left open. What a start has to read is
// bounded by what is open, not by that history.
func TestDelivery_LedgerIsBoundedByWhatIsOpen(t *testing.T) {
	const batch = 1000
	batches, leaveOpen, checkpoints := 3000, 20_000, 2
	if testing.Short() {
		batches, leaveOpen, checkpoints = 100, 2000, 0
	}
	r := newRig(t, 1, func(o *Options) { o.TailBytes = 4 << 20 })
	cl, s := r.subscribe(rigGroup, true, nil)
	cl.counting = true
	value := []byte("value")
	largest, left, position := 0, 0, uint64(0)
	for b := range batches {
		run := wal.TestRun{Stream: wal.StreamID{Kind: wal.Messages, Topic: rigTopic}}
		for i := range batch {
			run.Records = append(run.Records, wal.Record{Sequence: wal.Sequence(b*batch + i + 1), TimestampMs: r.wallMs, Value: value})
		}
		m := protocol.Credit{SubscriptionID: s.id, Mode: protocol.CreditSet, Count: 60_000, Bytes: 64 << 20}
		cl.send(protocol.OpCredit, m.AppendFrame(nil))
		r.round(run)
		r.turn()
		for _, parity := range []int{1, 0} { // scattered, so that a record is made of many runs
			for seq := b*batch + 1; seq <= (b+1)*batch; seq++ {
				if seq%2 != parity {
					continue
				}
				if seq%leaveOpen == 0 {
					left++
					continue
				}
				cl.ack(&protocol.Msg{SubscriptionID: s.id, TopicID: rigTopic, Sequence: uint64(seq),
					DeliveryID: uint64(rigEpoch)<<(64-deliveryIDEpochBits) | uint64(seq), OwnershipEpoch: r.d.groups[rigGroup].sets[0].readers[0].epoch}, 0)
			}
			r.turn()
			r.commit()
		}
		r.d.written(0, r.journal.number)
		// The store removes what a checkpoint replaces.
		kept := r.journal.committed[:0]
		bytes := 0
		for i := range r.journal.committed {
			if rec := r.journal.committed[i]; uint64(rec.Sequence) > r.store.position {
				kept = append(kept, rec)
				bytes += len(rec.Value)
			}
		}
		r.journal.committed = kept
		if bytes > checkpointBytes+ledger.MaxRecord || len(kept) > checkpointRecords+maxProposals {
			t.Fatalf("%d records with %d bytes are to be replayed after %d messages", len(kept), bytes, (b+1)*batch)
		}
		if n := len(r.store.snapshots); n > 1 || r.store.position > position {
			position = r.store.position
			checkpoints--
			largest = max(largest, len(r.store.snapshots[n-1]))
			r.store.snapshots = r.store.snapshots[n-1:]
		}
	}
	if checkpoints > 0 {
		t.Fatal("too few checkpoints")
	}
	r.d.checkpoint(r.d.ledgers[0])
	last := r.store.snapshots[len(r.store.snapshots)-1]
	if most := 256 + 64*(left+batch); max(len(last), largest) > most {
		t.Fatalf("a checkpoint has %d bytes, want at most %d for %d open messages", max(len(last), largest), most, left)
	}
	if g := r.stats(); g.Acknowledged != uint64(batches*batch-left) || g.InFlight != uint64(left) {
		t.Fatalf("%+v, %d left open", g, left)
	}
	r.wantSums()
	r.store.records[0] = nil
	r.restart()
	if g := r.stats(); g.Acknowledged != uint64(batches*batch-left) || g.Waiting != uint64(left) || g.Lag != uint64(batches*batch-leaveOpen+1) {
		t.Fatalf("after a restart %+v, %d were left open", g, left)
	}
	r.wantSums()
}
