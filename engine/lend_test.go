package engine

import (
	"encoding/binary"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/ring"
)

// lendingDevice counts the operations that run on lent threads.
type lendingDevice struct {
	*ring.Ring
	executed *atomic.Int64
	// delay is added to each of them.
	delay *atomic.Int64
}

func (d lendingDevice) Execute(op *ring.Op) {
	d.executed.Add(1)
	time.Sleep(time.Duration(d.delay.Load()))
	d.Ring.Execute(op)
}

func lendingOptions(dir string) (o Options, executed, delay *atomic.Int64) {
	o = testOptions(dir)
	executed, delay = new(atomic.Int64), new(atomic.Int64)
	o.OpenDevice = func() (Device, error) {
		r, err := ring.New(ring.Options{Entries: ringEntries, Logger: o.Logger})
		if err != nil {
			return nil, err
		}
		return lendingDevice{r, executed, delay}, nil
	}
	return o, executed, delay
}

// publishOne publishes a message and waits for its answer.
func (p *peer) publishOne(topic uint16, producer, seq uint64) {
	p.t.Helper()
	req := p.send(protocol.Pub{TopicID: topic, ProducerID: producer, ProducerSeq: seq, Value: binary.BigEndian.AppendUint64(nil, seq)})
	flush(p.in)
	if _, err := p.result(req); err != nil {
		p.t.Errorf("publish %d of producer %d: %v", seq, producer, err)
	}
}

// eventually repeats do until it reports true.
func eventually(t *testing.T, what string, do func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !do(); {
		if time.Now().After(end) {
			t.Fatalf("%s: not within a minute", what)
		}
	}
}

func TestLend_ALonePublishIsWrittenOnTheThreadThatBroughtIt(t *testing.T) {
	o, executed, _ := lendingOptions(t.TempDir())
	e := mustOpen(t, o)
	p := newPeer(t, e)
	topic := p.declare("orders", 1).TopicID
	seq := uint64(0)
	eventually(t, "publishes find the shard asleep", func() bool {
		seq++
		p.publishOne(topic, 1, seq)
		return executed.Load() >= 20
	})
	mustClose(t, e)

	e = mustOpen(t, o)
	defer mustClose(t, e)
	p = newPeer(t, e)
	req := p.send(protocol.Pub{TopicID: topic, ProducerID: 1, ProducerSeq: seq, Value: binary.BigEndian.AppendUint64(nil, seq)})
	flush(p.in)
	if res, err := p.result(req); err != nil || res.Sequence != seq || res.Flags != protocol.ResultFlagDeduplicated {
		t.Errorf("the last one again, after a restart: %+v, %v", res, err)
	}
}

func TestLend_ASlowDiskKeepsNoEventLoop(t *testing.T) {
	o, executed, delay := lendingOptions(t.TempDir())
	e := mustOpen(t, o)
	defer mustClose(t, e)
	p := newPeer(t, e)
	topic := p.declare("orders", 1).TopicID
	delay.Store(int64(2 * worstWrite))
	seq := uint64(0)
	s := e.shards[0]
	eventually(t, "slow writes stop the lending", func() bool {
		seq++
		p.publishOne(topic, 1, seq)
		s.driving.Lock()
		defer s.driving.Unlock()
		return s.lent.restUntil > 0
	})
	if n := executed.Load(); n > 8 {
		t.Errorf("%d slow writes were made on lent threads", n)
	}
	delay.Store(0)
	n := executed.Load()
	eventually(t, "it goes on when the disk is quick again", func() bool {
		seq++
		p.publishOne(topic, 1, seq)
		return executed.Load() > n
	})
}

func TestLend_OneSlowWriteIsForgiven(t *testing.T) {
	var d lentDisk
	for range 10 {
		d.account(0, 100*time.Microsecond)
	}
	d.account(0, time.Minute)
	if d.restUntil != 0 {
		t.Error("the lending rests after one slow write")
	}
	for range 3 {
		d.account(time.Second, 2*time.Millisecond)
	}
	if d.restUntil == 0 {
		t.Error("it does not after several")
	}
}

// Loops that lend their threads, the shard, the coordinator and requests of all sizes meet; each gets its answer.
func TestLend_NoRequestIsForgotten(t *testing.T) {
	o, executed, _ := lendingOptions(t.TempDir())
	o.Shards = 2
	e := mustOpen(t, o)
	defer mustClose(t, e)
	topic := newPeer(t, e).declare("orders", 4).TopicID
	var wg sync.WaitGroup
	for id := range uint64(6) {
		wg.Go(func() {
			p := newPeer(t, e)
			for i := range uint64(150) {
				switch i % 10 {
				case 3:
					p.declare("orders", 4)
				case 7: // a pipeline that is too large to be lent
					var last uint64
					for range lentRequests * 2 {
						last = p.send(protocol.Pub{TopicID: topic, Partition: uint16(id % 4), Value: make([]byte, 2048)})
					}
					flush(p.in)
					if _, err := p.result(last); err != nil {
						t.Errorf("a pipeline: %v", err)
					}
				default:
					req := p.send(protocol.Pub{TopicID: topic, Partition: uint16((id + i) % 4), Value: []byte("value")})
					flush(p.in)
					if _, err := p.result(req); err != nil {
						t.Errorf("publish: %v", err)
					}
				}
			}
		})
	}
	wg.Wait()
	if executed.Load() == 0 {
		t.Log("no thread was lent: the shards were never asleep")
	}
}
