package metadata

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// Strategy says how the partitions of a group are spread over its members.
type Strategy uint8

const (
	// StrategySticky moves as few partitions as a balance within one allows. It is the default.
	StrategySticky Strategy = iota
	// StrategyAveragely gives each member a run of neighbouring partitions.
	StrategyAveragely
	// StrategyCircle deals the partitions out one by one.
	StrategyCircle
)

var strategyNames = [...]string{StrategySticky: "sticky", StrategyAveragely: "averagely", StrategyCircle: "circle"}

func (s Strategy) String() string {
	if int(s) < len(strategyNames) {
		return strategyNames[s]
	}
	return "unknown"
}

// Retry says how long a message that failed waits for its next attempt.
type Retry uint8

const (
	// RetryExponential is the default: 1, 2, 4, 8 s and so on; in ordered groups 1 s each time.
	RetryExponential Retry = iota
	// RetryRocketMQ is RocketMQ's table of 16 delays between 10 s and 2 h.
	RetryRocketMQ
	// RetryList is a list of the group's own; the last delay repeats.
	RetryList
)

var retryNames = [...]string{RetryExponential: "exponential", RetryRocketMQ: "rocketmq", RetryList: "list"}

func (r Retry) String() string {
	if int(r) < len(retryNames) {
		return retryNames[r]
	}
	return "unknown"
}

// Bounds of group settings.
const (
	// MaxRetryDelays is the most delays in a list.
	MaxRetryDelays = 64
	// MinRetryDelay and MaxRetryDelay bound a delay of a list, MaxOrderedDelay that of an ordered group: its partition
	// stands still meanwhile.
	MinRetryDelay   = 10 * time.Millisecond
	MaxRetryDelay   = 24 * time.Hour
	MaxOrderedDelay = 30 * time.Second
	// MinLease and MaxLease bound the time that a delivery may stay unacknowledged.
	MinLease = time.Second
	MaxLease = 12 * time.Hour
)

// rocketMQDelays are those of RocketMQ's concurrent consumption.
var rocketMQDelays = []time.Duration{
	10 * time.Second, 30 * time.Second, time.Minute, 2 * time.Minute, 3 * time.Minute, 4 * time.Minute, 5 * time.Minute,
	6 * time.Minute, 7 * time.Minute, 8 * time.Minute, 9 * time.Minute, 10 * time.Minute, 20 * time.Minute, 30 * time.Minute,
	time.Hour, 2 * time.Hour,
}

// GroupSettings are a group's own settings. The zero value stands for the defaults. As JSON, in SUB and DECLARE, they
// have the keys in parentheses.
type GroupSettings struct {
	// Strategy ("strategy": "sticky", "averagely" or "circle").
	Strategy Strategy
	// Broadcast gives every member every partition, with a cursor of its own and without retries ("broadcast": true). It
	// can't be changed later, and goes with none of the other settings but the lease.
	Broadcast bool
	// Ordered holds a partition's next message back until the one before is done ("ordered": true).
	Ordered bool
	// MaxAttempts is how many counted attempts a message gets; 0: see Attempts ("max_attempts": 1 to 65535).
	MaxAttempts uint16
	// Lease is how long a delivery may stay unacknowledged; 0: the broker's delivery_lease_ms ("lease_ms").
	Lease time.Duration
	// Retry and, with RetryList only, Delays ("retry": "exponential", "rocketmq" or a list of milliseconds).
	Retry  Retry
	Delays []time.Duration
}

// Attempts returns how many attempts a message gets, 0 for no maximum. broker is the broker's delivery_max_attempts.
func (s *GroupSettings) Attempts(broker int) int {
	switch {
	case s.Broadcast:
		return 1
	case s.MaxAttempts != 0:
		return int(s.MaxAttempts)
	case s.Ordered:
		return 0
	case s.Retry == RetryRocketMQ:
		return len(rocketMQDelays) + 1
	default:
		return broker
	}
}

// RetryDelays returns the delays before the second, third, ... attempt, the last of which repeats; nil stands for the
// ledger's own exponential ones. Not to be changed.
func (s *GroupSettings) RetryDelays() []time.Duration {
	switch {
	case s.Retry == RetryRocketMQ:
		return rocketMQDelays
	case s.Retry == RetryList:
		return s.Delays
	case s.Ordered:
		return []time.Duration{time.Second}
	default:
		return nil
	}
}

// Equal reports whether two settings are the same.
func (s *GroupSettings) Equal(o *GroupSettings) bool {
	return s.Strategy == o.Strategy && s.Broadcast == o.Broadcast && s.Ordered == o.Ordered && s.MaxAttempts == o.MaxAttempts &&
		s.Lease == o.Lease && s.Retry == o.Retry && slices.Equal(s.Delays, o.Delays)
}

type groupSettingsJSON struct {
	Broadcast   bool            `json:"broadcast"`
	LeaseMs     *int64          `json:"lease_ms"`
	MaxAttempts *uint16         `json:"max_attempts"`
	Ordered     bool            `json:"ordered"`
	Retry       json.RawMessage `json:"retry"`
	Strategy    *string         `json:"strategy"`
}

