package client

import (
	"errors"

	"github.com/mortarmq/mortarmq/protocol"
)

// Error is the broker's refusal of a request. errors.Is matches it by its code:
//
//	if errors.Is(err, client.ErrUnknownTopic) { ... }
type Error = protocol.Error

// The refusals that applications meet most often; any protocol.Code... constant works with errors.Is as well.
const (
	ErrUnknownTopic        = protocol.CodeUnknownTopic
	ErrInvalidTopic        = protocol.CodeInvalidTopic
	ErrTopicExistsMismatch = protocol.CodeTopicExistsMismatch
	ErrAuthFailed          = protocol.CodeAuthFailed
	ErrBackpressure        = protocol.CodeBackpressure
	ErrReadOnly            = protocol.CodeReadOnlyDegraded
	ErrUnknownGroup        = protocol.CodeUnknownGroup
	ErrGroupMemberLimit    = protocol.CodeGroupMemberLimit
	ErrUnknownDelivery     = protocol.CodeUnknownDelivery
)

// Errors that arise in the library itself.
var (
	// ErrClosed is returned after Close, and given to what was still unanswered then.
	ErrClosed = errors.New("client: closed")
	// ErrKeyTooLarge refuses a key of more than protocol.MaxKeyLen bytes before anything is sent.
	ErrKeyTooLarge = errors.New("client: the key is longer than 255 bytes")
	// ErrValueTooLarge refuses a value of more than protocol.MaxValueLen bytes before anything is sent.
	ErrValueTooLarge = errors.New("client: the value is longer than 16776192 bytes")
	// ErrDeliveryTimeout ends a publish that got no final answer within ProducerOptions.DeliveryTimeout. The broker may
	// or may not have stored it. It wraps the last error.
	ErrDeliveryTimeout = errors.New("client: no final answer in time; the message may or may not be stored")
	// ErrDeliveryEnded is returned by Ack, Nack and Progress when the delivery is over already: answered before, its
	// partition revoked, its lease expired, or its connection lost. The broker redelivers the message if it must.
	ErrDeliveryEnded = errors.New("client: this delivery is over")
	// ErrReject, returned (or wrapped) by a Handler, sends the message straight to the group's dead-letter topic.
	ErrReject = errors.New("client: message rejected")

	// ErrConnectionLost is returned by AckSync when the connection broke before the broker's answer: the ACK may or may not
	// count, and the broker delivers the message again if it does not.
	ErrConnectionLost = errors.New("client: connection lost")
)

// fatal reports whether reconnecting to the same node cannot help: it does not accept this client, or serves nobody until
// an operator has repaired it.
func fatal(err error) bool {
	code, ok := protocol.CodeOf(err)
	if !ok {
		return false
	}
	switch code {
	case protocol.CodeAuthFailed, protocol.CodeUnsupportedVersion, protocol.CodeUnknownOp, protocol.CodeMetadataQuarantined:
		return true
	default:
		return false
	}
}
