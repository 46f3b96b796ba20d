package client

import (
	"context"
	"sync/atomic"

	"github.com/mortarmq/mortarmq/protocol"
)

// Message is a delivered message. Exactly one of Ack, Nack and their variants should end it; Run does that by itself.
//
// Key and Value belong to the application: they stay valid and are never reused. Small messages that arrived together
// share one block of memory, so keeping one of them keeps some 64 KiB; copy what is to be kept for long.
type Message struct {
	Topic     string
	Partition uint16
	// Sequence is the message's number in the partition. With Topic and Partition it names the message; a redelivery has
	// the same.
	Sequence uint64
	Key      []byte
	Value    []byte
	// Attempt counts from 1: one more than the attempts on record that failed.
	Attempt     uint16
	ProducerID  uint64
	ProducerSeq uint64
	// Redriven says that the message was put back from a dead-letter topic: an earlier one with the same key and value
	// failed.
	Redriven bool

	consumer       *Consumer
	part           *assigned
	deliveryID     uint64
	ownershipEpoch uint64
	cost           uint32
	born           uint64 // tick of the delivery
	renewed        uint64 // tick of the last PROGRESS, or of the delivery
	ended          atomic.Bool
	prev, next     *Message // in part's list of unfinished messages
}

// Ack says that the message is done. It is sent with others soon after, without waiting for the broker's answer: should
// the connection break before, the broker delivers the message again. ErrDeliveryEnded means that it does so anyway, or
// that the message was ended before.
func (m *Message) Ack() error {
	return m.consumer.finish(m, protocol.OpAck, 0, nil)
}

// AckSync is Ack that waits until the broker has recorded it.
func (m *Message) AckSync(ctx context.Context) error {
	answer := make(chan error, 1)
	if err := m.consumer.finish(m, protocol.OpAck, 0, answer); err != nil {
		return err
	}
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Nack refuses the message: protocol.NackRetryLater has it delivered again after a pause, protocol.NackRetryNow at once,
// protocol.NackReject moves it to the group's dead-letter topic. Like Ack it doesn't wait for the answer.
func (m *Message) Nack(reason protocol.NackReason) error {
	return m.consumer.finish(m, protocol.OpNack, reason, nil)
}

// Progress renews the lease of a message that takes long. The library does so by itself, up to
// ConsumerOptions.MaxProcessing; calling Progress starts that time anew.
func (m *Message) Progress() error { return m.consumer.progress(m) }

// Active reports whether the delivery is still this consumer's to finish. It turns false when the message is ended, its
// partition is revoked or the connection is lost; then work on it is better abandoned.
func (m *Message) Active() bool { return !m.ended.Load() }
