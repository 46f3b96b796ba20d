package harness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// RepoRoot returns the directory of the module's go.mod, searched upwards from the working directory.
func RepoRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("no go.mod above the working directory: run this inside the repository")
		}
		dir = parent
	}
}

// BinariesVariable names a directory with programs that were built from the working tree, those with the race detector in
// its subdirectory race. The Makefile sets it, so that the packages that need a broker don't link it once each.
const BinariesVariable = "MORTARMQ_TEST_BINARIES"

// BuildMortard builds mortard from the working tree into dir and returns its path, or that of the one in the directory that
// BinariesVariable names. GOFLAGS of the environment chooses the backend (see the Makefile); race adds the race detector.
func BuildMortard(dir string, race bool) (string, error) {
	return build(dir, "./cmd/mortard", "mortard", race)
}

func build(dir, pkg, name string, race bool) (string, error) {
	root, err := RepoRoot()
	if err != nil {
		return "", err
	}
	if built := os.Getenv(BinariesVariable); built != "" {
		if race {
			built = filepath.Join(built, "race")
		}
		if built = filepath.Join(built, name); exists(built) {
			return built, nil
		}
	}
	path := filepath.Join(dir, name)
	args := []string{"build", "-o", path}
	if race {
		args = append(args, "-race")
	}
	cmd := exec.Command("go", append(args, pkg)...)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build %s: %w\n%s", pkg, err, out)
	}
	return path, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
