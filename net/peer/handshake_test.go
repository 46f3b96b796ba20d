package peer

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
)

// TestHandshake_RefusesNodesThatDoNotBelongTogether lets node 2 differ from node 1.
func TestHandshake_RefusesNodesThatDoNotBelongTogether(t *testing.T) {
	identity := func(i Identity) func(o *Options) {
		return func(o *Options) { o.Identity = func() Identity { return i } }
	}
	for name, c := range map[string]struct {
		change func(o *Options) // of node 2
		want   error
		text   string // of node 1's log
	}{
		"another secret":      {func(o *Options) { o.Secret = []byte("something else entirely") }, ErrSecret, "does not know the secret"},
		"no secret":           {func(o *Options) { o.Secret = nil }, ErrSecret, "does not know the secret"},
		"another cluster":     {identity(Identity{Cluster: replica.ClusterID{9}, Logs: 2}), ErrCluster, "belongs to cluster"},
		"other logs":          {identity(Identity{Cluster: testIdentity.Cluster, Logs: 3}), ErrLogs, "node 2 has 3"},
		"a later version":     {func(o *Options) { o.minVersion, o.maxVersion = 3, 4 }, ErrVersion, "node 2 speaks 3 to 4"},
		"an earlier version":  {func(o *Options) { o.minVersion, o.maxVersion = 1, 1 }, ErrVersion, "node 2 speaks 1 to 1"},
		"it expects others":   {func(o *Options) { o.Peers = map[replica.NodeID]string{7: "127.0.0.1:1"} }, ErrNode, "node 1 is not among the peers of node 2"},
		"it is somebody else": {func(o *Options) { o.Self = 5 }, ErrNode, "node 2 was called, but this is node 5"},
	} {
		t.Run(name, func(t *testing.T) {
			nodes := newNodes(t, 2, func(o *Options) {
				quick(o)
				o.minVersion, o.maxVersion = 2, 2
				if o.Self == 2 {
					c.change(o)
				}
			})
			conn, err := net.Dial("tcp", nodes[1].Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = conn.Close() }()
			if _, err := nodes[0].dialHandshake(conn, 2, peerwire.Log); !errors.Is(err, c.want) {
				t.Errorf("the caller is told %v", err)
			}
			eventually(t, "a log line on the node that calls", func() bool { return strings.Contains(nodes[0].logs.String(), c.text) })
			eventually(t, "a log line on the node that is called", func() bool { return strings.Contains(nodes[1].logs.String(), "refused") })
			for _, n := range nodes {
				if n.rec.count(func(*event) bool { return true }) != 0 {
					t.Errorf("node %d was told something", n.id)
				}
			}
		})
	}
}

func TestHandshake_NodesWithoutAClusterMeetThoseWithOne(t *testing.T) {
	nodes := newNodes(t, 3, func(o *Options) {
		if o.Self == 2 {
			o.Identity = func() Identity { return Identity{} }
		}
	})
	waitConnected(t, nodes)
	e := nodes[0].rec.wait(t, "node 2", 1, connectedOn(peerwire.Control, 2))[0]
	if e.peer.Identity != (Identity{}) {
		t.Errorf("node 2 says %+v of itself", e.peer.Identity)
	}
}

func TestHandshake_ReconnectTellsTheNewIdentity(t *testing.T) {
	var formed atomic.Bool
	nodes := newNodes(t, 2, func(o *Options) {
		o.Identity = func() Identity {
			if formed.Load() {
				return testIdentity
			}
			return Identity{}
		}
	})
	waitConnected(t, nodes)
	formed.Store(true)
	nodes[1].Reconnect()
	nodes[0].rec.wait(t, "the new identity", 3, func(e *event) bool {
		return e.what == "connected" && e.peer.Identity == testIdentity
	})
}

