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

// registryPage is how many topics a page of the registry has.
const registryPage = 256

// Registry is an immutable picture of the topics, for the event loops. Two pictures share the pages that are the same in
// both, so that a new topic costs the same whatever the number of topics.
type Registry struct {
	pages       [1 << 16 / registryPage]*[registryPage]*Topic // by id; nil where there is none
	quarantined bool
}

// Topic finds a topic by its id.
func (r *Registry) Topic(id uint16) (*Topic, bool) {
	page := r.pages[id/registryPage]
	if page == nil {
		return nil, false
	}
	t := page[id%registryPage]
	return t, t != nil
}

// Quarantined reports whether the metadata can't be trusted: no topic is known, and a publish gets 0x2004.
func (r *Registry) Quarantined() bool { return r.quarantined }

// Topics returns all topics in the order of their ids.
func (r *Registry) Topics() []*Topic {
	var all []*Topic
	for _, page := range r.pages {
		if page == nil {
			continue
		}
		for _, t := range page {
			if t != nil {
				all = append(all, t)
			}
		}
	}
	return all
}

// with returns the picture in which id is t, or nobody where t is nil.
func (r *Registry) with(id uint16, t *Topic) *Registry {
	next, page := *r, new([registryPage]*Topic)
	if old := r.pages[id/registryPage]; old != nil {
		*page = *old
	}
	page[id%registryPage] = t
	next.pages[id/registryPage] = page
	return &next
}
