package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/mortarmq/mortarmq/tests/harness"
)

const (
	// electionTimeout is how long a cluster may take until all nodes name the same leader.
	electionTimeout = 60 * time.Second
	electionPoll    = 5 * time.Millisecond
	// wrongConfiguration is the exit status with which mortard refuses its configuration.
	wrongConfiguration = 2
)

// node is a member of a cluster, or a broker alone, that can be started again at the same addresses.
type node struct {
	id           int
	client, peer string
	dir          string
	d            *harness.Daemon
}

// newNodes lays out n nodes.
func (r *runner) newNodes(n int) []*node {
	nodes := make([]*node, n)
	for i := range nodes {
		nodes[i] = &node{id: i + 1, client: harness.LastingAddr(), peer: harness.LastingAddr(), dir: filepath.Join(r.dataDir(), fmt.Sprint(i+1))}
	}
	return nodes
}

// start starts one node; of a single one nothing about peers is configured.
func (r *runner) startNode(ctx context.Context, n *node, all []*node) error {
	config := r.config()
	config["listen_client"] = n.client
	if len(all) > 1 {
		peers := make([]map[string]any, len(all))
		for i, p := range all {
			peers[i] = map[string]any{"node_id": p.id, "addr": p.peer, "client_addr": p.client}
		}
		config["node_id"], config["listen_peer"], config["peers"] = n.id, n.peer, peers
	}
	d, err := harness.Start(ctx, harness.Options{Binary: r.cfg.Mortard, DataDir: n.dir, Config: config, LogPath: r.mortardLog(),
		ReadyTimeout: electionTimeout})
	var refused *harness.StartError
	if errors.As(err, &refused) && refused.ExitCode == wrongConfiguration && len(all) > 1 && strings.Contains(refused.Log, "single nodes only") {
		return fmt.Errorf("%w: this mortard runs single nodes only", errSkipped)
	}
	if err != nil {
		return fmt.Errorf("node %d: %w", n.id, err)
	}
	n.d = d
	return nil
}

// startNodes starts all nodes at once: a cluster forms when all of them answer.
func (r *runner) startNodes(ctx context.Context, nodes []*node) error {
	team, ctx := newTeam(ctx)
	for _, n := range nodes {
		team.start(func() error { return r.startNode(ctx, n, nodes) })
	}
	err := team.wait()
	if err != nil {
		killNodes(nodes)
	}
	return err
}

func killNodes(nodes []*node) {
	for _, n := range nodes {
		if n.d != nil {
			n.d.Kill()
		}
	}
}

// leader waits until every running node names the same leader and the quorum is healthy, and returns that node.
func leader(ctx context.Context, nodes []*node) (*node, error) {
	if len(nodes) == 1 {
		return nodes[0], nil
	}
	deadline := time.Now().Add(electionTimeout)
	for {
		led, state := agreed(nodes)
		if led != nil {
			return led, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(electionPoll):
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("no leader within %v: %s", electionTimeout, state)
		}
	}
}

// agreed asks every running node who leads; nil, and what they say, where they do not agree.
func agreed(nodes []*node) (led *node, state string) {
	var says []string
	same := true
	for _, n := range nodes {
		if n.d == nil {
			continue
		}
		var answer struct {
			LeaderID    int    `json:"leader_id"`
			LeaderEpoch uint64 `json:"leader_epoch"`
			QuorumState string `json:"quorum_state"`
		}
		var text bytes.Buffer
		err := n.d.Fetch("/leader", &text)
		if err == nil {
			err = json.Unmarshal(text.Bytes(), &answer)
		}
		if err != nil {
			return nil, fmt.Sprintf("node %d: %v", n.id, err)
		}
		says = append(says, fmt.Sprintf("node %d: leader %d, epoch %d, %s", n.id, answer.LeaderID, answer.LeaderEpoch, answer.QuorumState))
		var named *node
		for _, other := range nodes {
			if other.id == answer.LeaderID && other.d != nil && answer.QuorumState == "healthy" {
				named = other
			}
		}
		if named == nil || led != nil && named != led {
			same = false
		}
		led = named
	}
	if !same {
		return nil, strings.Join(says, "; ")
	}
	return led, ""
}

// openCluster starts a cluster on an empty directory and finds its leader.
func openCluster(ctx context.Context, r *runner, s *Sample, n int) (server, error) {
	nodes := r.newNodes(n)
	began := now()
	if err := r.startNodes(ctx, nodes); err != nil {
		return nil, err
	}
	led, err := leader(ctx, nodes)
	if err != nil {
		killNodes(nodes)
		return nil, err
	}
	s.StartSeconds = float64(now()-began) / 1e9
	m := &mortardServer{addr: led.client, group: groupName, nodes: []*harness.Daemon{led.d}}
	for _, other := range nodes {
		if other != led {
			m.nodes = append(m.nodes, other.d)
		}
	}
	return m, nil
}
