package wal

import (
	"fmt"
)

// SnapshotKind names one of the three states that a journal's owner keeps outside of the log.
type SnapshotKind uint8

const (
	// SnapshotMetadata is the folded metadata log. Its position is the Sequence (mutation id) it includes.
	SnapshotMetadata SnapshotKind = iota + 1
	// SnapshotCursors is the folded delivery ledger. Its position is the ledger Sequence it includes.
	SnapshotCursors
	// SnapshotDedup holds the producers' windows. Its position is the RoundNumber it includes.
	SnapshotDedup
)

// String returns the kind's name as it stands in errors.
func (k SnapshotKind) String() string {
	switch k {
	case SnapshotMetadata:
		return "metadata snapshot"
	case SnapshotCursors:
		return "cursor checkpoint"
	case SnapshotDedup:
		return "dedup snapshot"
	default:
		return fmt.Sprintf("snapshot kind %d", uint8(k))
	}
}
