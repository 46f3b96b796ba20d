package engine

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/engine/replica"
)

// A disk that is much slower than it was hurts nobody in a cluster, as the others are a majority without it, so nobody would
// notice: until one of the others fails. A leader therefore measures how long rounds take until each node has them on its
// disk, itself included, and says which node is out of step with the others.

// pace estimates the median of durations: each sample moves it by a part of itself, up or down. A single long one, as when a
// machine stands still for a moment, says little. One goroutine adds, any may read.
type pace struct {
	estimate int64 // nanoseconds
	samples  int
	known    atomic.Int64 // the estimate, once there are minSamples
}

const (
	// paceStep is the part of itself by which a sample moves a pace: to follow a disk that is 20 times slower takes 50 samples.
	paceStep = 16
	// minSamples are what an estimate takes that is worth something.
	minSamples = 32
)

func (p *pace) add(d time.Duration) {
	sample, step := max(int64(d), 1), max(p.estimate/paceStep, 1)
	switch {
	case p.estimate == 0:
		p.estimate = sample
	case sample > p.estimate:
		p.estimate = min(p.estimate+step, sample)
	case sample < p.estimate:
		p.estimate = max(p.estimate-step, sample)
	}
	if p.samples++; p.samples >= minSamples {
		p.known.Store(p.estimate)
	}
}

// get returns the estimate, 0 where it isn't known yet.
func (p *pace) get() time.Duration { return time.Duration(p.known.Load()) }

const (
	// A node is out of step when it takes outOfStep times as long as the median of all nodes and longer than minOutOfStep, and
	// until it takes less than inStep times as long.
	outOfStep, inStep = 10, 4
	minOutOfStep      = 2 * time.Millisecond
)

// judgePaces returns which of the nodes with these paces are out of step; was says which were. Where less than three are known
// nobody can tell which one is slow.
func judgePaces(paces []time.Duration, was []bool) []bool {
	known := slices.DeleteFunc(slices.Clone(paces), func(d time.Duration) bool { return d == 0 })
	slow := make([]bool, len(paces))
	if len(known) < 3 {
		return slow
	}
	slices.Sort(known)
	median := known[len(known)/2]
	for i, d := range paces {
		limit := outOfStep * median
		if was[i] {
			limit = inStep * median
		}
		slow[i] = d > max(limit, minOutOfStep)
	}
	return slow
}

// lookAtDisks tells the operator of disks that are slow, and of those that are not any more. It allocates, and so is called
// now and then only.
func (n *Node) lookAtDisks(e *Engine) {
	now := n.now()
	if now-n.disksSeen < judgeDisksEvery {
		return
	}
	n.disksSeen = now
	if n.serving.Load() == nil {
		clear(n.slowDisks) // the next leader tells
		return
	}
	for log, s := range e.shards {
		r := s.repl
		ids := append([]replica.NodeID{r.self}, r.others...)
		paces := make([]time.Duration, len(ids))
		was := make([]bool, len(ids))
		for i, id := range ids {
			paces[i], was[i] = r.paces[i].get(), n.slowDisks[slowDisk{log, id}]
		}
		for i, slow := range judgePaces(paces, was) {
			if slow == was[i] {
				continue
			}
			attrs := []any{"slow_node", n.nodes[ids[i]].name, "log", log, "takes", paces[i], "nodes", n.names(ids), "take", paces}
			if slow {
				n.slowDisks[slowDisk{log, ids[i]}] = true
				n.log.Warn("a node takes much longer than the others to have rounds on its disk: look at that disk, and at the network to it", attrs...)
			} else {
				delete(n.slowDisks, slowDisk{log, ids[i]})
				n.log.Info("a node has rounds on its disk as soon as the others again", attrs...)
			}
		}
	}
}

// judgeDisksEvery is how often a leader compares the disks.
const judgeDisksEvery = time.Second

// slowDisk names what is slow.
type slowDisk struct {
	log  int
	node replica.NodeID
}

func (n *Node) names(ids []replica.NodeID) []string {
	list := make([]string, len(ids))
	for i, id := range ids {
		list[i] = n.nodes[id].name
	}
	return list
}

// ReplicaStats is how far a node of the cluster is with a log, as its leader sees it.
type ReplicaStats struct {
	Node replica.NodeID
	// Pace is about how long rounds take, from being sealed, until that node has them on its disk; 0 is not known.
	Pace time.Duration
	// LagBytes are the bytes of rounds that it has not vouched for; of the leader itself always 0.
	LagBytes uint64
}

// replicas returns what is known of all nodes' copies of the log: of this one's only, if it doesn't lead. Any goroutine.
func (r *replication) replicas() []ReplicaStats {
	r.progress.mu.Lock()
	defer r.progress.mu.Unlock()
	list := []ReplicaStats{{Node: r.self, Pace: r.paces[0].get()}}
	if !r.progress.log.Leading {
		return list
	}
	for i, id := range r.others {
		st := ReplicaStats{Node: id, Pace: r.paces[i+1].get()}
		for _, p := range r.progress.log.Peers {
			if p.Node == id {
				st.LagBytes = p.LagBytes
			}
		}
		list = append(list, st)
	}
	return list
}

// measure takes an acknowledgement of a follower as a sample of how long it takes. What it has lacked since before it joined
// says nothing of its disk.
func (r *replication) measure(peer replica.NodeID, epoch replica.Epoch, index replica.Index) {
	i := slices.Index(r.others, peer)
	if i < 0 || !r.leading || epoch != r.epoch || index <= r.heard[i].measured {
		return
	}
	if sealed := r.sealedAt(index); sealed != 0 {
		r.heard[i].measured = index
		r.paces[i+1].add(r.s.eng.now() - sealed)
	}
}

// sealedAt returns when the round at an index was sealed, 0 if that is not known any more.
func (r *replication) sealedAt(i replica.Index) time.Duration {
	if f := &r.s.inFlight; f.len() > 0 {
		if first := f.front().repl.point.Index; i >= first && i < first+replica.Index(f.len()) {
			return f.at(int(i - first)).repl.sealed
		}
	}
	if n := r.history.len(); n > 0 && i >= r.oldest && i < r.oldest+replica.Index(n) {
		return r.history.at(int(i - r.oldest)).sealed
	}
	return 0
}

// joined has nothing measured of a follower that it lacks at the moment.
func (r *replication) joined(peer replica.NodeID) {
	if i := slices.Index(r.others, peer); i >= 0 && r.leading {
		r.heard[i].measured = r.log.Last().Index
	}
}
