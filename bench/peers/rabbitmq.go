package peers

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/mortarmq/mortarmq/bench"
)

const (
	// rabbitScript starts a node with the caller's user; the one on the PATH insists on the package's user.
	rabbitScript   = "/usr/lib/rabbitmq/bin/rabbitmq-server"
	rabbitPrefetch = 2000 // what RabbitMQ's documentation calls the most that a quorum queue's consumer gains from
)

func rabbitPeers() []*bench.Peer {
	var list []*bench.Peer
	for _, nodes := range []int{1, 3} {
		name := "rabbitmq"
		if nodes > 1 {
			name = fmt.Sprintf("rabbitmq-%d", nodes)
		}
		list = append(list, &bench.Peer{Name: name, Nodes: nodes, Durable: true, SlowStart: true,
			About:   fmt.Sprintf("RabbitMQ quorum queues, %d node(s), publisher confirms, persistent messages", nodes),
			Missing: rabbitMissing, Version: rabbitVersion,
			Start: func(ctx context.Context, o *bench.PeerOptions) (bench.PeerServer, error) {
				return startRabbit(ctx, o, nodes)
			}})
	}
	return list
}

func rabbitMissing(*bench.PeerOptions) error {
	if _, err := os.Stat(rabbitScript); err != nil {
		return errors.New("rabbitmq-server is not installed: run bench/peers/install.sh")
	}
	if _, err := exec.LookPath("epmd"); err != nil {
		return errors.New("epmd (Erlang) is not installed: run bench/peers/install.sh")
	}
	return nil
}

// rabbitVersion reads the version off the directory that the package installs; asking the program takes seconds.
func rabbitVersion(*bench.PeerOptions) string {
	dirs, err := filepath.Glob("/usr/lib/rabbitmq/lib/rabbitmq_server-*")
	if err != nil || len(dirs) == 0 {
		return ""
	}
	return "RabbitMQ " + dirs[0][strings.LastIndexByte(dirs[0], '-')+1:]
}

type rabbitServer struct {
	nodes []string
	procs processes // the first is epmd, through which the nodes find one another
}

func startRabbit(ctx context.Context, o *bench.PeerOptions, nodes int) (bench.PeerServer, error) {
	ports, err := freePorts(2*nodes + 1)
	if err != nil {
		return nil, err
	}
	clients, dist, mapper := ports[:nodes], ports[nodes:2*nodes], strconv.Itoa(ports[2*nodes])
	s := &rabbitServer{}
	epmd, err := launch(o, o.Dir, nil, "epmd", "-address", "127.0.0.1", "-port", mapper)
	if err != nil {
		return nil, err
	}
	s.procs = processes{epmd}
	for i := range nodes {
		env, err := rabbitNode(o, i, nodes, clients[i], dist[i], mapper)
		if err == nil {
			var p *process
			if p, err = launch(o, o.Dir, env, rabbitScript); err == nil {
				s.procs = append(s.procs, p)
				s.nodes = append(s.nodes, local(clients[i]))
			}
		}
		// The first node founds the cluster, the others find it and join.
		if err == nil && (i == 0 || i == nodes-1) {
			err = s.await(ctx, i)
		}
		if err != nil {
			s.procs.kill()
			return nil, err
		}
	}
	return s, nil
}

