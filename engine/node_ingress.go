package engine

import (
	"github.com/mortarmq/mortarmq/engine/coord"
	"github.com/mortarmq/mortarmq/protocol"
)

// nodeIngress is the intake of one event loop: it hands requests to the engine that serves, or says who leads.
type nodeIngress struct {
	n       *Node
	eng     *Engine
	in      *Ingress
	scratch []byte
	touched []coord.Client
}

// Ingress is what NewIngress of a Node returns.
type NodeIngress = *nodeIngress

// NewIngress returns the intake for one event loop, as Engine.NewIngress.
func (n *Node) NewIngress() *nodeIngress { return &nodeIngress{n: n} }

// current returns the intake of the engine that serves, nil if none does.
func (i *nodeIngress) current() *Ingress {
	if e := i.n.serving.Load(); e != i.eng {
		if i.in != nil {
			if i.in.Flush() { // the old engine answers, or refuses
				i.in.Lend()
			}
		}
		i.eng, i.in = e, nil
		if e != nil {
			i.in = e.NewIngress()
		}
	}
	return i.in
}

func (i *nodeIngress) refuse(c coord.Client, req uint64, op protocol.Op) {
	f := notLeading(i.n.leader.Load())
	i.scratch = protocol.AppendErr(i.scratch[:0], f.code, op, f.text)
	c.Complete(req, i.scratch)
	if k := len(i.touched); k == 0 || i.touched[k-1] != c {
		i.touched = append(i.touched, c)
	}
}

// Publish takes a PUB, see Ingress.Publish.
func (i *nodeIngress) Publish(c coord.Client, req uint64, p *protocol.Pub) {
	if in := i.current(); in != nil {
		in.Publish(c, req, p)
		return
	}
	i.refuse(c, req, protocol.OpPub)
}

// PublishOwned takes a PUB, see Ingress.PublishOwned.
func (i *nodeIngress) PublishOwned(c coord.Client, req uint64, p *protocol.Pub, own coord.Releaser) {
	if in := i.current(); in != nil {
		in.PublishOwned(c, req, p, own)
		return
	}
	i.refuse(c, req, protocol.OpPub)
	own.Release()
}

// Request takes any other request, see Ingress.Request.
func (i *nodeIngress) Request(c coord.Client, req uint64, op protocol.Op, payload []byte) {
	if in := i.current(); in != nil {
		in.Request(c, req, op, payload)
		return
	}
	i.refuse(c, req, op)
}

// Interrupt ends c's waiting PULLs, see Ingress.Interrupt.
func (i *nodeIngress) Interrupt(c coord.Client) {
	if in := i.current(); in != nil {
		in.Interrupt(c)
	}
}

// Lend sees to what Flush has left, see Ingress.Lend.
func (i *nodeIngress) Lend() {
	if i.in != nil {
		i.in.Lend()
	}
}

// Flush hands over what was taken, see Ingress.Flush.
func (i *nodeIngress) Flush() (lend bool) {
	if i.in != nil {
		lend = i.in.Flush()
	}
	for k, c := range i.touched {
		c.Flush()
		i.touched[k] = nil
	}
	i.touched = i.touched[:0]
	return lend
}

// ClientClosed tells that a connection is gone, see Engine.ClientClosed.
func (n *Node) ClientClosed(c coord.Client) {
	if e := n.engine.Load(); e != nil {
		e.ClientClosed(c)
	}
}

// ClientWritable tells that a connection's outstanding bytes have drained, see Engine.ClientWritable.
func (n *Node) ClientWritable(c coord.Client) {
	if e := n.engine.Load(); e != nil {
		e.ClientWritable(c)
	}
}

// Stopping is Engine.Stopping.
func (n *Node) Stopping() {
	if e := n.engine.Load(); e != nil {
		e.Stopping()
	}
}
