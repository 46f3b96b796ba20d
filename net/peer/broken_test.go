package peer

import (
	"bytes"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
)

// numbered returns the APPEND of the round with an index.
func numbered(index int) peerwire.Append {
	return peerwire.Append{
		Log: 1, Epoch: 3, Prev: replica.Point{Epoch: 3, Index: replica.Index(index - 1)},
		Point: replica.Point{Epoch: 3, Index: replica.Index(index)},
	}
}

// sendUntil sends rounds from node a to node b, each as often as it takes, until b has all n of them.
func sendUntil(t *testing.T, a, b *node, n int, payload []byte) {
	t.Helper()
	for i := 1; i <= n; i++ {
		f := numbered(i)
		arrived := func() bool {
			return b.rec.count(func(e *event) bool {
				return e.what == "APPEND" && e.append == f && bytes.Equal(e.payload, payload)
			}) > 0
		}
		connects := -1
		eventually(t, "a round's arrival", func() bool {
			if arrived() {
				return true
			}
			// On a connection that is still there it is on its way; on a new one it has to be sent again.
			if now := a.rec.count(connectedOn(peerwire.Log, b.id)); now != connects {
				if a.Append(b.id, &f, payload, nil) {
					connects = now
				}
			}
			return false
		})
	}
}

// TestTransport_BrokenFramesReachNobody cuts connections inside frames and flips bits of them, at many places.
func TestTransport_BrokenFramesReachNobody(t *testing.T) {
	faulty := new(faultyNet)
	nodes := newNodes(t, 2, func(o *Options) {
		quick(o)
		o.Dial = faulty.dial
	})
	waitConnected(t, nodes)
	a, b := nodes[0], nodes[1]
	payload := bytes.Repeat([]byte("payload "), 500)
	for name, fault := range map[string]*atomic.Int64{"cut": &faulty.cutAfter, "flipped": &faulty.flipAt} {
		for at := int64(1); at < 9000; at += 1 + at/4 {
			fault.Store(at)
			before := faulty.dials()
			a.Reconnect()
			f := numbered(int(at))
			eventually(t, fmt.Sprintf("new connections, the earlier ones %s at %d", name, at), func() bool {
				a.Append(b.id, &f, payload, nil)
				return faulty.dials() >= before+2*int(peerwire.Lanes)
			})
		}
		fault.Store(0)
	}
	a.Reconnect()
	sendUntil(t, a, b, 10, payload)
	for _, n := range nodes {
		alternates(t, n)
	}
	b.rec.mu.Lock()
	defer b.rec.mu.Unlock()
	for _, e := range b.rec.events {
		if e.what == "APPEND" && (!bytes.Equal(e.payload, payload) || e.append != numbered(int(e.append.Point.Index))) {
			t.Errorf("a broken frame was handed on: %+v", e.append)
		}
	}
}

func TestTransport_SilenceOfTheOtherEndIsNoticed(t *testing.T) {
	faulty := new(faultyNet)
	nodes := newNodes(t, 2, func(o *Options) {
		quick(o)
		o.Dial = faulty.dial
	})
	waitConnected(t, nodes)
	faulty.silent.Store(true)
	for lane := range peerwire.Lanes {
		first := nodes[0].rec.wait(t, "the end of a silent connection", 1, disconnectedOn(lane, nodes[1].id))[0]
		second := nodes[1].rec.wait(t, "the end of a silent connection", 1, disconnectedOn(lane, nodes[0].id))[0]
		if !errors.Is(first.err, errIdle) && !errors.Is(second.err, errIdle) {
			t.Errorf("lane %v ended with %v and %v", lane, first.err, second.err)
		}
	}
	faulty.silent.Store(false)
	for i, n := range nodes {
		for lane := range peerwire.Lanes {
			n.rec.wait(t, "a new connection", 2, connectedOn(lane, nodes[1-i].id))
		}
		alternates(t, n)
	}
}

func TestTransport_QuietConnectionsLiveByTheirPings(t *testing.T) {
	quiet := newNodes(t, 2, func(o *Options) {
		quick(o)
		o.PingInterval = patience
	})
	for _, n := range quiet {
		e := n.rec.wait(t, "the end of a connection without pings", 1, func(e *event) bool { return e.what == "disconnected" })[0]
		if n.id == 1 && e.err == nil {
			t.Error("it ended for no reason")
		}
	}
	nodes := newNodes(t, 2, func(o *Options) { o.PingInterval = time.Millisecond })
	waitConnected(t, nodes)
	for _, n := range nodes {
		eventually(t, "pings and their answers", func() bool {
			lanes, _ := n.Stats()
			for _, l := range lanes {
				if l.RoundTrip == 0 || l.ReceivedFrames < 100 || l.SentFrames < 100 {
					return false
				}
			}
			return true
		})
	}
}
