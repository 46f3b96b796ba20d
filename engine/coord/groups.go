package coord

import (
	"container/heap"
	"maps"
	"slices"
	"time"

	"github.com/mortarmq/mortarmq/engine/group"
	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/internal/mutant"
	"github.com/mortarmq/mortarmq/protocol"
)

// groupHost runs the machine of one group.
type groupHost struct {
	id        uint16
	topic     uint16
	broadcast bool
	m         *group.Machine
	// subs are the live subscriptions of its members and joiners, by handle.
	subs map[uint64]*subscription
	// deadline is when the machine wants a Tick, index its place in the heap (-1: no deadline).
	deadline time.Duration
	index    int
	// batch numbers the machine's proposals, so that the refusal of one is not taken for that of a later one.
	batch uint64
}

// groupHosts are all groups.
type groupHosts struct {
	byID    map[uint16]*groupHost
	byTopic map[uint16]map[uint16]*groupHost // by topic and id
	due     hostHeap
	changes groupChanges
	// starting holds, by group, the SUBs that wait until it is on record where the group starts; startOrder are those groups,
	// and some that have started, in the order in which they were created.
	starting   map[uint16][]*subscription
	startOrder []uint16
	arrivals   []arrival
	fx         []group.Effects // free effect lists
}

func newGroupHosts() groupHosts {
	return groupHosts{byID: make(map[uint16]*groupHost), byTopic: make(map[uint16]map[uint16]*groupHost),
		changes: newGroupChanges(), starting: make(map[uint16][]*subscription)}
}

// ofTopic returns the groups that read a topic, by id.
func (g *groupHosts) ofTopic(topic uint16) []*groupHost {
	return slices.SortedFunc(maps.Values(g.byTopic[topic]), func(a, b *groupHost) int { return int(a.id) - int(b.id) })
}

func (g *groupHosts) add(h *groupHost) {
	g.byID[h.id] = h
	if g.byTopic[h.topic] == nil {
		g.byTopic[h.topic] = make(map[uint16]*groupHost)
	}
	g.byTopic[h.topic][h.id] = h
}

func (g *groupHosts) remove(h *groupHost) {
	delete(g.byID, h.id)
	delete(g.byTopic[h.topic], h.id)
	if len(g.byTopic[h.topic]) == 0 {
		delete(g.byTopic, h.topic)
	}
	if h.index >= 0 {
		heap.Remove(&g.due, h.index)
	}
}

// noticeBaseShift leaves room for 2^32 notices of a group in each epoch.
const noticeBaseShift = 32

// memberBaseShift leaves room for 2^48 members of a group; the group's id above them makes member ids unique in the broker.
const memberBaseShift = 48

// host starts the machine of a group as the metadata has it.
func (c *Coordinator) host(g *metadata.Group) {
	st := group.State{
		MembershipEpoch: g.MembershipEpoch, AssignmentEpoch: g.AssignmentEpoch,
		LastOwnership: g.LastOwnership, LastMember: g.LastMember,
		Members: make([]group.MemberState, len(g.Members)), Parts: make([]group.PartState, len(g.Parts)),
	}
	for i, m := range g.Members {
		st.Members[i] = group.MemberState{ID: m.ID, JoinEpoch: m.JoinEpoch}
	}
	for i, p := range g.Parts {
		st.Parts[i] = group.PartState{Owner: p.Owner, OwnershipEpoch: p.OwnershipEpoch, Target: p.Target}
	}
	h := &groupHost{id: g.ID, topic: g.Topic, broadcast: g.Settings.Broadcast, subs: make(map[uint64]*subscription), index: -1}
	h.m = group.New(c.now, group.Options{
		Group: g.ID, Topic: g.Topic, MaxMembers: max(c.opts.MaxMembers, 0), Strategy: strategy(g.Settings.Strategy), Broadcast: g.Settings.Broadcast,
		MemberBase: uint64(g.ID) << memberBaseShift, NoticeBase: uint64(c.epoch) << noticeBaseShift,
	}, st)
	c.groups.add(h)
	c.reschedule(h)
}

func strategy(s metadata.Strategy) group.Strategy {
	switch s {
	case metadata.StrategyAveragely:
		return group.Averagely
	case metadata.StrategyCircle:
		return group.Circle
	case metadata.StrategySticky:
		return group.Sticky
	default:
		return group.Sticky
	}
}

