package main

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"

	"github.com/mortarmq/mortarmq/engine/replica"
)

const (
	// maxNodeID is the largest node_id in a cluster: replica.NodeID has one more, since 0 is nobody there.
	maxNodeID = 65534
	// minSecret and maxSecret bound the peers' secret in bytes. A shorter one could be guessed from a recorded handshake.
	minSecret = 16
	maxSecret = 4096
	// maxClusterMs bounds every timeout of the cluster.
	maxClusterMs = 3600 * 1000
)

// clustered reports whether this broker is one of several.
func (c *Config) clustered() bool { return len(c.Peers) > 0 }

// part says what this broker is a part of.
func (c *Config) part() string {
	if !c.clustered() {
		return "a single node"
	}
	return fmt.Sprintf("node %d of %d, peers at %s", c.NodeID, len(c.Peers), c.ListenPeer)
}

// replicaID turns a node_id into the number that replication knows the node by.
func replicaID(nodeID int) replica.NodeID { return replica.NodeID(nodeID + 1) }

// nodeIDs returns every node of the cluster, ascending.
func (c *Config) nodeIDs() []replica.NodeID {
	ids := make([]replica.NodeID, len(c.Peers))
	for i, p := range c.Peers {
		ids[i] = replicaID(p.NodeID)
	}
	slices.Sort(ids)
	return ids
}

// others returns the peer addresses of the other nodes, and the names of all for people.
func (c *Config) others() (addrs, names map[replica.NodeID]string) {
	addrs, names = make(map[replica.NodeID]string), make(map[replica.NodeID]string)
	for _, p := range c.Peers {
		names[replicaID(p.NodeID)] = strconv.Itoa(p.NodeID)
		if p.NodeID != c.NodeID {
			addrs[replicaID(p.NodeID)] = p.Addr
		}
	}
	return addrs, names
}

// rank is this node's place among the preferred leaders, from 0: in leader_priority, and behind those in peers' order.
func (c *Config) rank() int {
	order := slices.Clone(c.LeaderPriority)
	for _, p := range c.Peers {
		if !slices.Contains(order, p.NodeID) {
			order = append(order, p.NodeID)
		}
	}
	return max(slices.Index(order, c.NodeID), 0)
}

// secret reads the peers' secret, nil where there is none. White space around it doesn't count, since editors add it.
func (c *Config) secret() ([]byte, error) {
	if c.PeerSecretFile == "" {
		return nil, nil
	}
	text, err := os.ReadFile(c.PeerSecretFile)
	if err != nil {
		return nil, fmt.Errorf("peer_secret_file: %w", err)
	}
	text = bytes.TrimSpace(text)
	if len(text) < minSecret || len(text) > maxSecret {
		return nil, fmt.Errorf("peer_secret_file: %s holds a secret of %d bytes: use %d to %d, the same on all nodes (openssl rand -hex 32)",
			c.PeerSecretFile, len(text), minSecret, maxSecret)
	}
	return text, nil
}

// checkCluster reports every problem with the keys that are for clusters.
func (c *Config) checkCluster() []error {
	errs := c.checkTimeouts()
	if !c.clustered() {
		if len(c.LeaderPriority) > 0 {
			errs = append(errs, errors.New("leader_priority is set, but peers is not: a node on its own always leads, leave it out"))
		}
		if c.PeerSecretFile != "" {
			errs = append(errs, errors.New("peer_secret_file is set, but peers is not: leave it out, or name all nodes in peers"))
		}
		return errs
	}
	errs = append(errs, c.checkPeers()...)
	for i, id := range c.LeaderPriority {
		if !slices.ContainsFunc(c.Peers, func(p Peer) bool { return p.NodeID == id }) {
			errs = append(errs, fmt.Errorf("leader_priority[%d] is %d, which is not the node_id of one of the peers", i, id))
		}
		if slices.Index(c.LeaderPriority, id) != i {
			errs = append(errs, fmt.Errorf("leader_priority names node %d twice", id))
		}
	}
	if _, err := c.secret(); err != nil {
		errs = append(errs, err)
	}
	if c.PeerSecretFile == "" {
		open := []string{}
		for i, p := range c.Peers {
			if !isLoopback(p.Addr) {
				open = append(open, fmt.Sprintf("peers[%d].addr is %q", i, p.Addr))
			}
		}
		if len(open) == 0 && !isLoopback(c.ListenPeer) {
			open = append(open, fmt.Sprintf("listen_peer is %q", c.ListenPeer))
		}
		if len(open) > 0 {
			errs = append(errs, fmt.Errorf("%s, which others can reach, and there is no peer_secret_file, so anybody could join the cluster: "+
				"name a file with a secret that all nodes share (openssl rand -hex 32), or use 127.0.0.1", open[0]))
		}
	}
	return errs
}

