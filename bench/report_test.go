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
			Sample{Workload: "disk", System: machineName, Size: 4096, Round: round, Tool: "fio", Latency: q(80, 160)},
			Sample{Workload: "echo", System: machineName, Size: 1024, Round: round, Latency: q(20, 40)},
			Sample{Workload: "publish", System: mortardName, Size: 100, Round: round, MsgsPerSec: 1000 * r, Latency: q(1000, 2000),
				CPUSecondsPerMillion: 3, PerMessage: map[string]float64{"rounds": 0.0012, "commit syscalls": 0.25}},
			Sample{Workload: "publish", System: "redis-always", Durable: true, Size: 100, Round: round, MsgsPerSec: 500 * r, Latency: q(4000, 5000), CPUSecondsPerMillion: 12},
			Sample{Workload: "publish-sync", System: mortardName, Size: 1024, Round: round, MsgsPerSec: 8000, Latency: q(100+r, 300)},
			Sample{Workload: "publish-sync", System: "redis-always", Durable: true, Size: 1024, Round: round, MsgsPerSec: 7000, Latency: q(204, 300)},
			Sample{Workload: "partitions", Variant: "1 partition", System: mortardName, Size: 1024, Round: round, MsgsPerSec: 200},
			Sample{Workload: "partitions", Variant: "1024 partitions", System: mortardName, Size: 1024, Round: round, MsgsPerSec: 180, PerSecond: []float64{1, 2}},
			Sample{Workload: "end-to-end", Variant: "1 member", System: mortardName, Size: 1024, Round: round, Latency: q(500, 900), DeliverLatency: q(300, 600), PublishLatency: q(200, 400)},
			Sample{Workload: "end-to-end", Variant: "1 member", System: "nats-always", Durable: true, Size: 1024, Round: round, DeliverLatency: q(600, 1200), PublishLatency: q(200, 400)},
			Sample{Workload: "restart", Variant: "1GiB", System: mortardName, Size: 16384, Round: round, Values: map[string]float64{"killed_restart_s": 0.2, "clean_restart_s": 0.1}},
			Sample{Workload: "restart", Variant: "10GiB", System: mortardName, Size: 16384, Round: round, Values: map[string]float64{"killed_restart_s": 0.25, "clean_restart_s": 0.1}},
			Sample{Workload: "catchup", System: mortardName, Size: 1024, Round: round, Values: map[string]float64{"warm_mb_per_s": 500 + r}},
			Sample{Workload: "mixed", System: "mortard-3", Size: 1024, Round: round, Timeline: []Moment{{At: 1, Published: 5000, PublishP99: 10, Event: "node 1 killed"}}})
	}
	return list
}

func TestWriteTable_GivesMediansRangesAndComparisons(t *testing.T) {
	var b bytes.Buffer
	if err := WriteTable(&b, testSamples()); err != nil {
		t.Fatal(err)
	}
	text := strings.Join(strings.Fields(b.String()), " ")
	for _, want := range []string{
		"publish 100B mortard 2000 (1000-3000)",
		"warm_mb_per_s 502 (501-503)",
		"publish 100B mortard 0.0012 0.25", // per message
		"publish 100B redis-always 2.00x 0.25x 0.40x 0.25x -",
		"end-to-end 1KiB, 1 member nats-always - 0.50x 0.50x", // until arrival: nats does not answer acknowledgements
		"end-to-end 1KiB, 1 member mortard 200 400 300 600 500 900",
		"publish-sync 1KiB: p50 / (disk p50 + echo p50) 1.02",
		"publish 100B / redis-always 2.00 >= 2.5 missed",
		"one outstanding 1KiB: p50 / (disk + echo) 1.02 <= 1.2 met",
		"one outstanding 1KiB: p50 / redis-always 0.50 <= 1 met",
		"1024 partitions / 1 0.90 >= 0.85 met",
		"end to end at a rate, 1 member: p99 until arrival / disk p50 7.50 <= 8 met",
		"restart (killed) with 10GiB / with 1GiB 1.25 <= 1.5 met",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in:\n%s", want, b.String())
		}
	}
	if strings.Contains(text, "4096 partitions") || strings.Contains(text, "NaN") || strings.Contains(text, "Inf") {
		t.Errorf("the table has what was not measured:\n%s", b.String())
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
	for _, want := range []string{"publish-sync", `"P999":300`, "2000 (1000-3000)", "node 1 killed", "redis-always"} {
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
	c.Rounds, c.Sizes, c.Workloads, c.Members = 0, []int{1}, []string{"nonsense"}, []int{5}
	err := c.Validate()
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{"rounds is 0", "a size is 1", `unknown workload "nonsense"`, "members has 5", "no mortard binary"} {
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
