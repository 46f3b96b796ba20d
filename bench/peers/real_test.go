package peers

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/bench"
)

// TestPeers_RealServersStoreAndDeliver starts the servers that are installed. It takes a minute, so it waits to be asked for.
func TestPeers_RealServersStoreAndDeliver(t *testing.T) {
	if os.Getenv("MORTARMQ_PEER_TESTS") == "" {
		t.Skip("starts other brokers' servers; MORTARMQ_PEER_TESTS=1 (make bench-peers-test) runs it")
	}
	for _, p := range All() {
		t.Run(p.Name, func(t *testing.T) {
			dir := t.TempDir()
			o := &bench.PeerOptions{Dir: dir, Cache: filepath.Join("..", ".cache"), Log: filepath.Join(dir, "log")}
			if err := p.Missing(o); err != nil {
				t.Skip(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			defer cancel()
			began := time.Now()
			for _, members := range []int{3, 1} {
				o.Dir = t.TempDir()
				if err := bench.TryPeer(ctx, p, o, 1000, members); err != nil {
					text, _ := os.ReadFile(o.Log)
					t.Fatalf("%d members: %v\n%s", members, err, text)
				}
			}
			t.Logf("%v", time.Since(began))
		})
	}
}
