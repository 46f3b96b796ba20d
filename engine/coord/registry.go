package coord

import "github.com/mortarmq/mortarmq/protocol"

// Topic is what a publish needs to know of a topic. Immutable.
type Topic struct {
	ID         uint16
	Name       string
	Partitions uint16
	// Durability applies to a publish that does not ask for one; never DurabilityTopic.
	Durability protocol.Durability
}

// Registry is an immutable picture of the topics, for the event loops.
type Registry struct {
	topics      []*Topic // by id; nil where there is none
	quarantined bool
}

// Topic finds a topic by its id.
func (r *Registry) Topic(id uint16) (*Topic, bool) {
	if int(id) >= len(r.topics) || r.topics[id] == nil {
		return nil, false
	}
	return r.topics[id], true
}

// Quarantined reports whether the metadata can't be trusted: no topic is known, and a publish gets 0x2004.
func (r *Registry) Quarantined() bool { return r.quarantined }

// Topics returns all topics in the order of their ids.
func (r *Registry) Topics() []*Topic {
	var all []*Topic
	for _, t := range r.topics {
		if t != nil {
			all = append(all, t)
		}
	}
	return all
}
