package bench

import (
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/tests/harness/fakebroker"
)

// startFake returns the address of a fake broker with the topic of the benchmarks.
func startFake(t *testing.T, partitions int) (b *fakebroker.Broker, addr string, topic uint16) {
	t.Helper()
	b = fakebroker.New()
	addr, err := b.Start()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Crash)
	if topic, err = declare(addr, partitions); err != nil {
		t.Fatal(err)
	}
	return b, addr, topic
}

func newTestPublisher(t *testing.T, o PublisherOptions) *Publisher {
	t.Helper()
	p, err := NewPublisher(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func TestPublisher_EveryMessageIsAcknowledgedOnce(t *testing.T) {
	for _, tt := range []struct {
		name                       string
		partitions, window, refuse int
		value                      int
	}{
		{"one outstanding", 1, 1, 0, 100},
		{"pipelined", 1, 256, 0, 100},
		{"pipelined over many partitions", 37, 256, 0, 100},
		{"window of values larger than a write batch", 2, 64, 0, 16 << 10},
		{"refused now and then", 3, 64, 50, 100},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b, addr, topic := startFake(t, tt.partitions)
			b.SetFaults(fakebroker.Faults{RefuseEvery: tt.refuse})
			parts := make([]uint16, tt.partitions)
			for i := range parts {
				parts[i] = uint16(i)
			}
			p := newTestPublisher(t, PublisherOptions{Addr: addr, TopicID: topic, Partitions: parts, ProducerID: 7, ValueBytes: tt.value, Window: tt.window})
			for range 2 { // runs continue one another
				if err := p.Run(500, nil); err != nil {
					t.Fatal(err)
				}
			}
			if got := p.Completed(); got != 1000 {
				t.Errorf("%d messages acknowledged, want 1000", got)
			}
			if got := p.Latency().TotalCount(); got != 1000 {
				t.Errorf("%d latencies recorded, want 1000", got)
			}
			if (p.Retries() > 0) != (tt.refuse > 0) {
				t.Errorf("%d publishes sent again, refusals every %d", p.Retries(), tt.refuse)
			}
			stored := 0
			for i := range parts {
				log := b.Stored(topic, uint16(i))
				stored += len(log)
				for j, m := range log {
					if m.ProducerSeq != uint64(j)+1 {
						t.Fatalf("partition %d holds producer_seq %d at sequence %d", i, m.ProducerSeq, j+1)
					}
				}
			}
			if stored != 1000 {
				t.Errorf("%d messages stored, want 1000", stored)
			}
		})
	}
}

func TestPublisher_RefusesOptionsOutOfBounds(t *testing.T) {
	for _, o := range []PublisherOptions{
		{Partitions: []uint16{0}, ProducerID: 1, ValueBytes: 100, Window: maxWindow + 1},
		{ProducerID: 1, ValueBytes: 100, Window: 1},
		{Partitions: []uint16{0}, ValueBytes: 100, Window: 1},
		{Partitions: []uint16{0}, ProducerID: 1, ValueBytes: stampBytes - 1, Window: 1},
	} {
		if _, err := NewPublisher(o); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
}

func TestPublisher_ReportsABrokerThatGoesAway(t *testing.T) {
	b, addr, topic := startFake(t, 1)
	p := newTestPublisher(t, PublisherOptions{Addr: addr, TopicID: topic, Partitions: []uint16{0}, ProducerID: 1, ValueBytes: 100, Window: 8})
	calls := 0
	err := p.Run(0, func() bool {
		if calls++; calls == 100 {
			b.Crash()
		}
		return true
	})
	if err == nil {
		t.Fatal("no error after the broker was gone")
	}
}

func TestConsumer_ReceivesAndAcknowledgesEverything(t *testing.T) {
	for _, tt := range []struct {
		name   string
		credit uint16
		ack    AckMode
	}{
		{"an ACK per message, small window", 10, AckEach},
		{"an ACK per message", 1024, AckEach},
		{"cumulative", 1024, AckBatch},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b, addr, topic := startFake(t, 3)
			p := newTestPublisher(t, PublisherOptions{Addr: addr, TopicID: topic, Partitions: []uint16{0, 1, 2}, ProducerID: 1, ValueBytes: 200, Window: 64})
			total := NewTally(3000, 0)
			c, err := NewConsumer(ConsumerOptions{Addr: addr, TopicID: topic, Partitions: 3, Group: "g", CreditCount: tt.credit, CreditBytes: 1 << 20,
				Ack: tt.ack, Stamped: true, Total: total})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			team, ctx := newTeam(t.Context())
			team.start(func() error { return c.Run(ctx) })
			team.start(func() error { return p.Run(3000, nil) })
			if err := team.wait(); err != nil {
				t.Fatal(err)
			}
			if n, bytes := total.received.Load(), total.bytes.Load(); n != 3000 || bytes != 3000*200 {
				t.Errorf("received %d messages, %d bytes, want 3000 and %d", n, bytes, 3000*200)
			}
			if c.Assigned() != 3 {
				t.Errorf("the member counts %d partitions, want 3", c.Assigned())
			}
			if got := c.delivered.TotalCount(); got != 3000 {
				t.Errorf("%d delivery latencies, want 3000", got)
			}
			for part := range uint16(3) {
				if left := b.Unacknowledged("g", part); left != 0 {
					t.Errorf("partition %d: %d messages left unacknowledged", part, left)
				}
			}
		})
	}
}

func TestRatedPublisher_LatencyCountsFromWhenAMessageWasDue(t *testing.T) {
	b, addr, topic := startFake(t, 1)
	p := newTestPublisher(t, PublisherOptions{Addr: addr, TopicID: topic, Partitions: []uint16{0}, ProducerID: 1, ValueBytes: 100, Window: maxWindow})
	// The broker stands still for 100 ms in the middle: about 200 messages become due meanwhile.
	timer := time.AfterFunc(100*time.Millisecond, func() { b.Pause(100 * time.Millisecond) })
	defer timer.Stop()
	if err := p.RunRated(t.Context(), 2000, 100, 1500); err != nil {
		t.Fatal(err)
	}
	h := p.Latency()
	if got := h.TotalCount(); got != 1500 {
		t.Fatalf("%d latencies recorded, want those of 1500 messages", got)
	}
	late := int64(0)
	for _, bar := range h.Distribution() {
		if bar.From >= int64(10*time.Millisecond) {
			late += bar.Count
		}
	}
	if late < 100 {
		t.Errorf("%d messages were at least 10 ms late: the stall was omitted", late)
	}
}

func TestRatedPublisher_ARefusalIsAnError(t *testing.T) {
	b, addr, topic := startFake(t, 1)
	b.SetFaults(fakebroker.Faults{RefuseEvery: 20})
	p := newTestPublisher(t, PublisherOptions{Addr: addr, TopicID: topic, Partitions: []uint16{0}, ProducerID: 1, ValueBytes: 100, Window: 8})
	if err := p.RunRated(t.Context(), 5000, 0, 1000); err == nil || !strings.Contains(err.Error(), "BACKPRESSURE") {
		t.Errorf("got %v, want the refusal", err)
	}
}
