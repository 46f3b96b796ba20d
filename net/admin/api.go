package admin

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/mortarmq/mortarmq/engine/coord"
)

// Broker is the answer of /broker.
type Broker struct {
	NodeID        int    `json:"node_id"`
	UptimeSeconds int64  `json:"uptime_s"`
	Connections   int64  `json:"connections"`
	Version       string `json:"version"`
	IOBackend     string `json:"io_backend"`
	IOReason      string `json:"io_reason,omitempty"`
	Healthy       bool   `json:"healthy"`
	State         string `json:"state"`
	MetadataState string `json:"metadata_state"`
}

// Leader is the answer of /leader.
type Leader struct {
	LeaderID    int    `json:"leader_id"`
	LeaderEpoch uint32 `json:"leader_epoch"`
	QuorumState string `json:"quorum_state"`
}

// Topic is an element of /topics and of /stats.
type Topic struct {
	Name         string `json:"name"`
	Partitions   uint16 `json:"partitions"`
	State        string `json:"state"`
	CreatedEpoch uint32 `json:"created_epoch"`
	ID           uint16 `json:"id"`
	Durability   string `json:"durability"`
	Produced     uint64 `json:"produced"`
	Bytes        uint64 `json:"bytes"`
	Delivered    uint64 `json:"delivered"`
	Dropped      uint64 `json:"dropped"`
	DLQ          uint64 `json:"dlq"`

	PartitionStats []Partition `json:"partition_stats,omitempty"` // /stats only
}

// Partition is a partition of a Topic.
type Partition struct {
	Partition int    `json:"partition"`
	FirstSeq  uint64 `json:"first_seq"`
	LastSeq   uint64 `json:"last_seq"`
	Depth     uint64 `json:"depth"`
}

// Group is an element of /groups and of /stats; only the latter has settings, members and partitions. At any moment published =
// acknowledged + dropped + in_flight + waiting; these are on record and survive restarts, retries counts from the start.
type Group struct {
	Group           string `json:"group"`
	Topic           string `json:"topic"`
	Lag             uint64 `json:"lag"`
	State           string `json:"state"`
	InFlight        uint64 `json:"in_flight"`
	Waiting         uint64 `json:"waiting"`
	Published       uint64 `json:"published"`
	Acknowledged    uint64 `json:"acknowledged"`
	Dropped         uint64 `json:"dropped"`
	DLQ             uint64 `json:"dlq"`
	Retries         uint64 `json:"retries"`
	MembershipEpoch uint32 `json:"membership_epoch"`
	AssignmentEpoch uint32 `json:"assignment_epoch"`

	Settings   *GroupSettings   `json:"settings,omitempty"`
	Members    []Member         `json:"members,omitempty"`
	Partitions []GroupPartition `json:"partitions,omitempty"`
}

// GroupSettings are the settings that apply to a Group, its own and the broker's, under the names that SUB and DECLARE have
// for them. MaxAttempts is 0 where there is no maximum; RetryDelaysMs are the times before the second, third, ... attempt,
// the last of which repeats. A broadcast group has neither strategy nor retries.
type GroupSettings struct {
	Broadcast     bool    `json:"broadcast"`
	LeaseMs       int64   `json:"lease_ms"`
	MaxAttempts   int     `json:"max_attempts"`
	Ordered       bool    `json:"ordered"`
	Retry         string  `json:"retry,omitempty"`
	RetryDelaysMs []int64 `json:"retry_delays_ms,omitempty"`
	Start         string  `json:"start"`
	Strategy      string  `json:"strategy,omitempty"`
}

// Member is a member of a Group, and an element of /groups/NAME.
type Member struct {
	Member          uint64 `json:"member"`
	AssignmentEpoch uint32 `json:"assignment_epoch"`
	OwnershipEpoch  uint64 `json:"ownership_epoch"`
	Lag             uint64 `json:"lag"`
	InstalledEpoch  uint32 `json:"installed_epoch"`
	Connected       bool   `json:"connected"`
}

