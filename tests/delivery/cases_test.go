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
	t.Parallel()
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
	t.Parallel()
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

// A message that failed before the broker was killed gets the rest of its attempts afterwards, and no others.
func TestCase_AttemptsSurviveARestart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	d := start(t, dir)
	topic := declare(t, d, "t", 1)
	publish(t, d, topic, "1", "2", "3", "4")
	m := join(t, d, "g", topic, quick)
	// Message n fails n times and is in flight once more when the broker is killed, which does not count.
	failed := map[uint64]int{}
	for inFlight := 0; inFlight < 4; {
		msg, ok := m.next(30 * time.Second)
		switch {
		case !ok:
			t.Fatalf("nothing came, failed so far: %v", failed)
		case int(msg.Attempt) != failed[msg.Sequence]+1:
			t.Fatalf("message %d came as attempt %d after %d failures", msg.Sequence, msg.Attempt, failed[msg.Sequence])
		case failed[msg.Sequence] == int(msg.Sequence):
			inFlight++
			continue
		}
		if err := m.nack(&msg, protocol.NackRetryNow); err != nil {
			t.Fatal(err)
		}
		failed[msg.Sequence]++
	}
	d.Kill()
	<-d.Exited()
	d = start(t, dir)
	m = join(t, d, "g", topic, quick, m.rejoin)
	for left := (5 - 1) + (5 - 2) + (5 - 3) + (5 - 4); left > 0; left-- {
		msg, ok := m.next(30 * time.Second)
		if !ok || int(msg.Attempt) != failed[msg.Sequence]+1 {
			t.Fatalf("message %d came (%t) as attempt %d after %d failures", msg.Sequence, ok, msg.Attempt, failed[msg.Sequence])
		}
		if err := m.nack(&msg, protocol.NackRetryNow); err != nil {
			t.Fatal(err)
		}
		failed[msg.Sequence]++
	}
	eventually(t, d, "t", "g", "four dead letters", func(g harness.GroupSums) bool { return g.DLQ == 4 && g.Dropped == 4 && g.Lag == 0 })
	m.silent(200 * time.Millisecond)
	for _, l := range letters(t, d, "g", 4) {
		if !strings.HasSuffix(l, " 5 nack") {
			t.Errorf("dead letter %q", l)
		}
	}
}

// g4: a maximum of attempts is obeyed, in ordered groups too; 0 is no maximum that a group could have.
func TestCase_MaximumOfAttempts(t *testing.T) {
	t.Parallel()
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
	t.Parallel()
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
	eventually(t, d, "$dlq.g", "g", "dropped", func(g harness.GroupSums) bool {
		return g.Dropped == 1 && g.DLQ == 0 && g.Lag == 0 && g.Published == 1
	})
	wantLetters(t, d, "g", "poison 1 rejected")
	forged := protocol.Pub{TopicID: letterTopic, Value: []byte("forged")}
	if _, err := dial(t, d).Publish(&forged); !errors.Is(err, protocol.CodeInvalidTopic) {
		t.Fatalf("a client published to a dead-letter topic: %v", err)
	}
}

// g7: the broker is killed with leases open: what was not acknowledged comes again, without having used an attempt, and
// nothing that was.
func TestCase_KilledBrokerRedeliversTheUnacknowledgedOnly(t *testing.T) {
	t.Parallel()
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
	t.Parallel()
	d := start(t, t.TempDir())
	topic := declare(t, d, "t", 1)
	publish(t, d, topic, "slow")
	m := join(t, d, "g", topic, `{"retry":[10],"lease_ms":3000}`)
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
	t.Parallel()
	d := start(t, t.TempDir())
	topic := declare(t, d, "t", 1)
	large := strings.Repeat("x", 5000)
	publish(t, d, topic, "small 1", large, "small 3")
	m := join(t, d, "g", topic, quick, func(s *protocol.Sub) { s.CreditCount, s.CreditBytes = 10, 4000 })
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
	t.Parallel()
	const many, left = 100_000, 7_777
	dir := t.TempDir()
	d := start(t, dir)
	topic := declare(t, d, "t", 1)
	c := dial(t, d)
	p := protocol.Pub{TopicID: topic, Value: []byte("v")}
	const window = 10_000
	frames := bytes.Repeat(p.AppendFrame(nil), window)
	for range many / window {
		go func() { _ = c.Send(frames) }()
		for range window {
			f, err := c.Next()
			if err == nil {
				err = f.Err()
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	m := join(t, d, "g", topic, "", func(s *protocol.Sub) { s.CreditCount, s.CreditBytes = window, 64<<20 })
	acknowledgeAllBut(m, left, many)
	d.Kill()
	<-d.Exited()
	d = start(t, dir)
	m = join(t, d, "g", topic, "", m.rejoin)
	m.mustAck(m.want(left, 1))
	m.silent(200 * time.Millisecond)
	if g := stats(t, d, "t", "g"); g.Acknowledged != many || g.Lag != 0 {
		t.Fatalf("%+v", g)
	}
}

// acknowledgeAllBut receives messages 1 to many and acknowledges all but one of them.
func acknowledgeAllBut(m *member, left, many uint64) {
	m.t.Helper()
	const creditEvery = 1000
	for got, acked := uint64(0), uint64(0); got < many || acked < many-1; {
		f, err := m.read(30*time.Second, true)
		if err == nil {
			err = f.Err()
		}
		if err != nil {
			m.t.Fatalf("after %d messages and %d ACKs: %v", got, acked, err)
		}
		if f.Op == protocol.OpOK {
			var ok protocol.OKFrame
			if err := ok.Decode(f.Payload); err != nil {
				m.t.Fatal(err)
			}
			if ok.RequestOp == protocol.OpAck {
				acked++
			}
			continue
		}
		msg := m.msgs[0]
		m.msgs = m.msgs[:0]
		var out []byte
		if got++; msg.Sequence != got || msg.Attempt != 1 {
			m.t.Fatalf("message %d came, attempt %d; want %d", msg.Sequence, msg.Attempt, got)
		}
		if msg.Sequence != left {
			a := protocol.Ack{SubscriptionID: msg.SubscriptionID, TopicID: msg.TopicID, Partition: msg.Partition, Sequence: msg.Sequence,
				DeliveryID: msg.DeliveryID, OwnershipEpoch: msg.OwnershipEpoch}
			out = a.AppendFrame(out)
		}
		if got%creditEvery == 0 {
			c := protocol.Credit{SubscriptionID: msg.SubscriptionID, MembershipEpoch: m.sub.MembershipEpoch, Mode: protocol.CreditAdd,
				Count: creditEvery, Bytes: creditEvery}
			out = c.AppendFrame(out)
		}
		if len(out) == 0 {
			continue
		}
		m.mu.Lock()
		err = m.conn.Send(out)
		m.mu.Unlock()
		if err != nil {
			m.t.Fatal(err)
		}
	}
}
