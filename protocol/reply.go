package protocol

const (
	declareResultLen = 2 + 2 + 1
	pubResultLen     = 8 + 1 + 8 + 8 + 1
	subResultLen     = 2 + 8 + 4 + 4
	creditResultLen  = 2 + 4 + 2 + 4 + 8

	// OKEmptyFrameLen is the size of an OK frame with an empty result, its length field included.
	OKEmptyFrameLen = HeaderSize + 1 + 4
	// DeclareResultFrameLen is the size of DECLARE's OK frame, its length field included.
	DeclareResultFrameLen = OKEmptyFrameLen + declareResultLen
	// PubResultFrameLen is the size of PUB's OK frame, its length field included.
	PubResultFrameLen = OKEmptyFrameLen + pubResultLen
	// SubResultFrameLen is the size of SUB's OK frame, its length field included.
	SubResultFrameLen = OKEmptyFrameLen + subResultLen
	// CreditResultFrameLen is the size of CREDIT's OK frame, its length field included.
	CreditResultFrameLen = OKEmptyFrameLen + creditResultLen
)

// appendOKHeader starts an OK frame whose result will have exactly resultLen bytes.
func appendOKHeader(dst []byte, op Op, resultLen int) []byte {
	dst = appendHeader(dst, OpOK, 1+4+resultLen)
	dst = append(dst, byte(op))
	return be.AppendUint32(dst, uint32(resultLen))
}

// AppendOKEmpty appends the OK frame that answers op with an empty result.
func AppendOKEmpty(dst []byte, op Op) []byte { return appendOKHeader(dst, op, 0) }

// AppendFrame appends the whole OK frame. Result is at most MaxFrameLen - 6 bytes long.
func (m *OKFrame) AppendFrame(dst []byte) []byte {
	return append(appendOKHeader(dst, m.RequestOp, len(m.Result)), m.Result...)
}

// Decode reads an OK payload. Result aliases it.
func (m *OKFrame) Decode(payload []byte) error {
	r := reader{b: payload, op: OpOK}
	m.RequestOp = Op(r.u8("request_op"))
	m.Result = r.bytes("result", int(r.u32("result_len")), 0, MaxFrameLen, 4)
	return r.end()
}

// AppendErr appends an ERR frame. message is cut to MaxErrMessage bytes, never inside a rune; an empty one is replaced
// by the code's default text. requestOp is the op byte of what it answers, as it was received; 0 if there was none.
func AppendErr(dst []byte, code ErrorCode, requestOp Op, message string) []byte {
	if message == "" {
		message = code.Text()
	}
	message = truncateMessage(message)
	dst = appendErrHeader(dst, code, requestOp, len(message))
	return append(dst, message...)
}

func appendErrHeader(dst []byte, code ErrorCode, requestOp Op, messageLen int) []byte {
	dst = appendHeader(dst, OpErr, 2+1+2+messageLen)
	dst = be.AppendUint16(dst, uint16(code))
	dst = append(dst, byte(requestOp))
	return be.AppendUint16(dst, uint16(messageLen))
}

// AppendFrame appends the whole ERR frame. Message has at most MaxErrMessage bytes; AppendErr cuts a longer one.
func (m *ErrFrame) AppendFrame(dst []byte) []byte {
	must(OpErr, "message", len(m.Message), MaxErrMessage)
	return append(appendErrHeader(dst, m.Code, m.RequestOp, len(m.Message)), m.Message...)
}

// Decode reads an ERR payload. Message aliases it. Codes that are not published yet are accepted.
func (m *ErrFrame) Decode(payload []byte) error {
	r := reader{b: payload, op: OpErr}
	m.Code = ErrorCode(r.u16("code"))
	m.RequestOp = Op(r.u8("request_op"))
	m.Message = r.bytes("message", int(r.u16("message_len")), 0, MaxErrMessage, 2)
	return r.end()
}

