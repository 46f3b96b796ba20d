package coord

import (
	"github.com/mortarmq/mortarmq/engine/ledger"
	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/protocol"
)

// statistics takes the picture that Stats promises.
func (c *Coordinator) statistics() *Stats {
	s := &Stats{
		Epoch: uint32(c.epoch), MutationID: c.meta.MutationID(),
		MetadataState: "ok", Sessions: len(c.sessions), E2E: c.delivery.endToEnd(),
	}
	switch {
	case c.quarantined != "":
		s.MetadataState, s.MetadataReason = "quarantined", c.quarantined
		return s
	case c.logFailed != "":
		s.MetadataState, s.MetadataReason = "read_only", c.logFailed
	case c.readOnly != "":
		s.MetadataState, s.MetadataReason = "read_only", c.readOnly
	}
	for _, t := range c.meta.Topics() {
		s.Topics = append(s.Topics, c.topicStats(t))
	}
	if c.standby {
		c.standbyGroups(s)
		return s
	}
	for _, g := range c.meta.Groups() {
		if h := c.groups.byID[g.ID]; h != nil {
			s.Groups = append(s.Groups, c.groupStats(g, h))
			for _, sub := range h.subs {
				if sub.open {
					s.Subscriptions++
				}
			}
		}
	}
	return s
}

func (c *Coordinator) topicStats(t *metadata.Topic) TopicStats {
	ts := TopicStats{
		ID: t.ID, Name: t.Name, Partitions: t.Partitions, State: "active", CreatedEpoch: t.CreatedEpoch,
		Durability: t.Settings.EffectiveDurability().String(), Parts: make([]PartitionStats, t.Partitions),
	}
	if c.topics.deleting[t.ID] {
		ts.State = "deleting"
	}
	c.delivery.topicStats(&ts)
	return ts
}

func (c *Coordinator) groupStats(g *metadata.Group, h *groupHost) GroupStats {
	gs := GroupStats{
		ID: g.ID, Name: g.Name, TopicID: g.Topic, Topic: c.meta.Topic(g.Topic).Name,
		Parts: make([]GroupPartitionStats, len(g.Parts)),
	}
	gs.MembershipEpoch, gs.AssignmentEpoch = h.m.Epochs()
	gs.Settings = c.groupSettings(g)
	for i, p := range h.m.Parts() {
		gs.Parts[i] = GroupPartitionStats{Member: p.Owner, OwnershipEpoch: p.OwnershipEpoch, Installed: p.Installed}
	}
	members := h.m.Members()
	switch {
	case c.topics.deleting[g.Topic]:
		gs.State = "deleting"
	case len(members) == 0:
		gs.State = "empty"
	case h.m.Settled():
		gs.State = "stable"
	default:
		gs.State = "rebalancing"
	}
	for _, m := range members {
		ms := MemberStats{ID: m.ID, Connected: m.Connected, AssignmentEpoch: gs.AssignmentEpoch, InstalledEpoch: m.InstalledEpoch}
		if h.broadcast {
			ms.OwnershipEpoch = uint64(m.JoinEpoch)
		}
		gs.Members = append(gs.Members, ms)
	}
	c.delivery.groupStats(&gs)
	gs.ownedLag()
	return gs
}

// ownedLag gives the members the lag and the ownership epoch of what they own.
func (g *GroupStats) ownedLag() {
	at := make(map[uint64]int, len(g.Members))
	for i := range g.Members {
		at[g.Members[i].ID] = i
	}
	for _, p := range g.Parts {
		if i, ok := at[p.Member]; ok {
			m := &g.Members[i]
			m.Lag, m.OwnershipEpoch = max(m.Lag, p.Lag), max(m.OwnershipEpoch, p.OwnershipEpoch)
		}
	}
}

// groupSettings are a group's settings with the broker's in the places of those that it leaves open.
func (c *Coordinator) groupSettings(g *metadata.Group) GroupSettings {
	s := &g.Settings
	v := GroupSettings{
		Strategy: s.Strategy.String(), Broadcast: s.Broadcast, Ordered: s.Ordered, MaxAttempts: s.Attempts(c.opts.DeliveryMaxAttempts),
		Lease: c.opts.DeliveryLease, Retry: s.Retry.String(), StartLatest: g.Policy == protocol.StartLatest,
	}
	if s.Broadcast {
		v.Strategy, v.Retry = "", ""
		return v
	}
	if s.Lease > 0 {
		v.Lease = s.Lease
	}
	o := ledger.DefaultOptions()
	if v.RetryDelays = s.RetryDelays(); v.RetryDelays == nil {
		v.RetryDelays = o.Backoff
	}
	return v
}
