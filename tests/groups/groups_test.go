package groups

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

// mortard is the binary, built once.
var mortard string

func TestMain(m *testing.M) {
	RunIfMember()
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "mortarmq-groups-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		if raceEnabled {
			// A broker that finds a race ends at once, which is noticed although most brokers here end by a kill.
			os.Setenv("GORACE", "halt_on_error=1 atexit_sleep_ms=0")
		}
		if mortard, err = harness.BuildMortard(dir, raceEnabled); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	}())
}

const (
	topic = "orders"
	group = "billing"
	// patience is how long a test waits for what must happen; it is never waited out when all is well.
	patience = 60 * time.Second
)

// world is a broker, a topic, a producer that never rests, and what the consumers have seen of its messages.
type world struct {
	t          *testing.T
	d          *harness.Daemon
	addr       string
	partitions int
	gentle     bool // everybody leaves in an orderly way: each message is handled once, in order

	mu     sync.Mutex
	owners map[uint16]*member
	// next is, by partition, the lowest number that has not been handled with all before it; done are those above it.
	next map[uint16]uint64
	done map[uint16]map[uint64]bool

	sent      []atomic.Uint64 // by partition
	stop      chan struct{}
	producers sync.WaitGroup
}

func newWorld(t *testing.T, partitions int) *world {
	t.Helper()
	addr := harness.LastingAddr()
	d, err := harness.Start(t.Context(), harness.Options{Binary: mortard, DataDir: t.TempDir(), Config: map[string]any{"listen_client": addr}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.EndScenario(t) })
	w := &world{t: t, d: d, addr: addr, partitions: partitions, owners: map[uint16]*member{}, next: map[uint16]uint64{}, done: map[uint16]map[uint64]bool{},
		sent: make([]atomic.Uint64, partitions), stop: make(chan struct{})}
	c := w.dial()
	if _, err := c.Declare(t.Context(), topic, client.DeclareOptions{Partitions: uint16(partitions)}); err != nil {
		t.Fatal(err)
	}
	p, err := c.NewProducer(t.Context(), topic, client.ProducerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range partitions {
		w.producers.Add(1)
		go w.produce(p, uint16(i))
	}
	return w
}

// restart kills the broker and starts it again at the same address.
func (w *world) restart() {
	w.t.Helper()
	w.d.Kill()
	<-w.d.Exited()
	d, err := harness.Start(w.t.Context(), harness.Options{Binary: mortard, DataDir: w.d.DataDir, Config: map[string]any{"listen_client": w.addr}})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { d.EndScenario(w.t) })
	w.d = d
}

func (w *world) dial(opts ...client.Option) *client.Client {
	w.t.Helper()
	c, err := client.Dial(w.t.Context(), w.addr, append([]client.Option{client.WithBackoff(10*time.Millisecond, 100*time.Millisecond)}, opts...)...)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = c.Close() })
	return c
}

// produce publishes numbered messages to a partition until the world stops.
func (w *world) produce(p *client.Producer, partition uint16) {
	defer w.producers.Done()
	key := keyOf(partition, uint16(w.partitions))
	for {
		select {
		case <-w.stop:
			return
		default:
		}
		n := w.sent[partition].Load()
		if _, err := p.Send(context.Background(), client.Record{Key: key, Value: binary.BigEndian.AppendUint64(nil, n)}); err != nil {
			w.t.Errorf("publish to partition %d: %v", partition, err)
			return
		}
		w.sent[partition].Add(1)
		time.Sleep(time.Millisecond)
	}
}

// member is a consumer of the group.
type member struct {
	w    *world
	name string
	k    *client.Consumer
	// pause is how long it works at a message.
	pause time.Duration
	ran   chan struct{}
	conns connections
}

// connections are those that a member has opened.
type connections struct {
	mu   sync.Mutex
	all  []net.Conn
	dead bool // no more are opened
	// frozen is held while the member is frozen: nothing is read or written then.
	frozen sync.RWMutex
}

func (c *connections) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead {
		return nil, errors.New("the member is dead")
	}
	nc, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	c.all = append(c.all, nc)
	return &freezing{nc, &c.frozen}, nil
}

