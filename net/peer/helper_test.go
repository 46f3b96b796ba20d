package peer

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
)

// patience is how long tests wait for what must happen.
const patience = 60 * time.Second

// testSecret is what the nodes of the tests share.
var testSecret = []byte("a secret that the nodes of the tests share")

// event is one call of a handler.
type event struct {
	what    string // "connected", "disconnected", "writable", or the frame's kind
	from    replica.NodeID
	lane    peerwire.Lane
	peer    Peer
	err     error
	append  peerwire.Append
	flushed peerwire.Flushed
	reject  peerwire.Reject
	bulk    peerwire.BulkFrame
	message *replica.Message
	payload []byte
}

// recorder is a handler that notes what arrives. It keeps no payload unless hold is set.
type recorder struct {
	hold atomic.Bool

	mu     sync.Mutex
	events []event
	held   []peerwire.Payload
	more   chan struct{} // replaced and closed at each event
}

func newRecorder() *recorder { return &recorder{more: make(chan struct{})} }

func (r *recorder) note(e event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
	close(r.more)
	r.more = make(chan struct{})
}

func (r *recorder) take(p peerwire.Payload) []byte {
	if p == nil {
		return nil
	}
	b := bytes.Clone(p.Bytes())
	if r.hold.Load() {
		r.mu.Lock()
		r.held = append(r.held, p)
		r.mu.Unlock()
	} else {
		p.Release()
	}
	return b
}

// letGo releases what is held and holds nothing more.
func (r *recorder) letGo() {
	r.hold.Store(false)
	r.mu.Lock()
	held := r.held
	r.held = nil
	r.mu.Unlock()
	for _, p := range held {
		p.Release()
	}
}

func (r *recorder) Connected(from replica.NodeID, lane peerwire.Lane, p Peer) {
	r.note(event{what: "connected", from: from, lane: lane, peer: p})
}

func (r *recorder) Disconnected(from replica.NodeID, lane peerwire.Lane, err error) {
	r.note(event{what: "disconnected", from: from, lane: lane, err: err})
}

func (r *recorder) Writable(to replica.NodeID, lane peerwire.Lane) {
	r.note(event{what: "writable", from: to, lane: lane})
}

func (r *recorder) Message(from replica.NodeID, m *replica.Message) {
	r.note(event{what: "MESSAGE", from: from, lane: peerwire.Control, message: m})
}

func (r *recorder) Append(from replica.NodeID, a *peerwire.Append, p peerwire.Payload) {
	r.note(event{what: "APPEND", from: from, lane: peerwire.Log, append: *a, payload: r.take(p)})
}

func (r *recorder) Flushed(from replica.NodeID, f *peerwire.Flushed) {
	r.note(event{what: "FLUSHED", from: from, lane: peerwire.Log, flushed: *f})
}

func (r *recorder) Reject(from replica.NodeID, f *peerwire.Reject) {
	r.note(event{what: "REJECT", from: from, lane: peerwire.Log, reject: *f})
}

func (r *recorder) Bulk(from replica.NodeID, f peerwire.BulkFrame, p peerwire.Payload) {
	r.note(event{what: f.Kind().String(), from: from, lane: peerwire.Bulk, bulk: f, payload: r.take(p)})
}

// count returns how many of the events so far are as asked for.
func (r *recorder) count(is func(*event) bool) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for i := range r.events {
		if is(&r.events[i]) {
			n++
		}
	}
	return n
}

// wait waits until n of the events are as asked for and returns them.
func (r *recorder) wait(t *testing.T, what string, n int, is func(*event) bool) []event {
	t.Helper()
	timeout := time.After(patience)
	for {
		var found []event
		r.mu.Lock()
		for i := range r.events {
			if is(&r.events[i]) {
				found = append(found, r.events[i])
			}
		}
		more, all := r.more, len(r.events)
		r.mu.Unlock()
		if len(found) >= n {
			return found
		}
		select {
		case <-more:
		case <-timeout:
			t.Fatalf("waiting for %s: %d of %d came, among %d events", what, len(found), n, all)
		}
	}
}

