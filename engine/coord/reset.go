package coord

import (
	"fmt"

	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/protocol"
)

// handleReset moves a group's cursors, or tells what a move would change.
func (c *Coordinator) handleReset(r *Request, m *protocol.Declare) {
	t, g, err := c.groupOf(m)
	if err != nil {
		c.refuseErr(r.Client, r.Req, r.Op, err)
		return
	}
	client, req := r.Client, r.Req
	result := protocol.ResetResult{DeclareResult: protocol.DeclareResult{TopicID: t.ID, Partitions: t.Partitions, Existed: true}}
	c.delivery.reset(g.ID, m.Reset, func(positions []protocol.ResetPosition, err error) {
		if err != nil {
			c.refuseErr(client, req, protocol.OpDeclare, err)
			return
		}
		result.Positions = positions
		c.frame = result.AppendOK(c.frame[:0])
		client.Complete(req, c.frame)
		c.flushLater(client)
	})
}

// groupOf finds the group whose cursors a DECLARE wants to move, and checks that it may.
func (c *Coordinator) groupOf(m *protocol.Declare) (*metadata.Topic, *metadata.Group, error) {
	dry := m.Reset.Options&protocol.ResetDryRun != 0
	check := c.writable
	if dry {
		check = c.servable
	}
	if err := check(); err != nil {
		return nil, nil, err
	}
	if err := protocol.ValidateLookup(m.Topic); err != nil {
		return nil, nil, err
	}
	t := c.meta.TopicByName(string(m.Topic))
	if t == nil || c.topics.deleting[t.ID] {
		return nil, nil, unknownTopic(string(m.Topic))
	}
	g := c.meta.GroupByName(string(m.Group), t.ID)
	h := (*groupHost)(nil)
	if g != nil {
		h = c.groups.byID[g.ID]
	}
	if h == nil {
		return nil, nil, fmt.Errorf("topic %.64q has no group %.64q: 'mortarmq groups list' lists them: %w", m.Topic, m.Group, protocol.CodeUnknownGroup)
	}
	if n := len(h.m.Members()); n > 0 && !dry && m.Reset.Options&protocol.ResetForce == 0 {
		return nil, nil, fmt.Errorf("the group has %d members, which would get other messages than they expect: stop them, or force it: %w", n, protocol.CodeGroupExistsMismatch)
	}
	return t, g, nil
}