func groupSessionClosed(handle uint64) *group.Event {
	return &group.Event{Kind: group.SessionClosed, Session: handle}
}

// step gives a group one event and carries out what comes of it.
func (c *Coordinator) step(h *groupHost, ev *group.Event) {
	var fx group.Effects
	if n := len(c.groups.fx); n > 0 {
		fx = c.groups.fx[n-1]
		c.groups.fx = c.groups.fx[:n-1]
	}
	h.m.Step(c.now, ev, &fx)
	// A refused proposal steps the machine again, within the loop; the effects of that come behind.
	for i := 0; i < len(fx.List); i++ {
		c.effect(h, &fx.List[i], &fx)
	}
	fx.Reset()
	c.groups.fx = append(c.groups.fx, fx)
	c.reschedule(h)
}

func (c *Coordinator) effect(h *groupHost, e *group.Effect, fx *group.Effects) {
	s := c.byHandle[e.Session]
	switch e.Kind {
	case group.Propose:
		if !c.proposeChanges(h, e.Changes) {
			h.m.Step(c.now, &group.Event{Kind: group.Refused}, fx)
		}
	case group.Answer:
		c.answered(e)
	case group.Send:
		if s != nil {
			c.frame = e.Notice.AppendFrame(c.frame[:0])
			s.client.Push(c.frame)
			c.flushLater(s.client)
		}
	case group.Confirmed:
		if s != nil {
			s.assignmentEpoch = e.AssignmentEpoch
		}
	case group.Install:
		if s != nil {
			c.delivery.own(s, e.Partition, e.OwnershipEpoch)
		}
	case group.Drain:
		c.delivery.drain(h.id, e.Member, e.Partition, e.OwnershipEpoch)
	case group.Remove:
		c.delivery.disown(h.id, e.Member, e.Partition, e.OwnershipEpoch, e.Graceful)
	case group.End:
		if s != nil {
			c.endSub(s, e.Code, e.Text, e.Graceful)
		}
	case group.Forget:
		c.delivery.memberGone(h.id, e.Member)
	}
}

// endSub ends a subscription whose member is gone while its connection is not. A code of 0 is a LEAVE.
func (c *Coordinator) endSub(s *subscription, code protocol.ErrorCode, text string, graceful bool) {
	s.ended, s.endedText = code, text
	if code == 0 {
		s.ended, s.endedText = protocol.CodeUnknownMember, "the member has left the group: SUB again"
	}
	if s.open {
		c.delivery.closeSub(s, graceful)
	}
	if code == 0 {
		c.dropSub(s)
		return
	}
	c.detach(s)
}

// proposeChanges puts a batch of changes into the metadata log; false if the log does not take it.
func (c *Coordinator) proposeChanges(h *groupHost, changes []group.Change) bool {
	h.batch++
	batch := h.batch
	refused := func(error) {
		if h.batch == batch {
			h.batch++
			c.notJoined(h, changes)
			c.step(h, &group.Event{Kind: group.Refused})
		}
	}
	for i := range changes {
		ch := &changes[i]
		committed := func() {
			if h.batch == batch && !mutant.Is("notice-before-commit") {
				c.changeCommitted(h, ch, batch)
			}
		}
		if mutant.Is("notice-before-commit") {
			c.groups.arrivals = append(c.groups.arrivals, arrival{h, ch, batch})
		}
		if err := c.propose(mutation(h.id, ch), committed, refused); err != nil {
			h.batch++ // what is proposed of the batch speaks to nobody
			c.notJoined(h, changes[:i])
			if i > 0 {
				// Half a batch is in the log, which the machine has no state for.
				c.logHasFailed("it took only part of a change of group membership: " + err.Error())
			}
			return false
		}
		if h.broadcast && ch.Kind == group.Joined {
			policy := protocol.StartEarliest
			if s := c.byHandle[ch.Session]; s != nil {
				policy = s.policy
			}
			c.delivery.memberJoins(h.id, ch.Member, policy)
		}
	}
	return true
}

