package client

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

const (
	// scoutEvery is the least time between two looks for another leader.
	scoutEvery = time.Second
	// quietLimit is how long a node may owe answers without a word before the others are asked: a leader answers within its
	// quorum timeout of 2 s, if only with a refusal.
	quietLimit = 2500 * time.Millisecond
)

// scout looks for another leader while the one in use has no quorum, or says nothing. Leaving it on suspicion would be
// wrong: if the other nodes are gone, consumers still get from it what is committed, and could not come back.
type scout struct {
	busy atomic.Bool
	last atomic.Int64 // Unix nanoseconds
}

// refused is called by a session whose broker has refused a request with code.
func (c *Client) refused(l *link, code protocol.ErrorCode) {
	if withoutQuorum(code) {
		c.doubt(l)
	}
}

// owes is called by a session every now and then while its broker owes it answers.
func (c *Client) owes(l *link) {
	if l.quiet() > quietLimit {
		c.doubt(l)
	}
}

// doubt has the other nodes asked whether one of them leads by now; l is closed when it is so. It does not block.
func (c *Client) doubt(l *link) {
	if c.nodes.count() < 2 {
		return
	}
	now := time.Now().UnixNano()
	if now-c.scout.last.Load() < int64(scoutEvery) || !c.scout.busy.CompareAndSwap(false, true) {
		return
	}
	c.scout.last.Store(now)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	c.wg.Go(func() {
		defer c.scout.busy.Store(false)
		if leader := c.otherLeader(l); leader != "" {
			c.nodes.promote(leader)
			l.leave(fmt.Errorf("%s does not lead any more, %s does", l.addr, leader))
		}
	})
}

// doubtFrom is doubt again and again, from some time on until it is stopped: while a request is unanswered that no session
// looks after.
func (c *Client) doubtFrom(wait time.Duration, l *link) (stop func()) {
	if c.nodes.count() < 2 {
		return func() {}
	}
	stopped := make(chan struct{})
	go func() {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		for {
			select {
			case <-timer.C:
				c.doubt(l)
				timer.Reset(scoutEvery)
			case <-stopped:
				return
			}
		}
	}()
	return func() { close(stopped) }
}

// otherLeader asks the nodes that l does not go to, and those that they name, for one that leads; "" if there is none.
func (c *Client) otherLeader(l *link) string {
	way := c.newSearch()
	way.tried = append(way.tried, l.addr)
	for addr := way.next(); addr != "" && c.ctx.Err() == nil; addr = way.next() {
		remote, err := c.ask(addr, way.timeout())
		if err == nil && remote != l.nc.RemoteAddr().String() { // else it is the same one by another name
			return addr
		}
		way.failed(addr, false, err)
	}
	return ""
}

// ask finds out whether a node leads: it then answers a question about a topic, whether the topic exists or not. remote is
// the node's address as the network knows it.
func (c *Client) ask(addr string, timeout time.Duration) (remote string, err error) {
	l, err := openLink(c.ctx, &c.cfg, addr, timeout)
	if err != nil {
		return "", err
	}
	defer l.close()
	l.silence = timeout
	question := protocol.Declare{Topic: []byte("mortarmq"), Flags: protocol.DeclareFlagLookup}
	if _, err = l.nc.Write(question.AppendFrame(nil)); err == nil {
		_, err = l.answer(protocol.OpDeclare)
	}
	if code, refused := protocol.CodeOf(err); refused && code == protocol.CodeUnknownTopic {
		err = nil
	}
	return l.nc.RemoteAddr().String(), err
}
