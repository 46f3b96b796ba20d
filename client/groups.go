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

// GroupOptions are DeclareGroup's.
type GroupOptions struct {
	// Start is where a new group begins: protocol.StartEarliest (the zero value) or protocol.StartLatest.
	Start protocol.StartPolicy
	// Settings is a JSON object, such as {"strategy":"circle","ordered":true}; see package protocol. Empty: the defaults for
	// a new group, any for one that exists.
	Settings []byte
}

// DeclareGroup creates a consumer group on a topic, or finds it if it exists, and reports whether it created it. It is not
// needed before NewConsumer, which creates a missing group as well. A group with other settings is
// protocol.CodeGroupExistsMismatch.
func (c *Client) DeclareGroup(ctx context.Context, topic, group string, opts GroupOptions) (created bool, err error) {
	m := protocol.Declare{StartPolicy: opts.Start}
	if len(opts.Settings) > 0 {
		m.Flags, m.Settings = protocol.DeclareFlagSettings, opts.Settings
	}
	t, err := c.declareGroup(ctx, "declare", topic, group, &m)
	return err == nil && t.Created, err
}

// SetGroup gives an existing group (else protocol.CodeUnknownGroup) other settings, as in GroupOptions; what settings leave
// out gets its default. Members go on: the new settings count from the next attempt on, another strategy moves partitions.
func (c *Client) SetGroup(ctx context.Context, topic, group string, settings []byte) error {
	_, err := c.declareGroup(ctx, "set", topic, group, &protocol.Declare{
		Flags: protocol.DeclareFlagSettings | protocol.DeclareFlagUpdate, Settings: settings,
	})
	return err
}

// DeleteGroup deletes a consumer group with its cursors and ends its members. It reports whether the group existed; after
// a lost connection false may mean that the first attempt has deleted it.
func (c *Client) DeleteGroup(ctx context.Context, topic, group string) (existed bool, err error) {
	t, err := c.declareGroup(ctx, "delete", topic, group, &protocol.Declare{Flags: protocol.DeclareFlagDelete})
	return err == nil && !t.Created, err
}

// declareGroup completes m and sends it.
func (c *Client) declareGroup(ctx context.Context, what, topic, group string, m *protocol.Declare) (Topic, error) {
	err := validateGroup(topic, group)
	if err == nil && len(m.Settings) > 0xFFFF {
		err = fmt.Errorf("settings of %d bytes, at most 65535 are possible", len(m.Settings))
	}
	if err == nil && m.StartPolicy > protocol.StartLatest {
		err = fmt.Errorf("unknown start policy %d", m.StartPolicy)
	}
	if err != nil {
		return Topic{}, fmt.Errorf("%s group %q of topic %q: %w", what, group, topic, err)
	}
	m.Topic, m.Group = []byte(topic), []byte(group)
	m.Flags |= protocol.DeclareFlagGroup
	return c.declare(ctx, fmt.Sprintf("%s group %q of topic", what, group), m)
}

func validateGroup(topic, group string) error {
	if err := protocol.ValidateLookup([]byte(topic)); err != nil {
		return err
	}
	return protocol.ValidateGroup([]byte(group))
}