// ParseGroupSettings reads the JSON form of group settings. Unknown keys, values out of their bounds and combinations
// that make no sense are refused. The error wraps protocol.CodeGroupExistsMismatch, the code of settings that a group
// can't have.
func ParseGroupSettings(b []byte) (GroupSettings, error) {
	var s GroupSettings
	var j groupSettingsJSON
	err := parseObject(b, &j, "broadcast", "lease_ms", "max_attempts", "ordered", "retry", "strategy")
	if err == nil {
		err = s.fill(&j)
	}
	if err != nil {
		return GroupSettings{}, fmt.Errorf("group settings: %w: %w", err, protocol.CodeGroupExistsMismatch)
	}
	return s, nil
}

func (s *GroupSettings) fill(j *groupSettingsJSON) error {
	s.Broadcast, s.Ordered = j.Broadcast, j.Ordered
	if j.Strategy != nil {
		at := slices.Index(strategyNames[:], *j.Strategy)
		if at < 0 {
			return fmt.Errorf("strategy is %.32q: use sticky, averagely or circle", *j.Strategy)
		}
		s.Strategy = Strategy(at)
	}
	if j.MaxAttempts != nil {
		if s.MaxAttempts = *j.MaxAttempts; s.MaxAttempts == 0 {
			return errors.New("max_attempts is 0: a message needs at least 1 attempt")
		}
	}
	if j.LeaseMs != nil {
		if *j.LeaseMs < MinLease.Milliseconds() || *j.LeaseMs > MaxLease.Milliseconds() {
			return fmt.Errorf("lease_ms is %d: use %d to %d", *j.LeaseMs, MinLease.Milliseconds(), MaxLease.Milliseconds())
		}
		s.Lease = time.Duration(*j.LeaseMs) * time.Millisecond
	}
	if err := s.fillRetry(j.Retry); err != nil {
		return err
	}
	return s.combine()
}

// combine checks that the settings fit each other.
func (s *GroupSettings) combine() error {
	if s.Broadcast && (s.Ordered || s.MaxAttempts != 0 || s.Retry != RetryExponential || s.Strategy != StrategySticky) {
		return errors.New("a broadcast group has no retries and no strategy: leave out ordered, max_attempts, retry and strategy")
	}
	return nil
}

// Validate checks that settings fit each other. The error wraps protocol.CodeGroupExistsMismatch.
func (s *GroupSettings) Validate() error {
	if err := s.combine(); err != nil {
		return fmt.Errorf("group settings: %w: %w", err, protocol.CodeGroupExistsMismatch)
	}
	return nil
}

func (s *GroupSettings) fillRetry(raw json.RawMessage) error {
	const usage = `use "exponential", "rocketmq" or a list of milliseconds`
	switch {
	case len(raw) == 0 || bytes.Equal(raw, []byte(`"exponential"`)):
		return nil
	case bytes.Equal(raw, []byte(`"rocketmq"`)):
		if s.Ordered {
			return fmt.Errorf("retry is rocketmq in an ordered group, whose partitions would stand still for hours: use a list of at most %d ms", MaxOrderedDelay.Milliseconds())
		}
		s.Retry = RetryRocketMQ
		return nil
	}
	var list []int64
	if err := json.Unmarshal(raw, &list); err != nil {
		return fmt.Errorf("retry is %.32s: %s", raw, usage)
	}
	if len(list) == 0 || len(list) > MaxRetryDelays {
		return fmt.Errorf("retry has %d delays: use 1 to %d", len(list), MaxRetryDelays)
	}
	longest := MaxRetryDelay
	if s.Ordered {
		longest = MaxOrderedDelay
	}
	s.Retry = RetryList
	for _, ms := range list {
		if ms < MinRetryDelay.Milliseconds() || ms > longest.Milliseconds() {
			return fmt.Errorf("retry has a delay of %d ms: use %d to %d", ms, MinRetryDelay.Milliseconds(), longest.Milliseconds())
		}
		s.Delays = append(s.Delays, time.Duration(ms)*time.Millisecond)
	}
	return nil
}

// AppendJSON appends the canonical JSON form: keys sorted, defaults left out.
func (s *GroupSettings) AppendJSON(dst []byte) []byte {
	dst = append(dst, '{')
	start := len(dst)
	key := func(name string) {
		if len(dst) > start {
			dst = append(dst, ',')
		}
		dst = append(dst, '"')
		dst = append(dst, name...)
		dst = append(dst, '"', ':')
	}
	if s.Broadcast {
		key("broadcast")
		dst = append(dst, "true"...)
	}
	if s.Lease != 0 {
		key("lease_ms")
		dst = strconv.AppendInt(dst, s.Lease.Milliseconds(), 10)
	}
	if s.MaxAttempts != 0 {
		key("max_attempts")
		dst = strconv.AppendUint(dst, uint64(s.MaxAttempts), 10)
	}
	if s.Ordered {
		key("ordered")
		dst = append(dst, "true"...)
	}
	switch s.Retry {
	case RetryExponential:
	case RetryRocketMQ:
		key("retry")
		dst = append(dst, `"rocketmq"`...)
	case RetryList:
		key("retry")
		for i, d := range s.Delays {
			dst = append(dst, "[,"[min(i, 1)])
			dst = strconv.AppendInt(dst, d.Milliseconds(), 10)
		}
		dst = append(dst, ']')
	}
	if s.Strategy != StrategySticky {
		key("strategy")
		dst = append(dst, '"')
		dst = append(dst, s.Strategy.String()...)
		dst = append(dst, '"')
	}
	return append(dst, '}')
}
