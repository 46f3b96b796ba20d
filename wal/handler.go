package wal

// Handler gets what Open recovers. Its methods run on Open's goroutine. Byte slices and records are borrowed: they are
// valid until the method returns. An error ends the recovery, except where a method says otherwise.
type Handler interface {
	// Snapshot hands over the newest valid snapshot of a kind, at most one of each, before any record. position is what
	// SaveSnapshot was called with. An error for a metadata snapshot quarantines the metadata.
	Snapshot(kind SnapshotKind, position uint64, data []byte) error
	// Record hands over one committed record. First come the Ledger and Metadata records of the files that are above
	// their snapshot (fromJournal is false), each stream in order. Then the journal is replayed in its own order: its
	// Ledger and Metadata records above those, and every Messages record above the checkpoint, whether or not its
	// segment has it already (for the dedup windows). An error for a Metadata record (unknown type, a fold that fails)
	// quarantines the metadata instead of ending the recovery.
	Record(s StreamID, r *Record, fromJournal bool) error
}
