package client

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

func TestClient_DeclareLookupDelete(t *testing.T) {
	b := newFakeBroker(t)
	c := dialFake(t, b)
	ctx := testContext(t)
	if _, err := c.Lookup(ctx, "orders"); !errors.Is(err, ErrUnknownTopic) {
		t.Errorf("Lookup before Declare: %v", err)
	}
	created, err := c.Declare(ctx, "orders", DeclareOptions{Partitions: 12})
	if err != nil || !created.Created || created.Partitions != 12 || created.Name != "orders" || created.ID == 0 {
		t.Errorf("Declare: %+v, %v", created, err)
	}
	again, err := c.Declare(ctx, "orders", DeclareOptions{Partitions: 12, Settings: []byte(`{}`)})
	if err != nil || again.Created || again.ID != created.ID {
		t.Errorf("Declare again: %+v, %v", again, err)
	}
	if _, err := c.Declare(ctx, "orders", DeclareOptions{Partitions: 3}); !errors.Is(err, ErrTopicExistsMismatch) {
		t.Errorf("Declare with another count: %v", err)
	}
	if found, err := c.Lookup(ctx, "orders"); err != nil || found.Partitions != 12 {
		t.Errorf("Lookup: %+v, %v", found, err)
	}
	if err := c.DeleteTopic(ctx, "orders"); err != nil {
		t.Errorf("DeleteTopic: %v", err)
	}
	if _, err := c.NewProducer(ctx, "orders", ProducerOptions{}); !errors.Is(err, ErrUnknownTopic) {
		t.Errorf("NewProducer after the deletion: %v", err)
	}
}

func TestClient_RefusesBadNamesWithoutAskingTheBroker(t *testing.T) {
	b := newFakeBroker(t)
	c := dialFake(t, b)
	ctx := testContext(t)
	for _, name := range []string{"", "a..b", "$sys", "a b", "*"} {
		if _, err := c.Declare(ctx, name, DeclareOptions{}); !errors.Is(err, ErrInvalidTopic) {
			t.Errorf("%q: %v", name, err)
		}
	}
	b.inspect(func() {
		if b.seen[protocol.OpDeclare] != 0 {
			t.Error("the broker was asked")
		}
	})
}

func TestDial_ReportsAWrongToken(t *testing.T) {
	b := newFakeBroker(t)
	b.token = "secret"
	if _, err := Dial(testContext(t), b.addr(), WithToken("wrong")); !errors.Is(err, ErrAuthFailed) {
		t.Errorf("%v", err)
	}
	c, err := Dial(testContext(t), b.addr(), WithToken("secret"))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

func TestDial_TriesEveryAddress(t *testing.T) {
	b := newFakeBroker(t)
	b.addTopic("orders", 1)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dead := ln.Addr().String()
	_ = ln.Close()
	if _, err := Dial(testContext(t), dead); err == nil || !strings.Contains(err.Error(), dead) {
		t.Errorf("a dead address: %v", err)
	}
	c, err := Dial(testContext(t), dead+", "+b.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if _, err := c.Lookup(testContext(t), "orders"); err != nil {
		t.Error(err)
	}
}

func TestDial_ChecksItsOptions(t *testing.T) {
	ctx := testContext(t)
	for _, opt := range []Option{WithKeepalive(time.Minute), WithDialTimeout(0), WithBackoff(2, 1), WithToken(strings.Repeat("x", 70000))} {
		if _, err := Dial(ctx, "127.0.0.1:1", opt); err == nil || !strings.HasPrefix(err.Error(), "client: ") {
			t.Errorf("%v", err)
		}
	}
	if _, err := Dial(ctx, " , "); err == nil {
		t.Error("no address was accepted")
	}
}

func TestDial_GivesUpOnASilentBroker(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	if _, err := Dial(testContext(t), ln.Addr().String(), WithDialTimeout(20*time.Millisecond)); err == nil {
		t.Error("connected to a broker that does not answer")
	}
}

func TestClient_DeclareSurvivesALostConnection(t *testing.T) {
	b := newFakeBroker(t)
	c := dialFake(t, b)
	lost := 0
	b.hook(func(_ *fakeConn, op protocol.Op, _ []byte) ([]byte, bool, bool) {
		if op == protocol.OpDeclare && lost < 2 {
			lost++
			return nil, true, true
		}
		return nil, false, false
	})
	if topic, err := c.Declare(testContext(t), "orders", DeclareOptions{Partitions: 2}); err != nil || topic.Partitions != 2 {
		t.Errorf("%+v, %v", topic, err)
	}
}

func TestClient_DeclareWaitsWhileMetadataIsReadOnly(t *testing.T) {
	b := newFakeBroker(t)
	c := dialFake(t, b)
	refused := 0
	b.hook(func(_ *fakeConn, op protocol.Op, _ []byte) ([]byte, bool, bool) {
		if op == protocol.OpDeclare && refused < 3 {
			refused++
			return protocol.AppendErr(nil, protocol.CodeMetadataReadOnly, op, ""), true, false
		}
		return nil, false, false
	})
	if _, err := c.Declare(testContext(t), "orders", DeclareOptions{Partitions: 2}); err != nil {
		t.Error(err)
	}
}

func TestClient_DeclareObeysItsContext(t *testing.T) {
	b := newFakeBroker(t)
	c := dialFake(t, b)
	b.hook(func(_ *fakeConn, op protocol.Op, _ []byte) ([]byte, bool, bool) {
		return nil, op == protocol.OpDeclare, false
	})
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if _, err := c.Declare(ctx, "orders", DeclareOptions{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	b.hook(nil)
	if _, err := c.Declare(testContext(t), "orders", DeclareOptions{}); err != nil {
		t.Errorf("the next call: %v", err)
	}
}
