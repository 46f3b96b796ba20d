package bench

import (
	"cmp"
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
	if q := s.DeliverLatency; q != nil {
		fmt.Fprintf(&b, "  until arrival p50 %s p99 %s us", num(q.P50), num(q.P99))
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
	workload, variant, system string
	size                      int
	samples                   []*Sample
}

// name is the case without the system.
func (g *group) name() string {
	if g.variant == "" {
		return g.workload + " " + sizeName(g.size)
	}
	return g.workload + " " + sizeName(g.size) + ", " + g.variant
}

// groups gathers samples of the same case and system; those of a case stand together, in the order of the run.
func groups(samples []Sample) []*group {
	var list []*group
	for i := range samples {
		s := &samples[i]
		same := func(g *group) bool { return g.workload == s.Workload && g.variant == s.Variant && g.size == s.Size }
		at := slices.IndexFunc(list, func(g *group) bool { return same(g) && g.system == s.System })
		if at < 0 {
			at = len(list)
			for j, g := range list {
				if same(g) {
					at = j + 1
				}
			}
			list = slices.Insert(list, at, &group{workload: s.Workload, variant: s.Variant, system: s.System, size: s.Size})
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

func msgsPerSec(s *Sample) float64 { return s.MsgsPerSec }
func mbPerSec(s *Sample) float64   { return s.MBPerSec }
func cpu(s *Sample) float64        { return s.CPUSecondsPerMillion }
func rss(s *Sample) float64        { return float64(s.PeakRSSBytes) / 1e6 }

var columns = []column{
	{"msgs/s", msgsPerSec},
	{"with drain", func(s *Sample) float64 { return s.SustainedMsgsPerSec }},
	{"MB/s", mbPerSec},
	{"p50 us", p50}, {"p99 us", p99}, {"p99.9 us", p999}, {"max us", pMax},
	{"CPU s/M", cpu},
	{"RSS MB", rss},
	{"drain s", func(s *Sample) float64 { return s.DrainSeconds }},
}

// parts are the latencies of which an end-to-end latency is made.
var parts = []struct {
	name string
	of   func(*Sample) *Quantiles
}{
	{"published", func(s *Sample) *Quantiles { return s.PublishLatency }},
	{"arrived", func(s *Sample) *Quantiles { return s.DeliverLatency }},
	{"ACK answered", func(s *Sample) *Quantiles { return s.Latency }},
}

// sheet is one table of a report.
type sheet struct {
	title   string
	columns []string
	rows    [][]string
}

// sheets are all tables of a report: medians over the rounds with the range in parentheses.
func sheets(samples []Sample) []sheet {
	list := groups(samples)
	all := []sheet{mainSheet(list), partSheet(list), detailSheet(list), perMessageSheet(list), peerSheet(list), limitSheet(list), goalSheet(list)}
	return slices.DeleteFunc(all, func(s sheet) bool { return len(s.rows) == 0 })
}

func mainSheet(list []*group) sheet {
	s := sheet{title: "Results", columns: []string{"case", "system"}}
	for _, c := range columns {
		s.columns = append(s.columns, c.name)
	}
	for _, g := range list {
		row := []string{g.name(), g.system}
		for _, c := range columns {
			row = append(row, g.spread(c.value).String())
		}
		s.rows = append(s.rows, row)
	}
	return s
}

// detailSheet has the figures that only some cases have.
func detailSheet(list []*group) sheet {
	s := sheet{title: "Further figures", columns: []string{"case", "system", "what", "value"}}
	for _, g := range list {
		for _, k := range sortedKeys(g.samples[0].Values) {
			s.rows = append(s.rows, []string{g.name(), g.system, k, g.spread(func(s *Sample) float64 { return s.Values[k] }).String()})
		}
	}
	return s
}

// partSheet has the latencies of which an end-to-end latency is made.
func partSheet(list []*group) sheet {
	s := sheet{title: "End to end, us from when a message was due", columns: []string{"case", "system"}}
	for _, part := range parts {
		s.columns = append(s.columns, part.name+" p50", part.name+" p99")
	}
	for _, g := range list {
		if g.samples[0].DeliverLatency == nil {
			continue
		}
		row := []string{g.name(), g.system}
		for _, part := range parts {
			row = append(row, g.spread(orZero(part.of, func(q *Quantiles) float64 { return q.P50 })).String(),
				g.spread(orZero(part.of, func(q *Quantiles) float64 { return q.P99 })).String())
		}
		s.rows = append(s.rows, row)
	}
	return s
}

// orZero takes a figure of a latency that a sample may lack.
func orZero(of func(*Sample) *Quantiles, f func(*Quantiles) float64) func(*Sample) float64 {
	return func(s *Sample) float64 {
		if q := of(s); q != nil {
			return f(q)
		}
		return 0
	}
}

// perMessageSheet has the broker's own counters.
func perMessageSheet(list []*group) sheet {
	s := sheet{title: "mortard, per message", columns: []string{"case", "system"}}
	var names []string
	for _, g := range list {
		for k := range g.samples[0].PerMessage {
			if !slices.Contains(names, k) {
				names = append(names, k)
			}
		}
	}
	order := func(name string) int {
		for i, c := range counted {
			if c.name == name {
				return i
			}
		}
		return len(counted)
	}
	slices.SortFunc(names, func(a, b string) int { return cmp.Or(order(a)-order(b), strings.Compare(a, b)) })
	s.columns = append(s.columns, names...)
	for _, g := range list {
		if len(g.samples[0].PerMessage) == 0 {
			continue
		}
		row := []string{g.name(), g.system}
		for _, k := range names {
			row = append(row, perMessage(g.spread(func(s *Sample) float64 { return s.PerMessage[k] }).median))
		}
		s.rows = append(s.rows, row)
	}
	return s
}

// perMessage prints a figure that may be far below 1.
func perMessage(v float64) string {
	if v != 0 && v < 0.01 {
		return fmt.Sprintf("%.2g", v)
	}
	return num(v)
}

// peerSheet compares mortard with every peer in the cases that both have.
func peerSheet(list []*group) sheet {
	s := sheet{title: "mortard / peer", columns: []string{"case", "peer", "msgs/s", "p50", "p99", "CPU s/M", "RSS"}}
	for _, g := range list {
		if !isMortard(g.system) {
			continue
		}
		for _, other := range list {
			if isMortard(other.system) || other.name() != g.name() {
				continue
			}
			row := []string{g.name(), other.system}
			for _, f := range []func(*Sample) float64{msgsPerSec, latencyOf(g, other, 50), latencyOf(g, other, 99), cpu, rss} {
				row = append(row, quotient(g.spread(f).median, other.spread(f).median))
			}
			s.rows = append(s.rows, row)
		}
	}
	return s
}

// latencyOf takes the latency until the answer where both systems have one, else that until arrival.
func latencyOf(a, b *group, percentile float64) func(*Sample) float64 {
	of := func(s *Sample) *Quantiles { return s.Latency }
	if a.samples[0].Latency == nil || b.samples[0].Latency == nil {
		of = func(s *Sample) *Quantiles { return s.DeliverLatency }
	}
	return orZero(of, func(q *Quantiles) float64 {
		if percentile == 50 {
			return q.P50
		}
		return q.P99
	})
}

func isMortard(system string) bool { return strings.HasPrefix(system, mortardName) }

func quotient(a, b float64) string {
	if a == 0 || b == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2fx", a/b)
}

// limitSheet compares with what the machine allows.
func limitSheet(list []*group) sheet {
	s := sheet{title: "mortard / the machine's limits", columns: []string{"what", "ratio"}}
	for _, r := range ratios(list) {
		s.rows = append(s.rows, []string{r.name, fmt.Sprintf("%.2f", r.value)})
	}
	return s
}

// WriteTable prints every table.
func WriteTable(w io.Writer, samples []Sample) error {
	for i, s := range sheets(samples) {
		if i > 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintln(w, s.title)
		tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintln(tw, strings.Join(s.columns, "\t"))
		for _, row := range s.rows {
			fmt.Fprintln(tw, strings.Join(row, "\t"))
		}
		if err := tw.Flush(); err != nil {
			return err
		}
	}
	return nil
}

// ratio is a figure of the broker over a limit of the same run, both medians.
type ratio struct {
	name  string
	value float64
}

// find returns the group of a case, nil where it was not measured.
func find(list []*group, workload, variant, system string, size int) *group {
	for _, g := range list {
		if g.workload == workload && g.variant == variant && g.system == system && (g.size == size || size == 0) {
			return g
		}
	}
	return nil
}

func ratios(list []*group) []ratio {
	var out []ratio
	add := func(name string, a, b float64) {
		if a > 0 && b > 0 {
			out = append(out, ratio{name, a / b})
		}
	}
	for _, g := range list {
		if !isMortard(g.system) {
			continue
		}
		disk, echo := find(list, "disk", "", machineName, journalBlock(g.size)), find(list, "echo", "", machineName, g.size)
		big := find(list, "disk", "", machineName, bandwidthBlock)
		switch g.workload {
		case "publish-sync":
			if disk != nil && echo != nil {
				add(g.name()+": p50 / (disk p50 + echo p50)", g.spread(p50).median, disk.spread(p50).median+echo.spread(p50).median)
				add(g.name()+": p99 / (disk p99 + echo p99)", g.spread(p99).median, disk.spread(p99).median+echo.spread(p99).median)
			}
		case "end-to-end":
			if disk != nil {
				add(g.name()+": p99 / disk p50", g.spread(p99).median, disk.spread(p50).median)
			}
		case "publish":
			if big != nil {
				add(g.name()+": MB/s / disk write MB/s", g.spread(mbPerSec).median, big.spread(mbPerSec).median)
			}
		case "catchup":
			if read := find(list, "disk-read", "", machineName, bandwidthBlock); read != nil {
				add(g.name()+": cold MB/s / disk read MB/s", g.spread(func(s *Sample) float64 { return s.Values["cold_mb_per_s"] }).median,
					read.spread(mbPerSec).median)
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
