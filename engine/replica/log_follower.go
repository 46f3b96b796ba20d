package replica

import (
	"fmt"

	"github.com/mortarmq/mortarmq/internal/mutant"
)

// VerdictKind says what to do with a round that came from another node.
type VerdictKind uint8

const (
	// Accept: write the round behind the last one.
	Accept VerdictKind = iota + 1
	// Replace: forget the rounds from Verdict.From on, none of which is committed, and write this one.
	Replace
	// Duplicate: the round is there already; write nothing.
	Duplicate
	// Matched: a probe agrees.
	Matched
	// Gap: the round before is missing or another one. Answer REJECT with the log's end if Verdict.Reject.
	Gap
	// Stale: the sender's epoch is over (0x6005).
	Stale
	// NotFollowing: this node doesn't follow that epoch (yet); drop the round.
	NotFollowing
	// Divergent: the sender has another round where this node has a committed one (0x6009). Nothing may be written; the log
	// is to be quarantined.
	Divergent
	// Invalid: no leader sends such a round.
	Invalid
)

var verdictNames = [...]string{"", "accept", "replace", "duplicate", "matched", "gap", "stale", "not following", "divergent", "invalid"}

// String returns the kind's name.
func (k VerdictKind) String() string {
	if int(k) < len(verdictNames) {
		return verdictNames[k]
	}
	return fmt.Sprintf("verdict %d", uint8(k))
}

// Verdict is the answer to a round from another node.
type Verdict struct {
	Kind VerdictKind
	// From is the first round to forget, with Replace.
	From Index
	// Ticket is to be handed to Flushed when the round is durable, with Accept and Replace.
	Ticket uint64
	// Reject is set with Gap where the sender is to be told; not for every round behind the first that didn't fit.
	Reject bool
}

// Append takes a round of the leader of epoch, which follows prev, or a probe if point is zero. commit is the leader's
// commit index. Nothing of it is trusted. The host writes the round if told so, then looks at Commit and Ack.
func (l *Log) Append(epoch Epoch, prev, point Point, commit Index) Verdict {
	switch {
	case epoch < l.fence && !(mutant.Is("stale-epoch-taken") && epoch == l.epoch):
		return Verdict{Kind: Stale}
	case epoch != l.epoch || l.leading || l.lapsed || l.suspended:
		return Verdict{Kind: NotFollowing}
	}
	probe := point == Point{}
	if !probe && (point.Index != prev.Index+1 || point.Epoch < prev.Epoch || point.Epoch > epoch || point.Epoch == 0) {
		return Verdict{Kind: Invalid}
	}
	v := l.take(prev, point, probe)
	switch v.Kind {
	case Gap:
		v.Reject, l.rejected = !l.rejected || probe, true
		return v
	case Divergent:
		return v
	default:
	}
	l.rejected = false
	l.matched = max(l.matched, prev.Index, point.Index)
	l.leaderCommit = max(l.leaderCommit, commit)
	l.advance()
	return v
}

// Adopt takes a round that a candidate fetched from the node with the highest log end. It is as Append, without a leader.
func (l *Log) Adopt(prev, point Point) Verdict {
	if l.epoch != 0 && !mutant.Is("stale-epoch-taken") || point.Index != prev.Index+1 || point.Epoch < prev.Epoch || point.Epoch >= l.fence || point.Epoch == 0 {
		return Verdict{Kind: Invalid}
	}
	v := l.take(prev, point, false)
	v.Reject = v.Kind == Gap
	return v
}

// take is log matching: a round fits where its predecessor is the one that is there, and then everything below agrees too.
func (l *Log) take(prev, point Point, probe bool) Verdict {
	if prev.Index > l.runs.last {
		return Verdict{Kind: Gap}
	}
	// The sender may have forgotten the epoch of a round that is committed, or was taken from it.
	if e, known := l.runs.epochAt(prev.Index); known && e != prev.Epoch && (prev.Epoch != 0 || prev.Index > max(l.commit, l.matchedInEpoch())) {
		if prev.Index <= l.commit {
			return Verdict{Kind: Divergent}
		}
		return Verdict{Kind: Gap}
	}
	if probe {
		return Verdict{Kind: Matched}
	}
	if point.Index > l.runs.last {
		return Verdict{Kind: Accept, Ticket: l.wrote(point.Epoch)}
	}
	e, known := l.runs.epochAt(point.Index)
	switch {
	case known && e == point.Epoch, !known, mutant.Is("no-truncation"):
		return Verdict{Kind: Duplicate}
	case point.Index <= max(l.commit, l.matchedInEpoch()):
		// Committed, or taken from this very leader, whose log only grows.
		return Verdict{Kind: Divergent}
	}
	l.replace(point.Index)
	return Verdict{Kind: Replace, From: point.Index, Ticket: l.wrote(point.Epoch)}
}

// matchedInEpoch returns matched while a leader is followed.
func (l *Log) matchedInEpoch() Index {
	if l.epoch == 0 || l.leading {
		return 0
	}
	return l.matched
}

// LeaderCommit takes the leader's commit index from a heartbeat.
func (l *Log) LeaderCommit(epoch Epoch, commit Index) {
	if epoch == l.epoch && !l.leading && epoch != 0 {
		l.leaderCommit = max(l.leaderCommit, commit)
		l.advance()
	}
}

// Behind reports whether this log lacks base, the round before the oldest one that the leader of epoch has in memory: then the
// leader can't go on with it, and Node.Behind is to be called. From then on the log takes nothing and vouches for nothing, also
// under a later leader, until it is opened anew or resumed: whatever is committed of what this node may now give up lies before
// base, which a majority of others has. If the log has base, Ack may have moved, which is to be told to the leader.
func (l *Log) Behind(epoch Epoch, base Point) bool {
	if epoch != l.epoch || epoch == 0 || l.leading {
		return l.lapsed
	}
	l.lapsed = !l.Has(base) || l.suspended
	if mutant.Is("old-notice-believed") {
		return true
	}
	if !l.lapsed {
		l.matched = max(l.matched, base.Index)
		l.advance()
	}
	return l.lapsed
}

// Suspend has a follower's log take nothing and vouch for nothing until Resume, whatever the leader has: what it gave up before a
// restart is not there again.
func (l *Log) Suspend() { l.suspended = true }

// Resume ends what Behind has found, for a host that has given up nothing of the log and won't for that leader any more, and what
// Suspend has begun.
func (l *Log) Resume() { l.lapsed, l.suspended = false, false }

// Ack returns what a follower vouches for with FLUSHED: up to there the log is the leader's and durable. epoch is 0 if no
// leader is followed: then nothing may be sent.
func (l *Log) Ack() (epoch Epoch, index Index) {
	if l.epoch == 0 || l.leading || l.lapsed || l.suspended {
		return 0, 0
	}
	if mutant.Is("ack-before-flush") {
		return l.epoch, l.matched
	}
	return l.epoch, min(l.matched, l.flushed)
}
