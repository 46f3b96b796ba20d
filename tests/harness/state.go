package harness

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
)

// GroupState is a group with its members and partitions, as /stats gives it.
type GroupState struct {
	GroupSums
	State           string `json:"state"`
	AssignmentEpoch uint32 `json:"assignment_epoch"`
	Members         []struct {
		Member    uint64 `json:"member"`
		Connected bool   `json:"connected"`
	} `json:"members"`
	Partitions []struct {
		Member         uint64 `json:"member"`
		OwnershipEpoch uint64 `json:"ownership_epoch"`
		Installed      bool   `json:"installed"`
	} `json:"partitions"`
}

// GroupState returns the state of one group.
func (d *Daemon) GroupState(topic, group string) (*GroupState, error) {
	body, err := d.get("/stats?" + url.Values{"topic": {topic}, "group": {group}}.Encode())
	if err != nil {
		return nil, err
	}
	var stats struct {
		Groups []*GroupState `json:"groups"`
	}
	if err := json.Unmarshal(body, &stats); err != nil {
		return nil, fmt.Errorf("/stats: %w", err)
	}
	if len(stats.Groups) != 1 {
		return nil, fmt.Errorf("/stats has %d groups %s of topic %s", len(stats.Groups), group, topic)
	}
	return stats.Groups[0], nil
}

// Groups returns the numbers of all groups, sorted by name, after it has checked that they add up as CheckSums does, with
// one request however many they are.
func (d *Daemon) Groups() ([]GroupSums, error) {
	body, err := d.get("/groups")
	if err != nil {
		return nil, err
	}
	var all []GroupSums
	if err := json.Unmarshal(body, &all); err != nil {
		return nil, fmt.Errorf("/groups: %w", err)
	}
	var errs []error
	for i := range all {
		errs = append(errs, all[i].check("/groups"))
	}
	return all, errors.Join(errs...)
}

// Settled tells whether the group has so many members, all connected, that share the partitions evenly and have confirmed
// what they have.
func (g *GroupState) Settled(members int) bool {
	if g.State != "stable" || len(g.Members) != members {
		return false
	}
	held := map[uint64]int{}
	for _, m := range g.Members {
		if !m.Connected {
			return false
		}
		held[m.Member] = 0
	}
	for _, p := range g.Partitions {
		if _, ok := held[p.Member]; !ok || !p.Installed {
			return false
		}
		held[p.Member]++
	}
	least := len(g.Partitions) / members
	for _, n := range held {
		if n != least && n != least+1 {
			return false
		}
	}
	return true
}
