package crash

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/mortarmq/mortarmq/tests/harness"
)

// SmallConfig are settings that make everything that is rare with the defaults happen in a second: journal files are
// rotated and recycled, segments roll, sweeps and checkpoints run.
func SmallConfig() map[string]any {
	return map[string]any{
		"journal_file_bytes":        4 << 20,
		"journal_max_files":         4,
		"segment_max_bytes":         1 << 20,
		"metadata_snapshot_records": 16,
		"delivery_lease_ms":         600_000, // nothing expires while a test looks
	}
}

// DaemonTarget is a mortard process.
type DaemonTarget struct {
	opts harness.Options
	d    *harness.Daemon
}

// NewDaemonTarget returns a target whose broker is not running. config keys come on top of SmallConfig.
func NewDaemonTarget(binary, dataDir string, config map[string]any) *DaemonTarget {
	keys := SmallConfig()
	maps.Copy(keys, config)
	return &DaemonTarget{opts: harness.Options{Binary: binary, DataDir: dataDir, Config: keys}}
}

// Daemon returns the process that was started last.
func (t *DaemonTarget) Daemon() *harness.Daemon { return t.d }

// Start implements Target.
func (t *DaemonTarget) Start(ctx context.Context) (string, error) {
	d, err := harness.Start(ctx, t.opts)
	if err != nil {
		return "", err
	}
	t.d = d
	if _, err := d.CheckSums(); err != nil {
		return "", fmt.Errorf("after a start: %w", err)
	}
	return d.ClientAddr, nil
}

// Flicker implements Target.
func (t *DaemonTarget) Flicker(after time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), after)
	defer cancel()
	d, err := harness.Start(ctx, t.opts)
	if err == nil {
		d.Kill() // it was quicker than that
		return nil
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return nil
	}
	return err
}

// Kill implements Target.
func (t *DaemonTarget) Kill() { t.d.Kill() }

// Stop implements Target.
func (t *DaemonTarget) Stop() error {
	if _, err := t.d.CheckSums(); err != nil {
		return err
	}
	return t.d.Stop(harness.DefaultStopTimeout)
}

// Crashed implements Target.
func (t *DaemonTarget) Crashed() error {
	if t.d == nil {
		return nil
	}
	return t.d.Crashed()
}
