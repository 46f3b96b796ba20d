package peers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"

	"github.com/mortarmq/mortarmq/bench"
)

const (
	redisGroup = "g"
	// redisReadCount is how many messages one XREADGROUP asks for.
	redisReadCount = 256
	redisBlockMs   = 2000
)

func redisPeers() []*bench.Peer {
	var list []*bench.Peer
	for _, fsync := range []string{"always", "everysec"} {
		list = append(list, &bench.Peer{
			Name: "redis-" + fsync, Nodes: 1, Durable: fsync == "always",
			About:   "Redis Streams, appendonly yes, appendfsync " + fsync + ", no rewrites during a run",
			Missing: needs("redis-server"), Version: version("redis-server", "--version"),
			Start: func(ctx context.Context, o *bench.PeerOptions) (bench.PeerServer, error) {
				return startRedis(ctx, o, fsync)
			},
		})
	}
	return list
}

type redisServer struct {
	addr string
	proc *process
}

func startRedis(ctx context.Context, o *bench.PeerOptions, fsync string) (bench.PeerServer, error) {
	path, err := program(o, "redis-server")
	if err != nil {
		return nil, err
	}
	ports, err := freePorts(1)
	if err != nil {
		return nil, err
	}
	s := &redisServer{addr: local(ports[0])}
	s.proc, err = launch(o, o.Dir, nil, path, "--port", strconv.Itoa(ports[0]), "--bind", "127.0.0.1", "--dir", o.Dir, "--appendonly", "yes",
		"--appendfsync", fsync, "--save", "", "--auto-aof-rewrite-percentage", "0", "--loglevel", "warning", "--daemonize", "no")
	if err != nil {
		return nil, err
	}
	err = s.proc.await(ctx, "redis-server", func() error { return s.call(ctx, "PING") })
	if err != nil {
		s.proc.stop()
		return nil, err
	}
	return s, nil
}

func (s *redisServer) Processes() []int { return s.proc.pids() }

func (s *redisServer) Stop() error {
	s.proc.stop()
	return nil
}

// call sends one command on a connection of its own; an error reply is an error.
func (s *redisServer) call(ctx context.Context, args ...string) error {
	c, err := dial(ctx, s.addr)
	if err != nil {
		return err
	}
	defer c.Close()
	return exchange(c, respCommand(nil, args...), func(b []byte) (int, error) {
		n, err := respLen(b)
		if n > 0 && b[0] == '-' {
			err = respError(b[:n])
		}
		return n, err
	})
}

func redisKey(queue int) string { return "q" + strconv.Itoa(queue) }

func (s *redisServer) Create(ctx context.Context, first, n int) error {
	for i := first; i < first+n; i++ {
		if err := s.call(ctx, "XGROUP", "CREATE", redisKey(i), redisGroup, "0", "MKSTREAM"); err != nil {
			return err
		}
	}
	return nil
}

func (s *redisServer) Producer(ctx context.Context, queue int) (bench.ProducerConn, error) {
	c, err := dial(ctx, s.addr)
	if err != nil {
		return nil, err
	}
	head := respCommand(nil, "XADD", redisKey(queue), "*", "v", "")
	head = bytes.TrimSuffix(head, []byte("$0\r\n\r\n")) // the value is appended per message
	return &redisProducer{conn: c, head: head}, nil
}

// redisProducer sends one XADD per message. Replies come in the order of the commands.
type redisProducer struct {
	conn net.Conn
	head []byte
	next uint64 // id of the message answered next
}

func (p *redisProducer) Conn() net.Conn { return p.conn }

func (p *redisProducer) Append(dst []byte, _ uint64, value []byte) []byte {
	dst = append(dst, p.head...)
	return respBulk(dst, value)
}

func (p *redisProducer) Answers(b, out []byte, done func(uint64, bool)) (int, []byte, error) {
	off, answered := 0, p.next
	for off < len(b) {
		n, err := respLen(b[off:])
		if err != nil {
			return off, out, err
		}
		if n == 0 {
			break
		}
		if b[off] != '$' {
			return off, out, respError(b[off : off+n])
		}
		off += n
		p.next++
	}
	if p.next > answered {
		done(p.next-1, true)
	}
	return off, out, nil
}

func (s *redisServer) Consumer(ctx context.Context, queue, member int, _ bool) (bench.ConsumerConn, error) {
	c, err := dial(ctx, s.addr)
	if err != nil {
		return nil, err
	}
	key := redisKey(queue)
	return &redisConsumer{conn: c, key: key, read: respCommand(nil, "XREADGROUP", "GROUP", redisGroup, "c"+strconv.Itoa(member),
		"COUNT", strconv.Itoa(redisReadCount), "BLOCK", strconv.Itoa(redisBlockMs), "STREAMS", key, ">")}, nil
}

// redisConsumer has one XREADGROUP outstanding and acknowledges what it brought with one XACK.
type redisConsumer struct {
	conn net.Conn
	key  string
	read []byte
	acks []int // messages of the XACKs that are not answered
	ids  [][]byte
}

