package coord

import (
	"errors"
	"testing"
)

// What a coordinator knows whose journals are being filled from another node is not handed on: it is older than the files.
func TestSnapshots_AreRefusedWhereAJournalIsBeingFilled(t *testing.T) {
	r := newRig(t, 1, nil)
	r.c.delivery, r.c.meta = r.d, r.meta
	if _, err := r.c.snapshots(0); err != nil {
		t.Fatal(err)
	}
	r.c.silenced = true
	if _, err := r.c.snapshots(0); !errors.Is(err, errNoSnapshots) {
		t.Errorf("got %v", err)
	}
}
