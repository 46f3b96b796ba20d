package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/net/peer"
)

// clusterConfig returns a valid configuration of node 0 of three on loopback.
func clusterConfig() Config {
	c := Default()
	c.ListenClient, c.ListenPeer = "127.0.0.1:7188", "127.0.0.1:7189"
	for i := range 3 {
		c.Peers = append(c.Peers, Peer{
			NodeID: i, Addr: fmt.Sprintf("127.0.0.1:%d", 7189+10*i), ClientAddr: fmt.Sprintf("127.0.0.1:%d", 7188+10*i),
		})
	}
	return c
}

func secretFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

const goodSecret = "0123456789abcdef0123456789abcdef"

func TestCheckCluster_AcceptsWhatWorks(t *testing.T) {
	for name, change := range map[string]func(c *Config){
		"on loopback without a secret": func(*Config) {},
		"on loopback with a secret":    func(c *Config) { c.PeerSecretFile = secretFile(t, goodSecret+"\n") },
		"on a network with a secret": func(c *Config) {
			c.PeerSecretFile, c.ListenPeer = secretFile(t, goodSecret), "0.0.0.0:7189"
			for i := range c.Peers {
				c.Peers[i].Addr, c.Peers[i].ClientAddr = fmt.Sprintf("mq%d.example:7189", i), fmt.Sprintf("mq%d.example:7188", i)
			}
		},
		"any order of leaders":   func(c *Config) { c.LeaderPriority = []int{2, 0, 1} },
		"one preferred leader":   func(c *Config) { c.LeaderPriority = []int{1} },
		"numbers at the bounds":  func(c *Config) { c.Peers[1].NodeID, c.Peers[2].NodeID = 65534, 7 },
		"a single node":          func(c *Config) { c.Peers = nil },
		"the quickest leases":    func(c *Config) { c.LeaseHeartbeatMs, c.LeaseMs = 10, 40 },
		"a client address by v6": func(c *Config) { c.Peers[1].ClientAddr = "[2001:db8::1]:7188" },
	} {
		c := clusterConfig()
		change(&c)
		if err := errors.Join(c.checkCluster()...); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestCheckCluster_SaysWhatIsWrong(t *testing.T) {
	for name, test := range map[string]struct {
		change func(c *Config)
		want   string
	}{
		"two nodes":                  {func(c *Config) { c.Peers = c.Peers[:2] }, "peers names 2 nodes: a cluster has 3"},
		"four nodes":                 {func(c *Config) { c.Peers = append(c.Peers, Peer{9, "a:1", "a:2"}) }, "peers names 4 nodes"},
		"this node is missing":       {func(c *Config) { c.NodeID = 5 }, "peers does not name this node, whose node_id is 5"},
		"a number twice":             {func(c *Config) { c.Peers[2].NodeID = 1 }, "peers[1].node_id and peers[2].node_id are both 1"},
		"a number too large":         {func(c *Config) { c.Peers[2].NodeID = 65535 }, "peers[2].node_id is 65535: use 0 to 65534"},
		"a negative number":          {func(c *Config) { c.Peers[2].NodeID = -1 }, "peers[2].node_id is -1"},
		"an address twice":           {func(c *Config) { c.Peers[2].Addr = c.Peers[0].Addr }, "peers[0].addr and peers[2].addr are both 127.0.0.1:7189"},
		"one address for two things": {func(c *Config) { c.Peers[1].ClientAddr = c.Peers[1].Addr }, "peers[1].addr and peers[1].client_addr are both"},
		"no address":                 {func(c *Config) { c.Peers[1].Addr = "" }, `peers[1].addr is "": use host:port`},
		"no client address":          {func(c *Config) { c.Peers[1].ClientAddr = "" }, `peers[1].client_addr is "": use host:port`},
		"an address of all":          {func(c *Config) { c.Peers[1].Addr = "0.0.0.0:7189" }, "name the host by which they reach it"},
		"an address of nobody":       {func(c *Config) { c.Peers[1].ClientAddr = ":7188" }, "name the host by which they reach it"},
		"port 0":                     {func(c *Config) { c.Peers[1].Addr = "127.0.0.1:0" }, "peers[1].addr is \"127.0.0.1:0\": the others must know the port"},
		"any port to listen on":      {func(c *Config) { c.ListenPeer = "127.0.0.1:0" }, "listen_peer is \"127.0.0.1:0\": the others must know the port"},
		"a leader that isn't":        {func(c *Config) { c.LeaderPriority = []int{0, 3} }, "leader_priority[1] is 3, which is not the node_id"},
		"a leader twice":             {func(c *Config) { c.LeaderPriority = []int{0, 1, 0} }, "leader_priority names node 0 twice"},
		"open without a secret":      {func(c *Config) { c.Peers[1].Addr = "mq1.example:7189" }, `peers[1].addr is "mq1.example:7189", which others can reach, and there is no peer_secret_file`},
		"listening without a secret": {func(c *Config) { c.ListenPeer = "0.0.0.0:7189" }, `listen_peer is "0.0.0.0:7189", which others can reach`},
		"no secret in the file":      {func(c *Config) { c.PeerSecretFile = secretFile(t, "\n") }, "holds a secret of 0 bytes: use 16 to 4096"},
		"a secret too short":         {func(c *Config) { c.PeerSecretFile = secretFile(t, "  hunter2 \n") }, "holds a secret of 7 bytes"},
		"a secret too long":          {func(c *Config) { c.PeerSecretFile = secretFile(t, strings.Repeat("x", 4097)) }, "holds a secret of 4097 bytes"},
		"no such file":               {func(c *Config) { c.PeerSecretFile = "/does/not/exist" }, "peer_secret_file: open /does/not/exist"},
		"a leader of itself":         {func(c *Config) { c.Peers, c.LeaderPriority = nil, []int{0} }, "leader_priority is set, but peers is not"},
		"a secret with itself":       {func(c *Config) { c.Peers, c.PeerSecretFile = nil, "/x" }, "peer_secret_file is set, but peers is not"},
		"a lease too short":          {func(c *Config) { c.LeaseMs = 399 }, "lease_ms is 399: use 400 to"},
		"a heartbeat too short":      {func(c *Config) { c.LeaseHeartbeatMs = 9 }, "lease_heartbeat_ms is 9: use 10 to"},
		"no time for a quorum":       {func(c *Config) { c.QuorumTimeoutMs = 0 }, "quorum_timeout_ms is 0"},
		"a soft gap of nothing":      {func(c *Config) { c.FollowerSoftGapMs = 0 }, "follower_soft_gap_ms is 0"},
		"a soft gap of no bytes":     {func(c *Config) { c.FollowerSoftGapBytes = 0 }, "follower_soft_gap_bytes is 0"},
		"a hard gap of two hours":    {func(c *Config) { c.FollowerHardGapMs = 7_200_000 }, "follower_hard_gap_ms is 7200000: use 1 to 3600000"},
	} {
		c := clusterConfig()
		test.change(&c)
		err := errors.Join(c.checkCluster()...)
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: the error repeats the secret", name)
		}
	}
}

func TestParse_PeersInTheFileAndAsAVariable(t *testing.T) {
	const peers = `[{"node_id": 0, "addr": "127.0.0.1:7189", "client_addr": "127.0.0.1:7188"},
		{"node_id": 1, "addr": "127.0.0.1:7199", "client_addr": "127.0.0.1:7198"},
		{"node_id": 2, "addr": "127.0.0.1:7209", "client_addr": "127.0.0.1:7208"}]`
	var c Config
	if err := c.parseFile([]byte(`{"peers": ` + peers + `, "leader_priority": [2, 1, 0], "lease_ms": 2000}`)); err != nil {
		t.Fatal(err)
	}
	if want := clusterConfig().Peers; !slices.Equal(c.Peers, want) || !slices.Equal(c.LeaderPriority, []int{2, 1, 0}) || c.LeaseMs != 2000 {
		t.Errorf("%+v", c)
	}
	i := slices.IndexFunc(settings, func(s setting) bool { return s.key == "peers" })
	var again Config
	if err := settings[i].set(&again, peers); err != nil || !slices.Equal(again.Peers, c.Peers) {
		t.Errorf("%+v, %v", again.Peers, err)
	}
}

func TestConfig_WhatReplicationAndTransportAreTold(t *testing.T) {
	c := clusterConfig()
	c.NodeID = 1
	if got := c.nodeIDs(); !slices.Equal(got, []replica.NodeID{1, 2, 3}) {
		t.Errorf("the nodes are %v", got)
	}
	addrs, names := c.others()
	if want := (map[replica.NodeID]string{1: "127.0.0.1:7189", 3: "127.0.0.1:7209"}); !maps.Equal(addrs, want) {
		t.Errorf("the others are %v", addrs)
	}
	if want := (map[replica.NodeID]string{1: "0", 2: "1", 3: "2"}); !maps.Equal(names, want) {
		t.Errorf("the names are %v", names)
	}
	for _, test := range []struct {
		priority []int
		want     [3]int // ranks of nodes 0, 1, 2
	}{
		{nil, [3]int{0, 1, 2}},
		{[]int{2, 1, 0}, [3]int{2, 1, 0}},
		{[]int{1}, [3]int{1, 0, 2}},
	} {
		c.LeaderPriority = test.priority
		for node, want := range test.want {
			c.NodeID = node
			if got := c.rank(); got != want {
				t.Errorf("with %v the rank of node %d is %d, not %d", test.priority, node, got, want)
			}
		}
	}
	c.PeerSecretFile = secretFile(t, "\t"+goodSecret+" \r\n")
	if secret, err := c.secret(); err != nil || string(secret) != goodSecret {
		t.Errorf("the secret is %q, %v", secret, err)
	}
}

func TestPeerCounters_NameNodesAsPeopleKnowThem(t *testing.T) {
	c := clusterConfig()
	_, names := c.others()
	list := peerCounters([]peer.LaneStats{
		{Peer: 2, Lane: peerwire.Log, Version: 1, SentBytes: 7}, {Peer: 3, Lane: peerwire.Bulk, RoundTrip: time.Millisecond},
	}, 5, names)
	got := make(map[string]float64)
	for _, c := range list {
		key := c.Name + " " + c.Peer + " " + c.Lane
		if _, twice := got[key]; twice {
			t.Errorf("%s is there twice", key)
		}
		got[key] = c.Value
	}
	for key, want := range map[string]float64{
		"mortarmq_peer_connected 1 log": 1, "mortarmq_peer_connected 2 bulk": 0, "mortarmq_peer_sent_bytes_total 1 log": 7,
		"mortarmq_peer_round_trip_seconds 2 bulk": 0.001, "mortarmq_peer_handshakes_refused_total  ": 5,
	} {
		if v, ok := got[key]; !ok || v != want {
			t.Errorf("%s is %v", key, v)
		}
	}
}
