package client

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// diary keeps what happened, in order.
type diary struct {
	mu      sync.Mutex
	entries []string
}

func (d *diary) note(format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.entries = append(d.entries, fmt.Sprintf(format, args...))
}

func (d *diary) has(entry string) bool { return slices.Contains(d.read(), entry) }

func (d *diary) read() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.entries)
}

// callbacks have assignments noted.
func (d *diary) callbacks() ConsumerOptions {
	return ConsumerOptions{
		OnAssign: func(p uint16) { d.note("assign %d", p) },
		OnRevoke: func(p uint16, lost bool) { d.note("revoke %d lost=%t", p, lost) },
	}
}

func (d *diary) want(t *testing.T, want ...string) {
	t.Helper()
	if got := d.read(); !slices.Equal(got, want) {
		t.Errorf("happened: %q\nwant:     %q", got, want)
	}
}

func TestCallbacks_AssignComesBeforeTheFirstMessageRevokeBeforeTheConfirmation(t *testing.T) {
	b := newFakeBroker(t)
	b.fill(b.addTopic("orders", 1), 2)
	var d diary
	opts := d.callbacks()
	opts.OnAssign = func(p uint16) {
		time.Sleep(20 * time.Millisecond) // the messages are there meanwhile
		d.note("assign %d", p)
	}
	opts.OnRevoke = func(p uint16, lost bool) {
		b.inspect(func() { d.note("revoke %d lost=%t, %d confirmed", p, lost, len(b.control)) })
	}
	k := newTestConsumer(t, dialFake(t, b), opts)
	go func() {
		_ = k.Run(context.Background(), func(_ context.Context, m *Message) error { d.note("%s", m.Value); return nil })
	}()
	eventually(t, b, "both messages are acknowledged", func() bool { return len(b.acks) == 2 })
	b.inspect(func() {
		n := b.groups["billing"].conn.notice(protocol.NoticeRevoke, 0)
		b.groups["billing"].conn.push(n.AppendFrame(nil))
	})
	eventually(t, b, "the REVOKE is confirmed", func() bool { return len(b.control) == 2 })
	if err := k.Close(testContext(t)); err != nil {
		t.Fatal(err)
	}
	d.want(t, "assign 0", "0-0", "0-1", "revoke 0 lost=false, 1 confirmed")
}

func TestCallbacks_CloseRevokesWhatIsThere(t *testing.T) {
	b := newFakeBroker(t)
	b.addTopic("orders", 2)
	var d diary
	k := newTestConsumer(t, dialFake(t, b), d.callbacks())
	eventually(t, b, "both are assigned", func() bool { return d.has("assign 1") })
	left := 0
	b.hook(func(_ *fakeConn, op protocol.Op, payload []byte) ([]byte, bool, bool) {
		var m protocol.Heartbeat
		if op == protocol.OpHeartbeat && m.Decode(payload) == nil && m.State == protocol.MemberLeave {
			left = len(d.read())
		}
		return nil, false, false
	})
	if err := k.Close(testContext(t)); err != nil {
		t.Fatal(err)
	}
	got := d.read()
	slices.Sort(got)
	if want := []string{"assign 0", "assign 1", "revoke 0 lost=false", "revoke 1 lost=false"}; !slices.Equal(got, want) || left != 4 {
		t.Errorf("happened: %q, %d of it before LEAVE", got, left)
	}
}

func TestCallbacks_RejoiningKeepsAndLosingTheMembershipRevokes(t *testing.T) {
	b := newFakeBroker(t)
	b.addTopic("orders", 1)
	var d diary
	newTestConsumer(t, dialFake(t, b), d.callbacks())
	eventually(t, b, "it is assigned", func() bool { return d.has("assign 0") })
	b.dropConnections()
	eventually(t, b, "the member is back", func() bool { return len(b.subs) == 2 && b.groups["billing"].conn != nil })
	d.want(t, "assign 0")
	b.inspect(func() { b.groups["billing"].member = 1 }) // removed: REJOIN is refused
	b.dropConnections()
	eventually(t, b, "it is assigned anew", func() bool { return len(d.read()) == 3 })
	d.want(t, "assign 0", "revoke 0 lost=true", "assign 0")
}

func TestCallbacks_SlowRevokeDoesNotHoldTheConfirmationForEver(t *testing.T) {
	b := newFakeBroker(t)
	b.addTopic("orders", 1)
	var d diary
	opts, goOn := d.callbacks(), make(chan struct{})
	opts.OnRevoke = func(uint16, bool) { <-goOn }
	newTestConsumer(t, dialFake(t, b, quick(2*time.Millisecond)), opts)
	eventually(t, b, "it is assigned", func() bool { return d.has("assign 0") })
	b.inspect(func() {
		n := b.groups["billing"].conn.notice(protocol.NoticeRevoke, 0)
		b.groups["billing"].conn.push(n.AppendFrame(nil))
	})
	eventually(t, b, "the REVOKE is confirmed", func() bool { return len(b.control) == 2 })
	close(goOn)
}

func TestConsumer_EndsWhenItsGroupOrTopicIsDeleted(t *testing.T) {
	for _, deleted := range []protocol.ErrorCode{protocol.CodeUnknownGroup, protocol.CodeUnknownTopic} {
		t.Run(deleted.Name(), func(t *testing.T) {
			b := newFakeBroker(t)
			b.addTopic("orders", 1)
			var d diary
			k := newTestConsumer(t, dialFake(t, b, quick(2*time.Millisecond)), d.callbacks())
			eventually(t, b, "it is assigned", func() bool { return d.has("assign 0") })
			b.hook(func(_ *fakeConn, op protocol.Op, _ []byte) ([]byte, bool, bool) {
				if op == protocol.OpHeartbeat {
					return protocol.AppendErr(nil, deleted, op, ""), true, false
				}
				return nil, false, false
			})
			err := k.Run(testContext(t), func(context.Context, *Message) error { return nil })
			if code, _ := protocol.CodeOf(err); code != deleted {
				t.Errorf("Run returned %v", err)
			}
			eventually(t, b, "it hears of the end", func() bool { return d.has("revoke 0 lost=true") })
		})
	}
}
