package main

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/mortarmq/mortarmq/engine/dedupsnap"
	"github.com/mortarmq/mortarmq/engine/ledger"
	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/wal"
)

// The contents of ledger and metadata records and of snapshots. Their formats are their packages'.

// ledgerRecord prints a record of the delivery ledger, an item a line.
func (d *dumper) ledgerRecord(f *wal.RecordFound, fields fieldList) error {
	if err := d.print(f.Offset, "record", fields.with("value_bytes", len(f.Record.Value))); err != nil {
		return err
	}
	dec := ledger.NewDecoder(f.Record.Value)
	for it := (ledger.Item{}); dec.Next(&it); {
		if d.o.check {
			continue
		}
		if err := d.print(f.Offset, "item", ledgerItem(&it)); err != nil {
			return err
		}
	}
	if err := dec.Err(); err != nil {
		return d.bad(f.Offset, err)
	}
	return nil
}

// cursorFields name a cursor.
func cursorFields(k ledger.Key) fieldList {
	fields := fieldList{}.with("group_id", k.Group, "topic_id", k.Topic, "partition", k.Partition)
	if k.Member != 0 {
		fields = fields.with("of_member", k.Member)
	}
	return fields
}

func ledgerItem(it *ledger.Item) fieldList {
	fields := append(fieldList{}.with("item", it.Kind.String()), cursorFields(it.Key)...)
	switch it.Kind {
	case ledger.KindStart:
		return fields.with("floor", it.Floor)
	case ledger.KindDeliver:
		return fields.with("member", it.Owner.Member, "ownership_epoch", it.Owner.Epoch, "lease_until", unixMs(it.LeaseUntilMs), "runs", deliveries(it))
	case ledger.KindAck, ledger.KindDrop:
		return fields.with("runs", runs(it))
	case ledger.KindFail:
		return fields.with("failures", failures(it))
	case ledger.KindExhausted:
		return fields.with("sequence", it.Seq, "dead_letters_last", it.Letters)
	case ledger.KindForget:
	}
	return fields
}

// list prints as values with commas between them, and as a JSON array.
type list []string

func (l list) String() string { return strings.Join(l, ",") }

// runs are "first-last", or one sequence.
func runs(it *ledger.Item) list {
	l := make(list, it.Len)
	for i := range l {
		first, count := it.Run(i)
		l[i] = span(uint64(first), uint64(count))
	}
	return l
}

func span(first, count uint64) string {
	if count == 1 {
		return fmt.Sprint(first)
	}
	return fmt.Sprintf("%d-%d", first, first+count-1)
}

// deliveries are "first-last:delivery id of the first".
func deliveries(it *ledger.Item) list {
	l := runs(it)
	for i := range l {
		l[i] += fmt.Sprintf(":%#x", uint64(it.Delivery(i)))
	}
	return l
}

// failures are "sequence:failures:reason:due".
func failures(it *ledger.Item) list {
	l := make(list, it.Len)
	for i := range l {
		f := it.Failure(i)
		l[i] = fmt.Sprintf("%d:%d:%s:%s", f.Sequence, f.Failures, strings.ReplaceAll(f.Reason.String(), " ", "_"), unixMs(f.DueMs))
	}
	return l
}

// metadataRecord prints a mutation.
func (d *dumper) metadataRecord(f *wal.RecordFound, fields fieldList) error {
	m, err := metadata.DecodeMutation(f.Record.Value)
	if err != nil {
		if err := d.print(f.Offset, "record", fields.with("value_bytes", len(f.Record.Value))); err != nil {
			return err
		}
		return d.bad(f.Offset, err)
	}
	return d.print(f.Offset, "record", append(fields.with("mutation", strings.ReplaceAll(m.Type().String(), " ", "_")), mutation(m)...))
}

func mutation(m metadata.Mutation) fieldList {
	l := fieldList{}
	switch m := m.(type) {
	case *metadata.TopicCreated:
		return l.with("topic_id", m.Topic, "partitions", m.Partitions, "name", m.Name, "settings", object(m.Settings.AppendJSON(nil)))
	case *metadata.TopicDeleted:
		return l.with("topic_id", m.Topic)
	case *metadata.GroupCreated:
		return l.with("group_id", m.Group, "topic_id", m.Topic, "start_policy", m.Policy, "name", m.Name, "settings", object(m.Settings.AppendJSON(nil)))
	case *metadata.GroupDeleted:
		return l.with("group_id", m.Group)
	case *metadata.MemberJoined:
		return l.with("group_id", m.Group, "member", m.Member, "membership_epoch", m.MembershipEpoch)
	case *metadata.MemberLeft:
		return l.with("group_id", m.Group, "member", m.Member, "membership_epoch", m.MembershipEpoch)
	case *metadata.Assigned:
		parts := make(list, len(m.Parts))
		for i, p := range m.Parts {
			parts[i] = fmt.Sprintf("%d:%d@%d", p.Partition, p.Member, p.OwnershipEpoch)
		}
		return l.with("group_id", m.Group, "membership_epoch", m.MembershipEpoch, "assignment_epoch", m.AssignmentEpoch, "partition_member_ownership", parts)
	case *metadata.LeaderChanged:
		return l.with("node_id", m.Node)
	case *metadata.GroupChanged:
		return l.with("group_id", m.Group, "settings", object(m.Settings.AppendJSON(nil)))
	}
	return l
}

