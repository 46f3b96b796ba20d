package wal

import (
	"errors"
	"fmt"
)

// LogEnd is where a node's replicated log ends.
type LogEnd struct {
	// Last is its newest round, committed or not.
	Last LogPoint
	// Committed is the newest round that the node knows to be committed.
	Committed LogPoint
}

// gate decides at recovery which rounds of a replicated log are committed. The journal has them in the order in which
// this node wrote them, which includes what a later leader has replaced; see take.
type gate struct {
	// give takes a committed round, borrowed.
	give func(*Round) error
	// last is the newest round of the log, handed the newest that was given; a checkpoint counts as given.
	last, handed LogPoint
	// commit is the highest index that any round called committed.
	commit LogIndex
	// pending are the rounds above handed, without gaps, each with a reference.
	pending []*Round
}

var (
	errLogCommitted = errors.New("it takes the place of a round that was committed")
	errLogGap       = errors.New("rounds of the log are missing before it")
	errLogEpoch     = errors.New("it follows a round of another epoch than the one before it")
)

// resume makes the gate begin behind a checkpoint.
func (g *gate) resume(at LogPoint) { g.last, g.handed, g.commit = at, at, at.Index }

// take takes the next round of the journal, borrowed. One with index i replaces what is pending from i on: its leader had
// something else there. What the highest commit index seen covers is given on; it is the same on all nodes.
func (g *gate) take(r *Round) error {
	p, ok := r.Position()
	switch {
	case r.Start:
		if len(g.pending) > 0 {
			// Its number lies above rounds that aren't settled; a later one speaks for it.
			return nil
		}
		return g.give(r)
	case !ok:
		return &CorruptionError{Round: r.Number, Cause: errNoPosition}
	case p.Flags&CatchupRound != 0:
		return g.catchup(r, &p)
	}
	if err := g.place(&p); err != nil {
		return &CorruptionError{Round: r.Number, Cause: fmt.Errorf("%v of the log: %w; committed is %d, the newest round %d",
			p.Point, err, g.commit, g.last.Index)}
	}
	g.drop(p.Point.Index)
	r.Retain()
	g.pending = append(g.pending, r)
	g.last = p.Point
	return g.settle(p.Commit)
}

// place checks that a round may stand where it says.
func (g *gate) place(p *LogPosition) error {
	before := g.handed
	switch i := p.Point.Index; {
	case i <= g.handed.Index, i <= g.commit:
		return errLogCommitted
	case i > g.last.Index+1:
		return errLogGap
	case i > g.handed.Index+1:
		before = g.pending[i-g.handed.Index-2].position.Point
	}
	if p.Prev != before.Epoch {
		return errLogEpoch
	}
	return nil
}

// settle gives the pending rounds on that are committed.
func (g *gate) settle(commit LogIndex) error {
	g.commit = max(g.commit, commit)
	n := 0
	var err error
	for err == nil && n < len(g.pending) && g.pending[n].position.Point.Index <= g.commit {
		r := g.pending[n]
		n++
		g.handed = r.position.Point
		err = g.give(r)
		r.Release()
	}
	g.pending = append(g.pending[:0], g.pending[n:]...)
	return err
}

// catchup gives a round of a catch-up on. The node had given up what was pending then and not known committed.
func (g *gate) catchup(r *Round, p *LogPosition) error {
	if p.Commit > g.last.Index {
		return &CorruptionError{Round: r.Number, Cause: fmt.Errorf("the round of a catch-up: %w: committed is %d, the newest round %d",
			errLogGap, p.Commit, g.last.Index)}
	}
	if err := g.settle(p.Commit); err != nil {
		return err
	}
	g.drop(0)
	if p.Point.Index > g.handed.Index {
		g.handed, g.commit = p.Point, p.Point.Index
	}
	g.last = g.handed
	return g.give(r)
}

// drop forgets the pending rounds from an index on.
func (g *gate) drop(from LogIndex) {
	for n := len(g.pending); n > 0 && g.pending[n-1].position.Point.Index >= from; n-- {
		g.pending[n-1].Release()
		g.pending[n-1] = nil
		g.pending = g.pending[:n-1]
	}
}
