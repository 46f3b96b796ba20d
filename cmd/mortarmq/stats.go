package main

import (
	"context"
	"encoding/json"
	"errors"
	"net/url"
)

// statsAnswer is what commands need of the admin interface's /stats.
type statsAnswer struct {
	Topics []topicStats `json:"topics"`
	Groups []groupStats `json:"groups"`
}

// topicStats is a topic in detail. With those of its groups it is what topics describe --json prints.
type topicStats struct {
	Name         string           `json:"name"`
	ID           uint16           `json:"id"`
	State        string           `json:"state"`
	PartitionNum uint16           `json:"partitions"`
	Durability   string           `json:"durability"`
	CreatedEpoch uint32           `json:"created_epoch"`
	Produced     uint64           `json:"produced"`
	Bytes        uint64           `json:"bytes"`
	Partitions   []partitionStats `json:"partition_stats"`
}

type partitionStats struct {
	Partition int    `json:"partition"`
	FirstSeq  uint64 `json:"first_seq"`
	LastSeq   uint64 `json:"last_seq"`
	Depth     uint64 `json:"depth"`
}

type groupStats struct {
	Group      string          `json:"group"`
	Topic      string          `json:"topic"`
	State      string          `json:"state"`
	Lag        uint64          `json:"lag"`
	InFlight   uint64          `json:"in_flight"`
	Waiting    uint64          `json:"waiting"`
	Settings   json.RawMessage `json:"settings"`
	Members    []memberStats   `json:"members"`
	Partitions []struct {
		AckFloor uint64 `json:"ack_floor"`
	} `json:"partitions"`
}

type memberStats struct {
	memberRow
	Connected bool `json:"connected"`
}

// connected returns how many members have a connection.
func (g *groupStats) connected() (n int) {
	for _, m := range g.Members {
		if m.Connected {
			n++
		}
	}
	return n
}

// stats gets a topic and its groups, all of them or the one that is named; without a topic, the groups of that name. It is
// the leader's answer: what other nodes know is older.
func (a *app) stats(ctx context.Context, topic string, group string) (*statsAnswer, error) {
	query := url.Values{"leader": {"required"}}
	if topic != "" {
		query.Set("topic", topic)
	}
	if group != "" {
		query.Set("group", group)
	}
	var s statsAnswer
	if err := a.fetch(ctx, "/stats", query, &s); err != nil {
		return nil, err
	}
	return &s, nil
}

// look is stats for who only wants to see: where none of the nodes named leads, it takes what another one knows, which is all
// that is on record but not which members are connected, and says so.
func (a *app) look(ctx context.Context, topic string, group string) (*statsAnswer, error) {
	s, err := a.stats(ctx, topic, group)
	if f := (*failure)(nil); !errors.As(err, &f) || f.code != exitUnreachable {
		return s, err
	}
	query := url.Values{}
	if topic != "" {
		query.Set("topic", topic)
	}
	if group != "" {
		query.Set("group", group)
	}
	s = new(statsAnswer)
	if a.fetch(ctx, "/stats", query, s) != nil {
		return nil, err // that of the first attempt says more
	}
	a.note("as a node that does not lead knows it, which is not which members are connected: name all nodes with --admin or %s", envAdmin)
	return s, nil
}

// topic finds a topic in the answer.
func (s *statsAnswer) topic(name string) (*topicStats, bool) {
	for i := range s.Topics {
		if s.Topics[i].Name == name {
			return &s.Topics[i], true
		}
	}
	return nil, false
}

// group finds a group in the answer.
func (s *statsAnswer) group(topic, name string) (*groupStats, bool) {
	for i := range s.Groups {
		if s.Groups[i].Group == name && s.Groups[i].Topic == topic {
			return &s.Groups[i], true
		}
	}
	return nil, false
}

// lastSeqs returns the last committed sequence of each partition of a topic.
func (s *statsAnswer) lastSeqs(topic string) ([]uint64, bool) {
	t, ok := s.topic(topic)
	if !ok {
		return nil, false
	}
	last := make([]uint64, len(t.Partitions))
	for i, p := range t.Partitions {
		last[i] = p.LastSeq
	}
	return last, true
}

// reached tells whether a group has acknowledged everything up to end. A group that does not exist yet has not.
func (s *statsAnswer) reached(topic, group string, end []uint64) bool {
	g, ok := s.group(topic, group)
	if !ok || len(g.Partitions) != len(end) {
		return false
	}
	for i, p := range g.Partitions {
		if p.AckFloor < end[i] {
			return false
		}
	}
	return true
}
