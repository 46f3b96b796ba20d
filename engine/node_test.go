package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/protocol"
)

// mesh is the network of a cluster in one process: what is sent arrives in order on a goroutine per direction, until a node
// is cut off.
type mesh struct {
	mu    sync.Mutex
	nodes map[replica.NodeID]*Node
	cut   map[[2]replica.NodeID]bool // from, to
	pipes map[[2]replica.NodeID]chan func(*Node)
	wg    sync.WaitGroup
	// loses says which frames get lost.
	loses func(peerwire.BulkFrame) bool
}

func newMesh() *mesh {
	return &mesh{nodes: map[replica.NodeID]*Node{}, cut: map[[2]replica.NodeID]bool{}, pipes: map[[2]replica.NodeID]chan func(*Node){}}
}

func (m *mesh) deliver(from, to replica.NodeID, f func(*Node)) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	k := [2]replica.NodeID{from, to}
	if m.cut[k] {
		return false
	}
	p := m.pipes[k]
	if p == nil {
		p = make(chan func(*Node), 1<<16)
		m.pipes[k] = p
		m.wg.Add(1)
		go func() {
			defer m.wg.Done()
			for f := range p {
				m.mu.Lock()
				n := m.nodes[to]
				if m.cut[k] {
					n = nil
				}
				m.mu.Unlock()
				f(n)
			}
		}()
	}
	select {
	case p <- f:
		return true
	default:
		return false
	}
}

// lose has frames get lost; nil: none do.
func (m *mesh) lose(loses func(peerwire.BulkFrame) bool) {
	m.mu.Lock()
	m.loses = loses
	m.mu.Unlock()
}

func (m *mesh) lost(f peerwire.BulkFrame) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.loses != nil && m.loses(f)
}

// inOneTransfer leaves out what is of any transfer but the first that has a frame of the kind.
func inOneTransfer(kind func(peerwire.BulkFrame) bool) func(peerwire.BulkFrame) bool {
	var one peerwire.Transfer
	return func(f peerwire.BulkFrame) bool {
		if !kind(f) {
			return false
		}
		if one == (peerwire.Transfer{}) {
			one = f.Of()
		}
		return one == f.Of()
	}
}

func (m *mesh) set(id replica.NodeID, n *Node) {
	m.mu.Lock()
	m.nodes[id] = n
	m.mu.Unlock()
	if n == nil {
		return
	}
	for _, other := range []replica.NodeID{1, 2, 3} {
		if other != id {
			m.connect(id, other)
		}
	}
}

// isolate cuts a node off, or ends that: then the nodes are connected anew.
func (m *mesh) isolate(id replica.NodeID, on bool) {
	m.mu.Lock()
	for _, other := range []replica.NodeID{1, 2, 3} {
		m.cut[[2]replica.NodeID{id, other}], m.cut[[2]replica.NodeID{other, id}] = on, on
	}
	m.mu.Unlock()
	for _, other := range []replica.NodeID{1, 2, 3} {
		if on || other == id {
			continue
		}
		m.connect(id, other)
		m.connect(other, id)
	}
}

// connect tells a node that it hears another one.
func (m *mesh) connect(from, to replica.NodeID) {
	for lane := peerwire.Control; lane < peerwire.Lanes; lane++ {
		m.deliver(from, to, func(n *Node) {
			if n != nil {
				n.Connected(from, lane)
			}
		})
	}
}

func (m *mesh) close() {
	m.mu.Lock()
	for _, p := range m.pipes {
		close(p)
	}
	m.mu.Unlock()
	m.wg.Wait()
}

// meshPeers is a node's end of the mesh.
type meshPeers struct {
	m    *mesh
	self replica.NodeID
}

// heap is a payload that was copied, as a network does.
type heap []byte

func (h heap) Bytes() []byte { return h }
func (h heap) Release()      {}

func copied(b []byte) peerwire.Payload {
	if b == nil {
		return nil
	}
	return heap(bytes.Clone(b))
}

