//go:build mutants

package wal

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/mortarmq/mortarmq/internal/mutant"
)

// mutantInForce names the deliberate fault that the tests of this process run with.
const mutantInForce = "MORTARMQ_MUTANT"

func TestMain(m *testing.M) {
	mutant.Choose(os.Getenv(mutantInForce))
	os.Exit(m.Run())
}

// simulated are the tests that cut the power at every step, and at random.
const simulated = "RandomCrashes|RandomLives|PowerCuts"

// mutants are deliberate faults in the journal, each with what it is about, the tests that have to find it, and what the failure
// that speaks of it says. No simulated power cut shows the recycled file so far, only a script that looks at the files in use.
var mutants = []struct{ name, what, tests, by string }{
	{"chain-ignored", "recovery doesn't look whether a round chains to the one before", simulated, `recovered`},
	{"newest-file-recycled", "the journal file with the newest durable round is written again", "Journal_", `newest durable round`},
}

// Each is a process of its own, whose tests have to fail.
func TestMutants_AreCaught(t *testing.T) {
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			c := exec.Command(os.Args[0], "-test.run", m.tests, "-test.failfast")
			c.Env = append(os.Environ(), mutantInForce+"="+m.name)
			out, err := c.CombinedOutput()
			failed := regexp.MustCompile(`(?m)^ +\S+_test\.go:\d+: .*`).FindString(string(out))
			switch {
			case err == nil:
				t.Errorf("%s: not caught", m.what)
			case !regexp.MustCompile(m.by).MatchString(failed):
				t.Errorf("%s: the tests fail otherwise: %s", m.what, failed)
			default:
				t.Logf("%s: caught: %s", m.what, strings.TrimSpace(failed))
			}
		})
	}
}