// GroupPartition is a partition as a Group sees it. Member is 0 where nobody owns it.
type GroupPartition struct {
	Partition      int    `json:"partition"`
	Member         uint64 `json:"member"`
	OwnershipEpoch uint64 `json:"ownership_epoch"`
	Installed      bool   `json:"installed"`
	AckFloor       uint64 `json:"ack_floor"`
	Lag            uint64 `json:"lag"`
	InFlight       uint64 `json:"in_flight"`
}

func topicOf(t *coord.TopicStats, parts bool) Topic {
	v := Topic{
		Name: t.Name, Partitions: t.Partitions, State: t.State, CreatedEpoch: t.CreatedEpoch, ID: t.ID,
		Durability: t.Durability, Produced: t.Produced, Bytes: t.ProducedBytes,
		Delivered: t.Delivered, Dropped: t.Dropped, DLQ: t.DLQ,
	}
	if parts {
		for i, p := range t.Parts {
			v.PartitionStats = append(v.PartitionStats, Partition{i, p.FirstSeq, p.LastSeq, p.Depth})
		}
	}
	return v
}

func groupOf(g *coord.GroupStats, detail bool) Group {
	v := Group{
		Group: g.Name, Topic: g.Topic, Lag: g.Lag, State: g.State, InFlight: g.InFlight, Waiting: g.Waiting,
		Published: g.Published, Acknowledged: g.Acknowledged, Dropped: g.Dropped, DLQ: g.DLQ, Retries: g.Retries,
		MembershipEpoch: g.MembershipEpoch, AssignmentEpoch: g.AssignmentEpoch,
	}
	if !detail {
		return v
	}
	v.Settings = settingsOf(&g.Settings)
	for _, m := range g.Members {
		v.Members = append(v.Members, Member{m.ID, m.AssignmentEpoch, m.OwnershipEpoch, m.Lag, m.InstalledEpoch, m.Connected})
	}
	for i, p := range g.Parts {
		v.Partitions = append(v.Partitions, GroupPartition{i, p.Member, p.OwnershipEpoch, p.Installed, p.AckFloor, p.Lag, p.InFlight})
	}
	return v
}

func settingsOf(s *coord.GroupSettings) *GroupSettings {
	v := &GroupSettings{
		Broadcast: s.Broadcast, LeaseMs: s.Lease.Milliseconds(), MaxAttempts: s.MaxAttempts, Ordered: s.Ordered, Retry: s.Retry,
		Start: "earliest", Strategy: s.Strategy,
	}
	if s.StartLatest {
		v.Start = "latest"
	}
	for _, d := range s.RetryDelays {
		v.RetryDelaysMs = append(v.RetryDelaysMs, d.Milliseconds())
	}
	return v
}

