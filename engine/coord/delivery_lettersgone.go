package coord

import "github.com/mortarmq/mortarmq/engine/metadata"

// letGo implements deliverer. A letter that is on record as begun must stay with the topic that its record is about: a start
// looks for it behind a sequence of that topic.
func (d *delivery) letGo(t *metadata.Topic) bool {
	for place := range d.office.written {
		if place.letters == t.ID {
			return false // also those of groups that are gone
		}
	}
	for _, g := range d.groups {
		if g.letters.name == t.Name && g.lettersBegun() {
			return false
		}
	}
	for _, g := range d.groups {
		if g.letters.name == t.Name {
			g.letters.part = nil
		}
	}
	return true
}

// lettersBegun tells whether a message of the group is between two of the steps to the dead-letter topic.
func (g *groupDelivery) lettersBegun() bool {
	if g.letters.searching {
		return true
	}
	for rd := range g.readers() {
		for _, l := range rd.letters {
			if l.state != letterQueued || l.rd.cur.Parked(l.seq) {
				return true
			}
		}
	}
	return false
}
