package sim

import (
	"time"

	"github.com/mortarmq/mortarmq/engine/replica"
)

// monitor looks at the nodes all the time: at most one leads an epoch, a node's epoch never goes back, and neither does what
// one leader after the other says of the cluster.
type monitor struct {
	w       *world
	leaders map[replica.Epoch]replica.NodeID
	epochs  map[replica.NodeID]replica.Epoch
	looks   int
	// told is what the leaders up to an epoch have said.
	told  map[figure]uint64
	epoch uint32
}

// figure is something that is counted once for the whole cluster and never gets less.
type figure struct {
	what             string
	owner, partition uint16 // of a topic's or a group's
}

// lookEvery is how often the monitor looks, askEvery at how many looks it asks the leaders for their figures.
const (
	lookEvery = 50 * time.Millisecond
	askEvery  = 24
)

func newMonitor(w *world) *monitor {
	return &monitor{w: w, leaders: map[replica.Epoch]replica.NodeID{}, epochs: map[replica.NodeID]replica.Epoch{}, told: map[figure]uint64{}}
}

func (m *monitor) run() {
	for _, h := range m.w.hosts {
		m.look(h)
	}
	if m.looks++; m.looks%askEvery == 0 {
		for _, h := range m.w.hosts {
			if h.node != nil && !h.paused && h.node.Status().Serving {
				m.ask(h)
			}
		}
	}
	m.w.after(lookEvery, m.run)
}

// ask compares what a leader says with what the others have said, itself and those before it: of what is committed nothing is
// taken back. One that was the leader of an earlier epoch, and has no quorum any more, may know less.
func (m *monitor) ask(h *host) {
	s := h.stats()
	if s == nil || s.Epoch < m.epoch {
		return
	}
	m.epoch = s.Epoch
	m.grows(h, figure{what: "mutation id"}, s.MutationID)
	for i := range s.Topics {
		t := &s.Topics[i]
		for p := range t.Parts {
			m.grows(h, figure{"last sequence of topic", t.ID, uint16(p)}, t.Parts[p].LastSeq)
			m.grows(h, figure{"first sequence of topic", t.ID, uint16(p)}, t.Parts[p].FirstSeq)
		}
	}
	for i := range s.Groups {
		g := &s.Groups[i]
		m.grows(h, figure{"membership epoch of group", g.ID, 0}, uint64(g.MembershipEpoch))
		m.grows(h, figure{"assignment epoch of group", g.ID, 0}, uint64(g.AssignmentEpoch))
		m.grows(h, figure{"messages published to group", g.ID, 0}, g.Published)
		m.grows(h, figure{"messages acknowledged by group", g.ID, 0}, g.Acknowledged)
		m.grows(h, figure{"messages dropped by group", g.ID, 0}, g.Dropped)
		m.grows(h, figure{"dead letters of group", g.ID, 0}, g.DLQ)
	}
	m.w.count(figuresCompared)
}

func (m *monitor) grows(h *host, f figure, n uint64) {
	if was := m.told[f]; n < was {
		m.w.fail("node %d says in epoch %d: %s %d, partition %d: %d, before it was %d", h.id, m.epoch, f.what, f.owner, f.partition, n, was)
	}
	m.told[f] = n
}

func (m *monitor) look(h *host) {
	if h.node == nil {
		return
	}
	st := h.node.Status()
	if st.Standing == replica.Learner && st.Epoch > 1 {
		m.w.count(learner)
	}
	if st.Epoch < m.epochs[h.id] && st.LeaderName != "" && !h.wiped {
		m.w.fail("node %d follows epoch %d, before it was in %d", h.id, st.Epoch, m.epochs[h.id])
	}
	if st.LeaderName != "" {
		m.epochs[h.id] = max(m.epochs[h.id], st.Epoch)
	}
	if st.Role != "leader" {
		return
	}
	if other, ok := m.leaders[st.Epoch]; ok && other != h.id {
		m.w.fail("nodes %d and %d both lead epoch %d", other, h.id, st.Epoch)
	}
	m.leaders[st.Epoch] = h.id
}
