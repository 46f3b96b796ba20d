package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

const (
	topicName = "bench"
	// pipelineWindow is the number of outstanding publishes of the pipelined runs.
	pipelineWindow = 256
	manyProducers  = 16
	manyPartitions = 1000
	// fewPartitions is the broker's default partition count.
	fewPartitions = 4
	// catchupSize is the value size of the catch-up runs.
	catchupSize = 1 << 10
	// A consumer that is to be fast asks for a large credit window; 64 MiB is the largest.
	largeCreditCount = 16384
	largeCreditBytes = 64 << 20
)

// benchCase is one measurement of one round.
type benchCase struct {
	workload string
	size     int // value size, or the block size of a disk limit
	run      func(ctx context.Context, r *runner, s *Sample) error
}

// cases lists what a round measures, in order.
func (c *Config) cases() []benchCase {
	var list []benchCase
	add := func(workload string, size int, run func(context.Context, *runner, *Sample) error) {
		list = append(list, benchCase{workload, size, run})
	}
	for _, w := range Workloads {
		if !contains(c.Workloads, w) {
			continue
		}
		switch w {
		case "raw":
			c.addLimits(add)
		case "catchup":
			add("catchup", catchupSize, catchup)
		case "restart":
			add("restart", 16<<10, restart)
		default:
			for _, size := range c.Sizes {
				switch w {
				case "publish":
					add("publish", size, publish(1, pipelineWindow, 1))
				case "publish-sync":
					add("publish-sync", size, publish(1, 1, 1))
				case "producers":
					add("producers", size, publish(manyProducers, pipelineWindow, manyProducers))
				case "partitions":
					add("partitions", size, publish(1, pipelineWindow, manyPartitions))
				case "end-to-end":
					add("end-to-end", size, endToEnd)
				case "end-to-end-max":
					add("end-to-end-max", size, endToEndMax)
				}
			}
		}
	}
	return list
}

func (c *Config) addLimits(add func(string, int, func(context.Context, *runner, *Sample) error)) {
	blocks := map[int]bool{}
	for _, size := range c.Sizes {
		if b := journalBlock(size); !blocks[b] {
			blocks[b] = true
			add("disk", b, diskWrite)
		}
		add("echo", size, echo)
	}
	add("disk", bandwidthBlock, diskWrite)
	add("disk-read", bandwidthBlock, diskRead)
}

func contains(list []string, s string) bool {
	for _, l := range list {
		if l == s {
			return true
		}
	}
	return false
}

// diskWrite measures the device with fio where it is installed, and through package ring in any case. The sample is
// fio's figure if there is one.
func diskWrite(ctx context.Context, r *runner, s *Sample) error {
	path := filepath.Join(r.dir, "limit")
	if err := prepareZeroed(path, r.cfg.limitFileBytes); err != nil {
		return err
	}
	own, err := ringWrite(path, r.cfg.limitFileBytes, s.Size, r.cfg.Duration/2)
	if err != nil {
		return err
	}
	s.setLimit(own)
	s.Values = map[string]float64{"ring_p50_us": own.Latency.P50, "ring_p99_us": own.Latency.P99, "ring_mb_per_s": own.MBps}
	if _, err := exec.LookPath("fio"); err != nil {
		return nil
	}
	dev, err := fioWrite(ctx, path, r.cfg.limitFileBytes, s.Size, r.cfg.Duration/2)
	if err != nil {
		return err
	}
	s.setLimit(dev)
	return nil
}

func diskRead(ctx context.Context, r *runner, s *Sample) error {
	if _, err := exec.LookPath("fio"); err != nil {
		return errSkipped
	}
	path := filepath.Join(r.dir, "limit")
	if err := prepareZeroed(path, r.cfg.limitFileBytes); err != nil {
		return err
	}
	dev, err := fioRead(ctx, path, r.cfg.limitFileBytes, r.cfg.Duration/2)
	if err != nil {
		return err
	}
	s.setLimit(dev)
	return nil
}

