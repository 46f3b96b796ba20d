package wal

import (
	"fmt"

	"github.com/mortarmq/mortarmq/ring"
)

// Sequence numbers the records of one stream, from 1, without gaps, never going back.
type Sequence uint64

// Epoch counts leaders; a single node opens a new one at every start.
type Epoch uint32

// RoundNumber numbers the rounds of one journal, from 1, without gaps across files and restarts.
type RoundNumber uint64

// StreamKind tells what a stream of the journal holds.
type StreamKind uint8

const (
	// Messages is a partition's log; its files are segments (MMQS).
	Messages StreamKind = iota + 1
	// Ledger is the delivery ledger of a journal's partitions; its file is delivery.mql (MMLQ).
	Ledger
	// Metadata is the metadata mutation log, in journal 0 only (MMML).
	Metadata
	// Replica has the positions of a journal's rounds in their replicated log, see LogPosition. It has no files.
	Replica
)

// StreamID names one stream of a journal. Topic and Partition are 0 for all but Messages.
type StreamID struct {
	Kind      StreamKind
	Topic     uint16
	Partition uint16
}

func (s StreamID) String() string {
	switch s.Kind {
	case Messages:
		return fmt.Sprintf("topic %d partition %d", s.Topic, s.Partition)
	case Ledger:
		return "ledger"
	case Metadata:
		return "metadata"
	case Replica:
		return "log position"
	default:
		return fmt.Sprintf("stream kind %d", s.Kind)
	}
}

// Disk is all that this package needs of a disk. Operations complete on the goroutine that calls Wait (or its owner's
// Poll); *ring.Ring is one, the simulated disk another.
type Disk interface {
	// Submit starts op; ownership rules are those of ring.Op. It never blocks and never fails: errors come in op.Err.
	Submit(op *ring.Op)
	// Poll runs the Done of every operation that has completed, without blocking, and returns their number.
	Poll() int
}

// Waiter is a Disk whose owner may block for completions; recovery and clean shutdown need it.
type Waiter interface {
	Disk
	// WaitOne blocks until at least one operation has completed and its Done has run.
	WaitOne() error
}

// Entry is a run of consecutive records of one stream inside a round.
type Entry struct {
	Stream StreamID
	First  Sequence
	Count  uint32
	// Off and Len locate the encoded records, back to back, in the round's bytes.
	Off, Len uint32
}

// Last returns the sequence of the entry's last record.
func (e *Entry) Last() Sequence { return e.First + Sequence(e.Count) - 1 }
