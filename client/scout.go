package client

import (
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// scoutEvery is the least time between two looks for another leader.
const scoutEvery = time.Second

// scout looks for another leader while the one in use has no quorum. Leaving it on suspicion would be wrong: if the other
// nodes are gone, consumers still get from it what is committed, and could not come back.
type scout struct {
	busy atomic.Bool
	last atomic.Int64 // Unix nanoseconds
}

// doubt is called by a session whose broker has refused a request with code. If that may mean that another node leads
// by now, the other nodes are asked, and l is closed when it is so. It does not block.
func (c *Client) doubt(l *link, code protocol.ErrorCode) {
	if !withoutQuorum(code) || c.nodes.count() < 2 {
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
			c.cfg.logger.Warn("another node leads", "left", l.addr, "leader", leader)
			c.nodes.promote(leader)
			l.close()
		}
	})
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
