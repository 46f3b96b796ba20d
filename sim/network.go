package sim

import (
	"bytes"
	"slices"
	"time"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
)

// network connects the nodes: per pair and lane a connection as TCP gives it, in order or not at all, except that messages of
// the control lane, which nobody relies on, are also lost, doubled and reordered.
type network struct {
	w *world
	// blocked says who doesn't reach whom.
	blocked map[[2]replica.NodeID]bool
	conns   map[[2]replica.NodeID]*[peerwire.Lanes]conn
	loss    float64 // of control messages
	jitter  time.Duration
}

// conn is one direction of a lane.
type conn struct {
	up bool
	// life numbers the connections; what an ended one had under way is lost.
	life int
	last time.Duration // arrival of the newest frame
}

// usualJitter is up to how long a frame takes.
const usualJitter = 200 * time.Microsecond

func newNetwork(w *world) *network {
	n := &network{w: w, blocked: map[[2]replica.NodeID]bool{}, conns: map[[2]replica.NodeID]*[peerwire.Lanes]conn{}, jitter: usualJitter}
	for a := replica.NodeID(1); a <= 3; a++ {
		for b := replica.NodeID(1); b <= 3; b++ {
			n.conns[[2]replica.NodeID{a, b}] = new([peerwire.Lanes]conn)
		}
	}
	return n
}

func (n *network) conn(from, to replica.NodeID, lane peerwire.Lane) *conn {
	return &n.conns[[2]replica.NodeID{from, to}][lane]
}

func (n *network) host(id replica.NodeID) *host { return n.w.hosts[id-1] }

// down ends the connections of a process that is gone.
func (n *network) down(h *host) {
	for _, o := range n.w.hosts {
		if o != h {
			n.hangUp(h.id, o.id)
		}
	}
}

// hangUp ends all connections between two nodes; both sides notice if they can.
func (n *network) hangUp(a, b replica.NodeID) {
	for lane := peerwire.Control; lane < peerwire.Lanes; lane++ {
		for _, d := range [][2]replica.NodeID{{a, b}, {b, a}} {
			c := n.conn(d[0], d[1], lane)
			if c.up {
				c.up = false
				c.life++
				if h := n.host(d[0]); h.node != nil {
					h.node.Disconnected(d[1], lane)
					h.wake()
				}
			}
		}
	}
}

// connectAll connects what can be connected. A connection needs both directions.
func (n *network) connectAll() {
	for _, a := range n.w.hosts {
		for _, b := range n.w.hosts {
			if a.id >= b.id || a.node == nil || b.node == nil || n.blocked[[2]replica.NodeID{a.id, b.id}] || n.blocked[[2]replica.NodeID{b.id, a.id}] {
				continue
			}
			for lane := peerwire.Control; lane < peerwire.Lanes; lane++ {
				if n.conn(a.id, b.id, lane).up {
					continue
				}
				for _, d := range [][2]*host{{a, b}, {b, a}} {
					c := n.conn(d[0].id, d[1].id, lane)
					c.up = true
					c.life++
					d[0].node.Connected(d[1].id, lane)
					d[0].wake()
				}
			}
		}
	}
}

// block cuts a direction off, or both; frames vanish, and after a while the connection ends.
func (n *network) block(from, to replica.NodeID) {
	n.blocked[[2]replica.NodeID{from, to}] = true
	n.w.after(3*time.Second, func() {
		if n.blocked[[2]replica.NodeID{from, to}] {
			n.hangUp(from, to)
		}
	})
}

func (n *network) heal() {
	clear(n.blocked)
	for _, a := range n.w.hosts {
		for _, b := range n.w.hosts {
			if a.id < b.id {
				// What was lost meanwhile is lost: TCP would send it again or end the connection.
				n.hangUp(a.id, b.id)
			}
		}
	}
	n.connectAll()
}

// send delivers a frame; false where there is no connection.
func (n *network) send(from, to replica.NodeID, lane peerwire.Lane, do func(h *host)) bool {
	c := n.conn(from, to, lane)
	if !c.up {
		return false
	}
	if n.blocked[[2]replica.NodeID{from, to}] {
		return true
	}
	w := n.w
	if lane == peerwire.Control {
		if w.chance(n.loss) {
			return true
		}
		if w.chance(n.loss) {
			n.arrive(c, to, w.between(20*time.Microsecond, 20*n.jitter), do)
		}
		n.arrive(c, to, w.between(20*time.Microsecond, n.jitter), do)
		return true
	}
	at := max(c.last+1, w.now+w.between(20*time.Microsecond, n.jitter))
	c.last = at
	n.arrive(c, to, at-w.now, do)
	return true
}

func (n *network) arrive(c *conn, to replica.NodeID, d time.Duration, do func(h *host)) {
	life := c.life
	n.w.after(d, func() {
		h := n.host(to)
		if c.life != life || !c.up || h.node == nil {
			return
		}
		if h.paused {
			n.arrive(c, to, 10*time.Millisecond, do)
			return
		}
		do(h)
		h.wake()
	})
}

// link is a node's end of the network.
type link struct {
	n *network
	h *host
}

// bytesOnWire is a payload that was copied, as a network does.
type bytesOnWire []byte

func (b bytesOnWire) Bytes() []byte { return b }
func (b bytesOnWire) Release()      {}

func onWire(b []byte) peerwire.Payload {
	if b == nil {
		return nil
	}
	return bytesOnWire(bytes.Clone(b))
}

// Message implements engine.Peers.
func (l link) Message(to replica.NodeID, m *replica.Message) bool {
	return l.n.send(l.h.id, to, peerwire.Control, func(h *host) {
		c := *m
		c.Ends, c.Commits = slices.Clone(m.Ends), slices.Clone(m.Commits)
		h.node.Message(l.h.id, &c)
	})
}

// Append implements engine.Peers.
func (l link) Append(to replica.NodeID, a *peerwire.Append, payload []byte, owner peerwire.Releaser) bool {
	frame, b := *a, onWire(payload)
	ok := l.n.send(l.h.id, to, peerwire.Log, func(h *host) { h.node.Append(l.h.id, &frame, b) })
	if ok && owner != nil {
		owner.Release()
	}
	return ok
}

// Flushed implements engine.Peers.
func (l link) Flushed(to replica.NodeID, f *peerwire.Flushed) bool {
	c := *f
	l.n.w.flushed(l.h, &c)
	return l.n.send(l.h.id, to, peerwire.Log, func(h *host) { h.node.Flushed(l.h.id, &c) })
}

// Reject implements engine.Peers.
func (l link) Reject(to replica.NodeID, r *peerwire.Reject) bool {
	c := *r
	return l.n.send(l.h.id, to, peerwire.Log, func(h *host) { h.node.Reject(l.h.id, &c) })
}

// Bulk implements engine.Peers.
func (l link) Bulk(to replica.NodeID, f peerwire.BulkFrame, payload []byte, owner peerwire.Releaser) bool {
	b := onWire(payload)
	ok := l.n.send(l.h.id, to, peerwire.Bulk, func(h *host) { h.node.Bulk(l.h.id, f, b) })
	if ok && owner != nil {
		owner.Release()
	}
	return ok
}
