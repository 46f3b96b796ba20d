package groups

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/mortarmq/mortarmq/engine/deadletter"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

// Hostile lets clients do whatever the protocol has frames for, in any order and with any epochs, ids and credit, their own
// and others', while messages are published. Start from DefaultHostile.
//
// Two groups of two topics are left alone but for their members: in the end each of their messages must be acknowledged or
// in one dead letter. The others, and one topic, are also set back, changed, deleted and created again meanwhile, and the dead
// letters of these others deleted.
type Hostile struct {
	Seed    uint64
	Clients int
	Load    time.Duration
	// KillEvery is the mean time between two kills of the broker; 0: none.
	KillEvery time.Duration

	Binary  string // mortard
	DataDir string
	Config  map[string]any
	Logf    func(format string, args ...any)

	patience time.Duration
}

// DefaultHostile is what the tests run.
func DefaultHostile(seed uint64) Hostile {
	return Hostile{Seed: seed, Clients: 12, Load: 6 * time.Second, Config: map[string]any{}, Logf: func(string, ...any) {}}
}

// VariedHostile is one whose settings differ from seed to seed.
func VariedHostile(seed uint64) Hostile {
	rng := rand.New(rand.NewPCG(seed, 1))
	s := DefaultHostile(seed)
	s.Clients = pick(rng, 2, 6, 12, 24)
	s.Load = pick(rng, 5*time.Second, 10*time.Second, 30*time.Second)
	s.KillEvery = pick(rng, 0, 0, 2*time.Second, 5*time.Second)
	s.Config = map[string]any{
		"shards":                    pick(rng, 1, 1, 3),
		"io_backend":                pick(rng, "auto", "auto", "pread"),
		"journal_file_bytes":        pick(rng, 4<<20, 64<<20),
		"segment_max_bytes":         pick(rng, 64<<10, 64<<20),
		"metadata_snapshot_records": pick(rng, 1, 16, 8192),
	}
	return s
}

// The topics and groups of a Hostile run. What is doomed may be changed in every way, the others only have members.
var (
	hostileTopics = []hostileTopic{{"quiet", 1, false}, {"busy", 4, false}, {"doomed", 3, true}}
	hostileGroups = []hostileGroup{
		{"a", `{"retry":[10],"lease_ms":1000}`, false},
		{"b", `{"retry":[10,50],"lease_ms":2000,"max_attempts":3,"strategy":"circle"}`, false},
		{"wild", "", true},
		{"ordered", `{"ordered":true,"retry":[10]}`, true},
		{"radio", `{"broadcast":true,"lease_ms":1000}`, true},
	}
)

type hostileTopic struct {
	name       string
	partitions int
	doomed     bool
}

type hostileGroup struct {
	name     string
	settings string
	doomed   bool
}

// cast is a group of a topic whose messages are accounted for.
type cast struct{ topic, group string }

// hostileRun is a run that is under way.
type hostileRun struct {
	*Hostile
	addr string
	d    *harness.Daemon
	stop chan struct{}

	mu       sync.Mutex
	topics   map[string]uint16 // the ids as they were last heard of
	names    map[uint16]string
	history  map[cast]*history
	members  []uint64 // ids that were ever given out, to be guessed by others
	seen     []protocol.Msg
	answers  map[string]int
	problems []error
	lives    int
}

// Run runs it. The error names what was found broken.
func (s *Hostile) Run(ctx context.Context) (err error) {
	if s.patience == 0 {
		s.patience = defaultPatience
	}
	r := &hostileRun{Hostile: s, addr: harness.LastingAddr(), stop: make(chan struct{}), topics: map[string]uint16{}, names: map[uint16]string{},
		history: map[cast]*history{}, answers: map[string]int{}}
	defer func() {
		if r.d != nil {
			r.d.Kill()
		}
		if err != nil {
			err = fmt.Errorf("seed %d: %w", s.Seed, err)
		}
	}()
	if err := r.start(ctx); err != nil {
		return err
	}
	if err := r.prepare(); err != nil {
		return err
	}
	if err := r.load(ctx); err != nil {
		return err
	}
	if err := r.empty(ctx); err != nil {
		return err
	}
	return r.settle()
}

