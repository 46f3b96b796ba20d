package delivery

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

// mortard is the binary, built once.
var mortard string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "mortarmq-delivery-")
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

// start starts a broker whose leases don't run out while a test looks, however slow the machine is.
func start(t *testing.T, dir string) *harness.Daemon {
	t.Helper()
	d, err := harness.Start(t.Context(), harness.Options{Binary: mortard, DataDir: dir, Config: map[string]any{"delivery_lease_ms": 60_000}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.EndScenario(t) })
	return d
}

// quick has failed messages come back at once, nearly.
const quick = `{"retry":[10]}`

// member is a consumer in STREAM mode.
type member struct {
	t    *testing.T
	conn *harness.Conn
	sub  protocol.SubResult
	// msgs came while something else was waited for; errs are pushed ERR frames.
	msgs []protocol.Msg
	errs []error
	// mu guards sending, so that beats, the heartbeats without an answer, are counted in the order of the requests.
	mu    sync.Mutex
	beats int
	stop  chan struct{}
}

// heartbeats are sent until the member leaves or its connection breaks.
func (m *member) heartbeats() {
	m.stop = make(chan struct{})
	go func() {
		for {
			select {
			case <-m.stop:
				return
			case <-time.After(2 * time.Second):
			}
			m.mu.Lock()
			m.beats++
			err := m.conn.Send(m.heartbeat(protocol.MemberActive))
			m.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
}

func (m *member) heartbeat(state protocol.MemberState) []byte {
	h := protocol.Heartbeat{SubscriptionID: m.sub.SubscriptionID, MemberID: m.sub.MemberID, MembershipEpoch: m.sub.MembershipEpoch,
		AssignmentEpoch: m.sub.AssignmentEpoch, State: state}
	return h.AppendFrame(nil)
}

// beat tells whether an answer is that of a heartbeat nobody waits for.
func (m *member) beat(op protocol.Op) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if op != protocol.OpHeartbeat || m.beats == 0 {
		return false
	}
	m.beats--
	return true
}

func dial(t *testing.T, d *harness.Daemon) *harness.Conn {
	t.Helper()
	c, err := harness.Dial(d.ClientAddr, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func declare(t *testing.T, d *harness.Daemon, topic string, partitions int) uint16 {
	t.Helper()
	res, err := dial(t, d).Declare(topic, partitions)
	if err != nil {
		t.Fatal(err)
	}
	return res.TopicID
}

func publish(t *testing.T, d *harness.Daemon, topic uint16, values ...string) {
	t.Helper()
	c := dial(t, d)
	for _, v := range values {
		if _, err := c.Publish(&protocol.Pub{TopicID: topic, Value: []byte(v)}); err != nil {
			t.Fatal(err)
		}
	}
	c.Close()
}

func join(t *testing.T, d *harness.Daemon, group string, topic uint16, settings string, adjust ...func(*protocol.Sub)) *member {
	t.Helper()
	s := protocol.Sub{Group: []byte(group), TopicID: topic, Partition: protocol.AnyPartition, Flags: protocol.SubFlagStream}
	if settings != "" {
		s.Flags |= protocol.SubFlagSettings
		s.Settings = []byte(settings)
	}
	for _, f := range adjust {
		f(&s)
	}
	m := &member{t: t, conn: dial(t, d)}
	var err error
	m.sub, err = m.conn.Subscribe(&s)
	if errors.Is(err, protocol.CodeUnknownMember) { // a machine so slow that the session is over
		s.Flags &^= protocol.SubFlagRejoin
		m.sub, err = m.conn.Subscribe(&s)
	}
	if err != nil {
		t.Fatal(err)
	}
	m.heartbeats()
	t.Cleanup(func() { m.conn.Close() })
	return m
}

// rejoin has join come back as this member.
func (m *member) rejoin(s *protocol.Sub) {
	s.Flags, s.MemberID = s.Flags|protocol.SubFlagRejoin, m.sub.MemberID
}

var errSilence = errors.New("nothing came in time")

// read takes the next frame that is not a push, or a message if wanted; notices are confirmed on the way.
func (m *member) read(within time.Duration, wantMsg bool) (harness.Frame, error) {
	if err := m.conn.Net().SetReadDeadline(time.Now().Add(within)); err != nil {
		m.t.Fatal(err)
	}
	for {
		f, err := m.conn.Next()
		if err != nil {
			if os.IsTimeout(err) {
				err = errSilence
			}
			return f, err
		}
		switch f.Op {
		case protocol.OpNotice:
			var n protocol.Notice
			if err := n.Decode(f.Payload); err != nil {
				m.t.Fatal(err)
			}
			m.mu.Lock()
			m.sub.MembershipEpoch, m.sub.AssignmentEpoch = n.MembershipEpoch, n.AssignmentEpoch
			err := m.conn.Send(harness.ConfirmNotice(&n))
			m.mu.Unlock()
			if err != nil {
				return f, err
			}
		case protocol.OpMsg:
			var msg protocol.Msg
			if err := msg.Decode(append([]byte(nil), f.Payload...)); err != nil {
				m.t.Fatal(err)
			}
			m.msgs = append(m.msgs, msg)
			if wantMsg {
				return f, nil
			}
		case protocol.OpErr:
			var e protocol.ErrFrame
			if err := e.Decode(f.Payload); err != nil {
				m.t.Fatal(err)
			}
			if m.beat(e.RequestOp) {
				continue // it met a notice on the way
			}
			if e.RequestOp != protocol.OpMsg {
				return f, nil
			}
			m.errs = append(m.errs, e.Err())
			if wantMsg {
				return f, nil
			}
		case protocol.OpOK:
			var ok protocol.OKFrame
			if err := ok.Decode(f.Payload); err != nil {
				m.t.Fatal(err)
			}
			if ok.RequestOp != protocol.OpControlAck && !m.beat(ok.RequestOp) {
				return f, nil
			}
		default:
			m.t.Fatalf("%v came", f.Op)
		}
	}
}

// next waits for a message; false: none came in time.
func (m *member) next(within time.Duration) (protocol.Msg, bool) {
	m.t.Helper()
	if len(m.msgs) == 0 {
		if _, err := m.read(within, true); err != nil && !errors.Is(err, errSilence) {
			m.t.Fatal(err)
		}
	}
	if len(m.msgs) == 0 {
		return protocol.Msg{}, false
	}
	msg := m.msgs[0]
	m.msgs = m.msgs[1:]
	return msg, true
}

// want waits for a message and checks its sequence and attempt (0: any).
func (m *member) want(seq uint64, attempt uint16) protocol.Msg {
	m.t.Helper()
	msg, ok := m.next(30 * time.Second)
	switch {
	case !ok:
		m.t.Fatalf("message %d did not come", seq)
	case msg.Sequence != seq || attempt != 0 && msg.Attempt != attempt:
		m.t.Fatalf("message %d came, attempt %d; want %d, attempt %d", msg.Sequence, msg.Attempt, seq, attempt)
	}
	return msg
}

// silent checks that nothing comes for a while.
func (m *member) silent(for_ time.Duration) {
	m.t.Helper()
	if msg, ok := m.next(for_); ok {
		m.t.Fatalf("message %d came, attempt %d", msg.Sequence, msg.Attempt)
	}
}

// call sends a request and waits for its answer.
func (m *member) call(frame []byte) error {
	m.t.Helper()
	m.mu.Lock()
	err := m.conn.Send(frame)
	m.mu.Unlock()
	if err != nil {
		return err
	}
	f, err := m.read(15*time.Second, false)
	if err != nil {
		return err
	}
	return f.Err()
}

func (m *member) ack(msg *protocol.Msg) error {
	m.t.Helper()
	a := protocol.Ack{SubscriptionID: msg.SubscriptionID, TopicID: msg.TopicID, Partition: msg.Partition, Sequence: msg.Sequence,
		DeliveryID: msg.DeliveryID, OwnershipEpoch: msg.OwnershipEpoch}
	return m.call(a.AppendFrame(nil))
}

func (m *member) mustAck(msgs ...protocol.Msg) {
	m.t.Helper()
	for i := range msgs {
		if err := m.ack(&msgs[i]); err != nil {
			m.t.Fatalf("ACK of %d: %v", msgs[i].Sequence, err)
		}
	}
}

func (m *member) nack(msg *protocol.Msg, reason protocol.NackReason) error {
	m.t.Helper()
	a := protocol.Nack{SubscriptionID: msg.SubscriptionID, TopicID: msg.TopicID, Partition: msg.Partition, Sequence: msg.Sequence,
		DeliveryID: msg.DeliveryID, OwnershipEpoch: msg.OwnershipEpoch, Reason: reason}
	return m.call(a.AppendFrame(nil))
}

// leave goes without losing anything.
func (m *member) leave() {
	m.t.Helper()
	close(m.stop)
	if err := m.call(m.heartbeat(protocol.MemberLeave)); err != nil {
		m.t.Fatalf("LEAVE: %v", err)
	}
	m.conn.Close()
}

// stats returns the group's numbers after every group's sums were checked.
func stats(t *testing.T, d *harness.Daemon, topic, group string) harness.GroupSums {
	t.Helper()
	all, err := d.CheckSums()
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range all {
		if g.Topic == topic && g.Group == group {
			return g
		}
	}
	t.Fatalf("there is no group %s of topic %s", group, topic)
	return harness.GroupSums{}
}

// eventually waits until the group's numbers are as they should be.
func eventually(t *testing.T, d *harness.Daemon, topic, group, what string, ok func(harness.GroupSums) bool) {
	t.Helper()
	for range 6000 {
		if ok(stats(t, d, topic, group)) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("%s: %+v", what, stats(t, d, topic, group))
}
