package main

import (
	"bytes"
	"io"
	"strings"
	"testing"
	"time"
)

func TestRun_RefusesNonsense(t *testing.T) {
	for _, tt := range []struct{ args, want string }{
		{"--rounds 0", "must be more than 0"},
		{"--quiet 0s", "must be more than 0"},
		{"everything", `"everything" is no measurement`},
	} {
		if err := run(t.Context(), strings.Fields(tt.args), io.Discard, io.Discard); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", tt.args, err)
		}
	}
}

// One round of everything, on few members: that it works, not how well.
func TestRun_MeasuresAgainstARealBroker(t *testing.T) {
	defer func(m, g []int) { memberCounts, groupCounts = m, g }(memberCounts, groupCounts)
	memberCounts, groupCounts = []int{3}, []int{3}
	var out bytes.Buffer
	if err := run(t.Context(), []string{"--rounds", "1", "--quiet", "10ms", "--dir", t.TempDir()}, &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Partitions moved by a join: 3.00", "a member joins: partitions that stay", "idle, per second", "per group"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in:\n%s", want, out.String())
		}
	}
}

func TestLongestGap_IsThatOfThePartition(t *testing.T) {
	list := []arrival{{1, 0, 10}, {2, 0, 11}, {1, 0, 12}, {2, 0, 91}, {1, 0, 40}}
	if got := longestGap(list, 1); got != 28 {
		t.Errorf("got %d", got)
	}
	if got := longestGap(list, 3); got != 0 {
		t.Errorf("got %d for a partition without messages", got)
	}
}

func TestMilliseconds_HasTwoDigits(t *testing.T) {
	if got := milliseconds(1234567 * time.Nanosecond); got != "1.23" {
		t.Errorf("got %s", got)
	}
}
