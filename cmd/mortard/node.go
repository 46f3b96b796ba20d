package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/engine"
	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/net/admin"
	"github.com/mortarmq/mortarmq/net/client"
	"github.com/mortarmq/mortarmq/net/peer"
)

// node is this broker's part in a cluster: the node, and the transport that connects it to the others.
type node struct {
	*engine.Node
	transport *peer.Transport
	names     map[replica.NodeID]string // of all nodes, for people
}

// NewIngress implements client.Handler.
func (n node) NewIngress() client.Ingress { return n.Node.NewIngress() }

// openNode joins the cluster that the configuration names.
func openNode(ctx context.Context, c *Config, log *slog.Logger) (*node, error) {
	secret, err := c.secret()
	if err != nil {
		return nil, err
	}
	addrs, names := c.others()
	in := new(inbound)
	t, err := peer.New(peer.Options{
		Self: replicaID(c.NodeID), Addr: c.ListenPeer, Peers: addrs, Names: names, Secret: secret,
		Identity: in.identity, Handler: in, Logger: log,
	})
	if err != nil {
		return nil, err
	}
	o := engine.NodeOptions{
		Engine: c.engineOptions(log), Self: replicaID(c.NodeID), Rank: c.rank(), Peers: t,
		Heartbeat: ms(c.LeaseHeartbeatMs), Lease: ms(c.LeaseMs), QuorumTimeout: ms(c.QuorumTimeoutMs),
		SoftGap: ms(c.FollowerSoftGapMs), SoftGapBytes: uint64(c.FollowerSoftGapBytes), HardGap: ms(c.FollowerHardGapMs),
		Rejoin: t.Reconnect,
	}
	for _, p := range c.Peers {
		o.Nodes = append(o.Nodes, engine.NodeInfo{ID: replicaID(p.NodeID), Name: strconv.Itoa(p.NodeID), ClientAddr: p.ClientAddr})
	}
	n, err := engine.OpenNode(o)
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", c.DataDir, err)
	}
	in.node.Store(n)
	if err := t.Start(ctx); err != nil {
		err = fmt.Errorf("%w (the address is listen_peer, --listen-peer)", err)
		ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
		defer cancel()
		return nil, errors.Join(err, n.Close(ctx))
	}
	return &node{n, t, names}, nil
}

func ms(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

// close ends the node, then the transport: a leader that ends tells the others.
func (n *node) close(ctx context.Context) error {
	return errors.Join(n.Close(ctx), n.transport.Close())
}

// inbound hands what the transport delivers to the node. Nothing comes before the node is there: the transport starts
// later.
type inbound struct{ node atomic.Pointer[engine.Node] }

func (in *inbound) identity() peer.Identity {
	cluster, logs := in.node.Load().Identity()
	return peer.Identity{Cluster: cluster, Logs: uint16(logs)}
}

// Connected implements peer.Handler, as the methods below do.
func (in *inbound) Connected(from replica.NodeID, lane peerwire.Lane, _ peer.Peer) {
	in.node.Load().Connected(from, lane)
}

// Disconnected implements peer.Handler.
func (in *inbound) Disconnected(from replica.NodeID, lane peerwire.Lane, _ error) {
	in.node.Load().Disconnected(from, lane)
}

// Writable implements peer.Handler.
func (in *inbound) Writable(to replica.NodeID, lane peerwire.Lane) { in.node.Load().Writable(to, lane) }

// Message implements peer.Handler.
func (in *inbound) Message(from replica.NodeID, m *replica.Message) { in.node.Load().Message(from, m) }

// Append implements peer.Handler.
func (in *inbound) Append(from replica.NodeID, a *peerwire.Append, p peerwire.Payload) {
	in.node.Load().Append(from, a, p)
}

// Flushed implements peer.Handler.
func (in *inbound) Flushed(from replica.NodeID, f *peerwire.Flushed) { in.node.Load().Flushed(from, f) }

// Reject implements peer.Handler.
func (in *inbound) Reject(from replica.NodeID, r *peerwire.Reject) { in.node.Load().Reject(from, r) }

// Bulk implements peer.Handler.
func (in *inbound) Bulk(from replica.NodeID, f peerwire.BulkFrame, p peerwire.Payload) {
	in.node.Load().Bulk(from, f, p)
}

// health is what /healthz says of a node of a cluster.
func (n *node) health() (ok bool, state string) {
	st := n.Status()
	if e := n.Engine(); e != nil {
		if ok, state = e.Healthy(); !ok {
			return ok, state
		}
		return clusterHealth(&st, state)
	}
	switch {
	case st.Failed:
		return false, "this node's data can't be opened: see its log"
	case st.Cluster == replica.ClusterID{}:
		return false, "waiting for the other nodes to form the cluster"
	}
	return false, "recovering"
}

// clusterHealth is what /healthz says of a node whose engine is well, which itself says serving. A node that doesn't count is not
// healthy: who restarts the nodes one by one must wait until it does.
func clusterHealth(st *engine.NodeStatus, serving string) (ok bool, state string) {
	switch {
	case st.Failed:
		return false, "this node's disk has failed: it neither leads nor votes until it is restarted"
	case st.Serving:
		return true, fmt.Sprintf("leader of epoch %d, quorum %s, %s", st.Epoch, quorum(st.Quorum), serving)
	case st.Role == "leader":
		return false, fmt.Sprintf("leader of epoch %d without a majority: read only", st.Epoch)
	case st.Standing != replica.Voter && st.LeaderAddr == "":
		return false, fmt.Sprintf("catching up as a %s: no leader is known", st.Standing)
	case st.Standing != replica.Voter:
		return false, fmt.Sprintf("catching up as a %s: follows node %s in epoch %d", st.Standing, st.LeaderName, st.Epoch)
	case st.LeaderAddr == "":
		return false, "no leader is known"
	}
	return true, fmt.Sprintf("follows node %s in epoch %d as a %s", st.LeaderName, st.Epoch, st.Standing)
}

func quorum(q replica.QuorumState) admin.QuorumState { return admin.QuorumState(q) }

// complete adds what only a cluster has to the picture.
func (n *node) complete(snap *admin.Snapshot) {
	lanes, refused := n.transport.Stats()
	snap.Peers = peerCounters(lanes, refused, n.names)
	st := n.Status()
	snap.LeaderID = -1
	if id, err := strconv.Atoi(st.LeaderName); err == nil {
		snap.LeaderID = id
	}
	snap.Quorum = max(snap.Quorum, quorum(st.Quorum))
	snap.Coord.Epoch = uint32(st.Epoch)
}
