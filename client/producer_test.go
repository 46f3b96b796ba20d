package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

func testContext(tb testing.TB) context.Context {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	tb.Cleanup(cancel)
	return ctx
}

func dialFake(tb testing.TB, b *fakeBroker, opts ...Option) *Client {
	tb.Helper()
	opts = append([]Option{WithBackoff(time.Millisecond, 5*time.Millisecond)}, opts...)
	c, err := Dial(testContext(tb), b.addr(), opts...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = c.Close() })
	return c
}

func newTestProducer(tb testing.TB, b *fakeBroker, topic string, opts ProducerOptions) *Producer {
	tb.Helper()
	p, err := dialFake(tb, b).NewProducer(testContext(tb), topic, opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = p.Close(testContext(tb)) })
	return p
}

// numbers returns "0".."n-1".
func numbers(n int) []string {
	values := make([]string, n)
	for i := range values {
		values[i] = strconv.Itoa(i)
	}
	return values
}

// sendAll publishes values with one key and returns the results, in order.
func sendAll(tb testing.TB, p *Producer, values []string) ([]Result, []error) {
	tb.Helper()
	ctx := testContext(tb)
	futures := make([]*Future, len(values))
	for i, v := range values {
		futures[i] = p.SendAsync(ctx, Record{Key: []byte("k"), Value: []byte(v), Tag: uint64(i)})
	}
	results, errs := make([]Result, len(values)), make([]error, len(values))
	for i, f := range futures {
		results[i], errs[i] = f.Wait(ctx)
		if errors.Is(errs[i], context.DeadlineExceeded) {
			tb.Fatalf("message %d was never answered", i)
		}
	}
	return results, errs
}

func requireNoErrors(tb testing.TB, errs []error) {
	tb.Helper()
	if err := errors.Join(errs...); err != nil {
		tb.Fatal(err)
	}
}

func requireStored(tb testing.TB, b *fakeBroker, t *fakeTopic, partition int, want []string) {
	tb.Helper()
	if got := b.stored(t, partition); !slices.Equal(got, want) {
		tb.Fatalf("stored %d messages %.60v, want %d %.60v", len(got), got, len(want), want)
	}
}

func TestProducer_SendReturnsWhereTheMessageIs(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 12)
	p := newTestProducer(t, b, "orders", ProducerOptions{Durability: protocol.DurabilityLocal})
	key := []byte("order-1")
	for i := range 3 {
		r, err := p.Send(testContext(t), Record{Key: key, Value: []byte("v"), Tag: 42})
		if err != nil {
			t.Fatal(err)
		}
		if want := protocol.Route(key, 12); r.Partition != want || r.Sequence != uint64(i+1) || r.Tag != 42 || r.Deduplicated {
			t.Fatalf("result %+v, want partition %d, sequence %d", r, want, i+1)
		}
	}
	b.inspect(func() {
		for i, m := range topic.partitions[protocol.Route(key, 12)].log {
			if m.ProducerID == 0 || m.ProducerSeq != uint64(i+1) || m.Durability() != protocol.DurabilityLocal {
				t.Errorf("message %d was published as %+v", i, m)
			}
		}
	})
}

func TestProducer_SpreadsMessagesWithoutKey(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 3)
	p := newTestProducer(t, b, "orders", ProducerOptions{Plain: true})
	first := -1 // where a producer begins is left to chance
	for _, v := range numbers(6) {
		r, err := p.Send(testContext(t), Record{Value: []byte(v)})
		if err != nil {
			t.Fatal(err)
		}
		if first < 0 {
			first = int(r.Partition)
		}
	}
	requireStored(t, b, topic, first, []string{"0", "3"})
	requireStored(t, b, topic, (first+1)%3, []string{"1", "4"})
	requireStored(t, b, topic, (first+2)%3, []string{"2", "5"})
	b.inspect(func() {
		if m := topic.partitions[0].log[0]; m.ProducerID != 0 || m.ProducerSeq != 0 {
			t.Errorf("a plain publish carries a producer: %+v", m)
		}
	})
}