func (p meshPeers) Message(to replica.NodeID, msg *replica.Message) bool {
	c := *msg
	c.Ends, c.Commits = append([]replica.End(nil), msg.Ends...), append([]replica.Index(nil), msg.Commits...)
	return p.m.deliver(p.self, to, func(n *Node) {
		if n != nil {
			n.Message(p.self, &c)
		}
	})
}

func (p meshPeers) Append(to replica.NodeID, a *peerwire.Append, payload []byte, owner peerwire.Releaser) bool {
	frame, b := *a, copied(payload)
	ok := p.m.deliver(p.self, to, func(n *Node) {
		if n != nil {
			n.Append(p.self, &frame, b)
		}
	})
	if ok && owner != nil {
		owner.Release()
	}
	return ok
}

func (p meshPeers) Flushed(to replica.NodeID, f *peerwire.Flushed) bool {
	c := *f
	return p.m.deliver(p.self, to, func(n *Node) {
		if n != nil {
			n.Flushed(p.self, &c)
		}
	})
}

func (p meshPeers) Reject(to replica.NodeID, r *peerwire.Reject) bool {
	c := *r
	return p.m.deliver(p.self, to, func(n *Node) {
		if n != nil {
			n.Reject(p.self, &c)
		}
	})
}

func (p meshPeers) Bulk(to replica.NodeID, f peerwire.BulkFrame, payload []byte, owner peerwire.Releaser) bool {
	b := copied(payload)
	lost := p.m.lost(f)
	ok := p.m.deliver(p.self, to, func(n *Node) {
		if n != nil && !lost {
			n.Bulk(p.self, f, b)
		}
	})
	if ok && owner != nil {
		owner.Release()
	}
	return ok
}

// trioLease is longer than a busy machine stops a process.
const trioLease = 3 * time.Second

// trio is a cluster of three nodes in one process.
type trio struct {
	// ackEvery is of how many messages acknowledged acknowledges one, with those before it; 0: each of them.
	ackEvery uint64
	t        *testing.T
	m        *mesh
	dirs     map[replica.NodeID]string
	nodes    map[replica.NodeID]*Node
	tune     func(*NodeOptions)
}

func newTrio(t *testing.T, tune func(*NodeOptions)) *trio {
	c := &trio{t: t, m: newMesh(), dirs: map[replica.NodeID]string{}, nodes: map[replica.NodeID]*Node{}, tune: tune}
	for id := replica.NodeID(1); id <= 3; id++ {
		c.dirs[id] = t.TempDir()
	}
	t.Cleanup(func() {
		for id := range c.dirs {
			c.stop(id)
		}
		c.m.close()
	})
	for id := range replica.NodeID(3) {
		c.start(id + 1)
	}
	return c
}

func (c *trio) start(id replica.NodeID) {
	c.t.Helper()
	n, err := c.open(id)
	if err != nil {
		c.t.Fatal(err)
	}
	c.nodes[id] = n
	c.m.set(id, n)
}

// open opens a node, which the others don't reach yet.
func (c *trio) open(id replica.NodeID) (*Node, error) {
	o := NodeOptions{Engine: testOptions(c.dirs[id]), Self: id, Rank: int(id) - 1, Peers: meshPeers{c.m, id}, Lease: trioLease}
	out := io.Discard
	if os.Getenv("MORTARMQ_TEST_LOG") != "" {
		out = os.Stderr
	}
	o.Engine.Logger = slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: slog.LevelDebug}))
	for i := replica.NodeID(1); i <= 3; i++ {
		o.Nodes = append(o.Nodes, NodeInfo{ID: i, Name: fmt.Sprint(i), ClientAddr: fmt.Sprintf("node-%d:7188", i)})
	}
	if c.tune != nil {
		c.tune(&o)
	}
	return OpenNode(o)
}

func (c *trio) stop(id replica.NodeID) {
	n := c.nodes[id]
	if n == nil {
		return
	}
	c.m.set(id, nil)
	delete(c.nodes, id)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := n.Close(ctx); err != nil {
		c.t.Errorf("closing node %d: %v", id, err)
	}
}

