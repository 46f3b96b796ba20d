package client_test

import (
	"strings"
	"testing"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/tests/harness/fakebroker"
)

func TestProducer_RouteChoosesThePartition(t *testing.T) {
	b := fakebroker.New()
	addr, err := b.Start()
	if err != nil {
		t.Fatal(err)
	}
	defer b.Crash()
	c, err := client.Dial(t.Context(), addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Declare(t.Context(), "t", client.DeclareOptions{Partitions: 3}); err != nil {
		t.Fatal(err)
	}
	p, err := c.NewProducer(t.Context(), "t", client.ProducerOptions{Route: func(key []byte, partitions uint16) uint16 {
		if partitions != 3 {
			t.Errorf("Route was told of %d partitions", partitions)
		}
		return uint16(len(key))
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close(t.Context())
	for key := range 3 {
		r, err := p.Send(t.Context(), client.Record{Key: []byte(strings.Repeat("k", key))})
		if err != nil || int(r.Partition) != key {
			t.Errorf("key of %d bytes: partition %d, error %v", key, r.Partition, err)
		}
	}
	if _, err := p.Send(t.Context(), client.Record{Key: []byte("kkk")}); err == nil {
		t.Error("a partition that does not exist is accepted")
	}
}
