package peers

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/mortarmq/mortarmq/bench"
)

// collector is an Inbox that remembers.
type collector struct {
	values []string
	acked  int
}

func (c *collector) Message(value []byte) { c.values = append(c.values, string(value)) }
func (c *collector) Acknowledged(n int)   { c.acked += n }

// feed gives b to take in pieces of a size, as a socket might, and returns everything that it wanted written.
func feed(t *testing.T, b []byte, piece int, take func(b []byte) (int, []byte, error)) (written []byte) {
	t.Helper()
	var have []byte
	for part := range slices.Chunk(b, piece) {
		have = append(have, part...)
		n, out, err := take(have)
		if err != nil {
			t.Fatalf("pieces of %d: %v", piece, err)
		}
		written = append(written, out...)
		have = have[n:]
	}
	if len(have) > 0 {
		t.Fatalf("pieces of %d: %d bytes were left over", piece, len(have))
	}
	return written
}

var pieces = []int{1, 2, 3, 7, 64, 1 << 20}

func deliver(body string) []byte {
	b := amqpAppendMethod(nil, amqpChannel, amqpBasicDeliver, amqpArgs{}.str("c1").long(0).long(7).octet(0).str("").str("q0"))
	return amqpAppendContent(b, []byte(body), 16) // several body frames
}

func nsqFrame(kind uint32, body string) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(4+len(body)))
	return append(binary.BigEndian.AppendUint32(b, kind), body...)
}

// producers holds, per protocol, what a server answers to three messages and what acknowledges them.
var producers = []struct {
	name    string
	conn    bench.ProducerConn
	request string // of message 2 with the value "v\r\n"
	answers []byte
	reply   string
}{
	{"redis", &redisProducer{head: []byte("*5\r\n$4\r\nXADD\r\n$2\r\nq0\r\n$1\r\n*\r\n$1\r\nv\r\n")}, "*5\r\n$4\r\nXADD\r\n$2\r\nq0\r\n$1\r\n*\r\n$1\r\nv\r\n$3\r\nv\r\n\r\n",
		[]byte("$3\r\n1-0\r\n$3\r\n1-1\r\n$4\r\n1-22\r\n"), ""},
	{"nats", &natsProducer{head: []byte("PUB q0 in.")}, "PUB q0 in.2 3\r\nv\r\n\r\n",
		[]byte("MSG in.1 1 9\r\n{\"seq\":1}\r\nPING\r\nMSG in.0 1 9\r\n{\"seq\":2}\r\n+OK\r\nMSG in.2 1 9\r\n{\"seq\":3}\r\n"), "PONG\r\n"},
	{"nsq", &nsqProducer{head: []byte("PUB q0\n")}, "PUB q0\n\x00\x00\x00\x03v\r\n",
		slices.Concat(nsqFrame(0, "OK"), nsqFrame(0, "OK"), nsqFrame(0, "_heartbeat_"), nsqFrame(0, "OK")), "NOP\n"},
	{"rabbitmq", &rabbitProducer{frameMax: amqpFrameMax}, string(amqpAppendContent(nil, []byte("v\r\n"), amqpFrameMax)), slices.Concat(
		amqpAppendMethod(nil, amqpChannel, amqpBasicAck, []byte{0, 0, 0, 0, 0, 0, 0, 2, 1}),
		[]byte{amqpBeat, 0, 0, 0, 0, 0, 0, amqpEnd},
		amqpAppendMethod(nil, amqpChannel, amqpBasicAck, []byte{0, 0, 0, 0, 0, 0, 0, 3, 0})), ""},
}

func TestProducers_EveryAnswerCountsHoweverItIsCut(t *testing.T) {
	for _, p := range producers {
		if got := string(p.conn.Append(nil, 2, []byte("v\r\n"))); got != p.request {
			t.Errorf("%s: the request is %q, want %q", p.name, got, p.request)
		}
		for _, size := range pieces {
			switch c := p.conn.(type) { // those that count answers start anew
			case *redisProducer:
				c.next = 0
			case *nsqProducer:
				c.next = 0
			}
			acked := map[uint64]bool{}
			wrote := feed(t, p.answers, size, func(b []byte) (int, []byte, error) {
				return p.conn.Answers(b, nil, func(id uint64, all bool) {
					acked[id] = true
					for i := range id {
						acked[i] = acked[i] || all
					}
				})
			})
			if !acked[0] || !acked[1] || !acked[2] || len(acked) != 3 {
				t.Errorf("%s, pieces of %d: acknowledged are %v", p.name, size, acked)
			}
			if string(wrote) != p.reply {
				t.Errorf("%s, pieces of %d: wrote %q, want %q", p.name, size, wrote, p.reply)
			}
		}
	}
}

