package bench

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/mortarmq/mortarmq/tests/harness"
)

// saying returns a node that names a leader.
func saying(t *testing.T, id, leader int, quorum string) *node {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"leader_id":%d,"leader_epoch":7,"quorum_state":%q}`, leader, quorum)
	}))
	t.Cleanup(srv.Close)
	return &node{id: id, d: &harness.Daemon{AdminAddr: srv.Listener.Addr().String()}}
}

func TestAgreed_NeedsEveryRunningNodeToNameTheSameRunningLeader(t *testing.T) {
	down := &node{id: 3}
	for _, tt := range []struct {
		name  string
		nodes []*node
		want  int // 0: no agreement
	}{
		{"all name one", []*node{saying(t, 1, 2, "healthy"), saying(t, 2, 2, "healthy"), saying(t, 3, 2, "healthy")}, 2},
		{"one is down", []*node{saying(t, 1, 2, "healthy"), saying(t, 2, 2, "healthy"), down}, 2},
		{"the one that is down is named", []*node{saying(t, 1, 3, "healthy"), saying(t, 2, 3, "healthy"), down}, 0},
		{"they differ", []*node{saying(t, 1, 1, "healthy"), saying(t, 2, 2, "healthy"), down}, 0},
		{"one has no quorum", []*node{saying(t, 1, 1, "healthy"), saying(t, 2, 1, "read-only"), down}, 0},
		{"nobody runs", []*node{down}, 0},
	} {
		got := 0
		led, state := agreed(tt.nodes)
		if led != nil {
			got = led.id
		}
		if got != tt.want {
			t.Errorf("%s: leader %d (%s), want %d", tt.name, got, state, tt.want)
		}
	}
	if _, state := agreed([]*node{saying(t, 1, 9, "soft")}); !strings.Contains(state, "node 1: leader 9, epoch 7, soft") {
		t.Errorf("the state is %q", state)
	}
}

func TestMixedGroup_MarksEachMessageOnce(t *testing.T) {
	g := &mixedGroup{seen: make([]uint64, 3)}
	for _, i := range []uint64{0, 63, 64, 191, 64} {
		g.mark(i)
	}
	if g.had.Load() != 4 || g.again.Load() != 1 || !g.mark(1) || g.mark(191) {
		t.Errorf("%d messages, %d again", g.had.Load(), g.again.Load())
	}
}
