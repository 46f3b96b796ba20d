package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
)

// spread is the median and the range of a figure over the rounds.
type spread struct{ median, low, high float64 }

func spreadOf(values []float64) spread {
	if len(values) == 0 {
		return spread{}
	}
	v := slices.Sorted(slices.Values(values))
	m := v[len(v)/2]
	if len(v)%2 == 0 {
		m = (v[len(v)/2-1] + m) / 2
	}
	return spread{m, v[0], v[len(v)-1]}
}

// String gives the median, and the range where there is one.
func (s spread) String() string {
	if s.low == s.high {
		return num(s.median)
	}
	return num(s.median) + " (" + num(s.low) + "-" + num(s.high) + ")"
}

// num prints a figure with three to four significant digits and without an exponent.
func num(v float64) string {
	switch {
	case v == 0:
		return "-"
	case v >= 100_000:
		return fmt.Sprintf("%.0fk", v/1000)
	case v >= 1000:
		return fmt.Sprintf("%.0f", v)
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	default:
		return fmt.Sprintf("%.2f", v)
	}
}

// sizeName prints a size in bytes as people say it.
func sizeName(n int) string {
	switch {
	case n >= 1<<20 && n%(1<<20) == 0:
		return fmt.Sprintf("%dMiB", n>>20)
	case n >= 1<<10 && n%(1<<10) == 0:
		return fmt.Sprintf("%dKiB", n>>10)
	default:
		return fmt.Sprintf("%dB", n)
	}
}

// brief is a sample in one line of progress.
func (s *Sample) brief() string {
	var b strings.Builder
	if s.MsgsPerSec > 0 {
		fmt.Fprintf(&b, "%s/s %s MB/s  ", num(s.MsgsPerSec), num(s.MBPerSec))
	}
	if s.Latency != nil {
		fmt.Fprintf(&b, "p50 %s p99 %s us", num(s.Latency.P50), num(s.Latency.P99))
	}
	for _, k := range sortedKeys(s.Values) {
		fmt.Fprintf(&b, "  %s %s", k, num(s.Values[k]))
	}
	return b.String()
}

func sortedKeys(m map[string]float64) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// group holds the samples of one case.
type group struct {
	workload string
	size     int
	samples  []*Sample
}

func groups(samples []Sample) []*group {
	var list []*group
	for i := range samples {
		s := &samples[i]
		at := slices.IndexFunc(list, func(g *group) bool { return g.workload == s.Workload && g.size == s.Size })
		if at < 0 {
			list = append(list, &group{workload: s.Workload, size: s.Size})
			at = len(list) - 1
		}
		list[at].samples = append(list[at].samples, s)
	}
	return list
}

func (g *group) spread(f func(*Sample) float64) spread {
	var v []float64
	for _, s := range g.samples {
		v = append(v, f(s))
	}
	return spreadOf(v)
}

func latency(f func(*Quantiles) float64) func(*Sample) float64 {
	return func(s *Sample) float64 {
		if s.Latency == nil {
			return 0
		}
		return f(s.Latency)
	}
}

var (
	p50  = latency(func(q *Quantiles) float64 { return q.P50 })
	p99  = latency(func(q *Quantiles) float64 { return q.P99 })
	p999 = latency(func(q *Quantiles) float64 { return q.P999 })
	pMax = latency(func(q *Quantiles) float64 { return q.Max })
)

// column is one column of the table.
type column struct {
	name  string
	value func(*Sample) float64
}

var columns = []column{
	{"msgs/s", func(s *Sample) float64 { return s.MsgsPerSec }},
	{"with drain", func(s *Sample) float64 { return s.SustainedMsgsPerSec }},
	{"MB/s", func(s *Sample) float64 { return s.MBPerSec }},
	{"p50 us", p50}, {"p99 us", p99}, {"p99.9 us", p999}, {"max us", pMax},
	{"CPU s/M", func(s *Sample) float64 { return s.CPUSecondsPerMillion }},
	{"RSS MB", func(s *Sample) float64 { return float64(s.PeakRSSBytes) / 1e6 }},
	{"drain s", func(s *Sample) float64 { return s.DrainSeconds }},
}