func TestProducer_PipelinesInOrder(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 1)
	p := newTestProducer(t, b, "orders", ProducerOptions{})
	values := numbers(5000)
	results, errs := sendAll(t, p, values)
	requireNoErrors(t, errs)
	requireStored(t, b, topic, 0, values)
	for i, r := range results {
		if r.Sequence != uint64(i+1) || r.Tag != uint64(i) {
			t.Fatalf("result %d is %+v", i, r)
		}
	}
}

func TestProducer_RefusesWhatIsTooLargeBeforeSending(t *testing.T) {
	b := newFakeBroker(t)
	b.addTopic("orders", 1)
	p := newTestProducer(t, b, "orders", ProducerOptions{})
	ctx := testContext(t)
	if _, err := p.Send(ctx, Record{Value: make([]byte, protocol.MaxValueLen+1)}); !errors.Is(err, ErrValueTooLarge) {
		t.Errorf("value: %v", err)
	}
	if _, err := p.SendAsync(ctx, Record{Key: make([]byte, protocol.MaxKeyLen+1)}).Wait(ctx); !errors.Is(err, ErrKeyTooLarge) {
		t.Errorf("key: %v", err)
	}
	large := bytes.Repeat([]byte{7}, 3<<20)
	if r, err := p.Send(ctx, Record{Value: large}); err != nil || r.Sequence != 1 {
		t.Errorf("3 MiB: %+v, %v", r, err)
	}
	b.inspect(func() {
		if n := b.seen[protocol.OpPub]; n != 1 {
			t.Errorf("%d PUBs were sent", n)
		}
	})
}

func TestProducer_ReconnectsAndSendsTheUnansweredAgainWithoutDuplicates(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 1)
	p := newTestProducer(t, b, "orders", ProducerOptions{})
	// Every 1100th PUB is stored, but its answer and the connection are lost. (With a period below the 1024 that are
	// unanswered at once, the answers before it could be lost each time, too: the reset overtakes them.)
	pubs := 0
	b.hook(func(c *fakeConn, op protocol.Op, payload []byte) ([]byte, bool, bool) {
		if op != protocol.OpPub {
			return nil, false, false
		}
		if pubs++; pubs%1100 != 0 {
			return nil, false, false
		}
		var m protocol.Pub
		if err := m.Decode(payload); err != nil {
			t.Error(err)
		}
		answered := len(c.out)
		c.pub(&m)
		c.out = c.out[:answered]
		return nil, true, true
	})
	values := numbers(3000)
	results, errs := sendAll(t, p, values)
	requireNoErrors(t, errs)
	requireStored(t, b, topic, 0, values)
	deduplicated := 0
	for i, r := range results {
		if r.Sequence != uint64(i+1) {
			t.Fatalf("result %d is %+v", i, r)
		}
		if r.Deduplicated {
			deduplicated++
		}
	}
	if deduplicated == 0 {
		t.Error("no message was recognised as sent before")
	}
}

func TestProducer_SurvivesCutsAtRandomTimes(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 4)
	p := newTestProducer(t, b, "orders", ProducerOptions{})
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(3 * time.Millisecond):
				b.dropConnections()
			}
		}
	}()
	const senders, each = 4, 2000
	var wg sync.WaitGroup
	for s := range senders {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range each {
				err := p.SendFunc(context.Background(), Record{Key: fmt.Appendf(nil, "sender-%d", s), Value: fmt.Appendf(nil, "%d-%d", s, i)},
					func(r Result, err error) {
						if err != nil {
							t.Error(err)
						}
					})
				if err != nil {
					t.Error(err)
					return
				}
			}
		}()
	}
	wg.Wait()
	close(stop)
	<-stopped
	if err := p.Flush(testContext(t)); err != nil {
		t.Fatal(err)
	}
	next := map[string]int{}
	for i := range 4 {
		for _, v := range b.stored(topic, i) {
			var s, n int
			if _, err := fmt.Sscanf(v, "%d-%d", &s, &n); err != nil {
				t.Fatal(err)
			}
			sender := strconv.Itoa(s)
			if n != next[sender] {
				t.Fatalf("sender %d: message %d follows %d", s, n, next[sender]-1)
			}
			next[sender]++
		}
	}
	for s, n := range next {
		if n != each {
			t.Errorf("sender %s: %d messages stored, want %d", s, n, each)
		}
	}
}

