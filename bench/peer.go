package bench

import (
	"context"
	"net"
)

// Peer is another message broker that can be measured in the same run: one server program with one setting. Package
// bench/peers has those that exist.
type Peer struct {
	// Name is what tables show and --peers takes: system and setting, such as "redis-always".
	Name string
	// Nodes is the number of servers, each message being stored by a majority of them; 1 or 3.
	Nodes int
	// Durable says that a publish is answered after it was flushed to disk, on a majority of the nodes.
	Durable bool
	// About says in a few words how the servers are set.
	About string
	// SlowStart says that a start takes seconds. Such a server is started once per round; while others are measured it is
	// stopped by SIGSTOP.
	SlowStart bool
	// Version tells which version is installed, "" if that can't be found out.
	Version func(o *PeerOptions) string
	// Missing names what has to be installed first; nil where the peer can be started.
	Missing func(o *PeerOptions) error
	// Start starts the servers on loopback, empty.
	Start func(ctx context.Context, o *PeerOptions) (PeerServer, error)
}

// PeerOptions tell a peer where things are.
type PeerOptions struct {
	// Dir is an empty directory for the data.
	Dir string
	// Cache is the directory into which bench/peers/install.sh has put server programs.
	Cache string
	// Log is the file to which the servers' output is appended.
	Log string
}

// PeerServer is a started peer. Queue stands for what the system calls a queue, a stream or a topic: one log whose messages
// are stored in order. Queues are numbered from 0.
type PeerServer interface {
	// Create makes the queues first to first+n-1, each with one group of consumers that begins with the oldest message.
	Create(ctx context.Context, first, n int) error
	// Producer connects a producer to a queue.
	Producer(ctx context.Context, queue int) (ProducerConn, error)
	// Consumer connects one more member of a queue's group; member is different for each. One that reads alone may acknowledge
	// many messages at once where the system has a way that several members can't use.
	Consumer(ctx context.Context, queue, member int, alone bool) (ConsumerConn, error)
	// Processes lists the servers' processes.
	Processes() []int
	// Stop ends all processes. It may be called twice.
	Stop() error
}

// ProducerConn speaks a peer's protocol for one producer. It knows bytes only: the same generator loads every peer. One
// goroutine calls Append while another calls Answers.
type ProducerConn interface {
	// Conn is the connection, ready to publish; the caller reads, writes and closes it.
	Conn() net.Conn
	// Append appends the request that publishes value. Ids count from 0; each is appended once, in order.
	Append(dst []byte, id uint64, value []byte) []byte
	// Answers takes apart the beginning of b, what was read and not consumed yet. It calls done for what has been
	// acknowledged: message id alone, or, with all, every message up to it. out gets what must be written in turn. It
	// returns how many bytes were consumed; a refused message is an error.
	Answers(b, out []byte, done func(id uint64, all bool)) (n int, reply []byte, err error)
}

// ConsumerConn speaks a peer's protocol for one consumer that acknowledges every message.
type ConsumerConn interface {
	// Conn is the connection; the caller reads, writes and closes it.
	Conn() net.Conn
	// Open appends the request with which delivery begins.
	Open(out []byte) []byte
	// Take takes apart the beginning of b: messages go to in, what must be written in turn (acknowledgements, credit,
	// requests for more) to out. It returns how many bytes were consumed.
	Take(b, out []byte, in Inbox) (n int, reply []byte, err error)
}

// Inbox is where a ConsumerConn puts what it finds.
type Inbox interface {
	// Message is called per message; value is valid during the call.
	Message(value []byte)
	// Acknowledged says that the server has answered the acknowledgements of the n oldest messages whose answer was
	// outstanding. Systems that don't answer acknowledgements never call it.
	Acknowledged(n int)
}
