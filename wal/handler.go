package wal

import "time"

// Handler gets what Open recovers. Its methods run on Open's goroutine. Byte slices and records are borrowed: they are
// valid until the method returns. An error ends the recovery, except where a method says otherwise.
type Handler interface {
	// Snapshot hands over the newest valid snapshot of a kind, at most one of each, before any record. position is what
	// SaveSnapshot was called with. An error for a metadata snapshot quarantines the metadata.
	Snapshot(kind SnapshotKind, position uint64, data []byte) error
	// Record hands over one committed record. First come the Ledger and Metadata records of the files that are above
	// their snapshot (fromJournal is false), each stream in order. Then the journal is replayed in its own order: its
	// Ledger and Metadata records above those, and the Messages records of every round above the dedup snapshot's
	// (whether or not their segment has them already). An error for a Metadata record (an unknown type, a fold that
	// fails) quarantines the metadata instead of ending the recovery.
	Record(s StreamID, r *Record, fromJournal bool) error
}

// OpenOptions configures Open. Store.Dir is the data directory, Store.Journal and Journal.ID name the same journal.
type OpenOptions struct {
	// Journal.Dir may be empty: then it is journal/<id> in the data directory.
	Journal JournalOptions
	Store   StoreOptions
	// Replicated opens the journal of a node of a cluster: its rounds have positions in a replicated log, and only what is
	// known to be committed is handed to the Handler and to the store; see Recovery.Pending.
	Replicated bool
	// Suspect, if set, lets a cluster node be opened although the end of its journal is missing, which once was durable:
	// what it vouched for may be gone. It is called with the reason before anything is written, on Open's goroutine, and has
	// to put on record, durably, that this node's log ends can't be trusted; the next start finds nothing wrong any more.
	// An error ends the recovery. Ignored without Replicated.
	Suspect func(reason error) error
	// Deleted tells which topics were deleted, as far as that is known when it is called: the metadata may have been handed
	// over already, by this journal or one opened before. What there is of such a topic isn't served, reported or replayed;
	// its files are removed in the background, as after DropTopic, which a crash has then come before. nil knows of none.
	Deleted func(topic uint16) bool
	// Now is a monotonic clock to take Recovery.Duration with; nil leaves it 0.
	Now func() time.Duration
}

// Recovery tells what Open found.
type Recovery struct {
	// Epoch is the new one, opened by this start. In a cluster it is the node's own and has nothing to do with its leader's.
	Epoch Epoch
	// FirstSequences and LastSequences have the oldest and newest committed record of every stream that has any, and of a
	// partition that began anew (Store.Skip) and has none since, the record it begins with and the one before. LastTimes has
	// the newest one's timestamp (Unix milliseconds) of the partitions; 0 where it isn't known.
	FirstSequences, LastSequences map[StreamID]Sequence
	LastTimes                     map[StreamID]uint64
	// LastTopic is the highest topic id that there are files or records of, those being deleted included; 0 for none. The
	// metadata must have given it out, or it would be given out again.
	LastTopic uint16
	// Quarantined are the partitions whose files aren't served, with the reasons.
	Quarantined []QuarantineReport
	// Metadata is set where the metadata was quarantined, by this start or an earlier one: the broker knows no topics
	// and must not serve any.
	Metadata *QuarantineReport
	// DedupLost says why the producers' windows of before the journal's oldest round are gone, where they are: a
	// producer that repeats a record from back then would store it twice.
	DedupLost error
	// Torn is nil where the journal ended cleanly, otherwise what was cut off: an append that never became durable.
	Torn error
	// Pending are, in a cluster, the rounds of the log that aren't known to be committed: oldest first, without gaps, up to
	// Log.Last. Each has a reference that the caller owns. Their records were handed to nobody, but the snapshots may
	// include them: what this node knew committed when it saved them need not be known to be now. What is at or below
	// LastSequences, and what a window knows, is to be passed over when they are committed.
	Pending []*Round
	// Log is where the replicated log ends.
	Log LogEnd
	// Committed is, in a cluster, the newest round that is known to be committed: those up to it were handed over.
	Committed RoundNumber
	// Suspect is nil or the reason that was given to OpenOptions.Suspect.
	Suspect error
	// Unwritten has, oldest first, the rounds with messages that could not be written to their segments because the disk is
	// full: until OnWritten has reached them they can be read nowhere else. Each has a reference, which is the caller's.
	Unwritten []*Round
	// Rounds and Bytes count what was replayed from the journal.
	Rounds int
	Bytes  int64
	// Duration is how long it took.
	Duration time.Duration
}
