package client

import (
	"context"
	"sync"

	"github.com/mortarmq/mortarmq/protocol"
)

// Record is a message to publish. Key and Value are borrowed for the duration of the call only.
type Record struct {
	// Key decides the partition: messages with the same key stay in order. Messages with an empty key are spread over
	// the partitions. At most protocol.MaxKeyLen bytes.
	Key []byte
	// Value is at most protocol.MaxValueLen bytes.
	Value []byte
	// Redriven marks a message that is put back from a dead-letter topic; see Message.Redriven.
	Redriven bool
	// Tag is not sent; it comes back in Result.Tag.
	Tag uint64
}

// Result tells where a message was stored.
type Result struct {
	Partition uint16
	// Sequence is the message's number in the partition. It is 0 in the one case in which the broker knows that it
	// stored the message but not where any more: a repeated publish that fell out of its deduplication window.
	Sequence    uint64
	Durability  protocol.Durability // what was reached
	LeaderEpoch uint64
	CommitSeq   uint64 // below quorum durability, Sequence is provisional until this passes it
	// Deduplicated says that this publish had been stored by an earlier attempt already.
	Deduplicated bool
	Tag          uint64 // of the Record
}

// Future is the pending result of SendAsync.
type Future struct {
	mu       sync.Mutex
	complete bool
	ch       chan struct{} // made when somebody asks for it; nil before
	result   Result
	err      error
}

// closedChan is the Done channel of futures that were complete before anybody asked.
var closedChan = func() chan struct{} {
	ch := make(chan struct{})
	close(ch)
	return ch
}()

// Done returns a channel that is closed when the result is there.
func (f *Future) Done() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ch == nil {
		if f.complete {
			return closedChan
		}
		f.ch = make(chan struct{})
	}
	return f.ch
}

// Wait waits for the result or the end of ctx. After ctx's end the message is still on its way: wait again, or use Done.
func (f *Future) Wait(ctx context.Context) (Result, error) {
	select {
	case <-f.Done():
		return f.result, f.err
	case <-ctx.Done():
		return Result{}, ctx.Err()
	}
}

func (f *Future) finish(r Result, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.result, f.err, f.complete = r, err, true
	if f.ch != nil {
		close(f.ch)
	}
}

// completion is a result on its way to whoever sent the message.
type completion struct {
	future *Future
	f      func(Result, error)
	result Result
	err    error
}

func (c *completion) deliver() {
	if c.future != nil {
		c.future.finish(c.result, c.err)
	}
	if c.f != nil {
		c.f(c.result, c.err)
	}
}
