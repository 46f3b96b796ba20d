package bench

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

func TestJournalBlock_IsTheWriteOfOneMessage(t *testing.T) {
	for size, want := range map[int]int{100: 4096, 1024: 4096, 16 << 10: 20 << 10} {
		if got := journalBlock(size); got != want {
			t.Errorf("a value of %d bytes makes a write of %d, want %d", size, got, want)
		}
	}
}

func TestRingWrite_MeasuresWrites(t *testing.T) {
	path := filepath.Join(t.TempDir(), "limit")
	if err := prepareZeroed(path, 1<<20); err != nil {
		t.Fatal(err)
	}
	l, err := ringWrite(path, 1<<20, 4096, 5*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	if l.PerSec <= 0 || l.MBps <= 0 || l.Latency.P50 <= 0 || l.Latency.P99 < l.Latency.P50 {
		t.Errorf("implausible: %+v", l)
	}
}

func TestParseFio_ReadsTheBusyDirection(t *testing.T) {
	out := []byte("fio: a warning\n" + `{"jobs":[{"read":{"total_ios":0},"write":{"bw_bytes":4096000,"iops":1000,"io_bytes":8192000,"total_ios":2000,
		"lat_ns":{"max":900000,"percentile":{"50.000000":80000,"90.000000":90000,"99.000000":150000,"99.900000":901000}}}}]}`)
	l, err := parseFio(out)
	if err != nil {
		t.Fatal(err)
	}
	if l.Block != 4096 || l.PerSec != 1000 || l.MBps != 4.096 || l.Latency.P50 != 80 || l.Latency.P999 != 900 || l.Latency.Max != 900 {
		t.Errorf("got %+v", l)
	}
	for _, bad := range []string{"", "{}", `{"jobs":[{"read":{},"write":{}}]}`} {
		if _, err := parseFio([]byte(bad)); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

func TestFio_OfThisMachineIsUnderstood(t *testing.T) {
	if _, err := exec.LookPath("fio"); err != nil {
		t.Skip("fio is not installed")
	}
	path := filepath.Join(t.TempDir(), "limit")
	if err := prepareZeroed(path, 1<<20); err != nil {
		t.Fatal(err)
	}
	l, err := fioWrite(t.Context(), path, 1<<20, 4096, 50*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	if l.Block != 4096 || l.Latency.P50 <= 0 {
		t.Errorf("implausible: %+v", l)
	}
}

func TestDropCache_KeepsTheData(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, []byte("data"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := dropCache(filepath.Dir(path)); err != nil {
		t.Fatal(err)
	}
	if err := fillCache(filepath.Dir(path)); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != "data" {
		t.Errorf("read %q, %v", got, err)
	}
}
