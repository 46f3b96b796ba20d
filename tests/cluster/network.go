package cluster

import (
	"errors"
	"net"
	"sync"
	"time"

	"github.com/mortarmq/mortarmq/tests/harness"
)

// Network is what lies between the nodes of a cluster: each connection from one to another goes through it, and it loses or delays
// what flows in one direction, as a broken switch or a firewall does. It needs no privileges. The connections themselves stay
// open: nobody is told that nothing arrives.
type Network struct {
	mu      sync.Mutex
	changed chan struct{} // closed with each change
	lost    [harness.ClusterSize][harness.ClusterSize]bool
	delay   [harness.ClusterSize][harness.ClusterSize]time.Duration
	doors   []*door
	done    chan struct{}
	errs    []error
}

// door is where one node finds another.
type door struct {
	from, to int
	target   string // guarded by the network's lock
	l        net.Listener
}

// NewNetwork returns a network in which everything arrives.
func NewNetwork() *Network {
	return &Network{changed: make(chan struct{}), done: make(chan struct{})}
}

// Via is for harness.ClusterOptions: it opens a door, once, which leads to the newest addr.
func (n *Network) Via(from, to int, addr string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, d := range n.doors {
		if d.from == from && d.to == to {
			d.target = addr
			return d.l.Addr().String()
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		n.errs = append(n.errs, err)
		return addr
	}
	d := &door{from: from, to: to, target: addr, l: l}
	n.doors = append(n.doors, d)
	go n.accept(d)
	return l.Addr().String()
}

// Close ends all connections, and returns what kept the network from being there.
func (n *Network) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	close(n.done)
	for _, d := range n.doors {
		d.l.Close()
	}
	return errors.Join(n.errs...)
}

// Lose has what from sends to to arrive no more, or again.
func (n *Network) Lose(from, to int, lost bool) {
	n.change(func() { n.lost[from][to] = lost })
}

// Delay has what from sends to to arrive later by d.
func (n *Network) Delay(from, to int, d time.Duration) {
	n.change(func() { n.delay[from][to] = d })
}

// Isolate cuts a node off from the others, in both directions, or ends that.
func (n *Network) Isolate(node int, cut bool) {
	n.change(func() {
		for other := range harness.ClusterSize {
			if other != node {
				n.lost[node][other], n.lost[other][node] = cut, cut
			}
		}
	})
}

func (n *Network) change(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f()
	close(n.changed)
	n.changed = make(chan struct{})
}

// state returns what happens to what flows, and when to look again.
func (n *Network) state(from, to int) (lost bool, delay time.Duration, changed <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lost[from][to], n.delay[from][to], n.changed
}

func (n *Network) accept(d *door) {
	for {
		in, err := d.l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer in.Close()
			n.mu.Lock()
			target := d.target
			n.mu.Unlock()
			out, err := (&net.Dialer{Timeout: patience}).Dial("tcp", target)
			if err != nil {
				return
			}
			defer out.Close()
			ended := make(chan struct{}, 2)
			go n.carry(in, out, d.from, d.to, ended)
			go n.carry(out, in, d.to, d.from, ended)
			select {
			case <-ended:
			case <-n.done:
			}
		}()
	}
}

// parcel is what was read at one time.
type parcel struct {
	data []byte
	due  time.Time
}

// carry moves bytes from one end to the other. What is lost waits, as it does in a sender's retransmissions.
func (n *Network) carry(src, dst net.Conn, from, to int, ended chan<- struct{}) {
	defer func() { ended <- struct{}{} }()
	parcels := make(chan parcel, 256)
	go func() {
		defer close(parcels)
		for {
			b := make([]byte, 32<<10)
			k, err := src.Read(b)
			if k > 0 {
				_, delay, _ := n.state(from, to)
				select {
				case parcels <- parcel{b[:k], time.Now().Add(delay)}:
				case <-n.done:
					return
				}
			}
			if err != nil {
				return
			}
		}
	}()
	for p := range parcels {
		if !n.await(from, to, p.due) {
			return
		}
		if _, err := dst.Write(p.data); err != nil {
			return
		}
	}
}

// await waits until what flows in a direction arrives; false: the network is gone.
func (n *Network) await(from, to int, due time.Time) bool {
	for {
		lost, _, changed := n.state(from, to)
		if !lost {
			select {
			case <-time.After(time.Until(due)):
				return true
			case <-n.done:
				return false
			}
		}
		select {
		case <-changed:
		case <-n.done:
			return false
		}
	}
}