func TestProducer_RetriesInOrderWhatTheBrokerAsksToRetry(t *testing.T) {
	for _, code := range []protocol.ErrorCode{protocol.CodeBackpressure, protocol.CodeStorageHighWatermark, protocol.CodeReadOnlyDegraded} {
		t.Run(code.Name(), func(t *testing.T) {
			b := newFakeBroker(t)
			topic := b.addTopic("orders", 1)
			p := newTestProducer(t, b, "orders", ProducerOptions{MaxInFlight: 200}) // what each refusal has sent again
			pubs := 0
			b.hook(func(c *fakeConn, op protocol.Op, payload []byte) ([]byte, bool, bool) {
				if op != protocol.OpPub {
					return nil, false, false
				}
				if pubs++; pubs%97 != 0 {
					return nil, false, false
				}
				var m protocol.Pub
				if err := m.Decode(payload); err != nil {
					t.Error(err)
				}
				if _, refused := c.failed[[2]uint64{0, m.ProducerID}]; refused {
					return nil, false, false
				}
				return c.refuse(&m, code), true, false
			})
			values := numbers(1500)
			results, errs := sendAll(t, p, values)
			requireNoErrors(t, errs)
			requireStored(t, b, topic, 0, values)
			for i, r := range results {
				if r.Sequence != uint64(i+1) {
					t.Fatalf("result %d is %+v", i, r)
				}
			}
		})
	}
}

func TestProducer_RegistersAnewWhenTheBrokerForgotIt(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 1)
	p := newTestProducer(t, b, "orders", ProducerOptions{})
	_, errs := sendAll(t, p, numbers(10))
	requireNoErrors(t, errs)
	b.inspect(func() { // the windows are gone
		topic.partitions[0].windows = map[uint64]map[uint64]uint64{}
		topic.partitions[0].last = map[uint64]uint64{}
	})
	_, errs = sendAll(t, p, []string{"10", "11", "12"})
	requireNoErrors(t, errs)
	requireStored(t, b, topic, 0, numbers(13))
	b.inspect(func() {
		log := topic.partitions[0].log
		if log[9].ProducerID == log[10].ProducerID || log[10].ProducerSeq != 1 || log[12].ProducerSeq != 3 {
			t.Errorf("after the loss: %+v", log[10])
		}
	})
}

func TestProducer_GivesUpOnABrokerThatSeesGapsBeforeTheFirst(t *testing.T) {
	b := newFakeBroker(t)
	b.addTopic("orders", 1)
	p := newTestProducer(t, b, "orders", ProducerOptions{})
	b.hook(func(c *fakeConn, op protocol.Op, payload []byte) ([]byte, bool, bool) {
		return protocol.AppendErr(nil, protocol.CodeSeqGap, op, ""), op == protocol.OpPub, false
	})
	if _, err := p.Send(testContext(t), Record{Value: []byte("v")}); !errors.Is(err, protocol.CodeSeqGap) {
		t.Errorf("%v", err)
	}
}

func TestProducer_AFailedMessageDoesNotTakeTheOthersAlong(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 1)
	p := newTestProducer(t, b, "orders", ProducerOptions{})
	b.hook(func(c *fakeConn, op protocol.Op, payload []byte) ([]byte, bool, bool) {
		var m protocol.Pub
		if op != protocol.OpPub || m.Decode(payload) != nil || string(m.Value) != "3" {
			return nil, false, false
		}
		return c.refuse(&m, protocol.CodeInternal), true, false
	})
	_, errs := sendAll(t, p, numbers(8))
	for i, err := range errs {
		if (i == 3) != errors.Is(err, protocol.CodeInternal) || (i != 3 && err != nil) {
			t.Errorf("message %d: %v", i, err)
		}
	}
	requireStored(t, b, topic, 0, []string{"0", "1", "2", "4", "5", "6", "7"})
}

