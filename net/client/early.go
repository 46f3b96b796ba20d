package client

import (
	"encoding/binary"
	"slices"

	"github.com/mortarmq/mortarmq/engine/coord"
	"github.com/mortarmq/mortarmq/protocol"
)

// early is a subscription whose SUB was accepted before its turn: an earlier request of the connection has no answer yet.
// The client can't know it, or may even take its id for that of one that has ended, so its messages wait behind the answer.
type early struct {
	req          uint64 // the SUB
	subscription uint16
	messages     outQueue
}

// overtakes is told of an answer that has to wait for its turn. Like everything here it runs under the mutex.
func (c *conn) overtakes(req uint64, frame []byte) {
	if len(frame) == protocol.SubResultFrameLen && frame[protocol.LengthSize] == byte(protocol.OpOK) && frame[protocol.HeaderSize] == byte(protocol.OpSub) {
		c.early = append(c.early, early{req: req, subscription: binary.BigEndian.Uint16(frame[protocol.OKEmptyFrameLen:])})
	}
}

// passed is told that the answer to req is in the queue.
func (c *conn) passed(req uint64) {
	for i := range c.early {
		if c.early[i].req == req {
			c.out.take(&c.early[i].messages)
			c.early = slices.Delete(c.early, i, i+1)
			return
		}
	}
}

// queueOf returns the queue for pushed frames, which are of one subscription if they are messages.
func (c *conn) queueOf(frames []byte) *outQueue {
	if len(c.early) == 0 || len(frames) < protocol.HeaderSize+2 || frames[protocol.LengthSize] != byte(protocol.OpMsg) {
		return &c.out
	}
	id := binary.BigEndian.Uint16(frames[protocol.HeaderSize:])
	for i := len(c.early) - 1; i >= 0; i-- { // an id may have been given out twice: the last one counts
		if c.early[i].subscription == id {
			return &c.early[i].messages
		}
	}
	return &c.out
}

// toSend returns the number of queued bytes and, of these, of those in blocks.
func (c *conn) toSend() (bytes, copied int) {
	bytes, copied = c.out.bytes, c.out.copied
	for i := range c.early {
		bytes += c.early[i].messages.bytes
		copied += c.early[i].messages.copied
	}
	return bytes, copied
}

// dropEarly empties all queues; owners as in outQueue.consume.
func (c *conn) dropEarly(done []coord.Releaser) []coord.Releaser {
	for i := range c.early {
		done = c.early[i].messages.drop(done)
	}
	c.early = nil
	return done
}