// object is a JSON object that prints as it is.
type object []byte

func (o object) String() string { return string(o) }

// MarshalJSON returns the object itself.
func (o object) MarshalJSON() ([]byte, error) { return json.RawMessage(o).MarshalJSON() }

// snapshot prints a snapshot and the state in it.
func (d *dumper) snapshot(f *wal.SnapshotFound) error {
	what := strings.ReplaceAll(f.Kind.String(), " ", "_")
	if err := d.print(0, what, fieldList{}.with("epoch", f.Epoch, "position", f.Position, "bytes", f.Length)); err != nil {
		return err
	}
	if f.Data == nil {
		return d.print(0, "note", fieldList{}.with("text", fmt.Sprintf("its content is larger than %d bytes and is not printed", wal.MaxInspectSnapshot)))
	}
	var err error
	switch f.Kind {
	case wal.SnapshotMetadata:
		err = d.metadataState(f.Data)
	case wal.SnapshotCursors:
		err = d.cursors(f.Data)
	case wal.SnapshotDedup:
		err = d.producers(f.Data)
	}
	return err
}

func (d *dumper) metadataState(data []byte) error {
	s, err := metadata.DecodeSnapshot(data)
	if err != nil {
		return d.bad(0, err)
	}
	err = d.print(0, "state", fieldList{}.with("mutation_id", s.MutationID(), "epoch", s.Epoch(), "leader", s.Leader(),
		"last_topic_id", s.LastTopic(), "last_group_id", s.LastGroup()))
	if err != nil {
		return err
	}
	for _, t := range s.Topics() {
		err := d.print(0, "topic", fieldList{}.with("topic_id", t.ID, "partitions", t.Partitions, "created_epoch", t.CreatedEpoch,
			"name", t.Name, "settings", object(t.Settings.AppendJSON(nil))))
		if err != nil {
			return err
		}
	}
	for _, g := range s.Groups() {
		if err := d.metadataGroup(g); err != nil {
			return err
		}
	}
	return nil
}

func (d *dumper) metadataGroup(g *metadata.Group) error {
	members := make(list, len(g.Members))
	for i, m := range g.Members {
		members[i] = fmt.Sprint(m.ID)
	}
	parts := make(list, 0, len(g.Parts))
	for i, p := range g.Parts {
		if p.Owner != 0 || p.Target != 0 {
			parts = append(parts, fmt.Sprintf("%d:%d@%d", i, p.Owner, p.OwnershipEpoch))
		}
	}
	return d.print(0, "group", fieldList{}.with("group_id", g.ID, "topic_id", g.Topic, "start_policy", g.Policy, "created_epoch", g.CreatedEpoch,
		"name", g.Name, "settings", object(g.Settings.AppendJSON(nil)), "membership_epoch", g.MembershipEpoch,
		"assignment_epoch", g.AssignmentEpoch, "members", members, "partition_member_ownership", parts))
}

func (d *dumper) cursors(data []byte) error {
	book := ledger.NewBook(nil, nil) // its randomness is for retries: nothing is retried here
	if err := book.Load(data); err != nil {
		return d.bad(0, err)
	}
	for _, c := range book.Cursors() {
		k, s := c.Key(), c.Stats()
		err := d.print(0, "cursor", cursorFields(k).with("start", s.Start,
			"ack_floor", s.Floor, "delivered_up_to", c.Next()-1, "acknowledged", s.Acked, "dropped", s.Dropped, "retrying", s.Retrying))
		if err != nil {
			return err
		}
	}
	return nil
}

func (d *dumper) producers(data []byte) error {
	err := dedupsnap.Decode(data, func(w *dedupsnap.Window) error {
		l := make(list, len(w.Runs))
		for i, r := range w.Runs {
			l[i] = span(r.ProducerSeq, r.Count) + ":" + span(r.Sequence, r.Count)
		}
		return d.print(0, "producer", fieldList{}.with("topic_id", w.Topic, "partition", w.Partition, "producer_id", w.ProducerID,
			"producer_seqs_at_sequences", l))
	})
	if err != nil {
		return d.bad(0, err)
	}
	return nil
}
