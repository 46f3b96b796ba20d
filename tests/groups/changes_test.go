package groups

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/protocol"
)

// bounded returns a context that ends after patience.
func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// hearAgain begins the count anew: everything that was published must be handled once more.
func (w *world) hearAgain() {
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.next)
	clear(w.done)
}

// The cursors and the settings of a group with eight members are changed while they read, and the broker is killed meanwhile
// and right after the answer: what was answered counts, what was refused changes nothing, and everything is read again.
func TestChanges_CursorsAndSettingsAmidMembersAndKills(t *testing.T) {
	t.Parallel()
	const partitions, rounds = 12, 4
	w := newWorld(t, partitions)
	rng := rand.New(rand.NewPCG(seedOf(t, 1), 8))
	var members []*member
	for i := range 8 {
		members = append(members, w.join(fmt.Sprint("member ", i), client.ConsumerOptions{Concurrency: 2, Pull: i%4 == 3}))
	}
	w.balanced(members...)
	c := w.dial()
	for round := range rounds {
		if _, err := c.ResetGroup(bounded(t), topic, group, client.Latest(), client.ResetOptions{}); !errors.Is(err, protocol.CodeGroupExistsMismatch) {
			t.Fatalf("a reset of a group with members: %v, want 0x2002", err)
		}
		settings := fmt.Appendf(nil, `{"max_attempts":%d,"retry":[10]}`, 10+round)
		if err := c.SetGroup(bounded(t), topic, group, settings); err != nil {
			t.Fatal(err)
		}
		w.restart()
		if created, err := c.DeclareGroup(bounded(t), topic, group, client.GroupOptions{Settings: settings}); created || err != nil {
			t.Fatalf("the settings are not those that were answered: created %t, %v", created, err)
		}
		other := []byte(`{"max_attempts":9,"retry":[10]}`)
		if _, err := c.DeclareGroup(bounded(t), topic, group, client.GroupOptions{Settings: other}); !errors.Is(err, protocol.CodeGroupExistsMismatch) {
			t.Fatalf("other settings: %v, want 0x2002", err)
		}

		// The client asks again where the broker was killed before it answered.
		w.hearAgain()
		answered := make(chan error, 1)
		go func() {
			moves, err := c.ResetGroup(bounded(t), topic, group, client.Earliest(), client.ResetOptions{Force: true})
			if err == nil && (len(moves) != partitions || moves[partitions-1].To != 0) {
				err = fmt.Errorf("the group has moved to %+v", moves)
			}
			answered <- err
		}()
		time.Sleep(time.Duration(rng.IntN(10)) * time.Millisecond)
		w.restart()
		if err := <-answered; err != nil {
			t.Fatalf("reset to the start: %v", err)
		}
		if round%2 == 1 {
			w.restart()
		}
		time.Sleep(100 * time.Millisecond) // some load, too
	}
	w.finish()
	w.balanced(members...)
	for _, m := range members {
		m.leave()
	}
	if _, err := c.ResetGroup(bounded(t), topic, group, client.Latest(), client.ResetOptions{}); err != nil {
		t.Errorf("a reset of a group without members: %v", err)
	}
}

// A group with eight members, and then its topic, are deleted while the members read, and the broker is killed right after the
// answer. The members end and say why; what comes after it under the same names has nothing of the old.
func TestChanges_DeletedGroupAndTopicEndTheirMembers(t *testing.T) {
	t.Parallel()
	const partitions, perPartition = 12, 50
	a := newAudience(t, partitions)
	c := a.client()
	restart := func() {
		a.d.Kill()
		a.start()
	}
	var mu sync.Mutex
	heard := map[place]bool{}
	var ends []chan error
	join := func(n int) {
		t.Helper()
		clear(heard)
		ends = ends[:0]
		for range n {
			k, err := c.NewConsumer(bounded(t), topic, group, client.ConsumerOptions{})
			if err != nil {
				t.Fatal(err)
			}
			end := make(chan error, 1)
			ends = append(ends, end)
			go func() {
				end <- k.Run(context.Background(), func(_ context.Context, m *client.Message) error {
					mu.Lock()
					defer mu.Unlock()
					heard[place{m.Partition, m.Sequence}] = true
					return nil
				})
			}()
		}
	}
	hear := func(messages int) {
		t.Helper()
		for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
			mu.Lock()
			n := len(heard)
			mu.Unlock()
			if n == messages {
				return
			}
			if n > messages || time.Now().After(end) {
				t.Fatalf("%d messages came, want %d", n, messages)
			}
		}
	}
	ended := func(why protocol.ErrorCode) {
		t.Helper()
		for i, end := range ends {
			select {
			case err := <-end:
				if !errors.Is(err, why) {
					t.Errorf("member %d ended with %v, want %v", i, err, why)
				}
			case <-time.After(patience):
				t.Fatalf("member %d goes on", i)
			}
		}
	}

	a.publish(partitions, perPartition)
	join(8)
	hear(partitions * perPartition)
	if existed, err := c.DeleteGroup(bounded(t), topic, group); !existed || err != nil {
		t.Fatalf("the group is deleted: existed %t, %v", existed, err)
	}
	restart()
	ended(client.ErrUnknownGroup)
	if sums, err := a.d.Groups(); err != nil || len(sums) != 0 {
		t.Fatalf("there are groups after the kill: %+v, %v", sums, err)
	}
	join(8)
	hear(partitions * perPartition) // a new group begins at the start

	if err := c.DeleteTopic(bounded(t), topic); err != nil {
		t.Fatal(err)
	}
	restart()
	ended(client.ErrUnknownTopic)
	if _, err := c.Lookup(bounded(t), topic); !errors.Is(err, client.ErrUnknownTopic) {
		t.Fatalf("the topic after the kill: %v, want 0x0008", err)
	}
	again, err := c.Declare(bounded(t), topic, client.DeclareOptions{Partitions: partitions})
	if err != nil || !again.Created || again.ID == a.topic {
		t.Fatalf("%+v, %v: want a new topic, the old one's id was %d", again, err, a.topic)
	}
	a.topic = again.ID
	if sums, err := a.d.Groups(); err != nil || len(sums) != 0 {
		t.Fatalf("the new topic has groups: %+v, %v", sums, err)
	}
	join(8)
	a.publish(partitions, 2)
	hear(2 * partitions)
}

func (a *audience) client() *client.Client {
	a.t.Helper()
	c, err := client.Dial(a.t.Context(), a.addr, client.WithBackoff(10*time.Millisecond, 100*time.Millisecond))
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(func() { _ = c.Close() })
	return c
}
