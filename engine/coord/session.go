package coord

import (
	"strings"

	"github.com/mortarmq/mortarmq/protocol"
)

// open makes sure that a client that sends something has a session.
func (c *Coordinator) open(client Client) *session {
	if ss := c.lookup(client); ss != nil {
		return ss
	}
	ss := &session{client: client}
	c.sessions[client.ID()] = ss
	c.lastSession = ss
	return ss
}

// closed ends everything that a connection had. Its members keep their places for a while.
func (c *Coordinator) closed(client Client) {
	ss := c.lookup(client)
	if ss == nil {
		return
	}
	for _, s := range ss.subs {
		if s == nil || s.ended != 0 {
			continue
		}
		s.gone = true
		s.ended, s.endedText = protocol.CodeUnknownMember, "the connection closed"
		if s.open {
			c.delivery.closeSub(s, false)
		}
		c.detach(s)
		if h := c.groups.byID[s.group]; h != nil {
			c.step(h, groupSessionClosed(s.handle))
		}
	}
	delete(c.sessions, client.ID())
	c.lastSession = nil
}

// addSub gives a subscription its id on the connection; false if the connection has as many as it may.
func (ss *session) addSub(s *subscription) bool {
	free := -1
	for i, old := range ss.subs {
		if old == nil {
			free = i
			break
		}
	}
	if free < 0 && len(ss.subs) >= maxSubscriptions {
		// One that has ended has told so or never will be asked again.
		for i, old := range ss.subs {
			if old.ended != 0 {
				free = i
				break
			}
		}
		if free < 0 {
			return false
		}
	}
	if free < 0 {
		free = len(ss.subs)
		ss.subs = append(ss.subs, nil)
	}
	ss.subs[free] = s
	s.id = uint16(free + 1)
	return true
}

// dropSub frees a subscription's id.
func (c *Coordinator) dropSub(s *subscription) {
	c.detach(s)
	if ss := c.lookup(s.client); ss != nil && int(s.id) <= len(ss.subs) && ss.subs[s.id-1] == s {
		ss.subs[s.id-1] = nil
	}
}

// detach makes a subscription unknown to its group; the connection may still name it.
func (c *Coordinator) detach(s *subscription) {
	delete(c.byHandle, s.handle)
	if h := c.groups.byID[s.group]; h != nil {
		delete(h.subs, s.handle)
	}
}

// withoutCode is err's text without that of the code it wraps, which travels beside it.
func withoutCode(err error, code protocol.ErrorCode) string {
	return strings.TrimSuffix(strings.TrimSuffix(err.Error(), code.Error()), ": ")
}
