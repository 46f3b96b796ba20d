package protocol

import (
	"errors"
	"fmt"
	"unicode/utf8"
)

// codeInfo is what there is to know about a code.
type codeInfo struct {
	name      string
	text      string // the default text of ERR: what the user does about it
	closes    bool
	retriable bool
}

// codeTable holds every published code. A test compares it with the constants.
var codeTable = map[ErrorCode]codeInfo{
	CodeBadLength:          {name: "BAD_LENGTH", closes: true, text: "the frame length is outside 1..16777216: fix the client"},
	CodeUnknownOp:          {name: "UNKNOWN_OP", closes: true, text: "the operation is not part of protocol version 1: upgrade the broker or fix the client"},
	CodeMalformedPayload:   {name: "MALFORMED_PAYLOAD", closes: true, text: "the payload does not have the format of its operation: fix or upgrade the client"},
	CodeUnsupportedVersion: {name: "UNSUPPORTED_VERSION", closes: true, text: "this broker speaks protocol version 1 only: use a matching client"},
	CodeNotAuthenticated:   {name: "NOT_AUTHENTICATED", closes: true, text: "send CONNECT first"},
	CodeAuthFailed:         {name: "AUTH_FAILED", closes: true, text: "authentication failed: check the token"},
	CodeAuthTimeout:        {name: "AUTH_TIMEOUT", closes: true, text: "no valid CONNECT in time: send CONNECT right after connecting"},
	CodeUnknownTopic:       {name: "UNKNOWN_TOPIC", text: "the topic does not exist: create it with 'mortarmq topics create NAME' (DECLARE)"},
	CodeUnknownPartition:   {name: "UNKNOWN_PARTITION", text: "the topic has no such partition: use the count that DECLARE returned"},
	CodeInternal:           {name: "INTERNAL", text: "internal error: report it with the broker's log"},
	CodeInvalidTopic:       {name: "INVALID_TOPIC", text: "the topic name is not allowed: 1-255 bytes of UTF-8, tokens separated by '.', no leading '$', none of '*', '>', '#', spaces or control characters"},

	CodeSeqGap:             {name: "SEQ_GAP", text: "producer_seq jumps ahead: send the missing ones first, or start again at 1 with a new producer_id"},
	CodeSeqExpired:         {name: "SEQ_EXPIRED", text: "producer_seq is older than the window: the message was stored; start again at 1 with a new producer_id if it was new"},
	CodeProducerEpochStale: {name: "PRODUCER_EPOCH_STALE", text: "the producer's view of the leader is old: find the leader and register again"},
	CodeProducerSeqInvalid: {name: "PRODUCER_SEQ_INVALID", text: "producer_seq without producer_id: set both, or neither"},

	CodeStaleGeneration:      {name: "STALE_GENERATION", text: "the group has moved on: wait for NOTICE and use its epochs"},
	CodeNotOwner:             {name: "NOT_OWNER", text: "the partition belongs to another member: stop working on it"},
	CodeStaleOwner:           {name: "STALE_OWNER", text: "the ownership epoch is old: subscribe again"},
	CodeUnknownDelivery:      {name: "UNKNOWN_DELIVERY", text: "the delivery is unknown or already finished: nothing was changed"},
	CodeGroupMemberLimit:     {name: "GROUP_MEMBER_LIMIT", text: "the group has as many members as it may have: run fewer consumers"},
	CodeGroupAssignmentLimit: {name: "GROUP_ASSIGNMENT_LIMIT", text: "the group has as many assignments as it may have: run fewer consumers or use fewer partitions"},
	CodeUnknownMember:        {name: "UNKNOWN_MEMBER", text: "the member was removed from the group: subscribe again"},
	CodeMaxWaitingPulls:      {name: "MAX_WAITING_PULLS", retriable: true, text: "two PULLs are waiting already: wait for one of them"},

	CodeDLQPathOverflow: {name: "DLQ_PATH_OVERFLOW", text: "a message of a dead-letter topic ran out of attempts: it stays in its topic; look with 'mortarmq dlq list'"},
	CodeDLQUnavailable:  {name: "DLQ_UNAVAILABLE", retriable: true, text: "the dead-letter topic cannot be written: the source message is kept; back off"},

	CodeTopicExistsMismatch: {name: "TOPIC_EXISTS_MISMATCH", text: "the topic exists with another partition count: use that one, or another name"},
	CodeGroupExistsMismatch: {name: "GROUP_EXISTS_MISMATCH", text: "the group exists with other properties: use those, or another name"},
	CodeMetadataReadOnly:    {name: "METADATA_READ_ONLY", retriable: true, text: "topics and groups cannot be changed at the moment: try again later"},
	CodeMetadataQuarantined: {name: "METADATA_QUARANTINED", text: "the metadata log failed its checks and is in data/metadata/quarantine: an operator must reconcile it"},
	CodeUnknownGroup:        {name: "UNKNOWN_GROUP", text: "the group does not exist: subscribe first"},
	CodeMutationFenced:      {name: "MUTATION_FENCED", retriable: true, text: "a newer change came first: issue the request again"},

	CodeBackpressure:         {name: "BACKPRESSURE", retriable: true, text: "the broker has no room for more at the moment: back off and send it again"},
	CodeQuotaExceeded:        {name: "QUOTA_EXCEEDED", retriable: true, text: "a quota is used up: slow down"},
	CodeRateLimited:          {name: "RATE_LIMITED", retriable: true, text: "too many requests: back off"},
	CodeStorageHighWatermark: {name: "STORAGE_HIGH_WATERMARK", retriable: true, text: "the broker's disk is nearly full: free some space; try again later"},
	CodeMessageExceedsCredit: {name: "MESSAGE_EXCEEDS_CREDIT", text: "the next message is larger than the whole credit window: raise credit_bytes"},
	CodeNoCredit:             {name: "NO_CREDIT", text: "no credit is left: send CREDIT"},
	CodeSlowConsumer:         {name: "SLOW_CONSUMER", closes: true, text: "the consumer read nothing for too long: reconnect and read faster"},

	CodeQuorumLost:              {name: "QUORUM_LOST", retriable: true, text: "a majority of the nodes is out of reach: check the followers; try again later"},
	CodeReadOnlyDegraded:        {name: "READ_ONLY_DEGRADED", retriable: true, text: "no quorum in time, the broker is read-only: try again with the same producer_seq"},
	CodeInSyncReplicasNotEnough: {name: "IN_SYNC_REPLICAS_NOT_ENOUGH", retriable: true, text: "no follower is near enough: repair a follower; writes resume by themselves"},
	CodeFollowerLag:             {name: "FOLLOWER_LAG", text: "a follower lags behind: watch its catch-up"},
	CodeStaleLeaderEpoch:        {name: "STALE_LEADER_EPOCH", text: "this node is not the leader: connect to the leader"},
	CodeLeaseExpired:            {name: "LEASE_EXPIRED", retriable: true, text: "the leader's lease ran out: try again when there is a leader"},
	CodeCatchupRequired:         {name: "CATCHUP_REQUIRED", text: "the node must catch up first: wait for it"},
	CodeLogGap:                  {name: "LOG_GAP", text: "the log has a gap: the node must catch up"},
	CodeDivergentCommitted:      {name: "DIVERGENT_COMMITTED", text: "logs differ below the commit point, the partition is not served: an operator must reconcile it"},
	CodeQuorumRecovered:         {name: "QUORUM_RECOVERED", text: "the quorum is back"},
	CodeUncleanElectionRejected: {name: "UNCLEAN_ELECTION_REJECTED", text: "the election would lose committed records and was refused: bring a node with the data back"},
}