// leader waits until one of the nodes serves, other than those named.
func (c *trio) leader(not ...replica.NodeID) replica.NodeID {
	c.t.Helper()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
	nodes:
		for id, n := range c.nodes {
			for _, x := range not {
				if x == id {
					continue nodes
				}
			}
			if n.Status().Serving {
				return id
			}
		}
	}
	c.t.Fatal("no node serves")
	return 0
}

// nodePeer drives a node the way one event loop would.
type nodePeer struct {
	peer
	in *nodeIngress
}

func newNodePeer(t testing.TB, n *Node) *nodePeer {
	p := &nodePeer{peer: peer{t: t, c: newTestClient()}, in: n.NewIngress()}
	return p
}

func (p *nodePeer) declare(name string, partitions uint16) (protocol.DeclareResult, error) {
	p.t.Helper()
	req := p.c.request()
	d := protocol.Declare{Topic: []byte(name), Partitions: partitions}
	p.in.Request(p.c, req, protocol.OpDeclare, payloadOf(d.AppendFrame(nil)))
	flush(p.in)
	b, err := p.c.answer(p.t, req)
	var res protocol.DeclareResult
	if err == nil {
		err = res.Decode(b)
	}
	return res, err
}

func (p *nodePeer) publish(m protocol.Pub) (protocol.PubResult, error) {
	p.t.Helper()
	req := p.c.request()
	p.in.Publish(p.c, req, &m)
	flush(p.in)
	return p.result(req)
}

func TestNode_ThreeNodesFormAClusterAndCommit(t *testing.T) {
	t.Parallel()
	c := newTrio(t, nil)
	c.leader()
	topic := c.declare("orders", 2)
	for i := range 200 {
		res := c.commit(protocol.Pub{TopicID: topic.TopicID, Partition: 0, ProducerID: 7, ProducerSeq: uint64(i + 1), Value: fmt.Appendf(nil, "%d", i)})
		if res.Sequence != uint64(i+1) {
			t.Fatalf("publish %d: %+v", i, res)
		}
	}
	for _, n := range c.nodes {
		c.eventually("a follower names the leader", func() bool {
			if n.Status().Serving {
				return true
			}
			_, err := newNodePeer(t, n).publish(protocol.Pub{TopicID: topic.TopicID, Value: []byte("x")})
			leader := c.leader()
			var refused *protocol.Error
			return errors.As(err, &refused) && refused.Code == protocol.CodeStaleLeaderEpoch &&
				refused.Message == fmt.Sprintf("leader=%d node-%d:7188", leader, leader)
		})
	}

	first := c.leader()
	c.stop(first)
	c.leader()
	again := c.commit(protocol.Pub{TopicID: topic.TopicID, Partition: 0, ProducerID: 7, ProducerSeq: 200, Value: []byte("199")})
	if again.Sequence != 200 || again.Flags&protocol.ResultFlagDeduplicated == 0 {
		t.Fatalf("a publish sent again after the failover: %+v", again)
	}
	next := c.commit(protocol.Pub{TopicID: topic.TopicID, Partition: 0, ProducerID: 7, ProducerSeq: 201, Value: []byte("200")})
	if next.Sequence != 201 {
		t.Fatalf("the next publish: %+v", next)
	}
	c.start(first)
	if res := c.commit(protocol.Pub{TopicID: topic.TopicID, Partition: 0, ProducerID: 7, ProducerSeq: 202, Value: []byte("201")}); res.Sequence != 202 {
		t.Fatalf("a publish after the old leader came back: %+v", res)
	}
}