// topicsOf lists the topics called name, or all of them for "".
func topicsOf(s *coord.Stats, name string, parts bool) []Topic {
	list := []Topic{} // an empty list is [], not null
	for i := range s.Topics {
		if t := &s.Topics[i]; name == "" || t.Name == name {
			list = append(list, topicOf(t, parts))
		}
	}
	slices.SortStableFunc(list, func(a, b Topic) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// groupsOf lists the groups called name that read topic; "" stands for any.
func groupsOf(s *coord.Stats, topic, name string, detail bool) []Group {
	list := []Group{}
	for i := range s.Groups {
		g := &s.Groups[i]
		if (topic == "" || g.Topic == topic) && (name == "" || g.Name == name) {
			list = append(list, groupOf(g, detail))
		}
	}
	slices.SortStableFunc(list, func(a, b Group) int {
		if c := strings.Compare(a.Group, b.Group); c != 0 {
			return c
		}
		return strings.Compare(a.Topic, b.Topic)
	})
	return list
}

func reply(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	_ = enc.Encode(v) // the only error is that the client has gone
}

func (s *Server) healthz(w http.ResponseWriter, _ *http.Request) {
	ok, state := s.opts.Source.Healthy()
	status := http.StatusOK
	if !ok {
		status = http.StatusServiceUnavailable
	}
	reply(w, status, struct {
		Healthy bool   `json:"healthy"`
		State   string `json:"state"`
	}{ok, state})
}

func (s *Server) stats(w http.ResponseWriter, r *http.Request) {
	topic, group := r.FormValue("topic"), r.FormValue("group")
	if topic == "" && group == "" {
		http.Error(w, "a filter is required: /stats?topic=NAME, /stats?group=NAME or both", http.StatusBadRequest)
		return
	}
	snap, ok := s.view(w, r)
	if !ok {
		return
	}
	answer := struct {
		Topics []Topic `json:"topics"`
		Groups []Group `json:"groups"`
	}{[]Topic{}, groupsOf(snap.Coord, topic, group, true)}
	if topic != "" {
		answer.Topics = topicsOf(snap.Coord, topic, true)
		if len(answer.Topics) == 0 {
			http.Error(w, "there is no topic of this name; /topics lists them", http.StatusNotFound)
			return
		}
	} else if len(answer.Groups) == 0 {
		http.Error(w, "there is no group of this name; /groups lists them", http.StatusNotFound)
		return
	}
	reply(w, http.StatusOK, answer)
}

// view is snapshot for those who may ask for the leader's view, with leader=required: another node refuses then, since what
// it knows is older.
func (s *Server) view(w http.ResponseWriter, r *http.Request) (*Snapshot, bool) {
	snap, ok := s.snapshot(w, r)
	if ok && r.FormValue("leader") == "required" && snap.LeaderID != snap.NodeID {
		http.Error(w, notLeading(snap), http.StatusMisdirectedRequest)
		return nil, false
	}
	return snap, ok
}

// notLeading tells who asked for the leader's view where it is to be had.
func notLeading(snap *Snapshot) string {
	if snap.LeaderID < 0 {
		return fmt.Sprintf("node %d does not lead, and knows no leader at the moment", snap.NodeID)
	}
	return fmt.Sprintf("node %d does not lead: ask node %d", snap.NodeID, snap.LeaderID)
}

func (s *Server) broker(w http.ResponseWriter, r *http.Request) {
	snap, ok := s.snapshot(w, r)
	if !ok {
		return
	}
	healthy, state := s.opts.Source.Healthy()
	reply(w, http.StatusOK, Broker{
		NodeID: snap.NodeID, UptimeSeconds: int64(snap.Uptime.Seconds()), Connections: snap.Connections,
		Version: snap.Version, IOBackend: snap.IOBackend, IOReason: snap.IOReason,
		Healthy: healthy, State: state, MetadataState: snap.Coord.MetadataState,
	})
}

func (s *Server) leader(w http.ResponseWriter, r *http.Request) {
	if snap, ok := s.snapshot(w, r); ok {
		reply(w, http.StatusOK, Leader{snap.LeaderID, snap.Coord.Epoch, snap.Quorum.String()})
	}
}

func (s *Server) topics(w http.ResponseWriter, r *http.Request) {
	if snap, ok := s.view(w, r); ok {
		reply(w, http.StatusOK, topicsOf(snap.Coord, "", false))
	}
}

func (s *Server) groups(w http.ResponseWriter, r *http.Request) {
	if snap, ok := s.view(w, r); ok {
		reply(w, http.StatusOK, groupsOf(snap.Coord, r.FormValue("topic"), "", false))
	}
}

func (s *Server) members(w http.ResponseWriter, r *http.Request) {
	snap, ok := s.snapshot(w, r)
	if !ok {
		return
	}
	name, topic := r.PathValue("name"), r.FormValue("topic")
	list := groupsOf(snap.Coord, topic, name, true)
	switch len(list) {
	case 0:
		http.Error(w, "there is no such group; /groups lists them", http.StatusNotFound)
	case 1:
		reply(w, http.StatusOK, append([]Member{}, list[0].Members...)) // an empty list is [], not null
	default:
		http.Error(w, "several topics have a group of this name: add ?topic=NAME", http.StatusConflict)
	}
}
