package harness

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// ClusterSize is the number of nodes of a Cluster.
const ClusterSize = 3

// ClusterOptions say how to start a Cluster.
type ClusterOptions struct {
	// Binary is the path of mortard; Dir holds the nodes' data directories and logs.
	Binary, Dir string
	// Config are further keys of the JSON configuration of all nodes.
	Config map[string]any
	// Hosts are the addresses of the nodes; empty is one address of the loopback network, drawn at random, for all.
	Hosts []string
	// Binaries replace Binary for a node each, if they are not empty.
	Binaries []string
	// Via returns the address at which node from finds the peer port of node to, which listens at addr; nil is addr itself.
	Via func(from, to int, addr string) string
}

// Cluster is three mortard processes that form a cluster. Each keeps its addresses and its data directory over any number
// of lives. Its methods are for one goroutine at a time, but for those that say otherwise.
type Cluster struct {
	opts   ClusterOptions
	client [ClusterSize]string
	admin  [ClusterSize]string
	peer   [ClusterSize]string
	nodes  [ClusterSize]*Daemon // the newest life of each
}

// ports of a cluster are below those that the kernel gives to outgoing connections.
const (
	firstPort = 10_000
	ports     = 20_000
)

// NewCluster draws addresses for a cluster, and checks that they are free; nothing runs yet.
func NewCluster(o ClusterOptions) (*Cluster, error) {
	c := &Cluster{opts: o}
	if len(o.Hosts) > 0 {
		for i, host := range o.Hosts {
			c.client[i], c.admin[i], c.peer[i] = net.JoinHostPort(host, "7188"), net.JoinHostPort(host, "7190"), net.JoinHostPort(host, "7189")
		}
		return c, nil
	}
	var err error
	for range portAttempts {
		if err = c.draw(); err == nil {
			return c, nil
		}
	}
	return nil, err
}

// draw gives the nodes ports of an address that nobody else uses, see LastingAddr.
func (c *Cluster) draw() error {
	host, _, err := net.SplitHostPort(LastingAddr())
	if err != nil {
		return err
	}
	first := firstPort + rand.N(ports-3*ClusterSize)
	var free []net.Listener
	defer func() {
		for _, l := range free {
			l.Close()
		}
	}()
	for i := range 3 * ClusterSize {
		addr := net.JoinHostPort(host, strconv.Itoa(first+i))
		l, err := net.Listen("tcp", addr)
		if err != nil {
			return err
		}
		free = append(free, l)
		[]*[ClusterSize]string{&c.client, &c.peer, &c.admin}[i%3][i/3] = addr
	}
	return nil
}

// Launch starts a node and doesn't wait for it.
func (c *Cluster) Launch(i int) error {
	dir := c.DataDir(i)
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	type peer struct {
		NodeID     int    `json:"node_id"`
		Addr       string `json:"addr"`
		ClientAddr string `json:"client_addr"`
	}
	var peers []peer
	for to := range ClusterSize {
		addr := c.peer[to]
		if c.opts.Via != nil && to != i {
			addr = c.opts.Via(i, to, addr)
		}
		peers = append(peers, peer{to, addr, c.client[to]})
	}
	config := map[string]any{"node_id": i, "peers": peers, "listen_peer": c.peer[i]}
	maps.Copy(config, c.opts.Config)
	binary := c.opts.Binary
	if len(c.opts.Binaries) > 0 {
		binary = c.opts.Binaries[i]
	}
	d, err := Launch(Options{Binary: binary, DataDir: dir, Config: config, ClientAddr: c.client[i], AdminAddr: c.admin[i]})
	if err == nil {
		c.nodes[i] = d
	}
	return err
}

// Start starts all nodes, which have no data yet, and waits until one of them leads and the others follow.
func (c *Cluster) Start(ctx context.Context) error {
	for attempt := 1; ; attempt++ {
		err := c.start(ctx)
		if err == nil || attempt == portAttempts || len(c.opts.Hosts) > 0 || !strings.Contains(err.Error(), "address already in use") {
			return err
		}
		c.Close() // another process took a port between our look and the broker's bind
		for i := range c.nodes {
			if err := os.RemoveAll(c.DataDir(i)); err != nil {
				return err
			}
		}
		if err := c.draw(); err != nil {
			return err
		}
	}
}

func (c *Cluster) start(ctx context.Context) error {
	for i := range c.nodes {
		if err := c.Launch(i); err != nil {
			return err
		}
	}
	return c.AwaitHealthy(ctx)
}

// Node returns a node's newest life, nil before the first.
func (c *Cluster) Node(i int) *Daemon { return c.nodes[i] }