// Known reports whether c is a published code.
func (c ErrorCode) Known() bool { _, ok := codeTable[c]; return ok }

// Name returns the published name, such as UNKNOWN_TOPIC; for an unknown code its number.
func (c ErrorCode) Name() string {
	if info, ok := codeTable[c]; ok {
		return info.name
	}
	return fmt.Sprintf("0x%04X", uint16(c))
}

// Text returns the default text: what happened and what to do.
func (c ErrorCode) Text() string {
	if info, ok := codeTable[c]; ok {
		return info.text
	}
	return "unknown error code: upgrade the client"
}

// Closes reports whether the broker closes the connection after an ERR with this code.
func (c ErrorCode) Closes() bool { return codeTable[c].closes }

// Retriable reports whether the same request can succeed later, unchanged and on the same connection, without anybody
// fixing the client. Two answers that need more than waiting are not: CodeSeqGap (the earlier publish comes first) and
// CodeStaleLeaderEpoch (the leader is elsewhere).
func (c ErrorCode) Retriable() bool { return codeTable[c].retriable }

// Error returns name, number and default text.
func (c ErrorCode) Error() string {
	return fmt.Sprintf("%s (0x%04X): %s", c.Name(), uint16(c), c.Text())
}

// Error is an ERR frame as a Go error. errors.Is(err, CodeUnknownTopic) matches it by its code.
type Error struct {
	Code      ErrorCode
	RequestOp Op     // what it answers; 0 or an undefined op if nothing that could be decoded
	Message   string // the broker's text; may be empty
}

// Error returns the operation, the name and number of the code, and the broker's text (or the code's default text).
func (e *Error) Error() string {
	text := e.Message
	if text == "" {
		text = e.Code.Text()
	}
	if !e.RequestOp.Valid() {
		return fmt.Sprintf("%s (0x%04X): %s", e.Code.Name(), uint16(e.Code), text)
	}
	return fmt.Sprintf("%v: %s (0x%04X): %s", e.RequestOp, e.Code.Name(), uint16(e.Code), text)
}

// Unwrap returns the code.
func (e *Error) Unwrap() error { return e.Code }

// CodeOf finds the code that err wraps.
func CodeOf(err error) (ErrorCode, bool) {
	var code ErrorCode
	if errors.As(err, &code) {
		return code, true
	}
	return 0, false
}

// truncateMessage cuts s to MaxErrMessage bytes without splitting a rune.
func truncateMessage(s string) string {
	if len(s) <= MaxErrMessage {
		return s
	}
	n := MaxErrMessage
	for n > MaxErrMessage-utf8.UTFMax && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}