// await waits until the nodes up to one serve.
func (s *rabbitServer) await(ctx context.Context, last int) error {
	for i := range last + 1 {
		err := s.procs[1+i].await(ctx, "rabbitmq-server", func() error {
			c, _, err := s.dial(ctx, i)
			if err == nil {
				c.Close()
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func rabbitName(node int) string { return fmt.Sprintf("bench%d@localhost", node) }

// rabbitNode writes a node's configuration and returns its environment (rabbitmq-env.conf(5)).
func rabbitNode(o *bench.PeerOptions, node, nodes, client, dist int, mapper string) (env []string, err error) {
	dir := filepath.Join(o.Dir, strconv.Itoa(node))
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, err
	}
	var b strings.Builder
	fmt.Fprintf(&b, "listeners.tcp.default = %s\nlog.file = false\nlog.console = true\nlog.console.level = error\n", local(client))
	b.WriteString("disk_free_limit.absolute = 64MB\nvm_memory_high_watermark.relative = 0.8\n")
	if nodes > 1 {
		b.WriteString("cluster_formation.peer_discovery_backend = classic_config\n")
		for i := range nodes {
			fmt.Fprintf(&b, "cluster_formation.classic_config.nodes.%d = %s\n", i+1, rabbitName(i))
		}
	}
	for name, text := range map[string]string{"rabbitmq.conf": b.String(), "enabled_plugins": "[].\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o640); err != nil {
			return nil, err
		}
	}
	// The nodes' shared secret; Erlang wants it readable by its owner only.
	home := filepath.Join(o.Dir, "home")
	if err := os.MkdirAll(home, 0o750); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(home, ".erlang.cookie"), []byte("MORTARBENCH"), 0o400); err != nil && !errors.Is(err, os.ErrPermission) {
		return nil, err
	}
	return []string{
		"HOME=" + home,
		"ERL_EPMD_PORT=" + mapper,
		"ERL_EPMD_ADDRESS=127.0.0.1",
		"RABBITMQ_NODENAME=" + rabbitName(node),
		"RABBITMQ_NODE_PORT=" + strconv.Itoa(client),
		"RABBITMQ_DIST_PORT=" + strconv.Itoa(dist),
		"RABBITMQ_CONFIG_FILE=" + filepath.Join(dir, "rabbitmq.conf"),
		"RABBITMQ_ENABLED_PLUGINS_FILE=" + filepath.Join(dir, "enabled_plugins"),
		"RABBITMQ_MNESIA_BASE=" + filepath.Join(dir, "mnesia"),
		"RABBITMQ_LOG_BASE=" + filepath.Join(dir, "log"),
		"RABBITMQ_PID_FILE=" + filepath.Join(dir, "pid"),
		"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=-kernel inet_dist_use_interface {127,0,0,1}",
		"RABBITMQ_ALLOW_INPUT=1", // the script then becomes the server instead of waiting for it
	}, nil
}

func (s *rabbitServer) Processes() []int { return s.procs.pids() }

// Stop kills the nodes: an orderly end takes a node several seconds and leaves nothing that is wanted.
func (s *rabbitServer) Stop() error {
	s.procs.kill()
	return nil
}

// kill ends all groups at once.
func (l processes) kill() {
	for _, p := range l {
		p.kill()
	}
}

func (s *rabbitServer) dial(ctx context.Context, node int) (net.Conn, int, error) {
	c, err := dial(ctx, s.nodes[node])
	if err != nil {
		return nil, 0, err
	}
	frameMax, err := amqpConnect(c)
	if err != nil {
		c.Close()
		return nil, 0, err
	}
	return c, frameMax, nil
}

func rabbitQueue(queue int) string { return "q" + strconv.Itoa(queue) }

// Create declares the queues on the first node, which makes it their leader; everybody connects to it. Start
// has waited for all nodes, so each queue gets a member on every one.
func (s *rabbitServer) Create(ctx context.Context, first, n int) error {
	c, _, err := s.dial(ctx, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	for i := first; i < first+n; i++ {
		const durable = 1 << 1
		args := amqpArgs{}.short(0).str(rabbitQueue(i)).octet(durable).table("x-queue-type", "quorum", "x-queue-leader-locator", "client-local")
		if err := amqpCall(c, amqpChannel, amqpQueueDeclare, args, amqpQueueDeclareOK, nil); err != nil {
			return err
		}
	}
	return nil
}

func (s *rabbitServer) Producer(ctx context.Context, queue int) (bench.ProducerConn, error) {
	c, frameMax, err := s.dial(ctx, 0)
	if err != nil {
		return nil, err
	}
	if err := amqpCall(c, amqpChannel, amqpConfirmSelect, amqpArgs{}.octet(0), amqpConfirmSelectOK, nil); err != nil {
		c.Close()
		return nil, err
	}
	head := amqpAppendMethod(nil, amqpChannel, amqpBasicPublish, amqpArgs{}.short(0).str("").str(rabbitQueue(queue)).octet(0))
	return &rabbitProducer{conn: c, head: head, frameMax: frameMax}, nil
}

// rabbitProducer publishes to the default exchange. The delivery tag of message id is id+1.
type rabbitProducer struct {
	conn     net.Conn
	head     []byte
	frameMax int
}

func (p *rabbitProducer) Conn() net.Conn { return p.conn }

func (p *rabbitProducer) Append(dst []byte, _ uint64, value []byte) []byte {
	return amqpAppendContent(append(dst, p.head...), value, p.frameMax)
}

func (p *rabbitProducer) Answers(b, out []byte, done func(uint64, bool)) (int, []byte, error) {
	off := 0
	for {
		f, n, err := amqpNext(b[off:])
		if err != nil || n == 0 {
			return off, out, err
		}
		off += n
		switch {
		case f.kind == amqpBeat:
		case f.kind == amqpMethod && f.id == amqpBasicAck:
			tag, all, err := amqpAck(f.args)
			if err != nil {
				return off, out, err
			}
			if tag == 0 {
				return off, out, errors.New("rabbitmq: a confirm of no message")
			}
			done(tag-1, all)
		case f.kind == amqpMethod && f.id == amqpBasicNack:
			return off, out, errors.New("rabbitmq: a publish was refused")
		default:
			return off, out, fmt.Errorf("rabbitmq: unexpected frame type %d, method %#x", f.kind, f.id)
		}
	}
}

func (s *rabbitServer) Consumer(ctx context.Context, queue, member int, _ bool) (bench.ConsumerConn, error) {
	c, _, err := s.dial(ctx, 0)
	if err != nil {
		return nil, err
	}
	if err := amqpCall(c, amqpChannel, amqpBasicQos, amqpArgs{}.long(0).short(rabbitPrefetch).octet(0), amqpBasicQosOK, nil); err != nil {
		c.Close()
		return nil, err
	}
	return &rabbitConsumer{conn: c, consume: amqpAppendMethod(nil, amqpChannel, amqpBasicConsume,
		amqpArgs{}.short(0).str(rabbitQueue(queue)).str("c"+strconv.Itoa(member)).octet(0).table())}, nil
}

// rabbitConsumer acknowledges with "multiple", once per read. Deliveries of a channel are acknowledged in order.
type rabbitConsumer struct {
	conn    net.Conn
	consume []byte

	tag    uint64 // of the delivery whose content is being collected
	size   uint64 // that is missing, once the header is there
	open   bool
	header bool
	body   []byte
}

func (c *rabbitConsumer) Conn() net.Conn { return c.conn }

func (c *rabbitConsumer) Open(out []byte) []byte { return append(out, c.consume...) }

func (c *rabbitConsumer) Take(b, out []byte, in bench.Inbox) (int, []byte, error) {
	off := 0
	last := uint64(0)
	for {
		f, n, err := amqpNext(b[off:])
		if err != nil {
			return off, out, err
		}
		if n == 0 {
			break
		}
		off += n
		done, err := c.frame(&f, in)
		if err != nil {
			return off, out, err
		}
		if done {
			last = c.tag
		}
	}
	if last > 0 {
		args := [9]byte{8: 1} // multiple
		binary.BigEndian.PutUint64(args[:], last)
		out = amqpAppendMethod(out, amqpChannel, amqpBasicAck, args[:])
	}
	return off, out, nil
}

// frame handles one frame and tells whether it completed a message.
func (c *rabbitConsumer) frame(f *amqpFrame, in bench.Inbox) (done bool, err error) {
	switch {
	case f.kind == amqpBeat, f.kind == amqpMethod && f.id == amqpBasicConsumeOK:
		return false, nil
	case f.kind == amqpMethod && f.id == amqpBasicDeliver && !c.open:
		c.tag, err = amqpDeliveryTag(f.args)
		c.open, c.header, c.body = true, false, c.body[:0]
		return false, err
	case f.kind == amqpHeader && c.open && !c.header:
		if len(f.args) < 12 {
			return false, errors.New("rabbitmq: a content header that is too short")
		}
		c.header, c.size = true, binary.BigEndian.Uint64(f.args[4:])
	case f.kind == amqpBody && c.open && c.header && uint64(len(f.args)) <= c.size:
		c.size -= uint64(len(f.args))
		if c.size == 0 && len(c.body) == 0 { // the usual case: a body of one frame
			c.open = false
			in.Message(f.args)
			return true, nil
		}
		c.body = append(c.body, f.args...)
	default:
		return false, fmt.Errorf("rabbitmq: unexpected frame type %d, method %#x", f.kind, f.id)
	}
	if c.size > 0 {
		return false, nil
	}
	c.open = false
	in.Message(c.body)
	return true, nil
}
