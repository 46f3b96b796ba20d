package fakebroker

import (
	"fmt"
	"net"
	"sync"

	"github.com/mortarmq/mortarmq/protocol"
)

// Cluster is several nodes in front of the state of one Broker, which is what perfect replication would keep. One of them
// leads, the others refuse requests and name it; a test moves the leadership and breaks nodes.
type Cluster struct {
	*Broker
	nodes []*node
}

type node struct {
	cluster *Cluster
	id      int
	addr    string
	ln      net.Listener // nil while it is dead
	leads   bool
	cutOff  bool
	frozen  chan struct{} // closed when it thaws; nil while it is not frozen
	token   string        // required if it isn't empty
	hint    *string
	seen    int // CONNECTs
}

// NewCluster starts n nodes on the loopback interface. The first one leads.
func NewCluster(n int) (*Cluster, error) {
	c := &Cluster{Broker: New()}
	for i := range n {
		c.nodes = append(c.nodes, &node{cluster: c, id: i, addr: "127.0.0.1:0"})
		if err := c.Revive(i); err != nil {
			c.Close()
			return nil, err
		}
	}
	c.Lead(0)
	return c, nil
}

// Addr returns the address of a node, which it keeps.
func (c *Cluster) Addr(i int) string { return c.nodes[i].addr }

// Addrs returns the addresses of all nodes, separated by commas.
func (c *Cluster) Addrs() string {
	list := ""
	for i, n := range c.nodes {
		if i > 0 {
			list += ","
		}
		list += n.addr
	}
	return list
}

// Lead makes node i the leader, or none with -1. What was in flight at another one goes back, and its next request is refused.
func (c *Cluster) Lead(i int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.epoch++
	for _, n := range c.nodes {
		n.leads = n.id == i
	}
	for conn := range c.conns {
		if conn.node != nil && !conn.node.leads {
			conn.leave()
		}
	}
}

// CutOff has node i believe that it leads, without a majority: it refuses writes, and says nothing of another leader.
func (c *Cluster) CutOff(i int, cut bool) { c.with(i, func(n *node) { n.cutOff = cut }) }

// Freeze has node i do nothing until thaw is called, as a stopped process does: connections are accepted and bytes taken.
func (c *Cluster) Freeze(i int) (thaw func()) {
	frozen := make(chan struct{})
	c.with(i, func(n *node) { n.frozen = frozen })
	return sync.OnceFunc(func() {
		c.with(i, func(n *node) { n.frozen = nil })
		close(frozen)
	})
}

// thawed waits until the node is not frozen.
func (n *node) thawed() {
	if n == nil {
		return
	}
	n.cluster.mu.Lock()
	frozen := n.frozen
	n.cluster.mu.Unlock()
	if frozen != nil {
		<-frozen
	}
}

// Hint replaces what node i says of the leader when it does not lead, such as "leader=2 127.0.0.1:7188".
func (c *Cluster) Hint(i int, text string) { c.with(i, func(n *node) { n.hint = &text }) }

// RequireToken has node i take no client with another token.
func (c *Cluster) RequireToken(i int, token string) { c.with(i, func(n *node) { n.token = token }) }

// Connects returns how many CONNECTs node i has had.
func (c *Cluster) Connects(i int) (count int) {
	c.with(i, func(n *node) { count = n.seen })
	return count
}

// Kill ends node i: its connections break and nobody listens any more.
func (c *Cluster) Kill(i int) {
	c.with(i, func(n *node) {
		if n.ln != nil {
			c.shut(n.ln)
			n.ln = nil
		}
		for conn := range c.conns {
			if conn.node == n {
				conn.nc.Close()
			}
		}
	})
}

// Revive starts node i again at its address.
func (c *Cluster) Revive(i int) error {
	n := c.nodes[i]
	ln, err := net.Listen("tcp", n.addr)
	if err != nil {
		return err
	}
	c.with(i, func(n *node) { n.ln, n.addr = ln, ln.Addr().String() })
	c.accept(ln, n)
	return nil
}

// Close ends all nodes.
func (c *Cluster) Close() { c.Crash() }

func (c *Cluster) with(i int, f func(*node)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f(c.nodes[i])
}

// refuse is why a node does not take a request; nil if it does. The lock is held.
func (n *node) refuse(op protocol.Op, payload []byte) *protocol.Error {
	switch {
	case n == nil || op == protocol.OpPing:
		return nil
	case op == protocol.OpConnect:
		n.seen++
		var m protocol.Connect
		if n.token != "" && (m.Decode(payload) != nil || string(m.Token) != n.token) {
			return &protocol.Error{Code: protocol.CodeAuthFailed}
		}
		return nil
	case n.cutOff:
		return n.refuseWrite(op, payload)
	case n.leads:
		return nil
	case n.hint != nil:
		return &protocol.Error{Code: protocol.CodeStaleLeaderEpoch, Message: *n.hint}
	}
	refusal := &protocol.Error{Code: protocol.CodeStaleLeaderEpoch}
	for _, other := range n.cluster.nodes {
		if other.leads {
			refusal.Message = fmt.Sprintf("leader=%d %s", other.id, other.addr)
		}
	}
	return refusal
}

// refuseWrite is what a leader without a majority answers.
func (n *node) refuseWrite(op protocol.Op, payload []byte) *protocol.Error {
	switch op {
	case protocol.OpPub, protocol.OpAck, protocol.OpNack:
		return &protocol.Error{Code: protocol.CodeReadOnlyDegraded}
	case protocol.OpSub:
		return &protocol.Error{Code: protocol.CodeMetadataReadOnly}
	case protocol.OpDeclare:
		var m protocol.Declare
		if m.Decode(payload) != nil || m.Flags&protocol.DeclareFlagLookup == 0 {
			return &protocol.Error{Code: protocol.CodeMetadataReadOnly}
		}
		return nil
	default:
		return nil
	}
}