func (r *hostileRun) start(ctx context.Context) error {
	config := map[string]any{"listen_client": r.addr}
	for k, v := range r.Config {
		config[k] = v
	}
	d, err := harness.Start(ctx, harness.Options{Binary: r.Binary, DataDir: r.DataDir, Config: config})
	if err != nil {
		return err
	}
	r.d = d
	return nil
}

func (r *hostileRun) prepare() error {
	c, err := harness.Dial(r.addr, "")
	if err != nil {
		return err
	}
	defer c.Close()
	for _, t := range hostileTopics {
		res, err := c.Declare(t.name, t.partitions)
		if err != nil {
			return err
		}
		r.topic(t.name, res.TopicID)
		for _, g := range hostileGroups {
			if t.doomed || g.doomed {
				continue
			}
			r.history[cast{t.name, g.name}] = newHistory()
			m := protocol.Declare{Topic: []byte(t.name), Flags: protocol.DeclareFlagGroup | protocol.DeclareFlagSettings, Group: []byte(g.name), Settings: []byte(g.settings)}
			if _, err := c.Request(protocol.OpDeclare, m.AppendFrame(nil)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *hostileRun) topic(name string, id uint16) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.topics[name] = id
	r.names[id] = name
}

func (r *hostileRun) problem(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.problems) < maxViolations {
		r.problems = append(r.problems, fmt.Errorf(format, args...))
	}
}

// err returns everything that was found broken.
func (r *hostileRun) err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	errs := append([]error{r.d.Crashed()}, r.problems...)
	for c, h := range r.history {
		if err := h.err(); err != nil {
			errs = append(errs, fmt.Errorf("topic %s, group %s: %w", c.topic, c.group, err))
		}
	}
	return errors.Join(errs...)
}

// load lets everybody do what they like for a while.
func (r *hostileRun) load(ctx context.Context) error {
	var all sync.WaitGroup
	for i := range r.Clients {
		rng := rand.New(rand.NewPCG(r.Seed, uint64(i)<<8|4))
		all.Go(func() {
			for !r.stopped() {
				r.client(rng)
			}
		})
	}
	for i := range hostileTopics {
		all.Go(func() { r.publish(&hostileTopics[i], rand.New(rand.NewPCG(r.Seed, uint64(i)<<8|5))) })
	}
	err := r.watch(ctx)
	close(r.stop)
	all.Wait()
	r.Logf("%d kills; answers: %v", r.lives/2, r.answers)
	return errors.Join(err, r.err())
}

func (r *hostileRun) stopped() bool {
	select {
	case <-r.stop:
		return true
	default:
		return false
	}
}

// watch looks at the broker, and kills it where that is wanted.
func (r *hostileRun) watch(ctx context.Context) error {
	rng := rand.New(rand.NewPCG(r.Seed, 6))
	kill := time.Now().Add(r.nextKill(rng))
	for end := time.Now().Add(r.Load); time.Now().Before(end); {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
		if err := r.err(); err != nil {
			return err
		}
		if r.KillEvery > 0 && time.Now().After(kill) {
			r.count(&r.lives)
			r.d.Kill()
			if err := r.start(ctx); err != nil {
				return err
			}
			r.count(&r.lives)
			kill = time.Now().Add(r.nextKill(rng))
		}
		if _, err := r.d.CheckSums(); err != nil {
			// A group may be deleted between the list and the look at it.
			if !strings.Contains(err.Error(), "404") && !strings.Contains(err.Error(), "has 0 groups") {
				return err
			}
		}
	}
	return nil
}

