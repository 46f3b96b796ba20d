package compare

import (
	"archive/tar"
	"bytes"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestRankTest_KnownProbabilities(t *testing.T) {
	for _, tt := range []struct {
		name string
		a, b []float64
		want float64
	}{
		// Exact: of the 20 arrangements of 3 and 3 values, one each way is as extreme; of 252 of 5 and 5 likewise.
		{"apart, 3 and 3", []float64{1, 2, 3}, []float64{4, 5, 6}, 2.0 / 20},
		{"apart, 5 and 5", []float64{6, 7, 8, 9, 10}, []float64{1, 2, 3, 4, 5}, 2.0 / 252},
		{"one step less", []float64{1, 2, 4}, []float64{3, 5, 6}, 4.0 / 20},
		{"in turn", []float64{1, 3}, []float64{2, 4}, 4.0 / 6},
		{"all the same", []float64{1, 1, 1}, []float64{1, 1, 1}, 1},
		{"nothing", nil, []float64{1}, 1},
	} {
		if got := rankTest(tt.a, tt.b); math.Abs(got-tt.want) > 1e-9 {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
		if x, y := rankTest(tt.a, tt.b), rankTest(tt.b, tt.a); math.Abs(x-y) > 1e-9 {
			t.Errorf("%s: %v one way, %v the other", tt.name, x, y)
		}
	}
}

func TestRankTest_TiesUseTheNormalApproximation(t *testing.T) {
	// Ranks: a has 1, 2.5, 2.5, 4, so U is 0 of 16; one tie of two; variance 16/12*(9-6/56); z = 7.5/sqrt(variance).
	a, b := []float64{1, 2, 2, 3}, []float64{4, 5, 6, 7}
	want := math.Erfc(7.5 / math.Sqrt(16.0/12*(9-6.0/56)) / math.Sqrt2)
	if got := rankTest(a, b); math.Abs(got-want) > 1e-9 {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestMedianAndSpread(t *testing.T) {
	if median(nil) != 0 || median([]float64{3, 1, 2}) != 2 || median([]float64{4, 1, 2, 3}) != 2.5 {
		t.Error("wrong medians")
	}
	if got := spread([]float64{90, 95, 100, 105, 110}); math.Abs(got-0.05) > 1e-9 {
		t.Errorf("spread %v", got)
	}
}

const output = `goos: linux
BenchmarkPubDecode-2   	 1000	  100.0 ns/op	  10 B/op	  1 allocs/op
BenchmarkRing/uring/depth=4-2   	 1000	  50.5 ns/op	 81.1 MB/s
BenchmarkOdd prints this itself 4 5
PASS
`

func TestSet_ParseReadsBenchmarkLines(t *testing.T) {
	s := Set{}
	if err := s.Parse("protocol.", strings.NewReader(output)); err != nil {
		t.Fatal(err)
	}
	if len(s) != 2 || s["protocol.PubDecode"]["ns/op"][0] != 100 || s["protocol.PubDecode"]["allocs/op"][0] != 1 || s["protocol.Ring/uring/depth=4"]["MB/s"][0] != 81.1 {
		t.Errorf("got %v", s)
	}
}

func TestReport_OnlyDifferencesThatStandOutAreRegressions(t *testing.T) {
	base, head := Set{}, Set{}
	for i := range 10 {
		v := float64(i)
		base.Add("same", timeUnit, 100+v)
		head.Add("same", timeUnit, 100.5+v)
		base.Add("noisy", timeUnit, 100+20*v)
		head.Add("noisy", timeUnit, 111+20*v)
		base.Add("slower", timeUnit, 100+v)
		head.Add("slower", timeUnit, 130+v)
		base.Add("faster", timeUnit, 100+v)
		head.Add("faster", timeUnit, 50+v)
		base.Add("a little", timeUnit, 1000+v/10)
		head.Add("a little", timeUnit, 1050+v/10)
		base.Add("allocates", allocUnit, 0)
		head.Add("allocates", allocUnit, 1)
		base.Add("publish", MessageUnit, 0.10+v/1000)
		head.Add("publish", MessageUnit, 0.12+v/1000)
		head.Add("new", timeUnit, 1)
	}
	var b bytes.Buffer
	n, err := Report(&b, base, head, DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	if n != 2 {
		t.Errorf("%d regressions, want those of slower and allocates", n)
	}
	for line := range strings.Lines(b.String()) {
		bad := strings.Contains(line, "REGRESSION")
		want := strings.HasPrefix(line, "slower") || strings.HasPrefix(line, "allocates")
		if bad != want {
			t.Errorf("%q", line)
		}
	}
	if !strings.Contains(b.String(), "only in head: new") || !strings.Contains(b.String(), "geometric mean") {
		t.Errorf("got\n%s", b.String())
	}
}

func TestUnpack_StaysInsideItsDirectory(t *testing.T) {
	archive := func(name string) io.Reader {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: 2, Typeflag: tar.TypeReg}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte("hi")); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return &b
	}
	dir := t.TempDir()
	if err := unpack(archive("a/b"), dir); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(filepath.Join(dir, "a", "b")); err != nil || string(text) != "hi" {
		t.Errorf("%q, %v", text, err)
	}
	if err := unpack(archive("../outside"), dir); err == nil {
		t.Error("a file outside was written")
	}
}
