package delivery

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/engine/deadletter"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

// letters reads a group's dead letters with a group of its own: "value attempts reason", in order.
func letters(t *testing.T, d *harness.Daemon, group string, n int) []string {
	t.Helper()
	m := join(t, d, fmt.Sprintf("look.%d", time.Now().UnixNano()), topicOf(t, d, protocol.DLQPrefix+group), "")
	defer m.leave()
	var all []string
	for len(all) < n {
		msg := m.want(uint64(len(all)+1), 1)
		var e deadletter.Envelope
		value, err := e.Decode(msg.Value)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, fmt.Sprintf("%s %d %s", value, e.Attempts, e.Reason))
	}
	m.silent(100 * time.Millisecond)
	return all
}

func wantLetters(t *testing.T, d *harness.Daemon, group string, want ...string) {
	t.Helper()
	if got := letters(t, d, group, len(want)); strings.Join(got, "|") != strings.Join(want, "|") {
		t.Fatalf("dead letters %q, want %q", got, want)
	}
}

// g1: a gap holds the floor back, and it moves over everything at once when the gap is filled.
func TestCase_FloorMovesOverAFilledGap(t *testing.T) {
	d := start(t, t.TempDir())
	topic := declare(t, d, "t", 1)
	publish(t, d, topic, "1", "2", "3", "4", "5")
	m := join(t, d, "g", topic, quick)
	var msgs []protocol.Msg
	for seq := uint64(1); seq <= 5; seq++ {
		msgs = append(msgs, m.want(seq, 1))
	}
	if err := m.nack(&msgs[2], protocol.NackRetryNow); err != nil {
		t.Fatal(err)
	}
	m.mustAck(msgs[0], msgs[1], msgs[3], msgs[4])
	if g := stats(t, d, "t", "g"); g.Lag != 3 || g.Acknowledged != 4 {
		t.Fatalf("%+v, want a floor of 2", g)
	}
	m.mustAck(m.want(3, 2))
	if g := stats(t, d, "t", "g"); g.Lag != 0 || g.Acknowledged != 5 {
		t.Fatalf("%+v, want a floor of 5", g)
	}
}

// g2: five consumers die in turn with the same message in flight; the broker dies with them once: attempts survive that.
func TestCase_MessageThatKillsItsConsumersIsADeadLetter(t *testing.T) {
	dir := t.TempDir()
	d := start(t, dir)
	topic := declare(t, d, "t", 1)
	publish(t, d, topic, "poison")
	for attempt := uint16(1); attempt <= 5; attempt++ {
		m := join(t, d, "g", topic, quick)
		m.want(1, attempt)
		m.conn.Close()
		if attempt == 3 {
			// The failure must be on record: what is in flight when the broker dies does not count.
			next := join(t, d, "g", topic, quick)
			next.want(1, 4)
			next.leave()
			d.Kill()
			<-d.Exited()
			d = start(t, dir)
		}
	}
	eventually(t, d, "t", "g", "one dead letter", func(g harness.GroupSums) bool { return g.DLQ == 1 && g.Dropped == 1 && g.Lag == 0 })
	wantLetters(t, d, "g", "poison 5 connection")
	join(t, d, "g", topic, quick).silent(300 * time.Millisecond)
}