func TestProducers_ARefusalIsAnError(t *testing.T) {
	for i, answer := range [][]byte{
		[]byte("-OOM command not allowed\r\n"),
		[]byte("MSG in.0 1 32\r\n{\"error\":{\"code\":503,\"x\":\"12345\"}}\r\n"),
		nsqFrame(1, "E_PUB_FAILED"),
		amqpAppendMethod(nil, amqpChannel, amqpBasicNack, []byte{0, 0, 0, 0, 0, 0, 0, 1, 0}),
	} {
		_, _, err := producers[i].conn.Answers(answer, nil, func(uint64, bool) { t.Errorf("%s: a refusal counts as an acknowledgement", producers[i].name) })
		if err == nil {
			t.Errorf("%s: no error", producers[i].name)
		}
	}
	for _, status := range []string{
		"HMSG in.0 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\n",
		"-ERR 'Maximum Payload Violation'\r\n",
	} {
		if _, _, err := producers[1].conn.Answers([]byte(status), nil, func(uint64, bool) {}); err == nil {
			t.Errorf("%q is no error", status)
		}
	}
}

// consumers holds, per protocol, what a server sends with the messages "one" and "two\r\n", and what is written in turn.
var consumers = []struct {
	name   string
	open   func() bench.ConsumerConn
	sent   []byte
	writes []string // in this order
	acked  int
}{
	{"redis", func() bench.ConsumerConn { return &redisConsumer{key: "q0", read: []byte("READ"), acks: []int{3}} },
		[]byte(":3\r\n*1\r\n*2\r\n$2\r\nq0\r\n*2\r\n*2\r\n$3\r\n1-0\r\n*2\r\n$1\r\nv\r\n$3\r\none\r\n*2\r\n$3\r\n2-0\r\n*2\r\n$1\r\nv\r\n$5\r\ntwo\r\n\r\n*-1\r\n"),
		[]string{"*5\r\n$4\r\nXACK\r\n$2\r\nq0\r\n$1\r\ng\r\n$3\r\n1-0\r\n$3\r\n2-0\r\nREAD", "READ"}, 3},
	{"nats", func() bench.ConsumerConn { return &natsMember{asked: natsBatch} },
		[]byte("MSG q0 1 $JS.ACK.1 3\r\none\r\nPING\r\nHMSG q0 1 $JS.ACK.2 18 23\r\nNATS/1.0\r\nA: b\r\n\r\ntwo\r\n\r\nHMSG in 1 52 52\r\nNATS/1.0 408 Timeout\r\nNats-Pending-Messages: 998\r\n\r\n\r\n"),
		[]string{"PUB $JS.ACK.1 4\r\n+ACK\r\n", "PONG\r\n", "PUB $JS.ACK.2 4\r\n+ACK\r\n", "{\"batch\":1000,"}, 0},
	{"nsq", func() bench.ConsumerConn { return &nsqConsumer{} },
		slices.Concat(nsqFrame(2, "timestmpat0123456789abcdefone"), nsqFrame(0, "_heartbeat_"), nsqFrame(2, "timestmpat0123456789abcdegtwo\r\n")),
		[]string{"FIN 0123456789abcdef\n", "NOP\n", "FIN 0123456789abcdeg\n"}, 0},
	{"rabbitmq", func() bench.ConsumerConn { return &rabbitConsumer{} },
		slices.Concat(amqpAppendMethod(nil, amqpChannel, amqpBasicConsumeOK, amqpArgs{}.str("c1")), deliver("one"), deliver("two\r\n")),
		[]string{string(amqpAppendMethod(nil, amqpChannel, amqpBasicAck, []byte{0, 0, 0, 0, 0, 0, 0, 7, 1}))}, 0},
}

