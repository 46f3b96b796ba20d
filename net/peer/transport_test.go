package peer

import (
	"bytes"
	"runtime"
	"strings"
	"sync"
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

// TestTransport_FramesOfManySendersArriveOnceEach has senders of small and large frames at once: those that are written by
// their senders must not get between the others.
func TestTransport_FramesOfManySendersArriveOnceEach(t *testing.T) {
	nodes := newNodes(t, 2, nil)
	waitConnected(t, nodes)
	a, b := nodes[0], nodes[1]
	const senders, each = 8, 100
	payload := randomBytes(32 << 10)
	var running sync.WaitGroup
	for sender := range senders {
		running.Go(func() {
			for i := range each {
				f := numbered(i + 1)
				f.Log = uint16(sender)
				for !a.Append(b.id, &f, payload[:1+(i*i*(sender+1))%len(payload)], nil) {
					runtime.Gosched()
				}
				a.Flushed(b.id, &peerwire.Flushed{Log: f.Log, Epoch: 1, Index: f.Point.Index})
			}
		})
	}
	running.Wait()
	next := make([]replica.Index, senders)
	for _, e := range b.rec.wait(t, "all rounds", senders*each, func(e *event) bool { return e.what == "APPEND" }) {
		i := int(e.append.Point.Index) - 1
		if e.append.Prev.Index != next[e.append.Log] || !bytes.Equal(e.payload, payload[:1+(i*i*(int(e.append.Log)+1))%len(payload)]) {
			t.Fatalf("out of turn: %+v", e.append)
		}
		next[e.append.Log]++
	}
	for sender := range senders {
		b.rec.wait(t, "the last FLUSHED", 1, func(e *event) bool {
			return e.what == "FLUSHED" && e.flushed.Log == uint16(sender) && e.flushed.Index == each
		})
	}
}
