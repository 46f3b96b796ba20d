package engine

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/engine/deadletter"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// cellar is a broker without goroutines on a simulated disk, whose power can be cut.
type cellar struct {
	t    testing.TB
	dir  string // of the one file that is not on the simulated disk
	time *cellarTime
	disk *simdisk.Disk
	e    *Engine
	in   *Ingress
	c    *testClient
	sub  protocol.SubResult
	msgs []protocol.Msg
	beat time.Duration
}

// cellarTime goes on across starts, as the world's does.
type cellarTime struct{ now time.Duration }

func (c *cellarTime) Now() time.Duration { return c.now }
func (c *cellarTime) WallMs() uint64     { return uint64(1_800_000_000_000 + c.now.Milliseconds()) }

// cellarDevice is the simulated disk as one loop of the engine uses it.
type cellarDevice struct{ *simdisk.Queue }

func (d cellarDevice) Wait(time.Duration) (int, error) {
	if err := d.WaitOne(); err != nil {
		return 0, err
	}
	return 1, nil
}
func (d cellarDevice) Wake()             {}
func (d cellarDevice) Stats() ring.Stats { return ring.Stats{} }
func (d cellarDevice) Backend() string   { return "simulated" }
func (d cellarDevice) Reason() string    { return "" }
func (d cellarDevice) Close() error      { return nil }

// open starts a broker on a disk.
func openCellar(t testing.TB, dir string, at *cellarTime, disk *simdisk.Disk) *cellar {
	t.Helper()
	w := &cellar{t: t, dir: dir, time: at, disk: disk, c: newTestClient()}
	o := testOptions(dir)
	o.JournalFileBytes, o.JournalMaxFiles, o.MaxRoundBytes, o.Shards = 512<<10, 4, 64<<10, 2
	o.Clock, o.Stepped, o.Seed = at, true, 1
	o.OpenDevice = func() (Device, error) { return cellarDevice{disk.NewQueue()}, nil }
	w.e = mustOpen(t, o)
	w.in = w.e.NewIngress()
	return w
}

func newCellarDisk(seed uint64, at *cellarTime) *simdisk.Disk {
	return simdisk.New(simdisk.Options{Seed: seed, Now: at.Now, Latency: func(op *ring.Op, rng *rand.Rand) time.Duration {
		return time.Duration(10+rng.IntN(100)) * time.Microsecond
	}})
}

// until lets the broker run until ok, at most for a time; it reports whether that came true.
func (w *cellar) until(most time.Duration, ok func() bool) bool {
	w.t.Helper()
	end := w.time.now + most
	for steps := 0; !ok(); steps++ {
		if steps > 1_000_000 {
			w.t.Fatal("the broker never comes to rest")
		}
		if w.sub.MemberID != 0 && w.time.now >= w.beat {
			w.beat = w.time.now + time.Second
			w.request(protocol.OpHeartbeat, (&protocol.Heartbeat{SubscriptionID: w.sub.SubscriptionID, MemberID: w.sub.MemberID,
				MembershipEpoch: w.sub.MembershipEpoch, AssignmentEpoch: w.sub.AssignmentEpoch}).AppendFrame(nil))
		}
		progress, next := w.e.Step()
		w.pushed()
		if progress {
			continue
		}
		if w.sub.MemberID != 0 {
			next = min(next, w.beat)
		}
		if due, some := w.disk.NextDue(); some {
			next = min(next, due)
		}
		if next > end {
			w.time.now = end
			return ok()
		}
		w.time.now = max(w.time.now, next)
	}
	return true
}

// pushed takes what the broker sends by itself; notices are confirmed.
func (w *cellar) pushed() {
	for {
		op, payload, n, err := protocol.ParseFrame(w.c.pushed)
		if err != nil {
			w.t.Fatal(err)
		}
		if n == 0 {
			return
		}
		frame := append([]byte(nil), payload...)
		w.c.pushed = w.c.pushed[n:]
		switch op {
		case protocol.OpMsg:
			var m protocol.Msg
			if err := m.Decode(frame); err != nil {
				w.t.Fatal(err)
			}
			w.msgs = append(w.msgs, m)
		case protocol.OpNotice:
			m, confirm := confirmation(w.t, frame)
			w.sub.AssignmentEpoch = max(w.sub.AssignmentEpoch, m.AssignmentEpoch)
			w.request(protocol.OpControlAck, confirm)
		default:
			w.t.Fatalf("%v was pushed", op)
		}
	}
}