// parts are the latencies of which an end-to-end latency is made.
var parts = []struct {
	name string
	of   func(*Sample) *Quantiles
}{
	{"publish", func(s *Sample) *Quantiles { return s.PublishLatency }},
	{"deliver", func(s *Sample) *Quantiles { return s.DeliverLatency }},
}

// WriteTable prints medians over the rounds, with the range in parentheses, then the figures that only some cases have,
// then the ratios.
func WriteTable(w io.Writer, samples []Sample) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprint(tw, "workload\tsize")
	for _, c := range columns {
		fmt.Fprintf(tw, "\t%s", c.name)
	}
	fmt.Fprintln(tw)
	list := groups(samples)
	for _, g := range list {
		fmt.Fprintf(tw, "%s\t%s", g.workload, sizeName(g.size))
		for _, c := range columns {
			fmt.Fprintf(tw, "\t%v", g.spread(c.value))
		}
		fmt.Fprintln(tw)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	for _, g := range list {
		for _, k := range sortedKeys(g.samples[0].Values) {
			fmt.Fprintf(tw, "%s\t%s\t%s\t%v\n", g.workload, sizeName(g.size), k, g.spread(func(s *Sample) float64 { return s.Values[k] }))
		}
	}
	for _, g := range list {
		for _, part := range parts {
			if part.of(g.samples[0]) == nil {
				continue
			}
			fmt.Fprintf(tw, "%s\t%s\t%s p50, p99 us\t%v, %v\n", g.workload, sizeName(g.size), part.name,
				g.spread(func(s *Sample) float64 { return part.of(s).P50 }), g.spread(func(s *Sample) float64 { return part.of(s).P99 }))
		}
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	for _, r := range ratios(list) {
		fmt.Fprintf(tw, "%s\t%.2f\n", r.name, r.value)
	}
	return tw.Flush()
}

// ratio is a figure of the broker over a limit of the same run, both medians.
type ratio struct {
	name  string
	value float64
}

func ratios(list []*group) []ratio {
	find := func(workload string, size int) *group {
		for _, g := range list {
			if g.workload == workload && g.size == size {
				return g
			}
		}
		return nil
	}
	var out []ratio
	add := func(name string, a, b float64) {
		if a > 0 && b > 0 {
			out = append(out, ratio{name, a / b})
		}
	}
	for _, g := range list {
		size := sizeName(g.size)
		disk, echo := find("disk", journalBlock(g.size)), find("echo", g.size)
		switch g.workload {
		case "publish-sync":
			if disk != nil && echo != nil {
				add("publish-sync "+size+": p50 / (disk p50 + echo p50)", g.spread(p50).median, disk.spread(p50).median+echo.spread(p50).median)
				add("publish-sync "+size+": p99 / (disk p99 + echo p99)", g.spread(p99).median, disk.spread(p99).median+echo.spread(p99).median)
			}
		case "end-to-end":
			if disk != nil {
				add("end-to-end "+size+": p99 / disk p50", g.spread(p99).median, disk.spread(p50).median)
			}
		case "partitions":
			if one := find("publish", g.size); one != nil {
				add(fmt.Sprintf("partitions %s: throughput of %d / of 1", size, manyPartitions), g.spread(columns[0].value).median, one.spread(columns[0].value).median)
			}
		case "publish":
			if big := find("disk", bandwidthBlock); big != nil {
				add("publish "+size+": MB/s / disk write MB/s", g.spread(columns[2].value).median, big.spread(columns[2].value).median)
			}
		case "catchup":
			if read := find("disk-read", bandwidthBlock); read != nil {
				add("catchup "+size+": cold MB/s / disk read MB/s", g.spread(func(s *Sample) float64 { return s.Values["cold_mb_per_s"] }).median,
					read.spread(columns[2].value).median)
			}
		}
	}
	return out
}

// WriteJSONLines writes the environment and then every sample, one JSON object per line.
func WriteJSONLines(w io.Writer, env *Environment, samples []Sample) error {
	enc := json.NewEncoder(w)
	if err := enc.Encode(map[string]any{"Environment": env}); err != nil {
		return err
	}
	for i := range samples {
		if err := enc.Encode(&samples[i]); err != nil {
			return err
		}
	}
	return nil
}
