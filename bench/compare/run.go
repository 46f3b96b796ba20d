package compare

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Packages have the microbenchmarks that guard the hot path: codec, records and segments' reading, producer windows, ledger,
// assignment, a durable write through the ring.
var Packages = []string{"protocol", "wal", "engine", "engine/ledger", "engine/group", "ring"}

// Options say how to run microbenchmarks.
type Options struct {
	// Packages are directories below the root of the module.
	Packages []string
	// Match selects benchmarks, as go test -bench does.
	Match string
	// Count is how often each runs in each tree, Benchtime how long, as go test -benchtime.
	Count     int
	Benchtime string
	// Log gets the progress.
	Log io.Writer
}

// Checkout puts the tree of a commit into dir, without touching the repository.
func Checkout(ctx context.Context, repo, ref, dir string) error {
	cmd := exec.CommandContext(ctx, "git", "-C", repo, "archive", "--format=tar", ref)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	err = unpack(out, dir)
	_, _ = io.Copy(io.Discard, out) // what was not read would keep git from ending
	if werr := cmd.Wait(); werr != nil {
		return fmt.Errorf("git archive %s: %w: %s", ref, werr, bytes.TrimSpace(stderr.Bytes()))
	}
	return err
}

func unpack(r io.Reader, dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	in := tar.NewReader(r)
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		name := filepath.FromSlash(h.Name)
		switch h.Typeflag {
		case tar.TypeDir:
			err = root.MkdirAll(name, 0o750)
		case tar.TypeReg:
			err = writeFile(root, name, in, os.FileMode(h.Mode)&0o755)
		default: // the commit's number, links: nothing that a build needs
		}
		if err != nil {
			return err
		}
	}
}

func writeFile(root *os.Root, name string, r io.Reader, mode os.FileMode) error {
	if err := root.MkdirAll(filepath.Dir(name), 0o750); err != nil {
		return err
	}
	f, err := root.OpenFile(name, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, mode|0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	return errors.Join(err, f.Close())
}

// Micro runs the microbenchmarks of two trees, in turn.
func Micro(ctx context.Context, base, head string, o *Options) (b, h Set, err error) {
	trees := []string{base, head}
	sets := []Set{{}, {}}
	work, err := os.MkdirTemp("", "mortarmq-compare-")
	if err != nil {
		return nil, nil, err
	}
	defer os.RemoveAll(work)
	binaries := make([]map[string]string, len(trees))
	for i, tree := range trees {
		if binaries[i], err = build(ctx, tree, filepath.Join(work, fmt.Sprint(i)), o.Packages); err != nil {
			return nil, nil, err
		}
	}
	for round := range o.Count {
		for _, pkg := range o.Packages {
			for i, tree := range trees {
				binary := binaries[i][pkg]
				if binary == "" {
					continue
				}
				fmt.Fprintf(o.Log, "round %d/%d  %s  %s\n", round+1, o.Count, []string{"base", "head"}[i], pkg)
				cmd := exec.CommandContext(ctx, binary, "-test.run=^$", "-test.bench="+o.Match, "-test.benchtime="+o.Benchtime, "-test.benchmem")
				cmd.Dir = filepath.Join(tree, pkg)
				out, err := cmd.CombinedOutput()
				if err != nil {
					return nil, nil, fmt.Errorf("benchmarks of %s in %s: %w\n%s", pkg, tree, err, out)
				}
				if err := sets[i].Parse(pkg+".", bytes.NewReader(out)); err != nil {
					return nil, nil, err
				}
			}
		}
	}
	return sets[0], sets[1], nil
}

// build compiles the test binaries of a tree. A package that the tree does not have is left out.
func build(ctx context.Context, tree, dir string, packages []string) (map[string]string, error) {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, err
	}
	binaries := map[string]string{}
	for _, pkg := range packages {
		if _, err := os.Stat(filepath.Join(tree, pkg)); errors.Is(err, os.ErrNotExist) {
			continue
		}
		path := filepath.Join(dir, strings.ReplaceAll(pkg, "/", "-")+".test")
		if err := goTool(ctx, tree, "test", "-c", "-o", path, "./"+pkg); err != nil {
			return nil, err
		}
		binaries[pkg] = path
	}
	return binaries, nil
}

// BuildMortard builds the broker of a tree into dir.
func BuildMortard(ctx context.Context, tree, dir string) (path string, err error) {
	path = filepath.Join(dir, "mortard")
	return path, goTool(ctx, tree, "build", "-o", path, "./cmd/mortard")
}

func goTool(ctx context.Context, dir string, args ...string) error {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s in %s: %w\n%s", strings.Join(args, " "), dir, err, out)
	}
	return nil
}