// g4: a maximum of attempts is obeyed, in ordered groups too; 0 is no maximum that a group could have.
func TestCase_MaximumOfAttempts(t *testing.T) {
	d := start(t, t.TempDir())
	for _, ordered := range []bool{false, true} {
		for _, most := range []int{1, 5} {
			name := fmt.Sprintf("max%d.ordered-%t", most, ordered)
			topic := declare(t, d, name, 1)
			publish(t, d, topic, "poison", "good")
			m := join(t, d, name, topic, fmt.Sprintf(`{"max_attempts":%d,"ordered":%t,"retry":[10]}`, most, ordered))
			good := false
			for failed := 0; failed < most; {
				msg, ok := m.next(15 * time.Second)
				if !ok {
					t.Fatalf("%s: nothing came after %d attempts", name, failed)
				}
				if msg.Sequence == 2 {
					if ordered {
						t.Fatalf("%s: message 2 came before 1 was done", name)
					}
					m.mustAck(msg)
					good = true
					continue
				}
				if failed++; int(msg.Attempt) != failed {
					t.Fatalf("%s: attempt %d, want %d", name, msg.Attempt, failed)
				}
				if err := m.nack(&msg, protocol.NackRetryLater); err != nil {
					t.Fatal(err)
				}
			}
			if !good {
				m.mustAck(m.want(2, 1))
			}
			eventually(t, d, name, name, "one dead letter", func(g harness.GroupSums) bool { return g.DLQ == 1 && g.Acknowledged+g.Dropped == 2 })
			wantLetters(t, d, name, fmt.Sprintf("poison %d nack", most))
			m.silent(100 * time.Millisecond)
			m.leave()
		}
	}
	s := protocol.Sub{Group: []byte("zero"), TopicID: declare(t, d, "zero", 1), Partition: protocol.AnyPartition,
		Flags: protocol.SubFlagSettings, Settings: []byte(`{"max_attempts":0}`)}
	if _, err := dial(t, d).Subscribe(&s); !errors.Is(err, protocol.CodeGroupExistsMismatch) {
		t.Fatalf("a maximum of 0 attempts: %v", err)
	}
}

// g6: a group that reads and rejects its own dead letters makes no letters of letters; they stay readable.
func TestCase_DeadLettersDontMultiply(t *testing.T) {
	d := start(t, t.TempDir())
	topic := declare(t, d, "t", 1)
	publish(t, d, topic, "poison")
	m := join(t, d, "g", topic, quick)
	msg := m.want(1, 1)
	if err := m.nack(&msg, protocol.NackReject); err != nil {
		t.Fatal(err)
	}
	wantLetters(t, d, "g", "poison 1 rejected")
	letterTopic := topicOf(t, d, "$dlq.g")
	own := join(t, d, "g", letterTopic, quick)
	letter := own.want(1, 1)
	if err := own.nack(&letter, protocol.NackReject); !errors.Is(err, protocol.CodeDLQPathOverflow) {
		t.Fatalf("a dead letter was rejected: %v, want 0x0030", err)
	}
	if g := stats(t, d, "$dlq.g", "g"); g.Dropped != 1 || g.DLQ != 0 || g.Lag != 0 || g.Published != 1 {
		t.Fatalf("%+v", g)
	}
	wantLetters(t, d, "g", "poison 1 rejected")
	forged := protocol.Pub{TopicID: letterTopic, Value: []byte("forged")}
	if _, err := dial(t, d).Publish(&forged); !errors.Is(err, protocol.CodeInvalidTopic) {
		t.Fatalf("a client published to a dead-letter topic: %v", err)
	}
}

// g7: the broker is killed with leases open: what was not acknowledged comes again, without having used an attempt, and
// nothing that was.
func TestCase_KilledBrokerRedeliversTheUnacknowledgedOnly(t *testing.T) {
	dir := t.TempDir()
	d := start(t, dir)
	topic := declare(t, d, "t", 1)
	publish(t, d, topic, "1", "2", "3", "4", "5", "6")
	m := join(t, d, "g", topic, quick)
	var msgs []protocol.Msg
	for seq := uint64(1); seq <= 6; seq++ {
		msgs = append(msgs, m.want(seq, 1))
	}
	m.mustAck(msgs[0], msgs[2], msgs[4])
	d.Kill()
	<-d.Exited()
	d = start(t, dir)
	if g := stats(t, d, "t", "g"); g.Acknowledged != 3 || g.Waiting != 3 {
		t.Fatalf("%+v", g)
	}
	m = join(t, d, "g", topic, quick)
	for _, seq := range []uint64{2, 4, 6} {
		m.mustAck(m.want(seq, 1))
	}
	m.silent(200 * time.Millisecond)
	if g := stats(t, d, "t", "g"); g.Acknowledged != 6 || g.Lag != 0 {
		t.Fatalf("%+v", g)
	}
}