func TestNode_AnIsolatedLeaderAcknowledgesNothing(t *testing.T) {
	t.Parallel()
	c := newTrio(t, nil)
	c.leader()
	topic := c.declare("orders", 1)
	c.commit(protocol.Pub{TopicID: topic.TopicID, Value: []byte("kept")})
	first := c.leader()
	p := newNodePeer(t, c.nodes[first])
	c.m.isolate(first, true)
	if res, err := p.publish(protocol.Pub{TopicID: topic.TopicID, Value: []byte("lost")}); err == nil {
		t.Fatalf("the isolated leader acknowledged %+v", res)
	}
	second := c.leader(first)
	if res := c.commit(protocol.Pub{TopicID: topic.TopicID, Value: []byte("new")}); res.Sequence < 2 {
		t.Fatalf("the new leader: %+v", res)
	}
	c.m.isolate(first, false)
	// It comes back as a follower, and with the third node gone the two commit.
	for id := range c.nodes {
		if id != first && id != second {
			c.stop(id)
		}
	}
	for i := uint64(3); i < 30; i++ {
		// A publish that got an error may have been stored, and this producer has no number.
		if res := c.commit(protocol.Pub{TopicID: topic.TopicID, Value: []byte("more")}); res.Sequence < i {
			t.Fatalf("publish got %+v", res)
		}
	}
}

// A part of what it is sent may get lost with a connection, while those behind it arrive on the next one.
func TestNode_AFollowerThatWasAwayTooLongCatchesUpInBulk(t *testing.T) {
	for name, lost := range map[string]func(peerwire.BulkFrame) bool{
		"nothing is lost": func(peerwire.BulkFrame) bool { return false },
		"the records of a partition are lost": func(f peerwire.BulkFrame) bool {
			r, ok := f.(*peerwire.Records)
			return ok && r.Stream.Partition == 1
		},
		"a snapshot is lost": func(f peerwire.BulkFrame) bool {
			s, ok := f.(*peerwire.Snapshot)
			return ok && s.What == peerwire.SnapshotMetadata
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			catchUpInBulk(t, lost)
		})
	}
}

// catchUpInBulk has a follower catch up with a leader that sends it everything but, in the first transfer, what gets lost.
func catchUpInBulk(t *testing.T, lost func(peerwire.BulkFrame) bool) {
	c := newTrio(t, func(o *NodeOptions) { o.HistoryBytes = 64 << 10 })
	c.m.lose(inOneTransfer(lost))
	first := c.leader()
	topic := c.declare("orders", 3)
	p := newNodePeer(t, c.nodes[first])
	var away, other replica.NodeID
	for id := range c.nodes {
		switch {
		case id == first:
		case away == 0:
			away = id
		default:
			other = id
		}
	}
	c.stop(away)
	later := c.declare("later", 1)
	const n = 3000
	var reqs []uint64
	for i := range uint64(n) {
		reqs = append(reqs, p.c.request())
		p.in.Publish(p.c, reqs[i], &protocol.Pub{TopicID: topic.TopicID, Partition: uint16(i % 3), ProducerID: 9, ProducerSeq: i/3 + 1, Value: make([]byte, 1000)})
		if i%100 == 99 {
			flush(p.in)
		}
	}
	flush(p.in)
	for i, r := range reqs {
		if _, err := p.result(r); err != nil {
			// An election on a busy machine: in order, and recognised if it was stored.
			c.commit(protocol.Pub{TopicID: topic.TopicID, Partition: uint16(i % 3), ProducerID: 9, ProducerSeq: uint64(i)/3 + 1, Value: make([]byte, 1000)})
		}
	}
	c.start(away)
	// With the third node gone, publishes commit only if the one that was away has everything.
	c.waitStanding(away, replica.Voter)
	c.stop(other)
	for i := uint64(1); i <= 20; i++ {
		res := c.commit(protocol.Pub{TopicID: topic.TopicID, Partition: 0, ProducerID: 9, ProducerSeq: n/3 + i, Value: []byte("more")})
		if res.Sequence != n/3+i {
			t.Fatalf("publish %d is at %d", i, res.Sequence)
		}
	}
	// It can lead, knows every message, and recognises what was published while it was away.
	c.stop(first)
	c.start(other)
	res := c.commit(protocol.Pub{TopicID: topic.TopicID, Partition: 1, ProducerID: 9, ProducerSeq: n / 3, Value: make([]byte, 1000)})
	if res.Sequence != n/3 || res.Flags&protocol.ResultFlagDeduplicated == 0 {
		t.Fatalf("a publish from while it was away: %+v", res)
	}
	if res := c.commit(protocol.Pub{TopicID: later.TopicID, Value: []byte("first")}); res.Sequence != 1 {
		t.Fatalf("the first message of a topic that was declared while it was away: %+v", res)
	}
}