// die is what kill -9 leaves of a member.
func (c *connections) die() {
	c.mu.Lock()
	c.dead = true
	c.mu.Unlock()
	c.cut()
}

// freezing is a connection of a process that can be frozen.
type freezing struct {
	net.Conn
	frozen *sync.RWMutex
}

func (f *freezing) Read(b []byte) (int, error) {
	n, err := f.Conn.Read(b)
	f.frozen.RLock()
	defer f.frozen.RUnlock()
	return n, err
}

func (f *freezing) Write(b []byte) (int, error) {
	f.frozen.RLock()
	defer f.frozen.RUnlock()
	return f.Conn.Write(b)
}

// cut breaks every connection.
func (c *connections) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, nc := range c.all {
		_ = nc.Close()
	}
	c.all = nil
}

func (w *world) join(name string, opts client.ConsumerOptions) *member {
	w.t.Helper()
	m := &member{w: w, name: name, ran: make(chan struct{})}
	opts.OnAssign = m.assigned
	opts.OnRevoke = m.revoked
	var err error
	if m.k, err = w.dial(client.WithDialer(m.conns.dial)).NewConsumer(w.t.Context(), topic, group, opts); err != nil {
		w.t.Fatalf("%s joins: %v", name, err)
	}
	go func() {
		defer close(m.ran)
		if err := m.k.Run(context.Background(), m.handle); err != nil && !errors.Is(err, client.ErrClosed) {
			w.t.Errorf("%s ended: %v", name, err)
		}
	}()
	return m
}

func (m *member) leave() {
	m.w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := m.k.Close(ctx); err != nil {
		m.w.t.Errorf("%s leaves: %v", m.name, err)
	}
	<-m.ran
}

func (m *member) assigned(p uint16) {
	m.w.mu.Lock()
	defer m.w.mu.Unlock()
	if o := m.w.owners[p]; o != nil && o != m && m.w.gentle {
		m.w.t.Errorf("partition %d goes to %s while %s has it", p, m.name, o.name)
	}
	m.w.owners[p] = m
}

func (m *member) revoked(p uint16, lost bool) {
	m.w.mu.Lock()
	defer m.w.mu.Unlock()
	switch {
	case m.w.owners[p] == m:
		delete(m.w.owners, p)
	case m.w.gentle: // otherwise a frozen member may have read an old ASSIGN meanwhile
		m.w.t.Errorf("partition %d is taken from %s, which does not have it", p, m.name)
	}
	if lost && m.w.gentle {
		m.w.t.Errorf("%s lost partition %d", m.name, p)
	}
}

func (m *member) handle(_ context.Context, msg *client.Message) error {
	time.Sleep(m.pause)
	w := m.w
	n := binary.BigEndian.Uint64(msg.Value)
	w.mu.Lock()
	defer w.mu.Unlock()
	p := msg.Partition
	if w.gentle && (n != w.next[p] || w.owners[p] != m) {
		w.t.Errorf("partition %d: %s handles %d (attempt %d), next is %d", p, m.name, n, msg.Attempt, w.next[p])
	}
	if w.done[p] == nil {
		w.done[p] = map[uint64]bool{}
	}
	w.done[p][n] = true
	for ; w.done[p][w.next[p]]; w.next[p]++ {
		delete(w.done[p], w.next[p])
	}
	return nil
}

// finish ends the producers and waits until everything they sent has been handled.
func (w *world) finish() {
	w.t.Helper()
	close(w.stop)
	w.producers.Wait()
	w.await("everything is handled", func() bool {
		for i := range w.sent {
			if w.next[uint16(i)] < w.sent[i].Load() {
				return false
			}
		}
		return true
	})
	total := uint64(0)
	for i := range w.sent {
		total += w.sent[i].Load()
	}
	w.t.Logf("%d messages", total)
}

// await waits until ok, which runs under the lock, holds.
func (w *world) await(what string, ok func() bool) {
	w.t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		w.mu.Lock()
		is := ok()
		w.mu.Unlock()
		if is {
			return
		}
		if time.Now().After(end) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.t.Fatalf("it never came true that %s: handled %v, beyond %v", what, w.next, w.done)
		}
	}
}

