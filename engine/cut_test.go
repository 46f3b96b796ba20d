package engine

import (
	"testing"

	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/wal"
)

// A follower is sent what segments hold. With a full disk recovery leaves rounds in the journal: they are not there yet.
func TestCut_WaitsForWhatRecoveryCouldNotWrite(t *testing.T) {
	last := replica.Point{Epoch: 2, Index: 40}
	log, err := replica.NewLog(1, []replica.NodeID{1, 2, 3}, last, nil)
	if err != nil {
		t.Fatal(err)
	}
	s := &shard{eng: &Engine{}, store: &storeLoop{}, dedup: newDedup(dedupMaxBytes)}
	r := &replication{s: s, self: 1, others: []replica.NodeID{2, 3}, log: log}
	for _, tt := range []struct {
		name               string
		unwritten, written wal.RoundNumber
		ok                 bool
	}{
		{"all was written", 0, 0, true},
		{"nothing has been written since", 17, 0, false},
		{"a part has been written since", 17, 16, false},
		{"all has been written since", 17, 17, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s.unwritten = tt.unwritten
			s.store.written.Store(uint64(tt.written))
			if c := r.cutOf(0); c.ok != tt.ok || c.ok && c.point != last {
				t.Errorf("the cut is %+v", c)
			}
		})
	}
}