func (w *cellar) request(op protocol.Op, frame []byte) uint64 {
	req := w.c.request()
	w.in.Request(w.c, req, op, payloadOf(frame))
	flush(w.in)
	return req
}

func (w *cellar) answered(req uint64) bool { return w.c.answers[req] != nil }

// call sends a request and waits for its answer.
func (w *cellar) call(op protocol.Op, frame []byte) ([]byte, error) {
	w.t.Helper()
	req := w.request(op, frame)
	if !w.until(30*time.Second, func() bool { return w.answered(req) }) {
		w.t.Fatalf("%v is never answered", op)
	}
	return w.c.answer(w.t, req)
}

// topic creates a topic of one partition, or with partitions 0 looks one up, and returns its id.
func (w *cellar) topic(name string, partitions uint16) uint16 {
	w.t.Helper()
	m := protocol.Declare{Topic: []byte(name), Partitions: partitions}
	if partitions == 0 {
		m.Flags = protocol.DeclareFlagLookup
	}
	var r protocol.DeclareResult
	b, err := w.call(protocol.OpDeclare, m.AppendFrame(nil))
	if err == nil {
		err = r.Decode(b)
	}
	if err != nil {
		w.t.Fatalf("DECLARE %s: %v", name, err)
	}
	return r.TopicID
}

// join becomes a member of a group, on a connection of its own.
func (w *cellar) join(group string, topic uint16) {
	w.t.Helper()
	w.c, w.msgs, w.sub = newTestClient(), nil, protocol.SubResult{}
	b, err := w.call(protocol.OpSub, (&protocol.Sub{Group: []byte(group), TopicID: topic, Partition: protocol.AnyPartition, Flags: protocol.SubFlagStream}).AppendFrame(nil))
	if err == nil {
		err = w.sub.Decode(b)
	}
	if err != nil {
		w.t.Fatalf("SUB: %v", err)
	}
}

func (w *cellar) reject(m *protocol.Msg) uint64 {
	return w.request(protocol.OpNack, (&protocol.Nack{SubscriptionID: m.SubscriptionID, TopicID: m.TopicID, Partition: m.Partition,
		Sequence: m.Sequence, DeliveryID: m.DeliveryID, OwnershipEpoch: m.OwnershipEpoch, Reason: protocol.NackReject}).AppendFrame(nil))
}

func (w *cellar) group(name string) (dropped, dlq, open uint64) {
	w.t.Helper()
	var found bool
	done := make(chan struct{})
	go func() { // Stats waits for the coordinator, which the test drives
		defer close(done)
		s, err := w.e.Stats(context.Background())
		if err != nil {
			w.t.Error(err)
			return
		}
		for _, g := range s.Coord.Groups {
			if g.Name == name {
				found, dropped, dlq, open = true, g.Dropped, g.DLQ, g.InFlight+g.Waiting
			}
		}
	}()
	for waiting := true; waiting; {
		select {
		case <-done:
			waiting = false
		default:
			w.e.Step()
		}
	}
	if !found {
		w.t.Fatalf("there is no group %s", name)
	}
	return dropped, dlq, open
}

const cellarMessage = "poison"

