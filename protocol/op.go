package protocol

import "fmt"

var opNames = [...]string{
	OpConnect:    "CONNECT",
	OpDeclare:    "DECLARE",
	OpPub:        "PUB",
	OpSub:        "SUB",
	OpAck:        "ACK",
	OpNack:       "NACK",
	OpPing:       "PING",
	OpErr:        "ERR",
	OpOK:         "OK",
	OpMsg:        "MSG",
	OpPull:       "PULL",
	OpHeartbeat:  "HEARTBEAT",
	OpNotice:     "NOTICE",
	OpControlAck: "CONTROL_ACK",
	OpCredit:     "CREDIT",
}

// Valid reports whether op is one of the fifteen operations.
func (op Op) Valid() bool { return op >= OpConnect && op <= OpCredit }

// String returns the name of the operation, "op 0x.." for an undefined one.
func (op Op) String() string {
	if op.Valid() {
		return opNames[op]
	}
	return fmt.Sprintf("op 0x%02X", uint8(op))
}

// String returns the name of the level, as the command line and the topic settings spell it.
func (d Durability) String() string {
	switch d {
	case DurabilityTopic:
		return "topic"
	case DurabilityMemory:
		return "memory"
	case DurabilityLocal:
		return "local"
	case DurabilityQuorum:
		return "quorum"
	}
	return fmt.Sprintf("durability %d", uint8(d))
}
