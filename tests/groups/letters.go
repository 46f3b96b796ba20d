package groups

import (
	"fmt"
	"time"

	"github.com/mortarmq/mortarmq/engine/deadletter"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

// readLetters reads a group's dead-letter topic, which holds n letters.
func readLetters(addr, group string, n uint64, within time.Duration, take func(e *deadletter.Envelope, sequence uint64, value []byte)) error {
	if n == 0 {
		return nil
	}
	c, err := harness.Dial(addr, "")
	if err != nil {
		return err
	}
	defer c.Close()
	look := protocol.Declare{Topic: []byte(protocol.DLQPrefix + group), Flags: protocol.DeclareFlagLookup}
	result, err := c.Request(protocol.OpDeclare, look.AppendFrame(nil))
	if err != nil {
		return fmt.Errorf("look up the dead-letter topic: %w", err)
	}
	var topic protocol.DeclareResult
	if err := topic.Decode(result); err != nil {
		return err
	}
	_, err = c.Subscribe(&protocol.Sub{Group: []byte("reader"), TopicID: topic.TopicID, Partition: protocol.AnyPartition,
		Flags: protocol.SubFlagStream, CreditCount: 65535, CreditBytes: 64 << 20})
	if err != nil {
		return err
	}
	if n > 65535 {
		return fmt.Errorf("%d dead letters are more than the check can read at once", n)
	}
	if err := c.Net().SetReadDeadline(time.Now().Add(within)); err != nil {
		return err
	}
	for next := uint64(1); next <= n; {
		f, err := c.Next()
		if err != nil {
			return fmt.Errorf("read dead letter %d of %d: %w", next, n, err)
		}
		switch f.Op {
		case protocol.OpNotice:
			var notice protocol.Notice
			if err := notice.Decode(f.Payload); err != nil {
				return err
			}
			if err := c.Send(harness.ConfirmNotice(&notice)); err != nil {
				return err
			}
		case protocol.OpMsg:
			var m protocol.Msg
			if err := m.Decode(f.Payload); err != nil {
				return err
			}
			if m.Sequence != next {
				return fmt.Errorf("dead letter %d came, %d was next", m.Sequence, next)
			}
			var e deadletter.Envelope
			value, err := e.Decode(m.Value)
			if err != nil {
				return err
			}
			take(&e, m.Sequence, value)
			next++
		case protocol.OpErr:
			return f.Err()
		default:
		}
	}
	return nil
}
