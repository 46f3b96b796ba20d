package ledger

import (
	"cmp"
	"slices"
)

// run is a number of consecutive sequences.
type run struct {
	first Sequence
	count uint32
}

func (r run) last() Sequence { return r.first + Sequence(r.count) - 1 }

// deliverRun is a run that was delivered with consecutive delivery ids to one owner.
type deliverRun struct {
	run
	delivery DeliveryID
	owner    Owner
}

type failure struct {
	seq      Sequence
	failures uint16
	reason   Reason
	delayMs  uint32
}

type park struct{ seq, letters Sequence }

// queue holds a cursor's events until a record takes them. Their number is bounded: each concerns an open message.
type queue struct {
	cursor   *Cursor
	seek     bool
	forget   bool
	floor    Sequence
	delivers []deliverRun
	acks     []run
	drops    []run
	fails    []failure
	parks    []park
}

func (q *queue) reset() {
	q.seek, q.forget, q.floor = false, false, 0
	q.delivers, q.acks, q.drops, q.fails, q.parks = q.delivers[:0], q.acks[:0], q.drops[:0], q.fails[:0], q.parks[:0]
}

func (q *queue) deliver(seq Sequence, delivery DeliveryID, owner Owner) {
	if n := len(q.delivers); n > 0 {
		d := &q.delivers[n-1]
		if d.last()+1 == seq && d.delivery+DeliveryID(d.count) == delivery && d.owner == owner {
			d.count++
			return
		}
	}
	q.delivers = append(q.delivers, deliverRun{run{seq, 1}, delivery, owner})
}

func (q *queue) ack(seq Sequence) { q.acks = extend(q.acks, run{seq, 1}) }

func (q *queue) drop(first Sequence, count uint32) { q.drops = extend(q.drops, run{first, count}) }

// extend adds r to the runs, to the last one if it follows that.
func extend(runs []run, r run) []run {
	if n := len(runs); n > 0 && runs[n-1].last()+1 == r.first && uint64(runs[n-1].count)+uint64(r.count) < 1<<32 {
		runs[n-1].count += r.count
		return runs
	}
	return append(runs, r)
}

// merge sorts runs and joins adjacent ones. They are disjoint: every message is settled once.
func merge(runs []run) []run {
	byFirst := func(a, b run) int { return cmp.Compare(a.first, b.first) }
	if slices.IsSortedFunc(runs, byFirst) {
		return runs
	}
	slices.SortFunc(runs, byFirst)
	merged := runs[:0]
	for _, r := range runs {
		merged = extend(merged, r)
	}
	return merged
}