// Err returns the frame as an error, with a copy of the message.
func (m *ErrFrame) Err() *Error {
	return &Error{Code: m.Code, RequestOp: m.RequestOp, Message: string(m.Message)}
}

const (
	msgFixed  = 2 + 2 + 2 + 8 + 8 + 2 + 8 + 8 + 8 + 2 + 2 // up to and including key_len
	msgLayout = msgFixed + 4                              // without key and value
)

// MsgHeaderLen returns the size of a MSG frame up to and including value_len: what AppendHeader appends.
func MsgHeaderLen(keyLen int) int { return HeaderSize + msgLayout + keyLen }

// MsgFrameLen returns the size of a whole MSG frame, its length field included.
func MsgFrameLen(keyLen, valueLen int) int { return MsgHeaderLen(keyLen) + valueLen }

// MaxMsgValueLen is the largest value of a MSG: a dead letter's envelope header may come on top of MaxValueLen.
const MaxMsgValueLen = MaxValueLen + 512

// AppendFrame appends the whole MSG frame. Key has at most MaxKeyLen bytes, Value at most MaxMsgValueLen.
func (m *Msg) AppendFrame(dst []byte) []byte {
	return append(m.AppendHeader(dst, len(m.Value)), m.Value...)
}

// AppendHeader appends a MSG frame up to and including value_len; the caller sends valueLen bytes of value behind it,
// from wherever they are. m.Value is not looked at.
func (m *Msg) AppendHeader(dst []byte, valueLen int) []byte {
	must(OpMsg, "key", len(m.Key), MaxKeyLen)
	must(OpMsg, "value", valueLen, MaxMsgValueLen)
	dst = appendHeader(dst, OpMsg, msgLayout+len(m.Key)+valueLen)
	dst = be.AppendUint16(dst, m.SubscriptionID)
	dst = be.AppendUint16(dst, m.TopicID)
	dst = be.AppendUint16(dst, m.Partition)
	dst = be.AppendUint64(dst, m.Sequence)
	dst = be.AppendUint64(dst, m.DeliveryID)
	dst = be.AppendUint16(dst, m.Attempt)
	dst = be.AppendUint64(dst, m.OwnershipEpoch)
	dst = be.AppendUint64(dst, m.ProducerID)
	dst = be.AppendUint64(dst, m.ProducerSeq)
	dst = be.AppendUint16(dst, m.Flags)
	dst = be.AppendUint16(dst, uint16(len(m.Key)))
	dst = append(dst, m.Key...)
	return be.AppendUint32(dst, uint32(valueLen))
}

var msgFields = []field{{"subscription_id", 2}, {"topic_id", 2}, {"partition", 2}, {"sequence", 8}, {"delivery_id", 8},
	{"attempt", 2}, {"ownership_epoch", 8}, {"producer_id", 8}, {"producer_seq", 8}, {"flags", 2}, {"key_len", 2}}

// Decode reads a MSG payload. Key and Value alias it. Flags are passed on as they are: a broker may set bits that an
// older client does not know, as long as they declare no tail.
func (m *Msg) Decode(payload []byte) error {
	r := reader{b: payload, op: OpMsg}
	h := r.fixed(msgFixed, msgFields)
	if h == nil {
		return r.end()
	}
	m.SubscriptionID = be.Uint16(h[0:])
	m.TopicID = be.Uint16(h[2:])
	m.Partition = be.Uint16(h[4:])
	m.Sequence = be.Uint64(h[6:])
	m.DeliveryID = be.Uint64(h[14:])
	m.Attempt = be.Uint16(h[22:])
	m.OwnershipEpoch = be.Uint64(h[24:])
	m.ProducerID = be.Uint64(h[32:])
	m.ProducerSeq = be.Uint64(h[40:])
	m.Flags = be.Uint16(h[48:])
	m.Key = r.bytes("key", int(be.Uint16(h[50:])), 0, MaxKeyLen, 2)
	m.Value = r.bytes("value", int(r.u32("value_len")), 0, MaxMsgValueLen, 4)
	return r.end()
}

