package bench

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/mortarmq/mortarmq/tests/harness"
)

// mortardTarget is mortard, alone or as a cluster.
func mortardTarget(nodes int) *target {
	if nodes == 1 {
		return &target{name: mortardName, nodes: 1, durable: true, open: openMortard}
	}
	return &target{name: fmt.Sprintf("%s-%d", mortardName, nodes), nodes: nodes, durable: true,
		open: func(ctx context.Context, r *runner, s *Sample) (server, error) { return openCluster(ctx, r, s, nodes) }}
}

const (
	mortardName = "mortard"
	groupName   = "g"
)

func openMortard(ctx context.Context, r *runner, s *Sample) (server, error) {
	d, err := r.startMortard(ctx, s)
	if err != nil {
		return nil, err
	}
	return &mortardServer{nodes: []*harness.Daemon{d}, addr: d.ClientAddr, group: groupName}, nil
}

// mortardServer is a started broker, or a cluster of them whose leader clients connect to.
type mortardServer struct {
	nodes []*harness.Daemon
	addr  string
	topic uint16
	group string
}

func (m *mortardServer) create(_ context.Context, sh shape) (err error) {
	m.topic, err = declare(m.addr, sh.partitions)
	return err
}

func (m *mortardServer) publishers(_ context.Context, sh shape, size int, seed uint64) (list []publisher, err error) {
	for i := range sh.producers {
		// Each producer starts the turn elsewhere.
		turn := make([]uint16, sh.partitions)
		for j := range turn {
			turn[j] = uint16((i + j) % sh.partitions)
		}
		p, err := NewPublisher(PublisherOptions{Addr: m.addr, TopicID: m.topic, Partitions: turn, ProducerID: uint64(i) + 1, ValueBytes: size,
			Window: sh.window, Seed: seed<<8 | uint64(i)})
		if err != nil {
			closeAll(list)
			return nil, err
		}
		list = append(list, p)
	}
	return list, nil
}

func (m *mortardServer) members(_ context.Context, n int, sh shape, t *Tally, stamped bool) (list []member, err error) {
	ack := AckEach
	if !stamped {
		ack = AckBatch
	}
	for range n {
		c, err := NewConsumer(ConsumerOptions{Addr: m.addr, TopicID: m.topic, Partitions: sh.partitions, Group: m.group,
			CreditCount: largeCreditCount, CreditBytes: largeCreditBytes, Ack: ack, Stamped: stamped, Total: t})
		if err != nil {
			closeAll(list)
			return nil, err
		}
		list = append(list, c)
	}
	return list, nil
}

// settled waits until the members have all partitions and none has more than its share: messages that come before that
// would move from one to another.
func (m *mortardServer) settled(ctx context.Context, members []member) error {
	deadline := time.Now().Add(settleTimeout)
	for {
		sum, most, parts := 0, 0, 0
		for _, mb := range members {
			if c, ok := mb.(*Consumer); ok {
				sum, most, parts = sum+c.Assigned(), max(most, c.Assigned()), c.opts.Partitions
			}
		}
		if sum == parts && most <= (parts+len(members)-1)/len(members) {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Millisecond):
		}
		if time.Now().After(deadline) {
			return errNotSettled
		}
	}
}

func (m *mortardServer) usage() (sum harness.Usage, err error) {
	pids := make([]int, len(m.nodes))
	for i, d := range m.nodes {
		pids[i] = d.PID()
	}
	return sumUsage(pids)
}

func (m *mortardServer) daemons() []*harness.Daemon { return m.nodes }

// close stops the broker in order, after which everything is in segments. Followers end last, so that the leader can end
// in order.
func (m *mortardServer) close(s *Sample) error {
	for _, d := range m.nodes {
		if err := d.Crashed(); err != nil {
			return err
		}
	}
	u, err := m.usage()
	if err != nil {
		return err
	}
	s.PeakRSSBytes = u.PeakRSS
	began := now()
	used := time.Duration(0)
	for _, d := range m.nodes {
		if err := d.Stop(harness.DefaultStopTimeout); err != nil {
			return err
		}
		used += d.ExitCPU()
	}
	s.DrainSeconds = float64(now()-began) / 1e9
	if s.Messages > 0 {
		s.CPUSecondsPerMillion = (used - s.cpuAtStart).Seconds() / float64(s.Messages) * 1e6
		s.SustainedMsgsPerSec = float64(s.Messages) / (s.Seconds + s.DrainSeconds)
	}
	return nil
}

func (m *mortardServer) kill() {
	for _, d := range m.nodes {
		d.Kill()
	}
}

// config are the keys that every broker gets.
func (r *runner) config() map[string]any {
	config := map[string]any{"journal_file_bytes": r.cfg.JournalFileBytes, "journal_max_files": r.cfg.JournalMaxFiles, "log_level": "warn"}
	for k, v := range r.cfg.Broker {
		config[k] = v
	}
	return config
}

// startMortard starts a broker on the data directory, as it is.
func (r *runner) startMortard(ctx context.Context, s *Sample) (*harness.Daemon, error) {
	d, err := harness.Start(ctx, harness.Options{Binary: r.cfg.Mortard, DataDir: r.dataDir(), Config: r.config(), LogPath: r.mortardLog()})
	if err != nil {
		return nil, err
	}
	s.StartSeconds = d.ReadyIn.Seconds()
	return d, nil
}

func (r *runner) mortardLog() string { return filepath.Join(r.cfg.Out, "mortard.log") }

// withBroker starts mortard on the data directory, lets fn use it and stops it in order unless fn killed it.
func (r *runner) withBroker(ctx context.Context, s *Sample, fn func(*mortardServer) error) error {
	srv, err := openMortard(ctx, r, s)
	if err != nil {
		return err
	}
	m := srv.(*mortardServer)
	defer m.kill() // a no-op after close
	d := m.nodes[0]
	if err := fn(m); err != nil {
		return errors.Join(err, d.Crashed())
	}
	select {
	case <-d.Exited():
		return d.Crashed() // nil: fn killed it
	default:
		return m.close(s)
	}
}
