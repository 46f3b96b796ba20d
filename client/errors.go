package client

import (
	"errors"
	"strings"

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

	errConnectionLost = errors.New("client: connection lost")
)

// fatal reports whether reconnecting cannot help: the broker does not accept this client.
func fatal(err error) bool {
	code, ok := protocol.CodeOf(err)
	if !ok {
		return false
	}
	return code == protocol.CodeAuthFailed || code == protocol.CodeUnsupportedVersion || code == protocol.CodeUnknownOp
}

// leaderOf takes the leader's address out of the text of a follower's refusal, "leader=<node_id> <host:port>".
func leaderOf(err error) (addr string, redirected bool) {
	var refusal *Error
	if !errors.As(err, &refusal) || refusal.Code != protocol.CodeStaleLeaderEpoch {
		return "", false
	}
	_, rest, found := strings.Cut(refusal.Message, "leader=")
	if !found {
		return "", true
	}
	if words := strings.Fields(rest); len(words) >= 2 && strings.Contains(words[1], ":") {
		return words[1], true
	}
	return "", true
}
