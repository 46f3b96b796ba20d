// Package coord is the goroutine beside the hot path: it folds the metadata log, runs the consumer groups and the
// delivery ledger, and sends messages to consumers. The decisions are made by the pure packages engine/metadata,
// engine/group and engine/ledger; this one gives them events and carries out their effects.
package coord

import (
	"sync/atomic"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// Client is the broker's handle on one client connection; the network layer implements it. Every method may be called
// from any goroutine, none blocks, and all are no-ops once the connection is closed.
type Client interface {
	// ID is unique for the life of the process.
	ID() uint64
	// Complete gives the answer to request req, a whole OK or ERR frame, which is copied. Answers leave in the order of
	// the requests whatever the order of the calls. Each request is completed exactly once.
	Complete(req uint64, frame []byte)
	// Push queues whole frames (MSG, NOTICE, ERR) that need not wait for earlier answers. The bytes are copied.
	Push(frames []byte)
	// PushOwned is Push without the copy: frames stay valid until owner.Release is called, once, when the bytes have
	// left or the connection is gone.
	PushOwned(frames []byte, owner Releaser)
	// PushValue queues one frame in two pieces with nothing between them: head, which is copied, and value, which stays
	// valid until owner.Release is called, once.
	PushValue(head, value []byte, owner Releaser)
	// Flush hands what was queued to the socket. Call it once per batch, not per frame.
	Flush()
	// Outstanding is the number of pushed bytes that the socket has not taken yet. Above OutboundPause the pusher
	// stops and is called back by Coordinator.Writable.
	Outstanding() int
	// Pulls is the number of the connection's PULLs that wait. The coordinator counts them there; the event loop reads it to
	// know whether a request interrupts one.
	Pulls() *atomic.Int32
	// Shut sends an ERR with code, after the answers that are ready, and closes the connection.
	Shut(code protocol.ErrorCode, op protocol.Op, text string)
}

// Releaser is memory with a reference count.
type Releaser interface{ Release() }

// OutboundPause is the number of outstanding pushed bytes of a connection above which delivery to it pauses.
const OutboundPause = 1 << 20

// ZeroCopyMin is the size in bytes from which a message's value is sent from where it lies instead of being copied.
const ZeroCopyMin = 16 << 10

// Log takes records for the journal; the engine implements it over its shards. A proposed record rides in the next round
// of its journal and comes back, committed, as an entry of a Round, in the order of the proposals of its stream, or not at
// all if the journal fails (the broker then stops serving). value is borrowed until the call returns. proposal is kept
// in the record's producer_seq field so that the proposer recognises its own record.
type Log interface {
	ProposeMetadata(proposal uint64, value []byte) error
	ProposeLedger(journal int, proposal uint64, value []byte) error
	// ProposeMessage appends a message to a partition: it gets the next sequence there, whatever else is published. Its
	// value is head and value together; key, head and value are borrowed until the call returns. A message that can't be
	// stored, for want of space too, comes back through Coordinator.Refused, in the order of the proposals.
	ProposeMessage(topic, partition uint16, proposal uint64, key, head, value []byte) error
	// Flush has the journals look at what was proposed: until then they may sleep on.
	Flush()
}

// Store is the cold side: reads of what is no longer in memory and snapshots of the folded state. Calls may come from
// the coordinator's goroutine only, or whoever lends it a thread; results come back through Coordinator.ReadDone.
type Store interface {
	Read(journal int, req *wal.ReadRequest)
	SaveSnapshot(journal int, kind wal.SnapshotKind, position uint64, data []byte)
	DropTopic(topic uint16)
}

// Placement says which journal a partition lives in.
type Placement func(topic, partition uint16) int
