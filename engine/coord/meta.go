package coord

import (
	"errors"
	"fmt"

	"github.com/mortarmq/mortarmq/engine/group"
	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// proposal is a metadata mutation that was handed to the log and is not committed yet.
type proposal struct {
	id uint64
	// committed runs when the mutation has been folded, refused when it never will be. Exactly one of them runs.
	committed func()
	refused   func(err error)
}

// proposals are in the order of the log.
type proposals struct {
	last    uint64
	pending []proposal
	value   []byte // scratch
}

// propose puts a mutation into the metadata log. Exactly one of committed and refused is called later, unless propose
// itself returns an error (which wraps the code to answer with) and nothing was proposed.
func (c *Coordinator) propose(m metadata.Mutation, committed func(), refused func(error)) error {
	if err := c.writable(); err != nil {
		return err
	}
	p := &c.proposals
	p.value = metadata.AppendMutation(p.value[:0], m)
	c.proposed = true
	if err := c.log.ProposeMetadata(p.last+1, p.value); err != nil {
		if c.readOnly == "" {
			c.logger.Error("the metadata log does not take changes", "mutation", m.Type(), "err", err)
		}
		c.readOnly = err.Error()
		return fmt.Errorf("the metadata log takes no changes at the moment: %w", protocol.CodeMetadataReadOnly)
	}
	c.readOnly = ""
	p.last++
	p.pending = append(p.pending, proposal{id: p.last, committed: committed, refused: refused})
	return nil
}

// servable says whether metadata may be read.
func (c *Coordinator) servable() error {
	if c.quarantined != "" {
		return fmt.Errorf("the metadata log failed its checks and is in quarantine: an operator has to look at data/metadata/quarantine: %w", protocol.CodeMetadataQuarantined)
	}
	return nil
}

// journalFailed is what clients are told whose request would need the journal.
const journalFailed = "the broker's journal has failed: repair the disk and restart the broker"

// writable says whether metadata may be changed.
func (c *Coordinator) writable() error {
	if err := c.servable(); err != nil {
		return err
	}
	if c.logFailed != "" {
		return fmt.Errorf("%s: %w", journalFailed, protocol.CodeMetadataReadOnly)
	}
	if c.frozen != "" {
		return fmt.Errorf("%s: %w", c.frozen, protocol.CodeMetadataReadOnly)
	}
	return nil
}

// proposeLeader opens this start's epoch in the metadata log.
func (c *Coordinator) proposeLeader() {
	err := c.propose(&metadata.LeaderChanged{Node: c.opts.NodeID}, func() {}, func(error) {})
	if err != nil && c.quarantined == "" {
		c.logger.Error("the leader's epoch could not be recorded", "err", err)
	}
}

// foldEntry folds an entry of metadata records and tells those who proposed them.
func (c *Coordinator) foldEntry(r *wal.Round, e *wal.Entry) {
	data := r.Data(e)
	var rec wal.Record
	for range e.Count {
		data = data[wal.PeekRecord(data, &rec):]
		if c.quarantined != "" {
			return
		}
		if err := c.fold(&rec); err != nil {
			c.Quarantine(err.Error())
			c.refuseProposals(c.servable())
			return
		}
		if p := c.proposals.pending; len(p) > 0 && p[0].id == rec.ProducerSeq {
			done := p[0].committed
			p[0] = proposal{}
			c.proposals.pending = p[1:]
			done()
		}
	}
	c.saveMetadata()
}

// fold applies one committed record.
func (c *Coordinator) fold(rec *wal.Record) error {
	m, err := metadata.DecodeMutation(rec.Value)
	if err != nil {
		return fmt.Errorf("metadata record %d: %w", rec.Sequence, err)
	}
	if err := c.meta.Apply(uint64(rec.Sequence), uint32(rec.LeaderEpoch), m); err != nil {
		return err
	}
	c.metaRecords++
	c.metaBytes += int64(wal.RecordSize(len(rec.Key), len(rec.Value)))
	switch m.Type() {
	case metadata.TypeTopicCreated, metadata.TypeTopicDeleted:
		c.publishTopic(m)
	case metadata.TypeGroupCreated, metadata.TypeGroupDeleted, metadata.TypeMemberJoined, metadata.TypeMemberLeft,
		metadata.TypeAssigned, metadata.TypeLeaderChanged, metadata.TypeGroupChanged:
	}
	return nil
}

// saveMetadata writes a snapshot when the log behind the last one is long enough.
func (c *Coordinator) saveMetadata() {
	if c.silenced[0] || c.metaRecords < c.opts.MetadataSnapshotRecords && c.metaBytes < c.opts.MetadataSnapshotBytes {
		return
	}
	c.metaRecords, c.metaBytes = 0, 0
	c.store.SaveSnapshot(0, wal.SnapshotMetadata, c.meta.MutationID(), c.meta.AppendSnapshot(nil))
}

// logHasFailed answers everybody who waits for a commit that will not come.
func (c *Coordinator) logHasFailed(reason string) {
	if c.logFailed != "" {
		return
	}
	c.logFailed = reason
	c.refuseProposals(c.writable())
	c.delivery.failed(protocol.CodeReadOnlyDegraded, journalFailed)
	for id := range c.groups.starting {
		c.groupStarted(id, c.writable())
	}
	arrivals := c.groups.arrivals
	c.groups.arrivals = nil
	for _, a := range arrivals {
		if a.h.batch == a.batch {
			a.h.batch++
			c.step(a.h, &group.Event{Kind: group.Refused})
		}
	}
}

func (c *Coordinator) refuseProposals(err error) {
	pending := c.proposals.pending
	c.proposals.pending = nil
	for i := range pending {
		pending[i].refused(err)
	}
}

// Quarantine stops serving metadata: its log can't be trusted. Only a restart after an operator's repair ends it. It may
// be called before Run, for what recovery found; later only by the coordinator itself.
func (c *Coordinator) Quarantine(reason string) {
	if c.quarantined != "" {
		return
	}
	c.quarantined = reason
	c.logger.Error("metadata is quarantined and not served any more", "reason", reason)
	c.registry.Store(&Registry{quarantined: true})
}

// publishRegistry gives the event loops the present topics.
func (c *Coordinator) publishRegistry() {
	r := &Registry{}
	for _, t := range c.meta.Topics() {
		page := &r.pages[t.ID/registryPage]
		if *page == nil {
			*page = new([registryPage]*Topic)
		}
		(*page)[t.ID%registryPage] = topicOf(t)
	}
	c.registry.Store(r)
}

// publishTopic gives the event loops the topic that has come or gone with a mutation.
func (c *Coordinator) publishTopic(m metadata.Mutation) {
	switch m := m.(type) {
	case *metadata.TopicCreated:
		c.registry.Store(c.registry.Load().with(m.Topic, topicOf(c.meta.Topic(m.Topic))))
	case *metadata.TopicDeleted:
		c.registry.Store(c.registry.Load().with(m.Topic, nil))
	}
}

func topicOf(t *metadata.Topic) *Topic {
	return &Topic{ID: t.ID, Name: t.Name, Partitions: t.Partitions, Durability: t.Settings.EffectiveDurability()}
}

// RestoreMetadata starts from a snapshot of the metadata that includes the mutations up to position. snapshot is borrowed.
// After an error the metadata is quarantined.
func (c *Coordinator) RestoreMetadata(position uint64, snapshot []byte) error {
	s, err := metadata.DecodeSnapshot(snapshot)
	if err == nil && s.MutationID() != position {
		err = fmt.Errorf("metadata snapshot at mutation %d says that it is at %d: %w", position, s.MutationID(), metadata.ErrMalformed)
	}
	if err != nil {
		c.Quarantine(err.Error())
		return err
	}
	c.meta = s
	c.metaRecords, c.metaBytes = 0, 0
	return nil
}

// ReplayMetadata folds one record of the metadata log. r is borrowed. After an error the metadata is quarantined.
func (c *Coordinator) ReplayMetadata(r *wal.Record) error {
	if c.quarantined != "" {
		return fmt.Errorf("metadata record %d after a bad one: %w", r.Sequence, errors.New(c.quarantined))
	}
	if err := c.fold(r); err != nil {
		c.Quarantine(err.Error())
		return err
	}
	return nil
}

// RestoreLedger starts a journal's delivery ledger from a cursor checkpoint that includes the events up to position.
// snapshot is borrowed.
func (c *Coordinator) RestoreLedger(journal int, position uint64, snapshot []byte) error {
	return c.delivery.restore(journal, position, snapshot)
}

// ReplayLedger folds one record of a journal's ledger. r is borrowed.
func (c *Coordinator) ReplayLedger(journal int, r *wal.Record) error {
	return c.delivery.replay(journal, r)
}

// SetBounds tells which committed records of a partition recovery found.
func (c *Coordinator) SetBounds(topic, partition uint16, first, last wal.Sequence) {
	c.delivery.bounds(topic, partition, first, last)
}

// CheckIDs tells, after the last replay and before Recovered, whether the metadata has given out every topic id that the
// data directory has messages of (up to lastTopic) and every group id that the ledgers have cursors of. Where it has not it
// is older than they are (wal.ErrCorrupt): ids would be used twice, and cursors be taken for those of deleted groups.
func (c *Coordinator) CheckIDs(lastTopic uint16) error {
	if c.quarantined != "" {
		return nil
	}
	if lastTopic > c.meta.LastTopic() {
		return fmt.Errorf("%w: there are messages of topic id %d, but the metadata has only given out ids up to %d: it is older than the data; "+
			"restore the newest metadata, or the whole data directory from one backup", wal.ErrCorrupt, lastTopic, c.meta.LastTopic())
	}
	d, ok := c.delivery.(*delivery)
	if !ok {
		return nil
	}
	for _, l := range d.ledgers {
		for _, cur := range l.book.Cursors() {
			if k := cur.Key(); k.Group > c.meta.LastGroup() || k.Topic > c.meta.LastTopic() {
				return fmt.Errorf("%w: the ledger has a cursor of %v, but the metadata has only given out group ids up to %d and topic ids up to %d: "+
					"it is older than the ledger; restore the newest metadata, or the whole data directory from one backup",
					wal.ErrCorrupt, k, c.meta.LastGroup(), c.meta.LastTopic())
			}
		}
	}
	return nil
}

// LastTopic returns the highest topic id that was given out, as far as the metadata was replayed.
func (c *Coordinator) LastTopic() uint16 { return c.meta.LastTopic() }

// TopicDeleted tells, during and after the replay, whether what was replayed so far says that a topic of this id was
// deleted; false where the metadata is quarantined.
func (c *Coordinator) TopicDeleted(id uint16) bool {
	return c.quarantined == "" && c.meta.TopicDeleted(id)
}

// Epoch sets the leader epoch that this start has opened.
func (c *Coordinator) Epoch(e wal.Epoch) { c.epoch = e }

// RestoreTail takes over a reference to a round that recovery found committed but could not write to its segments, since
// the disk is full: consumers get its messages from memory. Behind Recovered and before Run, in the order of the journal.
func (c *Coordinator) RestoreTail(journal int, r *wal.Round) {
	if d, ok := c.delivery.(*delivery); ok {
		d.restoreTail(journal, r)
	}
	r.Release()
}

// Recovered ends recovery, after the last replay: all connections are gone, what was in flight returns without using an
// attempt.
func (c *Coordinator) Recovered() error {
	c.readClocks()
	if c.quarantined != "" {
		// Which groups there are is not known, so no cursor may be taken for that of a deleted one.
		return nil
	}
	c.publishRegistry()
	for _, g := range c.meta.Groups() {
		c.host(g)
	}
	if err := c.delivery.recovered(); err != nil {
		return err
	}
	for _, g := range c.meta.Groups() {
		if !c.delivery.groupStarted(g.ID) {
			c.groups.mustStart(g.ID)
		}
	}
	return nil
}
