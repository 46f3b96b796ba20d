package peers

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/mortarmq/mortarmq/bench"
)

const (
	natsConsumer = "g"      // of groups
	natsReader   = "reader" // of one that reads alone
	natsInbox    = "_INBOX.bench."
	// natsBatch is how many messages one pull asks for; a further one is sent when half have come.
	natsBatch       = 1000
	natsPullExpires = 30 * time.Second
	natsPoll        = 100 * time.Millisecond
	// natsAnswer is how long a request waits before it is sent again: a cluster without a leader does not answer at all.
	natsAnswer = time.Second
)

func natsPeers() []*bench.Peer {
	var list []*bench.Peer
	for _, nodes := range []int{1, 3} {
		for _, sync := range []string{"always", "default"} {
			name := "nats-" + sync
			if nodes > 1 {
				name = fmt.Sprintf("nats-r%d-%s", nodes, sync)
			}
			list = append(list, &bench.Peer{
				Name: name, Nodes: nodes, Durable: sync == "always",
				About:   fmt.Sprintf("NATS JetStream, file store, %d replica(s), sync_interval %s", nodes, sync),
				Missing: needs("nats-server"), Version: version("nats-server", "--version"),
				Start: func(ctx context.Context, o *bench.PeerOptions) (bench.PeerServer, error) {
					return startNATS(ctx, o, nodes, sync)
				},
			})
		}
	}
	return list
}

type natsServer struct {
	nodes []string // client addresses
	procs processes
}

func startNATS(ctx context.Context, o *bench.PeerOptions, nodes int, sync string) (bench.PeerServer, error) {
	path, err := program(o, "nats-server")
	if err != nil {
		return nil, err
	}
	ports, err := freePorts(2 * nodes)
	if err != nil {
		return nil, err
	}
	clients, routes := ports[:nodes], ports[nodes:]
	s := &natsServer{}
	for i := range nodes {
		dir := filepath.Join(o.Dir, strconv.Itoa(i))
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return nil, err
		}
		config := filepath.Join(dir, "nats.conf")
		if err := os.WriteFile(config, []byte(natsConfig(i, dir, sync, clients[i], routes)), 0o640); err != nil {
			return nil, err
		}
		p, err := launch(o, dir, nil, path, "-c", config)
		if err != nil {
			s.procs.stop()
			return nil, err
		}
		s.procs = append(s.procs, p)
		s.nodes = append(s.nodes, local(clients[i]))
	}
	// In a cluster JetStream answers when its own leader is elected.
	for i, p := range s.procs {
		err := p.await(ctx, "nats-server", func() error {
			_, err := s.request(ctx, s.nodes[i], "$JS.API.INFO", nil)
			return err
		})
		if err != nil {
			s.procs.stop()
			return nil, err
		}
	}
	return s, nil
}

func natsConfig(node int, dir, sync string, client int, routes []int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "server_name: n%d\nlisten: %s\nmax_payload: 8MB\njetstream {\n  store_dir: %q\n", node, local(client), dir)
	if sync != "default" {
		fmt.Fprintf(&b, "  sync_interval: %s\n", sync)
	}
	b.WriteString("}\n")
	if len(routes) > 1 {
		fmt.Fprintf(&b, "cluster {\n  name: bench\n  listen: %s\n  routes: [", local(routes[node]))
		for _, r := range routes {
			fmt.Fprintf(&b, "\"nats://%s\", ", local(r))
		}
		b.WriteString("]\n}\n")
	}
	return b.String()
}

func (s *natsServer) Processes() []int { return s.procs.pids() }

func (s *natsServer) Stop() error {
	s.procs.stop()
	return nil
}

