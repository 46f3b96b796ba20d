//go:build !uring

package ring

import (
	"strings"
	"testing"
)

var testBackends = map[string]func(Options) (*Ring, error){"pread": newTestPread}

func TestNew_WithoutTheTagFallsBackAndTellsHow(t *testing.T) {
	withRing(t, Options{}, func(r *Ring) {
		if r.Backend() != "pread" || !strings.Contains(r.Reason(), "-tags=uring") {
			t.Errorf("backend %q, reason %q", r.Backend(), r.Reason())
		}
	})
	if _, err := New(Options{Backend: Uring}); err == nil || !strings.Contains(err.Error(), "-tags=uring") {
		t.Errorf("forced io_uring: %v", err)
	}
}