// AppendOK appends the whole OK frame that answers DECLARE.
func (m *DeclareResult) AppendOK(dst []byte) []byte {
	return m.append(appendOKHeader(dst, OpDeclare, declareResultLen))
}

func (m *DeclareResult) append(dst []byte) []byte {
	dst = be.AppendUint16(dst, m.TopicID)
	dst = be.AppendUint16(dst, m.Partitions)
	existed := byte(0)
	if m.Existed {
		existed = 1
	}
	return append(dst, existed)
}

// Decode reads the result of DECLARE's OK.
func (m *DeclareResult) Decode(result []byte) error {
	r := reader{b: result, op: OpDeclare, result: true}
	m.decode(&r)
	return r.end()
}

func (m *DeclareResult) decode(r *reader) {
	m.TopicID = r.u16("topic_id")
	m.Partitions = r.u16("partition_count")
	m.Existed = r.atMost("created", 1) == 1
}

// AppendOK appends the whole OK frame that answers PUB.
func (m *PubResult) AppendOK(dst []byte) []byte {
	dst = appendOKHeader(dst, OpPub, pubResultLen)
	dst = be.AppendUint64(dst, m.Sequence)
	dst = append(dst, byte(m.Durability))
	dst = be.AppendUint64(dst, m.LeaderEpoch)
	dst = be.AppendUint64(dst, m.CommitSeq)
	return append(dst, m.Flags)
}

// Decode reads the result of PUB's OK.
func (m *PubResult) Decode(result []byte) error {
	r := reader{b: result, op: OpPub, result: true}
	m.Sequence = r.u64("sequence")
	m.Durability = Durability(r.atMost("durability", uint8(DurabilityQuorum)))
	m.LeaderEpoch = r.u64("leader_epoch")
	m.CommitSeq = r.u64("commit_seq")
	m.Flags = r.u8("result_flags")
	return r.end()
}

// AppendOK appends the whole OK frame that answers SUB.
func (m *SubResult) AppendOK(dst []byte) []byte {
	dst = appendOKHeader(dst, OpSub, subResultLen)
	dst = be.AppendUint16(dst, m.SubscriptionID)
	dst = be.AppendUint64(dst, m.MemberID)
	dst = be.AppendUint32(dst, m.MembershipEpoch)
	return be.AppendUint32(dst, m.AssignmentEpoch)
}

// Decode reads the result of SUB's OK.
func (m *SubResult) Decode(result []byte) error {
	r := reader{b: result, op: OpSub, result: true}
	m.SubscriptionID = r.u16("subscription_id")
	m.MemberID = r.u64("member_id")
	m.MembershipEpoch = r.u32("membership_epoch")
	m.AssignmentEpoch = r.u32("assignment_epoch")
	return r.end()
}

// AppendOK appends the whole OK frame that answers CREDIT.
func (m *CreditResult) AppendOK(dst []byte) []byte {
	dst = appendOKHeader(dst, OpCredit, creditResultLen)
	dst = be.AppendUint16(dst, m.GrantedCount)
	dst = be.AppendUint32(dst, m.GrantedBytes)
	dst = be.AppendUint16(dst, m.OutstandingCount)
	dst = be.AppendUint32(dst, m.OutstandingBytes)
	return be.AppendUint64(dst, m.CreditEpoch)
}

// Decode reads the result of CREDIT's OK.
func (m *CreditResult) Decode(result []byte) error {
	r := reader{b: result, op: OpCredit, result: true}
	m.GrantedCount = r.u16("granted_count")
	m.GrantedBytes = r.u32("granted_bytes")
	m.OutstandingCount = r.u16("outstanding_count")
	m.OutstandingBytes = r.u32("outstanding_bytes")
	m.CreditEpoch = r.u64("credit_epoch")
	return r.end()
}

// DecodeEmptyResult checks that the result of an OK that answers op is empty.
func DecodeEmptyResult(op Op, result []byte) error {
	r := reader{b: result, op: op, result: true}
	return r.end()
}
