package replica

import (
	"errors"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

func TestNew_RefusesWhatCannotWork(t *testing.T) {
	good := Config{Self: 1, Nodes: three, Logs: 1, Rand: func() uint64 { return 1 }}
	for name, spoil := range map[string]func(c *Config, s *Persistent){
		"two nodes":                      func(c *Config, _ *Persistent) { c.Nodes = []NodeID{1, 2} },
		"five nodes":                     func(c *Config, _ *Persistent) { c.Nodes = []NodeID{1, 2, 3, 4, 5} },
		"ids that don't ascend":          func(c *Config, _ *Persistent) { c.Nodes = []NodeID{2, 1, 3} },
		"an id twice":                    func(c *Config, _ *Persistent) { c.Nodes = []NodeID{1, 1, 3} },
		"id 0":                           func(c *Config, _ *Persistent) { c.Nodes = []NodeID{0, 1, 2} },
		"a node that isn't in it":        func(c *Config, _ *Persistent) { c.Self = 4 },
		"a rank beyond the nodes":        func(c *Config, _ *Persistent) { c.Rank = 3 },
		"no logs":                        func(c *Config, _ *Persistent) { c.Logs = 0 },
		"a lease of two heartbeats":      func(c *Config, _ *Persistent) { c.Heartbeat, c.Lease = 100, 200 },
		"a negative time":                func(c *Config, _ *Persistent) { c.HardGap = -1 },
		"no random numbers":              func(c *Config, _ *Persistent) { c.Rand = nil },
		"a persisted cluster of no logs": func(_ *Config, s *Persistent) { s.Cluster = testCluster },
	} {
		c, s := good, Persistent{}
		spoil(&c, &s)
		if _, err := New(c, s, 0); !errors.Is(err, ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := New(good, Persistent{}, 0); err != nil {
		t.Error(err)
	}
}

func TestNode_AnswersAPromiseOnlyWhenItIsDurableAndTheLogsAreFenced(t *testing.T) {
	for _, last := range []string{"persisted", "fenced"} {
		s := newSolo(t, formed(4), End{Last: Point{4, 9}}, End{Last: Point{3, 8}})
		s.holdPersist, s.holdFence = true, true
		s.recv(2, Message{Kind: KindPrepare, Epoch: 5})
		if last == "persisted" {
			s.holdFence = false
		} else {
			s.holdPersist = false
		}
		if s.release(); len(s.sent(KindPromise)) > 0 {
			t.Fatalf("the promise is answered before it is %s", last)
		}
		s.holdPersist, s.holdFence = false, false
		s.release()
		s.drain()
		if m := s.only(KindPromise); m.To != 2 || m.Message.Epoch != 5 || !slices.Equal(m.Message.Ends, s.ends) {
			t.Errorf("%+v", m)
		}
		if st := s.n.State(); st.Promised != 5 || st.Candidate != 2 {
			t.Errorf("persisted %+v", st)
		}
	}
}

func TestNode_PromisesAnEpochToOneCandidate(t *testing.T) {
	for _, c := range []struct {
		name    string
		from    NodeID
		epoch   Epoch
		promise bool
	}{
		{"a lower epoch", 3, 4, false},
		{"the same epoch to another one", 3, 5, false},
		{"the same epoch to the same one", 2, 5, true},
		{"a higher epoch", 3, 6, true},
	} {
		s := newSolo(t, formed(4))
		s.recv(2, Message{Kind: KindPrepare, Epoch: 5})
		s.only(KindPromise)
		s.now += DefaultLease
		s.clear()
		s.ends = []End{{Last: Point{5, 100}}, {}} // it has gone on meanwhile
		s.recv(c.from, Message{Kind: KindPrepare, Epoch: c.epoch})
		if !c.promise {
			if m := s.only(KindRefuse).Message; m.Reason != StaleEpoch || m.Epoch != 5 || m.Session != uint64(c.epoch) || len(s.sent(KindPromise)) > 0 {
				t.Errorf("%s: %+v", c.name, m)
			}
			continue
		}
		m := s.only(KindPromise).Message
		if m.Epoch != c.epoch {
			t.Errorf("%s: %+v", c.name, m)
		}
		if c.epoch == 5 && m.Ends[0].Last.Index != 0 {
			t.Errorf("%s: a promise that is answered again tells of other ends: %v", c.name, m.Ends)
		}
	}
}

func TestNode_APromiseSurvivesARestart(t *testing.T) {
	s := newSolo(t, formed(4))
	s.recv(2, Message{Kind: KindPrepare, Epoch: 5})
	again := newSolo(t, s.n.State())
	again.recv(3, Message{Kind: KindPrepare, Epoch: 5})
	if m := again.only(KindRefuse).Message; m.Reason != StaleEpoch {
		t.Errorf("%+v", m)
	}
}

func TestNode_PromisesNothingWhileALeaseRuns(t *testing.T) {
	s := newSolo(t, formed(4))
	s.follow(5)
	s.now += DefaultLease - 1
	s.recv(3, Message{Kind: KindPrepare, Epoch: 6})
	s.recv(3, Message{Kind: KindPreVote, Epoch: 6})
	if m := s.only(KindRefuse).Message; m.Reason != LeaseRuns {
		t.Errorf("%+v", m)
	}
	if m := s.only(KindPreVoteAck).Message; m.Granted {
		t.Errorf("%+v", m)
	}
	if s.n.State().Promised != 5 {
		t.Error("the epoch was promised")
	}
	// The leader that holds the lease may ask: it leads no more.
	s.recv(2, Message{Kind: KindPrepare, Epoch: 7})
	s.only(KindPromise)
	s.now += DefaultLease
	s.clear()
	s.recv(3, Message{Kind: KindPrepare, Epoch: 8})
	s.only(KindPromise)
}

func TestNode_PromisesNothingForALeaseTimeAfterAStart(t *testing.T) {
	s := startSolo(t, 1, three, formed(4))
	s.now = DefaultLease - 1
	s.recv(2, Message{Kind: KindPreVote, Epoch: 5})
	s.recv(2, Message{Kind: KindPrepare, Epoch: 5})
	if s.only(KindPreVoteAck).Message.Granted || s.only(KindRefuse).Message.Reason != LeaseRuns {
		t.Error("it may have renewed a lease just before")
	}
	s.now++
	s.recv(2, Message{Kind: KindPrepare, Epoch: 5})
	s.only(KindPromise)
}

func TestNode_HelpsNobodyWhenItsWordIsWorthNothing(t *testing.T) {
	learner := formed(4)
	learner.Learner = true
	suspect := formed(4)
	suspect.Suspect = true
	for name, c := range map[string]struct {
		state   Persistent
		spoil   func(s *solo)
		promise bool
	}{
		"learner":      {learner, func(*solo) {}, false},
		"suspect":      {suspect, func(*solo) {}, true},
		"stalled disk": {formed(4), func(s *solo) { s.do(func(now time.Duration) { s.n.DiskStalled(now, true) }) }, false},
		"failed disk":  {formed(4), func(s *solo) { s.do(s.n.DiskFailed) }, false},
	} {
		s := newSolo(t, c.state)
		c.spoil(s)
		s.recv(2, Message{Kind: KindPrepare, Epoch: 5})
		if c.promise {
			if m := s.only(KindPromise).Message; m.Standing != Suspect {
				t.Errorf("%s: %+v", name, m)
			}
			continue
		}
		if m := s.only(KindRefuse).Message; m.Reason != NoVote {
			t.Errorf("%s: %+v", name, m)
		}
		s.clear()
		s.pass(5 * time.Second)
		if len(s.sent(KindPreVote)) > 0 {
			t.Errorf("%s: stands for election", name)
		}
	}
}

func TestNode_AsksBeforeItPersistsAnything(t *testing.T) {
	s := newSolo(t, formed(4))
	s.pass(10 * time.Second)
	if len(s.sent(KindPreVote)) == 0 || has[Persist](s) || s.n.State().Promised != 4 {
		t.Error("a node that hears nobody persists an epoch")
	}
	for _, m := range s.sent(KindPreVote) {
		if m.Message.Epoch != 5 {
			t.Fatalf("asks about epoch %d", m.Message.Epoch)
		}
	}
	s.clear()
	for range 300 { // a majority says that there is a leader
		s.pass(10 * time.Millisecond)
		for _, m := range s.sent(KindPreVote) {
			s.recv(m.To, Message{Kind: KindPreVoteAck, Session: m.Message.Session, Reason: LeaseRuns})
		}
		s.clear()
	}
	if s.n.State().Promised != 4 {
		t.Errorf("epoch %d", s.n.State().Promised)
	}
}

func TestNode_CandidateSendsPrepareWhenItsOwnPromiseIsDurable(t *testing.T) {
	s := newSolo(t, formed(4))
	s.holdPersist = true
	s.stand()
	if s.pass(50 * time.Millisecond); len(s.sent(KindPrepare)) > 0 {
		t.Error("PREPARE before the promise to itself is durable")
	}
	s.holdPersist = false
	s.release()
	s.drain()
	if m := s.sent(KindPrepare); len(m) != 2 || m[0].Message.Epoch != 5 {
		t.Errorf("%+v", m)
	}
	if st := s.n.State(); st.Promised != 5 || st.Candidate != 1 {
		t.Errorf("%+v", st)
	}
}

func TestNode_ElectionNeedsAMajorityAndSoundVoters(t *testing.T) {
	for _, c := range []struct {
		name string
		two  *Standing
		tree *Standing
		wins bool
	}{
		{"nobody", nil, nil, false},
		{"a voter", ptr(Voter), nil, true},
		{"a suspect", ptr(Suspect), nil, false},
		{"a suspect and a voter", ptr(Suspect), ptr(Voter), true},
		{"two suspects, which are all there are", ptr(Suspect), ptr(Suspect), true},
	} {
		s := newSolo(t, formed(4))
		s.stand()
		for i, st := range []*Standing{c.two, c.tree} {
			if st != nil {
				s.recv(NodeID(i+2), Message{Kind: KindPromise, Epoch: 5, Standing: *st, Ends: make([]End, 2)})
			}
		}
		if won := s.n.role == leader; won != c.wins {
			t.Errorf("%s: leads %t", c.name, won)
		}
	}
}

func ptr[T any](v T) *T { return &v }

func TestNode_GoesOnFromTheHighestEndOfEachLog(t *testing.T) {
	s := newSolo(t, formed(8), End{Last: Point{5, 50}, Commit: 40}, End{Last: Point{7, 30}, Commit: 30})
	s.stand()
	// Node 2 is ahead in log 0, in a lower index of a higher epoch; this node is in log 1.
	s.recv(2, Message{Kind: KindPromise, Epoch: 9, Ends: []End{{Last: Point{6, 45}, Commit: 42}, {Last: Point{7, 29}, Commit: 20}}})
	f := outputs[FetchLog](s)
	if len(f) != 1 || f[0] != (FetchLog{Epoch: 9, Log: 0, From: 2, After: 40, Upto: Point{6, 45}}) {
		t.Fatalf("fetches %+v", f)
	}
	if has[Lead](s) || len(s.sent(KindHeartbeat)) == 0 {
		t.Error("it leads before it has everything, or doesn't say that it is elected")
	}
	s.do(func(now time.Duration) { s.n.Fetched(now, 9, 0, End{Last: Point{6, 45}, Commit: 42}) })
	if l := outputs[Lead](s); len(l) != 1 || l[0].Epoch != 9 {
		t.Errorf("%+v", l)
	}
}

func TestNode_FetchesBehindItsEndWhereBothHaveTheSameEpoch(t *testing.T) {
	s := newSolo(t, formed(8), End{Last: Point{5, 50}, Commit: 40}, End{})
	s.stand()
	s.recv(2, Message{Kind: KindPromise, Epoch: 9, Ends: []End{{Last: Point{5, 60}, Commit: 42}, {}}})
	if f := outputs[FetchLog](s); len(f) != 1 || f[0].After != 50 {
		t.Errorf("fetches %+v", f)
	}
}

func TestNode_AnElectionThatLosesCommittedRoundsIsRefused(t *testing.T) {
	for name, floor := range map[string]Point{"a higher index": {5, 51}, "a higher epoch": {6, 20}} {
		s := newSolo(t, formed(8), End{Last: Point{5, 50}, Commit: 40, Floor: Point{5, 40}}, End{})
		s.stand()
		s.recv(2, Message{Kind: KindPromise, Epoch: 9, Ends: []End{{Last: Point{4, 60}, Commit: 30, Floor: floor}, {}}})
		e := outputs[Event](s)
		if has[Lead](s) || len(e) == 0 || !slices.ContainsFunc(e, func(e Event) bool {
			return e.What == EventLosingElection && e.Code == protocol.CodeUncleanElectionRejected && e.Log == 0
		}) {
			t.Errorf("%s: %+v", name, e)
		}
		s.clear()
		if s.stand(); s.n.State().Promised != 10 {
			t.Errorf("%s: it is not tried again", name)
		}
	}
}

func TestNode_AnElectedNodeThatCannotFetchLetsOthersGoFirst(t *testing.T) {
	s := newSolo(t, formed(8))
	s.stand()
	s.recv(2, Message{Kind: KindPromise, Epoch: 9, Ends: []End{{Last: Point{5, 60}}, {}}})
	s.do(func(now time.Duration) { s.n.FetchFailed(now, 9, 0) })
	if len(s.sent(KindResign)) != 2 || has[Lead](s) {
		t.Error("the others are left waiting for its lease")
	}
	s.clear()
	if s.pass(DefaultLease); len(s.sent(KindPreVote)) > 0 {
		t.Error("it stands again at once")
	}
}

func TestNode_FetchesMayTakeAsLongAsTheyGoOn(t *testing.T) {
	s := newSolo(t, formed(8))
	s.stand()
	s.recv(2, Message{Kind: KindPromise, Epoch: 9, Ends: []End{{Last: Point{5, 60}}, {}}})
	for range 5 {
		s.pass(DefaultFetchTimeout - time.Second)
		s.do(func(now time.Duration) { s.n.Fetching(now, 9) })
	}
	if s.n.role != elected {
		t.Fatalf("the node is %s", s.n.Role())
	}
	if s.pass(DefaultFetchTimeout); s.n.role == elected {
		t.Error("a fetch that stopped is waited for")
	}
}

func TestNode_ALeadersLeaseCountsFromTheSending(t *testing.T) {
	s := newSolo(t, formed(4))
	s.lead()
	if s.n.LeaseEnd() != 0 || s.n.Serving(s.now) {
		t.Error("a lease without any answer")
	}
	sent := s.now
	s.now += 400 * time.Millisecond
	s.recv(2, Message{Kind: KindHeartbeatAck, Epoch: 5, Sent: sent})
	if want := sent + 900*time.Millisecond; s.n.LeaseEnd() != want || !s.n.Serving(want-1) || s.n.Serving(want) {
		t.Errorf("the lease ends at %v, not %v", s.n.LeaseEnd(), want)
	}
	s.recv(2, Message{Kind: KindHeartbeatAck, Epoch: 5, Sent: sent - 100})
	s.recv(3, Message{Kind: KindHeartbeatAck, Epoch: 4, Sent: s.now})
	s.recv(3, Message{Kind: KindHeartbeatAck, Epoch: 5, Sent: s.now, Standing: Learner})
	if want := sent + 900*time.Millisecond; s.n.LeaseEnd() != want {
		t.Errorf("an old answer, one of another epoch or a learner's moved the lease to %v", s.n.LeaseEnd())
	}
	s.recv(3, Message{Kind: KindHeartbeatAck, Epoch: 5, Sent: s.now + time.Hour})
	if want := s.now + 900*time.Millisecond; s.n.LeaseEnd() != want {
		t.Errorf("an answer from the future: %v, not %v", s.n.LeaseEnd(), want)
	}
}

func TestNode_StopsServingWithoutALeaseAndProbesBeforeItServesAgain(t *testing.T) {
	s := newSolo(t, formed(4))
	s.lead()
	s.ack(2, Voter)
	if !has[Serve](s) {
		t.Fatal("it does not serve")
	}
	s.clear()
	s.pass(DefaultLease)
	if st := outputs[StopServing](s); len(st) != 1 || st[0].Why != LeaseLost {
		t.Fatalf("%+v", st)
	}
	if q := outputs[SetQuorum](s); len(q) != 1 || q[0].State != ReadOnly || q[0].Code != protocol.CodeReadOnlyDegraded {
		t.Errorf("%+v", q)
	}
	s.clear()
	s.ack(2, Voter)
	s.ack(2, Voter)
	if p := outputs[ProbeLogs](s); len(p) != 1 || has[Serve](s) {
		t.Fatalf("%d probes, serves %t", len(p), has[Serve](s))
	}
	s.do(func(now time.Duration) { s.n.Probed(now, 5, []Index{7, 9}) })
	s.progress(9, 8)
	if has[Serve](s) {
		t.Error("it serves before the probe of log 1 is committed")
	}
	s.ack(2, Voter)
	s.progress(9, 9)
	if !has[Serve](s) || !s.n.Serving(s.now) || !s.saw(EventQuorumRecovered) {
		t.Error("it does not serve again")
	}
}

func TestNode_WritesStopWhenNothingIsCommittedInTime(t *testing.T) {
	s := newSolo(t, formed(4))
	s.lead()
	keep := func(d time.Duration) {
		for end := s.now + d; s.now < end; {
			s.pass(50 * time.Millisecond)
			s.ack(2, Voter)
		}
	}
	s.ack(2, Voter)
	s.clear()
	for i := Index(2); i < 30; i++ { // slow but moving
		s.progress(i+1, i)
		keep(time.Second)
	}
	if has[StopServing](s) {
		t.Fatal("it stopped although rounds are committed")
	}
	s.progress(40, 30)
	keep(DefaultQuorumTimeout - 100*time.Millisecond)
	if has[StopServing](s) {
		t.Error("it stopped too early")
	}
	keep(200 * time.Millisecond)
	if st := outputs[StopServing](s); len(st) != 1 || st[0].Why != NoQuorum {
		t.Fatalf("%+v", st)
	}
	s.progress(40, 40)
	s.do(func(now time.Duration) { s.n.Probed(now, 5, []Index{41, 41}) })
	s.progress(41, 41)
	if !s.n.Serving(s.now) {
		t.Error("it does not serve again")
	}
}

func TestNode_QuorumStatesFollowTheTable(t *testing.T) {
	s := newSolo(t, formed(4))
	s.lead()
	both := func() { s.ack(2, Voter); s.ack(3, Voter) }
	keep := func(d time.Duration, who ...NodeID) {
		for end := s.now + d; s.now < end; {
			s.pass(50 * time.Millisecond)
			for _, id := range who {
				s.ack(id, Voter)
			}
		}
	}
	state := func() SetQuorum { return s.n.quorum }
	peers := func(flushed2, flushed3 Index, lag3 uint64) []PeerProgress {
		return []PeerProgress{{Node: 2, Flushed: flushed2}, {Node: 3, Flushed: flushed3, LagBytes: lag3}}
	}
	both()
	s.progress(10, 10, peers(10, 10, 0)...)
	if state() != (SetQuorum{State: Healthy}) {
		t.Errorf("%+v", state())
	}
	s.progress(20, 20, peers(20, 10, DefaultSoftGapBytes+1)...)
	if state().State != Soft || !s.saw(EventFollowerLag) {
		t.Errorf("behind by bytes: %+v", state())
	}
	s.progress(20, 20, peers(20, 20, 0)...)
	if state().State != Healthy || !s.saw(EventFollowerOK) {
		t.Errorf("caught up: %+v", state())
	}
	s.progress(30, 30, peers(30, 20, 100)...)
	if keep(DefaultSoftGap-time.Second, 2, 3); state().State != Healthy {
		t.Errorf("behind for a moment: %+v", state())
	}
	if keep(2*time.Second, 2, 3); state().State != Soft {
		t.Errorf("behind by time: %+v", state())
	}
	s.progress(30, 30, peers(30, 30, 0)...)
	if keep(DefaultSoftGap+time.Second, 2); state().State != Soft {
		t.Errorf("a follower that says nothing: %+v", state())
	}
	if keep(2 * time.Second); state() != (SetQuorum{ReadOnly, protocol.CodeReadOnlyDegraded}) {
		t.Errorf("no follower: %+v", state())
	}
	if keep(DefaultHardGap); state() != (SetQuorum{ReadOnly, protocol.CodeInSyncReplicasNotEnough}) {
		t.Errorf("no follower for long: %+v", state())
	}
}

func TestNode_ALeaderWhoseDiskStallsRenewsNothing(t *testing.T) {
	s := newSolo(t, formed(4))
	s.lead()
	s.ack(2, Voter)
	s.do(func(now time.Duration) { s.n.DiskStalled(now, true) })
	s.clear()
	if s.pass(3 * time.Second); len(s.sent(KindHeartbeat)) > 0 || !has[StopServing](s) {
		t.Error("it goes on")
	}
	s.do(func(now time.Duration) { s.n.DiskStalled(now, false) })
	if s.pass(200 * time.Millisecond); len(s.sent(KindHeartbeat)) == 0 {
		t.Error("it does not go on when its disk answers")
	}
}

func TestNode_StepsDownForAHigherEpoch(t *testing.T) {
	for name, m := range map[string]Message{
		"heartbeat": {Kind: KindHeartbeat, Epoch: 6},
		"install":   {Kind: KindInstall, Epoch: 6, Session: 1},
		"refusal":   {Kind: KindRefuse, Epoch: 6, Session: 5, Reason: StaleEpoch},
	} {
		s := newSolo(t, formed(4))
		s.lead()
		s.ack(2, Voter)
		s.clear()
		s.recv(3, m)
		if st := outputs[StopServing](s); len(st) != 1 || st[0].Why != SteppedDown || s.n.role == leader || s.n.Serving(s.now) {
			t.Errorf("%s: %+v, %s", name, st, s.n.Role())
		}
		stop := slices.IndexFunc(s.out, func(o Output) bool { _, ok := o.(StopServing); return ok })
		fence := slices.IndexFunc(s.out, func(o Output) bool { _, ok := o.(FenceLogs); return ok })
		if fence >= 0 && fence < stop {
			t.Errorf("%s: the logs are fenced before it stops serving", name)
		}
	}
}

func TestNode_ALeaderKeepsItsPlaceWhileItsLeaseRuns(t *testing.T) {
	s := newSolo(t, formed(4))
	s.lead()
	s.ack(2, Voter)
	s.clear()
	s.recv(3, Message{Kind: KindPreVote, Epoch: 6})
	s.recv(3, Message{Kind: KindPrepare, Epoch: 6})
	s.recv(3, Message{Kind: KindHeartbeat, Epoch: 4})
	s.recv(3, Message{Kind: KindRefuse, Epoch: 6, Session: 4, Reason: StaleEpoch}) // about an earlier epoch
	if s.n.role != leader || s.only(KindPreVoteAck).Message.Granted || len(s.sent(KindRefuse)) != 2 {
		t.Errorf("the node is %s", s.n.Role())
	}
	s.now += DefaultLease
	s.clear()
	s.recv(3, Message{Kind: KindPrepare, Epoch: 6})
	if s.only(KindPromise); s.n.role != follower {
		t.Errorf("without a lease it is still %s", s.n.Role())
	}
}

func TestNode_TellsOfTwoLeadersInOneEpoch(t *testing.T) {
	s := newSolo(t, formed(4))
	s.follow(5)
	s.recv(3, Message{Kind: KindHeartbeat, Epoch: 5})
	if l, _ := s.n.Leader(); l != 2 || !s.saw(EventTwoLeaders) {
		t.Errorf("follows %d", l)
	}
	s.only(KindRefuse)
}

func TestNode_FollowsWhoeverWonTheEpochThatItStoodFor(t *testing.T) {
	s := newSolo(t, formed(4))
	s.stand() // epoch 5 is promised to itself
	s.recv(3, Message{Kind: KindRefuse, Epoch: 5, Session: 5, Reason: StaleEpoch})
	s.recv(2, Message{Kind: KindHeartbeat, Epoch: 5})
	if f := outputs[FollowLeader](s); len(f) != 1 || f[0].Leader != 2 || f[0].Epoch != 5 {
		t.Errorf("%+v", f)
	}
	if st := s.n.State(); st.Candidate != 1 {
		t.Errorf("it promised epoch 5 to itself, not to %d", st.Candidate)
	}
}

func TestNode_RenewsALeaseOnlyWhenTheEpochIsDurable(t *testing.T) {
	s := newSolo(t, formed(4))
	s.holdPersist = true
	s.recv(2, Message{Kind: KindHeartbeat, Epoch: 5, Sent: 77})
	s.recv(2, Message{Kind: KindInstall, Epoch: 5, Session: 3})
	if len(s.sent(KindHeartbeatAck))+len(s.sent(KindInstallAck)) > 0 || has[FollowLeader](s) {
		t.Fatal("it follows before that is durable")
	}
	s.holdPersist = false
	s.release()
	s.drain()
	if m := s.only(KindInstallAck).Message; m.Session != 3 || m.Instance != s.n.Instance() || len(m.Ends) != 2 {
		t.Errorf("%+v", m)
	}
	s.recv(2, Message{Kind: KindHeartbeat, Epoch: 5, Sent: 78, Commits: []Index{4, 5}})
	if m := s.only(KindHeartbeatAck).Message; m.Sent != 78 {
		t.Errorf("%+v", m)
	}
	if c := outputs[LeaderCommits](s); len(c) != 1 || !slices.Equal(c[0].Commits, []Index{4, 5}) {
		t.Errorf("%+v", c)
	}
}

func TestNode_TheOldLeaderHearsTheEpochThatItMissed(t *testing.T) {
	s := newSolo(t, formed(4))
	s.follow(9)
	s.recv(3, Message{Kind: KindHeartbeat, Epoch: 7})
	if m := s.only(KindRefuse); m.To != 3 || m.Message.Epoch != 9 || m.Message.Session != 7 || m.Message.Reason != StaleEpoch {
		t.Errorf("%+v", m)
	}
}

func TestNode_AResignedLeadersLeaseIsNotWaitedFor(t *testing.T) {
	s := newSolo(t, formed(4))
	s.follow(5)
	s.recv(3, Message{Kind: KindResign, Epoch: 5}) // not its leader
	s.recv(2, Message{Kind: KindResign, Epoch: 4})
	s.recv(3, Message{Kind: KindPrepare, Epoch: 6})
	s.only(KindRefuse)
	s.recv(2, Message{Kind: KindResign, Epoch: 5})
	s.recv(3, Message{Kind: KindPrepare, Epoch: 6})
	s.only(KindPromise)

	l := newSolo(t, formed(4))
	l.lead()
	l.ack(2, Voter)
	l.clear()
	l.do(l.n.Resign)
	stop := slices.IndexFunc(l.out, func(o Output) bool { _, ok := o.(StopServing); return ok })
	sent := slices.IndexFunc(l.out, func(o Output) bool { m, ok := o.(SendMessage); return ok && m.Message.Kind == KindResign })
	if stop < 0 || sent < stop {
		t.Error("the others are told before it has stopped serving")
	}
	l.clear()
	if l.pass(10 * time.Second); len(l.sent(KindPreVote)) > 0 {
		t.Error("it stands for election again")
	}
}

func TestNode_AStateThatWasRolledBackIsNotBelieved(t *testing.T) {
	s := newSolo(t, formed(4), End{Last: Point{7, 3}}, End{})
	if s.n.State().Promised != 7 || s.n.State().Candidate != 0 {
		t.Errorf("%+v", s.n.State())
	}
	s.recv(2, Message{Kind: KindPrepare, Epoch: 7})
	s.only(KindRefuse)
}

func TestNode_IgnoresWhatItCannotUse(t *testing.T) {
	s := newSolo(t, formed(4))
	before := s.n.State()
	for _, m := range []Message{
		{}, {Kind: 200}, {Kind: KindPrepare, Epoch: math.MaxUint32}, {Kind: KindPreVoteAck, Epoch: math.MaxUint32},
		{Kind: KindPromise, Epoch: 5}, {Kind: KindInstallAck, Epoch: 4, Ends: make([]End, 9)},
		{Kind: KindHeartbeat, Epoch: 5, Commits: make([]Index, 3)}, {Kind: KindHeartbeat, Epoch: 5, Confirmed: true},
		{Kind: KindHeartbeatAck, Epoch: 4, Standing: 9}, {Kind: KindHeartbeatAck, Epoch: 4}, {Kind: KindPromise, Epoch: 4, Ends: make([]End, 2)},
		{Kind: KindForm, Session: uint64(s.n.Instance())}, {Kind: KindFormAck},
	} {
		s.recv(2, m)
	}
	s.recv(9, Message{Kind: KindPrepare, Epoch: 5})
	s.recv(1, Message{Kind: KindPrepare, Epoch: 5})
	if s.n.State() != before || s.n.seen > 4 || has[Persist](s) {
		t.Errorf("%+v", s.n.State())
	}
}
