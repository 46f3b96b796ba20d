package wal

import (
	"cmp"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/mortarmq/mortarmq/ring"
)

// settle ends the recovery once the journal is known to be good.
func (o *opener) settle(found *journalRecovery) error {
	s := o.s
	if err := o.checkLogs(); err != nil {
		return err
	}
	o.forgetTopics()
	for i := range o.scanned {
		if c := &o.scanned[i]; c.err != nil && c.st.next == c.next && !c.st.dropped {
			// Nothing in the journal takes the place of what can't be read.
			c.st.abandonActive()
			s.quarantine(c.st, c.err)
		}
	}
	for _, st := range slices.Clone(s.order) {
		if err := o.unaccounted(st, 0); err != nil && st.id.Kind == Messages {
			st.stale = nil
			s.quarantine(st, err)
		}
	}
	if err := o.spill(); err != nil {
		return err
	}
	if err := o.cutScanned(); err != nil {
		return err
	}
	if err := o.removeStale(); err != nil {
		return err
	}
	for topic := range o.deleted {
		o.rec.LastTopic = max(o.rec.LastTopic, topic)
	}
	for _, st := range s.order {
		if st.id.Kind == Messages && (st.next > 1 || st.bad != nil) {
			o.rec.LastTopic = max(o.rec.LastTopic, st.id.Topic)
		}
		if st.next <= 1 {
			continue
		}
		o.rec.FirstSequences[st.id] = st.oldest()
		o.rec.LastSequences[st.id] = st.next - 1
		if st.id.Kind == Messages {
			o.rec.LastTimes[st.id] = max(o.rec.LastTimes[st.id], st.lastMs)
		}
	}
	if err := o.lookUpSpace(); err != nil {
		return err
	}
	o.rec.Unwritten, o.unwritten = o.unwritten, nil
	o.announce()
	o.rec.Torn, o.rec.Suspect = found.Torn, found.Suspect
	if o.o.Replicated {
		o.rec.Pending, o.rec.Log = o.gate.pending, LogEnd{Last: o.gate.last, Committed: o.gate.handed}
		o.rec.Committed = o.given
		o.gate.pending = nil
	}
	s.recovering, s.unpaced = false, false
	// What was found by scanning gets its checkpoints at once: a further start could take it for what the journal has.
	s.sweepWanted = o.rec.Bytes > 0 || len(s.drops) > 0 || o.scan && s.dirty > 0
	return nil
}

// cutScanned ends the files of streams that had no checkpoint on the block boundary that their next one will name.
func (o *opener) cutScanned() error {
	s := o.s
	for _, st := range s.order {
		if !st.cut || st.saved.Next > 0 || st.active == nil {
			continue
		}
		done := false
		s.acquire(st.active, func(err error) {
			if err != nil {
				s.fail("open segment", st.path(st.active), err)
				return
			}
			s.cutActive(st, func() {
				s.release(st.active)
				done = true
			})
		})
		if err := o.io.waitFor(func() bool { return done || s.inflight == 0 }); err != nil {
			return err
		}
		if !done {
			// Later would be too late: the file goes on from here.
			return cmp.Or(s.err, fmt.Errorf("cutting %s: no space; make room and start again", st.path(st.active)))
		}
	}
	return s.err
}

// removeStale removes the files that no checkpoint knew. All they held was in the journal and is in other files by now.
// It is durable before the next checkpoint, which would know them.
func (o *opener) removeStale() error {
	for _, st := range o.s.order {
		var paths []string
		if st.staleMQC {
			paths = append(paths, filepath.Join(st.dir, checkpointFile))
		}
		if st.staleActive {
			paths = append(paths, filepath.Join(st.dir, ledgerActive))
		}
		for _, base := range st.stale {
			paths = append(paths, filepath.Join(st.dir, logName(st.id.Kind, base, false)))
			if st.id.Kind == Messages {
				paths = append(paths, st.indexPath(base))
			}
		}
		if len(paths) == 0 {
			continue
		}
		for _, path := range paths {
			if _, err := o.io.run(ring.Op{Kind: ring.Remove, Path: path}); err != nil && !notExist(err) {
				return err
			}
		}
		st.stale, st.staleActive, st.staleMQC = nil, false, false
		if _, err := o.io.run(ring.Op{Kind: ring.SyncDir, Path: st.dir}); err != nil {
			return err
		}
	}
	return nil
}
