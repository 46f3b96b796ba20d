package coord

import (
	"fmt"

	"github.com/mortarmq/mortarmq/engine/group"
	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/protocol"
)

// groupChanges are the creations, new settings and deletions of groups that are proposed and not committed.
type groupChanges struct {
	// waiting holds, by group, what goes on when the change of that group in flight is committed, or has failed (err). The
	// key is there as long as the change is, so there is one at a time.
	waiting map[groupKey][]func(err error)
	// creating counts proposed groups, which have their ids already, and assignments their cursors and those of members of
	// broadcast groups that are joining.
	creating    int
	assignments int
}

func newGroupChanges() groupChanges { return groupChanges{waiting: make(map[groupKey][]func(error))} }

// groupKey names a group: its name on a topic.
type groupKey struct {
	name  string
	topic uint16
}

// groupWish is what a SUB or DECLARE says about the group that it names.
type groupWish struct {
	name   string
	policy protocol.StartPolicy
	// settings are nil where it names none. broadcast: the group must be a broadcast one, or must not, whatever they are.
	settings  *metadata.GroupSettings
	broadcast bool
}

// afterChange has do called after the change of a group that is in flight; false: there is none.
func (c *Coordinator) afterChange(key groupKey, do func(err error)) bool {
	waiting, busy := c.groups.changes.waiting[key]
	if busy {
		c.groups.changes.waiting[key] = append(waiting, do)
	}
	return busy
}

// proposeGroup proposes a change of a group. committed runs first when that is done, then what waits for it.
func (c *Coordinator) proposeGroup(key groupKey, m metadata.Mutation, committed func() error, done func(err error)) error {
	changes := c.groups.changes.waiting
	end := func(err error) {
		waiting := changes[key]
		delete(changes, key)
		if err == nil {
			err = committed()
		}
		done(err)
		for len(waiting) > 0 {
			if later, busy := changes[key]; busy { // one of them has begun another change, which the others wait for
				changes[key] = append(waiting, later...)
				return
			}
			next := waiting[0]
			waiting = waiting[1:]
			next(err)
		}
	}
	if err := c.propose(m, func() { end(nil) }, end); err != nil {
		return err
	}
	c.groups.changes.waiting[key] = nil
	return nil
}

// createGroup proposes a new group; done is called when it is there or can't be.
func (c *Coordinator) createGroup(key groupKey, w *groupWish, done func(err error)) error {
	changes := &c.groups.changes
	if err := c.meta.CheckCreateGroup(key.name, key.topic, changes.creating, changes.assignments); err != nil {
		return err
	}
	m := &metadata.GroupCreated{Group: c.meta.LastGroup() + uint16(changes.creating) + 1, Topic: key.topic, Policy: w.policy, Name: key.name}
	if m.Settings.Broadcast = w.broadcast; w.settings != nil {
		m.Settings = *w.settings
	}
	partitions := int(c.meta.Topic(key.topic).Partitions)
	if m.Settings.Broadcast {
		partitions = 0 // it has cursors when it has members
	}
	created := func() error {
		if c.topics.deleting[m.Topic] {
			return deletedTopic(m.Topic) // the group is gone with it in a moment
		}
		c.host(c.meta.Group(m.Group))
		c.delivery.groupCreated(m.Group, m.Topic, m.Policy)
		c.groups.mustStart(m.Group)
		return nil
	}
	err := c.proposeGroup(key, m, created, func(err error) {
		changes.creating--
		changes.assignments -= partitions
		done(err)
	})
	if err != nil {
		return err
	}
	changes.creating++
	changes.assignments += partitions
	return nil
}

// changeGroup proposes other settings for a group.
func (c *Coordinator) changeGroup(key groupKey, g *metadata.Group, settings *metadata.GroupSettings, done func(err error)) error {
	if err := g.CheckSetGroup(settings); err != nil {
		return err
	}
	id := g.ID
	return c.proposeGroup(key, &metadata.GroupChanged{Group: id, Settings: *settings}, func() error {
		c.step(c.groups.byID[id], &group.Event{Kind: group.Configure, Strategy: strategy(settings.Strategy)})
		c.delivery.groupConfigured(id)
		return nil
	}, done)
}

// deleteGroup proposes the end of a group. Its members are told at once: nothing more of them may be proposed behind it.
func (c *Coordinator) deleteGroup(key groupKey, g *metadata.Group, done func(err error)) error {
	id := g.ID
	err := c.proposeGroup(key, &metadata.GroupDeleted{Group: id}, func() error {
		c.groups.remove(c.groups.byID[id])
		c.delivery.groupDeleted(id)
		return nil
	}, done)
	if err == nil {
		c.closeGroup(id, fmt.Errorf("group %.64q was deleted: SUB again to create it anew: %w", g.Name, protocol.CodeUnknownGroup))
	}
	return err
}

