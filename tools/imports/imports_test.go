// Package imports holds the test of the module's import rules: where a thing lives tells what it may do.
package imports

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/mortarmq/mortarmq/"

type pkg struct {
	ImportPath string
	Imports    []string
	GoFiles    []string
}

// allowed lists, per package, the packages of this module that it may import directly.
var allowed = map[string][]string{
	"protocol":          {},
	"ring":              {},
	"internal/mutant":   {},
	"wal":               {"ring", "protocol", "internal/mutant"},
	"wal/simdisk":       {"wal", "ring"},
	"engine":            {"protocol", "ring", "wal", "engine/coord", "engine/dedupsnap", "engine/mpsc", "engine/replica", "engine/peerwire", "internal/mutant"},
	"engine/coord":      {"protocol", "wal", "ring", "engine/group", "engine/ledger", "engine/metadata", "engine/mpsc", "engine/deadletter", "internal/mutant"},
	"engine/group":      {"protocol"},
	"engine/ledger":     {"protocol"},
	"engine/metadata":   {"protocol"},
	"engine/mpsc":       {},
	"engine/deadletter": {"protocol"},
	"engine/dedupsnap":  {},
	"engine/replica":    {"protocol", "internal/mutant"},
	"engine/peerwire":   {"engine/replica"},
	"client":            {"protocol"},
	"net/client":        {"protocol", "engine/coord"},
	"net/admin":         {"protocol", "engine/coord", "engine"},
	"net/peer":          {"engine/peerwire", "engine/replica"},
}

// pure packages do no I/O and know no time but what they are given.
var pure = []string{"engine/group", "engine/ledger", "engine/metadata", "engine/deadletter", "engine/dedupsnap", "engine/replica", "engine/peerwire"}

var impure = []string{"os", "net", "sync", "sync/atomic", "syscall", "log", "log/slog", "math/rand", "context", "io/fs", "golang.org/x/sys/unix"}

func list(t *testing.T) []pkg {
	t.Helper()
	out, err := exec.Command("go", "list", "-json=ImportPath,Imports,GoFiles", module+"...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var all []pkg
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		err := dec.Decode(&p)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}

func TestImports_PointDown(t *testing.T) {
	all := list(t)
	if len(all) < 10 {
		t.Fatalf("go list found %d packages", len(all))
	}
	for _, p := range all {
		name := strings.TrimPrefix(p.ImportPath, module)
		may, restricted := allowed[name]
		for _, i := range p.Imports {
			dep, ours := strings.CutPrefix(i, module)
			if !ours {
				continue
			}
			if restricted && !slices.Contains(may, dep) {
				t.Errorf("%s imports %s: allowed are %v", name, dep, may)
			}
			if strings.HasPrefix(dep, "bench") && !strings.HasPrefix(name, "bench") {
				t.Errorf("%s imports %s: nobody imports bench", name, dep)
			}
			harness := dep == "tests/harness" && strings.HasPrefix(name, "bench") // it starts and stops brokers for both
			if strings.HasPrefix(dep, "cmd/") || (strings.HasPrefix(dep, "tests/") && !strings.HasPrefix(name, "tests/") && !harness) {
				t.Errorf("%s imports %s", name, dep)
			}
		}
	}
}

func TestImports_PurePackagesStayPure(t *testing.T) {
	for _, p := range list(t) {
		name := strings.TrimPrefix(p.ImportPath, module)
		if !slices.Contains(pure, name) {
			continue
		}
		for _, i := range p.Imports {
			if slices.Contains(impure, i) {
				t.Errorf("%s imports %s: it must take I/O, time, locks and randomness from its caller", name, i)
			}
		}
	}
}

func TestImports_NetHasNoFilesOfItsOwn(t *testing.T) {
	for _, p := range list(t) {
		if p.ImportPath == module+"net" && len(p.GoFiles) > 0 {
			t.Errorf("net has Go files %v: they would shadow the standard net", p.GoFiles)
		}
	}
}