// changeCommitted tells a group's machine that a change is in the log. A member of a broadcast group is let in only when it
// is on record, too, where its cursors begin: if the broker died in between they would begin at another place afterwards.
func (c *Coordinator) changeCommitted(h *groupHost, ch *group.Change, batch uint64) {
	if h.broadcast && ch.Kind == group.Joined && !c.delivery.memberStarted(h.id, ch.Member) {
		c.groups.arrivals = append(c.groups.arrivals, arrival{h, ch, batch})
		return
	}
	c.step(h, &group.Event{Kind: group.Committed})
}

// arrival is a member of a broadcast group whose joining is committed and whose cursors are not on record yet.
type arrival struct {
	h     *groupHost
	ch    *group.Change
	batch uint64
}

// letIn goes on with the members whose cursors are on record by now.
func (c *Coordinator) letIn() {
	all := c.groups.arrivals
	c.groups.arrivals = nil
	for _, a := range all {
		if a.h.batch == a.batch {
			c.changeCommitted(a.h, a.ch, a.batch)
		}
	}
}

// notJoined forgets what was begun for members of a batch that the log refused.
func (c *Coordinator) notJoined(h *groupHost, changes []group.Change) {
	if !h.broadcast {
		return
	}
	for i := range changes {
		if changes[i].Kind == group.Joined {
			c.delivery.memberGone(h.id, changes[i].Member)
		}
	}
}

func mutation(id uint16, ch *group.Change) metadata.Mutation {
	switch ch.Kind {
	case group.Joined:
		return &metadata.MemberJoined{Group: id, Member: ch.Member, MembershipEpoch: ch.MembershipEpoch}
	case group.Left:
		return &metadata.MemberLeft{Group: id, Member: ch.Member, MembershipEpoch: ch.MembershipEpoch}
	case group.Assigned:
		m := &metadata.Assigned{Group: id, MembershipEpoch: ch.MembershipEpoch, AssignmentEpoch: ch.AssignmentEpoch,
			Parts: make([]metadata.AssignedPart, len(ch.Parts))}
		for i, p := range ch.Parts {
			m.Parts[i] = metadata.AssignedPart{Partition: p.Partition, Member: p.Member, OwnershipEpoch: p.OwnershipEpoch}
		}
		return m
	default:
		panic("coord: a group change of an unknown kind")
	}
}

// tickGroups gives every group its time, and returns when the next one is due.
func (c *Coordinator) tickGroups() (next time.Duration, due bool) {
	if mutant.Is("notice-before-commit") {
		c.letIn()
	}
	for len(c.groups.due) > 0 && c.groups.due[0].deadline <= c.now {
		h := c.groups.due[0]
		for _, s := range h.subs {
			if s.member != 0 {
				h.m.Step(c.now, &group.Event{Kind: group.Touch, Member: s.member, At: s.lastOp}, nil)
			}
		}
		c.step(h, &group.Event{Kind: group.Tick})
	}
	if len(c.groups.due) == 0 {
		return 0, false
	}
	return c.groups.due[0].deadline, true
}

// reschedule puts a group where its deadline belongs.
func (c *Coordinator) reschedule(h *groupHost) {
	at, ok := h.m.Deadline()
	switch {
	case c.groups.byID[h.id] != h:
	case !ok && h.index >= 0:
		heap.Remove(&c.groups.due, h.index)
	case !ok:
	case h.index < 0:
		h.deadline = at
		heap.Push(&c.groups.due, h)
	case at != h.deadline:
		h.deadline = at
		heap.Fix(&c.groups.due, h.index)
	}
}

// hostHeap orders groups by deadline; groups that are due at once go by id.
type hostHeap []*groupHost

func (x hostHeap) Len() int { return len(x) }
func (x hostHeap) Less(i, j int) bool {
	if x[i].deadline != x[j].deadline {
		return x[i].deadline < x[j].deadline
	}
	return x[i].id < x[j].id
}
func (x hostHeap) Swap(i, j int) {
	x[i], x[j] = x[j], x[i]
	x[i].index, x[j].index = i, j
}

// Push implements heap.Interface.
func (x *hostHeap) Push(v any) {
	h := v.(*groupHost)
	h.index = len(*x)
	*x = append(*x, h)
}

// Pop implements heap.Interface.
func (x *hostHeap) Pop() any {
	old := *x
	h := old[len(old)-1]
	old[len(old)-1] = nil
	*x = old[:len(old)-1]
	h.index = -1
	return h
}
