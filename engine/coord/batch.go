package coord

import (
	"sync"

	"github.com/mortarmq/mortarmq/protocol"
)

// Request is one request of a client on its way to the coordinator.
type Request struct {
	Client Client
	// Req is what Client.Complete wants back.
	Req uint64
	Op  protocol.Op
	// Off and Len locate the payload in the batch's Data.
	Off, Len uint32
}

// Batch carries the requests of one readable event: one hand-over, one lock, one wake-up.
type Batch struct {
	Requests []Request
	Data     []byte
}

// maxPooledBatchBytes keeps a batch that once held a huge frame from occupying the pool for ever.
const maxPooledBatchBytes = 1 << 20

var batches = sync.Pool{New: func() any { return new(Batch) }}

// GetBatch returns an empty batch from the pool.
func GetBatch() *Batch { return batches.Get().(*Batch) }

// PutBatch gives a batch back; the caller must not touch it afterwards.
func PutBatch(b *Batch) {
	clear(b.Requests) // clients must not be kept alive
	b.Requests = b.Requests[:0]
	b.Data = b.Data[:0]
	if cap(b.Data) <= maxPooledBatchBytes {
		batches.Put(b)
	}
}

// Add appends a request. payload is borrowed: it is copied.
func (b *Batch) Add(c Client, req uint64, op protocol.Op, payload []byte) {
	b.Requests = append(b.Requests, Request{Client: c, Req: req, Op: op, Off: uint32(len(b.Data)), Len: uint32(len(payload))})
	b.Data = append(b.Data, payload...)
}

// Payload returns the payload of one of the batch's requests; it is valid until PutBatch.
func (b *Batch) Payload(r *Request) []byte { return b.Data[r.Off : r.Off+r.Len : r.Off+r.Len] }
