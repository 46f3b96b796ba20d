package protocol

// Sizes and limits of protocol version 1, in bytes unless said otherwise.
const (
	WireVersion   = 1
	MaxFrameLen   = 16 << 20       // largest value of the length field; counts the op byte
	MaxValueLen   = 16<<20 - 1<<10 // largest message value
	MaxKeyLen     = 255
	MaxTopicLen   = 255
	MaxGroupLen   = 255
	MaxErrMessage = 512

	// AnyPartition asks the broker to route a PUB by key, and is the only value that SUB allows.
	AnyPartition = 0xFFFF
	// ProducerWindow is how many recent producer_seqs per (topic, partition, producer) the broker can recognise again,
	// and so the most a client may keep unanswered.
	ProducerWindow = 1024
)

// Op is the operation byte of a frame.
type Op uint8

// The fifteen operations.
const (
	OpConnect Op = iota + 1
	OpDeclare
	OpPub
	OpSub
	OpAck
	OpNack
	OpPing
	OpErr
	OpOK
	OpMsg
	OpPull
	OpHeartbeat
	OpNotice
	OpControlAck
	OpCredit
)

// Durability is what a PUB asks for (flags bits 0-1) and what its result says was reached.
type Durability uint8

const (
	DurabilityTopic  Durability = iota // the topic's setting
	DurabilityMemory                   // the leader has it, flushed soon after
	DurabilityLocal                    // the leader's fsync
	DurabilityQuorum                   // a majority's fsync
)

// Flag bits of the requests.
const (
	PubFlagDurability uint16 = 0b11
	// PubFlagRedriven marks a message that is put back from a dead-letter topic. It is stored with the message;
	// MsgFlagRedriven is the same bit of its MSG.
	PubFlagRedriven uint16 = 1 << 2
	MsgFlagRedriven uint16 = 1 << 2

	DeclareFlagDelete   uint16 = 1 << 0
	DeclareFlagLookup   uint16 = 1 << 1
	DeclareFlagSettings uint16 = 1 << 2
	DeclareFlagGroup    uint16 = 1 << 3 // it is about a consumer group of the topic
	DeclareFlagUpdate   uint16 = 1 << 4 // the settings replace those of a group that exists
	DeclareFlagReset    uint16 = 1 << 5 // the group's cursors are moved

	SubFlagStream    uint16 = 1 << 0
	SubFlagBroadcast uint16 = 1 << 1
	SubFlagFollower  uint16 = 1 << 2
	SubFlagRejoin    uint16 = 1 << 3
	SubFlagSettings  uint16 = 1 << 4

	AckFlagProgress   uint16 = 1 << 0
	AckFlagCumulative uint16 = 1 << 1

	ResultFlagDeduplicated uint8 = 1 << 0
)

// StartPolicy says where a new group starts reading.
type StartPolicy uint8

const (
	StartEarliest StartPolicy = 0 // where the group left off, else the oldest message
	StartLatest   StartPolicy = 1 // where the group left off, else after the newest message
)

// NackReason says what becomes of a refused message.
type NackReason uint8

const (
	NackRetryLater NackReason = 0
	NackRetryNow   NackReason = 1
	NackReject     NackReason = 2
)

// MemberState is HEARTBEAT's state.
type MemberState uint8

const (
	MemberActive MemberState = 0
	MemberLeave  MemberState = 1
)

// NoticeKind tells an assignment from a revocation.
type NoticeKind uint8

const (
	NoticeAssign NoticeKind = 0
	NoticeRevoke NoticeKind = 1
)

// ControlResult is CONTROL_ACK's result.
type ControlResult uint8

const (
	ControlOK    ControlResult = 0
	ControlStale ControlResult = 1
	ControlError ControlResult = 2
)

// CreditMode is CREDIT's mode.
type CreditMode uint8

const (
	CreditSet CreditMode = 0
	CreditAdd CreditMode = 1
)

// Connect opens a connection's session. Token aliases the decoded payload.
type Connect struct {
	Version uint8
	Flags   uint16
	Token   []byte
}

// Declare creates, looks up, changes or deletes a topic or a group. Topic, Settings and Group alias the decoded payload.
type Declare struct {
	Topic      []byte
	Partitions uint16
	Flags      uint16
	Settings   []byte // JSON, present when Flags has DeclareFlagSettings; the group's with DeclareFlagGroup
	// Group and StartPolicy are present when Flags has DeclareFlagGroup. StartPolicy counts when the group is created.
	Group       []byte
	StartPolicy StartPolicy
	// Reset is present when Flags has DeclareFlagReset. The answer is then a ResetResult.
	Reset Reset
}