func (r *recorder) waitOne(t *testing.T, what string, from replica.NodeID) event {
	t.Helper()
	return r.wait(t, what, 1, func(e *event) bool { return e.what == what && e.from == from })[0]
}

func connectedOn(lane peerwire.Lane, from replica.NodeID) func(*event) bool {
	return func(e *event) bool { return e.what == "connected" && e.lane == lane && e.from == from }
}

func disconnectedOn(lane peerwire.Lane, from replica.NodeID) func(*event) bool {
	return func(e *event) bool { return e.what == "disconnected" && e.lane == lane && e.from == from }
}

// node is a transport under test.
type node struct {
	*Transport
	rec  *recorder
	id   replica.NodeID
	logs *logBuffer
}

// logBuffer keeps what was logged.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// listen returns a listener on loopback.
func listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

var testIdentity = Identity{Cluster: replica.ClusterID{1, 2, 3}, Logs: 2}

// newNodes returns n connected-to-be transports, numbered from 1; change may alter their options.
func newNodes(t *testing.T, n int, change func(o *Options)) []*node {
	t.Helper()
	listeners := make([]net.Listener, n)
	for i := range listeners {
		listeners[i] = listen(t)
	}
	nodes := make([]*node, n)
	for i := range nodes {
		peers := make(map[replica.NodeID]string)
		for k, l := range listeners {
			if k != i {
				peers[replica.NodeID(k+1)] = l.Addr().String()
			}
		}
		nodes[i] = startNode(t, replica.NodeID(i+1), listeners[i], peers, change)
	}
	return nodes
}

func startNode(t *testing.T, id replica.NodeID, l net.Listener, peers map[replica.NodeID]string, change func(o *Options)) *node {
	t.Helper()
	n := &node{rec: newRecorder(), id: id, logs: new(logBuffer)}
	o := Options{
		Self: id, Listener: l, Peers: peers, Secret: testSecret, Handler: n.rec,
		Identity: func() Identity { return testIdentity },
		Logger:   slog.New(slog.NewTextHandler(n.logs, nil)),
		// No connection ends because the machine is busy, unless a test wants them to.
		IdleTimeout: patience, HandshakeTimeout: patience,
	}
	if change != nil {
		change(&o)
	}
	tr, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := tr.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.Transport = tr
	t.Cleanup(func() {
		n.rec.letGo()
		if err := tr.Close(); err != nil {
			t.Errorf("closing node %d: %v", id, err)
		}
	})
	return n
}

// waitConnected waits until all lanes between all nodes are connected.
func waitConnected(t *testing.T, nodes []*node) {
	t.Helper()
	for _, n := range nodes {
		for _, other := range nodes {
			if n == other {
				continue
			}
			for lane := range peerwire.Lanes {
				n.rec.wait(t, fmt.Sprintf("node %d to connect with %d on lane %v", n.id, other.id, lane), 1, connectedOn(lane, other.id))
			}
		}
	}
}

// eventually waits until something is true.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for !ok() {
		select {
		case <-ctx.Done():
			t.Fatalf("%s: not within %v", what, patience)
		case <-time.After(time.Millisecond):
		}
	}
}

// TestMain fails where goroutines of this package are left behind by the tests.
func TestMain(m *testing.M) {
	code := m.Run()
	deadline := time.Now().Add(patience)
	for code == 0 {
		left := goroutines()
		if len(left) == 0 {
			break
		}
		if time.Now().After(deadline) {
			fmt.Fprintf(os.Stderr, "goroutines are left behind:\n%s\n", strings.Join(left, "\n\n"))
			code = 1
		}
		time.Sleep(time.Millisecond)
	}
	os.Exit(code)
}

// goroutines returns the stacks of this package's goroutines but the one that runs TestMain.
func goroutines() []string {
	buf := make([]byte, 1<<20)
	var ours []string
	for stack := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
		if strings.Contains(stack, "mortarmq/net/peer.") && !strings.Contains(stack, "net/peer.TestMain") {
			ours = append(ours, stack)
		}
	}
	return ours
}

// owner counts its releases.
type owner struct{ released atomic.Int64 }

func (o *owner) Release() { o.released.Add(1) }