// eventually waits until something holds.
func (c *trio) eventually(what string, holds func() bool) {
	c.t.Helper()
	for deadline := time.Now().Add(time.Minute); !holds(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			c.t.Fatalf("not within a minute: %s", what)
		}
	}
}

// declare makes a topic on whichever node leads.
func (c *trio) declare(name string, partitions uint16) protocol.DeclareResult {
	c.t.Helper()
	var err error
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		var res protocol.DeclareResult
		if res, err = newNodePeer(c.t, c.nodes[c.leader()]).declare(name, partitions); err == nil {
			return res
		}
	}
	c.t.Fatalf("no topic %s: %v", name, err)
	return protocol.DeclareResult{}
}

// commit publishes to whichever node leads until one acknowledges.
func (c *trio) commit(m protocol.Pub) protocol.PubResult {
	c.t.Helper()
	var err error
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		for id := range replica.NodeID(3) {
			n := c.nodes[id+1]
			if n == nil || !n.Status().Serving {
				continue
			}
			var res protocol.PubResult
			if res, err = newNodePeer(c.t, n).publish(m); err == nil {
				return res
			}
		}
	}
	c.t.Fatalf("no node acknowledges %+v: %v", m, err)
	return protocol.PubResult{}
}

// waitStanding waits until a node's word is worth that much, and it follows.
func (c *trio) waitStanding(id replica.NodeID, s replica.Standing) {
	c.t.Helper()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		st := c.nodes[id].Status()
		if st.Standing == s && st.LeaderName != "" && len(c.nodes[id].catchingNow()) == 0 && !st.Reopening {
			return
		}
	}
	c.t.Fatalf("node %d is %+v", id, c.nodes[id].Status())
}

// catchingNow returns the logs that catch up.
func (n *Node) catchingNow() []int {
	answer := make(chan []int, 1)
	n.do(func() {
		var logs []int
		for log := range n.catchings {
			logs = append(logs, log)
		}
		answer <- logs
	})
	return <-answer
}

// damage changes a byte of a file.
func damage(t *testing.T, path string, at func(b []byte) int) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	i := at(b)
	b[i] ^= 0x40
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if _, err := f.WriteAt(b[i:i+1], int64(i)); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
}

func TestNode_ADamagedJournalIsMadeAgainFromTheOthers(t *testing.T) {
	t.Parallel()
	for name, at := range map[string]func(b []byte) int{
		"the header of a file": func([]byte) int { return 20 },
		"the last round": func(b []byte) int {
			last := 0
			for off := 0; off < len(b); off += 4096 {
				if bytes.HasPrefix(b[off:], []byte("MRND")) {
					last = off
				}
			}
			return last + 90
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newTrio(t, nil)
			first := c.leader()
			topic := c.declare("orders", 1)
			for i := range uint64(50) {
				c.commit(protocol.Pub{TopicID: topic.TopicID, ProducerID: 5, ProducerSeq: i + 1, Value: []byte("before")})
			}
			hurt := first%3 + 1
			c.stop(hurt)
			files, err := filepath.Glob(filepath.Join(c.dirs[hurt], "journal", "0", "*.mmj"))
			if err != nil || len(files) == 0 {
				t.Fatalf("no journal: %v", err)
			}
			damage(t, files[0], at)
			c.start(hurt)
			c.waitStanding(hurt, replica.Voter)
			other := hurt%3 + 1
			if other == first {
				other = other%3 + 1
			}
			c.stop(other)
			for i := uint64(51); i <= 60; i++ {
				res := c.commit(protocol.Pub{TopicID: topic.TopicID, ProducerID: 5, ProducerSeq: i, Value: []byte("after")})
				if res.Sequence != i {
					t.Fatalf("publish %d is at %d", i, res.Sequence)
				}
			}
			c.stop(first)
			c.start(other)
			c.leader()
		})
	}
}
