package main

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/mortarmq/mortarmq/tests/harness/fakebroker"
)

func startCluster(t *testing.T) *fakebroker.Cluster {
	t.Helper()
	c, err := fakebroker.NewCluster(3)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	t.Setenv(envServer, c.Addrs())
	return c
}

// The nodes are named in any order, some of them may be down, and the leader may move meanwhile.
func TestCluster_CommandsFindTheLeader(t *testing.T) {
	cluster := startCluster(t)
	cluster.Lead(1)
	cluster.Kill(2)
	for _, nodes := range []string{cluster.Addrs(), cluster.Addr(2) + ", " + cluster.Addr(0), cluster.Addr(0)} {
		r := mortarmq(t, "", "topics", "create", "t", "--partitions", "1", "--server", nodes)
		if r.code != exitDone || !strings.HasSuffix(r.stdout, "ed\t1\n") {
			t.Errorf("with %s: exit code %d, %q, %s", nodes, r.code, r.stdout, r.stderr)
		}
	}
	var input, want strings.Builder
	for i := range 3000 {
		fmt.Fprintf(&want, "%d\n", i)
	}
	input.WriteString(want.String())
	moves := &movingReader{r: strings.NewReader(input.String()), move: func(i int) { cluster.Lead(i % 2) }}
	var stdout, stderr lockedBuffer
	if code := run(t.Context(), []string{"pub", "t"}, moves, &stdout, &stderr); code != exitDone || !strings.HasPrefix(stdout.String(), "3000\t") {
		t.Fatalf("exit code %d, %q, %s", code, stdout.String(), stderr.String())
	}
	mortarmq(t, "", "sub", "t", "--group", "g", "--count", "3000").want(t, exitDone, want.String())
}

// movingReader reads a little at a time and calls move between.
type movingReader struct {
	r    *strings.Reader
	move func(i int)
	n    int
}

func (m *movingReader) Read(p []byte) (int, error) {
	m.move(m.n)
	m.n++
	return m.r.Read(p[:min(len(p), 4000)])
}

func TestCluster_WithoutALeaderTheErrorSaysSo(t *testing.T) {
	cluster := startCluster(t)
	cluster.Lead(-1)
	r := mortarmq(t, "", "topics", "create", "t", "--timeout", "500ms")
	r.want(t, exitRefused, "")
	if !strings.Contains(r.stderr, "not the leader") {
		t.Errorf("the error is %s", r.stderr)
	}
}

// Looking works against any node: one that doesn't lead tells what is on record.
func TestCluster_AnyNodeTellsOfTopicsAndGroups(t *testing.T) {
	follower := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.FormValue("leader") == "required" {
			http.Error(w, "node 1 does not lead: ask node 0", http.StatusMisdirectedRequest)
			return
		}
		r.Form.Set("leader", "required") // what the leader would say
		uri := r.URL.Path
		if uri == "/stats" {
			uri += "?" + r.Form.Encode()
		}
		_, _ = io.WriteString(w, adminAnswers[uri])
	}))
	t.Cleanup(follower.Close)
	t.Setenv(envAdmin, strings.TrimPrefix(follower.URL, "http://"))
	for args, first := range map[string]string{
		"topics list": "events\t1", "topics describe orders": "name\torders", "groups list": "billing\tevents", "groups list --topic orders": "billing\t",
		"groups describe mail": "1\t2\t3\t4", "leader get": "0\t12", "broker status": "0\t3601",
	} {
		r := mortarmq(t, "", strings.Fields(args)...)
		if r.code != exitDone || !strings.HasPrefix(r.stdout, first) {
			t.Errorf("%s: exit code %d, %q, %s", args, r.code, r.stdout, r.stderr)
		}
		if says := strings.Contains(r.stderr, "does not lead"); says != strings.Contains(args, "describe") {
			t.Errorf("%s: %s", args, r.stderr)
		}
	}
}
