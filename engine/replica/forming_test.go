package replica

import (
	"testing"
	"time"
)

// unformed returns a node that belongs to no cluster.
func unformed(t *testing.T, id NodeID, state Persistent) *solo {
	t.Helper()
	s := startSolo(t, id, three, state)
	s.pass(10 * time.Millisecond)
	return s
}

// tells answers a probe for another node.
func (s *solo) tells(from NodeID, stage Stage, cluster ClusterID, instance Instance) {
	s.recv(from, Message{Kind: KindProbeAck, Stage: stage, Cluster: cluster, Logs: 2, Instance: instance, Session: uint64(s.n.Instance())})
}

func (s *solo) acks(from NodeID, instance Instance) {
	s.recv(from, Message{Kind: KindFormAck, Stage: Forming, Cluster: s.n.state.Cluster, Logs: 2, Instance: instance})
}

func TestForming_NeedsAllNodesAndTheirAcknowledgement(t *testing.T) {
	s := unformed(t, 1, Persistent{})
	s.tells(2, Empty, ClusterID{}, 22)
	if s.pass(5 * time.Second); has[Persist](s) {
		t.Fatal("a cluster is formed without node 3")
	}
	s.tells(3, Empty, ClusterID{}, 33)
	if st := s.n.State(); !st.Forming || st.Cluster == (ClusterID{}) || st.Logs != 2 {
		t.Fatalf("%+v", st)
	}
	s.pass(time.Second)
	s.acks(2, 22)
	s.acks(2, 22)
	s.acks(3, 99) // an earlier instance
	if !s.n.State().Forming || has[FormedCluster](s) {
		t.Error("formed without node 3's acknowledgement")
	}
	for _, m := range s.sent(KindForm) {
		if m.Message.Session != uint64(m.To)*11 || m.Message.Cluster != s.n.State().Cluster {
			t.Fatalf("%+v", m)
		}
	}
	s.acks(3, 33)
	if st := s.n.State(); st.Forming || st.Promised != 1 || st.Learner || len(outputs[FormedCluster](s)) != 1 {
		t.Errorf("%+v", st)
	}
	formed, fenced := -1, -1
	for i, o := range s.out {
		switch o.(type) {
		case FormedCluster:
			formed = i
		case FenceLogs:
			fenced = i
		default:
		}
	}
	if fenced < formed {
		t.Error("logs are fenced before they are made")
	}
}

func TestForming_OnlyTheLowestIDForms(t *testing.T) {
	s := unformed(t, 2, Persistent{})
	s.tells(1, Empty, ClusterID{}, 11)
	s.tells(3, Empty, ClusterID{}, 33)
	if s.pass(5 * time.Second); has[Persist](s) {
		t.Error("node 2 forms a cluster")
	}
}

func TestForming_APersistedIDIsNeverDropped(t *testing.T) {
	x, y := ClusterID{1}, ClusterID{2}
	// The node that forms lost its disk when some had persisted x.
	s := unformed(t, 1, Persistent{})
	s.tells(2, Forming, x, 22)
	s.tells(3, Empty, ClusterID{}, 33)
	if st := s.n.State(); st.Cluster != x || !st.Forming {
		t.Errorf("%+v", st)
	}
	// It was restarted before all had.
	s = unformed(t, 1, Persistent{Cluster: x, Logs: 2, Forming: true})
	s.tells(2, Empty, ClusterID{}, 22)
	s.tells(3, Forming, x, 33)
	s.acks(2, 22)
	s.acks(3, 33)
	if st := s.n.State(); st.Cluster != x || st.Forming {
		t.Errorf("%+v", st)
	}
	// Two ids.
	s = unformed(t, 1, Persistent{Cluster: x, Logs: 2, Forming: true})
	s.tells(2, Forming, y, 22)
	s.tells(3, Empty, ClusterID{}, 33)
	s.acks(2, 22)
	s.acks(3, 33)
	if !s.n.State().Forming || !s.saw(EventForeignCluster) {
		t.Errorf("%+v", s.n.State())
	}
}

