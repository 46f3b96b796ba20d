package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// lockName is the file in the data directory that a running broker holds a lock on. It stays when the broker ends; only
// the lock counts, which the kernel drops with the process.
const lockName = "LOCK"

// dirLock keeps a second broker off a data directory.
type dirLock struct{ f *os.File }

// lockDir creates dir if needed and locks it. The error of a locked one names the process that holds it.
func lockDir(dir string) (*dirLock, error) {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, fmt.Errorf("data_dir: %w", err)
	}
	path := filepath.Join(dir, lockName)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o640)
	if err != nil {
		return nil, fmt.Errorf("data_dir: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		text, _ := io.ReadAll(io.LimitReader(f, 32))
		_ = f.Close()
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("data_dir: locking %s: %w", path, err)
		}
		holder := "another process"
		if pid := strings.TrimSpace(string(text)); pid != "" {
			holder = "process " + pid
		}
		return nil, fmt.Errorf("data_dir: %s is in use by %s: stop that broker, or use another directory", dir, holder)
	}
	err = errors.Join(f.Truncate(0), writePID(f))
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		err = nil // a full disk: the lock counts, the pid is for the error above
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("data_dir: writing %s: %w", path, err)
	}
	return &dirLock{f}, nil
}

func writePID(f *os.File) error {
	_, err := f.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0)
	return err
}

// unlock gives the directory free.
func (l *dirLock) unlock() error { return l.f.Close() }
