package wal

// SealRound is Seal for a caller that needs the round before it is durable, to ship it: it returns the round, or nil where
// CanSeal is false. The round is immutable; it is borrowed, so the caller retains it before the disk is polled.
func (j *Journal) SealRound() *Round {
	if j.Seal() == 0 {
		return nil
	}
	return j.flight[len(j.flight)-1]
}

// Discard drops what is gathered: a payload that turned out not to be wanted.
func (j *Journal) Discard() {
	if j.gather != nil {
		j.gather.Release()
		j.gather = nil
	}
}

// Busy tells that as many rounds are at the device as may be.
func (j *Journal) Busy() bool { return len(j.flight) >= j.opts.MaxInFlight }

// GatheredPosition returns the position that the gathering round was stamped with, or that came with its payload; zero
// without one.
func (j *Journal) GatheredPosition() LogPosition {
	if j.gather == nil {
		return LogPosition{}
	}
	return j.gather.position
}
