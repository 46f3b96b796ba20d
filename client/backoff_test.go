package client

import (
	"testing"
	"time"
)

// A pause that has doubled until the leader is elected would be the longest part of a failover.
func TestElectionBackoff_StaysShortWhileAnElectionLasts(t *testing.T) {
	c := defaultConfig()
	total, n := time.Duration(0), 0
	for ; total < 2*time.Second; n++ {
		d := c.electionBackoff(n)
		if d < electionPause || d > 250*time.Millisecond {
			t.Fatalf("pause %d, after %v, is %v", n, total, d)
		}
		total += d
	}
	for ; n < 40; n++ {
		if d := c.electionBackoff(n); d < electionPause || d > maxElectionPause {
			t.Fatalf("pause %d is %v", n, d)
		}
	}
	if d := c.electionBackoff(1000); d != maxElectionPause {
		t.Errorf("in the end the pauses are %v", d)
	}
	c.backoffMin, c.backoffMax = time.Millisecond, 2*time.Millisecond
	for n := range 40 {
		if d := c.electionBackoff(n); d < time.Millisecond || d > 3*time.Millisecond {
			t.Errorf("with shorter times, pause %d is %v", n, d)
		}
	}
}
