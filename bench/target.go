package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/mortarmq/mortarmq/tests/harness"
)

// target is a system under measurement: mortard on one node or three, or a peer.
type target struct {
	name    string
	nodes   int
	durable bool // see Peer.Durable
	// slow says that starting takes so long that a started server is kept, and paused, for the other cases of the round.
	slow bool
	open func(ctx context.Context, r *runner, s *Sample) (server, error)
}

// server is a started target. Methods are for one goroutine.
type server interface {
	// create makes what a case publishes to: partitions of one topic in mortard, queues in a peer.
	create(ctx context.Context, sh shape) error
	// publishers connects sh.producers producers.
	publishers(ctx context.Context, sh shape, size int, seed uint64) ([]publisher, error)
	// members connects n members of one group, which together expect what t wants.
	members(ctx context.Context, n int, sh shape, t *Tally, stamped bool) ([]member, error)
	// settled waits until every member, running meanwhile, can get messages.
	settled(ctx context.Context, members []member) error
	// usage is what all processes have used so far.
	usage() (harness.Usage, error)
	// daemons are the mortard processes, for profiles and counters; a peer has none.
	daemons() []*harness.Daemon
	// close ends the processes in order and completes s.
	close(s *Sample) error
	// kill ends what close has not.
	kill()
}

// shape says who publishes to what.
type shape struct {
	producers int
	window    int // unanswered messages per producer
	// partitions are used by every producer in turn. A peer has as many queues as there are producers instead, one each:
	// its queues are what its documentation recommends to spread load over.
	partitions int
}

// publisher is one producer on a connection of its own.
type publisher interface {
	// Run publishes until count messages were acknowledged (0: no limit) or more was given and returned false.
	Run(count uint64, more func() bool) error
	// RunRated publishes at a fixed rate, once; latencies count from when a message was due.
	RunRated(ctx context.Context, rate float64, warm, count uint64) error
	Completed() uint64
	// Latency is not for use while a run goes on.
	Latency() *hdrhistogram.Histogram
	Retries() uint64
	// Unsent are the latencies, so far, of messages that a rated run has given up sending; nil if there are none.
	Unsent() *hdrhistogram.Histogram
	Close() error
}

// member is one consumer.
type member interface {
	// Run receives and acknowledges until the group has received everything.
	Run(ctx context.Context) error
	// Latencies are those until arrival and until the acknowledgement was answered; not while Run runs.
	Latencies() (delivered, acked *hdrhistogram.Histogram)
	Close() error
}

// targets returns what the settings select, of so many nodes.
func (c *Config) targets(nodes int) []*target {
	list := []*target{mortardTarget(nodes)}
	for _, p := range c.Peers {
		if p.Nodes == nodes {
			list = append(list, peerTarget(p))
		}
	}
	return list
}

func peerTarget(p *Peer) *target {
	return &target{name: p.Name, nodes: p.Nodes, durable: p.Durable, slow: p.SlowStart, open: func(ctx context.Context, r *runner, s *Sample) (server, error) {
		o, err := r.peerOptions(p)
		if err != nil {
			return nil, err
		}
		began := now()
		srv, err := p.Start(ctx, o)
		if err != nil {
			return nil, errors.Join(err, os.RemoveAll(o.Dir))
		}
		s.StartSeconds = float64(now()-began) / 1e9
		return &peerServer{srv: srv, dir: o.Dir}, nil
	}}
}

// peerServer is a started peer. A kept one gets new queues for every case.
type peerServer struct {
	srv   PeerServer
	dir   string
	first int // number of the present case's first queue
	next  int
}

func (p *peerServer) create(ctx context.Context, sh shape) error {
	p.first = p.next
	p.next += sh.producers
	resetPeakMemory(p.srv.Processes())
	return p.srv.Create(ctx, p.first, sh.producers)
}

func (p *peerServer) publishers(ctx context.Context, sh shape, size int, seed uint64) (list []publisher, err error) {
	for i := range sh.producers {
		conn, err := p.srv.Producer(ctx, p.first+i)
		if err != nil {
			closeAll(list)
			return nil, err
		}
		list = append(list, newPeerPublisher(conn, sh.window, size, seed<<8|uint64(i)))
	}
	return list, nil
}

func (p *peerServer) members(ctx context.Context, n int, _ shape, t *Tally, stamped bool) (list []member, err error) {
	for i := range n {
		conn, err := p.srv.Consumer(ctx, p.first, i, !stamped)
		if err != nil {
			closeAll(list)
			return nil, err
		}
		list = append(list, newPeerConsumer(conn, t, stamped))
	}
	return list, nil
}

// settled has nothing to wait for: messages of a queue go to whoever asks.
func (p *peerServer) settled(context.Context, []member) error { return nil }

func (p *peerServer) usage() (harness.Usage, error) { return sumUsage(p.srv.Processes()) }

func (p *peerServer) daemons() []*harness.Daemon { return nil }

func (p *peerServer) close(*Sample) error {
	return errors.Join(p.srv.Stop(), os.RemoveAll(p.dir))
}

// kill is for a server that close was not called for, or in vain: there is nobody left to tell an error.
func (p *peerServer) kill() { _ = p.close(nil) }

// signal sends a signal to all of the server's processes: SIGSTOP and SIGCONT keep a slow starter from using the machine
// while others are measured.
func (p *peerServer) signal(sig syscall.Signal) {
	for _, pid := range p.srv.Processes() {
		_ = syscall.Kill(pid, sig) // one that has ended shows in the next run
	}
}

// sumUsage adds up what processes have used. One that has ended meanwhile is left out.
func sumUsage(pids []int) (harness.Usage, error) {
	var sum harness.Usage
	for _, pid := range pids {
		u, err := harness.ReadUsage(pid)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return sum, err
		}
		sum.User += u.User
		sum.System += u.System
		sum.RSS += u.RSS
		sum.PeakRSS += u.PeakRSS
	}
	return sum, nil
}

// resetPeakMemory has the kernel forget the highest memory use so far (proc(5), clear_refs).
func resetPeakMemory(pids []int) {
	for _, pid := range pids {
		// Where it is not permitted the peak of the process's whole life is reported.
		_ = os.WriteFile(filepath.Join("/proc", strconv.Itoa(pid), "clear_refs"), []byte("5"), 0)
	}
}

func (r *runner) peerOptions(p *Peer) (*PeerOptions, error) {
	dir := filepath.Join(r.dir, p.Name)
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, err
	}
	log, err := filepath.Abs(filepath.Join(r.cfg.Out, p.Name+".log"))
	if err != nil {
		return nil, err
	}
	return &PeerOptions{Dir: dir, Cache: r.cfg.Cache, Log: log}, nil
}

func closeAll[C interface{ Close() error }](list []C) {
	for _, c := range list {
		_ = c.Close() // its errors have shown in its runs
	}
}

// settleTimeout is how long the members of a group may take to share the partitions.
const settleTimeout = 60 * time.Second

var errNotSettled = fmt.Errorf("the members did not get all partitions within %v", settleTimeout)
