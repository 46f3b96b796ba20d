package peer

import (
	"bytes"
	"strings"
	"testing"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
)

func TestTransport_NodesConnectOnEveryLaneAndExchangeFrames(t *testing.T) {
	nodes := newNodes(t, 3, nil)
	waitConnected(t, nodes)
	for _, n := range nodes {
		if logs := n.logs.String(); strings.Count(logs, "a node is connected") < 2 || strings.Contains(logs, "a lane is connected") {
			t.Errorf("node %d has logged\n%s", n.id, logs)
		}
		for _, other := range nodes {
			if n == other {
				continue
			}
			c := n.rec.wait(t, "connected", 1, connectedOn(peerwire.Log, other.id))[0]
			if c.peer.Identity != testIdentity || c.peer.Version != peerwire.MaxVersion {
				t.Errorf("node %d sees node %d as %+v", n.id, other.id, c.peer)
			}
			a := peerwire.Append{
				Log: 1, Epoch: 7, Prev: replica.Point{Epoch: 6, Index: 41}, Point: replica.Point{Epoch: 7, Index: 42}, Commit: 40,
			}
			var own owner
			payload := bytes.Repeat([]byte{byte(n.id)}, 100_000)
			if !n.Append(other.id, &a, payload, &own) {
				t.Fatal("APPEND was refused")
			}
			got := other.rec.waitOne(t, "APPEND", n.id)
			if got.append != a || !bytes.Equal(got.payload, payload) {
				t.Errorf("APPEND arrived as %+v with %d bytes", got.append, len(got.payload))
			}
			eventually(t, "the round's release", func() bool { return own.released.Load() == 1 })
			f := peerwire.Flushed{Log: 1, Voter: true, Epoch: 7, Index: 42, Instance: 99}
			n.Flushed(other.id, &f)
			if got := other.rec.waitOne(t, "FLUSHED", n.id); got.flushed != f {
				t.Errorf("FLUSHED arrived as %+v", got.flushed)
			}
			r := peerwire.Reject{Log: 1, Verdict: replica.Gap, Epoch: 7, Known: 8, End: replica.End{Last: replica.Point{Epoch: 5, Index: 9}, Commit: 8}, Instance: 3}
			n.Reject(other.id, &r)
			if got := other.rec.waitOne(t, "REJECT", n.id); got.reject != r {
				t.Errorf("REJECT arrived as %+v", got.reject)
			}
		}
	}
}
