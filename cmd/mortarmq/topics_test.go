package main

import (
	"bufio"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/mortarmq/mortarmq/protocol"
)

// topicBroker is a broker that knows CONNECT and DECLARE.
type topicBroker struct {
	addr  string
	token string

	mu     sync.Mutex
	topics map[string]protocol.DeclareResult
	last   uint16
	// settings is what the last DECLARE carried.
	settings string
}

func startTopicBroker(t *testing.T, token string) *topicBroker {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := &topicBroker{addr: ln.Addr().String(), token: token, topics: map[string]protocol.DeclareResult{}}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { b.serve(nc) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		wg.Wait()
	})
	return b
}

func (b *topicBroker) serve(nc net.Conn) {
	defer nc.Close()
	r := bufio.NewReader(nc)
	for {
		head, err := r.Peek(protocol.LengthSize)
		if err != nil {
			return
		}
		total, _, err := protocol.FrameLen(head)
		if err != nil {
			return
		}
		frame := make([]byte, total)
		if _, err := io.ReadFull(r, frame); err != nil {
			return
		}
		op, payload, _, err := protocol.ParseFrame(frame)
		if err != nil {
			return
		}
		answer, err := b.answer(op, payload)
		if code, refused := protocol.CodeOf(err); refused {
			answer = protocol.AppendErr(nil, code, op, "")
		}
		if _, err := nc.Write(answer); err != nil {
			return
		}
	}
}

func (b *topicBroker) answer(op protocol.Op, payload []byte) ([]byte, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch op {
	case protocol.OpConnect:
		var c protocol.Connect
		if err := c.Decode(payload); err != nil {
			return nil, err
		}
		if string(c.Token) != b.token {
			return nil, protocol.CodeAuthFailed
		}
		return protocol.AppendOKEmpty(nil, op), nil
	case protocol.OpDeclare:
		return b.declare(payload)
	default:
		return protocol.AppendOKEmpty(nil, op), nil
	}
}

func (b *topicBroker) declare(payload []byte) ([]byte, error) {
	var d protocol.Declare
	if err := d.Decode(payload); err != nil {
		return nil, err
	}
	b.settings = string(d.Settings)
	t, exists := b.topics[string(d.Topic)]
	switch {
	case d.Flags&protocol.DeclareFlagDelete != 0:
		delete(b.topics, string(d.Topic))
		return t.AppendOK(nil), nil
	case exists && d.Partitions != 0 && d.Partitions != t.Partitions:
		return nil, protocol.CodeTopicExistsMismatch
	case exists:
		t.Existed = true
		return t.AppendOK(nil), nil
	case d.Flags&protocol.DeclareFlagLookup != 0:
		return nil, protocol.CodeUnknownTopic
	}
	b.last++
	t = protocol.DeclareResult{TopicID: b.last, Partitions: d.Partitions}
	if t.Partitions == 0 {
		t.Partitions = 4
	}
	b.topics[string(d.Topic)] = t
	return t.AppendOK(nil), nil
}

func TestTopics_CreateAndDelete(t *testing.T) {
	b := startTopicBroker(t, "")
	t.Setenv(envServer, b.addr)
	mortarmq(t, "", "topics", "create", "other").want(t, exitDone, "created\t1\n")
	mortarmq(t, "", "topics", "create", "orders", "--partitions", "8").want(t, exitDone, "created\t2\n")
	mortarmq(t, "", "topics", "create", "orders", "--partitions", "8").want(t, exitDone, "existed\t2\n")
	mortarmq(t, "", "topics", "create", "orders").want(t, exitDone, "existed\t2\n")

	r := mortarmq(t, "", "topics", "create", "orders", "--partitions", "3")
	r.want(t, exitRefused, "mismatch\t2\n")
	if !strings.Contains(r.stderr, "8 partitions") {
		t.Errorf("the error does not tell the real count: %s", r.stderr)
	}
	mortarmq(t, "", "topics", "create", "orders", "--json").want(t, exitDone, `{"result":"existed","topic_id":2}`+"\n")
	mortarmq(t, "", "topics", "delete", "orders").want(t, exitDone, "deleted\n")
	mortarmq(t, "", "topics", "delete", "orders").want(t, exitDone, "not_found\n")
	mortarmq(t, "", "topics", "delete", "orders", "--json").want(t, exitDone, `{"result":"not_found"}`+"\n")
}

func TestTopics_CreateSendsTheDurability(t *testing.T) {
	b := startTopicBroker(t, "")
	mortarmq(t, "", "topics", "create", "quick", "--durability", "memory", "--server", b.addr).want(t, exitDone, "created\t1\n")
	if b.settings != `{"durability":"memory"}` {
		t.Errorf("the settings were %q", b.settings)
	}
}

func TestTopics_InvalidNameIsRefused(t *testing.T) {
	b := startTopicBroker(t, "")
	for _, command := range []string{"create", "delete"} {
		r := mortarmq(t, "", "topics", command, "a..b", "--server", b.addr)
		r.want(t, exitRefused, "")
		if !strings.Contains(r.stderr, "INVALID_TOPIC") {
			t.Errorf("%s: %s", command, r.stderr)
		}
	}
}

func TestToken_ComesFromFlagFileOrEnvironment(t *testing.T) {
	b := startTopicBroker(t, "secret")
	t.Setenv(envServer, b.addr)
	file := writeFile(t, "token", "secret\n")
	wrong := mortarmq(t, "", "topics", "create", "t")
	wrong.want(t, exitRefused, "")
	if !strings.Contains(wrong.stderr, "AUTH_FAILED") {
		t.Errorf("the error is %s", wrong.stderr)
	}
	mortarmq(t, "", "topics", "create", "t", "--token", "secret").want(t, exitDone, "created\t1\n")
	mortarmq(t, "", "topics", "create", "t", "--token-file", file).want(t, exitDone, "existed\t1\n")
	t.Setenv(envToken, "secret")
	mortarmq(t, "", "topics", "create", "t").want(t, exitDone, "existed\t1\n")
	mortarmq(t, "", "topics", "create", "t", "--token", "wrong").want(t, exitRefused, "")
}
