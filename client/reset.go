package client

import (
	"context"
	"fmt"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// ResetTarget says where a consumer group is to go on reading; see Earliest, Latest, AtSequence and AtTime.
type ResetTarget struct {
	to    protocol.ResetTo
	value uint64
}

// Earliest is the oldest message of each partition.
func Earliest() ResetTarget { return ResetTarget{to: protocol.ResetEarliest} }

// Latest is behind the newest message of each partition: what was not read is skipped.
func Latest() ResetTarget { return ResetTarget{to: protocol.ResetLatest} }

// AtSequence is the message with that sequence, or the nearest that a partition has.
func AtSequence(seq uint64) ResetTarget { return ResetTarget{protocol.ResetSequence, seq} }

// AtTime is the first message of each partition that was stored at t or later. The broker keeps milliseconds.
func AtTime(t time.Time) ResetTarget {
	return ResetTarget{protocol.ResetTime, uint64(max(t.UnixMilli(), 0))}
}

// ResetOptions are ResetGroup's.
type ResetOptions struct {
	// OnePartition limits the reset to Partition.
	OnePartition bool
	Partition    uint16
	// Force allows it while the group has members. They get the messages from the new position on; what they have at hand
	// and acknowledge later is delivered again where it lies behind that.
	Force bool
	// DryRun changes nothing.
	DryRun bool
}

// CursorMove is what a reset does to a partition: From and To are the highest sequences up to which everything is done for
// the group, before and after.
type CursorMove struct {
	Partition uint16
	From, To  uint64
}

// ResetGroup moves the cursors of a consumer group. While the group has members it is refused with
// protocol.CodeGroupExistsMismatch, unless Force is set. Once it returns without an error the new positions are durable.
func (c *Client) ResetGroup(ctx context.Context, topic, group string, target ResetTarget, opts ResetOptions) ([]CursorMove, error) {
	if err := validateGroup(topic, group); err != nil {
		return nil, fmt.Errorf("reset: %w", err)
	}
	m := protocol.Declare{
		Topic: []byte(topic), Group: []byte(group), Flags: protocol.DeclareFlagGroup | protocol.DeclareFlagReset,
		Reset: protocol.Reset{To: target.to, Value: target.value, Partition: protocol.AnyPartition},
	}
	if opts.OnePartition {
		m.Reset.Partition = opts.Partition
	}
	if opts.Force {
		m.Reset.Options |= protocol.ResetForce
	}
	if opts.DryRun {
		m.Reset.Options |= protocol.ResetDryRun
	}
	result, err := c.call(ctx, protocol.OpDeclare, m.AppendFrame(nil))
	var r protocol.ResetResult
	if err == nil {
		err = r.Decode(result)
	}
	if err != nil {
		return nil, fmt.Errorf("reset group %q of topic %q: %w", group, topic, err)
	}
	moves := make([]CursorMove, len(r.Positions))
	for i, p := range r.Positions {
		moves[i] = CursorMove(p)
	}
	return moves, nil
}

// DeleteGroup deletes a consumer group with its cursors and ends its members. It reports whether the group existed; after
// a lost connection false may mean that the first attempt has deleted it.
func (c *Client) DeleteGroup(ctx context.Context, topic, group string) (existed bool, err error) {
	if err := validateGroup(topic, group); err != nil {
		return false, fmt.Errorf("delete: %w", err)
	}
	m := protocol.Declare{Topic: []byte(topic), Group: []byte(group), Flags: protocol.DeclareFlagGroup | protocol.DeclareFlagDelete}
	t, err := c.declare(ctx, "delete group "+group+" of topic", &m)
	return err == nil && !t.Created, err
}

func validateGroup(topic, group string) error {
	if err := protocol.ValidateLookup([]byte(topic)); err != nil {
		return err
	}
	return protocol.ValidateGroup([]byte(group))
}
