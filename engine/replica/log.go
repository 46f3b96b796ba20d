package replica

import (
	"fmt"
	"slices"

	"github.com/mortarmq/mortarmq/internal/mutant"
)

// Log is one log's part of replication: which rounds this node has, which of them are flushed here and elsewhere, and how
// far the log is committed. It belongs to the goroutine of its shard. It knows indexes and epochs only; the host keeps the
// rounds.
//
// A Log is idle, follows a leader or leads:
//
//	Fence(e)   idle: nothing below e is taken any more; End tells where the log ends
//	Follow(e)  Append takes the rounds of e's leader; Ack says what to vouch for
//	Lead(e)    Seal numbers this node's own rounds; Next says what to send to whom
//
// Rounds are numbered in the order in which the host writes them to its disk, by tickets, because an index may be written
// more than once. Flushed takes a ticket.
type Log struct {
	self     NodeID
	majority int

	runs    runs
	flushed Index // everything up to here is durable on this node
	commit  Index
	floor   Point // committed, or may be, in this log or not

	fence   Epoch // nothing of a lower epoch is taken
	epoch   Epoch // the epoch that is followed or led; 0 if idle
	leading bool

	ticket uint64    // the newest round written
	writes []stretch // where the tickets that are not flushed yet lie, ascending

	// Following.
	matched      Index // up to here this log is the leader's
	leaderCommit Index
	lapsed       bool // it is behind: nothing is taken or vouched for until it has caught up
	suspended    bool // likewise, see Suspend
	rejected     bool // the leader was told where this log ends and has sent nothing that fits since

	// Leading.
	opening Index // the first round of epoch
	peers   []logPeer
	votes   []Index // scratch
}

// stretch says that the rounds from ticket on have the indexes from first on, until the next stretch.
type stretch struct {
	ticket uint64
	first  Index
}

// logPeer is what a leader knows of a follower's log.
type logPeer struct {
	node     NodeID
	instance Instance
	joined   bool // where its log ends is known, and rounds are sent
	voter    bool // its flushes count; never taken back within an instance and epoch
	flushed  Index
	agreed   Index // where the logs were found to agree when it joined, flushed there or not
	epoch    Epoch // of the round at agreed; 0 if unknown
	next     Index // the next round to send
	base     Index // it was asked whether it has that round, because the next one isn't in memory any more; 0 if not
	again    Index // rounds up to here are being sent again since a REJECT
	probe    bool  // nothing was sent yet that tells the follower how far it agrees
	heard    bool  // it has sent FLUSHED since it joined
}

// NewLog returns the log of a node after recovery. nodes are all nodes, self included. committed is the newest round known
// to be committed, pending are the ones behind it, ascending without gaps; all of them are durable. Both are borrowed.
func NewLog(self NodeID, nodes []NodeID, committed Point, pending []Point) (*Log, error) {
	l := &Log{self: self, majority: majority(len(nodes)), votes: make([]Index, 0, len(nodes))}
	for _, n := range nodes {
		if n != self {
			l.peers = append(l.peers, logPeer{node: n})
		}
	}
	l.runs.last = committed.Index
	if committed.Index > 0 {
		l.runs.list = append(l.runs.list, run{first: committed.Index, epoch: committed.Epoch})
	}
	for _, p := range pending {
		if p.Index != l.runs.last+1 || p.Epoch < l.runs.lastEpoch() {
			return nil, fmt.Errorf("%w: round %s cannot follow %s", ErrLogState, p, l.Last())
		}
		l.runs.append(p.Epoch)
	}
	l.commit, l.flushed, l.fence = committed.Index, l.runs.last, l.runs.lastEpoch()
	l.writes = append(l.writes, stretch{ticket: 1, first: l.runs.last + 1})
	return l, nil
}

// Last returns the newest round, flushed or not.
func (l *Log) Last() Point { return Point{Epoch: l.runs.lastEpoch(), Index: l.runs.last} }

// Commit returns the highest index that is committed as far as this node knows. A leader's may be ahead of its own disk
// (End().Last): only rounds that are flushed here too may go to the store.
func (l *Log) Commit() Index { return l.commit }

// FlushedIndex returns the index up to which everything is durable on this node.
func (l *Log) FlushedIndex() Index { return l.flushed }

// Epoch returns the epoch that is followed or led, 0 if the log is idle.
func (l *Log) Epoch() Epoch { return l.epoch }

// Leading reports whether this node leads the log.
func (l *Log) Leading() bool { return l.leading }

// End returns where the log ends on this node's disk.
func (l *Log) End() End {
	e, _ := l.runs.epochAt(l.flushed)
	c, _ := l.runs.epochAt(l.commit)
	end := End{Last: Point{Epoch: e, Index: l.flushed}, Commit: l.commit, Floor: Point{Epoch: c, Index: l.commit}}
	if end.Floor.Less(l.floor) {
		end.Floor = l.floor
	}
	return end
}

