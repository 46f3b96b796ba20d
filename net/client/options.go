package client

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/mortarmq/mortarmq/engine/coord"
	"github.com/mortarmq/mortarmq/protocol"
)

// Handler is what the server needs of the engine. All methods may be called from any event loop.
type Handler interface {
	// NewIngress returns the intake of one event loop; it is called on that loop, before the loop's first request.
	NewIngress() Ingress
	// ClientClosed says that an authenticated connection is gone; it comes after the last request of the connection.
	ClientClosed(c coord.Client)
	// ClientWritable says that c.Outstanding, which had been above coord.OutboundPause, has come down to half of it.
	ClientWritable(c coord.Client)
}

// Ingress takes the requests of one event loop and is used on that loop only. Every request is answered, exactly once,
// by a call of Complete with its number.
type Ingress interface {
	// Publish takes a PUB. p, its key and its value are borrowed until it returns.
	Publish(c coord.Client, req uint64, p *protocol.Pub)
	// PublishOwned takes a PUB whose key and value stay valid until own.Release, which it calls exactly once.
	PublishOwned(c coord.Client, req uint64, p *protocol.Pub, own coord.Releaser)
	// Request takes any other request of an authenticated client. The payload, not yet decoded, is borrowed.
	Request(c coord.Client, req uint64, op protocol.Op, payload []byte)
	// Interrupt ends c's waiting PULLs, because another request arrived behind them.
	Interrupt(c coord.Client)
	// Flush hands over what was taken; it is called at the end of each readable event. If it reports lend, Lend follows when
	// the loop has looked at its other events.
	Flush() (lend bool)
	// Lend lets the engine use the loop's thread for what it was handed, for about as long as a write to the disk takes.
	Lend()
}

// Options configures a Server. The zero value of a field means its default.
type Options struct {
	// Addr is the TCP address to listen on, host:port; port 0 picks a free one.
	Addr string
	// Loops is the number of event loops, default 1.
	Loops int
	// TokenDigests are the SHA-256 digests of the tokens that CONNECT may bring. Empty: any token is accepted.
	TokenDigests [][sha256.Size]byte

	// Keepalive is how long a connection may go without a complete frame, default 45 s.
	Keepalive time.Duration
	// HalfFrame is how long a frame may stay incomplete, default 10 s.
	HalfFrame time.Duration
	// AuthTimeout is the time from accept to a valid CONNECT, default 5 s.
	AuthTimeout time.Duration
	// AuthDelay is the pause before the answer to a wrong token, default 100 ms.
	AuthDelay time.Duration
	// SlowConsumer is how long a connection with bytes to send may take none of them, default 30 s.
	SlowConsumer time.Duration
	// Linger is how long a closing connection may take to read its last bytes and to close its side, default 1 s.
	Linger time.Duration
	// AnswerGrace is how long a connection that broke the protocol, or whose client has shut its side, still waits for
	// the answers to its earlier requests, default 5 s.
	AnswerGrace time.Duration

	// MaxConnections bounds the connections; further ones are closed as soon as they are accepted. The default leaves
	// an eighth (at least 64) of the process's file descriptors to the rest of the broker.
	MaxConnections int
	// MaxPending is how many unanswered requests a connection may have before its PUBs get 0x4001, default 65 536.
	// A connection with twice as many is closed.
	MaxPending int
	// MaxOutbound bounds the copied bytes (answers and small pushes) that a connection has not taken yet, default
	// 8 MiB. A connection above it is closed with 0x4007.
	MaxOutbound int
	// OutboundBytes bounds the copied bytes of all connections together, default 512 MiB. A connection with more than
	// what is left of them (and more than 64 KiB) is closed with 0x4007.
	OutboundBytes int64
	// PartialBytes bounds the memory for incomplete frames of all connections, default 512 MiB. The connection that
	// would exceed it is closed with 0x4001.
	PartialBytes int64
	// OwnedBytes bounds the memory of large frames that the engine has not released yet, default 512 MiB. A PUB that
	// would exceed it gets 0x4001.
	OwnedBytes int64

	// Logger defaults to slog.Default().
	Logger *slog.Logger
	// Handler is the engine; required.
	Handler Handler
}