func TestProducer_FollowsTheLeader(t *testing.T) {
	leader, follower := newFakeBroker(t), newFakeBroker(t)
	topic := leader.addTopic("orders", 1)
	follower.hook(func(c *fakeConn, op protocol.Op, payload []byte) ([]byte, bool, bool) {
		if op == protocol.OpConnect {
			return nil, false, false
		}
		return protocol.AppendErr(nil, protocol.CodeStaleLeaderEpoch, op, "leader=2 "+leader.addr()), true, false
	})
	p := newTestProducer(t, follower, "orders", ProducerOptions{})
	values := numbers(100)
	_, errs := sendAll(t, p, values)
	requireNoErrors(t, errs)
	requireStored(t, leader, topic, 0, values)
}

func TestProducer_MovesToTheNewLeaderInTheMiddle(t *testing.T) {
	first, second := newFakeBroker(t), newFakeBroker(t)
	topic := first.addTopic("orders", 1)
	second.inspect(func() { second.topics["orders"] = topic })
	p := newTestProducer(t, first, "orders", ProducerOptions{})
	pubs := 0
	first.hook(func(c *fakeConn, op protocol.Op, payload []byte) ([]byte, bool, bool) {
		if op != protocol.OpPub {
			return nil, false, false
		}
		if pubs++; pubs <= 500 {
			return nil, false, false
		}
		return protocol.AppendErr(nil, protocol.CodeStaleLeaderEpoch, op, "leader=2 "+second.addr()), true, false
	})
	values := numbers(2000)
	_, errs := sendAll(t, p, values)
	requireNoErrors(t, errs)
	requireStored(t, second, topic, 0, values)
}

func TestProducer_BlocksAtItsLimitsAndObeysTheContext(t *testing.T) {
	for name, opts := range map[string]ProducerOptions{
		"messages": {MaxInFlight: 10},
		"bytes":    {MaxBufferedBytes: 10 * protocol.PubFrameLen(1, 1)},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFakeBroker(t)
			topic := b.addTopic("orders", 1)
			p := newTestProducer(t, b, "orders", opts)
			release := make(chan struct{})
			b.hook(func(c *fakeConn, op protocol.Op, payload []byte) ([]byte, bool, bool) {
				if op == protocol.OpPub {
					c.b.mu.Unlock()
					<-release
					c.b.mu.Lock()
				}
				return nil, false, false
			})
			var futures []*Future
			for _, v := range numbers(10) {
				futures = append(futures, p.SendAsync(testContext(t), Record{Key: []byte("k"), Value: []byte(v)}))
			}
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
			defer cancel()
			if _, err := p.SendAsync(ctx, Record{Key: []byte("k"), Value: []byte("x")}).Wait(testContext(t)); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("the 11th: %v", err)
			}
			close(release)
			for _, f := range futures {
				if _, err := f.Wait(testContext(t)); err != nil {
					t.Error(err)
				}
			}
			if _, err := p.Send(testContext(t), Record{Key: []byte("k"), Value: []byte("y")}); err != nil {
				t.Error(err)
			}
			requireStored(t, b, topic, 0, append(numbers(10), "y"))
		})
	}
}

func TestProducer_GivesUpAfterTheDeliveryTimeout(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 1)
	p := newTestProducer(t, b, "orders", ProducerOptions{DeliveryTimeout: 30 * time.Millisecond})
	b.hook(func(c *fakeConn, op protocol.Op, payload []byte) ([]byte, bool, bool) {
		var m protocol.Pub
		if op != protocol.OpPub || m.Decode(payload) != nil {
			return nil, false, false
		}
		return c.refuse(&m, protocol.CodeReadOnlyDegraded), true, false
	})
	if _, err := p.Send(testContext(t), Record{Value: []byte("a")}); !errors.Is(err, ErrDeliveryTimeout) || !errors.Is(err, ErrReadOnly) {
		t.Errorf("refused for too long: %v", err)
	}
	b.hook(func(c *fakeConn, op protocol.Op, payload []byte) ([]byte, bool, bool) { return nil, true, true })
	b.dropConnections()
	if _, err := p.Send(testContext(t), Record{Value: []byte("b")}); !errors.Is(err, ErrDeliveryTimeout) {
		t.Errorf("disconnected for too long: %v", err)
	}
	b.hook(nil)
	if _, err := p.Send(testContext(t), Record{Value: []byte("c")}); err != nil {
		t.Error(err)
	}
	requireStored(t, b, topic, 0, []string{"c"})
}

