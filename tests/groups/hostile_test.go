package groups

import (
	"path/filepath"
	"testing"
)

// Clients do what they like: other members and groups don't suffer, nothing is lost, and the broker stays up.
func TestHostile_ClientsHurtNobodyElse(t *testing.T) {
	t.Parallel()
	s := DefaultHostile(seedOf(t, 1))
	s.Binary, s.DataDir, s.Logf = mortard, filepath.Join(t.TempDir(), "data"), t.Logf
	if err := s.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
}
