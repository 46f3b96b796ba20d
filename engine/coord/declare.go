package coord

import (
	"fmt"

	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/protocol"
)

// topicChanges are the creations and deletions of topics that are proposed and not committed.
type topicChanges struct {
	// waiting holds, by topic name, the requests that came while a change of that topic was in flight; they are handled
	// when it is committed. The key is there as long as the change is.
	waiting map[string][]declaration
	// creating and partitions count proposed topics, which have their ids already.
	creating   int
	partitions int
	// deleting holds the ids of topics whose deletion is in flight: nobody may subscribe any more.
	deleting map[uint16]bool
}

func newTopicChanges() topicChanges {
	return topicChanges{waiting: make(map[string][]declaration), deleting: make(map[uint16]bool)}
}

// declaration is a decoded DECLARE with a copy of what it names, or a topic that the broker itself wants.
type declaration struct {
	client     Client
	req        uint64
	name       string
	partitions uint16
	flags      uint16
	settings   *metadata.TopicSettings
	group      *groupDeclaration // it is about a group of the topic
	// system is called with the result instead of an answer to client.
	system func(topic uint16, err error)
}

func (c *Coordinator) handleDeclare(r *Request, payload []byte) {
	var d protocol.Declare
	if err := d.Decode(payload); err != nil {
		c.refuseErr(r.Client, r.Req, r.Op, err)
		return
	}
	if d.Flags&protocol.DeclareFlagReset != 0 {
		c.handleReset(r, &d)
		return
	}
	decl := declaration{client: r.Client, req: r.Req, name: string(d.Topic), partitions: d.Partitions, flags: d.Flags}
	if d.Flags&protocol.DeclareFlagGroup != 0 {
		g, err := decodeGroup(&d)
		if err != nil {
			c.declared(&decl, nil, false, err)
			return
		}
		decl.group = g
		c.declare(decl)
		return
	}
	if d.Flags&protocol.DeclareFlagSettings != 0 {
		s, err := metadata.ParseTopicSettings(d.Settings)
		if err != nil {
			c.declared(&decl, nil, false, err)
			return
		}
		decl.settings = &s
	}
	c.declare(decl)
}

// ensureSystemTopic creates one of the broker's own topics, whose names start with '$', unless it exists with that
// partition count. done is called once, possibly before this returns; its error wraps a code.
func (c *Coordinator) ensureSystemTopic(name string, partitions uint16, done func(topic uint16, err error)) {
	c.declare(declaration{name: name, partitions: partitions, system: done})
}

// declare handles a declaration, now or when the change of the topic that is in flight is committed.
func (c *Coordinator) declare(d declaration) {
	if err := c.servable(); err != nil {
		c.declared(&d, nil, false, err)
		return
	}
	lookup := d.flags&protocol.DeclareFlagLookup != 0
	if err := validateName(&d, lookup || d.group != nil); err != nil {
		c.declared(&d, nil, false, err)
		return
	}
	if queue, busy := c.topics.waiting[d.name]; busy && !lookup {
		c.topics.waiting[d.name] = append(queue, d)
		return
	}
	switch t := c.meta.TopicByName(d.name); {
	case d.group != nil:
		c.declareGroup(&d)
	case d.flags&protocol.DeclareFlagDelete != 0:
		c.deleteTopic(&d, t)
	case t != nil && lookup && c.topics.deleting[t.ID], t == nil && lookup:
		c.declared(&d, nil, false, unknownTopic(d.name))
	case t != nil:
		c.declared(&d, t, true, t.CheckSameTopic(d.partitions, d.settings))
	default:
		c.createTopic(&d)
	}
}

// validateName checks the name: those of system topics are for lookups and for the broker itself. Dead letters may be deleted.
func validateName(d *declaration, lookup bool) error {
	switch {
	case lookup || d.system != nil:
		return protocol.ValidateLookup([]byte(d.name))
	case d.flags&protocol.DeclareFlagDelete != 0:
		return protocol.ValidateDelete([]byte(d.name))
	}
	return protocol.ValidateTopic([]byte(d.name))
}

