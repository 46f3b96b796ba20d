package groups

import (
	"encoding/binary"
	"io"
	"sync"
)

// eventKind says what a member process has seen or is about to do.
type eventKind uint8

const (
	// eventJoined: SUB was answered; Member is the member's id.
	eventJoined eventKind = iota + 1
	// eventDelivered: a MSG has arrived.
	eventDelivered
	// eventHandled: the handler has ended; Code is 0 where it was content.
	eventHandled
	// eventAcking and eventNacking: an ACK or NACK is about to be sent.
	eventAcking
	eventNacking
	// eventAcked: an ACK was answered with OK. eventRefused: with an error, Code.
	eventAcked
	eventRefused
)

// event is what a member process writes to its parent, one behind the other, before what it tells of has consequences:
// so the parent knows at least as much as the broker when the process is killed.
type event struct {
	Kind      eventKind
	Cause     cause // of a message, as its value says
	Partition uint16
	Attempt   uint16
	Code      uint16
	Sequence  uint64
	Delivery  uint64
	Epoch     uint64 // ownership epoch
	Number    uint64 // of a message, as its value says
	Member    uint64
}

var eventSize = binary.Size(event{})

// reporter writes events. Any goroutine may use it.
type reporter struct {
	mu sync.Mutex
	w  io.Writer
}

// report writes events with one call, so that the process's end can't come between a call's events and what follows it.
func (r *reporter) report(list ...event) error {
	var b []byte
	for i := range list {
		var err error
		if b, err = binary.Append(b, binary.BigEndian, &list[i]); err != nil {
			return err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	_, err := r.w.Write(b)
	return err
}

// readEvents calls do for every event until the stream ends. What a killed process has written of its last event is
// dropped.
func readEvents(r io.Reader, do func(*event)) {
	b := make([]byte, eventSize)
	for {
		if _, err := io.ReadFull(r, b); err != nil {
			return
		}
		var e event
		if _, err := binary.Decode(b, binary.BigEndian, &e); err != nil {
			return
		}
		do(&e)
	}
}

// cause is why a message fails, if it does.
type cause uint8

const (
	good      cause = iota
	failing         // its handler returns an error
	panicking       // its handler panics
	rejected        // its handler returns ErrReject
)

// valueLen is the length of a value; messages of other tests have something behind it.
const valueLen = 9

// valueOf is the value of message number n.
func valueOf(n uint64, c cause) []byte {
	return append(binary.BigEndian.AppendUint64(nil, n), byte(c))
}

// parseValue is the reverse of valueOf; ok is false for something else.
func parseValue(v []byte) (n uint64, c cause, ok bool) {
	if len(v) != valueLen || v[valueLen-1] > byte(rejected) {
		return 0, 0, false
	}
	return binary.BigEndian.Uint64(v), cause(v[valueLen-1]), true
}