// SetFloor notes that p is committed in this log, or may be, whether or not this node has it: what it gives up while it catches
// up lies at or below. It is durable here before anything is given up, and is set again after a restart.
func (l *Log) SetFloor(p Point) {
	if l.floor.Less(p) {
		l.floor = p
	}
}

// EpochAt returns the epoch of the round at an index; false if it isn't known (any more).
func (l *Log) EpochAt(i Index) (Epoch, bool) { return l.runs.epochAt(i) }

// Has reports whether the log holds that round, or has committed beyond it and forgotten its epoch.
func (l *Log) Has(p Point) bool {
	e, known := l.runs.epochAt(p.Index)
	return known && e == p.Epoch || !known && p.Index <= l.commit
}

// Fence makes the log refuse everything of epochs below epoch, from now on and before it returns: a leader of a lower epoch
// leads no more, a follower of one takes and vouches for nothing. It returns where the log ends; rounds that are still on
// their way to the disk are not in it and are vouched for under no lower epoch any more. Fencing at the epoch that is in
// force changes nothing.
func (l *Log) Fence(epoch Epoch) End {
	if epoch > l.fence {
		l.fence = epoch
	}
	if l.epoch < l.fence && !mutant.Is("stale-epoch-taken") {
		l.epoch, l.leading = 0, false
	}
	return l.End()
}

// Follow makes the log take rounds of the leader of epoch. The node must have persisted that it follows that epoch. Following
// the epoch that is followed already changes nothing.
func (l *Log) Follow(epoch Epoch) error {
	if epoch < l.fence || epoch == 0 || (epoch == l.epoch && l.leading) {
		return fmt.Errorf("%w: follow epoch %d (fenced at %d, leading %t)", ErrLogState, epoch, l.fence, l.leading)
	}
	if epoch == l.epoch {
		return nil
	}
	l.fence, l.epoch, l.leading = epoch, epoch, false
	// What is committed is in every later leader's log.
	l.matched, l.leaderCommit, l.rejected = l.commit, 0, false
	return nil
}

// wrote accounts for a round that the host writes now and returns its ticket.
func (l *Log) wrote(e Epoch) uint64 {
	l.runs.append(e)
	l.ticket++
	return l.ticket
}

// replace forgets the rounds from index from on; the next round written has that index.
func (l *Log) replace(from Index) {
	l.runs.cut(from)
	l.flushed = min(l.flushed, from-1)
	if n := len(l.writes); l.writes[n-1].ticket == l.ticket+1 {
		l.writes = l.writes[:n-1]
	}
	l.writes = append(l.writes, stretch{ticket: l.ticket + 1, first: from})
}

// Flushed says that the round with that ticket and all before it are durable on this node's disk.
func (l *Log) Flushed(ticket uint64) {
	if ticket > l.ticket {
		return // not one of ours
	}
	at := -1
	for k := range l.writes {
		if l.writes[k].ticket <= ticket {
			at = k
		}
	}
	if at < 0 {
		return
	}
	l.writes = append(l.writes[:0], l.writes[at:]...)
	index := l.writes[0].first + Index(ticket-l.writes[0].ticket)
	for _, later := range l.writes[1:] {
		if mutant.Is("replaced-flush-counts") {
			break
		}
		index = min(index, later.first-1) // replaced since
	}
	l.flushed = max(l.flushed, min(index, l.runs.last))
	l.advance()
}

// advance moves the commit index as far as it goes.
func (l *Log) advance() {
	switch {
	case l.epoch == 0:
	case l.leading:
		l.advanceLeading()
	default:
		l.setCommit(min(l.leaderCommit, l.matched, l.flushed))
	}
}

// advanceLeading commits what a majority of all nodes has flushed, with or before a round of the leader's own epoch: a round
// of an earlier one that a majority has flushed may still be outvoted, unless one of this epoch lies on top of it.
func (l *Log) advanceLeading() {
	votes := append(l.votes[:0], l.flushed)
	for i := range l.peers {
		if p := &l.peers[i]; p.voter || mutant.Is("learner-votes") {
			votes = append(votes, p.flushed)
		}
	}
	need := l.majority
	if mutant.Is("commit-on-one-vote") {
		need = 1
	}
	if len(votes) < need {
		return
	}
	slices.SortFunc(votes, func(a, b Index) int { return int(int64(b) - int64(a)) })
	if n := votes[need-1]; n >= l.opening || mutant.Is("commit-old-epoch-by-count") {
		l.setCommit(n)
	}
}

func (l *Log) setCommit(i Index) {
	if i > l.commit {
		l.commit = i
		l.runs.trim(i)
	}
}
