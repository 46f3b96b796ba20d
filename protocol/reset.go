package protocol

// ResetTo says where a group's cursors are to go on.
type ResetTo uint8

const (
	ResetEarliest ResetTo = 0 // the oldest message that is stored
	ResetLatest   ResetTo = 1 // behind the newest one
	ResetSequence ResetTo = 2 // the message with the sequence Value
	ResetTime     ResetTo = 3 // the first message stored at or after Value, in Unix milliseconds
)

// Options of Reset.
const (
	ResetForce  uint8 = 1 << 0 // although the group has members
	ResetDryRun uint8 = 1 << 1 // only tell what would change

	resetOptions = ResetForce | ResetDryRun
)

// Reset is the tail of a DECLARE with DeclareFlagReset: it moves a group's cursors.
type Reset struct {
	To    ResetTo
	Value uint64
	// Partition is AnyPartition for all of them.
	Partition uint16
	Options   uint8
}

const resetLen = 1 + 8 + 2 + 1

func (m *Reset) append(dst []byte) []byte {
	dst = append(dst, byte(m.To))
	dst = be.AppendUint64(dst, m.Value)
	dst = be.AppendUint16(dst, m.Partition)
	return append(dst, m.Options)
}

func (m *Reset) decode(r *reader) {
	m.To = ResetTo(r.atMost("reset_to", uint8(ResetTime)))
	m.Value = r.u64("reset_value")
	m.Partition = r.u16("reset_partition")
	m.Options = r.u8("reset_options")
	if m.Options&^resetOptions != 0 {
		r.fail("reset_options", r.off-1, "has reserved bits set")
	}
}

// ResetResult is the OK result of a DECLARE with DeclareFlagReset: that of DECLARE, and what has changed.
type ResetResult struct {
	DeclareResult
	Positions []ResetPosition
}

// ResetPosition is the move of one cursor: everything up to the floor is done for the group.
type ResetPosition struct {
	Partition uint16
	From, To  uint64 // floors
}

const (
	resetPositionLen = 2 + 8 + 8
	maxPositions     = 0xFFFF
)

// AppendOK appends the whole OK frame. Positions has at most 65 535 elements.
func (m *ResetResult) AppendOK(dst []byte) []byte {
	must(OpDeclare, "positions", len(m.Positions), maxPositions)
	dst = appendOKHeader(dst, OpDeclare, declareResultLen+2+resetPositionLen*len(m.Positions))
	dst = m.DeclareResult.append(dst)
	dst = be.AppendUint16(dst, uint16(len(m.Positions)))
	for _, p := range m.Positions {
		dst = be.AppendUint16(dst, p.Partition)
		dst = be.AppendUint64(dst, p.From)
		dst = be.AppendUint64(dst, p.To)
	}
	return dst
}

// Decode reads the result.
func (m *ResetResult) Decode(result []byte) error {
	r := reader{b: result, op: OpDeclare, result: true}
	m.DeclareResult.decode(&r)
	n := int(r.u16("positions_len"))
	raw := r.bytes("positions", resetPositionLen*n, 0, resetPositionLen*maxPositions, 2)
	m.Positions = nil
	for ; len(raw) > 0; raw = raw[resetPositionLen:] {
		m.Positions = append(m.Positions, ResetPosition{Partition: be.Uint16(raw), From: be.Uint64(raw[2:]), To: be.Uint64(raw[10:])})
	}
	return r.end()
}