func TestForming_FormIsForTheInstanceThatSaidItIsEmpty(t *testing.T) {
	x := ClusterID{1}
	s := unformed(t, 2, Persistent{})
	m := Message{Kind: KindForm, Stage: Forming, Cluster: x, Logs: 2, Instance: 11}
	s.recv(1, m)
	if has[Persist](s) {
		t.Error("what was said to an earlier instance is taken: it may have taken part in elections since")
	}
	m.Session = uint64(s.n.Instance())
	s.holdPersist = true
	if s.recv(1, m); len(s.sent(KindFormAck)) > 0 {
		t.Error("acknowledged before it is durable")
	}
	s.recv(1, Message{Kind: KindProbe, Instance: 11})
	if len(s.sent(KindProbeAck)) > 0 {
		t.Error("what isn't durable is told")
	}
	s.holdPersist = false
	s.release()
	s.drain()
	if a := s.only(KindFormAck).Message; a.Cluster != x || a.Instance != s.n.Instance() {
		t.Errorf("%+v", a)
	}
	m.Cluster = ClusterID{9}
	s.recv(1, m)
	if s.n.State().Cluster != x || !s.saw(EventForeignCluster) {
		t.Errorf("%+v", s.n.State())
	}
}

func TestForming_AnEmptyNodeIsALearnerWhereAClusterIs(t *testing.T) {
	x := ClusterID{1}
	s := unformed(t, 1, Persistent{})
	s.tells(2, Empty, ClusterID{}, 22)
	s.recv(3, Message{Kind: KindProbeAck, Stage: Formed, Cluster: x, Logs: 2, Instance: 33, Session: 12345})
	if has[Persist](s) {
		t.Fatal("an answer to an earlier instance is believed")
	}
	s.tells(3, Formed, x, 33)
	if st := s.n.State(); st.Cluster != x || !st.Learner || s.n.Standing() != Learner || st.Promised != 0 {
		t.Errorf("%+v", st)
	}
	if f := outputs[FormedCluster](s); len(f) != 1 || f[0].Logs != 2 {
		t.Errorf("%+v", f)
	}
}

func TestForming_ANodeThatTookPartCompletes(t *testing.T) {
	x := ClusterID{1}
	s := unformed(t, 2, Persistent{Cluster: x, Logs: 2, Forming: true})
	s.tells(1, Formed, ClusterID{9}, 11)
	if !s.n.State().Forming || !s.saw(EventForeignCluster) {
		t.Fatalf("%+v", s.n.State())
	}
	s.tells(3, Formed, x, 33)
	if st := s.n.State(); st.Forming || st.Learner || st.Promised != 1 || s.n.Standing() != Voter {
		t.Errorf("%+v", st)
	}
}

func TestForming_ElectionsWaitForIt(t *testing.T) {
	s := unformed(t, 2, Persistent{Cluster: ClusterID{1}, Logs: 2, Forming: true})
	for _, m := range []Message{
		{Kind: KindPreVote, Epoch: 2}, {Kind: KindPrepare, Epoch: 2}, {Kind: KindHeartbeat, Epoch: 2}, {Kind: KindInstall, Epoch: 2},
	} {
		s.recv(1, m)
	}
	if has[Persist](s) || len(s.sent(KindPreVoteAck))+len(s.sent(KindPromise))+len(s.sent(KindHeartbeatAck)) > 0 {
		t.Error("it takes part before it belongs to a formed cluster")
	}
}

func TestForming_NodesStartedWithDifferentNumbersOfLogsSaySo(t *testing.T) {
	s := unformed(t, 1, Persistent{})
	s.recv(2, Message{Kind: KindProbeAck, Logs: 5, Instance: 22, Session: uint64(s.n.Instance())})
	s.tells(3, Empty, ClusterID{}, 33)
	if !s.saw(EventLogsDiffer) || s.n.State().Logs != 2 {
		t.Errorf("%+v", s.n.State())
	}
}

func TestForming_ASingleNodeFormsLeadsAndServes(t *testing.T) {
	s := startSolo(t, 1, []NodeID{1}, Persistent{})
	s.pass(3 * time.Second)
	if !has[FormedCluster](s) || len(outputs[Lead](s)) != 1 {
		t.Fatalf("%s, %+v", s.n.Role(), s.n.State())
	}
	s.progress(1, 1)
	s.do(func(now time.Duration) { s.n.Opened(now, s.n.state.Promised) })
	if !s.n.Serving(s.now) || s.n.quorum.State != Healthy {
		t.Errorf("%+v", s.n.quorum)
	}
	if s.pass(time.Minute); !s.n.Serving(s.now) {
		t.Error("it does not go on serving")
	}
	// Each start is an epoch of its own.
	again := startSolo(t, 1, []NodeID{1}, s.n.State())
	again.pass(3 * time.Second)
	if l := outputs[Lead](again); len(l) != 1 || l[0].Epoch != s.n.state.Promised+1 {
		t.Errorf("%+v", l)
	}
}
