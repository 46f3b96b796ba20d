package bench

import (
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

const (
	histMax    = int64(60 * time.Second)
	histDigits = 3
)

// base is the zero of the generator's clock: nanoseconds since then fit into a message and never jump.
var base = time.Now()

// now returns the generator's monotonic clock in nanoseconds.
func now() int64 { return int64(time.Since(base)) }

// newHist returns a histogram of nanoseconds up to a minute with three significant digits.
func newHist() *hdrhistogram.Histogram { return hdrhistogram.New(1, histMax, histDigits) }

// record adds a latency; what lies beyond a minute counts as a minute.
func record(h *hdrhistogram.Histogram, ns int64) {
	// The only error is a value out of range, which the clamp excludes.
	_ = h.RecordValue(min(max(ns, 1), histMax))
}

// Quantiles summarises a histogram in microseconds.
type Quantiles struct {
	P50, P90, P99, P999, Max float64
	// Curve are points of the distribution for a chart: percentile and microseconds.
	Curve [][2]float64 `json:",omitempty"`
}

// curvePercentiles are the points of a latency curve, dense at the tail.
var curvePercentiles = []float64{0, 10, 25, 50, 75, 90, 95, 99, 99.5, 99.9, 99.95, 99.99, 99.999}

func quantiles(h *hdrhistogram.Histogram) *Quantiles {
	if h.TotalCount() == 0 {
		return nil
	}
	us := func(p float64) float64 { return float64(h.ValueAtQuantile(p)) / 1e3 }
	q := &Quantiles{P50: us(50), P90: us(90), P99: us(99), P999: us(99.9), Max: float64(h.Max()) / 1e3}
	for _, p := range curvePercentiles {
		q.Curve = append(q.Curve, [2]float64{p, us(p)})
	}
	return q
}
