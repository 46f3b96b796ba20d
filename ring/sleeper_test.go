package ring

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestSleeper_WakeEndsThePresentOrTheNextSleep(t *testing.T) {
	s, err := NewSleeper()
	if err != nil {
		t.Fatal(err)
	}
	s.Wake()
	s.Wake()
	s.Sleep(-1)
	s.Sleep(time.Millisecond) // both were one
	done := make(chan struct{})
	go func() {
		s.Sleep(-1)
		close(done)
	}()
	s.Wake()
	<-done
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s.Wake() // of a goroutine that does not know yet
}

// TestSleeper_LosesNoWakeUp has producers count up and wake, and a sleeper that sleeps for ever whenever it has seen
// everything: a lost wake-up would hang it.
func TestSleeper_LosesNoWakeUp(t *testing.T) {
	s, err := NewSleeper()
	if err != nil {
		t.Fatal(err)
	}
	const producers, each = 4, 5000
	var sent atomic.Int64
	var wg sync.WaitGroup
	for range producers {
		wg.Go(func() {
			for range each {
				sent.Add(1)
				s.Wake()
			}
		})
	}
	for seen := int64(0); seen < producers*each; seen = sent.Load() {
		s.Sleep(-1)
	}
	wg.Wait()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestSleeper_DoesNotAllocate(t *testing.T) {
	s, err := NewSleeper()
	if err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(100, func() {
		s.Wake()
		s.Sleep(-1)
		s.Sleep(0)
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}