// g12: an ACK that comes after the lease ran out changes nothing; the new delivery stands and counts one attempt more.
func TestCase_LateAckIsANoOp(t *testing.T) {
	d := start(t, t.TempDir())
	topic := declare(t, d, "t", 1)
	publish(t, d, topic, "slow")
	m := join(t, d, "g", topic, quick)
	late := m.want(1, 1)
	again := m.want(1, 2) // after the lease
	if again.DeliveryID == late.DeliveryID {
		t.Fatal("both deliveries have one id")
	}
	if err := m.ack(&late); !errors.Is(err, protocol.CodeUnknownDelivery) {
		t.Fatalf("the late ACK: %v, want 0x0023", err)
	}
	if g := stats(t, d, "t", "g"); g.Acknowledged != 0 || g.InFlight != 1 {
		t.Fatalf("%+v", g)
	}
	m.mustAck(again)
	if g := stats(t, d, "t", "g"); g.Acknowledged != 1 || g.Lag != 0 {
		t.Fatalf("%+v", g)
	}
}

// g13: a message larger than the window is named; a larger window brings it, and what is behind it.
func TestCase_MessageLargerThanTheWindow(t *testing.T) {
	d := start(t, t.TempDir())
	topic := declare(t, d, "t", 1)
	large := strings.Repeat("x", 5000)
	publish(t, d, topic, "small 1", large, "small 3")
	m := join(t, d, "g", topic, `{"retry":[10],"lease_ms":60000}`, func(s *protocol.Sub) { s.CreditCount, s.CreditBytes = 10, 4000 })
	m.mustAck(m.want(1, 1))
	for len(m.errs) == 0 {
		if msg, ok := m.next(15 * time.Second); ok {
			t.Fatalf("message %d came", msg.Sequence)
		}
	}
	if err := m.errs[0]; !errors.Is(err, protocol.CodeMessageExceedsCredit) || !strings.Contains(err.Error(), "sequence 2") || !strings.Contains(err.Error(), "5000") {
		t.Fatalf("%v", err)
	}
	credit := protocol.Credit{SubscriptionID: m.sub.SubscriptionID, MembershipEpoch: m.sub.MembershipEpoch, Mode: protocol.CreditSet, Count: 10, Bytes: 1 << 20}
	if err := m.call(credit.AppendFrame(nil)); err != nil {
		t.Fatal(err)
	}
	two := m.want(2, 1)
	if !bytes.Equal(two.Value, []byte(large)) {
		t.Fatalf("%d bytes came", len(two.Value))
	}
	m.mustAck(two, m.want(3, 1))
	if g := stats(t, d, "t", "g"); g.Acknowledged != 3 || g.Lag != 0 {
		t.Fatalf("%+v", g)
	}
}

// One message of many is left unacknowledged: after a restart it comes again, alone and once.
func TestCase_OneOfManyIsRedelivered(t *testing.T) {
	const many, left = 20_000, 7_777
	dir := t.TempDir()
	d := start(t, dir)
	topic := declare(t, d, "t", 1)
	c := dial(t, d)
	var frames []byte
	for range many {
		p := protocol.Pub{TopicID: topic, Value: []byte("v")}
		frames = p.AppendFrame(frames)
	}
	go func() { _ = c.Send(frames) }()
	for range many {
		f, err := c.Next()
		if err == nil {
			err = f.Err()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	m := join(t, d, "g", topic, `{"lease_ms":60000}`, func(s *protocol.Sub) { s.CreditCount, s.CreditBytes = 65535, 64<<20 })
	for seq := uint64(1); seq <= many; seq++ {
		if msg := m.want(seq, 1); seq != left {
			a := protocol.Ack{SubscriptionID: msg.SubscriptionID, TopicID: msg.TopicID, Partition: msg.Partition, Sequence: msg.Sequence,
				DeliveryID: msg.DeliveryID, OwnershipEpoch: msg.OwnershipEpoch}
			if err := m.conn.Send(a.AppendFrame(nil)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for range many - 1 {
		if f, err := m.read(15*time.Second, false); err != nil || f.Err() != nil {
			t.Fatal(err, f.Err())
		}
	}
	d.Kill()
	<-d.Exited()
	d = start(t, dir)
	m = join(t, d, "g", topic, "")
	m.mustAck(m.want(left, 1))
	m.silent(200 * time.Millisecond)
	if g := stats(t, d, "t", "g"); g.Acknowledged != many || g.Lag != 0 {
		t.Fatalf("%+v", g)
	}
}