func (r *hostileRun) nextKill(rng *rand.Rand) time.Duration {
	if r.KillEvery == 0 {
		return r.Load
	}
	return time.Duration(rng.Int64N(2 * int64(r.KillEvery)))
}

// life is odd while the broker is being killed. A connection that ends in another life than it began in, or began while
// the broker was being killed, was ended by that.
func (r *hostileRun) life() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lives
}

func (r *hostileRun) count(n *int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	*n++
}

// publish sends messages to a topic, small ones and now and then a large one.
func (r *hostileRun) publish(t *hostileTopic, rng *rand.Rand) {
	var c *harness.Conn
	defer func() {
		if c != nil {
			c.Close()
		}
	}()
	// A publish that was not answered is sent again as what it was, so that it is stored once.
	const producer = 1
	next := make([]uint64, t.partitions)
	for !r.stopped() {
		r.mu.Lock()
		id := r.topics[t.name]
		r.mu.Unlock()
		if c == nil {
			var err error
			if c, err = harness.Dial(r.addr, ""); err != nil {
				c = nil
				time.Sleep(retryPause)
				continue
			}
		}
		p := rng.IntN(t.partitions)
		n := uint64(p)<<numberShift | (next[p] + 1)
		value := valueOf(n, good)
		if rng.IntN(50) == 0 {
			value = append(value, make([]byte, 1+rng.IntN(60_000))...)
		}
		m := protocol.Pub{TopicID: id, Partition: uint16(p), Value: value, ProducerID: producer, ProducerSeq: next[p] + 1}
		if t.doomed {
			m.ProducerID, m.ProducerSeq = 0, 0
		}
		res, err := c.Publish(&m)
		switch _, refused := protocol.CodeOf(err); {
		case err == nil:
			next[p]++
			if !t.doomed {
				r.published(t.name, uint16(p), res.Sequence, n)
			}
		case refused && t.doomed:
		case refused:
			r.problem("publish to %s: %w", t.name, err)
			return
		default:
			c.Close()
			c = nil
		}
		time.Sleep(time.Duration(rng.IntN(int(2 * time.Millisecond))))
	}
}

func (r *hostileRun) published(topic string, partition uint16, seq, n uint64) {
	res := resultAt(partition, seq)
	for c, h := range r.history {
		if c.topic == topic {
			h.published(&res, n, good)
		}
	}
}

// empty waits until the broker knows that everybody is gone.
func (r *hostileRun) empty(ctx context.Context) error {
	for end := time.Now().Add(r.patience); ; {
		gone := true
		for c := range r.history {
			g, err := r.d.GroupState(c.topic, c.group)
			if err != nil {
				return err
			}
			gone = gone && g.State == "empty" && g.InFlight == 0
		}
		var text strings.Builder
		if err := r.d.Fetch("/metrics", &text); err != nil {
			return err
		}
		if gone && strings.Contains(text.String(), "\nmortarmq_connections 0\n") {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%v after the last connection was closed the broker still has members or connections\n%s", r.patience, r.d.Log())
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pollEvery):
		}
	}
}

// settle has orderly members finish what is left, and compares everything.
func (r *hostileRun) settle() error {
	crowds := map[*harness.Crowd]bool{}
	defer func() {
		for c := range crowds {
			c.Close()
		}
	}()
	for c, h := range r.history {
		cr, err := harness.NewCrowd(r.addr, func(m *harness.CrowdMember, msg *protocol.Msg) {
			r.took(h, msg, m.ID())
			h.take(&event{Kind: eventAcking, Partition: msg.Partition, Sequence: msg.Sequence}, m.ID())
		})
		if err != nil {
			return err
		}
		crowds[cr] = true
		if _, err := cr.Join(&protocol.Sub{Group: []byte(c.group), TopicID: r.topics[c.topic], Partition: protocol.AnyPartition, Flags: protocol.SubFlagStream}); err != nil {
			return err
		}
	}
	if err := r.drained(); err != nil {
		return err
	}
	for c := range crowds {
		if err := c.Err(); err != nil {
			return err
		}
	}
	if err := r.readLetters(); err != nil {
		return err
	}
	for c, h := range r.history {
		g, err := r.d.GroupStats(c.topic, c.group)
		if err != nil {
			return err
		}
		t := h.checkHostile(hostileAttempts(c.group))
		if g.Published != t.published || g.Acknowledged != t.acknowledged || g.Dropped != t.dropped || g.DLQ != t.dropped {
			return errors.Join(r.err(), fmt.Errorf("topic %s, group %s: its counters are %+v, it was %+v", c.topic, c.group, g, t))
		}
		r.Logf("topic %s, group %s: %d messages, %d dead letters", c.topic, c.group, t.published, t.dropped)
	}
	_, err := r.d.CheckSums()
	return errors.Join(err, r.err())
}

