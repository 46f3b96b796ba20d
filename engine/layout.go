package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// layout is what a data directory was created with and can never change: placement of partitions depends on it.
type layout struct {
	Format   int `json:"format"`
	Journals int `json:"journals"`
}

const (
	layoutFile   = "layout.json"
	layoutFormat = 1
)

// openLayout reads the layout of dir, or creates dir and writes it. want is the number of journals asked for, 0 for
// whatever is there.
func openLayout(dir string, want int) (layout, error) {
	path := filepath.Join(dir, layoutFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		l := layout{Format: layoutFormat, Journals: max(want, 1)}
		return l, createLayout(dir, path, l)
	}
	if err != nil {
		return layout{}, fmt.Errorf("reading the data directory's layout: %w", err)
	}
	var l layout
	if err := json.Unmarshal(b, &l); err != nil {
		return layout{}, fmt.Errorf("%s is damaged (%w): it says how many journals the directory has; restore it from a backup, or write {\"format\":1,\"journals\":N} with N one more than the number of shard-* directories in %s", path, err, dir)
	}
	if l.Format != layoutFormat {
		return layout{}, fmt.Errorf("%s has format %d, this broker reads format %d: use the version that wrote it", path, l.Format, layoutFormat)
	}
	if l.Journals < 1 || l.Journals > maxShards {
		return layout{}, fmt.Errorf("%s says %d journals, possible are 1 to %d: restore it from a backup", path, l.Journals, maxShards)
	}
	if want != 0 && want != l.Journals {
		return layout{}, fmt.Errorf("shards is %d but %s was created with %d journals: the number can't change; leave shards out or set it to %d", want, dir, l.Journals, l.Journals)
	}
	return l, nil
}

// createLayout publishes the file atomically and durably.
func createLayout(dir, path string, l layout) error {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return fmt.Errorf("creating the data directory: %w", err)
	}
	b, err := json.Marshal(l)
	if err != nil {
		return err
	}
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o640)
	if err != nil {
		return fmt.Errorf("creating the data directory's layout: %w", err)
	}
	_, err = f.Write(append(b, '\n'))
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err == nil {
		err = syncDir(dir)
	}
	if err != nil {
		return fmt.Errorf("creating %s: %w", path, err)
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if cerr := d.Close(); err == nil {
		err = cerr
	}
	return err
}
