package bench

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/ring"
)

const (
	// bandwidthBlock is the size of a large journal round.
	bandwidthBlock = 1 << 20
	directAlign    = ring.BlockSize
)

// journalBlock returns the size of the journal write that one message of n value bytes makes when nothing else is
// outstanding: record header, entry and round headers, padded to the block size.
func journalBlock(n int) int {
	const recordAndRound = 56 + 256 // an upper bound of the headers; only the rounding up matters
	return (n + recordAndRound + directAlign - 1) / directAlign * directAlign
}

// diskLimit is what the device does for one shape of write.
type diskLimit struct {
	Tool    string // "fio" or "ring"
	Block   int
	Latency Quantiles // microseconds
	PerSec  float64
	MBps    float64
}

// diskWrite measures the device with fio where it is installed, and always by loops of this process: plain pwritev2, and
// the same through package ring. The sample is fio's figure if there is one, else that of pwritev2.
func diskWrite(ctx context.Context, r *runner, s *Sample) error {
	path := filepath.Join(r.dir, "limit")
	if err := prepareZeroed(path, r.cfg.limitFileBytes); err != nil {
		return err
	}
	defer os.Remove(path)
	plain, err := plainWrite(path, r.cfg.limitFileBytes, s.Size, r.cfg.Duration/4)
	if err != nil {
		return err
	}
	s.setLimit(plain)
	own, err := ringWrite(path, r.cfg.limitFileBytes, s.Size, r.cfg.Duration/4)
	if err != nil {
		return err
	}
	s.Values = map[string]float64{}
	for name, l := range map[string]*diskLimit{"pwritev2": plain, "ring": own} {
		s.Values[name+"_p50_us"], s.Values[name+"_p99_us"], s.Values[name+"_mb_per_s"] = l.Latency.P50, l.Latency.P99, l.MBps
	}
	if _, err := exec.LookPath("fio"); err != nil {
		return nil
	}
	dev, err := fioWrite(ctx, path, r.cfg.limitFileBytes, s.Size, r.cfg.Duration/4)
	if err != nil {
		return err
	}
	s.setLimit(dev)
	return nil
}

func diskRead(ctx context.Context, r *runner, s *Sample) error {
	if _, err := exec.LookPath("fio"); err != nil {
		return fmt.Errorf("%w: fio is not installed", errSkipped)
	}
	path := filepath.Join(r.dir, "limit")
	if err := prepareZeroed(path, r.cfg.limitFileBytes); err != nil {
		return err
	}
	defer os.Remove(path)
	dev, err := fioRead(ctx, path, r.cfg.limitFileBytes, r.cfg.Duration/4)
	if err != nil {
		return err
	}
	s.setLimit(dev)
	return nil
}

// prepareZeroed makes a preallocated, zeroed, durable file as the journal's are.
func prepareZeroed(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o640)
	if err != nil {
		return err
	}
	defer f.Close() // the sync below reports what matters
	if err := unix.Fallocate(int(f.Fd()), 0, 0, size); err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("fallocate %s: %w", path, err)
	}
	zeros := make([]byte, 1<<20)
	for off := int64(0); off < size; off += int64(len(zeros)) {
		if _, err := f.WriteAt(zeros, off); err != nil {
			return err
		}
	}
	return f.Sync()
}

// fioWrite measures direct, synchronous writes with one outstanding.
func fioWrite(ctx context.Context, path string, size int64, block int, d time.Duration) (*diskLimit, error) {
	return fio(ctx, path, size, d, "--rw=write", "--sync=dsync", "--overwrite=1", fmt.Sprintf("--bs=%d", block), "--ioengine=psync")
}

// fioRead measures direct sequential reads of 1 MiB, four at a time.
func fioRead(ctx context.Context, path string, size int64, d time.Duration) (*diskLimit, error) {
	return fio(ctx, path, size, d, "--rw=read", fmt.Sprintf("--bs=%d", bandwidthBlock), "--ioengine=io_uring", "--iodepth=4")
}

func fio(ctx context.Context, path string, size int64, d time.Duration, args ...string) (*diskLimit, error) {
	args = append(args, "--name=limit", "--filename="+path, fmt.Sprintf("--size=%d", size), "--direct=1", "--time_based",
		fmt.Sprintf("--runtime=%dms", d.Milliseconds()), "--lat_percentiles=1", "--clat_percentiles=0", "--output-format=json")
	cmd := exec.CommandContext(ctx, "fio", args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("fio: %w: %s", err, stderr.Bytes())
	}
	return parseFio(out)
}

