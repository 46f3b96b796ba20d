package replica

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
)

var three = []NodeID{1, 2, 3}

func openLog(t testing.TB, committed Point, pending ...Point) *Log {
	t.Helper()
	l, err := NewLog(1, three, committed, pending)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// following returns a log that follows epoch.
func following(t testing.TB, epoch Epoch, committed Point, pending ...Point) *Log {
	t.Helper()
	l := openLog(t, committed, pending...)
	l.Fence(epoch)
	if err := l.Follow(epoch); err != nil {
		t.Fatal(err)
	}
	return l
}

// leading returns a log that leads epoch and has sealed and flushed its opening round, with both followers joined at its end
// before.
func leading(t testing.TB, epoch Epoch, committed Point, pending ...Point) *Log {
	t.Helper()
	l := openLog(t, committed, pending...)
	l.Fence(epoch)
	end := l.End()
	if err := l.Lead(epoch); err != nil {
		t.Fatal(err)
	}
	for _, p := range []NodeID{2, 3} {
		if err := l.Join(p, epoch, Instance(p), true, end); err != nil {
			t.Fatal(err)
		}
	}
	l.Flushed(seal(t, l).Ticket)
	return l
}

func seal(t testing.TB, l *Log) Stamp {
	t.Helper()
	s, err := l.Seal()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestNewLog_RefusesWhatNoJournalHolds(t *testing.T) {
	for _, c := range []struct {
		name      string
		committed Point
		pending   []Point
	}{
		{"a gap", Point{2, 5}, []Point{{2, 7}}},
		{"an epoch that goes back", Point{2, 5}, []Point{{3, 6}, {2, 7}}},
		{"a round that is committed already", Point{2, 5}, []Point{{2, 5}}},
	} {
		if _, err := NewLog(1, three, c.committed, c.pending); !errors.Is(err, ErrLogState) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestLog_AppendJudgesEveryRound(t *testing.T) {
	// The log: 1..4 of epoch 1 (4 committed), 5 and 6 of epoch 2, 7 of epoch 3. It follows epoch 5.
	pending := []Point{{2, 5}, {2, 6}, {3, 7}}
	for _, c := range []struct {
		name        string
		epoch       Epoch
		prev, point Point
		want        VerdictKind
		from        Index
	}{
		{"the next round", 5, Point{3, 7}, Point{5, 8}, Accept, 0},
		{"the next round of an older epoch", 5, Point{3, 7}, Point{4, 8}, Accept, 0},
		{"a round that is there", 5, Point{2, 5}, Point{2, 6}, Duplicate, 0},
		{"a committed round that is there", 5, Point{1, 3}, Point{1, 4}, Duplicate, 0},
		{"a round so old that its epoch is forgotten", 5, Point{1, 1}, Point{1, 2}, Duplicate, 0},
		{"another round where an uncommitted one is", 5, Point{2, 5}, Point{4, 6}, Replace, 6},
		{"another round where the last one is", 5, Point{2, 6}, Point{5, 7}, Replace, 7},
		{"another round where a committed one is", 5, Point{1, 3}, Point{2, 4}, Divergent, 0},
		{"a round behind another committed one", 5, Point{2, 4}, Point{5, 5}, Divergent, 0},
		{"a round behind a missing one", 5, Point{5, 8}, Point{5, 9}, Gap, 0},
		{"a round behind another one", 5, Point{3, 6}, Point{5, 7}, Gap, 0},
		{"a probe that fits", 5, Point{2, 6}, Point{}, Matched, 0},
		{"a probe that doesn't", 5, Point{4, 7}, Point{}, Gap, 0},
		{"a probe of a committed round whose epoch the leader forgot", 5, Point{0, 4}, Point{}, Matched, 0},
		{"a probe of an uncommitted round without its epoch", 5, Point{0, 6}, Point{}, Gap, 0},
		{"a round of a leader whose epoch is over", 4, Point{3, 7}, Point{4, 8}, Stale, 0},
		{"a round of a leader that isn't followed yet", 6, Point{3, 7}, Point{6, 8}, NotFollowing, 0},
		{"a round that doesn't follow its predecessor", 5, Point{3, 7}, Point{5, 9}, Invalid, 0},
		{"a round from the future", 5, Point{3, 7}, Point{6, 8}, Invalid, 0},
		{"a round older than its predecessor", 5, Point{3, 7}, Point{2, 8}, Invalid, 0},
		{"a round without an epoch", 5, Point{0, 7}, Point{0, 8}, Invalid, 0},
		{"the last index there is", 5, Point{5, ^Index(0)}, Point{5, 0}, Gap, 0},
	} {
		l := following(t, 5, Point{1, 4}, pending...)
		before := l.Last()
		v := l.Append(c.epoch, c.prev, c.point, 0)
		if v.Kind != c.want || v.From != c.from {
			t.Errorf("%s: %v from %d, want %v from %d", c.name, v.Kind, v.From, c.want, c.from)
		}
		if wrote := v.Kind == Accept || v.Kind == Replace; wrote != (v.Ticket == 1) || wrote != (l.Last() != before) {
			t.Errorf("%s: ticket %d, the log ends at %v, before at %v", c.name, v.Ticket, l.Last(), before)
		}
	}
}

func TestLog_FollowerCommitsWhatMatchesAndIsFlushed(t *testing.T) {
	l := following(t, 5, Point{1, 4}, Point{2, 5}, Point{2, 6})
	if _, acked := l.Ack(); acked != 4 {
		t.Errorf("before the leader said anything %d is vouched for: only committed rounds are sure to match", acked)
	}
	l.LeaderCommit(5, 9)
	if l.Commit() != 4 {
		t.Errorf("commit %d without a match", l.Commit())
	}
	l.Append(5, Point{2, 5}, Point{}, 9)
	if _, acked := l.Ack(); l.Commit() != 5 || acked != 5 {
		t.Errorf("after a match at 5: commit %d, vouched %d", l.Commit(), acked)
	}
	v := l.Append(5, Point{2, 5}, Point{5, 6}, 9)
	if _, acked := l.Ack(); l.Commit() != 5 || acked != 5 {
		t.Errorf("6 isn't flushed: commit %d, vouched %d", l.Commit(), acked)
	}
	l.Flushed(v.Ticket)
	if epoch, acked := l.Ack(); l.Commit() != 6 || epoch != 5 || acked != 6 {
		t.Errorf("6 is flushed: commit %d, vouched %d in epoch %d", l.Commit(), acked, epoch)
	}
	l.LeaderCommit(4, 100)
	if l.Fence(6); l.Commit() != 6 {
		t.Errorf("commit %d", l.Commit())
	}
	if epoch, _ := l.Ack(); epoch != 0 {
		t.Errorf("a fenced log vouches for something in epoch %d", epoch)
	}
}

func TestLog_RejectsOnceUntilSomethingFits(t *testing.T) {
	l := following(t, 5, Point{1, 4})
	far := func() Verdict { return l.Append(5, Point{5, 8}, Point{5, 9}, 0) }
	if v := far(); !v.Reject {
		t.Error("the first gap isn't told")
	}
	if v := far(); v.Reject {
		t.Error("the second gap is told, too")
	}
	if v := l.Append(5, Point{5, 8}, Point{}, 0); !v.Reject {
		t.Error("a probe isn't answered")
	}
	l.Append(5, Point{1, 4}, Point{5, 5}, 0)
	if v := far(); !v.Reject {
		t.Error("a new gap isn't told")
	}
}

func TestLog_AFlushOfReplacedRoundsSaysNothingOfTheirSuccessors(t *testing.T) {
	l := following(t, 2, Point{1, 10})
	for i := Index(11); i <= 15; i++ {
		l.Append(2, Point{map[bool]Epoch{true: 1, false: 2}[i == 11], i - 1}, Point{2, i}, 0) // tickets 1 to 5
	}
	l.Flushed(1)
	l.Fence(4)
	if err := l.Follow(4); err != nil {
		t.Fatal(err)
	}
	v := l.Append(4, Point{2, 12}, Point{4, 13}, 0)
	if v.Kind != Replace || v.From != 13 || v.Ticket != 6 {
		t.Fatalf("%+v", v)
	}
	for _, c := range []struct {
		ticket uint64
		want   Index
	}{{2, 12}, {5, 12}, {1, 12}, {99, 12}, {6, 13}} {
		if l.Flushed(c.ticket); l.FlushedIndex() != c.want {
			t.Errorf("after ticket %d flushed is %d, not %d", c.ticket, l.FlushedIndex(), c.want)
		}
	}
	// Flushed rounds that are replaced count no more.
	l.Fence(6)
	if err := l.Follow(6); err != nil {
		t.Fatal(err)
	}
	l.Append(6, Point{2, 11}, Point{6, 12}, 0)
	if l.FlushedIndex() != 11 || l.End().Last != (Point{2, 11}) {
		t.Errorf("flushed %d, end %v", l.FlushedIndex(), l.End())
	}
}

func TestLog_NeverReplacesWhatItTookFromTheSameLeader(t *testing.T) {
	l := following(t, 5, Point{1, 4})
	l.Append(5, Point{1, 4}, Point{5, 5}, 0)
	if v := l.Append(5, Point{1, 4}, Point{4, 5}, 0); v.Kind != Divergent {
		t.Errorf("a leader's log only grows, but its round 5 is replaced: %v", v.Kind)
	}
}

func TestLog_AdoptWorksWhileIdleOnly(t *testing.T) {
	l := openLog(t, Point{1, 4}, Point{2, 5})
	l.Fence(7)
	if v := l.Adopt(Point{1, 4}, Point{3, 5}); v.Kind != Replace || v.From != 5 {
		t.Errorf("%+v", v)
	}
	if v := l.Adopt(Point{3, 6}, Point{3, 7}); v.Kind != Gap || !v.Reject {
		t.Errorf("%+v", v)
	}
	if v := l.Adopt(Point{3, 5}, Point{7, 6}); v.Kind != Invalid {
		t.Errorf("a round of the epoch that is being voted on: %v", v.Kind)
	}
	if err := l.Follow(7); err != nil {
		t.Fatal(err)
	}
	if v := l.Adopt(Point{3, 5}, Point{3, 6}); v.Kind != Invalid {
		t.Errorf("while following: %v", v.Kind)
	}
}

func TestLog_CommitsWithAMajorityAndItsOwnEpoch(t *testing.T) {
	l := leading(t, 5, Point{1, 4}, Point{2, 5}, Point{2, 6}) // opening round 7
	if l.Opening() != 7 || l.Commit() != 4 {
		t.Fatalf("opening %d, commit %d", l.Opening(), l.Commit())
	}
	if moved := l.PeerFlushed(2, 5, 2, true, 6); moved || l.Commit() != 4 {
		t.Errorf("rounds of older epochs were committed by count: %d", l.Commit())
	}
	if moved := l.PeerFlushed(2, 5, 2, true, 7); !moved || l.Commit() != 7 {
		t.Errorf("the opening round commits everything below: %d", l.Commit())
	}
	s := seal(t, l)
	if s.Point != (Point{5, 8}) || s.Prev != (Point{5, 7}) || s.Commit != 7 || s.Opening {
		t.Errorf("%+v", s)
	}
	l.PeerFlushed(2, 5, 2, true, 8)
	if l.Commit() != 7 {
		t.Errorf("committed on one vote")
	}
	l.PeerFlushed(3, 5, 3, true, 8)
	if l.Commit() != 8 || l.FlushedIndex() != 7 || l.End().Last.Index != 7 || l.End().Floor != (Point{5, 8}) {
		t.Errorf("both followers commit without the leader's disk: commit %d, end %+v", l.Commit(), l.End())
	}
}

func TestLog_FlushedCountsForItsEpochAndInstanceOnly(t *testing.T) {
	for _, c := range []struct {
		name     string
		node     NodeID
		epoch    Epoch
		instance Instance
		voter    bool
		index    Index
	}{
		{"another epoch", 2, 4, 2, true, 5},
		{"another instance", 2, 5, 99, true, 5},
		{"no instance", 2, 5, 0, true, 5},
		{"a node that is no voter", 2, 5, 2, false, 5},
		{"an unknown node", 9, 5, 2, true, 5},
		{"a round that the leader doesn't have", 2, 5, 2, true, 6},
	} {
		l := leading(t, 5, Point{1, 4})
		if c.name == "a node that is no voter" {
			_ = l.Join(2, 5, 22, false, End{})
			c.instance = 22
		}
		if l.PeerFlushed(c.node, c.epoch, c.instance, c.voter, c.index) || l.Commit() != 4 {
			t.Errorf("FLUSHED of %s counted", c.name)
		}
	}
}

func TestLog_ANewInstanceCountsFromNothing(t *testing.T) {
	l := leading(t, 5, Point{1, 4})
	s := seal(t, l)
	l.PeerFlushed(2, 5, 2, true, 6) // the leader itself hasn't flushed 6
	if err := l.Join(2, 5, 77, false, End{Last: Point{1, 4}, Commit: 4}); err != nil {
		t.Fatal(err)
	}
	if l.Flushed(s.Ticket); l.Commit() != 5 {
		t.Errorf("committed %d: 6 with what an earlier instance had flushed", l.Commit())
	}
	l.PeerFlushed(2, 5, 77, true, 6)
	if l.Commit() != 6 {
		t.Errorf("a node that has become a voter doesn't count: %d", l.Commit())
	}
	if err := l.Join(2, 5, 77, false, l.End()); err != nil || !l.peer(2).voter {
		t.Errorf("within an instance a voter stays one: %v", err)
	}
}

func TestLog_JoinFindsWhereTheLogsPart(t *testing.T) {
	// The leader: 1..4 committed (epoch 1), 5, 6 of epoch 2, 7 of epoch 4, opening round 8 of epoch 6.
	for _, c := range []struct {
		name string
		end  End
		want Index // the next round to send
		bad  bool
	}{
		{"at its end", End{Last: Point{4, 7}, Commit: 4}, 8, false},
		{"in the middle", End{Last: Point{2, 6}, Commit: 4}, 7, false},
		{"with more rounds of an epoch that both have", End{Last: Point{2, 9}, Commit: 4}, 7, false},
		{"with rounds of an epoch that this log hasn't", End{Last: Point{3, 9}, Commit: 3}, 4, false},
		{"with another round at an index that both have", End{Last: Point{3, 6}, Commit: 4}, 5, false},
		{"empty", End{}, 1, false},
		{"far behind", End{Last: Point{1, 2}, Commit: 2}, 3, false},
		{"with more committed than there is", End{Last: Point{5, 20}, Commit: 20}, 0, true},
		{"with another committed round", End{Last: Point{3, 6}, Commit: 6}, 0, true},
	} {
		l := openLog(t, Point{1, 4}, Point{2, 5}, Point{2, 6}, Point{4, 7})
		l.Fence(6)
		if err := l.Lead(6); err != nil {
			t.Fatal(err)
		}
		seal(t, l)
		err := l.Join(2, 6, 5, true, c.end)
		if c.bad {
			if !errors.Is(err, ErrDivergent) {
				t.Errorf("%s: %v", c.name, err)
			}
			continue
		}
		s, ok := l.Next(2)
		if err != nil || !ok || s.Index != c.want || s.Prev.Index != c.want-1 {
			t.Errorf("%s: next is %+v, %v", c.name, s, err)
		}
	}
}

func TestLog_SendsAndResends(t *testing.T) {
	l := leading(t, 5, Point{1, 4})
	next := func() Index {
		s, ok := l.Next(2)
		if !ok {
			return 0
		}
		l.Sent(2, s)
		return s.Index
	}
	seal(t, l)
	if got := []Index{next(), next(), next()}; !slices.Equal(got, []Index{5, 6, 0}) {
		t.Errorf("sent %v", got)
	}
	if !l.Unanswered(2) {
		t.Error("nothing is owed")
	}
	l.PeerFlushed(2, 5, 2, true, 5)
	if l.Resend(2); next() != 6 {
		t.Error("the round that wasn't flushed isn't sent again")
	}
	if err := l.Rejected(2, 5, 2, End{Last: Point{1, 4}, Commit: 4}); err != nil || next() != 6 {
		t.Error("an old REJECT makes the leader send what the follower vouched for")
	}
	l.PeerFlushed(2, 5, 2, true, 6)
	if l.Unanswered(2) {
		t.Error("something is owed")
	}
	l.Left(2)
	seal(t, l)
	if next() != 0 {
		t.Error("sent to a follower that has left")
	}
}

func TestLog_RejectionsOnTheirWayDontMakeItSendAgainAndAgain(t *testing.T) {
	l := leading(t, 5, Point{1, 4})
	for range 10 {
		seal(t, l)
	}
	sent := 0
	drain := func() {
		for s, ok := l.Next(2); ok; s, ok = l.Next(2) {
			l.Sent(2, s)
			sent++
		}
	}
	drain()
	for range 9 { // each round behind the lost one is refused
		if err := l.Rejected(2, 5, 2, End{Last: Point{1, 4}, Commit: 4}); err != nil {
			t.Fatal(err)
		}
		drain()
	}
	if sent != 22 {
		t.Errorf("11 rounds took %d frames", sent)
	}
	l.Resend(2) // the second time was lost, too
	if drain(); sent != 33 {
		t.Errorf("%d frames after Resend", sent)
	}
}

func TestLog_AFollowerIsBehindWhenItLacksTheLeadersBase(t *testing.T) {
	for _, c := range []struct {
		epoch Epoch
		base  Point
		want  bool
		acked Index
	}{
		{5, Point{5, 9}, true, 0}, {5, Point{4, 6}, true, 0}, {4, Point{4, 6}, false, 4}, {5, Point{1, 3}, false, 4}, {5, Point{2, 5}, false, 5},
	} {
		l := following(t, 5, Point{1, 4}, Point{2, 5}, Point{3, 6})
		if got := l.Behind(c.epoch, c.base); got != c.want {
			t.Errorf("a leader of epoch %d begins behind %v: behind %t", c.epoch, c.base, got)
		}
		if _, acked := l.Ack(); acked != c.acked {
			t.Errorf("a leader of epoch %d begins behind %v: vouches for %d", c.epoch, c.base, acked)
		}
	}

	// Once behind, it vouches for nothing that it may give up, whatever still arrives and whoever leads.
	l := following(t, 5, Point{1, 4}, Point{2, 5}, Point{3, 6})
	l.Behind(5, Point{5, 9})
	if v := l.Append(5, Point{3, 6}, Point{5, 7}, 0); v.Kind != NotFollowing {
		t.Errorf("a round that was on its way: %v", v.Kind)
	}
	l.Fence(6)
	if err := l.Follow(6); err != nil {
		t.Fatal(err)
	}
	if v := l.Append(6, Point{3, 6}, Point{6, 7}, 0); v.Kind != NotFollowing {
		t.Errorf("a round of a later leader: %v", v.Kind)
	}
	if l.Behind(6, Point{3, 6}) {
		t.Error("behind a leader whose base it has")
	}

	// A host that gives nothing up has it go on. One that has, before a restart, lets nothing but the end of the catch-up do so.
	l.Behind(6, Point{5, 9})
	l.Resume()
	if _, acked := l.Ack(); acked != 6 {
		t.Errorf("resumed, it vouches for %d", acked)
	}
	l.Suspend()
	if !l.Behind(6, Point{3, 6}) {
		t.Error("a log that lacks what was given up fits a leader whose base it has")
	}
	if v := l.Append(6, Point{3, 6}, Point{6, 7}, 0); v.Kind != NotFollowing {
		t.Errorf("a round for a log that lacks what was given up: %v", v.Kind)
	}
	l.Resume()
	if v := l.Append(6, Point{3, 6}, Point{6, 7}, 0); v.Kind != Accept {
		t.Errorf("a round of a leader whose base it has: %v", v.Kind)
	}

	lead := leading(t, 5, Point{1, 4})
	seal(t, lead)
	lead.Skip(2, Point{5, 5})
	if _, ok := lead.Next(2); ok {
		t.Error("rounds are sent before the follower has answered")
	}
	lead.PeerFlushed(2, 5, 2, true, 4)
	if _, ok := lead.Next(2); ok {
		t.Error("rounds are sent to a follower that lacks the base")
	}
	lead.PeerFlushed(2, 5, 2, true, 5)
	if s, ok := lead.Next(2); !ok || s.Index != 6 {
		t.Errorf("a follower that has the base gets %+v", s)
	}
}

func TestLog_AFloorIsToldUntilTheLogIsBehindIt(t *testing.T) {
	l := openLog(t, Point{1, 4})
	l.SetFloor(Point{3, 9})
	l.SetFloor(Point{2, 20})
	if f := l.End().Floor; f != (Point{3, 9}) {
		t.Errorf("floor %v", f)
	}
	l = openLog(t, Point{4, 12})
	l.SetFloor(Point{3, 9})
	if f := l.End().Floor; f != (Point{4, 12}) {
		t.Errorf("floor %v", f)
	}
}

func TestLog_EpochsNeverGoBack(t *testing.T) {
	l := openLog(t, Point{5, 4})
	l.Fence(7)
	for name, err := range map[string]error{
		"follow a fenced epoch": l.Follow(6), "follow epoch 0": l.Follow(0), "lead a fenced epoch": l.Lead(6),
	} {
		if !errors.Is(err, ErrLogState) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := l.Lead(7); err != nil {
		t.Fatal(err)
	}
	if err := l.Follow(7); !errors.Is(err, ErrLogState) {
		t.Errorf("follow an epoch that this node leads: %v", err)
	}
	if err := l.Lead(7); !errors.Is(err, ErrLogState) {
		t.Errorf("lead twice: %v", err)
	}
	if l.Fence(6); !l.Leading() {
		t.Error("a lower fence ends the leadership")
	}
	if l.Fence(8); l.Leading() {
		t.Error("a higher fence does not end the leadership")
	}
	if _, err := l.Seal(); !errors.Is(err, ErrLogState) {
		t.Errorf("seal: %v", err)
	}
	if l.PeerFlushed(2, 7, 2, true, 4) {
		t.Error("FLUSHED counts after the leadership")
	}
}

func TestRuns_AgreeWithAList(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		var r runs
		var list []Epoch
		for range 60 {
			if len(list) > 0 && rng.IntN(4) == 0 {
				from := 1 + rng.IntN(len(list))
				r.cut(Index(from))
				list = list[:from-1]
				continue
			}
			e := Epoch(1)
			if len(list) > 0 {
				e = list[len(list)-1]
			}
			e += Epoch(rng.IntN(2))
			r.append(e)
			list = append(list, e)
		}
		for i := range list {
			if e, ok := r.epochAt(Index(i + 1)); !ok || e != list[i] {
				t.Fatalf("%v: epochAt(%d) = %d, %t", list, i+1, e, ok)
			}
		}
		for e := Epoch(1); e < 60; e++ {
			want := Index(0)
			for i := range list {
				if list[i] == e {
					want = Index(i + 1)
				}
			}
			if got, ok := r.lastOf(e); ok != (want > 0) || got != want {
				t.Fatalf("%v: lastOf(%d) = %d, %t", list, e, got, ok)
			}
		}
	}
}

func TestLog_RemembersABoundedNumberOfOldEpochs(t *testing.T) {
	l := following(t, 1, Point{})
	var last Point
	for e := Epoch(1); e <= 3*maxOldRuns; e++ {
		l.Fence(e)
		_ = l.Follow(e)
		p := Point{e, last.Index + 1}
		l.Flushed(l.Append(e, last, p, p.Index).Ticket)
		last = p
	}
	if n := len(l.runs.list); n > maxOldRuns+1 {
		t.Errorf("%d runs are remembered", n)
	}
	if l.Commit() != last.Index || l.End().Floor != last || len(l.writes) != 1 {
		t.Errorf("commit %d, end %+v, %d stretches of writes", l.Commit(), l.End(), len(l.writes))
	}
}

func TestLog_AllocatesNothingPerRound(t *testing.T) {
	lead, follow := leading(t, 5, Point{1, 4}), following(t, 5, Point{1, 4})
	prev := Point{1, 4}
	var p Progress
	turn := func() {
		s, ok := lead.Next(2)
		if !ok {
			st, _ := lead.Seal()
			lead.Flushed(st.Ticket)
			s, _ = lead.Next(2)
		}
		lead.Sent(2, s)
		v := follow.Append(5, prev, Point{5, s.Index}, s.Commit)
		prev = Point{5, s.Index}
		follow.Flushed(v.Ticket)
		_, acked := follow.Ack()
		lead.PeerFlushed(2, 5, 2, true, acked)
		lead.Progress(&p)
	}
	turn()
	if n := testing.AllocsPerRun(1000, turn); n > 0 {
		t.Errorf("%v allocations per round", n)
	}
	if lead.Commit() < 900 || follow.Commit() < 900 {
		t.Errorf("commits %d and %d", lead.Commit(), follow.Commit())
	}
}