func TestConsumers_EveryMessageArrivesHoweverItIsCut(t *testing.T) {
	for _, c := range consumers {
		for _, size := range pieces {
			var in collector
			conn := c.open()
			wrote := feed(t, c.sent, size, func(b []byte) (int, []byte, error) { return conn.Take(b, nil, &in) })
			if !slices.Equal(in.values, []string{"one", "two\r\n"}) || in.acked != c.acked {
				t.Errorf("%s, pieces of %d: got %q, %d acknowledgements answered", c.name, size, in.values, in.acked)
			}
			rest := string(wrote)
			for _, w := range c.writes {
				_, after, ok := strings.Cut(rest, w)
				if !ok {
					t.Errorf("%s, pieces of %d: wrote %q, without %q in its place", c.name, size, wrote, w)
					break
				}
				rest = after
			}
		}
	}
}

func TestAMQP_LongBodiesTravelInSeveralFrames(t *testing.T) {
	body := bytes.Repeat([]byte("0123456789"), 10)
	var in collector
	c := &rabbitConsumer{}
	b := amqpAppendMethod(nil, amqpChannel, amqpBasicDeliver, amqpArgs{}.str("").long(0).long(1).octet(0).str("").str("q"))
	b = amqpAppendContent(b, body, 32)
	for _, size := range pieces {
		feed(t, b, size, func(b []byte) (int, []byte, error) { return c.Take(b, nil, &in) })
	}
	if len(in.values) != len(pieces) || in.values[0] != string(body) {
		t.Errorf("got %q", in.values)
	}
	if _, _, err := c.Take(amqpAppendMethod(nil, amqpChannel, amqpChannelClose, []byte("gone")), nil, &in); err == nil {
		t.Error("a close by the server is no error")
	}
}

func TestNATS_AReaderAloneAcknowledgesTheLastOfEachRead(t *testing.T) {
	var in collector
	c := &natsMember{asked: natsBatch, alone: true}
	b := []byte("MSG q0 1 $JS.ACK.1 3\r\none\r\nMSG q0 1 $JS.ACK.2 3\r\ntwo\r\n")
	n, out, err := c.Take(b, nil, &in)
	if err != nil || n != len(b) || len(in.values) != 2 || string(out) != "PUB $JS.ACK.2 4\r\n+ACK\r\n" {
		t.Errorf("consumed %d, got %q, wrote %q, %v", n, in.values, out, err)
	}
}

func TestNATS_ConfigurationNamesEveryRoute(t *testing.T) {
	text := natsConfig(1, "/data", "always", 4000, []int{5000, 5001, 5002})
	for _, want := range []string{"listen: 127.0.0.1:4000", "sync_interval: always", "listen: 127.0.0.1:5001", "nats://127.0.0.1:5000", "nats://127.0.0.1:5002"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in\n%s", want, text)
		}
	}
	if text := natsConfig(0, "/data", "default", 4000, []int{5000}); strings.Contains(text, "cluster") || strings.Contains(text, "sync_interval") {
		t.Errorf("a single node with defaults gets\n%s", text)
	}
}

func TestAll_NamesAreUniqueAndSayWhatIsMeasured(t *testing.T) {
	seen := map[string]bool{}
	for _, p := range All() {
		if seen[p.Name] || p.Name == "" || p.About == "" || p.Start == nil || p.Missing == nil || p.Version == nil || (p.Nodes != 1 && p.Nodes != 3) {
			t.Errorf("%+v", p)
		}
		seen[p.Name] = true
	}
	for _, name := range []string{"nats-always", "nats-r3-always", "redis-always", "redis-everysec", "rabbitmq", "rabbitmq-3", "nsq-sync"} {
		if !seen[name] {
			t.Errorf("%s is missing", name)
		}
	}
}

// FuzzTake gives arbitrary bytes to every parser: no panic, and never more consumed than there is.
func FuzzTake(f *testing.F) {
	for _, p := range producers {
		f.Add(p.answers)
	}
	for _, c := range consumers {
		f.Add(c.sent)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, p := range []bench.ProducerConn{&redisProducer{}, &natsProducer{}, &nsqProducer{}, &rabbitProducer{}} {
			n, _, _ := p.Answers(b, nil, func(uint64, bool) {})
			check(t, fmt.Sprintf("%T", p), n, len(b))
		}
		for _, c := range consumers {
			n, _, _ := c.open().Take(b, nil, new(collector))
			check(t, c.name, n, len(b))
		}
	})
}

func check(t *testing.T, name string, n, have int) {
	if n < 0 || n > have {
		t.Errorf("%s consumed %d of %d bytes", name, n, have)
	}
}