func echo(ctx context.Context, r *runner, s *Sample) error {
	addr, stop, err := startEcho(ctx)
	if err != nil {
		return err
	}
	defer stop()
	frame := protocol.PubFrameLen(0, s.Size)
	if _, err := echoLatency(ctx, addr, frame, r.cfg.Warmup+time.Millisecond); err != nil {
		return err
	}
	s.Tool = "gnet"
	s.Latency, err = echoLatency(ctx, addr, frame, r.cfg.Duration/2)
	return err
}

// publish returns the case of so many producers, each on a connection of its own and using every partition in turn.
func publish(producers, window, partitions int) func(context.Context, *runner, *Sample) error {
	return func(ctx context.Context, r *runner, s *Sample) error {
		return r.withBroker(ctx, s, func(d *harness.Daemon) error {
			pubs, err := newPublishers(d.ClientAddr, producers, window, partitions, s.Size, uint64(s.Round))
			if err != nil {
				return err
			}
			defer closeAll(pubs)
			stop := context.AfterFunc(ctx, func() { closeAll(pubs) })
			defer stop()
			if err := runAll(pubs, 0, r.cfg.Warmup); err != nil {
				return err
			}
			for _, p := range pubs {
				p.latency.Reset()
			}
			count, limit := r.cfg.messagesFor(s.Size)/uint64(producers)+1, time.Duration(0)
			if window == 1 {
				count, limit = 0, r.cfg.Duration // what one outstanding message fills in a reasonable time is no throughput
			}
			completed := func() (n uint64) {
				for _, p := range pubs {
					n += p.Completed()
				}
				return n
			}
			if err := r.measure(d, s, completed, func() error { return runAll(pubs, count, limit) }); err != nil {
				return err
			}
			h := newHist()
			for _, p := range pubs {
				h.Merge(p.latency)
				s.Retried += p.Retried
			}
			s.Latency = quantiles(h)
			return nil
		})
	}
}

func newPublishers(addr string, producers, window, partitions, size int, seed uint64) ([]*Publisher, error) {
	topic, err := declare(addr, partitions)
	if err != nil {
		return nil, err
	}
	parts := make([]uint16, partitions)
	for i := range parts {
		parts[i] = uint16(i)
	}
	var pubs []*Publisher
	for i := range producers {
		// Each producer starts the turn elsewhere.
		at := i % partitions
		turn := append(append([]uint16(nil), parts[at:]...), parts[:at]...)
		p, err := NewPublisher(PublisherOptions{Addr: addr, TopicID: topic, Partitions: turn, ProducerID: uint64(i) + 1, ValueBytes: size,
			Window: window, Seed: seed<<8 | uint64(i)})
		if err != nil {
			closeAll(pubs)
			return nil, err
		}
		pubs = append(pubs, p)
	}
	return pubs, nil
}

func declare(addr string, partitions int) (topic uint16, err error) {
	c, err := harness.Dial(addr, "")
	if err != nil {
		return 0, err
	}
	defer c.Close()
	res, err := c.Declare(topicName, partitions)
	return res.TopicID, err
}

func closeAll(pubs []*Publisher) {
	for _, p := range pubs {
		p.Close()
	}
}

