package coord

import (
	"errors"
	"testing"
)

// What a coordinator knows of a journal that is being filled from another node is neither handed on nor written down: it is older
// than the files. Of another journal both go on, so that two nodes can fill one for each other.
func TestSnapshots_AreRefusedOfAJournalThatIsBeingFilled(t *testing.T) {
	r := newRig(t, 1, nil)
	r.c = New(r.opts, r.journal, r.store, func(uint16, uint16) int { return 0 }, 2)
	r.c.meta = r.meta
	for _, filled := range []int{0, 1} {
		for journal := range 2 {
			if _, err := r.c.snapshots(journal); err != nil {
				t.Fatalf("of journal %d: %v", journal, err)
			}
		}
		r.c.handle(&event{kind: evSilence, journal: filled})
		if _, err := r.c.snapshots(filled); !errors.Is(err, errNoSnapshots) {
			t.Errorf("of journal %d, which is being filled: %v", filled, err)
		}
		if _, err := r.c.snapshots(1 - filled); err != nil {
			t.Errorf("of journal %d, while journal %d is being filled: %v", 1-filled, filled, err)
		}
		r.store.snapshots = nil
		d := r.c.delivery.(*delivery)
		for _, l := range d.ledgers {
			d.checkpoint(l)
		}
		r.c.metaRecords = r.c.opts.MetadataSnapshotRecords
		r.c.saveMetadata()
		if n := len(r.store.snapshots); n != 1+filled {
			t.Errorf("%d snapshots are written while journal %d is being filled", n, filled)
		}
		var served error
		r.c.standby = true
		r.c.lead(1, func(err error) { served = err })
		if !errors.Is(served, errSilenced) {
			t.Errorf("it leads: %v", served)
		}
		r.c.silenced[filled] = false
	}
}
