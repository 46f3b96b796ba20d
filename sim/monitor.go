package sim

import (
	"time"

	"github.com/mortarmq/mortarmq/engine/replica"
)

// monitor looks at the nodes all the time: at most one leads an epoch, and a node's epoch never goes back.
type monitor struct {
	w       *world
	leaders map[replica.Epoch]replica.NodeID
	epochs  map[replica.NodeID]replica.Epoch
}

// lookEvery is how often the monitor looks.
const lookEvery = 50 * time.Millisecond

func newMonitor(w *world) *monitor {
	return &monitor{w: w, leaders: map[replica.Epoch]replica.NodeID{}, epochs: map[replica.NodeID]replica.Epoch{}}
}

func (m *monitor) run() {
	for _, h := range m.w.hosts {
		m.look(h)
	}
	m.w.after(lookEvery, m.run)
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