// parseFio reads fio's JSON (fio(1), "JSON output"): latencies are total latencies in nanoseconds, bw_bytes per second.
func parseFio(out []byte) (*diskLimit, error) {
	type direction struct {
		BW      float64 `json:"bw_bytes"`
		IOPS    float64 `json:"iops"`
		IOBytes float64 `json:"io_bytes"`
		IOs     float64 `json:"total_ios"`
		Lat     struct {
			Max        float64            `json:"max"`
			Percentile map[string]float64 `json:"percentile"`
		} `json:"lat_ns"`
	}
	var report struct {
		Jobs []struct{ Read, Write direction }
	}
	if i := bytes.IndexByte(out, '{'); i > 0 {
		out = out[i:] // warnings come before the JSON
	}
	if err := json.Unmarshal(out, &report); err != nil {
		return nil, fmt.Errorf("fio's output: %w", err)
	}
	if len(report.Jobs) != 1 {
		return nil, fmt.Errorf("fio reported %d jobs, expected 1", len(report.Jobs))
	}
	d := report.Jobs[0].Write
	if d.IOs == 0 {
		d = report.Jobs[0].Read
	}
	if d.IOs == 0 {
		return nil, errors.New("fio reported no I/O")
	}
	// fio rounds percentiles up to the end of a bin, which can lie beyond the maximum.
	us := func(p string) float64 { return min(d.Lat.Percentile[p], d.Lat.Max) / 1e3 }
	return &diskLimit{Tool: "fio", Block: int(d.IOBytes / d.IOs), PerSec: d.IOPS, MBps: d.BW / 1e6,
		Latency: Quantiles{P50: us("50.000000"), P90: us("90.000000"), P99: us("99.000000"), P999: us("99.900000"), Max: d.Lat.Max / 1e3}}, nil
}

// plainWrite measures direct writes that are durable when they return, one after the other: the least that a durable
// publish can cost.
func plainWrite(path string, size int64, block int, d time.Duration) (*diskLimit, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pool := ring.NewPool(ring.MaxSlab) // for memory that is aligned as O_DIRECT wants it
	slab := pool.Get(block)
	if slab == nil {
		return nil, errors.New("no memory for the write buffer")
	}
	defer slab.Release()
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s for direct writes: %w", path, err)
	}
	defer unix.Close(fd) // every write was durable by itself
	copy(slab.Bytes(), randomBytes(1, block))
	bufs := [][]byte{slab.Bytes()[:block]}
	h := newHist()
	began, off := now(), int64(0)
	for h.TotalCount() == 0 || now()-began < int64(d) {
		t := now()
		n, err := unix.Pwritev2(fd, bufs, off, unix.RWF_DSYNC)
		if err != nil || n != block {
			return nil, fmt.Errorf("write %d of %d bytes to %s: %w", n, block, path, cmp.Or(err, io.ErrShortWrite))
		}
		record(h, now()-t)
		if off += int64(block); off+int64(block) > size {
			off = 0
		}
	}
	elapsed := float64(now()-began) / 1e9
	n := float64(h.TotalCount())
	return &diskLimit{Tool: "pwritev2", Block: block, Latency: *quantiles(h), PerSec: n / elapsed, MBps: n * float64(block) / elapsed / 1e6}, nil
}

// ringWrite measures the same write through package ring: what the broker's own disk path costs without the broker.
func ringWrite(path string, size int64, block int, d time.Duration) (*diskLimit, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pool := ring.NewPool(ring.MaxSlab)
	slab := pool.Get(block)
	if slab == nil {
		return nil, errors.New("no memory for the write buffer")
	}
	defer slab.Release()
	r, err := ring.New(ring.Options{})
	if err != nil {
		return nil, err
	}
	defer r.Close() // after the last write has completed
	done := false
	op := ring.Op{Done: func(*ring.Op) { done = true }}
	do := func() error {
		done = false
		r.Submit(&op)
		for !done {
			if _, err := r.Wait(-1); err != nil {
				return err
			}
		}
		return op.Err
	}
	op.Kind, op.Path, op.Flags = ring.Open, path, ring.Direct
	if err := do(); err != nil {
		return nil, err
	}
	fd := op.FD
	copy(slab.Bytes(), randomBytes(1, block))
	h := newHist()
	began, off := now(), int64(0)
	for h.TotalCount() == 0 || now()-began < int64(d) {
		op.Kind, op.FD, op.Buf, op.Off = ring.WriteSync, fd, slab.Bytes()[:block], off
		t := now()
		if err := do(); err != nil {
			return nil, err
		}
		record(h, now()-t)
		if off += int64(block); off+int64(block) > size {
			off = 0
		}
	}
	elapsed := float64(now()-began) / 1e9
	op.Kind, op.FD = ring.Close, fd
	if err := do(); err != nil {
		return nil, err
	}
	n := float64(h.TotalCount())
	return &diskLimit{Tool: "ring/" + r.Backend(), Block: block, Latency: *quantiles(h), PerSec: n / elapsed, MBps: n * float64(block) / elapsed / 1e6}, nil
}

// dropCache removes every file below dir from the page cache; the broker must have been shut down.
func dropCache(dir string) error {
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close() // read only
		if err := f.Sync(); err != nil {
			return err
		}
		return unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	})
	if err != nil {
		return fmt.Errorf("drop the page cache of %s: %w", dir, err)
	}
	return nil
}

// dropAllCaches empties the machine's page cache, where this process may (root): dropCache alone leaves pages behind that
// something else has mapped.
func dropAllCaches() { _ = os.WriteFile("/proc/sys/vm/drop_caches", []byte("1"), 0) }

// fillCache reads every file below dir, so that the page cache holds it.
func fillCache(dir string) error {
	buf := make([]byte, 1<<20)
	return filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close() // read only
		for {
			n, err := f.Read(buf)
			if n == 0 || err != nil {
				return nil // the end; what can't be read the broker will report
			}
		}
	})
}