// TestHandshake_VersionsThatDifferByOneAgreeOnTheLower is a rolling upgrade.
func TestHandshake_VersionsThatDifferByOneAgreeOnTheLower(t *testing.T) {
	nodes := newNodes(t, 3, func(o *Options) {
		o.minVersion, o.maxVersion = 1, 1+uint8(o.Self%2) // nodes 1 and 3 are new
	})
	waitConnected(t, nodes)
	for _, n := range nodes {
		for _, e := range n.rec.wait(t, "connections", 6, func(e *event) bool { return e.what == "connected" }) {
			want := uint8(1)
			if n.id != 2 && e.from != 2 {
				want = 2
			}
			if e.peer.Version != want {
				t.Errorf("node %d speaks version %d with node %d", n.id, e.peer.Version, e.from)
			}
		}
		f := peerwire.Flushed{Epoch: 1, Index: 1}
		for _, other := range nodes {
			if other != n {
				n.Flushed(other.id, &f)
				other.rec.waitOne(t, "FLUSHED", n.id)
			}
		}
	}
}

// TestHandshake_RecordedHandshakesAreWorthNothing plays to a node what another one has said to it before.
func TestHandshake_RecordedHandshakesAreWorthNothing(t *testing.T) {
	nodes := newNodes(t, 2, func(o *Options) {
		quick(o)
		if o.Self == 1 {
			o.Peers = map[replica.NodeID]string{2: "127.0.0.1:1"} // it makes no connection of its own
		}
	})
	record := func() (said []byte) {
		conn, err := net.Dial("tcp", nodes[1].Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		spy := &recordedConn{Conn: conn}
		if _, err := nodes[0].dialHandshake(spy, 2, peerwire.Log); err != nil {
			t.Fatal(err)
		}
		return spy.said.Bytes()
	}
	said := record()
	nodes[1].rec.wait(t, "the genuine connection", 1, connectedOn(peerwire.Log, 1))
	nodes[1].rec.wait(t, "its end", 1, disconnectedOn(peerwire.Log, 1))
	conn, err := net.Dial("tcp", nodes[1].Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(patience))
	if _, err := conn.Write(said); err != nil {
		t.Fatal(err)
	}
	if _, err := readHandshake(conn, peerwire.KindChallenge); err != nil {
		t.Fatal(err)
	}
	if _, err := readHandshake(conn, peerwire.KindWelcome); !errors.Is(err, ErrSecret) {
		t.Errorf("the recorded handshake ends with %v", err)
	}
	if n := nodes[1].rec.count(connectedOn(peerwire.Log, 1)); n != 1 {
		t.Errorf("node 1 is connected %d times", n)
	}
}

type recordedConn struct {
	net.Conn
	said bytes.Buffer
}

func (c *recordedConn) Write(b []byte) (int, error) {
	c.said.Write(b)
	return c.Conn.Write(b)
}

// TestHandshake_ANodeIsNotDeceivedByItsOwnProof answers a caller with what the caller itself has said.
func TestHandshake_ANodeIsNotDeceivedByItsOwnProof(t *testing.T) {
	nodes := newNodes(t, 2, func(o *Options) {
		if o.Self == 1 {
			o.Peers = map[replica.NodeID]string{2: "127.0.0.1:1"}
		}
	})
	ours, theirs := net.Pipe()
	defer func() { _, _ = ours.Close(), theirs.Close() }()
	result := make(chan error, 1)
	go func() {
		_, err := nodes[0].dialHandshake(ours, 2, peerwire.Log)
		result <- err
	}()
	said, err := readHandshake(theirs, peerwire.KindHello)
	if err != nil {
		t.Fatal(err)
	}
	h := hello{min: 1, max: 1, lane: peerwire.Log, from: 2, to: 1, cluster: testIdentity.Cluster, logs: testIdentity.Logs}
	h.encode()
	if err := writeHandshake(theirs, peerwire.KindChallenge, h.raw); err != nil {
		t.Fatal(err)
	}
	proof, err := readHandshake(theirs, peerwire.KindProof)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(append(said, proof...), testSecret) {
		t.Error("the secret itself was sent")
	}
	if err := writeHandshake(theirs, peerwire.KindWelcome, proof); err != nil {
		t.Fatal(err)
	}
	if err := <-result; !errors.Is(err, ErrSecret) {
		t.Errorf("the caller is satisfied with its own proof: %v", err)
	}
}

func TestHandshake_StrangersAreClosedWithoutHarm(t *testing.T) {
	nodes := newNodes(t, 2, func(o *Options) {
		o.HandshakeTimeout = time.Second
		o.BackoffMax = 10 * time.Millisecond
	})
	waitConnected(t, nodes)
	say := func(change func(h *hello)) []byte {
		h := hello{min: 1, max: 1, from: 1, to: 2}
		change(&h)
		h.encode()
		var b bytes.Buffer
		_ = writeHandshake(&bufferConn{Buffer: &b}, peerwire.KindHello, h.raw)
		return b.Bytes()
	}
	long := make([]byte, maxHandshakeBody+1)
	var tooLong bytes.Buffer
	_ = writeHandshake(&bufferConn{Buffer: &tooLong}, peerwire.KindHello, long)
	good := say(func(*hello) {})
	flipped := bytes.Clone(good)
	flipped[40] ^= 1
	strangers := make(map[string]net.Conn)
	for name, said := range map[string][]byte{
		"nothing":                {},
		"a client of HTTP":       []byte("GET / HTTP/1.1\r\nHost: mq1\r\n\r\n"),
		"half a header":          good[:7],
		"half a hello":           good[:40],
		"a flipped bit":          flipped,
		"a hello that is short":  append(good[:4:4], append([]byte{0, 0, 0, 0}, good[8:16]...)...),
		"a hello that is long":   tooLong.Bytes(),
		"a node of higher rank":  say(func(h *hello) { h.from = 3 }),
		"itself":                 say(func(h *hello) { h.from = 2 }),
		"a lane that isn't":      say(func(h *hello) { h.lane = peerwire.Lanes }),
		"a proof before a hello": append([]byte(nil), good...)[:2],
	} {
		conn, err := net.Dial("tcp", nodes[1].Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(patience))
		if _, err := conn.Write(said); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		strangers[name] = conn
	}
	for name, conn := range strangers {
		if _, err := io.Copy(io.Discard, conn); err != nil && !isReset(err) {
			t.Errorf("%s: not closed: %v", name, err)
		}
		_ = conn.Close()
	}
	for _, n := range nodes {
		alternates(t, n)
	}
	nodes[0].Flushed(2, &peerwire.Flushed{Epoch: 1})
	nodes[1].rec.waitOne(t, "FLUSHED", 1)
}

// bufferConn is a connection that only takes what is written.
type bufferConn struct {
	net.Conn
	*bytes.Buffer
}

func (c *bufferConn) Write(b []byte) (int, error) { return c.Buffer.Write(b) }
func (c *bufferConn) Read([]byte) (int, error)    { return 0, io.EOF }

func isReset(err error) bool {
	return strings.Contains(err.Error(), "reset by peer")
}

// TestHandshake_SilentStrangersDoNotKeepPeersOut holds every place for handshakes until they time out.
func TestHandshake_SilentStrangersDoNotKeepPeersOut(t *testing.T) {
	began := time.Now()
	listeners := []net.Listener{listen(t), listen(t)}
	addrs := map[replica.NodeID]string{1: listeners[0].Addr().String(), 2: listeners[1].Addr().String()}
	called := startNode(t, 2, listeners[1], map[replica.NodeID]string{1: addrs[1]}, func(o *Options) { o.HandshakeTimeout = time.Second })
	for range 2 * maxHandshakes {
		conn, err := net.Dial("tcp", addrs[2])
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
	}
	eventually(t, "refusals", func() bool { _, refused := called.Stats(); return refused >= maxHandshakes })
	caller := startNode(t, 1, listeners[0], map[replica.NodeID]string{2: addrs[2]}, quick)
	waitConnected(t, []*node{caller, called})
	n := strings.Count(called.logs.String(), "was refused")
	if most := 1 + int(time.Since(began)/refusalLogEvery); n > most {
		t.Errorf("%d lines were logged for %d strangers", n, 2*maxHandshakes)
	}
}

// TestHandshake_PeerThatSaysNothingIsCalledAgain has a listener that accepts and stays silent in the place of node 2.
func TestHandshake_PeerThatSaysNothingIsCalledAgain(t *testing.T) {
	silent := listen(t)
	defer func() { _ = silent.Close() }()
	for _, timeout := range []time.Duration{50 * time.Millisecond, patience} {
		faulty := new(faultyNet)
		n := startNode(t, 1, listen(t), map[replica.NodeID]string{2: silent.Addr().String()}, func(o *Options) {
			quick(o)
			o.HandshakeTimeout, o.Dial = timeout, faulty.dial
		})
		want := 3 * int(peerwire.Lanes)
		if timeout == patience {
			want = int(peerwire.Lanes)
		}
		eventually(t, "calls", func() bool { return faulty.dials() >= want })
		// In the second case a handshake is still waited for.
		began := time.Now()
		if err := n.Close(); err != nil || time.Since(began) > patience/2 {
			t.Errorf("the end took %v: %v", time.Since(began), err)
		}
	}
}

func TestNew_RefusesOptionsThatCannotWork(t *testing.T) {
	good := func() Options {
		return Options{
			Self: 1, Addr: "127.0.0.1:0", Peers: map[replica.NodeID]string{2: "127.0.0.1:1"}, Handler: newRecorder(),
			Identity: func() Identity { return Identity{} },
		}
	}
	if _, err := New(good()); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change func(o *Options)
		want   string
	}{
		"no handler":               {func(o *Options) { o.Handler = nil }, "Handler"},
		"no identity":              {func(o *Options) { o.Identity = nil }, "Identity"},
		"itself":                   {func(o *Options) { o.Peers[1] = "127.0.0.1:2" }, "this node itself"},
		"open without a secret":    {func(o *Options) { o.Addr = "0.0.0.0:0" }, "others than this machine can reach 0.0.0.0:0"},
		"far off without a secret": {func(o *Options) { o.Peers[2] = "mq2.example:1" }, "others than this machine can reach mq2.example:1"},
		"too many": {func(o *Options) {
			for i := range 20 {
				o.Peers[replica.NodeID(i+2)] = "127.0.0.1:1"
			}
		}, "use at most"},
	} {
		o := good()
		c.change(&o)
		if _, err := New(o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for addr, want := range map[string]bool{
		"127.0.0.1:1": true, "127.9.9.9:1": true, "[::1]:1": true, "localhost:1": true, "0.0.0.0:1": false, ":1": false,
		"10.0.0.1:1": false, "mq1:1": false, "127.0.0.1": false,
	} {
		if Loopback(addr) != want {
			t.Errorf("%s is on loopback: %v", addr, !want)
		}
	}
}

func FuzzHandshake(f *testing.F) {
	var b bytes.Buffer
	h := hello{min: 1, max: 1, from: 1, to: 2}
	h.encode()
	_ = writeHandshake(&bufferConn{Buffer: &b}, peerwire.KindHello, h.raw)
	f.Add(b.Bytes())
	_ = writeHandshake(&bufferConn{Buffer: &b}, peerwire.KindProof, make([]byte, proofLen))
	f.Add(b.Bytes())
	f.Add([]byte{})
	tr, err := New(Options{
		Self: 2, Addr: "127.0.0.1:0", Peers: map[replica.NodeID]string{1: "127.0.0.1:1"}, Handler: newRecorder(),
		Identity: func() Identity { return testIdentity }, Secret: testSecret,
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, said []byte) {
		if _, err := tr.answer(&scriptedConn{in: bytes.NewReader(said)}); err == nil {
			t.Error("a stranger got in")
		}
	})
}

// scriptedConn says what it was given and hears nothing.
type scriptedConn struct {
	net.Conn
	in *bytes.Reader
}

func (c *scriptedConn) Read(b []byte) (int, error)  { return c.in.Read(b) }
func (c *scriptedConn) Write(b []byte) (int, error) { return len(b), nil }
func (c *scriptedConn) RemoteAddr() net.Addr        { return new(net.TCPAddr) }
