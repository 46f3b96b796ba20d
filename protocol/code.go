package protocol

// ErrorCode is the code field of ERR. It is an error itself, so errors.Is(err, protocol.CodeUnknownTopic) works on
// anything that wraps it.
type ErrorCode uint16

// The published codes; their meaning never changes.
const (
	CodeBadLength          ErrorCode = 0x0001
	CodeUnknownOp          ErrorCode = 0x0002
	CodeMalformedPayload   ErrorCode = 0x0003
	CodeUnsupportedVersion ErrorCode = 0x0004
	CodeNotAuthenticated   ErrorCode = 0x0005
	CodeAuthFailed         ErrorCode = 0x0006
	CodeAuthTimeout        ErrorCode = 0x0007
	CodeUnknownTopic       ErrorCode = 0x0008
	CodeUnknownPartition   ErrorCode = 0x0009
	CodeInternal           ErrorCode = 0x000A
	CodeInvalidTopic       ErrorCode = 0x000B

	CodeSeqGap             ErrorCode = 0x0010
	CodeSeqExpired         ErrorCode = 0x0011
	CodeProducerEpochStale ErrorCode = 0x0012
	CodeProducerSeqInvalid ErrorCode = 0x0013

	CodeStaleGeneration      ErrorCode = 0x0020
	CodeNotOwner             ErrorCode = 0x0021
	CodeStaleOwner           ErrorCode = 0x0022
	CodeUnknownDelivery      ErrorCode = 0x0023
	CodeGroupMemberLimit     ErrorCode = 0x0024
	CodeGroupAssignmentLimit ErrorCode = 0x0025
	CodeUnknownMember        ErrorCode = 0x0026
	CodeMaxWaitingPulls      ErrorCode = 0x0027

	CodeDLQPathOverflow ErrorCode = 0x0030
	CodeDLQUnavailable  ErrorCode = 0x0031

	CodeTopicExistsMismatch ErrorCode = 0x2001
	CodeGroupExistsMismatch ErrorCode = 0x2002
	CodeMetadataReadOnly    ErrorCode = 0x2003
	CodeMetadataQuarantined ErrorCode = 0x2004
	CodeUnknownGroup        ErrorCode = 0x2005
	CodeMutationFenced      ErrorCode = 0x2006

	CodeBackpressure         ErrorCode = 0x4001
	CodeQuotaExceeded        ErrorCode = 0x4002
	CodeRateLimited          ErrorCode = 0x4003
	CodeStorageHighWatermark ErrorCode = 0x4004
	CodeMessageExceedsCredit ErrorCode = 0x4005
	CodeNoCredit             ErrorCode = 0x4006
	CodeSlowConsumer         ErrorCode = 0x4007

	CodeQuorumLost              ErrorCode = 0x6001
	CodeReadOnlyDegraded        ErrorCode = 0x6002
	CodeInSyncReplicasNotEnough ErrorCode = 0x6003
	CodeFollowerLag             ErrorCode = 0x6004
	CodeStaleLeaderEpoch        ErrorCode = 0x6005
	CodeLeaseExpired            ErrorCode = 0x6006
	CodeCatchupRequired         ErrorCode = 0x6007
	CodeLogGap                  ErrorCode = 0x6008
	CodeDivergentCommitted      ErrorCode = 0x6009
	CodeQuorumRecovered         ErrorCode = 0x600A
	CodeUncleanElectionRejected ErrorCode = 0x600B
)
