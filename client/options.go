package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// config is what the Options set. It does not change after Dial.
type config struct {
	token       []byte
	logger      *slog.Logger
	dialTimeout time.Duration
	keepalive   time.Duration
	silence     time.Duration // a connection without a frame for so long is dead
	tick        time.Duration // a second; shorter in tests
	backoffMin  time.Duration
	backoffMax  time.Duration
	dial        func(ctx context.Context, network, addr string) (net.Conn, error)
}

// Times of a connection. It counts as dead after silences keepalives without a frame from the broker, but not sooner than
// minSilence.
const (
	singleKeepalive  = 15 * time.Second
	clusterKeepalive = 5 * time.Second
	silences         = 3
	minSilence       = 5 * time.Second
)

func defaultConfig() config {
	return config{
		dialTimeout: 5 * time.Second,
		tick:        time.Second,
		backoffMin:  500 * time.Millisecond,
		backoffMax:  30 * time.Second,
	}
}

// complete fills in what is missing; some defaults depend on the number of nodes.
func (c *config) complete(nodes int) {
	if c.logger == nil {
		c.logger = slog.New(slog.DiscardHandler)
	}
	if c.dial == nil {
		c.dial = (&net.Dialer{}).DialContext
	}
	if c.keepalive == 0 {
		c.keepalive = singleKeepalive
		if nodes > 1 { // there is somewhere else to go
			c.keepalive = clusterKeepalive
		}
	}
	if c.silence == 0 {
		c.silence = max(silences*c.keepalive, minSilence)
	}
}

// validate reports every problem at once.
func (c *config) validate() error {
	var problems []error
	if len(c.token) > 0xFFFF {
		problems = append(problems, fmt.Errorf("the token has %d bytes, at most 65535 are possible", len(c.token)))
	}
	if c.dialTimeout <= 0 {
		problems = append(problems, fmt.Errorf("the dial timeout %v is not positive", c.dialTimeout))
	}
	if c.keepalive <= 0 || c.keepalive > 40*time.Second {
		problems = append(problems, fmt.Errorf("the keepalive %v is outside 0..40s: the broker closes after 45s of silence", c.keepalive))
	}
	if c.backoffMin <= 0 || c.backoffMax < c.backoffMin {
		problems = append(problems, fmt.Errorf("the backoff %v..%v is not a range", c.backoffMin, c.backoffMax))
	}
	return errors.Join(problems...)
}

// Option changes how a Client connects.
type Option func(*config)

// WithToken sets the token for CONNECT. The default is none, which a broker without configured tokens accepts.
func WithToken(token string) Option { return func(c *config) { c.token = []byte(token) } }

// WithLogger sets where connection losses, retries and refusals are reported. The default, and nil, discards them.
func WithLogger(l *slog.Logger) Option { return func(c *config) { c.logger = l } }

// WithDialTimeout bounds one attempt to connect and authenticate. The default is 5 s.
func WithDialTimeout(d time.Duration) Option { return func(c *config) { c.dialTimeout = d } }

// WithKeepalive sets after how long without a request a PING is sent, at most 40 s: the broker closes a connection after
// 45 s of silence. A broker that has sent nothing for three times as long, and at least 5 s, counts as dead. The default
// is 15 s, and 5 s where Dial was given several nodes.
func WithKeepalive(d time.Duration) Option { return func(c *config) { c.keepalive = d } }

// WithBackoff sets the first and the longest pause between attempts to reconnect, and between retries of what the
// broker asked to retry. The pause doubles each time and has some randomness. The default is 500 ms and 30 s. Of several
// nodes each is tried once before a pause. While a cluster elects its leader the pauses are 200 ms, later up to 1 s, if those
// are not shorter.
func WithBackoff(first, longest time.Duration) Option {
	return func(c *config) { c.backoffMin, c.backoffMax = first, longest }
}

