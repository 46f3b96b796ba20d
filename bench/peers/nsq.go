package peers

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strconv"

	"github.com/mortarmq/mortarmq/bench"
)

const (
	nsqChannel = "g"
	nsqReady   = 2500 // max-rdy-count's default: how many messages a consumer may hold

	nsqBeat     = "_heartbeat_"
	nsqBeatMs   = 60_000 // the rarest that nsqd accepts
	nsqBeatBack = "NOP\n"

	nsqResponse    = 0
	nsqError       = 1
	nsqMessage     = 2
	nsqMaxFrame    = 64 << 20
	nsqMessageHead = 8 + 2 + 16 // timestamp, attempts, id
)

func nsqPeers() []*bench.Peer {
	peer := func(name, about string, args ...string) *bench.Peer {
		return &bench.Peer{Name: name, Nodes: 1, About: about, Missing: needs("nsqd"), Version: version("nsqd", "--version"),
			Start: func(ctx context.Context, o *bench.PeerOptions) (bench.PeerServer, error) {
				return startNSQ(ctx, o, args)
			}}
	}
	// Neither is durable: even with sync-every 1 the flush follows the answer.
	return []*bench.Peer{
		peer("nsq-sync", "nsqd, everything through the disk queue, a flush per message (behind the answer)", "--mem-queue-size=0", "--sync-every=1"),
		peer("nsq-default", "nsqd, defaults: 10 000 messages in memory, the rest in the disk queue"),
	}
}

type nsqServer struct {
	addr string
	proc *process
}

func startNSQ(ctx context.Context, o *bench.PeerOptions, args []string) (bench.PeerServer, error) {
	path, err := program(o, "nsqd")
	if err != nil {
		return nil, err
	}
	ports, err := freePorts(2)
	if err != nil {
		return nil, err
	}
	s := &nsqServer{addr: local(ports[0])}
	args = append([]string{"--tcp-address=" + s.addr, "--http-address=" + local(ports[1]), "--data-path=" + o.Dir, "--log-level=warn",
		"--min-output-buffer-timeout=1ms"}, args...)
	if s.proc, err = launch(o, o.Dir, nil, path, args...); err != nil {
		return nil, err
	}
	err = s.proc.await(ctx, "nsqd", func() error {
		c, err := nsqDial(ctx, s.addr)
		if err == nil {
			c.Close()
		}
		return err
	})
	if err != nil {
		s.proc.stop()
		return nil, err
	}
	return s, nil
}

func (s *nsqServer) Processes() []int { return s.proc.pids() }

func (s *nsqServer) Stop() error {
	s.proc.stop()
	return nil
}

// nsqDial connects and identifies: messages leave nsqd's buffer after 1 ms at the latest.
func nsqDial(ctx context.Context, addr string) (net.Conn, error) {
	c, err := dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	settings, err := json.Marshal(map[string]any{"client_id": "bench", "heartbeat_interval": nsqBeatMs, "output_buffer_timeout": 1, "feature_negotiation": false})
	if err == nil {
		out := append([]byte("  V2IDENTIFY\n"), binary.BigEndian.AppendUint32(nil, uint32(len(settings)))...)
		err = exchange(c, append(out, settings...), nsqOK)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// nsqOK parses an OK for exchange.
func nsqOK(b []byte) (int, error) {
	kind, body, n, err := nsqNext(b)
	if err == nil && n > 0 && (kind != nsqResponse || string(body) != "OK") {
		err = fmt.Errorf("nsq: answered with %.200q", body)
	}
	return n, err
}

func nsqTopic(queue int) string { return "q" + strconv.Itoa(queue) }

// Create makes topic and channel by subscribing once.
func (s *nsqServer) Create(ctx context.Context, first, n int) error {
	for i := first; i < first+n; i++ {
		c, err := s.Consumer(ctx, i, 0, false)
		if err != nil {
			return err
		}
		if err := c.Conn().Close(); err != nil {
			return err
		}
	}
	return nil
}

func (s *nsqServer) Producer(ctx context.Context, queue int) (bench.ProducerConn, error) {
	c, err := nsqDial(ctx, s.addr)
	if err != nil {
		return nil, err
	}
	return &nsqProducer{conn: c, head: []byte("PUB " + nsqTopic(queue) + "\n")}, nil
}

// nsqProducer sends one PUB per message. Answers come in the order of the commands.
type nsqProducer struct {
	conn net.Conn
	head []byte
	next uint64
}

func (p *nsqProducer) Conn() net.Conn { return p.conn }

func (p *nsqProducer) Append(dst []byte, _ uint64, value []byte) []byte {
	dst = append(dst, p.head...)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(value)))
	return append(dst, value...)
}