// closeGroups ends the groups of a topic that is being deleted; their members are told why.
func (c *Coordinator) closeGroups(t *metadata.Topic) {
	for _, h := range c.groups.ofTopic(t.ID) {
		c.closeGroup(h.id, fmt.Errorf("topic %s was deleted: %w", t.Name, protocol.CodeUnknownTopic))
	}
}

// closeGroup ends a group for those who are its members or want to be; why wraps the code that they get.
func (c *Coordinator) closeGroup(id uint16, why error) {
	code, _ := protocol.CodeOf(why)
	if _, starting := c.groups.starting[id]; starting {
		c.groupStarted(id, why)
	}
	c.step(c.groups.byID[id], &group.Event{Kind: group.Close, Code: code, Text: withoutCode(why, code)})
}

// startGroups lets members into the groups whose starts are on record by now.
func (c *Coordinator) startGroups() {
	order := c.groups.startOrder
	c.groups.startOrder = nil
	kept := order[:0]
	for _, id := range order {
		switch _, waiting := c.groups.starting[id]; {
		case !waiting:
		case c.delivery.groupStarted(id):
			c.groupStarted(id, nil)
		default:
			kept = append(kept, id)
		}
	}
	c.groups.startOrder = append(kept, c.groups.startOrder...)
}

// mustStart has SUBs of a group wait until it has started.
func (g *groupHosts) mustStart(id uint16) {
	g.starting[id] = nil
	g.startOrder = append(g.startOrder, id)
}

// groupStarted lets the SUBs go on that waited for a group's start, unless err tells why there is none.
func (c *Coordinator) groupStarted(id uint16, err error) {
	waiting := c.groups.starting[id]
	delete(c.groups.starting, id)
	for _, s := range waiting {
		switch {
		case s.gone:
			c.freeCursors(s)
		case err != nil:
			c.refuseSub(s, err)
		default:
			c.join(s, id)
		}
	}
}

// groupDeclaration is the part of a DECLARE that is about a group.
type groupDeclaration struct {
	wish groupWish
	// update: the settings replace those of the group.
	update bool
}

// decodeGroup reads what a DECLARE says about a group.
func decodeGroup(m *protocol.Declare) (*groupDeclaration, error) {
	if err := protocol.ValidateGroup(m.Group); err != nil {
		return nil, err
	}
	g := &groupDeclaration{wish: groupWish{name: string(m.Group), policy: m.StartPolicy}, update: m.Flags&protocol.DeclareFlagUpdate != 0}
	if m.Flags&protocol.DeclareFlagSettings != 0 {
		s, err := metadata.ParseGroupSettings(m.Settings)
		if err != nil {
			return nil, err
		}
		g.wish.settings, g.wish.broadcast = &s, s.Broadcast
	}
	return g, nil
}

// declareGroup handles the DECLARE of a group, now or when the change of the group that is in flight is committed.
func (c *Coordinator) declareGroup(d *declaration) {
	if err := c.startDeclareGroup(d); err != nil {
		c.declared(d, nil, false, err)
	}
}

// startDeclareGroup does what a DECLARE of a group asks for, and answers it unless there is an error.
func (c *Coordinator) startDeclareGroup(d *declaration) error {
	t := c.meta.TopicByName(d.name)
	if t == nil || c.topics.deleting[t.ID] {
		return unknownTopic(d.name)
	}
	if err := t.CheckSameTopic(d.partitions, nil); err != nil {
		return err
	}
	w, key, decl, topic := &d.group.wish, groupKey{d.group.wish.name, t.ID}, *d, *t
	again := func(err error) {
		if err != nil {
			c.declared(&decl, nil, false, err)
			return
		}
		c.declareGroup(&decl)
	}
	if c.afterChange(key, again) {
		return nil
	}
	g := c.meta.GroupByName(key.name, key.topic)
	done := func(err error) { c.declared(&decl, &topic, g != nil, err) }
	switch {
	case d.flags&protocol.DeclareFlagDelete != 0 && g == nil:
		done(nil)
		return nil
	case d.flags&protocol.DeclareFlagDelete != 0:
		return c.deleteGroup(key, g, done)
	case g == nil && (d.group.update || d.flags&protocol.DeclareFlagLookup != 0):
		return fmt.Errorf("group %.64q does not exist on topic %.64q: create it or SUB first: %w", key.name, d.name, protocol.CodeUnknownGroup)
	case g == nil:
		return c.createGroup(key, w, done)
	case d.group.update:
		return c.changeGroup(key, g, w.settings, done)
	default:
		done(g.CheckSameGroup(w.settings))
		return nil
	}
}