// WithDialer replaces the function that opens TCP connections, for proxies and tests. nil is the default, net.Dialer.
func WithDialer(dial func(ctx context.Context, network, addr string) (net.Conn, error)) Option {
	return func(c *config) { c.dial = dial }
}

// ProducerOptions are a Producer's settings. The zero value is ready to use.
type ProducerOptions struct {
	// Durability is what every publish asks for; the zero value leaves it to the topic, whose default is quorum.
	Durability protocol.Durability
	// MaxInFlight is how many publishes per partition may be unanswered before Send blocks: at most, and by default,
	// protocol.ProducerWindow.
	MaxInFlight int
	// MaxBufferedBytes bounds the memory of unanswered publishes; Send blocks beyond it. The default is 64 MiB. A single
	// message larger than that is accepted when nothing else is unanswered.
	MaxBufferedBytes int
	// DeliveryTimeout is how long a partition, or the connection, may fail before its unanswered publishes are given up
	// with ErrDeliveryTimeout. The default is 2 minutes.
	DeliveryTimeout time.Duration
	// Route chooses the partition of each message, below partitions; nil takes protocol.Route for a key and turns without
	// one. It is called with the Producer's lock held, in the order of the calls, and must not block.
	Route func(key []byte, partitions uint16) uint16
	// Plain publishes without producer id and sequence: a retry after a lost connection may then store a message twice.
	Plain bool
}

func (o *ProducerOptions) setDefaults() error {
	if o.MaxInFlight == 0 {
		o.MaxInFlight = protocol.ProducerWindow
	}
	if o.MaxBufferedBytes == 0 {
		o.MaxBufferedBytes = 64 << 20
	}
	if o.DeliveryTimeout == 0 {
		o.DeliveryTimeout = 2 * time.Minute
	}
	var problems []error
	if o.Durability > protocol.DurabilityQuorum {
		problems = append(problems, fmt.Errorf("unknown durability %d", o.Durability))
	}
	if o.MaxInFlight < 1 || o.MaxInFlight > protocol.ProducerWindow {
		problems = append(problems, fmt.Errorf("option MaxInFlight %d is outside 1..%d", o.MaxInFlight, protocol.ProducerWindow))
	}
	if o.MaxBufferedBytes < 1 {
		problems = append(problems, fmt.Errorf("option MaxBufferedBytes %d is not positive", o.MaxBufferedBytes))
	}
	if o.DeliveryTimeout < 0 {
		problems = append(problems, fmt.Errorf("option DeliveryTimeout %v is negative", o.DeliveryTimeout))
	}
	return errors.Join(problems...)
}

