package engine

import (
	"fmt"
	"slices"

	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/wal"
)

// clusterOptions are what an engine needs to know as part of a cluster.
type clusterOptions struct {
	self  replica.NodeID
	nodes []replica.NodeID // all, ascending
	logs  int
	peers Peers
	// suspect puts on record that a journal's end is missing, see wal.OpenOptions.
	suspect func(error) error
	// random makes the keys of journal files, nil for the system's.
	random func() uint64
	// failed hears of a disk that failed; any goroutine calls it.
	failed func(error)
	// damaged hears of files of a log that are damaged; any goroutine calls it.
	damaged func(log int)
	logsKnown
	// history is NodeOptions.HistoryBytes.
	history int64
}

// logsKnown is what a node knows of its logs before they are opened, by log.
type logsKnown struct {
	// floors are the points that logs must not end before, from catch-ups that were interrupted.
	floors []replica.Point
	// unfinished are the logs that have given up rounds and have not got everything for them.
	unfinished []bool
}

// node is the node's number for the metadata log, 0 for a node on its own.
func (c *clusterOptions) node() uint16 {
	if c == nil {
		return 0
	}
	return uint16(c.self)
}

// behindOthers tells whether records may be here before the metadata that they need: where a log catches up in bulk, or did, its
// snapshots come behind the records; and of several logs this node may have another one's newest rounds but not yet those of the
// first, which has the metadata and is committed by the others.
func (c *clusterOptions) behindOthers() bool {
	return c != nil && (c.logs > 1 || slices.ContainsFunc(c.floors, func(p replica.Point) bool { return p != replica.Point{} }))
}

// join makes a recovered shard part of the cluster: idle, with what is not known to be committed pending.
func (c *clusterOptions) join(s *shard, rec *wal.Recovery) error {
	points := make([]replica.Point, len(rec.Pending))
	for i, r := range rec.Pending {
		p, _ := r.Log()
		points[i] = replicaPoint(p)
	}
	log, err := replica.NewLog(c.self, c.nodes, replicaPoint(rec.Log.Committed), points)
	if err != nil {
		return fmt.Errorf("log %d: %w", s.id, err)
	}
	log.SetFloor(c.floors[s.id])
	if c.unfinished[s.id] {
		log.Suspend()
	}
	r := &replication{
		s: s, self: c.self, log: log, peers: c.peers, logger: s.log,
		deposed: notLeading(nil), keepBytes: c.history,
	}
	if r.keepBytes == 0 {
		r.keepBytes = historyBytes
	}
	for _, id := range c.nodes {
		if id != c.self {
			r.others = append(r.others, id)
		}
	}
	r.heard, r.paces = make([]followerState, len(r.others)), make([]pace, len(c.nodes))
	for i, round := range rec.Pending {
		r.sealedBytes += int64(round.Bytes())
		s.inFlight.push(roundAnswers{round: round.Number, repl: replicaRound{
			r: round, point: points[i], upTo: r.sealedBytes, flushed: true,
		}})
	}
	s.repl = r
	r.report()
	return nil
}

func replicaPoint(p wal.LogPoint) replica.Point {
	return replica.Point{Epoch: replica.Epoch(p.Epoch), Index: replica.Index(p.Index)}
}
