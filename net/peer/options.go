package peer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
)

// Options configures a Transport. The zero value of a field means its default.
type Options struct {
	// Self is this node's number.
	Self replica.NodeID
	// Addr is the TCP address to listen on, host:port. Listener takes its place if it is set; the transport closes it.
	Addr     string
	Listener net.Listener
	// Peers are the addresses of the other nodes. They are resolved anew for each connection.
	Peers map[replica.NodeID]string
	// Names is how people know the nodes, for logs and errors; default their numbers.
	Names map[replica.NodeID]string
	// Secret is what the nodes share. It may be empty only while Addr and all Peers are on loopback.
	Secret []byte
	// Identity says what this node is at the moment of a handshake. It is called from any goroutine.
	Identity func() Identity
	// Handler takes what arrives.
	Handler Handler
	// Logger gets a line when a node comes, goes, or is refused, and one per lane at level debug; default slog.Default().
	Logger *slog.Logger

	// LogQueue bounds the bytes that wait for a peer on the lanes log and bulk each, default 64 MiB and 8 MiB. A single
	// frame may be larger where nothing else waits.
	LogQueue, BulkQueue int64
	// Unreleased bounds the payloads of one peer and lane that the handler has not released, default 64 MiB: nothing more
	// is read from that lane until it has.
	Unreleased int64

	// DialTimeout bounds a connection attempt, the look-up of the name included, default 2 s; HandshakeTimeout what follows it until both sides have proved
	// who they are, default 2 s.
	DialTimeout, HandshakeTimeout time.Duration
	// PingInterval is after how much silence of this node a PING goes out, default 500 ms; IdleTimeout after how much
	// silence of the other node a connection is given up, default 3 s.
	PingInterval, IdleTimeout time.Duration
	// BackoffMin and BackoffMax bound the pause between two connection attempts, default 20 ms and 500 ms; it doubles, and
	// half of it is random.
	BackoffMin, BackoffMax time.Duration

	// Dial replaces the way to another node, for tests.
	Dial func(ctx context.Context, addr string) (net.Conn, error)

	// versions are those that this node offers, for tests; default the ones of package peerwire.
	minVersion, maxVersion uint8
}

// Identity is what a node tells the others about itself when they connect.
type Identity struct {
	// Cluster is the id of the cluster that the node belongs to, zero while it belongs to none.
	Cluster replica.ClusterID
	// Logs is the number of its logs, 0 while it has none yet.
	Logs uint16
}

// Peer is what a node has said about itself.
type Peer struct {
	Identity
	// Version is the protocol's version on this connection.
	Version uint8
	// Addr is the other end's address.
	Addr string
}

// Handler takes what arrives. Per peer and lane the calls come one after the other: Connected, then the frames of that
// connection in their order, then Disconnected; those of different lanes come at the same time. A method that blocks holds
// up its own lane only. Payloads are the handler's until it calls Release, exactly once each.
type Handler interface {
	// Connected says that frames can be sent on a lane from now on. What was sent on an earlier connection and not
	// acknowledged is lost.
	Connected(from replica.NodeID, lane peerwire.Lane, p Peer)
	// Disconnected says that a lane's connection is gone, and why.
	Disconnected(from replica.NodeID, lane peerwire.Lane, err error)
	// Writable says that there is room again after a send on the lane was refused.
	Writable(to replica.NodeID, lane peerwire.Lane)

	// Message takes a message of replica.Node, which is handed over.
	Message(from replica.NodeID, m *replica.Message)
	// Append, Flushed and Reject take those frames; the structs are borrowed.
	Append(from replica.NodeID, a *peerwire.Append, payload peerwire.Payload)
	Flushed(from replica.NodeID, f *peerwire.Flushed)
	Reject(from replica.NodeID, r *peerwire.Reject)
	// Bulk takes a frame of the lane bulk, which is handed over. payload is nil where the kind has none.
	Bulk(from replica.NodeID, f peerwire.BulkFrame, payload peerwire.Payload)
}

const (
	defaultLogQueue   = 64 << 20
	defaultBulkQueue  = 8 << 20
	defaultUnreleased = 64 << 20
	// controlQueue bounds the bytes of messages that wait for a peer. They are small, and repeated by their sender.
	controlQueue = 1 << 20
	// maxQueued bounds the frames that wait for a peer on one lane.
	maxQueued = 16384
	// maxPeers bounds the nodes of a cluster.
	maxPeers = 15
)

func (o *Options) setDefaults() {
	set := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	setBytes := func(n *int64, v int64) {
		if *n <= 0 {
			*n = v
		}
	}
	setBytes(&o.LogQueue, defaultLogQueue)
	setBytes(&o.BulkQueue, defaultBulkQueue)
	setBytes(&o.Unreleased, defaultUnreleased)
	set(&o.DialTimeout, 2*time.Second)
	set(&o.HandshakeTimeout, 2*time.Second)
	set(&o.PingInterval, 500*time.Millisecond)
	set(&o.IdleTimeout, 3*time.Second)
	set(&o.BackoffMin, 20*time.Millisecond)
	set(&o.BackoffMax, 500*time.Millisecond)
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Dial == nil {
		var d net.Dialer
		o.Dial = func(ctx context.Context, addr string) (net.Conn, error) { return d.DialContext(ctx, "tcp", addr) }
	}
	if o.maxVersion == 0 {
		o.minVersion, o.maxVersion = peerwire.MinVersion, peerwire.MaxVersion
	}
}

func (o *Options) validate() error {
	var errs []error
	if o.Identity == nil || o.Handler == nil {
		errs = append(errs, errors.New("Identity and Handler must be set"))
	}
	if len(o.Peers) > maxPeers {
		errs = append(errs, fmt.Errorf("there are %d peers: use at most %d", len(o.Peers), maxPeers))
	}
	if addr, ok := o.Peers[o.Self]; ok {
		errs = append(errs, fmt.Errorf("node %d, at %s, is this node itself", o.Self, addr))
	}
	listen := o.Addr
	if o.Listener != nil {
		listen = o.Listener.Addr().String()
	}
	if len(o.Secret) == 0 {
		addrs := []string{listen}
		for _, a := range o.Peers {
			addrs = append(addrs, a)
		}
		for _, a := range addrs {
			if !Loopback(a) {
				errs = append(errs, fmt.Errorf("there is no secret, and others than this machine can reach %s", a))
			}
		}
	}
	return errors.Join(errs...)
}

// Loopback reports whether only this machine can reach addr, which is host:port. Names other than localhost are not
// resolved.
func Loopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.IsLoopback()
}
