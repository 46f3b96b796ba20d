package mpsc

import (
	"sync"
	"testing"
)

func TestQueue_DeliversEverythingInOrderPerProducer(t *testing.T) {
	const producers, each = 8, 5000
	wake := make(chan struct{}, 1)
	q := New[[2]int](func() {
		select {
		case wake <- struct{}{}:
		default:
		}
	})
	var wg sync.WaitGroup
	for p := range producers {
		wg.Go(func() {
			for i := range each {
				q.Push([2]int{p, i})
			}
		})
	}
	go func() { wg.Wait(); q.Close() }()
	var next [producers]int
	var spare [][2]int
	for {
		closed := q.Closed()
		items := q.Drain(spare)
		for _, it := range items {
			if it[1] != next[it[0]] {
				t.Fatalf("producer %d: got %d, want %d", it[0], it[1], next[it[0]])
			}
			next[it[0]]++
		}
		n := len(items)
		spare = items
		if n > 0 {
			continue
		}
		if closed {
			break
		}
		if q.Sleep() {
			<-wake
			q.Awake()
		}
	}
	for p, n := range next {
		if n != each {
			t.Errorf("producer %d: %d of %d arrived", p, n, each)
		}
	}
}

func TestQueue_WakesOnlyASleeper(t *testing.T) {
	wakes := 0
	q := New[int](func() { wakes++ })
	q.Push(1)
	if wakes != 0 {
		t.Error("a push woke a consumer that was not asleep")
	}
	if q.Sleep() {
		t.Error("the consumer may not sleep while something is queued")
	}
	q.Drain(nil)
	if !q.Sleep() {
		t.Error("the consumer may sleep when nothing is queued")
	}
	q.Push(2)
	q.Push(3)
	if wakes != 1 {
		t.Errorf("%d wake-ups for two pushes to a sleeper, want 1", wakes)
	}
	q.Close()
	if q.Push(4) {
		t.Error("a closed queue took an item")
	}
	if got := q.Drain(nil); len(got) != 2 {
		t.Errorf("%v left after Close, want two items", got)
	}
	if q.Sleep() {
		t.Error("the consumer of a closed queue may not sleep")
	}
}

func TestQueue_QuietPushesWakeOnNudge(t *testing.T) {
	wakes := 0
	q := New[int](func() { wakes++ })
	if !q.Sleep() {
		t.Fatal("an empty queue lets its consumer sleep")
	}
	q.Nudge()
	q.PushQuietly(1)
	if wakes != 0 {
		t.Error("the consumer was woken for nothing that it must see now")
	}
	q.Nudge()
	q.Nudge()
	if wakes != 1 {
		t.Errorf("%d wake-ups, want 1", wakes)
	}
	if got := q.Drain(nil); len(got) != 1 {
		t.Errorf("%v queued", got)
	}
	q.PushQuietly(2)
	if q.Sleep() {
		t.Error("the consumer may not sleep over a quiet push that came before")
	}
	q.Close()
	if q.PushQuietly(3) {
		t.Error("a closed queue took an item")
	}
}

func TestQueue_SteadyStateDoesNotAllocate(t *testing.T) {
	q := New[int](func() {})
	var spare []int
	step := func() {
		for i := range 100 {
			q.Push(i)
		}
		spare = q.Drain(spare)
	}
	step()
	step()
	if n := testing.AllocsPerRun(100, step); n > 0 {
		t.Errorf("%v allocations per batch", n)
	}
}
