package delivery

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/engine/deadletter"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

// The broker is killed again and again while messages are rejected, out of attempts or acknowledged. In the end each
// poison message is in the dead-letter topic once, and no other message is. The journals are several, so that the steps of
// a letter are in different ones.
func TestCrash_EachPoisonMessageIsInOneLetter(t *testing.T) {
	t.Parallel()
	const messages, kills = 900, 6
	dir := t.TempDir()
	boot := func() *harness.Daemon {
		d, err := harness.Start(t.Context(), harness.Options{Binary: mortard, DataDir: dir, Config: map[string]any{"shards": 3}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.EndScenario(t) })
		return d
	}
	d := boot()
	topic := declare(t, d, "t", 2)
	c := dial(t, d)
	for i := range messages {
		p := protocol.Pub{TopicID: topic, Partition: uint16(i % 2), Value: fmt.Appendf(nil, "%d", i)}
		if _, err := c.Publish(&p); err != nil {
			t.Fatal(err)
		}
	}
	poison := func(value string) bool { return value[len(value)-1] < '7' } // seven of ten
	rnd := rand.New(rand.NewPCG(1, 2))
	for life := 0; ; life++ {
		victim := d
		timer := time.AfterFunc(time.Duration(30+rnd.IntN(250))*time.Millisecond, func() {
			if life < kills {
				victim.Kill()
			}
		})
		done := consume(t, d, topic, poison)
		timer.Stop()
		if done {
			t.Logf("done in life %d", life)
			break
		}
		<-d.Exited()
		d = boot()
	}
	want := 0
	for i := range messages {
		if poison(fmt.Sprint(i)) {
			want++
		}
	}
	eventually(t, d, "t", "g", "all done", func(g harness.GroupSums) bool {
		return g.DLQ == uint64(want) && g.Dropped == g.DLQ && g.Acknowledged == uint64(messages-want) && g.Lag == 0
	})
	seen := map[string]int{}
	m := join(t, d, "look", topicOf(t, d, "$dlq.g"), "", func(s *protocol.Sub) { s.CreditCount, s.CreditBytes = 65535, 64<<20 })
	for i := range want {
		msg := m.want(uint64(i+1), 1)
		var e deadletter.Envelope
		value, err := e.Decode(msg.Value)
		if err != nil {
			t.Fatal(err)
		}
		seen[string(value)]++
	}
	m.silent(200 * time.Millisecond)
	for i := range messages {
		value := fmt.Sprint(i)
		if n := seen[value]; poison(value) != (n == 1) || n > 1 {
			t.Errorf("message %s is in %d letters", value, n)
		}
	}
}

// consume rejects poison, or lets it run out of attempts, until nothing is left; false: the broker was killed.
func consume(t *testing.T, d *harness.Daemon, topic uint16, poison func(string) bool) (done bool) {
	conn, err := harness.Dial(d.ClientAddr, "")
	if err != nil {
		return false
	}
	defer conn.Close()
	m := &member{t: t, conn: conn}
	s := protocol.Sub{Group: []byte("g"), TopicID: topic, Partition: protocol.AnyPartition, Flags: protocol.SubFlagStream | protocol.SubFlagSettings,
		CreditCount: 65535, CreditBytes: 64 << 20, Settings: []byte(`{"retry":[10],"max_attempts":2}`)}
	if m.sub, err = conn.Subscribe(&s); err != nil {
		return false
	}
	m.heartbeats()
	defer close(m.stop)
	for {
		if len(m.msgs) == 0 {
			if _, err := m.read(time.Second, true); err != nil {
				if g, err := d.GroupStats("t", "g"); err == nil && g.Waiting == 0 && g.InFlight == 0 {
					return true
				}
				select {
				case <-d.Exited():
					return false
				default:
				}
			}
			continue
		}
		msg := m.msgs[0]
		m.msgs = m.msgs[1:]
		switch value := string(msg.Value); {
		case !poison(value):
			err = m.ack(&msg)
		case value[len(value)-1] < '3':
			err = m.nack(&msg, protocol.NackReject)
		default:
			err = m.nack(&msg, protocol.NackRetryNow)
		}
		if err != nil {
			return false
		}
	}
}

func topicOf(t *testing.T, d *harness.Daemon, name string) uint16 {
	t.Helper()
	look := protocol.Declare{Topic: []byte(name), Flags: protocol.DeclareFlagLookup}
	result, err := dial(t, d).Request(protocol.OpDeclare, look.AppendFrame(nil))
	var topic protocol.DeclareResult
	if err == nil {
		err = topic.Decode(result)
	}
	if err != nil {
		t.Fatal(err)
	}
	return topic.TopicID
}