func (p *nsqProducer) Answers(b, out []byte, done func(uint64, bool)) (int, []byte, error) {
	off, answered := 0, p.next
	for {
		kind, body, n, err := nsqNext(b[off:])
		if err != nil {
			return off, out, err
		}
		if n == 0 {
			break
		}
		off += n
		switch {
		case kind == nsqResponse && string(body) == "OK":
			p.next++
		case kind == nsqResponse && string(body) == nsqBeat:
			out = append(out, nsqBeatBack...)
		default:
			return off, out, fmt.Errorf("nsq: answered with %.200q", body)
		}
	}
	if p.next > answered {
		done(p.next-1, true)
	}
	return off, out, nil
}

func (s *nsqServer) Consumer(ctx context.Context, queue, _ int, _ bool) (bench.ConsumerConn, error) {
	c, err := nsqDial(ctx, s.addr)
	if err != nil {
		return nil, err
	}
	if err := exchange(c, []byte("SUB "+nsqTopic(queue)+" "+nsqChannel+"\n"), nsqOK); err != nil {
		c.Close()
		return nil, err
	}
	return &nsqConsumer{conn: c}, nil
}

// nsqConsumer finishes every message; nsqd does not answer that.
type nsqConsumer struct {
	conn net.Conn
}

func (c *nsqConsumer) Conn() net.Conn { return c.conn }

func (c *nsqConsumer) Open(out []byte) []byte {
	return fmt.Appendf(out, "RDY %d\n", nsqReady)
}

func (c *nsqConsumer) Take(b, out []byte, in bench.Inbox) (int, []byte, error) {
	off := 0
	for {
		kind, body, n, err := nsqNext(b[off:])
		if err != nil || n == 0 {
			return off, out, err
		}
		off += n
		if kind == nsqResponse && string(body) == nsqBeat {
			out = append(out, nsqBeatBack...)
			continue
		}
		if kind != nsqMessage {
			return off, out, fmt.Errorf("nsq: answered with %.200q", body)
		}
		if len(body) < nsqMessageHead {
			return off, out, errors.New("nsq: a message without its header")
		}
		in.Message(body[nsqMessageHead:])
		out = append(out, "FIN "...)
		out = append(out, body[nsqMessageHead-16:nsqMessageHead]...)
		out = append(out, '\n')
	}
}

// nsqNext takes one frame off b (https://nsq.io/clients/tcp_protocol_spec.html, "Data Format"): size, type, body. n is 0
// where it is incomplete. An error frame is an error.
func nsqNext(b []byte) (kind uint32, body []byte, n int, err error) {
	if len(b) < 8 {
		return 0, nil, 0, nil
	}
	size := int64(binary.BigEndian.Uint32(b))
	if size < 4 || size > nsqMaxFrame {
		return 0, nil, 0, fmt.Errorf("nsq: a frame of %d bytes", size)
	}
	if int64(len(b)) < 4+size {
		return 0, nil, 0, nil
	}
	kind, body, n = binary.BigEndian.Uint32(b[4:]), b[8:4+size], int(4+size)
	if kind == nsqError {
		err = fmt.Errorf("nsq: %s", body)
	}
	return kind, body, n, err
}