// balanced waits until the members share the partitions evenly.
func (w *world) balanced(members ...*member) {
	w.t.Helper()
	w.await(fmt.Sprintf("%d members share the partitions", len(members)), func() bool {
		count := map[*member]int{}
		for _, o := range w.owners {
			count[o]++
		}
		for _, m := range members {
			if n := count[m]; n != w.partitions/len(members) && n != (w.partitions+len(members)-1)/len(members) {
				return false
			}
		}
		return len(w.owners) == w.partitions
	})
}

// keyOf returns a key that is routed to a partition.
func keyOf(partition, partitions uint16) []byte {
	for i := 0; ; i++ {
		if key := fmt.Appendf(nil, "key-%d", i); protocol.Route(key, partitions) == partition {
			return key
		}
	}
}

func TestGroup_ThreeMembersComeAndGoUnderLoad(t *testing.T) {
	for name, opts := range map[string]client.ConsumerOptions{
		"stream":     {Concurrency: 4},
		"pull":       {Concurrency: 4, Pull: true},
		"cumulative": {Concurrency: 2, CumulativeAcks: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 12)
			w.gentle = true
			a := w.join("a", opts)
			w.balanced(a)
			b := w.join("b", opts)
			w.balanced(a, b)
			c := w.join("c", opts)
			w.balanced(a, b, c)
			a.leave()
			w.balanced(b, c)
			a = w.join("a again", opts)
			b.leave()
			w.balanced(a, c)
			b = w.join("b again", opts)
			w.balanced(a, b, c)
			time.Sleep(300 * time.Millisecond) // some load, too
			w.finish()
			for _, m := range []*member{a, b, c} {
				m.leave()
			}
		})
	}
}

func TestGroup_FourthMemberMovesThreeOfTwelve(t *testing.T) {
	w := newWorld(t, 12)
	w.gentle = true
	members := []*member{w.join("a", client.ConsumerOptions{})}
	w.balanced(members...)
	for _, name := range []string{"b", "c"} {
		members = append(members, w.join(name, client.ConsumerOptions{}))
		w.balanced(members...)
	}
	before := map[uint16]*member{}
	w.await("nothing", func() bool {
		for p, o := range w.owners {
			before[p] = o
		}
		return true
	})
	members = append(members, w.join("d", client.ConsumerOptions{}))
	w.balanced(members...)
	moved := 0
	w.await("nothing", func() bool {
		for p, o := range w.owners {
			if before[p] != o {
				moved++
			}
		}
		return true
	})
	if moved != 3 {
		t.Errorf("%d partitions moved", moved)
	}
	w.finish()
	for _, m := range members {
		m.leave()
	}
}

func TestGroup_LostConnectionsLoseNothing(t *testing.T) {
	w := newWorld(t, 6)
	rng := rand.New(rand.NewPCG(1, 1))
	var members []*member
	for i := range 3 {
		members = append(members, w.join(fmt.Sprint("member ", i), client.ConsumerOptions{Concurrency: 2}))
	}
	for range 15 {
		members[rng.IntN(len(members))].conns.cut()
		time.Sleep(time.Duration(rng.IntN(300)) * time.Millisecond)
	}
	w.finish()
	w.balanced(members...)
}

func TestGroup_BrokerThatDiesLosesNothing(t *testing.T) {
	w := newWorld(t, 6)
	var members []*member
	for i := range 3 {
		members = append(members, w.join(fmt.Sprint("member ", i), client.ConsumerOptions{Concurrency: 2}))
	}
	w.balanced(members...)
	for range 3 {
		time.Sleep(200 * time.Millisecond)
		w.restart()
	}
	w.finish()
	w.balanced(members...)
}

// TestGroup_DeadAndFrozenMembersAreReplaced waits for two timeouts of the broker: 3 s for the connection of a dead member,
// 10 s for the silence of a frozen one, which comes back later with ACKs and epochs of another time.
func TestGroup_DeadAndFrozenMembersAreReplaced(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 6)
	a, b, c := w.join("a", client.ConsumerOptions{Concurrency: 2}), w.join("b", client.ConsumerOptions{}), w.join("c", client.ConsumerOptions{})
	w.balanced(a, b, c)
	b.conns.frozen.Lock()
	c.conns.die()
	w.balanced(a)
	b.conns.frozen.Unlock()
	w.balanced(a, b)
	w.finish()
}
