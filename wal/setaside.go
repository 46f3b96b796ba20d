package wal

import (
	"path/filepath"
	"slices"

	"github.com/mortarmq/mortarmq/ring"
)

// SetAside moves everything in the data directory dir to a new directory to inside it, except the entries named in keep,
// and makes that durable: a node of a cluster whose files can't be trusted begins without them, and they stay for whoever
// wants to look. Interrupted, it can be done again with the same or another name. It drives w.
func SetAside(w Waiter, dir, to string, keep []string) error {
	io := newBlockingDisk(w)
	target := filepath.Join(dir, to)
	if err := makeDir(io, target); err != nil {
		return err
	}
	op, err := io.run(ring.Op{Kind: ring.ReadDir, Path: dir})
	if err != nil {
		return err
	}
	slices.Sort(op.Names)
	for _, name := range op.Names {
		if name == to || slices.Contains(keep, name) {
			continue
		}
		if _, err := io.run(ring.Op{Kind: ring.Rename, Path: filepath.Join(dir, name), Path2: filepath.Join(target, name)}); err != nil {
			return err
		}
	}
	for _, d := range []string{target, dir} {
		if _, err := io.run(ring.Op{Kind: ring.SyncDir, Path: d}); err != nil {
			return err
		}
	}
	return nil
}

// ReplicaStateName is the name of a node's state file in its data directory.
const ReplicaStateName = replicaStateFile