func hostileAttempts(group string) uint16 {
	if group == "b" {
		return 3
	}
	return scenarioAttempts
}

func (r *hostileRun) drained() error {
	done, last := uint64(0), time.Now()
	for {
		sum, left := uint64(0), 0
		for c := range r.history {
			g, err := r.d.GroupStats(c.topic, c.group)
			if err != nil {
				return err
			}
			sum += g.Acknowledged + g.Dropped
			if g.Lag > 0 {
				left++
			}
		}
		if left == 0 {
			return nil
		}
		if sum != done {
			done, last = sum, time.Now()
		}
		if time.Since(last) > r.patience {
			return errors.Join(r.err(), fmt.Errorf("nothing has happened for %v, and %d groups have something left to be delivered\n%s", r.patience, left, r.d.Log()))
		}
		time.Sleep(pollEvery)
	}
}

// readLetters reads the dead letters of the groups that are accounted for, and of others on the way.
func (r *hostileRun) readLetters() error {
	for _, g := range hostileGroups {
		if g.doomed {
			continue
		}
		n := uint64(0)
		for c := range r.history {
			if c.group == g.name {
				s, err := r.d.GroupStats(c.topic, c.group)
				if err != nil {
					return err
				}
				n += s.DLQ
			}
		}
		if n == 0 {
			continue
		}
		// The topic also has those of the group of the same name on the doomed topic.
		total, err := r.lastLetter(g.name)
		if err != nil {
			return err
		}
		err = readLetters(r.addr, g.name, total, r.patience, func(e *deadletter.Envelope, seq uint64, value []byte) {
			if h := r.history[cast{string(e.Topic), g.name}]; h != nil {
				h.buried(e, seq, value)
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// lastLetter returns the number of letters in a group's dead-letter topic.
func (r *hostileRun) lastLetter(group string) (uint64, error) {
	var topics struct {
		Topics []struct {
			PartitionStats []struct {
				LastSeq uint64 `json:"last_seq"`
			} `json:"partition_stats"`
		} `json:"topics"`
	}
	if err := r.d.FetchJSON("/stats?"+url.Values{"topic": {protocol.DLQPrefix + group}}.Encode(), &topics); err != nil {
		return 0, err
	}
	if len(topics.Topics) != 1 || len(topics.Topics[0].PartitionStats) != 1 {
		return 0, io.ErrUnexpectedEOF
	}
	return topics.Topics[0].PartitionStats[0].LastSeq, nil
}

// took notes a delivery of a group that is accounted for.
func (r *hostileRun) took(h *history, m *protocol.Msg, member uint64) {
	n, _, ok := parseValue(m.Value[:min(len(m.Value), valueLen)])
	if !ok {
		r.problem("a value that nobody has published came: %.32x", m.Value)
		return
	}
	h.take(&event{Kind: eventDelivered, Number: n, Partition: m.Partition, Attempt: m.Attempt, Sequence: m.Sequence, Delivery: m.DeliveryID,
		Epoch: m.OwnershipEpoch}, member)
}