// Bounds of the server that are not options.
const (
	// readBufferBytes is the size of a loop's read buffer, so also the most that one readable event brings.
	readBufferBytes = 128 << 10
	// ownedFrameMin is the frame size from which a PUB that had to be assembled is handed over instead of copied.
	ownedFrameMin = 64 << 10
	// readIntoMin is how much of a frame must be missing for it to be read without the loop's buffer between.
	readIntoMin = 64 << 10
	// turnBytes is how much one connection may write, or read of large frames, before the loop turns to the next.
	turnBytes = 512 << 10
	// unpinAfter is how long a full socket may keep memory of others waiting before what is left is copied.
	unpinAfter = time.Second
	// outboundGrain is what a connection's copied bytes change by before that is counted, minOutboundShare what a connection
	// may have queued in any case.
	outboundGrain    = 16 << 10
	minOutboundShare = 64 << 10
	// maxTick and minTick bound the resolution of the timers.
	maxTick = 50 * time.Millisecond
	minTick = time.Millisecond
	// minPartialBytes is the memory that one largest frame takes while it moves to its last buffer.
	minPartialBytes = protocol.MaxFrameSize + 4<<20
	// maxLoops bounds Options.Loops.
	maxLoops = 256
)

func (o Options) withDefaults() Options {
	setDefault(&o.Loops, 1)
	setDefault(&o.Keepalive, 45*time.Second)
	setDefault(&o.HalfFrame, 10*time.Second)
	setDefault(&o.AuthTimeout, 5*time.Second)
	setDefault(&o.AuthDelay, 100*time.Millisecond)
	setDefault(&o.SlowConsumer, 30*time.Second)
	setDefault(&o.Linger, time.Second)
	setDefault(&o.AnswerGrace, 5*time.Second)
	setDefault(&o.MaxPending, 64<<10)
	setDefault(&o.MaxOutbound, 8<<20)
	setDefault(&o.OutboundBytes, 512<<20)
	setDefault(&o.PartialBytes, 512<<20)
	setDefault(&o.OwnedBytes, 512<<20)
	if o.MaxConnections == 0 {
		o.MaxConnections = defaultMaxConnections()
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	return o
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// validate checks options whose defaults are filled in.
func (o *Options) validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(o.Handler != nil, "no handler: the server needs an engine")
	check(o.Loops >= 1 && o.Loops <= maxLoops, "%d event loops: use 1 to %d", o.Loops, maxLoops)
	for _, d := range []struct {
		name  string
		value time.Duration
	}{
		{"keepalive", o.Keepalive}, {"half-frame timeout", o.HalfFrame}, {"auth timeout", o.AuthTimeout},
		{"auth delay", o.AuthDelay}, {"slow consumer timeout", o.SlowConsumer}, {"linger", o.Linger},
		{"answer grace", o.AnswerGrace},
	} {
		check(d.value > 0, "%s is %v: use a positive duration", d.name, d.value)
	}
	check(o.MaxConnections > 0, "at most %d connections: allow at least 1", o.MaxConnections)
	check(o.MaxPending > 0 && o.MaxPending <= 1<<24, "%d unanswered requests per connection: use 1 to %d", o.MaxPending, 1<<24)
	check(o.MaxOutbound > 0, "%d outbound bytes per connection: use a positive number", o.MaxOutbound)
	check(o.PartialBytes >= minPartialBytes, "%d bytes for incomplete frames: use at least %d", o.PartialBytes, minPartialBytes)
	check(o.OwnedBytes >= protocol.MaxFrameSize, "%d bytes for large frames: use at least %d", o.OwnedBytes, protocol.MaxFrameSize)
	return errors.Join(errs...)
}

// tick returns the resolution of the timers: an eighth of the shortest one, within bounds.
func (o *Options) tick() time.Duration {
	shortest := min(o.Keepalive, o.HalfFrame, o.AuthTimeout, o.AuthDelay, o.SlowConsumer, o.Linger, o.AnswerGrace)
	return min(max(shortest/8, minTick), maxTick)
}
