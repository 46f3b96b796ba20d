package sim

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"path"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/mortarmq/mortarmq/engine/deadletter"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// contents is what a node's segments hold.
type contents struct {
	host *host
	// sums are the checksums of the records, messages and letters what some of them are.
	sums     map[place]uint64
	messages map[place][2]uint64
	letters  []letter
	// damaged: a file could not be read whole.
	damaged bool
}

// letter is a record of a dead-letter topic.
type letter struct {
	topic  uint16 // the dead-letter topic
	source place
	header deadletter.Envelope
}

var errFull = errors.New("seen enough")

// contents reads a disk. The node is down.
func (s *scenario) contents(h *host) *contents {
	c := &contents{host: h, sums: map[place]uint64{}, messages: map[place][2]uint64{}}
	for _, p := range h.disk.Paths() {
		if path.Ext(p) != ".mqs" || quarantined(p) {
			continue
		}
		b := h.disk.ReadFile(p)
		err := wal.InspectReader(p, bytes.NewReader(b), int64(len(b)), func(f wal.Finding) error {
			switch f := f.(type) {
			case *wal.Damage:
				c.damaged = true
				if !h.victim {
					s.w.fail("node %d: %v", h.id, f.Err)
					return errFull
				}
			case *wal.RecordFound:
				s.record(c, f, b[f.Offset:f.Offset+f.Length])
			default:
			}
			return nil
		})
		if err != nil && !errors.Is(err, errFull) {
			s.w.fail("node %d: %v", h.id, err)
		}
	}
	return c
}

// quarantined tells whether a file lies among those that were set aside.
func quarantined(p string) bool {
	ok, _ := path.Match("/data/quarantine-*", p)
	for ; p != "/" && !ok; p = path.Dir(p) {
		ok, _ = path.Match("/data/quarantine-*", p)
	}
	return ok
}

func (s *scenario) record(c *contents, f *wal.RecordFound, raw []byte) {
	if f.Stream.Kind != wal.Messages || f.Stream.Topic == 0 {
		return // the header can't be read, which is told beside
	}
	name := s.topics[f.Stream.Topic]
	if name == "" {
		return // it is deleted, and its files may not be everywhere yet
	}
	at := place{f.Stream.Topic, f.Stream.Partition, uint64(f.Record.Sequence)}
	sum := xxhash.Sum64(raw)
	if was, ok := c.sums[at]; ok && was != sum {
		s.w.fail("node %d has two records at %d of topic %d, partition %d", c.host.id, at.seq, at.topic, at.partition)
	}
	if _, ok := c.sums[at]; ok {
		return
	}
	c.sums[at] = sum
	if at.topic == s.topic {
		if len(f.Record.Value) >= 16 {
			c.messages[at] = [2]uint64{binary.BigEndian.Uint64(f.Record.Value), binary.BigEndian.Uint64(f.Record.Value[8:])}
		}
		return
	}
	if !strings.HasPrefix(name, protocol.DLQPrefix) {
		return
	}
	var e deadletter.Envelope
	if _, err := e.Decode(f.Record.Value); err != nil {
		s.w.fail("node %d has no dead letter at %d of topic %d: %v", c.host.id, at.seq, at.topic, err)
		return
	}
	e.Topic = nil
	c.letters = append(c.letters, letter{topic: at.topic, source: place{e.TopicID, e.Partition, e.Sequence}, header: e})
}

// compareDisks reads the disks of all nodes, which are down, and returns what they hold: the same on all of them, but for
// places that the victim's disk has lost without anybody's having noticed.
func (s *scenario) compareDisks() *contents {
	w := s.w
	var all []*contents
	var first *contents
	for _, h := range w.hosts {
		c := s.contents(h)
		all = append(all, c)
		if first == nil && !h.victim {
			first = c
		}
	}
	if w.failed != "" {
		return nil
	}
	for _, c := range all {
		for _, p := range sortedPlaces(first.sums) {
			sum, ok := c.sums[p]
			if !ok && c.host.victim {
				continue
			}
			if sum != first.sums[p] {
				w.fail("nodes %d and %d have different records at %d of topic %d, partition %d (%s)", first.host.id, c.host.id, p.seq, p.topic, p.partition, presence(ok))
				return nil
			}
		}
		for _, p := range sortedPlaces(c.sums) {
			if _, ok := first.sums[p]; !ok {
				w.fail("node %d has a record at %d of topic %d, partition %d, which node %d has not", c.host.id, p.seq, p.topic, p.partition, first.host.id)
				return nil
			}
		}
	}
	return first
}

func presence(there bool) string {
	if there {
		return "both are there"
	}
	return "the second one is missing"
}

// checkLetters compares the dead letters with what the members of the groups know. names are the topics'.
func (s *scenario) checkLetters(c *contents, names map[uint16]string) {
	w := s.w
	for _, g := range s.groups {
		have := map[place]bool{}
		for _, l := range c.letters {
			if names[l.topic] != protocol.DLQPrefix+g.name {
				continue
			}
			d := g.messages[l.source]
			at := fmt.Sprintf("group %s: the dead letter of %d of partition %d", g.name, l.source.seq, l.source.partition)
			switch {
			case have[l.source]:
				w.fail("%s was written twice", at)
			case d == nil:
				w.fail("%s is of a message that was never delivered", at)
			case d.acked:
				w.fail("%s is of a message that was acknowledged", at)
			case l.header.Reason != deadletter.ReasonRejected && l.header.Attempts != maxAttempts:
				w.fail("%s came after %d attempts, not %d", at, l.header.Attempts, maxAttempts)
			}
			have[l.source] = true
		}
		for _, p := range sortedPlaces(c.messages) {
			d := g.messages[p]
			if have[p] || d != nil && d.acked {
				continue
			}
			_, forGood := poisonous(c.messages[p])
			switch {
			case d == nil:
				w.fail("group %s never got %d of partition %d", g.name, p.seq, p.partition)
			case !d.tried:
				w.fail("group %s: %d of partition %d was neither acknowledged, nor is there a dead letter (refused for good: %t)", g.name, p.seq, p.partition, forGood)
			default:
				// The answer to the acknowledgement was lost.
			}
		}
	}
}
