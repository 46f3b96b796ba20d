package replica

import (
	"slices"
	"testing"
	"time"
)

// solo is one Node under test: the other nodes are what the test says for them.
type solo struct {
	t   *testing.T
	n   *Node
	now time.Duration
	// ends is what the logs are reported to end with.
	ends []End
	// holdPersist and holdFence keep Persist and FenceLogs from being carried out.
	holdPersist, holdFence bool
	persists               []Persist
	fences                 []FenceLogs
	out                    []Output // since the last call of clear
}

var testCluster = ClusterID{1: 7}

// newSolo returns node 1 of a formed cluster of three with two logs, after its first lease time.
func newSolo(t *testing.T, state Persistent, ends ...End) *solo {
	t.Helper()
	s := startSolo(t, 1, three, state, ends...)
	s.now += DefaultLease
	return s
}

func startSolo(t *testing.T, id NodeID, nodes []NodeID, state Persistent, ends ...End) *solo {
	t.Helper()
	rand := uint64(0)
	n, err := New(Config{Self: id, Nodes: nodes, Logs: 2, Rand: func() uint64 { rand += 1 << 32; return rand }}, state, 0)
	if err != nil {
		t.Fatal(err)
	}
	s := &solo{t: t, n: n, ends: ends}
	for len(s.ends) < 2 {
		s.ends = append(s.ends, End{})
	}
	s.drain()
	return s
}

func formed(promised Epoch) Persistent {
	return Persistent{Cluster: testCluster, Logs: 2, Promised: promised}
}

// drain carries out what the node wants, as far as that isn't held back.
func (s *solo) drain() {
	for {
		out := s.n.Take()
		if len(out) == 0 {
			return
		}
		s.out = append(s.out, out...)
		for _, o := range out {
			switch o := o.(type) {
			case Persist:
				s.persists = append(s.persists, o)
			case FenceLogs:
				s.fences = append(s.fences, o)
			default:
			}
		}
		s.release()
	}
}

func (s *solo) release() {
	for !s.holdPersist && len(s.persists) > 0 {
		p := s.persists[0]
		s.persists = s.persists[1:]
		s.n.Persisted(s.now, p.Token)
	}
	for !s.holdFence && len(s.fences) > 0 {
		f := s.fences[0]
		s.fences = s.fences[1:]
		s.n.Fenced(s.now, f.Epoch, slices.Clone(s.ends))
	}
}

func (s *solo) recv(from NodeID, m Message) {
	s.n.Receive(s.now, from, m)
	s.drain()
}

// do calls an input.
func (s *solo) do(f func(now time.Duration)) {
	f(s.now)
	s.drain()
}

// pass lets time pass in small steps.
func (s *solo) pass(d time.Duration) {
	for end := s.now + d; s.now < end; {
		s.now = min(s.now+10*time.Millisecond, end)
		s.do(s.n.Tick)
	}
}

func (s *solo) clear() { s.out = nil }

// sent returns the messages of a kind since the last clear.
func (s *solo) sent(k Kind) []SendMessage {
	var list []SendMessage
	for _, m := range outputs[SendMessage](s) {
		if m.Message.Kind == k {
			list = append(list, m)
		}
	}
	return list
}

// only returns the one message of a kind since the last clear.
func (s *solo) only(k Kind) SendMessage {
	s.t.Helper()
	list := s.sent(k)
	if len(list) != 1 {
		s.t.Fatalf("%d messages %v were sent, not one", len(list), k)
	}
	return list[0]
}

// outputs returns the outputs of a type since the last clear.
func outputs[T Output](s *solo) []T {
	var list []T
	for _, o := range s.out {
		if o, ok := o.(T); ok {
			list = append(list, o)
		}
	}
	return list
}

func has[T Output](s *solo) bool { return len(outputs[T](s)) > 0 }

// saw reports whether an event was told since the last clear.
func (s *solo) saw(k EventKind) bool {
	return slices.ContainsFunc(outputs[Event](s), func(e Event) bool { return e.What == k })
}

// stand makes the node a candidate with the pre-votes of the others.
func (s *solo) stand() {
	s.t.Helper()
	for range 200 {
		if s.n.role == candidate {
			return
		}
		s.pass(10 * time.Millisecond)
		for _, m := range s.sent(KindPreVote) {
			s.recv(m.To, Message{Kind: KindPreVoteAck, Session: m.Message.Session, Granted: true})
		}
		if s.n.role == asking {
			s.clear()
		}
	}
	s.t.Fatal("the node does not stand for election")
}

// lead makes the node lead with the promise of node 2, whose logs end where its own do, and open.
func (s *solo) lead() {
	s.t.Helper()
	s.stand()
	s.recv(2, Message{Kind: KindPromise, Epoch: s.n.state.Promised, Ends: slices.Clone(s.ends)})
	if s.n.role != leader {
		s.t.Fatalf("the node is %s", s.n.Role())
	}
	s.progress(1, 1)
	s.do(func(now time.Duration) { s.n.Opened(now, s.n.state.Promised) })
	s.clear()
}

// progress reports where both logs of a leader are.
func (s *solo) progress(last, commit Index, peers ...PeerProgress) {
	for k := range 2 {
		s.do(func(now time.Duration) {
			s.n.Progress(now, k, &Progress{Epoch: s.n.state.Promised, Leading: true, Last: last, Commit: commit, Peers: peers})
		})
	}
}

// ack answers a leader's newest heartbeat to a node.
func (s *solo) ack(from NodeID, standing Standing) {
	s.recv(from, Message{Kind: KindHeartbeatAck, Epoch: s.n.state.Promised, Sent: s.now, Instance: Instance(from), Standing: standing})
}

// follow makes the node follow node 2 in an epoch, with a lease from now.
func (s *solo) follow(epoch Epoch) {
	s.t.Helper()
	s.recv(2, Message{Kind: KindHeartbeat, Epoch: epoch, Sent: 5})
	if l, e := s.n.Leader(); l != 2 || e != epoch {
		s.t.Fatalf("the node follows %d in epoch %d", l, e)
	}
}