// checkPeers reports every problem with peers itself.
func (c *Config) checkPeers() []error {
	var errs []error
	if len(c.Peers) != replica.MaxNodes {
		errs = append(errs, fmt.Errorf("peers names %d nodes: a cluster has %d, this one among them", len(c.Peers), replica.MaxNodes))
	}
	if !slices.ContainsFunc(c.Peers, func(p Peer) bool { return p.NodeID == c.NodeID }) {
		errs = append(errs, fmt.Errorf("peers does not name this node, whose node_id is %d: name all nodes, the same on each", c.NodeID))
	}
	seen := make(map[string]string)
	once := func(i int, key, value string) {
		at := fmt.Sprintf("peers[%d].%s", i, key)
		if other, ok := seen[value]; ok {
			errs = append(errs, fmt.Errorf("%s and %s are both %s: each node has its own", other, at, value))
			return
		}
		seen[value] = at
	}
	for i, p := range c.Peers {
		if p.NodeID < 0 || p.NodeID > maxNodeID {
			errs = append(errs, fmt.Errorf("peers[%d].node_id is %d: use 0 to %d", i, p.NodeID, maxNodeID))
		}
		once(i, "node_id", strconv.Itoa(p.NodeID))
		for _, a := range []struct{ key, addr string }{{"addr", p.Addr}, {"client_addr", p.ClientAddr}} {
			if err := checkRemoteAddr(a.addr); err != nil {
				errs = append(errs, fmt.Errorf("peers[%d].%s is %q: %w", i, a.key, a.addr, err))
			} else {
				once(i, a.key, a.addr)
			}
		}
	}
	if _, port, err := net.SplitHostPort(c.ListenPeer); err == nil && port == "0" {
		errs = append(errs, fmt.Errorf("listen_peer is %q: the others must know the port, so choose one", c.ListenPeer))
	}
	return errs
}

// checkRemoteAddr checks an address that other machines are to connect to.
func checkRemoteAddr(addr string) error {
	if err := checkAddr(addr); err != nil {
		return err
	}
	host, port, _ := net.SplitHostPort(addr) // checked
	if ip, err := netip.ParseAddr(host); host == "" || (err == nil && ip.IsUnspecified()) {
		return errors.New("the others can't connect to that: name the host by which they reach it")
	}
	if port == "0" {
		return errors.New("the others must know the port: choose one")
	}
	return nil
}

// checkTimeouts reports every problem with the cluster's times, in single nodes too: they are the same file but for peers.
func (c *Config) checkTimeouts() []error {
	var errs []error
	for _, ms := range []struct {
		key   string
		value int64
		least int64
	}{
		{"lease_heartbeat_ms", c.LeaseHeartbeatMs, 10},
		{"lease_ms", c.LeaseMs, 4 * c.LeaseHeartbeatMs},
		{"quorum_timeout_ms", c.QuorumTimeoutMs, 1},
		{"follower_soft_gap_ms", c.FollowerSoftGapMs, 1},
		{"follower_hard_gap_ms", c.FollowerHardGapMs, 1},
	} {
		if ms.value < ms.least || ms.value > maxClusterMs {
			errs = append(errs, fmt.Errorf("%s is %d: use %d to %d", ms.key, ms.value, ms.least, maxClusterMs))
		}
	}
	if c.FollowerSoftGapBytes < 1 {
		errs = append(errs, fmt.Errorf("follower_soft_gap_bytes is %d: use 1 or more", c.FollowerSoftGapBytes))
	}
	return errs
}
