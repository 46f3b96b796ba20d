package replica

import (
	"errors"
	"fmt"
)

// NodeID names a node of the cluster; 0 is nobody.
type NodeID uint16

// Epoch numbers the leaderships of a cluster; 0 is before the first. At most one node ever leads in an epoch.
type Epoch uint32

// Index numbers the rounds of one log: 1, 2, 3 and so on without gaps; 0 is before the first.
type Index uint64

// Instance names one life of a node: the time in which everything that it said it had flushed stays flushed. It is drawn at
// random at each start and whenever the node gives up rounds; only equality means something.
type Instance uint64

// ClusterID names a cluster; the zero value is none.
type ClusterID [16]byte

// Point names a round of a log: no two rounds of one log with the same Point ever differ, on whatever node.
type Point struct {
	Epoch Epoch
	Index Index
}

// Less orders points as elections do: by the epoch first.
func (p Point) Less(q Point) bool {
	if p.Epoch != q.Epoch {
		return p.Epoch < q.Epoch
	}
	return p.Index < q.Index
}

// String returns "epoch/index".
func (p Point) String() string { return fmt.Sprintf("%d/%d", p.Epoch, p.Index) }

// End is where a log ends on one node.
type End struct {
	// Last is the newest round that is durable there and has everything durable below it; zero if the log is empty.
	Last Point
	// Commit is the highest index up to which this log is known to hold what is committed; the cluster's may be higher.
	Commit Index
	// Floor is the newest round that this node knows to be committed, or gave up although it may be: a node that catches up
	// knows of more than it holds. No log that ends before it may be gone on from.
	Floor Point
}

// Standing says how much a node's word is worth.
type Standing uint8

const (
	// Voter is a node whose flushes, promises and log ends all count.
	Voter Standing = iota
	// Suspect is a node that may have lost rounds that it had flushed, because its journal's end was damaged. It keeps its
	// promises, but its flushes don't count and its log end proves nothing.
	Suspect
	// Learner is a node that may have forgotten its promises too: its disk was empty. It promises nothing and counts for
	// nothing.
	Learner
)

// String returns the name for logs and the admin port.
func (s Standing) String() string {
	switch s {
	case Voter:
		return "voter"
	case Suspect:
		return "suspect"
	case Learner:
		return "learner"
	}
	return fmt.Sprintf("standing %d", uint8(s))
}

var (
	// ErrLogState says that a Log or a Node was asked for something that its state does not allow: an error of the host.
	ErrLogState = errors.New("replica: not possible in this state")
	// ErrDivergent says that two nodes have committed different rounds at one index (0x6009).
	ErrDivergent = errors.New("replica: committed rounds differ between nodes")
	// ErrConfig says that a node was configured in a way that can't work.
	ErrConfig = errors.New("replica: configuration refused")
)

// majority is how many of n nodes are a majority.
func majority(n int) int { return n/2 + 1 }
