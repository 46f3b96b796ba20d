package main

import (
	"context"
	"errors"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/engine"
	"github.com/mortarmq/mortarmq/internal/version"
	"github.com/mortarmq/mortarmq/net/admin"
	"github.com/mortarmq/mortarmq/net/client"
	"github.com/mortarmq/mortarmq/ring"
)

// source tells the admin port about the broker, from before there is an engine until after it has closed.
type source struct {
	nodeID   int
	version  string
	began    time.Time
	engine   atomic.Pointer[engine.Engine] // of a node on its own
	node     atomic.Pointer[node]          // of one of a cluster
	client   atomic.Pointer[client.Server]
	stopping atomic.Bool
}

func newSource(c *Config) *source {
	return &source{nodeID: c.NodeID, version: version.Name(), began: time.Now()}
}

// Healthy implements admin.Source.
func (s *source) Healthy() (ok bool, state string) {
	e, n := s.engine.Load(), s.node.Load()
	switch {
	case s.stopping.Load():
		return false, "stopping"
	case n != nil && s.client.Load() != nil:
		return n.health()
	case e == nil:
		return false, "starting: the data directory is being recovered"
	case s.client.Load() == nil:
		return false, "starting"
	}
	return e.Healthy()
}

// Snapshot implements admin.Source.
func (s *source) Snapshot(ctx context.Context) (*admin.Snapshot, error) {
	e, n := s.engine.Load(), s.node.Load()
	if n != nil {
		e = n.Engine()
	}
	if e == nil {
		return nil, errors.New("it is still starting")
	}
	st, err := e.Stats(ctx)
	if err != nil {
		return nil, err
	}
	snap := &admin.Snapshot{
		NodeID: s.nodeID, Version: s.version, Uptime: time.Since(s.began),
		IOBackend: st.Backend, IOReason: st.Reason,
		LeaderID: s.nodeID, Coord: st.Coord,
	}
	if st.Failure != nil {
		snap.Quorum = admin.QuorumReadOnly
	}
	if n != nil {
		n.complete(snap)
	}
	if srv := s.client.Load(); srv != nil {
		n := srv.Stats()
		snap.Connections = n.Connections
		snap.Network = networkCounters(&n)
	}
	for i := range st.Shards {
		snap.Storage = append(snap.Storage, shardCounters(strconv.Itoa(i), &st.Shards[i])...)
		if n != nil {
			snap.Peers = append(snap.Peers, replicaCounters(i, st.Shards[i].Replicas, n.names)...)
		}
	}
	return snap, nil
}

func networkCounters(n *client.Stats) []admin.Counter {
	return []admin.Counter{
		{Name: "mortarmq_network_accepted_total", Help: "Connections accepted.", Value: float64(n.Accepted)},
		{Name: "mortarmq_network_rejected_total", Help: "Connections closed because there were too many.", Value: float64(n.Rejected)},
		{Name: "mortarmq_network_auth_failures_total", Help: "CONNECTs with a wrong token.", Value: float64(n.AuthFailures)},
		{Name: "mortarmq_network_slow_closed_total", Help: "Connections closed because they did not read.", Value: float64(n.SlowClosed)},
		{Name: "mortarmq_network_busy_total", Help: "Publishes refused because the connection had too many unanswered ones.", Value: float64(n.Busy)},
		{Name: "mortarmq_network_received_bytes_total", Help: "Bytes received from clients.", Value: float64(n.BytesIn)},
		{Name: "mortarmq_network_sent_bytes_total", Help: "Bytes sent to clients.", Value: float64(n.BytesOut)},
		{Name: "mortarmq_network_partial_frame_bytes", Help: "Memory of incomplete frames.", Gauge: true, Value: float64(n.PartialBytes)},
		{Name: "mortarmq_network_large_frame_bytes", Help: "Memory of large frames on their way to the journal.", Gauge: true, Value: float64(n.OwnedBytes)},
	}
}

func shardCounters(shard string, s *engine.ShardStats) []admin.Counter {
	list := []admin.Counter{
		{Name: "mortarmq_shard_rounds_total", Help: "Journal rounds committed.", Value: float64(s.Rounds)},
		{Name: "mortarmq_shard_records_total", Help: "Records committed.", Value: float64(s.Records)},
		{Name: "mortarmq_shard_round_bytes_total", Help: "Bytes of committed rounds, padding included.", Value: float64(s.RoundBytes)},
		{Name: "mortarmq_shard_duplicates_total", Help: "Publishes recognised as sent before.", Value: float64(s.Duplicates)},
		{Name: "mortarmq_shard_refused_total", Help: "Publishes answered with an error.", Value: float64(s.Refused)},
		{Name: "mortarmq_shard_queued_bytes", Help: "Publishes waiting for the shard.", Gauge: true, Value: float64(s.QueuedBytes)},
		{Name: "mortarmq_shard_pending_bytes", Help: "Committed bytes waiting for their segments.", Gauge: true, Value: float64(s.PendingBytes)},
		{Name: "mortarmq_shard_memory_bytes", Help: "Off-heap memory in use.", Gauge: true, Value: float64(s.MemoryBytes)},
	}
	list = append(list, []admin.Counter{
		{Name: "mortarmq_scrub_bytes_total", Help: "Bytes of full segments that were read in the background and are what was written.", Value: float64(s.Scrub.Bytes)},
		{Name: "mortarmq_scrub_damaged_total", Help: "Damaged segments that were found so.", Value: float64(s.Scrub.Damaged)},
		{Name: "mortarmq_scrub_failed_total", Help: "Segments that could not be read so.", Value: float64(s.Scrub.Failed)},
	}...)
	if s.FreeBytes >= 0 {
		list = append(list, admin.Counter{Name: "mortarmq_shard_free_bytes", Help: "Free bytes of the file system.", Gauge: true, Value: float64(s.FreeBytes)})
	}
	list = append(list, ringCounters("commit", &s.CommitRing)...)
	list = append(list, ringCounters("store", &s.StoreRing)...)
	for i := range list {
		list[i].Shard = shard
	}
	return list
}

func ringCounters(name string, r *ring.Stats) []admin.Counter {
	prefix := "mortarmq_" + name + "_ring_"
	return []admin.Counter{
		{Name: prefix + "syscalls_total", Help: "System calls of disk operations.", Value: float64(r.Syscalls)},
		{Name: prefix + "sqes_total", Help: "Entries handed to io_uring.", Value: float64(r.SQEs)},
		{Name: prefix + "flushes_total", Help: "Successful flushes.", Value: float64(r.Flushes)},
		{Name: prefix + "read_bytes_total", Help: "Bytes read.", Value: float64(r.BytesRead)},
		{Name: prefix + "written_bytes_total", Help: "Bytes written.", Value: float64(r.BytesWritten)},
	}
}