// runAll runs publishers side by side, each for count messages or, with 0, until limit has passed.
func runAll(pubs []*Publisher, count uint64, limit time.Duration) error {
	var more func() bool
	if count == 0 {
		end := now() + int64(limit)
		more = func() bool { return now() < end }
	}
	errs := make([]error, len(pubs))
	var wg sync.WaitGroup
	for i, p := range pubs {
		wg.Go(func() { errs[i] = p.Run(count, more) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// endToEnd publishes at a fixed rate to a group of one. Latency counts from the time a message was due until the answer to its ACK,
// which says that the acknowledgement is durable; DeliverLatency until the message arrived, PublishLatency until the answer to its PUB.
func endToEnd(ctx context.Context, r *runner, s *Sample) error {
	return r.withBroker(ctx, s, func(d *harness.Daemon) error {
		topic, err := declare(d.ClientAddr, fewPartitions)
		if err != nil {
			return err
		}
		warm, count := uint64(r.cfg.Rate*r.cfg.Warmup.Seconds()), uint64(r.cfg.Rate*r.cfg.Duration.Seconds())
		pub, err := NewRatedPublisher(PublisherOptions{Addr: d.ClientAddr, TopicID: topic, Partitions: []uint16{0, 1, 2, 3}, ProducerID: 1,
			ValueBytes: s.Size, Window: maxWindow, Seed: uint64(s.Round)}, r.cfg.Rate)
		if err != nil {
			return err
		}
		defer pub.Close()
		con, err := NewConsumer(ConsumerOptions{Addr: d.ClientAddr, TopicID: topic, Partitions: fewPartitions, Group: "g",
			CreditCount: largeCreditCount, CreditBytes: largeCreditBytes, Stamped: true, Warm: warm})
		if err != nil {
			return err
		}
		defer con.Close()
		err = r.measure(d, s, func() uint64 { n, _ := con.Received(); return n }, func() error {
			return both(ctx, func(ctx context.Context) error { return pub.Run(ctx, warm, count) },
				func(ctx context.Context) error { return con.Run(ctx, warm+count) })
		})
		if err != nil {
			return err
		}
		s.Latency, s.DeliverLatency, s.PublishLatency = quantiles(con.ackedAt), quantiles(con.delivered), quantiles(pub.p.latency)
		return nil
	})
}

// endToEndMax publishes with a full window to a group of one that acknowledges every message.
func endToEndMax(ctx context.Context, r *runner, s *Sample) error {
	return r.withBroker(ctx, s, func(d *harness.Daemon) error {
		pubs, err := newPublishers(d.ClientAddr, 1, pipelineWindow, fewPartitions, s.Size, uint64(s.Round))
		if err != nil {
			return err
		}
		defer closeAll(pubs)
		con, err := NewConsumer(ConsumerOptions{Addr: d.ClientAddr, TopicID: pubs[0].opts.TopicID, Partitions: fewPartitions, Group: "g",
			CreditCount: largeCreditCount, CreditBytes: largeCreditBytes, Stamped: true})
		if err != nil {
			return err
		}
		defer con.Close()
		count := r.cfg.messagesFor(s.Size)
		var published atomic.Int64
		began := now()
		err = r.measure(d, s, func() uint64 { n, _ := con.Received(); return n }, func() error {
			return both(ctx, func(ctx context.Context) error {
				stop := context.AfterFunc(ctx, func() { closeAll(pubs) })
				defer stop()
				err := pubs[0].Run(count, nil)
				published.Store(now())
				return err
			}, func(ctx context.Context) error { return con.Run(ctx, count) })
		})
		if err != nil {
			return err
		}
		s.Retried = pubs[0].Retried
		s.Latency, s.DeliverLatency, s.PublishLatency = quantiles(con.ackedAt), quantiles(con.delivered), quantiles(pubs[0].latency)
		s.Values = map[string]float64{"publish_msgs_per_s": float64(count) / (float64(published.Load()-began) / 1e9)}
		return nil
	})
}

// both runs two functions side by side; the error of one cancels the other.
func both(ctx context.Context, a, b func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := make(chan error, 2)
	go func() { errs <- a(ctx) }()
	go func() { errs <- b(ctx) }()
	first := <-errs
	if first != nil {
		cancel()
	}
	return cmp.Or(first, <-errs) // a second error is a consequence of the first
}

// catchup stores messages, restarts the broker, and reads them from a warm and then from a cold page cache. The sample is the
// warm read; the cold one and the restarts are in Values.
func catchup(ctx context.Context, r *runner, s *Sample) error {
	count := uint64(r.cfg.CatchupMessages)
	err := r.withBroker(ctx, s, func(d *harness.Daemon) error { return fillTopic(ctx, d, s, count) })
	if err != nil {
		return err
	}
	s.Values = map[string]float64{}
	for _, state := range []string{"warm", "cold"} {
		prepare := fillCache
		if state == "cold" {
			prepare = dropCache
			dropAllCaches()
		}
		if err := prepare(r.dataDir()); err != nil {
			return err
		}
		pass := Sample{Workload: s.Workload, Size: s.Size, Round: s.Round, keepData: true}
		err := r.withBroker(ctx, &pass, func(d *harness.Daemon) error { return readTopic(ctx, r, d, &pass, state, count) })
		if err != nil {
			return fmt.Errorf("%s: %w", state, err)
		}
		s.Values[state+"_mb_per_s"] = pass.MBPerSec
		s.Values[state+"_msgs_per_s"] = pass.MsgsPerSec
		s.Values[state+"_restart_s"] = pass.StartSeconds
		if state == "warm" {
			pass.Values = s.Values
			*s = pass
		}
	}
	return nil
}

func fillTopic(ctx context.Context, d *harness.Daemon, s *Sample, count uint64) error {
	pubs, err := newPublishers(d.ClientAddr, 1, pipelineWindow, fewPartitions, s.Size, uint64(s.Round))
	if err != nil {
		return err
	}
	defer closeAll(pubs)
	stop := context.AfterFunc(ctx, func() { closeAll(pubs) })
	defer stop()
	s.keepData = true
	return runAll(pubs, count, 0)
}

func readTopic(ctx context.Context, r *runner, d *harness.Daemon, s *Sample, group string, count uint64) error {
	topic, err := declare(d.ClientAddr, fewPartitions)
	if err != nil {
		return err
	}
	con, err := NewConsumer(ConsumerOptions{Addr: d.ClientAddr, TopicID: topic, Partitions: fewPartitions, Group: group,
		CreditCount: 65535, CreditBytes: largeCreditBytes, Ack: AckBatch})
	if err != nil {
		return err
	}
	defer con.Close()
	return r.measure(d, s, func() uint64 { n, _ := con.Received(); return n }, func() error { return con.Run(ctx, count) })
}

// restart measures how long an empty broker takes to start, then stores RestartBytes and measures it again after a clean
// shutdown and after a kill in the middle of publishing.
func restart(ctx context.Context, r *runner, s *Sample) error {
	empty := Sample{Workload: s.Workload, Size: s.Size, Round: s.Round}
	if err := r.withBroker(ctx, &empty, func(*harness.Daemon) error { return nil }); err != nil {
		return err
	}
	s.Values = map[string]float64{"empty_start_s": empty.StartSeconds}
	count := uint64(r.cfg.RestartBytes/int64(s.Size)) + 1
	fill := Sample{Workload: s.Workload, Size: s.Size, Round: s.Round}
	if err := r.withBroker(ctx, &fill, func(d *harness.Daemon) error { return fillTopic(ctx, d, &fill, count) }); err != nil {
		return err
	}
	killed := Sample{Workload: s.Workload, Size: s.Size, Round: s.Round, keepData: true}
	err := r.withBroker(ctx, &killed, func(d *harness.Daemon) error {
		s.Values["clean_restart_s"] = d.ReadyIn.Seconds()
		return killWhilePublishing(d, s, r.cfg.Duration/4)
	})
	if err != nil {
		return err
	}
	return r.withBroker(ctx, s, func(d *harness.Daemon) error {
		s.Values["killed_restart_s"] = d.ReadyIn.Seconds()
		return nil
	})
}

func killWhilePublishing(d *harness.Daemon, s *Sample, after time.Duration) error {
	topic, err := declare(d.ClientAddr, fewPartitions)
	if err != nil {
		return err
	}
	p, err := NewPublisher(PublisherOptions{Addr: d.ClientAddr, TopicID: topic, Partitions: []uint16{0, 1, 2, 3}, ProducerID: 1 << 20,
		ValueBytes: s.Size, Window: pipelineWindow, Seed: 1})
	if err != nil {
		return err
	}
	defer p.Close()
	timer := time.AfterFunc(after, d.Kill)
	defer timer.Stop()
	if err := p.Run(0, nil); err == nil {
		return errors.New("publishing went on after the broker was killed")
	}
	d.Kill()
	return nil
}
