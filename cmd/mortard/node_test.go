package main

import (
	"testing"

	"github.com/mortarmq/mortarmq/engine"
	"github.com/mortarmq/mortarmq/engine/replica"
)

func TestHealth_OnlyANodeThatCountsIsHealthy(t *testing.T) {
	for _, tt := range []struct {
		name  string
		st    engine.NodeStatus
		ok    bool
		state string
	}{
		{"serving leader", engine.NodeStatus{Role: "leader", Serving: true, Epoch: 7, LeaderName: "0", LeaderAddr: "a:1"},
			true, "leader of epoch 7, quorum healthy, serving"},
		{"leader that lacks a follower", engine.NodeStatus{Role: "leader", Serving: true, Epoch: 7, Quorum: replica.Soft, LeaderAddr: "a:1"},
			true, "leader of epoch 7, quorum soft, serving"},
		{"leader without a majority", engine.NodeStatus{Role: "leader", Epoch: 7, LeaderName: "0", LeaderAddr: "a:1"},
			false, "leader of epoch 7 without a majority: read only"},
		{"follower", engine.NodeStatus{Role: "follower", Epoch: 7, LeaderName: "2", LeaderAddr: "a:1"},
			true, "follows node 2 in epoch 7 as a voter"},
		{"follower without a leader", engine.NodeStatus{Role: "follower", Epoch: 7}, false, "no leader is known"},
		{"learner", engine.NodeStatus{Role: "follower", Epoch: 7, Standing: replica.Learner, LeaderName: "2", LeaderAddr: "a:1"},
			false, "catching up as a learner: follows node 2 in epoch 7"},
		{"suspect", engine.NodeStatus{Role: "follower", Epoch: 7, Standing: replica.Suspect, LeaderName: "2", LeaderAddr: "a:1"},
			false, "catching up as a suspect: follows node 2 in epoch 7"},
		{"learner without a leader", engine.NodeStatus{Role: "follower", Standing: replica.Learner},
			false, "catching up as a learner: no leader is known"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if ok, state := clusterHealth(&tt.st, "serving"); ok != tt.ok || state != tt.state {
				t.Errorf("got %v %q, want %v %q", ok, state, tt.ok, tt.state)
			}
		})
	}
}
