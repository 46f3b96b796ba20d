package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness/fakebroker"
)

// addr is the address of the examples' broker.
var addr = client.StartExampleBroker()

func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	c, err := client.Dial(ctx, addr, client.WithToken("secret"))
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Declare(ctx, "orders", client.DeclareOptions{Partitions: 4}); err != nil {
		log.Fatal(err)
	}

	p, err := c.NewProducer(ctx, "orders", client.ProducerOptions{})
	if err != nil {
		log.Fatal(err)
	}
	for i := range 3 {
		r, err := p.Send(ctx, client.Record{Key: []byte("customer-7"), Value: fmt.Appendf(nil, "order %d", i)})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("stored as", r.Sequence)
	}
	if err := p.Close(ctx); err != nil {
		log.Fatal(err)
	}

	k, err := c.NewConsumer(ctx, "orders", "billing", client.ConsumerOptions{})
	if err != nil {
		log.Fatal(err)
	}
	running, stop := context.WithCancel(ctx)
	err = k.Run(running, func(_ context.Context, m *client.Message) error {
		fmt.Printf("received %s of %s\n", m.Value, m.Key)
		if m.Sequence == 3 {
			stop()
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := k.Close(ctx); err != nil {
		log.Fatal(err)
	}
	// Output:
	// stored as 1
	// stored as 2
	// stored as 3
	// received order 0 of customer-7
	// received order 1 of customer-7
	// received order 2 of customer-7
}

// The nodes of a cluster are named in any order; which of them leads, now and later, the Client finds out.
func ExampleDial() {
	cluster, err := fakebroker.NewCluster(3)
	if err != nil {
		log.Fatal(err)
	}
	defer cluster.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := client.Dial(ctx, cluster.Addr(2)+","+cluster.Addr(1)+","+cluster.Addr(0),
		client.WithToken("secret"), client.WithLogger(slog.Default()))
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	topic, err := c.Declare(ctx, "orders", client.DeclareOptions{Partitions: 12})
	fmt.Println(topic.Partitions, err)
	// Output: 12 <nil>
}

// Handlers work on different keys at the same time. An error has the message delivered again after a pause, ErrReject moves
// it to the dead-letter topic.
func ExampleConsumer_Run() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := client.Dial(ctx, addr)
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Declare(ctx, "payments", client.DeclareOptions{Partitions: 2}); err != nil {
		log.Fatal(err)
	}
	p, err := c.NewProducer(ctx, "payments", client.ProducerOptions{})
	if err != nil {
		log.Fatal(err)
	}
	for i, amount := range []string{"10", "20", "nonsense"} {
		if _, err := p.Send(ctx, client.Record{Key: fmt.Appendf(nil, "account-%d", i), Value: []byte(amount)}); err != nil {
			log.Fatal(err)
		}
	}
	k, err := c.NewConsumer(ctx, "payments", "bank", client.ConsumerOptions{Concurrency: 8, ParallelKeys: true})
	if err != nil {
		log.Fatal(err)
	}
	running, stop := context.WithCancel(ctx)
	var handled atomic.Int32
	err = k.Run(running, func(_ context.Context, m *client.Message) error {
		if handled.Add(1) == 3 {
			stop()
		}
		amount, err := strconv.Atoi(string(m.Value))
		if err != nil {
			return fmt.Errorf("%w: %w", client.ErrReject, err) // it will never be a number
		}
		fmt.Printf("%s gets %d\n", m.Key, amount)
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := k.Close(ctx); err != nil { // sends the last ACKs and leaves the group
		log.Fatal(err)
	}
	// Unordered output:
	// account-0 gets 10
	// account-1 gets 20
}

func ExampleProducer_SendFunc() {
	ctx := context.Background()
	c, err := client.Dial(ctx, addr)
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Declare(ctx, "measurements", client.DeclareOptions{Partitions: 1}); err != nil {
		log.Fatal(err)
	}
	p, err := c.NewProducer(ctx, "measurements", client.ProducerOptions{Durability: protocol.DurabilityLocal})
	if err != nil {
		log.Fatal(err)
	}
	stored := 0 // only touched by done, which is never called twice at once
	done := func(_ client.Result, err error) {
		if err != nil {
			log.Print(err)
			return
		}
		stored++
	}
	for i := range 10000 {
		if err := p.SendFunc(ctx, client.Record{Value: fmt.Appendf(nil, "%d", i)}, done); err != nil {
			log.Fatal(err)
		}
	}
	if err := p.Close(ctx); err != nil { // waits for the answers
		log.Fatal(err)
	}
	fmt.Println(stored, "stored")
	// Output: 10000 stored
}

func ExampleProducer_SendAsync() {
	ctx := context.Background()
	c, err := client.Dial(ctx, addr)
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Declare(ctx, "events", client.DeclareOptions{Partitions: 1}); err != nil {
		log.Fatal(err)
	}
	p, err := c.NewProducer(ctx, "events", client.ProducerOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer p.Close(ctx)
	first := p.SendAsync(ctx, client.Record{Value: []byte("a")})
	second := p.SendAsync(ctx, client.Record{Value: []byte("b")})
	for _, f := range []*client.Future{first, second} {
		r, err := f.Wait(ctx)
		fmt.Println(r.Sequence, err)
	}
	// Output:
	// 1 <nil>
	// 2 <nil>
}

func ExampleConsumer_Messages() {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	c, err := client.Dial(ctx, addr)
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Declare(ctx, "mails", client.DeclareOptions{Partitions: 1}); err != nil {
		log.Fatal(err)
	}
	p, err := c.NewProducer(ctx, "mails", client.ProducerOptions{})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := p.Send(ctx, client.Record{Value: []byte("hello")}); err != nil {
		log.Fatal(err)
	}
	k, err := c.NewConsumer(ctx, "mails", "sender", client.ConsumerOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer k.Close(ctx)
	m := <-k.Messages()
	fmt.Printf("%s\n", m.Value)
	if err := m.AckSync(ctx); err != nil {
		log.Print(err)
	}
	// Output: hello
}

func ExampleClient_Lookup() {
	ctx := context.Background()
	c, err := client.Dial(ctx, addr)
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	_, err = c.Lookup(ctx, "no.such.topic")
	fmt.Println(errors.Is(err, client.ErrUnknownTopic))
	// Output: true
}
