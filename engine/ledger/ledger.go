package ledger

import (
	"cmp"
	"errors"
	"fmt"
	"time"
)

// Sequence is a message's position in its partition, from 1.
type Sequence uint64

// DeliveryID names one delivery of one message; the host draws it from a counter that never goes back.
type DeliveryID uint64

// Key names a cursor.
type Key struct {
	Group, Topic, Partition uint16
	// Member is whom a cursor of a broadcast group belongs to; 0 in other groups, whose members share the cursors.
	Member uint64
}

func (k Key) String() string {
	s := fmt.Sprintf("group %d topic %d partition %d", k.Group, k.Topic, k.Partition)
	if k.Member != 0 {
		s += fmt.Sprintf(" member %d", k.Member)
	}
	return s
}

// Compare orders keys by group, topic, member, partition.
func (k Key) Compare(o Key) int {
	return cmp.Or(cmp.Compare(k.Group, o.Group), cmp.Compare(k.Topic, o.Topic), cmp.Compare(k.Member, o.Member),
		cmp.Compare(k.Partition, o.Partition))
}

// Owner is the member that a partition is assigned to. The zero Owner is nobody.
type Owner struct {
	Member uint64
	Epoch  uint64 // ownership epoch; fences what an earlier owner still sends
}

// Source is where jitter comes from: a seeded generator, such as math/rand/v2's *PCG.
type Source interface{ Uint64() uint64 }

// Reason tells why an attempt failed.
type Reason uint8

// The reasons, as they are recorded; never renumbered.
const (
	ReasonNack       Reason = iota + 1 // the consumer refused it for now
	ReasonExpired                      // the lease ran out
	ReasonConnection                   // the connection was lost with the message in flight
	ReasonRejected                     // the consumer refused it for good
)

func (r Reason) String() string {
	switch r {
	case ReasonNack:
		return "nack"
	case ReasonExpired:
		return "expired"
	case ReasonConnection:
		return "connection"
	case ReasonRejected:
		return "rejected"
	default:
		return fmt.Sprintf("reason %d", uint8(r))
	}
}

// Verdict is what became of an ACK or a NACK.
type Verdict uint8

const (
	// Settling means that the event is queued: the client is answered when its record has committed.
	Settling Verdict = iota
	// Renewed means that the lease was renewed; nothing goes on record.
	Renewed
	// UnknownDelivery means that no such delivery is in flight: it is finished, or was delivered anew. Nothing changed.
	UnknownDelivery
	// StaleOwner means that the ownership epoch is not the partition's. Nothing changed.
	StaleOwner
)

// Limits that do not depend on a group's settings.
const (
	// maxOpen bounds Options.MaxOpen and what recovery accepts.
	maxOpen = 1 << 20
	// maxFailures is where the count of failed attempts stops; the wire's attempt field has 16 bits.
	maxFailures = 1<<16 - 2
	// quantum is the granularity of deadlines. They are rounded up to it, which bounds the number of scans for expired
	// leases to one per quantum whatever the clients do.
	quantum = 1 << 24 * time.Nanosecond
	// never is later than every deadline.
	never = time.Duration(1<<63 - 1)
)

// Options are a group's delivery settings. They are shared by its cursors and not changed once in use.
type Options struct {
	Lease time.Duration // how long a delivery may stay unanswered
	// MaxAttempts is the number of deliveries after which a message is exhausted; 0 means no maximum.
	MaxAttempts int
	// Backoff holds the delays before the second, third, ... attempt; the last one repeats.
	Backoff []time.Duration
	// JitterPercent of a delay, at most, are added to it; MaxDelay caps the sum.
	JitterPercent int
	MaxDelay      time.Duration
	// Ordered holds a message back until the one before it is done.
	Ordered bool
	// MaxOpen bounds the messages per partition that are in flight, settling or waiting for a retry; at the bound fresh
	// ones wait. Each needs about 50 bytes of memory. Room bounds those of all partitions together.
	MaxOpen int
}

