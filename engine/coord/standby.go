package coord

import (
	"errors"
	"fmt"
	"slices"

	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/internal/mutant"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// A coordinator stands by while another node leads the cluster: it folds the rounds that are committed, exactly as recovery
// does with those it finds on the disk, and serves nobody. Standing by is a recovery that goes on; Lead ends it.

// Lead tells, once and after the last round of earlier epochs was given to CommitRound, that this node leads from now on
// in the epoch e. served is called on the coordinator's goroutine when requests can be handled, with the error that keeps
// them from it otherwise.
func (c *Coordinator) Lead(e wal.Epoch, served func(error)) {
	c.inbox.Push(event{kind: evLead, epoch: e, served: served})
}

// Depose tells that this node leads no more: whoever waits for a commit is answered, all connections with a session are
// closed with 0x6005 and the text, which names the leader where it is known. Nothing is served afterwards; what is
// committed is not folded any more either, since what was proposed here may never be. The engine is opened anew.
func (c *Coordinator) Depose(text string) {
	c.inbox.Push(event{kind: evDepose, text: text})
}

// Silence tells that a journal is being filled from another node: what is folded here of it is of no use any more, and nothing
// is written down. Of other journals the coordinator goes on knowing everything, so that it can hand that on. The engine is opened
// anew when the journal is full.
func (c *Coordinator) Silence(journal int) {
	c.inbox.Push(event{kind: evSilence, journal: journal})
}

// Freeze tells that nothing can be committed for the time being, and why; an empty text ends it. Meanwhile ACK and NACK
// get 0x6002, what would change metadata 0x2003, both with the text; PULL goes on up to what is committed. The clock of
// leases, sessions and retries stands still: nobody is punished for what could not be put on record.
func (c *Coordinator) Freeze(text string) {
	c.inbox.Push(event{kind: evFreeze, text: text})
}

// errSilenced is why a coordinator whose journals are being filled can't lead.
var errSilenced = errors.New("a log of this node is being filled from another node")

// lead ends standing by.
func (c *Coordinator) lead(e wal.Epoch, served func(error)) {
	if !c.standby {
		served(fmt.Errorf("the coordinator leads in epoch %d already", c.epoch))
		return
	}
	c.epoch = e
	if slices.Contains(c.silenced, true) {
		served(errSilenced)
		return
	}
	if err := c.standbyErr; err != nil {
		served(err)
		return
	}
	c.standby = false
	if err := c.Recovered(); err != nil {
		served(err)
		return
	}
	c.proposeLeader()
	served(nil)
}

// depose ends serving.
func (c *Coordinator) depose(text string) {
	if c.deposed {
		return
	}
	c.deposed = true
	c.stopping.Store(true)
	c.logHasFailed(text)
	ids := make([]uint64, 0, len(c.sessions))
	for id := range c.sessions {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	for _, id := range ids {
		c.sessions[id].client.Shut(protocol.CodeStaleLeaderEpoch, 0, text)
	}
}

// follow folds a committed round while standing by. What can't be folded is kept as the reason why this node can't lead.
func (c *Coordinator) follow(journal int, r *wal.Round) {
	defer r.Release()
	if c.standbyErr != nil || c.silenced[journal] {
		return
	}
	var rec wal.Record
	for i := range r.Entries {
		e := &r.Entries[i]
		if e.Stream.Kind != wal.Ledger && e.Stream.Kind != wal.Metadata {
			continue
		}
		for data := r.Data(e); len(data) > 0; {
			data = data[wal.PeekRecord(data, &rec):]
			var err error
			if e.Stream.Kind == wal.Ledger && mutant.Is("ledger-forgotten") {
				continue
			}
			if e.Stream.Kind == wal.Ledger {
				err = c.delivery.replay(journal, &rec)
			} else {
				err = c.followMetadata(&rec)
			}
			if err != nil {
				c.standbyErr = err
				c.logger.Error("what the leader has committed can't be folded here: this node can't lead before its data is made again from the others", "journal", journal, "err", err)
				return
			}
		}
	}
	c.delivery.follow(journal, r)
	c.saveMetadata()
}

// followMetadata folds a record of the metadata log and carries out what it means for the files.
//
// What a catch-up brought may come once more with the live stream: a snapshot can be newer than the point it was sent for.
func (c *Coordinator) followMetadata(rec *wal.Record) error {
	if c.quarantined == "" && uint64(rec.Sequence) <= c.meta.MutationID() {
		return nil
	}
	if err := c.ReplayMetadata(rec); err != nil {
		return err
	}
	if m, err := metadata.DecodeMutation(rec.Value); err == nil {
		if t, ok := m.(*metadata.TopicDeleted); ok {
			c.delivery.topicDeleted(t.Topic)
			c.store.DropTopic(t.Topic)
		}
	}
	return nil
}

// standbyGroups adds the groups to a picture that is taken while standing by: from the metadata and the ledgers.
func (c *Coordinator) standbyGroups(s *Stats) {
	topics := make(map[uint16]*TopicStats, len(s.Topics))
	for i := range s.Topics {
		topics[s.Topics[i].ID] = &s.Topics[i]
	}
	for _, g := range c.meta.Groups() {
		gs := c.standbyGroup(g)
		c.delivery.standbyStats(&gs)
		gs.ownedLag()
		if t := topics[g.Topic]; t != nil {
			for i := range min(len(t.Parts), len(gs.Parts)) {
				t.Parts[i].Depth = max(t.Parts[i].Depth, gs.Parts[i].Lag)
			}
		}
		s.Groups = append(s.Groups, gs)
	}
}

// standbyGroup is what the metadata says of a group.
func (c *Coordinator) standbyGroup(g *metadata.Group) GroupStats {
	gs := GroupStats{
		ID: g.ID, Name: g.Name, TopicID: g.Topic, Topic: c.meta.Topic(g.Topic).Name, State: "stable",
		MembershipEpoch: g.MembershipEpoch, AssignmentEpoch: g.AssignmentEpoch, Settings: c.groupSettings(g),
		Parts: make([]GroupPartitionStats, len(g.Parts)),
	}
	for i, p := range g.Parts {
		gs.Parts[i] = GroupPartitionStats{Member: p.Owner, OwnershipEpoch: p.OwnershipEpoch, Installed: p.Owner == p.Target}
		if p.Owner != p.Target {
			gs.State = "rebalancing"
		}
	}
	if len(g.Members) == 0 {
		gs.State = "empty"
	}
	for _, m := range g.Members {
		ms := MemberStats{ID: m.ID, AssignmentEpoch: g.AssignmentEpoch, InstalledEpoch: g.AssignmentEpoch}
		if g.Settings.Broadcast {
			ms.OwnershipEpoch = uint64(m.JoinEpoch)
		}
		gs.Members = append(gs.Members, ms)
	}
	return gs
}
