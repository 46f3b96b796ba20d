package wal

import (
	"errors"
	"fmt"
	"strings"
)

var (
	// ErrCorrupt is matched by every *CorruptionError.
	ErrCorrupt = errors.New("corrupt data on disk")
	// ErrShort means that the bytes end before the record does: the normal end of a log whose last write was torn.
	// It is no corruption by itself; whether the missing bytes were ever durable is for the caller to judge.
	ErrShort = errors.New("incomplete record")
	// ErrRoundFull means that the gathering round takes no more: seal it first, then append again.
	ErrRoundFull = errors.New("journal round is full; seal it first")
	// ErrJournalFull means that the journal has no room until rounds are trimmed. Message appends get it while the
	// reserve for ledger and metadata is still there. Nothing was appended; the producer is told to slow down.
	ErrJournalFull = errors.New("journal is full until older rounds have moved to their segments")
	// ErrNoMemory means that the buffer pool is at its limit. Nothing was appended; it passes when rounds are released.
	ErrNoMemory = errors.New("buffer pool is at its limit")
	// ErrFailed is matched by every *FailedError.
	ErrFailed = errors.New("storage failed")
)

// CorruptionError reports bytes on disk that once were durable and are no longer what was written. It is never
// repaired by cutting or deleting. errors.Is(err, ErrCorrupt) is true for it.
type CorruptionError struct {
	// Path is the damaged file; empty where only the bytes are known (DecodeRecord), to be filled in by the caller.
	Path string
	// Offset is where in the file, or in the bytes given, the damaged thing starts.
	Offset int64
	// Stream and Sequence tell which record is affected. Stream.Kind is 0 and Sequence 0 where that is not known.
	Stream   StreamID
	Sequence Sequence
	// Round is the journal round affected; 0 outside the journal.
	Round RoundNumber
	// Cause says what is wrong with the bytes.
	Cause error
}

func (e *CorruptionError) Error() string {
	var b strings.Builder
	b.WriteString("corrupt data")
	if e.Path != "" {
		fmt.Fprintf(&b, " in %s", e.Path)
	}
	fmt.Fprintf(&b, " at offset %d", e.Offset)
	if e.Stream.Kind != 0 {
		fmt.Fprintf(&b, ", %v", e.Stream)
	}
	if e.Sequence != 0 {
		fmt.Fprintf(&b, ", sequence %d", e.Sequence)
	}
	if e.Round != 0 {
		fmt.Fprintf(&b, ", round %d", e.Round)
	}
	if e.Cause != nil {
		fmt.Fprintf(&b, ": %v", e.Cause)
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *CorruptionError) Unwrap() error { return e.Cause }

// Is makes every CorruptionError match ErrCorrupt.
func (e *CorruptionError) Is(target error) bool { return target == ErrCorrupt }

// VersionError reports a file written in a format version that this build doesn't know. Nothing was changed; a newer
// build reads it.
type VersionError struct {
	Path    string
	Version uint8
	// Supported is the newest version this build reads.
	Supported uint8
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("%s has format version %d, this build reads versions up to %d: start the newer build that wrote it",
		e.Path, e.Version, e.Supported)
}

// FailedError is the sticky error of a journal or a store after a write or a flush failed. What the page cache or the
// device holds of that file can't be trusted any more, so nothing further is acknowledged and the operation is never
// retried: restart, which reads everything again from the disk. errors.Is(err, ErrFailed) is true for it.
type FailedError struct {
	// Op is what was being done, "write round" for one.
	Op string
	// Path is the file.
	Path string
	// Err is the disk's error.
	Err error
}

func (e *FailedError) Error() string {
	return fmt.Sprintf("storage failed: %s %s: %v; nothing more is acknowledged until a restart has read it again",
		e.Op, e.Path, e.Err)
}

// Unwrap returns the disk's error.
func (e *FailedError) Unwrap() error { return e.Err }

// Is makes every FailedError match ErrFailed.
func (e *FailedError) Is(target error) bool { return target == ErrFailed }
