package bench

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"
)

func testSamples() []Sample {
	q := func(p50, p99 float64) *Quantiles {
		return &Quantiles{P50: p50, P90: p50, P99: p99, P999: p99, Max: p99, Curve: [][2]float64{{50, p50}, {99, p99}}}
	}
	var list []Sample
	for round := 1; round <= 3; round++ {
		r := float64(round)
		list = append(list,
			Sample{Workload: "disk", Size: 4096, Round: round, Tool: "fio", Latency: q(80, 160)},
			Sample{Workload: "echo", Size: 100, Round: round, Latency: q(20, 40)},
			Sample{Workload: "publish", Size: 100, Round: round, MsgsPerSec: 100 * r, Latency: q(1000, 2000)},
			Sample{Workload: "publish-sync", Size: 100, Round: round, MsgsPerSec: 8000, Latency: q(100+r, 300)},
			Sample{Workload: "partitions", Size: 100, Round: round, MsgsPerSec: 180, Latency: q(1000, 2000), PerSecond: []float64{1, 2}},
			Sample{Workload: "catchup", Size: 1024, Round: round, Values: map[string]float64{"warm_mb_per_s": 500 + r}})
	}
	return list
}

func TestWriteTable_GivesMedianRangeAndRatios(t *testing.T) {
	var b bytes.Buffer
	if err := WriteTable(&b, testSamples()); err != nil {
		t.Fatal(err)
	}
	text := strings.Join(strings.Fields(b.String()), " ")
	for _, want := range []string{
		"publish 100B 200 (100-300)",
		"warm_mb_per_s 502 (501-503)",
		"publish-sync 100B: p50 / (disk p50 + echo p50) 1.02",
		"publish-sync 100B: p99 / (disk p99 + echo p99) 1.50",
		"partitions 100B: throughput of 1000 / of 1 0.90",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in:\n%s", want, b.String())
		}
	}
}

func TestWriteHTML_IsSelfContained(t *testing.T) {
	var b bytes.Buffer
	if err := WriteHTML(&b, &Environment{Time: time.Unix(0, 0).UTC(), CPU: "<b>"}, testSamples()); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"http://", "https://", "(<b>)"} {
		if strings.Contains(b.String(), bad) {
			t.Errorf("the report contains %q", bad)
		}
	}
	for _, want := range []string{"publish-sync", `"P999":300`, "200 (100-300)"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("the report lacks %q", want)
		}
	}
}

func TestWriteJSONLines_OneObjectPerLine(t *testing.T) {
	var b bytes.Buffer
	samples := testSamples()
	if err := WriteJSONLines(&b, &Environment{}, samples); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(b.String()), "\n")
	if len(lines) != len(samples)+1 {
		t.Fatalf("%d lines, want %d", len(lines), len(samples)+1)
	}
	var s Sample
	if err := json.Unmarshal([]byte(lines[3]), &s); err != nil || s.Workload != "publish" || s.Latency.P99 != 2000 {
		t.Errorf("line 3 is %+v, %v", s, err)
	}
}

func TestSpread_MedianOfEvenCountIsTheMean(t *testing.T) {
	for _, tt := range []struct {
		in   []float64
		want spread
	}{
		{nil, spread{}},
		{[]float64{3}, spread{3, 3, 3}},
		{[]float64{9, 1, 2}, spread{2, 1, 9}},
		{[]float64{4, 1, 2, 9}, spread{3, 1, 9}},
	} {
		if got := spreadOf(tt.in); got != tt.want {
			t.Errorf("spread of %v is %v, want %v", tt.in, got, tt.want)
		}
	}
}

func TestConfig_ReportsEveryProblem(t *testing.T) {
	c := DefaultConfig()
	c.Rounds, c.Sizes, c.Workloads = 0, []int{1}, []string{"nonsense"}
	err := c.Validate()
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{"rounds is 0", "a size is 1", `unknown workload "nonsense"`, "no mortard binary"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing in %v", want, err)
		}
	}
	c = DefaultConfig()
	c.Mortard = "mortard"
	if err := c.Validate(); err != nil {
		t.Errorf("the defaults are refused: %v", err)
	}
}

func TestConfig_PublishRunsFillTheJournalSeveralTimes(t *testing.T) {
	c := DefaultConfig()
	for _, size := range c.Sizes {
		if got, want := c.messagesFor(size)*uint64(size+56), uint64(4*512<<20); got < want {
			t.Errorf("%d bytes of records at size %d, want at least %d", got, size, want)
		}
	}
}
