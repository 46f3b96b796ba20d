package harness

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Change is one that the next version of a program has over the working tree: in File, a path within the repository, New stands
// in the place of Old, which must be there once.
type Change struct {
	File, Old, New string
}

// BuildSuccessor builds mortard with changes into dir, beside the one of the working tree, and returns its path.
func BuildSuccessor(dir string, race bool, changes ...Change) (string, error) {
	root, err := RepoRoot()
	if err != nil {
		return "", err
	}
	overlay := struct{ Replace map[string]string }{map[string]string{}}
	for i, c := range changes {
		path := filepath.Join(root, filepath.FromSlash(c.File))
		text, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}
		if n := bytes.Count(text, []byte(c.Old)); n != 1 || overlay.Replace[path] != "" {
			return "", fmt.Errorf("%s has %q %d times, and may be changed in one place", c.File, c.Old, n)
		}
		overlay.Replace[path] = filepath.Join(dir, fmt.Sprintf("successor-%d.go", i))
		if err := os.WriteFile(overlay.Replace[path], bytes.Replace(text, []byte(c.Old), []byte(c.New), 1), 0o600); err != nil {
			return "", err
		}
	}
	list := filepath.Join(dir, "successor.json")
	text, err := json.Marshal(overlay)
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(list, text, 0o600); err != nil {
		return "", err
	}
	path := filepath.Join(dir, "mortard-successor")
	args := []string{"build", "-overlay", list, "-o", path}
	if race {
		args = append(args, "-race")
	}
	cmd := exec.Command("go", append(args, "./cmd/mortard")...)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build of the next version: %w\n%s", err, out)
	}
	return path, nil
}

// Install has a node's next lives run another binary.
func (c *Cluster) Install(i int, binary string) {
	if len(c.opts.Binaries) == 0 {
		c.opts.Binaries = make([]string, ClusterSize)
		for k := range c.opts.Binaries {
			c.opts.Binaries[k] = c.opts.Binary
		}
	}
	c.opts.Binaries[i] = binary
}