// natsDial connects and waits until the server answers.
func natsDial(ctx context.Context, addr string) (net.Conn, error) {
	c, err := dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	hello := []byte("CONNECT {\"verbose\":false,\"pedantic\":false,\"headers\":true,\"no_responders\":true,\"lang\":\"go\",\"version\":\"1\",\"protocol\":1}\r\nPING\r\n")
	err = exchange(c, hello, func(b []byte) (int, error) {
		served := false
		for off := 0; off < len(b) || !served; {
			m, n, err := natsNext(b[off:])
			if err != nil || n == 0 {
				return 0, err
			}
			off += n
			switch m.kind {
			case natsPong:
				served = true
			case natsErr:
				return 0, fmt.Errorf("nats: %s", m.body)
			default: // INFO comes first, and again, perhaps right behind the answer, when the cluster changes
			}
		}
		return len(b), nil
	})
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// request sends a request to JetStream's API and returns the answer; one that reports an error is an error.
func (s *natsServer) request(ctx context.Context, addr, subject string, body any) (map[string]json.RawMessage, error) {
	c, err := natsDial(ctx, addr)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	var payload []byte
	if body != nil {
		if payload, err = json.Marshal(body); err != nil {
			return nil, err
		}
	}
	const inbox = natsInbox + "api"
	out := fmt.Appendf(nil, "SUB %s 1\r\nPUB %s %s %d\r\n%s\r\n", inbox, subject, inbox, len(payload), payload)
	var answer map[string]json.RawMessage
	err = exchangeWithin(natsAnswer, c, out, func(b []byte) (int, error) {
		off := 0
		for {
			m, n, err := natsNext(b[off:])
			if err != nil || n == 0 {
				return 0, err
			}
			off += n
			switch m.kind {
			case natsMsg:
				if m.status != "" {
					return 0, fmt.Errorf("nats: %s: status %s", subject, m.status)
				}
				return off, json.Unmarshal(m.body, &answer)
			case natsErr:
				return 0, fmt.Errorf("nats: %s: %s", subject, m.body)
			default:
			}
		}
	})
	if err == nil && answer["error"] != nil {
		err = fmt.Errorf("nats: %s: %s", subject, answer["error"])
	}
	return answer, err
}

func natsStream(queue int) string  { return "S" + strconv.Itoa(queue) }
func natsSubject(queue int) string { return "q" + strconv.Itoa(queue) }

func (s *natsServer) Create(ctx context.Context, first, n int) error {
	for i := first; i < first+n; i++ {
		stream := natsStream(i)
		config := map[string]any{"name": stream, "subjects": []string{natsSubject(i)}, "storage": "file", "num_replicas": len(s.nodes),
			"retention": "limits", "discard": "old", "max_msgs": -1, "max_bytes": -1, "max_age": 0}
		// A cluster that has just formed may refuse for a moment.
		if err := s.retry(ctx, "$JS.API.STREAM.CREATE."+stream, config); err != nil {
			return err
		}
		if err := s.createConsumer(ctx, stream, natsConsumer, "explicit"); err != nil {
			return err
		}
	}
	return nil
}

// createConsumer makes a durable consumer; with the policy "all" an acknowledgement counts for every earlier message, too.
func (s *natsServer) createConsumer(ctx context.Context, stream, name, policy string) error {
	return s.retry(ctx, "$JS.API.CONSUMER.DURABLE.CREATE."+stream+"."+name, map[string]any{"stream_name": stream,
		"config": map[string]any{"durable_name": name, "ack_policy": policy, "deliver_policy": "all", "max_ack_pending": 50_000,
			"ack_wait": int64(60 * time.Second)}})
}

func (s *natsServer) retry(ctx context.Context, subject string, body any) error {
	deadline := time.Now().Add(startTimeout)
	for {
		_, err := s.request(ctx, s.nodes[0], subject, body)
		if err == nil || time.Now().After(deadline) || ctx.Err() != nil {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(natsPoll):
		}
	}
}

// leader returns the address of the node that leads a stream.
func (s *natsServer) leader(ctx context.Context, queue int) (string, error) {
	if len(s.nodes) == 1 {
		return s.nodes[0], nil
	}
	deadline := time.Now().Add(startTimeout)
	for {
		answer, err := s.request(ctx, s.nodes[0], "$JS.API.STREAM.INFO."+natsStream(queue), nil)
		var cluster struct {
			Leader string `json:"leader"`
		}
		if err == nil {
			err = json.Unmarshal(answer["cluster"], &cluster)
		}
		if err == nil {
			if i, aerr := strconv.Atoi(strings.TrimPrefix(cluster.Leader, "n")); aerr == nil && i < len(s.nodes) {
				return s.nodes[i], nil
			}
			err = fmt.Errorf("nats: the leader is %q", cluster.Leader)
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			return "", err
		}
		time.Sleep(natsPoll)
	}
}

func (s *natsServer) Producer(ctx context.Context, queue int) (bench.ProducerConn, error) {
	addr, err := s.leader(ctx, queue)
	if err != nil {
		return nil, err
	}
	c, err := natsDial(ctx, addr)
	if err != nil {
		return nil, err
	}
	// Each producer answers to a subject of its own, or every one would get all answers.
	inbox := natsInbox + strings.ReplaceAll(c.LocalAddr().String(), ".", "-") + "."
	if _, err := fmt.Fprintf(c, "SUB %s* 1\r\n", inbox); err != nil {
		c.Close()
		return nil, err
	}
	return &natsProducer{conn: c, head: []byte("PUB " + natsSubject(queue) + " " + inbox)}, nil
}

// natsProducer publishes with a reply subject that ends in the message's id.
type natsProducer struct {
	conn net.Conn
	head []byte
}

func (p *natsProducer) Conn() net.Conn { return p.conn }

func (p *natsProducer) Append(dst []byte, id uint64, value []byte) []byte {
	dst = append(dst, p.head...)
	dst = strconv.AppendUint(dst, id, 10)
	dst = append(dst, ' ')
	dst = strconv.AppendInt(dst, int64(len(value)), 10)
	dst = append(dst, "\r\n"...)
	dst = append(dst, value...)
	return append(dst, "\r\n"...)
}

func (p *natsProducer) Answers(b, out []byte, done func(uint64, bool)) (int, []byte, error) {
	off := 0
	for {
		m, n, err := natsNext(b[off:])
		if err != nil || n == 0 {
			return off, out, err
		}
		off += n
		switch m.kind {
		case natsMsg:
			id, err := natsAckID(&m)
			if err != nil {
				return off, out, err
			}
			done(id, false)
		case natsPing:
			out = append(out, "PONG\r\n"...)
		case natsErr:
			return off, out, fmt.Errorf("nats: %s", m.body)
		default:
		}
	}
}

// natsAckID checks that an answer acknowledges a message and returns its id.
func natsAckID(m *natsMessage) (uint64, error) {
	if m.status != "" {
		return 0, fmt.Errorf("nats: a publish was answered with status %s", m.status)
	}
	if bytes.Contains(m.body, []byte(`"error"`)) {
		return 0, fmt.Errorf("nats: a publish was refused: %s", m.body)
	}
	id, err := strconv.ParseUint(string(m.subject[bytes.LastIndexByte(m.subject, '.')+1:]), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("nats: an answer to %.100q", m.subject)
	}
	return id, nil
}

func (s *natsServer) Consumer(ctx context.Context, queue, member int, alone bool) (bench.ConsumerConn, error) {
	name := natsConsumer
	if alone {
		name = natsReader
		if err := s.createConsumer(ctx, natsStream(queue), name, "all"); err != nil {
			return nil, err
		}
	}
	addr, err := s.leader(ctx, queue)
	if err != nil {
		return nil, err
	}
	c, err := natsDial(ctx, addr)
	if err != nil {
		return nil, err
	}
	inbox := fmt.Sprintf("%smember.%d", natsInbox, member)
	return &natsMember{conn: c, alone: alone, pull: fmt.Appendf(nil, "PUB $JS.API.CONSUMER.MSG.NEXT.%s.%s %s ", natsStream(queue), name, inbox),
		subscribe: fmt.Appendf(nil, "SUB %s 1\r\n", inbox)}, nil
}

// natsMember pulls in batches and acknowledges each message, or alone the last one of each read; the protocol has no answer
// to that.
type natsMember struct {
	conn      net.Conn
	alone     bool
	subscribe []byte
	pull      []byte
	asked     int // messages asked for that have not come
}

func (c *natsMember) Conn() net.Conn { return c.conn }

func (c *natsMember) Open(out []byte) []byte {
	out = append(out, c.subscribe...)
	return c.more(out)
}

// more asks for another batch where half of the last one has come.
func (c *natsMember) more(out []byte) []byte {
	if c.asked > natsBatch/2 {
		return out
	}
	body := fmt.Sprintf(`{"batch":%d,"expires":%d}`, natsBatch, int64(natsPullExpires))
	out = append(out, c.pull...)
	out = fmt.Appendf(out, "%d\r\n%s\r\n", len(body), body)
	c.asked += natsBatch
	return out
}

func (c *natsMember) Take(b, out []byte, in bench.Inbox) (int, []byte, error) {
	off := 0
	var last []byte
	for {
		m, n, err := natsNext(b[off:])
		if err != nil {
			return off, out, err
		}
		if n == 0 {
			if last != nil {
				out = natsAck(out, last)
			}
			return off, c.more(out), nil
		}
		off += n
		switch m.kind {
		case natsMsg:
			if m.status != "" {
				if m.status != "404" && m.status != "408" {
					return off, out, fmt.Errorf("nats: a pull was answered with status %s", m.status)
				}
				c.asked -= min(c.asked, m.pending)
				continue
			}
			in.Message(m.body)
			c.asked--
			if c.alone {
				last = m.reply
			} else {
				out = natsAck(out, m.reply)
			}
		case natsPing:
			out = append(out, "PONG\r\n"...)
		case natsErr:
			return off, out, fmt.Errorf("nats: %s", m.body)
		default:
		}
	}
}

func natsAck(out, reply []byte) []byte {
	out = append(out, "PUB "...)
	out = append(out, reply...)
	return append(out, " 4\r\n+ACK\r\n"...)
}

// The client protocol as https://docs.nats.io/reference/reference-protocols/nats-protocol describes it.

type natsKind uint8

const (
	natsOther natsKind = iota // INFO, +OK
	natsMsg                   // MSG, HMSG
	natsPing
	natsPong
	natsErr
)

// natsMessage is one protocol message; the slices alias the buffer.
type natsMessage struct {
	kind                 natsKind
	subject, reply, body []byte
	status               string // of an HMSG without content: "408", ...
	pending              int    // its Nats-Pending-Messages
}

var errNATSForm = errors.New("nats: a message of unknown form")

// natsNext takes one message off b; n is 0 where it is incomplete.
func natsNext(b []byte) (m natsMessage, n int, err error) {
	end := bytes.IndexByte(b, '\n')
	if end < 0 {
		return m, 0, nil
	}
	line := bytes.TrimSuffix(b[:end], []byte("\r"))
	n = end + 1
	switch {
	case bytes.HasPrefix(line, []byte("MSG ")), bytes.HasPrefix(line, []byte("HMSG ")):
		return natsPayload(b, line, n)
	case bytes.Equal(line, []byte("PING")):
		m.kind = natsPing
	case bytes.Equal(line, []byte("PONG")):
		m.kind = natsPong
	case bytes.HasPrefix(line, []byte("-ERR")):
		m.kind, m.body = natsErr, line
	case bytes.HasPrefix(line, []byte("INFO ")), bytes.Equal(line, []byte("+OK")):
	default:
		return m, 0, fmt.Errorf("%w: %.100q", errNATSForm, line)
	}
	return m, n, nil
}

// natsPayload takes apart "MSG subject sid [reply] size" or "HMSG subject sid [reply] headers total" and what follows.
func natsPayload(b, line []byte, n int) (m natsMessage, _ int, err error) {
	var f [6][]byte
	k := 0
	for rest := line; len(rest) > 0 && k < len(f); k++ {
		f[k], rest, _ = bytes.Cut(rest, []byte(" "))
	}
	headers := line[0] == 'H'
	sizes := 1
	if headers {
		sizes = 2
	}
	if k < 3+sizes || k > 4+sizes {
		return m, 0, fmt.Errorf("%w: %.100q", errNATSForm, line)
	}
	m.kind, m.subject = natsMsg, f[1]
	if k == 4+sizes {
		m.reply = f[3]
	}
	total, err := strconv.Atoi(string(f[k-1]))
	head := 0
	if headers && err == nil {
		head, err = strconv.Atoi(string(f[k-2]))
	}
	if err != nil || head < 0 || head > total || total > 64<<20 {
		return m, 0, fmt.Errorf("%w: %.100q", errNATSForm, line)
	}
	if n+total+2 > len(b) {
		return m, 0, nil
	}
	m.body = b[n+head : n+total]
	if head > 0 {
		m.headers(b[n : n+head])
	}
	return m, n + total + 2, nil
}

// headers reads what pulls are answered with when there is nothing: "NATS/1.0 408 Request Timeout" and how many messages of
// the pull are still open.
func (m *natsMessage) headers(h []byte) {
	first, rest, _ := bytes.Cut(h, []byte("\r\n"))
	if f := bytes.Fields(first); len(f) > 1 {
		m.status = string(f[1])
	}
	for line := range bytes.Lines(rest) {
		if v, ok := bytes.CutPrefix(line, []byte("Nats-Pending-Messages:")); ok {
			m.pending, _ = strconv.Atoi(string(bytes.TrimSpace(v))) // 0 if it is no number: then more is asked for later
		}
	}
}