// DataDir returns a node's data directory.
func (c *Cluster) DataDir(i int) string { return filepath.Join(c.opts.Dir, "node-"+strconv.Itoa(i)) }

// ClientAddr returns the address of a node's client port. Any goroutine.
func (c *Cluster) ClientAddr(i int) string { return c.client[i] }

// Addrs returns the client addresses of all nodes, separated by commas. Any goroutine.
func (c *Cluster) Addrs() string { return strings.Join(c.client[:], ",") }

// AdminAddrs returns the admin addresses of all nodes, separated by commas. Any goroutine.
func (c *Cluster) AdminAddrs() string { return strings.Join(c.admin[:], ",") }

// Await polls a node's /healthz until it says what is wanted; an error quotes the last answer and the node's log.
func (c *Cluster) Await(ctx context.Context, i int, what string, wanted func(ok bool, state string) bool) error {
	last := "nothing"
	for {
		ok, state, err := c.nodes[i].Health()
		if err == nil {
			last = fmt.Sprintf("healthy %v, %s", ok, state)
			if wanted(ok, state) {
				return nil
			}
		}
		if err := c.nodes[i].Crashed(); err != nil {
			return fmt.Errorf("node %d: %w", i, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("node %d is not %s: it says %s: %w\n%s", i, what, last, ctx.Err(), c.nodes[i].Log())
		case <-time.After(clusterPoll):
		}
	}
}

const clusterPoll = 20 * time.Millisecond

// AwaitHealthy waits until /healthz of these nodes, or of all, is 200.
func (c *Cluster) AwaitHealthy(ctx context.Context, nodes ...int) error {
	if len(nodes) == 0 {
		nodes = []int{0, 1, 2}
	}
	for _, i := range nodes {
		if err := c.Await(ctx, i, "healthy", func(ok bool, _ string) bool { return ok }); err != nil {
			return err
		}
	}
	return nil
}

// Leads reports whether a state of /healthz is that of a leader that serves writes, Follows whether it is that of a follower
// that counts.
func Leads(ok bool, state string) bool { return ok && strings.HasPrefix(state, "leader of epoch ") }

// Follows is described at Leads.
func Follows(ok bool, state string) bool { return ok && strings.HasPrefix(state, "follows node ") }

// Leader waits until one of the nodes, or of all, serves as the leader.
func (c *Cluster) Leader(ctx context.Context, nodes ...int) (int, error) {
	if len(nodes) == 0 {
		nodes = []int{0, 1, 2}
	}
	for {
		for _, i := range nodes {
			if ok, state, err := c.nodes[i].Health(); err == nil && Leads(ok, state) {
				return i, nil
			}
		}
		select {
		case <-ctx.Done():
			var errs []error
			for i, d := range c.nodes {
				errs = append(errs, fmt.Errorf("node %d:\n%s", i, d.Log()))
			}
			return 0, fmt.Errorf("no node leads: %w", errors.Join(append(errs, ctx.Err())...))
		case <-time.After(clusterPoll):
		}
	}
}

// Crashed returns an error if a node has ended by itself.
func (c *Cluster) Crashed() error {
	var errs []error
	for i, d := range c.nodes {
		if d == nil {
			continue
		}
		if err := d.Crashed(); err != nil {
			errs = append(errs, fmt.Errorf("node %d: %w", i, err))
		}
	}
	return errors.Join(errs...)
}

// CheckSums is Daemon.CheckSums for the node that leads. It is nil where none does, or leads no more when it is asked again.
func (c *Cluster) CheckSums() error {
	for i, d := range c.nodes {
		if d == nil {
			continue
		}
		ok, before, err := d.Health()
		if err != nil || !Leads(ok, before) {
			continue
		}
		_, err = d.CheckSums()
		if ok, now, healthErr := d.Health(); err != nil && healthErr == nil && ok && now == before {
			return fmt.Errorf("node %d, %s: %w", i, now, err)
		}
	}
	return nil
}

// EndScenario is for the end of a test: the groups' numbers must add up (see Daemon.CheckSums) on the node that leads, if one
// does. Then all are killed.
func (c *Cluster) EndScenario(t Failer) {
	t.Helper()
	defer c.Close()
	if t.Failed() {
		return
	}
	if err := c.CheckSums(); err != nil {
		t.Errorf("at the end of the test: %v", err)
	}
}

// Close kills what runs.
func (c *Cluster) Close() {
	for _, d := range c.nodes {
		if d != nil {
			d.Kill()
		}
	}
}
