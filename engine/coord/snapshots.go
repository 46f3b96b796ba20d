package coord

import "errors"

// Snapshots is the state that a node which catches up goes on from: what the records up to the positions have made. The
// slices are the receiver's.
type Snapshots struct {
	// Cursors are those of the journal asked for, up to the ledger record LedgerPosition.
	Cursors        []byte
	LedgerPosition uint64
	// Metadata holds the mutations up to MutationID.
	Metadata   []byte
	MutationID uint64
}

// errNoSnapshots is returned where the state can't be trusted.
var errNoSnapshots = errors.New("the metadata or the ledger are not served here, so they can't be handed on")

// Snapshot has done called, on the coordinator's goroutine, with the state that everything committed so far, of the rounds
// handed to CommitRound, has made.
func (c *Coordinator) Snapshot(journal int, done func(Snapshots, error)) {
	if !c.inbox.Push(event{kind: evSnapshot, journal: journal, snapshot: done}) {
		done(Snapshots{}, ErrClosed)
	}
}

func (c *Coordinator) snapshots(journal int) (Snapshots, error) {
	d, ok := c.delivery.(*delivery)
	if !ok || c.silenced[journal] || c.quarantined != "" || c.standbyErr != nil || d.ledgers[journal].err != nil {
		return Snapshots{}, errNoSnapshots
	}
	l := d.ledgers[journal]
	return Snapshots{
		Cursors: l.book.AppendSnapshot(nil, c.now, c.wallMs), LedgerPosition: uint64(l.position),
		Metadata: c.meta.AppendSnapshot(nil), MutationID: c.meta.MutationID(),
	}, nil
}