// DefaultOptions are the specification's: 30 s lease, five attempts, 1-2-4-8 s backoff with jitter, at most 30 s.
func DefaultOptions() Options {
	return Options{
		Lease:         30 * time.Second,
		MaxAttempts:   5,
		Backoff:       []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second, 16 * time.Second, 30 * time.Second},
		JitterPercent: 25,
		MaxDelay:      30 * time.Second,
		MaxOpen:       1 << 17,
	}
}

// Validate reports every setting that the ledger can't work with.
func (o *Options) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(o.Lease > 0, "ledger: lease %v is not positive", o.Lease)
	check(o.MaxAttempts >= 0 && o.MaxAttempts <= maxFailures, "ledger: maximum of attempts %d is not within 0..%d", o.MaxAttempts, maxFailures)
	check(len(o.Backoff) > 0, "ledger: no backoff delays")
	for _, d := range o.Backoff {
		check(d >= 0 && d.Milliseconds() <= maxDelayMs, "ledger: backoff delay %v is not within 0..%d ms", d, int64(maxDelayMs))
	}
	check(o.JitterPercent >= 0 && o.JitterPercent <= 100, "ledger: jitter of %d %% is not within 0..100", o.JitterPercent)
	check(o.MaxDelay > 0 && o.MaxDelay.Milliseconds() <= maxDelayMs, "ledger: maximum delay %v is not within 1..%d ms", o.MaxDelay, int64(maxDelayMs))
	check(o.MaxOpen > 0 && o.MaxOpen <= maxOpen, "ledger: open messages %d are not within 1..%d", o.MaxOpen, maxOpen)
	return errors.Join(errs...)
}

// Fixed has failed messages wait exactly as delays say, the last one again and again. The slice, which is not empty, is kept.
func (o *Options) Fixed(delays []time.Duration) {
	o.Backoff, o.JitterPercent, o.MaxDelay = delays, 0, quantum
	for _, d := range delays {
		o.MaxDelay = max(o.MaxDelay, d)
	}
}

// maxDelayMs is the largest delay that a FAIL can carry.
const maxDelayMs = 1<<32 - 1

// delay returns the time before the attempt that follows the given number of failures, with jitter.
func (o *Options) delay(failures int, src Source) time.Duration {
	d := o.Backoff[min(failures-1, len(o.Backoff)-1)]
	if span := uint64(d) / 100 * uint64(o.JitterPercent); span > 0 {
		d += time.Duration(src.Uint64() % (span + 1))
	}
	return min(d, o.MaxDelay)
}

// roundUp rounds a deadline up to the granularity of deadlines.
func roundUp(t time.Duration) time.Duration { return (t + quantum - 1) &^ (quantum - 1) }

// Exhausted is a message that will not be delivered again by itself: it failed the maximum of attempts or was rejected.
// It stays open, and counts into the depth, until the host calls Drop for it, or Park and later Drop.
type Exhausted struct {
	Cursor   *Cursor
	Sequence Sequence
	Failures int
	Reason   Reason // of the last failure
}

// Parked is a message whose EXHAUSTED is on record: the host may now write its dead letter, unless it finds it above
// Letters in the dead-letter topic, and then calls Drop.
type Parked struct {
	Cursor   *Cursor
	Sequence Sequence
	Letters  Sequence
	Failures int
	Reason   Reason // of the last failure
}

// Effects are what the host has to do after Apply, Tick or Restore. It empties them itself (Reset) before the next call.
type Effects struct {
	// Ready are cursors that may have something to deliver now that they had not before. One may appear twice.
	Ready     []*Cursor
	Exhausted []Exhausted
	Parked    []Parked
	// Forgotten are cursors that a FORGET has removed.
	Forgotten []Key
}

// Reset empties the effects and keeps their memory.
func (fx *Effects) Reset() {
	fx.Ready = fx.Ready[:0]
	fx.Exhausted = fx.Exhausted[:0]
	fx.Parked = fx.Parked[:0]
	fx.Forgotten = fx.Forgotten[:0]
}

func (fx *Effects) ready(c *Cursor) {
	if n := len(fx.Ready); n == 0 || fx.Ready[n-1] != c {
		fx.Ready = append(fx.Ready, c)
	}
}