func (c *redisConsumer) Conn() net.Conn { return c.conn }

func (c *redisConsumer) Open(out []byte) []byte { return append(out, c.read...) }

func (c *redisConsumer) Take(b, out []byte, in bench.Inbox) (int, []byte, error) {
	off := 0
	for off < len(b) {
		n, err := respLen(b[off:])
		if err != nil {
			return off, out, err
		}
		if n == 0 {
			break
		}
		reply := b[off : off+n]
		off += n
		switch reply[0] {
		case ':': // XACK's
			if len(c.acks) == 0 {
				return off, out, errors.New("redis: an answer to an XACK that was not sent")
			}
			in.Acknowledged(c.acks[0])
			c.acks = append(c.acks[:0], c.acks[1:]...)
		case '*':
			if out, err = c.messages(reply, out, in); err != nil {
				return off, out, err
			}
			out = append(out, c.read...)
		default:
			return off, out, respError(reply)
		}
	}
	return off, out, nil
}

// messages walks through an XREADGROUP reply: [[key, [[id, [field, value]], ...]]], or a null where nothing came in time.
func (c *redisConsumer) messages(reply, out []byte, in bench.Inbox) ([]byte, error) {
	r := respReader{b: reply}
	if r.array() <= 0 {
		return out, r.err
	}
	r.array()
	r.bulk() // key
	n := r.array()
	c.ids = c.ids[:0]
	for range n {
		r.array()
		id := r.bulk()
		for pairs := r.array() / 2; pairs > 0 && r.err == nil; pairs-- {
			r.bulk()
			value := r.bulk()
			if r.err == nil {
				in.Message(value)
			}
		}
		if r.err != nil {
			return out, r.err
		}
		c.ids = append(c.ids, id)
	}
	if len(c.ids) == 0 {
		return out, nil
	}
	out = append(out, '*')
	out = strconv.AppendInt(out, int64(3+len(c.ids)), 10)
	out = append(out, "\r\n$4\r\nXACK\r\n"...)
	out = respBulk(out, []byte(c.key))
	out = respBulk(out, []byte(redisGroup))
	for _, id := range c.ids {
		out = respBulk(out, id)
	}
	c.acks = append(c.acks, len(c.ids))
	return out, nil
}

// RESP2 as https://redis.io/docs/latest/develop/reference/protocol-spec describes it.

func respCommand(dst []byte, args ...string) []byte {
	dst = append(dst, '*')
	dst = strconv.AppendInt(dst, int64(len(args)), 10)
	dst = append(dst, "\r\n"...)
	for _, a := range args {
		dst = respBulk(dst, []byte(a))
	}
	return dst
}

func respBulk(dst, b []byte) []byte {
	dst = append(dst, '$')
	dst = strconv.AppendInt(dst, int64(len(b)), 10)
	dst = append(dst, "\r\n"...)
	dst = append(dst, b...)
	return append(dst, "\r\n"...)
}

func respError(reply []byte) error {
	return fmt.Errorf("redis: unexpected reply %.200q", bytes.TrimRight(reply, "\r\n"))
}

// respLen returns the length of the reply at the beginning of b, 0 where it is incomplete.
func respLen(b []byte) (int, error) {
	off := 0
	for left := 1; left > 0; left-- {
		line := bytes.IndexByte(b[off:], '\n')
		if line < 0 {
			return 0, nil
		}
		if line < 2 {
			return 0, respError(b[off:])
		}
		kind, text := b[off], b[off+1:off+line-1]
		off += line + 1
		switch kind {
		case '+', '-', ':':
		case '$', '*':
			n, err := strconv.Atoi(string(text))
			if err != nil || n > 512<<20 {
				return 0, fmt.Errorf("redis: a length of %.40q", text)
			}
			switch {
			case n < 0: // null
			case kind == '*':
				left += n
			case off+n+2 > len(b):
				return 0, nil
			default:
				off += n + 2
			}
		default:
			return 0, respError(b[off-line-1:])
		}
	}
	return off, nil
}

// respReader walks through a complete reply; the first error stays.
type respReader struct {
	b   []byte
	err error
}

func (r *respReader) length(kind byte) int {
	line := bytes.IndexByte(r.b, '\n')
	if r.err != nil || line < 2 || r.b[0] != kind {
		if r.err == nil {
			r.err = respError(r.b)
		}
		return -1
	}
	n, err := strconv.Atoi(string(r.b[1 : line-1]))
	if err != nil {
		r.err = respError(r.b)
		return -1
	}
	r.b = r.b[line+1:]
	return n
}

func (r *respReader) array() int { return r.length('*') }

func (r *respReader) bulk() []byte {
	n := r.length('$')
	if n < 0 || len(r.b) < n+2 {
		if r.err == nil {
			r.err = respError(r.b)
		}
		return nil
	}
	v := r.b[:n]
	r.b = r.b[n+2:]
	return v
}
