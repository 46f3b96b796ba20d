package main

import (
	"strconv"

	"github.com/mortarmq/mortarmq/engine"
	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/net/admin"
	"github.com/mortarmq/mortarmq/net/peer"
)

// peerCounters tells /metrics about the connections to the other nodes, whom people know by names.
func peerCounters(lanes []peer.LaneStats, refused uint64, names map[replica.NodeID]string) []admin.Counter {
	list := []admin.Counter{{
		Name: "mortarmq_peer_handshakes_refused_total", Help: "Connections to the peer port that were refused.", Value: float64(refused),
	}}
	for i := range lanes {
		s := &lanes[i]
		connected := 0.0
		if s.Version > 0 {
			connected = 1
		}
		for _, c := range []admin.Counter{
			{Name: "mortarmq_peer_connected", Help: "1 while there is a connection.", Gauge: true, Value: connected},
			{Name: "mortarmq_peer_connections_total", Help: "Connections that were made.", Value: float64(s.Connects)},
			{Name: "mortarmq_peer_sent_bytes_total", Help: "Bytes sent to the node.", Value: float64(s.SentBytes)},
			{Name: "mortarmq_peer_received_bytes_total", Help: "Bytes received from the node.", Value: float64(s.ReceivedBytes)},
			{Name: "mortarmq_peer_sent_frames_total", Help: "Frames sent to the node.", Value: float64(s.SentFrames)},
			{Name: "mortarmq_peer_received_frames_total", Help: "Frames received from the node.", Value: float64(s.ReceivedFrames)},
			{Name: "mortarmq_peer_queued_bytes", Help: "Bytes waiting to be sent to the node.", Gauge: true, Value: float64(s.QueuedBytes)},
			{Name: "mortarmq_peer_refused_total", Help: "Frames that were not queued, for lack of a connection or of room.", Value: float64(s.Refused)},
			{Name: "mortarmq_peer_round_trip_seconds", Help: "Last round trip that was measured.", Gauge: true, Value: s.RoundTrip.Seconds()},
		} {
			c.Peer, c.Lane = names[s.Peer], s.Lane.String()
			list = append(list, c)
		}
	}
	return list
}

// replicaCounters tells /metrics how far the nodes' copies of a shard's log are: of all nodes on the leader, elsewhere of this
// one.
func replicaCounters(shard int, list []engine.ReplicaStats, names map[replica.NodeID]string) (counters []admin.Counter) {
	for i := range list {
		for _, c := range []admin.Counter{
			{Name: "mortarmq_replica_flush_seconds", Help: "About how long rounds take until the node has them on its disk.", Gauge: true, Value: list[i].Pace.Seconds()},
			{Name: "mortarmq_replica_lag_bytes", Help: "Bytes of rounds that the node has not on its disk yet.", Gauge: true, Value: float64(list[i].LagBytes)},
		} {
			c.Shard, c.Peer = strconv.Itoa(shard), names[list[i].Node]
			counters = append(counters, c)
		}
	}
	return counters
}
