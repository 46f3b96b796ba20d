package compare

import (
	"math"
	"slices"
)

// median of values; 0 of none.
func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	v := slices.Sorted(slices.Values(values))
	if m := len(v) / 2; len(v)%2 == 0 {
		return (v[m-1] + v[m]) / 2
	}
	return v[len(v)/2]
}

// spread is half of the range from the lower to the upper quartile, in parts of the median.
func spread(values []float64) float64 {
	m := median(values)
	if m == 0 {
		return 0
	}
	v := slices.Sorted(slices.Values(values))
	at := func(q float64) float64 { return v[int(math.Round(q*float64(len(v)-1)))] }
	return (at(0.75) - at(0.25)) / 2 / m
}

// exactLimit is the sample size up to which the rank test counts arrangements instead of using the normal distribution.
const exactLimit = 20

// rankTest returns the probability of ranks at least this different if a and b came from the same distribution: the
// two-sided Mann-Whitney U test (H. B. Mann, D. R. Whitney, 1947). Without ties and for small samples it is exact, else by
// the normal approximation with corrections for ties and continuity.
func rankTest(a, b []float64) float64 {
	n, m := len(a), len(b)
	if n == 0 || m == 0 {
		return 1
	}
	type value struct {
		v     float64
		first bool
	}
	var all []value
	for _, v := range a {
		all = append(all, value{v, true})
	}
	for _, v := range b {
		all = append(all, value{v, false})
	}
	slices.SortFunc(all, func(x, y value) int {
		switch {
		case x.v < y.v:
			return -1
		case x.v > y.v:
			return 1
		default:
			return 0
		}
	})
	rankSum, tieTerm := 0.0, 0.0
	for i := 0; i < len(all); {
		j := i
		for j < len(all) && all[j].v == all[i].v {
			j++
		}
		rank := float64(i+j+1) / 2 // of ranks i+1 to j the mean
		for k := i; k < j; k++ {
			if all[k].first {
				rankSum += rank
			}
		}
		t := float64(j - i)
		tieTerm += t*t*t - t
		i = j
	}
	nf, mf := float64(n), float64(m)
	u := rankSum - nf*(nf+1)/2
	u = min(u, nf*mf-u)
	if tieTerm == 0 && n <= exactLimit && m <= exactLimit {
		return min(1, 2*exactBelow(n, m, int(u)))
	}
	total := nf + mf
	variance := nf * mf / 12 * (total + 1 - tieTerm/(total*(total-1)))
	if variance <= 0 {
		return 1 // all values are the same
	}
	z := (nf*mf/2 - u - 0.5) / math.Sqrt(variance)
	return min(1, math.Erfc(max(0, z)/math.Sqrt2))
}

// exactBelow returns the probability that U is at most u, counting the arrangements of n and m values: f(n, m, u) =
// f(n-1, m, u-m) + f(n, m-1, u).
func exactBelow(n, m, u int) float64 {
	counts := make([][][]float64, n+1)
	for i := range counts {
		counts[i] = make([][]float64, m+1)
		for j := range counts[i] {
			c := make([]float64, u+1)
			for k := range c {
				switch {
				case i == 0 || j == 0:
					if k == 0 {
						c[k] = 1
					}
				default:
					c[k] = counts[i][j-1][k]
					if k >= j {
						c[k] += counts[i-1][j][k-j]
					}
				}
			}
			counts[i][j] = c
		}
	}
	sum := 0.0
	for _, c := range counts[n][m] {
		sum += c
	}
	return sum / binomial(n+m, n)
}

func binomial(n, k int) float64 {
	r := 1.0
	for i := 1; i <= k; i++ {
		r = r * float64(n-k+i) / float64(i)
	}
	return r
}
