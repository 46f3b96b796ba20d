package compare

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// Set holds samples by benchmark and unit: Set["protocol.PubDecode"]["ns/op"].
type Set map[string]map[string][]float64

// Add notes one sample.
func (s Set) Add(name, unit string, v float64) {
	if s[name] == nil {
		s[name] = map[string][]float64{}
	}
	s[name][unit] = append(s[name][unit], v)
}

// Parse reads the output of benchmarks (https://go.dev/design/14313-benchmark-format): name, iterations, then pairs of value
// and unit. Names get the prefix; the number of processors at their end is cut off.
func (s Set) Parse(prefix string, out io.Reader) error {
	in := bufio.NewScanner(out)
	for in.Scan() {
		f := strings.Fields(in.Text())
		if len(f) < 4 || !strings.HasPrefix(f[0], "Benchmark") {
			continue
		}
		if _, err := strconv.Atoi(f[1]); err != nil {
			continue // a line that a benchmark printed
		}
		name := strings.TrimPrefix(f[0], "Benchmark")
		if at := strings.LastIndexByte(name, '-'); at > 0 {
			if _, err := strconv.Atoi(name[at+1:]); err == nil {
				name = name[:at]
			}
		}
		for i := 2; i+1 < len(f); i += 2 {
			v, err := strconv.ParseFloat(f[i], 64)
			if err != nil {
				return fmt.Errorf("%q: %w", in.Text(), err)
			}
			s.Add(prefix+name, f[i+1], v)
		}
	}
	return in.Err()
}

// Limits say which differences count as a regression.
type Limits struct {
	// Time is by which part a time may grow, Alpha how improbable the difference must be by chance.
	Time, Alpha float64
	// Allocations is by how many an operation's or a message's may grow: less than one, for they are means.
	Allocations float64
}

// DefaultLimits are those of `make bench-compare`: on a shared machine with two cores medians of the same code differ by up
// to a tenth.
func DefaultLimits() Limits { return Limits{Time: 0.10, Alpha: 0.01, Allocations: 0.1} }

// Units that are compared. Others are derived from these, or say nothing about the code.
const (
	timeUnit  = "ns/op"
	allocUnit = "allocs/op"
	// MessageUnit is that of allocations per message of a whole broker.
	MessageUnit = "allocs/msg"
)

// line is one comparison.
type line struct {
	name, unit string
	base, head []float64
	p          float64
	regression bool
}

func (l *line) change() float64 {
	b := median(l.base)
	if b == 0 {
		return 0
	}
	return median(l.head)/b - 1
}

// compare pairs what both sets have.
func compare(base, head Set, limits Limits) (lines []line) {
	for name, units := range head {
		for unit, h := range units {
			b := base[name][unit]
			if len(b) == 0 || unit != timeUnit && unit != allocUnit && unit != MessageUnit {
				continue
			}
			l := line{name: name, unit: unit, base: b, head: h, p: rankTest(b, h)}
			if unit == timeUnit {
				l.regression = l.change() > limits.Time && l.p < limits.Alpha
			} else {
				l.regression = median(h)-median(b) > limits.Allocations
			}
			lines = append(lines, l)
		}
	}
	slices.SortFunc(lines, func(x, y line) int {
		if c := strings.Compare(x.unit, y.unit); c != 0 {
			return -c // times first
		}
		return strings.Compare(x.name, y.name)
	})
	return lines
}

// only lists the benchmarks that one set has and the other lacks.
func only(a, b Set) (names []string) {
	for name := range a {
		if b[name] == nil {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Report prints every comparison and returns how many are regressions.
func Report(w io.Writer, base, head Set, limits Limits) (regressions int, err error) {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "benchmark\tunit\tbase\thead\tchange\tp\t")
	product, times := 0.0, 0
	for _, l := range compare(base, head, limits) {
		verdict := ""
		switch {
		case l.regression:
			verdict = "REGRESSION"
			regressions++
		case l.p >= limits.Alpha && l.unit == timeUnit:
			verdict = "~" // no more than noise
		}
		if b, h := median(l.base), median(l.head); l.unit == timeUnit && b > 0 && h > 0 {
			product += math.Log(h / b)
			times++
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%+.1f %%\t%.3f\t%s\n", l.name, l.unit, figure(l.base), figure(l.head), 100*l.change(), l.p, verdict)
	}
	if times > 0 {
		fmt.Fprintf(tw, "geometric mean\t%s\t\t\t%+.1f %%\t\t\n", timeUnit, 100*(math.Exp(product/float64(times))-1))
	}
	if err := tw.Flush(); err != nil {
		return regressions, err
	}
	for _, side := range []struct {
		name  string
		names []string
	}{{"base", only(base, head)}, {"head", only(head, base)}} {
		if len(side.names) > 0 {
			fmt.Fprintf(w, "only in %s: %s\n", side.name, strings.Join(side.names, ", "))
		}
	}
	return regressions, nil
}

// figure prints a median with its spread.
func figure(values []float64) string {
	m := median(values)
	if s := spread(values); s >= 0.005 {
		return fmt.Sprintf("%.4g ± %.0f %%", m, 100*s)
	}
	return fmt.Sprintf("%.4g", m)
}
