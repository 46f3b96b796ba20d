package ledger

import "time"

// Retry names a schedule of delays between attempts.
type Retry uint8

const (
	// RetryExponential waits 1, 2, 4, 8, 16, 30, 30 ... seconds, each with up to a quarter on top but never more than 30.
	RetryExponential Retry = iota
	// RetryRocketMQ waits as RocketMQ does before each of at most 16 retries: 10 s, 30 s, 1 to 10 minutes, 20 and 30
	// minutes, 1 and 2 hours.
	RetryRocketMQ
	// RetryList waits as Settings.Delays says; the message is given up after the last of them.
	RetryList
)

// DefaultOrderedInterval is the delay between attempts in an ordered group.
const DefaultOrderedInterval = time.Second

// Settings are what a group may choose. The zero value leaves everything to the broker.
type Settings struct {
	// Lease is how long a delivery may stay unanswered; 0 means the broker's.
	Lease time.Duration
	// MaxAttempts is the number of deliveries after which a message is exhausted; 0 means what the schedule says: the
	// broker's number for RetryExponential, one more than there are delays for the others, no maximum for an ordered group.
	// Where it allows more attempts than there are delays the last delay repeats.
	MaxAttempts int
	// Ordered holds a message back until the one before it is done. OrderedInterval then stands for Retry; 0 means
	// DefaultOrderedInterval.
	Ordered         bool
	OrderedInterval time.Duration
	Retry           Retry
	Delays          []time.Duration // of RetryList; kept
}

// Options returns the settings with the gaps filled in: lease and maxAttempts are the broker's own.
func (s *Settings) Options(lease time.Duration, maxAttempts int) Options {
	o := DefaultOptions()
	o.Lease, o.MaxAttempts, o.Ordered = lease, maxAttempts, s.Ordered
	if s.Lease > 0 {
		o.Lease = s.Lease
	}
	switch {
	case s.Ordered:
		interval := s.OrderedInterval
		if interval == 0 {
			interval = DefaultOrderedInterval
		}
		o.fixed([]time.Duration{interval})
		o.MaxAttempts = 0
	case s.Retry == RetryRocketMQ:
		o.fixed(rocketMQDelays())
	case s.Retry == RetryList && len(s.Delays) > 0:
		o.fixed(s.Delays)
	}
	if s.MaxAttempts > 0 {
		o.MaxAttempts = s.MaxAttempts
	}
	return o
}

// fixed waits exactly as delays say.
func (o *Options) fixed(delays []time.Duration) {
	o.Backoff, o.JitterPercent, o.MaxAttempts = delays, 0, len(delays)+1
	o.MaxDelay = quantum
	for _, d := range delays {
		o.MaxDelay = max(o.MaxDelay, d)
	}
}

func rocketMQDelays() []time.Duration {
	d := []time.Duration{10 * time.Second, 30 * time.Second}
	for m := range 10 {
		d = append(d, time.Duration(m+1)*time.Minute)
	}
	return append(d, 20*time.Minute, 30*time.Minute, time.Hour, 2*time.Hour)
}
