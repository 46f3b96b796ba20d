package replica

// maxOldRuns is how many runs of committed rounds are remembered: enough to find where a follower that was away for a while
// agrees with this log. Runs of uncommitted rounds are all remembered; each has a round in the host's memory.
const maxOldRuns = 256

// run is a stretch of rounds of one epoch; it ends where the next one begins.
type run struct {
	first Index
	epoch Epoch
}

// runs knows the epoch of every index from the first run's on.
type runs struct {
	list []run // ascending in first and epoch
	last Index
}

// epochAt returns the epoch of the round at i, and false if i is beyond the end or too long ago.
func (r *runs) epochAt(i Index) (Epoch, bool) {
	if i == 0 {
		return 0, true
	}
	if i > r.last {
		return 0, false
	}
	for k := len(r.list) - 1; k >= 0; k-- {
		if r.list[k].first <= i {
			return r.list[k].epoch, true
		}
	}
	return 0, false
}

// lastOf returns the newest index of an epoch's run, and false if no run of that epoch is known.
func (r *runs) lastOf(e Epoch) (Index, bool) {
	end := r.last
	for k := len(r.list) - 1; k >= 0 && r.list[k].epoch >= e; k-- {
		if r.list[k].epoch == e {
			return end, true
		}
		end = r.list[k].first - 1
	}
	return 0, false
}

// lastEpoch returns the newest round's epoch; 0 if the log is empty.
func (r *runs) lastEpoch() Epoch {
	if len(r.list) == 0 {
		return 0
	}
	return r.list[len(r.list)-1].epoch
}

// append adds the round behind the last one.
func (r *runs) append(e Epoch) {
	r.last++
	if len(r.list) == 0 || r.list[len(r.list)-1].epoch != e {
		r.list = append(r.list, run{first: r.last, epoch: e})
	}
}

// cut forgets the rounds from index from on.
func (r *runs) cut(from Index) {
	r.last = from - 1
	for len(r.list) > 0 && r.list[len(r.list)-1].first >= from {
		r.list = r.list[:len(r.list)-1]
	}
}

// trim forgets old runs of committed rounds; the newest committed round's stays.
func (r *runs) trim(commit Index) {
	old := 0
	for old+1 < len(r.list) && r.list[old+1].first <= commit {
		old++
	}
	if drop := old - maxOldRuns; drop > 0 {
		r.list = append(r.list[:0], r.list[drop:]...)
	}
}
