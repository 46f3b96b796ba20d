package coord

import "time"

// Stats is a picture of the coordinator's state at one moment; nobody changes it afterwards. Topics, groups, members and
// partitions are sorted by id. A coordinator that stands by tells what is committed, as far as it has heard: who is connected,
// and what was confirmed without a record, only the leader knows.
type Stats struct {
	// Epoch is the leader epoch, MutationID the last metadata mutation folded.
	Epoch      uint32
	MutationID uint64
	// MetadataState is "ok", "read_only" or "quarantined"; MetadataReason says why it is not ok.
	MetadataState  string
	MetadataReason string
	Topics         []TopicStats
	Groups         []GroupStats
	// Sessions is the number of connections that sent the coordinator anything, Subscriptions that of live ones.
	Sessions      int
	Subscriptions int
	// E2E is the time from a publish's arrival to its ACK being durable, over the last 60 s.
	E2E Quantiles
}

// Quantiles of a duration, in milliseconds. Count is the number of samples they come from.
type Quantiles struct {
	P50Ms, P90Ms, P99Ms float64
	Count               uint64
}

// TopicStats describes one topic. The counters run from the broker's start.
type TopicStats struct {
	ID         uint16
	Name       string
	Partitions uint16
	// State is "active" or "deleting".
	State        string
	CreatedEpoch uint32
	// Durability is what a publish that does not ask for one gets: "memory", "local" or "quorum".
	Durability string
	// Produced counts committed publishes without duplicates, ProducedBytes their keys and values; Delivered counts
	// acknowledged messages over all groups, Dropped those out of attempts or rejected, DLQ those that reached a
	// dead-letter topic.
	Produced, ProducedBytes uint64
	Delivered, Dropped, DLQ uint64
	// Parts has one element per partition, in order.
	Parts []PartitionStats
}

// PartitionStats describes one partition of a topic. Depth is the largest one of its groups.
type PartitionStats struct {
	FirstSeq, LastSeq uint64
	Depth             uint64
}

// GroupStats describes one group.
type GroupStats struct {
	ID      uint16
	Name    string
	TopicID uint16
	Topic   string
	// State is "empty" (no members), "rebalancing" (an assignment is not fully installed), "stable" or "deleting".
	State           string
	MembershipEpoch uint32
	AssignmentEpoch uint32
	Settings        GroupSettings
	// Lag is the largest depth of its partitions, InFlight the number of messages under a lease, Waiting that of
	// messages not delivered yet, waiting for their next attempt or for their dead letter.
	Lag, InFlight, Waiting uint64
	// Published is the number of messages behind the position at which the group began, or was set to; of them,
	// Acknowledged and Dropped are done, and DLQ of the dropped have a dead letter. All are on record and survive restarts:
	// Published = Acknowledged + Dropped + InFlight + Waiting at any moment. In a broadcast group they are the sums over its
	// present members, each of which has every message for itself.
	Published, Acknowledged, Dropped, DLQ uint64
	// Retries counts redeliveries since the broker's start.
	Retries uint64
	Members []MemberStats
	// Parts has one element per partition of the topic, in order.
	Parts []GroupPartitionStats
}

// MemberStats describes one member of a group.
type MemberStats struct {
	ID        uint64
	Connected bool
	// AssignmentEpoch is that of the group's target, InstalledEpoch what the member has confirmed.
	AssignmentEpoch uint32
	InstalledEpoch  uint32
	// OwnershipEpoch is the highest of the partitions it owns, 0 without any; Lag the largest depth of them. A member of a
	// broadcast group owns all of them.
	OwnershipEpoch uint64
	Lag            uint64
}

// GroupSettings are the settings that apply to a group, its own or the broker's.
type GroupSettings struct {
	// Strategy is "sticky", "averagely" or "circle", Retry "exponential", "rocketmq" or "list"; both are empty in a broadcast
	// group, which has neither.
	Strategy, Retry    string
	Broadcast, Ordered bool
	// StartLatest: it began behind the newest messages, and not with the oldest ones.
	StartLatest bool
	// MaxAttempts is how many attempts a message gets, 0 for no maximum, RetryDelays the time before the second, third, ...
	// of them; the last one repeats. Exponential ones get some jitter.
	MaxAttempts int
	RetryDelays []time.Duration
	Lease       time.Duration
}

// GroupPartitionStats describes one partition for one group. Member is 0 where nobody owns it. In a broadcast group, where
// every member does, AckFloor is the lowest, Lag the largest of the members', and InFlight their sum.
type GroupPartitionStats struct {
	Member         uint64
	OwnershipEpoch uint64
	Installed      bool
	AckFloor       uint64
	Lag            uint64
	InFlight       uint64
}
