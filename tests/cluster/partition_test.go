package cluster

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

// connect starts a cluster whose nodes reach each other through a Network.
func connect(t *testing.T) (*rig, *Network) {
	t.Helper()
	n := NewNetwork()
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return start(t, harness.ClusterOptions{Config: with(map[string]any{"quorum_timeout_ms": 500}), Via: n.Via}), n
}

func TestPartition_OldLeaderAcknowledgesNothingBeyondItsLease(t *testing.T) {
	for _, tt := range []struct {
		name string
		cut  func(n *Network, leader int, cut bool)
	}{
		{"both ways", func(n *Network, leader int, cut bool) { n.Isolate(leader, cut) }},
		{"the leader hears the others, which don't hear it", func(n *Network, leader int, cut bool) {
			for _, other := range others(leader) {
				n.Lose(leader, other, cut)
			}
		}},
		{"the others hear the leader, which doesn't hear them", func(n *Network, leader int, cut bool) {
			for _, other := range others(leader) {
				n.Lose(other, leader, cut)
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, n := connect(t)
			c := r.client()
			topic := r.declare(c, "t")
			r.publish(c, "t", "before", 50, 100)
			old := r.leader()
			conn := r.conn(old)
			tt.cut(n, old, true)
			r.deposed(old, conn, topic, func() { tt.cut(n, old, false) })
			r.do("read", func(ctx context.Context) error {
				found, err := ReadAll(ctx, c, "t", 50)
				for at, value := range found {
					if value == "late" {
						t.Errorf("%v holds a message that was refused", at)
					}
				}
				return err
			})
		})
	}
}

// deposed waits until another node than old leads, sees that old, which is cut off, refuses what comes to it on conn, has the cut
// mended, and waits until old follows.
func (r *rig) deposed(old int, conn *harness.Conn, topic uint16, mend func()) {
	r.t.Helper()
	r.leader(others(old)...)
	for range 3 {
		code, err := answer(conn, topic, "late")
		if err != nil {
			break // it steps down and closes
		}
		if code == 0 {
			r.t.Fatal("the old leader has acknowledged a publish")
		}
		if !code.Retriable() && code != protocol.CodeStaleLeaderEpoch {
			r.t.Errorf("the old leader refuses with %v", code)
		}
	}
	mend()
	r.await(old, "following", func(ok bool, state string) bool { return harness.Follows(ok, state) || harness.Leads(ok, state) })
	r.healthy()
}

// A follower that takes a while costs nothing but its own lag: the other one carries the quorum.
func TestSlowFollower_TheOthersCarryTheQuorum(t *testing.T) {
	r, n := connect(t)
	c := r.client()
	r.declare(c, "t")
	leader := r.leader()
	slow := others(leader)[0]
	const delay = 300 * time.Millisecond // each way
	n.Delay(leader, slow, delay)
	n.Delay(slow, leader, delay)
	r.publish(c, "t", "m", 200, 1000)
	n.Delay(leader, slow, 0)
	n.Delay(slow, leader, 0)
	r.healthy()
	r.do("read", func(ctx context.Context) error {
		found, err := ReadAll(ctx, c, "t", 200)
		if len(found) != 200 {
			t.Errorf("%d messages are stored", len(found))
		}
		return err
	})
}

// namespaces puts each node into a network namespace of its own, so that what is cut is the kernel's routing. It needs the
// privileges of a container's root.
type namespaces struct {
	t      *testing.T
	prefix string
	subnet string
}

func newNamespaces(t *testing.T) (*namespaces, harness.ClusterOptions) {
	t.Helper()
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("there is no ip command: partitions in TestPartition go through a proxy and need none")
	}
	n := &namespaces{t: t, prefix: "mq" + strconv.Itoa(os.Getpid()) + "n", subnet: fmt.Sprintf("10.%d.%d.", 64+os.Getpid()%128, os.Getpid()/128%256)}
	bridge := n.prefix + "b"
	t.Cleanup(func() {
		_ = n.ip("link", "del", bridge) // those that were made
		for i := range harness.ClusterSize {
			_ = n.ip("netns", "del", n.name(i))
		}
	})
	var o harness.ClusterOptions
	steps := [][]string{{"link", "add", bridge, "type", "bridge"}, {"addr", "add", n.subnet + "1/24", "dev", bridge}, {"link", "set", bridge, "up"}}
	for i := range harness.ClusterSize {
		veth, ns := n.name(i)+"v", n.name(i)
		steps = append(steps, []string{"netns", "add", ns}, []string{"link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", ns},
			[]string{"link", "set", veth, "master", bridge, "up"}, []string{"-n", ns, "addr", "add", n.host(i) + "/24", "dev", "eth0"},
			[]string{"-n", ns, "link", "set", "eth0", "up"}, []string{"-n", ns, "link", "set", "lo", "up"})
		o.Hosts = append(o.Hosts, n.host(i))
	}
	for _, step := range steps {
		if err := n.ip(step...); err != nil {
			t.Skipf("network namespaces are not permitted here (%v): partitions in TestPartition go through a proxy and need none", err)
		}
	}
	dir := t.TempDir()
	secret := filepath.Join(dir, "secret")
	if err := os.WriteFile(secret, []byte("of a test, nobody else's"), 0o600); err != nil {
		t.Fatal(err)
	}
	digest := sha256.Sum256([]byte(token))
	o.Config = with(map[string]any{"peer_secret_file": secret, "auth_token_digests": []string{hex.EncodeToString(digest[:])}, "quorum_timeout_ms": 500})
	for i := range harness.ClusterSize {
		wrapper := filepath.Join(dir, "mortard-"+strconv.Itoa(i))
		if err := os.WriteFile(wrapper, fmt.Appendf(nil, "#!/bin/sh\nexec ip netns exec %s %s \"$@\"\n", n.name(i), mortard), 0o700); err != nil {
			t.Fatal(err)
		}
		o.Binaries = append(o.Binaries, wrapper)
	}
	return n, o
}

// token is what clients of nodes in namespaces need: their addresses are no loopback ones.
const token = "of a test"

func (n *namespaces) name(i int) string { return n.prefix + strconv.Itoa(i) }
func (n *namespaces) host(i int) string { return n.subnet + strconv.Itoa(10+i) }

func (n *namespaces) ip(args ...string) error {
	out, err := exec.Command("ip", args...).CombinedOutput()
	if err != nil {
		return errors.Join(fmt.Errorf("ip %s: %s", strings.Join(args, " "), strings.TrimSpace(string(out))), err)
	}
	return nil
}

// lose has what from sends to to go nowhere, or end that: the reverse way stays.
func (n *namespaces) lose(from, to int, lost bool) {
	n.t.Helper()
	verb := "del"
	if lost {
		verb = "add"
	}
	if err := n.ip("-n", n.name(from), "route", verb, "blackhole", n.host(to)+"/32"); err != nil {
		n.t.Fatal(err)
	}
}

// The kernel drops what the leader sends, and what the leader hears arrives: a one-way partition of real packets.
func TestPartition_OneWayInTheKernelEndsTheLeadership(t *testing.T) {
	n, o := newNamespaces(t)
	r := start(t, o)
	old := r.leader()
	conn, err := harness.Dial(r.ClientAddr(old), token)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	topic, err := conn.Declare("t", 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, other := range others(old) {
		n.lose(old, other, true)
	}
	r.deposed(old, conn, topic.TopicID, func() {
		for _, other := range others(old) {
			n.lose(old, other, false)
		}
	})
}