// bury brings the only message of the topic to its end, whatever an earlier start has left of that, and checks that there is
// one letter of it.
func (w *cellar) bury(what string) {
	w.t.Helper()
	topic := w.topic("orders", 0)
	w.join("g", topic)
	over := func() bool { dropped, dlq, open := w.group("g"); return dropped == 1 && dlq == 1 && open == 0 }
	for range 40 {
		w.until(500*time.Millisecond, func() bool { return len(w.msgs) > 0 })
		for i := range w.msgs {
			if m := &w.msgs[i]; string(m.Value) != cellarMessage || m.Attempt != 1 {
				w.t.Fatalf("%s: got %q, attempt %d", what, m.Value, m.Attempt)
			}
			w.reject(&w.msgs[i])
		}
		w.msgs = nil
		if over() {
			break
		}
	}
	if !over() {
		dropped, dlq, open := w.group("g")
		w.t.Fatalf("%s: %d dropped, %d with a letter, %d open", what, dropped, dlq, open)
	}
	w.join(fmt.Sprint("look-", w.time.now), w.topic("$dlq.g", 0))
	w.until(10*time.Second, func() bool { return len(w.msgs) > 0 })
	w.until(time.Second, func() bool { return len(w.msgs) > 1 })
	if len(w.msgs) != 1 {
		w.t.Fatalf("%s: %d letters", what, len(w.msgs))
	}
	var e deadletter.Envelope
	if value, err := e.Decode(w.msgs[0].Value); err != nil || string(value) != cellarMessage || e.TopicID != topic || e.Sequence != 1 || e.Attempts != 1 {
		w.t.Fatalf("%s: the letter has %q: %+v, %v", what, value, e, err)
	}
}

// The power is cut before every completion of the disk between the rejection of a message and its end, with any part of what
// was not flushed surviving, and again while the next start puts things right: there is always exactly one letter. The
// message, the ledger and the letter are in different journals.
func TestEngine_PowerCutsLeaveExactlyOneLetter(t *testing.T) {
	seeds := uint64(5)
	if testing.Short() {
		seeds = 1
	}
	for seed := range seeds {
		t.Run(fmt.Sprint("seed_", seed), func(t *testing.T) { powerCutsLeaveOneLetter(t, seed+1) })
	}
}

func powerCutsLeaveOneLetter(t *testing.T, seed uint64) {
	at, dir := &cellarTime{}, t.TempDir()
	disk := newCellarDisk(seed, at)
	w := openCellar(t, dir, at, disk)
	topic := w.topic("orders", 1)
	w.in.Publish(w.c, w.c.request(), &protocol.Pub{TopicID: topic, Value: []byte(cellarMessage)})
	flush(w.in)
	w.join("g", topic)
	if !w.until(10*time.Second, func() bool { return len(w.msgs) > 0 }) {
		t.Fatal("the message never came")
	}
	type cut struct {
		disk *simdisk.Disk
		now  time.Duration
		what string
	}
	var cuts []cut
	rng := rand.New(rand.NewPCG(seed, 4))
	steps := 0
	disk.OnStep(func(op *ring.Op) {
		steps++
		add := func(what string, d *simdisk.Disk) {
			cuts = append(cuts, cut{d, at.now, fmt.Sprintf("before completion %d (%v), %s", steps, op.Kind, what)})
		}
		add("nothing kept", disk.Crash(nil))
		add("killed", disk.Clone())
		for i := range 3 {
			add(fmt.Sprintf("part %d kept", i), disk.Crash(simdisk.RandomFates(rng)))
		}
	})
	nack := w.reject(&w.msgs[0])
	if !w.until(10*time.Second, func() bool { return w.answered(nack) }) {
		t.Fatal("the NACK is never answered")
	}
	if _, err := w.c.answer(t, nack); err != nil {
		t.Fatal(err)
	}
	w.until(50*time.Millisecond, func() bool { return false })
	disk.OnStep(nil)
	if steps < 5 {
		t.Fatalf("%d completions between the rejection and the end", steps)
	}
	for i, c := range cuts {
		at.now = c.now // which is the time of all disks
		var again *simdisk.Disk
		if i%3 == 0 { // the next start is cut short as well
			n := 1 + rng.IntN(60)
			c.disk.OnStep(func(*ring.Op) {
				if n--; n == 0 {
					again = c.disk.Crash(simdisk.RandomFates(rng))
				}
			})
		}
		openCellar(t, dir, at, c.disk).bury(c.what)
		if again != nil {
			openCellar(t, dir, at, again).bury(c.what + ", and again")
		}
	}
}
