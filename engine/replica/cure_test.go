package replica

import (
	"testing"
	"time"
)

// confirmed returns a leader's heartbeat that tells this node from where on it counts again.
func confirmed(s *solo, ends ...Index) Message {
	m := Message{Kind: KindHeartbeat, Epoch: s.n.state.Promised, Confirmed: true, Instance: s.n.Instance()}
	for _, i := range ends {
		m.Ends = append(m.Ends, End{Last: Point{Epoch: m.Epoch, Index: i}})
	}
	return m
}

func (s *solo) acked(log int, index Index) {
	s.do(func(now time.Duration) {
		s.n.Progress(now, log, &Progress{Epoch: s.n.state.Promised, Last: index, Flushed: index, Acked: index})
	})
}

func TestNode_CountsAgainWhenItHasWhatTheLeaderConfirmed(t *testing.T) {
	for _, standing := range []Standing{Learner, Suspect} {
		state := formed(4)
		state.Learner, state.Suspect = standing == Learner, standing == Suspect
		s := newSolo(t, state)
		s.follow(5)
		if f := outputs[FollowLeader](s); len(f) != 1 || f[0].Voter {
			t.Fatalf("%v: %+v", standing, f)
		}
		s.acked(0, 100)
		s.acked(1, 100)
		if s.n.Standing() != standing {
			t.Fatalf("%v: it counts without the leader's word", standing)
		}
		other := confirmed(s, 10, 10)
		other.Instance++
		s.recv(2, other)
		if s.n.Standing() != standing {
			t.Fatalf("%v: it believed what was said to an earlier instance", standing)
		}
		s.recv(2, confirmed(s, 110, 120))
		s.acked(0, 110)
		s.acked(1, 119)
		s.clear()
		if s.holdPersist = true; s.n.Standing() != standing {
			t.Fatalf("%v: it counts too early", standing)
		}
		s.acked(1, 120)
		if p := s.persists; len(p) != 1 || p[0].State.Learner || p[0].State.Suspect || s.n.Standing() != standing {
			t.Fatalf("%v: %+v, %v", standing, p, s.n.Standing())
		}
		s.holdPersist = false
		s.release()
		s.drain()
		if f := outputs[FollowLeader](s); s.n.Standing() != Voter || len(f) != 1 || !f[0].Voter {
			t.Errorf("%v: %v, %+v", standing, s.n.Standing(), f)
		}
	}
}

func TestNode_WhatWasConfirmedInAnEarlierEpochCountsNoMore(t *testing.T) {
	state := formed(4)
	state.Suspect = true
	s := newSolo(t, state)
	s.follow(5)
	s.recv(2, confirmed(s, 110, 120))
	s.follow(6)
	s.acked(0, 200)
	s.acked(1, 200)
	if s.n.Standing() != Suspect {
		t.Error("it counts with the word of a leader that leads no more")
	}
}

func TestNode_ConfirmsOnlyWhatItsLogsKnow(t *testing.T) {
	s := newSolo(t, formed(4))
	s.lead()
	install := func() Message {
		s.clear()
		s.do(func(now time.Duration) { s.n.Connected(now, 3) })
		return s.only(KindInstall).Message
	}
	heartbeat := func() Message {
		s.clear()
		s.pass(DefaultHeartbeat)
		for _, m := range s.sent(KindHeartbeat) {
			if m.To == 3 {
				return m.Message
			}
		}
		t.Fatal("no heartbeat")
		return Message{}
	}
	s.recv(3, Message{Kind: KindInstallAck, Epoch: 5, Session: install().Session, Instance: 33, Standing: Learner, Ends: make([]End, 2)})
	if j := outputs[PeerJoined](s); len(j) != 1 || j[0].Voter || j[0].Instance != 33 {
		t.Fatalf("%+v", j)
	}
	s.ack(2, Voter)
	if heartbeat().Confirmed {
		t.Error("confirmed before the logs know that the node doesn't count")
	}
	mark := PeerProgress{Node: 3, Instance: 33}
	s.do(func(now time.Duration) {
		s.n.Progress(now, 0, &Progress{Epoch: 5, Leading: true, Last: 10, Commit: 8, Peers: []PeerProgress{mark}})
	})
	s.ack(2, Voter)
	if heartbeat().Confirmed {
		t.Error("confirmed before both logs know")
	}
	s.progress(12, 8, mark)
	s.recv(3, Message{Kind: KindHeartbeatAck, Epoch: 5, Sent: s.now, Instance: 33, Standing: Learner})
	if heartbeat().Confirmed {
		t.Error("confirmed before a voter has renewed the lease since")
	}
	s.progress(20, 9, mark)
	s.ack(2, Voter)
	if m := heartbeat(); !m.Confirmed || m.Instance != 33 || m.Ends[0].Last != (Point{5, 12}) || m.Ends[1].Last != (Point{5, 12}) {
		t.Errorf("%+v: the logs ended at 12 when both knew", m)
	}
	// Another instance: everything from the beginning.
	s.clear()
	s.recv(3, Message{Kind: KindHeartbeatAck, Epoch: 5, Sent: s.now, Instance: 34, Standing: Learner})
	if !has[PeerLeft](s) || heartbeat().Confirmed {
		t.Error("another instance is taken for the one before")
	}
	old := s.sent(KindInstall)[0].Message.Session - 1
	s.recv(3, Message{Kind: KindInstallAck, Epoch: 5, Session: old, Instance: 33, Ends: make([]End, 2)})
	if has[PeerJoined](s) {
		t.Error("an answer to an earlier question binds")
	}
}