// ConsumerOptions are a Consumer's settings. The zero value is ready to use.
type ConsumerOptions struct {
	// Start is where a new group begins: protocol.StartEarliest (the zero value) or protocol.StartLatest.
	Start protocol.StartPolicy
	// CreditCount and CreditBytes are the window: how many messages, and how many bytes of keys and values, the broker
	// may have sent that the application has not finished. The defaults are 256 and 2 MiB, the most 65 535 and 64 MiB.
	// They bound the consumer's memory. A message larger than CreditBytes raises the window once to 17 MiB.
	CreditCount int
	CreditBytes int
	// Pull asks for messages with PULL requests, one at a time, instead of having the broker send them as long as there is
	// credit. It costs a round trip for each batch, and is for brokers or networks that do not take kindly to pushes.
	Pull bool
	// GroupSettings is a JSON object of settings for a new group, such as {"retry":"rocketmq"}; see package protocol. An
	// existing group must have the same ones, or joining it is refused with protocol.CodeGroupExistsMismatch. Empty sends
	// none, which takes the group as it is.
	GroupSettings []byte
	// Broadcast gives every member of the group every partition, and each a position of its own: it begins where Start says
	// and belongs to this Consumer as long as it is a member, across lost connections and restarts of the broker. A message is
	// not tried again: what a handler returns an error for is given up, and moves to no dead-letter topic. A group is a
	// broadcast group or none for all of its members, or joining it is refused with protocol.CodeGroupExistsMismatch.
	Broadcast bool
	// OnAssign is called when the member has got a partition, before the first message of it is handed out; OnRevoke when it
	// gives one up: after its last message has ended and before another member can have it. lost says that others may have
	// it already: the membership ended, or the messages at hand took longer than the broker waits. Close calls OnRevoke for
	// what the member has. Calls come one at a time, in order, on a goroutine of their own; the broker waits 5 s for the end
	// of an OnRevoke. For a partition that comes again after an interruption OnRevoke is called first, late but before
	// OnAssign. Either may be nil.
	OnAssign func(partition uint16)
	OnRevoke func(partition uint16, lost bool)
	// Concurrency is how many handlers Run may have at work, each on another partition. The default is 1, the most 1 024.
	Concurrency int
	// ParallelKeys has handlers work on different keys of one partition at the same time: messages are in order per key then,
	// not per partition, and those without key in no order. It excludes CumulativeAcks.
	ParallelKeys bool
	// CumulativeAcks has Run acknowledge what a handler has finished without error together, up to 32 messages of a
	// partition in one ACK. That is for handlers that take microseconds: a crash then has up to 32 finished messages
	// delivered again, not one.
	CumulativeAcks bool
	// Lease is the lease of the group, or the broker's delivery_lease_ms where it has none of its own; the default is the
	// broker's default of 30 s. PROGRESS is sent after a third of it, so a shorter lease must be named here.
	Lease time.Duration
	// MaxProcessing is how long the library keeps the lease of an unfinished message alive. After that it lets it
	// expire, and the broker redelivers the message. The default is 5 minutes.
	MaxProcessing time.Duration
}

const (
	maxCreditCount  = 65535
	maxCreditBytes  = 64 << 20
	largestMessage  = 17 << 20 // a value, a dead letter's envelope and a key, rounded up
	maxConcurrency  = 1024
	defaultCredit   = 256
	defaultCreditSz = 2 << 20
)

func (o *ConsumerOptions) setDefaults() error {
	if o.CreditCount == 0 {
		o.CreditCount = defaultCredit
	}
	if o.CreditBytes == 0 {
		o.CreditBytes = defaultCreditSz
	}
	if o.Concurrency == 0 {
		o.Concurrency = 1
	}
	if o.Lease == 0 {
		o.Lease = 30 * time.Second
	}
	if o.MaxProcessing == 0 {
		o.MaxProcessing = 5 * time.Minute
	}
	var problems []error
	if o.Start > protocol.StartLatest {
		problems = append(problems, fmt.Errorf("unknown start policy %d", o.Start))
	}
	if o.CreditCount < 1 || o.CreditCount > maxCreditCount {
		problems = append(problems, fmt.Errorf("option CreditCount %d is outside 1..%d", o.CreditCount, maxCreditCount))
	}
	if o.CreditBytes < 1 || o.CreditBytes > maxCreditBytes {
		problems = append(problems, fmt.Errorf("option CreditBytes %d is outside 1..%d", o.CreditBytes, maxCreditBytes))
	}
	if o.Concurrency < 1 || o.Concurrency > maxConcurrency {
		problems = append(problems, fmt.Errorf("option Concurrency %d is outside 1..%d", o.Concurrency, maxConcurrency))
	}
	if o.ParallelKeys && o.CumulativeAcks {
		problems = append(problems, errors.New("options ParallelKeys and CumulativeAcks exclude each other"))
	}
	if o.Lease < 3*time.Second {
		problems = append(problems, fmt.Errorf("option Lease %v is shorter than 3s", o.Lease))
	}
	if len(o.GroupSettings) > 0xFFFF {
		problems = append(problems, fmt.Errorf("option GroupSettings has %d bytes, at most 65535 are possible", len(o.GroupSettings)))
	}
	if o.MaxProcessing < 0 {
		problems = append(problems, fmt.Errorf("option MaxProcessing %v is negative", o.MaxProcessing))
	}
	return errors.Join(problems...)
}