// unknownTopic is the refusal of a lookup; its text names the command that helps.
func unknownTopic(name string) error {
	return fmt.Errorf("topic %.64q does not exist: create it first (mortarmq topics create NAME): %w", name, protocol.CodeUnknownTopic)
}

func (c *Coordinator) createTopic(d *declaration) {
	if d.partitions == 0 {
		d.partitions = uint16(c.opts.PartitionDefaultCount)
	}
	check := c.meta.CheckCreateTopic
	if d.system != nil {
		check = c.meta.CheckCreateSystemTopic
	}
	if err := check(d.name, d.partitions, c.topics.creating, c.topics.partitions); err != nil {
		c.declared(d, nil, false, err)
		return
	}
	m := &metadata.TopicCreated{Topic: c.meta.LastTopic() + uint16(c.topics.creating) + 1, Partitions: d.partitions, Name: d.name}
	if d.settings != nil {
		m.Settings = *d.settings
	}
	decl := *d
	done := func(err error) {
		c.topics.creating--
		c.topics.partitions -= int(m.Partitions)
		c.declared(&decl, c.meta.Topic(m.Topic), false, err)
		c.resume(m.Name)
	}
	if err := c.propose(m, func() { done(nil) }, done); err != nil {
		c.declared(d, nil, false, err)
		return
	}
	c.topics.creating++
	c.topics.partitions += int(m.Partitions)
	c.topics.waiting[m.Name] = nil
}

// deleteTopic deletes t, the topic that d names (nil: there is none, which is fine too).
func (c *Coordinator) deleteTopic(d *declaration, t *metadata.Topic) {
	if t == nil {
		c.declared(d, nil, false, nil)
		return
	}
	if isLetterTopic(t.Name) && !c.delivery.letGo(t) {
		c.declared(d, nil, false, fmt.Errorf("messages are on their way to topic %.64q: delete it when they are there: %w", t.Name, protocol.CodeBackpressure))
		return
	}
	decl, was := *d, *t
	done := func(err error) {
		delete(c.topics.deleting, was.ID)
		if err == nil {
			c.topicDeleted(was.ID)
		}
		c.declared(&decl, &was, true, err)
		c.resume(was.Name)
	}
	if err := c.propose(&metadata.TopicDeleted{Topic: t.ID}, func() { done(nil) }, done); err != nil {
		c.declared(d, nil, false, err)
		return
	}
	c.topics.waiting[t.Name] = nil
	c.topics.deleting[t.ID] = true
	// Nothing about the topic's groups may be proposed behind its deletion, so they end here.
	c.closeGroups(t)
}

// topicDeleted forgets a topic whose deletion is committed.
func (c *Coordinator) topicDeleted(topic uint16) {
	for _, h := range c.groups.ofTopic(topic) {
		c.groups.remove(h)
		c.delivery.groupDeleted(h.id)
	}
	c.delivery.topicDeleted(topic)
	c.store.DropTopic(topic)
}

// resume handles the requests that waited for a change of the topic, until one of them begins another change: the others
// wait for that one.
func (c *Coordinator) resume(name string) {
	queue := c.topics.waiting[name]
	delete(c.topics.waiting, name)
	for len(queue) > 0 {
		if later, busy := c.topics.waiting[name]; busy {
			c.topics.waiting[name] = append(queue, later...)
			return
		}
		d := queue[0]
		queue = queue[1:]
		c.declare(d)
	}
}

// declared answers a declaration: with the topic (nil after the deletion of one that did not exist), or with err.
func (c *Coordinator) declared(d *declaration, t *metadata.Topic, existed bool, err error) {
	var result protocol.DeclareResult
	if t != nil {
		result = protocol.DeclareResult{TopicID: t.ID, Partitions: t.Partitions, Existed: existed}
	}
	switch {
	case d.system != nil:
		d.system(result.TopicID, err)
	case err != nil:
		c.refuseErr(d.client, d.req, protocol.OpDeclare, err)
	default:
		c.frame = result.AppendOK(c.frame[:0])
		d.client.Complete(d.req, c.frame)
		c.flushLater(d.client)
	}
}