// DeclareResult is the OK result of DECLARE. For a group it has the topic's id and partitions, and tells whether the
// group existed.
type DeclareResult struct {
	TopicID    uint16
	Partitions uint16
	Existed    bool
}

// Pub publishes a message. Key and Value alias the decoded payload.
type Pub struct {
	TopicID     uint16
	Partition   uint16
	ProducerID  uint64
	ProducerSeq uint64
	Flags       uint16
	Key         []byte
	Value       []byte
}

// PubResult is the OK result of PUB.
type PubResult struct {
	Sequence    uint64
	Durability  Durability
	LeaderEpoch uint64
	CommitSeq   uint64
	Flags       uint8
}

// Sub subscribes to a topic as a member of a group. Group and Settings alias the decoded payload.
type Sub struct {
	Group       []byte
	TopicID     uint16
	Partition   uint16
	StartPolicy StartPolicy
	CreditCount uint16
	CreditBytes uint32
	Flags       uint16
	MemberID    uint64 // the member that comes back, with SubFlagRejoin
	Settings    []byte // the group's, as JSON, with SubFlagSettings
}

// SubResult is the OK result of SUB.
type SubResult struct {
	SubscriptionID  uint16
	MemberID        uint64
	MembershipEpoch uint32
	AssignmentEpoch uint32
}

// Ack acknowledges a delivery.
type Ack struct {
	SubscriptionID uint16
	TopicID        uint16
	Partition      uint16
	Sequence       uint64
	DeliveryID     uint64
	OwnershipEpoch uint64
	Flags          uint16
}

// Nack refuses a delivery.
type Nack struct {
	SubscriptionID uint16
	TopicID        uint16
	Partition      uint16
	Sequence       uint64
	DeliveryID     uint64
	OwnershipEpoch uint64
	Reason         NackReason
	Flags          uint16
}

// ErrFrame is the payload of ERR. Message aliases the decoded payload.
type ErrFrame struct {
	Code      ErrorCode
	RequestOp Op
	Message   []byte
}

// OKFrame is the payload of OK. Result aliases the decoded payload.
type OKFrame struct {
	RequestOp Op
	Result    []byte
}

// Msg delivers a message. Key and Value alias the decoded payload.
type Msg struct {
	SubscriptionID uint16
	TopicID        uint16
	Partition      uint16
	Sequence       uint64
	DeliveryID     uint64
	Attempt        uint16
	OwnershipEpoch uint64
	ProducerID     uint64
	ProducerSeq    uint64
	Flags          uint16
	Key            []byte
	Value          []byte
}

// Pull asks for messages. OwnershipEpochs of the decoded form is appended to the slice that the Pull already holds, so a
// reused Pull decodes without allocating.
type Pull struct {
	SubscriptionID  uint16
	MemberID        uint64
	MembershipEpoch uint32
	AssignmentEpoch uint32
	OwnershipEpochs []uint64
	MaxMsgs         uint16
	MaxBytes        uint32
	WaitMs          uint16
	MinBytes        uint32
}

// Heartbeat keeps a member alive or lets it leave.
type Heartbeat struct {
	SubscriptionID  uint16
	MemberID        uint64
	MembershipEpoch uint32
	AssignmentEpoch uint32
	State           MemberState
}

// Notice tells a member that a partition was given to it or taken from it.
type Notice struct {
	NoticeID        uint64
	Kind            NoticeKind
	GroupID         uint16
	MembershipEpoch uint32
	AssignmentEpoch uint32
	OwnershipEpoch  uint64
	TopicID         uint16
	Partition       uint16
	MemberID        uint64
}

// ControlAck confirms a Notice.
type ControlAck struct {
	NoticeID        uint64
	Kind            NoticeKind
	GroupID         uint16
	MembershipEpoch uint32
	AssignmentEpoch uint32
	OwnershipEpoch  uint64
	Result          ControlResult
}

// Credit grants the broker permission to send messages.
type Credit struct {
	SubscriptionID  uint16
	MembershipEpoch uint32
	OwnershipEpoch  uint64
	Mode            CreditMode
	Count           uint16
	Bytes           uint32
}

// CreditResult is the OK result of CREDIT.
type CreditResult struct {
	GrantedCount     uint16
	GrantedBytes     uint32
	OutstandingCount uint16
	OutstandingBytes uint32
	CreditEpoch      uint64
}