func TestNode_ADamagedNodeStopsCountingAndLeading(t *testing.T) {
	s := newSolo(t, formed(4))
	s.lead()
	s.ack(2, Voter)
	s.clear()
	was := s.n.Instance()
	s.do(s.n.Damaged)
	if s.n.Standing() != Suspect || !s.n.State().Suspect || s.n.role != follower || !has[StopServing](s) || s.n.Instance() == was {
		t.Errorf("%v, %+v, %s", s.n.Standing(), s.n.State(), s.n.Role())
	}
	if s.pass(5 * time.Second); len(s.sent(KindPreVote)) > 0 {
		t.Error("it stands for election")
	}
}

func TestNode_CatchesUpOneLogAndBeginsAgainWithAnotherLeader(t *testing.T) {
	s := newSolo(t, formed(4))
	s.do(func(now time.Duration) { s.n.Behind(now, 1) })
	if has[StartCatchup](s) {
		t.Error("catch-up without a leader")
	}
	s.follow(5)
	if has[StartCatchup](s) {
		t.Error("catch-up with a leader that has not been asked whether the log fits")
	}
	s.do(func(now time.Duration) { s.n.Behind(now, 1) })
	if c := outputs[StartCatchup](s); len(c) != 1 || c[0] != (StartCatchup{Leader: 2, Epoch: 5, Log: 1}) {
		t.Fatalf("%+v", c)
	}
	s.clear()
	s.do(func(now time.Duration) { s.n.Behind(now, 1) })
	s.do(func(now time.Duration) { s.n.Behind(now, 7) })
	s.do(func(now time.Duration) { s.n.CaughtUp(now, 0) })
	if len(s.out) > 0 {
		t.Errorf("%+v", s.out)
	}
	if s.n.Standing() != Voter {
		t.Error("it gives up its vote")
	}
	// Nothing was given up: the log may fit the next leader's.
	s.now += DefaultLease
	s.recv(3, Message{Kind: KindHeartbeat, Epoch: 6})
	if has[StartCatchup](s) || s.n.Catching(1) {
		t.Error("a catch-up that has taken nothing goes on with the next leader")
	}
	s.do(func(now time.Duration) { s.n.Behind(now, 1) })
	s.n.CallOff(1)
	if s.n.Catching(1) {
		t.Error("it was called off")
	}
	s.do(func(now time.Duration) { s.n.Behind(now, 1) })
	s.n.GivesUp(1)
	if s.n.CallOff(1); !s.n.Catching(1) || !s.n.incomplete() {
		t.Error("what has given up rounds was called off, or counts as complete")
	}
	s.clear()
	s.now += DefaultLease
	s.recv(2, Message{Kind: KindHeartbeat, Epoch: 7})
	if c := outputs[StartCatchup](s); len(c) != 1 || c[0] != (StartCatchup{Leader: 2, Epoch: 7, Log: 1}) {
		t.Errorf("%+v", c)
	}
	was := s.n.Instance()
	s.clear()
	s.do(func(now time.Duration) { s.n.CaughtUp(now, 1) })
	f := outputs[FollowLeader](s)
	if !has[FenceLogs](s) || len(f) != 1 || f[0].Instance == was || f[0].Leader != 2 {
		t.Errorf("the log is not brought into the live stream: %+v", s.out)
	}
}

func TestNode_DoesNotStandWhileALogIsIncomplete(t *testing.T) {
	s := newSolo(t, formed(4), End{Last: Point{3, 10}, Floor: Point{4, 90}}, End{})
	if s.pass(5 * time.Second); len(s.sent(KindPreVote)) > 0 {
		t.Error("it stands for election with a log that lacks what it knows to be committed")
	}
	s.recv(2, Message{Kind: KindPrepare, Epoch: 5})
	if m := s.only(KindPromise).Message; m.Ends[0].Floor != (Point{4, 90}) {
		t.Errorf("its promise does not tell: %+v", m)
	}
	s.ends[0] = End{Last: Point{4, 90}, Floor: Point{4, 90}}
	if s.pass(5 * time.Second); len(s.sent(KindPreVote)) == 0 {
		t.Error("it does not notice that the log is complete")
	}
}