func TestProducer_CloseWaitsForAnswersAndRefusesMore(t *testing.T) {
	b := newFakeBroker(t)
	topic := b.addTopic("orders", 1)
	p := newTestProducer(t, b, "orders", ProducerOptions{})
	var futures []*Future
	for _, v := range numbers(500) {
		futures = append(futures, p.SendAsync(testContext(t), Record{Value: []byte(v)}))
	}
	if err := p.Close(testContext(t)); err != nil {
		t.Fatal(err)
	}
	for _, f := range futures {
		select {
		case <-f.Done():
		default:
			t.Fatal("Close returned before everything was answered")
		}
	}
	requireStored(t, b, topic, 0, numbers(500))
	if _, err := p.Send(testContext(t), Record{}); !errors.Is(err, ErrClosed) {
		t.Errorf("Send after Close: %v", err)
	}
}

func TestProducer_CloseOfTheClientFailsTheUnanswered(t *testing.T) {
	b := newFakeBroker(t)
	b.addTopic("orders", 1)
	c := dialFake(t, b)
	p, err := c.NewProducer(testContext(t), "orders", ProducerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	b.hook(func(_ *fakeConn, op protocol.Op, _ []byte) ([]byte, bool, bool) {
		return nil, op == protocol.OpPub, false
	})
	f := p.SendAsync(testContext(t), Record{Value: []byte("v")})
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Wait(testContext(t)); !errors.Is(err, ErrClosed) {
		t.Errorf("%v", err)
	}
	if _, err := c.NewProducer(testContext(t), "orders", ProducerOptions{}); !errors.Is(err, ErrClosed) {
		t.Errorf("NewProducer after Close: %v", err)
	}
}

func TestProducer_KeepsAnIdleConnectionAlive(t *testing.T) {
	b := newFakeBroker(t)
	b.addTopic("orders", 1)
	c := dialFake(t, b, WithKeepalive(5*time.Millisecond))
	p, err := c.NewProducer(testContext(t), "orders", ProducerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for ctx := testContext(t); ctx.Err() == nil; time.Sleep(time.Millisecond) {
		pings := 0
		b.inspect(func() { pings = b.seen[protocol.OpPing] })
		if pings >= 3 {
			break
		}
	}
	if r, err := p.Send(testContext(t), Record{Value: []byte("v")}); err != nil || r.Sequence != 1 {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestProducer_SteadyStateDoesNotAllocatePerMessage(t *testing.T) {
	b := newFakeBroker(t)
	b.addTopic("orders", 1)
	p := newTestProducer(t, b, "orders", ProducerOptions{})
	// Answers are withheld, so that only the sending side is measured.
	b.hook(func(_ *fakeConn, op protocol.Op, _ []byte) ([]byte, bool, bool) {
		return nil, op == protocol.OpPub, false
	})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	m := Record{Key: []byte("k"), Value: make([]byte, 10)}
	done := func(Result, error) {}
	for range 500 { // the queues have grown
		if err := p.SendFunc(ctx, m, done); err != nil {
			t.Fatal(err)
		}
	}
	if n := testing.AllocsPerRun(400, func() { _ = p.SendFunc(ctx, m, done) }); n > 0.5 {
		t.Errorf("SendFunc allocates %v times per message", n)
	}
	b.hook(nil)
	b.dropConnections()
	if err := p.Flush(testContext(t)); err != nil {
		t.Error(err)
	}
}
